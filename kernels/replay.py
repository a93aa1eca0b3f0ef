"""Replay a call: repeat its launches, with other tensors in place of its own.

The launches of a call depend on shapes, strides, dtypes, alignment and options, not on the contents of tensors. While
:func:`recorded` runs a call, its launches are noted, and so are the tensors that launchers make for each other by
:func:`scratch`. Each tensor that a launch takes must be one of these, or have the address of one given to the call.
Then the launches are all that the call did, and :class:`Replay` repeats them for tensors of the same kinds. No tensor
is kept, only its position in the arguments.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel

from fusedattn.kernels.start import start_of

ALIGNMENT = 256  # bytes, of scratch tensors: the alignment of an allocator's memory


class _Recording(threading.local):
    """This thread's notes: launches as (compiled kernel, grid, arguments), and scratch tensors; None: not recording."""

    launches: list[tuple[CompiledKernel, tuple[int, int, int], tuple[Any, ...]]] | None = None
    made: list[torch.Tensor] | None = None


_recording = _Recording()


def scratch(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised contiguous tensor on the device of `like`, which a launch fills for a later one of the call."""
    x = like.new_empty(shape, dtype=dtype)
    if _recording.made is not None:
        _recording.made.append(x)
    return x


def note(compiled: CompiledKernel, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
    """Record a launch, with all arguments of the kernel in order."""
    if _recording.launches is not None:
        _recording.launches.append((compiled, grid, arguments))


def give_up() -> None:
    """Stop recording, because the call does something besides its launches."""
    _recording.launches = _recording.made = None


def recorded(call: Callable[[], object], given: Sequence[torch.Tensor]) -> "Replay | None":
    """Run `call`, which takes and fills only `given` tensors, and return its replay, or None if it has none."""
    _recording.launches, _recording.made = [], []
    try:
        call()
        launches, made = _recording.launches, _recording.made
    finally:
        _recording.launches = _recording.made = None
    if not launches or made is None:
        return None
    try:
        return Replay(launches, made, given)
    except _UnknownTensorError:
        return None


class _UnknownTensorError(Exception):
    """A launch takes a tensor that is neither given nor made."""


class Replay:
    """The launches of a call, for tensors like those it was given.

    Kernels get addresses, and strides beside them as numbers: if two tensors share an address, either serves.
    """

    def __init__(
        self,
        launches: list[tuple[CompiledKernel, tuple[int, int, int], tuple[Any, ...]]],
        made: list[torch.Tensor],
        given: Sequence[torch.Tensor],
    ) -> None:
        # By address: the expression of that address, and the expression that a descriptor takes in place of a tensor.
        places = {x.data_ptr(): (f"addresses[{i}]", f"given[{i}]") for i, x in reversed(list(enumerate(given)))}
        self.n_bytes = 0  # of one allocation for all scratch tensors
        for x in made:
            places[x.data_ptr()] = f"scratch + {self.n_bytes}", f"Address(scratch + {self.n_bytes})"
            self.n_bytes += -(-x.numel() * x.itemsize // ALIGNMENT) * ALIGNMENT
        self.steps = [_step(compiled, grid, arguments, places) for compiled, grid, arguments in launches]
        self.kernels = [compiled for compiled, *_ in launches]  # Triton 3.9 unloads kernels without a reference

    def run(self, given: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
        """Launch all, for tensors with their addresses; shapes, strides, dtypes and alignment are as recorded."""
        made = given[0].new_empty(self.n_bytes, dtype=torch.uint8) if self.n_bytes else None
        scratch = 0 if made is None else made.data_ptr()
        driver = triton.runtime.driver.active
        stream = driver.get_current_stream(driver.get_current_device())
        for step in self.steps:
            step(given, addresses, scratch, stream)


_Places = dict[int, tuple[str, str]]


def _step(
    compiled: CompiledKernel, grid: tuple[int, int, int], arguments: tuple[Any, ...], places: _Places
) -> Callable[..., object]:
    """A launch, as a function of (given, addresses, scratch, stream), which looks up nothing else."""
    start, before = start_of(compiled)
    constants: dict[str, Any] = {"start": start}
    passed = ["*" + _named(grid, constants), "stream", "*" + _named(before, constants)]
    passed += _elements(arguments, places, constants)
    parameters = ", ".join(("given", "addresses", "scratch", "stream", *(f"{name}={name}" for name in constants)))
    return eval(f"lambda {parameters}: start({', '.join(passed)})", {**constants, "Address": _Address})


def _elements(values: tuple[Any, ...], places: _Places, constants: dict[str, Any]) -> list[str]:
    """The expressions of consecutive values; a stretch of values without tensors is one constant."""
    parts = []
    for depends, stretch in itertools.groupby(values, _has_tensor):
        if depends:
            parts += [_expression(x, places, constants) for x in stretch]
        else:
            parts.append("*" + _named(tuple(stretch), constants))
    return parts


def _expression(value: Any, places: _Places, constants: dict[str, Any]) -> str:
    if isinstance(value, torch.Tensor):
        return _place(value, places)[0]
    if is_descriptor(value):
        attributes = {name: x for name, x in vars(value).items() if name != "base"}
        of_place = type("TilesOfPlace", (_Tiles, type(value)), attributes)
        return f"{_named(of_place, constants)}({_place(value.base, places)[1]})"
    return f"({', '.join(_elements(value, places, constants))},)"


def _named(value: Any, constants: dict[str, Any]) -> str:
    name = f"constant{len(constants)}"
    constants[name] = value
    return name


def _place(x: torch.Tensor, places: _Places) -> tuple[str, str]:
    if x.data_ptr() not in places:
        raise _UnknownTensorError
    return places[x.data_ptr()]


def _has_tensor(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor) or is_descriptor(value)


def is_descriptor(value: Any) -> bool:
    """Whether a value is a tensor descriptor, of Triton or of Gluon."""
    return hasattr(value, "block_shape")


class _Address(int):
    """An address in place of a tensor: a descriptor asks for nothing else."""

    def data_ptr(self) -> int:
        return self


class _Tiles:
    """Part of a descriptor that takes its address alone: its other attributes belong to a subclass."""

    def __init__(self, base: torch.Tensor | _Address) -> None:
        self.base = base
