"""A whole GPT: a training step, and text generation; with our attention, and the same model with torch's."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.measuring.timing import SetUp, Timed
from bench.work.attention import CHECKED_LENGTHS
from bench.work.work import OWN, Contestant, Work
from fusedattn import fuse
from fusedattn.kv_cache import KVCache
from fusedattn.masks import Mask, as_mask
from fusedattn.qk_norm import QKNorm
from fusedattn.rope import Rope, apply_rope
from fusedattn.testing.cases import Case
from fusedattn.testing.peers import Peer
from fusedattn.transformer import GPTModel, ScaledDotProductAttention
from fusedattn.transformer.cache import LayerCache, with_keys

Form = Callable[[GPTModel], torch.nn.Module]


class TorchAttention(ScaledDotProductAttention):
    """The reference attention by ``F.scaled_dot_product_attention``, causal, with the backend that torch chooses."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        rope: Rope | None = None,
        qk_norm: QKNorm | None = None,
        cache: LayerCache | None = None,
        need_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        if cache is not None:
            return self.cached(q, k, v, with_keys(cache), mask, need_weights=need_weights)
        mask = as_mask(mask)
        seqlen_q, seqlen_k = q.shape[2], k.shape[2]
        if need_weights or not mask.only_bands or mask.band(seqlen_q, seqlen_k) != (None, seqlen_k - seqlen_q):
            raise NotImplementedError("mask, need_weights: allowed is a causal mask alone, without weights")
        if qk_norm is not None:
            q, k = qk_norm.apply(q, k)
        if rope is not None:
            q, k = rope.rotate(q, k)
        causal = seqlen_q > 1  # a single query is the last, and sees every key
        if causal and seqlen_q != seqlen_k:
            raise NotImplementedError(f"q: got {seqlen_q} queries of {seqlen_k} keys, allowed are 1 and all")
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=self.scale, enable_gqa=grouped)
        return out, None

    def cached(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        mask: Mask | Tensor | None = None,
        *,
        need_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Several queries are a whole prompt. One attends to the whole cache, whose rest a mask hides.

        Sequences are of one length, which the host need not know.
        """
        rope, n = cache.rope, q.shape[2]
        if rope is None or cache.block_table is not None or cache.format is not None:
            raise NotImplementedError("cache: allowed is a contiguous one with rope, and without codes")
        positions = cache.lengths[:1] - n + torch.arange(n, device=q.device)
        q, k = (apply_rope(x, rope.cos, rope.sin, positions, interleaved=rope.interleaved) for x in (q, k))
        cache.k.index_copy_(2, positions, k)
        cache.v.index_copy_(2, positions, v)
        if n > 1:
            return self(q, k, v, mask, need_weights=need_weights)
        exists = torch.arange(cache.capacity, device=q.device) < cache.lengths[:, None, None, None]
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q, cache.k, cache.v, attn_mask=exists, scale=self.scale, enable_gqa=grouped
        )
        return out, None


class CudnnAttention(TorchAttention):
    """A separate class, because torch.compile reuses a compiled model even if another backend is allowed."""


class FlashAttention(TorchAttention):
    """A separate class, as for cuDNN."""


# Backends of torch's function that are measured separately, besides the one that torch chooses.
BACKENDS: dict[str, tuple[type[TorchAttention], SDPBackend]] = {
    "sdpa-cudnn": (CudnnAttention, SDPBackend.CUDNN_ATTENTION),
    "sdpa-flash": (FlashAttention, SDPBackend.FLASH_ATTENTION),
}


@dataclass(frozen=True)
class ModelSize:
    """The size of a GPT with LLaMA's parts (RoPE, grouped queries), and its number of parameters."""

    parameters: str
    d_model: int
    n_heads: int
    n_kv_heads: int
    n_layers: int
    vocab_size: int

    @property
    def title(self) -> str:
        return f"GPT of {self.parameters} parameters"

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


@dataclass(frozen=True)
class ModelWork(Work):
    """Training: one step of AdamW on `batch` x `seqlen` tokens. Generating: `n_new` tokens each after `seqlen`."""

    size: ModelSize
    task: Literal["training", "generate"]
    batch: int
    seqlen: int
    n_new: int = 0
    dtype: torch.dtype = torch.bfloat16
    compiled: bool = True
    unit: ClassVar[str] = "tokens/s"

    @property
    def amount(self) -> float:
        return self.batch * (self.seqlen if self.task == "training" else self.n_new)

    def cases(self) -> list[Case]:
        heads = {"nheads_q": self.size.n_heads, "nheads_kv": self.size.n_kv_heads}
        common: dict[str, Any] = {"head_dim": self.size.head_dim, "dtype": self.dtype, **heads}
        common |= {"causal": "bottom_right", "rope": "half"}
        lengths = dict.fromkeys(min(n, self.seqlen) for n in CHECKED_LENGTHS)
        found = [Case(seqlen_q=n, seqlen_k=n, **common) for n in lengths]
        if self.task == "training":
            return found
        token = Case(seqlen_q=1, seqlen_k=self.seqlen + 1, **common)
        return [*found, *(replace(case, cache="contiguous") for case in (*found, token))]

    def contestants(self, device: torch.device, functions: Mapping[str, Peer]) -> dict[str, Callable[[], Contestant]]:
        model = self._model(device)
        ids = torch.randint(self.size.vocab_size, (self.batch, self.seqlen + 1), device=device)

        @torch.enable_grad()  # so that a compiled model is the trained one, not another without gradients
        def answer(called: Any) -> Tensor:
            return _loss(called, ids, self.dtype).detach()

        def prepare(form: Form, compiled: bool = False, backend: SDPBackend | None = None) -> Contestant:
            mine = form(copy.deepcopy(model))
            called: Any = torch.compile(mine, dynamic=False) if compiled else mine
            set_up = self._training(mine, called, ids) if self.task == "training" else self._generating(mine, ids)
            return _by_backend(Contestant(set_up, functools.partial(answer, called)), backend)

        forms: dict[str, Form] = {OWN: fuse, "sdpa": with_attention, "textbook": lambda model: model}
        found = {name: functools.partial(prepare, form) for name, form in forms.items()}
        if self.compiled and self.task == "training":
            found |= {f"{name}, compiled": functools.partial(prepare, forms[name], True) for name in (OWN, "sdpa")}
            if device.type == "cuda":  # torch's own choice may not be the fastest
                for name, (attention, backend) in BACKENDS.items():
                    form = functools.partial(with_attention, attention=attention)
                    found[f"{name}, compiled"] = functools.partial(prepare, form, True, backend)
        return dict(found)

    def _model(self, device: torch.device) -> GPTModel:
        torch.manual_seed(0)
        size = self.size
        with device:
            return GPTModel(
                size.vocab_size,
                size.d_model,
                size.n_heads,
                size.n_layers,
                max_len=self.seqlen + self.n_new,
                positions="rotary",
                n_kv_heads=size.n_kv_heads,
            )

    def _training(self, model: torch.nn.Module, called: Any, ids: Tensor) -> SetUp:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)  # so that the model stays the same

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            _loss(called, ids, self.dtype).backward()
            optimizer.step()

        return lambda: step

    def _generating(self, model: torch.nn.Module, ids: Tensor) -> SetUp:
        generator: Any = model

        def generate() -> None:
            with _autocast(ids.device, self.dtype):
                generator.generate(ids[:, : self.seqlen], self.n_new, temperature=0.0)

        return lambda: generate


def _by_backend(contestant: Contestant, backend: SDPBackend | None) -> Contestant:
    """The contestant with only this backend of torch's function allowed, if one is named."""
    if backend is None:
        return contestant

    def within(function: Callable[[], Any]) -> Any:
        with sdpa_kernel(backend):
            return function()

    def set_up() -> Timed:
        timed = contestant.set_up()
        return lambda: within(timed)

    return Contestant(set_up, lambda: within(contestant.answer))


def with_attention(model: GPTModel, attention: type[TorchAttention] = TorchAttention) -> GPTModel:
    """The model, with torch's function in place of the reference."""
    for module in model.modules():
        if type(module) is ScaledDotProductAttention:
            module.__class__ = attention
    return model


def _autocast(device: torch.device, precision: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """Autocast to 16 bits if that is the precision."""
    return contextlib.nullcontext() if precision == torch.float32 else torch.autocast(device.type, dtype=precision)


def _loss(model: Any, ids: Tensor, precision: torch.dtype) -> Tensor:
    """Mean cross-entropy of the next token."""
    with _autocast(ids.device, precision):
        logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
