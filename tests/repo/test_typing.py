"""A strictly typed program that uses the public names: no errors, and the types that the documentation promises."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.compiling import ROOT, run

PROGRAM = """
import torch
from torch import Tensor, nn

import fusedattn
from fusedattn import Rope, ScoreMod, attention, attention_varlen, attention_weights, biases, masks
from fusedattn.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from fusedattn.integrations.transformers import register
from fusedattn.transformer import GPTModel

q = torch.randn(1, 2, 5, 16)
mask = masks.causal() & masks.padding(torch.ones(1, 5, dtype=torch.bool))
reveal_type(mask)
reveal_type(attention(q, q, q, mask=mask, rope=Rope.from_theta(16, 8), bias=biases.alibi(torch.ones(2))))
reveal_type(attention(q, q, q, return_lse=True))
reveal_type(attention(q, q, q, return_max=True))
reveal_type(attention(q, q, q, return_lse=True, return_max=True))
out, lse = attention(q, q, q, return_lse=True)
reveal_type(attention_weights(q, q, lse))
x, stops = q[0].transpose(0, 1), torch.tensor([0, 5], dtype=torch.int32)
reveal_type(attention_varlen(x, x, x, stops, stops))
reveal_type(fusedattn.scaled_dot_product_attention(q, q, q, is_causal=True))
with fusedattn.replace_sdpa() as replaced:
    reveal_type(replaced.fused)
reveal_type(fusedattn.fuse(GPTModel(8, 16, 2, 1)))
reveal_type(fusedattn.fuse(nn.TransformerEncoderLayer(16, 2)))
reveal_type(fusedattn.fusion_report(nn.MultiheadAttention(16, 2)))
reveal_type(fusedattn.not_supported_reasons(q, q, q))
reveal_type(flash_attn_func)
register()
attention(q, q, q, backend="cuda")
attention(q, q, q, scale="1")
masks.causal(align="left")
"""

REVEALED = (
    "fusedattn.mask.Mask",
    "torch._tensor.Tensor",
    "tuple[torch._tensor.Tensor, torch._tensor.Tensor]",
    "tuple[torch._tensor.Tensor, torch._tensor.Tensor]",
    "tuple[torch._tensor.Tensor, torch._tensor.Tensor, torch._tensor.Tensor]",
    "torch._tensor.Tensor",
    "torch._tensor.Tensor",
    "torch._tensor.Tensor",
    "int",
    "fusedattn.transformer.gpt.GPTModel",
    "torch.nn.modules.transformer.TransformerEncoderLayer",
    "list[fusedattn.fusion.Replacement]",
    "list[str]",
)


@pytest.mark.thorough
def test_a_program_under_mypy_strict(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    options = ["--follow-imports", "silent", "--ignore-missing-imports", "--hide-error-context", "--no-color-output"]
    # Not from the checkout, whose configuration mypy would read; `make lint` covers errors in the package itself.
    command = ("-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", *options, "program.py")
    done = run(*command, cwd=tmp_path, MYPYPATH=str(ROOT))
    lines = [line for line in done.stdout.splitlines() if line.startswith("program.py")]
    types = [line.partition('Revealed type is "')[2].rstrip('"') for line in lines if "Revealed type" in line]
    types = [name.replace("builtins.", "") for name in types]  # older versions of mypy write this prefix
    assert tuple(types[: len(REVEALED)]) == REVEALED, done.stdout + done.stderr
    assert "Any" not in types[len(REVEALED)].replace("*args: Any", ""), types[len(REVEALED) :]
    errors = [line.rpartition("[")[2] for line in lines if "error:" in line]
    assert errors == ["call-overload]", "call-overload]", "arg-type]"], done.stdout


# Internal parts, and classes that transformers declares without types. All else is public or seen in public types.
WITHOUT_ALL_TYPES = ("kernels.", "backends.", "virtual_gpu.", "cli.", "integrations.transformers.")


@pytest.fixture(scope="module")
def _pyright() -> None:
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed")
    # Its package of PyPI fetches the program from npm's registry, once.
    started = run("-m", "pyright", "--version", npm_config_fetch_retries="0")
    if started.returncode:
        pytest.skip(f"pyright does not start: {(started.stdout + started.stderr).strip()[-200:]}")


def pyright(*arguments: str, cwd: Path) -> dict[str, Any]:
    """The report of pyright."""
    # With --verifytypes it looks for packages in those of the first `python` of PATH, whatever --pythonpath says.
    paths = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": str(ROOT)}
    variables = {name: _before(folder, name) for name, folder in paths.items()}
    done = run("-m", "pyright", *arguments, "--outputjson", cwd=cwd, **variables)
    assert done.stdout.lstrip().startswith("{"), done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.thorough
@pytest.mark.usefixtures("_pyright")
def test_a_program_under_pyright_strict(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = {"typeCheckingMode": "strict", "reportUnusedImport": False, "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    found = pyright("--pythonpath", sys.executable, "program.py", cwd=tmp_path)["generalDiagnostics"]
    revealed = [x["message"].rpartition(' is "')[2].rstrip('"') for x in found if x["severity"] == "information"]
    # pyright writes the names of classes without their modules.
    expected = tuple(re.sub(r"(\w+\.)+", "", name) for name in REVEALED)
    assert tuple(revealed[: len(REVEALED)]) == expected, found
    assert "Unknown" not in revealed[len(REVEALED)], revealed
    lines = PROGRAM.splitlines()
    wrong = [lines[x["range"]["start"]["line"]] for x in found if x["severity"] == "error"]
    assert wrong == lines[-3:], found


@pytest.mark.thorough
@pytest.mark.usefixtures("_pyright")
def test_every_public_type_is_known(tmp_path: Path) -> None:
    symbols = pyright("--verifytypes", "fusedattn", "--ignoreexternal", cwd=tmp_path)["typeCompleteness"]["symbols"]
    assert len(symbols) > 1000, "pyright does not find the package"
    unknown = [x["name"].removeprefix("fusedattn.") for x in symbols if x["isExported"] and not x["isTypeKnown"]]
    assert [name for name in unknown if not name.startswith(WITHOUT_ALL_TYPES)] == []


def _before(folder: str, variable: str) -> str:
    """A search path with a folder before those of a variable."""
    return os.pathsep.join(filter(None, (folder, os.environ.get(variable))))
