"""What caches refuse: every message names the argument, and nothing is written before it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import KVCache, Rope, attention, attention_varlen, caches, call_checks, masks
from tests.helpers.cache_model import CACHED, cache_in, device_of

HEADS, DIM, DIM_V = 2, 16, 8

backends = pytest.mark.parametrize("backend", CACHED)


def ints(*x: int, **options: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.int32, **options)


def memory(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


K, V, LENGTHS = memory(3, HEADS, 8, DIM), memory(3, HEADS, 8, DIM_V), ints(0, 0)
CODES = {"k": K.to(torch.int8), "v": V.to(torch.int8)}
PACKED = {"k": memory(3, HEADS, 8, 8, dtype=torch.uint8), "v": memory(3, HEADS, 8, 4, dtype=torch.uint8)}
SCALE = memory(3, HEADS, 8, 1)
SCALES = {"k_scale": SCALE, "v_scale": SCALE}

# Arguments of KVCache besides those above, the error, and how its message begins.
BUILT: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "k of three dimensions": ({"k": K[0]}, ValueError, "k: got torch.float32 (2, 8, 16)"),
    "k is no tensor": ({"k": 3}, ValueError, "k: got int"),
    "k of ints": ({"k": K.int(), "v": V.int()}, TypeError, "k: got torch.int32"),
    "k without features": ({"k": K[..., :0]}, ValueError, "k: got head_dim 0"),
    "features apart": ({"k": K.mT.contiguous().mT}, ValueError, "k: got strides (256, 128, 1, 8)"),
    "v apart": ({"v": V.mT.contiguous().mT}, ValueError, "v: got strides (128, 64, 1, 8)"),
    "v of other slots": ({"v": V[:, :, 1:]}, ValueError, "v: got torch.float32 (3, 2, 7, 8)"),
    "v of another dtype": ({"v": V.half()}, ValueError, "v: got torch.float16"),
    "v elsewhere": ({"v": V.to("meta")}, ValueError, "v: got torch.float32 (3, 2, 8, 8) on meta"),
    "lengths of int64": ({"lengths": LENGTHS.long()}, TypeError, "lengths: got torch.int64 (2,)"),
    "lengths of two dimensions": ({"lengths": LENGTHS[None]}, ValueError, "lengths: got shape (1, 2)"),
    "too many sequences": ({"lengths": ints(0, 0, 0, 0)}, ValueError, "k: got 3 rows, allowed are batch = 4"),
    "lengths elsewhere": ({"lengths": LENGTHS.to("meta")}, ValueError, "lengths: got device meta"),
    "rows of a list": ({"rows": [0, 1]}, TypeError, "rows: got list"),
    "rows of another batch": ({"rows": ints(0)}, ValueError, "rows: got shape (1,)"),
    "a table of one dimension": ({"block_table": ints(0, 1)}, ValueError, "block_table: got shape (2,)"),
    "a table of int64": ({"block_table": ints(0, 1)[:, None].long()}, TypeError, "block_table: got torch.int64"),
    "a table of columns": (
        {"block_table": ints(0, 1, 2, 0).view(2, 2).T}, ValueError, "block_table: got strides (1, 2)",
    ),
    "a table and rows": (
        {"block_table": ints(0, 1)[:, None], "rows": ints(0, 1)}, ValueError, "rows: got a tensor together with",
    ),
    "padding of another batch": ({"left_padding": ints(1)}, ValueError, "left_padding: got shape (1,)"),
    "a ring without room": (
        {"k": K[:, :, :0], "v": V[:, :, :0], "overwrites": True}, ValueError, "overwrites: got True for a capacity of",
    ),
    "sinks without a ring": ({"n_sinks": 1}, ValueError, "n_sinks: got sinks"),
    "sinks and padding": (
        {"n_sinks": 1, "overwrites": True, "left_padding": LENGTHS}, ValueError, "n_sinks: got sinks",
    ),
    "nothing but sinks": ({"n_sinks": 8, "overwrites": True}, ValueError, "n_sinks: got 8, allowed are 0 .. 7"),
    "fewer than no sinks": ({"n_sinks": -1, "overwrites": True}, ValueError, "n_sinks: got -1"),
    "rope of a tensor": ({"rope": K}, TypeError, "rope: got Tensor"),
    "rope too wide": ({"rope": Rope.from_theta(18, 8)}, ValueError, "rope: got tables for rotary_dim 18"),
    "rope of another batch": (
        {"rope": Rope(torch.ones(3, 8, 4), torch.ones(3, 8, 4))}, ValueError, "rope: got tables for batch 3",
    ),
    "codes without scales": (CODES, ValueError, "k_scale: got None for a cache of torch.int8"),
    "codes with one scale": (CODES | {"k_scale": SCALE}, ValueError, "v_scale: got None for a cache of torch.int8"),
    "numbers with scales": (SCALES, ValueError, "k_scale: got a tensor for a cache of torch.float32"),
    "scales of float64": (CODES | SCALES | {"v_scale": SCALE.double()}, TypeError, "v_scale: got torch.float64"),
    "scales of other slots": (CODES | SCALES | {"v_scale": SCALE[:, :, 1:]}, ValueError, "v_scale: got shape"),
    "groups of 8 bits": (
        CODES | SCALES | {"k_scale": SCALE.expand(3, HEADS, 8, 2)}, ValueError, "k_scale: got shape (3, 2, 8, 2)",
    ),
    "groups that do not divide": (
        PACKED | SCALES | {"k_scale": memory(3, HEADS, 8, 3)}, ValueError, "k_scale: got shape (3, 2, 8, 3)",
    ),
    "groups apart": (
        PACKED | SCALES | {"k_scale": memory(3, HEADS, 2, 8).mT}, ValueError, "k_scale: got shape (3, 2, 8, 2)",
    ),
    "given scales of 4 bits": (
        PACKED | SCALES | {"k_scale": SCALE[:, :, 0, 0]}, ValueError, "k_scale: got shape (3, 2)",
    ),
    "given scales of other heads": (
        CODES | SCALES | {"v_scale": memory(3, 1)}, ValueError, "v_scale: got shape (3, 1)",
    ),
}  # fmt: skip


def message(start: str) -> str:
    return "^" + re.escape(start)


@pytest.mark.parametrize("name", BUILT)
def test_building(name):
    changed, error, start = BUILT[name]
    with pytest.raises(error, match=message(start)):
        KVCache(**{"k": K, "v": V, "lengths": LENGTHS} | changed)


@pytest.mark.parametrize(
    ("options", "error", "start"),
    [
        ({"dtype": torch.int32}, TypeError, "k: got torch.int32"),
        ({"dtype": torch.float32, "group_size": 16}, ValueError, "group_size: got 16 for torch.float32"),
        ({"dtype": torch.uint8, "group_size": 3}, ValueError, "group_size: got 3 for torch.uint8, head_dim 16"),
        ({"dtype": torch.uint8, "group_size": 0}, ValueError, "group_size: got 0"),
        ({"dtype": torch.uint8, "group_size": 1}, ValueError, "group_size: got 1"),
        ({"dtype": torch.uint8, "group_size": 32}, ValueError, "group_size: got 32"),
        (
            {"dtype": torch.uint8, "head_dim_v": 24, "group_size": 16},
            ValueError,
            "group_size: got 16 for torch.uint8, head_dim 16 and head_dim_v 24, allowed are None and, for torch.uint8, "
            "powers of two from 2 on that divide both",
        ),
        ({"dtype": torch.uint8, "head_dim_v": 9}, ValueError, "head_dim, head_dim_v: got 16 and 9"),
        ({"dtype": torch.int8, "group_size": 8}, ValueError, "group_size: got 8 for torch.int8"),
        ({"dtype": torch.float32, "lengths": ints(0)}, ValueError, "left_padding: got shape (2,)"),
    ],
)
def test_allocating(options, error, start):
    with pytest.raises(error, match=message(start)):
        KVCache.contiguous(2, HEADS, 8, DIM, left_padding=LENGTHS, **options)


def test_allocating_pages():
    with pytest.raises(TypeError, match=message("block_table: got torch.int64")):
        KVCache.paged(torch.zeros(2, 2, dtype=torch.int64), 4, 16, HEADS, DIM, dtype=torch.float32)


def of(device: str, **options: Any) -> KVCache:
    """A cache of 2 sequences with 3 and 5 tokens of 8."""
    cache = cache_in("rows", 2, 8, HEADS, DIM, DIM_V, device=device, **options)
    cache.lengths.copy_(ints(3, 5))
    return cache


def paged(device: str) -> KVCache:
    cache = cache_in("pages of 16", 2, 32, HEADS, DIM, DIM_V, device=device)
    cache.lengths.copy_(ints(15, 5))
    return cache


Case = tuple[Callable[[KVCache], dict[str, Any]], type[Exception], str]

NEW, NEW_V = memory(2, HEADS, 3, DIM), memory(2, HEADS, 3, DIM_V)
FLAT, FLAT_V = memory(4, HEADS, DIM), memory(4, HEADS, DIM_V)
SHARED = memory(2, HEADS, 8, DIM)
ROPE = Rope.from_theta(DIM, 6)

# What to change in a call of append(cache, NEW, NEW_V), the error, and how its message begins.
APPENDED: dict[str, Case] = {
    "no cache": (lambda c: {"cache": 3}, TypeError, "cache: got int"),
    "no v": (lambda c: {"v": None}, ValueError, "v: got None"),
    "v of features of k": (
        lambda c: {"cache": KVCache(SHARED, SHARED[..., :4], LENGTHS)}, ValueError, "v: got a tensor",
    ),
    "k is no tensor": (lambda c: {"k": [1]}, TypeError, "k: got list, allowed are torch.float16"),
    "k of ints": (lambda c: {"k": NEW.int()}, TypeError, "k: got torch.int32"),
    "k of another dtype": (
        lambda c: {"k": NEW.half()}, TypeError, "k: got torch.float16, allowed is that of the cache",
    ),
    "v of another dtype": (lambda c: {"v": NEW_V.half()}, TypeError, "v: got torch.float16"),
    "k elsewhere": (lambda c: {"k": NEW.to("meta")}, ValueError, "k: got torch.float32 on meta"),
    "k of other heads": (
        lambda c: {"k": NEW[:, :1]}, ValueError, "k: got shape (2, 1, 3, 16), allowed is (2, 2, 3, 16)",
    ),
    "k of three dimensions": (lambda c: {"k": NEW[0]}, ValueError, "k: got shape (2, 3, 16)"),
    "v of other tokens": (lambda c: {"v": NEW_V[:, :, :2]}, ValueError, "v: got shape (2, 2, 2, 8)"),
    "features apart": (lambda c: {"k": NEW.mT.contiguous().mT}, ValueError, "k: got strides (96, 48, 1, 3)"),
    "k that is learned": (
        lambda c: {"k": NEW.clone().requires_grad_()}, NotImplementedError, "k: got requires_grad=True",
    ),
    "max_seqlen alone": (lambda c: {"max_seqlen": 3}, ValueError, "max_seqlen: got 3 without cu_seqlens"),
    "packed heads": (
        lambda c: {"k": FLAT[:, :1], "v": FLAT_V, "cu_seqlens": ints(0, 1, 4)}, ValueError, "k: got shape (4, 1, 16)",
    ),
    "packed and padded": (lambda c: {"cu_seqlens": ints(0, 1, 4)}, ValueError, "k: got shape (2, 2, 3, 16)"),
    "offsets of int64": (
        lambda c: {"k": FLAT, "v": FLAT_V, "cu_seqlens": ints(0, 1, 4).long()}, TypeError,
        "cu_seqlens: got torch.int64",
    ),
    "offsets of another batch": (
        lambda c: {"k": FLAT, "v": FLAT_V, "cu_seqlens": ints(0, 4)}, ValueError, "cu_seqlens: got shape (2,)",
    ),
    "offsets that decrease": (
        lambda c: {"k": FLAT, "v": FLAT_V, "cu_seqlens": ints(0, 3, 2)}, ValueError, "cu_seqlens: got [0, 3, 2]",
    ),
    "offsets beyond the tokens": (
        lambda c: {"k": FLAT, "v": FLAT_V, "cu_seqlens": ints(0, 3, 5)}, ValueError,
        "cu_seqlens: got [0, 3, 5], allowed begins with 0, does not decrease, and ends with at most total = 4",
    ),
    "longer than max_seqlen": (
        lambda c: {"k": FLAT, "v": FLAT_V, "cu_seqlens": ints(0, 1, 4), "max_seqlen": 2}, ValueError,
        "max_seqlen: got 2, allowed are the longest length, 3, and more",
    ),
    "an unknown backend": (lambda c: {"backend": "cuda"}, ValueError, "backend: got 'cuda'"),
    "too many tokens": (
        lambda c: {"k": memory(2, HEADS, 4, DIM), "v": memory(2, HEADS, 4, DIM_V)}, ValueError,
        "lengths: got 9, allowed are 0 .. 8: the cache is full",
    ),
    "too few counted": (
        lambda c: {"k": memory(2, HEADS, 4, DIM), "v": memory(2, HEADS, 4, DIM_V), "counted": True}, ValueError,
        "lengths: got [3, 5], allowed are those that count the new tokens",
    ),
    "a row that is not there": (lambda c: {"cache": replace(c, rows=ints(0, 4))}, ValueError, "rows: got rows 0 .. 4"),
    "a row twice": (
        lambda c: {"cache": replace(c, rows=ints(1, 1))}, ValueError, "rows: got [1, 1], allowed are different",
    ),
    "tables that are too short": (
        lambda c: {"cache": replace(c, rope=ROPE)}, ValueError, "rope: got tables of 6 rows, allowed are 8 and more",
    ),
    "a position outside the tables": (
        lambda c: {"cache": replace(c, rope=ROPE.at(None, torch.tensor([4, 5, 6])))}, ValueError,
        "rope.positions_k: got positions 4 .. 6",
    ),
    "positions of other tokens": (
        lambda c: {"cache": replace(c, rope=ROPE.at(None, torch.tensor([4, 5])))}, ValueError,
        "cache.rope.positions_k: got shape (2,), allowed are (3,), (1, 3), (2, 3)",
    ),
}  # fmt: skip


WIDE = memory(2, HEADS, 8, DIM + 8)
BYTES, GROUPS = memory(2, HEADS, 8, 32, dtype=torch.uint8), memory(2, HEADS, 8, 4)
INT8 = BYTES.char()
with torch.inference_mode():
    OF_INFERENCE = memory(2, HEADS, 8, DIM)

# Memory in which tokens would overwrite each other: a cache, whether it gets values, and how the message begins.
WRITTEN: dict[str, tuple[KVCache, bool, str]] = {
    "expanded rows": (KVCache(SHARED[:1].expand_as(SHARED), SHARED.clone(), LENGTHS), True, "cache.k: got expanded"),
    "expanded heads": (
        KVCache(SHARED.clone(), SHARED[:, :1].expand_as(SHARED), LENGTHS), True, "cache.v: got expanded memory"
    ),
    "expanded scales": (
        KVCache(**CODES, lengths=LENGTHS, k_scale=SCALE.clone(), v_scale=SCALE[:1].expand_as(SCALE)), True,
        "cache.v_scale: got expanded memory",
    ),
    "the last features of k": (KVCache(WIDE[..., :DIM], WIDE[..., 8:], LENGTHS), True, "v, v_scale: got memory"),
    "k before v": (KVCache(WIDE[..., 8:], WIDE[..., :DIM], LENGTHS), True, "v, v_scale: got memory that keys have"),
    "one tensor of scales": (KVCache(**CODES, lengths=LENGTHS, **SCALES), True, "v, v_scale: got memory that keys"),
    "groups that differ": (
        KVCache(BYTES, BYTES[..., :16], LENGTHS, k_scale=GROUPS, v_scale=GROUPS[..., :1]), False, "v_scale: got memory",
    ),
    "given scales of latent values": (
        KVCache(INT8, INT8[..., :16], LENGTHS, k_scale=SCALE[:2], v_scale=SCALE[:2, :, 0, 0]), False,
        "v_scale: got memory",
    ),
    "memory that is learned": (
        KVCache(SHARED.clone().requires_grad_(), SHARED.clone(), LENGTHS), True, "cache.k: got requires_grad=True",
    ),
    "memory of inference_mode": (KVCache(OF_INFERENCE, SHARED, LENGTHS), True, "cache.k: got a tensor of torch.inf"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_memory_that_cannot_be_appended_to(name):
    cache, has_values, start = WRITTEN[name]
    k, v = (torch.ones(2, HEADS, 1, n) for n in (cache.head_dim, cache.head_dim_v))
    lengths = cache.lengths.clone()
    with pytest.raises((ValueError, NotImplementedError), match=message(start)):
        caches.append(cache, k, v if has_values else None, backend="torch")
    assert torch.equal(cache.lengths, lengths)
    assert not cache.k.any()


@pytest.mark.parametrize("has_values", [True, False])
def test_memory_beside_that_of_keys(has_values):
    """Keys and values that alternate, or lie in the same rows, are no error."""
    both, wide = memory(2, HEADS, 8, 2, DIM), memory(2, HEADS, 8, DIM)
    for k, v in ((both[..., 0, :], both[..., 1, :]), (wide[..., :8], wide[..., 8:])):
        cache = KVCache(k, k[..., :4] if not has_values else v, LENGTHS.clone())
        new = torch.randn(2, HEADS, 3, k.shape[3])
        caches.append(cache, new, 2 * new if has_values else None, backend="torch")
        assert torch.equal(k[:, :, :3], new)
        assert torch.equal(v[:, :, :3], 2 * new if has_values else torch.zeros_like(new))


@pytest.mark.parametrize("name", APPENDED)
def test_appending(name):
    change, error, start = APPENDED[name]
    cache = of("cpu")
    before = cache.k.clone(), cache.v.clone(), cache.lengths.clone()
    with pytest.raises(error, match=message(start)):
        caches.append(**{"cache": cache, "k": NEW, "v": NEW_V} | change(cache))  # type: ignore[arg-type]
    for x, y in zip(before, (cache.k, cache.v, cache.lengths), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@backends
def test_a_page_that_is_not_there(backend):
    """Also for the attention; entries behind the last page are not read."""
    if backend == "triton" and device_of(backend) != "cpu":
        pytest.skip("on a GPU nothing is read")
    cache = paged("cpu")
    assert cache.block_table is not None
    cache.block_table[:, 1] = 99
    q = torch.zeros(2, HEADS, 1, DIM)
    assert attention(q, cache=cache, backend=backend).shape == (2, HEADS, 1, DIM_V)
    with pytest.raises(ValueError, match=message("block_table: got rows")):
        caches.append(cache, NEW, NEW_V, backend=backend)
    assert cache.lengths.tolist() == [15, 5]
    assert cache.k.isnan().all()
    cache.lengths[0] = 17
    with pytest.raises(ValueError, match=message("block_table: got rows")):
        attention(q, cache=cache, backend=backend)


Q = memory(2, 4, 2, DIM)

# What to change in a call of attention(Q, cache=cache), the error, and how its message begins.
ATTENDED: dict[str, Case] = {
    "no cache": (lambda c: {"cache": 3}, TypeError, "cache: got int"),
    "k too": (lambda c: {"k": K}, ValueError, "k, v: got tensors together with cache"),
    "v too": (lambda c: {"v": V}, ValueError, "k, v: got tensors together with cache"),
    "q of three dimensions": (lambda c: {"q": Q[0]}, ValueError, "q: got torch.float32 (4, 2, 16)"),
    "q of ints": (lambda c: {"q": Q.int()}, ValueError, "q: got torch.int32"),
    "q of another dtype": (
        lambda c: {"q": Q.half()}, TypeError, "cache: got torch.float32, allowed are the dtype of q",
    ),
    "q elsewhere": (lambda c: {"q": Q.to("meta"), "backend": "torch"}, ValueError, "cache: got device cpu"),
    "q of another batch": (
        lambda c: {"q": Q[:1]}, ValueError, "cache: got 2 sequences, allowed is the number of q's, 1",
    ),
    "q of another head_dim": (lambda c: {"q": Q[..., :8]}, ValueError, "cache: got head_dim 16"),
    "q with features apart": (lambda c: {"q": Q.mT.contiguous().mT}, ValueError, "q: got strides (128, 32, 1, 2)"),
    "heads that do not divide": (lambda c: {"q": Q[:, :3]}, ValueError, "q, cache: got nheads_q = 3 and nheads_kv = 2"),
    "rope twice": (
        lambda c: {"cache": replace(c, rope=ROPE), "rope": ROPE}, ValueError, "rope: got tables for a cache",
    ),
    "rope too short": (lambda c: {"rope": Rope.from_theta(DIM, 4)}, ValueError, "rope: got tables of 4 rows"),
    "rope of the cache too short": (
        lambda c: {"cache": replace(c, rope=Rope.from_theta(DIM, 4))}, ValueError, "rope: got tables of 4 rows",
    ),
    "positions of other queries": (
        lambda c: {"cache": replace(c, rope=ROPE.at(torch.tensor([1]), None))}, ValueError,
        "cache.rope.positions_q: got shape (1,), allowed are (2,), (1, 2), (2, 2)",
    ),
    "a position outside the tables": (
        lambda c: {"cache": replace(c, rope=ROPE.at(torch.tensor([1, 6]), None))}, ValueError,
        "rope.positions_q: got positions 1 .. 6",
    ),
    "a window that was overwritten": (
        lambda c: {"cache": replace(c, overwrites=True), "mask": masks.window(7, 0)}, ValueError,
        "cache: got room for 8 of the last tokens, allowed are window + seqlen_q = 7 + 2",
    ),
    "a cache that is too long": (
        lambda c: {"cache": replace(c, lengths=ints(9, 1))}, ValueError, "lengths: got 9, allowed are 0 .. 8",
    ),
    "a negative length": (lambda c: {"cache": replace(c, lengths=ints(-1, 1))}, ValueError, "lengths: got [-1, 1]"),
    "a row that is not there": (
        lambda c: {"cache": replace(c, rows=ints(-1, 1))}, ValueError, "rows: got rows -1 .. 1",
    ),
    "a mask of other keys": (
        lambda c: {"mask": torch.ones(2, 4, 2, 5).bool()}, ValueError, "mask: boolean(m): got shape (2, 4, 2, 5)",
    ),
    "splits of a float": (lambda c: {"num_splits": 1.0}, TypeError, "num_splits: got float"),
    "no splits": (lambda c: {"num_splits": 0}, ValueError, "num_splits: got 0"),
    "sinks that are learned": (
        lambda c: {"sinks": torch.zeros(4, requires_grad=True)}, NotImplementedError,
        "attention cannot run on backend 'torch': cache",
    ),
    "a bias that is learned": (
        lambda c: {"bias": torch.zeros(2, 8, requires_grad=True)}, NotImplementedError,
        "attention cannot run on backend 'torch': cache",
    ),
    "q that is learned": (
        lambda c: {"q": Q.clone().requires_grad_()}, NotImplementedError,
        "attention cannot run on backend 'torch': cache",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENDED)
def test_attending(name):
    change, error, start = ATTENDED[name]
    cache = of("cpu")
    with pytest.raises(error, match=message(start)):
        attention(**{"q": Q, "cache": cache, "backend": "torch"} | change(cache))


FLAT_Q = memory(3, 4, DIM)


@pytest.mark.parametrize(
    ("options", "error", "start"),
    [
        ({"cu_seqlens_k": ints(0, 1, 3)}, ValueError, "cu_seqlens_k, max_seqlen_k: got values together with cache"),
        ({"max_seqlen_k": 5}, ValueError, "cu_seqlens_k, max_seqlen_k: got values together with cache"),
        ({"cu_seqlens_q": ints(0, 3)}, ValueError, "cache: got 2 sequences, allowed is the number of q's, 1"),
        ({"cu_seqlens_q": ints(0, 2, 4)}, ValueError, "cu_seqlens_q: got [0, 2, 4]"),
        ({"mask": masks.documents(torch.zeros(1, 3).int())}, NotImplementedError, "mask: got documents"),
        ({"cache": None, "cu_seqlens_k": ints(0, 1, 3)}, ValueError, "k: got NoneType"),
        ({"cache": None, "k": FLAT, "v": FLAT}, TypeError, "cu_seqlens_k: got NoneType"),
    ],
)
def test_packed_queries(options, error, start):
    given = {"q": FLAT_Q, "k": None, "v": None, "cu_seqlens_q": ints(0, 1, 3), "cu_seqlens_k": None, "cache": of("cpu")}
    with pytest.raises(error, match=message(start)):
        attention_varlen(**given | options, backend="torch")  # type: ignore[arg-type]


def test_windows_of_packed_queries(monkeypatch):
    """Without a longest length it is read; where it cannot be read, all queries may belong to one sequence."""
    cache = replace(of("cpu"), overwrites=True)
    stops, mask = ints(0, 1, 3), masks.window(6, 0)
    out = attention_varlen(FLAT_Q, None, None, stops, None, cache=cache, mask=mask, backend="torch")
    assert out.shape == (3, 4, DIM_V)
    monkeypatch.setattr(call_checks, "can_read", lambda x: False)
    with pytest.raises(ValueError, match=message("cache: got room for 8 of the last tokens, allowed are window + max")):
        attention_varlen(FLAT_Q, None, None, stops, None, cache=cache, mask=mask, backend="torch")


def test_nested_queries():
    q = torch.nested.as_nested_tensor([Q[0].transpose(0, 1), Q[1].transpose(0, 1)], layout=torch.jagged)
    with pytest.raises(ValueError, match="q: got a nested tensor without k, allowed with a cache are a dense tensor"):
        attention(q.transpose(1, 2), cache=of("cpu"))


def test_growing():
    growing = caches.GrowingCache(2, HEADS, DIM, DIM_V, dtype=torch.float32, capacity=2)
    before = growing.cache
    for changed, start in (({"k": NEW[:, :1]}, "k: got shape"), ({"backend": "cuda"}, "backend: got")):
        with pytest.raises(ValueError, match=message(start)):
            growing.append(**{"k": NEW, "v": NEW_V} | changed)
        assert growing.cache is before
        assert growing.length == 0
