"""Run jobs in several processes; one that crashes or hangs is replaced, and its job fails."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from bench.first.jobs import Job
from bench.first.records import Record
from bench.measuring.measure import reason
from bench.measuring.processes import Child, ProcessError
from bench.measuring.timing import Budget, still_works
from fusedattn.cli import machine

BROKEN = "the GPU does not work any more for this process"
POLL = 1.0  # seconds between two checks for hanging processes and of the budget


@dataclass
class Kernels:
    """Hashes of kernels that were compiled, and of those that Triton's cache on disk had."""

    compiled: set[str] = field(default_factory=set)
    found: set[str] = field(default_factory=set)

    def add(self, hash: str, was_found: bool) -> None:
        """Count a kernel once, even if one process compiles it and others find it in the cache."""
        if was_found:
            self.found |= {hash} - self.compiled
        else:
            self.compiled.add(hash)


@dataclass
class _Worker:
    child: Child
    job: Job
    began: float
    heard: float


def run_jobs(
    jobs: Iterable[Job], device: torch.device, n_processes: int, silence: float, budget: Budget, kernels: Kernels
) -> Iterator[Record]:
    """Yield the record of each job, in the order in which they end; jobs beyond the budget are left out.

    A process sends a message for each kernel that it compiles; one that is silent for `silence` seconds hangs.
    """
    queue, idle, busy = deque(jobs), [], {}  # type: deque[Job], list[Child], dict[Connection, _Worker]
    try:
        while (queue or busy) and not budget.is_spent:
            while queue and len(busy) < n_processes:
                child = idle.pop() if idle else Child(answer_all, str(device))
                now = time.monotonic()
                busy[child.connection] = worker = _Worker(child, queue.popleft(), now, now)
                with suppress(OSError):  # the process has died, which is handled below
                    child.connection.send(worker.job)
            ready = wait(list(busy), POLL)
            for connection, worker in list(busy.items()):
                record = None
                try:
                    if connection in ready:
                        record = _heard(worker, kernels)
                    elif time.monotonic() - worker.heard > worker.child.limit(silence):
                        raise ProcessError(f"its process was silent for {silence:g} s: it hangs")
                except ProcessError as error:
                    del busy[connection]
                    worker.child.kill()
                    yield _record(worker, ok=False, text=str(error))
                if record is not None:
                    del busy[connection]
                    if record.text.endswith(BROKEN):
                        worker.child.kill()
                    else:
                        idle.append(worker.child)
                    yield record
    finally:
        for child in (*idle, *(worker.child for worker in busy.values())):
            child.kill()


def _heard(worker: _Worker, kernels: Kernels) -> Record | None:
    """The record if the process sends an answer; None if it has started or compiled a kernel."""
    what, value = worker.child.receive(0.0)
    worker.heard = time.monotonic()
    if what == "answer":
        return _record(worker, **value)
    if what == "kernel":
        kernels.add(*value)
    return None


def _record(worker: _Worker, **fields: Any) -> Record:
    return Record(worker.job.part, worker.job.name, seconds=round(time.monotonic() - worker.began, 3), **fields)


def answer_all(connection: Connection, device_name: str) -> None:
    """Answer jobs until the connection ends."""
    device = prepared(device_name, lambda *kernel: connection.send(("kernel", kernel)))
    connection.send(("started", None))
    counted = {True: 0, False: 0}
    _listen(lambda hash, was_found: counted.update({was_found: counted[was_found] + 1}))
    with suppress(EOFError, BrokenPipeError):
        while True:
            job: Job = connection.recv()
            counted.update({True: 0, False: 0})
            try:
                found = job.run(device)
                answer: dict[str, Any] = {"ok": found.ok, "text": found.text, "figures": found.figures}
            except Exception as error:
                answer = {"ok": False, "text": reason(error)}
            answer |= {"compiled": counted[False], "found": counted[True]}
            if not still_works(device):
                answer |= {"ok": False, "text": f"{answer['text']}; {BROKEN}"}
            connection.send(("answer", answer))


def prepared(device_name: str, heard: Callable[[str, bool], None]) -> torch.device:
    """The device of this process, one of several; `heard` is called for each kernel with its hash and whether the cache
    on disk had it.
    """
    device = torch.device(device_name)
    machine.choose_how_triton_runs(device)
    torch.set_num_threads(1)
    _listen(heard)
    return device


def _listen(heard: Callable[[str, bool], None]) -> None:
    import triton

    before = triton.knobs.compilation.listener

    def listener(*, metadata: dict[str, Any], cache_hit: bool, **other: Any) -> None:
        if before is not None:
            before(metadata=metadata, cache_hit=cache_hit, **other)
        heard(metadata["hash"], cache_hit)

    triton.knobs.compilation.listener = listener
