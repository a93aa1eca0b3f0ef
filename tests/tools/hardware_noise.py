"""The arithmetic of a GPU, for interpreted kernels and for the eager PyTorch that they are compared with.

The interpreter computes ``exp2`` exactly and rounds a product once. A GPU does neither. Inside :func:`gpu_kernels` and
:func:`~fusedattn.virtual_gpu.eager.gpu_eager` each operation has an error as large as the documentation of the device
allows; that module lists them.

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

from fusedattn.virtual_gpu.eager import (
    LOG2E,
    div_full,
    ex2,
    gpu_eager,
    log2f,
    logf,
    other_expf,
    products_of,
    sum_by_halves,
)
from fusedattn.virtual_gpu.instructions.floats import fma
from fusedattn.virtual_gpu.registers import Array


@contextmanager
def gpu_kernels(dtype: torch.dtype) -> Iterator[None]:
    """Inside, interpreted kernels compute in float32 as a GPU does, for inputs of `dtype`, of 32 or 16 bits."""
    from triton.runtime import interpreter

    builder, reduce, handle = interpreter.InterpreterBuilder, interpreter.ReduceOps, interpreter.TensorHandle
    products = products_of(dtype)

    def elementwise(name: str, function: Callable[..., Array]) -> Any:
        own = getattr(builder, name)

        def call(self: Any, *operands: Any) -> Any:
            if operands[0].data.dtype != np.float32:
                return own(self, *operands)
            with np.errstate(all="ignore"):
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
