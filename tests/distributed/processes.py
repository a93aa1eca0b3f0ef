"""Run functions in several CPU processes that talk by gloo, and return what each of them returned."""

from __future__ import annotations

import datetime
import faulthandler
import functools
import multiprocessing
import multiprocessing.process
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.conftest import INTERPRETING

# For pytestmark.
NEEDS_PROCESSES = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo"),
    pytest.mark.skipif(not INTERPRETING, reason="the processes of these tests are CPU processes"),
]

SECONDS = 300
SECONDS_OF_START = 120
SECONDS_OF_STEP = 60
MOST_LOST = 3  # steps of one run


def in_processes(world: int, directory: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(*args)`` in `world` processes; the results in the order of ranks.

    Raises:
        torch.multiprocessing.ProcessRaisedException: one of them raised an error.
    """
    directory.mkdir(parents=True, exist_ok=True)
    torch.multiprocessing.spawn(_process, (world, str(directory), function, args), nprocs=world)
    return [torch.load(directory / f"result{rank}", weights_only=False) for rank in range(world)]


def _process(rank: int, world: int, directory: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with_gloo(rank, world, SECONDS, init_method=f"file://{directory}/meeting")
    try:
        result = function(*args)
    finally:
        dist.destroy_process_group()
    torch.save(result, f"{directory}/result{rank}")
    _end()


def _end() -> None:
    """End this process at once: torch's caches for DTensor keep a group, and its threads can abort a slower end."""
    os._exit(0)


def with_gloo(rank: int, world: int, seconds: float, **where: Any) -> None:
    """Make this process one of a world; what it waits for takes at most so many seconds.

    Args:
        where: the processes meet, as an argument of ``init_process_group``.
    """
    torch.set_num_threads(1)
    start = functools.partial(dist.init_process_group, "gloo", rank=rank, world_size=world)
    start(timeout=datetime.timedelta(seconds=seconds), **where)


@dataclass(frozen=True)
class Raised:
    """An error that a process caught: the name of its type, and its message."""

    kind: str
    message: str


@dataclass(frozen=True)
class Lost:
    """A process that had no result in time, or ended before."""

    reason: str

    def __repr__(self) -> str:
        return f"Lost({self.reason})"


def caught(function: Callable[[], Any]) -> Any:
    """The result of a function, or the error that it raised."""
    try:
        return function()
    except Exception as error:
        return Raised(type(error).__name__, str(error))


class Steps(dict[str, Callable[..., Any]]):
    """Functions for :func:`in_steps` by name; a decorator adds one."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self[function.__name__] = function
        return function


def without_trouble(results: list[Any]) -> list[Any]:
    """The results of all ranks.

    Raises:
        AssertionError: one of them is an error, or lost.
    """
    assert not any(isinstance(x, Raised | Lost) for x in results), results
    return results


def in_steps(
    world: int,
    directory: Path,
    function: Callable[..., Any],
    names: Sequence[str],
    *args: Any,
    seconds: float = SECONDS_OF_STEP,
) -> dict[str, list[Any]]:
    """``function(name, *args)`` for each name in `world` processes; by name, the results in the order of ranks.

    A result is :class:`Raised` if the function raised an error. If a name takes more than so many seconds, or a process
    ends, it is :class:`Lost`, and other processes begin at the next name; after MOST_LOST of them, none does.
    """
    found: dict[str, list[Any]] = {}
    left, n_lost = list(names), 0
    while left and n_lost < MOST_LOST:
        start = directory / f"{len(left)}left"
        start.mkdir(parents=True)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes = [
            multiprocessing.get_context("spawn").Process(
                target=_steps, args=(rank, world, store.port, str(start), seconds, function, left, args), daemon=True
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        reason = _wait(processes, start, seconds)
        for step, name in enumerate(left):
            if step and not list(start.glob(f"begun{step}of*")):  # after trouble in the step before
                break
            found[name] = [_result(start, step, rank, reason) for rank in range(world)]
            if any(isinstance(x, Lost) for x in found[name]):
                n_lost += 1
                break
        left = [name for name in names if name not in found]
    return found | {name: [Lost(f"not tried after {n_lost} steps without a result")] * world for name in left}


def _wait(processes: Sequence[multiprocessing.process.BaseProcess], start: Path, seconds: float) -> str:
    """Wait until all processes have ended, or a step takes too long; returns the reason if a result is missing."""
    n_known, until, ends_at = 0, time.monotonic() + SECONDS_OF_START, 0.0
    while any(process.is_alive() for process in processes) and time.monotonic() < until:
        n_results = len(list(start.glob("step*")))
        if n_results >= n_known + len(processes):
            n_known = n_results - n_results % len(processes)
            until = time.monotonic() + seconds
        if any(process.exitcode for process in processes):  # the others may have a result, or wait in vain
            ends_at = ends_at or time.monotonic() + seconds / 2
            until = min(until, ends_at)
        time.sleep(0.02)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    stacks = [f"rank {path.name[5:]}:\n{path.read_text()}" for path in sorted(start.glob("waits*"))]
    return "\n".join([f"no result; exit codes of all ranks: {codes} (None: it waited for {seconds} s)", *stacks])


def _result(start: Path, step: int, rank: int, reason: str) -> Any:
    path = start / f"step{step}of{rank}"
    return torch.load(path, weights_only=False) if path.exists() else Lost(reason)


def _steps(
    rank: int,
    world: int,
    port: int,
    directory: str,
    seconds: float,
    function: Callable[..., Any],
    names: Sequence[str],
    args: tuple[Any, ...],
) -> None:
    store = dist.TCPStore("127.0.0.1", port)
    with_gloo(rank, world, SECONDS, store=dist.PrefixStore("world", store))
    Meeting.here = Meeting(dist.PrefixStore("steps", store), rank, world, seconds / 2)
    for step, name in enumerate(names):
        path = Path(f"{directory}/begun{step}of{rank}")
        path.touch()
        with path.with_name(f"waits{rank}").open("w") as file:
            faulthandler.dump_traceback_later(0.7 * seconds, file=file)
            result = caught(functools.partial(function, name, *args))
            faulthandler.cancel_dump_traceback_later()
        torch.save(result, path.with_name(f"saved{step}of{rank}"))
        path.with_name(f"saved{step}of{rank}").rename(path.with_name(f"step{step}of{rank}"))  # whole
        if not Meeting.here.all_came():
            os._exit(1)
    dist.destroy_process_group()
    _end()


class Meeting:
    """Where the processes of :func:`in_steps` wait for each other without a process group, which may be in trouble."""

    here: Meeting

    def __init__(self, store: dist.Store, rank: int, world: int, seconds: float) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._wait = datetime.timedelta(seconds=seconds)
        self._n = 0

    def all_came(self) -> bool:
        """Wait for the others; False if one does not come, or has waited in vain for another."""
        self._n += 1
        self._store.set(f"{self._n}of{self._rank}", "")
        keys = [f"{self._n}of{rank}" for rank in range(self._world)]
        try:
            self._store.wait(keys, self._wait)
        except RuntimeError:
            self._store.set("trouble", "")
        return not self._store.check(["trouble"])

    def then(self, function: Callable[[], Any]) -> Any:
        """What :func:`caught` returns for a function, after all have come."""
        return caught(function) if self.all_came() else Lost("another process does not come")


def new_group(ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """A process group that nothing has been sent in, with the timeout of the world; all processes of it call this."""
    world = dist.group.WORLD
    assert world is not None
    timeout = world._get_backend(torch.device("cpu")).options._timeout
    group = dist.new_group(None if ranks is None else list(ranks), timeout)
    assert group is not None
    return group
