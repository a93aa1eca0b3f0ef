"""Loads of the kernel's parameters."""

from __future__ import annotations

from fusedattn.virtual_gpu.instructions.builders import Step, builds, unknown
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.ptx import Address, Instruction, name
from fusedattn.virtual_gpu.registers import store


@builds("ld.param", modifiers=True)
def _load_parameter(machine: Machine, x: Instruction) -> Step:
    words = x.opcode.split(".")
    operand = x.operand(1)
    if len(words) != 3 or not isinstance(operand, Address) or operand.offset:
        raise unknown(x)
    size, signed = int(words[2][1:]) // 8, words[2][0] == "s"
    if operand.base not in machine.parameters:
        raise unknown(x)
    width = machine.registers.bits(name(x, 0)) // 8
    out = machine.registers.row(name(x, 0), f"{'i' if signed else 'u'}{width}")
    value = machine.parameters[operand.base].view("u1")[:size].view(f"{'i' if signed else 'u'}{size}")
    return lambda mask: store(out, value[0], mask)
