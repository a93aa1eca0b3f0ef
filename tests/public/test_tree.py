"""``masks.tree``: which of the newest keys each query sees, beside all older ones; and that those cost nothing."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.work.visited import visited
from fusedattn import attention, attention_varlen, masks, reference, testing
from fusedattn.backends.triton import launching
from fusedattn.backends.triton.operands import constants_of
from fusedattn.options import Options
from fusedattn.testing import Case
from tests.conftest import (
    BACKENDS,
    DEVICE,
    INTERPRETING,
    TORCH_LIMIT,
    assert_accurate,
    assert_equal,
    assert_ratios,
    inputs_of,
    torch_attention,
    triton_attention,
)
from tests.helpers import quick
from tests.helpers.accesses import checked_accesses
from tests.helpers.embedded import run
from tests.helpers.hostile import strided

pytestmark = [pytest.mark.usefixtures("poison", "_seed")]

backends = pytest.mark.parametrize("backend", BACKENDS)

# The interpreter's tiles have 16 queries if queries are few, 32 otherwise, and 16 keys.
BASE = Case(batch=2, nheads_q=4, nheads_kv=2, seqlen_q=20, seqlen_k=70, head_dim=16, tree=True)
LENGTHS = [(1, 40), (15, 50), (16, 48), (17, 49), (31, 47), (32, 80), (33, 33), (33, 90), (40, 25), (5, 1)]


def is_seen(m: Tensor, seqlen_k: int) -> Tensor:
    """The definition, pair by pair, for `m` ``(batch, nheads, seqlen_q, seqlen_q)``."""
    batch, nheads, seqlen_q, _ = m.shape
    table = m.tolist()
    older = seqlen_k - seqlen_q
    rows = [
        [
            [[j < older or table[b][h][i][j - older] for j in range(seqlen_k)] for i in range(seqlen_q)]
            for h in range(nheads)
        ]
        for b in range(batch)
    ]
    return torch.tensor(rows, dtype=torch.bool).view(batch, nheads, seqlen_q, seqlen_k)


def written_out(inputs: testing.Inputs) -> testing.Inputs:
    """The same problem with its tree written out as a boolean mask, by :func:`is_seen`."""
    assert inputs.mask.tree is not None
    full = inputs.mask.tree.expand(*inputs.q.shape[:3], -1)
    seen = is_seen(full, inputs.k.shape[2]).to(DEVICE)
    return replace(inputs, mask=replace(inputs.mask, tree=None) & masks.boolean(seen))


def with_tree(inputs: testing.Inputs, m: Tensor) -> testing.Inputs:
    return replace(inputs, mask=replace(inputs.mask, tree=m.to(DEVICE)))


def test_a_draft_tree_by_hand():
    """Tokens 1 and 2 follow token 0; 3 and 4 are two continuations of 1, and 5 one of 2. Three keys are older."""
    m = torch.eye(6, dtype=torch.bool)
    for i, parent in enumerate([0, 0, 0, 1, 1, 2]):
        m[i] |= m[parent]
    rows = masks.tree(m).dense(6, 9)[0, 0].int().tolist()
    assert ["".join(map(str, row)) for row in rows] == [
        "111100000", "111110000", "111101000", "111110100", "111110010", "111101001",
    ]  # fmt: skip


def test_more_queries_than_keys_by_hand():
    """The last query and the last key belong together, so the first key has column 2."""
    m = torch.tensor([[0, 0, 1, 0], [1, 1, 0, 1], [0, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    assert masks.tree(m).dense(4, 2)[0, 0].int().tolist() == [[1, 0], [0, 1], [1, 1], [0, 0]]


def test_the_reference_by_hand():
    """Softmax over the keys that the definition shows, in Python's own arithmetic."""
    n, older, width = 3, 2, 4
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(x, width, dtype=torch.float64, generator=generator) for x in (n, n + older, n + older))
    m = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    sees = [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4]]
    out, lse, _ = reference.attention(q[None, None], k[None, None], v[None, None], mask=masks.tree(m))
    for i, keys in enumerate(sees):
        scores = [sum(a * b for a, b in zip(q[i].tolist(), k[j].tolist(), strict=True)) / width**0.5 for j in keys]
        total = sum(map(math.exp, scores))
        assert lse[0, 0, i].item() == pytest.approx(math.log(total), rel=1e-13)
        for d in range(width):
            expected = sum(math.exp(s) * v[j, d].item() for s, j in zip(scores, keys, strict=True)) / total
            assert out[0, 0, i, d].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("shape", [(3, 2, 6, 6), (1, 1, 6, 6), (3, 1, 6, 1), (2, 1, 6), (6, 6), (6,), ()])
@pytest.mark.parametrize("expand", [True, False])
def test_dense_of_sequences_of_several_lengths(shape, expand):
    """Each is aligned to its own end and uses the first rows and columns; pairs beyond its lengths do not matter."""
    m = torch.rand(shape) < 0.5
    lengths_q, lengths_k = [6, 2, 5], [9, 4, 3]
    parts: list[tuple[Any, Any]] = [(None, None), (slice(1, 5), torch.tensor([8, 0, 3, 2]))]
    for rows, keys in parts:
        found = masks.tree(m).dense(
            6, 9, rows=rows, keys=keys, lengths=(torch.tensor(lengths_q), torch.tensor(lengths_k)), expand=expand
        )
        found = found.expand(3, 2, len(torch.arange(6)[rows or slice(None)]), -1)
        for b, (n_q, n_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
            own = is_seen(m.expand(3, 2, 6, 6)[b : b + 1, :, :n_q, :n_q], n_k)[0]
            own = torch.nn.functional.pad(own, (0, 9 - n_k, 0, 6 - n_q))
            exists = torch.zeros(6, 9, dtype=torch.bool)
            exists[:n_q, :n_k] = True
            for x in (own, exists):
                assert x.shape[-2:] == (6, 9)
            own, exists = (x if rows is None else x[..., rows, :][..., keys] for x in (own, exists))
            assert torch.equal(found[b] & exists, own)


ACCURATE: dict[str, dict[str, Any]] = {
    "few queries": {"seqlen_q": 3, "seqlen_k": 101},  # the keys are in splits
    "few queries, one split": {"seqlen_q": 4, "seqlen_k": 30},
    "many queries": {"seqlen_q": 50, "seqlen_k": 90},
    "one query": {"seqlen_q": 1, "nheads_q": 6},
    "GQA 8:1": {"nheads_q": 8, "nheads_kv": 1, "seqlen_q": 2},
    "causal": {"causal": "bottom_right"},
    "causal, top-left": {"causal": "top_left", "seqlen_k": 40},
    "right padding": {"padding": "right", "empty_batch": True},
    "left padding, few queries": {"padding": "left", "seqlen_q": 4},
    "uneven padding": {"padding": "uneven", "seqlen_q": 40},
    "window": {"window": (30, 2)},
    "window, few queries": {"window": (40, 0), "seqlen_q": 4},
    "documents": {"documents": "packed"},
    "prefix": {"prefix": True},
    "boolean": {"boolean": "full"},
    "block-sparse": {"layout": 16},
    "more queries than keys": {"seqlen_q": 60, "seqlen_k": 25},
    "scores and dropout": {"bias": "per_head", "softcap": 2.0, "sinks": True, "dropout_p": 0.2, "rope": "half"},
    **{f"{n} of {m}": {"seqlen_q": n, "seqlen_k": m, "nheads_q": 2, "nheads_kv": 1} for n, m in LENGTHS},
}


@quick.every(3)
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, (torch.float32, torch.bfloat16)[i % 2]) for i, name in enumerate(ACCURATE)], ids=str
)
def test_accuracy(name, dtype):
    """Out, lse and all gradients; the truth uses the mask that the definition gives."""
    inputs = inputs_of(replace(BASE, **ACCURATE[name], dtype=dtype))
    truth = testing.golden(written_out(inputs))
    assert_equal(testing.golden(inputs), truth)
    assert_accurate(triton_attention, inputs, name, truth)


@quick.every(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACCURATE)
def test_accuracy_of_the_torch_backend(name, dtype):
    inputs = testing.make_inputs(replace(BASE, **ACCURATE[name], dtype=dtype))
    assert_ratios(testing.check(torch_attention, inputs), name, TORCH_LIMIT[dtype])
    torch.testing.assert_close(
        torch_attention(inputs.q, inputs.k, inputs.v, **inputs.options),
        torch_attention(inputs.q, inputs.k, inputs.v, **written_out(inputs).options),
        atol=1e-2 if dtype == torch.bfloat16 else 1e-5,
        rtol=1e-2 if dtype == torch.bfloat16 else 1e-5,
    )


@quick.every(2)
@pytest.mark.parametrize("shape", [(2, 2, 20, 20), (1, 2, 20, 20), (2, 1, 20, 20), (20, 20), (20, 1), (2, 1, 20), ()])
def test_broadcast_and_strided_trees(shape):
    """The same bits as of the tree written out for each head, whatever its strides."""
    inputs = inputs_of(replace(BASE, nheads_q=2, seqlen_k=40))
    m = (torch.rand(shape) < 0.6).to(DEVICE)
    whole = m.expand(2, 2, 20, 20)
    expected = testing.run(triton_attention, with_tree(inputs, whole.contiguous()))
    inside = torch.nn.functional.pad(~whole, (3, 2, 1, 0))[..., 1:, 3:-2].copy_(whole)
    transposed = whole.mT.contiguous().mT
    for same in (m, strided(m), *((transposed, inside) if m.dim() == 4 else ())):
        assert_equal(testing.run(triton_attention, with_tree(inputs, same)), expected)


@backends
@pytest.mark.parametrize("seqlen_q", [3, 20])
def test_several_masks(seqlen_q, backend):
    """``&`` of two trees is a logical and; a causal mask beside a tree hides the later ones of its keys."""
    inputs = inputs_of(replace(BASE, seqlen_q=seqlen_q, seqlen_k=40, nheads_q=2))
    one, other = (torch.rand(2, 1, seqlen_q, seqlen_q) < 0.7 for _ in range(2))
    function = functools.partial(attention, backend=backend)

    def results(*parts: masks.Mask) -> dict[str, Tensor]:
        mask = functools.reduce(lambda a, b: a & b, parts).to(DEVICE)
        return testing.run(function, replace(inputs, mask=mask))

    assert_equal(results(masks.tree(one), masks.tree(other)), results(masks.tree(one & other)))
    torch.testing.assert_close(results(masks.causal(), masks.tree(one)), results(masks.tree(one.tril())))
    tril = torch.ones(seqlen_q, seqlen_q, dtype=torch.bool).tril()
    torch.testing.assert_close(results(masks.tree(tril)), results(masks.causal()))


@quick.only(value=math.isnan)
@backends
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("seqlen_q", [3, 20])
def test_keys_that_a_tree_hides(seqlen_q, value, backend):
    """Their values change nothing, and their own gradients are 0; a key that some queries see reaches these alone."""
    inputs = inputs_of(replace(BASE, seqlen_q=seqlen_q, seqlen_k=40, nheads_q=2))
    older = 40 - seqlen_q
    m = torch.rand(2, 2, seqlen_q, seqlen_q) < 0.7
    m[..., 1], m[..., 2] = False, torch.arange(seqlen_q) % 3 == 0
    inputs = with_tree(inputs, m)
    function = functools.partial(attention, backend=backend)

    def poisoned(j: int, x: float) -> testing.Inputs:
        at = torch.tensor([older + j], device=DEVICE)
        return replace(inputs, k=inputs.k.index_fill(2, at, x), v=inputs.v.index_fill(2, at, x))

    expected, got = (testing.run(function, poisoned(1, x)) for x in (0.0, value))
    torch.testing.assert_close(got, expected)
    assert all(x.isfinite().all() for x in got.values())
    assert (got["dk"][:, :, older + 1] == 0).all()
    assert (got["dv"][:, :, older + 1] == 0).all()
    expected, got = (testing.run(function, poisoned(2, x)) for x in (0.0, value))
    reached = m[..., 2].to(DEVICE)
    torch.testing.assert_close(got["out"][~reached], expected["out"][~reached])
    assert got["out"].isnan().any(-1)[reached].all() or value == math.inf
    assert got["out"].isfinite().all(-1)[~reached].all()


@backends
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(6, 6), (40, 33), (5, 2)])
def test_rows_that_see_nothing(seqlen_q, seqlen_k, backend):
    """Only if no key is older. Their results are 0, their lse is -inf, and a NaN in them reaches no gradient."""
    inputs = inputs_of(replace(BASE, nheads_q=2, nheads_kv=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k))
    m = torch.rand(2, 2, seqlen_q, seqlen_q) < 0.7
    m[..., 2::3, :] = False
    empty = ~is_seen(m, seqlen_k).any(-1).to(DEVICE)
    inputs = replace(
        with_tree(inputs, m),
        q=inputs.q.masked_fill(empty[..., None], math.nan),
        dout=inputs.dout.masked_fill(empty[..., None], math.nan),
        dlse=inputs.dlse.masked_fill(empty, math.nan),
    )
    found = run(inputs, functools.partial(attention, backend=backend))
    assert empty[:, :, 2::3].all()
    assert not empty.all()
    assert (found["out"][empty] == 0).all()
    assert (found["dq"][empty] == 0).all()
    assert torch.equal(found["lse"] == -math.inf, empty)
    assert all(found[name].isfinite().all() for name in ("out", "dq", "dk", "dv"))


PACKED_Q, PACKED_K = (7, 0, 33, 1, 20, 4), (40, 5, 61, 29, 11, 4)


@backends
@pytest.mark.parametrize("shape", [(6, 4, 33, 33), (1, 1, 33, 33), (6, 1, 33, 1)])
def test_packed_sequences(shape, backend):
    """Each is aligned to its own end, and uses its own matrix: the first rows and columns of it."""
    n, longest_k = len(PACKED_Q), max(PACKED_K)
    m = (torch.rand(shape) < 0.6).to(DEVICE)
    whole = m.expand(n, 4, 33, 33)
    shapes = ((sum(PACKED_Q), 4), (sum(PACKED_K), 2), (sum(PACKED_K), 2))
    q, k, v = (torch.randn(*x, 16, device=DEVICE, requires_grad=True) for x in shapes)
    stops_q, stops_k = ([0, *itertools.accumulate(x)] for x in (PACKED_Q, PACKED_K))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (stops_q, stops_k))
    out, lse = attention_varlen(
        q, k, v, cu_q, cu_k, 33, longest_k, mask=masks.tree(m), return_lse=True, backend=backend
    )
    dout, dlse = torch.randn_like(out), torch.randn_like(lse).masked_fill(lse.detach() == -math.inf, 0.0)
    gradients = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    for i in range(n):
        rows, keys = slice(stops_q[i], stops_q[i + 1]), slice(stops_k[i], stops_k[i + 1])
        own = [x.detach()[y].transpose(0, 1)[None].double() for x, y in ((q, rows), (k, keys), (v, keys))]
        own = [x.requires_grad_() for x in own]
        seen = is_seen(whole[i : i + 1, :, : PACKED_Q[i], : PACKED_Q[i]], PACKED_K[i]).to(DEVICE)
        alone, alone_lse, _ = reference.attention(*own, mask=masks.boolean(seen))
        expected = torch.autograd.grad(
            (alone, alone_lse), own,
            (dout[rows].transpose(0, 1)[None].double(), dlse[:, rows][None].double()),
        )  # fmt: skip
        torch.testing.assert_close(out[rows].transpose(0, 1)[None].double(), alone, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[:, rows][None].double(), alone_lse, atol=1e-5, rtol=1e-5)
        for found, x, part in zip(gradients, expected, (rows, keys, keys), strict=True):
            torch.testing.assert_close(found[part].transpose(0, 1)[None].double(), x, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 100), (5, 256), (40, 300), (64, 64), (50, 20)])
def test_blocks_of_older_keys_are_full(seqlen_q, seqlen_k):
    """Only the last blocks, those with one of the newest keys, read the tree."""
    mask, older = masks.tree(torch.zeros(seqlen_q, seqlen_q, dtype=torch.bool)), seqlen_k - seqlen_q
    for start_m, blocks in itertools.groupby(visited(mask, seqlen_q, seqlen_k, 32, 16), key=lambda x: x.start_m):
        own = list(blocks)
        assert [x.start_n for x in own] == list(range(0, seqlen_k, 16)), start_m
        assert [x.is_full for x in own] == [x.start_n + 16 <= older for x in own], start_m


@pytest.mark.skipif(not INTERPRETING, reason="on a GPU, compute-sanitizer checks the addresses")
@quick.every(3)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_addresses(seqlen_q, seqlen_k):
    """Kernels read elements of the tree alone; it lies inside a larger tensor, with gaps between rows and elements."""
    inputs = inputs_of(replace(BASE, nheads_q=2, nheads_kv=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k))
    inputs = replace(inputs, mask=strided(inputs.mask))
    with checked_accesses() as accesses:
        testing.run(triton_attention, inputs)
    assert {"attention_fwd", "attention_bwd_dkdv", "attention_bwd_dq"} <= set(accesses.launched)


def test_nothing_of_the_size_of_the_scores_is_made():
    """The kernels get the caller's own tensor."""
    m = torch.ones(4, 4, dtype=torch.bool, device=DEVICE)
    q, k = torch.zeros(1, 2, 4, 16, device=DEVICE), torch.zeros(1, 2, 900, 16, device=DEVICE)
    mask = launching.problem_of(q, k, k, constants_of(Options(masks.tree(m)), keep_residual=False)).call.mask
    assert mask.tree.ptr.data_ptr() == m.data_ptr()
    assert mask._replace(tree=None, function_args=None) == mask._replace(
        valid_ptr=None, key_range_ptr=None, allowed=None, prefix_ptr=None, documents=None, layout=None, tree=None,
        function_args=None,
    )  # fmt: skip
