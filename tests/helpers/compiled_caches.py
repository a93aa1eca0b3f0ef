"""Caches that the compiled kernels append to and attend to on the virtual GPU.

Import this only where kernels are compiled: not in a process with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusedattn import KVCache, Rope, attention, caches, masks, reference_cached, testing
from fusedattn.kernels import configs
from fusedattn.testing import Ratios
from fusedattn.virtual_gpu.attention import compiled_attention
from fusedattn.virtual_gpu.counters import Counters
from fusedattn.virtual_gpu.eager import gpu_eager
from tests.helpers.cached_eager import FORMATS, NUMBERS, by_eager, numbers_of

BATCH, HEADS_Q, HEADS, HEAD_DIM, PAGE, PAGES = 2, 8, 2, 64, 32, 6
LENGTHS = (75, 150)


@dataclass(frozen=True)
class CacheProblem:
    """Two prompts and another token, appended to pages, and attention to all of them.

    Attributes:
        form: of tests.helpers.cached_eager.FORMATS, or NUMBERS.
        seqlen_q: queries of each sequence.
        ring: later tokens overwrite earlier ones.
        rotated: keys are rotated when they are appended.
    """

    arch: configs.Arch
    dtype_of_q: torch.dtype
    form: str = NUMBERS
    seqlen_q: int = 1
    ring: bool = False
    rotated: bool = False

    group = "caches"

    @property
    def dtype(self) -> str:
        return str(self.dtype_of_q).removeprefix("torch.")

    def __str__(self) -> str:
        parts = [self.group, self.arch, self.dtype, self.form, f"{self.seqlen_q} queries"]
        return ", ".join([*parts, *(["a ring"] if self.ring else []), *(["rotated"] if self.rotated else [])])


def problems(arch: configs.Arch) -> Iterator[CacheProblem]:
    """Every format for few and for many queries; rings; rotated keys."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for i, form in enumerate((NUMBERS, *FORMATS)):
        yield CacheProblem(arch, dtypes[i % 3], form)
        yield CacheProblem(arch, dtypes[(i + 1) % 3], form, seqlen_q=70)
    for dtype, form in zip(dtypes, (NUMBERS, "e4m3", "int4"), strict=True):
        yield CacheProblem(arch, dtype, form, ring=True)
        yield CacheProblem(arch, dtype, seqlen_q=3, rotated=True)


def solve(problem: CacheProblem) -> tuple[dict[str, Ratios], dict[str, Counters]]:
    """The share of its budget that each result uses, and what each kernel executed.

    Raises:
        AssertionError: the memory of the cache is not that of the definition.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(problem.dtype_of_q)

    cache = _empty(problem, generator)
    eager, wide = (_copy(cache, dtype) for dtype in (None, torch.float64))
    q = normal(BATCH, HEADS_Q, problem.seqlen_q, HEAD_DIM)
    stops = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0).int()
    steps = [(*(normal(sum(LENGTHS), HEADS, HEAD_DIM) for _ in range(2)), stops)]
    steps.append((*(normal(BATCH, HEADS, 1, HEAD_DIM) for _ in range(2)), None))
    mask = masks.causal()
    with compiled_attention(problem.arch) as gpu:
        for k, v, cu_seqlens in steps:
            caches.append(cache, k, v, cu_seqlens=cu_seqlens, backend="triton")
        rope = cache.rope
        out, lse = attention(q, cache=cache, mask=mask, return_lse=True, backend="triton")
    for k, v, cu_seqlens in steps:
        for other in (eager, wide):
            counts = 1 if cu_seqlens is None else cu_seqlens.diff()
            other.lengths.add_(counts)
            wider = (x.to(other.k.dtype) if other.format is None else x for x in (k, v))
            reference_cached.append(other, *wider, cu_seqlens)
    ratios = {}
    if problem.rotated:
        with gpu_eager():
            stored, truth, baseline = (x.dense()[0] for x in (cache, wide, eager))
        ratios["keys"] = testing.compare(stored, truth, baseline)
        assert rope is not None
        q = _rotated_alike(q, cache, rope)
    else:
        _assert_same_memory(cache, eager)
    inputs = testing.Inputs(q, q, q, q, q[..., 0], mask, None, None)
    with gpu_eager() if problem.dtype_of_q == torch.float32 else contextlib.nullcontext():
        baseline = by_eager(inputs, numbers_of(cache, problem.dtype_of_q))
    golden = by_eager(inputs.to(torch.float64), numbers_of(cache, torch.float64))
    return ratios | testing.compare_results({"out": out, "lse": lse}, golden, baseline, q.dtype), gpu.counters


def _empty(problem: CacheProblem, generator: torch.Generator) -> KVCache:
    codes, group, given = FORMATS.get(problem.form, (problem.dtype_of_q, None, False))
    pages = 3 if problem.ring else PAGES
    order = torch.randperm(BATCH * pages + 1, generator=generator)[: BATCH * pages]
    cache = KVCache.paged(
        order.int().view(BATCH, pages), BATCH * pages + 1, PAGE, HEADS, HEAD_DIM, dtype=codes,
        group_size=group, overwrites=problem.ring, n_sinks=4 if problem.ring else 0,
        rope=Rope.from_theta(HEAD_DIM, 256) if problem.rotated else None,
    )  # fmt: skip
    if given:
        k_scale, v_scale = 4.0 / cache.format.largest * (0.5 + torch.rand(2, *cache.k.shape[:2], generator=generator))
        cache = replace(cache, k_scale=k_scale.contiguous(), v_scale=v_scale.contiguous())
    return cache


def _copy(cache: KVCache, dtype: torch.dtype | None) -> KVCache:
    """Memory of its own; numbers in another dtype."""
    names = ("k", "v", "lengths", "k_scale", "v_scale")
    copied = {name: x.clone() for name in names if (x := getattr(cache, name)) is not None}
    if dtype is not None and cache.format is None:
        copied |= {name: copied[name].to(dtype) for name in ("k", "v")}
    return replace(cache, **copied)


def _assert_same_memory(cache: KVCache, eager: KVCache) -> None:
    for name in ("k", "v", "k_scale", "v_scale", "lengths"):
        found, expected = getattr(cache, name), getattr(eager, name)
        if found is not None:
            wrong = (found.view(torch.uint8) != expected.view(torch.uint8)).sum()
            assert wrong == 0, f"{name}: {wrong} bytes are not those of the definition"


def _rotated_alike(q: Tensor, cache: KVCache, rope: Rope) -> Tensor:
    """Queries, rotated at the end of each sequence."""
    rows = [
        rope.at(at, at).rotate(x, x)[0]
        for n, x in zip(cache.lengths.tolist(), q.split(1), strict=True)
        for at in [torch.arange(n - q.shape[2], n)]
    ]
    return torch.cat(rows)
