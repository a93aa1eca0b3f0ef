"""``python -m tests.tools.fuzz 1000``: check 1000 new problems one by one, after those that failed before.

``--of caches`` draws calls with a cache, ``--of linear`` calls of linear attention, ``--of fp8`` calls in 8 bits.
Failures are kept in ``.hypothesis/``. The last line is a summary; ``fuzz.json``, or ``fuzz_caches.json`` and so on, in
``docs/results``, or the file named by ``--out``, has the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.strategies import SearchStrategy

from fusedattn.cli.machine import versions
from tests.conftest import DEVICE
from tests.helpers import cached_contract, contract, fp8_contract, linear_contract
from tests.helpers.cached_eager import NUMBERS
from tests.helpers.cached_problem import CachedProblem
from tests.helpers.cached_strategies import cached_problems
from tests.helpers.fp8_contract import FP8Problem
from tests.helpers.fp8_strategies import fp8_problems
from tests.helpers.hostile import FuzzProblem, added_leaves
from tests.helpers.linear import LinearProblem
from tests.helpers.linear_strategies import linear_problems
from tests.helpers.strategies import problems

DATABASE = ".hypothesis/fuzz"
RUN = 10  # beyond ten examples in one run, hypothesis draws variations of these
PROGRESS = 100
MAX_FAILURES = 5  # finding the smallest problem that fails takes minutes


Problem = FuzzProblem | CachedProblem | LinearProblem | FP8Problem


def checked(
    seed: int | None, function: Callable[[Any], object], drawn: SearchStrategy[Any], **settings: Any
) -> Callable[[], None]:
    """A test of `function` on problems that are `drawn`; the same ones for the same `seed`."""

    @hypothesis.settings(deadline=None, suppress_health_check=list(HealthCheck), **settings)
    @given(drawn)
    def test(problem: Problem) -> None:
        function(problem)

    return test if seed is None else hypothesis.seed(seed)(test)


class Subject(NamedTuple):
    """What to draw, how to check it, and the kinds that a problem counts as."""

    drawn: SearchStrategy[Any]
    check: Callable[[Any], bool]
    kinds: Callable[[Any], set[str]]
    results: str


class Tally:
    """Counts of the problems tried."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.count: Counter[str] = Counter()
        self.failures: list[str] = []
        self.tried: set[str] = set()  # every run of hypothesis begins with the simplest problem
        self.shrinking = False
        self.start = time.monotonic()

    def check(self, problem: Problem) -> None:
        """Check a problem; attempts to make a failing problem smaller do not count."""
        if repr(problem) in self.tried:
            return
        counts = not self.shrinking
        if counts:
            self.count.update({"problems", str(_dtype(problem)).removeprefix("torch."), *self.subject.kinds(problem)})
        try:
            fits = self.subject.check(problem)
        except AssertionError:
            self.shrinking = True
            raise
        self.tried.add(repr(problem))
        if counts:
            self.count["compared with float64"] += fits

    def run(self, **settings: Any) -> None:
        """One run of hypothesis; a failure is printed and kept."""
        try:
            checked(None, self.check, self.subject.drawn, report_multiple_bugs=False, derandomize=False, **settings)()
        except AssertionError as error:
            command, _, reason = str(error).partition("\n")
            if command not in self.failures:
                self.failures.append(command)
                print(f"{command}\n    {reason}", flush=True)
        self.shrinking = False

    def as_json(self) -> dict[str, Any]:
        """Plain data for the file of results."""
        by_dtype = {name: self.count[name] for name in ("float32", "float16", "bfloat16")}
        hostile = {name: n for name, n in sorted(self.count.items()) if name not in (*by_dtype, "problems")}
        return {
            "problems": self.count["problems"],
            "by_dtype": by_dtype,
            "compared_with_float64": hostile.pop("compared with float64", 0),
            "of_these": hostile,
            "failures": self.failures,
            "seconds": round(time.monotonic() - self.start),
            "device": "interpreter" if DEVICE == "cpu" else torch.cuda.get_device_name(),
            "versions": {**versions(), "hypothesis": hypothesis.__version__},
        }


def _dtype(problem: Problem) -> torch.dtype:
    return problem.case.dtype if isinstance(problem, FuzzProblem) else problem.dtype


def kinds_of_call(problem: FuzzProblem) -> set[str]:
    """The kinds of a call without a cache."""
    case = problem.case
    found = {
        "zero sizes": 0 in (case.batch, case.nheads_q, case.seqlen_q, case.seqlen_k),
        "length 1": 1 in (case.seqlen_q, case.seqlen_k),
        "strided, expanded or overlapping": bool(problem.layouts),
        "broadcast": bool(problem.broadcast),
        "misaligned": problem.storage_offset > 0,
        "huge or tiny values": bool(problem.magnitudes),
        "one visible key": problem.rows == "one key",
        "nothing visible": problem.rows == "all empty" or case.empty_batch,
        "NaN or infinity": any(value in ("nan", "inf", "-inf") for _, value, _ in problem.poison),
        "largest and lowest numbers": any(value in ("highest", "lowest") for _, value, _ in problem.poison),
        "masked": bool(case.causal or case.padding or case.boolean or case.tree),
        "window or prefix": case.window is not None or case.prefix,
        "documents or blocks": case.documents is not None or case.layout is not None,
        "functions of masks or scores": case.mask_function or case.score_mod,
        "rope": case.rope is not None,
        "bias": bool(case.bias or case.alibi or case.relative),
        "soft-cap": case.softcap is not None,
        "sinks": case.sinks,
        "dropout": case.dropout_p > 0,
        "head_dim of values": case.head_dim_v is not None,
        "some gradients only": not {"q", "k", "v", *(name[0] for name in added_leaves(case))} <= set(problem.needed),
    }
    return {name for name, is_so in found.items() if is_so}


def kinds_of_cached(problem: CachedProblem) -> set[str]:
    """The kinds of a call with a cache."""
    if problem.wrong is not None:
        return {"refused"}
    found = {
        "pages": problem.layout.startswith("pages"),
        "rows": problem.layout == "rows",
        "heads of a token together": problem.token_major,
        "codes": problem.form != NUMBERS,
        "values that are features of keys": problem.latent,
        "given scales": problem.form.endswith("given"),
        "ring": problem.ring is not None,
        "ring with sinks": bool(problem.ring),
        "overwritten tokens": problem.ring is not None and max(problem.lengths) > problem.capacity,
        "full": problem.ring is None and max(problem.lengths) == problem.capacity,
        "left padding": problem.padding is not None,
        "NaN in padding": problem.poisoned,
        "rope on appending": problem.rope == "appending",
        "rope on reading": problem.rope == "reading",
        "several appends": len(problem.steps) > 1,
        "uneven lengths": len(set(problem.lengths)) > 1,
        "empty sequences": 0 in problem.lengths,
        "packed queries": not isinstance(problem.queries, int),
        "several queries": problem.longest > 1,
        "groups of heads": problem.group > 1,
        "causal": problem.causal is not None,
        "window": problem.window is not None,
        "tree": problem.tree,
        "pairs": problem.boolean,
        "alibi": problem.alibi,
        "soft-cap": problem.softcap is not None,
        "sinks": problem.sinks,
        "head_dim of values": problem.head_dim != problem.head_dim_v,
        "given splits": problem.num_splits is not None,
    }
    return {name for name, is_so in found.items() if is_so}


def kinds_of_linear(problem: LinearProblem) -> set[str]:
    """The kinds of a call of linear attention."""
    lengths = problem.lengths or (problem.seqlen_q,)
    found = {
        "no token": problem.seqlen_q == 0 or problem.seqlen_k == 0,
        "several chunks": max(lengths, default=0) > 64,
        "causal": problem.causal,
        "normalised": problem.normalize,
        "hidden tokens": problem.valid is not None,
        "NaN in hidden tokens": problem.poisoned and (problem.valid is not None or problem.lengths is not None),
        "packed": problem.lengths is not None,
        "initial state": problem.initial_state,
        "gradients of the state": problem.return_state,
        "groups of heads": problem.nheads_q > problem.nheads_kv,
        "head_dim of values": problem.head_dim_v not in (None, problem.head_dim),
        "functions": problem.feature_map in ("jit", "torch"),
        "random features": problem.feature_map == "favor",
        "strided": problem.transposed,
    }
    return {name for name, is_so in found.items() if is_so}


def kinds_of_fp8(problem: FP8Problem) -> set[str]:
    """The kinds of a call in 8 bits."""
    case = problem.case
    found = {
        "several blocks of 128 tokens": case.seqlen_k > 128,
        "one scale": problem.precision.scales == "tensor",
        "rotated": problem.precision.rotate,
        "numbers behind padding": problem.hidden is not None and case.padding is not None,
        "NaN in keys that nobody sees": problem.unseen is not None,
        "strided": problem.transposed,
        "other sizes": problem.size != 1.0,
        "masked": bool(case.causal or case.boolean or case.tree or case.window or case.documents or case.sparse),
        "blocks": case.layout is not None,
        "rope": case.rope is not None,
        "norm": case.qk_norm is not None,
        "changed scores": bool(case.bias or case.alibi or case.relative or case.softcap or case.score_mod),
        "dropout": case.dropout_p > 0,
    }
    return {name for name, is_so in found.items() if is_so}


SUBJECTS = {
    "calls": Subject(problems(), contract.check, kinds_of_call, "docs/results/fuzz.json"),
    "caches": Subject(cached_problems(), cached_contract.check, kinds_of_cached, "docs/results/fuzz_caches.json"),
    "fp8": Subject(fp8_problems(), fp8_contract.check, kinds_of_fp8, "docs/results/fuzz_fp8.json"),
    "linear": Subject(linear_problems(), linear_contract.check, kinds_of_linear, "docs/results/fuzz_linear.json"),
}


def summary(results: dict[str, Any]) -> str:
    """The results in one line."""
    dtypes = ", ".join(f"{name} {n}" for name, n in results["by_dtype"].items())
    packages = ", ".join(f"{name} {results['versions'][name]}" for name in ("torch", "triton"))
    return (
        f"{results['problems']} problems ({dtypes}), {results['compared_with_float64']} compared with float64, "
        f"{len(results['failures'])} failures, {results['seconds']} s, {results['device']}, {packages}"
    )


def main(n_problems: int, path: Path, subject: Subject) -> int:
    """Try the problems that failed before, then at least `n_problems` new ones; 1 if any failed."""
    tally, database = Tally(subject), DirectoryBasedExampleDatabase(DATABASE)
    phases, shown = [Phase.reuse, Phase.generate, Phase.shrink], 0
    try:
        while tally.count["problems"] < n_problems and len(tally.failures) < MAX_FAILURES:
            tally.run(database=database, phases=phases, max_examples=RUN)
            phases = [Phase.generate, Phase.shrink]
            if tally.count["problems"] >= shown + PROGRESS:
                shown = tally.count["problems"]
                print(f"{shown} problems, {len(tally.failures)} failures", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    results = tally.as_json()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(summary(results))
    return 1 if tally.failures else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check new problems.")
    parser.add_argument("problems", type=int, help="how many, at least")
    parser.add_argument("--of", choices=SUBJECTS, default="calls", help="what to draw")
    parser.add_argument("--out", type=Path, help="the file of results")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = parsed()
    chosen = SUBJECTS[arguments.of]
    sys.exit(main(arguments.problems, arguments.out or Path(chosen.results), chosen))
