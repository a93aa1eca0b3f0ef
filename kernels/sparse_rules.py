"""The rules of sparse masks inside a block: which pairs are visible.

Each function has the signature of a user's mask function (:func:`fusedattn.kernels.masking.visible`), and the name that
:attr:`fusedattn.patterns.Pattern.rule` gives; that file defines them. Query ``i`` stands at position ``i + shift``.
"""

import triton
import triton.language as tl


@triton.jit
def strided(batch, head, query, key, args):
    """Args: shift in a tensor; stride."""
    distance = query + tl.load(args[0]) - key
    return (tl.abs(distance) < args[1]) | (distance % args[1] == 0)


@triton.jit
def fixed(batch, head, query, key, args):
    """Args: shift in a tensor; stride; the place in a block from which on all queries see its keys."""
    position = query + tl.load(args[0])
    # Division rounds towards 0, so that a position before all keys would be in the first block.
    own = (position >= 0) & (position // args[1] == key // args[1])
    return own | (key % args[1] >= args[2])


@triton.jit
def dilated(batch, head, query, key, args):
    """Args: shift in a tensor; the least and the largest distance; dilation."""
    ahead = key - query - tl.load(args[0])
    return (ahead >= args[1]) & (ahead <= args[2]) & (ahead % args[3] == 0)


@triton.jit
def dilated_with_global_tokens(batch, head, query, key, args):
    """Args: those of `dilated`, with the stride of a batch and n behind shift; which tokens are global, uint8
    ``(batches, n)``.
    """
    near = dilated(batch, head, query, key, args)
    tokens = args[4] + tl.cast(batch, tl.int64) * tl.load(args[0] + 1)
    position = query + tl.load(args[0])
    of_query = tl.load(tokens + position, mask=(position >= 0) & (position < tl.load(args[0] + 2)), other=0) != 0
    return near | of_query | (tl.load(tokens + key) != 0)


@triton.jit
def block_table(batch, head, query, key, args):
    """Args: a tensor of shift, rows from batch to batch, rows from head to head, query heads that share one, n_rows and
    n_columns; the table, uint8 ``(batches, heads, n_rows, n_columns)``; block_q, block_k.
    """
    numbers = args[0]
    position = query + tl.load(numbers)
    row = position // args[2]
    first = tl.cast(batch, tl.int64) * tl.load(numbers + 1) + head // tl.load(numbers + 3) * tl.load(numbers + 2)
    exists = (position >= 0) & (row < tl.load(numbers + 4))
    return tl.load(args[1] + (first + row) * tl.load(numbers + 5) + key // args[3], mask=exists, other=0) != 0


@triton.jit
def neighborhood(batch, head, query, key, args):
    """Args: the three sizes of the grid, and those of the window."""
    plane = args[1] * args[2]
    by_depth = _near(query // plane, key // plane, args[0], args[3])
    by_height = _near(query // args[2] % args[1], key // args[2] % args[1], args[1], args[4])
    return by_depth & by_height & _near(query % args[2], key % args[2], args[2], args[5])


@triton.jit
def _near(place, key, size, window):
    """Whether a key lies in the window around a place, which moves inwards at the edges."""
    start = tl.minimum(tl.maximum(place - window // 2, 0), size - window)
    return (key >= start) & (key < start + window)


@triton.jit
def block_diffusion(batch, head, query, key, args):
    """Args: the number of noisy tokens, the size of blocks."""
    is_clean_q = query >= args[0]
    is_clean_k = key >= args[0]
    block_q = (query - tl.where(is_clean_q, args[0], 0)) // args[1]
    block_k = (key - tl.where(is_clean_k, args[0], 0)) // args[1]
    own = (block_q == block_k) & (is_clean_q == is_clean_k)
    return own | (is_clean_k & (block_k < block_q))


RULES = (strided, fixed, dilated, dilated_with_global_tokens, block_table, neighborhood, block_diffusion)
