"""``fusedattn.fuse(model)`` for models of transformers: it changes the name of their attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fusedattn.integrations.transformers.attention import unknown_arguments
from fusedattn.integrations.transformers.registration import NAME, register, without_refusal
from fusedattn.integrations.transformers.rotary import TWINS
from fusedattn.integrations.transformers.sources import (
    computes_itself,
    file_looks_up,
    looks_up,
    passed_by_name,
    reasons_of_parts,
)
from fusedattn.support import Backend

_BEFORE = "_before_fusedattn"


def models_in(model: nn.Module) -> dict[str, PreTrainedModel]:
    """The outermost models of transformers in a module that have attention, by name."""
    found: dict[str, PreTrainedModel] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") if outer else True for outer in found)
        if isinstance(module, PreTrainedModel) and not inside and any(map(_may_attend, module.modules())):
            found[name] = module
    return found


def _may_attend(module: nn.Module) -> bool:
    """Whether the file of the module's class looks attention up, or the module computes attention itself."""
    return file_looks_up(type(module)) or "Attention" in type(module).__name__


def reasons(model: PreTrainedModel) -> list[str]:
    """Reasons why a model cannot be fused."""
    found = []
    for part in _parts(model):
        name = type(part).__name__
        kinds = _kinds(part)
        if not part._can_set_attn_implementation():
            found.append(f"{name} does not choose its attention by attn_implementation")
            continue
        found += reasons_of_parts(type(part), kinds)
        for kind in sorted(kinds, key=lambda kind: kind.__name__):
            unknown = unknown_arguments(passed_by_name(kind))
            found += [
                f"{kind.__name__} passes {argument!r}, which fused attention does not know" for argument in unknown
            ]
    if not found and not any(map(looks_up, _kinds(model))):
        own = {kind.__name__ for kind in _kinds(model) if computes_itself(kind)}
        found = [f"{type(model).__name__} computes attention in {name} itself" for name in sorted(own)]
    return list(dict.fromkeys(found))


def _kinds(model: nn.Module) -> set[type[nn.Module]]:
    """The classes of all modules in a model, except torch's."""
    kinds = {type(module) for module in model.modules()}
    return {kind for kind in kinds if not kind.__module__.startswith("torch.")}


def is_fused(model: PreTrainedModel) -> bool:
    """Whether :func:`fuse` was called on the model, or on one that contains it, and nothing has changed since."""
    return _BEFORE in model.__dict__ and model.config._attn_implementation == NAME


def is_bypassed(module: Any) -> bool:
    """Whether a module is a fused layer for which another attention has been chosen since."""
    return type(module) in TWINS.values() and module.config._attn_implementation != NAME


def implementations(model: PreTrainedModel) -> tuple[str, str]:
    """The attention before and after fusing, for the report."""
    own = sorted(kind.__name__ for kind in _kinds(model) if computes_itself(kind))
    but = f" (except {', '.join(own)}, which computes its own)" if own else ""
    return f"{type(model).__name__} with {model.__dict__[_BEFORE]!r} attention{but}", repr(NAME)


def fuse(model: PreTrainedModel, backend: Backend | None, deterministic: bool) -> None:
    """Choose the registered attention, and remember the previous one of each part."""
    register()
    parts = list(_parts(model))
    known = {id(part.config): part.__dict__[_BEFORE] for part in parts if _BEFORE in part.__dict__}
    for part in parts:  # all before any is changed, because they share configs
        part.__dict__.setdefault(_BEFORE, known.get(id(part.config), part.config._attn_implementation))
    with without_refusal():
        for part in parts:
            if part.config._attn_implementation != NAME:
                part.set_attn_implementation(NAME)
    for module in model.modules():
        module.__dict__.update(fusedattn_backend=backend, fusedattn_deterministic=deterministic)


def unfuse(model: PreTrainedModel) -> None:
    """Undo :func:`fuse`."""
    for part in _parts(model):
        if _BEFORE in part.__dict__:
            part.config._attn_implementation_internal = part.__dict__.pop(_BEFORE)
    for module in model.modules():
        for name in ("fusedattn_backend", "fusedattn_deterministic"):
            module.__dict__.pop(name, None)


def _parts(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model and the models of transformers inside, some of which have their own configs."""
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))
