"""Calls with a cache that must be refused, by name: the error, and how its message begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedattn import KVCache, Rope, attention, caches, masks
from tests.helpers.cache_model import device_of
from tests.helpers.cached_eager import NUMBERS
from tests.helpers.cached_memory import assert_same_bytes, bytes_of
from tests.helpers.cached_problem import POSITIONS, CachedProblem, Numbers


class Refusal(NamedTuple):
    """A call that must raise.

    Attributes:
        change: the arguments of ``append(cache, k, v)`` or ``attention(q, cache=)`` that are wrong.
        applies: to which problems.
        of_values: only the numbers in tensors are wrong; a GPU does not wait for them.
    """

    change: Callable[[CachedProblem, KVCache, Tensor], dict[str, Any]]
    error: type[Exception]
    start: str
    applies: Callable[[CachedProblem], bool] = lambda p: True
    of_values: bool = False


def _ints(*x: int) -> Tensor:
    return torch.tensor(x, dtype=torch.int32)


def _tokens(p: CachedProblem, n: int) -> dict[str, Tensor]:
    """Another `n` tokens for each sequence."""
    return {
        name: torch.zeros(p.batch, p.nheads_kv, n, width, dtype=p.dtype)
        for name, width in (("k", p.head_dim), ("v", p.head_dim_v))
        if name == "k" or not p.latent
    }


def _has_room(p: CachedProblem) -> bool:
    return p.ring is not None or max(p.lengths) < p.capacity


def _is_paged(p: CachedProblem) -> bool:
    return p.layout.startswith("pages")


def _rotates(p: CachedProblem) -> bool:
    return p.rope == "appending" and _has_room(p)


def _short(p: CachedProblem, rows: int) -> Rope:
    return Rope.from_theta(p.rotary_dim, rows)


def _without_page(c: KVCache) -> KVCache:
    assert c.block_table is not None
    return replace(c, block_table=torch.full_like(c.block_table, c.k.shape[0]))


def _with_other_scales(c: KVCache) -> KVCache:
    assert c.v_scale is not None
    return replace(c, v_scale=c.v_scale.clone())


# The last argument of `change` is k, of one new token for each sequence, or q.
APPENDED = {
    "too many tokens": Refusal(
        lambda p, c, k: _tokens(p, p.capacity + 1 - max(p.lengths)), ValueError, "lengths: got",
        lambda p: p.ring is None, of_values=True,
    ),
    "tokens that are not counted": Refusal(
        lambda p, c, k: _tokens(p, min(p.lengths) + 1) | {"counted": True}, ValueError, "lengths: got", of_values=True,
    ),
    "pages that are not there": Refusal(
        lambda p, c, k: {"cache": _without_page(c)}, ValueError, "block_table: got rows",
        lambda p: _is_paged(p) and _has_room(p), of_values=True,
    ),
    "a row that is not there": Refusal(
        lambda p, c, k: {"cache": replace(c, rows=_ints(*[-1] * p.batch))}, ValueError, "rows: got rows -1",
        lambda p: not _is_paged(p) and _has_room(p), of_values=True,
    ),
    "a row twice": Refusal(
        lambda p, c, k: {"cache": replace(c, rows=_ints(*[1] * p.batch))}, ValueError, "rows: got [1, 1",
        lambda p: not _is_paged(p) and _has_room(p) and p.batch > 1, of_values=True,
    ),
    "keys of another dtype": Refusal(
        lambda p, c, k: {"k": k.double()}, TypeError, "k: got torch.float64", lambda p: p.form == NUMBERS,
    ),
    "keys that are integers": Refusal(lambda p, c, k: {"k": k.int()}, TypeError, "k: got torch.int32"),
    "keys of other heads": Refusal(
        lambda p, c, k: {"k": torch.cat((k, k), dim=1)}, ValueError, "k: got shape",
    ),
    "values of other tokens": Refusal(
        lambda p, c, k: {"v": _tokens(p, 2)["v"]}, ValueError, "v: got shape", lambda p: not p.latent,
    ),
    "no values": Refusal(lambda p, c, k: {"v": None}, ValueError, "v: got None", lambda p: not p.latent),
    "values beside latent keys": Refusal(lambda p, c, k: {"v": k}, ValueError, "v: got a tensor", lambda p: p.latent),
    "scales of latent values": Refusal(
        lambda p, c, k: {"cache": _with_other_scales(c)}, ValueError, "v_scale: got memory",
        lambda p: p.latent and p.form != NUMBERS and not p.form.endswith("given"),
    ),
    "keys that are learned": Refusal(
        lambda p, c, k: {"k": k.requires_grad_()}, NotImplementedError, "k: got requires_grad=True",
    ),
    "packed tokens that are padded": Refusal(
        lambda p, c, k: {"cu_seqlens": _ints(*range(p.batch + 1))}, ValueError, "k: got shape",
    ),
    "offsets of other sequences": Refusal(
        lambda p, c, k: _packed(p) | {"cu_seqlens": _ints(0, p.batch)}, ValueError, "cu_seqlens: got shape",
        lambda p: p.batch > 1,
    ),
    "offsets that decrease": Refusal(
        lambda p, c, k: _packed(p) | {"cu_seqlens": _ints(0, p.batch, *[1] * (p.batch - 1))}, ValueError,
        "cu_seqlens: got [0,", lambda p: p.batch > 1, of_values=True,
    ),
    "offsets behind the tokens": Refusal(
        lambda p, c, k: _packed(p) | {"cu_seqlens": _ints(*[0] * p.batch, p.batch + 1)}, ValueError,
        "cu_seqlens: got [0,", of_values=True,
    ),
    "too small a longest length": Refusal(
        lambda p, c, k: _packed(p) | {"max_seqlen": 0}, ValueError, "max_seqlen: got 0", of_values=True,
    ),
    "a longest length of padded tokens": Refusal(
        lambda p, c, k: {"max_seqlen": 1}, ValueError, "max_seqlen: got 1 without cu_seqlens",
    ),
    "tables that end before a key": Refusal(
        lambda p, c, k: {"cache": replace(c, rope=_short(p, max(p.lengths)))}, ValueError, "rope: got tables",
        _rotates, of_values=True,
    ),
    "a key at a position outside the tables": Refusal(
        lambda p, c, k: {"cache": replace(c, rope=_short(p, POSITIONS).at(None, _ints(POSITIONS)))}, ValueError,
        "rope.positions_k: got positions", _rotates, of_values=True,
    ),
    "positions of other keys": Refusal(
        lambda p, c, k: {"cache": replace(c, rope=_short(p, POSITIONS).at(None, _ints(1, 2)))}, ValueError,
        "cache.rope.positions_k: got shape", _rotates,
    ),
}  # fmt: skip

ATTENDED = {
    "a sequence longer than the cache": Refusal(
        lambda p, c, q: {"cache": replace(c, lengths=c.lengths + p.capacity + 1)}, ValueError, "lengths: got",
        lambda p: p.ring is None, of_values=True,
    ),
    "a negative length": Refusal(
        lambda p, c, q: {"cache": replace(c, lengths=torch.full_like(c.lengths, -1))}, ValueError, "lengths: got",
        of_values=True,
    ),
    "pages that are gone": Refusal(
        lambda p, c, q: {"cache": _without_page(c)}, ValueError, "block_table: got rows",
        lambda p: _is_paged(p) and max(p.lengths) > 0, of_values=True,
    ),
    "a row that is gone": Refusal(
        lambda p, c, q: {"cache": replace(c, rows=_ints(*[c.k.shape[0]] * p.batch))}, ValueError, "rows: got rows",
        lambda p: not _is_paged(p), of_values=True,
    ),
    "a window that was overwritten": Refusal(
        lambda p, c, q: {"mask": masks.window(p.capacity - c.n_sinks, 0)}, ValueError, "cache: got room for",
        lambda p: p.ring is not None,
    ),
    "no splits": Refusal(lambda p, c, q: {"num_splits": 0}, ValueError, "num_splits: got 0"),
    "splits of a bool": Refusal(lambda p, c, q: {"num_splits": True}, TypeError, "num_splits: got bool"),
    "a mask of other keys": Refusal(
        lambda p, c, q: {"mask": torch.ones(1, 1, 1, p.capacity + 1, dtype=torch.bool)}, ValueError, "mask: boolean(m)",
    ),
    "a tree of other queries": Refusal(
        lambda p, c, q: {"mask": masks.tree(torch.ones(3, 3, dtype=torch.bool))}, ValueError, "mask: tree(m)",
    ),
    "queries of another head_dim": Refusal(
        lambda p, c, q: {"q": torch.cat((q, q), dim=-1)}, ValueError, "cache: got head_dim",
    ),
    "queries of another batch": Refusal(lambda p, c, q: {"q": torch.cat((q, q))}, ValueError, "cache: got"),
    "queries of another dtype": Refusal(
        lambda p, c, q: {"q": q.double()}, TypeError, "cache: got torch.", lambda p: p.form == NUMBERS,
    ),
    "heads that do not divide": Refusal(
        lambda p, c, q: {"q": torch.cat((q, q[:, :1]), dim=1)}, ValueError, "q, cache: got nheads_q",
        lambda p: p.nheads_kv > 1,
    ),
    "keys beside the cache": Refusal(lambda p, c, q: {"k": q}, ValueError, "k, v: got tensors together with cache"),
    "queries that are learned": Refusal(
        lambda p, c, q: {"q": q.requires_grad_()}, NotImplementedError, "attention cannot run on backend",
    ),
    "a rotation of rotated keys": Refusal(
        lambda p, c, q: {"rope": p.rotation("cpu")}, ValueError, "rope: got tables for a cache",
        lambda p: p.rope == "appending",
    ),
    "queries before the first key": Refusal(
        lambda p, c, q: {"q": q.expand(-1, -1, min(p.lengths) + 1, -1)}, ValueError, "rope.positions_q: got None",
        lambda p: p.rope == "appending", of_values=True,
    ),
    "tables that end before a query": Refusal(
        lambda p, c, q: {"rope": _short(p, max(p.lengths) - 1)}, ValueError, "rope: got tables",
        lambda p: p.rope == "reading" and p.ring is None and max(p.lengths) > 0, of_values=True,
    ),
    "a query at a position outside the tables": Refusal(
        lambda p, c, q: {"cache": replace(c, rope=p.rotation("cpu").at(_ints(-1), None))}, ValueError,
        "rope.positions_q: got positions", lambda p: p.rope == "appending", of_values=True,
    ),
}  # fmt: skip

WRONG = APPENDED | ATTENDED


def _packed(p: CachedProblem) -> dict[str, Tensor]:
    """One new token for each sequence, packed."""
    flat = {name: x.transpose(1, 2).flatten(0, 1) for name, x in _tokens(p, 1).items()}
    return flat | {"cu_seqlens": _ints(*range(p.batch + 1))}


def check_refused(problem: CachedProblem, backend: str) -> None:
    """Raise AssertionError unless the call raises the error, with all bytes of the cache as before."""
    assert problem.wrong is not None
    refusal, device = WRONG[problem.wrong], device_of(backend)
    if refusal.of_values and device != "cpu":
        return
    cache, numbers = problem.empty("cpu"), Numbers(problem)
    numbers.append(cache, backend)
    one = torch.zeros(problem.batch, problem.nheads_q, 1, problem.head_dim, dtype=problem.dtype)
    if problem.wrong in APPENDED:
        given = {"cache": cache, **_tokens(problem, 1)}
        given |= refusal.change(problem, cache, given["k"])
    else:
        given = {"q": one, "cache": cache} | refusal.change(problem, cache, one)
    before = bytes_of(given["cache"])
    raised: Exception | None = None
    try:
        caches.append(**given, backend=backend) if problem.wrong in APPENDED else attention(**given, backend=backend)
    except refusal.error as error:
        raised = error
    assert raised is not None, f"{problem.wrong}: not refused"
    assert str(raised).startswith(refusal.start), f"{problem.wrong}: {raised}"
    assert_same_bytes(given["cache"], before, f"{problem.wrong}: the cache has changed")
