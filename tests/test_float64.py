"""The kernels in float64, where rounding is negligible, against formulas in extended precision.

A GPU has no float64 kernels; this is for the interpreter alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fusedattn import Rope, testing
from fusedattn.testing import CASES
from tests.conftest import INTERPRETING, assert_accurate, triton_attention

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
    for align in inputs.mask.causal:
        past = seqlen_k - seqlen_q if align == "bottom_right" else 0
        for i in range(seqlen_q):
            for j in range(seqlen_k):
                seen[:, :, i, j] &= j <= i + past
    if inputs.mask.valid is not None:
        seen &= inputs.mask.valid.numpy()[:, None, None, :]
    if inputs.mask.allowed is not None:
        seen &= inputs.mask.allowed.numpy()
    return seen


def rotate(x: np.ndarray, rope: Rope, positions: Tensor, *, backward: bool = False) -> np.ndarray:
    """Pair by pair; `backward` is the transpose, which takes the gradient of the result to that of x."""
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


def by_formula(inputs: testing.Inputs) -> dict[str, Tensor]:
    """Attention and its gradients, as one derives them on paper; nothing here is torch's or the package's."""
    q, k, v, dout = (extended(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    dlse = extended(inputs.dlse)
    (nheads_q, seqlen_q, head_dim), (nheads_kv, seqlen_k) = q.shape[1:], k.shape[1:3]
    rope, group = inputs.rope, nheads_q // nheads_kv
    scale = FLOAT(1) / np.sqrt(FLOAT(head_dim)) if inputs.scale is None else FLOAT(inputs.scale)
    if rope is not None:
        at_q = rope.positions_q if rope.positions_q is not None else torch.arange(seqlen_k - seqlen_q, seqlen_k)
        at_k = rope.positions_k if rope.positions_k is not None else torch.arange(seqlen_k)
        q, k = rotate(q, rope, at_q), rotate(k, rope, at_k)
    k_q, v_q = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)

    seen = visible_pairs(inputs)
    scores = np.where(seen, scale * (q @ k_q.swapaxes(2, 3)), FLOAT(-np.inf))
    highest = scores.max(axis=3, keepdims=True)
    exps = np.where(seen, np.exp(scores - np.where(np.isinf(highest), FLOAT(0), highest)), FLOAT(0))
    total = exps.sum(axis=3, keepdims=True)
    empty = total == 0
    p = exps / np.where(empty, FLOAT(1), total)
    out = p @ v_q
    lse = np.where(empty, FLOAT(-np.inf), highest + np.log(np.where(empty, FLOAT(1), total)))[..., 0]

    # d out = p (d v) and d p = p (d s - sum p d s); d lse = sum p d s.
    dp = dout @ v_q.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(axis=3, keepdims=True) + np.where(empty[..., 0], FLOAT(0), dlse)[..., None])
    dq = scale * (ds @ k_q)
    dk = scale * (ds.swapaxes(2, 3) @ q)
    dv = p.swapaxes(2, 3) @ dout
    dk, dv = (x.reshape(x.shape[0], nheads_kv, group, seqlen_k, head_dim).sum(axis=2) for x in (dk, dv))
    if rope is not None:
        dq, dk = rotate(dq, rope, at_q, backward=True), rotate(dk, rope, at_k, backward=True)
    results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    return {name: torch.from_numpy(x.astype(np.float64)) for name, x in results.items()}


@pytest.mark.skipif(np.finfo(FLOAT).eps > 1e-18, reason="numpy.longdouble is float64 here")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_budget_in_float64(case):
    """Also proves the reference: its own error, the unit of the budget, must be a few units in the last place."""
    inputs = testing.make_inputs(replace(case, dtype=torch.float64))
    truth, eager = by_formula(inputs), testing.baseline(inputs)
    # In float64 the interpreter's products are rounded as a GPU's are: dp and delta of a row that sees one key do not
    # cancel to the last bit, as they do in eager PyTorch.
    assert_accurate(triton_attention, inputs, case, truth)
    for name, x in truth.items():
        finite = x.isfinite()
        assert torch.equal(eager[name].isfinite(), finite)
        error = torch.where(finite, eager[name] - x, 0.0).abs().max()
        assert error <= 1e-14 * torch.where(finite, x, 0.0).abs().max(), name
