"""How a compiled kernel is started, where no profiler is to be told of it."""

import re
from collections.abc import Callable
from typing import Any

import triton
from triton.compiler import CompiledKernel
from triton.knobs import HookChain

# Releases whose own launches call CompiledKernel.run with these arguments; others are asked by their public way.
_KNOWN = (3, 6) <= tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) < (3, 10)


def start_of(compiled: CompiledKernel) -> tuple[Callable[..., object], tuple[Any, ...]]:
    """A function that starts a kernel where nobody is watching, and what it takes between (grid, stream) and arguments.

    It is what Triton itself calls for every launch, with the metadata and the hooks of :func:`watched` left out.
    """
    if not _KNOWN:
        return lambda x, y, z, stream, *arguments: compiled[x, y, z](*arguments, stream=stream), ()
    start = compiled.run  # loads the kernel, which `function` is then
    return start, (compiled.function, compiled.packed_metadata, None, None, None)


def watched() -> bool:
    """Whether somebody has asked Triton to be told of every launch, as profilers do."""
    runtime = triton.knobs.runtime
    return _is_hook(runtime.launch_enter_hook) or _is_hook(runtime.launch_exit_hook)


def _is_hook(hook: Any) -> bool:
    """Whether that calls anything: a chain of hooks, which may be empty, or what somebody has put in its place."""
    return bool(hook.calls) if type(hook) is HookChain else hook is not None
