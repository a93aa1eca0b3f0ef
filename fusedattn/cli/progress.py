"""Progress and remaining time of a command, on the error output if that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

CLEARED = "\r\033[K"


def shown(items: Iterable[T], total: int) -> Iterator[T]:
    """Yield the items; while the next one is computed, a line shows how many are done and the estimated time left.

    The line is erased before an item is yielded, and not shown if the error output is not a terminal.
    """
    if not sys.stderr.isatty():
        yield from items
        return
    start = time.monotonic()
    _say(f"0 of {total}")
    for number, item in enumerate(items, 1):
        _say("")
        yield item
        if number < total:
            left = (time.monotonic() - start) / number * (total - number)
            _say(f"{number} of {total}, about {_duration(left)} left")


def _say(text: str) -> None:
    print(f"{CLEARED}{text}", end="", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
