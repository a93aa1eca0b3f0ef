"""Read in the source code of a transformers model how it computes attention.

A layer either looks its attention up by the name in its config, or computes it itself. Only its ``forward`` tells.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_LOOKED_UP = "ALL_ATTENTION_FUNCTIONS"  # the name of the registry in the files of models
_COMPUTES = re.compile(r"softmax|scaled_dot_product_attention")
_ADDS_MASK = re.compile(r"\+=?\s*attention_mask\b")


def looks_up(kind: type[nn.Module]) -> bool:
    """Whether modules of a class look their attention up."""
    return _LOOKED_UP in _source(kind)


def file_looks_up(kind: type[nn.Module]) -> bool:
    """Whether any class in the file of a class looks its attention up."""
    return hasattr(sys.modules.get(kind.__module__), _LOOKED_UP)


def computes_itself(kind: type[nn.Module]) -> bool:
    """Whether modules of a class compute attention themselves."""
    return _is_attention(kind) and not looks_up(kind) and _COMPUTES.search(_source(kind)) is not None


def adds_mask(kind: type[nn.Module]) -> bool:
    """Whether layers of a class add the model's mask to their scores; the mask of a named attention is not additive."""
    if not _is_attention(kind) or looks_up(kind) or "hidden_states" not in inspect.signature(kind.forward).parameters:
        return False
    return _ADDS_MASK.search(_source(kind)) is not None


def passed_by_name(kind: type[nn.Module]) -> frozenset[str]:
    """The keyword arguments that modules of a class pass to the attention that they look up."""
    if not looks_up(kind):
        return frozenset()
    calls = (node for node in ast.walk(ast.parse(_source(kind))) if isinstance(node, ast.Call))
    named = (call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "attention_interface")
    return frozenset(keyword.arg for call in named for keyword in call.keywords if keyword.arg)


def reasons_by_name(model: type[PreTrainedModel], name: str) -> list[str]:
    """Reasons against ``attn_implementation=name`` for models of a class, from the source of their file."""
    kinds = _made_by(model)
    if any(map(_is_attention, kinds)) and not any(map(looks_up, kinds)):
        return [f"{model.__name__} does not choose its attention by attn_implementation"]
    found = reasons_of_parts(model, kinds)
    for table, entries in _named_in(model, kinds).items():
        if isinstance(entries, dict) and table.endswith("ATTENTION_CLASSES") and name not in entries:
            found.append(f"{model.__name__} chooses its attention among {', '.join(entries)}")
    return found


def reasons_of_parts(model: type[PreTrainedModel], kinds: Iterable[type[nn.Module]]) -> list[str]:
    """A sentence for each class among the parts of a model whose attention a name would not replace."""
    own = {kind.__name__ for kind in kinds if adds_mask(kind) or (computes_itself(kind) and not can_choose(model))}
    return [f"{model.__name__} computes attention in {name} itself" for name in sorted(own)]


@cache
def is_causal_without_mask(module: str) -> bool:
    """Whether ``is_causal`` layers of a file hide later keys if they get no mask: sdpa does so, eager does not."""
    file = vars(sys.modules.get(module, object)).values()
    models = {x for x in file if isinstance(x, type) and issubclass(x, PreTrainedModel)} - {PreTrainedModel}
    return not models or any(model._supports_sdpa for model in models)  # type: ignore[attr-defined]


def can_choose(model: type[PreTrainedModel]) -> bool:
    """Whether a class declares that it can run with attention other than its eager one."""
    return bool(model._supports_sdpa or model._supports_flex_attn or model._supports_attention_backend)


def _is_attention(kind: type[nn.Module]) -> bool:
    return "Attention" in kind.__name__


def _made_by(model: type[nn.Module]) -> list[type[nn.Module]]:
    """A model's class and the module classes of its file that it uses, found by following the names in their source."""
    found = [model]
    for kind in found:
        for x in _named_in(model, [kind]).values():
            named = x.values() if isinstance(x, dict) else [x]
            found += [k for k in named if inspect.isclass(k) and issubclass(k, nn.Module) and k not in found]
    return found


def _named_in(model: type[nn.Module], kinds: Iterable[type[nn.Module]]) -> dict[str, Any]:
    """The classes and tables in the file of a model that the source of `kinds` mentions, by name."""
    file = vars(sys.modules.get(model.__module__, object))
    words = {word for kind in kinds for word in re.findall(r"\b[A-Z]\w+", _source(kind))}
    own = {word: file[word] for word in sorted(words) if word in file}
    return {
        word: x for word, x in own.items() if isinstance(x, dict) or getattr(x, "__module__", "") == model.__module__
    }


def _source(kind: type[nn.Module]) -> str:
    """The source of a class and its bases, except the bases that all modules or all models of a family share.

    Empty for a class that was defined in an interactive session.
    """
    bases = (base for base in kind.__mro__ if not base.__name__.endswith("PreTrainedModel"))
    return "\n".join(_classes_in(base.__module__).get(base.__qualname__, "") for base in bases)


@cache
def _classes_in(module: str) -> dict[str, str]:
    """The source of each class of a file, which is parsed once; inspect.getsource would do so for each."""
    if module.partition(".")[0] in ("builtins", "torch"):
        return {}
    try:
        text = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return {}
    lines = text.splitlines()
    classes = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    return {node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in classes}
