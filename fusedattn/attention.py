"""``attention()``: fused scaled-dot-product attention, forward and backward, as one PyTorch function."""

from __future__ import annotations

import math
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from fusedattn import checks, reference, sdpa
from fusedattn.masks import Mask, as_mask
from fusedattn.rope import Rope
from fusedattn.support import Backend, default_backend, not_supported_reasons

if TYPE_CHECKING:
    from fusedattn.kernels.masking import DeviceMask
    from fusedattn.kernels.rope import Rotation

# A kernel's offsets inside one tile are int32: what lies further apart than this is copied together first.
MAX_ROW_STRIDE = 2**31 // 512


def _tileable(x: Tensor) -> Tensor:
    """``x`` with a contiguous last dimension and rows near enough for int32 offsets inside a tile."""
    if (x.stride(3) == 1 or x.shape[3] == 1) and x.stride(2) <= MAX_ROW_STRIDE:
        return x
    return x.contiguous()


def _new_like(x: Tensor) -> Tensor:
    """An uninitialised tensor of the shape, dtype and layout of ``x``; contiguous where that fits no tile."""
    unfit = sdpa.rows_overlap(x) or x.stride(2) > MAX_ROW_STRIDE
    layout = torch.contiguous_format if unfit else torch.preserve_format
    return torch.empty_like(x, memory_format=layout)


def _on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of its arguments."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _precision(dtype: torch.dtype) -> str:
    """How float32 products are computed: as IEEE float32, unless the user has allowed TF32 to torch."""
    if dtype != torch.float32 or torch.version.hip:
        return "ieee"
    try:
        allowed = torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it was set through torch's newer names, which this function refuses to translate
        allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed else "ieee"


def _device_mask(valid: Tensor | None, allowed: Tensor | None, is_causal: bool, diagonal: int) -> DeviceMask:
    from fusedattn.kernels.masking import DeviceMask, key_range

    if valid is not None:
        valid = valid.contiguous().view(torch.uint8)
    if allowed is not None and max(allowed.stride()[2:]) > MAX_ROW_STRIDE:
        # Contiguous, or, where its rows are too long for that, transposed.
        allowed = allowed.contiguous() if allowed.shape[3] <= MAX_ROW_STRIDE else allowed.mT.contiguous().mT
    return DeviceMask(
        diagonal=diagonal if is_causal else None,
        valid=valid,
        key_range=None if valid is None else key_range(valid),
        allowed=None if allowed is None else allowed.view(torch.uint8),
    )


def _rotation(
    cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, offset: int, interleaved: bool
) -> Rotation | None:
    from fusedattn.kernels.rope import Rotation

    if cos is None or sin is None:
        return None
    if positions is not None:
        positions = (positions if positions.dim() == 2 else positions[None]).contiguous()
    return Rotation(
        cos=(cos if cos.dim() == 3 else cos[None]).contiguous(),
        sin=(sin if sin.dim() == 3 else sin[None]).contiguous(),
        positions=positions,
        offset=offset,
        interleaved=interleaved,
    )


@torch.library.custom_op("fusedattn::attention_fwd", mutates_args=())
def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    allowed: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions_q: Tensor | None,
    positions_k: Tensor | None,
    interleaved: bool,
    is_causal: bool,
    diagonal: int,
    scale: float,
    keep_rest: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(out, lse, row_max, row_sum, rest)`` by the Triton kernels; the last three are for the backward.

    rest is empty unless `keep_rest` asks for it and the inputs have 16 bits; gradients are less precise without.
    `allowed` is four-dimensional; tables and positions are as in :class:`Rope`; `scale` is positive.
    """
    from fusedattn.kernels import attention_fwd as kernel
    from fusedattn.kernels import configs
    from fusedattn.kernels.rope import rotated

    if not scale > 0:
        raise ValueError(f"scale: got {scale}, allowed are positive numbers")
    out, lse, row_max, row_sum, rest = _attention_fwd_empty(q, keep_rest)
    if out.numel() == 0:
        return out, lse, row_max, row_sum, rest
    q, k, v = _tileable(q), _tileable(k), _tileable(v)
    rotation_q = _rotation(cos, sin, positions_q, k.shape[2] - q.shape[2], interleaved)
    rotation_k = _rotation(cos, sin, positions_k, 0, interleaved)
    config = configs.for_tensor(q, dense_mask=allowed is not None).fwd
    with _on_device_of(q):
        if rotation_k is not None and k.numel() > 0:
            k = rotated(k, rotation_k)
        mask = _device_mask(valid, allowed, is_causal, diagonal)
        kernel.launch(
            q, k, v, out, lse, row_max, row_sum, rest if rest.numel() else None, mask, rotation_q, scale,
            _precision(q.dtype), config,
        )  # fmt: skip
    return out, lse, row_max, row_sum, rest


def _attention_fwd_empty(q: Tensor, keep_rest: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    lse = torch.empty(
        q.shape[:3],
        dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
        device=q.device,
    )
    out = _new_like(q)
    if keep_rest and q.dtype.itemsize == 2:
        rest = torch.empty_like(out, dtype=torch.int8)
    else:
        rest = torch.empty(0, dtype=torch.int8, device=q.device)
    return out, lse, torch.empty_like(lse), torch.empty_like(lse), rest


@attention_fwd.register_fake
def _attention_fwd_fake(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _attention_fwd_empty(q, keep_rest=arguments[-1])


@torch.library.custom_op("fusedattn::attention_bwd", mutates_args=())
def attention_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    rest: Tensor,
    valid: Tensor | None,
    allowed: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions_q: Tensor | None,
    positions_k: Tensor | None,
    interleaved: bool,
    is_causal: bool,
    diagonal: int,
    scale: float,
    needs_dq: bool,
    needs_dkdv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` by the Triton kernels; a gradient that is not needed comes back empty."""
    from fusedattn.kernels import attention_bwd as kernel
    from fusedattn.kernels import attention_bwd_rows as rows_kernel
    from fusedattn.kernels import configs
    from fusedattn.kernels.primitives import is_exact
    from fusedattn.kernels.rope import rotated

    dq, dk, dv = _attention_bwd_empty(q, k, v, needs_dq, needs_dkdv)
    if out.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    # Hooks on saved tensors may have changed the layout of some of them.
    q, k, v, dout, out = _tileable(q), _tileable(k), _tileable(v), _tileable(dout), _tileable(out)
    row_max, row_sum = row_max.contiguous(), row_sum.contiguous()
    if rest.numel() and rest.stride() != out.stride():
        rest = torch.empty_like(out, dtype=torch.int8).copy_(rest)
    rotation_q = _rotation(cos, sin, positions_q, k.shape[2] - q.shape[2], interleaved)
    rotation_k = _rotation(cos, sin, positions_k, 0, interleaved)
    config = configs.for_tensor(q, dense_mask=allowed is not None)
    precision = _precision(q.dtype)
    with _on_device_of(q):
        if rotation_q is not None and rotation_k is not None:
            q, k = rotated(q, rotation_q), rotated(k, rotation_k)
        mask = _device_mask(valid, allowed, is_causal, diagonal)
        dlse = None if dlse is None else dlse.contiguous()
        if is_exact(q.dtype):
            config_rows = configs.exact_rows_for_tensor(q)
            rows = rows_kernel.launch_exact(
                q, k, v, dout, row_max, row_sum, dlse, mask, scale, precision, config_rows
            )  # fmt: skip
        else:
            rows = rows_kernel.launch(out, rest if rest.numel() else None, dout, row_max, row_sum, dlse, scale)
        kernel.launch(
            q,
            k,
            v,
            dout,
            rows,
            dq if needs_dq else None,
            (dk, dv) if needs_dkdv else None,
            mask,
            rotation_q,
            rotation_k,
            scale,
            precision,
            config,
        )
    return dq, dk, dv


def _attention_bwd_empty(
    q: Tensor, k: Tensor, v: Tensor, needs_dq: bool, needs_dkdv: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _new_like(q) if needs_dq else q.new_empty(0),
        _new_like(k) if needs_dkdv else k.new_empty(0),
        _new_like(v) if needs_dkdv else v.new_empty(0),
    )


@attention_bwd.register_fake
def _attention_bwd_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _attention_bwd_empty(q, k, v, needs_dq=arguments[-2], needs_dkdv=arguments[-1])


class Attention(torch.autograd.Function):
    """:func:`attention_fwd` with gradients for q, k and v; everything else is constant."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *constants: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return attention_fwd(q, k, v, *constants)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, *constants = inputs
        out, _, row_max, row_sum, rest = output
        tensors, ctx.numbers = constants[:6], constants[6:-1]
        ctx.save_for_backward(q, k, v, out, row_max, row_sum, rest, *tensors)
        ctx.mark_non_differentiable(row_max, row_sum, rest)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, row_max, row_sum, rest, *tensors = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        needs_dq, needs_dk, needs_dv = ctx.needs_input_grad[:3]
        dq, dk, dv = attention_bwd(
            dout, dlse, q, k, v, out, row_max, row_sum, rest, *tensors, *ctx.numbers, needs_dq, needs_dk or needs_dv
        )
        nones = (None,) * (len(tensors) + len(ctx.numbers) + 1)
        return (dq if needs_dq else None, dk if needs_dk else None, dv if needs_dv else None, *nones)


# The op by itself is differentiable too, by the same two functions.
attention_fwd.register_autograd(Attention.backward, setup_context=Attention.setup_context)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rope: Rope | None, scale: float) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` by the Triton kernels, differentiable."""
    batch, nheads_q, seqlen_q, _ = q.shape
    seqlen_k = k.shape[2]
    diagonal = mask.diagonal(seqlen_q, seqlen_k)
    allowed = mask.allowed
    if allowed is not None:
        allowed = allowed.expand(batch, nheads_q, seqlen_q, seqlen_k)
    # Dynamo cannot trace an autograd.Function in every setting (shared inputs, inputs without a gradient), but takes
    # the op, which has the same backward, as it is.
    function = attention_fwd if torch.compiler.is_compiling() else Attention.apply
    out, lse, *_ = function(
        q,
        k,
        v,
        mask.valid,
        allowed,
        None if rope is None else rope.cos,
        None if rope is None else rope.sin,
        None if rope is None else rope.positions_q,
        None if rope is None else rope.positions_k,
        rope is not None and rope.interleaved,
        diagonal is not None,
        0 if diagonal is None else diagonal,
        scale,
        torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
    )
    return out, lse


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = ...,
    rope: Rope | None = ...,
    bias: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    dropout_p: float = ...,
    return_lse: Literal[False] = ...,
    backend: Backend | None = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = ...,
    rope: Rope | None = ...,
    bias: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    dropout_p: float = ...,
    return_lse: Literal[True],
    backend: Backend | None = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    rope: Rope | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled-dot-product attention: ``softmax(scale * rope(q) rope(k)^T, masked) v``, differentiable in q, k, v.

    Vaswani et al., "Attention Is All You Need" (2017), eq. 1, with the rotation of Su et al. (2021), computed
    tile by tile as Dao (2023) does: nothing of size ``seqlen_q x seqlen_k`` is stored.

    Args:
        q: ``(batch, nheads_q, seqlen_q, head_dim)``; float16, bfloat16, float32 (float64 on the ``torch``
            backend and in Triton's interpreter). Any strides whose last is 1: a transposed
            ``(batch, seqlen, nheads, head_dim)`` tensor is not copied. head_dim up to 256.
        k, v: ``(batch, nheads_kv, seqlen_k, head_dim)``, dtype and device of q. ``nheads_q`` is a multiple of
            ``nheads_kv``; query head ``h`` attends with KV head ``h // (nheads_q // nheads_kv)``.
        mask: a :class:`fusedattn.masks.Mask`, or a bool tensor broadcastable to
            ``(batch, nheads_q, seqlen_q, seqlen_k)``; True = attend. ``masks.causal()`` aligns the last query
            with the last key.
        rope: rotary tables and positions, applied to q and k inside; :class:`fusedattn.Rope`.
        bias, softcap, dropout_p: not implemented yet; anything but the default raises NotImplementedError.
        scale: factor of the scores; ``1 / sqrt(head_dim)`` by default.
        return_lse: also return the log-sum-exp of each row's scores.
        backend: ``"triton"``, ``"torch"``, or None: the Triton kernels for GPU tensors and, where
            ``TRITON_INTERPRET=1`` is set, through the interpreter for CPU tensors; else torch. A named backend
            is used or the call raises; it is never replaced.

    Returns:
        out, shape and dtype of q; with the triton backend also its strides (contiguous where rows of q overlap, or lie
        more than 2^22 elements apart).
        With ``return_lse``, ``(out, lse)``: lse natural logarithm, float32 (float64 for float64),
        ``(batch, nheads_q, seqlen_q)``, differentiable too.

        A query that may attend to nothing has out 0 and lse ``-inf`` and causes no gradient. A NaN or Inf in a
        key or value never reaches the output or gradient of a query that may not attend to it (under torch.compile
        the torch backend keeps this for keys that are hidden from every query, such as padding). Under autocast,
        float32 inputs are cast to the autocast dtype, as torch's own function does.

    Raises:
        TypeError, ValueError: an argument that is wrong in itself; the message names it, what it got and what
            is allowed.
        NotImplementedError: a valid call that the backend cannot run, with every reason; see
            :func:`fusedattn.not_supported_reasons`.
    """
    q, k, v = (_autocast(x) for x in (q, k, v))
    mask = as_mask(mask)
    checks.check_backend(backend)
    checks.check_qkv(q, k, v)
    checks.check_mask(mask, q, k)
    if rope is not None:
        checks.check_rope(rope, q, k)
    if bias is not None:
        checks.check_bias(bias, q, k)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    else:
        checks.check_number("scale", scale, -sys.float_info.max, sys.float_info.max, "any finite number")
    if softcap is not None:
        checks.check_number("softcap", softcap, sys.float_info.min, sys.float_info.max, "a positive number")
    checks.check_number("dropout_p", dropout_p, 0.0, 1.0 - sys.float_info.epsilon, "0 <= dropout_p < 1")
    backend = backend or default_backend(q.device)
    reasons = not_supported_reasons(
        q, k, v, mask=mask, rope=rope, bias=bias, scale=scale, softcap=softcap, dropout_p=dropout_p,
        return_lse=return_lse, backend=backend,
    )  # fmt: skip
    if reasons:
        raise NotImplementedError(f"attention cannot run on backend {backend!r}: " + "; ".join(reasons))
    # On a GPU reading the positions would wait for it; there, the kernels turn rows outside the tables into NaN.
    if rope is not None and q.device.type == "cpu" and not torch.compiler.is_compiling():
        rope.check_positions()

    scale = float(scale)
    if scale <= 0:  # kernels take the maximum of the scores before they scale, or hide keys before they scale
        # For 0, queries of 0, and the smallest scale there is, because the gradient of these would overflow under 1.
        q, scale = (-q, -scale) if scale < 0 else (q * 0.0, torch.finfo(torch.float32).tiny)
    if backend == "triton":
        out, lse = _fused(q, k, v, mask, rope, scale)
        return (out, lse) if return_lse else out
    if return_lse:
        # torch's own function returns no lse.
        out, lse, _ = reference.attention(q, k, v, mask=mask, rope=rope, scale=scale)
        return out, lse
    return sdpa.attention(q, k, v, mask=mask, rope=rope, scale=scale)


def _autocast(x: Tensor) -> Tensor:
    """``x`` in the dtype of the autocast region, if it is in one."""
    if not isinstance(x, Tensor) or x.dtype != torch.float32:
        return x
    device = x.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return x
    return x.to(torch.get_autocast_dtype(device))
