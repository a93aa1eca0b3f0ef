"""Few queries against many keys: each row of a tile is a pair of a query and a head, and keys are in splits.

The interpreter's tile has 16 rows and a split 32 keys (kernels/configs.py), so even short sequences have several.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedattn import ScoreMod, attention_varlen, biases, fuse, masks, testing
from fusedattn.integrations import flash_attn
from fusedattn.kernels import attention_fwd, configs
from fusedattn.transformer import GPTModel
from tests.conftest import (
    DEVICE,
    DTYPES,
    INTERPRETING,
    assert_accurate,
    assert_equal,
    assert_results_accurate,
    inputs_of,
    member,
    triton_attention,
)
from tests.helpers import quick
from tests.helpers.accesses import checked_accesses
from tests.helpers.decode_features import BASE, FEATURES, SHAPES, SPLIT, shaped, tilings

pytestmark = [pytest.mark.usefixtures("poison", "_seed")]

interpreted = pytest.mark.skipif(not INTERPRETING, reason="a GPU's splits are longer")


@contextmanager
def in_tiles_of_one_head() -> Iterator[None]:
    """Compute few queries with the tiles of many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configs, "lookup_few_queries", lambda *asked: None)
        yield


def forward(inputs: testing.Inputs, **changes: Any) -> dict[str, Tensor]:
    out, lse = triton_attention(inputs.q, inputs.k, inputs.v, return_lse=True, **(inputs.options | changes))
    return {"out": out, "lse": lse}


def assert_forward_accurate(inputs: testing.Inputs, what: object = "") -> None:
    """Check out and lse; the gradients come from the same kernels as with many queries."""
    eager = testing.baseline(inputs)
    assert_results_accurate(eager | forward(inputs), inputs, testing.golden(inputs), eager, what)


@quick.every(3, feature=lambda feature: feature in ("block-sparse", "sinks, one split"))
@pytest.mark.parametrize("feature", FEATURES)
def test_accuracy(feature):
    """Each feature with a different shape and dtype."""
    i = list(FEATURES).index(feature)
    for n in range(2):
        case = replace(BASE, **FEATURES[feature], dtype=DTYPES[(i + n) % 3])
        case = shaped(case, *SHAPES[(5 * i + 7 * n) % len(SHAPES)])
        with tilings() as found:
            assert_forward_accurate(inputs_of(case), case)
        if INTERPRETING:
            of_functions = case.mask_function or case.score_mod
            group = case.nheads_q // case.nheads_kv
            assert (found[0].split_keys > 0) == (case.layout is None and case.seqlen_k > SPLIT)
            assert (found[0].heads > 1) == (group > 1 and case.layout is None and not of_functions)


@quick.every(4, group=20)
@interpreted
@pytest.mark.parametrize(("queries", "group"), SHAPES)
def test_shapes(queries, group):
    for dtype in DTYPES:
        case = shaped(replace(BASE, dtype=dtype, causal="bottom_right", seqlen_k=2 * SPLIT + 3), queries, group)
        with tilings() as found:
            assert_forward_accurate(inputs_of(case), case)
        (tiling,) = found
        heads = min(16, triton.next_power_of_2(group))
        assert (tiling.heads, tiling.split_keys, tiling.n_tiles) == (heads, SPLIT, 3)
        assert tiling.n_programs == 3 * case.batch * case.nheads_kv * (2 if group == 20 else 1)


@quick.every(3)
@interpreted
@pytest.mark.parametrize(("queries", "group"), [(17, 1), (9, 2), (5, 3), (3, 8), (2, 9), (2, 20)])
def test_queries_beyond_one_tile_are_computed_as_usual(queries, group):
    inputs = inputs_of(shaped(BASE, queries, group))
    with tilings() as found:
        got = forward(inputs)
    assert [(x.heads, x.split_keys) for x in found] == [(1, 0)]
    with in_tiles_of_one_head():
        assert_equal(got, forward(inputs))


@quick.every(4)
@interpreted
@pytest.mark.parametrize("seqlen_k", [0, 1, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT - 1, 2 * SPLIT, 2 * SPLIT + 1, 600])
@pytest.mark.parametrize("causal", [None, "bottom_right"])
def test_lengths_around_the_bounds_of_splits(seqlen_k, causal):
    for n, (queries, group) in enumerate([(1, 3), (4, 3)]):
        case = shaped(replace(BASE, seqlen_k=seqlen_k, causal=causal, dtype=DTYPES[seqlen_k % 3]), queries, group)
        with tilings() as found:
            assert_forward_accurate(inputs_of(replace(case, seed=n)), case)
        assert [x.n_tiles for x in found] == [max(1, -(-seqlen_k // SPLIT))]


GRADIENTS = ("plain", "padding with gaps", "rope", "sinks and dropout", "common part", "everything")


@quick.only(feature=lambda feature: feature != "everything")
@pytest.mark.parametrize("feature", GRADIENTS)
def test_gradients(feature):
    """Computed from the statistics that the forward keeps of each row."""
    # The rounding residual is kept in 16 bits, and matters if keys and values have a common part.
    dtype = torch.float32 if feature in ("plain", "rope", "everything") else torch.bfloat16
    case = replace(BASE, **FEATURES[feature], nheads_q=3, nheads_kv=1, dtype=dtype, seqlen_k=2 * SPLIT + 5)
    assert_accurate(triton_attention, inputs_of(case), case)


@interpreted
@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"dropout_p": 0.3}])
def test_the_rounding_residual_is_kept(monkeypatch, options):
    """If keys and values have a common part, out plus its rounding residual is far closer to the truth than out."""
    inputs = inputs_of(replace(BASE, nheads_q=3, nheads_kv=1, offset=4.0, dtype=torch.bfloat16, **options))
    kept = []
    launch = attention_fwd.launch

    def noted(*args: Any) -> None:
        launch(*args)
        kept.append(args[3])

    monkeypatch.setattr(attention_fwd, "launch", noted)
    testing.run(triton_attention, inputs)
    truth = testing.golden(inputs)["out"]
    (results,) = kept
    unit = 2.0 ** results.out.double().abs().log2().floor() * (2.0**-7 / 127)
    exact = results.out.double() + results.rounding_residual.double() * unit
    assert (exact - truth).abs().mean() < 0.2 * (results.out.double() - truth).abs().mean()


@quick.every(7)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"dropout_p": 0.3}, {"sinks": True, "dropout_p": 0.3}])
def test_splits_change_rounding_alone(options, dtype):
    """Results and kept statistics stay close to those of one program for all keys, which keep the budget."""
    inputs = inputs_of(replace(BASE, nheads_q=3, nheads_kv=1, dtype=dtype, **options))
    got = testing.run(triton_attention, inputs)
    with in_tiles_of_one_head():
        expected = testing.run(triton_attention, inputs)
    eps = torch.finfo(dtype).eps
    for name, x in expected.items():
        torch.testing.assert_close(got[name], x, rtol=4 * eps, atol=8 * eps * x.abs().max().item())


def padded(inputs: testing.Inputs, lengths: list[int], *, left: bool) -> testing.Inputs:
    """Hide all but the first (or last) `lengths` keys; the hidden keys and values are NaN."""
    at = torch.arange(inputs.k.shape[2], device=DEVICE)
    stops = torch.tensor(lengths, device=DEVICE)[:, None]
    valid = at >= inputs.k.shape[2] - stops if left else at < stops
    hidden = ~valid[:, None, :, None]
    changed = {name: getattr(inputs, name).masked_fill(hidden, torch.nan) for name in ("k", "v")}
    return replace(inputs, **changed, mask=masks.padding(valid))


def sliced(inputs: testing.Inputs, b: int, length: int, *, left: bool) -> testing.Inputs:
    """Member `b` without its padding."""
    one = member(inputs, b)
    keys = slice(inputs.k.shape[2] - length, None) if left else slice(0, length)
    return replace(one, k=one.k[:, :, keys], v=one.v[:, :, keys], mask=masks.full())


@quick.only(dtype=torch.bfloat16, left=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(left, dtype):
    """Padding may hide whole splits or a part of one; without it a sequence may have no splits at all."""
    lengths = [0, 1, SPLIT, SPLIT + 1, 3 * SPLIT + 5]
    case = replace(BASE, batch=len(lengths), nheads_q=3, nheads_kv=1, dtype=dtype, rope=None)
    inputs = padded(inputs_of(case), lengths, left=left)
    together = testing.run(triton_attention, inputs)
    for b, length in enumerate(lengths):
        names = ("out", "lse", "dq")
        in_batch = {name: together[name][b : b + 1] for name in names}
        alone = testing.run(triton_attention, member(inputs, b))
        assert_equal({name: alone[name] for name in names}, in_batch)
        bare = testing.run(triton_attention, sliced(inputs, b, length, left=left))
        assert_equal({name: bare[name] for name in names}, in_batch)


@quick.only(dtype=torch.bfloat16)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_sequences_get_the_bits_of_each_alone(dtype):
    """The longest has splits that the others lack; one has no queries, one no keys."""
    lengths_q, lengths_k = (2, 1, 0, 2, 1), (3 * SPLIT + 5, 1, SPLIT, 0, 2 * SPLIT)
    stops_q, stops_k = (
        torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device=DEVICE) for x in (lengths_q, lengths_k)
    )
    q, k, v = (
        torch.randn(n + 2, h, 16, device=DEVICE).to(dtype).requires_grad_()
        for n, h in ((sum(lengths_q), 6), (sum(lengths_k), 2), (sum(lengths_k), 2))
    )
    sinks = torch.randn(6, device=DEVICE)
    options: dict[str, Any] = {"mask": masks.causal(), "sinks": sinks, "backend": "triton"}
    with tilings() as found:
        out, lse = attention_varlen(q, k, v, stops_q, stops_k, 2, max(lengths_k), return_lse=True, **options)
    assert not INTERPRETING or (found[0].heads, found[0].n_tiles) == (4, 4)
    assert (out[sum(lengths_q) :] == 0).all()
    assert (lse[:, sum(lengths_q) :] == -torch.inf).all()
    dout = torch.randn_like(out)
    (dq,) = torch.autograd.grad(out, q, dout)
    for i, (n, m) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        if n == 0:
            continue
        own, keys = slice(stops_q[i], stops_q[i + 1]), slice(stops_k[i], stops_k[i + 1])
        alone_q = q[own].detach().requires_grad_()
        ones = (torch.tensor([0, x], dtype=torch.int32, device=DEVICE) for x in (n, m))
        # A query beyond the last would be read behind the tensors.
        with checked_accesses() if INTERPRETING else nullcontext():
            alone, alone_lse = attention_varlen(alone_q, k[keys], v[keys], *ones, 2, m, return_lse=True, **options)
        (alone_dq,) = torch.autograd.grad(alone, alone_q, dout[own])
        assert_equal(
            {"out": alone, "lse": alone_lse, "dq": alone_dq}, {"out": out[own], "lse": lse[:, own], "dq": dq[own]}
        )


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_runs_agree(dtype):
    inputs = inputs_of(replace(BASE, **FEATURES["everything"], dtype=dtype))
    assert_equal(testing.run(triton_attention, inputs), testing.run(triton_attention, inputs))


@quick.every(6)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_keys_and_values_have_no_part(value, dtype):
    """Keys hidden by padding, or only from some rows of a tile: in each split, for one query and for one head."""
    case = replace(BASE, dtype=dtype, seqlen_q=4, nheads_q=3, nheads_kv=1)
    inputs = inputs_of(case)
    allowed = torch.rand(2, 3, 4, case.seqlen_k, device=DEVICE) < 0.8
    keys = torch.tensor([3, SPLIT, 2 * SPLIT + 7, case.seqlen_k - 1], device=DEVICE)
    allowed[:, :, 1, keys], allowed[:, 2, :, keys] = False, False
    clean = replace(inputs, mask=masks.boolean(allowed))
    expected = testing.run(triton_attention, clean)
    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, :, keys], v[:, :, keys] = value, value
    got = testing.run(triton_attention, replace(clean, k=k, v=v))
    blind = ~allowed[..., keys].any(-1)  # (batch, heads, queries) that see none of these keys
    assert blind.any()
    for name in ("out", "lse", "dq"):
        # After a NaN, the second pass sums weights relative to the last maximum.
        eps = torch.finfo(expected[name].dtype).eps
        own, atol = expected[name][blind], 4 * eps * expected[name].abs().max().item()
        torch.testing.assert_close(got[name][blind], own, rtol=4 * eps, atol=atol)
    assert value == value or got["out"][~blind].isnan().all()


@quick.every(9)
@pytest.mark.parametrize("options", [{}, {"sinks": True}])
@pytest.mark.parametrize("kind", ["infinite", "minus infinite", "NaN score", "NaN value", "NaN value of no weight"])
def test_non_finite_values_reach_the_same_rows_as_in_one_program(kind, options):
    """In a part of one split, in one whole split, and in all."""
    parts = [slice(40, 41), slice(SPLIT, 2 * SPLIT), slice(None)]
    for where, run in zip(parts, (functools.partial(testing.run, triton_attention), forward, forward), strict=True):
        inputs = inputs_of(replace(BASE, nheads_q=3, nheads_kv=1, **options))
        q, k, v = inputs.q, inputs.k.clone(), inputs.v.clone()
        q = q.abs()
        if kind == "infinite":
            k[:, :, where, 0] = torch.inf
        elif kind == "minus infinite":
            k[:, :, where, 0] = -torch.inf
        elif kind == "NaN score":
            k[:, :, where, 0] = torch.nan
        else:
            v[:, :, where, 0] = torch.nan
        if kind == "NaN value of no weight":
            k[:, :, where, 0] = -torch.inf
        changed = replace(inputs, q=q, k=k, v=v)
        got = run(changed)
        with in_tiles_of_one_head():
            expected = run(changed)
        for name, x in expected.items():
            assert torch.equal(got[name].isnan(), x.isnan()), (name, where)
            torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_queries_that_see_no_key_of_some_splits():
    """One sees no key at all, one only keys of the last split, one all keys."""
    seen = torch.ones(3, BASE.seqlen_k, dtype=torch.bool, device=DEVICE)
    seen[0], seen[1, : 3 * SPLIT] = False, False
    inputs = replace(inputs_of(replace(BASE, seqlen_q=3)), mask=masks.boolean(seen))
    with tilings() as found:
        assert_forward_accurate(inputs)
    assert not INTERPRETING or found[0].split_keys > 0


@interpreted
@pytest.mark.parametrize(
    ("mask", "n_splits"),
    [
        (masks.full(), 10),
        (masks.window(SPLIT - 2, 0), 1),
        (masks.window(SPLIT - 1, 0), 2),
        (masks.window(5, 5, "top_left"), 1),
        (masks.causal() & masks.window(2 * SPLIT, None), 3),
        (masks.window(None, 4), 10),
    ],
)
def test_splits_that_a_window_hides_are_not_launched(mask, n_splits):
    inputs = replace(inputs_of(replace(BASE, seqlen_k=10 * SPLIT)), mask=mask)
    with tilings() as found:
        assert_forward_accurate(inputs)
    assert [x.n_tiles for x in found] == [n_splits]


@quick.only(name=lambda name: name in ("plain", "sinks and dropout"))
@pytest.mark.parametrize("name", ["plain", "rope", "sinks and dropout", "everything", "documents"])
@interpreted
def test_gradcheck(name):
    changes = {"batch": 1, "nheads_q": 3, "nheads_kv": 1, "head_dim": 4, "rotary_dim": None, "dtype": torch.float64}
    case = replace(BASE, **{**FEATURES[name], "head_dim_v": None}, **changes)
    inputs = testing.make_inputs(replace(case, seqlen_k=SPLIT + 3))
    tensors = list(inputs.leaves.values())

    def function(x: Tensor) -> Tensor:
        parts = x.split([t.numel() for t in tensors])
        leaves = (part.view_as(t) for part, t in zip(parts, tensors, strict=True))
        found = forward(inputs.with_leaves(dict(zip(inputs.leaves, leaves, strict=True))))
        return torch.cat((found["out"], found["lse"].nan_to_num(neginf=0.0)[..., None]), -1)

    x = torch.cat([t.flatten() for t in tensors]).requires_grad_()
    with tilings() as found:
        assert torch.autograd.gradcheck(function, x, fast_mode=True, atol=1e-6, rtol=1e-4)
    assert {(tiling.heads, tiling.split_keys) for tiling in found} == {(4, SPLIT)}


def test_heads_and_queries_may_lie_anywhere():
    """Expanded, transposed and with gaps; out gets the layout of q."""
    case = replace(BASE, seqlen_q=4, nheads_q=3, nheads_kv=1, causal="bottom_right")
    inputs = inputs_of(case)
    expected = forward(inputs)
    q = torch.empty(2, 4, 5, 40, device=DEVICE).permute(0, 2, 1, 3)[:, 1:4, :, 3:19].copy_(inputs.q)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (inputs.k, inputs.v))
    got = forward(replace(inputs, q=q, k=k, v=v))
    assert_equal(got, expected)
    shared = inputs.q[:, :1].expand(-1, 3, -1, -1)
    assert_equal(forward(replace(inputs, q=shared)), forward(replace(inputs, q=shared.contiguous())))


@triton.jit
def _only_the_first_head(batch, head, q_index, k_index, args):
    if head == 0:
        shown = k_index >= 0
    else:
        shown = k_index < 0
    return shown & (q_index >= 0)


@triton.jit
def _doubled_for_the_first_head(score, batch, head, q_index, k_index, args):
    if head == 0:
        factor = 2.0
    else:
        factor = 1.0
    return score * factor


@triton.jit
def _derivative(score, batch, head, q_index, k_index, args):
    if head == 0:
        factor = 2.0
    else:
        factor = 1.0
    return tl.zeros_like(score) + factor


def test_a_function_may_branch_on_the_head():
    """A function gets the index of a single head, so heads do not share a tile."""
    inputs = inputs_of(replace(BASE, nheads_q=3, nheads_kv=1))
    first = torch.arange(3, device=DEVICE) == 0
    with tilings() as found:
        got = forward(inputs, mask=masks.function(_only_the_first_head))
        scored = forward(inputs, score_mod=ScoreMod(_doubled_for_the_first_head, _derivative))
    assert not INTERPRETING or {(x.heads, x.split_keys) for x in found} == {(1, SPLIT)}
    expected = forward(inputs)
    assert_equal({"out": got["out"][:, :1]}, {"out": expected["out"][:, :1]})
    assert (got["out"][:, 1:] == 0).all()
    doubled = forward(replace(inputs, q=inputs.q * torch.where(first, 2.0, 1.0)[:, None, None]))
    torch.testing.assert_close(scored["out"], doubled["out"])


def test_batches_share_biases_and_masks():
    """Broadcast along every dimension, in a tile with several heads and queries."""
    inputs = inputs_of(replace(BASE, seqlen_q=3, nheads_q=4, nheads_kv=1))
    n_k = inputs.k.shape[2]
    for shape in ((2, 1, 1, n_k), (1, 4, 1, 1), (1, 1, 3, 1), (2, 4, 3, n_k)):
        bias = torch.randn(shape, device=DEVICE)
        allowed = torch.rand(shape, device=DEVICE) < 0.7
        assert_forward_accurate(replace(inputs, bias=biases.tensor(bias), mask=masks.boolean(allowed)))


@contextmanager
def allocations_of_splits() -> Iterator[list[tuple[int, ...]]]:
    from fusedattn.kernels import combine

    found: list[tuple[int, ...]] = []
    empty = combine.empty_partials

    def noted(*args: Any, **named: Any) -> Any:
        partials = empty(*args, **named)
        found.append(tuple(0 if x is None else x.numel() * x.itemsize for x in partials))
        return partials

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combine, "empty_partials", noted)
        yield found


@interpreted
def test_memory_of_splits():
    """As documented: for each row and split the float32 values and two numbers; three or four for a backward."""
    inputs = inputs_of(replace(BASE, dtype=torch.float16, head_dim_v=24))
    rows = inputs.q.shape[0] * inputs.q.shape[1] * inputs.q.shape[2]
    number = 4 * rows * 4  # splits, bytes
    with allocations_of_splits() as found:
        forward(inputs)
        testing.run(triton_attention, inputs)
        dropped = {"dropout_p": 0.2, "dropout_seed": torch.tensor([3])}
        forward(inputs, **dropped)
        testing.run(triton_attention, replace(inputs, **dropped))
        one_split = replace(inputs, k=inputs.k[:, :, :SPLIT], v=inputs.v[:, :, :SPLIT])
        testing.run(triton_attention, one_split)
    values = 24 * number
    assert found == [
        (values, number, number, 0, 0),
        (values, number, number, number, 0),
        (values, number, number, 0, 0),
        (values, number, number, number, number),
    ]


@pytest.mark.thorough
@interpreted
def test_generating_text_goes_this_way():
    torch.manual_seed(0)
    model = GPTModel(17, 24, 6, 2, max_len=64, n_kv_heads=2, positions="rotary").eval()
    ids = torch.randint(0, 17, (2, 40))
    expected = model.generate(ids, max_new_tokens=5, temperature=0.0)
    with tilings() as found:
        got = fuse(model, backend="triton").generate(ids, max_new_tokens=5, temperature=0.0)
    assert torch.equal(got, expected)
    assert [(x.heads, x.n_tiles) for x in found] == [(1, 2)] * 2 + [(4, 2)] * 8


@interpreted
def test_flash_attn_with_kvcache_goes_this_way():
    q, cache = torch.randn(2, 1, 6, 16), torch.randn(2, 2, 100, 2, 16)
    lengths = torch.tensor([70, 33], dtype=torch.int32)
    k, v = torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
    with tilings() as found:
        out = flash_attn.flash_attn_with_kvcache(q, *cache.unbind(), k, v, cache_seqlens=lengths, causal=True)
    assert [(x.heads, x.n_tiles) for x in found] == [(4, 4)]
    for b, n in enumerate((71, 34)):
        keys, values = (x[b : b + 1, :n].transpose(1, 2) for x in cache.unbind())
        alone = triton_attention(q[b : b + 1].transpose(1, 2), keys, values)
        assert torch.equal(out[b], alone[0].transpose(0, 1))


def test_configs_of_few_queries():
    """They depend on nothing that changes with the batch or a length."""
    head_dims, dtypes = (1, 64, 65, 128, 256, 512), (torch.float16, torch.float32)
    works = itertools.product(get_args(configs.Work), (False, True))
    for arch, head_dim, dtype, work in itertools.product(configs.TABLE, head_dims, dtypes, works):
        few = configs.lookup_few_queries(arch, head_dim, dtype, *work)
        assert few.split % few.config.BLOCK_N == 0
        assert few.config.style == "pointers"
    with pytest.raises(ValueError, match="split: got 40, allowed are multiples of 32"):
        configs.FewQueries(configs.TileConfig(16, 32, 4, 1, BOUNDARY=16), 40)
