"""A paged cache of keys or values; a block table lists the pages of each sequence in order."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedattn.integrations.flash_attn.arguments import with_contiguous_features
from fusedattn.integrations.flash_attn.packing import places
from fusedattn.kv_cache import KVCache
from fusedattn.readable import can_read


def capacity(block_table: Tensor, batch: int, cache: Tensor) -> int:
    """The number of tokens of a sequence that the table has pages for.

    Raises:
        TypeError, ValueError: the table is not one of `batch` sequences for `cache`.
    """
    if not isinstance(block_table, Tensor) or block_table.dtype not in (torch.int32, torch.int64):
        got = block_table.dtype if isinstance(block_table, Tensor) else type(block_table).__name__
        raise TypeError(f"block_table: got {got}, allowed is a torch.int32 tensor")
    if block_table.dim() != 2 or block_table.shape[0] != batch:
        raise ValueError(
            f"block_table: got shape {tuple(block_table.shape)}, allowed is (batch, max_num_blocks_per_seq) with "
            f"batch = {batch}"
        )
    if block_table.device != cache.device:
        raise ValueError(f"block_table: got device {block_table.device}, allowed is that of the cache, {cache.device}")
    return block_table.shape[1] * cache.shape[1]


def check_pages(block_table: Tensor, lengths: Tensor | int, cache: Tensor) -> None:
    """Raise ValueError if one of the first `lengths` tokens, an int or ``(batch,)``, has no page; not on a GPU."""
    if not can_read(block_table):
        return
    starts = torch.arange(block_table.shape[1], device=cache.device) * cache.shape[1]
    used = block_table.masked_select(starts < (lengths[:, None] if isinstance(lengths, Tensor) else lengths))
    if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < cache.shape[0]:
        raise ValueError(
            f"block_table: got pages {int(used.min())} .. {int(used.max())}, allowed are 0 .. {cache.shape[0] - 1}"
        )


def cache_of(k: Tensor, v: Tensor, block_table: Tensor, cu_seqlens: Tensor, longest: int) -> KVCache:
    """The pages of keys and values, ``(n_pages, page_size, nheads, head_dim)``, as a cache, without a copy.

    `cu_seqlens`, int32 ``(batch + 1,)``, has the lengths of the sequences, of at most `longest` tokens.
    """
    _check_lengths(k, v, block_table, cu_seqlens, longest)
    k, v = (with_contiguous_features(x).transpose(1, 2) for x in (k, v))
    return KVCache(k, v, cu_seqlens.diff(), block_table=block_table.to(torch.int32).contiguous())


def packed(k: Tensor, v: Tensor, block_table: Tensor, cu_seqlens: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Copies of keys and values, packed as `cu_seqlens` says; differentiable.

    They have room for sequences of `longest` tokens each; behind the last sequence their values are undefined. Nothing
    waits for `cu_seqlens`, int32 ``(batch + 1,)``.
    """
    most = _check_lengths(k, v, block_table, cu_seqlens, longest)
    batch, page_size = cu_seqlens.shape[0] - 1, k.shape[1]
    sequence, position, inside = places(cu_seqlens, batch * min(longest, most))
    page = block_table.long()[sequence, position // page_size].masked_fill(~inside, 0)
    row = position % page_size
    return k[page, row], v[page, row]


def _check_lengths(k: Tensor, v: Tensor, block_table: Tensor, cu_seqlens: Tensor, longest: int) -> int:
    """The number of tokens of a sequence that the table has pages for.

    Raises:
        TypeError, ValueError: these are not pages of sequences of such lengths.
    """
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError("cu_seqlens_k: got none for one sequence or more, allowed is a tensor (batch + 1,)")
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens_k: got {cu_seqlens.dtype}, allowed is a torch.int32 tensor")
    most = capacity(block_table, cu_seqlens.shape[0] - 1, k)
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"v: got pages {tuple(v.shape[:2])}, allowed are those of k, {tuple(k.shape[:2])}")
    if can_read(cu_seqlens):
        lengths = cu_seqlens.diff()
        if int(cu_seqlens[0]) != 0 or int(lengths.min()) < 0:
            raise ValueError(f"cu_seqlens_k: got {cu_seqlens.tolist()}, allowed begins with 0 and does not decrease")
        if int(lengths.max()) > most:
            raise ValueError(f"block_table: got pages for {most} tokens, allowed are those for the longest sequence")
        if int(lengths.max()) > longest:
            raise ValueError(
                f"max_seqlen_k: got {longest}, allowed are the longest length, {int(lengths.max())}, and more"
            )
        check_pages(block_table, lengths, k)
    return most
