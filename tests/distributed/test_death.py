"""A process that dies or hangs in the middle of a call: the others end with an error, and do not wait for ever."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusedattn.distributed import Context, collectives
from tests.distributed.own_tokens import PLAIN, OwnTokens, own_tokens
from tests.distributed.processes import NEEDS_PROCESSES, with_gloo
from tests.helpers import quick

pytestmark = NEEDS_PROCESSES

SECONDS = 5  # that the group of the context waits
SECONDS_OF_TEST = 40  # from the death on, until all processes have ended

WHEN = ("before the forward", "in the forward", "before the backward", "in the backward")
HOW = ("exit", "kill", "hang")


def end(how: str) -> None:
    """End this process without a word to the others, or do nothing more for a long time."""
    if how == "exit":
        os._exit(1)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10 * SECONDS_OF_TEST)


def end_when_sending(how: str) -> None:
    """End this process when it is about to send the first tensor, after all have agreed to."""

    def ending(*_: Any, **__: Any) -> Any:
        end(how)

    for name in ("all_to_all_single", "batch_isend_irecv"):
        setattr(collectives.dist, name, ending)
    collectives.gather_equal = _unless_numbers(ending)


def _unless_numbers(ending: Any) -> Any:
    """Numbers of the agreement are int64, tensors are sent as bytes."""
    known = collectives.gather_equal

    def gather(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> Any:
        return known(received, sent, group) if sent.dtype == torch.int64 else ending()

    return gather


def work(rank: int, world: int, directory: str, mode: str, when: str, how: str) -> None:
    """One right step, then one in which the last rank ends; others write down what happens to them."""
    with_gloo(rank, world, SECONDS_OF_TEST, init_method=f"file://{directory}/meeting")
    dist.barrier()
    group = dist.new_group(timeout=datetime.timedelta(seconds=SECONDS))
    assert group is not None
    x = own_tokens(Context(group, mode=mode), 13)
    x.out_and_gradients()
    Path(f"{directory}/ready{rank}").touch()
    try:
        _step(x, group, when, how if rank == world - 1 else None)
    except Exception:
        traceback.print_exc()
        Path(f"{directory}/error{rank}").write_text(traceback.format_exc())
        sys.stderr.flush()
        os._exit(3)  # a program whose training ends: what it says on its way is not the subject
    Path(f"{directory}/error{rank}").write_text("none")


def _step(x: OwnTokens, group: dist.ProcessGroup, when: str, how: str | None) -> None:
    leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]
    if how and when == "before the forward":
        end(how)
    if how and when == "in the forward":
        end_when_sending(how)
    out = x.call(**dict(zip("qkv", leaves, strict=True)))
    if how and when == "before the backward":
        end(how)
    if how and when == "in the backward":
        end_when_sending(how)
    torch.autograd.grad(out.square().sum(), leaves)
    dist.all_reduce(
        torch.zeros(1), group=group
    )  # as that of parameters: an error reaches each process here at the latest


# (processes, mode, when, how)
QUICK = [(2, "ring", "before the forward", "hang"), (2, "ring", "in the backward", "kill")]
CASES = [
    *QUICK,
    *[(2, mode, when, how) for mode in PLAIN for when in WHEN for how in HOW if (2, mode, when, how) not in QUICK],
    *[(3, mode, when, "kill") for mode in PLAIN if mode != "ulysses" for when in WHEN],  # of 4 heads
]


@quick.only(case=lambda case: case in QUICK)
@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(map(str, case)))
def test_others_end_with_an_error(tmp_path: Path, case: tuple[int, str, str, str]) -> None:
    world, *of_work = case
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=work, args=(rank, world, str(tmp_path), *of_work), daemon=True) for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        while len(list(tmp_path.glob("ready*"))) < world:
            assert all(process.is_alive() for process in processes), "a process ended in the right step"
            time.sleep(0.05)
        until = time.monotonic() + SECONDS_OF_TEST
        for process in processes[:-1]:
            process.join(max(0.0, until - time.monotonic()))
        codes = [process.exitcode for process in processes[:-1]]
    finally:
        for process in processes:
            process.kill()
            process.join()
    errors = [path.read_text() if path.exists() else "" for path in (tmp_path / f"error{i}" for i in range(world - 1))]
    assert codes == [3] * (world - 1), f"{codes} (None: it waits for more than {SECONDS_OF_TEST} s)\n" + "\n".join(
        errors
    )
    for error in errors:
        assert "Error" in error.splitlines()[-1], error
