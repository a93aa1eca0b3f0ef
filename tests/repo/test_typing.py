"""A strictly typed program that uses the public names: no errors, and the types that the documentation promises."""

from __future__ import annotations

from pathlib import Path

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
