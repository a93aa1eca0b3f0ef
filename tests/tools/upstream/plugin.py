"""A plugin of pytest: run each test under a replacement, and write its outcome as a line of JSON.

Environment variables: UPSTREAM_REPLACEMENT, UPSTREAM_OUT (the file), UPSTREAM_CHECKOUT and UPSTREAM_SAMPLE.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fusedattn
from tests.tools.upstream import flash_attn_on_cpu
from tests.tools.upstream.replacements import REPLACEMENTS, Served
from tests.tools.upstream.sample import limited, sampled

REPLACEMENT = os.environ["UPSTREAM_REPLACEMENT"]
OUT = Path(os.environ["UPSTREAM_OUT"])
SAMPLE = int(os.environ.get("UPSTREAM_SAMPLE", "0"))
PACKAGE = str(Path(fusedattn.__file__).parent)
served: dict[str, int] = {}


def pytest_configure(config: pytest.Config) -> None:
    if REPLACEMENT == "flash_attn":
        flash_attn_on_cpu.install(Path(os.environ["UPSTREAM_CHECKOUT"]))
        if SAMPLE:
            vars(pytest.mark)["parametrize"] = limited(pytest.mark.parametrize)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    flash_attn_on_cpu.prepare_modules()
    if REPLACEMENT == "flash_attn" and SAMPLE:
        items[:] = sampled(items, SAMPLE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    counter = Served()
    try:
        with REPLACEMENTS[REPLACEMENT](counter):
            return (yield)
    finally:
        served[item.nodeid] = counter.calls


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[Any]:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        result = {"test": report.nodeid, "outcome": report.outcome, "served": served.get(report.nodeid, 0)}
        if report.outcome == "failed" and call.excinfo is not None:
            result |= _error(call.excinfo)
        with OUT.open("a") as file:
            print(json.dumps(result), file=file)
    return report


def _error(error: pytest.ExceptionInfo[BaseException]) -> dict[str, Any]:
    """The kind and message of an error; it is refused if this package says that it cannot run the call."""
    raised_in = str(error.traceback[-1].path)
    refused = error.errisinstance(NotImplementedError) and raised_in.startswith(PACKAGE)
    message = " ".join(str(error.value).split())[:300]
    return {"outcome": "refused" if refused else "failed", "error": error.typename, "message": message}
