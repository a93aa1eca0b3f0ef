"""Convert the mask functions of transformers to :class:`fusedattn.masks.Mask`.

A model builds its masks before its layers run, by the function that is registered under the name of its attention. The
usual masks (causal, sliding windows, chunks, packed sequences, padding) are recognised by the code of their functions,
so that hidden blocks are never visited; any other mask is written out as a bool tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import masking_utils

from fusedattn import masks
from fusedattn.masks import Band, Mask

MaskFunction = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class PreparedMask:
    """A mask on its way through a model to its attention.

    Most models only pass it on. For other uses it acts as the bool tensor that SDPA would get, written out on demand;
    only adding it to scores is refused, because that would be wrong for a bool mask.

    Attributes:
        mask: the mask.
        shape: ``(batch, 1, seqlen_q, seqlen_k)``.
        device: the device of the tensor.
    """

    mask: Mask
    shape: tuple[int, int, int, int]
    device: torch.device

    dtype: ClassVar[torch.dtype] = torch.bool
    ndim: ClassVar[int] = 4

    def dense(self) -> Tensor:
        """The bool tensor, True = attend."""
        batch, _, *lengths = self.shape
        return self.mask.dense(*lengths, batch=batch, nheads=1, device=self.device).expand(self.shape)

    def dim(self) -> int:
        return self.ndim

    def contiguous(self) -> PreparedMask:
        return self

    def to(self, device: torch.device | str | None = None, **_: object) -> PreparedMask:
        """The mask on another device; its dtype does not change."""
        return self if device is None else PreparedMask(self.mask.to(device), self.shape, torch.device(device))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look for such names
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    def __invert__(self) -> Tensor:
        return ~self.dense()

    def __and__(self, other: Any) -> Tensor:
        return self.dense() & other

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _SUMS:
            raise NotImplementedError(
                "attention_mask: this model adds it to its scores, which is wrong for a bool mask; choose another "
                "attn_implementation than 'fusedattn'"
            )
        args, kwargs = torch.utils._pytree.tree_map_only(PreparedMask, PreparedMask.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


_SUMS = ("add", "add_", "__add__", "__radd__", "__iadd__")


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | PreparedMask | None = None,
    **options: Any,
) -> Tensor | PreparedMask | None:
    """A mask function for ``transformers.AttentionMaskInterface``, with the arguments of transformers' ``sdpa_mask``.

    Args:
        batch_size, q_length, kv_length: sizes of the attention.
        q_offset, kv_offset: positions of the first query and the first key.
        mask_function: ``(batch, head, query, key)`` -> bool, of positions.
        attention_mask: bool ``(batch, positions)``, True = a real token; or a mask that is already prepared.

    Returns:
        A :class:`PreparedMask`; a bool tensor ``(batch, 1, q_length, kv_length)``, True = attend, if the function is of
        an unknown kind, if ``q_offset`` is a tensor (static caches) and under ``torch.compile``; or None for a
        bidirectional model whose mask hides nothing.
    """
    if isinstance(attention_mask, PreparedMask):
        return attention_mask
    if not (isinstance(q_offset, Tensor) or torch.compiler.is_compiling()):
        span = _Span(q_length, kv_length, q_offset, kv_offset)
        mask = _mask_of(mask_function, span)
        if mask is not None:
            if attention_mask is not None:
                mask = mask & span.padding(masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset))
            device = torch.device(options.get("device", "cpu"))
            return PreparedMask(mask, (batch_size, 1, q_length, kv_length), device)
    options["allow_is_causal_skip"] = False
    return masking_utils.sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **options
    )


@dataclass(frozen=True)
class _Span:
    """The positions of the queries and keys of a call."""

    q_length: int
    kv_length: int
    q_offset: int
    kv_offset: int

    @property
    def shift(self) -> int:
        return self.q_offset - self.kv_offset

    def band(self, left: int | None, right: int | None) -> Mask:
        return Mask(bands=frozenset({_band(left, right, self.shift, self.q_length, self.kv_length)}))

    def padding(self, valid: Tensor) -> Mask:
        """A padding mask from ``valid``, ``(batch, positions)``, for all positions."""
        return masks.padding(valid[:, self.kv_offset : self.kv_offset + self.kv_length].to(torch.bool))

    def documents(self, ids: Tensor) -> Mask:
        """A mask of documents from ``ids``, ``(batch, positions)``, for all positions."""
        ids_q = ids[:, self.q_offset : self.q_offset + self.q_length]
        return masks.documents(ids_q, ids[:, self.kv_offset : self.kv_offset + self.kv_length])

    def chunks(self, size: int, start: Tensor) -> Mask:
        """A mask of chunks of ``size`` positions, counted from ``start``, ``(batch,)``."""
        at = torch.arange(max(self.q_offset + self.q_length, self.kv_offset + self.kv_length), device=start.device)
        return self.documents(torch.div(at - start[:, None], size, rounding_mode="floor"))


def _band(left: int | None, right: int | None, shift: int, q_length: int, kv_length: int) -> Band:
    """Query ``i`` sees keys ``i + shift - left .. i + shift + right``."""
    if shift == kv_length - q_length:
        return Band(left, right, "bottom_right")
    return Band(None if left is None else left - shift, None if right is None else right + shift, "top_left")


def _code_of(make: Callable[..., MaskFunction], *arguments: Any) -> Any:
    """The code that all functions made by ``make`` share."""
    return make(*arguments).__code__


_AND = _code_of(masking_utils.and_masks)
_WINDOW = _code_of(masking_utils.sliding_window_overlay, 1)
_WINDOW_BOTH_WAYS = _code_of(masking_utils.sliding_window_bidirectional_overlay, 1)
_CHUNKS = _code_of(masking_utils.chunked_overlay, 1, None)
_PADDING = _code_of(masking_utils.padding_mask_function, None)
_PACKED = _code_of(masking_utils.packed_sequence_mask_function, None)
# Older versions have no such function: their positions do not restart at packed sequences.
_PER_SEQUENCE = (
    _code_of(masking_utils.remap_positions_for_packed_sequence, None, None)
    if hasattr(masking_utils, "remap_positions_for_packed_sequence")
    else object()
)


def _mask_of(function: MaskFunction, span: _Span) -> Mask | None:
    """The mask that a function of transformers describes; None if its kind is unknown."""
    if function is masking_utils.causal_mask_function:
        return span.band(None, 0)
    if function is masking_utils.bidirectional_mask_function:
        return masks.full()
    code = getattr(function, "__code__", None)
    if code is _AND:
        return _intersection(_captured(function, "mask_functions"), span)
    if code is _WINDOW:
        return span.band(_captured(function, "sliding_window") - 1, None)
    if code is _WINDOW_BOTH_WAYS:
        distance = _captured(function, "sliding_window")
        return span.band(distance, distance)
    if code is _CHUNKS:
        return span.chunks(_captured(function, "chunk_size"), _captured(function, "left_padding"))
    if code is _PADDING:
        return span.padding(_captured(function, "padding_mask"))
    if code is _PACKED:
        return span.documents(_captured(function, "packed_sequence_mask"))
    return None


def _intersection(functions: tuple[MaskFunction, ...], span: _Span) -> Mask | None:
    whole = masks.full()
    packed = any(getattr(function, "__code__", None) is _PACKED for function in functions)
    for function in functions:
        if packed and getattr(function, "__code__", None) is _PER_SEQUENCE:
            # Inside a packed sequence positions rise by one, so distances are the same as in the whole row.
            mask = _mask_of(_captured(function, "mask_function"), span)
            mask = mask if mask is not None and mask.only_bands else None
        else:
            mask = _mask_of(function, span)
        if mask is None or (mask.documents is not None and whole.documents is not None):
            return None
        whole = whole & mask
    return whole


def _captured(function: Any, name: str) -> Any:
    """The value of a variable in the closure of a function."""
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents
