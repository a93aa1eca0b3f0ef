"""The norms of q and k in layers of transformers, as :class:`fusedattn.QKNorm` computes them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.olmo3.modeling_olmo3 import Olmo3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from fusedattn.qk_norm import QKNorm

ACROSS_HEADS = (Olmo2RMSNorm, Olmo3RMSNorm)  # of all features of a token
KNOWN = (Gemma3RMSNorm, Qwen3RMSNorm, Qwen3MoeRMSNorm, *ACROSS_HEADS)


def qk_norm_of(layer: nn.Module, q: Tensor, k: Tensor) -> QKNorm | None:
    """The norm of q and k, ``(batch, seqlen, nheads, head_dim)``; None if only the modules of a layer know it.

    Modules that were replaced, or whose inputs or outputs somebody watches by hooks, must run themselves.
    """
    norms: list[Any] = [layer.q_norm, layer.k_norm]
    if type(norms[0]) not in KNOWN or type(norms[1]) is not type(norms[0]) or any(map(_is_watched, norms)):
        return None
    eps, other = (norm.eps if isinstance(norm, Gemma3RMSNorm) else norm.variance_epsilon for norm in norms)
    weights = [1.0 + norm.weight.float() if isinstance(norm, Gemma3RMSNorm) else norm.weight for norm in norms]
    across_heads = isinstance(norms[0], ACROSS_HEADS)
    sizes = [x.shape[2] * x.shape[3] if across_heads else x.shape[3] for x in (q, k)]
    if eps != other or [weight.numel() for weight in weights] != sizes:
        return None
    if across_heads:
        weights = [weight.unflatten(0, (-1, q.shape[3])) for weight in weights]
    q_weight, k_weight = weights
    return QKNorm(q_weight, k_weight, eps=eps, across_heads=across_heads)


def normalized(layer: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q and k, ``(batch, seqlen, nheads, head_dim)``, by the modules of a layer."""
    if isinstance(layer.q_norm, ACROSS_HEADS):
        q, k = (norm(x.flatten(2)).view_as(x) for norm, x in ((layer.q_norm, q), (layer.k_norm, k)))
        return q, k
    return layer.q_norm(q), layer.k_norm(k)


def _is_watched(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in module.__dict__
