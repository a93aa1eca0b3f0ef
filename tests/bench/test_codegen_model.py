"""The model of bench/codegen: excerpts of machine code, and figures computed by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest

from bench.codegen.disassembly import sass_instructions
from bench.codegen.estimate import Kernel, Workload, blocks, estimate, rotation_break_even, rotation_seconds
from bench.codegen.hardware import MACHINES
from bench.codegen.loops import Loop, Order, Step, loop_of
from bench.codegen.machine_code import product_loops
from bench.codegen.model import bound, resources_of
from bench.codegen.predictions import predict
from bench.codegen.report import Report
from fusedattn import masks
from tests.helpers.compiling import output

H200 = MACHINES["sm_90"]
EXCERPT = """
        /*0000*/                   DEPBAR.LE SB0, 0x1 ;
        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0020*/              @!PT LDS RZ, [RZ] ;
        /*0030*/                   WARPGROUP.ARRIVE ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR12], RZ, !UPT ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR28], R88, gsb0 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/                   FMNMX R137, R88, R89, !PT ;
        /*0080*/                   FFMA R134, R109, R134, R116 ;
        /*0090*/                   MUFU.EX2 R119, R119 ;
        /*00a0*/                   F2FP.BF16.F32.PACK_AB R149, R115, R114 ;
        /*00b0*/                   SHFL.BFLY PT, R97, R118, 0x2, 0x1f ;
        /*00c0*/                   HGMMA.64x128x16.F32.BF16 R24, R136, gdesc[UR12].tnspB, R24, gsb0 ;
        /*00d0*/                   LDGSTS.E.BYPASS.128 [R105+0x8000], desc[UR16][R88.64], !P0 ;
        /*00e0*/                   LDGDEPBAR ;
        /*00f0*/                   LDG.E R5, desc[UR16][R6.64] ;
        /*0100*/                   LDS.64 R8, [R9] ;
        /*0110*/                   LDSM.16.M88.4 R12, [R5] ;
        /*0120*/                   BAR.SYNC.DEFER_BLOCKING 0x1, 0x80 ;
        /*0130*/               @P0 BRA 0x0 ;
"""


def excerpt() -> Loop:
    [instructions] = product_loops(sass_instructions(EXCERPT))
    return loop_of(instructions)


def loop(*steps: Step | Iterable[Step]) -> Loop:
    """A loop of steps and lists of steps."""
    return Loop(tuple(x for step in steps for x in ([step] if isinstance(step, Step) else step)))


# 64x64x16 in a warp group, both operands in shared memory: 32 clocks of the tensor core, 32 of shared memory.
PRODUCT = Step("wgmma", macs=16 * 64 * 16, shared_bytes=512 + 512, commits=True)
WAIT = Step("wait")


def test_instructions_of_a_loop_are_counted() -> None:
    found = excerpt()
    assert len(found.steps) == 20
    # The other barrier holds one warp group, as its wgmma does anyway.
    counts = {"wgmma": 3, "wait": 1, "alu": 2, "fma": 1, "mufu": 1, "shuffle": 1, "barrier": 1}
    assert {kind: found.counts[kind] for kind in counts} == counts
    # Each warp multiplies 16 of the 64 rows.
    assert found.macs == 16 * 16 * (64 + 64 + 128)
    assert found.copies
    assert found.style == "wgmma 1/3 from registers, cp.async"
    assert found.steps[0] == Step("arrived", pending=1)


def test_bytes_of_a_loop() -> None:
    """Each warp reads a left operand in shared memory; four warps read the right one together, once."""
    found = {i: step for i, step in enumerate(excerpt().steps) if step.shared_bytes or step.memory_bytes}
    assert found[4].shared_bytes == 16 * 32 + 64 * 32 / 4
    assert found[12].shared_bytes == 128 * 32 / 4
    assert (found[13].shared_bytes, found[13].memory_bytes) == (512, 512)
    assert (found[15].shared_bytes, found[15].memory_bytes) == (0, 128)
    assert found[16].shared_bytes == 256
    assert found[17].shared_bytes == 512
    assert sorted(found) == [4, 5, 12, 13, 15, 16, 17]  # LDS RZ reads nothing


@pytest.mark.parametrize(
    ("instruction", "step"),
    [
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", Step("mma", macs=16 * 8 * 16)),
        ("HMMA.1688.F32.TF32 R4, R8, R12, R4", Step("mma", macs=16 * 8 * 8, size=4)),
        ("QMMA.16832.F32.E4M3.E4M3 R8, R20.ROW, R92.COL, RZ", Step("mma", macs=16 * 8 * 32, size=1)),
        (
            "HGMMA.64x32x8.F32.TF32 R24, R40, gdesc[UR4], R24, gsb0",
            Step("wgmma", macs=16 * 32 * 8, size=4, shared_bytes=256, commits=True),
        ),
        (
            "QGMMA.64x64x32.F32.E4M3.E4M3 R88, gdesc[UR12], RZ, !UPT",
            Step("wgmma", macs=16 * 64 * 32, size=1, shared_bytes=16 * 32 + 512),
        ),
        ("WARPGROUP.DEPBAR.LE gsb0, 0x1", Step("wait", pending=1)),
        ("BAR.SYNC.DEFER_BLOCKING 0x2, 0x100", Step("barrier")),
        ("UTMALDG.4D [UR8], [UR4]", Step("tma")),
        ("UTMAREDG.4D.ADD [UR4], [UR8]", Step("tma add")),
        ("STS.U16 [R4], R5", Step("issue", shared_bytes=64)),
        ("STSM.16.M88.2 [R4], R5", Step("issue", shared_bytes=256)),
        ("IMAD.MOV.U32 R4, RZ, RZ, R5", Step("imad")),
        ("UIADD3 UR4, UR4, 0x1, URZ", Step("issue")),
    ],
)
def test_one_instruction(instruction: str, step: Step) -> None:
    [found] = loop_of(sass_instructions(f"/*0000*/ {instruction} ;")).steps
    assert found == step


def test_order_that_the_assembler_wrote() -> None:
    """Bits 105 to 125: stall, yield, scoreboards of the result, of the operands and of the ones to wait for."""
    control = 5 | 1 << 4 | 3 << 5 | 7 << 8 | 0b100010 << 11
    sass = f"/*0000*/ MUFU.EX2 R1, R1 ; /* 0x{17:016x} */\n  /* 0x{control << 41 | 0x123:016x} */"
    [instruction] = sass_instructions(sass)
    assert loop_of([instruction]).steps[0].order == Order(stall=5, result=3, operands=None, needs=(1, 5))


def test_resources_by_hand() -> None:
    """Eight warps, two per scheduler."""
    found = resources_of(excerpt(), H200, warps=8)
    assert found["tensor"] == 2 * (32 + 32 + 64)
    assert found["mufu"] == 2 * 8
    assert found["alu"] == 2 * 2 * 2
    assert found["issue"] == 2 * 20
    assert found["shared"] == 8 * (1024 + 1024 + 1024 + 512 + 256 + 512) / 128
    assert found["L2"] == pytest.approx(8 * (512 + 128) / 37)
    assert resources_of(excerpt(), H200, warps=8, fetched_bytes=3700)["L2"] == pytest.approx(found["L2"] + 100)


def test_products_alone_keep_the_tensor_cores_busy() -> None:
    found = bound(loop([PRODUCT] * 8, WAIT), H200, warps=4, ctas=1)
    assert found.resources["tensor"] == 256
    assert 256 <= found.clocks <= 256 * 1.02
    assert set(found.limiters) == {"tensor", "shared"}  # 64 columns of two operands in shared memory need both equally


def test_narrow_products_wait_for_shared_memory() -> None:
    """64x16x16: 8 clocks of the tensor core, and 2560 bytes."""
    narrow = Step("wgmma", macs=16 * 16 * 16, shared_bytes=512 + 128, commits=True)
    found = bound(loop([narrow] * 8, WAIT), H200, warps=4, ctas=1)
    assert found.resources["tensor"] == 64
    assert found.limiters == ("shared", "tensor")
    assert found.clocks == pytest.approx(8 * 20, rel=0.02)


def test_operands_of_32_bits_take_twice_as_long_and_those_of_8_bits_half() -> None:
    narrow = Step("wgmma", macs=16 * 64 * 8, size=4, shared_bytes=1024, commits=True)
    assert resources_of(loop(narrow), H200, warps=4)["tensor"] == 32
    short = Step("wgmma", macs=16 * 64 * 32, size=1, shared_bytes=1024, commits=True)
    assert resources_of(loop(short), H200, warps=4)["tensor"] == 32
    assert resources_of(loop(Step("mma", macs=2048)), H200, warps=4)["tensor"] == pytest.approx(4 / 0.629)


def test_warps_share_the_clocks_of_a_scheduler() -> None:
    """Two warps: the products of one end at clock 128, those of the other at 256. 400 instructions follow in all; the
    first warp issues 128 of them by then, so the last ends at 256 + 272."""
    steps = loop([PRODUCT] * 4, WAIT, [Step("issue")] * 200, Step("barrier"))
    assert bound(steps, H200, warps=8, ctas=1).clocks == pytest.approx(528, rel=0.04)


def test_the_limit_changes_with_the_counts() -> None:
    def limiter(n_mufu: int, n_alu: int) -> str:
        steps = loop([PRODUCT] * 4, [Step("mufu")] * n_mufu, [Step("alu")] * n_alu, WAIT)
        return bound(steps, H200, warps=4, ctas=1).limiters[0]

    assert limiter(4, 4) == "tensor"
    assert limiter(40, 4) == "mufu"
    assert limiter(4, 400) == "alu"


def test_code_after_a_wait_overlaps_with_nothing_of_the_same_warp() -> None:
    """256 clocks of products, then 256 of exponentials; a second program fills the gaps."""
    serial = loop([PRODUCT] * 8, WAIT, [Step("mufu")] * 32)
    alone, shared = (bound(serial, H200, warps=4, ctas=ctas) for ctas in (1, 2))
    assert alone.clocks == pytest.approx(512, rel=0.03)
    assert alone.limiters[0] == "waits"
    assert shared.clocks == pytest.approx(256, rel=0.05)
    assert shared.program_clocks == 2 * shared.clocks
    behind = loop([PRODUCT] * 8, [Step("mufu")] * 32, WAIT)
    assert bound(behind, H200, warps=4, ctas=1).clocks == pytest.approx(256, rel=0.03)
    assert behind.overlapped > 0.9 > 0.3 > serial.overlapped


def test_a_product_may_run_into_the_next_iteration() -> None:
    """With one pending group, the wait is for the iteration before."""
    wait = Step("wait", pending=1)
    steps = loop([replace(PRODUCT, commits=False)] * 7, PRODUCT, wait, [Step("mufu")] * 32)
    assert bound(steps, H200, warps=4, ctas=1).clocks == pytest.approx(256, rel=0.03)
    assert steps.overlapped == 1.0


def test_a_barrier_holds_the_warps_of_a_program() -> None:
    """Two warps per scheduler, each with 128 clocks of special functions: a barrier after each one costs latency."""
    free = bound(loop([Step("mufu")] * 16), H200, warps=8, ctas=1)
    stalled = Step("barrier", order=Order(stall=15))
    held = bound(loop([x for _ in range(16) for x in (Step("mufu"), stalled)]), H200, warps=8, ctas=1)
    assert free.clocks == 256
    assert held.clocks > 1.4 * free.clocks


def test_a_scoreboard_delays_instructions_that_need_the_result() -> None:
    ask = Step("shuffle", order=Order(result=2))
    used, unused = Step("fma", order=Order(needs=(2,))), Step("fma", order=Order(needs=(3,)))
    late, soon = (bound(loop(ask, x), H200, warps=4, ctas=1).clocks for x in (used, unused))
    assert soon == 4
    assert late == 4 + H200.latencies["shuffle"] + 1


def test_narrow_loads_are_near() -> None:
    """128 bytes take 2 clocks at the port, 512 bytes 8."""
    used = Step("fma", order=Order(needs=(2,)))

    def clocks(n_bytes: int) -> float:
        ask = Step("issue", memory_bytes=n_bytes, order=Order(result=2))
        return bound(loop(ask, used), H200, warps=4, ctas=1).clocks

    assert clocks(128) == 4 * 2 + 41 + 1
    assert clocks(512) == 4 * 8 + 263 + 1


def test_copies_are_waited_for() -> None:
    """4 KiB for each of four warps at 64 bytes per clock take 256 clocks plus latency, unless requested in time."""
    copies = [Step("issue", shared_bytes=512, memory_bytes=512)] * 8
    commit = Step("commit", commits=True)

    def clocks(pending: int) -> float:
        steps = loop(copies, commit, Step("arrived", pending=pending), [Step("mufu")] * 64)
        return bound(steps, H200, warps=4, ctas=1).clocks

    assert clocks(0) == pytest.approx(256 + 263 + 512, rel=0.02)
    assert clocks(1) == pytest.approx(512, rel=0.03)


def test_programs_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="ctas: got 4, 0"):
        bound(loop(PRODUCT), H200, warps=4, ctas=0)


def brute_force(kernel: Kernel, problem: Workload) -> list[tuple[int, int]]:
    """For each tile, the numbers of fully visible and of partly visible blocks, from the mask itself."""
    mask = masks.causal() if problem.causal else masks.full()
    visible = mask.dense(problem.seqlen_q, problem.seqlen_k).expand(1, 1, problem.seqlen_q, problem.seqlen_k)[0, 0]
    own, walked, heads = kernel.block_m, kernel.block_n, 1
    if kernel.by_keys:
        visible, own, walked, heads = visible.T.flip(1), walked, own, problem.group  # blocks count from the last query
    found = []
    for tile in visible.split(own):
        parts = tile.split(walked, 1)
        # A block that reaches beyond the last key or query needs a mask.
        full = sum(bool(x.all()) for x in parts if x.shape[1] == walked and (len(tile) == own or not kernel.by_keys))
        found.append((heads * full, heads * (sum(bool(x.any()) for x in parts) - full)))
    return found


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(256, 256), (100, 230), (230, 100), (1, 300), (65, 64), (130, 1)])
def test_blocks_are_those_of_the_mask(by_keys: bool, causal: bool, seqlen_q: int, seqlen_k: int) -> None:
    kernel = Kernel(64, 32, 64 if by_keys else 32, 1, 1.0, 1.0, by_keys)
    problem = Workload(1, 1, 3, seqlen_q, seqlen_k, 64, causal)
    assert list(blocks(kernel, problem)) == brute_force(kernel, problem)


def test_waves() -> None:
    """132 multiprocessors: one program beyond a full wave doubles the time."""
    kernel = Kernel(128, 64, 64, 1, 1000.0, 2000.0)
    one, two = (Workload(1, 1, nheads, 128, 6400, 128) for nheads in (132, 133))
    first, second = estimate(kernel, one, H200), estimate(kernel, two, H200)
    assert first.seconds == pytest.approx((100 * 1000 + 2 * 479) / 1.755e9)
    assert (first.waves, first.filled) == (1.0, 1.0)
    assert second.seconds == pytest.approx(2 * first.seconds)
    assert second.filled == pytest.approx(133 / 264)
    both = replace(kernel, ctas=2)
    assert estimate(both, two, H200).seconds == pytest.approx(first.seconds)  # each has a place
    assert estimate(kernel, Workload(1, 1, 1, 1, 0, 128), H200).seconds == pytest.approx(2 * 479 / 1.755e9)


def test_a_small_launch_wants_small_tiles_and_a_large_one_the_fastest() -> None:
    """64 rows are faster if 128 leave half of the GPU idle; otherwise 128 are."""
    large = Kernel(128, 64, 64, 1, 1100.0, 1400.0)
    small = Kernel(64, 64, 64, 1, 700.0, 900.0)
    few, many = Workload(1, 8, 1, 1024, 4096, 128), Workload(8, 16, 1, 4096, 4096, 128)
    assert estimate(small, few, H200).seconds < 0.75 * estimate(large, few, H200).seconds
    assert estimate(large, many, H200).seconds < estimate(small, many, H200).seconds


def test_memory_is_a_floor() -> None:
    kernel = Kernel(128, 64, 64, 1, 1.0, 1.0)
    problem = Workload(64, 32, 1, 128, 128, 128)
    assert estimate(kernel, problem, H200).seconds >= problem.bytes / H200.hbm_bytes_per_second
    assert problem.bytes == 64 * 32 * 4 * 128 * 128 * 2
    assert problem.operations == 4 * 64 * 32 * 128 * 128 * 128


def test_rotation_once_or_in_place() -> None:
    """By hand: 2 * 64 * 128 * 2 bytes at 4.3 TB/s take 7.6 ns, and 256 clocks on 132 multiprocessors 1.1 ns."""
    break_even = rotation_break_even(128, 64, 256, 128, H200)
    assert break_even == pytest.approx(128 * (32768 / 4.3e12) / (256 / 1.755e9 / 132), rel=1e-12)
    assert 880 < break_even < 885
    # At break-even, rotating the rows of all tiles costs as much as the separate pass.
    problem = Workload(1, 8, 1, round(break_even), 6400, 128)
    tiles = problem.nheads_q * break_even / 128 * 6400 / 64
    assert H200.seconds(256 * tiles) / 132 == pytest.approx(rotation_seconds(problem, H200))


def test_only_known_loops_are_predicted() -> None:
    config = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
    report = Report("attention_fwd", "sm_90", 64, "bf16", "plain", config, True, ctas_per_sm=1, loops=(excerpt(),))
    with pytest.raises(NotImplementedError, match="got 1, allowed 3 or 2"):
        predict(report)
    found = predict(replace(report, loops=(excerpt(), excerpt(), excerpt())))
    assert found.main == "full"
    assert found.flops == pytest.approx(4 * 128 * 64 * 64 / found.bounds["full"].clocks * 132 * 1.755e9)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "pieces"),
    [("bf16", 256, False), ("bf16", 260, True), ("tf32", 128, False), ("tf32", 132, True)],
)
def test_products_in_pieces_are_not_predicted(dtype: str, head_dim: int, pieces: bool) -> None:
    """Their loops would be mistaken for loops of whole blocks."""
    config = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1}
    loops = (excerpt(), excerpt())
    report = Report("attention_bwd_dkdv", "sm_90", head_dim, dtype, "all", config, True, ctas_per_sm=1, loops=loops)
    if pieces:
        with pytest.raises(NotImplementedError, match=f"head_dim.*got {head_dim}"):
            predict(report)
    else:
        assert predict(report).main == "full"


@pytest.mark.thorough
def test_a_compiled_kernel() -> None:
    """A tile's products take the clocks of their multiply-adds; the residual adds 16 columns to 2 * 64."""
    script = """
import json
from bench.codegen import compilations, predictions
case = compilations.Case("sm_90", "bf16", 64, ("plain",), ("attention_fwd",), ("plain",))
for report in compilations.compile_case(case):
    x = predictions.predict(report)
    full = x.bounds["full"]
    print(json.dumps([report.features, report.config, full.resources, full.clocks, x.repeated, x.flops]))
"""
    found = {features: rest for features, *rest in map(json.loads, output("-c", script).splitlines())}
    assert set(found) == {"plain", "residual"}
    for features, (config, resources, clocks, repeated, flops) in found.items():
        padding = 1 + 16 / (2 * 64) if features == "residual" else 1
        assert repeated == padding
        pairs = config["BLOCK_M"] * config["BLOCK_N"]
        assert resources["tensor"] == padding * 2 * pairs * 64 / 2048
        # One exponential per pair, and one or two for each row of a warp.
        assert pairs / 16 < resources["mufu"] < 1.1 * pairs / 16
        assert resources["L2"] == pytest.approx(2 * config["BLOCK_N"] * 64 * 2 / 37)
        assert max(resources.values()) <= clocks < 10 * max(resources.values())
        assert flops < H200.peak
