"""Functions that make sparse masks; :mod:`fusedattn.masks` has them too.

The position of a query is the number of the key at which it stands: ``i + seqlen_k - seqlen_q`` for
``align="bottom_right"``, ``i`` for ``"top_left"``. Below, i is the position of a query and j the number of a key. A
query at a negative position stands before all keys. A query that sees no key has output 0.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn.block_tables import BigBird, SelectedBlocks, SlidingTiles
from fusedattn.mask import Mask
from fusedattn.mask_parts import Band, CausalAlign, check_bool
from fusedattn.patterns import BlockDiffusion, Dilated, Fixed, Neighborhood, Pattern, Strided, check_count


def strided(stride: int, *, causal: bool = True, align: CausalAlign = "bottom_right") -> Mask:
    """Keys less than ``stride`` away, and every ``stride``-th one: ``|i - j| < stride`` or ``(i - j) % stride == 0``.

    Child et al., "Generating Long Sequences with Sparse Transformers" (2019), section 4.2. With a stride near
    ``sqrt(seqlen_k)`` a query sees about ``2 sqrt(seqlen_k)`` keys.

    Args:
        stride: 1 and more; 1 shows everything.
        causal: hide later keys, ``j > i``, as in the paper.
        align: of the positions.

    Raises:
        TypeError, ValueError: ``stride`` is not a positive int, or ``align`` is unknown.
    """
    return _mask(Strided(align, stride), causal)


def fixed(stride: int, expressivity: int = 1, *, causal: bool = True, align: CausalAlign = "bottom_right") -> Mask:
    """Keys of the query's own block of ``stride`` tokens, and the last ``expressivity`` keys of every block.

    ``i // stride == j // stride`` or ``j % stride >= stride - expressivity``. Child et al., "Generating Long Sequences
    with Sparse Transformers" (2019), section 4.2; they use strides of 128 or 256, and an expressivity of 8, 16 or 32.

    Args:
        stride: 1 and more.
        expressivity: ``1 .. stride``.
        causal: hide later keys, ``j > i``, as in the paper.
        align: of the positions.

    Raises:
        TypeError, ValueError: ``stride`` or ``expressivity`` is not such an int, or ``align`` is unknown.
    """
    return _mask(Fixed(align, stride, expressivity), causal)


def dilated(
    left: int,
    right: int,
    dilation: int = 1,
    *,
    global_tokens: Tensor | int = 0,
    align: CausalAlign = "bottom_right",
) -> Mask:
    """A window with gaps: ``left`` keys before the query and ``right`` behind it, ``dilation`` apart; global tokens.

    Query i sees key j if ``j - i`` is a multiple of ``dilation`` from ``-left * dilation`` to ``right * dilation``, or
    if i or j is a global token. Beltagy et al., "Longformer" (2020), section 3.1. ``dilated(w // 2, w // 2,
    global_tokens=n)`` is Longformer's window with global attention for the first n tokens.

    Args:
        left, right: 0 and more.
        dilation: 1 and more.
        global_tokens: bool ``(seqlen_k,)`` or ``(batch, seqlen_k)``, True = sees all keys and is seen by all queries;
            or an int: the first so many tokens.
        align: of the positions.

    Raises:
        TypeError, ValueError: a number is not such an int, ``global_tokens`` is neither an int nor such a tensor, or
            ``align`` is unknown.
    """
    return Mask(pattern=Dilated(align, left, right, dilation, global_tokens))


def bigbird(
    block_size: int,
    *,
    window: int = 1,
    n_global: int = 1,
    n_random: int = 2,
    seed: int = 0,
    causal: bool = False,
    align: CausalAlign = "bottom_right",
) -> Mask:
    """Blocks of tokens see the blocks beside them, global blocks, and random blocks.

    Block r sees block c if ``|r - c| <= window``, if r or c is one of the first ``n_global`` blocks, or if c is one of
    ``n_random`` other blocks, drawn for each r. Zaheer et al., "Big Bird" (2020), section 2. All batches and heads
    share the draw. It depends on ``seed`` and on the number of blocks, and is the same on every device.

    Args:
        block_size: tokens of a block. Multiples of 16 are fastest.
        window: blocks on each side.
        n_global: the first so many blocks see all blocks and are seen by all.
        n_random: random blocks of each block; fewer if fewer are left.
        seed: 0 and more.
        causal: hide later keys, and draw among earlier blocks.
        align: of the positions; blocks count from the first key.

    Raises:
        TypeError, ValueError: a number is not such an int, or ``align`` is unknown.
    """
    return _mask(BigBird(align, block_size, block_size, window, n_global, n_random, seed, causal), causal)


def selected_blocks(indices: Tensor, block_size: int | tuple[int, int]) -> Mask:
    """Each query, or block of queries, sees the blocks of keys that are listed for it.

    Native sparse attention and MoBA list blocks for each query: ``block_size=(1, block_k)``. Causal attention needs
    ``& masks.causal()`` besides. Yuan et al., "Native Sparse Attention" (2025); Lu et al., "MoBA" (2025). Choosing has
    no gradient.

    Args:
        indices: int32 or int64 ``(batch, nheads, ceil(seqlen_q / block_q), k)``; each row lists blocks of keys, from 0
            on. A number that is no block, such as -1, selects none; repetitions have no effect. nheads is that of q,
            of k and v, or 1: consecutive query heads share a list. The batch may be 1.
        block_size: ``(block_q, block_k)``, or one number for both; with 1 for block_q, rows are queries. Multiples of
            16 are fastest.

    Raises:
        TypeError, ValueError: ``indices`` is not such a tensor, or ``block_size`` is not one or two positive ints.
    """
    return Mask(pattern=SelectedBlocks("top_left", *_sizes(block_size), indices))


def top_blocks(scores: Tensor, k: int, block_size: int | tuple[int, int]) -> Mask:
    """Each query, or block of queries, sees the ``k`` blocks of keys with the highest scores.

    With ``scores = mean_pooled_scores(q, k, block_size, causal=True)`` and ``& masks.causal()`` this is MoBA (Lu et
    al., "MoBA: Mixture of Block Attention", 2025).

    Args:
        scores: float ``(batch, nheads, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k))``; a block of score ``-inf``
            is never chosen, nor one of score NaN. nheads is that of q, of k and v, or 1.
        k: blocks to choose, 0 and more; all if there are fewer.
        block_size: as for :func:`selected_blocks`.

    Raises:
        TypeError, ValueError: ``scores`` is not such a tensor, ``k`` is not such an int, or ``block_size`` is not one
            or two positive ints.
    """
    check_count("k", k, least=0)
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        got = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
        raise TypeError(f"scores: got {got}, allowed is a tensor of floating-point numbers")
    if scores.dim() != 4:
        raise ValueError(
            f"scores: got shape {tuple(scores.shape)}, allowed is (batch, nheads_q or nheads_kv, blocks of queries, "
            "blocks of keys)"
        )
    known = scores.detach().masked_fill(scores.isnan(), -math.inf)
    best = known.topk(min(k, scores.shape[3]), dim=-1)
    return selected_blocks(best.indices.masked_fill(best.values == -math.inf, -1), block_size)


def mean_pooled_scores(
    q: Tensor, k: Tensor, block_size: int, *, causal: bool = False, valid: Tensor | None = None
) -> Tensor:
    """The products of queries and the means of blocks of keys, by which MoBA chooses blocks.

    Lu et al., "MoBA: Mixture of Block Attention" (2025), section 2.2. The scores carry no gradient.

    Args:
        q: ``(batch, nheads_q, seqlen_q, head_dim)``.
        k: ``(batch, nheads_kv, seqlen_k, head_dim)``, where nheads_kv divides nheads_q.
        block_size: keys of a block; the last block may have fewer.
        causal: with the last query at the last key, a block that begins behind the query gets ``-inf``, and the
            query's own block ``inf``, so that it is always chosen.
        valid: bool ``(batch, seqlen_k)``, True = a real token, as for :func:`fusedattn.masks.padding`: means are those
            of real keys, and a block without one gets ``-inf``, unless it is the query's own.

    Returns:
        ``(batch, nheads_q, seqlen_q, ceil(seqlen_k / block_size))``, float32 (float64 for float64).

    Raises:
        TypeError, ValueError: ``block_size`` is not a positive int, ``valid`` not bool, or the shapes do not fit.
    """
    check_count("block_size", block_size)
    fits = q.dim() == k.dim() == 4 and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q, k: got shapes {tuple(q.shape)} and {tuple(k.shape)}, allowed are (batch, nheads_q, seqlen_q, "
            "head_dim) and (batch, nheads_kv, seqlen_k, head_dim), where nheads_kv divides nheads_q"
        )
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    real = torch.ones(1, seqlen_k, dtype=torch.bool, device=k.device) if valid is None else valid
    check_bool(real, "valid")
    if valid is not None and valid.shape != (k.shape[0], seqlen_k):
        raise ValueError(
            f"valid: got shape {tuple(valid.shape)}, allowed is (batch, seqlen_k) = {(k.shape[0], seqlen_k)}"
        )
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = q.detach().to(dtype), k.detach().to(dtype)
    means, counts = _means(k, real, block_size)
    with torch.autocast(q.device.type, enabled=False):  # which would round products to 16 bits
        scores = torch.einsum("bhgid,bhnd->bhgin", q.unflatten(1, (k.shape[1], -1)), means).flatten(1, 2)
    scores = scores.masked_fill(counts[:, :, None] == 0, -math.inf)
    if not causal:
        return scores
    position = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
    block = torch.arange(scores.shape[3], device=q.device)
    own = position.div(block_size, rounding_mode="floor") == block
    return scores.masked_fill(block * block_size > position, -math.inf).masked_fill(own, math.inf)


def _means(k: Tensor, real: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """The means of the real keys of n blocks, ``(batch, nheads_kv, n, head_dim)``, and how many these are.

    The second result is ``(batch or 1, 1, n)``; the mean of none is 0.
    """
    n = -(-k.shape[2] // block_size)
    missing = n * block_size - k.shape[2]  # the last block is filled up
    summands = F.pad(k.masked_fill(~real[:, None, :, None], 0.0), (0, 0, 0, missing))
    counts = F.pad(real, (0, missing)).unflatten(1, (n, block_size)).sum(2)[:, None]
    return summands.unflatten(2, (n, block_size)).sum(3) / counts.clamp(min=1)[..., None], counts


def neighborhood(shape: int | tuple[int, ...], window: int | tuple[int, ...]) -> Mask:
    """Tokens of a grid see the ``window`` of tokens around them, in each dimension.

    Along a dimension of n places, the token at y sees the w places from ``min(max(y - w // 2, 0), n - w)`` on: at an
    edge the window moves inwards, so every token sees the same number. Hassani et al., "Neighborhood Attention
    Transformer" (2023). Both lengths must be the number of tokens of the grid.

    Args:
        shape: of the grid, one to three ints, such as ``(height, width)``; the last dimension runs fastest.
        window: as many ints, each at most that of ``shape``; one int for all.

    Raises:
        TypeError, ValueError: ``shape`` or ``window`` are not such ints.
    """
    return Mask(pattern=Neighborhood("top_left", *_grid("shape", shape, window)))


def sliding_tiles(tiles: int | tuple[int, ...], tile_size: int, window: int | tuple[int, ...]) -> Mask:
    """Tiles of a grid see the ``window`` of tiles around them, as tokens do in :func:`neighborhood`.

    Tokens are in the order of tiles: the first ``tile_size`` tokens are those of the first tile. Zhang et al., "Fast
    Video Generation with Sliding Tile Attention" (2025). Both lengths must be the number of tokens of all tiles.

    Args:
        tiles: of the grid, one to three ints, such as ``(frames, rows, columns)``; the last dimension runs fastest.
        tile_size: tokens of a tile. Multiples of 16 are fastest: each tile is then one block, or several.
        window: as many ints, in tiles, each at most that of ``tiles``; one int for all.

    Raises:
        TypeError, ValueError: ``tiles``, ``tile_size`` or ``window`` are not such ints.
    """
    return Mask(pattern=SlidingTiles("top_left", tile_size, tile_size, *_grid("tiles", tiles, window)))


def block_diffusion(seqlen: int, block_size: int) -> Mask:
    """Training by block diffusion: ``seqlen`` noisy tokens, then the same tokens without noise.

    A noisy token sees the noisy tokens of its own block and the clean tokens of earlier blocks. A clean token sees the
    clean tokens of its own and of earlier blocks. Arriola et al., "Block Diffusion" (2025), section 3. Both lengths
    must be ``2 * seqlen``.

    Args:
        seqlen: tokens of the text.
        block_size: tokens that are denoised together.

    Raises:
        TypeError, ValueError: a number is not an int, or ``block_size`` is not positive.
    """
    return Mask(pattern=BlockDiffusion("top_left", seqlen, block_size))


def _mask(pattern: Pattern, causal: bool) -> Mask:
    return Mask(bands=frozenset({Band(None, 0, pattern.align)} if causal else ()), pattern=pattern)


def _sizes(block_size: int | tuple[int, int]) -> tuple[int, int]:
    sizes = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if len(sizes) != 2:
        raise ValueError(f"block_size: got {block_size}, allowed are an int and two ints, (block_q, block_k)")
    return sizes


def _grid(
    name: str, sizes: int | tuple[int, ...], window: int | tuple[int, ...]
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The grid and the window, filled up with ones to three dimensions."""
    sizes = sizes if isinstance(sizes, tuple) else (sizes,)
    windows = window if isinstance(window, tuple) else (window,) * len(sizes)
    if not 1 <= len(sizes) <= 3 or len(windows) != len(sizes):
        raise ValueError(f"{name}, window: got {sizes} and {windows}, allowed are one to three ints, as many in both")
    for size, of_window in zip(sizes, windows, strict=True):
        check_count(name, size)
        check_count("window", of_window, most=size)
    ones = (1,) * (3 - len(sizes))
    return (*ones, *sizes), (*ones, *windows)  # type: ignore[return-value]
