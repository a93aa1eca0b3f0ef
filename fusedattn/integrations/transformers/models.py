"""What ``fusedattn.fuse(model)`` does to models of transformers: it changes the name of their attention."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from fusedattn.integrations.transformers.registration import NAME, register
from fusedattn.support import Backend


def models_in(model: nn.Module) -> dict[str, PreTrainedModel]:
    """The outermost models of transformers in a module, by name."""
    found: dict[str, PreTrainedModel] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") if outer else True for outer in found)
        if isinstance(module, PreTrainedModel) and not inside:
            found[name] = module
    return found


def reasons(model: PreTrainedModel) -> list[str]:
    """Why a model cannot be fused."""
    return [
        f"{type(part).__name__} does not choose its attention by attn_implementation"
        for part in model.modules()
        if isinstance(part, PreTrainedModel) and not part._can_set_attn_implementation()
    ]


def is_fused(model: PreTrainedModel) -> bool:
    """Whether :func:`fuse` was called on it."""
    return "_before_fusedattn" in model.__dict__


def implementations(model: PreTrainedModel) -> tuple[str, str]:
    """The attention before and after."""
    before, after = model.__dict__["_before_fusedattn"], model.config._attn_implementation
    return f"{type(model).__name__} with {before!r} attention", repr(after)


def fuse(model: PreTrainedModel, backend: Backend | None) -> None:
    """Choose the registered attention, and remember which it was."""
    register()
    if not is_fused(model):
        model.__dict__["_before_fusedattn"] = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    for module in model.modules():
        module.__dict__["fusedattn_backend"] = backend


def unfuse(model: PreTrainedModel) -> None:
    """Undo :func:`fuse`."""
    if not is_fused(model):
        return
    model.set_attn_implementation(model.__dict__.pop("_before_fusedattn"))
    for module in model.modules():
        module.__dict__.pop("fusedattn_backend", None)
