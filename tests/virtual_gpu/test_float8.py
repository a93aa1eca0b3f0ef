"""Kernels that multiply e4m3, as Triton compiles them for sm_90 and sm_89."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from fusedattn.kernels.versions import TRITON_VERSION
from tests.helpers import quick
from tests.virtual_gpu.processes import Process, answering

FENCED = TRITON_VERSION >= (3, 7, 1)  # whether a fence is between cp.async and wgmma
LATE = {"asynchronous": "late", "fenced_copies": FENCED}
EARLY = {"asynchronous": "early", "fenced_copies": FENCED}
RANDOM = {"asynchronous": "random", "fenced_copies": FENCED, "schedule": "random", "seed": 1}


@pytest.fixture(scope="module")
def kernels() -> Iterator[Process]:
    with answering("tests.virtual_gpu.float8") as process:
        yield process


def _passes(kernels: Process, kind: str, capability: int, sizes: list[Any], settings: dict[str, Any]) -> None:
    said, instructions = kernels.ask([kind, capability, sizes, "", settings])
    assert said == "right"
    if "product" in kind:
        multiplies = "wgmma" if capability == 90 else "mma.sync"
        products = [x for x in instructions if "mma" in x]
        assert products
        assert all(x.startswith(multiplies) and "e4m3.e4m3" in x for x in products)


@quick.only(num_warps=4, sizes=[64, 64, 64])
@pytest.mark.parametrize("capability", [90, 89])
@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize("sizes", [[64, 64, 64], [128, 128, 128], [64, 32, 32], [128, 64, 256], [64, 256, 64]])
def test_a_product(kernels: Process, sizes: list[int], num_warps: int, capability: int) -> None:
    _passes(kernels, "product", capability, [*sizes, num_warps], LATE)


WAYS = {"sm_89": (89, False), "pointers": (90, False), "descriptors": (90, True)}


@quick.covering()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[64, 64, 64, 4], [128, 128, 128, 8], [128, 32, 64, 4], [64, 64, 32, 4],
                                   [128, 64, 128, 8], [64, 64, 256, 4], [64, 128, 64, 8]])  # fmt: skip
def test_a_result_that_is_multiplied(kernels: Process, sizes: list[int], stages: int, way: str) -> None:
    """It becomes e4m3, and moves among the threads of a warp from accumulators to operands."""
    capability, descriptors = WAYS[way]
    for settings in (LATE, EARLY, RANDOM) if sizes[0] == 64 else (LATE,):
        _passes(kernels, "two products", capability, [*sizes, stages, descriptors], settings)


@pytest.mark.parametrize("capability", [90, 89])
@pytest.mark.parametrize(("kind", "between"), [
    ("narrowed", []), ("widened", ["float32"]), ("widened", ["float16"]), ("widened", ["bfloat16"]),
])  # fmt: skip
def test_conversions_of_tiles(kernels: Process, kind: str, between: list[str], capability: int) -> None:
    _passes(kernels, kind, capability, between, LATE)


@pytest.mark.skipif(TRITON_VERSION > (3, 9, 0), reason="a later Triton may have mended it")
def test_sums_apart_are_read_before_the_wait(kernels: Process) -> None:
    """With max_num_imprecise_acc; the assembler inserts waits, and then no two products overlap."""
    said, _ = kernels.ask(["product", 90, [64, 64, 128, 4, 64], "", LATE])
    assert re.match(r"AsyncError: add\.f32, at float8\.py:\d+: uses \S+, which belongs to a product", said)
    _passes(kernels, "product", 89, [64, 64, 128, 4, 64], LATE)


FENCE, WAIT, PROXY = r"wgmma\.fence", r"wgmma\.wait_group", r"fence\.proxy\.async"
COPIED, ARRIVED = r"cp\.async\.wait_group", r"mbarrier\.arrive\.expect_tx"


@pytest.mark.parametrize(("way", "removed", "says"), [
    ("product", FENCE, "no wgmma.fence before it"),
    ("product", WAIT, "not complete"),
    ("product", PROXY, "no fence.proxy.async"),
    ("pointers", FENCE, "no wgmma.fence before it"),
    ("pointers", WAIT, "not complete"),
    ("pointers", PROXY, "no fence.proxy.async"),
    ("pointers", COPIED, "RaceError"),
    ("descriptors", WAIT, "not complete"),
    ("descriptors", ARRIVED, "DeadlockError"),
    ("sm_89", COPIED, "RaceError"),
    ("sm_89", r"bar\.sync", "RaceError"),
])  # fmt: skip
def test_what_is_missing_is_found(kernels: Process, way: str, removed: str, says: str) -> None:
    if way == "product":
        said, _ = kernels.ask(["product", 90, [64, 64, 64, 4], removed, LATE])
    else:
        capability, descriptors = WAYS[way]
        said, _ = kernels.ask(["two products", capability, [64, 64, 64, 4, 2, descriptors], removed, LATE])
    assert says in said
