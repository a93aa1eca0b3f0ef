"""Tests that see the kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from tests.conftest import INTERPRETING

interpreted = pytest.mark.skipif(not INTERPRETING, reason="where kernels are compiled, the interpreter sees none")


@contextmanager
def seen_launches() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """The name and the tile of every kernel that is launched inside; no tile if the kernel has none."""
    from triton.runtime import interpreter

    run = interpreter.GridExecutor.__call__
    found: list[tuple[str, dict[str, Any]]] = []

    def seeing(executor: Any, *args: Any, **kwargs: Any) -> None:
        named = dict(zip(executor.arg_names, args, strict=False)) | kwargs
        tile = named["tile"]._asdict() if "tile" in named else {}
        found.append((executor.fn.__name__, {name: getattr(x, "value", x) for name, x in tile.items()}))
        run(executor, *args, **kwargs)

    with patch.object(interpreter.GridExecutor, "__call__", seeing):
        yield found
