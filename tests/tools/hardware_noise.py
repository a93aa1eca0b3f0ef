"""The arithmetic of a GPU, for interpreted kernels and for the eager PyTorch that they are compared with.

The interpreter computes ``exp2`` exactly and rounds a product once. A GPU does neither. Inside :func:`gpu_kernels` and
:func:`gpu_eager` each operation has an error as large as the documentation of the device allows. The error is derived
from the bits of the operands, so that equal operands have equal results, and all runs are the same.

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

Units are those in the last place of the correctly rounded result.

.. [1] PTX ISA 9.1, section 9.7.3.21: "The maximum ulp error is 2 ulp from correctly rounded result across the full
   range of inputs"; 1 for an input of 0.
.. [2] PTX ISA 9.1, section 9.7.3.8: "The maximum ulp error is 2 across the full range of inputs".
.. [3] CUDA C++ Programming Guide, "Mathematical Functions": expf 2, tanhf 2, logf 1, log2f 1 ulp.
.. [4] Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science, 2021.
   How many terms at a time, and how many bits beyond the 24 of float32, differs between devices.

``python -m tests.tools.hardware_noise`` prints the share of the error budget that each case uses, with noise and
without, and the share that eager PyTorch uses of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

EX2, DIV, LOG, EXPF, TANHF = 2, 2, 1, 2, 2  # units in the last place
TERMS = 16  # of a product of 16 bits that are aligned at once
LOG2E = np.float32(1.4426950408889634)

Array = np.ndarray[Any, Any]


def _drawn(most: int, salt: int, *operands: Array) -> Array:
    """Uniform integers from -most to most, derived from the bits of float32 `operands` of one shape."""
    bits = np.full(operands[0].shape, salt, np.uint64)
    for x in operands:  # splitmix64
        bits = (bits ^ x.view(np.uint32)) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(29)
    return (bits >> np.uint64(33)).astype(np.int32) % (2 * most + 1) - most


def _float32(x: Array) -> Array:
    return np.ascontiguousarray(x, np.float32)


def _off(exact: Array, by: Array) -> Array:
    """`exact`, float64, rounded to float32 and moved by some units in the last place; 0 and infinity stay."""
    rounded = _float32(exact)
    moved = (rounded.view(np.int32) + by).view(np.float32)
    size = np.abs(rounded)
    return np.where((size > 2.0**-124) & (size < 2.0**127), moved, rounded)


def _erring(function: Callable[[Array], Array], most: int, salt: int, exact_at: float) -> Callable[[Array], Array]:
    """A function of float32 with errors of up to `most` units, except where all implementations are exact."""

    def call(x: Array) -> Array:
        x = _float32(x)
        with np.errstate(all="ignore"):
            exact = function(x.astype(np.float64))
            return np.where(x == exact_at, _float32(exact), _off(exact, _drawn(most, salt, x)))

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
    x, y = map(_float32, np.broadcast_arrays(x, y))
    with np.errstate(all="ignore"):
        return _off(x.astype(np.float64) / y.astype(np.float64), _drawn(DIV, 6, x, y))


def fma(x: Array, y: Array, z: Array) -> Array:
    """``x * y + z`` of float32; rounded to float64 first, which almost never matters."""
    with np.errstate(all="ignore"):
        return _float32(x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64))


def sum_by_halves(x: Array, axis: int) -> Array:
    """The sum over an axis in float32."""
    x = np.moveaxis(_float32(x), axis, 0)
    with np.errstate(all="ignore"):
        while len(x) > 1:
            half = (len(x) + 1) // 2
            x = np.concatenate((x[: len(x) - half] + x[half:], x[len(x) - half : half]))
    return x[0] if len(x) else np.zeros(x.shape[1:], np.float32)


def chain(a: Array, b: Array, acc: Array) -> Array:
    """``acc + a @ b`` of float32 values, ``(..., M, K)`` and ``(..., K, N)``: one FMA per term, in order."""
    acc = _float32(acc)
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
    return _float32(acc)


def _products(dtype: torch.dtype) -> Callable[[Array, Array, Array], Array]:
    return chain if dtype == torch.float32 else tensor_core


@contextmanager
def gpu_kernels(dtype: torch.dtype) -> Iterator[None]:
    """Inside, interpreted kernels compute in float32 as a GPU does, for inputs of `dtype`, of 32 or 16 bits."""
    from triton.runtime import interpreter

    builder, reduce, handle = interpreter.InterpreterBuilder, interpreter.ReduceOps, interpreter.TensorHandle
    products = _products(dtype)

    def elementwise(name: str, function: Callable[..., Array]) -> Any:
        own = getattr(builder, name)

        def call(self: Any, *operands: Any) -> Any:
            if operands[0].data.dtype != np.float32:
                return own(self, *operands)
            found = function(*(x.data for x in operands))
            return handle(np.asarray(found), operands[0].dtype.scalar)

        return patch.object(builder, name, call)

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *options: Any) -> Any:
        found = products(a.data.astype(np.float64), b.data.astype(np.float64), acc.data)
        return handle(found.astype(acc.data.dtype), acc.dtype.scalar)

    own_sum = reduce.sum

    def create_sum(self: Any, x: Any) -> Any:
        data = x.handle.data
        if data.dtype not in (np.float32, np.float64):
            return own_sum(self, x)
        axis = self.axis
        total = sum_by_halves(data.ravel(), 0) if axis is None else sum_by_halves(data, axis)
        if self.keep_dims:
            total = np.expand_dims(total, tuple(range(data.ndim)) if axis is None else axis)
        return self.to_tensor(total.astype(data.dtype), x.dtype)

    with ExitStack() as stack:
        for name, function in (
            ("create_exp2", ex2),
            ("create_exp", lambda x: ex2(x * LOG2E)),
            ("create_log", logf),
            ("create_log2", log2f),
            ("create_fdiv", div_full),
            ("create_fma", fma),
        ):
            stack.enter_context(elementwise(name, function))
        stack.enter_context(patch.object(builder, "create_dot", create_dot))
        stack.enter_context(patch.object(reduce, "sum", create_sum))
        yield


class gpu_eager(TorchDispatchMode):  # noqa: N801
    """Inside, eager PyTorch on CPU tensors computes as it does on a GPU, with another `exp` if one is given."""

    def __init__(self, exp: Callable[[Array], Array] = expf) -> None:
        super().__init__()
        self.exp = exp

    def product(self, a: Array, b: Array, dtype: torch.dtype) -> Array:
        """``a @ b`` of values of a dtype, as float64, in float32."""
        return _products(dtype)(a, b, np.zeros((*a.shape[:-1], b.shape[-1])))

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
        a, b = ((_float32(x).view(np.uint32) & kept).view(np.float32).astype(np.float64) for x in (a, b))
        return tensor_core(a, b, np.zeros((*a.shape[:-1], b.shape[-1])))


other_expf = _erring(np.exp, EXPF, 7, 0.0)  # errors as frequent and as large as those of expf, elsewhere


def main() -> None:
    """Print the share of the error budget that each case uses in its worst tensor; medians over the draws.

    Eager PyTorch is judged in the same way, with other errors of `exp`.
    """
    from fusedattn import attention, testing
    from fusedattn.cli.interpreter import speed_up

    parser = argparse.ArgumentParser(prog="python -m tests.tools.hardware_noise", description=main.__doc__)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), action="append")
    parser.add_argument("--case", default="", help="only cases with this in their name")
    parser.add_argument("--draws", type=int, default=1, help="random inputs per case (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    speed_up()

    def kernels(*args: Any, **named: Any) -> Any:
        return attention(*args, backend="triton", **named)

    def used(case: testing.Case) -> tuple[float, float, float]:
        """The shares without noise, with noise, and of eager PyTorch."""
        inputs, dtype = testing.make_inputs(case), case.dtype
        truth, terms = testing.golden(inputs), testing.bias_terms(inputs)

        def worst(actual: testing.Results, eager: testing.Results) -> float:
            return max(x.used for x in testing.compare_results(actual, truth, eager, dtype, terms).values())

        without = worst(testing.run(kernels, inputs), testing.baseline(inputs))
        with gpu_kernels(dtype):
            actual = testing.run(kernels, inputs)
        with gpu_eager():
            eager = testing.baseline(inputs)
        with gpu_eager(other_expf):
            again = testing.baseline(inputs)
        return without, worst(actual, eager), worst(again, eager)

    print(f"{'case':38} {'dtype':9} {'no noise':>9} {'noise':>9} {'eager':>9}")
    n_over = 0
    for name in options.dtype or ("float32", "float16", "bfloat16"):
        shares = []
        for case in testing.CASES:
            if options.case not in case.name:
                continue
            drawn = [replace(case, dtype=getattr(torch, name), seed=case.seed + i) for i in range(options.draws)]
            shares.append(np.median([used(x) for x in drawn], axis=0))
            print(f"{case.name:38} {name:9}", *(f"{x:9.0%}" for x in shares[-1]), flush=True)
        for label, found in (("median", np.median(shares, axis=0)), ("largest", np.max(shares, axis=0))):
            print(f"{label:38} {name:9}", *(f"{x:9.0%}" for x in found))
        over = (np.array(shares) > 1.0).sum(0)
        print(f"{'beyond the budget':38} {name:9}", *(f"{x:9}" for x in over))
        n_over += over[1]
    sys.exit(f"{n_over} beyond the budget with noise" if n_over else 0)


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    main()
