"""Hand-written machine code, as cuobjdump prints it."""

from __future__ import annotations

from bench.codegen.disassembly import Instruction, sass_instructions


def disassembly(*lines: str) -> list[Instruction]:
    """Print like cuobjdump, with an instruction every 16 bytes."""
    return sass_instructions("\n".join(f"        /*{16 * i:04x}*/    {line} ;" for i, line in enumerate(lines)))
