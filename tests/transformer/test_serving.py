"""docs/serving.py runs, its checks notice faults, and its page shows its output."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

import pytest

from tests.helpers.compiling import ROOT, output

SCRIPT = ROOT / "docs/serving.py"


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    """The script with fewer requests."""
    spec = importlib.util.spec_from_file_location("serving", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "serving", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.N_REQUESTS = 8
    return module


@pytest.mark.thorough
def test_it_runs_as_the_page_shows():
    found = output(SCRIPT, PYTHONPATH=str(ROOT))
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    shown = page.partition("$ python docs/serving.py\n")[2].partition("```")[0]
    # The time, and what rounding may change.
    varying = re.compile(r"[0-9.]+(?= s$)|(?<=float32: )\d+|(?<=by at most )[0-9.e+-]+|(?<=deviation is )[0-9.]+", re.M)
    assert varying.sub("", found) == varying.sub("", shown)
    assert "each request alone: 0 of" in found


def test_a_few_requests_pass(script):
    assert script.main() == 0


def test_shared_pages_are_noticed(script, monkeypatch, capsys):
    """Every request gets the same page for all its tokens."""
    take = script.Pages.take
    monkeypatch.setattr(script.Pages, "take", lambda self, n: [1] * len(take(self, n)))
    assert script.main() == 1
    assert "each request alone: 0 of" not in capsys.readouterr().out


def test_lost_pages_are_noticed(script, monkeypatch):
    monkeypatch.setattr(script.Pages, "give", lambda self, pages: self.free.extend(pages[:-1]))
    script.N_REQUESTS = 3
    assert script.main() == 1


def test_a_large_error_of_codes_is_noticed(script):
    script.TOLERANCE = 1e-3
    assert script.main() == 1


def test_pages_are_used_again_and_never_twice(script):
    pages = script.Pages(5)
    first, second = pages.take(3), pages.take(1)
    assert sorted(first + second) == [1, 2, 3, 4]
    assert pages.take(1) == []
    pages.give(first)
    assert pages.take(4) == []
    assert sorted(pages.take(3)) == sorted(first)
    assert (pages.most_used, pages.n_taken) == (4, 7)
