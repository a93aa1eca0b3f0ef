"""Kernels that were compiled before, recognised by their IR before the passes for a target.

Triton and its assembler are deterministic: the same IR, options and assembler give the same machine code. So a kernel
that the baseline has with the same fingerprint need not be compiled again. Places in the source are left out, and
functions are inlined, so moving or renaming a helper changes no fingerprint. A kernel in Gluon is written in the GPU
dialect, so its IR is that of the source; its first pass inlines functions, and runs here before the hash.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import triton
from triton._C.libtriton import ir, passes
from triton.backends.compiler import Language

from bench.codegen.loops import WARP_GROUP

HEX_DIGITS = 16


class Known(Exception):  # noqa: N818 -- not an error
    """Ends a compilation whose fingerprint is known."""


@dataclass
class Seen:
    """The last compilation inside :func:`watching`; empty if there was none."""

    fingerprint: str = ""
    options: dict[str, int] = field(default_factory=dict)  # num_warps, of all tasks together, and num_stages


@contextmanager
def watching(known: Collection[str]) -> Iterator[Seen]:
    """Inside, compilations are noted in the value; those in `known` end with :class:`Known`."""
    seen = Seen()

    def inspect(
        backend: Any = None, stages: Any = None, options: Any = None, language: Any = None, capability: Any = None
    ) -> tuple[str, str] | None:
        if backend is None:
            return "", ""  # nothing to add to Triton's key
        lower = stages["ttgir"]  # takes the IR that all targets share

        def lower_unless_known(module: Any, metadata: Any) -> Any:
            if language == Language.GLUON:
                _inline(module)
            text = module.str_nodebug()
            seen.fingerprint = _of(text, options, capability)
            seen.options = {"num_warps": _all_warps(text, options.num_warps), "num_stages": options.num_stages}
            if seen.fingerprint in known:
                raise Known(seen.fingerprint)
            return lower(module, metadata)

        stages["ttgir"] = lower_unless_known
        return None

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.add_stages_inspection_hook = inspect
        yield seen


def _inline(module: Any) -> None:
    manager = ir.pass_manager(module.context)
    passes.gluon.add_inliner(manager)
    manager.run(module, "inline")


def _all_warps(text: str, own: int) -> int:
    """The warps of a program: its own and those of its other tasks, in whole groups."""
    others = [int(n) for n in re.findall(r"^\s*partition\d+\(.*\bnum_warps\((\d+)\)", text, re.MULTILINE)]
    return own + -(-sum(others) // WARP_GROUP) * WARP_GROUP


def _of(text: str, options: Any, capability: int | None) -> str:
    """The fingerprint of a kernel's IR; `capability` is None for AMD, where LLVM assembles, a part of Triton."""
    # The paths of libraries belong to the machine.
    chosen = sorted((name, value) for name, value in vars(options).items() if name != "extern_libs")
    parts = [text, repr(chosen)]
    if capability is not None:
        nvidia = triton.knobs.nvidia
        parts.append((nvidia.ptxas if capability < 100 else nvidia.ptxas_blackwell).version)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:HEX_DIGITS]
