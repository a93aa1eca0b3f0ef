"""Processes that compile kernels, and answer requests: each request and each answer is a line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.helpers.compiling import ROOT, environment


class Process:
    """A module that runs as a program, in a process without the interpreter of the tests."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, f"no answer to {request}: the process ended, with status {self.process.wait()}"
        return json.loads(answer)


@contextmanager
def answering(module: str) -> Iterator[Process]:
    """Inside, the module answers."""
    command = [sys.executable, "-m", module]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment(), **pipes) as process:
        try:
            yield Process(process)
        finally:
            process.kill()
