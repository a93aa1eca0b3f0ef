"""Processes of their own, for kernels that hang, or break the context on the GPU: they do so to nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

SILENCE = 400.0  # seconds until a process that says nothing counts as hanging
START = 300.0  # the same before its first word: Python and torch take long where many start at once


class ProcessError(Exception):
    """A process ended without a word, or hangs."""


class Child:
    """A process that runs ``target(connection, *arguments)``, and the other end of its connection."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=target, args=(other, *arguments))
        self.process.start()
        self.has_started = False  # has said something
        other.close()

    def receive(self, seconds: float) -> Any:
        """What it sends next.

        Raises:
            ProcessError: it died, or was silent for so long.
        """
        try:
            if not self.connection.poll(seconds):
                raise ProcessError(f"no answer in {seconds:g} s")
            answer = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(10)
            raise ProcessError(f"its process ended with status {self.process.exitcode}") from None
        self.has_started = True
        return answer

    def limit(self, silence: float) -> float:
        """Seconds for which it may say nothing now, if that is `silence` in general."""
        return silence if self.has_started else max(silence, START)

    def kill(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.join(10)
        self.connection.close()


def apart(function: Callable[..., Iterator[Any]], *arguments: Any) -> Iterator[Any]:
    """What `function` yields, from a process of its own.

    Raises:
        ProcessError: it died, or was silent for too long; what it had yielded before has come.
    """
    child = Child(_send, function, arguments)
    try:
        while True:
            is_last, answer = child.receive(child.limit(SILENCE))
            if is_last:
                return
            yield answer
    finally:
        child.kill()


def _send(connection: Connection, function: Callable[..., Iterator[Any]], arguments: tuple[Any, ...]) -> None:
    for answer in function(*arguments):
        connection.send((False, answer))
    connection.send((True, None))
