"""bench/scaling counts the bytes that the real modes send, and those that their operators read, write and keep."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from bench.scaling import stages
from bench.scaling.stages import MODES, Mode, Model, Share
from tests.distributed.counted import Pass, counted
from tests.distributed.processes import NEEDS_PROCESSES, in_processes
from tests.helpers import quick

pytestmark = NEEDS_PROCESSES

TOKENS = 24  # of each process
MODELS = {
    "a KV head for each query head": Model(16, 16, 128),
    "grouped": Model(16, 8, 128),
    "a KV head for all": Model(16, 1, 128),
}
MESHES = ("ring, ulysses", "all_gather, ulysses")


Found = Callable[[int], list[Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """(forward, backward) by mode and model of each process; all modes share processes, which start slowly."""
    directory = tmp_path_factory.mktemp("counted")

    @functools.cache
    def passes(world: int) -> list[dict[tuple[Mode, Model], tuple[Pass, Pass]]]:
        modes = [mode for mode in MODES if world == 4 or mode not in MESHES]
        return in_processes(world, directory / str(world), counted, modes, list(MODELS.values()), TOKENS)

    return passes


RUNS = [(world, mode) for world in (2, 4) for mode in MODES if world == 4 or mode not in MESHES]


@quick.only(world=2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("world", "mode"), RUNS)
def test_bytes_are_those_of_the_modes(found: Found, world: int, mode: Mode, name: str) -> None:
    share, plan = Share(MODELS[name], TOKENS), stages.layout(mode, world, per_node=2)
    expected = stages.forward(share, plan), stages.backward(share, plan, recomputed=1)
    for of_rank in found(world):
        passes = of_rank[mode, MODELS[name]]
        for of_mode, counts in zip(expected, passes, strict=True):
            assert stages.sent_bytes(of_mode) == counts.sent
            assert stages.messages(of_mode) == counts.messages
            assert stages.moved_bytes(of_mode) == counts.moved
        assert stages.kept_bytes(share, plan) == passes[0].kept


@quick.only(world=2)
@pytest.mark.parametrize("world", [2, 4])
def test_shares_of_a_ring_that_are_under_way(found: Found, world: int) -> None:
    share = Share(MODELS["grouped"], TOKENS)
    expected = [n * 2 * share.model.element_bytes * share.k for n in stages.SHARES_UNDER_WAY]
    for of_rank in found(world):
        assert [counts.under_way for counts in of_rank["ring", share.model]] == expected
