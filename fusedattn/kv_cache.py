"""A cache of keys and values: where each token of each sequence lies, and what its codes mean.

:meth:`KVCache.dense` writes the keys and values out, and :meth:`KVCache.write` appends tokens, both in eager PyTorch:
they define what a cache holds. The kernels read and write the same memory directly, and are tested against them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedattn.quantization import FORMATS, Format, dequantised, quantised, scales_of
from fusedattn.readable import can_read
from fusedattn.rope import Rope, apply_rope
from fusedattn.strides import is_view_of_first_features

UNQUANTISED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of a batch of sequences, appended to in place.

    Sequence ``i`` has ``lengths[i]`` tokens, counted from 0. Token ``t`` lies in slot ``t`` of row ``i``, or of row
    ``rows[i]``; with a block table, in slot ``t % page_size`` of row (page) ``block_table[i, t // page_size]``. Tensors
    of different layers may share `lengths`, `block_table`, `rows` and `left_padding`.

    Attributes:
        k: ``(n_rows, nheads_kv, n_slots, head_dim)``; float16, bfloat16, float32 (float64 where ``attention`` has it),
            or codes: float8_e4m3fn, float8_e5m2, int8, or uint8, which has two 4-bit codes in each element and
            ``head_dim / 2`` of them. Any strides whose last is 1.
        v: ``(n_rows, nheads_kv, n_slots, head_dim_v)``, dtype and device of k. It may be a view of the first features
            of k, as in multi-head latent attention; scales that are written when tokens are appended are then a view
            of those of k, too.
        lengths: int32 ``(batch,)``: the tokens of each sequence, changed in place when tokens are appended. Fewer drop
            the newest tokens, such as drafts that were rejected; not if `overwrites`, where the older tokens are lost.
        block_table: int32 ``(batch, max_pages)``: the pages of each sequence, in order, ``n_slots`` tokens each.
            Entries for pages that a sequence does not reach may be anything. Sequences may share pages that are full;
            a page that tokens are appended to belongs to one sequence.
        rows: int32 ``(batch,)``: the row of each sequence, all different if it is appended to; the first rows by
            default. Not together with a block table.
        left_padding: int32 ``(batch,)``: tokens at the start of a sequence that no query sees.
        overwrites: a sequence that is longer than the cache keeps its first `n_sinks` tokens and its last ones, which
            overwrite those between (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023).
            Queries see those that are kept: append no more tokens at once than their first query can do without.
            Without it, such a sequence is an error on a CPU, and has NaN results on a GPU or under a compiler.
        n_sinks: see `overwrites`.
        rope: tables for keys that are rotated when they are appended, at their position, the number of the token; and
            for the queries that attend to them. Its ``positions_k`` replace the positions of appended tokens, its
            ``positions_q`` those of queries, packed like them. Keys are not rotated again when they are read. None if
            keys are stored as they are; ``attention(..., rope=)`` then rotates them when it reads them, counting the
            tokens that are kept.
        k_scale, v_scale: for codes, the float32 factors that make numbers of them: ``(n_rows, nheads_kv, n_slots,
            n)``, written when tokens are appended, one for all features of a token and head or, for 4-bit codes, for
            each ``group_size`` of them: n is ``head_dim / group_size`` for keys, ``head_dim_v / group_size`` for
            values. Or ``(n_rows, nheads_kv)``, given, one for all tokens of a row, for codes of 8 bits. The last
            dimension of the first form is contiguous.

    Raises:
        TypeError, ValueError: a tensor is wrong or does not fit the others.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    block_table: Tensor | None = None
    rows: Tensor | None = None
    left_padding: Tensor | None = None
    overwrites: bool = False
    n_sinks: int = 0
    rope: Rope | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @classmethod
    def contiguous(
        cls,
        batch: int,
        nheads_kv: int,
        capacity: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        dtype: torch.dtype,
        group_size: int | None = None,
        rope: Rope | None = None,
        overwrites: bool = False,
        n_sinks: int = 0,
        left_padding: Tensor | None = None,
        lengths: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> KVCache:
        """A new cache with one row for each sequence, its memory 0.

        Args:
            batch, capacity: the sequences, and the tokens that each has room for.
            head_dim_v: head_dim by default.
            dtype: of the numbers or codes; codes get the scales of each token.
            group_size: for 4-bit codes, the adjacent features that share a scale, a power of two that divides head_dim
                and head_dim_v; None if all features of a token and head share one.
            lengths: int32 ``(batch,)``, which appending changes; new zeros by default.
            rope, overwrites, n_sinks, left_padding: see the class.
            device: torch's default device by default.

        Raises:
            TypeError, ValueError: an argument is wrong or does not fit the others.
        """
        lengths = torch.zeros(batch, dtype=torch.int32, device=device) if lengths is None else lengths
        return cls(
            lengths=lengths, rope=rope, overwrites=overwrites, n_sinks=n_sinks, left_padding=left_padding,
            **_memory((batch, nheads_kv, capacity), (head_dim, head_dim_v), dtype, group_size, device),
        )  # fmt: skip

    @classmethod
    def paged(
        cls,
        block_table: Tensor,
        n_pages: int,
        page_size: int,
        nheads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        dtype: torch.dtype,
        group_size: int | None = None,
        rope: Rope | None = None,
        overwrites: bool = False,
        n_sinks: int = 0,
        left_padding: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> KVCache:
        """A new cache of `n_pages` pages of `page_size` tokens, its memory 0, on the device of `block_table`.

        The other arguments are those of :meth:`contiguous`.
        """
        _check_int32("block_table", block_table, "(batch, max_pages)", 2)
        device = block_table.device
        if lengths is None:
            lengths = torch.zeros(block_table.shape[0], dtype=torch.int32, device=device)
        return cls(
            lengths=lengths, block_table=block_table, rope=rope, overwrites=overwrites, n_sinks=n_sinks,
            left_padding=left_padding,
            **_memory((n_pages, nheads_kv, page_size), (head_dim, head_dim_v), dtype, group_size, device),
        )  # fmt: skip

    def __post_init__(self) -> None:
        for name, x in (("k", self.k), ("v", self.v)):
            if not isinstance(x, Tensor) or x.dim() != 4:
                raise ValueError(f"{name}: got {_shown(x)}, allowed is (n_rows, nheads_kv, n_slots, head_dim)")
            if x.shape[3] == 0:
                raise ValueError(f"{name}: got head_dim 0, allowed is 1 and more")
            if x.dtype not in UNQUANTISED and x.dtype not in FORMATS:
                raise TypeError(f"{name}: got {x.dtype}, allowed are {', '.join(map(str, (*UNQUANTISED, *FORMATS)))}")
            if x.stride(3) != 1 and x.shape[3] > 1:
                raise ValueError(f"{name}: got strides {x.stride()}, allowed are any whose last is 1")
        if self.k.shape[:3] != self.v.shape[:3] or self.k.dtype != self.v.dtype or self.k.device != self.v.device:
            raise ValueError(
                f"v: got {_shown(self.v)}, allowed are rows, heads, slots, dtype and device of k, {_shown(self.k)}"
            )
        _check_int32("lengths", self.lengths, "(batch,)", 1)
        batch = self.lengths.shape[0]
        for name, of_batch in (("rows", self.rows), ("left_padding", self.left_padding)):
            if of_batch is not None:
                _check_int32(name, of_batch, "(batch,)", 1, batch)
        if self.block_table is not None:
            _check_int32("block_table", self.block_table, "(batch, max_pages)", 2, batch)
            if self.rows is not None:
                raise ValueError("rows: got a tensor together with block_table, allowed is one of them")
        elif self.rows is None and self.k.shape[0] < batch:
            raise ValueError(f"k: got {self.k.shape[0]} rows, allowed are batch = {batch} and more")
        if self.overwrites and self.capacity == 0:
            raise ValueError("overwrites: got True for a capacity of 0, allowed are 1 and more")
        if not 0 <= self.n_sinks < max(1, self.capacity):
            raise ValueError(f"n_sinks: got {self.n_sinks}, allowed are 0 .. {self.capacity - 1}")
        if self.n_sinks and (not self.overwrites or self.left_padding is not None):
            raise ValueError("n_sinks: got sinks, allowed are none without overwrites, or with left_padding")
        if self.rope is not None and not isinstance(self.rope, Rope):
            raise TypeError(f"rope: got {type(self.rope).__name__}, allowed are fusedattn.Rope and None")
        if self.rope is not None:
            self.rope.at(None, None).check_shapes(batch, 0, 0, self.head_dim)
        self._check_scales()
        for name, x in self.tensors().items():
            if x.device != self.k.device:
                raise ValueError(f"{name}: got device {x.device}, allowed is that of k, {self.k.device}")

    def _check_scales(self) -> None:
        named = (("k_scale", self.k_scale, self.head_dim), ("v_scale", self.v_scale, self.head_dim_v))
        for name, scale, head_dim in named:
            if (scale is None) != (self.format is None):
                got = "None" if scale is None else "a tensor"
                raise ValueError(
                    f"{name}: got {got} for a cache of {self.k.dtype}, allowed is a tensor for codes alone"
                )
            if scale is None:
                continue
            if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
                raise TypeError(f"{name}: got {_shown(scale)}, allowed is a torch.float32 tensor")
            per_token = scale.dim() == 4 and scale.shape[:3] == self.k.shape[:3] and scale.stride(3) == 1
            is_packed = self.k.dtype == torch.uint8
            if per_token and (_has_groups(head_dim, scale.shape[3]) if is_packed else scale.shape[3] == 1):
                continue
            if is_packed or tuple(scale.shape) != tuple(self.k.shape[:2]):
                raise ValueError(
                    f"{name}: got shape {tuple(scale.shape)}, allowed are (n_rows, nheads_kv, n_slots, n) = "
                    f"{(*self.k.shape[:3], 'n')} with a contiguous last dimension (n is 1, or for 4 bits {head_dim} / "
                    f"group_size, a power of two) and, except for 4 bits, "
                    f"(n_rows, nheads_kv) = {tuple(self.k.shape[:2])}"
                )

    @property
    def format(self) -> Format | None:
        """The format of the codes; None if the cache holds numbers."""
        return FORMATS.get(self.k.dtype)

    @property
    def head_dim(self) -> int:
        """The features of a key."""
        return self.k.shape[3] * (1 if self.format is None else self.format.per_element)

    @property
    def head_dim_v(self) -> int:
        """The features of a value."""
        return self.v.shape[3] * (1 if self.format is None else self.format.per_element)

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int:
        """The tokens of one sequence that the cache has room for."""
        return self.k.shape[2] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def shares_memory(self) -> bool:
        """Whether values are the first features of the keys."""
        return is_view_of_first_features(self.v, self.k)

    @property
    def shares_scales(self) -> bool:
        """Whether scales of values that are written when tokens are appended are those of the keys."""
        k_scale, v_scale = self.k_scale, self.v_scale
        if k_scale is None or v_scale is None or k_scale.dim() == v_scale.dim() == 2:
            return True
        if k_scale.dim() != v_scale.dim() or not is_view_of_first_features(v_scale, k_scale):
            return False
        n, n_v = k_scale.shape[3], v_scale.shape[3]
        return n == n_v == 1 or self.head_dim * n_v == self.head_dim_v * n

    def kept(self) -> Tensor:
        """The tokens of each sequence that the cache holds, int32 ``(batch,)``."""
        return self.lengths.clamp(max=self.capacity) if self.overwrites else self.lengths

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the cache but k and v, by name."""
        named = {
            "lengths": self.lengths,
            "block_table": self.block_table,
            "rows": self.rows,
            "left_padding": self.left_padding,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
        }
        if self.rope is not None:
            named |= {
                "rope.cos": self.rope.cos,
                "rope.positions_q": self.rope.positions_q,
                "rope.positions_k": self.rope.positions_k,
            }
        return {name: x for name, x in named.items() if x is not None}

    def place(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where tokens lie: (row, slot, exists), int64 and bool ``(batch, n)``.

        A token that was overwritten has the place of a later one. One without a place, because it is beyond the
        capacity or its page or row is not there, has some place of the cache.
        """
        slots = tokens
        if self.overwrites:
            ring = self.capacity - self.n_sinks
            slots = torch.where(tokens < self.n_sinks, tokens, self.n_sinks + (tokens - self.n_sinks) % ring)
        near = slots.clamp(0, self.capacity - 1)
        exists = slots == near
        if self.block_table is None and self.rows is None:
            return torch.arange(self.batch, device=tokens.device)[:, None].expand_as(near), near, exists
        if self.block_table is not None:
            rows, near = self.block_table.long().gather(1, near // self.k.shape[2]), near % self.k.shape[2]
        else:
            assert self.rows is not None
            rows = self.rows.long()[:, None].expand_as(near)
        near_rows = rows.clamp(0, self.k.shape[0] - 1)
        return near_rows, near, exists & (rows == near_rows)

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """The keys and values that are kept, in order, and which of them queries may see.

        Returns:
            ``(k, v, visible)``: k ``(batch, nheads_kv, capacity, head_dim)`` and v, in the dtype of the cache, or
            float32 for codes, 0 behind the last token, NaN for tokens without a place and for all of a sequence that
            is longer than the cache; visible, bool ``(batch, capacity)``.
        """
        keys = torch.arange(self.capacity, device=self.k.device)
        kept = self.kept()[:, None]
        dropped = self.lengths[:, None] - kept
        is_kept = keys < kept
        tokens = torch.where(keys < self.n_sinks, keys, keys + dropped)
        rows, slots, exists = self.place(tokens)
        visible = is_kept
        if self.left_padding is not None:
            visible = visible & (tokens >= self.left_padding[:, None])
        if not self.overwrites:
            exists = exists & (kept <= self.capacity)
        # Entries of the table behind the last page may be anything.
        held, absent = (is_kept & exists)[:, None, :, None], torch.where(is_kept, math.nan, 0.0)[:, None, :, None]
        numbers = (_numbers(x, s, rows, slots) for x, s in ((self.k, self.k_scale), (self.v, self.v_scale)))
        k, v = (torch.where(held, x, absent.to(x.dtype)) for x in numbers)
        return k, v, visible

    def write(self, k: Tensor, v: Tensor | None, counts: Tensor | None = None, positions: Tensor | None = None) -> None:
        """Write the newest tokens of each sequence, which `lengths` counts already; in eager PyTorch.

        Tokens without a place are left out.

        Args:
            k, v: ``(batch, nheads_kv, n, head_dim)``; v is None if values are features of the keys.
            counts: int ``(batch,)``: the first of the n that exist; all by default.
            positions: of keys to rotate, ``(n,)`` or ``(batch, n)``; the numbers of the tokens by default.
        """
        n = k.shape[2]
        if 0 in (self.batch, n, self.k.numel()):
            return
        number = torch.arange(n, device=k.device)
        tokens = (self.lengths - (n if counts is None else counts))[:, None] + number
        rows, slots, exists = self.place(tokens)
        if counts is not None:
            exists = exists & (number < counts[:, None])
        if self.overwrites:  # the others are overwritten by the last ones
            exists = exists & (
                (tokens < self.n_sinks) | (tokens >= self.lengths[:, None] - self.capacity + self.n_sinks)
            )
        wide = torch.promote_types(k.dtype, torch.float32)
        if self.rope is not None:
            positions = tokens if positions is None else positions
            k = apply_rope(k.to(wide), self.rope.cos, self.rope.sin, positions, interleaved=self.rope.interleaved)
        chosen, some = _chosen(exists.flatten())
        at = rows.flatten()[chosen], slice(None), slots.flatten()[chosen]
        for x, cached, scale in ((k, self.k, self.k_scale), (v, self.v, self.v_scale)):
            if x is None:
                continue
            own = x.transpose(1, 2).flatten(0, 1)[chosen]  # (tokens, nheads_kv, head_dim)
            if scale is None:
                new = own.to(cached.dtype)
            elif scale.dim() == 2:
                new = quantised(own, scale[at[0]][..., None], cached.dtype)
            else:
                scales = scales_of(own, cached.dtype, scale.shape[3])
                new = quantised(own, scales, cached.dtype)
                scale[at] = scales if some is None else torch.where(some, scales, scale[at])
            cached[at] = new if some is None else torch.where(some, new, cached[at])

    def check_values(self, n_new: Sequence[int] | None = None, *, counted: bool = True) -> None:
        """Raise ValueError if a token has no place, or a sequence has fewer than its new tokens.

        Reads tensors, and so waits for a GPU.

        Args:
            n_new: the new tokens of each sequence; none by default.
            counted: `lengths` counts them.
        """
        lengths = self.lengths.tolist()
        n_new = [0] * len(lengths) if n_new is None else n_new
        if not counted:
            lengths = [length + n for length, n in zip(lengths, n_new, strict=True)]
        if any(length < n for length, n in zip(lengths, n_new, strict=True)):
            raise ValueError(f"lengths: got {lengths}, allowed are those that count the new tokens, {list(n_new)}")
        if not self.overwrites and max(lengths, default=0) > self.capacity:
            raise ValueError(f"lengths: got {max(lengths)}, allowed are 0 .. {self.capacity}: the cache is full")
        if self.block_table is not None:
            for pages, length in zip(self.block_table, lengths, strict=True):
                used = pages[: -(-min(length, self.capacity) // self.k.shape[2])]
                _check_rows("block_table", used.tolist(), self.k.shape[0])
        if self.rows is not None:
            _check_rows("rows", self.rows.tolist(), self.k.shape[0])


def _chosen(exists: Tensor) -> tuple[Tensor | slice, Tensor | None]:
    """The indices of those that exist, and whether there are some, or None if this does not matter.

    A compiler cannot follow how many these are, and to count them is to wait for a GPU. The first one that exists is
    then chosen in place of all others, so that it is written several times.
    """
    if can_read(exists):
        return slice(None) if exists.all() else exists.nonzero()[:, 0], None
    numbers = torch.arange(exists.shape[0], device=exists.device)
    return numbers.where(exists, exists.int().argmax()), exists.any()


def _memory(
    shape: tuple[int, int, int],
    head_dims: tuple[int, int | None],
    dtype: torch.dtype,
    group_size: int | None,
    device: torch.device | str | None,
) -> dict[str, Tensor]:
    """Zeros for k and v of ``(n_rows, nheads_kv, n_slots)``, and for the scales of codes."""
    form = FORMATS.get(dtype)
    per_element = 1 if form is None else form.per_element
    head_dim = head_dims[0]
    widths = {"k": head_dim, "v": head_dim if head_dims[1] is None else head_dims[1]}
    if any(n % per_element for n in widths.values()):
        raise ValueError(
            f"head_dim, head_dim_v: got {widths['k']} and {widths['v']}, allowed for {dtype} are multiples of "
            f"{per_element}"
        )
    if group_size is not None and (per_element == 1 or not all(_divides(group_size, n) for n in widths.values())):
        raise ValueError(
            f"group_size: got {group_size} for {dtype}, head_dim {widths['k']} and head_dim_v {widths['v']}, allowed "
            "are None and, for torch.uint8, powers of two from 2 on that divide both"
        )
    found = {}
    for name, n in widths.items():
        found[name] = torch.zeros(*shape, n // per_element, dtype=dtype, device=device)
        if form is not None:
            n_scales = 1 if group_size is None else n // group_size
            found[f"{name}_scale"] = torch.zeros(*shape, n_scales, dtype=torch.float32, device=device)
    return found


def _divides(group_size: int, head_dim: int) -> bool:
    """Whether groups of that many features may have scales of their own."""
    return group_size > 1 and group_size & (group_size - 1) == 0 and head_dim % group_size == 0


def _has_groups(head_dim: int, n: int) -> bool:
    """Whether the features of a head may have `n` scales."""
    return n == 1 or (n > 1 and head_dim % n == 0 and _divides(head_dim // n, head_dim))


def _numbers(x: Tensor, scale: Tensor | None, rows: Tensor, slots: Tensor) -> Tensor:
    """The tokens at ``(batch, n)`` rows and slots, ``(batch, nheads_kv, n, head_dim)``."""
    codes = x[rows, :, slots]
    if scale is None:
        numbers = codes
    else:
        numbers = dequantised(codes, scale[rows][..., None] if scale.dim() == 2 else scale[rows, :, slots])
    return numbers.transpose(1, 2)


def _shown(x: object) -> str:
    return f"{x.dtype} {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else type(x).__name__


def _check_int32(name: str, x: object, form: str, dim: int, batch: int | None = None) -> None:
    if not isinstance(x, Tensor) or x.dtype != torch.int32:
        raise TypeError(f"{name}: got {_shown(x)}, allowed is a torch.int32 tensor")
    if x.dim() != dim or (batch is not None and x.shape[0] != batch):
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}, allowed is {form}" + (f" with batch = {batch}" if batch else "")
        )
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name}: got strides {x.stride()}, allowed are any whose last is 1")


def _check_rows(name: str, used: list[int], n_rows: int) -> None:
    if used and not 0 <= min(used) <= max(used) < n_rows:
        raise ValueError(f"{name}: got rows {min(used)} .. {max(used)}, allowed are 0 .. {n_rows - 1}")
