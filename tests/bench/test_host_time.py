"""The host time of a call, and Triton's hooks: Triton's own launchers, over a driver that launches nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bench.work.host import FOUR_ARGUMENTS
from bench.work.work import OWN
from tests.helpers.compiling import output

pytestmark = pytest.mark.skipif(
    not (shutil.which("gcc") or shutil.which("clang")), reason="Triton's launchers are built by a C compiler"
)

# In launches of a kernel with four arguments. The goals are 6 and 8; processors differ by a fifth. Under other load, a
# backward mostly waits for the scheduler, so `python -m bench run` measures that.
BOUNDS = {"forward": 7.2, "decode": 9.6}


@pytest.mark.thorough
@pytest.mark.parametrize("panel", BOUNDS)
def test_calls_cost_the_host_little(tmp_path: Path, panel: str) -> None:
    """One of three tries must succeed: other load on the machine makes calls longer, not shorter."""
    ratios = []
    for attempt in range(3):
        out = tmp_path / str(attempt)
        command = ["bench", "run", "--suite", "launch", "--filter", f"host alone, {panel}, ", "--out", str(out)]
        output("-m", *command, TRITON_CACHE_DIR=str(tmp_path))
        ratios.append(_ratio(out))
        if ratios[-1] <= BOUNDS[panel]:
            return
    pytest.fail(f"as long as {ratios} launches, allowed are {BOUNDS[panel]}")


def _ratio(folder: Path) -> float:
    (file,) = folder.rglob("*.json")
    (result,) = json.loads(file.read_text())["results"]
    ours, four_arguments = (result["contestants"][name]["ms"]["median"] for name in (OWN, FOUR_ARGUMENTS))
    return float(ours / four_arguments)


@pytest.mark.thorough
def test_hooks_of_triton_are_told_of_every_launch(tmp_path: Path) -> None:
    """Profilers add them to a running process: known launches and replayed calls must notify them too."""
    script = """
import torch, triton
from bench.work.stubbed_driver import launching_nothing
from fusedattn import attention, masks
from fusedattn.backends.triton import launching
told = []
q = torch.zeros(1, 2, 64, 64, dtype=torch.float16)
def launched(most_replays):
    launching.MOST_REPLAYS = most_replays
    told.clear()
    attention(q, q, q, mask=masks.causal(), backend="triton")
    return len(told)
with launching_nothing():
    attention(q, q, q, mask=masks.causal(), backend="triton")
    found = []
    for hook in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        found += [launched(256), launched(256), launched(256), launched(0)]
        hook.add(told.append)
        found += [launched(256), launched(0)]
        hook.remove(told.append)
        found += [launched(256), launched(0)]
print(found)
"""
    assert output("-c", script, TRITON_CACHE_DIR=str(tmp_path)).strip() == str([0, 0, 0, 0, 1, 1, 0, 0] * 2)
