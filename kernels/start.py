"""Start a compiled kernel without notifying profilers."""

from collections.abc import Callable
from typing import Any

import triton
from triton.compiler import CompiledKernel
from triton.knobs import HookChain

from fusedattn.kernels.versions import TRITON_VERSION

# Releases whose own launches call CompiledKernel.run with these arguments; others start kernels by their public API.
_KNOWN = (3, 6) <= TRITON_VERSION < (3, 10)


def start_of(compiled: CompiledKernel) -> tuple[Callable[..., object], tuple[Any, ...]]:
    """A function that starts a kernel without hooks, and its parameters between (grid, stream) and the arguments.

    Triton itself calls it for every launch, with launch metadata and the hooks of :func:`watched` besides.
    """
    if not _KNOWN:
        return lambda x, y, z, stream, *arguments: compiled[x, y, z](*arguments, stream=stream), ()
    start = compiled.run  # loads the kernel into `function`
    return start, (compiled.function, compiled.packed_metadata, None, None, None)


def watched() -> bool:
    """Whether Triton has been asked to report every launch, as profilers ask it to."""
    runtime = triton.knobs.runtime
    return _is_hook(runtime.launch_enter_hook) or _is_hook(runtime.launch_exit_hook)


def _is_hook(hook: Any) -> bool:
    """Whether `hook` calls anything: it is a chain of hooks, which may be empty, or has replaced the chain."""
    return bool(hook.calls) if type(hook) is HookChain else hook is not None
