"""``fuse(model)``: replace the attention of a model by fused attention, in place.

A module that computes attention has a fused twin, a subclass of its class that computes the same. Fusing a model
changes the class of such modules in place, so parameters, buffers, hooks, names, optimizers and references to modules
stay as they were. Models of Hugging Face transformers look their attention up by a name in their config; that name
is changed too.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from fusedattn.call_checks import check_backend, check_deterministic
from fusedattn.integrations import torch_nn
from fusedattn.integrations.modules import (
    FusedLinearAttention,
    FusedScaledDotProductAttention,
    SplitLearnedPositionalEncoding,
    SplitPositionalEncoding,
)
from fusedattn.integrations.torch_nn import FusedMultiheadAttention
from fusedattn.support import Backend
from fusedattn.transformer import (
    LearnedPositionalEncoding,
    LinearAttention,
    PositionalEncoding,
    ScaledDotProductAttention,
    TopBlockAttention,
)

if TYPE_CHECKING:
    from fusedattn.distributed import Context

logger: logging.Logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)

# Subclasses of these are refused: they may compute something else.
TWINS: dict[type[nn.Module], type[nn.Module]] = {
    ScaledDotProductAttention: FusedScaledDotProductAttention,
    LinearAttention: FusedLinearAttention,
    nn.MultiheadAttention: FusedMultiheadAttention,
}

# With a context.
POSITION_TWINS: dict[type[nn.Module], type[nn.Module]] = {
    PositionalEncoding: SplitPositionalEncoding,
    LearnedPositionalEncoding: SplitLearnedPositionalEncoding,
}


@dataclass(frozen=True)
class Replacement:
    """A fused module: its name in the model, and its class (or implementation) before and after."""

    name: str
    reference: str
    fused: str

    def __str__(self) -> str:
        return f"{_called(self.name)}: {self.reference} -> {self.fused}"


def fuse(
    model: Model,
    *,
    backend: Backend | None = None,
    deterministic: bool = True,
    context: Context | None = None,
) -> Model:
    """Run every known attention in ``model`` through :func:`fusedattn.attention`, in place.

    Known are the reference Transformer of ``fusedattn.transformer``; ``torch.nn.MultiheadAttention``, and with it
    ``nn.TransformerEncoderLayer``, ``nn.TransformerDecoderLayer`` and ``nn.Transformer``; and models of Hugging Face
    transformers that choose their attention by ``attn_implementation``.

    Args:
        model: any module that is or contains such attention. Parameters, ``state_dict`` keys, hooks and modes are
            untouched; fusing twice is fusing once.
        backend: passed on to :func:`fusedattn.attention`; None chooses by device.
        deterministic: likewise; with False, gradients may be summed in any order.
        context: the model gets, on each process, the tokens that :meth:`fusedattn.distributed.Context.shard` gives it.
            Attention is to the tokens of all processes, at their positions in the whole sequence. Only for models of
            ``fusedattn.transformer``.

    Returns:
        ``model`` itself. :func:`fusion_report` lists the replacements, :func:`unfuse` undoes them.

    Raises:
        NotImplementedError: some module cannot be replaced faithfully; the message has every reason, and the
            model is left as it was.
        ValueError: there is no known attention in ``model``, or ``backend`` is unknown.
        TypeError: ``model`` is not a module, or ``deterministic`` not a bool.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, allowed is a torch.nn.Module")
    check_backend(backend)
    check_deterministic(deterministic)
    hugging_face = _hugging_face()
    reasons = [] if hugging_face else _of_old_transformers(model)
    reasons += [f"{_called(name)}: {reason}" for name, module in model.named_modules() for reason in _reasons(module)]
    models = hugging_face.models_in(model) if hugging_face else {}
    for name, pretrained in models.items():
        reasons += [f"{_called(name)}: {reason}" for reason in hugging_face.reasons(pretrained)]  # type: ignore[union-attr]
    if context is not None:
        from fusedattn.distributed.context import checked

        context = checked(context)
        others = [f"{_called(name)}: takes no context" for name in models]
        others += [
            f"{_called(name)}: takes no context"
            for name, module in model.named_modules()
            if isinstance(module, (TopBlockAttention, *_twins())) and not isinstance(module, ScaledDotProductAttention)
        ]
        reasons += others
    if reasons:
        raise NotImplementedError("model: cannot be fused faithfully: " + "; ".join(reasons))
    twins = _twins()
    cores = [module for module in model.modules() if type(module) in twins or type(module) in twins.values()]
    if not cores and not models:
        raise ValueError(
            f"model: got {type(model).__name__} without known attention, allowed are models with modules of "
            "fusedattn.transformer, torch.nn.MultiheadAttention or whole models of transformers; if a model calls "
            "F.scaled_dot_product_attention itself, fusedattn.replace_sdpa() replaces these calls"
        )
    for core in cores:
        core.__class__ = twins.get(type(core), type(core))
        core.__dict__.update(backend=backend, deterministic=deterministic)
    for module in model.modules():
        _split_positions(module, context)
        if isinstance(module, FusedScaledDotProductAttention):
            module.__dict__.update(context=context)
    for pretrained in models.values():
        hugging_face.fuse(pretrained, backend, deterministic)  # type: ignore[union-attr]
    for replacement in fusion_report(model):
        logger.info("fused %s", replacement)
    return model


def unfuse(model: Model) -> Model:
    """Undo :func:`fuse`, in place; returns ``model``."""
    references = {twin: reference for reference, twin in _twins().items()}
    for module in model.modules():
        if type(module) in references:
            for name in ("backend", "deterministic", "context"):
                module.__dict__.pop(name, None)
            module.__class__ = references[type(module)]
        _split_positions(module, None)
    hugging_face = _hugging_face()
    if hugging_face:
        for pretrained in hugging_face.models_in(model).values():
            hugging_face.unfuse(pretrained)
    return model


def fusion_report(model: nn.Module) -> list[Replacement]:
    """The modules that are fused in ``model`` now, in the order of its modules."""
    references = {twin: reference for reference, twin in _twins().items()}
    hugging_face = _hugging_face()
    models = hugging_face.models_in(model) if hugging_face else {}
    report = []
    for name, module in model.named_modules():
        if name in models and hugging_face and hugging_face.is_fused(module):
            report.append(Replacement(name, *hugging_face.implementations(module)))
        for twin, reference in references.items():
            if isinstance(module, twin) and not (hugging_face and hugging_face.is_bypassed(module)):
                report.append(Replacement(name, reference.__name__, type(module).__name__))
    return report


def _split_positions(module: nn.Module, context: Context | None) -> None:
    """Let a position encoding count through the whole sequence of a context, or undo it."""
    for reference, twin in POSITION_TWINS.items():
        if context is not None and type(module) is reference:
            module.__class__ = twin
        elif context is None and type(module) is twin:
            module.__class__ = reference
            module.__dict__.pop("context", None)
        if type(module) is twin:
            module.__dict__.update(context=context)


def _twins() -> dict[type[nn.Module], type[nn.Module]]:
    """The fused twin of each class; including classes of transformers once that is imported."""
    hugging_face = _hugging_face()
    return TWINS | hugging_face.TWINS if hugging_face else TWINS


def _hugging_face() -> ModuleType | None:
    """The integration with transformers; None if transformers is too old or not imported (no model can then be its)."""
    if "transformers" not in sys.modules:
        return None
    try:
        from fusedattn.integrations import transformers
    except ImportError:
        return None
    return transformers


def _of_old_transformers(model: nn.Module) -> list[str]:
    """Reasons why models of transformers are not fused if the integration cannot be imported."""
    transformers = sys.modules.get("transformers")
    kind = getattr(transformers, "PreTrainedModel", None)
    if kind is None or not any(isinstance(module, kind) for module in model.modules()):
        return []
    return [f"transformers: got {getattr(transformers, '__version__', None)}, allowed are 5.4 and newer"]


def _reasons(module: nn.Module) -> list[str]:
    """Reasons why this one module cannot be fused, or cannot be skipped."""
    for reference, twin in TWINS.items():
        if not isinstance(module, reference):
            continue
        if type(module) not in (reference, twin):
            return [f"{type(module).__name__} is a subclass of {reference.__name__}, which may compute something else"]
        found = ["its forward was replaced on the instance"] if "forward" in module.__dict__ else []
        return found + (torch_nn.reasons(module) if isinstance(module, nn.MultiheadAttention) else [])
    return []


def _called(name: str) -> str:
    return name or "(the model itself)"
