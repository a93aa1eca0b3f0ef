"""A fixed sample of the cases of FlashAttention's tests."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

LONGEST = 256  # tokens of a sequence
Case = TypeVar("Case")


def limited(parametrize: Callable[..., Any]) -> Callable[..., Any]:
    """``pytest.mark.parametrize`` without lengths beyond `LONGEST`, or with the first if none is shorter."""

    def of_short(names: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        values = list(values)
        if "seqlen" in str(names) and "seqlen_offsets" not in str(names):
            short = [x for x in values if (max(x) if isinstance(x, tuple) else x) <= LONGEST]
            values = short or values[:1]
        return parametrize(names, values, *args, **kwargs)

    return of_short


def sampled(items: list[pytest.Item], per_function: int) -> list[pytest.Item]:
    """`per_function` cases of each test, at even distances."""
    by_function: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_function[item.nodeid.partition("[")[0]].append(item)
    return [case for cases in by_function.values() for case in _spread(cases, per_function)]


def _spread(cases: list[Case], n: int) -> list[Case]:
    """`n` cases at distances that share no divisor with their number, so that all values of each parameter occur."""
    if len(cases) <= n:
        return cases
    step = int(len(cases) * 0.6180339887)  # far from all small fractions
    while math.gcd(step, len(cases)) != 1:
        step += 1
    return [cases[i] for i in sorted(i * step % len(cases) for i in range(n))]
