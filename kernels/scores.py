"""Changes to a score between the product of query and key and the softmax.

    s = scale * q k
    s = softcap * tanh(s / softcap)
    s = function(s, batch, head, query, key)          the user's
    s = s + bias - slope * |distance| + relative[distance]

with ``distance = key - query``, counted so that the last query lies at the last key.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedattn.kernels.accurate_math import quotient
from fusedattn.kernels.masking import numbers_of_pairs
from fusedattn.kernels.pairs import Pairs, pair_pointers, pairs
from fusedattn.kernels.primitives import Strided, widen
from fusedattn.kernels.shard import diagonal_at_end


class ScoreArguments(NamedTuple):
    """The changes to scores; parts that are None do nothing. If MODIFIED is False, scores are not even scaled.

    UNBOUNDED: something is added, or a user's function is applied. A score may then be any finite number, such as the
    lowest one, by which many masks hide keys.

    `slopes_ptr` is float32 ``(sequences, nheads_q)``, with `slopes_stride` 0 if all sequences share them. `relative` is
    ``(sequences, nheads_q, seqlen_q, 2 * reach + 1)``, with strides of 0 where it is broadcast: the column of a pair is
    its distance, at most `reach` either way, plus `reach`. Functions and switches, which are always constants, come
    last: docs/decisions/0007.
    """

    softcap: Any
    slopes_ptr: Any
    slopes_stride: Any
    reach: Any
    function_args: Any
    bias: Pairs | None
    relative: Strided | None
    FUNCTION: Any
    DERIVATIVE: Any
    MODIFIED: Any
    UNBOUNDED: Any


UNMODIFIED = ScoreArguments(
    None, None, None, None, (), None, None, None, None, tl.constexpr(False), tl.constexpr(False)
)


@triton.jit
def tanh(x):
    """tanh to one or two units in the last place, near zero too: x or 1, minus a quotient of at most a third of it."""
    x2 = x * x
    is_small = x2 < 1.0
    small = tl.minimum(x2, 1.0)
    if x.dtype == tl.float64:
        # Lambert's continued fraction; float64 is for checking gradients.
        below = x2 * 0.0 + 25.0
        for i in tl.static_range(11):
            below = (23.0 - 2.0 * i) + small / below
        above = x * small
        below += small
    else:
        # The same fraction down to 7, as one quotient.
        above = x * small * (45045.0 + small * (2772.0 + small * 27.0))
        below = 135135.0 + small * (62370.0 + small * (3150.0 + small * 28.0))
    sign = tl.where(x < 0.0, -1.0, 1.0)
    decay = tl.math.exp2(tl.abs(x) * -2.8853900817779268)  # e^(-2 |x|)
    less = tl.where(is_small, above, sign * (2.0 * decay)) / tl.where(is_small, below, 1.0 + decay)
    return tl.where(is_small, x, sign) - less


@triton.jit
def distance_of(place, block):
    """The distance from each query of a block to each key."""
    return block.keys - block.rows - diagonal_at_end(place)


@triton.jit
def relative_pointers(score, place, block):
    """Pointers to the entries of `relative` for a block."""
    column = tl.minimum(tl.maximum(distance_of(place, block), -score.reach), score.reach) + score.reach
    matrix = score.relative.ptr + tl.cast(place.sequence, tl.int64) * score.relative.stride_b
    matrix += tl.cast(place.head, tl.int64) * score.relative.stride_h
    matrix += tl.cast(block.start_m, tl.int64) * score.relative.stride_s
    return matrix + (block.rows - block.start_m) * score.relative.stride_s + column


@triton.jit
def capped(products, score, scale):
    """(scores, derivative) of products of q and k, scaled and soft-capped: the input of a user's function."""
    scores = products * scale
    derivative = 1.0
    if score.softcap is not None:
        ratio = tanh(quotient(scores, score.softcap))
        scores = score.softcap * ratio
        derivative = 1.0 - ratio * ratio
    return scores, derivative


@triton.jit
def load_addends(score, place, block, readable):
    """(bias, relative): the elements of these tensors for a block, or 0 without the tensor.

    Tensors are read where `readable`, which broadcasts to the block.
    """
    bias = 0.0
    relative = 0.0
    if score.bias is not None:
        bias = tl.load(pair_pointers(score.bias, place, block), mask=readable, other=0.0)
    if score.relative is not None:
        relative = tl.load(relative_pointers(score, place, block), mask=readable, other=0.0)
    return bias, relative


@triton.jit
def modified(scores, addends, score, scale, place, block, readable, ACC: tl.constexpr):
    """(scores, derivative) of a block of products of q and k.

    If nothing is modified the scores stay unscaled. The derivative is with respect to the scaled scores. `addends` come
    from load_addends, by which the forward reads tensors before it multiplies (docs/decisions/0044). If they are None,
    it is called here. Where nothing is `readable` the scores are meaningless.
    """
    derivative = 1.0
    if score.MODIFIED:
        scores, derivative = capped(scores, score, scale)
        if score.FUNCTION is not None:
            sequence, head, query, key = numbers_of_pairs(place, block.rows, block.keys)
            derivative *= tl.cast(score.DERIVATIVE(scores, sequence, head, query, key, score.function_args), ACC)
            changed = score.FUNCTION(scores, sequence, head, query, key, score.function_args)
            scores = tl.cast(changed, ACC)
        if addends is None:
            bias, relative = load_addends(score, place, block, readable)
        else:
            bias, relative = addends
        if score.bias is not None:
            scores += widen(bias, ACC)
        if score.slopes_ptr is not None:
            slope = tl.load(score.slopes_ptr + place.sequence * score.slopes_stride + place.head).to(ACC)
            scores -= slope * tl.abs(distance_of(place, block)).to(ACC)
        if score.relative is not None:
            scores += widen(relative, ACC)
    return scores, derivative


def score_arguments(
    *,
    softcap: float | None,
    function: Any,
    derivative: Any,
    function_args: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None,
    relative: torch.Tensor | None,
    has_sinks: bool,
) -> ScoreArguments:
    """The changes as kernels take them; bias and relative have four dimensions, slopes two. Sinks need scaled scores.

    The last dimension of `relative` is contiguous, and its rows are near enough for int32 offsets inside a tile.
    """
    bounded = function is None and bias is None and slopes is None and relative is None
    if bounded and softcap is None and not has_sinks:
        return UNMODIFIED
    columns = None
    if relative is not None:
        strides = (0 if size == 1 else stride for size, stride in zip(relative.shape, relative.stride(), strict=True))
        columns = Strided(relative, *list(strides)[:3])
    return ScoreArguments(
        softcap=softcap,
        slopes_ptr=None if slopes is None else slopes.contiguous(),
        slopes_stride=None if slopes is None else slopes.shape[1] if slopes.shape[0] > 1 else 0,
        reach=None if relative is None else relative.shape[3] // 2,
        function_args=function_args,
        bias=None if bias is None else pairs(bias),
        relative=columns,
        FUNCTION=function,
        DERIVATIVE=derivative,
        MODIFIED=tl.constexpr(True),
        UNBOUNDED=tl.constexpr(not bounded),
    )
