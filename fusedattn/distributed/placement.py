"""Where the tokens of a sequence are: split among the processes of one group, each share among those of another."""

from __future__ import annotations

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
        shapes = [torch.Size((*x.shape[:-2], -(-n // size), x.shape[-1])) for n in self.inner.lengths]
        return torch.cat(gather(x, [(shape, x.dtype) for shape in shapes], self.inner_group), dim=-2)

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
    shape = list(x.shape)
    shape[dim] = length
    return x.new_empty(()).expand(shape)


def _joined(x: Tensor, split: Split, group: Group, dim: int) -> Tensor:
    if group is None:
        return x
    shapes = []
    for length in split.lengths:
        shape = list(x.shape)
        shape[dim] = length
        shapes.append(torch.Size(shape))
    return split.joined(gather(x, [(shape, x.dtype) for shape in shapes], group), dim)
