"""``python -m tests.tools.reproduce "FuzzProblem(...)"``: check a problem, on the GPU or, without one, interpreted.

``"CachedProblem(...)"`` is a call with a cache, ``"LinearProblem(...)"`` one of linear attention.
"""

from __future__ import annotations

import sys

import torch

# Through tests.conftest, which decides how Triton runs.
from tests.helpers import cached_contract, contract, linear_contract
from tests.helpers.cached_problem import CachedProblem
from tests.helpers.hostile import FuzzProblem
from tests.helpers.linear import LinearProblem

Problem = FuzzProblem | CachedProblem | LinearProblem


def problem_of(text: str) -> Problem:
    """The problem that printed as `text`."""
    from fusedattn.testing import Case

    kinds = (FuzzProblem, CachedProblem, LinearProblem)
    named = {kind.__name__: kind for kind in (*kinds, Case)} | {"torch": torch}
    problem = eval(text, named)
    if not isinstance(problem, kinds):
        raise TypeError(f"got {type(problem).__name__}, allowed are {', '.join(kind.__name__ for kind in kinds)}")
    return problem


def check(problem: Problem) -> bool:
    """Whether the numbers of a problem that keeps the contract were compared with the truth."""
    if isinstance(problem, LinearProblem):
        return linear_contract.check(problem)
    return cached_contract.check(problem) if isinstance(problem, CachedProblem) else contract.check(problem)


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
    print("holds" if fits else "holds; the call is refused, or its numbers overflow or hang on one rounding")
    return 0


if __name__ == "__main__":
    sys.exit(main())
