"""The rounding residual of a 16-bit tensor: the amount that rounding took from each element, as int8.

The forward keeps that of `out`, so that the backward can compute delta from out before rounding (docs/decisions/0005).
"""

import triton
import triton.language as tl

from fusedattn.kernels.primitives import widen


@triton.jit
def _power_below(near, dtype: tl.constexpr):
    """The largest power of two not above each value of a 16-bit `dtype`, given in float32."""
    # Below 2^-14, the least normal number of float16, its neighbours are as far apart as there. Normal numbers of
    # bfloat16 begin at 2^-126, but float32 holds a step of a residual and its inverse only from 2^-112 (decision 0005).
    least: tl.constexpr = 2.0**-14 if dtype == tl.float16 else 2.0**-112
    return tl.maximum((near.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), least)


@triton.jit
def _steps_of(dtype: tl.constexpr):
    """The number of steps of a residual, 127 to the next value of `dtype`, from a power of two to twice that."""
    return 127.0 * 2.0**10 if dtype == tl.float16 else 127.0 * 2.0**7


@triton.jit
def encode_residual(exact, rounded):
    """The distance from `rounded` to the float32 tile `exact`, at most one unit in the last place, as int8."""
    near = widen(rounded, tl.float32)
    # One over a power of two, by its exponent.
    power = _power_below(near, rounded.dtype).to(tl.int32, bitcast=True)
    steps = (exact - near) * ((0x7F000000 - power).to(tl.float32, bitcast=True) * _steps_of(rounded.dtype))
    steps = tl.where(steps == steps, tl.minimum(tl.maximum(steps, -127.0), 127.0), 0.0)
    return tl.floor(steps + 0.5).to(tl.int8)


@triton.jit
def decode_residual(rounded, residual):
    """The inverse of encode_residual: float32, with about 8 more bits than `rounded`."""
    near = widen(rounded, tl.float32)
    return near + residual.to(tl.float32) * (_power_below(near, rounded.dtype) * (1.0 / _steps_of(rounded.dtype)))
