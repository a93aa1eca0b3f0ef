"""Separate processes, for kernels that may hang or break the context on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

SILENCE = 400.0  # seconds without a message until a process counts as hanging
START = 300.0  # the same before its first message: Python and torch take long if many processes start at once


class ProcessError(Exception):
    """A process ended without an answer, or hangs."""


class Child:
    """A process that runs ``target(connection, *arguments)``, with the other end of its connection."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=target, args=(other, *arguments))
        self.process.start()
        self.has_started = False  # has sent something
        other.close()

    def receive(self, seconds: float) -> Any:
        """The next object that the process sends.

        Raises:
            ProcessError: it died, or sent nothing for `seconds`.
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
        """The seconds without a message that are allowed now, if `silence` are allowed after the start."""
        return silence if self.has_started else max(silence, START)

    def kill(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.join(10)
        self.connection.close()


def apart(function: Callable[..., Iterator[Any]], *arguments: Any) -> Iterator[Any]:
    """Run `function` in a separate process and yield its items.

    Raises:
        ProcessError: the process died, or was silent for too long; earlier items have been yielded.
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
