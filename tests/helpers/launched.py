"""Collect the arguments of compiled kernels without compiling: each launch as Triton would specialise it.

    python -m tests.helpers.launched

runs calls as Triton launches them and as they are replayed, with other tensors, and compares kernels, grids and
arguments; addresses are replaced by the names of their tensors. Prints how many calls were replayed. Kernels must not
be interpreted, so a test runs this in a separate process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction, compute_cache_key
from triton.tools.tensor_descriptor import TensorDescriptor

from bench.codegen.launches import NoDevice
from fusedattn import attention, testing
from fusedattn.backends.triton import launching, results
from fusedattn.kernels import launcher, replay
from fusedattn.testing import Case, Inputs, make_inputs
from fusedattn.virtual_gpu.attention import launches_for


@dataclass
class Launches:
    """A stand-in for Triton's compiler and launcher.

    `found` are (compilation, grid, arguments). `constants` are those of all kernels. `names` are those of tensors by
    their addresses; `alive` keeps the addresses from being reused.
    """

    found: list[tuple[Any, ...]] = field(default_factory=list)
    constants: list[launcher.KernelConstants] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)
    compiled: dict[Any, Any] = field(default_factory=dict)

    def run(self, fn: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        """Replaces JITFunction.run."""
        *_, binder = fn.device_caches[0]
        bound, specialization, options = binder(*args, debug=False, instrumentation_mode="", **named)
        key = fn.__name__, compute_cache_key({}, specialization, options)
        if key not in self.compiled:
            self.compiled[key] = _RecordingKernel(key, tuple(of_type for of_type, _ in specialization), self)
        self.note(self.compiled[key], grid, tuple(bound.values()))
        return self.compiled[key]

    def note(self, compiled: _RecordingKernel, grid: Any, arguments: tuple[Any, ...]) -> None:
        """Record a launch."""
        self.alive.append(arguments)
        self.found.append((compiled.key, grid, self.named(arguments, compiled.types)))

    def named(self, x: Any, of_type: Any) -> Any:
        """An argument of a Triton type, with names for addresses; arguments of a replay are numbers."""
        if isinstance(x, TensorDescriptor):
            of_base = self.named(x.base.data_ptr(), "*")
            return of_base, tuple(x.shape), tuple(x.strides), tuple(x.block_shape), x.padding
        if isinstance(x, tuple):
            return tuple(map(self.named, x, of_type))
        if of_type.startswith("*"):
            address = x.data_ptr() if isinstance(x, Tensor) else int(x)
            return self.names.setdefault(address, f"scratch {len(self.names)}")
        return getattr(x, "value", x)

    def forget(self, kernel: str | None = None) -> None:
        """Clear the records of the launches of `kernel`, or of all launches and calls."""
        if kernel is None:
            launching._replays.clear()
        for x in self.constants:
            if kernel in (None, x.kernel.__name__):
                x.compiled.clear()

    def name(self, **tensors: Tensor | None) -> None:
        """Name the addresses of tensors; an address that has a name keeps it."""
        self.alive.append(tensors)
        for name, x in tensors.items():
            if x is not None and x.numel():
                self.names.setdefault(x.data_ptr(), name)


class _RecordingKernel(CompiledKernel):
    """A compiled kernel that records its launches."""

    def __init__(self, key: Any, types: tuple[Any, ...], launches: Launches) -> None:
        self.key, self.types, self.launches = key, types, launches

        self.function = self.packed_metadata = None

    @property
    def run(self) -> Callable[..., None]:
        return lambda x, y, z, stream, function, metadata, of_launch, enter, leave, *arguments: self.launches.note(
            self, (x, y, z), arguments
        )


@contextmanager
def hopper() -> Iterator[Launches]:
    """Inside, calls with CPU tensors launch the same kernels as on a Hopper GPU."""
    launches = Launches()
    init = launcher.KernelConstants.__init__

    def noted(constants: launcher.KernelConstants, *args: Any, **named: Any) -> None:
        init(constants, *args, **named)
        launches.constants.append(constants)

    def run(fn: JITFunction, *args: Any, **named: Any) -> Any:
        return launches.run(fn, *args, **named)

    triton.runtime.driver.set_active(NoDevice(GPUTarget("cuda", 90, 32)))
    with (
        patch.object(JITFunction, "run", run),
        patch.object(launcher, "_run", run),
        patch.object(launcher.KernelConstants, "__init__", noted),
        launches_for("sm_90", multiprocessors=132),
    ):
        yield launches


def launched(launches: Launches, inputs: Inputs, *, backward: bool, **options: Any) -> list[tuple[Any, ...]]:
    """The launches of one call, forward and backward."""
    launches.found.clear()
    launches.names.clear()
    launches.alive.clear()
    leaves = {name: x.detach().requires_grad_(backward) for name, x in inputs.leaves.items()}
    x = inputs.with_leaves(leaves)
    launches.name(**leaves, dout=inputs.dout, dlse=inputs.dlse, **x.mask.tensors())
    if x.rope is not None:
        launches.name(cos=x.rope.cos, sin=x.rope.sin, at_q=x.rope.positions_q, at_k=x.rope.positions_k)

    def of(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
        def noted(*args: Any, **named: Any) -> Any:
            made = function(*args, **named)
            launches.name(**dict(zip(names, made, strict=True)))
            return made

        return noted

    with (
        patch.object(
            results, "of_forward", of(results.of_forward, "out", "lse", "row_max", "row_sum", "residual", "largest")
        ),
        patch.object(results, "of_backward", of(results.of_backward, "dq", "dk", "dv")),
    ):
        returned = attention(x.q, x.k, x.v, **(x.options | options), return_lse=True, backend="triton")
        if backward:
            for address, name in list(launches.names.items()):  # tensors of the forward may have moved
                if name.startswith("scratch"):
                    del launches.names[address]
            torch.autograd.grad(returned[:2], list(leaves.values()), (inputs.dout, inputs.dlse))
    return list(launches.found)


def compare(
    launches: Launches, first: Inputs, then: Inputs, *, backward: bool, like: bool = True, **options: Any
) -> bool:
    """Whether the call of `then`, after two of `first`, was replayed; it must launch the same as without them.

    With `like` the two are of one kind.
    """
    launches.forget()
    for _ in range(2):
        launched(launches, first, backward=backward)
    replays = 0
    again = replay.Replay.run

    def counted(self: Any, given: Any, addresses: Any) -> None:
        nonlocal replays
        replays += 1
        again(self, given, addresses)

    with patch.object(replay.Replay, "run", counted):
        found = launched(launches, then, backward=backward, **options)
    launches.forget()
    expected = launched(launches, then, backward=backward, **options)
    if found != expected:
        differing = [f"{a}\n{b}" for a, b in zip(found, expected, strict=False) if a != b]
        raise AssertionError(f"launched, and expected: {len(found)}, {len(expected)}\n" + "\n".join(differing[:1]))
    if not like and replays:
        raise AssertionError("replayed a call of another kind")
    return replays > 0


def of_one_kind(launches: Launches) -> tuple[int, int]:
    """(replayed, all) of the shared cases, with other tensors of the same kinds."""
    replayed = total = 0
    for case in testing.CASES:
        for dtype in (torch.bfloat16, torch.float32):
            for backward in (False, True):
                given = replace(case, dtype=dtype)
                first, then = make_inputs(given), make_inputs(replace(given, seed=7))
                replayed += compare(launches, first, then, backward=backward)
                total += 1
    return replayed, total


def partly_compiled(launches: Launches, kernel: str) -> None:
    """Check that a call is not partly replayed if one of its kernels is not yet compiled, as in another thread."""
    inputs = make_inputs(PLAIN)
    launches.forget()
    expected = launched(launches, inputs, backward=True)
    launches.forget(kernel)
    for _ in range(2):  # the first call is recorded
        found = launched(launches, inputs, backward=True)
        if found != expected:
            raise AssertionError(f"{kernel}: launched {len(found)}, of {len(expected)}")


PLAIN = Case(batch=1, seqlen_q=64, seqlen_k=64, head_dim=64, causal="bottom_right", rope="half", dtype=torch.bfloat16)


def of_other_kinds(launches: Launches) -> None:
    """Check that no other call is replayed if shapes, strides, addresses, options or settings differ."""
    first = make_inputs(PLAIN)
    then = make_inputs(replace(PLAIN, seed=7))
    for name, changed in {
        "seqlen_q": {"seqlen_q": 65},
        "seqlen_k": {"seqlen_k": 65},
        "batch": {"batch": 2},
        "heads": {"nheads_q": 6},
        "one head": {"nheads_q": 1, "nheads_kv": 1},
        "head_dim": {"head_dim": 32},
        "head_dim_v": {"head_dim_v": 32},
        "dtype": {"dtype": torch.float16},
        "mask": {"causal": None},
        "alignment of the mask": {"causal": "top_left", "seqlen_k": 96},
        "window": {"window": (3, 0)},
        "padding": {"padding": "right"},
        "pairs": {"rope": "interleaved"},
        "rotary_dim": {"rotary_dim": 16},
        "tables": {"rope_tables": "per_batch"},
        "positions": {"rope_positions": True},
        "scale": {"scale": 0.5},
        "softcap": {"softcap": 3.0},
        "sinks": {"sinks": True},
        "dropout": {"dropout_p": 0.5},
    }.items():
        for a, b in ((first, make_inputs(replace(PLAIN, **changed))), (make_inputs(replace(PLAIN, **changed)), then)):
            _told(name, partial(compare, launches, a, b, backward=True, like=False))
    q, k, v = then.q, then.k, then.v
    assert then.rope is not None
    for name, inputs in {
        "q elsewhere": replace(then, q=_shifted(q)),
        "v elsewhere": replace(then, v=_shifted(v)),
        "q by token": replace(then, q=q.transpose(1, 2).contiguous().transpose(1, 2)),
        "k with gaps": replace(then, k=torch.cat((k, k), 3)[..., : k.shape[3]]),
        "odd gaps": replace(then, k=torch.cat((k, k[..., :3]), 3)[..., : k.shape[3]]),
        "rows that overlap": replace(then, v=v[:, :, :1].expand(v.shape)),
        "k and v at one place": replace(then, v=k),
        "tables elsewhere": replace(then, rope=replace(then.rope, cos=_shifted(then.rope.cos))),
    }.items():
        for backward in (False, True):
            for a, b in ((first, inputs), (inputs, then)):
                _told(name, partial(compare, launches, a, b, backward=backward, like=False))
    # The forwards of these are of the same kind.
    elsewhere = replace(then, dout=_shifted(then.dout))
    _told("dout elsewhere", partial(compare, launches, first, elsewhere, backward=True))
    _told("dout elsewhere", partial(compare, launches, elsewhere, then, backward=True))
    _told("order of sums", partial(compare, launches, first, then, backward=True, deterministic=False))
    for backward in (False, True):
        _told("largest", partial(compare, launches, first, then, backward=backward, like=False, return_max=True))


def _shifted(x: Tensor) -> Tensor:
    """The same tensor at an address that is not a multiple of 16."""
    return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)


def _told(name: str, run: Callable[[], object]) -> None:
    try:
        run()
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None


if __name__ == "__main__":
    with hopper() as launches:
        replayed, total = of_one_kind(launches)
        of_other_kinds(launches)
        for kernel in ("qk_prologue", "attention_fwd", "attention_bwd_rows", "attention_bwd_dq"):
            partly_compiled(launches, kernel)
    print(f"{replayed} of {total} calls replayed")
