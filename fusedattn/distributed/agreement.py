"""All processes of a group take the same path: before they send tensors, they compare what each was asked to do.

The messages are a few numbers between CPUs; nothing waits for a GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist

from fusedattn.distributed.collectives import gather_equal

N_NUMBERS = 5  # that processes tell each other
LONGEST = 2000  # characters of an error that other processes report


def agree(numbers: Sequence[int], call: Hashable, error: Exception | None, group: dist.ProcessGroup) -> torch.Tensor:
    """The numbers of every process, int64 ``(processes, N_NUMBERS)``.

    Args:
        numbers: of this process, such as its queries and keys, at most N_NUMBERS; 0 for the others.
        call: what must be the same for all processes; its ``repr`` is compared.
        error: why this process cannot take part, or None.
        group: of CPU tensors.

    Raises:
        Exception: `error`, after all others know.
        RuntimeError: another process has an error.
        ValueError: the processes were asked for different calls.
    """
    digest = int.from_bytes(hashlib.sha256(repr(call).encode()).digest()[:7], "big")
    own = torch.zeros(N_NUMBERS + 2, dtype=torch.int64, device="cpu")
    own[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    own[N_NUMBERS:] = torch.tensor([digest, error is not None], device="cpu")
    found = own.new_empty(dist.get_world_size(group), len(own))
    gather_equal(found, own[None], group)
    ranks = dist.get_process_group_ranks(group)
    failed = found[:, N_NUMBERS + 1].nonzero()[:, 0].tolist()
    if failed:
        texts: list[str] = [""] * len(ranks)
        dist.all_gather_object(
            texts, "" if error is None else f"{type(error).__name__}: {error}"[:LONGEST], group=group
        )
        if error is not None:
            raise error
        raise RuntimeError("; ".join(f"rank {ranks[i]}: {texts[i]}" for i in failed))
    if not (found[:, N_NUMBERS] == digest).all():
        calls: list[str] = [""] * len(ranks)
        dist.all_gather_object(calls, repr(call)[:LONGEST], group=group)
        raise ValueError(
            "context: got different calls on different ranks, allowed are equal shapes (but for the sequence), dtypes, "
            "masks and options: " + "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, calls, strict=True))
        )
    return found[:, :N_NUMBERS]
