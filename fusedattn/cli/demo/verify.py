"""Check that the fused model agrees with the reference: loss, logits and every gradient, within the error budget.

The truth is the reference model in float64. The budget of :mod:`fusedattn.testing` limits the fused model's errors
relative to those of the reference model in the same dtype.

That budget is made for the tensors of one attention. In a whole model both errors are mostly the rounding of other
layers, and in one small tensor (a bias) the ratio of two such errors is chance: judged alone, one tensor in ten would
exceed the budget, a different one each time. So tensors of one kind are judged together, each divided by its own size,
and the ratios are averaged (geometrically) over a few batches. The factors stay the same, and a fault stays visible:
it is orders of magnitude above rounding, and the row criterion compares every row of every tensor, relative to its own
size, with the worst row of the reference.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn import fuse, testing
from fusedattn.cli.demo import corpus
from fusedattn.cli.demo.corpus import Batch, Corpus
from fusedattn.cli.demo.settings import Agreement, Settings
from fusedattn.support import Backend
from fusedattn.testing import Ratios
from fusedattn.transformer import GPTModel

LOSS, LOGITS = "loss per token", "logits"


@dataclass(frozen=True)
class Kind:
    """The tensors of one kind: their number, the largest error of each model relative to the size of its tensor, and
    :class:`fusedattn.testing.Ratios`, averaged over batches."""

    name: str
    n_tensors: int
    fused: float
    reference: float
    ratios: Ratios

    @property
    def used(self) -> float:
        """The share of the budget that is used (1 = all), with one unit in the last place allowed."""
        r = self.ratios
        by_ratios = max(r.max / testing.MAX_FACTOR, r.mean / testing.MEAN_FACTOR, r.row / testing.MAX_FACTOR)
        return min(by_ratios, r.used)

    @property
    def ok(self) -> bool:
        return self.used <= 1.0


def build_model(settings: Settings, n_layers: int, max_len: int, device: torch.device) -> GPTModel:
    """The reference GPT over bytes."""
    return GPTModel(
        256, settings.d_model, settings.n_heads, n_layers, max_len=max_len, positions="rotary", dropout=0.0
    ).to(device)  # fmt: skip


def verify(
    agreement: Agreement, settings: Settings, text: Corpus, device: torch.device, generator: torch.Generator
) -> list[Kind]:
    """Compare a reference model and its fused copy on real batches."""
    reference = build_model(settings, agreement.n_layers, agreement.seqlen, device).to(agreement.dtype)
    fused = fuse(copy.deepcopy(reference), backend=cast(Backend, agreement.backend))
    golden = copy.deepcopy(reference).double()
    batches = []
    for _ in range(agreement.n_batches):
        batch = corpus.random_batch(text.train, agreement.batch, agreement.seqlen, generator, device)
        batches.append(_padded(batch, generator) if agreement.padded else batch)
    return compare(fused, golden, reference, batches)


def compare(fused: GPTModel, golden: GPTModel, reference: GPTModel, batches: Iterable[Batch]) -> list[Kind]:
    """The errors of `fused` and `reference`, both against `golden`, by kind of tensor."""
    parts: dict[str, list[Kind]] = {}
    for batch in batches:
        results = tuple(_results(model, batch) for model in (fused, golden, reference))
        names: dict[str, list[str]] = {}
        for name in results[0]:
            names.setdefault(_kind(name), []).append(name)
        for kind, members in names.items():
            parts.setdefault(kind, []).append(_judge(kind, members, *results))
    return [_average(kinds) for kinds in parts.values()]


def _judge(kind: str, names: list[str], *results: dict[str, Tensor]) -> Kind:
    """The named tensors of (actual, golden, baseline) joined into one, with the rows of all of them."""
    width = min(results[0][name].shape[-1] for name in names)
    sizes = {name: _size(results[1][name]) for name in names}
    actual, golden, baseline = (
        torch.cat([(tensors[name] / sizes[name]).reshape(-1, width) for name in names]) for tensors in results
    )
    return Kind(
        kind,
        len(names),
        fused=(actual.double() - golden).abs().max().item(),
        reference=(baseline.double() - golden).abs().max().item(),
        ratios=testing.compare(actual, golden, baseline),
    )


def _average(kinds: list[Kind]) -> Kind:
    """One kind over several batches: the largest errors, the geometric means of the ratios."""
    largest = {name: max(getattr(kind, name) for kind in kinds) for name in ("fused", "reference")}
    batches = [astuple(kind.ratios) for kind in kinds]
    ratios = Ratios(*(math.prod(batch) ** (1 / len(batches)) for batch in zip(*batches, strict=True)))
    return replace(kinds[0], **largest, ratios=ratios)


def _results(model: GPTModel, batch: Batch) -> dict[str, Tensor]:
    """The loss of each token, the logits, and the gradient of the mean loss for every parameter; each with rows."""
    logits = model(batch.ids, batch.valid)
    losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none").view_as(batch.ids)
    if batch.valid is not None:
        losses = losses * batch.valid
    n_tokens = batch.ids.numel() if batch.valid is None else int(batch.valid.sum())
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(losses.sum() / n_tokens, parameters)
    found = {LOSS: losses.detach(), LOGITS: logits.detach(), **dict(zip(names, gradients, strict=True))}
    return {name: x if x.dim() > 1 else x[None] for name, x in found.items()}


def _size(x: Tensor) -> float:
    """The root mean square of a tensor as a power of two, so that dividing by it rounds nothing."""
    rms = x.square().mean().sqrt().item()
    return 2.0 ** round(math.log2(rms)) if 0.0 < rms < math.inf else 1.0


def _kind(name: str) -> str:
    if name in (LOSS, LOGITS):
        return name
    if "norm." in name:
        return "grad norms"
    if ".q_proj." in name or ".k_proj." in name or ".v_proj." in name:
        return "grad q, k, v"
    if ".out_proj." in name:
        return "grad attn out"
    return "grad FFN" if ".feed_forward." in name else "grad embedding"


def _padded(batch: Batch, generator: torch.Generator) -> Batch:
    """The same batch with the right end of every sequence but the first marked as padding."""
    n, seqlen = batch.ids.shape
    lengths = torch.randint(seqlen // 4, seqlen + 1, (n, 1), generator=generator)
    lengths[0] = seqlen
    valid = torch.arange(seqlen) < lengths
    return replace(batch, valid=valid.to(batch.ids.device))
