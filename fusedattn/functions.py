"""Users' ``@triton.jit`` functions, registered under names because an op takes a string but no function; their args."""

from __future__ import annotations

import pickle
import pkgutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_FUNCTIONS: dict[str, Any] = {}
_KEYS: dict[int, str] = {}  # by id, which no other object can get: `_FUNCTIONS` keeps the function alive
_NAMES: Counter[str] = Counter()  # how many functions have each name


def register(function: Any, name: str = "function") -> str:
    """The key under which :func:`registered` finds ``function``; the same object always has the same key.

    Call this outside compiled code: ``torch.compile`` cannot look into a ``@triton.jit`` function. If no other function
    has the same name, the key is the same in every process, so that saved programs can hold it.

    Raises:
        TypeError: ``function`` is not a ``@triton.jit`` function; the message calls it ``name``.
    """
    key = _KEYS.get(id(function))
    if key is None:
        source = getattr(function, "fn", None)  # compiled and interpreted functions have it
        if not callable(source):
            raise TypeError(f"{name}: got {type(function).__name__}, allowed is a @triton.jit function")
        of_source = f"{source.__module__}.{source.__qualname__}"
        key = f"{of_source}#{_NAMES[of_source]}"
        _NAMES[of_source] += 1
        _KEYS[id(function)] = key
        _FUNCTIONS[key] = function
    return key


def registered(key: str) -> Any:
    """The function that :func:`register` returned ``key`` for; KeyError if there is none."""
    if key not in _FUNCTIONS:
        raise KeyError(
            f"function: got {key!r}, allowed are functions of the masks and ScoreMods that this process has made; "
            "make it before a saved program calls it"
        )
    return _FUNCTIONS[key]


@dataclass(frozen=True)
class Importable:
    """A ``@triton.jit`` function that ``copy`` copies as the same object and ``pickle`` stores by its name."""

    function: Any

    def __deepcopy__(self, memo: Any) -> Importable:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        name = f"{self.function.fn.__module__}:{self.function.fn.__qualname__}"
        try:
            found = pkgutil.resolve_name(name)
        except (AttributeError, ImportError, ValueError):
            found = None
        if found is not self.function:
            raise pickle.PicklingError(
                f"function: got {name}, allowed in a mask or a ScoreMod that is pickled are functions at the top of a "
                "module, under their own names"
            )
        return _imported, (name,)


def _imported(name: str) -> Importable:
    return Importable(pkgutil.resolve_name(name))


def rebuilt(make: Callable[..., Any], *arguments: Any) -> Any:
    """Call `make` with each :class:`Importable` argument unwrapped; for ``__reduce__``."""
    return make(*(x.function if isinstance(x, Importable) else x for x in arguments))


def check_args(args: tuple[Any, ...]) -> None:
    """Raise TypeError unless ``args`` is a tuple of tensors, ints and floats."""
    if not isinstance(args, tuple):
        raise TypeError(f"args: got {type(args).__name__}, allowed is a tuple of tensors, ints and floats")
    for i, x in enumerate(args):
        if not isinstance(x, (Tensor, int, float)):
            raise TypeError(f"args[{i}]: got {type(x).__name__}, allowed are tensors, ints and floats")


@dataclass(frozen=True)
class LearnedArg:
    """Placeholder for a tensor with a gradient, which an op takes as an argument of its own."""

    n_entries: int


def written(args: tuple[Any, ...], learned: Collection[int] = ()) -> str:
    """Serialise the numbers of ``args``, each followed by a comma: an op takes no mixed tuple.

    A tensor becomes an empty string, and a tensor that is `learned` becomes ``@`` and its number of entries.
    """
    return "".join(f"{_written(x)}," for x in without_learned(args, learned))


def _written(x: Any) -> str:
    if isinstance(x, LearnedArg):
        return f"@{x.n_entries}"
    return "" if isinstance(x, Tensor) else repr(x)


def read(numbers: str, tensors: Iterator[Tensor]) -> tuple[Any, ...]:
    """The args that :func:`written` serialised; their tensors come from `tensors`, in order."""
    return tuple(_number(number) if number else next(tensors) for number in numbers.split(",")[:-1])


def _number(text: str) -> int | float | LearnedArg:
    if text.startswith("@"):
        return LearnedArg(int(text[1:]))
    return int(text) if text.lstrip("-").isdigit() else float(text)


def without_learned(args: tuple[Any, ...], learned: Collection[int]) -> tuple[Any, ...]:
    """``args`` with a :class:`LearnedArg` in place of each tensor whose index is in `learned`."""
    return tuple(LearnedArg(x.numel()) if i in learned else x for i, x in enumerate(args))


def with_learned(args: tuple[Any, ...], learned: Tensor | None) -> tuple[Any, ...]:
    """``args`` with each :class:`LearnedArg` replaced by its part of `learned`, ``(n,)``."""
    if learned is None:
        return args
    parts = iter(learned.split([x.n_entries for x in args if isinstance(x, LearnedArg)]))
    return tuple(next(parts) if isinstance(x, LearnedArg) else x for x in args)


def readers_of(readers: str, args: tuple[Any, ...]) -> list[tuple[int, int, Any, Any]]:
    """Parse ``ScoreMod.readers``: (first entry, number of entries, index, derivative) of each."""
    found = []
    for reader in filter(None, readers.split(";")):
        arg, index, derivative = reader.split(" ")
        i = int(arg)
        start = sum(x.n_entries for x in args[:i] if isinstance(x, LearnedArg))
        found.append((start, args[i].n_entries, registered(index), registered(derivative)))
    return found


def check_eager(eager: Any) -> None:
    """Raise TypeError unless ``eager`` is a function or None."""
    if eager is not None and not callable(eager):
        raise TypeError(f"eager: got {type(eager).__name__}, allowed are a function of torch and None")


def mapped_args(args: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    """``args`` with ``change(x)`` in place of each tensor."""
    return tuple(change(x) if isinstance(x, Tensor) else x for x in args)


def tensors_of(args: tuple[Any, ...], owner: str) -> dict[str, Tensor]:
    """The tensors among ``args``, by name."""
    return {f"{owner}(args[{i}])": x for i, x in enumerate(args) if isinstance(x, Tensor)}
