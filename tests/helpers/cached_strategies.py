"""Strategies of hypothesis: calls that append to a cache and attend to it, a few of which must be refused."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from tests.conftest import DTYPES
from tests.helpers.cache_model import capacity_of
from tests.helpers.cached_eager import FORMATS, NUMBERS
from tests.helpers.cached_problem import CachedProblem
from tests.helpers.cached_refusals import WRONG

LAYOUTS = ["contiguous", "rows", *(f"pages of {size}" for size in (1, 4, 7, 16, 17, 32))]
MOST = 80  # tokens of a sequence; the interpreter splits keys into parts of 32
SELDOM = st.sampled_from([False, False, False, True])


@st.composite
def cached_problems(draw: st.DrawFn) -> CachedProblem:
    """Problems of every kind; each feature is in some of them."""
    layout, room = draw(st.sampled_from(LAYOUTS)), draw(st.integers(3, 48))
    capacity, batch = capacity_of(layout, room), draw(st.integers(1, 3))
    ring = draw(st.one_of(st.none(), st.none(), st.integers(0, min(3, capacity - 1))))
    padded = (ring or 0) == 0 and draw(SELDOM)
    lengths = [draw(_lengths(layout, capacity, MOST if ring is not None else capacity)) for _ in range(batch)]
    form = draw(st.sampled_from([NUMBERS, NUMBERS, NUMBERS, *FORMATS]))
    latent = draw(SELDOM)
    head_dim, head_dim_v = draw(_head_dims(form, latent))
    problem = CachedProblem(
        steps=draw(_steps(lengths)),
        queries=draw(_queries(batch)),
        dtype=draw(st.sampled_from(DTYPES)),
        form=form,
        layout=layout,
        room=room,
        token_major=draw(SELDOM),
        nheads_kv=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 1, 2, 3, 5])),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        latent=latent,
        ring=ring,
        padding=tuple(draw(st.integers(0, n + 2)) for n in lengths) if padded else None,
        poisoned=padded and draw(st.booleans()),
        packed=draw(st.booleans()),
        counted=draw(SELDOM),
        rope=draw(st.sampled_from([None, None, "appending", "reading"])) if head_dim > 1 else None,
        interleaved=draw(st.booleans()),
        positions=draw(SELDOM),
        causal=draw(st.sampled_from([None, "bottom_right", "bottom_right", "top_left"])),
        window=draw(st.one_of(st.none(), st.none(), st.tuples(_reaches(), _reaches()))),
        tree=draw(SELDOM),
        boolean=draw(SELDOM),
        alibi=draw(SELDOM),
        scale=draw(st.sampled_from([None, None, None, 1.0, 0.1, -0.3])),
        softcap=draw(st.sampled_from([None, None, None, 0.5, 30.0])),
        sinks=draw(SELDOM),
        num_splits=draw(st.sampled_from([None, None, 1, 2, 3, 100])),
        sizes=draw(st.tuples(*[st.sampled_from([1.0, 1.0, 1.0, 1e-3, 30.0])] * 2)),
        seed=draw(st.integers(0, 10**6)),
    )
    problem = replace(problem, rotary_dim=2 * draw(st.integers(1, head_dim // 2)) if head_dim > 1 else 2)
    problem = _allowed(problem)
    if draw(st.sampled_from([False] * 5 + [True])):
        problem = replace(problem, wrong=draw(st.sampled_from([x for x in WRONG if WRONG[x].applies(problem)])))
    return problem


def _reaches() -> st.SearchStrategy[int | None]:
    return st.sampled_from([None, 0, 1, 5, 16, 40])


def _lengths(layout: str, capacity: int, most: int) -> st.SearchStrategy[int]:
    """Lengths at the ends of pages and of the cache, among others."""
    size = capacity_of(layout, 1)
    ends = [0, 1, 2, size - 1, size, size + 1, 2 * size, capacity - 1, capacity, capacity + 1, 2 * capacity + 3]
    ends += [most // 3, most // 2, most // 2 + 1, most - 5, most - 2, most - 1, most]
    return st.one_of(st.integers(0, most), st.sampled_from([n for n in ends if 0 <= n <= most]))


@st.composite
def _steps(draw: st.DrawFn, lengths: list[int]) -> tuple[tuple[int, ...], ...]:
    """The lengths, in one to four steps."""
    n = draw(st.integers(1, 4))
    parts = []
    for length in lengths:
        cuts = sorted(draw(st.lists(st.integers(0, length), min_size=n - 1, max_size=n - 1)))
        parts.append([b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)])
    return tuple(zip(*parts, strict=True))


@st.composite
def _queries(draw: st.DrawFn, batch: int) -> int | tuple[int, ...]:
    """One number for all sequences, or packed ones; seldom more than a small tile has."""
    numbers = st.sampled_from([1, 1, 1, 2, 3, 4, 5, 8, 20])
    return draw(numbers) if draw(st.booleans()) else tuple(draw(st.sampled_from([0, 1, 1, 2, 5])) for _ in range(batch))


def _head_dims(form: str, latent: bool) -> st.SearchStrategy[tuple[int, int]]:
    if latent:  # those of multi-head latent attention have a kernel path of their own
        return st.sampled_from([(16, 16), (24, 16), (40, 8), (576, 512)])
    if form.startswith("int4"):  # groups of 4
        return st.sampled_from([(16, 16), (8, 8), (32, 16), (24, 24) if form == "int4" else (4, 4)])
    return st.tuples(st.sampled_from([1, 3, 8, 16, 16, 24, 40]), st.sampled_from([1, 3, 8, 16, 16, 24, 40]))


def _allowed(problem: CachedProblem) -> CachedProblem:
    """The problem without what the contract excludes: queries before the first key, windows that are overwritten."""
    kept, counts = [len(problem.kept(i)) for i in range(problem.batch)], problem.counts
    if problem.rope is not None and any(count > n for count, n in zip(counts, kept, strict=True)):
        problem = replace(problem, queries=tuple(map(min, counts, kept)))
    if problem.longest == 0:
        problem = replace(problem, queries=(1,) * problem.batch, rope=None)
    left = None if problem.window is None else problem.window[0]
    if problem.ring is not None and left is not None and left + problem.longest > problem.capacity - problem.ring:
        problem = replace(problem, window=None)
    return problem
