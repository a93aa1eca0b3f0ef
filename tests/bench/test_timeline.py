"""Warps that wait for each other, on the timeline: traces by hand, and clocks that follow from them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from bench.codegen.hardware import MACHINES
from bench.codegen.loops import Order, Step
from bench.codegen.timeline import TENSOR, Action, Timeline, replay

# Clocks are easy to follow if a wait costs no more than it must.
H200 = replace(MACHINES["sm_90"], latencies=MACHINES["sm_90"].latencies | {"shared": 0, "memory": 100}, port_bytes=32)
FULL, EMPTY, FIRST, SECOND = range(4)  # mbarriers
BLOCKS = 12
ISSUE = Action(Step("issue"))
ALL = Action(Step("wait", pending=0), label="products")


def product(clocks: int, label: str = "scores") -> Action:
    """Keeps the tensor core of a scheduler busy for so many clocks."""
    return Action(Step("wgmma", macs=clocks * 512, commits=True), label=label)


def wait(barrier: int, phases: int, label: str = "turn") -> Action:
    return Action(Step("issue"), "wait", barrier, phases, label)


def arrive(barrier: int, n_bytes: int = 0) -> Action:
    return Action(Step("issue"), "arrive", barrier, n_bytes)


def copy(barrier: int, n_bytes: int) -> Action:
    return Action(Step("tma"), "copy", barrier, n_bytes)


def pair(of_products: int, of_weights: int, *, turns: bool) -> Timeline:
    """Two groups that multiply and then compute weights, in every block."""
    parties = {}
    for own, other, name in ((FIRST, SECOND, "group 1"), (SECOND, FIRST, "group 2")):
        # Of the second, the first turn comes by the first group.
        actions = []
        for i in range(BLOCKS):
            actions += [wait(own, i + 1)] if turns else []
            actions += [product(of_products), *([arrive(other)] if turns else []), ALL, *[ISSUE] * of_weights]
        parties[name] = actions
    return replay(parties, H200, {FIRST: 1, SECOND: 1}, begun=[FIRST])


def steady(found: Timeline) -> tuple[float, float]:
    """The clocks between two products of the first group, and the share of them that is busy, of the middle blocks."""
    starts = [x.start for x in found.intervals if x.place == TENSOR and x.party == "group 1"]
    a, b = starts[3], starts[-3]
    return (b - a) / (len(starts) - 6), found.busy(a, b)


def test_a_pair_that_takes_turns_keeps_the_tensor_core_busy() -> None:
    """100 clocks of products and fewer of weights, each: the weights of one hide behind the products of the other."""
    clocks, busy = steady(pair(100, 90, turns=True))
    assert clocks == 200
    assert busy == 1.0


@pytest.mark.parametrize(("weights", "least"), [(150, 300), (110, 220)])
def test_weights_that_take_longer_than_the_products_of_the_other(weights: int, least: int) -> None:
    """Both groups issue their weights by one scheduler, which bounds them: one instruction a clock."""
    clocks, busy = steady(pair(100, weights, turns=True))
    assert least <= clocks <= least + 10
    assert busy == pytest.approx(200 / clocks)


def test_weights_that_wait_for_their_latency() -> None:
    """100 clocks of products and 50 instructions at 3 clocks each: a group alone needs 250, without contention."""
    slow = [Action(Step("issue", order=Order(stall=3)))] * 50
    parties = {name: [x for _ in range(BLOCKS) for x in (product(100), ALL, *slow)] for name in ("group 1", "group 2")}
    clocks, busy = steady(replay(parties, H200, {}))
    assert 250 <= clocks <= 260
    assert busy == pytest.approx(200 / clocks)


def test_issue_is_shared() -> None:
    """Both groups compute weights at a time: one instruction a clock in all."""
    parties = {name: [ISSUE] * 100 for name in ("group 1", "group 2")}
    found = replay(parties, H200, {})
    assert max(map(max, found.issued.values())) == 199
    alone = replay({"group 1": [ISSUE] * 100}, H200, {})
    assert max(alone.issued["group 1"]) == 99


def test_pipes_and_control_bits() -> None:
    """A special function occupies its pipe for 8 clocks; a stall of 4 lets the other warp issue."""
    mufu = [Action(Step("mufu"))] * 10
    assert replay({"a": mufu}, H200, {}).issued["a"][-1] == 72
    slow = [Action(Step("issue", order=Order(stall=4)))] * 10
    found = replay({"a": slow, "b": slow}, H200, {})
    assert max(found.issued["a"][-1], found.issued["b"][-1]) == 37


def test_products_run_in_the_order_of_issue() -> None:
    """The second group's product waits for both of the first; a wait for all but one ends with the first."""
    first = [product(100), product(50, "values"), Action(Step("wait", pending=1), label="products"), ISSUE]
    found = replay({"group 1": first, "group 2": [ISSUE, product(10), ALL]}, H200, {})
    tensor = [(x.label, x.party, x.start, x.end) for x in found.intervals if x.place == TENSOR]
    # Group 1 issues at clocks 0 and 2, group 2 at 1 and 3.
    assert tensor == [
        ("scores", "group 1", 0, 100),
        ("values", "group 1", 100, 150),
        ("scores", "group 2", 150, 160),
    ]
    assert found.issued["group 1"][2:] == [100, 101]
    assert found.waiting("group 2", 0, 200) == {"products": pytest.approx(160 - 4, abs=1)}


def test_tiles_come_after_latency_and_bandwidth() -> None:
    """Two copies of 3200 bytes: 100 clocks each on the way, one after the other, and 100 of latency."""
    tiles = (0, 4)
    producer = [x for full in tiles for x in (arrive(full, 3200), copy(full, 3200))]
    reader = [x for full in tiles for x in (wait(full, 1, "tile"), ISSUE)]
    found = replay({"producer": producer, "reader": reader}, H200, dict.fromkeys(tiles, 1))
    sent = found.issued["producer"]
    at = found.issued["reader"]
    assert (at[0], at[2]) == (sent[1] + 200, sent[1] + 300)
    assert found.waiting("reader", 0, 400) == {"tile": pytest.approx(300, abs=4)}


def test_a_ring_of_one_tile() -> None:
    """The producer waits for both readers of a phase before it asks again."""
    n = 5
    producer, reader = [], []
    for i in range(n):
        producer += [wait(EMPTY, i, "empty"), arrive(FULL, 320), copy(FULL, 320)]
        reader += [wait(FULL, i + 1, "tile"), *[ISSUE] * 40, arrive(EMPTY)]
    found = replay({"producer": producer, "a": reader, "b": reader}, H200, {FULL: 1, EMPTY: 2})
    ends = [found.issued["producer"][3 * i + 2] for i in range(n)]
    gaps = [b - a for a, b in itertools.pairwise(ends)]
    # 10 clocks on the way, 100 of latency, and 82 instructions of both readers.
    assert all(190 <= gap <= 202 for gap in gaps), gaps


def test_a_party_that_waits_for_ever() -> None:
    with pytest.raises(ValueError, match=r"^parties: a, b wait for ever$"):
        replay({"a": [wait(FULL, 1)], "b": [wait(FULL, 2)], "c": [arrive(EMPTY)]}, H200, {FULL: 1, EMPTY: 1})
