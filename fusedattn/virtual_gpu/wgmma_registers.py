"""The registers of wgmma: while a product is in flight, and by which fence they must be ordered."""

from __future__ import annotations

from collections import Counter

import numpy as np

from fusedattn.virtual_gpu.errors import AsyncError
from fusedattn.virtual_gpu.ptx import Instruction, Kernel, vector
from fusedattn.virtual_gpu.registers import Array, Mask

GROUP = 128  # threads


class InFlight:
    """Registers of products that nobody has waited for: accumulators must not be touched, sources not be written."""

    def __init__(self) -> None:
        # By the registers of one operand, the number of products for each group of four warps.
        self.targets: dict[frozenset[str], Counter[int]] = {}
        self.sources: dict[frozenset[str], Counter[int]] = {}

    def begin(self, targets: frozenset[str], sources: frozenset[str], groups: Array, x: Instruction) -> None:
        """A product takes accumulators, which may be those of the one before, and sources."""
        self._check(self.targets, sources, groups, x)
        self._check(self.sources, targets, groups, x)
        self._check({used: counts for used, counts in self.targets.items() if used != targets}, targets, groups, x)
        for table, registers in ((self.targets, targets), (self.sources, sources)):
            if registers:
                table.setdefault(registers, Counter()).update(groups.tolist())

    def end(self, targets: frozenset[str], sources: frozenset[str], groups: Array) -> None:
        for table, registers in ((self.targets, targets), (self.sources, sources)):
            if registers:
                left = table[registers] - Counter(groups.tolist())
                if left:
                    table[registers] = left
                else:
                    del table[registers]

    def concerned(self, touched: frozenset[str], written: frozenset[str]) -> bool:
        """Whether some group's accumulators are among the touched registers, or its sources among the written."""
        return any(
            not used.isdisjoint(registers)
            for table, registers in ((self.targets, touched), (self.sources, written))
            for used in table
        )

    def check(self, x: Instruction, touched: frozenset[str], written: frozenset[str], mask: Mask) -> None:
        """Fail if an instruction touches accumulators or writes sources, of the groups that execute it."""
        executing = None if mask is True else np.flatnonzero(mask.reshape(-1, GROUP).any(axis=1))
        self._check(self.targets, touched, executing, x)
        self._check(self.sources, written, executing, x)

    @staticmethod
    def _check(
        table: dict[frozenset[str], Counter[int]], registers: frozenset[str], groups: Array | None, x: Instruction
    ) -> None:
        for used, counts in table.items():
            if not used.isdisjoint(registers) and (groups is None or any(counts[g] for g in groups.tolist())):
                raise AsyncError(
                    f"{x.opcode}, at {x.place}: uses {min(used & registers)}, which belongs to a product that is not "
                    "complete"
                )


WRITES_AFTER_FENCE = "registers of wgmma written after wgmma.fence"


class Fences:
    """A wgmma.fence must stand before a product, and after all other writes of its registers.

    LLVM moves such writes past the fence; NVIDIA's assembler then orders them itself. So only the fence is required,
    unless the machine is strict; but a fence of an earlier group of products orders no later writes.
    """

    def __init__(self, kernel: Kernel, liberties: Counter[str], *, strict: bool) -> None:
        self.instructions, self.liberties, self.strict = kernel.instructions, liberties, strict
        self.starts = set(kernel.block_starts())

    def require(self, x: Instruction) -> None:
        """Fail unless a fence stands before a product, in its block."""
        registers = {*vector(x, 0), *(vector(x, 1) if not isinstance(x.operands[1], str) else ())}
        written = of_earlier_group = False
        for i in range(self._index(x) - 1, -1, -1):
            before = self.instructions[i]
            if before.opcode.startswith("wgmma.fence"):
                break
            if i in self.starts:
                raise AsyncError(f"{x.opcode}, at {x.place}: no wgmma.fence before it")
            if before.opcode.startswith("wgmma.mma_async"):
                written |= bool(set(vector(before, 0)) & registers) and vector(before, 0) != vector(x, 0)
            else:
                of_earlier_group |= before.opcode.startswith("wgmma.commit_group")
                written |= bool(written_by(before) & registers)
        if written and of_earlier_group:
            raise AsyncError(f"{x.opcode}, at {x.place}: no wgmma.fence after its registers were written")
        if written:
            self.liberties[f"{WRITES_AFTER_FENCE}: {x.place}"] += 1
            if self.strict:
                raise AsyncError(f"{x.opcode}, at {x.place}: no wgmma.fence after its registers were written")

    def _index(self, x: Instruction) -> int:
        return next(i for i, other in enumerate(self.instructions) if other is x)


def written_by(x: Instruction) -> frozenset[str]:
    """The registers that an instruction writes, of those that compute or load."""
    if not x.operands or x.opcode.startswith(("st.", "red.", "bar.", "cp.", "bra", "stmatrix", "mbarrier.arrive")):
        return frozenset()
    first = x.operands[0]
    if isinstance(first, str):
        return frozenset({first})
    return frozenset(first) if isinstance(first, tuple) else frozenset()
