"""A few of the cases under pytest-benchmark: ``pytest bench --benchmark-enable``; the tests do not collect this file.

It times the work of ``python -m bench run --quick``, on a GPU until the GPU is done.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.measuring.timing import synchronize
from bench.work import functions, suites
from bench.work.attention import AttentionWork
from bench.work.work import OWN, Work

pytest.importorskip("pytest_benchmark")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAMES = ("forward", "backward", "decode")
WORKS = [work for work in suites.works(list(NAMES), suites.scale_for(DEVICE, quick=True)) if work.priority == 0]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread on a CPU, as ``--quick`` does: for such small work, waiting for threads costs more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("contestant", [OWN, "torch.sdpa-flash", "torch.sdpa-math"])
@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_speed(benchmark, work: Work, contestant: str) -> None:
    assert isinstance(work, AttentionWork)
    try:
        found = work.contestants(DEVICE, functions.choose([]))[contestant]()
        timed = found.set_up()
        timed()
    except NotImplementedError as error:
        pytest.skip(str(error))

    def timed_to_the_end() -> None:
        timed()
        synchronize(DEVICE)

    benchmark.group = work.name
    benchmark(timed_to_the_end)
