"""Where the tokens of a sequence are: split among the processes of one group, each share among those of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fusedattn.distributed.collectives import gather
from fusedattn.distributed.split import Split

Group = dist.ProcessGroup | None  # None: this process alone


def size_of(group: Group) -> int:
    """The number of processes."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: Group) -> int:
    """The rank of this process."""
    return 0 if group is None else dist.get_rank(group)


def order_of(ranks: Tensor) -> Tensor:
    """The places of processes in the order of ranks, by their ranks in the two groups of a mesh, int64 ``(n,)``.

    Args:
        ranks: of the mesh, ``(n_first, n_second)``. Wherever they stand, a group counts them in increasing order.

    Raises:
        ValueError: two processes have the same rank in both of their groups.
    """
    first, second = (ranks.argsort(dim).argsort(dim) for dim in (0, 1))
    in_groups = (first * ranks.shape[1] + second).flatten()
    if len(in_groups.unique()) < len(in_groups):
        raise ValueError(
            f"group: got a mesh of ranks {ranks.tolist()}, allowed are ranks that increase along every row and column"
        )
    return ranks.flatten().argsort().argsort()[in_groups.argsort()]


@dataclass(frozen=True)
class Placement:
    """The tokens of a sequence.

    Attributes:
        outer, inner: the split of all tokens, and of the share of this process in the outer split.
        outer_group, inner_group: the processes among which they are split.
    """

    outer: Split
    inner: Split
    outer_group: Group
    inner_group: Group

    def share(self, x: Tensor, dim: int) -> Tensor:
        """The tokens of the share, from those of this process; differentiable."""
        return _joined(x, self.inner, self.inner_group, dim)

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """All tokens, from those of this process; differentiable."""
        return _joined(self.share(x, dim), self.outer, self.outer_group, dim)

    def blocks_of_share(self, x: Tensor, size: int) -> Tensor:
        """The blocks of `size` tokens of the share, ``(..., blocks, n)``, from those of this process."""
        if self.inner_group is None:
            return x
        return torch.cat(_gathered(x, [-(-n // size) for n in self.inner.lengths], self.inner_group, -2), dim=-2)

    def planned(self) -> Placement:
        """The same for shapes alone: nothing is sent, and results have no numbers."""
        return _Planned(self.outer, self.inner, self.outer_group, self.inner_group)


class _Planned(Placement):
    def share(self, x: Tensor, dim: int) -> Tensor:
        return x if self.inner_group is None else _of_length(x, self.inner.seqlen, dim)

    def whole(self, x: Tensor, dim: int) -> Tensor:
        share = self.share(x, dim)
        return share if self.outer_group is None else _of_length(share, self.outer.seqlen, dim)

    def blocks_of_share(self, x: Tensor, size: int) -> Tensor:
        if self.inner_group is None:
            return x
        return _of_length(x, sum(-(-n // size) for n in self.inner.lengths), -2)


def _of_length(x: Tensor, length: int, dim: int) -> Tensor:
    return x.new_empty(()).expand(_shape(x, length, dim))


def _joined(x: Tensor, split: Split, group: Group, dim: int) -> Tensor:
    return x if group is None else split.joined(_gathered(x, split.lengths, group, dim), dim)


def _gathered(x: Tensor, lengths: Sequence[int], group: dist.ProcessGroup, dim: int) -> list[Tensor]:
    """The tensor of each process, which has its own length in one dimension."""
    return gather(x, [(_shape(x, length, dim), x.dtype) for length in lengths], group)


def _shape(x: Tensor, length: int, dim: int) -> torch.Size:
    """The shape of `x` with another length in one dimension."""
    sizes = list(x.shape)
    sizes[dim] = length
    return torch.Size(sizes)
