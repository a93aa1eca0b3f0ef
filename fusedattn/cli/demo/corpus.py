"""Text to train on, as bytes: no tokenizer, 256 tokens."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fusedattn.cli.errors import CommandError

MAX_BYTES = 4 * 2**20
HELD_OUT = 0.1

# Folders to skip in the standard library: its tests, and installed packages.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Batch:
    """Tokens and the next token of each, both int64 ``(batch, seqlen)``; only tokens with `valid` True are real."""

    ids: Tensor
    targets: Tensor
    valid: Tensor | None = None


@dataclass(frozen=True)
class Corpus:
    """The bytes to train on, and the held-out bytes: the last tenth of the text."""

    train: Tensor  # uint8
    held_out: Tensor  # uint8
    source: str


def read_corpus(path: str | None, seqlen: int) -> Corpus:
    """The text of ``--text``, or Python's own library."""
    if path is None:
        folder = sysconfig.get_path("stdlib")
        text, n_files = _read(_library_files(folder))
        source = f"Python's standard library, {n_files} files"
    elif os.path.isdir(path):
        text, n_files = _read(_files(path))
        source = f"{path}, {n_files} files"
    elif os.path.exists(path):
        text, _ = _read([path])
        source = path
    else:
        raise CommandError(f"--text: there is no file or folder {path!r}")
    least = int((seqlen + 1) / HELD_OUT) + 1
    if len(text) < least:
        hint = "; name a file or a folder with --text" if path is None else ""
        raise CommandError(f"--text: got {len(text)} bytes of text from {source}, needed are {least} and more{hint}")
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    split = len(text) - max(int(len(text) * HELD_OUT), seqlen + 1)
    return Corpus(tokens[:split], tokens[split:], source)


def random_batch(tokens: Tensor, batch: int, seqlen: int, generator: torch.Generator, device: torch.device) -> Batch:
    """A batch of windows with random starts."""
    starts = torch.randint(0, len(tokens) - seqlen, (batch, 1), generator=generator)
    return _windows(tokens, starts, seqlen, device)


def spread_batches(tokens: Tensor, n: int, batch: int, seqlen: int, device: torch.device) -> Iterator[Batch]:
    """Up to ``n`` batches of windows, always the same ones, spread evenly over the text."""
    last = len(tokens) - seqlen - 1
    starts = torch.linspace(0, last, min(n * batch, last // seqlen + 1), dtype=torch.float64).long()
    for some in starts[:, None].split(batch):
        yield _windows(tokens, some, seqlen, device)


def _windows(tokens: Tensor, starts: Tensor, seqlen: int, device: torch.device) -> Batch:
    windows = tokens[starts + torch.arange(seqlen + 1)].to(device).long()
    return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


def _library_files(folder: str) -> Iterator[str]:
    for path in _files(folder, skip=_NOT_LIBRARY):
        if path.endswith(".py"):
            yield path


def _files(folder: str, skip: set[str] | None = None) -> Iterator[str]:
    """Regular files below a folder, without hidden ones, in the same order on every machine."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in (skip or ()))
        for name in sorted(names):
            path = os.path.join(root, name)
            if not name.startswith(".") and Path(path).is_file():
                yield path


def _read(paths: Iterator[str] | list[str]) -> tuple[bytes, int]:
    """The contents of files, up to MAX_BYTES, and the number of files; binary files are skipped."""
    parts: list[bytes] = []
    left = MAX_BYTES
    for path in paths:
        try:
            with open(path, "rb") as file:
                part = file.read(left)
        except OSError as error:
            raise CommandError(f"--text: cannot read {path!r}: {error.strerror}") from None
        if not part or b"\0" in part:
            continue
        parts.append(part)
        left -= len(part)
        if left <= 0:
            break
    return b"".join(parts), len(parts)
