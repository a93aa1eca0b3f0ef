"""Calls that append to a cache and attend to it, as plain data: a :class:`CachedProblem` prints as the call for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fusedattn import KVCache, Rope, biases, caches, masks
from fusedattn.masks import CausalAlign, Mask
from tests.helpers.cache_model import cache_in, capacity_of, pages_of
from tests.helpers.cached_eager import FORMATS, NUMBERS
from tests.helpers.hostile import call_of

POSITIONS = 512  # the rows of the tables of a rotation
PADDED = 1  # packed queries that belong to no sequence


@dataclass(frozen=True, repr=False)
class CachedProblem:
    """Tokens that are appended to an empty cache, and queries that attend to it; the same numbers on every device.

    Attributes:
        steps: for each append, the number of new tokens of each sequence.
        queries: of each sequence: one number for all, or the numbers of packed queries.
        dtype: of queries and new tokens.
        form: of the cache: of FORMATS, or NUMBERS.
        layout: of :func:`tests.helpers.cache_model.cache_in`; pages may have any size.
        room: the tokens that each sequence has room for, or a few more in pages.
        token_major: the heads of a token lie together, rather than the tokens of a head.
        group: query heads that share a KV head.
        latent: values are the first features of the keys.
        ring: later tokens overwrite earlier ones, but for the first `ring`.
        padding: tokens at the start of each sequence that no query sees.
        poisoned: these tokens are NaN.
        packed: new tokens are packed, even if all sequences get the same number.
        counted: lengths are increased before the append.
        rope: whether keys are rotated when they are appended or when they are read.
        positions: those of keys and queries are given.
        boolean: a mask of random pairs.
        sizes: the magnitudes of keys and values.
        wrong: what is wrong with the call, of :data:`tests.helpers.cached_refusals.WRONG`.
    """

    steps: tuple[tuple[int, ...], ...]
    queries: int | tuple[int, ...] = 1
    dtype: torch.dtype = torch.float32
    form: str = NUMBERS
    layout: str = "contiguous"
    room: int = 40
    token_major: bool = False
    nheads_kv: int = 2
    group: int = 1
    head_dim: int = 16
    head_dim_v: int = 16
    latent: bool = False
    ring: int | None = None
    padding: tuple[int, ...] | None = None
    poisoned: bool = False
    packed: bool = True
    counted: bool = False
    rope: Literal["appending", "reading"] | None = None
    rotary_dim: int = 16
    interleaved: bool = False
    positions: bool = False
    causal: CausalAlign | None = None
    window: tuple[int | None, int | None] | None = None
    tree: bool = False
    boolean: bool = False
    alibi: bool = False
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    num_splits: int | None = None
    sizes: tuple[float, float] = (1.0, 1.0)
    wrong: str | None = None
    seed: int = 0

    def __repr__(self) -> str:
        return call_of(self)

    @property
    def command(self) -> str:
        """The shell command that checks this problem again."""
        return f'python -m tests.tools.reproduce "{self!r}"'

    @property
    def batch(self) -> int:
        return len(self.steps[0])

    @property
    def nheads_q(self) -> int:
        return self.nheads_kv * self.group

    @property
    def capacity(self) -> int:
        return capacity_of(self.layout, self.room)

    @property
    def lengths(self) -> list[int]:
        """All tokens of each sequence."""
        return [sum(counts) for counts in zip(*self.steps, strict=True)]

    @property
    def counts(self) -> list[int]:
        """The queries of each sequence."""
        return [self.queries] * self.batch if isinstance(self.queries, int) else list(self.queries)

    @property
    def longest(self) -> int:
        """The most queries of a sequence."""
        return max(self.counts)

    def kept(self, sequence: int) -> list[int]:
        """The numbers of the tokens that the cache still has."""
        n = self.lengths[sequence]
        if self.ring is None or n <= self.capacity:
            return list(range(n))
        return [*range(self.ring), *range(n - self.capacity + self.ring, n)]

    def slot(self, token: int) -> int:
        """The slot of a token among those of its sequence."""
        if self.ring is None or token < self.ring:
            return token
        return self.ring + (token - self.ring) % (self.capacity - self.ring)

    def position(self, sequence: int, token: int) -> int:
        """Where a key is rotated to when it is appended."""
        return (5 * token + 3 * sequence + 1) % POSITIONS if self.positions else token

    def empty(self, device: str) -> KVCache:
        """The cache before the first append; its memory is NaN, or any codes with NaN scales."""
        codes, group, given = FORMATS.get(self.form, (self.dtype, None, False))
        generator = torch.Generator().manual_seed(self.seed)
        options: dict[str, Any] = {"group_size": group}
        if self.padding is not None:
            options["left_padding"] = torch.tensor(self.padding, dtype=torch.int32, device=device)
        if self.rope == "appending":
            options["rope"] = self.rotation(device)
        cache = cache_in(
            self.layout, self.batch, self.room, self.nheads_kv, self.head_dim, self.head_dim_v, dtype=codes,
            device=device, used=[min(n, self.capacity) for n in self.lengths], overwrites=self.ring is not None,
            n_sinks=self.ring or 0, **options,
        )  # fmt: skip
        if self.token_major:
            moved = {name: getattr(cache, name) for name in ("k", "v", "k_scale", "v_scale")}
            moved = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in moved.items() if x is not None}
            cache = replace(cache, **moved)
        if given:
            assert cache.format is not None
            largest = torch.tensor(self.sizes)[:, None, None] * 4.0 / cache.format.largest
            scales = largest * (0.5 + torch.rand(2, *cache.k.shape[:2], generator=generator))
            k_scale, v_scale = scales.to(device).unbind()
            cache = replace(cache, k_scale=k_scale, v_scale=v_scale)
        return _with_latent_values(cache) if self.latent else cache

    def rotation(self, device: str) -> Rope:
        """The tables."""
        tables = Rope.from_theta(self.rotary_dim, POSITIONS, 100.0)
        return Rope(tables.cos, tables.sin, interleaved=self.interleaved).to(device)


def _with_latent_values(cache: KVCache) -> KVCache:
    """The cache, its values the first features of its keys."""
    scale = cache.k_scale
    if scale is not None and scale.dim() == 4:
        assert cache.v_scale is not None
        scale = scale[..., : cache.v_scale.shape[3]]
    return replace(cache, v=cache.k[..., : cache.v.shape[3]], v_scale=scale)


class Numbers:
    """The tensors of a problem, on the CPU.

    Attributes:
        k, v: for each sequence ``(nheads_kv, its tokens, head_dim)``.
        q: ``(batch, nheads_q, queries, head_dim)``; packed ``(total, nheads_q, head_dim)``.
    """

    def __init__(self, problem: CachedProblem) -> None:
        self.problem, generator = problem, torch.Generator().manual_seed(problem.seed + 1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.k, self.v = (
            [(size * normal(problem.nheads_kv, n, width)).to(problem.dtype) for n in problem.lengths]
            for size, width in zip(problem.sizes, (problem.head_dim, problem.head_dim_v), strict=True)
        )
        if problem.latent:
            self.v = [x[..., : problem.head_dim_v] for x in self.k]
        if problem.poisoned and problem.padding is not None:
            for tokens in (self.k, self.v):
                for x, n in zip(tokens, problem.padding, strict=True):
                    x[:, :n] = torch.nan
        heads, longest = problem.nheads_q, problem.longest
        if isinstance(problem.queries, int):
            q = normal(problem.batch, heads, problem.queries, problem.head_dim)
        else:
            q = normal(sum(problem.queries) + PADDED, heads, problem.head_dim)
        self.q = q.to(problem.dtype)
        self.tree = torch.rand(longest, longest, generator=generator) < 0.6
        self.pairs = torch.rand(problem.batch, heads, longest, problem.capacity, generator=generator) < 0.7
        self.slopes, self.sinks = (normal(heads) for _ in range(2))
        self.positions_q = torch.randint(0, POSITIONS, (problem.batch, longest), generator=generator)
        self.positions_k = torch.randint(0, POSITIONS, (problem.capacity,), generator=generator)

    def stops(self, counts: list[int]) -> Tensor:
        return torch.tensor([0, *counts]).cumsum(0).int()

    def append(self, cache: KVCache, backend: str) -> None:
        """Append all steps."""
        before = [0] * self.problem.batch
        for counts in self.problem.steps:
            self._append(cache, before, list(counts), backend)
            before = [n + count for n, count in zip(before, counts, strict=True)]

    def _append(self, cache: KVCache, before: list[int], counts: list[int], backend: str) -> None:
        problem, device = self.problem, cache.k.device
        rows = [slice(n, n + count) for n, count in zip(before, counts, strict=True)]
        new = [[x[:, own] for x, own in zip(tokens, rows, strict=True)] for tokens in (self.k, self.v)]
        options: dict[str, Any] = {"counted": problem.counted, "backend": backend}
        as_rows = not problem.packed and len(set(counts)) == 1
        if as_rows:
            k, v = (torch.stack(x).to(device) for x in new)
        else:
            k, v = (torch.cat(x, dim=1).transpose(0, 1).to(device) for x in new)
            options |= {"cu_seqlens": self.stops(counts).to(device), "max_seqlen": max(counts)}
        if problem.rope == "appending" and problem.positions:
            at = [[problem.position(i, t) for t in range(own.start, own.stop)] for i, own in enumerate(rows)]
            own_at = torch.tensor(at if as_rows else [t for x in at for t in x], device=device, dtype=torch.int64)
            assert cache.rope is not None
            cache = replace(cache, rope=cache.rope.at(None, own_at))
        if problem.counted:
            cache.lengths.add_(torch.tensor(counts, dtype=torch.int32, device=device))
        caches.append(cache, k, None if problem.latent else v, **options)

    def options(self, device: str) -> dict[str, Any]:
        """The options of the call of attention, but those that a backend has alone."""
        problem = self.problem
        found = self._common(self.mask(self.tree, self.pairs)).items()
        options = {name: x.to(device) if hasattr(x, "to") else x for name, x in found}
        if problem.rope == "reading":
            rope = problem.rotation(device)
            if problem.positions:
                rope = rope.at(self._given_q().to(device), self.positions_k.to(device))
            options["rope"] = rope
        return options

    def cache_to_read(self, cache: KVCache) -> KVCache:
        """The cache with the positions of the queries, if they are given."""
        if cache.rope is None or not self.problem.positions:
            return cache
        return replace(cache, rope=cache.rope.at(self._given_q().to(cache.k.device), None))

    def _given_q(self) -> Tensor:
        """The given positions of queries, in the form of q."""
        if isinstance(self.problem.queries, int):
            return self.positions_q
        own = [x[:n] for x, n in zip(self.positions_q, self.problem.counts, strict=True)]
        return torch.cat([*own, torch.zeros(PADDED, dtype=torch.int64)])

    def of_sequence(self, i: int, shown: list[bool]) -> dict[str, Any]:
        """The options of a sequence alone, whose kept tokens are visible where `shown`."""
        problem, n, count = self.problem, len(shown), self.problem.counts[i]
        mask = self.mask(self.tree[:count, :count], self.pairs[i : i + 1, :, :count, :n])
        options = self._common(mask & masks.padding(torch.tensor([shown]).bool()))
        at = self.positions_q[i, :count]
        if problem.rope == "reading":
            rope = problem.rotation("cpu")
            options["rope"] = rope.at(at, self.positions_k[:n]) if problem.positions else rope
        elif problem.rope == "appending":  # at position 0 the keys stay as they are
            newest = torch.arange(problem.lengths[i] - count, problem.lengths[i])
            options["rope"] = problem.rotation("cpu").at(
                at if problem.positions else newest, torch.zeros(n, dtype=torch.int64)
            )
        return options

    def mask(self, tree: Tensor, pairs: Tensor) -> Mask:
        problem, mask = self.problem, masks.full()
        if problem.causal is not None:
            mask = mask & masks.causal(problem.causal)
        if problem.window is not None:
            mask = mask & masks.window(*problem.window)
        if problem.tree:
            mask = mask & masks.tree(tree)
        return mask & masks.boolean(pairs) if problem.boolean else mask

    def _common(self, mask: Mask) -> dict[str, Any]:
        """Options that are the same for each sequence, with its mask."""
        problem = self.problem
        return {
            "mask": mask,
            "scale": problem.scale,
            "softcap": problem.softcap,
            "bias": biases.alibi(self.slopes) if problem.alibi else None,
            "sinks": self.sinks if problem.sinks else None,
        }


def size_of_page(problem: CachedProblem) -> int:
    """The slots of a row of the memory."""
    return pages_of(problem.layout) or problem.room


def places(problem: CachedProblem, cache: KVCache, sequence: int) -> tuple[list[int], list[int]]:
    """The rows and slots of the tokens of a sequence that are kept, in plain Python."""
    size = size_of_page(problem)
    slots = [problem.slot(token) for token in problem.kept(sequence)]
    if cache.block_table is not None:
        pages = cache.block_table[sequence].tolist()
        return [pages[slot // size] for slot in slots], [slot % size for slot in slots]
    row = sequence if cache.rows is None else int(cache.rows[sequence])
    return [row] * len(slots), slots
