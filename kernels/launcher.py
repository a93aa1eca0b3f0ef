"""Launch kernels, and keep Triton's choice of a compiled kernel for the next launch of the same kind.

``kernel[grid](...)`` binds arguments to names, and derives from all of them which compiled kernel to run. In a short
call nothing takes longer. Launchers here group arguments by their part in that choice, in the order of parameters:

    arguments    tensors and tuples of them: the choice depends on their dtypes, alignment and strides
    numbers      sizes and factors, for which nothing is recompiled (``do_not_specialize``)
    constants    constexpr parameters and launch options, one :class:`KernelConstants` for each set of them

Only compiled kernels are kept, with their constants: no tensor, and nothing that depends on a length or a stream.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedattn.kernels import replay
from fusedattn.kernels.assembler import sound_assembler
from fusedattn.kernels.primitives import Strided
from fusedattn.kernels.start import start_of, watched

SPECIALIZED = 16  # Triton compiles another kernel for addresses, in bytes, and whole numbers that are multiples of it

# For every launch: a * b + c is one operation, rounded once. Triton's default, announced to change in 3.10.
LAUNCH_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}

_run = JITFunction.run


class KernelConstants:
    """The constexpr parameters and launch options of a kernel, and the kernels compiled for them so far."""

    def __init__(
        self,
        kernel: Any,
        *,
        num_warps: int,
        num_stages: int | None = None,
        maxnreg: int | None = None,
        **parameters: Any,
    ) -> None:
        self.kernel = kernel
        options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
        self.named = {**parameters, **{name: x for name, x in options.items() if x is not None}, **LAUNCH_OPTIONS}
        self.in_order = tuple(parameters[name] for name in kernel.arg_names if name in parameters)
        self.compiled: dict[Hashable, CompiledKernel] = {}


def launch(
    constants: KernelConstants,
    n_programs: int,
    arguments: tuple[Any, ...],
    numbers: tuple[Any, ...],
    known: tuple[Any, Hashable] = (None, None),
) -> None:
    """Launch a kernel on the current device; `known` is one of the arguments and its kind."""
    kernel, grid = constants.kernel, (n_programs, 1, 1)
    if not isinstance(kernel, JITFunction):  # interpreted
        replay.give_up()
        kernel[grid](*arguments, *numbers, **constants.named)
        return
    # A tool that observes launches expects them on Triton's own path.
    if JITFunction.run is not _run or kernel.pre_run_hooks or watched():
        replay.give_up()
        with sound_assembler():
            kernel[grid](*arguments, *numbers, **constants.named)
        return
    driver = triton.runtime.driver.active
    device = driver.get_current_device()
    of_known = known[0]
    key = (device, None in numbers, *[known[1] if x is of_known else kind_of(x) for x in arguments])
    compiled = constants.compiled.get(key)
    if compiled is None:
        replay.give_up()  # it would not have this launch
        with sound_assembler():
            compiled = kernel.run(*arguments, *numbers, grid=grid, warmup=False, **constants.named)
        if isinstance(compiled, CompiledKernel):
            constants.compiled[key] = compiled
    else:
        in_order = (*arguments, *numbers, *constants.in_order)
        replay.note(compiled, grid, in_order)
        start, before = start_of(compiled)
        start(*grid, driver.get_current_stream(device), *before, *in_order)


def kind_of(x: Any) -> Hashable:
    """The part of an argument that decides which compiled kernel to run."""
    if x is None:
        return None
    of_type = _KINDS.get(type(x))
    if of_type is not None:
        return of_type(x)
    if isinstance(x, torch.Tensor):
        return _of_tensor(x)
    if isinstance(x, tuple):
        return tuple(map(kind_of, x))
    return (type(x), x.base.dtype, *x.block_shape) if replay.is_descriptor(x) else x


def _of_tensor(x: torch.Tensor) -> Hashable:
    return x.dtype, x.data_ptr() % SPECIALIZED == 0


def _of_strided(x: Strided) -> Hashable:
    ptr, stride_b, stride_h, stride_s = x
    if ptr is None:
        return None
    together = stride_b | stride_h | stride_s
    if together % SPECIALIZED == 0 and 0 <= together < 2**31:  # nearly always
        strides: Hashable = SPECIALIZED
    else:
        strides = _of_number(stride_b), _of_number(stride_h), _of_number(stride_s)
    return ptr.dtype, ptr.data_ptr() % SPECIALIZED == 0, strides


def _of_number(x: int) -> Hashable:
    if x == 1:
        return 1
    return x % SPECIALIZED == 0, -(2**31) <= x < 2**31, x < 2**63


_KINDS: dict[type, Callable[[Any], Hashable]] = {
    torch.Tensor: _of_tensor,
    Strided: _of_strided,
    int: _of_number,
    float: type,
    triton.language.constexpr: lambda x: x.value,
    TensorDescriptor: type,  # its tile is one of the constants
}
