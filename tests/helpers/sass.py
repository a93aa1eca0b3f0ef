"""Hand-written machine code, as cuobjdump prints it."""

from __future__ import annotations

from collections.abc import Mapping

from bench.codegen.disassembly import Instruction, sass_instructions


def disassembly(*lines: str, tables: Mapping[int, tuple[int, ...]] | None = None) -> list[Instruction]:
    """Print like cuobjdump, with an instruction every 16 bytes; `tables` are those of branches, by their address."""
    sass = "\n".join(f"        /*{16 * i:04x}*/    {line} ;" for i, line in enumerate(lines))
    return sass_instructions(sass, tables)
