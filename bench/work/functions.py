"""The other attention functions to measure for each case: as they are, or after a rotation of q and k."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from bench.work.libraries import LIBRARIES, Rotation, is_installed, liger_rope
from fusedattn.rope import Rope
from fusedattn.testing import peers
from fusedattn.testing.cases import Case
from fusedattn.testing.peers import PEERS, Peer


def choose(names: Iterable[str]) -> dict[str, Peer]:
    """The functions of these names, by default all that are installed.

    Args:
        names: of :data:`fusedattn.testing.peers.PEERS` or :data:`bench.work.libraries.LIBRARIES`, or
            ``package.module:function``.

    Raises:
        ValueError, TypeError, ImportError: a name is none of these, or importing it raises.
    """
    names = list(names)
    if not names:
        return PEERS | {name: function for name, function in LIBRARIES.items() if is_installed(name)}
    return dict((name, LIBRARIES[name]) if name in LIBRARIES else peers.find(name) for name in names)


def missing() -> list[str]:
    """The names of known libraries that are not installed."""
    return [name for name in (*LIBRARIES, "liger") if not is_installed(name)]


def for_case(case: Case, functions: Mapping[str, Peer], *, compiled: bool) -> dict[str, Peer]:
    """The contestants of a case by name; with RoPE, each function after each available rotation."""
    if case.rope is None:
        return dict(functions)
    rotations: dict[str, Rotation] = {"eager": Rope.rotate}
    if compiled:
        rotations = {"compiled": _compiled_rope, **rotations}
    if is_installed("liger"):
        rotations = {"liger": liger_rope, **rotations}
    return {
        f"{name} after {kind} rope": functools.partial(_after_rope, rotate, function)
        for name, function in functions.items()
        for kind, rotate in rotations.items()
    }


def _after_rope(rotate: Rotation, function: Peer, q: Tensor, k: Tensor, v: Tensor, *, rope: Rope, **others: Any) -> Any:
    return function(*rotate(rope, q, k), v, rope=None, **others)


def _compiled_rope(rope: Rope, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return _compiled()(rope, q, k)


@functools.cache
def _compiled() -> Rotation:
    return torch.compile(Rope.rotate, dynamic=False)
