"""Other attention functions behind the signature of :func:`fusedattn.attention`, to be measured beside it.

:data:`PEERS` has one function a name, ``(q, k, v, *, mask, rope, scale, return_lse)``. Each calls what it is named
after, as people call it, and nothing else: where that cannot run, the function raises NotImplementedError with the
reason, and where that gives NaN, so does the function. RoPE is applied before, by ``Rope.rotate``, and rounded to the
dtype of q.
"""

from __future__ import annotations

import functools
import pkgutil
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusedattn.masks import Mask, as_mask
from fusedattn.rope import Rope

Peer = Callable[..., Any]  # Tensor, or (out, lse) with return_lse

# FlexAttention is compiled anew for each shape and mask; Dynamo stops at 8 unless told otherwise.
FLEX_COMPILATIONS = 1024


def find(name: str) -> tuple[str, Peer]:
    """The full name of a peer, and the function.

    Args:
        name: one of :data:`PEERS`, with or without ``torch.``; or ``package.module:function`` for any function with
            the signature above, which is imported.

    Raises:
        ValueError: the name is neither.
        TypeError: what it names is not a function.
        Exception: whatever importing the module raises.
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
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor:
    """One backend of ``F.scaled_dot_product_attention``: ``is_causal`` where that means the same, or a bool mask."""
    if return_lse:
        raise NotImplementedError("return_lse: F.scaled_dot_product_attention returns no lse")
    if q.device.type == "cpu" and backend not in ON_CPU:
        raise NotImplementedError(f"device: got cpu, but torch has {backend.name} for a GPU only")
    mask = as_mask(mask)
    if rope is not None:
        q, k = rope.rotate(q, k)
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    only_causal = mask.valid is None and mask.allowed is None and mask.diagonal(seqlen_q, seqlen_k) == 0
    attn_mask = None
    if not (only_causal or mask.is_full):
        attn_mask = _once(
            mask,
            ("dense", seqlen_q, seqlen_k, q.device),
            lambda: mask.dense(seqlen_q, seqlen_k, device=q.device),
        )
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


ON_CPU = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)


def _reasons(caught: list[warnings.WarningMessage]) -> str:
    """Why torch refused the one backend that was enabled: it warns of that, and that the others are disabled."""
    texts = [str(warning.message).partition(" (Triggered internally")[0] for warning in caught]
    return "; ".join(text for text in texts if "not used because" not in text and "runtime disabled" not in text)


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    rope: Rope | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """FlexAttention: compiled on a GPU; eager on a CPU, where its compiled form returns no lse.

    The eager form stores the scores. It has no gradients on a CPU, nor has the compiled one: torch says so.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    mask = as_mask(mask)
    if rope is not None:
        q, k = rope.rotate(q, k)
    block_mask = None
    if not mask.is_full:
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        block_mask = _once(mask, ("block", shape, q.device), lambda: _block_mask(mask, shape, q.device))
    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=FLEX_COMPILATIONS):
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out, aux = _flex_function(compiled=q.device.type != "cpu")(
            q,
            k,
            v,
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


def _block_mask(mask: Mask, shape: tuple[int, int, int, int], device: torch.device) -> object:
    """A mask for FlexAttention, from ``(batch, nheads_q, seqlen_q, seqlen_k)``; the parts read what the mask reads."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    batch, nheads, seqlen_q, seqlen_k = shape
    diagonal, valid = mask.diagonal(seqlen_q, seqlen_k), mask.valid
    parts: list[Callable[..., Tensor]] = []
    if diagonal is not None:
        parts.append(lambda b, h, i, j: j <= i + diagonal)
    if valid is not None:
        parts.append(lambda b, h, i, j: valid[b, j])
    if mask.allowed is not None:
        allowed = mask.allowed.expand(shape)
        parts.append(lambda b, h, i, j: allowed[b, h, i, j])
    return create_block_mask(
        and_masks(*parts),
        batch if len(parts) > (diagonal is not None) else None,
        nheads if mask.allowed is not None else None,
        seqlen_q,
        seqlen_k,
        device=device,
    )


_MADE: WeakKeyDictionary[Mask, dict[tuple, Any]] = WeakKeyDictionary()


def _once(mask: Mask, key: tuple, make: Callable[[], Any]) -> Any:
    """What ``make`` makes of a mask, kept for as long as the mask: people make theirs once, too."""
    made = _MADE.setdefault(mask, {})
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
