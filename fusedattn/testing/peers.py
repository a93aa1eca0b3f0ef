"""Other attention functions behind the signature of :func:`fusedattn.attention`, to compare with it.

:data:`PEERS` has one function per name, ``(q, k, v, *, mask, rope, bias, scale, ..., return_lse)``. Each calls only the
function that it is named after, as users call it. If that function cannot run, or lacks an option, the peer raises
NotImplementedError with the reason; if it gives NaN, so does the peer. Norm and RoPE are applied before, by
``QKNorm.apply`` and ``Rope.rotate``, and rounded to the dtype of q.
"""

from __future__ import annotations

import functools
import math
import pkgutil
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusedattn.biases import Bias, as_bias
from fusedattn.masks import Mask, as_mask, causal
from fusedattn.qk_norm import QKNorm
from fusedattn.rope import Rope
from fusedattn.score_mod import ScoreMod

Peer = Callable[..., Any]  # Tensor, or (out, lse) with return_lse

# FlexAttention is compiled anew for each shape and mask; by default Dynamo stops at 8.
FLEX_COMPILATIONS = 1024


def find(name: str) -> tuple[str, Peer]:
    """The full name of a peer, and the function.

    Args:
        name: one of :data:`PEERS`, with or without ``torch.``; or ``package.module:function`` to import any function
            with the signature above.

    Raises:
        ValueError: the name is neither.
        TypeError: the named object is not a function.
        Exception: any error from importing the module.
    """
    for known in (name, f"torch.{name}"):
        if known in PEERS:
            return known, PEERS[known]
    if ":" not in name:
        raise ValueError(f"got {name!r}, allowed are {', '.join(PEERS)} and package.module:function")
    function = pkgutil.resolve_name(name)
    if not callable(function):
        raise TypeError(f"got {name!r}, which is a {type(function).__name__}, allowed are functions")
    return name, function


def _sdpa(
    backend: SDPBackend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    rope: Rope | None = None,
    qk_norm: QKNorm | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor:
    """One backend of ``F.scaled_dot_product_attention``, with ``is_causal`` if that means the same, else with a mask.

    The mask is bool, or, with a bias, in the dtype of q.
    """
    if return_lse:
        raise NotImplementedError("return_lse: F.scaled_dot_product_attention returns no lse")
    _refuse("F.scaled_dot_product_attention", dropout_p, softcap=softcap, score_mod=score_mod, sinks=sinks)
    if q.device.type == "cpu" and backend not in ON_CPU:
        raise NotImplementedError(f"device: got cpu, but torch has {backend.name} for a GPU only")
    mask, bias = as_mask(mask), as_bias(bias)
    if qk_norm is not None:
        q, k = qk_norm.apply(q, k)
    if rope is not None:
        q, k = rope.rotate(q, k)
    (batch, nheads, seqlen_q), seqlen_k = q.shape[:3], k.shape[2]
    only_causal = bias is None and mask.only_bands and mask.band(seqlen_q, seqlen_k) == (None, 0)
    attn_mask = None
    if not (only_causal or mask.is_full):
        attn_mask = _once(
            mask,
            ("dense", batch, nheads, seqlen_q, seqlen_k, q.device),
            lambda: mask.dense(seqlen_q, seqlen_k, batch=batch, nheads=nheads, device=q.device),
        )
    if bias is not None:
        attn_mask = _added(bias, mask, attn_mask, seqlen_q, seqlen_k, q.dtype)
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel([backend]):
        warnings.simplefilter("always")
        try:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask, is_causal=only_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        except RuntimeError as error:
            if not str(error).startswith(("No available kernel", "No viable backend")):
                raise
            raise NotImplementedError(_reasons(caught) or str(error)) from error


def _added(bias: Bias, mask: Mask, allowed: Tensor | None, seqlen_q: int, seqlen_k: int, dtype: torch.dtype) -> Tensor:
    """A bias as ``attn_mask``, with -inf where the mask hides; made only once for a bias without gradients."""

    def make() -> Tensor:
        if bias.tensor is not None and len(bias.tensors()) == 1 and bias.tensor.dtype == dtype:
            added = bias.tensor[(None,) * (4 - bias.tensor.dim())]
        else:
            added = bias.dense(seqlen_q, seqlen_k, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
        return added if allowed is None else torch.where(allowed, added, -math.inf)

    if any(x.requires_grad for x in bias.tensors().values()):
        return make()
    shape = None if allowed is None else allowed.shape
    return _once(bias, ("added", mask, shape, seqlen_q, seqlen_k, dtype), make)


def _refuse(function: str, dropout_p: float, **options: object) -> None:
    """Raise NotImplementedError for options that a function of torch has no argument for."""
    reasons = [f"{name}: {function} has none" for name, x in options.items() if x is not None]
    if dropout_p:
        reasons.append(f"dropout_p: {function} takes no seed, so that it drops other weights")
    if reasons:
        raise NotImplementedError("; ".join(reasons))


ON_CPU = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)


def _reasons(caught: list[warnings.WarningMessage]) -> str:
    """Why torch refused the one enabled backend: torch warns of that, and also that the others are disabled."""
    texts = [str(warning.message).partition(" (Triggered internally")[0] for warning in caught]
    return "; ".join(text for text in texts if "not used because" not in text and "runtime disabled" not in text)


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    rope: Rope | None = None,
    qk_norm: QKNorm | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """FlexAttention: compiled on a GPU; eager on a CPU, where its compiled form returns no lse.

    The eager form stores the scores. On a CPU neither form has gradients; torch raises for them.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    _refuse("FlexAttention", dropout_p, sinks=sinks)
    mask = as_mask(mask)
    if qk_norm is not None:
        q, k = qk_norm.apply(q, k)
    if rope is not None:
        q, k = rope.rotate(q, k)
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    block_mask = None
    if not mask.is_full:
        block_mask = _once(mask, ("block", shape, q.device), lambda: _block_mask(mask, shape, q.device))
    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=FLEX_COMPILATIONS):
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out, aux = _flex_function(compiled=q.device.type != "cpu")(
            q,
            k,
            v,
            score_mod=_flex_score_mod(softcap, score_mod, as_bias(bias), shape, q.dtype),
            block_mask=block_mask,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=return_lse),
        )
    return (out, aux.lse) if return_lse else out


@functools.cache
def _flex_function(*, compiled: bool) -> Peer:
    from torch.nn.attention.flex_attention import flex_attention

    function: Peer = flex_attention
    return torch.compile(function, dynamic=False) if compiled else function


def _flex_score_mod(
    softcap: float | None,
    score_mod: ScoreMod | None,
    bias: Bias | None,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> Callable[..., Tensor] | None:
    """A ``score_mod`` of FlexAttention for scores ``(batch, nheads_q, seqlen_q, seqlen_k)``, q of `dtype`, or None.

    It reads the tensors of the bias.
    """
    batch, nheads, seqlen_q, seqlen_k = shape
    steps: list[Callable[..., Tensor]] = []
    if softcap is not None:
        steps.append(lambda s, b, h, i, j: softcap * torch.tanh(s / softcap))
    if score_mod is not None:
        eager, args = score_mod.eager, score_mod.args
        if eager is None:
            raise NotImplementedError("score_mod: got eager=None, allowed is a function of torch")
        steps.append(lambda s, b, h, i, j: eager(s, b, h, i, j, args))
    if bias is not None and bias.tensor is not None:
        added = bias.tensor.expand(shape)
        steps.append(lambda s, b, h, i, j: s + added[b, h, i, j])
    if bias is not None and bias.slopes is not None:
        slopes = bias.slopes.to(torch.promote_types(dtype, torch.float32)).expand(batch, nheads)
        steps.append(lambda s, b, h, i, j: s - slopes[b, h] * (j - i - (seqlen_k - seqlen_q)).abs())
    if bias is not None and bias.relative is not None:
        limit = bias.relative.shape[-1] // 2
        table = bias.relative.expand(batch, nheads, seqlen_q, -1)
        steps.append(
            lambda s, b, h, i, j: s + table[b, h, i, (j - i - (seqlen_k - seqlen_q)).clamp(-limit, limit) + limit]
        )
    if not steps:
        return None

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for step in steps:
            score = step(score, b, h, i, j)
        return score

    return modify


def _block_mask(mask: Mask, shape: tuple[int, int, int, int], device: torch.device) -> object:
    """A mask for FlexAttention, for ``(batch, nheads_q, seqlen_q, seqlen_k)``; it reads the tensors of the mask."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    batch, nheads, seqlen_q, seqlen_k = shape
    lower, upper = mask.band(seqlen_q, seqlen_k)
    valid, prefix, documents, layout, function = mask.valid, mask.prefix, mask.documents, mask.layout, mask.function
    parts: list[Callable[..., Tensor]] = []
    if lower is not None:
        parts.append(lambda b, h, i, j: j >= i + lower)
    if upper is not None:
        parts.append(lambda b, h, i, j: j <= i + upper)
    if valid is not None:
        parts.append(lambda b, h, i, j: valid[b, j])
    if prefix is not None:
        diagonal = causal(prefix.align).band(seqlen_q, seqlen_k)[1]
        parts.append(lambda b, h, i, j: (j <= i + diagonal) | (j < prefix.lengths[b]))
    if documents is not None:
        parts.append(lambda b, h, i, j: documents.q[b, i] == documents.k[b, j])
    if mask.allowed is not None:
        allowed = mask.allowed.expand(shape)
        parts.append(lambda b, h, i, j: allowed[b, h, i, j])
    if layout is not None:
        block_q, block_k = layout.block_q, layout.block_k
        blocks = layout.blocks.expand(batch, nheads, -(-seqlen_q // block_q), -(-seqlen_k // block_k))
        parts.append(lambda b, h, i, j: blocks[b, h, i // block_q, j // block_k])
    if function is not None:
        eager = function.eager
        if eager is None:
            raise NotImplementedError("mask: got function(fn) with eager=None, allowed is a function of torch")
        parts.append(lambda b, h, i, j: eager(b, h, i, j, function.args))
    if mask.tree is not None:
        tree, older = mask.tree.expand(batch, nheads, seqlen_q, seqlen_q), seqlen_k - seqlen_q
        parts.append(lambda b, h, i, j: (j < older) | tree[b, h, i, (j - older).clamp(min=0)])
    if mask.pattern is not None:
        shown = (
            Mask(pattern=mask.pattern)
            .dense(seqlen_q, seqlen_k, batch=batch, nheads=nheads, device=device)
            .expand(shape)
        )
        parts.append(lambda b, h, i, j: shown[b, h, i, j])
    per_head = any(part is not None for part in (mask.allowed, layout, function, mask.tree, mask.pattern))
    return create_block_mask(
        and_masks(*parts),
        None if mask.only_bands else batch,
        nheads if per_head else None,
        seqlen_q,
        seqlen_k,
        device=device,
    )


_MADE: WeakKeyDictionary[Mask | Bias, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()


def _once(owner: Mask | Bias, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """The result of ``make`` for a mask or bias, cached as long as that lives: users too make theirs once."""
    made = _MADE.setdefault(owner, {})
    if key not in made:
        made[key] = make()
    return made[key]


PEERS: dict[str, Peer] = {
    "torch.sdpa-math": functools.partial(_sdpa, SDPBackend.MATH),
    "torch.sdpa-flash": functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "torch.sdpa-efficient": functools.partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "torch.sdpa-cudnn": functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "flex": _flex,
}
