"""The tool that plants faults: its list fits the code, and it tells detected faults from others."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.helpers import quick
from tests.helpers.compiling import output
from tests.mutation import __main__ as mutation
from tests.mutation.fault import Fault

ROOT = Path(__file__).parents[2]


FILES = sorted({fault.path for fault in mutation.FAULTS})


def test_each_fault_fits_the_code():
    """Its text is still there, and the file of its tests too."""
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in FILES}
    for fault in mutation.FAULTS:
        assert fault.mutated(texts[fault.path]) != texts[fault.path]
        assert (ROOT / mutation.pytest_arguments(fault.tests)[0]).is_file(), fault.tests


@quick.every(15)
@pytest.mark.parametrize("path", FILES)
def test_each_fault_is_other_python(path):
    """The result of planting is valid and different Python."""
    text = (ROOT / path).read_text(encoding="utf-8")
    right = ast.dump(ast.parse(text))
    for fault in mutation.FAULTS:
        assert fault.path != path or ast.dump(ast.parse(fault.mutated(text))) != right, fault.what


@pytest.mark.thorough
def test_the_tests_named_for_a_fault_exist():
    names: dict[str, list[str]] = {}
    for line in output("-m", "pytest", "--collect-only", "-q", "tests").splitlines():
        file, separator, name = line.partition("::")
        if separator:
            names.setdefault(file, []).append(f"{Path(file).name}::{name}".lower())
    for tests in sorted({fault.tests for fault in mutation.FAULTS}):
        file, *expression = mutation.pytest_arguments(tests)
        matches = Expression.compile(expression[1]).evaluate if expression else lambda _: True
        assert any(matches(lambda word, name=name: word.lower() in name) for name in names.get(file, ())), tests


def test_there_are_enough_and_no_two_have_one_name():
    names = [fault.what for fault in mutation.FAULTS]
    assert len(set(names)) == len(names) >= 60
    assert {Path(fault.path).parts[0] for fault in mutation.FAULTS} == {"kernels", "fusedattn"}


def test_no_file_of_the_kernels_is_left_out():
    files = {f"kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}
    assert not files - {fault.path for fault in mutation.FAULTS}


@pytest.mark.parametrize(("nth", "expected"), [(None, None), (0, "b a"), (1, "a b"), (2, None)])
def test_which_occurrence(nth, expected):
    fault = Fault("file", "a", "b", "what", nth=nth)
    if expected is None:
        with pytest.raises(ValueError, match=r"file: got 2 times 'a'"):
            fault.mutated("a a")
    else:
        assert fault.mutated("a a") == expected


@pytest.fixture
def tree(tmp_path):
    code = "def double(x):\n    return 2 * x\n\n\ndef triple(x):\n    return 3 * x\n"
    (tmp_path / "code_under_test.py").write_text(code)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_code.py").write_text(
        "import code_under_test as code\n\n\ndef test_double():\n    assert code.double(1) == 2\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    return tmp_path


@pytest.mark.thorough
def test_a_fault_that_is_seen_and_one_that_is_not(tree, monkeypatch):
    monkeypatch.setattr(mutation, "OPERATION_TESTS", ("tests/test_code.py",))
    before = (tree / "code_under_test.py").read_text()
    seen = Fault("code_under_test.py", "2 * x", "3 * x", "seen", "tests/test_code.py")
    unseen = Fault("code_under_test.py", "3 * x", "2 * x", "unseen", "tests/test_code.py -k double")
    assert mutation.judge(seen, tree).killed_by == "tests/test_code.py::test_double"
    assert mutation.judge(unseen, tree).killed_by is None
    assert (tree / "code_under_test.py").read_text() == before


@pytest.mark.thorough
def test_tests_that_are_not_there_are_no_verdict(tree):
    """Neither killed nor survived: errors of pytest itself are raised."""
    for arguments in (["tests/test_nothing.py"], ["tests/test_code.py", "-k", "nothing"]):
        with pytest.raises(RuntimeError, match="exit status"):
            mutation.run_tests(tree, arguments)


def test_figures():
    verdicts = [
        mutation.Verdict(fault.what, fault.path, None if i == 0 or fault.equivalent else "test", 1)
        for i, fault in enumerate(mutation.FAULTS)
    ]
    result = mutation.report(verdicts)
    assert result["survived"] == [mutation.FAULTS[0].what]
    assert result["planted"] == result["killed"] + len(result["equivalent"]) + 1
    assert 0.9 < result["share_killed"] < 1.0
