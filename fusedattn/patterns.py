"""Sparse patterns of attention: exact rules of which pairs are visible, and the blocks that contain such a pair.

A pattern depends on the lengths of a call, so it becomes a list of blocks only there
(:mod:`fusedattn.pattern_blocks`). It knows the *position* of a query, the number of the key at which it stands, and
counts all batches, heads and tokens of the whole attention, of which a call may compute a shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn.mask_parts import CausalAlign, check_align, check_bool
from fusedattn.shard import WHOLE, Shard, numbers_on


class Whole(NamedTuple):
    """The attention that a pattern applies to: its lengths, its query heads if known, and its device."""

    seqlen_q: int
    seqlen_k: int
    nheads: int | None
    device: torch.device | str | None


def whole_of(
    nheads: int | None, seqlen_q: int, seqlen_k: int, shard: Shard = WHOLE, device: torch.device | str | None = None
) -> Whole:
    """The whole attention of which a shard has these sizes."""
    return Whole(*shard.lengths(seqlen_q, seqlen_k), None if nheads is None else shard.heads(nheads), device)


class Span(NamedTuple):
    """The first and the last token of each block, int64; of queries ``(n_q, 1)``, of keys ``(n_k,)``."""

    first: Tensor
    last: Tensor


@dataclass(frozen=True, eq=False)
class Pattern(ABC):
    """One rule of visible pairs.

    Attributes:
        align: the position of query ``i`` is ``i + seqlen_k - seqlen_q`` for ``"bottom_right"`` and ``i`` for
            ``"top_left"``.
    """

    align: CausalAlign

    def __post_init__(self) -> None:
        check_align(self.align)

    @property
    @abstractmethod
    def rule(self) -> str:
        """The name of the same rule in :mod:`fusedattn.kernels.sparse_rules`."""

    @abstractmethod
    def pairs(self, q: Tensor, k: Tensor, whole: Whole) -> Tensor:
        """Which pairs of the positions q, ``(n_q, 1)``, and the keys k, ``(n_k,)``, are visible.

        Returns:
            bool, ``(n_q, n_k)`` or ``(batch or 1, nheads_q or 1, n_q, n_k)``.
        """

    @abstractmethod
    def blocks(self, q: Span, k: Span, whole: Whole) -> Tensor:
        """The blocks that may have a visible pair, in the shapes of :meth:`pairs`; a few others may be True too."""

    @abstractmethod
    def kernel_args(self, whole: Whole) -> tuple[Any, ...]:
        """The tensors and numbers that the rule takes in the kernels; numbers that depend on sizes are in tensors."""

    def shift(self, whole: Whole) -> int:
        """The position of query 0."""
        return whole.seqlen_k - whole.seqlen_q if self.align == "bottom_right" else 0

    def check(self, batch: int, whole: Whole) -> None:
        """Raise ValueError if the pattern does not fit these sizes."""
        return None

    def written_out(self, whole: Whole) -> Pattern:
        """The same pattern for these sizes, without work that all calls of :meth:`pairs` would repeat."""
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors, under the names of the arguments that they were passed as."""
        return {}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Pattern:
        """The same pattern with ``change(x)`` in place of each tensor."""
        return self


@dataclass(frozen=True, eq=False)
class Strided(Pattern):
    """Keys less than `stride` away, and those a multiple of it away."""

    stride: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("stride", self.stride)

    @property
    def rule(self) -> str:
        return "strided"

    def pairs(self, q: Tensor, k: Tensor, whole: Whole) -> Tensor:
        distance = q - k
        return (distance.abs() < self.stride) | (distance % self.stride == 0)

    def blocks(self, q: Span, k: Span, whole: Whole) -> Tensor:
        nearest, furthest = q.first - k.last, q.last - k.first
        near = (nearest < self.stride) & (furthest > -self.stride)
        return near | _has_multiple(nearest, furthest, self.stride)

    def kernel_args(self, whole: Whole) -> tuple[Any, ...]:
        return of_sizes(whole, self.shift(whole)), self.stride


@dataclass(frozen=True, eq=False)
class Fixed(Pattern):
    """Keys of the same block of `stride` tokens, and the last `expressivity` keys of every block."""

    stride: int
    expressivity: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("stride", self.stride)
        check_count("expressivity", self.expressivity, most=self.stride)

    @property
    def rule(self) -> str:
        return "fixed"

    def pairs(self, q: Tensor, k: Tensor, whole: Whole) -> Tensor:
        return (q // self.stride == k // self.stride) | (k % self.stride >= self.stride - self.expressivity)

    def blocks(self, q: Span, k: Span, whole: Whole) -> Tensor:
        own = (q.first // self.stride <= k.last // self.stride) & (k.first // self.stride <= q.last // self.stride)
        return own | (self._summaries(k.last + 1) > self._summaries(k.first))

    def _summaries(self, stop: Tensor) -> Tensor:
        """How many keys before `stop` every query sees."""
        of_last = (stop % self.stride - (self.stride - self.expressivity)).clamp(min=0)
        return stop // self.stride * self.expressivity + of_last

    def kernel_args(self, whole: Whole) -> tuple[Any, ...]:
        return of_sizes(whole, self.shift(whole)), self.stride, self.stride - self.expressivity


@dataclass(frozen=True, eq=False)
class Dilated(Pattern):
    """Every `dilation`-th key, `left` of them before the query and `right` behind it; and pairs with a global token.

    Attributes:
        global_tokens: bool ``(batch or 1, seqlen_k)``; they see all keys, and all queries see them. An int stands for
            the first so many tokens.
    """

    left: int
    right: int
    dilation: int
    global_tokens: Tensor | int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("left", self.left, least=0)
        check_count("right", self.right, least=0)
        check_count("dilation", self.dilation)
        if not isinstance(self.global_tokens, Tensor):
            check_count("global_tokens", self.global_tokens, least=0)
            return
        check_bool(self.global_tokens, "global_tokens")
        if self.global_tokens.dim() not in (1, 2):
            raise ValueError(
                f"global_tokens: got shape {tuple(self.global_tokens.shape)}, allowed are (seqlen_k,), "
                "(batch, seqlen_k), and an int"
            )

    @property
    def has_global_tokens(self) -> bool:
        return isinstance(self.global_tokens, Tensor) or self.global_tokens > 0

    @property
    def rule(self) -> str:
        return "dilated_with_global_tokens" if self.has_global_tokens else "dilated"

    def check(self, batch: int, whole: Whole) -> None:
        if isinstance(self.global_tokens, Tensor):
            got, allowed = tuple(self.global_tokens.shape), (batch, whole.seqlen_k)
            if got not in (allowed, allowed[1:], (1, whole.seqlen_k)):
                raise ValueError(
                    f"mask: dilated(global_tokens): got shape {got}, allowed are (seqlen_k,) = {allowed[1:]} and "
                    f"(batch, seqlen_k) = {allowed}"
                )

    def _tokens(self, whole: Whole) -> Tensor:
        """Which tokens are global, bool ``(batch or 1, seqlen_k)``."""
        if isinstance(self.global_tokens, Tensor):
            return torch.atleast_2d(self.global_tokens)
        return (torch.arange(whole.seqlen_k, device=whole.device) < self.global_tokens)[None]

    def pairs(self, q: Tensor, k: Tensor, whole: Whole) -> Tensor:
        ahead = k - q
        near = (ahead >= -self.left * self.dilation) & (ahead <= self.right * self.dilation)
        near = near & (ahead % self.dilation == 0)
        if not self.has_global_tokens:
            return near
        tokens = self._tokens(whole)
        of_queries = _entries(tokens, q[:, 0])[:, None, :, None]
        return near | of_queries | tokens[:, None, None, k]

    def blocks(self, q: Span, k: Span, whole: Whole) -> Tensor:
        first = (k.first - q.last).clamp(min=-self.left * self.dilation)
        last = (k.last - q.first).clamp(max=self.right * self.dilation)
        near = _has_multiple(first, last, self.dilation)
        if not self.has_global_tokens:
            return near
        counts = F.pad(self._tokens(whole).cumsum(-1), (1, 0))
        of_queries, of_keys = (_counted(counts, span) for span in (Span(q.first[:, 0], q.last[:, 0]), k))
        return near | of_queries[:, None, :, None] | of_keys[:, None, None, :]

    def kernel_args(self, whole: Whole) -> tuple[Any, ...]:
        near = -self.left * self.dilation, self.right * self.dilation, self.dilation
        if not self.has_global_tokens:
            return of_sizes(whole, self.shift(whole)), *near
        tokens = self._tokens(whole)
        stride = tokens.shape[1] if tokens.shape[0] > 1 else 0
        numbers = of_sizes(whole, self.shift(whole), stride, tokens.shape[1])
        return numbers, *near, tokens.contiguous().view(torch.uint8)

    def tensors(self) -> dict[str, Tensor]:
        return {"dilated(global_tokens)": self.global_tokens} if isinstance(self.global_tokens, Tensor) else {}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Pattern:
        is_number = not isinstance(self.global_tokens, Tensor)
        return self if is_number else replace(self, global_tokens=change(self.global_tokens))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Neighborhood(Pattern):
    """Tokens of a grid see the `window` around them, which moves inwards at the edges.

    Attributes:
        shape, window: of up to three dimensions, the last of which runs fastest; filled up with ones to three.
    """

    shape: tuple[int, int, int]
    window: tuple[int, int, int]

    @property
    def rule(self) -> str:
        return "neighborhood"

    def check(self, batch: int, whole: Whole) -> None:
        _check_length("neighborhood(shape)", whole, self.shape[0] * self.shape[1] * self.shape[2])

    def _places(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, height, width = self.shape
        return tokens // (height * width), tokens // width % height, tokens % width

    def _starts(self, places: tuple[Tensor, ...]) -> list[Tensor]:
        """The first place, in each dimension, that a query at these places sees."""
        sizes = zip(places, self.shape, self.window, strict=True)
        return [(place - window // 2).clamp(0, size - window) for place, size, window in sizes]

    def pairs(self, q: Tensor, k: Tensor, whole: Whole) -> Tensor:
        found = [
            (key >= start) & (key < start + window)
            for start, key, window in zip(self._starts(self._places(q)), self._places(k), self.window, strict=True)
        ]
        return found[0] & found[1] & found[2]

    def blocks(self, q: Span, k: Span, whole: Whole) -> Tensor:
        of_queries, of_keys = self._box(q), self._box(k)
        starts = self._starts(tuple(first for first, _ in of_queries))
        ends = self._starts(tuple(last for _, last in of_queries))
        found = [
            (last >= start) & (first < end + window)
            for start, end, (first, last), window in zip(starts, ends, of_keys, self.window, strict=True)
        ]
        return found[0] & found[1] & found[2]

    def _box(self, span: Span) -> list[tuple[Tensor, Tensor]]:
        """The range of each dimension that the tokens of a span lie in: the whole one inside of a line that breaks."""
        firsts, lasts = self._places(span.first), self._places(span.last)
        found, breaks = [], torch.zeros_like(span.first, dtype=torch.bool)
        for first, last, size in zip(firsts, lasts, self.shape, strict=True):
            found.append((first.masked_fill(breaks, 0), last.masked_fill(breaks, size - 1)))
            breaks = breaks | (first != last)
        return found

    def kernel_args(self, whole: Whole) -> tuple[Any, ...]:
        return *self.shape, *self.window


@dataclass(frozen=True, eq=False)
class BlockDiffusion(Pattern):
    """A noisy copy of `seqlen` tokens and the clean one, in blocks of `block_size` that are denoised one by one."""

    seqlen: int
    block_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("seqlen", self.seqlen, least=0)
        check_count("block_size", self.block_size)

    @property
    def rule(self) -> str:
        return "block_diffusion"

    def check(self, batch: int, whole: Whole) -> None:
        _check_length("block_diffusion(seqlen)", whole, 2 * self.seqlen)

    def pairs(self, q: Tensor, k: Tensor, whole: Whole) -> Tensor:
        clean_q, clean_k = q >= self.seqlen, k >= self.seqlen
        block_q, block_k = ((x - is_clean * self.seqlen) // self.block_size for x, is_clean in
                            ((q, clean_q), (k, clean_k)))  # fmt: skip
        own = ~clean_q & ~clean_k & (block_q == block_k)
        return own | (clean_k & (block_k < block_q + clean_q.long()))

    def blocks(self, q: Span, k: Span, whole: Whole) -> Tensor:
        noisy_q, clean_q = self._ranges(q)
        noisy_k, clean_k = self._ranges(k)
        own = _is_some(noisy_q) & _is_some(noisy_k) & (noisy_q.first <= noisy_k.last) & (noisy_k.first <= noisy_q.last)
        earlier = _is_some(noisy_q) & _is_some(clean_k) & (clean_k.first < noisy_q.last)
        return own | earlier | (_is_some(clean_q) & _is_some(clean_k) & (clean_k.first <= clean_q.last))

    def _ranges(self, span: Span) -> tuple[Span, Span]:
        """The numbers of the noisy blocks and of the clean ones; the last is less than the first if there is none."""
        n, size = self.seqlen, self.block_size
        last_noisy = torch.where(span.first < n, span.last.clamp(max=n - 1) // size, -1)
        last_clean = torch.where(span.last >= n, (span.last - n) // size, -1)
        return Span(span.first // size, last_noisy), Span((span.first - n).clamp(min=0) // size, last_clean)

    def kernel_args(self, whole: Whole) -> tuple[Any, ...]:
        return self.seqlen, self.block_size


def of_sizes(whole: Whole, *numbers: int) -> Tensor:
    """Numbers that depend on sizes, which may be symbols, as the rules of kernels read them: int32 ``(n,)``."""
    return numbers_on(torch.device(whole.device or "cpu"), numbers)


def _is_some(span: Span) -> Tensor:
    return span.last >= 0


def _has_multiple(first: Tensor, last: Tensor, step: int) -> Tensor:
    """Whether a multiple of `step` lies in ``first .. last``."""
    return last.div(step, rounding_mode="floor") * step >= first


def _entries(x: Tensor, index: Tensor) -> Tensor:
    """``x[:, index]``, and False where there is no such entry."""
    n = x.shape[1]
    if n == 0:
        return x.new_zeros(x.shape[0], index.shape[0])
    return x[:, index.clamp(0, n - 1)] & (index >= 0) & (index < n)


def _counted(counts: Tensor, span: Span) -> Tensor:
    """Whether a span has an entry that `counts`, the number of those before each place, has counted."""
    n = counts.shape[1] - 1
    return counts[:, (span.last + 1).clamp(0, n)] > counts[:, span.first.clamp(0, n)]


def check_count(name: str, x: object, *, least: int = 1, most: int | None = None) -> None:
    """Raise TypeError or ValueError unless ``x`` is an int of ``least .. most``."""
    if isinstance(x, bool) or not isinstance(x, int):
        raise TypeError(f"{name}: got {type(x).__name__}, allowed is an int")
    if x < least or (most is not None and x > most):
        raise ValueError(f"{name}: got {x}, allowed are {least} {'and more' if most is None else f'.. {most}'}")


def _check_length(name: str, whole: Whole, n: int) -> None:
    if (whole.seqlen_q, whole.seqlen_k) != (n, n):
        raise ValueError(
            f"mask: {name}: got seqlen_q = {whole.seqlen_q} and seqlen_k = {whole.seqlen_k}, allowed are {n} for both"
        )
