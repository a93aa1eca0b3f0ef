"""The steps of one warp in an iteration of a loop, from its disassembly, as far as the model needs them.

Each instruction becomes a :class:`Step`: its pipe, how much it multiplies and moves, and whether the warp waits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from bench.codegen.disassembly import Instruction

Kind = Literal[
    "issue",
    "fma",
    "imad",
    "alu",
    "mufu",
    "shuffle",
    "wgmma",
    "mma",
    "wait",
    "barrier",
    "tma",
    "tma add",
    "commit",
    "arrived",
]

LANES = 32
WARP_GROUP = 4  # warps, one on each scheduler
OPERAND_BYTES = 32  # of a row of an operand of a matrix instruction, along the summed axis

# First part of the opcode -> kind. Other opcodes take only an issue slot: control, the uniform datapath, memory.
KINDS: dict[str, Kind] = {
    **dict.fromkeys(("FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2", "HSETP2", "FFMA2"), "fma"),
    **dict.fromkeys(("IMAD", "IDP"), "imad"),
    **dict.fromkeys(("FMNMX", "FSETP", "FSEL", "F2FP", "IADD3", "LOP3", "ISETP", "SEL", "PRMT", "SHF", "LEA"), "alu"),
    **dict.fromkeys(
        ("VIADD", "VIMNMX", "VIADDMNMX", "PLOP3", "P2R", "IMNMX", "IABS", "MOV", "SGXT", "BMSK", "FCHK", "I2FP"), "alu"
    ),
    **dict.fromkeys(("MUFU", "I2F", "F2I", "POPC", "FLO", "BREV"), "mufu"),
    **dict.fromkeys(("SHFL", "REDUX", "MATCH"), "shuffle"),
}

# Names of the innermost loops with products, in program order, by their number in a kernel. Those of the kernels for
# Hopper stand in it twice, once for each group of warps; in the backward one loop has all blocks.
LOOPS: dict[str, dict[int, tuple[str, ...]]] = {
    "attention_fwd": {3: ("full", "boundary", "repair"), 2: ("boundary", "repair")},
    "attention_bwd_dkdv": {2: ("boundary", "full"), 1: ("boundary",)},
    "attention_bwd_dq": {3: ("full", "boundary", "repair"), 2: ("boundary", "repair")},
    "hopper_fwd": {
        4: ("boundary", "full", "boundary 2", "full 2"),
        6: ("boundary", "full", "left", "boundary 2", "full 2", "left 2"),
    },
    "hopper_bwd_dkdv": {2: ("all", "all 2")},
    "hopper_bwd_dq": {2: ("all", "all 2")},
}


class Order(NamedTuple):
    """When the next instruction of a warp may follow.

    The 21 control bits of every instruction from Volta on (Jia et al., "Dissecting the NVIDIA Volta GPU Architecture
    via Microbenchmarking", arXiv:1804.06826, section 2.1): the clocks until the next instruction, and, for variable
    latencies, six scoreboards that an instruction occupies until it has its result or has read its operands.
    """

    stall: int = 1
    result: int | None = None
    operands: int | None = None
    needs: tuple[int, ...] = ()


FREE = Order()


@dataclass(frozen=True)
class Step:
    """One instruction of a warp.

    Attributes:
        kind: the pipe, or the kind of wait.
        macs: this warp's multiply-adds in a matrix instruction.
        size: bytes of an element of its operands; twice as many take twice as long.
        shared_bytes: bytes of shared memory read or written; bytes that a warp group reads once count a quarter.
        memory_bytes: bytes that it fetches from beyond shared memory.
        commits: whether it ends a group of wgmma that a wait can name; "commit" does so for a group of copies.
        pending: groups that may still run after a "wait" for wgmma, or after "arrived" for copies.
        order: the control bits of the instruction.
    """

    kind: Kind
    macs: int = 0
    size: int = 2
    shared_bytes: float = 0
    memory_bytes: int = 0
    commits: bool = False
    pending: int = 0
    order: Order = FREE


@dataclass(frozen=True)
class Loop:
    """The steps of one iteration, in program order."""

    steps: tuple[Step, ...]

    @cached_property
    def counts(self) -> Counter[str]:
        """Steps by kind."""
        return Counter(step.kind for step in self.steps)

    @property
    def macs(self) -> int:
        """Multiply-adds of one warp, by matrix instructions."""
        return sum(step.macs for step in self.steps)

    @property
    def copies(self) -> bool:
        """Whether it prefetches into shared memory, so that an iteration need not wait for its own loads."""
        return any(step.kind == "tma" or (step.memory_bytes and step.shared_bytes) for step in self.steps)

    def _beside_products(self) -> Iterator[tuple[Step, bool, bool]]:
        """Each step, whether wgmma of this warp may be running after it, and whether some is not committed yet."""
        running, is_open = 0, False
        for steady in (False, True):  # products of the last iteration may still run in the next
            for step in self.steps:
                if step.kind == "wait":
                    running = min(running, step.pending)
                elif step.kind == "wgmma":
                    running += step.commits
                    is_open = not step.commits
                if steady:
                    yield step, running > 0, is_open

    @property
    def overlapped(self) -> float:
        """The share of the steps during which wgmma of this warp may be running."""
        return sum(running for _, running, _ in self._beside_products()) / len(self.steps)

    @property
    def idle_exponentials(self) -> int:
        """The number of exponentials that the warp computes while no wgmma of its own is running."""
        return sum(
            step.kind == "mufu" and not running and not is_open for step, running, is_open in self._beside_products()
        )

    @property
    def style(self) -> str:
        """A short description of how it multiplies and fetches."""
        if self.counts["wgmma"]:
            from_registers = sum(step.kind == "wgmma" and not _reads_a(step) for step in self.steps)
            product = f"wgmma {from_registers}/{self.counts['wgmma']} from registers"
        else:
            product = "mma" if self.counts["mma"] else "fma"
        fetch = "TMA" if self.counts["tma"] else "cp.async" if self.copies else "loads"
        return f"{product}, {fetch}"


def _reads_a(step: Step) -> bool:
    """Whether the left operand of a wgmma comes from shared memory, as the right one always does."""
    n = step.macs * step.size // (16 * OPERAND_BYTES)
    return step.shared_bytes > n * OPERAND_BYTES / WARP_GROUP


def loop_of(instructions: list[Instruction]) -> Loop:
    """The steps of the instructions of a loop for an NVIDIA target."""
    return Loop(tuple(replace(_step(x), order=order_of(x.encoding)) for x in instructions))


def order_of(encoding: int | None) -> Order:
    """The control bits that the assembler wrote into an instruction."""
    if encoding is None:
        return FREE
    bits = encoding >> 105

    def scoreboard(at: int) -> int | None:
        return None if bits >> at & 7 == 7 else bits >> at & 7

    return Order(max(bits & 15, 1), scoreboard(5), scoreboard(8), tuple(i for i in range(6) if bits >> 11 + i & 1))


def _step(instruction: Instruction) -> Step:
    opcode, operands = instruction.opcode, instruction.operands
    name, *modifiers = opcode.split(".")
    size = 4 if "TF32" in modifiers else 1 if name.startswith("Q") else 2
    if name in ("HGMMA", "QGMMA"):
        shape = re.search(r"64x(\d+)x(\d+)", opcode)
        if shape is None:
            raise ValueError(f"opcode: got {opcode}, allowed are HGMMA and QGMMA with a shape such as 64x64x16")
        n, k = int(shape[1]), int(shape[2])
        right = n * OPERAND_BYTES / WARP_GROUP  # the warp group reads it once
        left = 16 * OPERAND_BYTES if operands.split(",")[1].strip().startswith("gdesc") else 0
        commits = re.search(r"\bgsb0\b", operands) is not None
        return Step("wgmma", 16 * n * k, size, left + right, commits=commits)
    if name in ("HMMA", "QMMA"):
        shape = re.search(r"\.16(8)(\d+)", opcode)
        if shape is None:
            raise ValueError(f"opcode: got {opcode}, allowed are HMMA and QMMA with a shape such as 16816")
        return Step("mma", 16 * int(shape[1]) * int(shape[2]), size)
    if opcode.startswith("WARPGROUP.DEPBAR"):
        return Step("wait", pending=int(operands.split(",")[1], 16))
    if name == "BAR" and "SYNC" in modifiers and _whole_program(operands):
        return Step("barrier")
    if name == "LDGDEPBAR":
        return Step("commit", commits=True)
    if opcode.startswith("DEPBAR.LE"):
        return Step("arrived", pending=int(operands.split(",")[1], 16))
    if name == "UTMALDG":
        return Step("tma")
    if name == "UTMAREDG":
        return Step("tma add")
    moved = LANES * _width(modifiers)
    if name in ("LDS", "STS", "ATOMS") and not operands.strip().startswith("RZ"):  # LDS RZ only orders, reads nothing
        return Step("issue", shared_bytes=moved)
    if name in ("LDSM", "STSM"):
        return Step("issue", shared_bytes=8 * 16 * int(modifiers[-1]) if modifiers[-1].isdigit() else 8 * 16)
    if name == "LDGSTS":
        return Step("issue", shared_bytes=moved, memory_bytes=moved)
    if name == "LDG":
        return Step("issue", memory_bytes=moved)
    return Step(KINDS.get(name, "issue"))


def _whole_program(operands: str) -> bool:
    """Whether a barrier holds more than one warp group; its second operand is a number of threads, if missing all."""
    _, *threads = (operand.strip() for operand in operands.split(","))
    if not threads or not threads[0].startswith("0x"):
        return True
    return int(threads[0], 16) > WARP_GROUP * LANES


def _width(modifiers: list[str]) -> int:
    """Bytes per lane."""
    for modifier in modifiers:
        if modifier in ("128", "64"):
            return int(modifier) // 8
        if modifier in ("U16", "S16", "U8", "S8"):
            return int(modifier[1:]) // 8
    return 4
