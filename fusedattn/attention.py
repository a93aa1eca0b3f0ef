"""``attention()``: fused scaled-dot-product attention, forward and backward, as one PyTorch function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from fusedattn import backends
from fusedattn.backends.torch import fast_path
from fusedattn.biases import Bias, as_bias
from fusedattn.call_checks import unknown_argument
from fusedattn.fp8 import FP8
from fusedattn.kv_cache import KVCache
from fusedattn.masks import Mask, as_mask
from fusedattn.options import Keywords, Options
from fusedattn.prepare import prepared, scale_of
from fusedattn.qk_norm import QKNorm
from fusedattn.rope import Rope
from fusedattn.score_mod import ScoreMod
from fusedattn.support import Backend, are_dtensors
from fusedattn.varlen import are_nested, nested_attention

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fusedattn.distributed import Context


@overload
def attention(
    q: Tensor,
    k: Tensor | None = ...,
    v: Tensor | None = ...,
    *,
    cache: KVCache | None = ...,
    context: Context | None = ...,
    return_lse: Literal[False] = ...,
    return_max: Literal[False] = ...,
    **keywords: Unpack[Keywords],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor | None = ...,
    v: Tensor | None = ...,
    *,
    cache: KVCache | None = ...,
    context: Context | None = ...,
    return_lse: Literal[True],
    return_max: Literal[False] = ...,
    **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor | None = ...,
    v: Tensor | None = ...,
    *,
    cache: KVCache | None = ...,
    context: Context | None = ...,
    return_lse: Literal[False] = ...,
    return_max: Literal[True],
    **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor | None = ...,
    v: Tensor | None = ...,
    *,
    cache: KVCache | None = ...,
    context: Context | None = ...,
    return_lse: Literal[True],
    return_max: Literal[True],
    **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache: KVCache | None = None,
    context: Context | None = None,
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
    deterministic: bool = True,
    num_splits: int | None = None,
    precision: FP8 | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    backend: Backend | None = None,
    **others: object,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Scaled-dot-product attention: ``dropout(softmax(scores, masked)) v``, differentiable.

    Vaswani et al., "Attention Is All You Need" (2017), eq. 1, with the rotation of Su et al. (2021), computed
    tile by tile as Dao (2023) does: nothing of size ``seqlen_q x seqlen_k`` is stored. The scores are, in this order::

        s = scale * rope(norm(q)) rope(norm(k))^T
        s = softcap * tanh(s / softcap)
        s = score_mod(s)
        s = s + bias

    Args:
        q: ``(batch, nheads_q, seqlen_q, head_dim)``; float16, bfloat16, float32 (float64 on the ``torch``
            backend and in Triton's interpreter). Any strides whose last is 1: a transposed
            ``(batch, seqlen, nheads, head_dim)`` tensor is not copied. head_dim is at most 512. Or a nested tensor of
            this shape, ragged in seqlen, with the layout ``torch.jagged``; k and v are then nested too, out and lse are
            nested, and masks and biases have the shapes that :func:`fusedattn.attention_varlen` describes.
        k: ``(batch, nheads_kv, seqlen_k, head_dim)``, dtype and device of q. ``nheads_q`` is a multiple of
            ``nheads_kv``; query head ``h`` attends with KV head ``h // (nheads_q // nheads_kv)``.
        v: ``(batch, nheads_kv, seqlen_k, head_dim_v)``, likewise; head_dim_v may differ from head_dim.
        cache: a :class:`fusedattn.KVCache`, in place of k and v, without gradients. Each sequence then has as many keys
            as the cache keeps of it, and ``seqlen_k`` in the shapes of masks and biases is the capacity of the cache.
            Queries are the newest tokens: masks, biases and positions count from the end of their own sequence.
            Numbers that are stored as codes are those of :meth:`fusedattn.KVCache.dense`.
        context: a :class:`fusedattn.distributed.Context`, if the tokens of a sequence are split among processes. q, k
            and v are then those of this process, all of which make the call; ``docs/distributed.md`` says which part of
            each other argument a process passes. q, k and v may also be DTensors, split by batches and heads.
        mask: a :class:`fusedattn.masks.Mask`, or a bool tensor broadcastable to
            ``(batch, nheads_q, seqlen_q, seqlen_k)``; True = attend. ``masks.causal()`` aligns the last query
            with the last key.
        rope: rotary tables and positions, applied to q and k inside the kernels; :class:`fusedattn.Rope`.
        qk_norm: normalises each query and key before the rotation; :class:`fusedattn.QKNorm`. Keys of a cache are not
            normalised here: append :meth:`fusedattn.QKNorm.of_keys` of them.
        bias: a :class:`fusedattn.biases.Bias`, or a floating-point tensor broadcastable to
            ``(batch, nheads_q, seqlen_q, seqlen_k)``; its gradient is summed over the broadcast dimensions.
        scale: factor of the scores; ``1 / sqrt(head_dim)`` by default.
        softcap: bound of the scores before the bias (Gemma 2, 2024), a positive number; None for no bound.
        score_mod: a user's function of each score; :class:`fusedattn.ScoreMod`.
        sinks: ``(nheads_q,)``, one logit per head that takes part in the softmax of every query but has no value
            (Xiao et al., 2023, in the form of gpt-oss); differentiable. lse counts it.
        dropout_p: probability that a weight is dropped, ``0 <= dropout_p < 1``; the others are divided by
            ``1 - dropout_p``. ``eval()`` does not switch it off: pass 0 then.
        dropout_seed: int64 tensor of one element. The same seed drops the same weights;
            :func:`fusedattn.dropout.keep_mask` returns which. None draws one from torch's generator of the device.
        deterministic: gradients are the same bit for bit on every run. With False, the gradients of q, k and v may be
            summed in the order in which GPU programs finish. This saves one recomputation of the weights if there is
            a kernel for the call, and takes a float32 buffer of the shape of q while the backward runs.
            ``torch.use_deterministic_algorithms(True)`` during the backward overrules False. No effect on the
            ``torch`` backend.
        num_splits: if all queries of the heads that share a KV head fit into one small tile, as in a step of
            generation: the number of programs among which the keys of each such tile are split, on the ``triton``
            backend. None gives each program the same number of keys on every GPU, so that the result of a sequence
            depends neither on the batch nor on the lengths of others; so does 1. With other numbers it may depend on
            the longest length.
        precision: ``FP8()`` multiplies numbers of 8 bits, on NVIDIA GPUs of compute capability 8.9 and later, without
            gradients; :class:`fusedattn.FP8`. None multiplies numbers of the dtype of q.
        return_lse: also return the log-sum-exp of each row's scores.
        return_max: also return the largest score of each row, as QK-clip needs it (Kimi K2, 2025).
        backend: ``"triton"``, ``"torch"``, or None. None runs the Triton kernels for GPU tensors, and for CPU tensors
            if ``TRITON_INTERPRET=1`` is set (in Triton's interpreter); otherwise torch. A named backend is used or
            the call raises; it is never replaced.

    Returns:
        out, ``(batch, nheads_q, seqlen_q, head_dim_v)`` in the dtype of q. With the triton backend its dimensions have
        the memory order of q (contiguous if rows of q overlap or lie more than 2^22 elements apart).
        With ``return_lse``, ``(out, lse)``: lse is a natural logarithm, float32 (float64 for float64),
        ``(batch, nheads_q, seqlen_q)``, differentiable too.
        With ``return_max``, ``(out, largest)`` or ``(out, lse, largest)``: the largest score of the keys that a query
        sees, as the softmax gets it (after the bias), in the shape and dtype of lse; not differentiable. Sinks do not
        count. ``-inf`` for a query that may attend to nothing, NaN if it sees a score of NaN or ``+inf``.

        A query that may attend to nothing has out 0 and lse ``-inf`` (with sinks, its head's sink) and causes no
        gradient. A bias of ``-inf`` takes all weight from a key, as the mask does.

        A NaN or Inf in a key or value never reaches the output or gradient of a query from which the mask hides it
        (under torch.compile the torch backend keeps this for keys that are hidden from every query, such as padding).
        A bias of ``-inf`` does not contain it: a sum with NaN, and a product of 0 and NaN, are NaN. A NaN or Inf in a
        query, or in the gradient of its output, may reach the gradients of all keys and values of its head.

        Under autocast, all inputs but float64 are cast to the autocast dtype, as torch's own function does.

    Raises:
        TypeError, ValueError: an argument is wrong in itself; the message names the argument, the value it got and
            the values that are allowed.
        NotImplementedError: the call is valid but the backend cannot run it; the message lists every reason, as
            :func:`fusedattn.not_supported_reasons` does.
    """
    if context is not None:
        from fusedattn.distributed.context import checked

        context = checked(context)
    if others:
        error = unknown_argument("attention", others)
        if context is not None:
            context.refuse(error)  # the other processes wait for this one
        raise error
    plainly = backend != "triton" and rope is None and bias is None and scale is None and softcap is None
    plainly = plainly and qk_norm is None and cache is None and score_mod is None and sinks is None and context is None
    plainly = plainly and precision is None and not return_lse and not return_max
    plainly = plainly and type(deterministic) is bool and type(dropout_p) is float and dropout_p == 0.0
    if plainly and dropout_seed is None and k is not None and v is not None:
        answer = fast_path.attention(q, k, v, mask, backend)
        if answer is not None:
            return answer
    try:
        is_nested = are_nested(q, k, v)
        options = Options(
            as_mask(mask), rope, as_bias(bias), scale_of(scale, q), softcap, score_mod, sinks, dropout_p, dropout_seed,
            deterministic, return_lse, return_max, cache=cache, num_splits=num_splits, qk_norm=qk_norm,
            precision=precision,
        )  # fmt: skip
    except Exception as error:
        if context is not None:
            context.refuse(error)
        raise
    if context is not None:
        return options.returned(*context.attention(q, k, v, options, backend))
    if not (type(q) is type(k) is type(v) is Tensor) and are_dtensors(q, k, v):
        from fusedattn.distributed import dtensor

        return options.returned(*dtensor.attention(q, k, v, options, backend))
    if is_nested:
        return nested_attention(q, k, v, options, backend)
    q, k, v, backend = prepared(q, k, v, options, backend)
    found = backends.attention(q, k, v, options, backend)
    return options.returned(*found) if return_lse or return_max else found[0]
