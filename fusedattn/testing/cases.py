"""Attention problems as plain data: the cases that tests, ``check`` and benchmarks share, and their inputs."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fusedattn import biases, masks
from fusedattn.biases import Bias
from fusedattn.masks import CausalAlign, Mask
from fusedattn.qk_norm import QKNorm
from fusedattn.quantization import FORMATS, dequantised, quantised
from fusedattn.rope import Rope
from fusedattn.score_mod import ScoreMod

RELATIVE_CLIP = 5  # the clipping distance of the relative bias in a case
CODES = {form.name: dtype for dtype, form in FORMATS.items()}


@dataclass(frozen=True)
class Case:
    """One attention problem. Everything in it is plain data, so a case prints as the call that makes it."""

    name: str = ""
    batch: int = 2
    nheads_q: int = 4
    nheads_kv: int = 2
    seqlen_q: int = 48
    seqlen_k: int = 48
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    causal: CausalAlign | None = None
    padding: Literal["right", "left", "uneven"] | None = None
    empty_batch: bool = False  # with padding: the last batch sees no key
    boolean: Literal["full", "broadcast"] | None = None
    rope: Literal["half", "interleaved"] | None = None
    rotary_dim: int | None = None  # default: head_dim
    rope_tables: Literal["shared", "per_batch"] = "shared"
    rope_positions: bool = False  # random positions per batch instead of the default
    qk_norm: Literal["shared", "per_head", "scale", "across_heads"] | None = None
    scale: float | None = None
    offset: float = 0.0  # size of a part that all keys, and all values, of a head share; lse then gets no gradient
    head_dim_v: int | None = None  # default: head_dim
    window: tuple[int | None, int | None] | None = None  # left, right; aligned as `causal`, by default bottom-right
    prefix: bool = False  # random lengths; replaces the mask of `causal`, keeps its alignment
    documents: Literal["packed", "shuffled"] | None = None  # packed: q and k of one length share the ids
    layout: int | None = None  # the block size; two thirds of the blocks are visible
    tree: bool = False  # two thirds of the pairs of a query and one of the newest keys are visible
    mask_function: bool = False
    sparse: Literal["strided", "fixed", "dilated", "global", "bigbird", "blocks", "pairs"] | None = None
    bias: Literal["full", "per_head", "per_batch", "per_key", "per_query", "scalar"] | None = None
    bias_inf: bool = False  # a tenth of the bias is -inf
    alibi: bool | Literal["per_batch"] = False
    relative: Literal["per_head", "per_query"] | None = None
    bias_dtype: torch.dtype | None = None  # of bias, relative and sinks; default: dtype
    softcap: float | None = None
    score_mod: bool = False
    sinks: bool = False
    dropout_p: float = 0.0
    cache: Literal["contiguous", "paged"] | None = None  # keys and values are appended to one; without gradients
    codes: Literal["e4m3", "e5m2", "int8", "int4"] | None = None  # of a cache; they represent k and v exactly
    latent: bool = False  # the values in a cache are the first head_dim_v features of the keys
    seed: int = 0

    @property
    def needs_triton(self) -> bool:
        """Whether the case has a mask function or score function, which is written in Triton."""
        return self.mask_function or self.score_mod


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case; `dout` and `dlse` are the gradients that come back to out and lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    mask: Mask
    rope: Rope | None
    scale: float | None
    bias: Bias | None = None
    softcap: float | None = None
    score_mod: ScoreMod | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    cache: Literal["contiguous", "paged"] | None = None
    codes: str | None = None
    latent: bool = False
    qk_norm: QKNorm | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments: mask, rope and scale, and the others that differ from their defaults."""
        others = {
            name: getattr(self, name)
            for name in ("qk_norm", "bias", "softcap", "score_mod", "sinks")
            if getattr(self, name) is not None
        }
        if self.dropout_p:
            others |= {"dropout_p": self.dropout_p, "dropout_seed": self.dropout_seed}
        return {"mask": self.mask, "rope": self.rope, "scale": self.scale, **others}

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors that get a gradient: q, k, v and those that are present of the others."""
        found = {"q": self.q, "k": self.k, "v": self.v, "sinks": self.sinks}
        if self.bias is not None:
            found |= {name: getattr(self.bias, part) for name, part in OF_BIAS.items()}
        if self.score_mod is not None:
            found["learned"] = self.score_mod.learned
        if self.qk_norm is not None:
            found |= self.qk_norm.weights()
        return {name: x for name in _LEAVES if (x := found.get(name)) is not None}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the problem, by name."""
        owners = (self.mask, self.bias, self.score_mod)
        found = {name: x for owner in owners if owner is not None for name, x in owner.tensors().items()}
        found |= {} if self.qk_norm is None else self.qk_norm.weights()
        fields = {name: getattr(self, name) for name in ("q", "k", "v", "dout", "dlse", "sinks", "dropout_seed")}
        if self.rope is not None:
            fields |= {name: getattr(self.rope, name) for name in ("cos", "sin", "positions_q", "positions_k")}
        return {name: x for name, x in fields.items() if x is not None} | found

    def with_leaves(self, leaves: Mapping[str, Tensor]) -> Inputs:
        """The same problem with other tensors for :attr:`leaves`, by the same names."""
        fields: dict[str, Any] = {name: x for name, x in leaves.items() if name not in (*OF_BIAS, "learned")}
        parts: dict[str, Any] = {OF_BIAS[name]: x for name, x in leaves.items() if name in OF_BIAS}
        if self.bias is not None:
            fields["bias"] = replace(self.bias, **parts)
        if self.score_mod is not None and "learned" in leaves:
            fields["score_mod"] = self.score_mod.with_learned(leaves["learned"])
        if self.qk_norm is not None:
            fields["qk_norm"] = replace(self.qk_norm, **{name: fields.pop(name) for name in OF_NORM if name in fields})
        return replace(self, **fields)

    def visible(self) -> Tensor:
        """Bool ``(batch, nheads_q, seqlen_q, seqlen_k)``: the keys that the mask lets each query see."""
        (batch, nheads, seqlen_q), seqlen_k = self.q.shape[:3], self.k.shape[2]
        dense = self.mask.dense(seqlen_q, seqlen_k, batch=batch, nheads=nheads, device=self.q.device)
        return dense.expand(batch, nheads, -1, -1)

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same problem in another dtype."""
        wide = torch.promote_types(dtype, torch.float32)
        other = self.with_leaves({name: x.to(wide if name in _WIDE else dtype) for name, x in self.leaves.items()})
        return replace(other, dout=self.dout.to(dtype), dlse=self.dlse.to(wide))


_LEAVES = ("q", "k", "v", "bias", "relative", "sinks", "slopes", "learned", "q_weight", "k_weight")
_WIDE = ("slopes", "learned")  # float32 at least
OF_NORM = ("q_weight", "k_weight")
OF_BIAS = {"bias": "tensor", "relative": "relative", "slopes": "slopes"}


def results_of(inputs: Inputs) -> tuple[str, ...]:
    """The names of the results of a problem: out, lse and a gradient for each leaf; in the order of ALL_TENSORS."""
    return ("out", "lse", *(f"d{name}" for name in inputs.leaves))


def make_inputs(case: Case, device: torch.device | str = "cpu", *, drawn_there: bool = False) -> Inputs:
    """Normally distributed inputs of a case, the same on every device.

    Args:
        case: the problem.
        device: the device of the tensors.
        drawn_there: draw the large tensors on the device, which is fast; the numbers then differ from those on a CPU.

    Raises:
        ModuleNotFoundError: the case has a function of masks or scores, and Triton is not installed.
    """
    generator = torch.Generator().manual_seed(case.seed)
    large = torch.Generator(device).manual_seed(case.seed) if drawn_there else generator

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=large, device=large.device).to(device, case.dtype)

    head_dim_v = case.head_dim_v or case.head_dim
    q = normal(case.batch, case.nheads_q, case.seqlen_q, case.head_dim)
    k = normal(case.batch, case.nheads_kv, case.seqlen_k, case.head_dim)
    v = normal(case.batch, case.nheads_kv, case.seqlen_k, head_dim_v)
    dout = normal(case.batch, case.nheads_q, case.seqlen_q, head_dim_v)
    dlse = normal(case.batch, case.nheads_q, case.seqlen_q).to(torch.promote_types(case.dtype, torch.float32))
    mask = _make_mask(case, generator).to(device)
    rope = _make_rope(case, generator)
    if case.offset:
        k, v = (x + case.offset * normal(*x.shape[:2], 1, x.shape[3]) for x in (k, v))
        dlse = torch.zeros_like(dlse)  # its part in dq would hide terms that fail to cancel
    if case.codes:
        k, v = (_representable(x, CODES[case.codes]) for x in (k, v))
    if case.latent:
        v = k[..., :head_dim_v]
    bias = _make_bias(case, large)
    score_mod = _make_score_mod(case, generator)
    qk_norm = _make_qk_norm(case, generator)
    sinks = torch.randn(case.nheads_q, generator=generator).to(case.bias_dtype or case.dtype) if case.sinks else None
    dropout_seed = torch.randint(-(2**63), 2**63 - 1, (1,), generator=generator) if case.dropout_p else None
    return Inputs(
        q,
        k,
        v,
        dout,
        dlse,
        mask,
        None if rope is None else rope.to(device),
        case.scale,
        None if bias is None else bias.to(device),
        case.softcap,
        None if score_mod is None else score_mod.to(device),
        None if sinks is None else sinks.to(device),
        case.dropout_p,
        None if dropout_seed is None else dropout_seed.to(device),
        case.cache,
        case.codes,
        case.latent,
        None if qk_norm is None else qk_norm.to(device),
    )


def _make_qk_norm(case: Case, generator: torch.Generator) -> QKNorm | None:
    """Weights between 0.5 and 1.5, or such numbers times 4 for a length, in the dtype of the case."""
    if case.qk_norm is None:
        return None

    def weight(nheads: int) -> Tensor:
        shapes = {"shared": (case.head_dim,), "scale": (nheads, 1)}
        shape = shapes.get(case.qk_norm or "", (nheads, case.head_dim))
        size = 4.0 if case.qk_norm == "scale" else 1.0
        return (size * (0.5 + torch.rand(shape, generator=generator))).to(case.dtype)

    return QKNorm(
        weight(case.nheads_q),
        weight(case.nheads_kv),
        kind="l2" if case.qk_norm == "scale" else "rms",
        across_heads=case.qk_norm == "across_heads",
    )


def _representable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x`, rounded to numbers that codes of `dtype` represent exactly: the scale of each row is a power of two."""
    if x.numel() == 0:
        return x
    largest = FORMATS[dtype].largest
    magnitude = x.float().abs()
    row_max = magnitude.amax(dim=-1, keepdim=True)
    scale = (row_max / largest).log2().ceil().exp2()
    numbers = dequantised(quantised(x, scale, dtype), scale)
    return torch.where(magnitude == row_max, x.sign() * largest * scale, numbers).to(x.dtype)


def _make_mask(case: Case, generator: torch.Generator) -> Mask:
    mask = masks.full() if case.causal is None or case.prefix else masks.causal(case.causal)
    if case.padding is not None:
        positions = torch.arange(case.seqlen_k)
        lengths = torch.randint(1, case.seqlen_k + 1, (case.batch, 1), generator=generator)
        if case.padding == "right":
            valid = positions < lengths
        elif case.padding == "left":
            valid = positions >= case.seqlen_k - lengths
        else:
            valid = torch.rand(case.batch, case.seqlen_k, generator=generator) < 0.7
        if case.empty_batch:
            valid[-1] = False
        mask = mask & masks.padding(valid)
    if case.boolean is not None:
        shape = (case.batch, case.nheads_q, case.seqlen_q, case.seqlen_k)
        if case.boolean == "broadcast":
            shape = (1, case.nheads_q, 1, case.seqlen_k)
        mask = mask & masks.boolean(torch.rand(shape, generator=generator) < 0.6)
    align = case.causal or "bottom_right"
    if case.window is not None:
        mask = mask & masks.window(*case.window, align)
    if case.prefix:
        lengths = torch.randint(0, case.seqlen_k + 1, (case.batch,), generator=generator)
        mask = mask & masks.prefix_lm(lengths, align)
    if case.documents is not None:
        mask = mask & _make_documents(case, generator)
    if case.layout is not None:
        n_q, n_k = (-(-seqlen // case.layout) for seqlen in (case.seqlen_q, case.seqlen_k))
        blocks = torch.rand(1, case.nheads_q, n_q, n_k, generator=generator) < 2 / 3
        mask = mask & masks.block_sparse(blocks, case.layout)
    if case.tree:
        shape = (case.batch, case.nheads_q, case.seqlen_q, case.seqlen_q)
        mask = mask & masks.tree(torch.rand(shape, generator=generator) < 2 / 3)
    if case.sparse is not None:
        mask = mask & _make_sparse(case, generator)
    if case.mask_function:
        from fusedattn.testing import triton_functions

        mask = mask & triton_functions.mask_function(case.batch, case.nheads_q, generator)
    return mask


def _make_sparse(case: Case, generator: torch.Generator) -> Mask:
    """A pattern of small numbers; `blocks` and `pairs` list blocks for each 16 queries, and for each query."""
    align = case.causal or "bottom_right"
    if case.sparse == "strided":
        return masks.strided(6, causal=False, align=align)
    if case.sparse == "fixed":
        return masks.fixed(7, 2, align=align)
    if case.sparse == "dilated":
        return masks.dilated(5, 2, 3, align=align)
    if case.sparse == "global":
        tokens = torch.rand(case.batch, case.seqlen_k, generator=generator) < 0.1
        return masks.dilated(3, 3, 2, global_tokens=tokens, align=align)
    if case.sparse == "bigbird":
        return masks.bigbird(6, window=0, n_random=1, seed=case.seed, align=align)
    size = (16, 16) if case.sparse == "blocks" else (1, 5)
    n_rows, n_blocks = -(-case.seqlen_q // size[0]), -(-case.seqlen_k // size[1])
    return masks.top_blocks(torch.rand(case.batch, case.nheads_kv, n_rows, n_blocks, generator=generator), 2, size)


def _make_documents(case: Case, generator: torch.Generator) -> Mask:
    """About three documents in each batch: packed in int32, shuffled in int64."""

    def packed(seqlen: int) -> Tensor:
        begins = torch.rand(case.batch, seqlen, generator=generator) < 2 / max(seqlen, 1)
        return begins.cumsum(-1).int()

    if case.documents == "shuffled":
        lengths = (case.seqlen_q, case.seqlen_k)
        return masks.documents(*(torch.randint(0, 3, (case.batch, n), generator=generator) for n in lengths))
    if case.seqlen_q == case.seqlen_k:
        return masks.documents(packed(case.seqlen_q))
    return masks.documents(packed(case.seqlen_q), packed(case.seqlen_k))


def _make_bias(case: Case, generator: torch.Generator) -> Bias | None:
    device = generator.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case.bias_dtype or case.dtype)

    batch, nheads, seqlen_q, seqlen_k = case.batch, case.nheads_q, case.seqlen_q, case.seqlen_k
    parts = []
    if case.bias is not None:
        shapes: dict[str, tuple[int, ...]] = {
            "full": (batch, nheads, seqlen_q, seqlen_k),
            "per_head": (1, nheads, seqlen_q, seqlen_k),
            "per_batch": (batch, 1, seqlen_q, seqlen_k),
            "per_key": (batch, 1, 1, seqlen_k),
            "per_query": (nheads, seqlen_q, 1),
            "scalar": (),
        }
        x = normal(*shapes[case.bias])
        if case.bias_inf:
            x = x.masked_fill(torch.rand(x.shape, generator=generator, device=device) < 0.1, -math.inf)
        parts.append(biases.tensor(x))
    if case.alibi:
        slopes = biases.alibi_slopes(max(nheads, 1))[:nheads]
        slopes = slopes.to(device, torch.promote_types(case.dtype, torch.float32))
        if case.alibi == "per_batch":
            slopes = slopes * (0.5 + torch.rand(batch, 1, generator=generator, device=device))
        parts.append(biases.alibi(slopes))
    if case.relative is not None:
        rows = (1, nheads, 1) if case.relative == "per_head" else (batch, nheads, seqlen_q)
        parts.append(biases.relative(normal(*rows, 2 * RELATIVE_CLIP + 1)))
    return functools.reduce(operator.add, parts) if parts else None


def _make_score_mod(case: Case, generator: torch.Generator) -> ScoreMod | None:
    if not case.score_mod:
        return None
    from fusedattn.testing import triton_functions

    score_mod = triton_functions.score_function(case.nheads_q, generator)
    gains = score_mod.args[0].to(torch.promote_types(case.dtype, torch.float32))
    return score_mod.with_learned(gains)


def _make_rope(case: Case, generator: torch.Generator) -> Rope | None:
    if case.rope is None:
        return None
    n_positions = 2 * max(case.seqlen_q, case.seqlen_k)
    rope = Rope.from_theta(case.rotary_dim or case.head_dim, n_positions, interleaved=case.rope == "interleaved")
    if case.rope_tables == "per_batch":
        # Scaled, so that the transpose of the rotation is not its inverse.
        factor = 0.5 + torch.rand(case.batch, 1, 1, generator=generator)
        rope = replace(rope, cos=rope.cos * factor, sin=rope.sin * factor)
    if case.rope_positions or case.seqlen_q > case.seqlen_k:
        rope = rope.at(
            torch.randint(0, n_positions, (case.batch, case.seqlen_q), generator=generator),
            torch.randint(0, n_positions, (case.batch, case.seqlen_k), generator=generator),
        )
    return rope


# One case per feature, awkward combinations, and all features together; small enough for Triton's interpreter. Under
# these seeds eager PyTorch is not exact by chance at the places of the largest errors.
_SMALL: dict[str, Any] = {"nheads_q": 2, "nheads_kv": 1, "seqlen_q": 33, "seqlen_k": 41}
CASES = (
    Case("full attention", nheads_kv=4),
    Case("causal", causal="bottom_right", nheads_kv=4),
    Case("causal, top-left, more keys", causal="top_left", seqlen_k=75),
    Case("causal, more queries than keys", causal="bottom_right", seqlen_q=61, seqlen_k=40),
    Case("right padding", padding="right"),
    Case("left padding", padding="left", causal="bottom_right"),
    Case("uneven padding, one batch empty", batch=3, padding="uneven", empty_batch=True),
    Case("boolean mask", boolean="full"),
    Case("boolean mask, broadcast", boolean="broadcast"),
    Case("cross attention", seqlen_q=21, seqlen_k=83),
    Case("grouped queries, 8:2", nheads_q=8, nheads_kv=2, causal="bottom_right"),
    Case("multi-query, 6:1", nheads_q=6, nheads_kv=1),
    Case("head_dim 80", head_dim=80, seqlen_q=33, seqlen_k=33),
    Case("head_dim 256", head_dim=256, seqlen_q=33, seqlen_k=33, nheads_q=2, nheads_kv=1),
    Case("RoPE", rope="half", causal="bottom_right"),
    Case("RoPE, interleaved", rope="interleaved", causal="bottom_right"),
    Case("RoPE, partial, 24 of 40", rope="half", head_dim=40, rotary_dim=24),
    Case("RoPE, tables and positions per batch", rope="interleaved", rope_tables="per_batch", rope_positions=True),
    Case("QK-norm, RoPE", qk_norm="shared", rope="half", causal="bottom_right"),
    Case("QK-norm, weights per head, GQA 6:2", qk_norm="per_head", nheads_q=6, seqlen_q=37),
    Case("QK-norm of length, learned scale", **_SMALL, qk_norm="scale", scale=1.0),
    Case("QK-norm across heads, RoPE", qk_norm="across_heads", rope="interleaved", rotary_dim=24, seqlen_k=75),
    Case("scale", scale=0.37),
    Case("negative scale", scale=-0.2, causal="bottom_right"),
    Case("keys and values with a common part", offset=1.0, causal="bottom_right"),
    Case("values of 16 features, keys of 24", **_SMALL, head_dim=24, head_dim_v=16, seed=1),
    Case("values of 40 features, keys of 24", **_SMALL, head_dim=24, head_dim_v=40, causal="bottom_right"),
    Case("sliding window", window=(9, 4), seqlen_q=61, seqlen_k=75, seed=1),
    Case("sliding window, open to the right", **_SMALL, window=(3, None)),
    Case("sliding window, causal, left padding", window=(17, None), causal="bottom_right", padding="left", seqlen_k=59),
    Case("prefix", prefix=True),
    Case("prefix, top-left, RoPE", **_SMALL, prefix=True, causal="top_left", rope="half"),
    Case("documents", documents="packed"),
    Case("documents in any order", **_SMALL, documents="shuffled"),
    Case("documents, causal, GQA 6:2", documents="packed", causal="bottom_right", nheads_q=6),
    Case("documents, window, right padding", documents="packed", window=(11, 11), padding="right", seed=1),
    Case("block-sparse", layout=16, seqlen_q=61, seqlen_k=75),
    Case("block-sparse, causal, uneven padding", layout=16, causal="bottom_right", padding="uneven", seed=1),
    Case("tree", tree=True, seqlen_q=21, seqlen_k=83),
    Case("tree, causal, uneven padding, GQA 6:2", tree=True, causal="bottom_right", padding="uneven", nheads_q=6),
    Case("tree, more queries than keys", **_SMALL | {"seqlen_k": 20}, tree=True),
    Case("strided", **_SMALL, sparse="strided"),
    Case("fixed, left padding", sparse="fixed", padding="left", seqlen_q=61, seqlen_k=75),
    Case("dilated, more queries than keys, RoPE", sparse="dilated", rope="half", seqlen_q=61, seqlen_k=40),
    Case("dilated, global tokens", **_SMALL, sparse="global"),
    Case("BigBird, causal", **_SMALL, sparse="bigbird", causal="bottom_right"),
    Case("selected blocks, sinks", sparse="blocks", nheads_q=6, seqlen_q=61, seqlen_k=75, sinks=True),
    Case("blocks selected by query, causal", sparse="pairs", causal="bottom_right"),
    Case("mask function", mask_function=True),
    Case("mask function, causal, right padding", **_SMALL, mask_function=True, causal="bottom_right", padding="right"),
    Case("bias", bias="full"),
    Case("bias per head, causal, left padding", bias="per_head", causal="bottom_right", padding="left"),
    Case("bias per batch", **_SMALL, bias="per_batch"),
    Case("bias per key", **_SMALL, bias="per_key"),
    Case("bias per query, GQA 6:2", bias="per_query", nheads_q=6),
    Case("bias of one number", bias="scalar"),
    Case("bias with -inf", bias="per_head", bias_inf=True, seqlen_q=21, seqlen_k=83),
    Case(
        "bias in float32", **_SMALL, bias="per_head", relative="per_query", sinks=True, bias_dtype=torch.float32,
        seed=3,
    ),
    Case("ALiBi", alibi=True, causal="bottom_right"),
    Case("ALiBi, slopes per batch", **_SMALL, alibi="per_batch"),
    Case("relative positions", relative="per_head"),
    Case("relative per query, soft-cap", relative="per_query", softcap=1.5, seqlen_q=37),
    Case("soft-cap", softcap=1.5),
    Case("soft-cap, causal, RoPE", **_SMALL, softcap=0.7, causal="bottom_right", rope="half"),
    Case("score function", score_mod=True),
    Case("score function, soft-cap, bias", **_SMALL, score_mod=True, softcap=2.0, bias="full"),
    Case("sinks", sinks=True, causal="bottom_right"),
    Case("sinks, one batch empty", **_SMALL, sinks=True, padding="right", empty_batch=True),
    Case("sinks, window, soft-cap", sinks=True, window=(15, 0), softcap=2.0, nheads_q=6),
    Case("dropout", dropout_p=0.3),
    Case("dropout, causal, bias per head", **_SMALL, dropout_p=0.1, causal="bottom_right", bias="per_head"),
    Case(
        "everything together", batch=3, nheads_q=2, nheads_kv=1, seqlen_q=45, seqlen_k=70, causal="bottom_right",
        padding="uneven", empty_batch=True, boolean="full", rope="interleaved", rotary_dim=20, rope_tables="per_batch",
        rope_positions=True, scale=0.3, head_dim_v=24, window=(60, 20), prefix=True, documents="packed", layout=16,
        tree=True, mask_function=True, bias="per_head", bias_inf=True, alibi="per_batch", relative="per_query",
        softcap=3.0, score_mod=True, sinks=True, dropout_p=0.2, qk_norm="per_head", seed=33,
    ),
)  # fmt: skip

# Caches of keys and values, which give no gradients.
CACHED_CASES = (
    Case("cache, one query, RoPE", cache="contiguous", seqlen_q=1, seqlen_k=75, causal="bottom_right", rope="half"),
    Case("cache, chunk, GQA 6:2", cache="contiguous", seqlen_q=33, seqlen_k=75, causal="bottom_right", nheads_q=6),
    Case(
        "cache of pages, chunk, window, RoPE", cache="paged", seqlen_q=33, seqlen_k=75, causal="bottom_right",
        window=(29, 0), rope="interleaved",
    ),
    Case(
        "cache of pages, one query, sinks, soft-cap", cache="paged", seqlen_q=1, seqlen_k=75, sinks=True, softcap=2.0
    ),
    Case("cache of pages, tree", cache="paged", seqlen_q=9, seqlen_k=75, tree=True),
    Case("cache of e4m3, one query, RoPE", cache="paged", codes="e4m3", seqlen_q=1, seqlen_k=75, rope="half"),
    Case("cache of e5m2, chunk", cache="paged", codes="e5m2", seqlen_q=33, seqlen_k=75, causal="bottom_right"),
    Case("cache of int8, chunk", cache="contiguous", codes="int8", seqlen_q=33, seqlen_k=75, causal="bottom_right"),
    Case("cache of int4, one query", cache="paged", codes="int4", seqlen_q=1, seqlen_k=75),
    Case(
        "cache of latent keys, chunk", cache="paged", latent=True, nheads_kv=1, seqlen_q=5, seqlen_k=75, head_dim=576,
        head_dim_v=512, causal="bottom_right",
    ),
)  # fmt: skip
