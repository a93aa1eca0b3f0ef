"""The registers of wgmma: while a product is in flight, and by which fence they must be ordered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

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
        executing = None if mask is True else _groups_of(mask)
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


AFTER_FENCE = "registers of wgmma used after wgmma.fence"
_ORDERED, _USED = 0, -1  # of a register, by a fence, or used by a thread since; otherwise it was accumulated since
_NEVER, _SINCE_COMMIT, _BEFORE_COMMIT = range(3)  # when a group's last fence was


class Fences:
    """A group of warps executes wgmma.fence before its first product, and between its use of a register and a product.

    Uses are writes, and reads of accumulators. Products of one shape may follow each other with the same accumulators.
    LLVM moves writes past the fence; NVIDIA's assembler then orders them itself. So a use after the fence is an error
    only if the machine is strict, or if the fence is that of an earlier group of products, which orders no later uses.
    """

    def __init__(self, kernel: Kernel, n_groups: int, tolerated: Counter[str], *, strict: bool) -> None:
        self.tolerated, self.strict = tolerated, strict
        products = [x for x in kernel.instructions if x.opcode.startswith("wgmma.mma_async")]
        used = {register for x in products for operand in x.operands[:2] if isinstance(operand, tuple)
                for register in operand}  # fmt: skip
        self.row_of = {register: i for i, register in enumerate(sorted(used))}
        self.accumulators = {register for x in products for register in vector(x, 0)}
        self.state = np.zeros((len(used), n_groups), dtype="i4")
        self.fenced = np.zeros(n_groups, dtype="i4")
        self.shapes: dict[tuple[str, tuple[str, ...]], int] = {}  # of accumulators -> their state after a product

    def clear(self) -> None:
        self.state.fill(_ORDERED)
        self.fenced.fill(_NEVER)

    def rows_used(self, x: Instruction) -> list[int]:
        """The rows of :attr:`state` of the products' registers that an instruction other than wgmma uses."""
        if x.opcode.startswith("wgmma"):
            return []
        used = self.accumulators.intersection(x.names) | written_by(x)
        return [self.row_of[register] for register in used if register in self.row_of]

    def use(self, rows: list[int], mask: Mask) -> None:
        groups = _groups_of(mask)
        for row in rows:
            self.state[row, groups] = _USED

    def fence(self, mask: Mask) -> None:
        groups = _groups_of(mask)
        self.fenced[groups] = _SINCE_COMMIT
        self.state[:, groups] = _ORDERED

    def commit(self, mask: Mask) -> None:
        groups = _groups_of(mask)
        self.fenced[groups] = np.where(self.fenced[groups] == _NEVER, _NEVER, _BEFORE_COMMIT)

    def requirement(self, x: Instruction) -> Callable[[Array], None]:
        """A function of the groups that execute a product: it fails if they need a fence."""
        d = [self.row_of[register] for register in vector(x, 0)]
        a = [self.row_of[register] for register in vector(x, 1)] if isinstance(x.operands[1], tuple) else []
        shape = x.opcode.split(".")[4], vector(x, 0)
        mine = self.shapes.setdefault(shape, 1 + len(self.shapes))

        def require(groups: Array) -> None:
            if (self.fenced[groups] == _NEVER).any():
                raise AsyncError(f"{x.opcode}, at {x.place}: no wgmma.fence before it")
            of_d = self.state[d][:, groups]
            unordered = ((of_d != _ORDERED) & (of_d != mine)).any(axis=0) | self.state[a][:, groups].any(axis=0)
            if unordered.any():
                if self.strict or (self.fenced[groups[unordered]] == _BEFORE_COMMIT).any():
                    raise AsyncError(f"{x.opcode}, at {x.place}: no wgmma.fence after its registers were used")
                self.tolerated[f"{AFTER_FENCE}: {x.place}"] += 1
            for row in d:
                self.state[row][groups] = mine

        return require


def _groups_of(mask: Mask) -> Any:
    return slice(None) if mask is True else np.flatnonzero(mask.reshape(-1, GROUP).any(axis=1))


def written_by(x: Instruction) -> frozenset[str]:
    """The registers that an instruction writes, of those that compute or load."""
    if not x.operands or x.opcode.startswith(("st.", "red.", "bar.", "cp.", "bra", "stmatrix", "mbarrier.arrive")):
        return frozenset()
    first = x.operands[0]
    if isinstance(first, str):
        return frozenset({first})
    return frozenset(first) if isinstance(first, tuple) else frozenset()
