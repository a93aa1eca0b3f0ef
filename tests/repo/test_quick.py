"""``make test`` runs quick tests of every kind; ``make test-all`` runs every test."""

from __future__ import annotations

import itertools
import shlex
import shutil
from pathlib import Path

import pytest

from tests.helpers import quick
from tests.helpers.compiling import ROOT, make, output


def arguments(target: str) -> list[str]:
    """The pytest arguments of a Makefile target, without the options of a run."""
    (line,) = [line for line in make("--dry-run", "--old-file=.venv/.test", target) if "-m pytest" in line]
    words = shlex.split(line)
    return [word for word in words[words.index("pytest") + 1 :] if word not in OPTIONS]


OPTIONS = ("-n", "2", "--dist", "worksteal", "--maxfail=0", "--durations=10")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_targets_run_every_test_together() -> None:
    assert arguments("test-all") == ["--ignore=tests/integrations"]
    assert arguments("test") == ["-m", "not thorough", "--ignore=tests/integrations"]
    assert arguments("test-integrations") == ["tests/integrations"]


# Modules that compile, time or type-check the whole package, which takes too long for any quick test.
WITHOUT = {"tests/bench/test_gate_kernels.py", "tests/bench/test_host_time.py", "tests/bench/test_prebuilt.py"}
WITHOUT |= {"tests/bench/test_versions.py", "tests/repo/test_typing.py"}


COLLECT = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "not thorough")


@pytest.mark.thorough
def test_every_module_has_a_quick_test() -> None:
    lines = output(*COLLECT, "--ignore=tests/integrations", "tests").splitlines()
    with_quick_tests = {line.partition("::")[0] for line in lines if "::" in line}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    skipped = {line.partition(": ")[2].partition(":")[0] for line in lines if "left out:" in line}
    assert {module for module in modules if "/integrations/" not in module} - skipped - WITHOUT == with_quick_tests


ROWS = pytest.mark.parametrize(("a", "b"), [(0, "x"), (1, "x"), pytest.param(2, "y", id="last")])
COLUMNS = pytest.mark.parametrize("c", [True, False])


@pytest.mark.parametrize(
    ("choose", "expected"),
    [
        (quick.only(a=1), [(1, "x", True), (1, "x", False)]),
        (quick.only(a=lambda a: a > 0, c=False), [(1, "x", False), (2, "y", False)]),
        (quick.every(4), [(0, "x", True), (2, "y", True)]),
        (quick.every(4, start=1, a=1), [(0, "x", False), (1, "x", True), (1, "x", False), (2, "y", False)]),
        (quick.covering(), [(0, "x", True), (1, "x", False), (2, "y", True)]),
        (quick.covering(pairs=True), [(*row, c) for row in ((0, "x"), (1, "x"), (2, "y")) for c in (True, False)]),
    ],
    ids=["a value", "a function and a value", "every 4th", "and others", "rows", "pairs of rows"],
)
def test_which_cases_are_quick(choose, expected) -> None:
    def test(a, b, c):
        pass

    (mark,) = [mark for mark in choose(COLUMNS(ROWS(test))).pytestmark if mark.name == "quick"]
    assert sorted(tuple(case.values()) for case in mark.args[0]) == sorted(expected)


def test_which_cases_stay() -> None:
    """Of 27, nine with every two values of two marks, and one that is named; quick ones are among them."""

    def test(a, b, c):
        pass

    for name in "abc":
        test = pytest.mark.parametrize(name, [0, 1, 2])(test)
    test = quick.only(c=0)(quick.pairwise(a=1, b=1, c=1)(test))
    kept = [tuple(case[name] for name in "abc") for case in test.kept_cases.values()]
    assert len(kept) == len(set(kept)) <= 11
    assert (1, 1, 1) in kept
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert {(case[i], case[j]) for case in kept} == set(itertools.product(range(3), repeat=2))
    (mark,) = [mark for mark in test.pytestmark if mark.name == "quick"]
    assert {tuple(case[name] for name in "abc") for case in mark.args[0]} == {x for x in kept if x[2] == 0}


def test_a_choice_of_nothing_is_an_error() -> None:
    def test(c):
        pass

    with pytest.raises(AssertionError, match="test has no quick case"):
        quick.only(c=None)(COLUMNS(test))


def test_chosen_cases_are_not_thorough(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_itemcollected, pytest_pycollect_makeitem\n"
    )
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\naddopts = --import-mode=importlib\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\nfrom tests.helpers import quick\n\n\n"
        "@quick.only(x=1.5)\n@pytest.mark.parametrize('x', [1.5, 2.5])\ndef test_it(x):\n    pass\n\n\n"
        "def test_without_a_choice():\n    pass\n\n\n"
        "@quick.pairwise()\n@pytest.mark.parametrize('x', [1, 2])\n@pytest.mark.parametrize('y', [1, 2])\n"
        "@pytest.mark.parametrize('z', [1, 2])\ndef test_pairs(x, y, z):\n    pass\n"
    )
    found = output(*COLLECT, cwd=tmp_path).split()
    assert found[:2] == ["test_it.py::test_it[1.5]", "test_it.py::test_without_a_choice"], found
    assert 4 <= sum("::test_pairs[" in x for x in found) < 8, found
