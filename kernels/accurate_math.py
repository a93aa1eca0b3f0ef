"""float32 arithmetic with errors of about half a unit in the last place; a device's own instructions err by several.

``tl.math.exp2`` and ``/`` are ``ex2.approx`` and ``div.full`` on NVIDIA GPUs, which may err by two units. That is
negligible beside the rounding of 16-bit weights, but as much as all other float32 errors together. Every function here
also takes float64, which it computes as usual.
"""

import triton
import triton.language as tl

from fusedattn.kernels.primitives import INTERPRETED

# 1.5 * 2^23: adding it to a number below 2^22 puts the nearest whole number into the last bits.
_WHOLE = tl.constexpr(12582912.0)


@triton.jit
def fma(x, y, z):
    """``x * y + z``, rounded once."""
    if x.dtype != tl.float32:
        return x * y + z
    elif INTERPRETED:
        zero = tl.zeros_like(x)  # added to it, the interpreter's float64 numbers become float32
        return (x.to(tl.float64) * (zero + y).to(tl.float64) + (zero + z).to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(x, y, z)


@triton.jit
def exp2_of_product(x, y):
    """``exp2(x * y)`` for x at most about 0; a result below the normal numbers becomes 0.

    The product is not rounded: at -20, half a unit in its last place would be 7 units of the power.
    """
    if x.dtype != tl.float32:
        return tl.math.exp2(x * y)
    else:
        if INTERPRETED:  # NumPy warns about arithmetic with infinity
            hidden = x == float("-inf")
            x = tl.where(hidden, 0.0, x)
        shifted = fma(x, y, _WHOLE)
        rest = fma(x, y, _WHOLE - shifted)  # from the nearest whole number: -1/2 to 1/2
        # Minimax polynomial for the relative error, which is 2e-9.
        power = fma(rest, 1.5326471e-4, 1.3390807e-3)
        power = fma(rest, power, 9.618506e-3)
        power = fma(rest, power, 5.55036e-2)
        power = fma(rest, power, 2.4022648e-1)
        power = fma(rest, power, 6.931472e-1)
        power = fma(rest, power, 1.0)
        # The whole number becomes the exponent of a power of two.
        scale = ((shifted.to(tl.int32, bitcast=True) + 127) << 23).to(tl.float32, bitcast=True)
        vanishes = shifted < _WHOLE - 126.0
        if INTERPRETED:
            vanishes |= hidden
        return tl.where(vanishes, 0.0, power * scale)


@triton.jit
def divide(x, y):
    """``x / y``, rounded once: for one number per row."""
    if y.dtype == tl.float32:
        return tl.math.div_rn(x, y)
    else:
        return x / y


@triton.jit
def quotient(x, y):
    """``x / y`` for each element of a tile: x times the reciprocal of y, then corrected by the remainder."""
    if x.dtype == tl.float32:
        reciprocal = 1.0 / y
        near = x * reciprocal
        better = fma(fma(-near, y, x), reciprocal, near)
        return tl.where(better == better, better, near)  # the correction of an infinite quotient is NaN
    else:
        return x / y
