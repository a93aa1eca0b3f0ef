"""Compile the launches of calls of ``attention()``, without a GPU.

The package is called as a user calls it. Triton sees a driver with a target but no device, and each launch becomes a
compilation, specialised by Triton itself from the arguments of the launcher: there is no second list of constants,
types and alignments that could differ from the launchers'.
"""

from __future__ import annotations

import functools
import io
import operator
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from bench.codegen import fingerprint, ones
from fusedattn import (
    FP8,
    KVCache,
    LinearState,
    QKNorm,
    Rope,
    attention,
    attention_varlen,
    biases,
    caches,
    linear_attention,
    masks,
)
from fusedattn.kernels import configs, hopper
from fusedattn.linear.state import empty_state
from fusedattn.masks import Mask
from fusedattn.testing import triton_functions
from fusedattn.virtual_gpu.attention import launches_for

TARGETS: dict[configs.Arch, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

# Sets of features of a call. "all but boolean" and "all" need the most registers of those that do not change scores.
FEATURES: dict[str, frozenset[str]] = {
    "plain": frozenset(),
    "causal": frozenset({"causal"}),
    "causal+rope": frozenset({"causal", "rope"}),
    "all but boolean": frozenset({"causal", "padding", "rope", "positions"}),
    "all": frozenset({"causal", "padding", "boolean", "rope", "positions"}),
    "norm": frozenset({"causal", "rope", "norm"}),
    "norm across heads": frozenset({"causal", "rope", "norm", "across heads"}),
    "few queries": frozenset({"causal", "rope", "few queries"}),
    "some queries": frozenset({"causal", "padding", "rope", "some queries"}),
    "decode": frozenset({"causal", "rope", "padding", "one query", "long cache"}),
    "ranges": frozenset({"causal", "window", "prefix", "documents", "padding"}),
    "blocks": frozenset({"causal", "layout", "mask function"}),
    "bias": frozenset({"causal", "padding", "bias"}),
    "biased": frozenset({"causal", "padding", "bias", "alibi", "sinks"}),
    "scores": frozenset({"causal", "bias", "alibi", "relative", "softcap", "score function", "sinks"}),
    "dropout": frozenset({"causal", "dropout"}),
    "packed": frozenset({"causal", "window", "rope", "packed"}),
    "fp8": frozenset({"causal", "padding", "rope", "norm", "fp8", "rotated"}),
    "fp8, tensor": frozenset({"causal", "padding", "fp8", "one scale"}),
    "fp8, packed": frozenset({"causal", "window", "packed", "fp8"}),
    "fp8, scores": frozenset({"causal", "bias", "alibi", "softcap", "sinks", "fp8"}),
    "everything": frozenset(
        {"causal", "window", "prefix", "documents", "padding", "boolean", "mask function", "rope", "positions", "bias"}
        | {"alibi", "relative", "softcap", "score function", "sinks", "dropout", "packed"}
    ),
    "cache": frozenset({"causal", "rope", "paged", "one query", "long cache"}),
    "cache, rotated on reading": frozenset({"causal", "rope on reading", "paged", "one query", "long cache"}),
    "cache of e4m3": frozenset({"causal", "rope", "paged", "e4m3", "one query", "long cache"}),
    "cache of int8": frozenset({"causal", "rope", "paged", "int8", "one query", "long cache"}),
    "cache of int4": frozenset({"causal", "rope", "paged", "int4", "one query", "long cache"}),
    "latent": frozenset({"causal", "paged", "latent", "one query", "long cache"}),
    "cache, chunk": frozenset({"causal", "rope", "paged"}),
    "cache of e4m3, chunk": frozenset({"causal", "rope", "paged", "e4m3"}),
    "one pass": frozenset({"one pass"}),
    "one pass, causal+rope": frozenset({"one pass", "causal", "rope"}),
    "one pass, padding": frozenset({"one pass", "causal", "padding", "rope", "positions"}),
    "one pass, packed": frozenset({"one pass", "causal", "window", "rope", "packed"}),
    "hopper": frozenset({"hopper"}),
    "hopper, causal+rope": frozenset({"hopper", "causal", "rope"}),
    "hopper, padding": frozenset({"hopper", "causal", "padding"}),
    "hopper, window": frozenset({"hopper", "causal", "window"}),
    "hopper, packed": frozenset({"hopper", "causal", "window", "packed"}),
    "linear": frozenset({"linear", "causal", "padding", "state"}),
    "linear, all keys": frozenset({"linear", "padding"}),
    "linear, packed": frozenset({"linear", "causal", "packed"}),
    "linear, softmax": frozenset({"linear", "causal", "softmax"}),
}

# Triton compiles another kernel for a stride that is 1 or a multiple of 16. Here the row stride of a boolean mask is
# neither; strides that depend on head_dim are multiples of 16.
BATCH, NHEADS_Q, NHEADS_KV, SEQLEN_Q, SEQLEN_K = 2, 8, 2, 256, 264
FEW_QUERIES, SOME_QUERIES, LONG_CACHE = 8, 96, 2056
LAYOUT_BLOCK, REACH = 128, 32
PAGE, GROUP = 16, 32
KEYS, VALUES, LATENT_HEADS = 576, 512, 128  # multi-head latent attention, as DeepSeek V3 has it
FP8_TARGETS = ("sm_90", "sm_100")  # the targets with products of 8 bits
CODES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call."""

    batch: int
    nheads_q: int
    nheads_kv: int
    seqlen_q: int
    seqlen_k: int

    @staticmethod
    def of(features: frozenset[str]) -> Sizes:
        """The usual sizes, changed as the features ask."""
        lengths = {"one query": 1, "few queries": FEW_QUERIES, "some queries": SOME_QUERIES}
        return Sizes(
            batch=1 if features & {"packed", "one sequence"} else BATCH,
            nheads_q=1 if "one head" in features else NHEADS_Q,
            nheads_kv=1 if features & {"one head", "one KV head"} else NHEADS_KV,
            seqlen_q=next((n for name, n in lengths.items() if name in features), SEQLEN_Q),
            seqlen_k=LONG_CACHE if "long cache" in features else 1 if "one key" in features else SEQLEN_K,
        )


@dataclass(frozen=True)
class Launch:
    """One compiled launch: values of the kernel's constexpr parameters, optional arguments that it got, whether tensor
    descriptors are among them, whether its programs walk over tiles, launch options, and the result.

    For a kernel in Gluon, `boxes` has the rows of each tensor that it requests at a time; for others it is None.

    `compiled` is Triton's CompiledKernel; if it is None, `error` says why, or the fingerprint was known. `log` is the
    output of ptxas.
    """

    kernel: str
    constants: dict[str, Any]
    features: tuple[str, ...]
    has_descriptors: bool
    is_persistent: bool
    options: dict[str, int]
    fingerprint: str
    compiled: Any
    log: str
    error: str
    boxes: dict[str, int] | None = None


# Names of switches and optional tensors in reports; others have the name of the kernel's parameter.
NAMES = {
    "HAS_LOWER": "window",
    "HAS_UPPER": "causal",
    "INDEX": "learned-args",
    "slopes": "alibi",
    "valid": "padding",
    "key_lists": "layout",
    "q": "documents",
    "seed": "dropout",
    "cu_q": "packed",
    "dq_total": "one-pass",
    "HEADS": "grouped",
    "split_keys": "split",
    "table": "paged",
    "lengths": "cache",
    "GROUP": "groups",
    "BLOCK": "one-token",
    "cu": "packed",
    "den": "normalized",
    "scale": "normalized",
    "NORMALIZES": "normed",
    "r": "across-heads",
    "dweight": "with-weights",
    "FROM_START": "rotated",
    "q_scale": "fp8",
    "whole": "one-scale",
    "rounded_sum": "residual",
    "rounding_residual": "residual",
    "reciprocal": "unbounded",
    "nan_rows": "marks",
}
# Arguments that follow from another switch, or are always present.
IMPLIED = {
    *("MODIFIED", "UNBOUNDED", "BY_PAIR", "MAY_HIDE_ROWS", "EXACT", "DERIVATIVE", "function_args", "PREFIX_AT_END"),
    *(
        "key_range",
        "k",
        "key_ranges",
        "query_ranges",
        "key_counts",
        "query_counts",
        "query_lists",
        "blocks",
        "sin",
        "cu_k",
        "ptr",
        "k_scale",
        "v_scale",
        "scales",
    ),
    *("delta", "shift", "factor", "row_max", "row_sum", "lse", "out", "dbias", "drelative", "reach"),
    *("first", "sequence", "k_sum"),
    *("weight", "c"),
    *("words", "special", "PIPELINED", "FULL_FIRST", "weighted", "kept_sum"),
}
# Tuples of one tensor and its strides that are optional.
_IN_MEMORY = ("allowed", "tree", "bias", "relative", "rounding_residual", "dq_total", "nan_rows")


def features_of(arguments: dict[str, Any], owner: str = "") -> Iterator[str]:
    """The optional arguments that a kernel got, also those in the tuples among its arguments, such as `owner`."""
    for name, value in arguments.items():
        value = getattr(value, "value", value)  # a constexpr
        if name in ("FORMAT", "NAME"):
            yield from [value] if value else []
        if name in ("HEADS", "split_keys", "GROUP"):
            value = value > (name == "HEADS")
        if name == "BLOCK":
            value = value == 1
        name = name.removesuffix("_ptr")
        if isinstance(value, tuple):
            if hasattr(value, "ptr"):  # one tensor and its strides
                if value.ptr is not None and name in _IN_MEMORY:
                    yield NAMES.get(name, name)
            elif hasattr(value, "_asdict"):
                yield from features_of(value._asdict(), name)
        elif (
            value is True or isinstance(value, Tensor) or callable(value) or (name == "softcap" and value is not None)
        ) and name not in IMPLIED:
            of_owner = {"FUNCTION": f"{owner}-function", "cos": "rope-of-keys" if owner == "rotation_k" else "rope"}
            of_owner["kv"] = owner
            yield of_owner.get(name) or NAMES.get(name, name.lower())


def constants_of(fn: JITFunction, arguments: dict[str, Any]) -> dict[str, Any]:
    """The constants among a kernel's arguments, by name; those of its tile without a ``tl.constexpr`` around them."""
    tile = arguments["tile"]._asdict() if "tile" in arguments else {}
    beside = {p.name: arguments[p.name] for p in fn.params if p.is_constexpr}
    return {name: getattr(x, "value", x) for name, x in tile.items()} | beside


def boxes_of(arguments: dict[str, Any]) -> dict[str, int]:
    """The rows of the boxes in which a kernel in Gluon reads and writes tensors, by the name of the tensor."""
    boxes = {name.removesuffix("_boxes"): x for name, x in arguments.items() if name.endswith("_boxes")}
    return {name: x.block_shape[-2] for name, x in boxes.items() if x is not None}


@dataclass(frozen=True)
class NoDevice:
    """The part of a Triton driver that compiling needs."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        """The key under which Triton keeps compiled kernels."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Required by Triton, but not used."""
        return 0


@contextmanager
def compiling(arch: configs.Arch, kernels: Collection[str] = (), known: Collection[str] = ()) -> Iterator[list[Launch]]:
    """Inside, launches compile for `arch` and are collected, each distinct one once; all, or those of `kernels`.

    Kernels whose fingerprint is among `known` are not compiled to machine code.
    """
    launches: list[Launch] = []
    seen: dict[JITFunction, list[Any]] = {}
    run = JITFunction.run

    def compile_instead(fn: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        if kernels and fn.__name__ not in kernels:
            return None
        parameters = {name: value for name, value in named.items() if name in fn.signature.parameters}
        bound = fn.signature.bind(*args, **parameters)
        bound.apply_defaults()
        arguments = bound.arguments
        chosen = {name: value for name, value in named.items() if name in ("num_warps", "num_stages")}
        log, compiled, error = io.StringIO(), None, ""
        try:
            with redirect_stdout(log), fingerprint.watching(known) as watched:  # the output of ptxas
                compiled = run(fn, *args, grid=grid, warmup=True, **named)
        except fingerprint.Known:
            pass
        except Exception as raised:  # one failure must not hide the other launches
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
        if compiled is not None and compiled in seen.setdefault(fn, []):
            return compiled
        seen.setdefault(fn, []).append(compiled)
        launches.append(
            Launch(
                kernel=fn.__name__,
                constants=constants_of(fn, arguments),
                features=tuple(sorted(set(features_of(arguments)))),
                has_descriptors=any(isinstance(x, TensorDescriptor) for x in arguments.values()),
                is_persistent=arguments.get("n_tile_ids") is not None,
                options=chosen | watched.options,
                fingerprint=watched.fingerprint,
                compiled=compiled,
                log=log.getvalue(),
                error=error,
                boxes=boxes_of(arguments) if fn.is_gluon() else None,
            )
        )
        return compiled

    triton.runtime.driver.set_active(NoDevice(TARGETS[arch]))
    with (
        patch.object(JITFunction, "run", compile_instead),
        launches_for(arch, multiprocessors=1),
        triton.knobs.compilation.scope(),
        triton.knobs.nvidia.scope(),
    ):
        # ptxas prints nothing for a kernel from the cache on disk.
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        try:
            yield launches
        finally:
            for fn in seen:
                fn.device_caches.clear()  # they do not notice a change of the target


def call(
    head_dim: int,
    dtype: torch.dtype,
    features: frozenset[str],
    *,
    training: bool = True,
    sizes: Sizes | None = None,
) -> None:
    """Call ``attention()`` on the CPU, forward and (training) backward, with every gradient and that of lse.

    A call in few bits has no backward. One with "hopper" runs the kernels for Hopper wherever they take it.
    """
    with hopper.choosing("all" if "hopper" in features else None):
        _call(head_dim, dtype, features, training, sizes or Sizes.of(features))


def _call(head_dim: int, dtype: torch.dtype, features: frozenset[str], training: bool, sizes: Sizes) -> None:
    training = training and "fp8" not in features
    if "linear" in features:
        _call_linear(head_dim, dtype, features, sizes)
        return
    if "latent" in features:
        sizes = replace(sizes, nheads_q=LATENT_HEADS, nheads_kv=1)
    nheads, of_one_number = sizes.nheads_q, "of one number" in features
    shape_q = (sizes.batch, nheads, sizes.seqlen_q, head_dim)
    shape_k = (sizes.batch, sizes.nheads_kv, sizes.seqlen_k, head_dim)
    shape_v = (*shape_k[:3], 1 if "one value" in features else head_dim)
    q, k, v = (torch.zeros(shape, dtype=dtype, requires_grad=training) for shape in (shape_q, shape_k, shape_v))
    leaves = [q, k, v]
    options: dict[str, Any] = {"mask": _mask(features, sizes), "rope": _rope(head_dim, features, sizes)}
    if "paged" in features:
        _call_with_cache(q, k, v, features, options)
        return
    if "norm" in features:
        weights = [torch.zeros(n, head_dim, dtype=dtype, requires_grad=training) for n in (nheads, sizes.nheads_kv)]
        leaves += weights
        options["qk_norm"] = QKNorm(weights[0], weights[1], across_heads="across heads" in features)
    bias = []
    if "bias" in features:
        shape = (1, 1, 1, 1) if of_one_number else (1, nheads, sizes.seqlen_q, sizes.seqlen_k)
        leaves.append(torch.zeros(shape, dtype=dtype, requires_grad=training))
        bias.append(biases.tensor(leaves[-1]))
    if "relative" in features:
        reach = next((n for n in (0, 1) if f"reach {n}" in features), REACH)
        shape = (1, 1, sizes.seqlen_q, 2 * reach + 1) if of_one_number else (1, nheads, 1, 2 * reach + 1)
        leaves.append(torch.zeros(shape, dtype=dtype, requires_grad=training))
        bias.append(biases.relative(leaves[-1]))
    if "alibi" in features:
        leaves.append(torch.zeros(nheads, requires_grad=training))
        bias.append(biases.alibi(leaves[-1]))
    if bias:
        options["bias"] = functools.reduce(operator.add, bias)
    if "sinks" in features:
        leaves.append(torch.zeros(nheads, requires_grad=training))
        options["sinks"] = leaves[-1]
    if "softcap" in features:
        options["softcap"] = 30.0
    if "score function" in features:
        of_ones = "args of 1" in features
        leaves.append(torch.zeros(1 if of_ones else nheads, requires_grad=training))
        score_mod = ones.score_function() if of_ones else triton_functions.score_function(nheads, torch.Generator())
        options["score_mod"] = score_mod.with_learned(leaves[-1])
    if "one pass" in features:
        options["deterministic"] = False
    if "dropout" in features:
        options |= {"dropout_p": 0.1, "dropout_seed": torch.zeros(1, dtype=torch.int64)}
    if "fp8" in features:
        options["precision"] = FP8("tensor" if "one scale" in features else "block", rotate="rotated" in features)
    if "largest" in features:
        options["return_max"] = True
    if "packed" in features:
        lengths = (sizes.seqlen_q, sizes.seqlen_k)
        cu_seqlens: list[Any] = [torch.tensor([0, n], dtype=torch.int32) for n in lengths]
        packed: list[Any] = [x[0].transpose(0, 1) for x in (q, k, v)]
        packed += [*cu_seqlens, *lengths]
        results = attention_varlen(*packed, return_lse=True, backend="triton", **options)
    else:
        results = attention(q, k, v, return_lse=True, backend="triton", **options)
    if training:
        torch.autograd.grad(results[:2], leaves, [torch.zeros_like(x) for x in results[:2]])


def _call_linear(head_dim: int, dtype: torch.dtype, features: frozenset[str], sizes: Sizes) -> None:
    """Call ``linear_attention()``, forward and backward, with every gradient and that of the state."""
    heads = sizes.nheads_q, sizes.nheads_kv, sizes.nheads_kv
    leaves = [torch.zeros(sizes.batch, n, sizes.seqlen_q, head_dim, dtype=dtype, requires_grad=True) for n in heads]
    valid, state = None, None
    if "padding" in features:
        valid = torch.ones(sizes.batch, sizes.seqlen_q, dtype=torch.bool)
    if "state" in features:
        state = LinearState(*(x.requires_grad_() for x in empty_state(sizes.batch, *leaves[1:])))
        leaves += state
    packed = torch.tensor([0, sizes.seqlen_q], dtype=torch.int32) if "packed" in features else None
    out, found = linear_attention(
        *leaves[:3],
        feature_map="softmax" if "softmax" in features else "elu+1",
        causal="causal" in features,
        valid=valid,
        initial_state=state,
        return_state=True,
        cu_seqlens=packed,
        backend="triton",
    )
    results = [out, *found]
    torch.autograd.grad(results, leaves, [torch.zeros_like(x) for x in results])


def _call_with_cache(q: Tensor, k: Tensor, v: Tensor, features: frozenset[str], options: dict[str, Any]) -> None:
    """Append as many tokens as there are queries to a paged cache, and attend to it."""
    batch, nheads_kv, seqlen_k, head_dim = k.shape
    n_pages = -(-seqlen_k // PAGE)
    table = torch.zeros(batch, n_pages, dtype=torch.int32)
    dtype = next((x for name, x in CODES.items() if name in features), k.dtype)
    group_size = GROUP if "int4" in features else None
    rope = options.pop("rope")
    lengths = torch.full((batch,), seqlen_k - q.shape[2], dtype=torch.int32)
    if "latent" in features:
        memory = torch.zeros(n_pages, 1, PAGE, head_dim, dtype=k.dtype)
        cache = KVCache(memory, memory[..., :VALUES], lengths, block_table=table)
        with torch.no_grad():
            caches.append(cache, k[:, :1, : q.shape[2]], backend="triton")
            attention(q, cache=cache, return_lse=True, backend="triton", **options)
        return
    cache = KVCache.paged(
        table, n_pages, PAGE, nheads_kv, head_dim, dtype=dtype, group_size=group_size, lengths=lengths,
        rope=rope if "rope" in features else None,
    )  # fmt: skip
    with torch.no_grad():
        caches.append(cache, k[:, :, : q.shape[2]], v[:, :, : q.shape[2]], backend="triton")
        own = None if "rope" in features else rope
        attention(q, cache=cache, rope=own, return_lse=True, backend="triton", **options)


def _mask(features: frozenset[str], sizes: Sizes) -> Mask:
    batch, nheads, lengths = sizes.batch, sizes.nheads_q, (sizes.seqlen_q, sizes.seqlen_k)
    mask = masks.full()
    if "causal" in features:
        mask = mask & masks.causal()
    if "window" in features:
        mask = mask & masks.window(SEQLEN_K // 2, 0)
    if "prefix" in features:
        mask = mask & masks.prefix_lm(torch.zeros(batch, dtype=torch.int32))
    if "padding" in features:
        mask = mask & masks.padding(torch.ones(batch, sizes.seqlen_k, dtype=torch.bool))
    if "documents" in features:
        mask = mask & masks.documents(*(torch.zeros(batch, n, dtype=torch.int32) for n in lengths))
    if "boolean" in features:
        shape = (1, 1, 1, 1) if "of one number" in features else (batch, 1, *lengths)
        mask = mask & masks.boolean(torch.ones(shape, dtype=torch.bool))
    if "layout" in features:
        block = 2 * SEQLEN_Q if "one block" in features else LAYOUT_BLOCK
        n_q, n_k = (-(-n // block) for n in lengths)
        mask = mask & masks.block_sparse(torch.ones(batch, nheads, n_q, n_k, dtype=torch.bool), block)
    if "tree" in features:
        shape = (1, 1, 1, 1) if "of one number" in features else (batch, 1, sizes.seqlen_q, sizes.seqlen_q)
        mask = mask & masks.tree(torch.ones(shape, dtype=torch.bool))
    if "mask function" in features:
        of_ones = "args of 1" in features
        function = ones.mask_function() if of_ones else triton_functions.mask_function(batch, nheads, torch.Generator())
        mask = mask & function
    return mask


def _rope(head_dim: int, features: frozenset[str], sizes: Sizes) -> Rope | None:
    if not features & {"rope", "rope on reading"}:
        return None
    rotary_dim = 2 if "one pair" in features else head_dim // 2 * 2
    positions: dict[str, Tensor] = {}
    if "positions" in features:
        positions = {"positions_q": torch.arange(sizes.seqlen_q), "positions_k": torch.arange(sizes.seqlen_k)}
    table = torch.zeros(sizes.seqlen_k, rotary_dim // 2)
    return Rope(table, table, interleaved="interleaved" in features, **positions)
