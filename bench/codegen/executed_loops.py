"""The loops of a kernel's PTX that multiply tiles, and what one iteration of them executes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from bench.codegen.loops import LANES, WARP_GROUP
from bench.codegen.machine_code import FMAS_OF_A_PRODUCT
from fusedattn.virtual_gpu.counters import Counters, Executed, Traffic, total
from fusedattn.virtual_gpu.kinds import Kind, kind_of
from fusedattn.virtual_gpu.ptx import Instruction, Kernel, name

FMA = "fma.rn.f32"
_COPIES = ("cp.async.ca", "cp.async.cg", "cp.async.bulk.tensor")


@dataclass(frozen=True)
class Iteration:
    """One iteration, on average: instructions and multiply-adds of a warp; `traffic` is that of all `iterations`.

    The first iterations find their tiles already fetched, and the last ones fetch none, so in few iterations the
    average of the bytes is too small: `memory_bytes` and `shared_bytes` are those of a program in an iteration that
    fetches, and None if none does.

    Attributes:
        iterations: of programs, in all.
        barriers: that hold more than one warp group, as in bench/codegen/loops.py.
    """

    iterations: float
    issued: dict[Kind, float]
    multiply_adds: float
    barriers: float
    traffic: dict[str, Traffic]
    memory_bytes: float | None
    shared_bytes: float | None


def product_loops(kernel: Kernel) -> list[list[Instruction]]:
    """The innermost loops with products, in program order, as bench/codegen/machine_code.py finds them in SASS."""
    code = kernel.instructions
    products = [i for i, x in enumerate(code) if kind_of(x.opcode) == "products"]
    at_least = 1
    if not products:
        products, at_least = [i for i, x in enumerate(code) if x.opcode == FMA], FMAS_OF_A_PRODUCT
    ends: dict[int, int] = {}  # by the start of a loop, its last branch back
    for i, x in enumerate(code):
        if x.opcode.startswith("bra") and kernel.labels[name(x, 0)] <= i:
            ends[kernel.labels[name(x, 0)]] = i
    loops = [(a, b) for a, b in sorted(ends.items()) if sum(a <= i <= b for i in products) >= at_least]
    innermost = [x for x in loops if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    return [code[a : b + 1] for a, b in innermost]


def iteration(loop: list[Instruction], counters: Counters, n_warps: int) -> Iteration | None:
    """The average of all iterations of a loop; None if it did not run."""
    executed = [counters.executed[id(x)] for x in loop if id(x) in counters.executed]
    by_warps = next((int(e.issued.sum()) for e in executed if e.x is loop[0]), 0)
    if not by_warps:
        return None
    issued: Counter[Kind] = Counter()
    for e in executed:
        issued[kind_of(e.x.opcode)] += int(e.issued.sum())
    barriers = sum(int(e.issued.sum()) for e in executed if _holds_all(e))
    iterations = by_warps / n_warps
    fetches = all(e.readers for e in executed if e.x.opcode.startswith(_COPIES))
    return Iteration(
        iterations,
        {kind: n / by_warps for kind, n in issued.items()},
        sum(e.multiply_adds for e in executed) / by_warps,
        barriers / by_warps,
        total(executed),
        sum(_bytes(e, "global", n_warps, iterations) for e in executed) if fetches else None,
        sum(_bytes(e, "shared", n_warps, iterations) for e in executed) if fetches else None,
    )


def _bytes(e: Executed, space: str, n_warps: int, iterations: float) -> float:
    """Bytes of a program in an iteration: read and added in global memory, or read and written in shared memory.

    An instruction that fetches does so once for each warp that ever does.
    """
    found = [t for where, t in e.traffic.items() if where.startswith(space) and where != "global write"]
    if "global read" in e.traffic:
        return sum(t.bytes / t.requests for t in found) * len({warp % n_warps for warp in e.readers})
    return sum(t.bytes for t in found) / iterations


def _holds_all(e: Executed) -> bool:
    """Whether an instruction is a barrier of more than one warp group."""
    if not e.x.opcode.startswith(("bar.sync", "barrier.sync")):
        return False
    return len(e.x.operands) == 1 or int(name(e.x, 1)) > WARP_GROUP * LANES
