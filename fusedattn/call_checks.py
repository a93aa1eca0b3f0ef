"""Checks of arguments, for any backend: every error names the argument, the value it got and the allowed values."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from fusedattn.biases import Bias
from fusedattn.fp8 import FP8
from fusedattn.kv_cache import KVCache
from fusedattn.masks import Mask
from fusedattn.options import Options, Packed, lengths_of
from fusedattn.qk_norm import QKNorm
from fusedattn.readable import can_read
from fusedattn.rope import Rope
from fusedattn.score_mod import ScoreMod
from fusedattn.shard import WHOLE, Shard
from fusedattn.strides import features_overlap, is_expanded

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BACKENDS = ("triton", "torch")


# Argument names of other attention functions, and the replacement to suggest.
WORDS = {
    "is_causal": "mask=masks.causal('top_left'), torch's alignment, or mask=masks.causal(), which aligns the ends",
    "causal": "mask=masks.causal()",
    "attn_mask": "mask= for a bool tensor (True = attend), bias= for a floating-point one",
    "attention_mask": "mask=masks.padding(attention_mask.bool()) for a mask of keys, mask= for one of pairs",
    "key_padding_mask": "mask=masks.padding(~key_padding_mask)",
    "window_size": "mask=masks.window(left, right)",
    "attn_bias": "bias=",
    "alibi_slopes": "bias=biases.alibi(slopes)",
    "softmax_scale": "scale=",
    "scaling": "scale=",
    "dropout": "dropout_p=",
    "enable_gqa": "nothing: the numbers of heads decide the grouping",
}


def unknown_argument(function: str, others: dict[str, object]) -> TypeError:
    """The error for an argument that `function` does not have; suggests a replacement if one is known."""
    name = next(iter(others))
    near = WORDS.get(name)
    return TypeError(
        f"{function}: got an unknown argument {name}=; " + (f"write {near}" if near else "help() lists the known ones")
    )


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise TypeError or ValueError unless q, k and v fit each other."""
    if _are_alike(q, k, v):
        return
    named = (("q", q), ("k", k), ("v", v))
    for name, x in named:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, allowed is a torch.Tensor")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: got {x.dtype}, allowed are {', '.join(map(str, DTYPES))}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: got {x.dtype}, allowed is the dtype of q, {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: got device {x.device}, allowed is the device of q, {q.device}")
        if x.dim() != 4:
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)}, allowed is four dimensions, (batch, nheads, seqlen, head_dim)"
            )
    batch, nheads_q, _, head_dim = q.shape
    batch_k, nheads_kv, seqlen_k, head_dim_k = k.shape
    batch_v, nheads_v, seqlen_v, _ = v.shape
    for name, size in (("k", batch_k), ("v", batch_v)):
        if size != batch:
            raise ValueError(f"{name}: got batch {size}, allowed is that of q, {batch}")
    if nheads_kv != nheads_v or seqlen_k != seqlen_v:
        raise ValueError(
            f"v: got (nheads_kv, seqlen_k) {tuple(v.shape[1:3])}, allowed is that of k, {tuple(k.shape[1:3])}"
        )
    if head_dim_k != head_dim:
        raise ValueError(f"k: got head_dim {head_dim_k}, allowed is that of q, {head_dim}")
    for name, x in named:
        if x.shape[3] == 0:
            raise ValueError(f"{name}: got head_dim 0, allowed is 1 and more")
        if x.stride(3) != 1 and x.shape[3] > 1 and x.numel() > 0:
            raise ValueError(
                f"{name}: got strides {x.stride()}, allowed are any whose last is 1 (head_dim contiguous); "
                f"pass {name}.contiguous()"
            )
    if nheads_kv == 0 or nheads_q % nheads_kv:
        raise ValueError(
            f"q, k: got nheads_q = {nheads_q} and nheads_kv = {nheads_kv}, "
            "allowed are nheads_q divisible by nheads_kv (GQA, MQA)"
        )


def _are_alike(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether q, k and v certainly fit each other: a fast test that nearly every call passes."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return False
    shape_q, shape_k, shape_v, dtype, device = q.shape, k.shape, v.shape, q.dtype, q.device
    if not len(shape_q) == len(shape_k) == len(shape_v) == 4:
        return False
    batch, nheads_q, _, head_dim = shape_q
    batch_k, nheads_kv, seqlen_k, head_dim_k = shape_k
    batch_v, nheads_v, seqlen_v, head_dim_v = shape_v
    return (
        batch == batch_k == batch_v
        and nheads_kv == nheads_v
        and seqlen_k == seqlen_v
        and head_dim == head_dim_k > 0
        and head_dim_v > 0
        and nheads_kv > 0
        and nheads_q % nheads_kv == 0
        and k.dtype == v.dtype == dtype
        and dtype in DTYPES
        and k.device == v.device == device
        and q.stride(3) == k.stride(3) == v.stride(3) == 1
    )


def check_packed(packed: Packed, q: Tensor, total_k: int) -> None:
    """Raise TypeError or ValueError unless these are sequences of q and k; makes only checks without a GPU sync."""
    stops_q, stops_k = packed.cu_seqlens_q, packed.cu_seqlens_k
    check_offsets("cu_seqlens_q", stops_q, q)
    if stops_k is not None:
        check_offsets("cu_seqlens_k", stops_k, q)
        if stops_k.shape != stops_q.shape:
            raise ValueError(
                f"cu_seqlens_k: got shape {tuple(stops_k.shape)}, allowed is that of cu_seqlens_q, "
                f"{tuple(stops_q.shape)}"
            )
    check_longest("_q", stops_q, packed.max_seqlen_q, q.shape[2])
    check_longest("_k", stops_k, packed.max_seqlen_k, total_k)


def check_offsets(name: str, x: Tensor, q: Tensor) -> None:
    """Check the dtype, shape and device of the offsets of packed sequences."""
    if not isinstance(x, Tensor) or x.dtype != torch.int32:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: got {got}, allowed is a torch.int32 tensor")
    if x.dim() != 1 or x.shape[0] < 1 or not x.is_contiguous():
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, allowed is (n_sequences + 1,), contiguous")
    if x.device != q.device:
        raise ValueError(f"{name}: got device {x.device}, allowed is the device of q, {q.device}")


def check_longest(side: str, cu_seqlens: Tensor | None, longest: int, total: int) -> None:
    """Check ``max_seqlen`` of a side, "_q" or "_k", and on a CPU the values of its offsets."""
    if isinstance(longest, float | bool):
        raise TypeError(f"max_seqlen{side}: got {type(longest).__name__}, allowed is an int")
    if longest < 0:
        raise ValueError(f"max_seqlen{side}: got {longest}, allowed are 0 and more")
    if cu_seqlens is not None and can_read(cu_seqlens):
        _check_stops(side, cu_seqlens.tolist(), longest, total)


def _check_stops(side: str, stops: list[int], longest: int, total: int) -> None:
    lengths = [stop - start for start, stop in itertools.pairwise(stops)]
    if stops[0] != 0 or min(lengths, default=0) < 0 or stops[-1] > total:
        raise ValueError(
            f"cu_seqlens{side}: got {stops}, allowed begins with 0, does not decrease, and ends with at most "
            f"total{side} = {total}"
        )
    if max(lengths, default=0) > longest:
        raise ValueError(f"max_seqlen{side}: got {longest}, allowed are the longest length, {max(lengths)}, and more")


def check_cache(cache: KVCache, q: Tensor, k: Tensor | None, v: Tensor | None) -> None:
    """Raise TypeError or ValueError unless this is a cache, in place of k and v, and q has queries."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache: got {type(cache).__name__}, allowed are fusedattn.KVCache and None")
    if k is not None or v is not None:
        raise ValueError("k, v: got tensors together with cache, allowed is None; caches.append() adds them to it")
    if not isinstance(q, Tensor) or q.dim() != 4 or q.dtype not in DTYPES:
        got = f"{q.dtype} {tuple(q.shape)}" if isinstance(q, Tensor) else type(q).__name__
        raise ValueError(
            f"q: got {got}, allowed is (batch, nheads_q, seqlen_q, head_dim) in {', '.join(map(str, DTYPES))}"
        )


def check_cached(cache: KVCache, q: Tensor, mask: Mask, rope: Rope | None, packed: Packed | None) -> None:
    """Raise TypeError or ValueError unless q can attend to the cache; reads its tensors if they are on a CPU."""
    if cache.format is None and cache.k.dtype != q.dtype:
        raise TypeError(f"cache: got {cache.k.dtype}, allowed are the dtype of q, {q.dtype}, and codes")
    if cache.k.device != q.device:
        raise ValueError(f"cache: got device {cache.k.device}, allowed is the device of q, {q.device}")
    n_sequences = q.shape[0] if packed is None else packed.n_sequences
    if cache.batch != n_sequences:
        raise ValueError(f"cache: got {cache.batch} sequences, allowed is the number of q's, {n_sequences}")
    if cache.head_dim != q.shape[3]:
        raise ValueError(f"cache: got head_dim {cache.head_dim}, allowed is that of q, {q.shape[3]}")
    if q.stride(3) != 1 and q.shape[3] > 1 and q.numel() > 0:
        raise ValueError(f"q: got strides {q.stride()}, allowed are any whose last is 1; pass q.contiguous()")
    nheads_kv = cache.k.shape[1]
    if nheads_kv == 0 or q.shape[1] % nheads_kv:
        raise ValueError(
            f"q, cache: got nheads_q = {q.shape[1]} and nheads_kv = {nheads_kv}, allowed are nheads_q divisible by "
            "nheads_kv (GQA, MQA)"
        )
    if rope is not None and cache.rope is not None:
        raise ValueError("rope: got tables for a cache whose keys are rotated already, by cache.rope; allowed is None")
    if cache.overwrites:
        _check_window(cache, mask, q, packed)
    if cache.rope is not None and cache.rope.positions_q is not None:
        _check_positions("positions_q", cache.rope.positions_q, q.shape[2], cache.batch if packed is None else 1)
    if can_read(q):
        cache.check_values()
        if cache.rope is not None:
            for length_q, length in zip(_lengths_q(q, packed), cache.lengths.tolist(), strict=False):
                cache.rope.check_lengths(length_q, length)


def _check_positions(name: str, positions: Tensor, n: int, batch: int) -> None:
    """Raise ValueError unless these are positions of `n` tokens in the rope of a cache."""
    allowed = dict.fromkeys(((n,), (1, n), (batch, n)))
    if tuple(positions.shape) not in allowed:
        raise ValueError(
            f"cache.rope.{name}: got shape {tuple(positions.shape)}, allowed are {', '.join(map(str, allowed))}"
        )


def _check_window(cache: KVCache, mask: Mask, q: Tensor, packed: Packed | None) -> None:
    """Raise ValueError if a query would miss keys of its window that have been overwritten."""
    lefts = [band.left for band in mask.bands if band.left is not None and band.align == "bottom_right"]
    if not lefts:
        return
    name, longest = "seqlen_q", q.shape[2]
    if packed is not None and can_read(packed.cu_seqlens_q):
        longest = max(lengths_of(packed.cu_seqlens_q), default=0)
    elif packed is not None:
        name, longest = "max_seqlen_q", packed.max_seqlen_q
    room = cache.capacity - cache.n_sinks
    if min(lefts) + longest > room:
        raise ValueError(
            f"cache: got room for {room} of the last tokens, allowed are window + {name} = {min(lefts)} + {longest} "
            "and more, because the first query sees that far back"
        )


def check_append(
    cache: KVCache, k: Tensor, v: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> None:
    """Raise an error unless k and v can be appended to the cache; whether it has room is not checked."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache: got {type(cache).__name__}, allowed is a fusedattn.KVCache")
    _check_memory(cache, v is not None)
    first = (cache.batch, cache.k.shape[1]) if cu_seqlens is None else ()
    for name, x, head_dim in (("k", k, cache.head_dim), ("v", v, cache.head_dim_v)):
        if x is None:
            continue
        if not isinstance(x, Tensor) or x.dtype not in DTYPES:
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name}: got {kind}, allowed are {', '.join(map(str, DTYPES))}")
        if cache.format is None and x.dtype != cache.k.dtype:
            raise TypeError(f"{name}: got {x.dtype}, allowed is that of the cache, {cache.k.dtype}")
        if x.dtype != k.dtype or x.device != cache.k.device:
            raise ValueError(f"{name}: got {x.dtype} on {x.device}, allowed is {k.dtype} on {cache.k.device}")
        if cu_seqlens is None:
            allowed: tuple[int | str, ...] = (*first, k.shape[2] if k.dim() == 4 else "n", head_dim)
        else:
            allowed = (k.shape[0] if k.dim() == 3 else "total", cache.k.shape[1], head_dim)
        if tuple(x.shape) != allowed:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, allowed is {allowed}")
        if x.stride(-1) != 1 and head_dim > 1:
            raise ValueError(f"{name}: got strides {x.stride()}, allowed are any whose last is 1")
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name}: got requires_grad=True, allowed is False, and torch.no_grad()")
    if cache.rope is not None and cache.rope.positions_k is not None:
        n, batch = (k.shape[2], cache.batch) if cu_seqlens is None else (k.shape[0], 1)
        _check_positions("positions_k", cache.rope.positions_k, n, batch)
    if cu_seqlens is not None:
        check_offsets("cu_seqlens", cu_seqlens, cache.k)
        if cu_seqlens.shape[0] != cache.batch + 1:
            raise ValueError(f"cu_seqlens: got shape {tuple(cu_seqlens.shape)}, allowed is {(cache.batch + 1,)}")
        check_longest("", cu_seqlens, k.shape[0] if max_seqlen is None else max_seqlen, k.shape[0])
    elif max_seqlen is not None:
        raise ValueError(f"max_seqlen: got {max_seqlen} without cu_seqlens, allowed is None")


def _check_memory(cache: KVCache, has_values: bool) -> None:
    """Raise an error unless tokens with or without values can be written to the memory of a cache."""
    written = {"k": cache.k, "v": cache.v}
    for name, scale in (("k_scale", cache.k_scale), ("v_scale", cache.v_scale)):
        if scale is not None and scale.dim() == 4:  # given ones, of two dimensions, are only read
            written[name] = scale
    for name, x in written.items():
        if is_expanded(x):
            raise ValueError(
                f"cache.{name}: got expanded memory, shape {tuple(x.shape)} with strides {x.stride()}, allowed is "
                "memory in which each number has a place of its own"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"cache.{name}: got requires_grad=True, allowed is False, and torch.no_grad()")
        if not torch.compiler.is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(f"cache.{name}: got a tensor of torch.inference_mode(), allowed outside of it are others")
    if torch.compiler.is_compiling():  # which knows no addresses
        is_right = has_values or cache.v.stride() == cache.k.stride()
    else:
        is_right = has_values != cache.shares_memory
    if not is_right:
        got = "a tensor" if has_values else "None"
        raise ValueError(f"v: got {got}, allowed is None if values are features of the keys, and only then")
    if torch.compiler.is_compiling():
        return
    if not has_values and not cache.shares_scales:
        raise ValueError(
            f"v_scale: got memory of its own or other groups, allowed are the scales in k_scale of the first "
            f"{cache.head_dim_v} features, as v is part of k"
        )
    pairs = ((written[x], written[y]) for x, y in (("k", "v"), ("k_scale", "v_scale")) if {x, y} <= written.keys())
    if has_values and any(features_overlap(x, y) for x, y in pairs):
        raise ValueError("v, v_scale: got memory that keys have too, allowed is other memory, or v=None")


def check_scalars(options: Options, backend: str | None) -> None:
    """Raise TypeError or ValueError unless the backend and the options that are no tensors are allowed."""
    check_backend(backend)
    if options.num_splits is not None:
        _check_num_splits(options.num_splits)
    if options.precision is not None and not isinstance(options.precision, FP8):
        raise TypeError(f"precision: got {type(options.precision).__name__}, allowed are fusedattn.FP8 and None")
    if options.softcap is not None:
        check_softcap(options.softcap)
    if options.dropout_p != 0.0 or type(options.dropout_p) is not float:
        check_dropout_p(options.dropout_p)
    if type(options.deterministic) is not bool:
        check_deterministic(options.deterministic)


def _check_num_splits(num_splits: int) -> None:
    """Raise TypeError or ValueError unless ``num_splits`` is a positive int."""
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise TypeError(f"num_splits: got {type(num_splits).__name__}, allowed are an int and None")
    if num_splits < 1:
        raise ValueError(f"num_splits: got {num_splits}, allowed are 1 and more, and None")


def check_mask(mask: Mask, q: Tensor, seqlen_k: int, packed: Packed | None = None, shard: Shard = WHOLE) -> None:
    """Raise ValueError unless the mask fits the shapes and lies on the device of q."""
    if mask.only_bands:  # bands fit any shape
        return
    if packed is not None and mask.pattern is not None:
        raise NotImplementedError(
            "mask: got a sparse pattern with packed sequences, allowed are all other masks; attention(), with a batch "
            "for each sequence, takes it"
        )
    if packed is None:
        mask.check(q.shape[0], q.shape[1], q.shape[2], seqlen_k, shard)
    elif packed.cu_seqlens_k is None:
        if mask.documents is not None:
            raise NotImplementedError(
                "mask: got documents with packed queries and a cache, allowed are all other masks"
            )
        mask.check(packed.n_sequences, q.shape[1], packed.max_seqlen_q, seqlen_k)
    else:
        by_token = Mask(valid=mask.valid, documents=mask.documents)
        by_token.check(q.shape[0], q.shape[1], q.shape[2], seqlen_k)
        by_sequence = replace(mask, valid=None, documents=None)
        by_sequence.check(packed.n_sequences, q.shape[1], packed.max_seqlen_q, packed.max_seqlen_k)
    _check_device("mask", mask.tensors(), q)


def check_rope(
    rope: Rope, q: Tensor, seqlen_k: int, packed: Packed | None = None, cache: KVCache | None = None
) -> None:
    """Raise TypeError or ValueError unless the tables and positions fit the shapes and lie on the device of q."""
    if not isinstance(rope, Rope):
        raise TypeError(f"rope: got {type(rope).__name__}, allowed are fusedattn.Rope and None")
    batch, _, seqlen_q, head_dim = q.shape
    rope.check_shapes(batch, seqlen_q, seqlen_k, head_dim)
    if packed is None and (cache is None or q.device.type != "cpu"):
        rope.check_lengths(seqlen_q, seqlen_k)
    elif can_read(q):
        for length_q, length_k in zip(_lengths_q(q, packed), _lengths_k(packed, cache), strict=False):
            rope.check_lengths(length_q, length_k)
    # sin is on the device of cos.
    for name, x in (("cos", rope.cos), ("positions_q", rope.positions_q), ("positions_k", rope.positions_k)):
        if x is not None and x.device != q.device:
            raise ValueError(f"rope.{name}: got device {x.device}, allowed is the device of q, {q.device}")


def _lengths_q(q: Tensor, packed: Packed | None) -> Iterable[int]:
    return itertools.repeat(q.shape[2]) if packed is None else lengths_of(packed.cu_seqlens_q)


def _lengths_k(packed: Packed | None, cache: KVCache | None) -> list[int]:
    """The numbers of keys."""
    if cache is not None:
        return cache.kept().tolist()
    return [] if packed is None or packed.cu_seqlens_k is None else lengths_of(packed.cu_seqlens_k)


def check_bias(bias: Bias, q: Tensor, seqlen_k: int, packed: Packed | None = None) -> None:
    """Raise ValueError unless the bias fits the scores and lies on the device of q."""
    if packed is None:
        bias.check(q.shape[0], q.shape[1], q.shape[2], seqlen_k)
    else:
        bias.check(packed.n_sequences, q.shape[1], packed.max_seqlen_q, packed.max_seqlen_k)
    _check_device("bias", bias.tensors(), q)


def check_score_mod(score_mod: ScoreMod, q: Tensor) -> None:
    """Raise TypeError or ValueError unless ``score_mod`` is a ScoreMod whose tensors lie on the device of q."""
    if not isinstance(score_mod, ScoreMod):
        raise TypeError(f"score_mod: got {type(score_mod).__name__}, allowed are fusedattn.ScoreMod and None")
    _check_device("score_mod", score_mod.tensors(), q)


def check_qk_norm(qk_norm: QKNorm, q: Tensor, nheads_kv: int) -> None:
    """Raise TypeError or ValueError unless the weights of the norm fit the heads and lie on the device of q."""
    if not isinstance(qk_norm, QKNorm):
        raise TypeError(f"qk_norm: got {type(qk_norm).__name__}, allowed are fusedattn.QKNorm and None")
    qk_norm.check(q, nheads_kv)


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Raise TypeError or ValueError unless there is one floating-point sink for each head of q."""
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        got = sinks.dtype if isinstance(sinks, Tensor) else type(sinks).__name__
        raise TypeError(f"sinks: got {got}, allowed is a floating-point tensor")
    if tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(f"sinks: got shape {tuple(sinks.shape)}, allowed is (nheads_q,) = {(q.shape[1],)}")
    if sinks.device != q.device:
        raise ValueError(f"sinks: got device {sinks.device}, allowed is the device of q, {q.device}")


def check_dropout_p(dropout_p: float) -> None:
    """Raise TypeError or ValueError unless ``dropout_p`` is a probability below 1."""
    check_number("dropout_p", dropout_p, 0.0, 1.0 - sys.float_info.epsilon, "0 <= dropout_p < 1")


def check_deterministic(deterministic: bool) -> None:
    """Raise TypeError unless ``deterministic`` is a bool."""
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic: got {type(deterministic).__name__}, allowed is a bool")


def check_dropout_seed(seed: Tensor, q: Tensor) -> None:
    """Raise TypeError or ValueError unless the seed is one int64 number on the device of q."""
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64:
        got = seed.dtype if isinstance(seed, Tensor) else type(seed).__name__
        raise TypeError(f"dropout_seed: got {got}, allowed is a torch.int64 tensor")
    if tuple(seed.shape) != (1,):
        raise ValueError(f"dropout_seed: got shape {tuple(seed.shape)}, allowed is (1,)")
    if seed.device != q.device:
        raise ValueError(f"dropout_seed: got device {seed.device}, allowed is the device of q, {q.device}")


def check_scale(scale: float) -> None:
    """Raise TypeError or ValueError unless ``scale`` is a finite number."""
    check_number("scale", scale, -sys.float_info.max, sys.float_info.max, "any finite number")


def check_softcap(softcap: float) -> None:
    """Raise TypeError or ValueError unless ``softcap`` is a positive number."""
    check_number("softcap", softcap, sys.float_info.min, sys.float_info.max, "a positive number")


def check_number(name: str, x: float, lowest: float, highest: float, allowed: str) -> None:
    """Raise TypeError unless ``x`` is a number, ValueError unless ``lowest <= x <= highest`` (NaN never is)."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{name}: got {type(x).__name__}, allowed is a float ({allowed})")
    if not lowest <= x <= highest:
        raise ValueError(f"{name}: got {x}, allowed is {allowed}")


def check_backend(backend: str | None) -> None:
    """Raise ValueError unless ``backend`` is a known name or None."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, allowed are {', '.join(map(repr, BACKENDS))} and None")


def _check_device(owner: str, tensors: dict[str, Tensor], q: Tensor) -> None:
    for name, x in tensors.items():
        if x.device != q.device:
            raise ValueError(f"{owner}: got {name} on {x.device}, allowed is the device of q, {q.device}")
