"""How fast a kernel could run at best, computed from its machine code: which resource limits it, and what waits cost.

One scheduler of a multiprocessor is played through, step by step, with its warps of every program that fits (the four
are alike). A warp issues in order, one instruction a clock for all warps; an instruction also needs its pipe
(bench/codegen/hardware.py). wgmma runs on its own until the warp waits for it, behind what other warps asked for; a
barrier holds the warps of its program. What comes out is a bound: latencies of single instructions, bank conflicts,
misses of the L2 cache, launches and clocks that fall with power are not seen.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from bench.codegen.hardware import SCHEDULERS, Machine
from bench.codegen.loops import Loop, Step

WARM_UP, MEASURED = 4, 12  # iterations
SATURATED = 0.95  # a resource that is busy for longer than this share of the time is the limit


@dataclass(frozen=True)
class Bound:
    """Clocks that one iteration of one program takes from a multiprocessor that `ctas` programs share.

    Attributes:
        clocks: in all.
        resources: clocks for which each resource is busy: "tensor", "issue", "shared", "L2" and the pipes of the
            schedulers.
        program_clocks: from one iteration of a program to its next.
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
        """What limits, and what would next. "waits": no resource is busy all the time."""
        first, second, *_ = self.busiest
        if self.resources[first] >= SATURATED * self.clocks:
            return first, second
        return "waits", first


def bound(loop: Loop, machine: Machine, *, warps: int, ctas: int, stages: int, fetched_bytes: int = 0) -> Bound:
    """Of a loop that programs of `warps` warps run, `ctas` at a time.

    `fetched_bytes` are those of one iteration of a program that TMA fetches: the instructions do not tell.
    """
    if ctas < 1 or warps % SCHEDULERS:
        raise ValueError(f"warps, ctas: got {warps}, {ctas}, allowed are multiples of {SCHEDULERS}, and at least 1")
    resources = resources_of(loop, machine, warps, fetched_bytes)
    alone = _played(loop, machine, warps // SCHEDULERS, 1)
    together = _played(loop, machine, warps // SCHEDULERS, ctas) if ctas > 1 else alone
    # What is fetched arrives after the latency, in time for the iteration that many stages later.
    if stages > 1 and loop.copies:
        alone = max(alone, machine.l2_latency / (stages - 1))
    else:
        alone += machine.l2_latency
    clocks = max(together, alone / ctas, *resources.values())
    return Bound(clocks, resources, clocks * ctas)


def resources_of(loop: Loop, machine: Machine, warps: int, fetched_bytes: int = 0) -> dict[str, float]:
    """Clocks for which one iteration of one program keeps each resource busy."""
    of_scheduler = warps / SCHEDULERS
    memory = warps * sum(step.memory_bytes for step in loop.steps) + fetched_bytes
    shared = warps * sum(step.shared_bytes for step in loop.steps) + fetched_bytes
    busy = {"tensor": of_scheduler * sum(_tensor_clocks(step, machine) for step in loop.steps)}
    busy |= {pipe: of_scheduler * clocks * loop.counts[pipe] for pipe, clocks in machine.pipes.items()}
    return busy | {
        "issue": of_scheduler * len(loop.steps),
        "shared": shared / machine.shared_bytes,
        "L2": memory / machine.l2_bytes,
    }


def _tensor_clocks(step: Step, machine: Machine) -> float:
    """For which a matrix instruction keeps the tensor core of its scheduler."""
    if not step.macs:
        return 0
    macs = machine.wgmma_macs if step.kind == "wgmma" else machine.mma_macs
    return step.macs * (1 + step.wide) / (macs / SCHEDULERS)


@dataclass
class _Warp:
    """One warp on its way: which program it belongs to, the next step, and when its groups of wgmma end."""

    program: int
    at: int = 0
    running: deque[float] = field(default_factory=deque)


def _played(loop: Loop, machine: Machine, warps: int, ctas: int) -> float:
    """Clocks per iteration and program, of one scheduler with `warps` warps of each of `ctas` programs."""
    steps = loop.steps
    everyone = [_Warp(program) for program in range(ctas) for _ in range(warps)]
    turns = itertools.count()  # of two warps that are ready, the one that has waited longer goes first
    ready = [(0.0, next(turns), warp) for warp in everyone]
    free: dict[str, float] = {}  # when a pipe is
    waiting: dict[int, list[_Warp]] = {program: [] for program in range(ctas)}  # at a barrier
    ended = {WARM_UP: 0.0, WARM_UP + MEASURED: 0.0}  # when the last warp had run that many iterations

    def later(time: float, warp: _Warp) -> None:
        heapq.heappush(ready, (time, next(turns), warp))

    while ready:
        now, _, warp = heapq.heappop(ready)
        step = steps[warp.at % len(steps)]
        pipe, clocks = _pipe(step, machine)
        start = max(now, free.get("issue", 0.0), 0.0 if step.kind == "wgmma" else free.get(pipe, 0.0))
        if step.kind == "wait" and len(warp.running) > step.pending:
            start = max(start, warp.running[-1 - step.pending])
        if start > now:
            later(start, warp)
            continue
        free["issue"] = now + 1
        if step.kind == "wgmma":
            free[pipe] = max(now, free.get(pipe, 0.0)) + clocks
            if step.commits:
                warp.running.append(free[pipe])
        elif step.kind == "wait":
            while len(warp.running) > step.pending:
                warp.running.popleft()
        elif clocks:
            free[pipe] = now + clocks
        warp.at += 1
        iterations, rest = divmod(warp.at, len(steps))
        if not rest and iterations in ended:
            ended[iterations] = max(ended[iterations], now + 1)
        if iterations == WARM_UP + MEASURED:
            continue
        if step.kind == "barrier":
            held = waiting[warp.program]
            held.append(warp)
            if len(held) == warps:
                for each in held:
                    later(now + 1, each)
                held.clear()
        else:
            later(now + 1, warp)
    return (ended[WARM_UP + MEASURED] - ended[WARM_UP]) / (MEASURED * ctas)


def _pipe(step: Step, machine: Machine) -> tuple[str, float]:
    """Which pipe a step keeps busy, and for how long."""
    if step.macs:
        # Operands that come from shared memory may take longer than their product.
        return "tensor", max(_tensor_clocks(step, machine), SCHEDULERS * step.shared_bytes / machine.shared_bytes)
    if step.shared_bytes:
        return "shared", SCHEDULERS * step.shared_bytes / machine.shared_bytes
    return step.kind, machine.pipes.get(step.kind, 0)
