"""bench/scaling counts the bytes that the real modes send, and those that their operators read, write and keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from bench.scaling import stages
from bench.scaling.stages import MODES, Mode, Model, Share
from tests.conftest import INTERPRETING
from tests.distributed.counted import Pass, counted
from tests.distributed.processes import in_processes
from tests.helpers import quick

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo"),
    pytest.mark.skipif(not INTERPRETING, reason="the processes of these tests are CPU processes"),
]

TOKENS = 24  # of each process
MODELS = {
    "a KV head for each query head": Model(16, 16, 128),
    "grouped": Model(16, 8, 128),
    "a KV head for all": Model(16, 1, 128),
}
MESHES = ("ring, ulysses", "all_gather, ulysses")


class Counted:
    """The counts by number of processes; all modes of one run share processes, which start slowly."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[int, list[dict[tuple[Mode, Model], tuple[Pass, Pass]]]] = {}

    def passes(self, world: int, mode: Mode, model: Model) -> list[tuple[Pass, Pass]]:
        """(forward, backward) of each process."""
        if world not in self._known:
            modes = [mode for mode in MODES if world == 4 or mode not in MESHES]
            arguments = modes, list(MODELS.values()), TOKENS
            self._known[world] = in_processes(world, self._directory / str(world), counted, *arguments)
        return [found[mode, model] for found in self._known[world]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    return Counted(tmp_path_factory.mktemp("counted"))


RUNS = [(world, mode) for world in (2, 4) for mode in MODES if world == 4 or mode not in MESHES]


@quick.only(world=2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("world", "mode"), RUNS)
def test_bytes_are_those_of_the_modes(found: Counted, world: int, mode: Mode, name: str) -> None:
    share, plan = Share(MODELS[name], TOKENS), stages.layout(mode, world, per_node=2)
    expected = stages.forward(share, plan), stages.backward(share, plan, recomputed=1)
    for passes in found.passes(world, mode, MODELS[name]):
        for of_mode, counts in zip(expected, passes, strict=True):
            assert stages.sent_bytes(of_mode) == counts.sent
            assert stages.messages(of_mode) == counts.messages
            assert stages.moved_bytes(of_mode) == counts.moved
        assert stages.kept_bytes(share, plan) == passes[0].kept


@quick.only(world=2)
@pytest.mark.parametrize("world", [2, 4])
def test_shares_of_a_ring_that_are_under_way(found: Counted, world: int) -> None:
    share = Share(MODELS["grouped"], TOKENS)
    expected = [n * 2 * share.model.element_bytes * share.k for n in stages.SHARES_UNDER_WAY]
    for passes in found.passes(world, "ring", share.model):
        assert [counts.under_way for counts in passes] == expected
