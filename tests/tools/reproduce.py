"""``python -m tests.tools.reproduce "FuzzProblem(...)"``: check a problem, on the GPU or, without one, interpreted.

``"CachedProblem(...)"`` is a call with a cache, ``"LinearProblem(...)"`` one of linear attention,
``"FP8Problem(...)"`` one in 8 bits.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

# Through tests.conftest, which decides how Triton runs.
from tests.helpers import cached_contract, contract, fp8_contract, linear_contract
from tests.helpers.cached_problem import CachedProblem
from tests.helpers.fp8_contract import FP8Problem
from tests.helpers.hostile import FuzzProblem
from tests.helpers.linear import LinearProblem

Problem = FuzzProblem | CachedProblem | LinearProblem | FP8Problem


def problem_of(text: str) -> Problem:
    """The problem that printed as `text`."""
    from fusedattn import FP8
    from fusedattn.testing import Case

    kinds = (FuzzProblem, CachedProblem, LinearProblem, FP8Problem)
    named: dict[str, Any] = {kind.__name__: kind for kind in (*kinds, Case, FP8)}
    named |= {"torch": torch, "nan": math.nan, "inf": math.inf}
    problem = eval(text, named)
    if not isinstance(problem, kinds):
        raise TypeError(f"got {type(problem).__name__}, allowed are {', '.join(kind.__name__ for kind in kinds)}")
    return problem


def check(problem: Problem) -> bool:
    """Whether the numbers of a problem that keeps the contract were compared with the truth."""
    if isinstance(problem, LinearProblem):
        return linear_contract.check(problem)
    if isinstance(problem, FP8Problem):
        return fp8_contract.check(problem)
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
