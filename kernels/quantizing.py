"""From numbers to the codes of a quantised cache: nearest, ties to even, at most the largest code.

Integer arithmetic on the bits of float32 does it, so that every GPU, and the interpreter, gives the same codes.
"""

import triton
import triton.language as tl

from fusedattn.kernels.accurate_math import divide

# The smallest normal number: a smaller scale counts as 0, because it may have no finite reciprocal.
SMALLEST_SCALE = tl.constexpr(1.1754943508222875e-38)


@triton.constexpr_function
def largest_code(FORMAT):
    """The largest code of a format."""
    return {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0, "int4": 7.0}[FORMAT]


@triton.jit
def _float_codes(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Codes of 8 bits, MANTISSA of them, of float32 numbers none of which is beyond the largest code."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    DROPPED: tl.constexpr = 23 - MANTISSA
    rounded = magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)
    LEAST: tl.constexpr = (127 - BIAS) << MANTISSA
    normal = tl.maximum(rounded >> DROPPED, LEAST) - LEAST
    # Below the smallest normal number codes are multiples of one unit: those of a float32 whose last bit is that unit.
    MAGIC: tl.constexpr = (127 + 1 - BIAS + DROPPED) << 23
    shifted = magnitude.to(tl.float32, bitcast=True) + tl.full(x.shape, MAGIC, tl.uint32).to(tl.float32, bitcast=True)
    small = shifted.to(tl.uint32, bitcast=True) - MAGIC
    code = tl.where(magnitude < ((128 - BIAS) << 23), small, normal)
    return sign | tl.where(magnitude > 0x7F800000, 0x7F, code)


@triton.jit
def scales_of(x, FORMAT: tl.constexpr):
    """The scale of each last dimension of ``x``, float32: 0 if it is no normal number, NaN unless ``x`` is finite."""
    last: tl.constexpr = len(x.shape) - 1
    finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), last) != 0
    largest = tl.max(tl.abs(x), last)
    scale = divide(largest, tl.full(largest.shape, largest_code(FORMAT), tl.float32))
    return tl.where(finite, tl.where(scale < SMALLEST_SCALE, 0.0, scale), float("nan"))


@triton.jit
def encoded(x, scale, FORMAT: tl.constexpr):
    """The codes of ``x``, float32, for scales that broadcast to it: uint32, or int32 for int8.

    Codes of a scale that is NaN, or below the smallest normal number, are 0. A NaN stays one in the formats that have
    it, and is 0 in the others.
    """
    is_scale = scale >= SMALLEST_SCALE
    factor = divide(tl.full(scale.shape, 1.0, tl.float32), tl.where(is_scale, scale, 1.0))
    return codes_of(tl.where(is_scale, x * factor, 0.0), FORMAT)


@triton.jit
def codes_of(x, FORMAT: tl.constexpr):
    """The codes of ``x``, float32, whose scale is 1; results as those of encoded."""
    LARGEST: tl.constexpr = largest_code(FORMAT)
    # A comparison keeps NaN.
    x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
    if FORMAT == "e4m3":
        return _float_codes(x, 3, 7)
    elif FORMAT == "e5m2":
        return _float_codes(x, 2, 15)
    else:
        # The last bit of this number is 1, so the sum is rounded to a whole number.
        x = tl.where(x == x, x, 0.0)
        whole = ((x + 12582912.0) - 12582912.0).to(tl.int32)
        if FORMAT == "int8":
            return whole
        else:
            return (whole + 8).to(tl.uint32)
