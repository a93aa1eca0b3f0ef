"""The memory of a cache that attention reads: that of the tokens alone, each once; the same bits wherever it lies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedattn import KVCache, Rope, attention, attention_varlen, caches, masks, testing
from fusedattn.backends.triton import appending, autograd
from fusedattn.options import Options
from fusedattn.testing import Case
from tests.conftest import DEVICE, DTYPES, INTERPRETING, assert_equal
from tests.helpers import quick
from tests.helpers.accesses import checked_accesses
from tests.helpers.cache_model import LAYOUTS
from tests.helpers.cached_eager import FORMATS, NUMBERS
from tests.helpers.cached_truth import attend, cached_inputs, filled
from tests.helpers.decode_features import SPLIT
from tests.helpers.interpreted import interpreted

pytestmark = pytest.mark.usefixtures("poison", "_seed")

FEW = Case(batch=3, seqlen_q=2, seqlen_k=2 * SPLIT + 5, nheads_q=16, nheads_kv=2, head_dim=16, causal="bottom_right")
MANY = replace(FEW, seqlen_q=20, nheads_q=4)
GARBAGE = (-(2**31), -1, 10**6, 2**31 - 1)
forms = pytest.mark.parametrize("form", [NUMBERS, "e4m3", "int4, groups of 4", "int8, given"])
shapes = pytest.mark.parametrize("case", [FEW, MANY], ids=["few", "many"])


def lengths_of(inputs: testing.Inputs) -> list[int]:
    capacity = inputs.k.shape[2]
    return [SPLIT + 3, capacity, 0][: inputs.q.shape[0]]


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Lengths, rows and block tables are not read before a launch, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "check_values", lambda *_: None)
        yield


@quick.covering()
@quick.pairwise()
@interpreted
@shapes
@pytest.mark.parametrize("form", [NUMBERS, *FORMATS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_element_is_read_once(layout, form, case):
    """By few queries, once for all heads that share a KV head; scales likewise; nothing but the tokens is read."""
    if case is MANY:  # one tile for each head: as many reads as heads
        case = replace(case, nheads_q=case.nheads_kv, seqlen_q=20)
    inputs = cached_inputs(replace(case, causal=None, head_dim=24), layout)  # groups: no power of two
    lengths = lengths_of(inputs)
    cache = filled(layout, inputs, lengths, form)
    with checked_accesses(count_reads=True) as seen:
        attend(inputs, cache)
    assert seen.reads is not None
    for name, x in (("k.ptr", cache.k), ("v.ptr", cache.v), ("k_scale", cache.k_scale), ("v_scale", cache.v_scale)):
        if x is None or x.dim() == 2:
            continue
        found = torch.from_numpy(seen.reads[f"attention_fwd {name if '.' in name else f'call.cache.{name}.ptr'}"])
        order = sorted((d for d in range(4) if x.shape[d] > 1), key=lambda d: -x.stride(d))
        shape = [x.shape[d] for d in order]
        found = found.view(shape).permute([order.index(d) for d in range(4) if d in order]).reshape(x.shape)
        expected = torch.zeros(x.shape, dtype=torch.int32)
        for i, n in enumerate(lengths):
            rows, slots = cache.place(torch.arange(n).expand(cache.batch, n))[:2] if n else (None, None)
            if rows is not None:
                expected[rows[i], :, slots[i]] = 1
        assert torch.equal(found, expected), name


@quick.covering()
@interpreted
@shapes
@forms
def test_packed_queries_and_masks(form, case):
    """Addresses with queries of several sequences behind each other, padding, a tree and a ring."""
    case = replace(case, nheads_q=case.nheads_kv, seqlen_k=48)
    inputs = cached_inputs(replace(case, padding="uneven", bias="full"), "pages of 17")
    full = filled("pages of 17", inputs, [inputs.k.shape[2]] * 3, form)
    wrapped = replace(full, lengths=full.lengths * 3 - 7, overwrites=True, n_sinks=3)
    padded = replace(full, left_padding=torch.tensor([4, 90, 5], dtype=torch.int32, device=DEVICE))
    stops = torch.tensor([0, 1, 1, 1 + case.seqlen_q], dtype=torch.int32)
    n = case.seqlen_q
    tree = masks.tree(torch.rand(n, n) < 0.5)
    packed = inputs.q[:2].transpose(1, 2).flatten(0, 1)[: n + 2]
    with checked_accesses() as seen:
        attend(inputs, wrapped)
        attend(inputs, padded, mask=masks.causal(), bias=None)
        for own, mask in ((wrapped, tree), (padded, inputs.mask)):
            attention_varlen(packed, None, None, stops, None, n, cache=own, mask=mask, backend="triton")
    combined = {"attention_combine"} if case.seqlen_q == FEW.seqlen_q else set()
    assert set(seen.launched) == {"attention_fwd", "_key_range"} | combined


@quick.covering()
@quick.pairwise()
@shapes
@forms
@pytest.mark.parametrize("row", GARBAGE)
def test_a_page_that_is_not_there(row, form, case):
    """Queries that see one of its tokens are NaN; the others get the bits that they get with all pages."""
    inputs = cached_inputs(case, "pages of 16")
    lengths = [30, 60, 16]
    cache = filled("pages of 16", inputs, lengths, form)
    expected = attend(inputs, cache)
    cache.block_table[:, 1] = row
    with unchecked(), checked_accesses() if INTERPRETING else contextlib.nullcontext():
        got = attend(inputs, cache)
    at = torch.arange(case.seqlen_q, device=DEVICE) - case.seqlen_q
    for i, n in enumerate(lengths):
        sees = (n + at >= 16) & (n > 16)
        assert (got["out"][i][:, sees].isnan()).all()
        assert (got["lse"][i][:, sees].isnan()).all()
        for name in got:
            torch.testing.assert_close(got[name][i][:, ~sees], expected[name][i][:, ~sees], rtol=1e-6, atol=1e-6)


@shapes
@pytest.mark.parametrize("rows", [[5, 1, -1], [2**31 - 1, 2, 0]], ids=str)
def test_a_row_that_is_not_there(rows, case):
    inputs = cached_inputs(replace(case, causal=None), "rows")
    cache = filled("rows", inputs, [20, 40, 33])
    known = [row if 0 <= row < 5 else None for row in rows]
    cache = replace(cache, rows=torch.tensor(rows, dtype=torch.int32, device=DEVICE))
    for x in (cache.k, cache.v):
        x.copy_(torch.randn_like(x))
    with unchecked(), checked_accesses() if INTERPRETING else contextlib.nullcontext():
        got = attend(inputs, cache)
    for i, row in enumerate(known):
        assert got["out"][i].isnan().all() == (row is None)
        assert got["lse"][i].isnan().all() == (row is None)
        assert row is None or not got["out"][i].isnan().any()


@quick.covering()
@quick.pairwise()
@shapes
@forms
@pytest.mark.parametrize("layout", ["contiguous", "pages of 16"])
def test_more_tokens_than_the_cache_holds(layout, form, case):
    """Nothing is right then: all queries of the sequence are NaN, and those of others are untouched."""
    inputs = cached_inputs(replace(case, causal=None, seqlen_k=48), layout)
    cache = filled(layout, inputs, [48, 48, 20], form)
    expected = attend(inputs, cache)
    for length in (49, 2**31 - 1):
        cache.lengths[0] = length
        with unchecked(), checked_accesses() if INTERPRETING else contextlib.nullcontext():
            got = attend(inputs, cache)
        for name in got:
            assert got[name][0].isnan().all(), length
            assert torch.equal(got[name][1:], expected[name][1:])


@quick.covering()
@shapes
@forms
def test_negative_lengths(form, case):
    """As of no token."""
    inputs = cached_inputs(case, "pages of 16")
    cache = filled("pages of 16", inputs, [20, 0, 20], form)
    expected = attend(inputs, cache)
    for length in (-1, -(2**31)):
        cache.lengths[1] = length
        with unchecked(), checked_accesses() if INTERPRETING else contextlib.nullcontext():
            assert_equal(attend(inputs, cache), expected)


def one_of(inputs: testing.Inputs, cache: KVCache, i: int) -> tuple[testing.Inputs, KVCache]:
    """Sequence `i` alone."""

    def own(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[i : i + 1].clone()

    rows = cache.rows
    if cache.block_table is None and rows is None:
        rows = torch.arange(cache.batch, dtype=torch.int32, device=cache.k.device)
    alone = replace(cache, lengths=cache.lengths[i : i + 1].clone(), block_table=own(cache.block_table), rows=own(rows))
    return replace(inputs, q=inputs.q[i : i + 1]), alone


@quick.every(3)
@shapes
@pytest.mark.parametrize("form", [NUMBERS, *FORMATS])
def test_bits_of_a_sequence(form, case):
    """The same alone and in a batch, in another layout, with a wider table, packed; each with another dtype."""
    turn = [NUMBERS, *FORMATS].index(form) + (case is MANY)
    inputs = cached_inputs(replace(case, dtype=DTYPES[turn % 3], seqlen_k=128), "pages of 64")
    lengths = lengths_of(inputs)
    cache = filled("pages of 64", inputs, lengths, form)
    expected = attend(inputs, cache)
    for i, is_wider in ((0, False), (1, True)):
        own, alone = one_of(inputs, cache, i)
        if is_wider:
            wider = torch.cat((alone.block_table, torch.full_like(alone.block_table, -5)), dim=1)
            alone = replace(alone, block_table=wider)
        assert_equal(attend(own, alone), {name: x[i : i + 1] for name, x in expected.items()})
    if "given" not in form:  # the scales of rows are drawn
        layout = ("contiguous", "token-major", "rows", "pages of 16")[turn % 4]
        assert_equal(attend(inputs, filled(layout, inputs, lengths, form)), expected)
    q = inputs.q.transpose(1, 2).flatten(0, 1)
    stops = torch.arange(cache.batch + 1, dtype=torch.int32, device=DEVICE) * case.seqlen_q
    out, lse = attention_varlen(
        q, None, None, stops, None, case.seqlen_q, cache=cache, mask=inputs.mask, return_lse=True, backend="triton"
    )
    sizes = (cache.batch, case.seqlen_q)
    packed = {"out": out.unflatten(0, sizes).transpose(1, 2), "lse": lse.unflatten(1, sizes).transpose(0, 1)}
    assert_equal(packed, expected)


@quick.every(4)
@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("form", [NUMBERS, "int4"])
def test_bits_of_given_splits_do_not_depend_on_the_batch(form, num_splits):
    inputs = cached_inputs(FEW, "pages of 16")
    cache = filled("pages of 16", inputs, lengths_of(inputs), form)
    expected = attend(inputs, cache, num_splits=num_splits)
    for i in range(cache.batch):
        own, alone = one_of(inputs, cache, i)
        got = attend(own, alone, num_splits=num_splits)
        assert_equal(got, {name: x[i : i + 1] for name, x in expected.items()})


READS = ("item", "tolist", "__bool__", "__int__", "__index__", "__float__", "numpy", "cpu", "nonzero", "unique")


@contextlib.contextmanager
def no_reads() -> Iterator[None]:
    """Reading a tensor raises, except inside an interpreted kernel."""
    from triton.runtime import interpreter

    def refuse(name: str) -> Any:
        def read(*_: object, **__: object) -> None:
            raise AssertionError(f"Tensor.{name} waits for the device")

        return read

    run = interpreter.GridExecutor.__call__
    with pytest.MonkeyPatch.context() as patch:
        kept = {name: getattr(Tensor, name) for name in READS}

        def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            with pytest.MonkeyPatch.context() as inner:
                for name, method in kept.items():
                    inner.setattr(Tensor, name, method)
                run(executor, *args, **kwargs)

        patch.setattr(interpreter.GridExecutor, "__call__", launch)
        for name in READS:
            patch.setattr(Tensor, name, refuse(name))
        yield


@quick.covering()
@interpreted
@shapes
@forms
def test_launches_read_no_tensor(form, case):
    """From the checked arguments to the launches, no value of a tensor is read."""
    inputs = cached_inputs(replace(case, padding="uneven", layout=16), "pages of 16")
    cache = filled("pages of 16", inputs, [30, 20, 0], form)
    rope = Rope.from_theta(16, 256)
    cache = replace(cache, rope=rope, left_padding=torch.zeros(3, dtype=torch.int32))
    options = Options(inputs.mask, scale=0.25, cache=cache, return_lse=True)
    k, v, stops = torch.randn(9, 2, 16), torch.randn(9, 2, 16), torch.tensor([0, 4, 9, 9], dtype=torch.int32)
    with no_reads():
        autograd.attention(inputs.q, cache.k, cache.v, options)
        appending.append(cache, k, v, stops, 9)


@pytest.mark.parametrize("form", [NUMBERS, "e4m3", "int4"])
def test_calls_on_a_gpu_wait_for_nothing(form, monkeypatch):
    """Of fake tensors on a GPU, whose values nobody can read: checks, operators and their fakes."""
    monkeypatch.setattr(KVCache, "shares_memory", False)  # fake tensors have no addresses
    dtype, *_ = FORMATS.get(form, (torch.float16,))
    with FakeTensorMode():
        table = torch.zeros(2, 4, dtype=torch.int32, device="cuda")
        rope = Rope(*torch.zeros(2, 64, 16, device="cuda"))
        cache = KVCache.paged(table, 9, 16, 2, 32, dtype=dtype, rope=rope)
        q = torch.randn(2, 8, 1, 32, dtype=torch.float16, device="cuda")
        k, v = torch.randn(2, 2, 2, 3, 32, dtype=torch.float16, device="cuda")
        caches.append(cache, k, v, backend="triton")
        caches.append(cache, k, v, counted=True, backend="triton")
        out, lse = attention(q, cache=cache, mask=masks.causal(), return_lse=True, backend="triton")
    assert (out.shape, out.dtype, out.device.type) == ((2, 8, 1, 32), torch.float16, "cuda")
    assert (lse.shape, lse.dtype) == ((2, 8, 1), torch.float32)
