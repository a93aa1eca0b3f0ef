"""The functions of flash_attn: their signatures and results."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import dropout
from fusedattn.integrations import flash_attn
from fusedattn.integrations.flash_attn import (
    bert_padding,
    flash_attn_func,
    flash_attn_interface,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    paging,
)
from fusedattn.integrations.flash_attn.layers import rotary
from tests.conftest import BACKENDS, DEVICE
from tests.helpers.flash_attn_truth import NoWait, assert_right, attend, attend_packed, place_of, results

pytestmark = pytest.mark.usefixtures("_seed")

OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
PACKS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"

# From flash_attn 2.8.3, by module.
SIGNATURES: dict[ModuleType, dict[str, str]] = {
    flash_attn_interface: {
        "flash_attn_func": f"q, k, v, {OPTIONS}",
        "flash_attn_kvpacked_func": f"q, kv, {OPTIONS}",
        "flash_attn_qkvpacked_func": f"qkv, {OPTIONS}",
        "flash_attn_varlen_func": f"q, k, v, {PACKS}, {OPTIONS}, block_table=None",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {PACKS}, {OPTIONS}",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {OPTIONS}",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
        "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False",
    },
    bert_padding: {
        "unpad_input": "hidden_states, attention_mask, unused_mask=None",
        "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
        "pad_input": "hidden_states, indices, batch, seqlen",
    },
    rotary: {
        "apply_rotary_emb": "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
        "max_seqlen=None",
        "apply_rotary_emb_qkv_": "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, "
        "num_heads_q=None",
        "apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
    },
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in SIGNATURES for name in SIGNATURES[module]])
def test_signature(module, name):
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    assert ", ".join(str(p.replace(annotation=p.empty)) for p in parameters) == SIGNATURES[module][name]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def test_exports():
    """The names that `flash_attn` exports, and the most used names of its modules."""
    for name in (*SIGNATURES[flash_attn_interface], "apply_rotary_emb", "pad_input", "unpad_input"):
        assert name in flash_attn.__all__
        assert callable(getattr(flash_attn, name))
    assert rotary.apply_rotary_emb_func is rotary.apply_rotary_emb


@pytest.fixture(params=BACKENDS)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return place_of(request.param, monkeypatch)


def qkv_of(seqlen_q: int, seqlen_k: int, heads: int, kv_heads: int, dim: int, dim_v: int = 0) -> dict[str, Tensor]:
    shapes = ((2, seqlen_q, heads, dim), (2, seqlen_k, kv_heads, dim), (2, seqlen_k, kv_heads, dim_v or dim))
    return {name: torch.randn(*shape, dtype=torch.float64) for name, shape in zip("qkv", shapes, strict=True)}


# By name: lengths, heads and head_dim; options.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((7, 9, 2, 2, 8), {}),
    "causal, fewer queries": ((5, 9, 4, 2, 8), {"causal": True}),
    "causal, more queries, of which some see nothing": ((9, 5, 2, 1, 8), {"causal": True}),
    "window": ((9, 12, 2, 2, 8), {"window_size": (2, 1)}),
    "window and causal, which has the last word": ((9, 12, 2, 2, 8), {"window_size": (3, 2), "causal": True}),
    "window to the left": ((6, 9, 2, 2, 8), {"window_size": (2, -1)}),
    "window to the right": ((6, 9, 2, 2, 8), {"window_size": (-1, 0)}),
    "window beyond the keys, more queries": ((11, 4, 2, 2, 8), {"window_size": (1, 9)}),
    "soft-cap": ((7, 9, 2, 2, 8), {"softcap": 0.7, "causal": True}),
    "soft-cap below 0, which is none": ((7, 9, 2, 2, 8), {"softcap": -1.0}),
    "slopes": ((7, 9, 4, 2, 8), {"alibi_slopes": (4,)}),
    "slopes of each batch, causal": ((9, 7, 4, 2, 8), {"alibi_slopes": (2, 4), "causal": True}),
    "scale": ((5, 5, 2, 2, 8), {"softmax_scale": 0.9}),
    "negative scale": ((5, 5, 2, 2, 8), {"softmax_scale": -0.4, "causal": True}),
    "odd head_dim, another one of v": ((5, 6, 2, 2, 9, 5), {"causal": True}),
    "one query": ((1, 9, 4, 1, 8), {"causal": True, "window_size": (3, 0)}),
    "one query, one key": ((1, 1, 2, 2, 8), {"causal": True}),
    "no keys": ((3, 0, 2, 2, 8), {"causal": True}),
    "no queries": ((0, 3, 2, 2, 8), {}),
}


def options_at(place: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Replace the shape of slopes by slopes of that shape."""
    options = dict(options)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.rand(options["alibi_slopes"]).to(**place)
    return options


def out_and_lse(*tensors: Any, function: Callable[..., Any] = flash_attn_func, **options: Any) -> tuple[Tensor, Tensor]:
    """Call a function that also returns weights if asked to, which are empty without dropout."""
    out, lse, nothing = function(*tensors, **options, return_attn_probs=True)
    assert (nothing.shape, nothing.dtype) == ((0,), out.dtype)
    assert out.is_contiguous()
    return out, lse


@pytest.mark.parametrize("name", CASES)
def test_meaning(name, place):
    shape, options = CASES[name]
    options = options_at(place, options)

    ours = partial(out_and_lse, **options)
    leaves = {name: x.to(**place) for name, x in qkv_of(*shape).items()}
    assert_right(ours, partial(attend, **options), leaves)
    alone = flash_attn_func(*leaves.values(), **options)
    # Without lse, the torch backend computes out with another function.
    atol = 1e-6 if alone.dtype != torch.float64 else 1e-12
    torch.testing.assert_close(alone, ours(**leaves)[0], rtol=1e-9, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_budget_in_16_bits(dtype):
    leaves = {name: x.to(DEVICE, dtype) for name, x in qkv_of(17, 20, 2, 1, 16).items()}
    options = {"causal": True, "window_size": (11, 0)}
    assert_right(partial(out_and_lse, **options), partial(attend, **options), leaves)


def weights_of(q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """``(batch, nheads, seqlen_q, seqlen_k)``: the weights, read from out with unit vectors as values."""
    unit = torch.eye(k.shape[1]).to(k)[None, :, None].expand(*k.shape[:3], -1)
    return flash_attn_func(q, k, unit, **options).transpose(1, 2)


def assert_kept(out: Tensor, weights: Tensor, v: Tensor) -> None:
    """Check that out is the sum over weights that are not negative, after dropout of 0.4."""
    kept = torch.where(weights >= 0, weights, 0) / (1 - 0.4)
    expected = kept @ v.transpose(1, 2).repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("slopes", [False, True])
def test_the_sign_of_weights_says_which_are_dropped(slopes, place):
    """flash_attn's own tests read it so."""
    q, k, v = (x.to(**place) for x in qkv_of(13, 17, 4, 2, 8).values())
    options: dict[str, Any] = {"causal": True, "window_size": (9, 0), "softcap": 2.0, "softmax_scale": 0.7}
    if slopes:
        options["alibi_slopes"] = torch.rand(2, 4, **place)
    out, _, found = flash_attn_func(q, k, v, dropout_p=0.4, **options, return_attn_probs=True)
    torch.testing.assert_close(found.abs(), weights_of(q, k, **options), rtol=1e-4, atol=1e-5)
    assert_kept(out, found, v)
    share = (found < 0).sum() / (found != 0).sum()
    assert 0.2 < share < 0.6
    assert not found.requires_grad


@pytest.mark.parametrize("shared", [False, True])
def test_the_sign_of_weights_of_packed_sequences(shared, place):
    """Each sequence as if alone; 0 after its end. All may share the slopes."""
    leaves, n = packed_leaves(place), len(LENGTHS_Q)
    slopes = torch.rand(1 if shared else n, 4, **place)
    options = {"causal": True, "alibi_slopes": slopes, "dropout_p": 0.4, "return_attn_probs": True}
    out, _, found = flash_attn_varlen_func(*leaves.values(), *cu_seqlens_at(place), 7, 9, **options)
    assert found.shape == (n, 4, 7, 9)
    assert (found < 0).any()
    qs, outs = leaves["q"].split(LENGTHS_Q), out.split(LENGTHS_Q)
    ks, vs = leaves["k"].split(LENGTHS_K), leaves["v"].split(LENGTHS_K)
    for weights, own, q, k, v, its_out in zip(found, slopes.expand(n, -1), qs, ks, vs, outs, strict=True):
        assert not weights[:, len(q) :].any()
        assert not weights[:, :, len(k) :].any()
        if len(q) and len(k):
            weights = weights[None, :, : len(q), : len(k)]
            expected = weights_of(q[None], k[None], causal=True, alibi_slopes=own)
            torch.testing.assert_close(weights.abs(), expected, rtol=1e-4, atol=1e-5)
            assert_kept(its_out[None], weights, v[None])


def test_gradients_of_slopes(place):
    """flash_attn has none."""
    leaves = {name: x.to(**place) for name, x in qkv_of(6, 8, 2, 2, 8).items()}
    leaves["alibi_slopes"] = torch.rand(2, 2, **place)
    assert_right(out_and_lse, attend, leaves)


EVERY_OPTION: dict[str, Any] = {"softmax_scale": 0.9, "causal": True, "window_size": (3, 2), "softcap": 0.8}


def packed_gradients(function: Callable[..., Any], *tensors: Tensor, **options: Any) -> list[Tensor]:
    """Gradients of a call with dropout plus those of lse, which a call with dropout does not return."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    torch.manual_seed(0)
    out = function(*leaves, dropout_p=0.3, **options)
    assert out.is_contiguous()
    _, lse, _ = function(*leaves, return_attn_probs=True, **options)
    dout = torch.linspace(-1, 1, out.numel()).to(out).view(out.shape)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out * dout).sum() + lse.sin().sum(), leaves)]


def test_packed_tensors(place):
    """The same bits as from the function of three tensors."""
    q, k, v = torch.randn(3, 2, 7, 2, 8).to(**place)
    options = {**EVERY_OPTION, "alibi_slopes": torch.rand(2, **place)}
    expected = packed_gradients(flash_attn_func, q, k, v, **options)
    *found, dkv = packed_gradients(flash_attn_kvpacked_func, q, torch.stack((k, v), 2), **options)
    assert all(map(torch.equal, (*found, *dkv.unbind(2)), expected))
    *found, dqkv = packed_gradients(flash_attn_qkvpacked_func, torch.stack((q, k, v), 2), **options)
    assert all(map(torch.equal, (*found, *dqkv.unbind(2)), expected))


def test_packed_tensors_of_packed_sequences(place):
    q, k, v = torch.randn(3, 9, 2, 8).to(**place)
    options = {**EVERY_OPTION, "alibi_slopes": torch.rand(3, 2, **place)}
    stops_of_three = stops([4, 0, 5], place["device"])
    lengths = {"cu_seqlens_q": stops_of_three, "cu_seqlens_k": stops_of_three, "max_seqlen_q": 5, "max_seqlen_k": 5}
    expected = packed_gradients(flash_attn_varlen_func, q, k, v, **lengths, **options)
    *found, dkv = packed_gradients(flash_attn_varlen_kvpacked_func, q, torch.stack((k, v), 1), **lengths, **options)
    assert all(map(torch.equal, (*found, *dkv.unbind(1)), expected))
    lengths = {"cu_seqlens": stops_of_three, "max_seqlen": 5}
    *found, dqkv = packed_gradients(flash_attn_varlen_qkvpacked_func, torch.stack((q, k, v), 1), **lengths, **options)
    assert all(map(torch.equal, (*found, *dqkv.unbind(1)), expected))


LENGTHS_Q, LENGTHS_K = [5, 0, 1, 7, 3], [6, 2, 9, 4, 0]


def stops(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)


def cu_seqlens_at(place: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return stops(LENGTHS_Q, place["device"]), stops(LENGTHS_K, place["device"])


VARLEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "window and causal": {"window_size": (2, 1), "causal": True},
    "soft-cap, scale": {"softcap": 0.7, "softmax_scale": 0.9},
    "slopes": {"alibi_slopes": (4,), "causal": True},
    "slopes of each sequence": {"alibi_slopes": (5, 4)},
}


def packed_leaves(place: dict[str, Any], total_k: int = sum(LENGTHS_K)) -> dict[str, Tensor]:
    shapes = ((sum(LENGTHS_Q), 4, 8), (total_k, 2, 8), (total_k, 2, 8))
    return {name: torch.randn(*shape).to(**place) for name, shape in zip("qkv", shapes, strict=True)}


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", VARLEN)
def test_packed_sequences(name, paged, place):
    options = options_at(place, VARLEN[name])
    lengths = *cu_seqlens_at(place), 7, 9
    table, pages = pages_of(LENGTHS_K, 4, place["device"])

    def ours(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if paged:
            k, v = (in_pages(x, pages, 4, n_pages=12) for x in (k, v))
        block_table = table if paged else None
        return out_and_lse(q, k, v, *lengths, **options, block_table=block_table, function=flash_attn_varlen_func)

    truth = partial(attend_packed, lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, **options)
    assert_right(ours, truth, packed_leaves(place))


@pytest.mark.parametrize("name", VARLEN)
def test_pages_are_read_in_place(name, place, monkeypatch):
    """Without gradients nothing is gathered."""
    monkeypatch.setattr(paging, "packed", None)
    options, leaves = options_at(place, VARLEN[name]), packed_leaves(place)
    table, pages = pages_of(LENGTHS_K, 4, place["device"])
    keys = [in_pages(leaves[x], pages, 4, n_pages=12) for x in "kv"]
    lengths = *cu_seqlens_at(place), 7, 9
    found = out_and_lse(leaves["q"], *keys, *lengths, **options, block_table=table, function=flash_attn_varlen_func)
    expected = attend_packed(*(leaves[x].double() for x in "qkv"), LENGTHS_Q, LENGTHS_K, **options)
    tolerance = 1e-9 if place["dtype"] == torch.float64 else 1e-5
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)


def pages_of(lengths: list[int], size: int, device: str) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return a block table, with pages in random order and garbage in unused entries, and each token's page and row."""
    free = iter([7, 2, 10, 0, 5, 11, 3, 8, 1, 6, 4, 9])
    table = torch.full((len(lengths), 3), -(10**6), dtype=torch.int32)
    places = []
    for i, length in enumerate(lengths):
        for position in range(length):
            if position % size == 0:
                table[i, position // size] = next(free)
            places.append((int(table[i, position // size]), position % size))
    return table.to(device), places


def in_pages(x: Tensor, places: list[tuple[int, int]], size: int, n_pages: int) -> Tensor:
    """Put tokens into their pages, differentiably; rows without a token are NaN."""
    empty = x.new_full((n_pages * size, *x.shape[1:]), math.nan)
    index = torch.tensor([page * size + row for page, row in places], device=x.device)
    return empty.index_copy(0, index, x).unflatten(0, (n_pages, size))


def test_pages_that_are_read_get_gradients(place):
    """A page that two sequences share gets the sum of both gradients, and an unread page gets 0."""
    k = torch.randn(3, 4, 1, 8, **place, requires_grad=True)
    q = torch.randn(2, 1, 8, **place)
    table = torch.tensor([[1, 0], [1, 2]], dtype=torch.int32, device=place["device"])
    lengths = stops([1, 1], place["device"]), stops([6, 3], place["device"]), 1, 8
    out = flash_attn_varlen_func(q, k, k, *lengths, block_table=table)
    (dk,) = torch.autograd.grad(out.square().sum(), k)
    written = k.detach().clone().requires_grad_()
    first, second = torch.cat((written[1], written[0, :2])), written[1, :3]
    parts = ((q[:1], first), (q[1:], second))
    expected = sum(attend(x[None], y[None], y[None])[0].square().sum() for x, y in parts)
    assert (dk[2] == 0).all()
    assert (dk[0, 2:] == 0).all()
    (of_truth,) = torch.autograd.grad(expected, written)
    torch.testing.assert_close(dk, of_truth, rtol=1e-9, atol=1e-10 if dk.dtype == torch.float64 else 1e-6)


def test_no_sequence(place):
    """Tokens after the last sequence: out is 0, lse -inf, gradients are 0, and their NaN reaches nothing."""
    leaves = {name: x.requires_grad_() for name, x in packed_leaves(place, total_k=24).items()}
    with torch.no_grad():
        leaves["q"][-2:], leaves["k"][-3:], leaves["v"][-3:] = math.nan, math.nan, math.nan
    lengths_q = [*LENGTHS_Q[:-1], LENGTHS_Q[-1] - 2]
    cu_seqlens = stops(lengths_q, place["device"]), stops(LENGTHS_K, place["device"])
    out, lse, _ = flash_attn_varlen_func(*leaves.values(), *cu_seqlens, 7, 9, causal=True, return_attn_probs=True)
    assert (out[-3:] == 0).all()
    assert (lse[:, -3:] == -math.inf).all()
    assert out.isfinite().all()
    for gradient, n in zip(torch.autograd.grad(out.sum(), list(leaves.values())), (2, 3, 3), strict=True):
        assert (gradient[-n:] == 0).all()
        assert gradient.isfinite().all()


def test_longest_lengths_as_tensors(place):
    """transformers passes them so."""
    leaves, cu_seqlens = packed_leaves(place), cu_seqlens_at(place)
    expected = flash_attn_varlen_func(*leaves.values(), *cu_seqlens, 7, 9)
    found = flash_attn_varlen_func(*leaves.values(), *cu_seqlens, *(x.diff().max() for x in cu_seqlens))
    assert torch.equal(found, expected)


def test_windows_of_other_kinds_of_numbers():
    x = torch.randn(1, 6, 1, 8, device=DEVICE)
    expected = flash_attn_func(x, x, x, window_size=(2, 1))
    assert torch.equal(flash_attn_func(x, x, x, window_size=torch.tensor([2, 1])), expected)
    assert torch.equal(flash_attn_func(x, x, x, window_size=[2, 1]), expected)


def test_nan_behind_the_mask(place):
    leaves = {name: x.to(**place) for name, x in qkv_of(4, 9, 2, 2, 8).items()}
    expected = results(partial(out_and_lse, window_size=(2, 0)), leaves)
    leaves["k"][:, :3], leaves["v"][:, :3] = math.nan, math.inf  # before the first query's window
    torch.testing.assert_close(results(partial(out_and_lse, window_size=(2, 0)), leaves), expected)


def test_any_strides(place):
    """Expanded keys, heads before tokens, and features that are not contiguous; only the last are copied."""
    q = torch.randn(2, 2, 7, 8).to(**place).transpose(1, 2)
    k = torch.randn(1, 9, 1, 8).to(**place).expand(2, -1, 2, -1)
    v = torch.randn(2, 9, 8, 2).to(**place).transpose(2, 3)
    found = flash_attn_func(q, k, v, causal=True)
    assert found.is_contiguous()
    expected = flash_attn_func(*(x.contiguous() for x in (q, k, v)), causal=True)
    torch.testing.assert_close(found, expected)


def test_nothing_is_copied(monkeypatch):
    seen: list[Tensor] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        seen.extend((q, k, v))
        return q

    monkeypatch.setattr(flash_attn_interface, "attention", spy)
    monkeypatch.setattr(flash_attn_interface, "attention_varlen", lambda q, k, v, *_, **options: spy(q, k, v))
    qkv = torch.randn(2, 5, 3, 4, 8)
    flash_attn_qkvpacked_func(qkv)
    lengths = torch.zeros(3, dtype=torch.int32)
    flash_attn_varlen_qkvpacked_func(qkv[0], lengths, 5)
    for i, x in enumerate(seen):
        assert x.data_ptr() == qkv[0, 0, i % 3].data_ptr()


def test_dropout(place):
    """The same weights remain as with torch's seed; also with a soft-cap, which flash_attn refuses."""
    q, k, v = (x.to(**place) for x in qkv_of(6, 8, 2, 2, 8).values())
    torch.manual_seed(3)
    out = flash_attn_func(q, k, v, dropout_p=0.4, softcap=2.0)
    torch.manual_seed(3)
    seed = dropout.draw_seed(place["device"])
    keep = dropout.keep_mask(seed, 0.4, 2, 2, 6, 8).double().cpu() / 0.6
    q, k, v = (x.double().cpu() for x in (q, k, v))
    scores = 2.0 * torch.tanh(torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(8) / 2.0)
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1) * keep, v)
    close = {"rtol": 1e-9, "atol": 1e-10} if out.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out.double().cpu(), expected, **close)


def test_deterministic_and_two_runs():
    q, k, v = torch.randn(3, 2, 6, 2, 8, device=DEVICE)
    assert torch.equal(flash_attn_func(q, k, v, deterministic=True), flash_attn_func(q, k, v))


X = torch.zeros(2, 5, 2, 8, device=DEVICE)
P = torch.zeros(5, 2, 8, device=DEVICE)
CU = torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE)
PAGES, TABLE = torch.zeros(3, 4, 2, 8, device=DEVICE), torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)


def in_some_pages(k: Tensor = PAGES, v: Tensor = PAGES, table: Tensor = TABLE, **options: Any) -> Any:
    return flash_attn_varlen_func(P, k, v, CU, CU, 3, 3, **options, block_table=table)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: flash_attn_func(X[0], X, X), ValueError, r"q: got shape \(5, 2, 8\), allowed is \(batch, seqlen, "),
        (lambda: flash_attn_func(X, X, None), TypeError, r"v: got NoneType, allowed is a torch\.Tensor"),
        (lambda: flash_attn_func(X, X[:, :, :, :4], X), ValueError, "k: got head_dim 4"),
        (lambda: flash_attn_func(X, X.half(), X), TypeError, "k: got torch.float16"),
        (lambda: flash_attn_func(X, X[:1], X), ValueError, "k: got batch 1"),
        (lambda: flash_attn_func(X, X, X, dropout_p=1.0), ValueError, "dropout_p: got 1.0"),
        (lambda: flash_attn_func(X, X, X, softmax_scale=math.nan), ValueError, "scale: got nan"),
        (lambda: flash_attn_func(X, X, X, softcap=math.nan), ValueError, "softcap: got nan"),
        (lambda: flash_attn_func(X, X, X, window_size=(1, 2, 3)), ValueError, "window_size: got 3 numbers"),
        (lambda: flash_attn_func(X, X, X, window_size=(1.0, 2)), TypeError, "window_size: got float, allowed are ints"),
        (lambda: flash_attn_func(X, X, X, alibi_slopes=X[0, 0, :, 0].half()), TypeError, "slopes: got torch.float16"),
        (lambda: flash_attn_func(X, X, X, alibi_slopes=X[0, :3, 0, 0]), ValueError, r"slopes of shape \(3"),
        (lambda: flash_attn_func(X, X, X, dropout_p=-0.1, return_attn_probs=True), ValueError, "dropout_p: got -0.1"),
        (lambda: flash_attn_kvpacked_func(X, X), ValueError, "kv: got shape"),
        (lambda: flash_attn_qkvpacked_func(torch.zeros(2, 5, 2, 2, 8)), ValueError, r"allowed is \(batch, seqlen, 3,"),
        (lambda: flash_attn_varlen_func(X, X, X, CU, CU, 3, 3), ValueError, "q: got shape"),
        (lambda: flash_attn_varlen_func(P, P, P, CU.long(), CU, 3, 3), TypeError, "cu_seqlens_q: got torch.int64"),
        (lambda: flash_attn_varlen_func(P, P, P, CU, CU, 3.0, 3), TypeError, "max_seqlen_q: got float"),
        (lambda: flash_attn_varlen_func(P, P, P, CU, CU, 3, P.sum()), TypeError, "max_seqlen_k: got torch.float32"),
        (lambda: flash_attn_varlen_kvpacked_func(P, P, CU, CU, 3, 3), ValueError, "kv: got shape"),
        (lambda: flash_attn_varlen_qkvpacked_func(P, CU, 3), ValueError, "qkv: got shape"),
        (lambda: in_some_pages(P, P), ValueError, r"k: got shape \(5, 2, 8"),
        (lambda: in_some_pages(table=TABLE.float()), TypeError, "block_table: got torch.float32"),
        (lambda: in_some_pages(table=TABLE[:1]), ValueError, r"block_table: got shape \(1, 1\).* batch = 2"),
        (lambda: in_some_pages(v=PAGES[:2]), ValueError, r"v: got pages \(2, 4\)"),
    ],
)
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU nothing waits to be checked")
@pytest.mark.parametrize(
    ("lengths", "table", "match"),
    [
        ([2, 5], [[0], [1]], "block_table: got pages for 4 tokens"),
        ([2, 3], [[0], [3]], r"block_table: got pages 0 \.\. 3"),
    ],
)
def test_errors_of_pages(lengths, table, match):
    table = torch.tensor(table, dtype=torch.int32)
    with pytest.raises(ValueError, match=match):
        flash_attn_varlen_func(P, PAGES, PAGES, CU, stops(lengths, "cpu"), 3, 9, block_table=table)


def test_nothing_waits_for_pages(monkeypatch):
    monkeypatch.setattr(paging, "can_read", lambda x: False)  # as on a GPU
    monkeypatch.setattr(flash_attn_interface, "attention_varlen", lambda q, *_, **options: q)
    with NoWait():
        in_some_pages(causal=True)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_gpu_is_not_waited_for():
    in_some_pages(causal=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        in_some_pages(causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
