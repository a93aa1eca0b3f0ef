"""``python -m tests.tools.reproduce "FuzzProblem(...)"``: check a problem, on the GPU or, without one, interpreted."""

from __future__ import annotations

import sys

import torch

from tests.helpers.contract import check  # through tests.conftest, which decides how Triton runs
from tests.helpers.hostile import FuzzProblem


def problem_of(text: str) -> FuzzProblem:
    """The problem that printed as `text`."""
    from fusedattn.testing import Case

    problem = eval(text, {"FuzzProblem": FuzzProblem, "Case": Case, "torch": torch})
    if not isinstance(problem, FuzzProblem):
        raise TypeError(f"got {type(problem).__name__}, allowed is a FuzzProblem")
    return problem


def main() -> int:
    """Return 0 if the contract holds, 1 if it is broken, with the reason on standard error."""
    if len(sys.argv) != 2:
        print('usage: python -m tests.tools.reproduce "FuzzProblem(...)"', file=sys.stderr)
        return 2
    try:
        fits = check(problem_of(sys.argv[1]))
    except AssertionError as error:
        print(f"broken: {error}", file=sys.stderr)
        return 1
    print("holds" if fits else "holds; the numbers overflow, or hang on one rounding, and were not compared")
    return 0


if __name__ == "__main__":
    sys.exit(main())
