"""An upper bound of a kernel's speed, computed from its machine code: the limiting resource, and the cost of waits.

The model simulates one scheduler of a multiprocessor, step by step, with its warps of every program that fits (the four
schedulers are alike). Warps issue in order, one instruction per clock in all; an instruction also needs its pipe
(bench/codegen/hardware.py). wgmma runs asynchronously until the warp waits for it, behind products of other warps; a
barrier holds the warps of its program, and copies arrive after the latency of the L2 cache. A warp obeys the control
bits of its instructions. The result is a bound: the model ignores bank conflicts, misses of the L2 cache, late TMA,
launches, and clocks that fall with power.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from bench.codegen.hardware import SCHEDULERS, Machine
from bench.codegen.loops import LANES, Loop, Step

WARM_UP, MEASURED = 4, 12  # iterations
WIDEST = LANES * 16  # bytes that one instruction can load
SATURATED = 0.95  # a resource that is busy for more than this share of the time is the limit


@dataclass(frozen=True)
class Bound:
    """Clocks that one iteration of one program takes from a multiprocessor that `ctas` programs share.

    Attributes:
        clocks: the total.
        resources: clocks for which each resource is busy: "tensor", "issue", "shared", "L2" and the pipes of the
            schedulers.
        program_clocks: clocks from one iteration of a program to its next.
    """

    clocks: float
    resources: dict[str, float]
    program_clocks: float

    @property
    def busiest(self) -> list[str]:
        """The resources, the busiest first."""
        return sorted(self.resources, key=lambda name: -self.resources[name])

    @property
    def limiters(self) -> tuple[str, str]:
        """The limit and the next one. "waits": no resource is busy all the time."""
        first, second, *_ = self.busiest
        if self.resources[first] >= SATURATED * self.clocks:
            return first, second
        return "waits", first


def bound(loop: Loop, machine: Machine, warps: int, ctas: int, fetched_bytes: int = 0) -> Bound:
    """The bound of a loop in programs of `warps` warps, `ctas` at a time.

    `fetched_bytes` are those that TMA fetches in one iteration of a program; the instructions do not show them.
    """
    if ctas < 1 or warps % SCHEDULERS:
        raise ValueError(f"warps, ctas: got {warps}, {ctas}, allowed are multiples of {SCHEDULERS}, and at least 1")
    resources = resources_of(loop, machine, warps, fetched_bytes)
    clocks = max(_simulated(loop, machine, warps // SCHEDULERS, ctas), *resources.values())
    return Bound(clocks, resources, clocks * ctas)


def resources_of(loop: Loop, machine: Machine, warps: int, fetched_bytes: int = 0) -> dict[str, float]:
    """Clocks for which one iteration of one program keeps each resource busy."""
    of_scheduler = warps / SCHEDULERS
    memory = warps * sum(step.memory_bytes for step in loop.steps) + fetched_bytes
    shared = warps * sum(step.shared_bytes for step in loop.steps) + fetched_bytes
    busy = {"tensor": of_scheduler * sum(tensor_clocks(step, machine) for step in loop.steps)}
    busy |= {pipe: of_scheduler * clocks * loop.counts[pipe] for pipe, clocks in machine.pipes.items()}
    return busy | {
        "issue": of_scheduler * len(loop.steps),
        "shared": shared / machine.shared_bytes,
        "L2": memory / machine.l2_bytes,
    }


def tensor_clocks(step: Step, machine: Machine) -> float:
    """Clocks for which a matrix instruction keeps the tensor core of its scheduler busy."""
    if not step.macs:
        return 0
    macs = machine.wgmma_macs if step.kind == "wgmma" else machine.mma_macs
    return step.macs * (step.size / 2) / (macs / SCHEDULERS)


@dataclass
class Warp:
    """The state of one warp: its program, the next step, and when its pending work will be done."""

    program: int
    at: int = 0
    products: deque[float] = field(default_factory=deque)  # groups of wgmma
    copies: deque[float] = field(default_factory=deque)  # groups of copies into shared memory
    copying: float = 0.0  # the last copy, not yet in a group
    scoreboards: dict[int, float] = field(default_factory=dict)

    def ready(self, step: Step) -> float:
        """When everything that the step waits for is done."""
        times = [self.scoreboards.get(i, 0.0) for i in step.order.needs]
        groups = {"wait": self.products, "arrived": self.copies}.get(step.kind, ())
        if len(groups) > step.pending:
            times.append(groups[-1 - step.pending])
        return max(times, default=0.0)


def _simulated(loop: Loop, machine: Machine, warps: int, ctas: int) -> float:
    """Simulate one scheduler with `warps` warps of each of `ctas` programs; clocks per iteration and program."""
    steps = loop.steps
    turns = itertools.count()  # if two warps are ready, the one that has waited longer goes first
    ready = [(0.0, next(turns), Warp(program)) for program in range(ctas) for _ in range(warps)]
    free: dict[str, float] = {}  # when a pipe is free
    held: dict[int, list[Warp]] = {program: [] for program in range(ctas)}  # at a barrier
    ended = {WARM_UP: 0.0, WARM_UP + MEASURED: 0.0}  # when the last warp had run that many iterations

    def later(time: float, warp: Warp) -> None:
        heapq.heappush(ready, (time, next(turns), warp))

    while ready:
        now, _, warp = heapq.heappop(ready)
        step = steps[warp.at % len(steps)]
        start = max(now, free.get("issue", 0.0), warp.ready(step))
        if step.kind in machine.pipes or step.kind == "mma":
            start = max(start, free.get(step.kind, 0.0))
        if start > now:
            later(start, warp)
            continue
        free["issue"] = now + 1
        begin(step, warp, now, free, machine)
        warp.at += 1
        iterations, rest = divmod(warp.at, len(steps))
        if not rest and iterations in ended:
            ended[iterations] = max(ended[iterations], now + 1)
        if iterations == WARM_UP + MEASURED:
            continue
        if step.kind != "barrier":
            later(now + step.order.stall, warp)
            continue
        held[warp.program].append(warp)
        if len(held[warp.program]) == warps:
            for each in held[warp.program]:
                later(now + step.order.stall, each)
            held[warp.program].clear()
    return (ended[WARM_UP + MEASURED] - ended[WARM_UP]) / (MEASURED * ctas)


def begin(step: Step, warp: Warp, now: float, free: dict[str, float], machine: Machine) -> None:
    """Keep the pipes of a step busy, and note when it will be done."""

    def occupy(pipe: str, clocks: float) -> float:
        free[pipe] = max(now, free.get(pipe, 0.0)) + clocks
        return free[pipe]

    done, latency = now, machine.latencies.get(step.kind, 0)
    if step.macs:
        # Reading operands from shared memory may take longer than the product.
        clocks = max(tensor_clocks(step, machine), SCHEDULERS * step.shared_bytes / machine.shared_bytes)
        done = occupy(step.kind, clocks)
    elif step.kind in machine.pipes:
        done = occupy(step.kind, machine.pipes[step.kind])
    elif step.shared_bytes and not step.memory_bytes:
        done = occupy("shared", SCHEDULERS * step.shared_bytes / machine.shared_bytes)
        latency = machine.latencies["shared"]
    read = done
    if step.memory_bytes:
        done = occupy("port", SCHEDULERS * step.memory_bytes / machine.port_bytes)
        # Narrow loads, of masks and biases, hit lines that their neighbours have fetched.
        narrow = not step.shared_bytes and step.memory_bytes < WIDEST
        latency = machine.latencies["near" if narrow else "memory"]
    done += latency
    if step.memory_bytes and step.shared_bytes:
        warp.copying = max(warp.copying, done)
    elif step.kind == "commit":
        warp.copies.append(max(warp.copying, now))
    elif step.kind == "wgmma" and step.commits:
        warp.products.append(done)
    if step.order.result is not None and step.kind != "commit":
        warp.scoreboards[step.order.result] = max(warp.scoreboards.get(step.order.result, 0.0), done)
    if step.order.operands is not None:
        warp.scoreboards[step.order.operands] = max(warp.scoreboards.get(step.order.operands, 0.0), read)
