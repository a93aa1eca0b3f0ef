"""Which calls the kernels for Hopper take.

They are written in Gluon, which states what Triton leaves to its compiler: one warp requests tiles, two groups of four
warps multiply. Everything that they do not take goes to the general kernels.
"""

import os

import torch
import triton

from fusedattn.kernels.cached import NO_CACHE
from fusedattn.kernels.descriptors import ALIGNMENT, strides_of
from fusedattn.kernels.epilogue import Results
from fusedattn.kernels.problem import Problem
from fusedattn.kernels.scores import UNMODIFIED
from fusedattn.kernels.versions import TRITON_VERSION

HEAD_DIM = 128  # at 64 the general kernels are faster
FEWEST_QUERIES = 1024  # with fewer, a program has too little work to hide its beginning and its end

chosen = os.environ.get("FUSEDATTN_HOPPER") == "1"  # asked where kernels are launched


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
        "head_dim": q.shape[3] != HEAD_DIM or v.shape[3] != HEAD_DIM,
        "score": call.score is not UNMODIFIED or problem.sinks is not None,
        "dropout": call.dropout.seed_ptr is not None,
        "cache": call.cache is not NO_CACHE,
        "codes": problem.codes is not None,
        "shard": call.sequences.shard_ptr is not None,
        "mask by pair": bool(mask.BY_PAIR.value) or mask.documents is not None,
        "layout": mask.layout is not None,
        "padding": mask.valid_ptr is not None and TRITON_VERSION < (3, 7),  # its compiler fails
        "few queries": problem.rotates_in_place or problem.shape.max_seqlen_q < FEWEST_QUERIES,
        "return_max": results is not None and results.largest is not None,
        "strides": any(x.data_ptr() % ALIGNMENT or strides_of(x) is None for x in (q, k, v)),
    }
    return [name for name, is_so in found.items() if is_so]


def hides_values(problem: Problem) -> bool:
    """Whether a tile may have values that one of its queries does not see; rows that do not exist arrive as 0."""
    band, mask, sequences = problem.band, problem.call.mask, problem.call.sequences
    in_band = band.has_upper or band.has_lower or mask.prefix_ptr is not None
    return in_band or mask.key_range_ptr is not None or sequences.cu_k_ptr is not None


def _is_hopper() -> bool:
    if triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch == 90)


def takes_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, problem: Problem, *, of_keys: bool
) -> bool:
    """Whether a kernel for Hopper, if `chosen`, computes the gradients of keys and values, or those of queries."""
    if not _is_hopper():
        return False
    against = reasons_against(q, k, v, None, problem)
    rotates = problem.prologue_q.rotation is not None or problem.prologue_k.rotation is not None
    odd = dout.data_ptr() % ALIGNMENT or strides_of(dout) is None or problem.call.sequences.cu_q_ptr is not None
    if of_keys:
        # Rows of dout that see nothing must be 0, and those of other sequences.
        band, mask, shape = problem.band, problem.call.mask, problem.shape
        odd = odd or band.has_lower or mask.key_range_ptr is not None or mask.prefix_ptr is not None
        upper = min(band.sizes["upper_start"], band.sizes["upper_end"] + shape.seqlen_k - shape.seqlen_q)
        odd = odd or upper < 0
        # The accelerator reads a line of statistics from a multiple of 16 bytes on.
        odd = odd or shape.seqlen_q % 4 != 0
        odd = odd or shape.n_sequences * shape.nheads_q * shape.seqlen_q >= 2**31 - 2**10
    return not (against or rotates or odd)
