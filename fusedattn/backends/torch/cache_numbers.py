"""The numbers of a cache in float32 or float64, a few tokens at a time in memory that stays in the processor's cache.

The scale of a token is left to the products: there it is one factor for a score or a weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fusedattn.backends.torch.cache_tiles import Sequences
from fusedattn.quantization import FORMATS, dequantised

NUMBERS = 2**18  # in one tile


def numbers_of(
    own: Sequences, x: Tensor, scale: Tensor | None, start: int, stop: int, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """The kept tokens ``start .. stop - 1`` of ``x``, the k or v of a cache, in `dtype`, in order.

    Yields:
        Which of them (from 0), their numbers ``(batch, nheads_kv, n, features)``, and the factors of these,
        ``(batch, nheads_kv, 1, n)``, or None. Features of 4 bits are in the order of :func:`split_pairs`. The next
        tile overwrites this one.
    """
    if scale is not None and scale.dim() == 2:
        scale = scale[..., None, None].expand(*x.shape[:3], 1)
    memory, at = _Memory(dtype, x.device), 0
    for tile, *scales in own.tiles((x,) if scale is None else (x, scale), start, stop):
        n = tile.shape[2]
        size = n if tile.dtype == dtype else max(16, NUMBERS // (tile.shape[0] * tile.shape[1] * tile.shape[3]))
        for first in range(0, n, size):
            codes = tile[:, :, first : first + size]
            keys = slice(at, at + codes.shape[2])
            at = keys.stop
            if not scales:
                yield keys, codes if codes.dtype == dtype else memory.copied(codes), None
                continue
            factors = scales[0][:, :, first : first + size]
            if dtype == torch.float64:  # in which the product of a code and its scale is rounded to float32
                numbers = dequantised(codes, factors).to(dtype)
                yield keys, split_pairs(numbers) if codes.dtype == torch.uint8 else numbers, None
            elif codes.dtype == torch.uint8:
                yield keys, *memory.of_pairs(codes, factors)
            else:
                numbers, factor = memory.of_codes(codes)
                yield keys, numbers, factors.mT * factor


def split_pairs(x: Tensor) -> Tensor:
    """The features 0, 2, 4 ... of ``x``, then 1, 3, 5 ...: the lower bits of all bytes before the higher ones."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)


def joined_pairs(x: Tensor) -> Tensor:
    """The inverse of :func:`split_pairs`."""
    return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)


class _Memory:
    """Memory that one tile after the other uses."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._numbers = torch.empty(0, dtype=dtype, device=device)
        self._integers = torch.empty(0, dtype=torch.int16, device=device)

    def copied(self, x: Tensor) -> Tensor:
        """``x`` in the dtype of this memory."""
        return self._of_shape(x.shape).copy_(x)

    def of_codes(self, codes: Tensor) -> tuple[Tensor, float]:
        """Codes of 8 bits, whose scale is the factor that is also returned."""
        if codes.dtype == torch.int8:
            return self.copied(codes), 1.0
        # Torch converts these formats number by number. As the upper bits of float16, they are those numbers or, with
        # one bit less of the exponent, a 256th of them.
        integers = codes.view(torch.int8)
        shift, factor = (8, 1.0) if codes.dtype == torch.float8_e5m2 else (7, 256.0)
        if factor != 1.0 and (integers & 0x7F).max() == 0x7F:  # a NaN, whose bits differ
            return self.copied(codes), 1.0
        if self._integers.numel() < codes.numel():
            self._integers = self._integers.new_empty(codes.numel())
        bits = self._integers[: codes.numel()].view(codes.shape).copy_(integers).bitwise_left_shift_(shift)
        if shift == 7:
            bits.bitwise_and_(~0x4000)  # a copy of the sign
        return self.copied(bits.view(torch.float16)), factor

    def of_pairs(self, codes: Tensor, factors: Tensor) -> tuple[Tensor, Tensor | None]:
        """Codes of 4 bits; their factors are applied if there is more than one for a token."""
        width, n_groups = codes.shape[3], factors.shape[3]
        numbers = self._of_shape((*codes.shape[:3], 2 * width))
        numbers[..., :width] = codes & 15
        numbers[..., width:] = codes >> 4
        numbers -= FORMATS[codes.dtype].largest + 1.0
        if n_groups == 1:
            return numbers, factors.mT
        numbers.unflatten(3, (2, n_groups, -1)).mul_(factors[..., None, :, None])
        return numbers, None

    def _of_shape(self, shape: tuple[int, ...]) -> Tensor:
        n = torch.Size(shape).numel()
        if self._numbers.numel() < n:
            self._numbers = self._numbers.new_empty(n)
        return self._numbers[:n].view(shape)
