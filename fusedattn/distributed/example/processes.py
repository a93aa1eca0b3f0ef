"""The processes: they start, speak and end together."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

# Before there is a group. Imported later, by an optimizer, its default arguments would keep the group and its threads,
# which can abort a process that ends.
import torch.distributed.nn

from fusedattn.cli.errors import CommandError

T = TypeVar("T")

PROGRAM = "python -m fusedattn.distributed.example"
LAUNCH = "torchrun --nproc-per-node 2 -m fusedattn.distributed.example"


def are_launched() -> bool:
    """Whether torchrun, or another launcher, has said which process this is."""
    return "RANK" in os.environ


@contextlib.contextmanager
def group() -> Iterator[None]:
    """The default process group, of the processes of the launcher or of this one alone.

    CPU tensors go by gloo. Tensors of GPUs go by NCCL.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if are_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()  # models and optimizers, in cycles, keep the group too
        dist.destroy_process_group()


def on_this_machine() -> int:
    """The number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def device_of(name: str | None) -> torch.device:
    """The device of this process for ``--device``: by default a GPU if there are any. CPU threads are shared out."""
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0
    if name == "cpu" or (name is None and not n_gpus):
        torch.set_num_threads(max(1, _cores() // on_this_machine()))
        return torch.device("cpu")
    if n_gpus < on_this_machine():
        raise CommandError(
            f"--device: got cuda for {on_this_machine()} processes, but torch {torch.__version__} sees {n_gpus} GPUs "
            "here; start one process for each GPU, or use --device cpu"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def together(prepare: Callable[[], T]) -> T:
    """What `prepare` returns, once it has succeeded in every process.

    Raises:
        CommandError: it has failed in one of them. Every process raises it.
    """
    found, own = [], ""
    try:
        found.append(prepare())
    except CommandError as error:
        own = str(error)
    except Exception as error:  # all processes must hear of it
        own = f"{type(error).__name__}: {error}"
    errors = [""] * dist.get_world_size()
    dist.all_gather_object(errors, own)
    failed = [rank for rank, error in enumerate(errors) if error]
    if len(failed) == len(errors) and len(set(errors)) == 1:
        raise CommandError(own)
    if failed:
        raise CommandError("; ".join(f"rank {rank}: {errors[rank]}" for rank in failed))
    return found[0]


def check_same(name: str, value: int) -> None:
    """Check that all processes have the same value for an option.

    Raises:
        CommandError: they have not. Every process raises it.
    """
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if different:
        raise CommandError(
            f"{name}: got something else on ranks {different} than on rank 0, allowed is the same on all"
        )


def say_once(line: str) -> None:
    """Print an error on rank 0. None returns before: a launcher kills all processes as soon as one of them fails."""
    if dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)
    dist.all_reduce(torch.zeros(()))


def fail(error: Exception) -> int:
    """Print what went wrong in this process; returns the exit status."""
    rank = os.environ.get("RANK", "0")
    print(f"{PROGRAM}: rank {rank}: error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return 1


def counted() -> str:
    """The number of processes, in words."""
    world = dist.get_world_size()
    return f"{world} process{'' if world == 1 else 'es'}"
