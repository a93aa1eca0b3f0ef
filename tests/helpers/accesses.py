"""Check every address that an interpreted kernel touches, as compute-sanitizer does on a GPU.

Inside :func:`checked_accesses` a launch fails unless each load reads elements of one tensor argument that the kernel
does not write, each store writes elements of one output, and each element of an output is written exactly once, or
added to by atomics. So no program depends on another one of its launch. The elements are those of the tensor as it was
passed: the rest of its storage is out of bounds. Masked lanes may have any address. Tensors inside tuples are named by
their fields, as in ``results.out.ptr``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

RESULTS = {"results.out.ptr", "results.rounding_residual.ptr"}
RESULTS |= {f"results.{name}.ptr" for name in ("lse", "row_max", "row_sum", "largest")}
# Outputs that a split without keys does not write.
UNLESS_NOTHING = {"partials.weighted", "partials.rounded_sum", "partials.kept_sum"}

# The outputs of each kernel; its other tensors are inputs.
OUTPUTS = {
    "attention_fwd": RESULTS | {"partials.row_max", "partials.row_sum"} | UNLESS_NOTHING,
    "attention_combine": RESULTS,
    "attention_bwd_rows": {"delta_ptr", "shift_ptr", "reciprocal_ptr"},
    "attention_bwd_exact_rows": {"delta_ptr", "factor_ptr"},
    "attention_bwd_dkdv": {"dk_out.ptr", "dv_out.ptr", "dq_total.ptr"},
    "attention_bwd_dq_sum": {"dq_out.ptr"},
    "attention_bwd_dq": {"dq_out.ptr"},
    "attention_bwd_dbias": {"dbias_ptr"},
    "attention_bwd_drelative": {"drelative_ptr", "sums.words_ptr", "sums.special_ptr"},
    "attention_bwd_learned": {"sums.words_ptr", "sums.special_ptr"},
    "cache_append": {"k_cache.ptr", "v_cache.ptr", "cache.k_scale.ptr", "cache.v_scale.ptr"},
    "qk_prologue": {"out.ptr"},
    "qk_prologue_bwd": {"dx.ptr", "dweight_ptr"},
    "qk_norm_rows": {"out_ptr"},
    "quantize_fp8": {"codes.ptr", "scales_ptr", "largest_ptr"},
    "largest_of_all": {"out_ptr"},
    "_key_range": {"key_range_ptr"},
    "linear_states": {"states.kv", "states.k_sum", "final.kv", "final.k_sum"},
    "linear_outputs": {"out.ptr", "den_ptr"},
    "linear_features": {"dx.ptr", "numbers.scale", "numbers.delta"},
}

# Outputs that are 0 before the launch and get sums added (distances that no key has stay 0); and those of splits.
WRITTEN_IN_PART = {
    ("attention_bwd_dkdv", "dq_total.ptr"),
    *((kernel, name) for kernel in ("attention_bwd_drelative", "attention_bwd_learned") for name in OUTPUTS[kernel]),
    *(("attention_fwd", name) for name in UNLESS_NOTHING),
    *(("cache_append", name) for name in OUTPUTS["cache_append"]),
    # Blocks that no sequence has, scales up to a multiple of 16, and what only one of two passes writes.
    *(("quantize_fp8", name) for name in OUTPUTS["quantize_fp8"]),
}

# Writes to larger outputs are not counted: tests run only some of their programs.
COUNTED = 2**22


def tensors_in(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors among arguments and inside tuples, by name."""
    found: dict[str, Tensor] = {}
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            found[name] = x
        elif isinstance(x, tuple):
            fields = getattr(x, "_fields", range(len(x)))
            found |= tensors_in({f"{name}.{field}": y for field, y in zip(fields, x, strict=True)})
        elif isinstance(x, TensorDescriptor):
            found[name] = x.base
    return found


def outputs_of(kernel: str, arguments: dict[str, Any]) -> set[str]:
    """The outputs of a launch: a cache may have scales that are given, which are only read."""
    found = OUTPUTS[kernel]
    if kernel == "cache_append":
        scales = {name: getattr(arguments["cache"], name) for name in ("k_scale", "v_scale")}
        found = found - {f"cache.{name}.ptr" for name, x in scales.items() if x is not None and x.GIVEN.value}
    if kernel == "linear_features" and arguments["TRANSPOSED"]:
        found = found - {"numbers.scale", "numbers.delta"}
    return found


def _has_rows_behind(arguments: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
    """Whether packed tensors are longer than all sequences, so that no program writes their end."""
    if arguments.get("chunks") is not None and arguments["chunks"].cu_ptr is not None:
        return True  # and no program has the chunks that only other lengths would need
    stops = {name.rsplit(".", 1)[-1]: x for name, x in tensors.items() if name.endswith(("cu_q_ptr", "cu_k_ptr"))}
    lengths = {"cu_q_ptr": arguments.get("seqlen_q"), "cu_k_ptr": arguments.get("seqlen_k")}
    return any(int(x[-1]) < lengths[name] for name, x in stops.items())


class Argument:
    """A tensor argument of a launch, with the number of writes to each element."""

    def __init__(self, name: str, x: Tensor, is_output: bool, in_part: bool = False) -> None:
        self.name, self.is_output, self.in_part = name, is_output, in_part
        self.start, self.itemsize = x.data_ptr(), x.element_size()
        # (size, stride in bytes), outermost first; an expanded dimension has only one element.
        sizes = ((n, stride * self.itemsize) for n, stride in zip(x.shape, x.stride(), strict=True))
        self.dims = sorted(((n, stride) for n, stride in sizes if n > 1 and stride > 0), key=lambda dim: -dim[1])
        extent = self.itemsize
        for n, stride in reversed(self.dims):
            if stride < extent:
                raise ValueError(f"{name}: got overlapping rows, strides {x.stride()}; allowed are separate ones")
            extent += (n - 1) * stride
        numel = math.prod(n for n, _ in self.dims)
        self.writes = np.zeros(numel, np.int32) if is_output and numel <= COUNTED else None

    def index(self, addresses: np.ndarray) -> np.ndarray | None:
        """The indices of the elements at the addresses, or None if one is not the address of an element."""
        rest = addresses.astype(np.int64) - self.start
        index = np.zeros_like(rest)
        inside = rest >= 0
        for n, stride in self.dims:
            at, rest = np.divmod(rest, stride)
            inside &= at < n
            index = index * n + at
        return index if inside.all() and not rest.any() else None


@dataclass
class Accesses:
    """A stand-in for the interpreter's memory, for one launch at a time."""

    memory: Any
    kernel: str = ""
    arguments: list[Argument] = field(default_factory=list)
    launched: list[str] = field(default_factory=list)
    reads: dict[str, np.ndarray] | None = None  # of each element of each input, by "kernel argument", if counted

    def load(self, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: Any) -> np.ndarray:
        # The mask of a tensor descriptor is a memoryview.
        found = self._find(addresses[np.asarray(mask, bool)], np.dtype(dtype).itemsize, is_output=False)
        if found is not None and self.reads is not None:
            argument, index = found
            numel = math.prod(n for n, _ in argument.dims)
            np.add.at(self.reads.setdefault(f"{self.kernel} {argument.name}", np.zeros(numel, np.int32)), index, 1)
        return self.memory.load(addresses, mask, other, dtype)

    def store(self, addresses: np.ndarray, value: np.ndarray, mask: np.ndarray) -> None:
        found = self._find(addresses[mask.astype(bool)], value.dtype.itemsize, is_output=True)
        if found is not None and found[0].writes is not None:
            argument, index = found
            np.add.at(argument.writes, index, 1)
            if (argument.writes[index] > 1).any():
                raise AssertionError(f"{self.kernel} writes an element of {argument.name} twice")
        self.memory.store(addresses, value, mask)

    def atomic_rmw(self, op: Any, addresses: np.ndarray, value: np.ndarray, mask: np.ndarray, sem: Any) -> np.ndarray:
        self._find(addresses[mask.astype(bool)], value.dtype.itemsize, is_output=True)
        return self.memory.atomic_rmw(op, addresses, value, mask, sem)

    def _find(self, addresses: np.ndarray, itemsize: int, is_output: bool) -> tuple[Argument, np.ndarray] | None:
        if addresses.size == 0:
            return None
        for argument in self.arguments:
            if argument.is_output == is_output and argument.itemsize == itemsize:
                index = argument.index(addresses)
                if index is not None:
                    return argument, index
        low, high = int(addresses.min()), int(addresses.max())
        nearby = ", ".join(f"{x.name}{low - x.start:+d} .. {high - x.start:+d}" for x in self.arguments)
        what = "writes outside its outputs" if is_output else "reads outside its inputs"
        raise AssertionError(f"{self.kernel} {what}, at bytes {nearby}")

    def launch(self, kernel: str, arguments: dict[str, Any]) -> None:
        self.kernel = kernel
        self.launched.append(kernel)
        tensors = tensors_in(arguments)
        rows_behind, outputs = _has_rows_behind(arguments, tensors), outputs_of(kernel, arguments)
        self.arguments = [
            Argument(name, x, name in outputs, rows_behind or (kernel, name) in WRITTEN_IN_PART)
            for name, x in tensors.items()
        ]

    def finish(self) -> None:
        for argument in self.arguments:
            if argument.writes is None or argument.in_part:
                continue
            if missing := int((argument.writes == 0).sum()):
                raise AssertionError(f"{self.kernel} leaves {missing} elements of {argument.name} unwritten")
        self.arguments = []


@contextmanager
def checked_accesses(*, count_reads: bool = False) -> Iterator[Accesses]:
    """Check the reads and writes of the interpreter's launches; `launched` of the result names the kernels."""
    from triton.runtime import interpreter

    accesses = Accesses(interpreter._interpreter, reads={} if count_reads else None)
    run = interpreter.GridExecutor.__call__

    def checked(executor: Any, *args: Any, **kwargs: Any) -> None:
        named = dict(zip(executor.arg_names, args, strict=False)) | kwargs
        accesses.launch(executor.fn.__name__, {name: named[name] for name in executor.arg_names if name in named})
        run(executor, *args, **kwargs)
        accesses.finish()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_interpreter", accesses)
        patch.setattr(interpreter.GridExecutor, "__call__", checked)
        yield accesses
