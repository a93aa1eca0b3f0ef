"""Triton's own faults on Hopper, found in its PTX: run this file under another Triton by its PYTHONPATH.

Gradients of linear attention were wrong with Triton 3.4 to 3.7.0 (fla-org/flash-linear-attention#640), which was put
down to a transposed result of a product. Its PTX multiplies correctly in every version, also with the operand in
registers; but before 3.7.1 no fence.proxy.async stands between cp.async and the wgmma that reads what it copied
(triton-lang/triton#10537). And a tile that is multiplied and also summed, as in that kernel, is still overwritten by
the next cp.async while wgmma reads it: it has one buffer, and the wait for the product comes later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from fusedattn.kernels.pipelining import FENCES_COPIES
from fusedattn.kernels.versions import TRITON_VERSION
from tests.helpers import quick
from tests.virtual_gpu.processes import Process, answering

SIZES = [(64, 64, 64), (128, 64, 64), (64, 128, 64), (64, 64, 128)]


@pytest.fixture(scope="module")
def kernels() -> Iterator[Process]:
    with answering("tests.virtual_gpu.history") as process:
        yield process


@quick.only(sizes=SIZES[0], num_warps=4, asynchronous="late")
@pytest.mark.parametrize(("stages", "asynchronous"), [(2, "late"), (3, "early")])
@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize("sizes", SIZES)
def test_product_of_a_transposed_result(
    kernels: Process, sizes: tuple[int, int, int], num_warps: int, stages: int, asynchronous: str
) -> None:
    settings = {"asynchronous": asynchronous, "fenced_copies": False}
    assert kernels.ask(["transposed", [*sizes, num_warps, stages], settings]) == "right"


@quick.only(num_warps=4, stages=2)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("num_warps", [4, 8])
def test_fence_between_copies_and_products(kernels: Process, num_warps: int, stages: int) -> None:
    """Required by default."""
    found = kernels.ask(["transposed", [64, 64, 64, num_warps, stages], {}])
    if FENCES_COPIES:
        assert found == "right"
    else:
        assert re.match(r"RaceError: wgmma\S*, at history.py:\d+: no fence.proxy.async after cp.async", found)


@pytest.mark.skipif(TRITON_VERSION > (3, 9, 0), reason="a later Triton may have mended it")
@quick.only(block=64, num_warps=4, stages=2)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize("block", [64, 128])
def test_tile_with_two_uses_is_overwritten(kernels: Process, block: int, num_warps: int, stages: int) -> None:
    found = kernels.ask(["two uses", [block, num_warps, stages], {"fenced_copies": False}])
    assert re.match(r"RaceError: cp.async\S*, at history.py:\d+, overwrites what wgmma\S* .* is still reading", found)


def test_one_stage_has_no_such_race(kernels: Process) -> None:
    assert kernels.ask(["two uses", [64, 4, 1], {}]) == "right"
