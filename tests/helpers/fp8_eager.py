"""Attention of e4m3 codes in eager PyTorch: as kernels compute it, and its definition with every feature."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedattn import FP8, reference, testing
from fusedattn.low_precision import E4M3, by_block, by_tensor, float32_scales, quantised, rotated, rounded
from fusedattn.masks import Mask
from fusedattn.testing import Inputs

TOKENS, TILE = 128, 32  # of a block that shares a scale; queries and keys of a tile in the interpreter
SMALLEST_SCALE = 2.0**-126


def prepared(inputs: Inputs, precision: FP8) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in float32, normalised and rotated; keys and values that padding hides are 0."""
    q, k, v = (x.float() for x in (inputs.q, inputs.k, inputs.v))
    if inputs.qk_norm is not None:
        q, k = inputs.qk_norm.mapped(Tensor.float).apply(q, k)
    if inputs.rope is not None:
        q, k = inputs.rope.rotate(q, k)
    if precision.rotate:
        q, k = rotated(q), rotated(k)
    if inputs.mask.valid is not None:
        hidden = ~inputs.mask.valid[:, None, :, None]
        k, v = (x.masked_fill(hidden, 0.0) for x in (k, v))
    return q, k, v


def codes_of(x: Tensor, precision: FP8) -> tuple[Tensor, Tensor]:
    """Codes of ``x``, ``(batch, nheads, n, features)``, as numbers, and the scale of each token, ``(..., n)``."""
    n = x.shape[2]
    sizes = torch.where(x.isfinite(), x.abs(), 0.0)
    blocks = torch.nn.functional.pad(sizes.amax(-1), (0, -n % TOKENS)).unflatten(-1, (-1, TOKENS)).amax(-1)
    if precision.scales == "tensor":
        blocks = sizes.amax().expand_as(blocks)
    scales = float32_scales(blocks, E4M3)
    scales = torch.where(scales < SMALLEST_SCALE, 0.0, scales).repeat_interleave(TOKENS, -1)[..., :n]
    codes = torch.where(scales[..., None] > 0, rounded(x / scales[..., None], E4M3), 0.0)
    return torch.where(x.isfinite(), codes, math.nan), scales


def as_kernels(inputs: Inputs, precision: FP8) -> tuple[Tensor, Tensor]:
    """``(out, lse)``, tile by tile: weights are rounded relative to the largest score so far.

    For masks of bands and padding, and booleans. Scores follow from exact sums of codes, as in the interpreter.
    """
    (q, q_scale), (k, k_scale), (v, v_scale) = (codes_of(x, precision) for x in prepared(inputs, precision))
    scale = inputs.q.shape[3] ** -0.5 if inputs.scale is None else inputs.scale
    q, qk_scale = math.copysign(1.0, scale) * q, np.float32(abs(scale) * 1.4426950408889634)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    visible = inputs.visible()
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(0, q.shape[2], TILE):
                rows = slice(i, i + TILE)
                largest = torch.full((len(q[b, h, rows]),), -math.inf)
                total, sums = torch.zeros(len(largest)).double(), out[b, h, rows]
                for j in tiles_of(visible[b, h, rows], inputs.mask, b):
                    keys = slice(j, j + TILE)
                    products = (q[b, h, rows].double() @ k[b, h // group, keys].mT.double()).float()
                    products *= q_scale[b, h, i] * k_scale[b, h // group, j]
                    scores = products.masked_fill(~visible[b, h, rows, keys], -math.inf)
                    before, largest = largest, torch.maximum(largest, scores.amax(-1))
                    shift = torch.where(largest == -math.inf, 0.0, largest)
                    p, alpha = (exp2(x, shift, qk_scale) for x in (scores, before[:, None]))
                    total = total * alpha[:, 0].double() + p.double().sum(-1)
                    values = v[b, h // group, keys].double() * v_scale[b, h // group, j].double()
                    sums = sums * alpha.double() + rounded(p * 448.0, E4M3).double() / 448.0 @ values
                seen = total > 0
                out[b, h, rows] = torch.where(seen[:, None], sums / total[:, None], 0.0)
                lse[b, h, rows] = torch.where(seen, largest.double() * abs(scale) + total.log(), -math.inf)
    return out, lse


def exp2(scores: Tensor, shift: Tensor, qk_scale: np.float32) -> Tensor:
    """As the interpreter: weights on the edge between two codes fall to the same side."""
    factor = torch.tensor(qk_scale)
    return torch.from_numpy(np.exp2((scores * factor - shift[:, None] * factor).numpy()))


def tiles_of(visible: Tensor, mask: Mask, batch: int) -> Iterator[int]:
    """The first keys of the tiles that a tile of queries visits: full ones, then others."""
    starts = [j for j in range(0, visible.shape[1], TILE) if visible[:, j : j + TILE].any()]
    full = [j for j in starts if j + TILE <= visible.shape[1] and visible[:, j : j + TILE].all()]
    has_holes = mask.valid is not None and (mask.valid[batch].int().diff() != 0).sum() > 1
    if has_holes or mask.allowed is not None:
        full = []
    yield from full
    yield from (j for j in starts if j not in full)


def defined(inputs: Inputs, precision: FP8) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` in float32: low_precision.attention, with all that it does not take."""
    how = by_block(E4M3, TOKENS) if precision.scales == "block" else by_tensor(E4M3)
    q, k, v = (quantised(x, how) for x in prepared(inputs, precision))
    scale = inputs.q.shape[3] ** -0.5 if inputs.scale is None else inputs.scale
    wide = replace(inputs.to(torch.float32), q=q, k=k, v=v, rope=None, qk_norm=None, scale=scale)
    _, lse, weights = reference.attention(q, k, v, **wide.options)
    largest = weights.amax(-1, keepdim=True).clamp(min=1e-38) if k.shape[2] else weights.new_ones(())
    weights = rounded(weights / largest * 448.0, E4M3) / 448.0 * largest
    return (weights * testing.keep_factor(wide)) @ v.repeat_interleave(q.shape[1] // k.shape[1], 1), lse


def assert_as_accurate(found: tuple[Tensor, Tensor], inputs: Inputs, precision: FP8, what: Any = "") -> None:
    """Fail if the error of out or lse exceeds 1.5 times (largest) or 1.1 times (mean) that of the definition."""
    wide = inputs.to(torch.float64)
    truths = reference.attention(wide.q, wide.k, wide.v, **wide.options)[:2]
    for name, actual, truth, eager in zip(("out", "lse"), found, truths, defined(inputs, precision), strict=True):
        assert torch.equal(actual == -math.inf, truth == -math.inf), (what, name)
        truth = truth.masked_fill(truth == -math.inf, 0.0)
        actual, eager = (x.masked_fill(x == -math.inf, 0.0) for x in (actual, eager.to(actual.dtype)))
        assert actual.isfinite().all(), (what, name)
        error, allowed = ((x.double() - truth).abs() for x in (actual, eager))
        unit = 4 * torch.finfo(actual.dtype).eps * float(truth.abs().max())
        assert error.max() <= 1.5 * allowed.max() + unit, (what, name, float(error.max() / allowed.max()))
        assert error.mean() <= 1.1 * allowed.mean() + unit / 4, (what, name, float(error.mean() / allowed.mean()))
