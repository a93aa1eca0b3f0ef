"""Faults to plant in the PTX of the kernels for Hopper: mbarriers, rings, fences, waits and barriers, line by line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from fusedattn.testing import Case
from tests.virtual_gpu.planted import BARRIER, Fault, New, Of, Problem

# Asynchronous work late, early and at random, while warps drift apart.
_ORDERS: tuple[dict[str, Any], ...] = (
    {},
    {"asynchronous": "early"},
    {"asynchronous": "random", "schedule": "random", "seed": 0},
)

# Every ring is used again, also from its other phase on: five blocks of keys in the forward and nine in dq; six of
# queries, of two heads, in dkdv; three tiles of one program, of three blocks or one.
_LONG = Case(
    batch=1, nheads_q=1, nheads_kv=1, seqlen_q=68, seqlen_k=516, head_dim=128, causal="bottom_right",
    dtype=torch.bfloat16,
)  # fmt: skip
_HEADS = replace(_LONG, nheads_q=2, seqlen_q=132, seqlen_k=192)
_TURNS = (
    replace(_LONG, seqlen_q=260, seqlen_k=300, causal=None),
    replace(_LONG, seqlen_q=260, seqlen_k=100, causal=None),
)
_WINDOW = replace(_LONG, seqlen_q=260, seqlen_k=400, window=(200, 0))  # masked blocks at both ends of the range

FWD, DKDV, DQ = "hopper_fwd", "hopper_bwd_dkdv", "hopper_bwd_dq"
PROBLEMS = {
    "long": Problem("sm_90", (_LONG,), {}, _ORDERS, by_hopper=True),
    "heads": Problem("sm_90", (_HEADS,), {}, _ORDERS, DKDV, by_hopper=True),
    "turns": Problem("sm_90", _TURNS, {}, _ORDERS, FWD, by_hopper=True),
    "window": Problem("sm_90", (_WINDOW,), {}, _ORDERS, FWD, by_hopper=True),
}
# For a fault of one kernel of the backward: kernels that need not run, and their results.
BESIDE = {DKDV: ((DQ, "attention_bwd_dq"), ("dq",)), DQ: ((DKDV, "attention_bwd_dkdv"), ("dk", "dv"))}
_TURN, _WINDOWED = ("turns", FWD), ("window", FWD)
_ONCE = (("long", FWD), ("heads", DKDV), ("long", DQ))  # each kernel
_EACH = (*_ONCE, _TURN)  # each ring
_ALL = (*_EACH, _WINDOWED)  # each loop

_WAIT = r"mbarrier\.try_wait\S*\s+(\w+), \[(%r\d+)\], (%r\d+|\d);"
_ARRIVE = r"(?:@!?%p\d+ )?mbarrier\.arrive\.shared.*"
_EXPECT = r"((?:@!?%p\d+ )?mbarrier\.arrive\.expect_tx.*, )(\d+);"
_COPY = r"^(\s*(?:@!?%p\d+ )?cp\.async\.bulk\.tensor\S* \[(%r\d+)\], .*)$"
_GROUPS_LEFT = r"(wgmma\.wait_group\S*\s+)(\d+)"


def _moved(register: int, n: int) -> str:
    """The line with `n` more in the register of a group."""
    return rf"add.s32 \{register}, \{register}, {n};\n\g<0>\nsub.s32 \{register}, \{register}, {n};"


def _other_parity(found: re.Match[str]) -> str:
    if found[3].isdigit():
        return f"{found[0][:-2]}{1 - int(found[3])};"
    flip = f"xor.b32 {found[3]}, {found[3]}, 1;"
    return f"{flip}\n{found[0]}\n{flip}"


def _bytes(numerator: int) -> Callable[[re.Match[str]], str]:
    """Halves of what was expected."""
    return lambda found: f"{found[1]}{int(found[2]) * numerator // 2};"


def _one_more(found: re.Match[str]) -> str:
    return f"{found[1]}{int(found[2]) + 1}"


def _each(lines: Iterable[tuple[str, Sequence[int | None]]], reason: str) -> tuple[tuple[Of, str], ...]:
    """Lines of these texts, and which of them."""
    return tuple((Of(text, nth), reason) for text, numbers in lines for nth in numbers)


_ALL_OF = (None,)
_BRANCH = _each(
    [("# a branch, over which", _ALL_OF)],
    "the wait before it is for the same phase; this one keeps the assembler from moving instructions",
)
_ONE_TILE = _each(
    [("q.empty.index(0)", _ALL_OF), ("q.empty.index(1)", _ALL_OF), ("k.empty", [0]), ("v.empty", [0])],
    "a program has one tile, and its first block finds all slots free",
)
_FIRST = "the predicate of the first block is false: there is no tile before"
_ROOMS = {
    DKDV: _each(
        [("dout.empty", _ALL_OF)],
        "each group releases dout before the queries of its block, for which the wait comes first",
    ),
    DQ: _each(
        [("v.empty", _ALL_OF)],
        "each group releases the values before the keys of their block, for which the wait comes first",
    ),
}


def _on(
    places: tuple[tuple[str, str], ...],
    what: str,
    old: str,
    new: New,
    harmless: dict[tuple[str, str], tuple[tuple[int | Of, str], ...]] | None = None,
) -> Iterator[Fault]:
    for place in places:
        yield Fault(what, *place, old, new, None, (harmless or {}).get(place, ()))


# With turns, the second group waits for an arrival of the first, which has waited for the same tiles.
_AFTER_A_TURN = _each(
    [("k.full.index(total", [1]), ("k.full.index(slot)", [1]), ("v.full.index(before)", [2])],
    "the group whose arrival gives it the turn has waited for the same",
)
_BETWEEN_TILES = (
    (
        Of("turns.index(GROUP), total", 0),
        "the first group is one turn ahead; two, in tiles of one block, need rare orders",
    ),
    (
        Of("k.empty", 0),
        "the wait for free values of the block before implies it; in tiles of one block, only rare orders show it",
    ),
    (Of("v.empty", 0), "both groups release these values before the queries of their tile, whose waits come first"),
)

_HARMLESS_WAITS = {
    ("long", FWD): (*_BRANCH, *_ONE_TILE),
    ("window", FWD): (*_BRANCH, *_ONE_TILE),
    ("heads", DKDV): _ROOMS[DKDV],
    ("long", DQ): (*_BRANCH, *_ROOMS[DQ]),
    _TURN: (*_BRANCH, *_AFTER_A_TURN, *_BETWEEN_TILES),
}
_NO_TURNS = ((0, "nobody takes turns"),)
_LAST_TILE = _each([("q.empty", _ALL_OF)], "a program has one tile, so nobody waits for free queries")
_READS = "the group writes no shared memory, and mbarriers order what it reads"
_HARMLESS_BARRIERS = {
    ("long", FWD): (
        *_each([("tma.store_wait(0)", _ALL_OF)], "a program has one tile: no box was stored before, none is after"),
        *_each([("wait(q.full", _ALL_OF), ("wait(k.full", _ALL_OF), ("# a branch, over which", _ALL_OF)], _READS),
        *_each([("wait(v.full.index(slot)", _ALL_OF)], _READS),
        *_each([("q.empty", _ALL_OF), ("v.empty.index(slot)", _ALL_OF)], "a program has one tile, which ends here"),
        (Of("k.empty.index(slot)"), "the barrier before the release of values follows, whose wait comes first"),
    ),
    ("heads", DKDV): (
        *_each([("dout.empty", _ALL_OF)], "the barrier before the release of queries follows, whose wait comes first"),
        *_each([("q.empty", _ALL_OF)], "the barrier before the release of dout has ordered the same reads"),
        *_each([("own.full.index(1)", _ALL_OF), ("mine.shift", _ALL_OF)], _READS),
    ),
    ("long", DQ): (
        *_each([("k.empty", [0, 1])], _FIRST),
        *_each([("v.empty", _ALL_OF)], "the barrier before the release of keys follows, whose wait comes first"),
        *_each([("# a branch, over which", _ALL_OF), ("return warpgroup_mma", _ALL_OF)], _READS),
    ),
}
_HARMLESS_ARRIVALS = {
    ("long", FWD): (*_NO_TURNS, *_LAST_TILE),
    ("window", FWD): (*_NO_TURNS, *_LAST_TILE),
    ("heads", DKDV): _each([("dout.empty", [0, 1]), ("q.empty", [0, 1])], _FIRST),
    ("long", DQ): _each([("k.empty", [0, 1])], _FIRST),
}

# fmt: off
FAULTS = (
    *_on(_ALL, "a wait for an mbarrier removed", _WAIT, r"setp.eq.u32 \1, 0, 0;", _HARMLESS_WAITS),
    *_on(_EACH, "the other parity of a wait", _WAIT, _other_parity),
    *_on(_ALL, "an arrival removed", _ARRIVE, "", _HARMLESS_ARRIVALS),
    *_on(_EACH, "an arrival doubled", _ARRIVE, r"\g<0>\n\g<0>", _HARMLESS_ARRIVALS),
    *_on(_EACH, "an mbarrier for one arrival of two", r"(mbarrier\.init.*, )2;", r"\g<1>1;"),
    *_on(_ONCE, "half of the bytes expected", _EXPECT, _bytes(1)),
    *_on(_ONCE, "more bytes expected", _EXPECT, _bytes(3)),
    *_on(_EACH, "a copy to the next slot", _COPY, _moved(2, 16384)),
    *_on(_EACH, "a fence between proxies removed", r"fence\.proxy\.async.*", ""),
    *_on((_TURN,), "a wait for a stored box removed", r"cp\.async\.bulk\.wait_group.*", ""),
    *_on((_TURN,), "a commit of a stored box removed", r"cp\.async\.bulk\.commit_group.*", ""),
    *_on(_ALL, "a wait for products removed", r"wgmma\.wait_group.*", ""),
    *_on(_EACH, "a wait for products leaves one more group", _GROUPS_LEFT, _one_more),
    *_on(_ONCE, "a barrier of a group removed", BARRIER, "", _HARMLESS_BARRIERS),
)
# fmt: on

# Of these, lines for the quick tests.
_QUICK = {
    "a wait for an mbarrier removed": 16,
    "the other parity of a wait": 4,
    "an arrival removed": 0,
    "an arrival doubled": 0,
    "an mbarrier for one arrival of two": 0,
    "a copy to the next slot": 0,
    "a fence between proxies removed": 0,
    "a wait for a stored box removed": 0,
    "a wait for products removed": 0,
}
QUICK = tuple(
    replace(fault, what=f"{fault.what}, in one line", nth=_QUICK[fault.what], harmless=())
    for fault in FAULTS
    if (fault.problem, fault.kernel) == _TURN and fault.what in _QUICK
)
FAULTS += QUICK
