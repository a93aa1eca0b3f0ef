"""The guard of warp-specialised kernels: its refusals, planted and by cross-compilation. No GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from fusedattn.kernels import guard
from tests.conftest import INTERPRETING
from tests.helpers import quick
from tests.helpers.compiling import compiling

CLEAN = "ptxas info: 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info: Used 168 registers"
ASM = {"ttgir": "ttg.warp_specialize(%0)", "ptx": "ptx", "cubin": b"code"}


def compiled(shared: int = 180_000, **changes: Any) -> Any:
    return lambda: SimpleNamespace(asm=ASM | changes, metadata=SimpleNamespace(shared=shared))


@pytest.fixture
def assembler(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The result of the assembler for any kernel."""
    gives: dict[str, Any] = {"cubin": b"code", "log": CLEAN}
    monkeypatch.setattr(guard, "_assembled", lambda ptx: (gives["cubin"], gives["log"]))
    monkeypatch.setattr(guard, "_reasons", {})
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    return gives


def test_what_is_refused(assembler, monkeypatch):
    assert guard.reason(compiled()) == ""

    def crash() -> Any:
        raise RuntimeError("PassManager::run failed\nand more")

    assert guard.reason(crash) == "RuntimeError: PassManager::run failed"
    assert guard.reason(lambda: None).startswith("AttributeError")  # nothing, or a kernel compiled later
    assert guard.reason(lambda: SimpleNamespace(asm=ASM)).startswith("AttributeError")
    assert guard.reason(compiled(shared=300_000)) == "it takes 300000 bytes of shared memory"
    assert guard.reason(compiled(ttgir="scf.for")) == "its loop was not split between warps"
    assembler["log"] = CLEAN.replace("0 bytes spill loads", "4 bytes spill loads")
    assert guard.reason(compiled()) == "it spills registers"
    assembler["log"] = CLEAN.replace("0 bytes spill stores", "10 bytes spill stores")
    assert guard.reason(compiled()) == "it spills registers"
    assembler["log"] = ""
    assert guard.reason(compiled()) == "it spills registers"
    assembler["log"] = f"{CLEAN}\nwgmma.mma_async instructions are serialized due to ..."
    assert guard.reason(compiled()) == "its products wait for each other"
    assembler["cubin"] = b"other code"
    assert guard.reason(compiled()) == "its machine code is not what the assembler gives for it"

    def no_assembler(ptx: str) -> Any:
        raise subprocess.CalledProcessError(1, "ptxas")

    monkeypatch.setattr(guard, "_assembled", no_assembler)
    assert guard.reason(compiled()).startswith("CalledProcessError")


def test_a_verdict_is_kept_and_a_refusal_said_once(assembler, recwarn):
    asked = []

    def counted(**changes: Any) -> Any:
        asked.append(changes)
        return compiled(**changes)()

    for _ in range(3):
        assert guard.accepts("good", counted)
        assert not guard.accepts("bad", lambda: counted(ttgir=""))
    assert asked == [{}, {"ttgir": ""}]
    assert [str(x.message) for x in recwarn] == [
        "a warp-specialised kernel is not launched: its loop was not split between warps"
    ]


def test_where_none_is_tried(monkeypatch):
    """Another GPU, another version of Triton, AMD, or disabled by the user."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(guard, "_allowed", True)
    capabilities = [(9, 0), (10, 0), (8, 0), (9, 1)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(triton, "__version__", "3.7.1")
    guard._is_known.cache_clear()
    assert [guard.knows(torch.device("cuda", i)) for i in range(4)] == [True, False, False, False]
    for version in ("3.7.0", "3.8.0", "3.10.0", "3.7.1+git"):
        monkeypatch.setattr(triton, "__version__", version)
        assert not guard.knows(torch.device("cuda", 0))
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    assert guard.knows(torch.device("cuda", 0))
    monkeypatch.setattr(guard, "_allowed", False)
    assert not guard.knows(torch.device("cuda", 0))
    monkeypatch.setattr(guard, "_allowed", True)
    monkeypatch.setattr(torch.version, "hip", "6.0")
    guard._is_known.cache_clear()
    assert not guard.knows(torch.device("cuda", 0))
    guard._is_known.cache_clear()


@quick.only(value="0")
@pytest.mark.parametrize(("value", "allowed"), [(None, True), ("1", True), ("0", False)])
def test_the_switch_is_read_once(value, allowed):
    environment = {name: x for name, x in os.environ.items() if name != guard.SWITCH}
    script = "from fusedattn.kernels import guard; print(guard._allowed)"
    found = subprocess.run(
        [sys.executable, "-c", script],
        env=environment | ({} if value is None else {guard.SWITCH: value}),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == str(allowed)


@pytest.mark.skipif(not INTERPRETING, reason="there is a GPU to compile for")
def test_an_interpreted_kernel_is_not_compiled():
    assert guard.knows(torch.device("cpu"))
    assert guard.accepts("interpreted", lambda: 1 / 0)


SCRIPT = """
import warnings
from dataclasses import replace
from unittest.mock import patch
import torch
from bench.codegen import launches
from fusedattn import attention, masks
from fusedattn.kernels import attention_fwd_specialized as specialized, configs, guard
from fusedattn.kernels.configs import KernelConfigs, TileConfig

accepts, keys, reasons = guard.accepts, {}, []

def judged(key, compiled):
    keys.setdefault(key, set()).add(compiled().hash)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accepted = accepts(key, compiled)
    reasons.append("; ".join(str(x.message) for x in caught) or accepted)
    return accepted

def launched(tile, *tensors, **options):
    plain = tile.plain
    names = ("attention_fwd", "attention_fwd_specialized")
    with (
        launches.compiling("sm_90", names) as found,
        patch.object(configs, "lookup", lambda *asked: KernelConfigs(tile, plain, plain)),
        patch.object(guard, "accepts", judged),
    ):
        attention(*tensors, backend="triton", **options)
    return [x.kernel + (" only_nan" if "only_nan" in x.features else "") for x in found]

def tensors(batch, nheads, seqlen, head_dim, transposed=False):
    shape = (batch, seqlen, nheads, head_dim) if transposed else (batch, nheads, seqlen, head_dim)
    found = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(3))
    return [x.transpose(1, 2) if transposed else x for x in found]
"""


@pytest.mark.thorough
def test_what_the_compiler_makes(tmp_path: Path) -> None:
    """A good config runs, with a repair after it if masked; one that spills, is too large or is not split does not."""
    script = f"""{SCRIPT}
good, wide, narrow = (TileConfig(128, n, 4, 2, "specialized") for n in (64, 256, 32))
print(launched(good, *tensors(2, 2, 256, 64)), reasons.pop())
print(launched(good, *tensors(2, 2, 250, 64), mask=masks.causal()), reasons.pop())
print(launched(wide, *tensors(2, 2, 256, 128)), reasons.pop())
print(launched(narrow, *(x.requires_grad_() for x in tensors(2, 2, 256, 256))), reasons.pop())
bad = replace(good)
object.__setattr__(bad, "num_warps", 8)
print(launched(bad, *tensors(2, 2, 256, 64)), reasons.pop())
with patch.object(guard, "_assembled", side_effect=OSError("no assembler")):
    print(launched(replace(good, num_stages=3), *tensors(2, 2, 256, 64)), reasons.pop())
"""
    result = compiling("-c", script, cache=tmp_path)
    assert result.returncode == 0, result.stderr
    good, causal, wide, spilling, bad, no_assembler = result.stdout.splitlines()
    assert good == "['attention_fwd_specialized'] True"
    assert causal == "['attention_fwd_specialized', 'attention_fwd only_nan'] True"
    # It is compiled first, so that the guard can inspect it.
    for line in (wide, spilling, bad, no_assembler):
        assert line.startswith(
            "['attention_fwd_specialized', 'attention_fwd'] a warp-specialised kernel is not launched"
        )
    assert "bytes of shared memory" in wide
    assert "it spills registers" in spilling  # the accumulators at head_dim 256 need too many
    assert "its loop was not split" in bad
    assert no_assembler.endswith("OSError: no assembler")


@pytest.mark.thorough
def test_a_key_names_one_compilation(tmp_path: Path) -> None:
    """A key holds everything that makes Triton compile another kernel, but no lengths, which change often."""
    script = f"""{SCRIPT}
good = TileConfig(128, 64, 4, 2, "specialized")
calls = ((2, 2, 256, 64), (2, 2, 320, 64), (1, 16, 192, 64), (1, 1, 64, 64), (2, 2, 256, 64, True), (2, 3, 128, 40))
for call in calls:
    launched(good, *tensors(*call))
print(*(len(x) for x in keys.values()), len(set.union(*keys.values())))
"""
    result = compiling("-c", script, cache=tmp_path)
    assert result.returncode == 0, result.stderr
    *of_key, in_all = map(int, result.stdout.split())
    assert set(of_key) == {1}
    assert in_all <= len(of_key) <= 5  # the first two have the same key
