"""Which calls the kernels for Hopper take.

They are written in Gluon, which states what Triton leaves to its compiler: one warp requests tiles, two groups of four
warps multiply. Everything that they do not take goes to the general kernels. They run only if chosen: with
``FUSEDATTN_HOPPER=1`` where they were faster on a GPU, with ``FUSEDATTN_HOPPER=all`` wherever they can.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Literal

import torch
import triton

from fusedattn.kernels.cached import NO_CACHE
from fusedattn.kernels.descriptors import is_addressable
from fusedattn.kernels.epilogue import Results
from fusedattn.kernels.hopper_configs import DKDV, FEWEST_QUERIES, FORWARD, ROWS
from fusedattn.kernels.problem import Problem
from fusedattn.kernels.scores import UNMODIFIED
from fusedattn.kernels.versions import TRITON_VERSION

Choice = Literal["faster", "all"]
_CHOICES: dict[str, Choice] = {"1": "faster", "all": "all"}

chosen = _CHOICES.get(os.environ.get("FUSEDATTN_HOPPER", ""))  # asked where kernels are launched


@contextlib.contextmanager
def choosing(choice: Choice | None) -> Iterator[None]:
    """Inside, `choice` is what is chosen, in all threads."""
    global chosen
    before, chosen = chosen, choice
    try:
        yield
    finally:
        chosen = before


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, results: Results, problem: Problem) -> bool:
    """Whether the kernel for Hopper, if `chosen`, runs the forward of a call."""
    return _is_hopper() and not reasons_against(q, k, v, results, problem)


def reasons_against(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, results: Results | None, problem: Problem
) -> list[str]:
    """What the kernel for Hopper does not take of a call; empty if it takes the call."""
    call, mask = problem.call, problem.call.mask
    found = {
        "dtype": q.itemsize != 2 or k.dtype != q.dtype or v.dtype != q.dtype,
        "head_dim": q.shape[3] not in FORWARD or v.shape[3] != q.shape[3],
        "codes": problem.codes is not None,
        "score": call.score is not UNMODIFIED or problem.sinks is not None,
        "dropout": call.dropout.seed_ptr is not None,
        "cache": call.cache is not NO_CACHE,
        "shard": call.sequences.shard_ptr is not None,
        "mask by pair": bool(mask.BY_PAIR.value) or mask.documents is not None,
        "layout": mask.layout is not None,
        "padding": mask.valid_ptr is not None and TRITON_VERSION < (3, 7),  # its compiler fails
        "few queries": problem.rotates_in_place or problem.shape.max_seqlen_q <= ROWS,
        "slower": chosen != "all" and not _is_faster(q.shape[3], problem),
        "return_max": results is not None and results.largest is not None,
        "strides": not all(map(is_addressable, (q, k, v))),
    }
    return [name for name, is_so in found.items() if is_so]


def _is_faster(head_dim: int, problem: Problem) -> bool:
    """Whether the general kernels were slower on an H200: docs/decisions/0036. 256 features were not measured."""
    is_long = problem.shape.max_seqlen_q >= FEWEST_QUERIES
    return head_dim == 128 and is_long and problem.call.mask.valid_ptr is None


def hides_values(problem: Problem) -> bool:
    """Whether a tile may have values that one of its queries does not see; rows that do not exist arrive as 0."""
    band = problem.band
    return band.has_upper or band.has_lower or hides_rows(problem)


def hides_rows(problem: Problem) -> bool:
    """Whether a tile may have queries that see nothing, keys that nobody sees, or rows of another sequence."""
    band, mask, shape = problem.band, problem.call.mask, problem.shape
    _, upper = band.at(shape)
    return (
        band.has_lower
        or upper < max(0, shape.seqlen_k - shape.seqlen_q)
        or mask.prefix_ptr is not None
        or mask.key_range_ptr is not None
        or problem.call.sequences.cu_k_ptr is not None
    )


def _is_hopper() -> bool:
    if triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch == 90)


def takes_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, problem: Problem) -> bool:
    """Whether kernels for Hopper, if `chosen`, compute the gradients of queries, keys and values."""
    return _is_hopper() and q.shape[3] in DKDV and is_addressable(dout) and not reasons_against(q, k, v, None, problem)
