"""The reference itself: against finite differences, and with NaN in hidden places; test_float64.py has its formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedattn import Rope, biases, masks, reference
from fusedattn.masks import Mask
from fusedattn.score_mod import ScoreMod
from fusedattn.shard import Shard

pytestmark = pytest.mark.usefixtures("_seed")

B, H, KV, N, M, D, DV = 2, 4, 2, 5, 7, 3, 4
SEED = torch.tensor([20250614])


@triton.jit
def squashed(score, batch, head, q_index, k_index, args):
    return score / (1.0 + tl.abs(score)) + tl.load(args[0] + head) * (q_index - 2 * k_index)


@triton.jit
def squashed_derivative(score, batch, head, q_index, k_index, args):
    return 1.0 / (1.0 + tl.abs(score)) / (1.0 + tl.abs(score))


def squashed_in_torch(
    score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor, args: tuple[Any, ...]
) -> Tensor:
    return score / (1.0 + score.abs()) + args[0][head] * (q_index - 2 * k_index)


FACTORS = torch.tensor([0.3, -0.1, 0.0, 0.2])
SCORE_MOD = ScoreMod(squashed, squashed_derivative, squashed_in_torch, (FACTORS,))


def inputs(n: int = N, m: int = M, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((B, H, n, D), (B, KV, m, D), (B, KV, m, DV))
    q, k, v = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def mask() -> Mask:
    """A mask that hides some keys from every query, all keys from some queries, and one key from all queries."""
    allowed = torch.rand(B, H, N, M) < 0.7
    allowed[0, 1, 3], allowed[:, :, 0, 1:3] = False, True
    valid = torch.ones(B, M, dtype=torch.bool)
    valid[1, 4] = False
    return masks.boolean(allowed) & masks.padding(valid)


def everything() -> dict[str, Any]:
    """Every option, with a bias of each kind and with -inf in it."""
    bias = torch.randn(B, H, N, M, dtype=torch.float64)
    bias[0, 0, 0, 1], bias[1, 3, 2] = -math.inf, -math.inf
    return {
        "mask": mask(),
        "rope": Rope.from_theta(2, 9),
        "bias": biases.tensor(bias) + biases.alibi(torch.rand(H)) + biases.relative(torch.randn(H, 1, 5).double()),
        "scale": 0.9,
        "softcap": 1.3,
        "score_mod": SCORE_MOD,
        "sinks": torch.randn(H, dtype=torch.float64),
        "dropout_p": 0.4,
        "dropout_seed": SEED,
    }


OPTIONS = ("mask", "rope", "bias", "scale", "softcap", "score_mod", "sinks", "dropout_p")


def options(*names: str) -> dict[str, Any]:
    found = everything()
    if "dropout_p" in names:
        names = (*names, "dropout_seed")
    return {name: found[name] for name in names}


@triton.jit
def next_batch(batch, head, q_index, k_index, args):
    return (q_index + k_index + batch * head) % 2 == 0


def test_a_mask_function_knows_the_batch_and_the_head():
    q, k, v = inputs()
    function = masks.function(next_batch, lambda b, h, i, j, args: (i + j + b * h) % 2 == 0)
    seen = torch.tensor(
        [[[[(i + j + b * h) % 2 == 0 for j in range(M)] for i in range(N)] for h in range(H)] for b in range(B)]
    )
    for x, y in zip(
        reference.attention(q, k, v, mask=function), reference.attention(q, k, v, mask=masks.boolean(seen)), strict=True
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype):
    q, k, v = inputs(dtype=dtype)
    chosen = everything()
    out, lse, weights = reference.attention(q, k, v, **chosen)
    assert (out.dtype, lse.dtype, weights.dtype) == (dtype, torch.float32, dtype)
    expected = reference.attention(q.double(), k.double(), v.double(), **chosen)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 5e-2, "rtol": 2e-2}
    for x, y in zip((out, lse, weights), expected, strict=True):
        torch.testing.assert_close(x.double(), y, **close)


def test_gradients():
    """Gradients of q, k, v, the bias, the tables and the sinks, with every option; some rows see nothing."""
    q, k, v = inputs()
    chosen = everything()
    full, slopes = chosen["bias"].tensor.expand(B, H, N, M).clone(), chosen["bias"].slopes
    full = full.masked_fill(full == -math.inf, 0.0)  # no finite difference exists there
    table, sinks = torch.randn(H, 5, D, dtype=torch.float64), chosen["sinks"]
    leaves = [x.requires_grad_() for x in (q, k, v, full, table, sinks)]

    def call(q: Tensor, k: Tensor, v: Tensor, full: Tensor, table: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        bias = biases.tensor(full) + biases.alibi(slopes) + biases.shaw(q, table)
        out, lse, _ = reference.attention(q, k, v, **{**chosen, "bias": bias, "sinks": sinks})
        return out, lse

    assert torch.autograd.gradcheck(call, leaves)


def gradients(chosen: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """All results of attention, and every gradient of out and lse together."""
    leaves = {"dq": q, "dk": k, "dv": v}
    bias = chosen.get("bias")
    if bias is not None:
        bias = replace(bias, **{name: getattr(bias, name).detach().requires_grad_() for name in ("tensor", "relative")})
        leaves |= {"dbias": bias.tensor, "drelative": bias.relative}
    sinks = chosen.get("sinks")
    if sinks is not None:
        sinks = leaves["dsinks"] = sinks.detach().requires_grad_()
    for name in ("dq", "dk", "dv"):
        leaves[name] = leaves[name].detach().requires_grad_()
    q, k, v = (leaves[name] for name in ("dq", "dk", "dv"))
    out, lse, weights = reference.attention(q, k, v, **{**chosen, "bias": bias, "sinks": sinks})
    torch.manual_seed(5)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))
    result = {"out": out, "lse": lse, "weights": weights} | dict(zip(leaves, found, strict=True))
    return {name: x.detach() for name, x in result.items()}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "names",
    [("mask", "bias"), ("mask", "bias", "softcap"), ("mask", "bias", "score_mod"), ("mask", "bias", "sinks"), OPTIONS],
    ids="-".join,
)
def test_hidden_values_reach_nothing(names, value):
    """Keys and values that no query sees, and hidden entries of a bias, change no result."""
    q, k, v = inputs()
    chosen = options(*names)
    visible = chosen["mask"].dense(N, M).expand(B, H, N, M)
    bias = chosen["bias"]
    # Padding hides one key, and no visible pair has some of the distances: those of a table for each query.
    table = torch.randn(B, H, N, 2 * M + 1, dtype=torch.float64)
    bias = biases.tensor(bias.tensor) + biases.relative(table)
    distance = torch.arange(M) - torch.arange(N)[:, None] - (M - N) + M
    used = torch.zeros(table.shape, dtype=torch.int64).scatter_add_(3, distance.expand(B, H, N, M), visible.long()) > 0
    clean = {**chosen, "bias": bias}
    poisoned_bias = biases.tensor(bias.tensor.masked_fill(~visible, value)) + biases.relative(
        table.masked_fill(~used, value)
    )
    where = torch.zeros(B, 1, M, 1, dtype=torch.bool)
    where[1, :, 4] = True
    expected = gradients(clean, q, k.masked_fill(where, 0.0), v.masked_fill(where, 0.0))
    got = gradients({**chosen, "bias": poisoned_bias}, q, k.masked_fill(where, value), v.masked_fill(where, value))
    assert expected["dq"].isfinite().all()
    for name in expected:
        torch.testing.assert_close(
            got[name], expected[name], rtol=0, atol=1e-14, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert (got["dbias"][~visible] == 0).all()
    assert (got["drelative"][~used] == 0).all()
    for name in ("dk", "dv"):
        assert (got[name].masked_select(where) == 0).all()


@pytest.mark.parametrize("names", [("mask", "bias"), OPTIONS], ids="-".join)
def test_a_nan_reaches_only_the_rows_that_see_it(names):
    """A visible NaN in a key, a value or a bias makes the rows that see it NaN, and nothing else."""
    q, k, v = inputs()
    chosen = options(*names)
    visible = chosen["mask"].dense(N, M).expand(B, H, N, M)
    bias = chosen["bias"].tensor
    finite = ~(bias == -math.inf).masked_fill(~visible, True).all(-1)
    clean = gradients(chosen, q, k, v)
    for what in ("k", "v", "bias"):
        x = {"k": k.clone(), "v": v.clone(), "bias": bias.clone()}
        if what == "bias":
            x["bias"][:, :, :, 2] = math.nan
            seen = visible[..., 2]
        else:
            x[what][0, 1, 2, 0] = math.nan
            seen = visible[..., 2] & (torch.arange(B)[:, None, None] == 0) & (torch.arange(H)[:, None] >= 2)
            seen = seen & finite if what == "v" else seen
        poisoned = replace(chosen["bias"], tensor=x["bias"])
        got = gradients({**chosen, "bias": poisoned}, q, x["k"], x["v"])
        assert 0 < int(seen.sum()) < seen.numel()
        for name in ("out", "dq"):
            assert torch.equal(got[name].isnan().any(-1), seen), (what, name)
            torch.testing.assert_close(got[name][~seen], clean[name][~seen], rtol=0, atol=1e-14)
        assert (got["weights"][~visible] == 0).all()
        assert (got["dbias"][~visible] == 0).all()
        assert not got["dbias"].isnan()[~seen].any()
        unseen = ~(visible & seen[..., None]).any(2).unflatten(1, (KV, -1)).any(2)  # by queries that are NaN
        assert unseen.any()
        for name in ("dk", "dv"):
            assert torch.equal(got[name][unseen], clean[name][unseen]), (what, name)
        if what == "k":
            assert torch.equal(got["lse"].isnan(), seen)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("poisoned", ["q", "k", "v"])
def test_a_nan_in_16_bits_reaches_only_the_rows_that_see_it(poisoned, dtype):
    # With lengths that are no multiple of 4, torch's product of 16-bit matrices passes a NaN on to the row before.
    row = 6
    inputs = {name: torch.randn(1, 2, 46, 10).to(dtype) for name in ("q", "k", "v")}
    inputs[poisoned][:, :, row, 3] = math.nan
    for x in inputs.values():
        x.requires_grad_()
    out, lse, weights = reference.attention(**inputs, mask=masks.causal())
    (dq,) = torch.autograd.grad(out, inputs["q"], torch.ones_like(out))
    sees = torch.arange(46) == row if poisoned == "q" else torch.arange(46) >= row
    for x in (out, dq):
        assert x.dtype == dtype
        assert torch.equal(x.isnan().any(-1), sees.expand(1, 2, 46))
    assert weights.dtype == dtype
    assert not weights[:, :, ~sees].isnan().any()
    assert not lse[:, :, ~sees].isnan().any()


def test_rows_of_minus_infinity_see_nothing():
    """Hidden by a bias alone: out is 0, lse -inf, and all gradients are 0, for any incoming gradient and any values."""
    q, k, v = inputs()
    bias = torch.randn(B, H, N, M, dtype=torch.float64)
    bias[0, 0, 2] = -math.inf
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    out, lse, weights = reference.attention(q, k, v, bias=bias)
    assert (out[0, 0, 2] == 0).all()
    assert (weights[0, 0, 2] == 0).all()
    assert torch.equal(lse == -math.inf, (bias == -math.inf).all(-1))
    dout, dlse = torch.zeros_like(out), torch.zeros_like(lse)
    dout[0, 0, 2], dlse[0, 0, 2] = math.nan, math.nan
    for gradient in torch.autograd.grad((out, lse), leaves, (dout, dlse)):
        assert (gradient == 0).all()
    poisoned = v.detach().clone()
    poisoned[0, 0, 3] = math.nan
    out, _, _ = reference.attention(q, k, poisoned, bias=bias)
    assert (out[0, 0, 2] == 0).all()
    dq, dbias = torch.autograd.grad(out, (q, bias), torch.randn_like(out))
    assert (dq[0, 0, 2] == 0).all()
    assert (dbias[0, 0, 2] == 0).all()
    assert dq[0, 0, [0, 1, 3, 4]].isnan().all()


def test_a_pair_of_minus_infinity_has_weight_and_gradient_zero():
    q, k, v = (x.requires_grad_() for x in inputs())
    bias = torch.randn(B, 1, N, M, dtype=torch.float64)
    hidden = torch.rand(B, 1, N, M) < 0.4
    hidden[..., 0] = False
    bias = bias.masked_fill(hidden, -math.inf).requires_grad_()
    got = reference.attention(q, k, v, bias=bias)
    finite = bias.detach().nan_to_num(neginf=0.0)
    expected = reference.attention(q, k, v, bias=finite, mask=~hidden)
    dout = torch.randn_like(got[0])
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y)
    d = torch.autograd.grad(got[0], (q, k, v, bias), dout)
    for x, y in zip(d, torch.autograd.grad(expected[0], (q, k, v), dout), strict=False):
        torch.testing.assert_close(x, y)
    assert (d[3][hidden] == 0).all()


def test_rows_that_see_nothing_give_their_sink():
    q, k, v = (x.requires_grad_() for x in inputs())
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True)
    seen = torch.ones(N, M, dtype=torch.bool)
    seen[2] = False
    out, lse, weights = reference.attention(q, k, v, mask=seen, sinks=sinks)
    assert (out[:, :, 2] == 0).all()
    assert (weights[:, :, 2] == 0).all()
    assert torch.equal(lse[:, :, 2], sinks.detach().expand(B, H))
    dlse = torch.zeros_like(lse)
    dlse[:, :, 2] = 1.0
    dq, dk, dv, dsinks = torch.autograd.grad((out, lse), (q, k, v, sinks), (torch.full_like(out, 0.0), dlse))
    assert all((x == 0).all() for x in (dq, dk, dv))
    assert torch.equal(dsinks, torch.full_like(sinks, B))


def test_a_sink_of_minus_infinity_is_none():
    q, k, v = (x.requires_grad_() for x in inputs())
    sinks = torch.full((H,), -math.inf, dtype=torch.float64, requires_grad=True)
    seen = mask()
    got = reference.attention(q, k, v, mask=seen, sinks=sinks)
    expected = reference.attention(q, k, v, mask=seen)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y)
    dq, dsinks = torch.autograd.grad(got[0].sum() + got[1][0, 0].sum(), (q, sinks))
    assert dq.isfinite().all()
    assert (dsinks == 0).all()


def test_nothing_there():
    for n, m in ((0, 7), (5, 0), (0, 0)):
        q, k, v = (x.requires_grad_() for x in inputs(n, m))
        bias = biases.alibi(torch.rand(H)) + biases.relative(torch.randn(H, 1, 5))
        sinks = torch.randn(H, requires_grad=True)
        out, lse, _ = reference.attention(
            q, k, v, bias=bias, sinks=sinks, softcap=2.0, score_mod=SCORE_MOD, dropout_p=0.5, dropout_seed=SEED
        )
        assert out.shape == (B, H, n, DV)
        assert (out == 0).all() or m > 0
        assert lse.shape == (B, H, n)
        assert [x.shape for x in torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


def test_dropout_draws_from_the_generator_of_torch():
    q, k, v = inputs()
    torch.manual_seed(3)
    first, again = (reference.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first[0], again[0])
    assert torch.equal(first[2], again[2])  # weights before dropout
    torch.manual_seed(3)
    assert torch.equal(reference.attention(q, k, v, dropout_p=0.5)[0], first[0])


def test_a_score_mod_is_written_out_by_eager_alone():
    q, k, v = inputs()
    with pytest.raises(NotImplementedError, match=r"score_mod: got eager=None, allowed is a function of torch"):
        reference.attention(q, k, v, score_mod=ScoreMod(squashed, squashed_derivative))


def test_a_part_of_the_batches_keeps_their_numbers():
    def eager(scores, batch, head, q_index, k_index, args):
        return scores * (1 + batch)

    q, k, v = (torch.randn(2, 2, 3, 8) for _ in range(3))
    score_mod = ScoreMod(SCORE_MOD.function, SCORE_MOD.derivative, eager=eager)
    whole = reference.attention(q, k, v, score_mod=score_mod)[0]
    part = reference.attention(q[1:], k[1:], v[1:], score_mod=score_mod, shard=Shard(1))[0]
    torch.testing.assert_close(part, whole[1:])


def test_a_score_mod_is_a_value():
    assert SCORE_MOD.function_key != SCORE_MOD.derivative_key
    assert SCORE_MOD.function_key == ScoreMod(squashed, squashed).derivative_key
    assert list(SCORE_MOD.tensors()) == ["score_mod(args[0])"]
    moved = SCORE_MOD.to("meta")
    assert moved.tensors()["score_mod(args[0])"].is_meta
    assert (moved.function, moved.derivative, moved.eager) == (squashed, squashed_derivative, squashed_in_torch)
    rows, keys = torch.tensor([3, 1]), torch.tensor([0, 6, 2])
    scores = torch.randn(B, H, N, M)
    part = SCORE_MOD.apply(scores[:, :, rows][..., keys], rows=rows, keys=keys)
    assert torch.equal(part, SCORE_MOD.apply(scores)[:, :, rows][..., keys])
    for arguments, message in (
        ((squashed_in_torch, squashed), "function: got function, allowed is a @triton.jit function"),
        ((squashed, 1.0), "derivative: got float, allowed is a @triton.jit function"),
        ((squashed, squashed, "x"), "eager: got str, allowed are a function of torch and None"),
        ((squashed, squashed, None, (None,)), r"args\[0\]: got NoneType, allowed are tensors"),
    ):
        with pytest.raises(TypeError, match=message):
            ScoreMod(*arguments)


@pytest.mark.thorough
@pytest.mark.parametrize("names", [("mask", "bias"), OPTIONS], ids="-".join)
def test_in_a_compiled_function(names):
    q, k, v = (x.requires_grad_() for x in inputs())
    chosen = options(*names)
    full, sinks = chosen["bias"].tensor.requires_grad_(), chosen.pop("sinks", None)
    slopes, table = torch.rand(H), torch.randn(H, 5, D, dtype=torch.float64, requires_grad=True)

    def call(q: Tensor, k: Tensor, v: Tensor, full: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        bias = biases.as_bias(full) + biases.alibi(slopes) + biases.shaw(q, table)
        seen = chosen["mask"] & masks.window(4, None) & masks.prefix_lm(torch.tensor([2, 0]))
        out, lse, _ = reference.attention(q, k, v, **{**chosen, "bias": bias, "mask": seen}, sinks=sinks)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    def run(function: Any) -> tuple[Tensor, ...]:
        out, lse = function(q, k, v, full, table)
        return (out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v, full, table)))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for x, y in zip(run(compiled), run(call), strict=True):
        torch.testing.assert_close(x, y)
