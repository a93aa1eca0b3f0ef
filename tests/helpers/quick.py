"""Which cases of a test ``make test`` runs; ``make test-all`` runs every case.

A decorator stands above the ``parametrize`` marks of a test and names its quick cases; the others get the marker
``thorough``. A test that has no quick case has ``@pytest.mark.thorough`` itself. Tests without either are quick.

:func:`pairwise` stands between the two where every combination of values would take too long.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., object])
Case = dict[str, Any]  # argument -> value
Places = tuple[int, ...]  # of a row in each parametrize mark


def only(**wanted: Any) -> Callable[[Test], Test]:
    """Choose the cases in which every named argument has the value given, or satisfies the function given."""
    return _choosing(lambda cases: _with(cases, wanted))


def every(n: int, start: int = 0, **besides: Any) -> Callable[[Test], Test]:
    """Choose every nth case, and each case that :func:`only` would choose for `besides`."""
    return _choosing(lambda cases: {*list(cases)[start::n], *(_with(cases, besides) if besides else ())})


def covering(*, pairs: bool = False) -> Callable[[Test], Test]:
    """Choose few cases with every row of every ``parametrize`` mark; with `pairs`, with every two rows of two marks."""

    return _choosing(lambda cases: _covering(cases, 1 + pairs))


def pairwise(**besides: Any) -> Callable[[Test], Test]:
    """Leave out cases: those stay in which every two rows of two marks meet, and all that :func:`only` would choose."""

    def decorate(test: Test) -> Test:
        cases = _cases_of(test)
        kept = _covering(cases, 2) | (_with(cases, besides) if besides else set())
        vars(test)["kept_cases"] = {places: case for places, case in cases.items() if places in kept}
        return test

    return decorate


def is_kept(item: pytest.Item) -> bool:
    """Whether :func:`pairwise` has left an item in."""
    kept = getattr(getattr(item, "function", None), "kept_cases", None)
    return kept is None or _is_among(item, kept.values())


def _covering(cases: Mapping[Places, Case], n: int) -> set[Places]:
    """Few cases with every combination of rows of `n` marks that occurs in `cases`."""
    parts = {places: set(itertools.combinations(enumerate(places), n)) for places in cases}
    missing: set[object] = set().union(*parts.values())
    chosen: set[Places] = set()
    uses: Counter[object] = Counter()
    while missing:
        # The first of those that add most and repeat least.
        best = max(cases, key=lambda places: (len(parts[places] & missing), -sum(uses[x] for x in enumerate(places))))
        chosen.add(best)
        missing -= parts[best]
        uses.update(enumerate(best))
    return chosen


def _with(cases: Mapping[Places, Case], wanted: Case) -> set[Places]:
    def fits(case: Case) -> bool:
        return all(want(case[name]) if callable(want) else case[name] == want for name, want in wanted.items())

    return {places for places, case in cases.items() if fits(case)}


def _choosing(choose: Callable[[Mapping[Places, Case]], set[Places]]) -> Callable[[Test], Test]:
    """Return a decorator that stores the quick cases that `choose` takes from all."""

    def decorate(test: Test) -> Test:
        cases = getattr(test, "kept_cases", None) or _cases_of(test)
        chosen = choose(cases)
        assert chosen, f"{test.__name__} has no quick case"
        return pytest.mark.quick([cases[places] for places in chosen])(test)

    return decorate


def _cases_of(test: Callable[..., object]) -> dict[Places, Case]:
    """Every combination of rows of the ``parametrize`` marks of a test."""
    axes = [mark.args for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    cases: dict[Places, Case] = {}
    for places in itertools.product(*(range(len(values)) for _, values in axes)):
        cases[places] = {}
        for place, (names, values) in zip(places, axes, strict=True):
            cases[places] |= _row(names, list(values)[place])
    return cases


def _row(names: str | Sequence[str], row: Any) -> Case:
    """The arguments that one row of a ``parametrize`` mark gives."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    if isinstance(row, type(pytest.param())):
        row = row.values
    elif len(names) == 1:
        row = (row,)
    return dict(zip(names, row, strict=True))


def mark(item: pytest.Item) -> None:
    """Give an item that is no quick case the marker ``thorough``."""
    if (quick := item.get_closest_marker("quick")) is None:
        return
    if not _is_among(item, quick.args[0]):
        item.add_marker("thorough")


def _is_among(item: pytest.Item, cases: Iterable[Case]) -> bool:
    """Whether the case of an item is one of `cases`; by identity, because values may be tensors."""
    case = item.callspec.params  # type: ignore[attr-defined]
    cases = list(cases)
    assert set(cases[0]) == set(case), f"{item.nodeid}: a parametrize mark stands above the choice of cases"
    return any(all(value is case[name] for name, value in other.items()) for other in cases)
