"""What ``fusedattn.fuse(model)`` does to models of transformers: it changes the name of their attention."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fusedattn.integrations.transformers.registration import NAME, register
from fusedattn.integrations.transformers.rotary import TWINS
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
    """Whether the file of its class looks attention up, or it is an attention that does not."""
    looked_up = hasattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS")
    return looked_up or "Attention" in type(module).__name__


def reasons(model: PreTrainedModel) -> list[str]:
    """Why a model cannot be fused."""
    found = []
    for part in _parts(model):
        name = type(part).__name__
        if not part._can_set_attn_implementation():
            found.append(f"{name} does not choose its attention by attn_implementation")
        elif not (part._supports_sdpa or part._supports_flex_attn or part._supports_attention_backend):
            # Some of its attention may be looked up, and some not.
            own = {type(m).__name__ for m in part.modules() if _computes_weights(m)}
            found += [f"{name} computes attention in {kind} itself" for kind in sorted(own)]
    return list(dict.fromkeys(found))


def _computes_weights(module: nn.Module) -> bool:
    is_attention = "Attention" in type(module).__name__ and not isinstance(module, nn.MultiheadAttention)
    return is_attention and "softmax" in inspect.getsource(type(module))


def is_fused(model: PreTrainedModel) -> bool:
    """Whether :func:`fuse` was called on it, or on one that it is a part of, and it is as that left it."""
    return _BEFORE in model.__dict__ and model.config._attn_implementation == NAME


def is_bypassed(module: Any) -> bool:
    """Whether a module is a fused layer for which another attention was chosen since."""
    return type(module) in TWINS.values() and module.config._attn_implementation != NAME


def implementations(model: PreTrainedModel) -> tuple[str, str]:
    """The attention before and after."""
    return f"{type(model).__name__} with {model.__dict__[_BEFORE]!r} attention", repr(NAME)


def fuse(model: PreTrainedModel, backend: Backend | None, deterministic: bool) -> None:
    """Choose the registered attention, and remember which each part had."""
    register()
    parts = list(_parts(model))
    known = {id(part.config): part.__dict__[_BEFORE] for part in parts if _BEFORE in part.__dict__}
    for part in parts:  # all, before any is changed: they share configs
        part.__dict__.setdefault(_BEFORE, known.get(id(part.config), part.config._attn_implementation))
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
    """It, and the models of transformers inside, some of which have configs of their own."""
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))
