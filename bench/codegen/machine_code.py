"""Figures of a compiled kernel: registers and spills from the assembler, instructions from the disassembly."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.codegen.control_flow import INDIRECT
from bench.codegen.disassembly import Instruction, amdgcn_instructions, branch_tables, sass_instructions
from bench.codegen.in_flight import Touch, touches
from bench.codegen.loops import Loop, loop_of
from bench.codegen.register_budget import Stretch, stretches
from bench.codegen.undefined import Undefined, undefined

# Matrix products: wgmma of sm_90, mma of all others, tcgen05 of sm_100; mfma of AMD.
WGMMA = ("HGMMA", "QGMMA")  # of 16 bits and TF32, and of 8 bits
TENSOR_CORE = (*WGMMA, "HMMA", "QMMA", "UTCHMMA", "UTCQMMA", "v_mfma")
FMA = ("FFMA",)
FMAS_OF_A_PRODUCT = 16  # a loop with fewer does not multiply tiles
SPILLS = ("LDL", "STL", "scratch_")


@dataclass(frozen=True)
class MachineCode:
    """Figures of one kernel.

    `spill_bytes` counts stores and loads of one thread. `loop_instructions` are the lengths of the innermost loops that
    multiply tiles, in program order, and `loop_spills` the numbers of instructions in each that spill or reload;
    `loops` are their steps, empty for AMD. `touches` are those of registers that a wgmma may still need,
    `undefined` reads of uniform registers that may not have been written. `stretches` are those between changes of the
    number of registers, if warps share them out.
    """

    registers: int
    spill_bytes: int
    hgmma: int
    tensor_core: int
    loop_instructions: tuple[int, ...]
    loop_spills: tuple[int, ...]
    serialized_wgmma: bool
    loops: tuple[Loop, ...] = ()
    touches: tuple[Touch, ...] = ()
    undefined: tuple[Undefined, ...] = ()
    stretches: tuple[Stretch, ...] = ()


def of_cubin(cubin: bytes, ptxas_log: str, tools: Path) -> MachineCode:
    """Figures of a kernel for an NVIDIA target, from its cubin and the output of ptxas; `tools` has cuobjdump."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)

        def shown(what: str) -> str:
            command = [str(tools / "cuobjdump"), what, str(path)]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        sass = shown("-sass")
        tables = branch_tables(shown("-elf")) if re.search(rf"\b(?:{'|'.join(INDIRECT)})\b", sass) else {}
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", ptxas_log)
    registers = re.search(r"Used (\d+) registers", ptxas_log)
    if spills is None or registers is None:
        raise RuntimeError(f"ptxas printed no register count:\n{ptxas_log}")
    instructions = sass_instructions(sass, tables)
    loops = product_loops(instructions)
    return MachineCode(
        registers=int(registers[1]),
        spill_bytes=int(spills[1]) + int(spills[2]),
        hgmma=_count(instructions, WGMMA),
        tensor_core=_count(instructions, TENSOR_CORE),
        loop_instructions=tuple(map(len, loops)),
        loop_spills=tuple(_count(loop, SPILLS) for loop in loops),
        serialized_wgmma="serializ" in ptxas_log,
        loops=tuple(map(loop_of, loops)),
        touches=tuple(touches(instructions)),
        undefined=tuple(undefined(instructions)),
        stretches=stretches(instructions, int(registers[1])),
    )


def of_amdgcn(assembly: str) -> MachineCode:
    """Figures of a kernel for an AMD target; its assembly ends with the compiler's metadata."""

    def number(field: str) -> int:
        found = re.search(rf"\.{field}:\s+(\d+)", assembly)
        if found is None:
            raise RuntimeError(f"the assembly has no {field}")
        return int(found[1])

    instructions = amdgcn_instructions(assembly)
    loops = product_loops(instructions)
    return MachineCode(
        registers=number("vgpr_count"),
        spill_bytes=4 * number("vgpr_spill_count"),
        hgmma=0,
        tensor_core=_count(instructions, TENSOR_CORE),
        loop_instructions=tuple(map(len, loops)),
        loop_spills=tuple(_count(loop, SPILLS) for loop in loops),
        serialized_wgmma=False,
    )


def product_loops(instructions: list[Instruction]) -> list[list[Instruction]]:
    """The innermost loops that multiply tiles, in program order: backward branches and their bodies."""
    products = [x.address for x in instructions if x.opcode.startswith(TENSOR_CORE)]
    at_least = 1
    if not products:
        products, at_least = [x.address for x in instructions if x.opcode.startswith(FMA)], FMAS_OF_A_PRODUCT
    loops = {(x.target, x.address) for x in instructions if x.target is not None and x.target < x.address}
    with_product = [(a, b) for a, b in loops if sum(a <= address <= b for address in products) >= at_least]
    # The code of a wait for data may lie behind its loop, and jump back into the middle of the loop.
    with_product = [(a, b) for a, b in with_product if not any(c < a <= d < b for c, d in with_product)]
    innermost = [x for x in with_product if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in with_product)]
    return [[x for x in instructions if a <= x.address <= b] for a, b in sorted(innermost)]


def _count(instructions: list[Instruction], opcodes: tuple[str, ...]) -> int:
    return sum(x.opcode.startswith(opcodes) for x in instructions)
