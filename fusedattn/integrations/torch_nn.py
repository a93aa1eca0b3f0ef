"""``FusedMultiheadAttention``: fused attention in place of ``torch.nn.MultiheadAttention``, with its parameters."""

import copy
import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedattn import biases, masks
from fusedattn.attention import attention
from fusedattn.biases import Bias
from fusedattn.call_checks import check_backend, check_deterministic
from fusedattn.dropout import draw_seed
from fusedattn.masks import Mask
from fusedattn.support import Backend
from fusedattn.varlen import attention_varlen
from fusedattn.weights import attention_weights


class FusedMultiheadAttention(nn.MultiheadAttention):
    """The fused twin of ``torch.nn.MultiheadAttention``: same arguments, parameters, ``state_dict`` and results.

    :func:`fusedattn.fuse` converts a module in place, by changing its class; the constructor makes a new one. It
    differs from torch's:

    - A query that may attend to nothing has attention 0: its output is ``out_proj.bias``, its weights are 0, and it
      causes no gradient. In torch the output is NaN or the same, depending on the code path.
    - NaN and Inf in padded keys and values, and behind a bool ``attn_mask``, reach no output. In torch they do.
    - ``is_causal`` replaces reading ``attn_mask`` whenever possible; see :meth:`forward`.
    - Dropout draws the dropped weights differently.
    - The layers of ``torch.nn`` call it in ``eval()`` too, rather than torch's fused layer, which would bypass it.

    Args:
        backend: passed on to :func:`fusedattn.attention`; None chooses by device.
        deterministic: likewise; with False, gradients may be summed in any order.
        args, kwargs: those of ``torch.nn.MultiheadAttention``.

    Raises:
        ValueError: `backend` is unknown, or torch refuses the arguments.
        TypeError: `deterministic` is not a bool.
    """

    backend: Backend | None = None
    deterministic: bool = True
    # For TorchScript; torch declares it as an attribute of instances.
    __constants__: list[str] = [*nn.MultiheadAttention.__constants__, "backend", "deterministic"]  # noqa: RUF012

    def __init__(self, *args: Any, backend: Backend | None = None, deterministic: bool = True, **kwargs: Any) -> None:
        check_backend(backend)
        check_deterministic(deterministic)
        # torch's constructor uses the attribute that the property below hides.
        self.__dict__.update(nn.MultiheadAttention(*args, **kwargs).__dict__)
        self.__dict__.update(backend=backend, deterministic=deterministic)

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False, so that ``nn.TransformerEncoderLayer`` and ``nn.TransformerEncoder`` call the module.

        Otherwise they pass its parameters to an operator of torch. The true value stays in the ``__dict__``, for when
        the class is torch's again.
        """
        return False

    def _reset_parameters(self) -> None:
        # A shallow copy has the same parameters.
        of_torch = copy.copy(self)
        of_torch.__class__ = nn.MultiheadAttention  # type: ignore[assignment]
        of_torch._reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Multi-head attention (Vaswani et al., 2017, section 3.2.2), with torch's signature.

        Masks are in torch's polarity, the opposite of ``fusedattn.attention``: True hides. A float mask is added to the
        scores, its ``-inf`` hides, and it gets a gradient. The two masks may be of different kinds.

        Args:
            query: ``(batch, seqlen_q, embed_dim)`` if ``batch_first``, else ``(seqlen_q, batch, embed_dim)``; or
                ``(seqlen_q, embed_dim)``, with key and value likewise. Or one strided nested tensor as query, key and
                value, with ``need_weights=False`` and without masks.
            key: likewise, with ``seqlen_k`` and ``kdim``.
            value: likewise, with ``seqlen_k`` and ``vdim``.
            key_padding_mask: bool or floating-point ``(batch, seqlen_k)``, or ``(seqlen_k,)``. Keys before the first
                and behind the last visible one are not visited.
            need_weights: also return the weights. They are the quadratic matrix, which is never written otherwise.
            attn_mask: bool or floating-point ``(seqlen_q, seqlen_k)`` or
                ``(batch * num_heads, seqlen_q, seqlen_k)``.
            average_attn_weights: average the weights over heads.
            is_causal: a promise that `attn_mask`, which must be given, is the causal mask with which query ``i`` sees
                the keys ``j <= i`` ("top_left"). `attn_mask` is then not read, and hidden blocks are not visited. With
                `need_weights`, `bias_k` or `add_zero_attn`, `attn_mask` is read and decides.

        Returns:
            ``(output, weights)``: output like query, with ``embed_dim``; weights
            ``(batch, seqlen_q, seqlen_k)``, or ``(batch, num_heads, seqlen_q, seqlen_k)`` if not averaged, without
            batch if query has none, in the dtype of the projected query, after dropout; or None. `bias_k` and
            `add_zero_attn` add one column each, in this order.

        Raises:
            ValueError: the shapes do not fit each other or the module; ``is_causal`` without ``attn_mask``.
            TypeError: a mask is neither bool nor floating-point.
            NotImplementedError: other uses of nested tensors than above, with every reason; as
                :func:`fusedattn.attention`.
        """
        return self._attend(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )

    @torch.jit.ignore  # type: ignore[untyped-decorator]
    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """:meth:`forward` without defaults: TorchScript compiles that, and calls this as Python.

        It reads the annotations, which must not be strings: no ``from __future__ import annotations`` in this file.
        """
        if is_causal and attn_mask is None:
            raise ValueError("attn_mask: got None, allowed with is_causal=True is the causal mask that it promises")
        dropout_p = self.dropout if self.training else 0.0
        if query.is_nested or key.is_nested or value.is_nested:
            asked = (key_padding_mask is not None, attn_mask is not None, need_weights)
            _check_nested(self, query, key, value, *asked)
            return _of_nested(self, query, dropout_p), None

        batched = query.dim() == 3
        batch_dim = 0 if self.batch_first or not batched else 1
        _check_inputs(self, query, key, value)
        q, k, v = (x if batched else x[None] for x in _projected(self, query, key, value))
        if batch_dim == 1:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        shape = (q.shape[0], self.num_heads, q.shape[2], k.shape[2])
        k, v = _with_appended(self, k, v)
        n_appended = k.shape[2] - shape[3]

        if key_padding_mask is not None:
            key_padding_mask = _checked(key_padding_mask, "key_padding_mask", shape[::3] if batched else shape[3:])
            key_padding_mask = key_padding_mask if batched else key_padding_mask[None]
        if attn_mask is not None:
            attn_mask = _checked(attn_mask, "attn_mask", shape[2:], (shape[0] * shape[1], *shape[2:]))
            attn_mask = attn_mask if attn_mask.dim() == 2 else attn_mask.view(shape)
        hint = is_causal and not need_weights and not n_appended
        mask, bias = _masked(key_padding_mask, None if hint else attn_mask, n_appended)
        if hint:
            mask = mask & masks.causal("top_left")

        options: dict[str, Any] = {"mask": mask, "bias": bias, "dropout_p": dropout_p}
        options["dropout_seed"] = draw_seed(q.device) if dropout_p else None
        chosen: dict[str, Any] = {"deterministic": self.deterministic, "backend": self.backend}
        weights = None
        if need_weights:
            out, lse = attention(q, k, v, **options, **chosen, return_lse=True)
            weights = attention_weights(q, k, lse, **options)
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = (weights if batched else weights[0]).to(q.dtype)
        else:
            out = attention(q, k, v, **options, **chosen)
        out = out.transpose(1, 2)
        out = out.transpose(0, 1) if batch_dim == 1 else out
        return _out(self, out if batched else out[0]), weights


def _check_inputs(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> None:
    layouts = {2: "(seqlen, {})", 3: "(batch, seqlen, {})" if module.batch_first else "(seqlen, batch, {})"}
    for name, x, width in (
        ("query", query, module.embed_dim),
        ("key", key, module.kdim),
        ("value", value, module.vdim),
    ):
        dims = (2, 3) if x is query else (query.dim(),)
        if x.dim() not in dims or x.shape[-1] != width:
            allowed = " and ".join(layouts[n].format(width) for n in dims)
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, allowed is {allowed}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"value: got shape {tuple(value.shape)}, allowed is the batch and length of key, {tuple(key.shape)}"
        )
    batch_dim = 0 if module.batch_first else 1
    if query.dim() == 3 and key.shape[batch_dim] != query.shape[batch_dim]:
        raise ValueError(f"key: got shape {tuple(key.shape)}, allowed is the batch of query, {query.shape[batch_dim]}")


def _projected(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """q, k and v: ``(..., width)`` to ``(..., num_heads, head_dim)``; one product for those that share an input."""
    packed = module.in_proj_weight
    parts: list[tuple[Tensor, Tensor]]
    if packed is None:
        parts = [(query, module.q_proj_weight), (key, module.k_proj_weight), (value, module.v_proj_weight)]
    elif query is key and key is value:
        parts = [(query, packed)]
    elif key is value:
        parts = [(query, packed[: module.embed_dim]), (key, packed[module.embed_dim :])]
    else:
        parts = list(zip((query, key, value), packed.chunk(3), strict=True))
    projected: list[Tensor] = []
    start = 0
    for x, weight in parts:
        stop = start + weight.shape[0]
        bias = None if module.in_proj_bias is None else module.in_proj_bias[start:stop]
        sizes = (*x.shape[:-1], (stop - start) // module.embed_dim, module.num_heads, module.head_dim)
        projected += F.linear(x, weight, bias).view(sizes).unbind(-3)
        start = stop
    return projected


def _out(module: nn.MultiheadAttention, heads: Tensor) -> Tensor:
    """``(..., num_heads, head_dim)`` to ``(..., embed_dim)``; like torch, without running the hooks of `out_proj`."""
    return F.linear(heads.flatten(-2), module.out_proj.weight, module.out_proj.bias)


def _with_appended(module: nn.MultiheadAttention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v ``(batch, num_heads, seqlen_k, head_dim)``, with `bias_k`, `bias_v` and the zeros appended."""
    more_k, more_v = [k], [v]
    single = (k.shape[0], module.num_heads, 1, module.head_dim)
    if module.bias_k is not None and module.bias_v is not None:
        for more, x in ((more_k, module.bias_k), (more_v, module.bias_v)):
            more.append(x.view(1, module.num_heads, 1, module.head_dim).expand(single).to(k.dtype))
    if module.add_zero_attn:
        more_k.append(k.new_zeros(single))
        more_v.append(v.new_zeros(single))
    return (torch.cat(more_k, dim=2), torch.cat(more_v, dim=2)) if len(more_k) > 1 else (k, v)


def _check_nested(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    has_padding: bool,
    has_mask: bool,
    need_weights: bool,
) -> None:
    """Raise NotImplementedError unless this is self-attention of a kind that torch also has for nested tensors."""
    wrong = [
        what
        for what, is_wrong in (
            ("query, key and value that are not one tensor", not (query is key and key is value)),
            (f"{query.dim()} dimensions", query.dim() != 3),  # 1 where there is no sequence in it
            ("another layout than torch.strided", any(x.layout != torch.strided for x in (query, key, value))),
            ("batch_first=False", not module.batch_first),
            ("kdim or vdim", module.in_proj_weight is None),
            ("bias_k or add_zero_attn", module.bias_k is not None or module.add_zero_attn),
            ("key_padding_mask", has_padding),
            ("attn_mask", has_mask),
            ("need_weights=True", need_weights),
        )
        if is_wrong
    ]
    if wrong:
        raise NotImplementedError(
            f"query, key, value: got nested tensors with {'; '.join(wrong)}; allowed is one strided nested tensor "
            "(batch, seqlen, embed_dim) as all three, in a module with batch_first=True, with need_weights=False and "
            "without masks"
        )


def _of_nested(module: FusedMultiheadAttention, x: Tensor, dropout_p: float) -> Tensor:
    """Self-attention of each sequence ``(seqlen, embed_dim)`` of a nested tensor."""
    sequences = x.unbind()
    lengths = [sequence.shape[0] for sequence in sequences]
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=x.device)
    packed = torch.cat(sequences)
    q, k, v = _projected(module, packed, packed, packed)
    longest = max(lengths)
    out = attention_varlen(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, dropout_p=dropout_p,
        deterministic=module.deterministic, backend=module.backend,
    )  # fmt: skip
    return torch.nested.as_nested_tensor(list(torch.split(_out(module, out), lengths)))


def reasons(module: nn.MultiheadAttention) -> list[str]:
    """Reasons why :class:`FusedMultiheadAttention` cannot replace `module`; empty if it can."""
    found = []
    if not 0.0 <= module.dropout < 1.0:
        found.append(f"dropout: got {module.dropout}, allowed is 0 <= dropout < 1")
    if (module.bias_k is None) != (module.bias_v is None):
        found.append("bias_k, bias_v: got one without the other, allowed are both and neither")
    return found


def _checked(mask: Tensor, name: str, *shapes: tuple[int, ...]) -> Tensor:
    """`mask`, checked: one of the shapes, bool or floating-point."""
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name}: got {got}, allowed are a bool tensor (True hides) and a floating-point one")
    if all(mask.shape != torch.Size(shape) for shape in shapes):
        allowed = " and ".join(map(str, shapes))
        raise ValueError(f"{name}: got shape {tuple(mask.shape)}, allowed is {allowed}")
    return mask


def _masked(padding: Tensor | None, hidden: Tensor | None, n_appended: int) -> tuple[Mask, Bias | None]:
    """torch's two masks in this package's polarity, with columns for the appended keys.

    Args:
        padding: bool or floating-point ``(batch, seqlen_k)``.
        hidden: bool or floating-point, broadcastable to ``(batch, num_heads, seqlen_q, seqlen_k)``.
    """
    mask, parts = masks.full(), []
    if padding is not None:
        padding = F.pad(padding, (0, n_appended))
        is_hidden = padding if padding.dtype == torch.bool else padding == -math.inf
        mask = mask & masks.padding(~is_hidden)
        if padding.dtype != torch.bool:
            parts.append(biases.tensor(padding.masked_fill(is_hidden, 0.0)[:, None, None, :]))
    if hidden is not None:
        hidden = F.pad(hidden, (0, n_appended))
        if hidden.dtype == torch.bool:
            mask = mask & masks.boolean(~hidden)
        else:
            parts.append(biases.tensor(hidden))
    return mask, sum(parts[1:], parts[0]) if parts else None
