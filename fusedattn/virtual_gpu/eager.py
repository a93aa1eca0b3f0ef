"""The arithmetic of a GPU for eager PyTorch, with which kernels are compared, and for single operations.

Inside :func:`gpu_eager` eager PyTorch on CPU tensors has errors as large as the documentation of the device allows. An
error is derived from the bits of the operands, so that equal operands have equal results, and all runs are the same.

======================= ============================================================= =====================
operation               on the device                                                 error
======================= ============================================================= =====================
tl.math.exp2            ``ex2.approx.ftz.f32`` [1]_                                   2 units, 0 below 2^-126
tl.exp                  that of a product with log2 e, which is rounded               likewise
``/`` of a kernel       ``div.full.f32`` [2]_                                         2 units
tl.log, tl.math.log2    those of CUDA's library [3]_                                  1 unit
eager exp, tanh, log    those of CUDA's library [3]_                                  2, 2, 1 units
products of float32     one FMA after another, in the order of the terms              roundings
products of 16 bits     16 terms at a time, cut off below 2^-24 of the largest [4]_   roundings, truncation
sums                    halves of a row are added until one number is left            roundings
fma, div_rn, ``/`` of   exact but for one rounding                                    none more
eager PyTorch
======================= ============================================================= =====================

Units are those in the last place of the correctly rounded result. Errors are whole units, as CUDA states them; those of
:mod:`~fusedattn.virtual_gpu.noise` are any part of the bounds of PTX, some of which are relative or absolute.

.. [1] PTX ISA 9.1, section 9.7.3.21: "The maximum ulp error is 2 ulp from correctly rounded result across the full
   range of inputs"; 1 for an input of 0.
.. [2] PTX ISA 9.1, section 9.7.3.8: "The maximum ulp error is 2 across the full range of inputs".
.. [3] CUDA C++ Programming Guide, "Mathematical Functions": expf 2, tanhf 2, logf 1, log2f 1 ulp.
.. [4] Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science, 2021.
   How many terms at a time, and how many bits beyond the 24 of float32, differs between devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedattn.virtual_gpu.instructions.floats import fma
from fusedattn.virtual_gpu.registers import Array

EX2, DIV, LOG, EXPF, TANHF = 2, 2, 1, 2, 2  # units in the last place
TERMS = 16  # of a product of 16 bits that are aligned at once
LOG2E = np.float32(1.4426950408889634)


def _drawn(most: int, salt: int, *operands: Array) -> Array:
    """Uniform integers from -most to most, derived from the bits of float32 `operands` of one shape."""
    bits = np.full(operands[0].shape, salt, np.uint64)
    for x in operands:  # splitmix64
        bits = (bits ^ x.view(np.uint32)) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(29)
    return (bits >> np.uint64(33)).astype(np.int32) % (2 * most + 1) - most


def as_float32(x: Array) -> Array:
    return np.ascontiguousarray(x, np.float32)


def _off(exact: Array, by: Array) -> Array:
    """`exact`, float64, rounded to float32 and moved by some units in the last place; 0 and infinity stay."""
    rounded = as_float32(exact)
    moved = (rounded.view(np.int32) + by).view(np.float32)
    size = np.abs(rounded)
    return np.where((size > 2.0**-124) & (size < 2.0**127), moved, rounded)


def _erring(function: Callable[[Array], Array], most: int, salt: int, exact_at: float) -> Callable[[Array], Array]:
    """A function of float32 with errors of up to `most` units, except where all implementations are exact."""

    def call(x: Array) -> Array:
        x = as_float32(x)
        with np.errstate(all="ignore"):
            exact = function(x.astype(np.float64))
            return np.where(x == exact_at, as_float32(exact), _off(exact, _drawn(most, salt, x)))

    return call


_exp2 = _erring(np.exp2, EX2, 1, 0.0)
expf = _erring(np.exp, EXPF, 2, 0.0)
logf = _erring(np.log, LOG, 3, 1.0)
log2f = _erring(np.log2, LOG, 4, 1.0)
_tanh = _erring(np.tanh, TANHF, 5, 0.0)


def ex2(x: Array) -> Array:
    """``ex2.approx.ftz.f32``."""
    found = _exp2(np.where(np.abs(x) < 2.0**-126, np.float32(0.0), x))
    return np.where(found < 2.0**-126, np.float32(0.0), found)


def tanhf(x: Array) -> Array:
    """CUDA's tanh, which does not exceed 1."""
    return np.clip(_tanh(x), np.float32(-1.0), np.float32(1.0))


def div_full(x: Array, y: Array) -> Array:
    """``div.full.f32``."""
    x, y = map(as_float32, np.broadcast_arrays(x, y))
    with np.errstate(all="ignore"):
        return _off(x.astype(np.float64) / y.astype(np.float64), _drawn(DIV, 6, x, y))


def sum_by_halves(x: Array, axis: int) -> Array:
    """The sum over an axis in float32."""
    x = np.moveaxis(as_float32(x), axis, 0)
    with np.errstate(all="ignore"):
        while len(x) > 1:
            half = (len(x) + 1) // 2
            x = np.concatenate((x[: len(x) - half] + x[half:], x[len(x) - half : half]))
    return x[0] if len(x) else np.zeros(x.shape[1:], np.float32)


def chain(a: Array, b: Array, acc: Array) -> Array:
    """``acc + a @ b`` of float32 values, ``(..., M, K)`` and ``(..., K, N)``: one FMA per term, in order."""
    acc = as_float32(acc)
    with np.errstate(all="ignore"):
        for k in range(a.shape[-1]):
            acc = fma(a[..., :, k, None], b[..., None, k, :], acc)
    return acc


def tensor_core(a: Array, b: Array, acc: Array) -> Array:
    """``acc + a @ b`` of 16-bit values: products are exact, terms and sums are truncated below 2^-24."""
    acc = acc.astype(np.float64)
    for k in range(0, a.shape[-1], TERMS):
        products = a[..., :, None, k : k + TERMS] * np.swapaxes(b[..., None, k : k + TERMS, :], -1, -2)
        terms = np.concatenate((products, acc[..., None]), -1)
        largest = np.abs(terms).max(-1, keepdims=True)
        with np.errstate(all="ignore"):
            last = np.exp2(np.floor(np.log2(largest)) - 24.0)
            total = np.where(np.isfinite(largest) & (last > 0.0), np.trunc(terms / last) * last, terms).sum(-1)
            near = total.astype(np.float32)
            too_large = np.isfinite(near) & (np.abs(near.astype(np.float64)) > np.abs(total))
            acc = np.where(too_large, np.nextafter(near, np.float32(0.0)), near).astype(np.float64)
    return as_float32(acc)


def products_of(dtype: torch.dtype) -> Callable[[Array, Array, Array], Array]:
    return chain if dtype == torch.float32 else tensor_core


class gpu_eager(TorchDispatchMode):  # noqa: N801
    """Inside, eager PyTorch on CPU tensors computes as it does on a GPU, with another `exp` if one is given."""

    def __init__(self, exp: Callable[[Array], Array] = expf) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.exp = exp

    def product(self, a: Array, b: Array, dtype: torch.dtype) -> Array:
        """``a @ b`` of values of a dtype, as float64, in float32."""
        return products_of(dtype)(a, b, np.zeros((*a.shape[:-1], b.shape[-1])))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the operators that are not exact on a GPU."""
        replaced = self._replaced(func, args)
        return func(*args, **(kwargs or {})) if replaced is None else replaced

    def _replaced(self, func: Any, args: Any) -> Tensor | None:
        aten, x = torch.ops.aten, args[0] if args else None
        if not isinstance(x, Tensor) or x.dtype == torch.float64 or not x.is_floating_point():
            return None
        if func in (aten.bmm.default, aten.mm.default):
            a, b = (y.detach().double().numpy() for y in args)
            return torch.from_numpy(self.product(a, b, x.dtype)).to(x.dtype)
        if x.dtype != torch.float32 or x.shape[-1:] == (0,):
            return None
        data = x.detach().numpy()
        functions = {aten.exp.default: self.exp, aten.log.default: logf, aten.tanh.default: tanhf}
        if func in functions:
            return torch.from_numpy(functions[func](data))
        if func == aten._softmax.default:
            exps, total, _ = self._exps(data, args[1])
            with np.errstate(all="ignore"):
                return torch.from_numpy(exps / total)
        if func == aten.logsumexp.default:
            _, total, largest = self._exps(data, -1)
            return torch.from_numpy((logf(total) + largest)[..., 0])
        if func == aten.sum.dim_IntList and len(args[1]) == 1:
            total = sum_by_halves(data, args[1][0])
            return torch.from_numpy(np.expand_dims(total, args[1][0]) if args[2:3] == (True,) else np.asarray(total))
        return None

    def _exps(self, x: Array, axis: int) -> tuple[Array, Array, Array]:
        """Exponentials relative to the largest number of a row, their sum, and that number, or 0 if it is infinite."""
        with np.errstate(all="ignore"):
            largest = x.max(axis, keepdims=True)
            exps = self.exp(x - largest)
            total = np.expand_dims(sum_by_halves(exps, axis), axis)
            return exps, total, np.where(np.isfinite(largest), largest, np.float32(0.0))


class tf32_eager(gpu_eager):  # noqa: N801
    """The same with TF32 allowed: matrix units ignore the low 13 bits of float32."""

    def product(self, a: Array, b: Array, dtype: torch.dtype) -> Array:
        kept = np.uint32(0xFFFFE000)
        a, b = ((as_float32(x).view(np.uint32) & kept).view(np.float32).astype(np.float64) for x in (a, b))
        return tensor_core(a, b, np.zeros((*a.shape[:-1], b.shape[-1])))


other_expf = _erring(np.exp, EXPF, 7, 0.0)  # errors as frequent and as large as those of expf, elsewhere
