"""From the tensors of a mask to arguments of the kernels, on the device and without waiting for it."""

from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from fusedattn.kernels import launcher, replay
from fusedattn.kernels.masking import FAR, DocumentArguments, LayoutArguments, MaskArguments
from fusedattn.kernels.pairs import pairs
from fusedattn.kernels.sequences import Sequences, Shape, place_of

_SWITCH = {False: tl.constexpr(False), True: tl.constexpr(True)}


@dataclass(frozen=True)
class BandBounds:
    """Query ``i`` sees keys ``i + lower .. i + upper``; None is no bound. Both pairs hold: `_start` bounds count from
    the first key, `_end` bounds put the last query and the last key on the diagonal.
    """

    lower_start: int | None = None
    upper_start: int | None = None
    lower_end: int | None = None
    upper_end: int | None = None

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The bounds as the kernels take them, by name."""
        far = FAR.value
        return {
            name: (-far if name.startswith("lower") else far) if bound is None else max(-far, min(far, bound))
            for name, bound in asdict(self).items()
        }

    @cached_property
    def in_order(self) -> tuple[int, ...]:
        """The bounds as the kernels take them, in the order of their parameters."""
        return tuple(self.sizes.values())

    @cached_property
    def has_lower(self) -> bool:
        """Whether a bound limits how far queries look back."""
        return self.lower_start is not None or self.lower_end is not None

    @cached_property
    def has_upper(self) -> bool:
        """Whether a bound limits how far queries look ahead."""
        return self.upper_start is not None or self.upper_end is not None

    @cached_property
    def width(self) -> int:
        """The most keys that the bounds let a query see."""
        sizes = self.sizes
        widths = (sizes[f"upper_{end}"] - sizes[f"lower_{end}"] + 1 for end in ("start", "end"))
        return max(0, min(widths))

    def at(self, shape: Shape) -> tuple[int, int]:
        """(lower, upper) of sequences that are not packed."""
        sizes, at_end = self.sizes, shape.seqlen_k - shape.seqlen_q
        lower = max(sizes["lower_start"], sizes["lower_end"] + at_end)
        return lower, min(sizes["upper_start"], sizes["upper_end"] + at_end)


def mask_arguments(
    mask: Any,
    sizes: Any,
    function: Any,
    function_args: tuple[Any, ...],
    band: BandBounds,
    sequences: Sequences,
    shape: Shape,
) -> MaskArguments:
    """A mask as the kernels read it.

    Args:
        mask: has the fields `valid`, bool ``(batch, seqlen_k)``; `allowed`, bool, ``n_sequences``, nheads_q, seqlen_q
            and seqlen_k long, or 1 where it is broadcast; `prefix`, int ``(n_sequences,)``; `documents_q` and
            `documents_k`, int ``(batch, seqlen)``; `layout`, bool ``(n_sequences, nheads_q, blocks of queries, blocks
            of keys)``, each 1 where it is broadcast; `tree`, bool, ``n_sequences``, nheads_q, max_seqlen_q and
            max_seqlen_q long, or 1 where it is broadcast. None masks nothing.
        sizes: has `prefix_at_end`, which is PREFIX_AT_END of the kernels, and `block_q` and `block_k` of the layout.
        function, function_args: the user's function, and its tensors and numbers.
        band: bounds of the distance from a query to its keys.
        sequences, shape: of the call.
    """
    valid = None if mask.valid is None else mask.valid.contiguous().view(torch.uint8)
    documents: DocumentArguments | None = None
    layout: LayoutArguments | None = None
    if mask.documents_q is not None and mask.documents_k is not None and mask.documents_k.numel() > 0:
        documents = _documents(mask.documents_q, mask.documents_k)
    if mask.layout is not None:
        n_q, n_k = triton.cdiv(shape.max_seqlen_q, sizes.block_q), triton.cdiv(shape.max_seqlen_k, sizes.block_k)
        blocks = mask.layout.expand(-1, -1, n_q, n_k)
        if sequences.cu_q_ptr is None and sequences.lengths_ptr is None and sequences.shard_ptr is None:
            blocks = blocks & _blocks_in_band(blocks, sizes.block_q, sizes.block_k, *band.at(shape))
        layout = _layout(blocks, sizes.block_q, sizes.block_k)
    by_pair = mask.allowed is not None or mask.layout is not None or function is not None
    irregular = band.has_lower or mask.prefix is not None or mask.documents_q is not None or mask.tree is not None
    return MaskArguments(
        HAS_LOWER=_SWITCH[band.has_lower],
        HAS_UPPER=_SWITCH[band.has_upper],
        BY_PAIR=_SWITCH[by_pair],
        MAY_HIDE_ROWS=_SWITCH[by_pair or irregular],
        valid_ptr=valid,
        key_range_ptr=None if valid is None else key_range(valid, sequences, shape),
        allowed=None if mask.allowed is None else pairs(mask.allowed.view(torch.uint8)),
        prefix_ptr=None if mask.prefix is None else mask.prefix.to(torch.int32).contiguous(),
        PREFIX_AT_END=_SWITCH[bool(sizes.prefix_at_end)],
        documents=documents,
        layout=layout,
        tree=None if mask.tree is None else pairs(mask.tree.view(torch.uint8)),
        function_args=function_args,
        FUNCTION=function,
    )


def _documents(ids_q: torch.Tensor, ids_k: torch.Tensor) -> DocumentArguments:
    sorted_k, index_k = ids_k.sort(dim=-1, stable=True)
    number_q, key_ranges = _ranges(ids_q, sorted_k, index_k)
    _, query_ranges = _ranges(ids_k, *ids_q.sort(dim=-1, stable=True))
    # Queries and keys share the numbering of the keys, in which each document of the keys has a number.
    number_k = torch.searchsorted(sorted_k, ids_k.contiguous())
    return DocumentArguments(
        number_q.to(torch.int32),
        number_k.to(torch.int32),
        key_ranges,
        query_ranges,
        key_ranges_stride=ids_q.numel(),
        query_ranges_stride=ids_k.numel(),
    )


def _ranges(ids: torch.Tensor, others: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers of the documents `ids` among the sorted `others`, -1 if there is none; ranges in the others)."""
    ids = ids.contiguous()
    left, right = torch.searchsorted(others, ids), torch.searchsorted(others, ids, right=True)
    found = right > left
    # A stable sort keeps the order within a document.
    first = index.gather(-1, left.clamp(max=others.shape[-1] - 1))
    last = index.gather(-1, (right - 1).clamp(min=0))
    stop = torch.where(found, last + 1, 0)
    ranges = (
        torch.where(found, first, FAR.value),
        stop,
        torch.where(last - first == right - left - 1, stop, 0),
    )
    return torch.where(found, left, -1), torch.stack(ranges).to(torch.int32)


def _blocks_in_band(blocks: torch.Tensor, block_q: int, block_k: int, lower: int, upper: int) -> torch.Tensor:
    """Which blocks have a pair between the bounds, ``(blocks of queries, blocks of keys)``."""
    n_q, n_k = blocks.shape[2:]
    first_q = torch.arange(n_q, device=blocks.device)[:, None] * block_q
    first_k = torch.arange(n_k, device=blocks.device) * block_k
    return (first_k <= first_q + block_q - 1 + upper) & (first_k + block_k - 1 >= first_q + lower)


def _layout(blocks: torch.Tensor, block_q: int, block_k: int) -> LayoutArguments:
    key_counts, key_lists = _lists(blocks)
    query_counts, query_lists = _lists(blocks.mT)
    n_matrices, n_heads, n_q, n_k = blocks.shape
    return LayoutArguments(
        key_counts,
        key_lists,
        query_counts,
        query_lists,
        blocks.contiguous().view(torch.uint8),
        stride_b=n_heads if n_matrices > 1 else 0,
        stride_h=1 if n_heads > 1 else 0,
        n_q=n_q,
        n_k=n_k,
        block_q=block_q,
        block_k=block_k,
    )


def _lists(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row, the number of True elements, and their indices, followed by the other indices."""
    counts = blocks.sum(dim=-1, dtype=torch.int32)
    return counts, (~blocks).to(torch.uint8).argsort(dim=-1, stable=True).to(torch.int32).contiguous()


RANGE_BLOCK = 1024


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k"])
def _key_range(valid_ptr, key_range_ptr, sequences, seqlen_q, seqlen_k, BLOCK: tl.constexpr):
    """One program per sequence: reduce ``valid`` to (first visible, last visible + 1, no gaps)."""
    sequence = tl.program_id(0)
    place = place_of(sequences, sequence, 0, 1, seqlen_q, seqlen_k)
    row = valid_ptr + place.key_base
    first = place.seqlen_k
    stop = 0
    count = 0
    for start in range(0, place.seqlen_k, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        seen = tl.load(row + offs, mask=offs < place.seqlen_k, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(seen, offs, place.seqlen_k), 0))
        stop = tl.maximum(stop, tl.max(tl.where(seen, offs + 1, 0), 0))
        count += tl.sum(seen.to(tl.int32), 0)
    base = key_range_ptr + sequence.to(tl.int64) * 3
    tl.store(base, tl.minimum(first, stop))  # nothing visible: the empty range [0, 0)
    tl.store(base + 1, stop)
    tl.store(base + 2, (count == stop - first).to(tl.int32))


def key_range(valid: torch.Tensor, sequences: Sequences, shape: Shape) -> torch.Tensor:
    """The visible range of each sequence.

    Args:
        valid: uint8 ``(batch, seqlen_k)``, contiguous.
        sequences, shape: of the attention.

    Returns:
        int32 ``(n_sequences, 3)``: first visible key, last visible key + 1, and 1 if there is no gap between.
    """
    out = replay.scratch(valid, (shape.n_sequences, 3), torch.int32)
    launcher.launch(
        _key_range_constants(), shape.n_sequences, (valid, out, sequences), (shape.seqlen_q, shape.seqlen_k)
    )
    return out


@lru_cache
def _key_range_constants() -> launcher.KernelConstants:
    return launcher.KernelConstants(_key_range, BLOCK=RANGE_BLOCK, num_warps=4)
