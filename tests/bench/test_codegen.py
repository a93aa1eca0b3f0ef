"""The machine code of every launch, by cross-compilation: no GPU is needed."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from bench.codegen import baseline, machine_code, tables
from bench.codegen.in_flight import Touch
from bench.codegen.loops import LOOPS
from bench.codegen.occupancy import ctas_per_sm
from bench.codegen.report import Report
from bench.codegen.ttgir import rearranged_products
from fusedattn.kernels import configs, fp8_configs
from tests.helpers.compiling import ROOT, compiling, output, run

TARGETS: tuple[configs.Arch, ...] = ("sm_80", "sm_90", "sm_100")
FP8_TARGETS = ("sm_90", "sm_100")


def kernels() -> set[str]:
    """All kernels that `make codegen` compiles: those that a :class:`launcher.KernelConstants` is built for."""
    sources = (path.read_text() for path in (ROOT / "kernels").glob("*.py"))
    nodes = [x for source in sources for x in ast.walk(ast.parse(source))]
    compiled = {x.name for x in nodes if isinstance(x, ast.FunctionDef) and x.decorator_list}
    calls = (x for x in nodes if isinstance(x, ast.Call) and x.args)
    makers = ("constants_of", "_constants", "launcher.KernelConstants")
    return compiled & {ast.unparse(x.args[0]) for x in calls if ast.unparse(x.func) in makers}


def tiles_of(target: configs.Arch) -> set[tuple[str, str]]:
    """Every (kernel, short config) of the config table; `make codegen` adds the largest head_dim and other scores."""
    by_kernel = {"fwd": "attention_fwd", "dkdv": "attention_bwd_dkdv", "dq": "attention_bwd_dq"}
    by_kernel["one_pass"] = "attention_bwd_dkdv"
    tiles = {("attention_bwd_exact_rows", config) for largest, config in configs.EXACT_ROWS.items() if largest <= 256}
    if target in FP8_TARGETS:
        tiles |= {("attention_fwd", config["streamed"]) for config in fp8_configs.TILES.values()}
    for by_head_dim in configs.TABLE[target].values():
        for largest, entry in by_head_dim.items():
            for kernels in (entry.streamed, entry.pairwise) if largest <= 256 else ():
                found = {(kernel, getattr(kernels, name)) for name, kernel in by_kernel.items()}
                tiles |= {(kernel, config) for kernel, config in found if config is not None}
    return {(kernel, in_short(kernel, c)) for kernel, c in tiles}


def in_short(kernel: str, config: configs.TileConfig) -> str:
    """The config as a report prints it."""
    walked = config.BLOCK_M if kernel == "attention_bwd_dkdv" else config.BLOCK_N
    has_boundary = kernel != "attention_bwd_exact_rows" and walked > config.BOUNDARY
    return (
        f"{config.BLOCK_M}x{config.BLOCK_N} w{config.num_warps} s{config.num_stages}"
        f"{f' b{config.BOUNDARY}' if has_boundary else ''}{'' if config.style == 'pointers' else f' {config.style}'}"
    )


@pytest.mark.thorough
@pytest.mark.parametrize("target", TARGETS)
def test_every_config_compiles_to_fit_code(target: configs.Arch, tmp_path: Path) -> None:
    """No spills, shared memory within its limit, products on tensor cores, no transposed product, and nothing worse
    than in the baseline of this Triton version."""
    result = compiling("-m", "bench.codegen", "--quick", "--jobs=1", "--json", f"--target={target}", cache=tmp_path)
    assert result.stdout, result.stderr
    reports = json.loads(result.stdout)
    faults = {f"{r['kernel']} {r['head_dim']} {r['dtype']} {r['features']}": r["faults"] for r in reports}
    assert not {key: found for key, found in faults.items() if found}, result.stderr
    assert result.returncode == 0, result.stderr
    for_hopper = {name for name in kernels() if name.startswith("hopper_")}
    assert len(for_hopper) == 3
    lacking = set() if target == "sm_90" else {"attention_bwd_dq_sum"} | for_hopper
    lacking |= set() if target in FP8_TARGETS else {"quantize_fp8", "largest_of_all"}
    assert {r["kernel"] for r in reports} == kernels() - lacking
    assert all(len(r["loop_instructions"]) in LOOPS[r["kernel"]] for r in reports if r["kernel"] in for_hopper)
    fields = {field.name for field in dataclasses.fields(Report)}
    tiles = {(r["kernel"], Report(**{name: x for name, x in r.items() if name in fields}).tile) for r in reports}
    assert tiles_of(target) <= tiles


def test_every_call_of_the_whole_list_is_possible() -> None:
    """Nothing is compiled here. On sm_86, float32 has no backward beyond 256 features."""
    script = """
from dataclasses import replace
from bench.codegen import __main__, compilations
options = __main__._parser().parse_args([])
options.target = list(compilations.launches.TARGETS)
for case in (*compilations.cases(options), *compilations.cases_of_ones(options)):
    assert compilations.compile_case(replace(case, kernels=("none",))) == []
print("all")
"""
    assert output("-c", script) == "all\n"


def test_features_narrow_the_list() -> None:
    """Features are compiled where they are listed, or at the head_dims that the command names."""
    script = """
from bench.codegen import __main__, compilations
from fusedattn.kernels.hopper_configs import FORWARD

def cases(*arguments):
    options = __main__._parser().parse_args(["--target=sm_90", *arguments])
    return {(c.dtype, c.head_dim, *c.features) for c in compilations.cases(options)}

assert cases("--features=latent") == {("bf16", 576, "latent")}
assert cases("--features=dropout") == {("bf16", 128, "dropout"), ("fp32", 64, "dropout")}
assert cases("--features=hopper") == {("bf16", head_dim, "hopper") for head_dim in FORWARD}
found = cases("--features=plain", "--features=dropout", "--dtype=fp16", "--head-dim=80")
assert found == {("fp16", 80, "plain", "dropout")}
cases("--features=latent", "--dtype=fp16")
"""
    done = run("-c", script)
    assert done.returncode == 1
    assert done.stderr.startswith("--features: none of them is listed"), done.stderr


@pytest.mark.thorough
def test_a_config_that_spills_is_found() -> None:
    """The check above can fail: a tile too large for its warps spills and serialises its products."""
    script = """
import torch
from bench.codegen import compilations
from fusedattn.kernels import configs
from fusedattn.kernels.configs import Entry, KernelConfigs, TileConfig
bad = TileConfig(128, 128, 4, 2)
kernels = KernelConfigs(bad, bad, bad)
configs.TABLE["sm_90"][2][128] = Entry(kernels, kernels)
case = compilations.Case("sm_90", "bf16", 128, ("plain",), ("attention_fwd",), inference=())
[report] = compilations.compile_case(case)
print(report.tile, report.faults)
"""
    shown = output("-c", script)
    assert shown.startswith("128x128 w4 s2 b64 ['spills"), shown
    assert "instructions in its loops: " in shown
    assert "'serialises wgmma'" in shown


@pytest.mark.thorough
def test_registers_in_flight_are_found() -> None:
    """Triton before 3.9, or its assembler, overwrites weights that wgmma still reads, only in the pipelined style."""
    script = """
import json
from bench.codegen import compilations
from fusedattn.kernels.configs import TileConfig
for style in ("pipelined", "descriptors"):
    tile = TileConfig(128, 64, 8, 3, style)
    case = compilations.Case("sm_90", "bf16", 64, ("plain",), ("attention_fwd",), ("plain",), tile)
    for report in compilations.compile_case(case):
        what = [(touch.what, touch.is_ordered) for touch in report.touches]
        print(json.dumps([report.tile, report.hgmma, report.certain_faults, report.faults, what]))
"""
    found = list(map(json.loads, output("-c", script).splitlines()))
    assert [tile.split(" ")[-1] for tile, *_ in found] == ["pipelined"] * 2 + ["descriptors"] * 2
    is_mended = tuple(map(int, version("triton").split(".")[:2])) >= (3, 9)
    for tile, hgmma, certain, faults, what in found:
        assert hgmma
        assert certain == []
        assert bool(what) == bool(faults) == (tile.endswith("pipelined") and not is_mended)
        assert all(touch == ["operand written", False] for touch in what)


@pytest.mark.thorough
def test_one_pass_adds_by_tma(tmp_path: Path) -> None:
    """One addition of the loop over full blocks, which the interpreter cannot run, and pipelined: the wait comes before
    the next one. Boundary blocks, and a total that no descriptor can address, are added by atomics."""
    script = """
import torch
from bench.codegen import launches
from bench.tuning.slots import holding_one_pass
for head_dim in (64, 62):
    with launches.compiling("sm_90", ("attention_bwd_dkdv",)) as found, holding_one_pass():
        launches.call(head_dim, torch.bfloat16, launches.FEATURES["one pass"])
    code = found[0].compiled.asm["ttgir"]
    print(head_dim, found[0].features, code.count("async_tma_reduce add"), code.count("tt.atomic_rmw fadd"))
"""
    # The atomic in both adds NaN for keys that hold one.
    assert output("-c", script, TRITON_CACHE_DIR=str(tmp_path)).splitlines() == [
        "64 ('one-pass',) 1 2",
        "62 ('one-pass',) 0 3",
    ]


def test_an_error_of_a_launcher_is_found(tmp_path: Path) -> None:
    """A surplus constant is a fault, and a missing one is an error."""
    script = """
import torch
from unittest.mock import patch
from bench.codegen import compilations
from fusedattn.kernels import attention_fwd
constants = attention_fwd.constants_of
case = compilations.Case("sm_90", "bf16", 64, ("plain",), ("attention_fwd",), inference=())
with patch.object(attention_fwd, "constants_of", lambda *x, **others: constants(*x, **others, HAS_BIAS=False)):
    print(compilations.compile_case(case)[0].faults)
def forgetful(*x, **others):
    found = constants(*x, **others)
    del found.named["tile"]
    return found
with patch.object(attention_fwd, "constants_of", forgetful):
    compilations.compile_case(case)
"""
    result = compiling("-c", script, cache=tmp_path)
    assert result.stdout.startswith('["does not compile: KeyError'), result.stdout + result.stderr
    assert "HAS_BIAS" in result.stdout
    assert result.returncode == 1
    assert "TypeError: missing a required argument: 'tile'" in result.stderr


@pytest.mark.thorough
def test_a_product_that_is_transposed_is_found(tmp_path: Path) -> None:
    """Triton before 3.7.1 miscompiles dot(trans(x), ...) on Hopper if x is itself a product."""
    script = '''
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bench.codegen.ttgir import transposed_products

@triton.jit
def kernel(a_ptr, b_ptr, out_ptr, n, PRODUCT: tl.constexpr, CARRIED: tl.constexpr):
    """out = sum over blocks of trans(x) @ b, where x is a block of b, or a product of it."""
    offs = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    a = tl.load(a_ptr + offs)
    x = a
    acc = tl.zeros([64, 64], tl.float32)
    for i in range(0, n):
        b = tl.load(b_ptr + i * 4096 + offs)
        if CARRIED:  # the product of the iteration before
            acc = tl.dot(tl.trans(x), b, acc)
        x = b
        if PRODUCT:
            x = tl.math.exp2(tl.dot(a, b)).to(tl.bfloat16)
        if not CARRIED:
            acc = tl.dot(tl.trans(x), b, acc)
    tl.store(out_ptr + offs, acc)

types = {"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*fp32", "n": "i32"}
for product in (False, True):
    for carried in (False, True):
        constants = {"PRODUCT": product, "CARRIED": carried}
        source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants)
        ttgir = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttgir"]
        assert "warp_group_dot" in ttgir and "trans" in ttgir
        print(product, carried, transposed_products(ttgir))
'''
    path = tmp_path / "script.py"  # Triton reads a kernel's source from its file
    path.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{script}")
    lines = output(path, TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    found = {(product, carried): int(n) for product, carried, n in map(str.split, lines)}
    assert len(found) == 4
    assert all((n > 0) == (product == "True") for (product, _), n in found.items())


def test_products_that_get_the_layout_of_loads_are_counted_in_loops() -> None:
    """The forward with a bias had this conversion while it loaded the bias behind the product."""
    conversion = (
        "%scores_353 = ttg.convert_layout %scores_352 : tensor<64x64xf32, #mma1> -> tensor<64x64xf32, #blocked> loc(#l)"
    )
    others = (
        "%x = ttg.convert_layout %y : tensor<64x64xbf16, #blocked> -> tensor<64x64xbf16, #mma1> loc(#l)",
        "%x = ttg.convert_layout %y : tensor<64xf32, #ttg.slice<{dim = 1, parent = #mma}>> -> "
        "tensor<64xf32, #ttg.slice<{dim = 1, parent = #blocked}>> loc(#l)",
        "%x = ttg.convert_layout %y : tensor<64x16xf32, #mma3> -> tensor<64x16xf32, #mma2> loc(#l)",
    )
    reduction = (
        '%m = "tt.reduce"(%s) <{axis = 1 : i32}> ({',
        "^bb0(%a: f32, %b: f32):",
        "tt.reduce.return %c : f32",
        "})",
    )
    loop = ("%sums:2 = scf.for %i = %a to %b step %c iter_args(%p = %q, %r = %s) -> (f32, f32) : i32 {",)
    inside = (*loop, *others, *reduction, conversion, "scf.yield %u, %v : f32, f32", "} loc(#l)")
    assert rearranged_products("\n".join((*inside, *others))) == 1
    assert rearranged_products("\n".join((*inside, conversion, *inside))) == 2
    assert rearranged_products("\n".join((conversion, *others))) == 0


@pytest.mark.thorough
def test_the_command_compares_and_updates(tmp_path: Path) -> None:
    """A missing entry fails until --update has written it, and a later change fails again."""
    script = """
import sys
from pathlib import Path
from bench.codegen import baseline, tables
from bench.codegen.__main__ import main
baseline.FOLDER = tables.FOLDER = Path(sys.argv[1])
tables.DOCUMENT = baseline.FOLDER / "codegen.md"
tables.DOCUMENT.write_text("<!-- figures: python -m bench.codegen --update -->\\n<!-- end of figures -->\\n")
baseline.save(baseline.Baseline(sys.argv[2]))
arguments = "--target sm_90 --kernel _key_range --dtype bf16 --head-dim 64 --features all --jobs 1".split()
assert main(arguments) == 1
assert main([*arguments, "--update"]) == 0
assert "| sm_90 | 1 |" in tables.DOCUMENT.read_text()
assert main(arguments) == 0
assert main([*arguments, "--afresh"]) == 0
entries = baseline.load(sys.argv[2])
entries.entries["_key_range sm_90 any 0 padding"]["tile"] = "512 w4 s3"
baseline.save(entries)
assert main([*arguments, "--afresh", "--json"]) == 1
"""
    result = compiling("-c", script, str(tmp_path), version("triton"), cache=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "FAULT: _key_range sm_90 any 0 padding: is not in the baseline" in result.stdout
    assert "FAULT: _key_range sm_90 any 0 padding: is launched as 1024 w4 s3, in the baseline as 512" in result.stderr
    tables = [line for line in result.stdout.splitlines() if line.startswith("_key_range")]
    assert len(set(tables)) == 1, "the figures of the baseline are those of the kernel"
    summaries = [line for line in result.stdout.splitlines() if line.startswith("Triton ")]
    assert [line.split(" of them")[0].split(", ")[1] for line in summaries] == ["1", "1", "0", "1"]
    assert f"Triton {version('triton')}: 1 kernels, 1 of them compiled" in result.stderr


REPORT = Report(
    kernel="attention_fwd",
    target="sm_90",
    head_dim=128,
    dtype="bf16",
    features="causal+rope",
    config={"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
    has_products=True,
    registers=200,
    shared_bytes=100_000,
    ctas_per_sm=2,
    hgmma=16,
    tensor_core=16,
    loop_instructions=(100, 400),
)

TOUCH = Touch(0x100, "MOV", "operand written", registers=(100,), products=(0xF0,), later=0)
IN_FLIGHT = "touches registers of wgmma in flight: 2 instructions,"


def judged(report: Report, before: baseline.Baseline) -> list[str]:
    return baseline.judge([report], before, set()).new.get(report.key, [])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"spill_bytes": 8}, "spills 8 bytes, outside of loops"),
        ({"spill_bytes": 8, "loop_spills": (0, 2)}, "spills 8 bytes, instructions in its loops: 0, 2"),
        ({"spill_bytes": 8, "loop_spills": (0, 0)}, "spills 8 bytes, outside of loops"),
        ({"shared_bytes": 227 * 1024 + 1}, "uses 232449 bytes of shared memory"),
        ({"serialized_wgmma": True}, "serialises wgmma"),
        ({"hgmma": 0}, "has no HGMMA"),
        ({"hgmma": 0, "tensor_core": 0, "target": "sm_80", "shared_bytes": 0}, "has no tensor-core instruction"),
        ({"rearranged_products": 2}, "rearranges products between threads in its loops: 2"),
        ({"transposed_products": 1}, "transposes 1 products, which Triton before 3.7.1 miscompiles"),
        ({"touches": (TOUCH, TOUCH)}, f"{IN_FLIGHT} none of them ordered by a scoreboard"),
        ({"touches": (TOUCH, replace(TOUCH, is_ordered=True))}, f"{IN_FLIGHT} 1 of them ordered by a scoreboard"),
        ({"error": "OutOfMemory"}, "does not compile: OutOfMemory"),
    ],
)
def test_faults_without_a_baseline(change: dict[str, Any], fault: str) -> None:
    assert not REPORT.faults
    assert replace(REPORT, **change).faults == [fault]


def test_calls_in_which_numbers_are_1_need_not_be_fast() -> None:
    """They must compile correctly; no baseline has them, and their names differ from those of other kernels."""
    of_ones = replace(REPORT, ones="one-head")
    assert of_ones.key == REPORT.key.replace(REPORT.features, f"one-head:{REPORT.features}") != REPORT.key
    assert not replace(of_ones, spill_bytes=8, serialized_wgmma=True, hgmma=0, tensor_core=0).faults
    assert replace(of_ones, error="OutOfMemory").faults == ["does not compile: OutOfMemory"]
    assert replace(of_ones, transposed_products=1).faults
    assert replace(of_ones, shared_bytes=227 * 1024 + 1).faults
    before = baseline.updated([REPORT, of_ones], None, "3.7.1", set(), accept_faults=False)
    assert list(before.entries) == [REPORT.key]
    assert not baseline.judge([REPORT, of_ones], before, {"sm_90"}).new


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"loop_instructions": (103, 412)}, None),
        ({"loop_instructions": (104, 400)}, "has a loop of 104 instructions, 100 in the baseline (+4.0%)"),
        ({"loop_instructions": (100, 413)}, "has a loop of 413 instructions, 400 in the baseline (+3.2%)"),
        ({"loop_instructions": (90, 390)}, None),
        ({"loop_instructions": (100,)}, "has 1 loops with products, 2 in the baseline"),
        ({"ctas_per_sm": 1}, "fits 1 times on a multiprocessor, 2 in the baseline"),
        ({"ctas_per_sm": 3}, None),
        ({"features": "new"}, "is not in the baseline"),
        ({"config": REPORT.config | {"num_stages": 3}}, "is launched as 128x64 w8 s3, in the baseline as 128x64 w8 s2"),
    ],
)
def test_faults_against_the_baseline(change: dict[str, Any], fault: str | None) -> None:
    before = baseline.updated([REPORT], None, "3.7.1", set(), accept_faults=False)
    assert judged(replace(REPORT, **change), before) == ([fault] if fault else [])


def test_only_listed_faults_are_known() -> None:
    """A fault is accepted only on request, with its figure, and leaves the list when it is gone."""
    bad, worse = replace(REPORT, spill_bytes=8), replace(REPORT, spill_bytes=16)
    before = baseline.updated([bad], None, "3.7.1", set(), accept_faults=False)
    assert judged(bad, before) == bad.faults
    before = baseline.updated([bad], before, "3.7.1", set(), accept_faults=True)
    assert baseline.judge([bad], before, set()) == baseline.Judgement({}, {REPORT.key: bad.faults})
    assert judged(worse, before) == worse.faults != bad.faults
    before = baseline.updated([REPORT], before, "3.7.1", set(), accept_faults=False)
    assert not before.known_faults


def test_a_kernel_is_known_by_its_fingerprint() -> None:
    """Without its own figures it has those of the baseline, and the faults that are known there."""
    bad = replace(REPORT, fingerprint="f00d", spill_bytes=8)
    before = baseline.updated([bad], None, "3.7.1", set(), accept_faults=True)
    assert before.fingerprints == {"f00d"}
    known = replace(REPORT, fingerprint="f00d", is_known=True, registers=0, loop_instructions=())
    assert before.with_figures(known) == replace(bad, is_known=True)
    assert baseline.judge([known], before, {"sm_90"}) == baseline.Judgement({}, {REPORT.key: bad.faults})
    after = baseline.updated([known], copy.deepcopy(before), "3.7.1", {"sm_90"}, accept_faults=False)
    assert after == before
    renamed = replace(known, features="new")
    assert judged(renamed, before) == [baseline.RENAMED]


def test_a_kernel_with_a_new_fault_is_not_known() -> None:
    """It would not fail again."""
    bad = replace(REPORT, fingerprint="f00d", spill_bytes=8)
    of_ones = replace(bad, fingerprint="0de5", ones="one-head", error="OutOfMemory")
    before = baseline.updated([bad, of_ones], None, "3.7.1", set(), accept_faults=False)
    assert not before.fingerprints


def test_calls_with_ones_are_known_by_their_fingerprints() -> None:
    of_ones = replace(REPORT, fingerprint="0de5", ones="one-head")
    before = baseline.updated([of_ones], None, "3.7.1", set(), accept_faults=False)
    assert not before.entries
    assert before.fingerprints == {"0de5"}
    assert not judged(replace(of_ones, is_known=True), before)
    assert baseline.judge([REPORT], before, {"sm_90"}).new[of_ones.key] == [
        "is in the baseline, but nothing launches it"
    ]
    assert not baseline.updated([REPORT], before, "3.7.1", {"sm_90"}, accept_faults=False).ones


@pytest.mark.thorough
def test_fingerprints_depend_on_the_kernel_alone(tmp_path: Path) -> None:
    """Not on the places of its lines, but on its code, its options and the assembler."""
    script = """
import sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bench.codegen import fingerprint, launches

triton.runtime.driver.set_active(launches.NoDevice(GPUTarget("cuda", 90, 32)))

@triton.jit
def _next(x, step):
    return x + step

LINES
@triton.jit
def kernel(x_ptr, STEP: tl.constexpr):
    tl.store(x_ptr, _next(tl.load(x_ptr), STEP))

def found(step=1, options=None, target=GPUTarget("cuda", 90, 32), known=()):
    source = ASTSource(kernel, {"x_ptr": "*i32", "STEP": "constexpr"}, {"STEP": step})
    with triton.knobs.compilation.scope(), fingerprint.watching(known) as seen:
        triton.knobs.compilation.always_compile = True
        try:
            triton.compile(source, target=target, options=options)
            compiled = True
        except fingerprint.Known:
            compiled = False
    return seen.fingerprint, compiled

first, _ = found()
assert found(known=(first,)) == (first, False)
others = [found(2), found(options={"num_warps": 8}), found(target=GPUTarget("cuda", 80, 32))]
assemblers = [triton.knobs.nvidia.ptxas, triton.knobs.nvidia.ptxas_blackwell]
if len({x.version for x in assemblers}) == 2:  # not under Triton 3.9
    with triton.knobs.nvidia.scope():
        triton.knobs.nvidia.ptxas = assemblers[1].path
        others.append(found(known=(first,)))
assert all(compiled for _, compiled in others)
assert len({first, *(x for x, _ in others)}) == 1 + len(others)
print(first)
"""
    shown = []
    for lines in ("", "\n\n# moved\n"):
        path = tmp_path / "script.py"  # Triton reads a kernel's source from its file
        path.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{script.replace('LINES', lines)}")
        shown.append(output(path, TRITON_CACHE_DIR=str(tmp_path)).strip())
    assert shown[0] == shown[1]
    assert len(shown[0]) == 16


def test_a_kernel_that_is_gone_must_leave_the_baseline() -> None:
    """Only if the whole target was compiled."""
    other = replace(REPORT, kernel="attention_bwd_dq")
    before = baseline.updated([REPORT, other], None, "3.7.1", set(), accept_faults=False)
    assert not baseline.judge([REPORT], before, set()).new
    assert not baseline.judge([REPORT], before, {"sm_80"}).new
    assert baseline.judge([REPORT], before, {"sm_90"}).new == {
        other.key: ["is in the baseline, but nothing launches it"]
    }
    after = baseline.updated([REPORT], before, "3.7.1", {"sm_90"}, accept_faults=False)
    assert list(after.entries) == [REPORT.key]


def test_a_baseline_survives_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line per entry, and the same figures when read again."""
    monkeypatch.setattr(baseline, "FOLDER", tmp_path)
    bad = replace(REPORT, kernel="qk_prologue", spill_bytes=8, loop_instructions=())
    before = baseline.updated([bad, REPORT], None, "3.7.1", set(), accept_faults=True)
    path = baseline.save(before)
    assert baseline.load("3.7.1") == before
    assert sum(REPORT.key in line for line in path.read_text().splitlines()) == 1
    assert baseline.load("3.7.0") is None


def test_tables_are_those_of_the_baselines() -> None:
    """`python -m bench.codegen.tables` rewrites them."""
    text = tables.DOCUMENT.read_text()
    assert tables.document(text) == text


@pytest.mark.parametrize(
    ("target", "registers", "shared_bytes", "warps", "expected"),
    [
        ("sm_90", 255, 100_352, 8, 1),  # 8 * 32 * 256 registers are all there are
        ("sm_90", 128, 0, 8, 2),
        ("sm_90", 129, 0, 8, 1),  # registers are allocated in steps of 8 per thread
        ("sm_90", 32, 0, 4, 16),  # 64 warps
        ("sm_90", 16, 0, 1, 32),  # 32 programs
        ("sm_90", 64, 227 * 1024, 4, 1),
        ("sm_90", 64, 113 * 1024, 4, 2),
        ("sm_90", 64, 113 * 1024 + 1, 4, 1),
        ("sm_80", 64, 163 * 1024, 4, 1),
        ("sm_86", 32, 0, 4, 12),  # 48 warps
        ("sm_86", 64, 99 * 1024, 4, 1),
        ("gfx942", 219, 41_216, 8, 1),
        ("gfx942", 128, 0, 4, 4),
    ],
)
def test_occupancy(target: str, registers: int, shared_bytes: int, warps: int, expected: int) -> None:
    assert ctas_per_sm(target, registers, shared_bytes, warps) == expected


def test_tensor_memory_limits_occupancy() -> None:
    assert ctas_per_sm("sm_100", 64, 0, 4, tensor_memory_columns=256) == 2


def loops(instructions: list[machine_code.Instruction]) -> list[list[str]]:
    """The opcodes of each loop with products."""
    return [[x.opcode for x in loop] for loop in machine_code.product_loops(instructions)]


@pytest.mark.parametrize("product", [
    "HGMMA.64x64x16.F32.BF16", "QGMMA.64x64x32.F32.E4M3.E4M3", "QMMA.16832.F32.E4M3.E4M3", "UTCQMMA",
])  # fmt: skip
def test_loops_of_a_disassembly(product: str) -> None:
    """Innermost loops with products count; the outer loop and loops without products do not."""
    sass = f"""
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   {product} R24, gdesc[UR4], RZ, !UPT ;
        /*0020*/                   FADD R2, R2, R3 ;
        /*0030*/              @!P0 BRA 0x10 ;
        /*0040*/                   IADD3 R4, R4, 0x1, RZ ;
        /*0050*/               @P1 BRA 0x0040 ;
        /*0060*/                   {product} R24, gdesc[UR4], RZ, !UPT ;
        /*0070*/               @P2 BRA 0x60 ;
        /*0080*/               @P3 BRA 0x0 ;
        /*0090*/                   EXIT ;
        /*00a0*/                   BRA 0xa0;
    """
    assert loops(machine_code.sass_instructions(sass)) == [[product, "FADD", "BRA"], [product, "BRA"]]


def test_loops_without_tensor_cores() -> None:
    """float32 products are FMAs; only a few of them are no product."""
    body = [machine_code.Instruction(i, "FFMA") for i in range(16)]
    assert loops([*body, machine_code.Instruction(16, "BRA", 0)]) == [["FFMA"] * 16 + ["BRA"]]
    assert loops([*body, machine_code.Instruction(16, "BRA", 1)]) == []


def test_loops_of_amd_assembly() -> None:
    assembly = """
.LBB0_1:
\ts_waitcnt lgkmcnt(0)
\tv_mfma_f32_32x32x8_bf16_1k v[0:15], v[16:17], v[18:19], v[0:15]
; %bb.2:
\ts_cbranch_scc1 .LBB0_1
\ts_endpgm
"""
    found = loops(machine_code.amdgcn_instructions(assembly))
    assert found == [["s_waitcnt", "v_mfma_f32_32x32x8_bf16_1k", "s_cbranch_scc1"]]
