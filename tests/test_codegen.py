"""The machine code of every launch configuration, by cross-compilation: no GPU is needed."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")  # .ci/run adds sm_86 through make codegen
REPORTS_PER_TARGET = (3 + 4) * 3 * 2  # kernels in 16 bits and in float32, head_dims, regimes


def codegen(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run bench.codegen where kernels are compiled, not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "bench.codegen", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", TARGETS)
def test_every_config_compiles_to_fit_code(target: str, tmp_path: Path) -> None:
    """No spills (on AMD they are only reported), no more shared memory than there is, products on tensor cores."""
    result = codegen("--target", target, "--json", cache=tmp_path)
    assert result.stdout, result.stderr
    reports = json.loads(result.stdout)
    faults = {
        f"{r['kernel']} head_dim {r['head_dim']} {r['dtype']} {r['features']} {r['config']}": r["faults"]
        for r in reports
        if r["faults"]
    }
    assert len(reports) == REPORTS_PER_TARGET
    assert not faults
    assert result.returncode == 0


def test_a_config_that_spills_is_found(tmp_path: Path) -> None:
    """The check above can fail: a tile that is too large for its warps spills."""
    script = """
import sys, torch
from bench import codegen
from fusedattn.kernels.configs import TileConfig
what = codegen.Compilation("attention_fwd", "sm_90", 128, torch.bfloat16, "plain", TileConfig(128, 128, 4, 2))
report = codegen.compile_kernel(what)
assert report.spill_bytes > 0 and report.faults, report
assert codegen.table([report])
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, check=True)


def test_no_product_is_transposed() -> None:
    """Triton before 3.7.1 miscompiles dot(trans(x), ...) on Hopper where x is itself a product: only tiles that
    were loaded may be transposed."""
    loaded = {"q", "k", "v", "dout"}
    transposed = []
    for path in sorted((ROOT / "kernels").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.trans":
                transposed.append((path.name, ast.unparse(node.args[0])))
    assert transposed
    assert {name for _, name in transposed} <= loaded, transposed
