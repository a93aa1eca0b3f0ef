"""The kernels as torch's flash attention: they run ``aten::_scaled_dot_product_flash_attention`` and its variants.

torch lets the operators of its flash backend be overridden by name, see
``torch.nn.attention.activate_flash_attention_impl``. These operators run below autograd: torch differentiates the
forward by calling the backward operator with the results of the forward. Keys in pages, and keys of which only the
first are used, are read as a :class:`fusedattn.KVCache`, for inference only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.attention
from torch import Tensor

from fusedattn import masks
from fusedattn.backends.triton import ops
from fusedattn.backends.triton.operands import constants_of
from fusedattn.dropout import draw_seed
from fusedattn.kv_cache import KVCache
from fusedattn.masks import Mask
from fusedattn.options import Options, Packed
from fusedattn.parts import gradients_of_part
from fusedattn.prepare import prepared, scale_of

NAME = "fusedattn"

DISPATCH_KEYS = ("CUDA", "CPU")

Keys = tuple[Tensor, Tensor] | KVCache  # keys and values

_OTHERS = (None,) * (ops.N_DIFFERENTIABLE - 3)
_NEEDED = (True,) * 3 + (False,) * (ops.N_DIFFERENTIABLE - 3)


def register(*, dispatch_key: str = "CUDA") -> None:
    """Register ``"fusedattn"`` as a name for ``torch.nn.attention.activate_flash_attention_impl``.

    Nothing changes until the name is activated. Then, in the whole process, every call that reaches torch's flash
    backend on a GPU runs the Triton kernels, also from C++: ``F.scaled_dot_product_attention`` if torch chooses this
    backend (``torch.nn.attention.sdpa_kernel`` forces it), its jagged tensors, and
    ``torch.nn.attention.varlen.varlen_attn``. ``torch.nn.attention.restore_flash_attention_impl()`` ends this.

    Layouts, dtypes and alignments are those of torch's operators: causal masks and windows count from the last query
    and key; lse is the natural logarithm, float32, ``(batch, nheads, seqlen_q)`` or, packed, ``(nheads, total_q)``. A
    query that may attend to nothing has out 0 and lse ``-inf``; FlashAttention-2 returns ``inf``. ``rng_state`` holds
    the dropout seed, so that the backward drops the same weights, as :func:`fusedattn.dropout.keep_mask` lists them.

    The operators return lse, but not the maximum and sum of each row, from which this package's backward computes the
    weights more exactly. So the backward runs the forward once more; its gradients are bit for bit those of
    :func:`fusedattn.attention`. If the backward operator is given out and lse of more keys than these, as by torch's
    ``context_parallel``, its gradients are those of the attention to all of them.

    Packed queries may attend to a part of the keys of their sequence, the first ``seqused_k[i]``, which also lie in the
    pages of a `block_table`. Neither keys nor values are copied. The backward operator is not told of it, so such calls
    are refused for inputs that require grad. `num_splits` is that of :func:`fusedattn.attention`; 0 is None.

    The operators raise NotImplementedError, with every reason, for calls that the kernels cannot run: a debug mask,
    ALiBi slopes, a different head_dim of the values, `seqused_k` or `block_table` without packed queries or with
    gradients. Such a call fails even if torch's own flash attention could run it.

    Args:
        dispatch_key: the device of the tensors; ``"CPU"`` for tests in Triton's interpreter.

    Raises:
        ValueError: ``dispatch_key`` is unknown.
        NotImplementedError: this version of torch has no such registration.
    """
    if dispatch_key not in DISPATCH_KEYS:
        raise ValueError(f"dispatch_key: got {dispatch_key!r}, allowed are {', '.join(map(repr, DISPATCH_KEYS))}")
    hook = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if hook is None:
        raise NotImplementedError(
            f"torch: got version {torch.__version__}, allowed are those with "
            "torch.nn.attention.register_flash_attention_impl, as 2.13 has it"
        )
    hook(NAME, register_fn=lambda: _Overrides(dispatch_key))


class _Overrides:
    """Overrides of torch's operators, until :meth:`remove` or the end of the object."""

    def __init__(self, dispatch_key: str) -> None:
        self.library: Any = torch.library.Library("aten", "IMPL", dispatch_key)
        for name, kernel in _KERNELS.items():
            self.library.impl(name, kernel, dispatch_key)

    def remove(self) -> None:
        """Let torch's own kernels run again."""
        self.library = None


def _scaled_dot_product_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """q, k and v are ``(batch, nheads, seqlen, head_dim)``."""
    _refuse(key, value, [], return_debug_mask=return_debug_mask, alibi_slopes=None)
    mask = _mask(is_causal, None, None)
    out, lse, seed = _forward(query, (key, value), None, mask, scale, dropout_p)
    return out, lse, None, None, query.shape[2], key.shape[2], *_for_backward(seed, query)


def _scaled_dot_product_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    mask = _mask(is_causal, None, None)
    return _backward(grad_out, query, key, value, (out, logsumexp), None, mask, scale, dropout_p, philox_seed)


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Any, ...]:
    """q, k and v are ``(batch, seqlen, nheads, head_dim)``, or ``(total, nheads, head_dim)`` with `cum_seq_q`.

    With `block_table`, k and v are ``(n_pages, page_size, nheads, head_dim)``.
    """
    inference_only = {"seqused_k": seqused_k, "block_table": block_table}
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    reasons = _inference_reasons(inference_only, cum_seq_q is not None and query.dim() == 3, needs_gradient)
    _refuse(key, value, reasons, return_debug_mask=return_debug_mask, alibi_slopes=alibi_slopes)
    mask = _mask(is_causal, window_size_left, window_size_right)
    num_splits = max(0, num_splits or 0) or None
    if cum_seq_q is not None and not (seqused_k is None and block_table is None):
        cache = _cache(key, value, cum_seq_k, max_k, seqused_k, block_table)
        packed: Packed | None = Packed(cum_seq_q, None, int(max_q), cache.capacity)
        (q,) = _heads_first(query)
        out, lse, seed = _forward(q, cache, packed, mask, scale, dropout_p, num_splits)
    else:
        packed = _packed(query, key, cum_seq_q, cum_seq_k, max_q, max_k)
        q, k, v = _heads_first(query, key, value)
        out, lse, seed = _forward(q, (k, v), packed, mask, scale, dropout_p, num_splits)
    (out,) = _heads_last(query, out)
    return out, lse if packed is None else lse[0], *_for_backward(seed, query)


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    packed = _packed(query, key, cum_seq_q, cum_seq_k, max_q, max_k)
    mask = _mask(is_causal, window_size_left, window_size_right)
    dout, q, k, v, out = _heads_first(grad_out, query, key, value, out)
    whole = out, logsumexp if packed is None else logsumexp[None]
    return _heads_last(query, *_backward(dout, q, k, v, whole, packed, mask, scale, dropout_p, rng_state))


def _flash_forward_inplace(out: Tensor, *args: Any, **options: Any) -> Tensor:
    """Write `out` and return lse."""
    found, lse, *_ = _flash_forward(*args, **options)
    out.copy_(found)
    return lse


_KERNELS: dict[str, Any] = {
    "_scaled_dot_product_flash_attention": _scaled_dot_product_forward,
    "_scaled_dot_product_flash_attention_backward": _scaled_dot_product_backward,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_backward": _flash_backward,
}
if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):
    _KERNELS["_flash_attention_forward_no_dropout_inplace"] = _flash_forward_inplace


def _refuse(
    key: Tensor, value: Tensor, reasons: list[str], *, return_debug_mask: bool, alibi_slopes: Tensor | None
) -> None:
    """Raise NotImplementedError for `reasons`, and for options that the kernels, or the backward, cannot run."""
    if return_debug_mask:
        reasons = ["return_debug_mask: got True, allowed is False", *reasons]
    if alibi_slopes is not None:
        reasons = [*reasons, "alibi_slopes: got a tensor, allowed is None"]
    if key.shape[-1] != value.shape[-1]:
        reasons = [*reasons, f"value: got head_dim {value.shape[-1]}, allowed is that of key, {key.shape[-1]}"]
    if reasons:
        raise NotImplementedError(f"flash attention by {NAME} cannot run: " + "; ".join(reasons))


def _inference_reasons(named: dict[str, Tensor | None], is_packed: bool, needs_gradient: bool) -> list[str]:
    """Reasons against calls that choose among the keys, by the arguments that do."""
    reasons = []
    for name in (name for name, x in named.items() if x is not None):
        if not is_packed:
            reasons.append(f"{name}: got a tensor, allowed is None unless queries are packed, with cum_seq_q")
        if needs_gradient:
            reasons.append(f"{name}: got a tensor and inputs that require grad, allowed is inference, torch.no_grad()")
    return reasons


def _cache(
    key: Tensor,
    value: Tensor,
    cum_seq_k: Tensor | None,
    max_k: int,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
) -> KVCache:
    """The keys and values as a cache: in pages, or each packed token as a page of its own."""
    if seqused_k is None:
        raise ValueError("block_table: got a tensor without seqused_k, allowed is one with it")
    if seqused_k.dtype != torch.int32 or seqused_k.dim() != 1:
        raise ValueError(
            f"seqused_k: got {seqused_k.dtype} {tuple(seqused_k.shape)}, allowed is torch.int32 (n_sequences,)"
        )
    if block_table is None:
        if cum_seq_k is None:
            raise ValueError("cum_seq_k: got None without block_table, allowed is where sequences begin in key")
        block_table = cum_seq_k[:-1, None] + torch.arange(int(max_k), dtype=torch.int32, device=key.device)
        key, value = key[:, None], value[:, None]
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in _heads_first(key, value))
    return KVCache(k, v, seqused_k.contiguous(), block_table=block_table)


def _mask(is_causal: bool, left: int | None, right: int | None) -> Mask:
    """The mask of torch's arguments; a negative limit is no limit."""
    left, right = (None if x is None or x < 0 else x for x in (left, right))
    mask = Mask() if left is right is None else masks.window(left, right)
    return mask & masks.causal() if is_causal else mask


def _packed(
    query: Tensor, key: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int
) -> Packed | None:
    if cum_seq_q is None and cum_seq_k is None:
        return None
    if cum_seq_q is None or cum_seq_k is None or query.dim() != 3 or key.dim() != 3:
        raise ValueError(
            f"cum_seq_q, cum_seq_k: got {'None' if cum_seq_q is None else 'a tensor'} and "
            f"{'None' if cum_seq_k is None else 'a tensor'} with shapes {tuple(query.shape)} and {tuple(key.shape)}, "
            "allowed are two tensors with three dimensions, (total, nheads, head_dim), and None with four"
        )
    return Packed(cum_seq_q, cum_seq_k, int(max_q), int(max_k))


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as ``(batch, nheads, seqlen, head_dim)``, with a batch of 1 if packed."""
    return tuple(x.transpose(0, 1)[None] if x.dim() == 3 else x.transpose(1, 2) for x in tensors)


def _heads_last(query: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the layout of `query`."""
    return tuple(x[0].transpose(0, 1) if query.dim() == 3 else x.transpose(1, 2) for x in tensors)


def _problem(q: Tensor, keys: Keys, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as the kernels take them, checked; fills in the defaults of `options`."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    if isinstance(keys, KVCache):
        options.cache = keys
        return prepared(q, None, None, options, "triton")[:3]
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in keys)
    return prepared(q, k, v, options, "triton")[:3]


def _forward(
    q: Tensor,
    keys: Keys,
    packed: Packed | None,
    mask: Mask,
    scale: float | None,
    dropout_p: float,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse and the seed of dropout."""
    seed = draw_seed(q.device) if dropout_p else None
    options = Options(
        mask, scale=scale_of(scale, q), dropout_p=dropout_p, dropout_seed=seed, packed=packed, num_splits=num_splits,
        return_lse=True,
    )  # fmt: skip
    inputs = _problem(q, keys, options)
    constants = constants_of(options, keep_residual=False)
    out, lse, *_ = ops.forward((*inputs, *_OTHERS), constants)
    assert lse is not None
    return out, lse, seed


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    whole: tuple[Tensor, Tensor],
    packed: Packed | None,
    mask: Mask,
    scale: float | None,
    dropout_p: float,
    rng_state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; runs the forward once more.

    `whole` are out and lse of these keys, or of others too: torch's ring attention passes those of all its processes.
    """
    seed = rng_state.view(torch.int64).reshape(-1)[:1] if dropout_p else None
    options = Options(mask, scale=scale_of(scale, q), dropout_p=dropout_p, dropout_seed=seed, packed=packed)
    inputs = _problem(q, (k, v), options)
    constants = constants_of(options, keep_residual=True)
    out, lse, *kept, _ = ops.forward((*inputs, *_OTHERS), constants)
    assert lse is not None
    into_out, into_lse = gradients_of_part((out, lse), whole, (dout, None))
    dq, dk, dv, *_ = ops.gradients(
        into_out.to(out.dtype), into_lse, (*inputs, *_OTHERS), (out, *kept), _NEEDED, constants
    )
    assert dq is not None
    assert dk is not None
    assert dv is not None
    if scale is not None and scale <= 0:  # the queries were multiplied by -1 or 0
        dq = dq * (-1.0 if scale < 0 else 0.0)
    return dq, dk, dv


def _for_backward(seed: Tensor | None, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``rng_state``, an unused tensor and the debug mask, in the shapes and dtypes that torch's compiler expects."""
    nothing = torch.zeros(1, dtype=torch.int64, device=query.device)
    seed = nothing if seed is None else seed
    debug_mask = query.new_empty(0)
    if torch.version.hip:
        return seed.reshape(()), nothing.reshape(()), debug_mask
    return torch.cat((seed, nothing)).view(torch.uint64), nothing.view(torch.uint64).reshape(()), debug_mask
