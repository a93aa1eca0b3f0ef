"""The torch backend's plan: the scores it asks torch's function for, and correct results for the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn import attention, biases, masks, reference, testing
from fusedattn.backends.torch import mask_plan
from fusedattn.backends.torch.boxes import cut, paste
from fusedattn.masks import Band, Mask
from tests.conftest import TORCH_LIMIT, assert_ratios, torch_attention_beside_lse

pytestmark = pytest.mark.usefixtures("poison", "_seed")

B = 3


@pytest.fixture
def small(monkeypatch):
    """Plans with many pieces for few tokens."""
    monkeypatch.setattr(mask_plan, "CALL", 1)
    monkeypatch.setattr(mask_plan, "FEW", 0)
    monkeypatch.setattr(mask_plan, "BLOCKS", (3, 7))


def paddings(n: int) -> dict[str, Tensor | None]:
    """bool ``(B, n)``: some are uneven, and in some a batch is all padding."""
    at = torch.arange(n)[None]
    return {
        "none": None,
        "right": at < torch.tensor([[n], [n // 2], [1]]),
        "left": at >= torch.tensor([[n // 2], [n // 2], [n - 1]]),
        "both": (at >= 2) & (at < torch.tensor([[n], [n - 1], [0]])),
        "gaps": torch.rand(B, n) < 0.6,
        "all": (at < 0).expand(B, -1),
    }


def structures(n: int, m: int) -> dict[str, Mask]:
    """Masks for ``n`` queries and ``m`` keys, in both alignments."""
    found = {"full": masks.full()}
    for align in ("bottom_right", "top_left"):
        found[f"causal, {align}"] = masks.causal(align)
        found[f"window, {align}"] = masks.window(4, 1, align)
        found[f"earlier, {align}"] = masks.window(2, None, align) & masks.causal(align)
        found[f"prefix, {align}"] = masks.prefix_lm(torch.tensor([0, m // 2, m + 2]), align)
    found["far"] = Mask(bands=frozenset({Band(None, -3, "bottom_right")}))
    found["nothing"] = Mask(bands=frozenset({Band(-3, 2, "top_left")}))
    ordered_q, ordered_k = (torch.randint(0, 3, (B, x)).sort(1)[0] for x in (n, m))
    found["documents"] = masks.documents(ordered_q, ordered_k)
    found["documents, causal"] = found["documents"] & masks.causal()
    found["documents, mixed"] = masks.documents(torch.randint(0, 3, (B, n)), torch.randint(0, 3, (B, m)))
    found["documents, prefix"] = found["documents"] & found["prefix, bottom_right"] & masks.window(5, 2)
    found["prefix, narrower"] = found["prefix, bottom_right"] & masks.causal("top_left")
    found["boolean"] = masks.boolean(torch.rand(B, 4, n, m) < 0.6)
    found["boolean, causal"] = masks.boolean(masks.causal().dense(n, m)) & masks.window(6, 2)
    found["boolean of keys"] = masks.boolean(torch.rand(B, 1, 1, m) < 0.6) & masks.causal()
    found["boolean of one key"] = masks.boolean(torch.rand(n, 1) < 0.6)
    found["tree, window"] = masks.tree(torch.rand(B, 1, n, n) < 0.6) & masks.window(6, None)
    found["sparse"] = masks.block_sparse(torch.rand(-(-n // 16), -(-m // 16)) < 0.5, 16)
    return found


LENGTHS = [(17, 17), (9, 20), (20, 9), (1, 13), (13, 1), (1, 1)]


def results(
    function: Callable[..., Any], qkv: tuple[Tensor, ...], dout: Tensor, **options: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    out = function(*qkv, **options)
    out = out if isinstance(out, Tensor) else out[0]
    return out.detach(), torch.autograd.grad(out, qkv, dout)


def problem(n: int, m: int, head_dim_v: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """q, k and v; k is stored token by token."""
    q, v = torch.randn(B, 4, n, 4, dtype=dtype), torch.randn(B, 2, m, head_dim_v, dtype=dtype)
    k = torch.randn(B, m, 2, 4, dtype=dtype).transpose(1, 2)
    return tuple(x.requires_grad_() for x in (q, k, v))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("structure", structures(2, 2))
def test_every_mask(structure, lengths):
    """In float64, with every padding; NaN in the gradient of a row that sees nothing reaches no gradient."""
    n, m = lengths
    qkv = problem(n, m)
    for name, valid in paddings(m).items():
        mask = structures(n, m)[structure] & (masks.full() if valid is None else masks.padding(valid))
        empty = ~mask.dense(n, m, batch=B, nheads=4).any(-1, keepdim=True)
        dout = torch.randn_like(qkv[0])
        expected = results(reference.attention, qkv, dout, mask=mask)
        got = results(attention, qkv, dout.masked_fill(empty, torch.nan), mask=mask, backend="torch")
        torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")
        assert (got[0].masked_select(empty) == 0).all()
        assert (got[1][0].masked_select(empty) == 0).all()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("lengths", [(17, 17), (9, 20)], ids=str)
@pytest.mark.parametrize("kind", ["tensor", "alibi", "with -inf", "with a gradient"])
@pytest.mark.parametrize("structure", ["full", "causal, top_left", "window, bottom_right", "documents", "boolean"])
def test_with_a_bias(structure, kind, lengths):
    n, m = lengths
    qkv = problem(n, m)
    bias: Any = torch.randn(4, 1, m, dtype=torch.float64)
    if kind == "with -inf":
        bias[0, 0, : m - 1] = -torch.inf
    elif kind == "alibi":
        bias = biases.alibi(torch.rand(4))
    elif kind == "with a gradient":
        qkv = (*qkv, bias.requires_grad_())
    for valid in paddings(m).values():
        mask = structures(n, m)[structure] & (masks.full() if valid is None else masks.padding(valid))
        found = []
        for function, options in ((reference.attention, {}), (attention, {"backend": "torch"})):
            out = function(*qkv[:3], mask=mask, bias=bias, **options)
            out = out if isinstance(out, Tensor) else out[0]
            found.append((out, torch.autograd.grad(out.sin().sum(), qkv)))
        torch.testing.assert_close(*found)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["window", "more keys", "padded"])
def test_sums_over_pieces_are_not_rounded_each(name, dtype):
    """A key is in many pieces, and its gradient is a sum over them."""
    case = testing.Case(batch=2, nheads_q=4, nheads_kv=2, seqlen_q=61, seqlen_k=61, head_dim=16, dtype=dtype)
    mask = masks.window(20, 3)
    if name == "more keys":
        case, mask = replace(case, seqlen_k=90), masks.causal()
    elif name == "padded":
        mask = masks.causal() & masks.padding(torch.arange(61)[None] < torch.tensor([[30], [61]]))
    inputs = replace(testing.make_inputs(case, "cpu"), mask=mask)
    assert_ratios(testing.check(torch_attention_beside_lse, inputs), name, TORCH_LIMIT[dtype])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("head_dim_v", [3, 4, 9])
def test_head_dims(head_dim_v):
    """Without gradients the narrower tensors are padded with zeros; with gradients there are second derivatives."""
    qkv = problem(9, 12, head_dim_v)
    mask = masks.causal() & masks.padding(torch.arange(12)[None] < torch.tensor([[12], [5], [0]]))
    expected = reference.attention(*qkv, mask=mask)[0]
    with torch.no_grad():
        out = attention(*qkv, mask=mask, backend="torch")
    torch.testing.assert_close(out, expected.detach())
    assert out.shape == expected.shape
    if head_dim_v != 4:
        assert torch.autograd.gradgradcheck(lambda *x: attention(*x, mask=mask, backend="torch"), qkv, fast_mode=True)


@pytest.mark.usefixtures("small")
def test_transforms_of_torch_func():
    q, k, v = (x.detach() for x in problem(6, 6))
    mask = masks.causal() & masks.padding(torch.arange(6)[None] < torch.tensor([[6], [3], [0]]))

    def function(k: Tensor) -> Tensor:
        return attention(q, k, v, mask=mask, backend="torch").square().sum()

    def eager(k: Tensor) -> Tensor:
        return reference.attention(q, k, v, mask=mask)[0].square().sum()

    expected = torch.func.grad(eager)(k)
    torch.testing.assert_close(torch.func.grad(function)(k), expected)
    torch.testing.assert_close(torch.autograd.functional.jacobian(function, k), expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.usefixtures("small")
def test_a_trace_is_not_of_one_padding():
    q, k, v = (x.detach() for x in problem(8, 8))
    at = torch.arange(8)[None]

    def function(valid: Tensor) -> Tensor:
        return attention(q, k, v, mask=masks.causal() & masks.padding(valid), backend="torch")

    traced = torch.jit.trace(function, (at < torch.tensor([[3], [2], [5]]),), check_trace=False)
    other = at >= torch.tensor([[0], [4], [1]])
    torch.testing.assert_close(traced(other), function(other))


def counted(monkeypatch: pytest.MonkeyPatch, seqlen: int, mask: Mask, batch: int = 2, **options: Any) -> float:
    """The number of scores per batch and head that torch's function computes; half of them for ``is_causal``."""
    asked: list[float] = []
    q, k, v = (torch.randn(batch, heads, seqlen, 2) for heads in (8, 4, 4))

    def counting(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, **other: Any) -> Tensor:
        for x, whole in ((k, keys), (v, values)):
            assert x.untyped_storage().data_ptr() == whole, "keys and values are not copied"
        n, m = q.shape[2], k.shape[2]
        asked.append(q.shape[0] * q.shape[1] * (n * m - (min(n, m) * (min(n, m) - 1) // 2 if is_causal else 0)))
        return torch.zeros(*q.shape[:3], v.shape[3])

    keys, values = k.untyped_storage().data_ptr(), v.untyped_storage().data_ptr()
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", counting)
        attention(q, k, v, mask=mask, backend="torch", **options)
    return sum(asked) / (batch * 8)


def first(n: int, *lengths: int) -> Mask:
    return masks.padding(torch.arange(n)[None] < torch.tensor(lengths)[:, None])


def last(n: int, *lengths: int) -> Mask:
    return masks.padding(torch.arange(n)[None] >= n - torch.tensor(lengths)[:, None])


N = 1024
SQUARE = N * N


ALIKE = torch.arange(N).expand(2, -1)

# A mask, and the largest share of the square that may be computed.
SHARES = {
    "causal": (masks.causal(), 0.501),
    "half padded": (first(N, N // 2, N // 2), 0.5),
    "half padded, to the left": (last(N, N // 2, N // 2), 0.5),
    "unevenly padded": (first(N, N // 2, N // 4), 0.375),
    "one is all padding": (first(N, N // 2, 0), 0.25),
    "causal, half padded": (masks.causal() & first(N, N // 2, N // 2), 0.376),
    "causal, half padded to the left": (masks.causal() & last(N, N // 2, N // 4), 0.08),
    "causal, with gaps": (masks.causal() & masks.padding(ALIKE % 7 != 0), 0.63),
    "prefix": (masks.prefix_lm(torch.tensor([N // 4, N // 4])), 0.7),
    "documents": (masks.documents(ALIKE // 128), 0.126),
    "documents, causal": (masks.documents(ALIKE // 128) & masks.causal(), 0.064),
    "short documents": (masks.documents(ALIKE // 10) & masks.causal(), 0.15),
    "unordered documents": (masks.documents(ALIKE % 3), 1.0),
    "a window": (masks.window(63, 0), 191 / N),
    "a window at the start": (masks.window(63, 0, "top_left"), 191 / N),
    "a window, padded": (masks.window(63, 0) & first(N, N // 2, N), 0.75 * 200 / N),
    "a boolean of keys": (masks.boolean(first(N, N // 2, N // 4).valid[:, None, None]), 0.375),
    "a causal boolean": (masks.boolean(masks.causal().dense(N, N)), 0.63),
}


@pytest.mark.parametrize("name", SHARES)
def test_scores_that_are_computed(name, monkeypatch):
    mask, most = SHARES[name]
    share = counted(monkeypatch, N, mask) / SQUARE
    shown = float(mask.dense(N, N).expand(2, 1, N, N).double().mean())
    assert shown <= share + 1e-9
    assert share <= most


def test_a_bias_leaves_out_hidden_keys(monkeypatch):
    bias = biases.alibi(torch.rand(8))
    assert counted(monkeypatch, N, masks.causal(), bias=bias) <= 0.63 * SQUARE
    assert counted(monkeypatch, N, masks.window(63, 0), bias=bias) <= 191 * N


@pytest.mark.parametrize("beside", [masks.full(), masks.causal("top_left")], ids=["alone", "causal"])
def test_a_window_takes_time_linear_in_the_length(beside, monkeypatch):
    mask = masks.window(255, 0) & beside
    two, four, six = (counted(monkeypatch, n, mask, batch=1) for n in (2048, 4096, 6144))
    assert six - four == four - two
    assert six <= 6144 * (256 + 256)


def test_few_tokens_are_one_call(monkeypatch):
    assert counted(monkeypatch, 32, masks.window(3, 0) & first(32, 7, 30)) == 32 * 32


def test_cuts_and_their_gradients():
    """Each is the gradient of the other, for disjoint and overlapping parts, in any layout."""
    apart = [(range(0, 2), range(3, 5)), (range(2, 3), range(0, 4))]
    overlapping = [(range(0, 3), range(0, 4)), (range(0, 3), range(2, 5)), (range(0, 3), range(1, 2))]
    for boxes, by_token in itertools.product((apart, overlapping), (False, True)):
        x = torch.randn(3, 2, 5, 4, dtype=torch.float64)
        x = (x.transpose(1, 2).contiguous().transpose(1, 2) if by_token else x).requires_grad_()
        for function in (
            lambda x, b=boxes: cut(x, b),
            lambda x, b=boxes: paste([y.sin() for y in cut(x, b)], b, x.shape),
        ):
            assert torch.autograd.gradcheck(function, x, fast_mode=True)
            assert torch.autograd.gradgradcheck(function, x, fast_mode=True)
        (grad,) = torch.autograd.grad([y.sum() for y in cut(x, boxes)], x)
        assert grad.stride() == x.stride()
