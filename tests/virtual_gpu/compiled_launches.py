"""Launches of Triton kernels on the virtual GPU: their arguments, its settings, and the driver afterwards.

These tests need a process in which Triton compiles, without ``tests/conftest.py``: see ``test_launch.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedattn import attention
from fusedattn.kernels.pipelining import FENCES_COPIES
from fusedattn.virtual_gpu.attention import compiled_attention
from fusedattn.virtual_gpu.driver import VirtualGPU, virtual_gpu
from fusedattn.virtual_gpu.errors import MemoryAccessError, RaceError
from fusedattn.virtual_gpu.launch import Settings

# Later versions of Triton have other names.
BARRIER = getattr(gl, "barrier", None) or gl.thread_barrier
LOAD = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
STORE = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@triton.jit
def _copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + index, tl.load(x_ptr + index, mask=index < n), mask=index < n)


@triton.jit
def _of_tuples(first, numbers, nothing, NAMES: tl.constexpr):
    """first is (pointer, (pointer, number)); numbers a tuple of which one is constant."""
    index = tl.arange(0, 32)
    x = tl.load(first[0] + index) * first[1][1]
    if nothing is None:
        x += numbers[0] - numbers[1]
    if NAMES[1] == 3:
        x += 0.25
    tl.store(first[1][0] + index, x)


@triton.jit
def _of_descriptors(x, y_ptr, row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    index = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(y_ptr + index, x.load([row, COLUMNS]))


@triton.jit
def _of_pair(pair, y_ptr):
    index = tl.arange(0, 8)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(y_ptr + index, pair[0].load([0, 0]))


@triton.jit
def _add_tile(x_ptr, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    index = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    y.atomic_add([4, 0], tl.load(x_ptr + index))


@triton.jit
def _product(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):
    """x @ y over n blocks of columns and rows, loaded ahead."""
    rows, columns = tl.arange(0, 64), tl.arange(0, BLOCK)
    total = tl.full((64, 64), 0.0, tl.float32)
    for i in range(n):
        x = tl.load(x_ptr + rows[:, None] * (n * BLOCK) + i * BLOCK + columns[None, :])
        y = tl.load(y_ptr + (i * BLOCK + columns[:, None]) * 64 + rows[None, :])
        total = tl.dot(x, y, total)
    tl.store(z_ptr + rows[:, None] * 64 + rows[None, :], total)


@gluon.jit
def _load_tiles(x, y, tile, full, empty, n):
    for i in range(n):
        mbarrier.wait(empty, i & 1 ^ 1)
        mbarrier.expect(full, x.block_type.nbytes)
        LOAD(x, [i * 16, 0], full, tile)


@gluon.jit
def _store_tiles(x, y, tile, full, empty, n):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    copy = gl.allocate_shared_memory(gl.float32, [16, 32], y.layout)
    for i in range(n):
        mbarrier.wait(full, i & 1)
        values = tile.load(layout)
        BARRIER()
        mbarrier.arrive(empty, count=1)
        tma.store_wait(0)
        copy.store(values * 2)
        fence_async_shared()
        STORE(y, [i * 16, 0], copy)
    tma.store_wait(0)


@gluon.jit
def _two_partitions(x, y, n):
    """One warp loads tiles by the accelerator, four others double them."""
    tile = gl.allocate_shared_memory(gl.float32, [16, 32], x.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full, empty = barriers.index(0), barriers.index(1)
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [(_store_tiles, (x, y, tile, full, empty, n)), (_load_tiles, (x, y, tile, full, empty, n))], [1], [24]
    )


@triton.jit
def _number_of_program(x_ptr, VALUE_OF_EACH: tl.constexpr):
    tl.store(x_ptr, tl.program_id(0) if VALUE_OF_EACH else 7)


@triton.jit
def _numbers(x_ptr, y_ptr, a, b, c, d):
    tl.store(x_ptr, a)
    tl.store(x_ptr + 1, b)
    tl.store(x_ptr + 2, d.to(tl.int64))
    tl.store(y_ptr, c)


@pytest.mark.parametrize("dtype", [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool,
])  # fmt: skip
def test_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    x = (torch.arange(100) % 7).to(dtype)
    y = torch.zeros_like(x)
    with virtual_gpu(90):
        _copy[(2,)](x, y, 90, BLOCK=64)
    assert torch.equal(y[:90], x[:90])
    assert not y[90:].any()


@pytest.mark.parametrize("capability", [80, 86, 89, 90])
def test_a_store_behind_the_end(capability: int) -> None:
    x = torch.zeros(100)
    with virtual_gpu(capability), pytest.raises(MemoryAccessError, match=r"\.py:\d+: 4 bytes at byte 396"):
        _copy[(2,)](x, torch.zeros(100)[:99], 100, BLOCK=64)


def test_tuples_constants_and_none() -> None:
    x, y = torch.arange(32.0), torch.zeros(32)
    with virtual_gpu(90):
        _of_tuples[(1,)]((x, (y, 2.5)), (8, tl.constexpr(3)), None, NAMES=(2, 3))
    assert torch.equal(y, x * 2.5 + 5 + 0.25)
    with virtual_gpu(90):
        _of_tuples[(1,)]((x, (y, 2.5)), (1, -4), 1, NAMES=(3, 2))
    assert torch.equal(y, x * 2.5)


def test_numbers_of_every_size() -> None:
    x, y = torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.float32)
    with virtual_gpu(90):
        _numbers[(1,)](x, y, -5, 2**40 + 3, 0.75, True)
    assert x.tolist() == [-5, 2**40 + 3, 1]
    assert y.item() == 0.75


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("row", [0, 20, -3])
def test_descriptors(dtype: torch.dtype, row: int) -> None:
    x = torch.arange(24 * 96).reshape(24, 96).remainder(1000).to(dtype)
    y = torch.zeros(16, 32, dtype=dtype)
    expected = torch.zeros_like(y)
    inside = range(max(row, 0), min(row + 16, 24))
    expected[inside.start - row : inside.stop - row] = x[inside.start : inside.stop, 32:64]
    for changes in ({}, {"asynchronous": "early"}, {"asynchronous": "random", "schedule": "random", "seed": 1}):
        y.zero_()
        with virtual_gpu(90, **changes):
            _of_descriptors[(1,)](TensorDescriptor.from_tensor(x, [16, 32]), y, row, ROWS=16, COLUMNS=32)
        assert torch.equal(y, expected)


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float16, 0x7FFF), (torch.bfloat16, 0x7FFF), (torch.float32, 2**31 - 1)]
)
def test_a_descriptor_that_pads_with_nan(dtype: torch.dtype, bits: int) -> None:
    x = torch.arange(24 * 96).reshape(24, 96).remainder(100).to(dtype)
    y = torch.zeros(16, 32, dtype=dtype)
    with virtual_gpu(90):
        _of_descriptors[(1,)](TensorDescriptor.from_tensor(x, [16, 32], "nan"), y, 20, ROWS=16, COLUMNS=32)
    assert torch.equal(y[:4], x[20:, 32:64])
    assert (y[4:].view({2: torch.int16, 4: torch.int32}[y.itemsize]) == bits).all()


def test_descriptors_that_are_not_known() -> None:
    """Triton has no such field before 3.7, and gives TF32 to the driver of CUDA."""
    described = TensorDescriptor.from_tensor(torch.zeros(16, 32), [16, 32])
    described.round_f32_to_tf32 = True
    with virtual_gpu(90), pytest.raises(NotImplementedError, match="round_f32_to_tf32"):
        _of_descriptors[(1,)](described, torch.zeros(16, 32), 0, ROWS=16, COLUMNS=32)


def test_a_tile_that_a_descriptor_adds() -> None:
    x, y = torch.arange(16 * 32.0).reshape(16, 32), torch.ones(20, 32)
    with virtual_gpu(90):
        _add_tile[(3,)](x, TensorDescriptor.from_tensor(y, [16, 32]), ROWS=16, COLUMNS=32)
    expected = torch.ones(20, 32)
    expected[4:] += 3 * x
    assert torch.equal(y, expected)


SETTINGS = [
    Settings(),
    Settings(asynchronous="early", programs="reversed", together=False),
    Settings(asynchronous="random", programs="random", seed=1),
    Settings(asynchronous="random", schedule="random", seed=2),
    Settings(schedule="random", seed=3, counting=True),
]


@pytest.mark.parametrize("capability", [80, 90])
def test_all_settings_compute_the_same(capability: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(-4, 5, shape, generator=generator).to(torch.float16) for shape in ((64, 160), (160, 64)))
    for settings in SETTINGS:
        z = torch.zeros(64, 64)
        with virtual_gpu(capability, settings) as gpu:
            # Before 3.7.1 Triton writes no fence between a copy and wgmma, which the virtual GPU asks for.
            stages = 3 if capability == 80 or FENCES_COPIES else 1
            _product[(1,)](x, y, z, 5, BLOCK=32, num_warps=4, num_stages=stages)
        assert torch.equal(z, x.float() @ y.float())
        assert gpu.counters["_product"].programs == 1
        assert bool(gpu.counters["_product"].traffic) == settings.counting


@pytest.mark.parametrize(
    "changes",
    [
        {"asynchronous": "soon"},
        {"programs": "forwards"},
        {"schedule": "fair"},
        {"seed": -1},
        {"seed": True},
        {"seed": "0"},
        {"noise": "no"},
        {"strict": 1},
    ],
)
def test_settings_that_do_not_exist(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(changes))}: got .*, allowed are"):
        Settings(**changes)
    with pytest.raises(ValueError, match="allowed are"), virtual_gpu(90, **changes):
        pass


def test_an_unknown_setting() -> None:
    message = "settings: got noisy, allowed are asynchronous, .*, noise, "
    with pytest.raises(TypeError, match=message), virtual_gpu(90, noisy=True):
        pass


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a", "sm_", "sm_100", 90, None])
def test_architectures_of_attention_that_do_not_exist(arch: Any) -> None:
    message = f"arch: got {arch!r}, allowed are sm_80, sm_86, sm_90"
    with pytest.raises(ValueError, match=message), compiled_attention(arch):
        pass


def test_attention_refuses_what_a_gpu_does() -> None:
    """Checks inside count inside only, and those before only outside."""
    q = torch.zeros(1, 1, 3, 16)
    for _ in range(2):
        with compiled_attention("sm_80"):
            with pytest.raises(NotImplementedError, match=r"dtype: got torch.float64, allowed are float16"):
                attention(q.double(), q.double(), q.double(), backend="triton")
            attention(q, q, q, backend="triton")
        with pytest.raises(NotImplementedError, match="device: got cpu, allowed is a GPU"):
            attention(q, q, q, backend="triton")


def test_times_are_refused() -> None:
    tuned = triton.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=[])(_copy)
    with virtual_gpu(90), pytest.raises(NotImplementedError, match="the virtual GPU has no times"):
        tuned[(1,)](torch.zeros(4), torch.zeros(4), 4)


def test_architectures_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="capability: got 75, allowed are 80, 86, 89, 90"), virtual_gpu(75):
        pass


def test_programs_that_store_different_values() -> None:
    x = torch.zeros(1, dtype=torch.int32)
    for together in (True, False):
        with virtual_gpu(90, together=together):
            _number_of_program[(3,)](x, VALUE_OF_EACH=False)
            assert x.item() == 7
            with pytest.raises(RaceError, match=r"\.py:\d+: another value than program \d stores .* at .*\.py:\d+"):
                _number_of_program[(3,)](x, VALUE_OF_EACH=True)
            _number_of_program[(1,)](x, VALUE_OF_EACH=True)
            assert x.item() == 0


def test_an_empty_grid_and_an_empty_tensor() -> None:
    x = torch.zeros(0)
    with virtual_gpu(90) as gpu:
        _copy[(0,)](x, x, 0, BLOCK=64)
        _copy[(1,)](x, x, 0, BLOCK=64)
        assert gpu.counters["_copy"].programs == 1
        with pytest.raises(MemoryAccessError, match="the launch has no tensor"):
            _copy[(1,)](x, x, 1, BLOCK=64)


def test_arguments_of_wrong_types() -> None:
    x = torch.zeros(64)
    with virtual_gpu(90), pytest.raises(TypeError, match="got a tensor on meta, allowed are tensors on the CPU"):
        _copy[(1,)](x, x.to("meta"), 64, BLOCK=64)


def _drivers() -> tuple[Any, Any, Any]:
    return triton.runtime.driver._active, CUDABackend.make_cubin, triton.knobs.cache.dir


def test_the_driver_is_as_before_after_an_exception() -> None:
    before = _drivers()
    with pytest.raises(MemoryAccessError), virtual_gpu(90):
        _copy[(1,)](torch.zeros(3), torch.zeros(4), 4, BLOCK=64)
    assert _drivers() == before
    with pytest.raises(KeyError), virtual_gpu(80):
        raise KeyError
    assert _drivers() == before


def test_a_gpu_inside_another() -> None:
    x, before = torch.zeros(64), _drivers()
    one = torch.ones(64)
    with virtual_gpu(90) as outer:
        _copy[(1,)](one, x, 64, BLOCK=64)
        with virtual_gpu(80, counting=True) as inner:
            assert _active() is inner
            _copy[(1,)](one, x, 64, BLOCK=64)
            _copy[(1,)](one, x, 64, BLOCK=64)
        assert _active() is outer
        _copy[(1,)](one, x, 64, BLOCK=64)
    assert _drivers() == before
    assert (outer.counters["_copy"].programs, inner.counters["_copy"].programs) == (2, 2)
    assert inner.counters["_copy"].traffic
    assert not outer.counters["_copy"].traffic


def _active() -> VirtualGPU:
    return triton.runtime.driver.active


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("settings", [
    {"asynchronous": "late"}, {"asynchronous": "early"}, {"asynchronous": "random", "schedule": "random", "seed": 1},
])  # fmt: skip
def test_partitions_of_warps_in_gluon(n: int, settings: dict[str, Any]) -> None:
    x, y = torch.randn(70, 32), torch.zeros(70, 32)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    descriptors = [GluonDescriptor(z, [70, 32], [32, 1], [16, 32], layout) for z in (x, y)]
    with virtual_gpu(90, **settings):
        _two_partitions[(1,)](*descriptors, n)
    assert torch.equal(y[: 16 * n], 2 * x[: 16 * n])
    assert not y[16 * n :].any()


def test_a_descriptor_in_a_tuple() -> None:
    """Triton's own launcher refuses it, and only on a GPU."""
    x = TensorDescriptor.from_tensor(torch.zeros(16, 32), [8, 32])
    with virtual_gpu(90), pytest.raises(NotImplementedError, match="a tensor descriptor: got one in a tuple"):
        _of_pair[(1,)]((x, 1), torch.zeros(8, 32))
