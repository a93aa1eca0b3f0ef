"""The same call finds precompiled kernels from another checkout and in another cache; other calls do not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.helpers.compiling import ROOT, output

# Compile the launches of a small call, pack and unpack them; print what another process finds.
COMPILE = """
import json, os, sys
from pathlib import Path
from bench.codegen import launches
from bench.first import prebuilt
from bench.first.jobs import Smoke
from bench.first.pool import Kernels
from fusedattn.testing.cases import Case
from fusedattn import support
import torch, triton

support.INTERPRETER_REASONS = ["what the interpreter cannot do does not matter to the compiler"]
kernels = Kernels()
triton.knobs.compilation.listener = lambda *, metadata, cache_hit, **_: kernels.add(metadata["hash"], cache_hit)
job = Smoke("small", Case(batch=1, nheads_q=2, nheads_kv=2, seqlen_q=16, seqlen_k=16, head_dim=16, dtype=torch.float16))
folder = Path(sys.argv[1])
made = prebuilt.compile_job(job, arch="sm_90", folder=folder, libtriton=None)
assert not made.errors, made.errors
path, here = Path(sys.argv[2]), prebuilt.identity(launches.TARGETS["sm_90"])
if not path.exists():
    assert prebuilt.pack(folder, path, here) == len(made.kernels)
    other = here | {"triton_key": "another"}
    n, text = prebuilt.unpack(path, other, folder.parent / "refused")
    assert n == 0 and "triton_key is another here" in text, text
    assert not (folder.parent / "refused").exists()
    n, text = prebuilt.unpack(path, here, folder.parent / "unpacked")
    assert (n, text) == (len(made.kernels), f"{path.name}: {n} kernels that need not be compiled"), text
print(len(kernels.compiled), len(kernels.found), sorted(made.kernels))
"""


def compiled(checkout: Path, *arguments: Path) -> list[str]:
    path = os.pathsep.join((str(checkout), os.environ.get("PYTHONPATH", "")))
    return output("-c", COMPILE, *arguments, cwd=checkout, PYTHONPATH=path).split(maxsplit=2)


@pytest.mark.thorough
def test_another_checkout_finds_the_compiled_kernels(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    archive = tmp_path / "kernels.tar.xz"
    n_compiled, n_found, kernels = compiled(ROOT, tmp_path / "cache", archive)
    assert int(n_compiled) >= 4
    assert n_found == "0"
    shutil.rmtree(tmp_path / "cache")  # kernels do not depend on its paths
    elsewhere = tmp_path / "elsewhere"
    for name in ("fusedattn", "kernels", "bench"):
        shutil.copytree(ROOT / name, elsewhere / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    assert compiled(elsewhere, tmp_path / "unpacked", archive) == ["0", n_compiled, kernels]
