"""Tensors of masks and biases that have a row for each query of a process, or one row for all queries.

With a single query the two look alike, so that all processes compare what each has.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusedattn.indices import four_dimensional
from fusedattn.options import Options

NAMES = ("mask: boolean(m)", "mask: tree(m)", "mask: block_sparse(blocks)", "bias: tensor", "bias: relative")
NONE, ONE, EACH, EITHER = range(4)  # no tensor; one row; a row for each query; these two are the same here


def tensors_of(options: Options) -> tuple[Tensor | None, ...]:
    """The tensors of these names; rows are their last dimension but one."""
    mask, bias = options.mask, options.bias
    blocks = None if mask.layout is None else mask.layout.blocks
    of_bias = (None, None) if bias is None else (bias.tensor, bias.relative)
    return mask.allowed, mask.tree, blocks, *of_bias


def kinds(options: Options, seqlen: int) -> int:
    """The kinds of all tensors of a process with `seqlen` queries, as one number.

    Raises:
        ValueError: a tensor has another number of rows.
    """
    layout, number = options.mask.layout, 0
    for i, (name, x) in enumerate(zip(NAMES, tensors_of(options), strict=True)):
        n_rows = -(-seqlen // layout.block_q) if layout is not None and x is not None and "blocks" in name else seqlen
        kind = NONE
        if x is not None:
            own = x.shape[-2] if x.dim() > 1 else 1
            if own not in (1, n_rows):
                raise ValueError(
                    f"{name}: got {own} rows, allowed with a context are {n_rows}, those of the queries of this "
                    "process, and 1"
                )
            kind = EACH if own != 1 else (EITHER if n_rows == 1 and x.dim() > 1 else ONE)
        number += kind * 4**i
    return number


def for_each_query(numbers: Sequence[int]) -> tuple[bool, ...]:
    """Which tensors have a row for each query, from :func:`kinds` of every process.

    Raises:
        ValueError: some processes have a row for each query, and others one; the same error on all.
    """
    found = []
    for i, name in enumerate(NAMES):
        of_ranks = {number // 4**i % 4 for number in numbers}
        if {ONE, EACH} <= of_ranks:
            raise ValueError(
                f"{name}: got one row on some ranks and a row for each query on others, allowed is the same on all"
            )
        found.append(ONE not in of_ranks)
    return tuple(found)


def other_sizes(options: Options) -> tuple[tuple[int, ...], ...]:
    """The sizes of these tensors besides their rows."""
    found = (None if x is None else four_dimensional(x).shape for x in tensors_of(options))
    return tuple(() if sizes is None else (*sizes[:2], *sizes[3:]) for sizes in found)
