"""The memory of a cache, compared with plain Python: each token in its place, rounded once, nothing else changed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedattn import KVCache
from tests.helpers.cache_codes import code_of, number_of, scale_of
from tests.helpers.cache_model import rotated
from tests.helpers.cached_eager import FORMATS
from tests.helpers.cached_problem import CachedProblem, Numbers, places
from tests.helpers.contract import memory_of


def bytes_of(cache: KVCache) -> dict[str, Tensor]:
    """Copies of all bytes of the memory of a cache."""
    return {name: memory_of(x).clone() for name, x in {"k": cache.k, "v": cache.v, **cache.tensors()}.items()}


def assert_same_bytes(cache: KVCache, expected: dict[str, Tensor], what: str) -> None:
    """Fail, saying `what`, if a byte is not the expected one."""
    for name, x in bytes_of(cache).items():
        assert torch.equal(x, expected[name]), f"{what}: {name}"


def keys_and_values(problem: CachedProblem, cache: KVCache, sequence: int) -> tuple[Tensor, Tensor]:
    """The numbers that the memory holds at the places of a sequence, float64 ``(1, nheads_kv, n, head_dim)``."""
    at = places(problem, cache, sequence)
    return _numbers_at(cache.k, cache.k_scale, *at), _numbers_at(cache.v, cache.v_scale, *at)


def _numbers_at(x: Tensor, scale: Tensor | None, rows: list[int], slots: list[int]) -> Tensor:
    own = x.cpu()[rows, :, slots].transpose(0, 1)[None]
    if scale is None:
        return own.double()
    codes, factors = _codes(own), _scales_at(scale, rows, slots).double()
    values = torch.tensor([number_of(code, x.dtype) for code in codes.flatten().tolist()]).double()
    return values.view(codes.shape) * factors.repeat_interleave(codes.shape[-1] // factors.shape[-1], dim=-1)


def _codes(x: Tensor) -> Tensor:
    """Codes as ints: the byte, the integer, or for 4 bits two for each byte, the lower one first."""
    if x.dtype == torch.uint8:
        return torch.stack((x & 15, x >> 4), dim=-1).flatten(-2)
    return x if x.dtype == torch.int8 else x.view(torch.uint8)


def _scales_at(scale: Tensor, rows: list[int], slots: list[int]) -> Tensor:
    """``(1, nheads_kv, n, groups)``."""
    own = scale.cpu()
    found = own[rows, :, slots] if scale.dim() == 4 else own[rows][..., None]
    return found.transpose(0, 1)[None]


def assert_memory(problem: CachedProblem, numbers: Numbers, cache: KVCache, before: dict[str, Tensor]) -> None:
    """Fail unless the tokens of the problem are where they must be, and all else is as `before` they were appended."""
    assert cache.lengths.tolist() == problem.lengths
    empty = torch.ones(cache.k.shape[0], cache.k.shape[2], dtype=torch.bool)
    for i in range(problem.batch):
        rows, slots = places(problem, cache, i)
        empty[rows, slots] = False
        kept = problem.kept(i)
        if problem.poisoned and problem.padding is not None:  # NaN, which has no code that attention may read
            shown = [at for at, token in enumerate(kept) if token >= problem.padding[i]]
            rows, slots, kept = ([x[at] for at in shown] for x in (rows, slots, kept))
        if kept:
            keys = _Bounds.of_keys(problem, i, numbers.k[i], kept)
            _assert_tokens(keys, cache.k, cache.k_scale, rows, slots, problem, f"k of sequence {i}")
            if not problem.latent:
                values = _Bounds.of(numbers.v[i][:, kept])
                _assert_tokens(values, cache.v, cache.v_scale, rows, slots, problem, f"v of sequence {i}")
    for name in ("k", "v", "k_scale", "v_scale"):
        x = getattr(cache, name)
        if x is not None:
            _assert_unchanged(x, before[name], empty, name)


def _assert_unchanged(x: Tensor, before: Tensor, empty: Tensor, name: str) -> None:
    """Compare the `empty` slots ``(n_rows, n_slots)`` with the bytes of the memory before, or all given scales."""
    was = torch.empty(0, dtype=x.dtype, device=x.device)
    was.set_(before.untyped_storage(), x.storage_offset(), x.shape, x.stride())
    if x.dim() == 4:
        x, was = (y.transpose(1, 2)[empty.to(y.device)] for y in (x, was))
    x, was = (y.contiguous().view(torch.uint8) for y in (x, was))
    assert torch.equal(x, was), f"{name}: memory of no token was changed"


class _Bounds(NamedTuple):
    """The least and the largest numbers that may be rounded, float64 ``(nheads_kv, n, features)``."""

    lower: Tensor
    upper: Tensor

    @classmethod
    def of(cls, x: Tensor) -> _Bounds:
        return cls(x.double(), x.double())

    @classmethod
    def of_keys(cls, problem: CachedProblem, i: int, x: Tensor, tokens: list[int]) -> _Bounds:
        """A rotation is computed in float32."""
        x = x[:, tokens]
        if problem.rope != "appending":
            return cls.of(x)
        exact = rotated(x, problem.rotation("cpu"), [problem.position(i, token) for token in tokens])
        error = 2 * torch.finfo(torch.float32).eps * x.double().abs().amax(dim=-1, keepdim=True)
        is_rotated = torch.arange(x.shape[-1]) < problem.rotary_dim
        return cls(*(torch.where(is_rotated, y, exact) for y in (exact - error, exact + error)))


def _assert_tokens(
    bounds: _Bounds,
    x: Tensor,
    scale: Tensor | None,
    rows: list[int],
    slots: list[int],
    problem: CachedProblem,
    what: str,
) -> None:
    """Fail unless numbers within the bounds, rounded once, are what the memory ``x`` has at these places."""
    stored = x.cpu()[rows, :, slots].transpose(0, 1)
    if scale is not None:
        _assert_codes(
            bounds, _codes(stored), _scales_at(scale, rows, slots)[0], x.dtype, FORMATS[problem.form][2], what
        )
        return
    lower, upper = (y.float().to(x.dtype) for y in bounds)
    is_right = (lower <= stored) & (stored <= upper)
    assert is_right.all(), f"{what}: not the new numbers in (head, token, feature) {(~is_right).nonzero()[:3].tolist()}"


def _assert_codes(bounds: _Bounds, codes: Tensor, scales: Tensor, dtype: torch.dtype, given: bool, what: str) -> None:
    """Fail unless these are codes and scales, ``(nheads_kv, n, features)`` and ``(..., groups)``, in plain Python."""
    of_group = (scales.shape[-1], -1)
    rows = [x.float().unflatten(-1, of_group).flatten(0, 2).tolist() for x in bounds]
    groups = codes.unflatten(-1, of_group).flatten(0, 2).tolist()
    for lower, upper, own, scale in zip(*rows, groups, scales.flatten().tolist(), strict=True):
        ends = list(zip(lower, upper, strict=True))
        least = scale_of([0.0 if a <= 0.0 <= b else min(abs(a), abs(b)) for a, b in ends], dtype)
        most = scale_of([max(abs(a), abs(b)) for a, b in ends], dtype)
        assert given or least <= scale <= most, f"{what}: scale {scale}, right are {least} .. {most}"
        for (a, b), code in zip(ends, own, strict=True):
            right = [code_of(end, scale, dtype) for end in (a, b)]
            assert None not in right
            first, last = (number_of(x, dtype) for x in right if x is not None)
            is_right = first <= number_of(code, dtype) <= last  # a zero may have either sign
            assert is_right, f"{what}: code {code} of a number in {a} .. {b} with scale {scale}"
