"""The attention function of Hugging Face transformers' ``AttentionInterface``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fusedattn import masks
from fusedattn.attention import attention
from fusedattn.biases import Bias, tensor
from fusedattn.dropout import draw_seed
from fusedattn.integrations.transformers.cache import cache_of, over_capacity
from fusedattn.integrations.transformers.masks import PreparedMask
from fusedattn.integrations.transformers.sources import is_causal_without_mask
from fusedattn.masks import Mask
from fusedattn.qk_norm import QKNorm
from fusedattn.rope import Rope
from fusedattn.weights import attention_weights

# Arguments that models pass to every layer and whose effect is already in the mask or in the rotated q and k.
HONOURED_ELSEWHERE = frozenset(
    {
        "position_ids", "cache_position", "max_length_q", "max_length_k", "use_cache", "output_hidden_states",
        "output_router_logits", "return_dict", "num_items_in_batch", "logits_to_keep",
    }
)  # fmt: skip

# Layers whose eager attention returns weights without the sink.
WEIGHTS_WITHOUT_SINK = frozenset({"GraniteSWAAttention", "GraniteMoeSWAAttention"})

# The outputs that transformers' hooks record while a model runs: a dict by name, or None. In many models this is the
# only sign for a layer that weights were asked for.
try:
    from transformers.utils.output_capturing import _active_collector as _recording
except ImportError:  # older versions pass output_attentions
    _recording = None


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | PreparedMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    indices: Tensor | None = None,
    output_attentions: bool | None = None,
    deterministic: bool | None = None,
    rope: Rope | None = None,
    qk_norm: QKNorm | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """:func:`fusedattn.attention` with the arguments and layouts of transformers.

    Args:
        module: the attention layer; its ``is_causal``, ``fusedattn_backend``, ``fusedattn_deterministic`` are read.
        query: ``(batch, nheads_q, seqlen_q, head_dim)``.
        key, value: ``(batch, nheads_kv, seqlen_k, head_dim)``; not repeated for grouped queries. Those of a
            :class:`PreallocatedCache` are read from its memory.
        attention_mask: the result of the registered mask function; or a bool tensor ``(batch, seqlen_k)`` or
            ``(batch, 1 or nheads_q, seqlen_q, seqlen_k)``, True = attend; or a floating-point tensor of four
            dimensions, which is added to the scores; sizes of 1 broadcast. With None, attention is causal if
            ``is_causal`` is True (else ``module.is_causal``, for models that have an sdpa attention), with the last
            query aligned with the last key.
        dropout: probability that a weight is dropped.
        scaling: factor of the scores; ``1 / sqrt(head_dim)`` by default.
        softcap: bound of the scores (Gemma 2).
        sliding_window: without a mask, a query sees its own key and the ``sliding_window - 1`` before it (and as many
            behind it if attention is not causal). A mask already includes the window.
        s_aux: ``(nheads_q,)``, attention sinks (gpt-oss).
        position_bias: added to the scores, broadcastable to ``(batch, nheads_q, seqlen_q, seqlen_k)`` (T5).
        cu_seq_lens_q, cu_seq_lens_k: int ``(n_sequences + 1,)``, where packed sequences start in a batch of one.
        indices: int ``(batch, seqlen_q, n)``, the only keys that each query may see (DeepSeek's sparse attention).
        output_attentions: also return the weights, which are then computed in full; implied if the model records them.
        deterministic: True forbids sums in a varying order, whatever the module allows.
        rope, qk_norm: rotate and normalise query and key, for callers that have not done so.

    Returns:
        out ``(batch, seqlen_q, nheads_q, head_dim_v)``, and the weights ``(batch, nheads_q, seqlen_q, seqlen_k)`` after
        dropout, or None. With sinks the weights of a query add up to less than 1, except in models whose eager
        attention returns weights without the sink. A query that may attend to nothing, such as one at a padded
        position, has out 0.

    Raises:
        NotImplementedError: an argument that is not listed here has a value.
        TypeError, ValueError: as :func:`fusedattn.attention`.
    """
    _refuse_unknown(others, packed=cu_seq_lens_q is not None)
    cache = cache_of(key, value)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    mask, bias = _mask_and_bias(attention_mask, query, key)
    if attention_mask is None:
        causal = is_causal
        if causal is None:
            causal = getattr(module, "is_causal", False) and is_causal_without_mask(type(module).__module__)
        if causal and query.shape[2] > 1:
            mask = masks.causal()
        if sliding_window is not None:
            mask = mask & masks.window(sliding_window - 1, 0 if causal else sliding_window - 1)
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        mask = _within_sequences(mask, cu_seq_lens_q, cu_seq_lens_k, query, key)
    if indices is not None:
        mask = mask & _at(indices, *_lengths(query, key))
    if position_bias is not None:
        bias = tensor(position_bias) if bias is None else bias + tensor(position_bias)

    options: dict[str, Any] = {"mask": mask, "rope": rope, "qk_norm": qk_norm, "bias": bias, "scale": scaling}
    options |= {"softcap": softcap, "dropout_p": dropout, "dropout_seed": draw_seed(query.device) if dropout else None}
    apart: dict[str, Any] = {"sinks": s_aux, "backend": getattr(module, "fusedattn_backend", None)}
    apart["deterministic"] = bool(deterministic) or getattr(module, "fusedattn_deterministic", True)
    attend = functools.partial(attention, query, key, value, **options)
    if cache is not None:
        attend = functools.partial(
            attention, query, cache=cache, **options | over_capacity(mask, bias, key.shape[2], cache)
        )
    if not (output_attentions or _weights_are_recorded()):
        return attend(**apart).transpose(1, 2).contiguous(), None
    out, lse = attend(**apart, return_lse=True)
    if s_aux is not None and type(module).__name__ in WEIGHTS_WITHOUT_SINK:
        lse = attend(**(apart | {"sinks": None}), return_lse=True)[1]
    if cache is not None:  # numbers, if it holds codes
        key = cache.dense()[0][:, :, : key.shape[2]].to(query.dtype)
    return out.transpose(1, 2).contiguous(), attention_weights(query, key, lse, **options).to(query.dtype)


def unknown_arguments(names: Iterable[str]) -> list[str]:
    """The argument names that :func:`attention_function` refuses."""
    return sorted(set(names) - HONOURED_ELSEWHERE - set(inspect.signature(attention_function).parameters))


def _weights_are_recorded() -> bool:
    """Whether the running model was asked for weights; not all models tell their layers."""
    # Dynamo cannot read a ContextVar. Once a compiled model has set its collector, it is an ordinary variable.
    hidden = torch.compiler.is_dynamo_compiling() and not getattr(_recording, "compiling", False)
    recorded = None if _recording is None or hidden else _recording.get()
    return recorded is not None and any("attentions" in name for name in recorded)


def _at(indices: Tensor, seqlen_q: int, seqlen_k: int) -> Mask:
    """Each query sees the keys listed for it."""
    batch = indices.shape[0]
    listed = torch.zeros(batch, 1, seqlen_q, seqlen_k, dtype=torch.bool, device=indices.device)
    return masks.boolean(listed.scatter(-1, indices[:, None].long(), True))


def _refuse_unknown(others: dict[str, Any], *, packed: bool) -> None:
    known = HONOURED_ELSEWHERE | {"seq_idx"} if packed else HONOURED_ELSEWHERE  # the same sequences, numbered
    unknown = [name for name, x in others.items() if name not in known and x is not None and x is not False]
    if unknown:
        raise NotImplementedError(
            f"attention with attn_implementation='fusedattn': got {', '.join(sorted(unknown))}, which it does not know "
            "and will not ignore; choose another attn_implementation for this model"
        )


def _mask_and_bias(x: Tensor | PreparedMask | None, query: Tensor, key: Tensor) -> tuple[Mask, Bias | None]:
    if x is None:
        return masks.full(), None
    if isinstance(x, PreparedMask):
        if x.shape[2:] == _lengths(query, key):
            return x.mask, None
        if any(size not in (1, length) for size, length in zip(x.shape[2:], _lengths(query, key), strict=True)):
            raise NotImplementedError(
                f"attention_mask: got one of (seqlen_q, seqlen_k) {x.shape[2:]} for an attention of "
                f"{_lengths(query, key)}, allowed are equal ones; this model would have fitted a tensor to them"
            )
        x = x.dense()
    if not isinstance(x, Tensor):
        raise TypeError(f"attention_mask: got {type(x).__name__}, allowed are a tensor and None")
    if x.dtype != torch.bool and not (x.is_floating_point() and x.dim() == 4):
        raise TypeError(
            f"attention_mask: got {x.dtype} of shape {tuple(x.shape)}, allowed are torch.bool, and a floating-point "
            "dtype in four dimensions"
        )
    if x.dtype != torch.bool:
        return masks.full(), tensor(x)
    if x.dim() == 4 and x.shape[1] == 1 and x.shape[2] == 1:  # the same for all queries: keys that are hidden
        x = x[:, 0, 0].expand(query.shape[0], key.shape[2])
    return masks.padding(x) if x.dim() == 2 else masks.boolean(x), None


def _within_sequences(
    mask: Mask, cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None, query: Tensor, key: Tensor
) -> Mask:
    """The mask, restricted to the keys of each query's own sequence."""
    if cu_seq_lens_q is None or cu_seq_lens_k is None or query.shape[0] != 1:
        raise ValueError(
            f"cu_seq_lens_q, cu_seq_lens_k: got {type(cu_seq_lens_q).__name__}, {type(cu_seq_lens_k).__name__} and "
            f"batch {query.shape[0]}, allowed are two tensors and batch 1"
        )
    seqlen_q, seqlen_k = _lengths(query, key)
    ids_q, ids_k = _numbered(cu_seq_lens_q, seqlen_q), _numbered(cu_seq_lens_k, seqlen_k)
    if mask.documents is not None:
        count = max(seqlen_q, seqlen_k) + 1
        ids_q, ids_k = mask.documents.q * count + ids_q, mask.documents.k * count + ids_k
    return replace(mask, documents=masks.documents(ids_q, ids_k).documents)


def _numbered(cu_seq_lens: Tensor, seqlen: int) -> Tensor:
    """The sequence of each token, int64 ``(1, seqlen)``."""
    at = torch.arange(seqlen, device=cu_seq_lens.device)
    return torch.searchsorted(cu_seq_lens[1:].contiguous(), at, right=True)[None]


def _lengths(query: Tensor, key: Tensor) -> tuple[int, int]:
    return query.shape[2], key.shape[2]
