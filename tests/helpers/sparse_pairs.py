"""Sparse patterns pair by pair, from their definitions, in NumPy and plain Python."""

from __future__ import annotations

import numpy as np

from fusedattn.block_tables import BigBird, SelectedBlocks, SlidingTiles
from fusedattn.patterns import BlockDiffusion, Dilated, Fixed, Neighborhood, Pattern, Strided, Whole


def visible(pattern: Pattern, batch: int, nheads: int, seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """Bool ``(batch, nheads, seqlen_q, seqlen_k)``."""
    seen = np.zeros((batch, nheads, seqlen_q, seqlen_k), bool)
    past = seqlen_k - seqlen_q if pattern.align == "bottom_right" else 0
    for b, h, i, j in np.ndindex(*seen.shape):
        seen[b, h, i, j] = _sees(pattern, b, h, i, i + past, j, (nheads, seqlen_q, seqlen_k))
    return seen


def _sees(pattern: Pattern, b: int, h: int, i: int, place: int, j: int, sizes: tuple[int, int, int]) -> bool:
    nheads, seqlen_q, seqlen_k = sizes
    distance = place - j
    match pattern:
        case Strided():
            return abs(distance) < pattern.stride or distance % pattern.stride == 0
        case Fixed():
            own = place // pattern.stride == j // pattern.stride
            return own or j % pattern.stride in range(pattern.stride - pattern.expressivity, pattern.stride)
        case Dilated():
            n = pattern.dilation
            near = j in {place + n * step for step in range(-pattern.left, pattern.right + 1)}
            return near or _is_global(pattern, b, j) or (0 <= place < seqlen_k and _is_global(pattern, b, place))
        case BigBird():
            table = pattern.table(Whole(seqlen_q, seqlen_k, nheads, "cpu"))
            return place >= 0 and place < seqlen_k and bool(table[0, 0, place // pattern.block_q, j // pattern.block_k])
        case SelectedBlocks():
            indices = pattern.indices
            row = indices[min(b, indices.shape[0] - 1), h * indices.shape[1] // nheads, i // pattern.block_q]
            return j // pattern.block_k in row.tolist()
        case SlidingTiles():
            return _is_near(i // pattern.block_q, j // pattern.block_k, pattern.tiles, pattern.window)
        case Neighborhood():
            return _is_near(i, j, pattern.shape, pattern.window)
        case BlockDiffusion():
            n, size = pattern.seqlen, pattern.block_size
            if i < n:
                return i // size == j // size if j < n else (j - n) // size < i // size
            return j >= n and (j - n) // size <= (i - n) // size
    raise TypeError(type(pattern).__name__)


def _is_global(pattern: Dilated, b: int, token: int) -> bool:
    tokens = pattern.global_tokens
    if isinstance(tokens, int):
        return token < tokens
    return bool(tokens[token] if tokens.dim() == 1 else tokens[min(b, tokens.shape[0] - 1), token])


def _is_near(i: int, j: int, shape: tuple[int, ...], window: tuple[int, ...]) -> bool:
    for y, x, n, w in zip(np.unravel_index(i, shape), np.unravel_index(j, shape), shape, window, strict=True):
        start = min(max(int(y) - w // 2, 0), n - w)
        if not start <= x < start + w:
            return False
    return True
