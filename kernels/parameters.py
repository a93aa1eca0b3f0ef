"""The parameters of kernels that walk over blocks of keys or of queries.

Tensors come first, alone or in tuples (docs/decisions/0007). Then come numbers, each a parameter of its own, for which
Triton recompiles nothing; a kernel collects them in :class:`Numbers`. The :class:`Tile`, all constants, is last.
"""

from typing import Any, NamedTuple

import triton.language as tl

from fusedattn.kernels.cached import NO_CACHE, CacheArguments
from fusedattn.kernels.dropout import NO_DROPOUT, DropoutArguments
from fusedattn.kernels.masking import MaskArguments
from fusedattn.kernels.scores import UNMODIFIED, ScoreArguments
from fusedattn.kernels.sequences import NOT_PACKED, Sequences


class Call(NamedTuple):
    """The arguments that every kernel of a call of ``attention()`` reads besides q, k and v."""

    mask: MaskArguments
    score: ScoreArguments = UNMODIFIED
    dropout: DropoutArguments = NO_DROPOUT
    sequences: Sequences = NOT_PACKED
    cache: CacheArguments = NO_CACHE


class QKV(NamedTuple):
    """q, k and v, each a :class:`~fusedattn.kernels.primitives.Strided`, descriptors of k and v, or None, and scales.

    If `scales`, :class:`~fusedattn.kernels.fp8.CodeScales`, are not None, q, k and v are codes.
    """

    q: Any
    k: Any
    v: Any
    k_tiles: Any
    v_tiles: Any
    scales: Any


# Numbers that depend on the heads, the lengths, the bounds of a mask, or the tables of a rotation.
NOT_SPECIALIZED = (
    "nheads_q",
    "nheads_kv",
    "seqlen_q",
    "seqlen_k",
    "n_tiles",
    "heads_in_l2",
    "lower_start",
    "upper_start",
    "lower_end",
    "upper_end",
    "n_positions",
)


class Numbers(NamedTuple):
    """Numbers of a call that its helpers read.

    The bounds are those of :class:`~fusedattn.kernels.mask_arguments.BandBounds`. `scale` multiplies the products of q
    and k if scores are modified; `qk_scale` is the scale that the softmax applies, in base 2.
    """

    lower_start: Any
    upper_start: Any
    lower_end: Any
    upper_end: Any
    n_positions: Any
    scale: Any
    qk_scale: Any


class Tile(NamedTuple):
    """Constants of a kernel, each a ``tl.constexpr``.

    BLOCK_M queries and BLOCK_N keys; BLOCK_D and BLOCK_DV are head_dim and head_dim_v rounded up for tl.dot. ACC names
    the dtype of sums, which `dtype_of` gives; PRECISION is that of float32 products, EXACT as in kernels/softmax.py.
    TAIL features, beyond the HEAD_DIM, are multiplied apart. SHARES_V: values are the first features of the keys.
    Boundary blocks have BOUNDARY keys (or queries) and BOUNDARY_STAGES pipeline stages. HEADS heads share a tile
    (kernels/grouped_heads.py).
    """

    HEAD_DIM: Any
    HEAD_DIM_V: Any
    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    ACC: Any
    PRECISION: Any
    EXACT: Any
    BOUNDARY: Any = tl.constexpr(0)
    BOUNDARY_STAGES: Any = tl.constexpr(1)
    HEADS: Any = tl.constexpr(1)
    TAIL: Any = tl.constexpr(0)
    SHARES_V: Any = tl.constexpr(False)
