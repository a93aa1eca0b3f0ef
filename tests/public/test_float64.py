"""The kernels in float64, where rounding is negligible (a GPU has none), against formulas in extended precision."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fusedattn import QKNorm, Rope, testing
from fusedattn.testing import CASES
from tests.conftest import INTERPRETING, assert_accurate, triton_attention
from tests.helpers import quick, sparse_pairs

pytestmark = [
    pytest.mark.usefixtures("poison", "_seed"),
    pytest.mark.skipif(not INTERPRETING, reason="float64 runs in the interpreter only"),
]

FLOAT = np.longdouble


def extended(x: Tensor) -> np.ndarray:
    return x.detach().cpu().double().numpy().astype(FLOAT)


def visible_pairs(inputs: testing.Inputs) -> np.ndarray:
    """``(batch, nheads_q, seqlen_q, seqlen_k)``, pair by pair from the definition of each constraint."""
    batch, nheads, seqlen_q, _ = inputs.q.shape
    seqlen_k = inputs.k.shape[2]
    seen = np.ones((batch, nheads, seqlen_q, seqlen_k), bool)
    for band in inputs.mask.bands:
        past = seqlen_k - seqlen_q if band.align == "bottom_right" else 0
        for i in range(seqlen_q):
            for j in range(seqlen_k):
                if band.left is not None:
                    seen[:, :, i, j] &= j >= i + past - band.left
                if band.right is not None:
                    seen[:, :, i, j] &= j <= i + past + band.right
    if inputs.mask.valid is not None:
        seen &= inputs.mask.valid.numpy()[:, None, None, :]
    if inputs.mask.allowed is not None:
        seen &= inputs.mask.allowed.numpy()
    i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)
    prefix, documents, layout, function = (
        getattr(inputs.mask, name) for name in ("prefix", "documents", "layout", "function")
    )
    if prefix is not None:
        past = seqlen_k - seqlen_q if prefix.align == "bottom_right" else 0
        seen &= (j <= i + past) | (j < prefix.lengths.numpy()[:, None, None, None])
    if documents is not None:
        seen &= documents.q.numpy()[:, None, :, None] == documents.k.numpy()[:, None, None, :]
    if layout is not None:
        seen &= layout.blocks.numpy()[..., i // layout.block_q, j // layout.block_k]
    if inputs.mask.tree is not None:
        for i_new, j_new in np.ndindex(seqlen_q, seqlen_q):
            if (j_old := j_new + seqlen_k - seqlen_q) >= 0:
                seen[:, :, i_new, j_old] &= inputs.mask.tree.numpy()[:, :, i_new, j_new]
    if inputs.mask.pattern is not None:
        seen &= sparse_pairs.visible(inputs.mask.pattern, batch, nheads, seqlen_q, seqlen_k)
    if function is not None:  # of triton_functions: its arguments are one number for each head of each batch
        first = function.args[0].numpy().reshape(batch, nheads)[:, :, None, None]
        seen &= (i + 4 * j + first) % 5 != 0
    return seen


def modified(scores: np.ndarray, inputs: testing.Inputs) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The modified scores, their derivative, the derivative by a learned gain, and the columns of a relative bias."""
    (batch, nheads, seqlen_q, seqlen_k), derivative = scores.shape, np.ones_like(scores)
    i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)
    distance = j - i - (seqlen_k - seqlen_q)
    if inputs.softcap is not None:
        ratio = np.tanh(scores / FLOAT(inputs.softcap))
        scores, derivative = FLOAT(inputs.softcap) * ratio, 1 - ratio * ratio
    by_gain = np.zeros_like(scores)
    if inputs.score_mod is not None:  # of triton_functions
        gains, slope = extended(inputs.score_mod.args[0])[:, None, None], FLOAT(inputs.score_mod.args[1])
        size = 1 + np.abs(scores)
        by_gain = scores / size
        scores, derivative = scores + gains * scores / size - slope * (j - i), derivative * (1 + gains / size**2)
    columns = np.zeros_like(distance)
    if inputs.bias is not None:
        if inputs.bias.tensor is not None:
            scores = scores + extended(inputs.bias.tensor)
        if inputs.bias.slopes is not None:
            scores = scores - extended(inputs.bias.slopes)[..., None, None] * np.abs(distance)
        if inputs.bias.relative is not None:
            reach = inputs.bias.relative.shape[-1] // 2
            columns = np.clip(distance, -reach, reach) + reach
            table = np.broadcast_to(extended(inputs.bias.relative), (batch, nheads, seqlen_q, 2 * reach + 1))
            scores = scores + np.take_along_axis(table, np.broadcast_to(columns, scores.shape), axis=3)
    return scores, derivative, by_gain, columns


def sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum ``x`` over the dimensions that `shape` is broadcast over."""
    shape_4 = (1,) * (4 - len(shape)) + tuple(shape)
    axes = tuple(axis for axis in range(4) if shape_4[axis] == 1)
    return x.sum(axis=axes, keepdims=True).reshape(shape)


def rotate(x: np.ndarray, rope: Rope, positions: Tensor, *, backward: bool = False) -> np.ndarray:
    """Rotate pair by pair; `backward` applies the transpose, which maps the gradient of the result to that of x."""
    half = rope.cos.shape[-1]
    out = x.copy()
    for b in range(x.shape[0]):
        rows = positions[b] if positions.dim() == 2 else positions
        cos, sin = (extended(t[b if t.dim() == 3 else ...][rows]) for t in (rope.cos, rope.sin))  # (seqlen, half)
        if backward:
            sin = -sin
        for i in range(half):
            first, second = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + half)
            out[b, :, :, first] = x[b, :, :, first] * cos[:, i] - x[b, :, :, second] * sin[:, i]
            out[b, :, :, second] = x[b, :, :, second] * cos[:, i] + x[b, :, :, first] * sin[:, i]
    return out


def length_of(x: np.ndarray, norm: QKNorm) -> np.ndarray:
    """The root mean square of each row, or its length, with eps; ``(batch, nheads or 1, seqlen, 1)``."""
    axes = (1, 3) if norm.across_heads else (3,)
    squares = (x * x).sum(axis=axes, keepdims=True)
    n = np.prod([x.shape[axis] for axis in axes]) if norm.kind == "rms" else 1
    return np.sqrt(squares / FLOAT(n) + FLOAT(norm.eps))


def normalized(x: np.ndarray, norm: QKNorm, name: str) -> np.ndarray:
    return x / length_of(x, norm) * np.atleast_2d(extended(getattr(norm, name)))[:, None]


def through_norm(g: np.ndarray, x: np.ndarray, norm: QKNorm, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of rows and of their weight, from that of normalised rows: d (x / l) = dx / l - x (dl) / l^2."""
    weight, length = getattr(norm, name), length_of(x, norm)
    of_weight = sum_to(g * x / length, np.atleast_2d(extended(weight))[:, None].shape).reshape(weight.shape)
    g = g * np.atleast_2d(extended(weight))[:, None]
    axes = (1, 3) if norm.across_heads else (3,)
    n = np.prod([x.shape[axis] for axis in axes]) if norm.kind == "rms" else 1
    slope = x / (length * FLOAT(n))  # of l by x
    return g / length - slope * (g * x).sum(axis=axes, keepdims=True) / length**2, of_weight


def by_formula(inputs: testing.Inputs) -> dict[str, Tensor]:
    """Attention and its gradients as derived on paper, without code of torch or of the package."""
    q, k, v, dout = (extended(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    dlse = extended(inputs.dlse)
    (nheads_q, seqlen_q, head_dim), (nheads_kv, seqlen_k) = q.shape[1:], k.shape[1:3]
    rope, group = inputs.rope, nheads_q // nheads_kv
    scale = FLOAT(1) / np.sqrt(FLOAT(head_dim)) if inputs.scale is None else FLOAT(inputs.scale)
    given = q, k
    if inputs.qk_norm is not None:
        q, k = normalized(q, inputs.qk_norm, "q_weight"), normalized(k, inputs.qk_norm, "k_weight")
    if rope is not None:
        at_q = rope.positions_q if rope.positions_q is not None else torch.arange(seqlen_k - seqlen_q, seqlen_k)
        at_k = rope.positions_k if rope.positions_k is not None else torch.arange(seqlen_k)
        q, k = rotate(q, rope, at_q), rotate(k, rope, at_k)
    k_q, v_q = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)

    seen = visible_pairs(inputs)
    scores, derivative, by_gain, columns = modified(scale * (q @ k_q.swapaxes(2, 3)), inputs)
    scores = np.where(seen, scores, FLOAT(-np.inf))
    highest = scores.max(axis=3, keepdims=True)
    if inputs.sinks is not None:
        sinks = extended(inputs.sinks)[:, None, None]
        highest = np.maximum(highest, sinks)
    exps = np.where(seen, np.exp(scores - np.where(np.isinf(highest), FLOAT(0), highest)), FLOAT(0))
    total = exps.sum(axis=3, keepdims=True)
    if inputs.sinks is not None:
        total = total + np.exp(sinks - highest)
    empty = total == 0
    p = exps / np.where(empty, FLOAT(1), total)
    kept = extended(testing.keep_factor(inputs))  # tests/public/test_dropout.py tests which pairs are kept
    out = (p * kept) @ v_q
    lse = np.where(empty, FLOAT(-np.inf), highest + np.log(np.where(empty, FLOAT(1), total)))[..., 0]

    # d out = p (d v) and d p = p (d s - sum p d s); d lse = sum p d s.
    dp = kept * (dout @ v_q.swapaxes(2, 3))
    others = np.where(empty[..., 0], FLOAT(0), dlse)[..., None] - (p * dp).sum(axis=3, keepdims=True)
    dscores = p * (dp + others)
    ds = dscores * derivative
    dq = scale * (ds @ k_q)
    dk = scale * (ds.swapaxes(2, 3) @ q)
    dv = (p * kept).swapaxes(2, 3) @ dout
    dk, dv = (x.reshape(x.shape[0], nheads_kv, group, seqlen_k, -1).sum(axis=2) for x in (dk, dv))
    if rope is not None:
        dq, dk = rotate(dq, rope, at_q, backward=True), rotate(dk, rope, at_k, backward=True)
    of_weights = {}
    if inputs.qk_norm is not None:
        (dq, of_q), (dk, of_k) = (
            through_norm(g, x, inputs.qk_norm, name)
            for g, x, name in zip((dq, dk), given, ("q_weight", "k_weight"), strict=True)
        )
        of_weights = {"dq_weight": of_q, "dk_weight": of_k}
    results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv, **of_weights}
    if inputs.bias is not None and inputs.bias.tensor is not None:
        results["dbias"] = sum_to(dscores, inputs.bias.tensor.shape)
    if inputs.bias is not None and inputs.bias.relative is not None:
        found = [np.where(columns == c, dscores, 0).sum(axis=3) for c in range(inputs.bias.relative.shape[-1])]
        results["drelative"] = sum_to(np.stack(found, axis=3), inputs.bias.relative.shape)
    if inputs.bias is not None and inputs.bias.slopes is not None:
        distance = np.arange(seqlen_k) - np.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
        by_head = -(dscores * np.abs(distance)).sum(axis=(2, 3))
        results["dslopes"] = by_head if inputs.bias.slopes.ndim == 2 else by_head.sum(axis=0)
    if inputs.score_mod is not None:
        results["dlearned"] = (dscores * by_gain).sum(axis=(0, 2, 3))
    if inputs.sinks is not None:
        results["dsinks"] = (np.exp(sinks - lse[..., None]) * others).sum(axis=(0, 2, 3))
    return {name: torch.from_numpy(x.astype(np.float64)) for name, x in results.items()}


@quick.only(case=lambda case: case in CASES[1:-1:2])
@pytest.mark.skipif(np.finfo(FLOAT).eps > 1e-18, reason="numpy.longdouble is float64 here")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_budget_in_float64(case):
    """Also proves the reference: its own error, the unit of the budget, must be a few units in the last place."""
    inputs = testing.make_inputs(replace(case, dtype=torch.float64))
    truth, eager = by_formula(inputs), testing.baseline(inputs)
    # In float64 the interpreter rounds products as a GPU does: dp and delta of a row that sees one key do not cancel to
    # the last bit, as they do in eager PyTorch.
    assert_accurate(triton_attention, inputs, case, truth)
    for name, x in truth.items():
        finite = x.isfinite()
        assert torch.equal(eager[name].isfinite(), finite)
        error = torch.where(finite, eager[name].double() - x, 0.0).abs().max()
        unit = torch.finfo(eager[name].dtype).eps
        assert error <= 45 * unit * torch.where(finite, x, 0.0).abs().max(), name
