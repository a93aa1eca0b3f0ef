"""The suites of ``python -m bench run``, by name.

``forward`` and ``backward`` (both passes, and the backward alone) over head_dim, seqlen, causal or not, grouped or not,
and dtype, at a constant number of tokens; ``rope``, ``padding``, ``bias`` and ``window``, one feature each; ``decode``,
one query against a cache; ``training`` and ``generate``, a whole GPT; ``launch``, the host time of a call. The
priority of a piece of work is the number of ways in which it differs from the most usual one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from bench.work.attention import AttentionWork
from bench.work.counts import Direction
from bench.work.host import HostWork
from bench.work.launch import LaunchWork
from bench.work.model import ModelSize, ModelWork
from bench.work.work import Place, Work
from fusedattn.testing.cases import Case

GROUP = 4  # query heads per KV head, if queries are grouped
K = 1024


@dataclass(frozen=True)
class Scale:
    """The size of the work; `width` is nheads * head_dim, lengths are in tokens. The first of each has priority."""

    width: int
    tokens: int
    seqlens: tuple[int, ...]
    head_dims: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    windows: tuple[int, ...]
    batches: tuple[int, ...]  # for decode
    caches: tuple[int, ...]
    most_cached: int  # batch * cache
    models: tuple[tuple[ModelSize, tuple[int, ...]], ...]  # with their training seqlens; the first also generates
    prompt: int
    n_new: int
    launch_seqlens: tuple[int, ...]
    headline: tuple[int, ...]  # the seqlens with priority
    compiled: bool = True
    most: int | None = None  # pieces of work per suite


GPU = Scale(
    width=2048,
    tokens=16 * K,
    seqlens=(512, 1 * K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K),
    head_dims=(128, 64, 256),
    dtypes=(torch.bfloat16, torch.float16),
    windows=(1 * K, 4 * K),
    batches=(1, 8, 32, 128),
    caches=(1 * K, 4 * K, 8 * K, 32 * K, 128 * K),
    most_cached=4 * K * K,
    models=(
        (ModelSize("420M", 2048, 16, n_kv_heads=4, n_layers=8, vocab_size=32 * K), (2 * K, 4 * K, 8 * K)),
        (ModelSize("124M", 768, 12, n_kv_heads=12, n_layers=12, vocab_size=50304), (1 * K,)),
    ),
    prompt=1 * K,
    n_new=64,
    launch_seqlens=(128, 512),
    headline=(2 * K, 8 * K, 16 * K),
)
CPU = Scale(
    width=512,
    tokens=1 * K,
    seqlens=(256, 512, 1 * K),
    head_dims=(64, 128),
    dtypes=(torch.float32, torch.bfloat16),
    windows=(128,),
    batches=(1, 8),
    caches=(1 * K, 8 * K),
    most_cached=8 * K,
    models=((ModelSize("1.6M", 256, 4, n_kv_heads=1, n_layers=2, vocab_size=1 * K), (256, 512)),),
    prompt=128,
    n_new=16,
    launch_seqlens=(64,),
    headline=(1 * K,),
)
QUICK = Scale(
    width=256,
    tokens=128,
    seqlens=(64, 128),
    head_dims=(64,),
    dtypes=(torch.float32,),
    windows=(32,),
    batches=(2,),
    caches=(256,),
    most_cached=512,
    models=((ModelSize("48k", 64, 4, n_kv_heads=1, n_layers=1, vocab_size=64), (64,)),),
    prompt=16,
    n_new=4,
    launch_seqlens=(64,),
    headline=(128,),
    compiled=False,
    most=4,
)

DIRECTIONS: tuple[Direction, ...] = ("forward", "both")


def scale_for(device: torch.device, *, quick: bool) -> Scale:
    """The scale for a GPU, for a CPU, or the smallest one."""
    if quick:
        return QUICK
    return GPU if device.type == "cuda" else CPU


def works(names: list[str], scale: Scale) -> list[Work]:
    """All work of these suites, the most important first; equal ones in the order of the suites."""
    suites = [sorted(SUITES[name](scale), key=lambda work: work.priority) for name in names]
    return sorted((work for suite in suites for work in suite[: scale.most]), key=lambda work: work.priority)


def _case(scale: Scale, seqlen: int, *, head_dim: int | None = None, grouped: bool = False, **fields: Any) -> Case:
    head_dim = head_dim or scale.head_dims[0]
    nheads = scale.width // head_dim
    fields = {"dtype": scale.dtypes[0], "batch": max(1, scale.tokens // seqlen), "head_dim": head_dim, **fields}
    nheads_kv = nheads // GROUP if grouped else nheads
    return Case(nheads_q=nheads, nheads_kv=nheads_kv, seqlen_q=seqlen, seqlen_k=seqlen, **fields)


def _sweep(scale: Scale, suite: str, directions: tuple[Direction, ...]) -> Iterator[Work]:
    every = itertools.product(directions, scale.dtypes, (False, True), scale.head_dims, (True, False), scale.seqlens)
    for direction, dtype, grouped, head_dim, causal, seqlen in every:
        if grouped and scale.width // head_dim < GROUP:
            continue
        case = _case(scale, seqlen, head_dim=head_dim, grouped=grouped, dtype=dtype, causal=_causal(causal))
        pages = (
            str(dtype).removeprefix("torch."),
            _heads(grouped),
            *(() if direction == "forward" else (PASSES[direction],)),
        )
        place = Place(suite, ", ".join(pages), f"head_dim {head_dim}, {_causality(causal)}", "seqlen", seqlen)
        departures = (
            dtype != scale.dtypes[0],
            grouped,
            head_dim != scale.head_dims[0],
            seqlen not in scale.headline,
            direction == "backward",
        )
        yield AttentionWork(place, sum(departures), case, direction, compiled=scale.compiled)


PASSES: dict[Direction, str] = {"forward": "forward", "backward": "backward alone", "both": "forward and backward"}


def _causal(causal: bool) -> Literal["bottom_right"] | None:
    return "bottom_right" if causal else None


def _causality(causal: bool) -> str:
    return "causal" if causal else "not causal"


def _heads(grouped: bool) -> str:
    return f"grouped queries {GROUP}:1" if grouped else "as many KV heads"


def _rope(scale: Scale) -> Iterator[Work]:
    for direction, grouped, seqlen in itertools.product(DIRECTIONS, (False, True), scale.seqlens):
        case = _case(scale, seqlen, grouped=grouped, causal="bottom_right", rope="half")
        place = Place("rope", _heads(grouped), PASSES[direction], "seqlen", seqlen)
        priority = grouped + (seqlen not in scale.headline)
        yield AttentionWork(place, priority, case, direction, compiled=scale.compiled)


def _padding(scale: Scale) -> Iterator[Work]:
    for direction, causal, percent in itertools.product(DIRECTIONS, (True, False), (50, 0, 25, 75)):
        case = _case(scale, min(4 * K, scale.seqlens[-1]), causal=_causal(causal))
        place = Place("padding", _causality(causal), PASSES[direction], "padding (%)", percent)
        yield AttentionWork(place, (not causal) + (percent != 50), case, direction, percent / 100, scale.compiled)


def _bias(scale: Scale) -> Iterator[Work]:
    learned: dict[str, Any] = {"bias": "per_head"}
    kinds: tuple[tuple[str, dict[str, Any], float], ...] = (
        ("per head, learned", learned, 0.0),
        ("per head, learned, half padded", learned, 0.5),
        ("ALiBi", {"alibi": True}, 0.0),
    )
    for direction, (name, fields, padded), seqlen in itertools.product(DIRECTIONS, kinds, scale.seqlens):
        if seqlen <= 8 * K:  # beyond this, a written-out bias is larger than all other tensors together
            case = _case(scale, seqlen, causal="bottom_right", **fields)
            place = Place("bias", name, PASSES[direction], "seqlen", seqlen)
            priority = 1 + (seqlen not in scale.headline)
            yield AttentionWork(place, priority, case, direction, padded, scale.compiled)


def _window(scale: Scale) -> Iterator[Work]:
    for direction, window, seqlen in itertools.product(DIRECTIONS, scale.windows, scale.seqlens):
        if seqlen > window:
            case = _case(scale, seqlen, causal="bottom_right", window=(window - 1, 0))
            place = Place("window", f"of {window} keys, causal", PASSES[direction], "seqlen", seqlen)
            yield AttentionWork(place, 1 + (seqlen not in scale.headline), case, direction, compiled=scale.compiled)


def _decode(scale: Scale) -> Iterator[Work]:
    for grouped, batch, cache in itertools.product((True, False), scale.batches, scale.caches):
        if batch * cache <= scale.most_cached:
            heads: dict[str, Any] = {"nheads_q": 32, "nheads_kv": 32 // GROUP if grouped else 32}
            sizes: dict[str, Any] = {"batch": batch, "seqlen_q": 1, "seqlen_k": cache, "head_dim": scale.head_dims[0]}
            case = Case(**sizes, **heads, dtype=scale.dtypes[0])
            place = Place("decode", _heads(grouped), f"batch {batch}", "cached tokens", cache)
            priority = (not grouped) + (batch not in (scale.batches[0], scale.batches[-1]))
            yield AttentionWork(place, priority, case, compiled=scale.compiled)


def _training(scale: Scale) -> Iterator[Work]:
    for model, seqlens in scale.models:
        for i, seqlen in enumerate(seqlens):
            place = Place("training", model.title, "one step", "seqlen", seqlen)
            batch = max(1, scale.tokens // seqlen)
            yield ModelWork(place, i, model, "training", batch, seqlen, 0, scale.dtypes[0], scale.compiled)


def _generate(scale: Scale) -> Iterator[Work]:
    model, _ = scale.models[0]
    for batch in (1, 16):
        place = Place("generate", model.title, f"{scale.n_new} tokens each after {scale.prompt}", "batch", batch)
        yield ModelWork(place, 1, model, "generate", batch, scale.prompt, scale.n_new, scale.dtypes[0], scale.compiled)


def _launch(scale: Scale) -> Iterator[Work]:
    ways: tuple[tuple[Literal["called", "CUDA graph"], bool, str], ...] = (
        ("called", False, "called, until the host is free"),
        ("called", True, "called, until all are done"),
        ("CUDA graph", True, "CUDA graph, until all are done"),
    )
    for (how, wait, panel), seqlen in itertools.product(ways, scale.launch_seqlens):
        case = Case(
            batch=1, nheads_q=4, nheads_kv=4, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=scale.head_dims[0],
            dtype=scale.dtypes[0], causal="bottom_right",
        )  # fmt: skip
        yield LaunchWork(Place("launch", "forward, causal", panel, "seqlen", seqlen), 1, case, how, wait)
    if scale is not QUICK:  # QUICK compiles nothing
        yield from _host()


def _host() -> Iterator[Work]:
    head_dim, seqlen = 128, 128
    fields: dict[str, Any] = {"batch": 1, "nheads_q": 8, "nheads_kv": 8, "head_dim": head_dim, "dtype": torch.bfloat16}
    training = Case(seqlen_q=seqlen, seqlen_k=seqlen, causal="bottom_right", **fields)
    for panel, case, backward in (
        ("forward", training, False),
        ("decode", replace(training, seqlen_q=1, seqlen_k=1 * K), False),
        ("forward and backward", training, True),
        ("forward and backward, RoPE", replace(training, rope="half"), True),
    ):
        yield HostWork(Place("launch", "host alone", panel, "seqlen", case.seqlen_q), 1, case, backward)


SUITES: dict[str, Callable[[Scale], Iterator[Work]]] = {
    "forward": partial(_sweep, suite="forward", directions=("forward",)),
    "backward": partial(_sweep, suite="backward", directions=("both", "backward")),
    "rope": _rope,
    "padding": _padding,
    "bias": _bias,
    "window": _window,
    "decode": _decode,
    "training": _training,
    "generate": _generate,
    "launch": _launch,
}
