"""Calls that append to a cache and attend to it, drawn at random, and proof that a broken one is detected."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import KVCache, caches
from tests.conftest import INTERPRETING
from tests.helpers import cached_contract, cached_refusals, quick
from tests.helpers.cached_contract import check
from tests.helpers.cached_problem import CachedProblem
from tests.helpers.cached_refusals import WRONG
from tests.helpers.cached_strategies import cached_problems
from tests.tools import fuzz, reproduce

UNEVEN = ((5, 0, 17), (1, 1, 1), (12, 0, 1))

# Problems that random ones rarely contain, and problems that have failed.
PROBLEMS = {
    "a ring that turns twice, rotated": CachedProblem(
        ((5, 2, 17), (1, 1, 1), (12, 0, 1)), queries=3, layout="pages of 4", room=7, ring=2, rope="appending",
        causal="bottom_right",
    ),
    "everything packed": CachedProblem(
        UNEVEN, queries=(3, 0, 5), dtype=torch.bfloat16, form="int4, groups of 4", layout="pages of 16",
        rope="reading", positions=True, tree=True, boolean=True, alibi=True, sinks=True, softcap=2.0, num_splits=3,
    ),
    "NaN in padding that is longer than a sequence": CachedProblem(
        UNEVEN, queries=2, dtype=torch.float16, form="e5m2", layout="rows", padding=(0, 3, 40), poisoned=True
    ),
    "positions of padded tokens": CachedProblem(
        ((2, 2), (9, 9)), form="e4m3, given", packed=False, counted=True, rope="appending", positions=True,
    ),
    "heads of one feature, in the order of channels_last": CachedProblem(
        ((1,),), queries=(1,), room=3, nheads_kv=1, group=2, head_dim=1, head_dim_v=3, scale=-0.3
    ),
    "sinks, and a query not belonging to a sequence": CachedProblem(UNEVEN, queries=(2, 0, 3), sinks=True),
    "latent keys in pages, a chunk": CachedProblem(
        UNEVEN, queries=(2, 0, 3), layout="pages of 16", nheads_kv=1, group=5, head_dim=576, head_dim_v=512,
        latent=True, causal="bottom_right",
    ),
    "latent codes of 4 bits, rotated when read": CachedProblem(
        UNEVEN, queries=(3, 1, 2), form="int4, groups of 4", head_dim=24, latent=True, rope="reading",
        dtype=torch.bfloat16,
    ),
    "rotated codes, of which few are decisive": CachedProblem(
        ((17, 17),), queries=3, dtype=torch.bfloat16, form="int4, groups of 4", layout="pages of 16", room=9,
        nheads_kv=1, group=3, head_dim=8, head_dim_v=8, ring=2, rope="reading", rotary_dim=4, interleaved=True,
        causal="bottom_right", scale=0.1, seed=999999,
    ),
}  # fmt: skip


@quick.every(2)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_the_contract_holds(problem):
    assert check(problem)


# On a GPU most problems compile their own kernels.
@quick.only(seed=0)
@pytest.mark.parametrize("seed", range(6 if INTERPRETING else 2))
def test_the_contract_holds_for_drawn_problems(seed):
    fuzz.checked(seed, check, cached_problems(), max_examples=fuzz.RUN, database=None)()


WITH = [
    CachedProblem(UNEVEN, rope="appending"),
    CachedProblem(UNEVEN, rope="reading", layout="pages of 5"),
    CachedProblem(UNEVEN, ring=2, layout="rows", form="int8"),
    CachedProblem(UNEVEN, latent=True, form="e4m3"),
]


@pytest.mark.parametrize("name", WRONG)
def test_refusals(name):
    """Every one applies to some problem, and is refused by both backends before anything is written."""
    problem = next(problem for problem in WITH if WRONG[name].applies(problem))
    assert not check(replace(problem, wrong=name))


Change = Callable[[Tensor, Tensor, Tensor, KVCache], tuple[Tensor, Tensor, Tensor]]
SMALL = CachedProblem(UNEVEN, queries=2, causal="bottom_right")


def row_too_large(x: Tensor) -> Tensor:
    factor = torch.ones_like(x[:, :, :, :1])
    factor[0, 0, -1] += 1e-4
    return x * factor


def overwritten(cache: KVCache) -> KVCache:
    cache.v[0, 0, 0, 0] = 0.0
    return cache


RUNS = itertools.count()


# What becomes of (out, lse, largest), and how the message begins.
ATTENDED: dict[str, tuple[Change, str]] = {
    "one row of out": (lambda out, lse, most, c: (row_too_large(out), lse, most), "out .*budget"),
    "lse": (lambda out, lse, most, c: (out, lse * (1 + 1e-4), most), "lse .*budget"),
    "the largest score": (lambda out, lse, most, c: (out, lse, most * (1 + 1e-4)), "largest .*budget"),
    "a cache that is modified": (
        lambda out, lse, most, c: (out, lse, most, overwritten(c))[:3], "attention has changed",
    ),
    "numbers that differ between runs": (
        lambda out, lse, most, c: (out * (1 + 5e-7 * next(RUNS)), lse, most), "out alone",
    ),
    "numbers that depend on the batch": (
        lambda out, lse, most, c: (out * (1 + 1e-7 * len(out)), lse, most), "out",
    ),
    "another dtype": (lambda out, lse, most, c: (out, lse.double(), most), "AssertionError"),
    "an exception": (lambda out, lse, most, c: (out.view(7), lse, most), "RuntimeError"),
}  # fmt: skip


ON_TORCH = ("one row of out", "lse", "the largest score", "a cache that is modified")


@pytest.mark.parametrize(
    ("fault", "backend"), [*((fault, "triton") for fault in ATTENDED), *((fault, "torch") for fault in ON_TORCH)]
)
def test_faults_of_attention_are_noticed(monkeypatch, fault, backend):
    change, message = ATTENDED[fault]
    original = cached_contract.attention

    def wrong(q: Tensor, *, cache: KVCache, return_lse: bool = False, return_max: bool = False, **options: Any) -> Any:
        results = change(*original(q, cache=cache, return_lse=True, return_max=True, **options), cache)
        return results[: 3 if return_max else 2] if return_lse else results[0]

    monkeypatch.setattr(cached_contract, "attention", wrong)
    monkeypatch.setattr(cached_contract, "CACHED", (backend,))
    with pytest.raises(AssertionError, match=message) as raised:
        check(SMALL)
    assert str(raised.value).startswith(f"{SMALL.command}\n")


def off_by_one(cache: KVCache) -> None:
    """In the first token of the third sequence."""
    cache.k[2, 1, 0, 3] = cache.k[2, 1, 0, 3] + 1 if cache.format else cache.k[2, 1, 0, 3].nextafter(torch.tensor(9.0))


CODED, ROTATED = (replace(SMALL, **x) for x in ({"form": "int8"}, {"rope": "appending"}))
APPENDED: dict[str, tuple[CachedProblem, Callable[[KVCache], object], str]] = {
    "a number": (SMALL, off_by_one, "k of sequence 2: not the new numbers"),
    "a code": (CODED, off_by_one, "k of sequence 2: code"),
    "a rotated number": (ROTATED, lambda c: c.k.mul_(1.00001), "k of sequence 0: not the new numbers"),
    "a scale": (CODED, lambda c: c.v_scale[0, 0, 0].mul_(1.001), "v of sequence 0: scale"),  # type: ignore[index]
    "memory of no token": (SMALL, lambda c: c.v[1, 1, 30].fill_(0.0), "v: memory of no token"),
    "memory of no sequence": (SMALL, lambda c: c.k[4].fill_(0.0), "k: memory of no token"),
    "two tokens": (SMALL, lambda c: c.k[:, :, :2].copy_(c.k[:, :, :2].flip(2).clone()), "k of sequence 0"),
    "a length": (SMALL, lambda c: c.lengths.add_(1), "AssertionError"),
}


@pytest.mark.parametrize("fault", APPENDED)
def test_faults_of_appending_are_noticed(monkeypatch, fault):
    """They come with the last step."""
    problem, change, message = APPENDED[fault]
    original, steps = caches.append, []

    def wrong(cache: KVCache, k: Tensor, v: Tensor, **options: Any) -> None:
        original(cache, k, v, **options)
        steps.append(k)
        if len(steps) == len(problem.steps):
            change(cache)

    monkeypatch.setattr(caches, "append", wrong)
    with pytest.raises(AssertionError, match=message):
        check(problem)


REFUSED = replace(SMALL, wrong="keys of other heads")


def test_what_is_not_refused_is_noticed(monkeypatch):
    def writes(*_: Any, **options: Any) -> None:
        if "cache" in options:
            overwritten(options["cache"])
            raise ValueError("k: got shape (1,)")

    for function, message in (
        (lambda *_, **__: None, "keys of other heads: not refused"),
        (writes, "keys of other heads: the cache has changed: v"),
    ):
        monkeypatch.setattr(cached_refusals.caches, "append", function)
        with pytest.raises(AssertionError, match=message):
            check(REFUSED)


@pytest.mark.parametrize("problem", [*PROBLEMS.values(), REFUSED], ids=str)
def test_a_problem_prints_as_the_call_that_makes_it(problem):
    """The call also works in a shell, between double quotes."""
    assert reproduce.problem_of(repr(problem)) == problem
    assert not set(repr(problem)) & set('"$`\\!\n')


def test_reproduce(monkeypatch, capsys):
    monkeypatch.setattr(reproduce.sys, "argv", ["reproduce", repr(REFUSED)])
    assert reproduce.main() == 0
    assert capsys.readouterr().out.startswith("holds; the call is refused")


def test_the_long_mode(monkeypatch, tmp_path, capsys):
    """Calls that must be refused count as problems, but not as compared."""
    monkeypatch.setattr(fuzz, "DATABASE", str(tmp_path / "database"))
    subject = fuzz.SUBJECTS["caches"]._replace(check=lambda problem: problem.wrong is None)
    assert fuzz.main(60, tmp_path / "fuzz.json", subject) == 0
    results = json.loads((tmp_path / "fuzz.json").read_text())
    assert results["problems"] == sum(results["by_dtype"].values())
    assert results["problems"] == results["compared_with_float64"] + results["of_these"]["refused"]
    assert results["of_these"]["pages"] > 0
    assert capsys.readouterr().out.startswith(f"{results['problems']} problems (float32 ")
