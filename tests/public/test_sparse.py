"""Sparse masks: the pairs that each shows, the blocks that are visited, results and gradients on both backends."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.work.visited import visited
from fusedattn import attention, attention_varlen, masks, testing
from fusedattn.masks import Mask
from fusedattn.pattern_blocks import blocks_and_rule, blocks_of
from fusedattn.shard import WHOLE
from fusedattn.testing import Case
from tests.conftest import (
    BACKENDS,
    DEVICE,
    assert_accurate,
    torch_attention_beside_lse,
    triton_attention,
)
from tests.helpers import quick, sparse_pairs

pytestmark = pytest.mark.usefixtures("poison", "_seed")

backends = pytest.mark.parametrize("backend", BACKENDS)
FUNCTIONS = {"triton": triton_attention, "torch": torch_attention_beside_lse}
B, H, KV = 2, 4, 2


def drawn(*shape: int, most: int) -> Tensor:
    """Numbers of blocks, some of which no block has."""
    return torch.randint(-1, most + 2, shape)


# Masks for n queries and m keys.
KINDS: dict[str, Callable[[int, int], Mask]] = {
    "strided": lambda n, m: masks.strided(7),
    "strided, all": lambda n, m: masks.strided(1),
    "strided, far": lambda n, m: masks.strided(1000, causal=False),
    "strided, both ways": lambda n, m: masks.strided(5, causal=False, align="top_left"),
    "fixed": lambda n, m: masks.fixed(8, 2),
    "fixed, whole blocks": lambda n, m: masks.fixed(4, 4, causal=False),
    "fixed, both ways": lambda n, m: masks.fixed(9, 1, causal=False),
    "dilated": lambda n, m: masks.dilated(3, 2, 4),
    "dilated, itself": lambda n, m: masks.dilated(0, 0, 3),
    "dilated, first tokens": lambda n, m: masks.dilated(3, 2, 4, global_tokens=2),
    "dilated, tokens": lambda n, m: masks.dilated(2, 0, 3, global_tokens=torch.rand(B, m) < 0.1) & masks.causal(),
    "dilated, shared tokens": lambda n, m: masks.dilated(1, 1, 1, global_tokens=torch.rand(m) < 0.1),
    "BigBird": lambda n, m: masks.bigbird(8),
    "BigBird, causal": lambda n, m: masks.bigbird(16, window=0, n_global=1, n_random=1, causal=True, seed=3),
    "selected": lambda n, m: masks.selected_blocks(drawn(B, KV, -(-n // 16), 3, most=-(-m // 8)), (16, 8)),
    "selected, whole": lambda n, m: masks.selected_blocks(drawn(B, H, -(-n // 16), 2, most=-(-m // 32)), (16, 32)),
    "selected by query": lambda n, m: masks.selected_blocks(drawn(1, 1, n, 2, most=-(-m // 16)).int(), (1, 16)),
    "selected, nothing": lambda n, m: masks.selected_blocks(drawn(1, 1, n, 0, most=1), (1, 16)),
}

# Masks of a grid, or of a text, and the number of its tokens.
OF_TOKENS: dict[str, tuple[Mask, int]] = {
    "neighborhood, line": (masks.neighborhood(41, 5), 41),
    "neighborhood, plane": (masks.neighborhood((6, 10), (3, 4)), 60),
    "neighborhood, space": (masks.neighborhood((3, 4, 5), (2, 3, 5)), 60),
    "neighborhood, all": (masks.neighborhood((5, 7), (5, 7)), 35),
    "sliding tiles": (masks.sliding_tiles((3, 5), 4, (3, 2)), 60),
    "sliding tiles, whole": (masks.sliding_tiles((2, 2), 16, (1, 2)), 64),
    "block diffusion": (masks.block_diffusion(30, 4), 60),
    "block diffusion, one block": (masks.block_diffusion(7, 100), 14),
    "block diffusion, odd": (masks.block_diffusion(19, 1), 38),
}

SHAPES = [(41, 41), (33, 70), (70, 33), (1, 40), (40, 1), (1, 1), (0, 5), (5, 0), (0, 0)]


def problems() -> list[Any]:
    found = [pytest.param(make, n, m, id=f"{kind}, {n}, {m}") for kind, make in KINDS.items() for n, m in SHAPES]
    return [*found, *(pytest.param(lambda n, m, x=x: x, n, n, id=kind) for kind, (x, n) in OF_TOKENS.items())]


@pytest.mark.parametrize(("make", "n", "m"), problems())
def test_pairs_and_blocks(make, n, m):
    """``dense`` is the definition pair by pair, and the lists have every block with a visible pair."""
    mask = make(n, m)
    mask.check(B, H, n, m)
    dense = mask.dense(n, m, batch=B, nheads=H).expand(B, H, n, m)
    expected = torch.from_numpy(sparse_pairs.visible(mask.pattern, B, H, n, m)) & replace(mask, pattern=None).dense(
        n, m
    )
    assert torch.equal(dense, expected)
    rows, keys = slice(n // 3, n), torch.arange(m - 1, -1, -2)
    part = mask.dense(n, m, rows=rows, keys=keys, batch=B, nheads=H)
    assert torch.equal(part.expand(B, H, -1, -1), dense[:, :, rows][..., keys])
    for block_q, block_k in ((16, 16), (64, 32), (32, 1), (1, 1)):
        blocks = blocks_of(mask, (block_q, block_k), H, n, m, WHOLE, torch.device("cpu"))
        assert blocks.shape[-2:] == (-(-n // block_q), -(-m // block_k))
        shown = blocks.repeat_interleave(block_q, -2)[..., :n, :].repeat_interleave(block_k, -1)[..., :m]
        assert not (dense & ~shown).any()
        if block_q == block_k == 1:
            assert torch.equal(dense, shown.expand_as(dense))


def case_of(n: int, m: int, dtype: torch.dtype) -> Case:
    return Case(batch=B, nheads_q=H, nheads_kv=KV, seqlen_q=n, seqlen_k=m, head_dim=16, dtype=dtype, seed=1)


def inputs_of(make: Callable[[int, int], Mask], n: int, m: int, dtype: torch.dtype) -> testing.Inputs:
    inputs = testing.make_inputs(case_of(n, m, dtype), DEVICE)
    return replace(inputs, mask=make(n, m).to(DEVICE))


RESULTS = [
    *((make, n, m) for make in KINDS.values() for n, m in ((41, 41), (33, 70), (70, 33), (1, 40))),
    *((lambda n, m, x=x: x, n, n) for x, n in OF_TOKENS.values()),
]


@quick.every(61)
@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("make", "n", "m"), RESULTS)
def test_accuracy(make, n, m, dtype, backend):
    """Forward and backward within the error budget, empty rows and several tiles among them."""
    assert_accurate(FUNCTIONS[backend], inputs_of(make, n, m, dtype))


@quick.every(11)
@backends
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "m"), [(0, 5), (5, 0), (1, 1)])
def test_lengths_0_and_1(kind, n, m, backend):
    inputs = inputs_of(KINDS[kind], n, m, torch.float32)
    results = testing.run(functools.partial(attention, backend=backend), inputs)
    torch.testing.assert_close(results, testing.baseline(inputs))


@quick.every(9)
@backends
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["dilated", "fixed", "selected", "selected by query", "BigBird, causal"])
def test_keys_that_no_query_sees(kind, value, backend):
    """NaN and infinities there reach no result."""
    inputs = inputs_of(KINDS[kind], 12, 90, torch.float32)
    hidden = ~inputs.visible().any(2).unflatten(1, (KV, -1)).any(2)
    assert hidden.any()
    clean, poisoned = (
        replace(inputs, **{name: getattr(inputs, name).masked_fill(hidden[..., None], x) for name in "kv"})
        for x in (0.0, value)
    )
    function = functools.partial(attention, backend=backend)
    got, expected = testing.run(function, poisoned), testing.run(function, clean)
    torch.testing.assert_close(got, expected)
    assert (got["dk"][hidden] == 0).all()


@quick.every(19)
@backends
@pytest.mark.parametrize(
    "changes",
    [
        {"padding": "uneven", "empty_batch": True, "causal": "bottom_right"},
        {"window": (20, 3), "documents": "packed"},
        {"boolean": "full", "bias": "full", "softcap": 2.0},
        {"layout": 16, "sinks": True},
        {"layout": 48, "prefix": True},
        {"tree": True, "dropout_p": 0.3},
        {"alibi": True, "rope": "half", "score_mod": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("sparse", ["strided", "global", "blocks", "pairs"])
def test_with_other_parts(sparse, changes, backend):
    case = replace(case_of(45, 70, torch.float32), sparse=sparse, **changes)
    assert_accurate(FUNCTIONS[backend], testing.make_inputs(case, DEVICE))


@backends
def test_strided_and_large_inputs(backend):
    """Inputs whose last dimension alone is contiguous, and scores far beyond the range of exp."""
    inputs = inputs_of(KINDS["fixed"], 50, 50, torch.float32)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (inputs.q * 300, inputs.k * 300, inputs.v))
    assert_accurate(FUNCTIONS[backend], replace(inputs, q=q, k=k, v=v))


# The number of visited blocks.


def counted(mask: Mask, n: int) -> int:
    """The blocks of 64 queries and 64 keys in the list of a mask."""
    found = blocks_and_rule(mask, 1, n, n, WHOLE, torch.device("cpu"))
    return int(found.blocks.sum()) * found.block_q * found.block_k // 64**2


GROWING: dict[str, Callable[[int], Mask]] = {  # with the root of n
    "strided": lambda root: masks.strided(root),
    "fixed": lambda root: masks.fixed(root, 8),
    "dilated": lambda root: masks.dilated(root, root),
    "Longformer": lambda root: masks.dilated(root, root, global_tokens=root),
    "BigBird": lambda root: masks.bigbird(root, window=1, n_global=1, n_random=3),
    "neighborhood": lambda root: masks.neighborhood((root, root), 7),
    "sliding tiles": lambda root: masks.sliding_tiles((root, 4), root // 4, (3, 4)),
}


@pytest.mark.parametrize("kind", GROWING)
def test_visited_blocks_grow_with_n_root_n(kind):
    """Four times the tokens: eight times the blocks; a dense mask has 16 times as many."""
    counts = [counted(GROWING[kind](root), root * root) for root in (128, 256, 512)]
    assert counts[1] <= 9 * counts[0]
    assert counts[2] <= 8.5 * counts[1]
    assert counts[2] < (512 * 512 // 64) ** 2 / 4


def test_the_list_is_what_kernels_visit():
    for mask in (masks.fixed(64, 4), masks.dilated(20, 0, 2), masks.bigbird(64, n_random=1), masks.strided(100)):
        n = 500
        dense = mask.dense(n, n)[0, 0]
        tiles = [(block.start_m, block.start_n) for block in visited(mask, n, n, 64, 64)]
        assert len(set(tiles)) == len(tiles)
        with_pairs = {(i, j) for i in range(0, n, 64) for j in range(0, n, 64) if dense[i : i + 64, j : j + 64].any()}
        assert set(tiles) == with_pairs


def test_whole_blocks_need_no_rule():
    """Lists of blocks of 16 and more tokens are layouts; the mask inside a block is not evaluated."""
    indices = torch.zeros(1, 1, 8, 1, dtype=torch.int64)
    cpu = torch.device("cpu")
    found = blocks_and_rule(masks.selected_blocks(indices, (16, 32)), 1, 128, 128, WHOLE, cpu)
    assert (found.rule, found.block_q, found.block_k) == ("", 16, 32)
    assert blocks_and_rule(masks.bigbird(32), 1, 128, 128, WHOLE, cpu).rule == ""
    assert blocks_and_rule(masks.bigbird(32), 1, 100, 128, WHOLE, cpu).rule == "block_table"
    assert blocks_and_rule(masks.bigbird(20), 1, 128, 128, WHOLE, cpu).rule == "block_table"


# Builders.


def test_the_figure_of_the_paper():
    """Child et al. (2019), figure 3, smaller: a stride of 3, and blocks of 3 whose last token is a summary."""
    assert masks.strided(3).dense(7, 7)[0, 0].int().tolist()[6] == [1, 0, 0, 1, 1, 1, 1]
    assert masks.fixed(3).dense(7, 7)[0, 0].int().tolist()[4] == [0, 0, 1, 1, 1, 0, 0]
    assert masks.dilated(1, 1, 2, global_tokens=1).dense(5, 5)[0, 0].int().tolist() == [
        [1, 1, 1, 1, 1], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1],
    ]  # fmt: skip


def test_random_blocks():
    mask = masks.bigbird(16, window=1, n_global=1, n_random=3, seed=5)
    table = mask.dense(64 * 16, 64 * 16)[0, 0, ::16, ::16]
    assert torch.equal(table, masks.bigbird(16, n_random=3, seed=5).dense(1024, 1024)[0, 0, ::16, ::16])
    rows = table[2:-1].sum(1)
    assert ((rows >= 6) & (rows <= 7)).all()  # 3 of the window, 3 random, and the global one unless it is the window's
    assert not torch.equal(table, masks.bigbird(16, n_random=3, seed=6).dense(1024, 1024)[0, 0, ::16, ::16])
    counts = (table & masks.bigbird(16, n_random=0).dense(1024, 1024)[0, 0, ::16, ::16].logical_not()).sum(0)
    assert int(counts.max()) < 12  # drawn evenly: 3 on average
    earlier = masks.bigbird(16, n_random=2, causal=True).dense(1024, 1024)[0, 0, 15::16, ::16]
    assert (earlier.sum(1)[5:] == 5).all()  # itself, the one before, the global one, 2 random ones


def test_more_random_blocks_than_there_are():
    assert masks.bigbird(4, n_random=100).dense(10, 10).all()


def test_top_blocks_are_those_of_moba():
    q, k = torch.randn(B, H, 30, 8), torch.randn(B, KV, 50, 8)
    scores = masks.mean_pooled_scores(q, k, 16, causal=True)
    assert scores.shape == (B, H, 30, 4)
    means = torch.stack([x.mean(2) for x in k.split(16, 2)], 2).repeat_interleave(H // KV, 1)
    plain = masks.mean_pooled_scores(q, k, 16)
    torch.testing.assert_close(plain, q @ means.mT)
    dense = (masks.top_blocks(scores, 2, (1, 16)) & masks.causal()).dense(30, 50, nheads=H)
    for i in range(30):
        own = (i + 20) // 16
        assert dense[:, :, i, own * 16 : i + 21].all()
        assert not dense[:, :, i, i + 21 :].any()
        if own:
            best = plain[:, :, i, :own].argmax(-1)
            seen = dense[:, :, i, : own * 16].unflatten(-1, (own, 16))
            assert (seen.all(-1).sum(-1) == 1).all()
            assert torch.equal(seen.any(-1).int().argmax(-1), best)


def test_scores_are_not_rounded_by_autocast():
    q, k = torch.randn(B, H, 30, 8), torch.randn(B, KV, 50, 8)
    want = masks.mean_pooled_scores(q, k, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(masks.mean_pooled_scores(q, k, 16), want)


def test_hidden_keys_have_no_part_in_means():
    """Not even if they are NaN; a block of hidden keys is not chosen, except as a query's own."""
    q, k = torch.randn(B, H, 30, 8), torch.randn(B, KV, 30, 8)
    valid = torch.ones(B, 30, dtype=torch.bool)
    valid[0, 3:5] = False
    valid[1, 8:16] = False
    poisoned = k.masked_fill(~valid[:, None, :, None], math.nan)
    scores = masks.mean_pooled_scores(q, poisoned, 8, valid=valid)
    plain = masks.mean_pooled_scores(q, k, 8)
    kept = torch.cat((k[:1, :, :3], k[:1, :, 5:8]), dim=2)
    torch.testing.assert_close(scores[:1, ..., :1], masks.mean_pooled_scores(q[:1], kept, 8))
    assert (scores[1, ..., 1] == -math.inf).all()
    others = torch.ones_like(plain, dtype=torch.bool)
    others[0, ..., 0], others[1, ..., 1] = False, False
    torch.testing.assert_close(scores[others], plain[others])
    causal = masks.mean_pooled_scores(q, k, 8, causal=True, valid=valid)[1, ..., 1]
    assert (causal[:, 8:16] == math.inf).all()
    assert (causal[:, 16:] == -math.inf).all()


def test_scores_of_minus_infinity_and_nan_choose_nothing():
    scores = torch.tensor([math.nan, 1.0, -math.inf, -math.inf]).expand(1, 1, 2, 4)
    assert masks.top_blocks(scores, 3, (1, 2)).dense(2, 8)[0, 0, 0].int().tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert not masks.top_blocks(scores, 0, (1, 2)).dense(2, 8).any()


def test_copies():
    mask = masks.dilated(1, 1, global_tokens=torch.tensor([True, False, False])) & masks.causal()
    same = pickle.loads(pickle.dumps(mask))
    assert torch.equal(same.dense(3, 3), mask.dense(3, 3))
    assert mask.to("meta").pattern.tensors()["dilated(global_tokens)"].is_meta  # type: ignore[union-attr]
    assert not mask.is_full
    assert not masks.strided(2).only_bands


@quick.only(backend="triton", dynamic=True)
@backends
@pytest.mark.parametrize("dynamic", [False, True])
def test_in_a_compiled_function(backend, dynamic):
    """The mask is made there; with `dynamic` lengths are symbols."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=masks.strided(5) & masks.window(30, 0), backend=backend)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for n in (40, 70):
        q, k, v = (torch.randn(1, 2, n, 8, device=DEVICE, requires_grad=True) for _ in "qkv")
        expected = torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))
        torch.testing.assert_close(torch.autograd.grad(compiled(q, k, v).square().sum(), (q, k, v)), expected)


@pytest.mark.thorough
def test_compiled_selected_blocks():
    """Lists of blocks are inputs of the graph."""

    def call(q: Tensor, indices: Tensor) -> Tensor:
        return attention(q, q, q, mask=masks.selected_blocks(indices, (1, 16)), backend="triton")

    q, indices = torch.randn(1, 2, 40, 8, device=DEVICE), drawn(1, 2, 40, 2, most=2).to(DEVICE)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, indices), call(q, indices))


@pytest.mark.thorough
def test_second_derivatives_of_kernels():
    q, k, v = (torch.randn(1, 1, 6, 4, dtype=torch.float64, device=DEVICE, requires_grad=True) for _ in "qkv")
    function = functools.partial(attention, mask=masks.strided(2), backend="triton")
    assert torch.autograd.gradgradcheck(function, (q, k, v))


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "stride 0": (lambda: masks.strided(0), ValueError, "stride: got 0, allowed are 1 and more"),
    "stride 1.5": (lambda: masks.strided(1.5), TypeError, "stride: got float"),  # type: ignore[arg-type]
    "True": (lambda: masks.fixed(True), TypeError, "stride: got bool"),
    "expressivity": (lambda: masks.fixed(4, 5), ValueError, r"expressivity: got 5, allowed are 1 .. 4"),
    "align": (lambda: masks.strided(4, align="left"), ValueError, "align: got 'left'"),  # type: ignore[arg-type]
    "left": (lambda: masks.dilated(-1, 0), ValueError, "left: got -1"),
    "tokens": (lambda: masks.dilated(1, 0, global_tokens=torch.ones(3)), TypeError, "global_tokens: got a torch.fl"),
    "tokens of 3 dimensions": (
        lambda: masks.dilated(1, 0, global_tokens=torch.ones(1, 1, 3, dtype=torch.bool)), ValueError, "global_tokens",
    ),
    "seed": (lambda: masks.bigbird(4, seed=-1), ValueError, "seed: got -1"),
    "float indices": (lambda: masks.selected_blocks(torch.ones(1, 1, 1, 1), 16), TypeError, "indices: got torch.fl"),
    "three sizes": (lambda: masks.selected_blocks(drawn(1, 1, 1, 1, most=1), (1, 2, 3)), ValueError, "block_size"),  # type: ignore[arg-type]
    "int scores": (lambda: masks.top_blocks(drawn(1, 1, 1, 1, most=1), 1, 16), TypeError, "scores: got torch.int64"),
    "window": (lambda: masks.neighborhood((4, 4), (5, 3)), ValueError, "window: got 5, allowed are 1 .. 4"),
    "four dimensions": (lambda: masks.neighborhood((2, 2, 2, 2), 1), ValueError, "shape, window: got"),
    "two patterns": (lambda: masks.strided(4) & masks.fixed(4), ValueError, "Strided and Fixed to combine"),
    "lengths": (lambda: masks.block_diffusion(4, 2).check(1, 1, 8, 9), ValueError, "allowed are 8 for both"),
    "grid": (lambda: masks.neighborhood((2, 3), 2).check(1, 1, 5, 5), ValueError, "allowed are 6 for both"),
    "tiles": (lambda: masks.sliding_tiles(3, 4, 1).check(1, 1, 5, 5), ValueError, "allowed are 12 for both"),
    "rows": (
        lambda: masks.selected_blocks(drawn(2, 2, 3, 1, most=1), 16).check(2, 4, 49, 60), ValueError,
        r"selected_blocks\(indices\): got shape \(2, 2, 3, 1\)",
    ),
    "heads": (
        lambda: masks.selected_blocks(drawn(2, 3, 3, 1, most=1), 16).check(2, 4, 48, 60), ValueError,
        "a divisor of 4",
    ),
    "heads of k": (
        lambda: masks.mean_pooled_scores(torch.ones(1, 3, 1, 4), torch.ones(1, 2, 1, 4), 2), ValueError, "q, k: got",
    ),
    "valid of floats": (
        lambda: masks.mean_pooled_scores(*torch.ones(2, 1, 1, 3, 4), 2, valid=torch.ones(1, 3)), TypeError, "valid",
    ),
    "valid of other keys": (
        lambda: masks.mean_pooled_scores(*torch.ones(2, 1, 1, 3, 4), 2, valid=torch.ones(1, 4) > 0),
        ValueError, r"valid: got shape \(1, 4\), allowed is \(batch, seqlen_k\) = \(1, 3\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what):
    call, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        call()


@backends
def test_calls_that_no_backend_runs(backend):
    from fusedattn.testing import triton_functions

    q = torch.randn(1, 1, 8, 8, device=DEVICE)
    both = masks.strided(2) & triton_functions.mask_function(1, 1, torch.Generator()).to(DEVICE)
    with pytest.raises(NotImplementedError, match="a sparse pattern and a function"):
        attention(q, q, q, mask=both, backend="triton")
    assert attention(q, q, q, mask=both, backend="torch").isfinite().all()
    stops = torch.tensor([0, 8], dtype=torch.int32, device=DEVICE)
    with pytest.raises(NotImplementedError, match="a sparse pattern with packed sequences"):
        attention_varlen(*[q[0].transpose(0, 1)] * 3, stops, stops, mask=masks.strided(2), backend=backend)
