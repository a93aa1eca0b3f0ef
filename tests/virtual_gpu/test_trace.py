"""The traced events of warps: PTX by hand, whose order is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedattn.virtual_gpu.tensor_map import TensorMap
from fusedattn.virtual_gpu.trace import Event, Trace
from tests.helpers.counted_ptx import SHARED, aligned, counted, kernel_of
from tests.helpers.ptx_kernels import launch

# The first of two warps asks for a box of 256 bytes; the second waits for it and releases it. The first waits for that.
HANDED_OVER = """
    add.s32 %r20, %s, 8192;
    add.s32 %r24, %s, 8200;
    setp.eq.s32 %p0, %t, 0;
    setp.eq.s32 %p3, %t, 32;
    setp.ge.u32 %p2, %t, 32;
    mov.b32 %r21, 0;
    @%p0 mbarrier.init.shared::cta.b64 [%r20], 1;
    @%p0 mbarrier.init.shared::cta.b64 [%r24], 1;
    bar.sync 0;
    @%p2 bra second;
    @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 256;
    @%p0 {copy} [%s], [%map, {{%r21, %r21}}], [%r20];
empty:
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r24], 0;
    @!%p1 bra empty;
    bra end;
second:
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r20], 0;
    @!%p1 bra second;
    ex2.approx.ftz.f32 %r43, %r44;
    add.s32 %r45, %r45, 1;
    add.s32 %r45, %r45, 1;
    @%p3 mbarrier.arrive.shared::cta.b64 _, [%r24];
end:
    bar.sync 1, 64;
""".format(copy="cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes")
PRODUCTS = """
    wgmma.fence.sync.aligned;
    wgmma.commit_group.sync.aligned;
    mov.b32 %r50, 1;
    wgmma.wait_group.sync.aligned 1;
    wgmma.wait_group.sync.aligned 0;
"""


def traced(body: str, n_threads: int = 64, n_programs: int = 1, **settings: Any) -> Trace:
    tensor = aligned(256)
    box = TensorMap(tensor.data_ptr(), (8, 32), (128, 4), (4, 16), 4, 0, is_float=True)
    offsets = torch.zeros(n_threads, dtype=torch.int32)
    tensors = {"out": offsets, "x": tensor, "offsets": offsets}
    grid, kernel = (n_programs, 1, 1), kernel_of(body, n_threads)
    found = launch(kernel, tensors, {"map": box}, grid=grid, shared_bytes=SHARED, tracing=True, **settings)
    assert found.counters.trace is not None
    return found.counters.trace


def short(events: list[Event]) -> list[tuple[str, int, int]]:
    """Events, with mbarriers as their distance from the first one."""
    first = min((x.barrier for x in events if x.what in ("init", "wait", "arrive", "copy")), default=0) // 64 * 64
    return [(x.what, x.barrier - (x.what not in ("barrier", "products", "commit")) * first, x.amount) for x in events]


@pytest.mark.parametrize("asynchronous", ["early", "late"])
def test_a_box_that_is_handed_over(asynchronous: str) -> None:
    """Whatever the order: a wait is one event, however often it was tried. Programs have events of their own."""
    found = traced(HANDED_OVER, n_programs=2, asynchronous=asynchronous)
    assert sorted(found.events) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for program in (0, 1):
        assert short(found.events[program, 0]) == [
            *(("init", 0, 1), ("init", 8, 1), ("barrier", 0, 64), ("arrive", 0, 256), ("copy", 0, 256)),
            *(("wait", 8, 1), ("barrier", 1, 64)),
        ]
        second = found.events[program, 1]
        assert short(second) == [("barrier", 0, 64), ("wait", 0, 1), ("arrive", 8, 0), ("barrier", 1, 64)]
        # From the wait to the arrival, with the branch of the last try.
        assert second[2].issued == {"control": 1, "exponentials": 1, "integer": 2}
        assert second[3].issued == {}


def test_groups_of_products() -> None:
    found = traced(PRODUCTS, n_threads=128)
    for warp in range(4):
        events = found.events[0, warp]
        assert [(x.what, x.amount) for x in events] == [("commit", 0), ("products", 1), ("products", 0)]
        assert [x.issued for x in events[1:]] == [{"moves": 1}, {}]


def test_nothing_is_kept_if_it_is_not_asked_for() -> None:
    assert counted(kernel_of(PRODUCTS, 128), counting=False).trace is None
