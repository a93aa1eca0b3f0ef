"""Caches of 8-bit and 4-bit codes, compared with codes that plain Python rounds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusedattn import KVCache, attention, caches, masks
from tests.conftest import DTYPES
from tests.helpers import quick
from tests.helpers.cache_codes import LARGEST, code_of, number_of, scale_of, values
from tests.helpers.cache_model import (
    CACHED,
    DIM,
    HEADS,
    HEADS_Q,
    LAYOUTS,
    assert_results,
    cache_in,
    device_of,
    tokens,
)

CODES = tuple(LARGEST)
GROUPS = {torch.uint8: (None, 8, 4, 2)}  # group sizes
EIGHT_BITS = CODES[:3]

backends = pytest.mark.parametrize("backend", CACHED)
codes = pytest.mark.parametrize("dtype", CODES, ids=lambda d: str(d).partition(".")[2])


@pytest.fixture(autouse=True)
def _drawn(_seed: None) -> None:
    """Every test draws the same numbers."""


def stored(x: Tensor) -> list[int]:
    """The codes of one token and head as Python's ints, the lower 4 bits of a byte first."""
    if x.dtype == torch.uint8:
        return [nibble for byte in x.tolist() for nibble in (byte & 15, byte >> 4)]
    return (x if x.dtype == torch.int8 else x.view(torch.uint8)).tolist()


def assert_codes(x: Tensor, written: Tensor, scale: Tensor, given: float | None = None) -> None:
    """Fail unless the features ``x`` of one token have these codes and, unless `given`, these scales."""
    size = len(x) // len(scale)
    found = stored(written)
    for g in range(len(scale)):
        group = x[g * size : (g + 1) * size].float().tolist()
        expected = scale_of(group, written.dtype) if given is None else given
        assert scale[g] == expected or (math.isnan(expected) and scale[g].isnan())
        for feature, code in zip(group, found[g * size :], strict=False):
            right = code_of(feature, expected, written.dtype)
            if right is None:
                assert written.float()[found.index(code)].isnan()
            else:
                assert code == right, (feature, expected)


def hard_tokens(dtype: torch.dtype, n_features: int) -> Tensor:
    """Tokens ``(1, 1, n, n_features)`` whose largest feature makes the scale 1; the others are ties and the like."""
    largest = LARGEST[dtype]
    if dtype in (torch.int8, torch.uint8):
        points = [x / 2 for x in range(int(2 * largest) + 1)] + [0.49999997, 0.50000006, 2.0**-130]
    else:
        exact = [float(x) for x in values(dtype)]
        ties = [(a + b) / 2 for a, b in itertools.pairwise(exact)]
        points = [*exact, *ties, 2.0**-30]
        points += torch.tensor(ties).nextafter(torch.tensor(0.0)).tolist()
        points += torch.tensor(ties).nextafter(torch.tensor(torch.inf)).tolist()
    points += [-x for x in points]
    width = n_features - 1
    points += [0.0] * (-len(points) % width)
    rows = torch.tensor(points).reshape(-1, width)
    return torch.cat((rows, torch.full((len(rows), 1), largest)), dim=1)[None, None]


@codes
@backends
def test_codes_of_hard_numbers(dtype, backend):
    """Ties, neighbours of ties, subnormals and zeros of both signs, at scale 1."""
    x, device = hard_tokens(dtype, DIM), device_of(backend)
    cache = cache_in("contiguous", 1, x.shape[2], 1, DIM, DIM, dtype=dtype, device=device)
    caches.append(cache, x.to(device), -x.to(device), backend=backend)
    for t in range(x.shape[2]):
        for sign, name in ((1, "k"), (-1, "v")):
            at = (0, 0, t)
            assert_codes(sign * x[at], getattr(cache, name)[at].cpu(), getattr(cache, f"{name}_scale")[at].cpu())


@quick.covering()
@quick.pairwise()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", DTYPES, ids=lambda d: str(d).partition(".")[2])
@codes
@backends
def test_codes_of_tokens(dtype, source, layout, backend):
    """In every group size, for tokens of any size."""
    device = device_of(backend)
    for group_size in GROUPS.get(dtype, (None,)):
        cache = cache_in(layout, 2, 20, HEADS, DIM, DIM, dtype=dtype, group_size=group_size, device=device)
        k, v = (x[..., :DIM].to(source) for x in tokens(18, torch.float32, (2,)))
        k = k * torch.logspace(-4, 4, 18).to(source)[:, None]
        caches.append(cache, k.to(device), v.to(device), backend=backend)
        rows, slots, _ = (x.cpu() for x in cache.place(torch.arange(18, device=device).expand(2, 18)))
        for i, t in ((0, 0), (1, 16), (0, 17), (1, 3)):
            for x, name in ((k, "k"), (v, "v")):
                at = (rows[i, t], 1, slots[i, t])
                scale = getattr(cache, f"{name}_scale")[at].cpu()
                assert_codes(x[i, 1, t], getattr(cache, name)[at].cpu(), scale)


@codes
@backends
def test_tokens_that_have_no_scale(dtype, backend):
    """Zeros, numbers so small that 1 / scale is infinite, the largest ones, and NaN and Inf."""
    device, x = device_of(backend), torch.randn(1, 1, 7, DIM)
    x[0, 0, 0] = 0.0
    x[0, 0, 1] *= 1e-40
    x[0, 0, 2] *= 1e-37
    x[0, 0, 2, 3] = 0.0
    x[0, 0, 3, 1], x[0, 0, 3, 2] = torch.finfo(torch.float32).max, -0.0
    x[0, 0, 4, 5], x[0, 0, 5, 5], x[0, 0, 6, 5] = torch.nan, torch.inf, -torch.inf
    cache = cache_in("contiguous", 1, 7, 1, DIM, DIM, dtype=dtype, device=device)
    caches.append(cache, x.to(device), x.to(device), backend=backend)
    for t in range(7):
        assert_codes(x[0, 0, t], cache.k[0, 0, t].cpu(), cache.k_scale[0, 0, t].cpu())
    k, _, _ = cache.dense()
    assert k[0, 0, :3].isfinite().all()
    assert k[0, 0, :2].abs().max() == 0
    assert k[0, 0, 4:7].isnan().all()


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=lambda d: str(d).partition(".")[2])
@backends
def test_given_scales(dtype, backend):
    """One for each row and head; too large numbers become the largest code, and scales of 0 and NaN give 0."""
    device, n = device_of(backend), 6
    cache = cache_in("rows", 2, 8, dtype=dtype, device=device)
    scale = torch.rand(4, HEADS) + 0.5
    first, second = cache.rows.tolist()
    scale[second] = torch.tensor([0.0, torch.nan])
    of_values = scale * 3
    cache = replace(cache, k_scale=scale.to(device), v_scale=of_values.to(device))
    k, v = tokens(n, torch.float32, (2,))
    k[0, 0, 1, :4] = torch.tensor([1e6, -1e6, torch.inf, -torch.inf])
    k[0, 0, 2, :4] = torch.tensor([torch.nan, -0.0, 0.0, 1e-30])
    caches.append(cache, k.to(device), v.to(device), backend=backend)
    for i, row in enumerate((first, second)):
        for h in range(HEADS):
            for t in range(n):
                for x, written, scales in ((k, cache.k, scale), (v, cache.v, of_values)):
                    own = scales[row, h].item()
                    assert_codes(x[i, h, t], written[row, h, t].cpu(), scales[row, h][None], own)
    assert torch.equal(cache.k_scale.nan_to_num(-1.0).cpu(), scale.nan_to_num(-1.0))


def decoded(cache: KVCache, sequence: int, n: int) -> tuple[Tensor, Tensor]:
    """The numbers of a contiguous or paged cache, float64 ``(1, nheads_kv, n, head_dim)``, by plain Python."""
    rows, slots, _ = cache.place(torch.arange(n, device=cache.k.device).expand(cache.batch, n))
    found = []
    for x, scales in ((cache.k.cpu(), cache.k_scale.cpu()), (cache.v.cpu(), cache.v_scale.cpu())):
        heads = []
        for h in range(x.shape[1]):
            for row, slot in zip(rows[sequence].tolist(), slots[sequence].tolist(), strict=True):
                numbers = torch.tensor([number_of(code, x.dtype) for code in stored(x[row, h, slot])]).double()
                own = scales[row, h, slot].double() if scales.dim() == 4 else scales[row, h][None].double()
                heads.append(numbers * own.repeat_interleave(len(numbers) // len(own)))
        found.append(torch.stack(heads).reshape(1, x.shape[1], n, -1))
    return found[0], found[1]


@quick.covering()
@quick.pairwise()
@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("source", DTYPES, ids=lambda d: str(d).partition(".")[2])
@pytest.mark.parametrize("layout", ["contiguous", "pages of 17"])
@pytest.mark.parametrize(
    ("dtype", "given"),
    [*((dtype, False) for dtype in CODES), *((dtype, True) for dtype in EIGHT_BITS)],
    ids=lambda x: str(x).partition(".")[2] or ("given scales" if x else "scales of tokens"),
)
@backends
def test_attention_to_codes(dtype, given, layout, source, seqlen_q, backend):
    """Within the budget of the numbers that plain Python makes of the codes; unused codes have NaN scales."""
    device, lengths = device_of(backend), [33, 5, 0]
    cache = cache_in(layout, 3, 34, dtype=dtype, device=device)
    if given:
        k_scale, v_scale = (torch.rand(x.shape[:2], device=device) * 0.02 + 0.01 for x in (cache.k, cache.v))
        cache = replace(cache, k_scale=k_scale, v_scale=v_scale)
    new = [tokens(n, torch.float32) for n in lengths]
    k, v = (torch.cat(x, dim=1).transpose(0, 1).to(device) for x in zip(*new, strict=True))
    stops = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    caches.append(cache, k, v, cu_seqlens=stops, backend=backend)
    q = torch.randn(3, HEADS_Q, seqlen_q, DIM).to(source)
    out, lse = attention(q.to(device), cache=cache, mask=masks.causal(), return_lse=True, backend=backend)
    assert out.dtype == source
    for i in (0, 1):
        rows = slice(i, i + 1)
        own = decoded(cache, i, lengths[i])
        assert_results([(out[rows], lse[rows])], q[rows], *own, f"sequence {i}", mask=masks.causal())
    assert not out[2].any()
    assert (lse[2] == -torch.inf).all()


@pytest.mark.parametrize(
    ("dtype", "group_size", "source"),
    [
        *((torch.uint8, group_size, torch.float32) for group_size in (None, 8, 2)),
        *((dtype, None, torch.float64) for dtype in CODES),
        (torch.uint8, 8, torch.float64),
    ],
    ids=lambda x: str(x).rpartition(".")[2],
)
@backends
def test_attention_to_groups(dtype, group_size, source, backend):
    """Eager numbers in float64 are those of the cache, products in float32; the kernels' are exact with one group."""
    device = device_of(backend)
    cache = cache_in("contiguous", 2, 20, HEADS, DIM, DIM, dtype=dtype, group_size=group_size, device=device)
    k, v = torch.randn(2, HEADS, 19, DIM), torch.randn(2, HEADS, 19, DIM)
    caches.append(cache, k.to(device), v.to(device), backend=backend)
    q = torch.randn(2, HEADS_Q, 1, DIM).to(source)
    out, lse = attention(q.to(device), cache=cache, return_lse=True, backend=backend)
    for i in range(2):
        rows = slice(i, i + 1)
        rounds = source == torch.float64 and (backend == "torch" or group_size is not None)
        own = [x.float() if rounds else x for x in decoded(cache, i, 19)]
        assert_results([(out[rows], lse[rows])], q[rows], *own, f"sequence {i}")


@pytest.mark.parametrize("group_size", [16, 32])
@pytest.mark.parametrize("head_dims", [(64, 32), (64, 128), (576, 512)], ids=str)
@backends
def test_groups_of_keys_and_of_values(head_dims, group_size, backend):
    """Features that share a scale are as many in both; values then have another number of scales than keys."""
    device, n = device_of(backend), 19
    cache = cache_in("pages of 16", 2, n, HEADS, *head_dims, dtype=torch.uint8, group_size=group_size, device=device)
    for scale, head_dim in zip((cache.k_scale, cache.v_scale), head_dims, strict=True):
        assert scale.shape[3] == head_dim // group_size
    k, v = (torch.randn(2, HEADS, n, d) * 4.0 ** (torch.arange(d) // group_size % 3) for d in head_dims)
    caches.append(cache, k.to(device), v.to(device), backend=backend)
    for i, t in ((0, 0), (1, n - 1)):
        row, slot, _ = (x[i, t].item() for x in cache.place(torch.arange(n, device=device).expand(2, n)))
        for x, codes, scale in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
            assert_codes(x[i, 1, t], codes[row, 1, slot].cpu(), scale[row, 1, slot].cpu())
    for seqlen_q in (1, 20):
        q = torch.randn(2, HEADS_Q, seqlen_q, head_dims[0]) / 8
        out, lse = attention(q.to(device), cache=cache, return_lse=True, backend=backend)
        for i in range(2):
            rows = slice(i, i + 1)
            assert_results([(out[rows], lse[rows])], q[rows], *decoded(cache, i, n), f"sequence {i}")


@pytest.mark.parametrize(
    ("dtype", "given"),
    [*((dtype, False) for dtype in CODES), (torch.float8_e4m3fn, True), (torch.float8_e5m2, True)],
    ids=lambda x: str(x).partition(".")[2] or ("given scales" if x else "scales of tokens"),
)
@backends
def test_numbers_that_are_not_finite(dtype, given, backend):
    """A token with a NaN makes NaN of the queries that see it, and of no others."""
    device = device_of(backend)
    cache = cache_in("pages of 16", 1, 20, dtype=dtype, device=device)
    if given:
        scale = torch.ones(cache.k.shape[:2], device=device)
        cache = replace(cache, k_scale=scale, v_scale=scale)
    k, v = tokens(20, torch.float32, (1,))
    k[0, 0, 18, 2], v[0, 1, 0, 3] = torch.nan if given else torch.inf, torch.nan
    caches.append(cache, k.to(device), v.to(device), backend=backend)
    q = torch.randn(1, HEADS_Q, 3, DIM, device=device)
    out = attention(q, cache=cache, mask=masks.window(4, 0), backend=backend)
    assert out.isnan().any(dim=-1)[0].tolist() == [[False, True, True]] * 2 + [[False] * 3] * 2
    out = attention(q, cache=cache, mask=masks.causal(), backend=backend)
    assert out.isnan().any(dim=-1)[0].tolist() == [[False, True, True]] * 2 + [[True] * 3] * 2


@pytest.mark.parametrize("many", [False, True], ids=["one query", "many queries"])
@backends
def test_numbers_beyond_float16(many, backend):
    """A code times its scale may be infinite in float16; the weights and scores are not."""
    device = device_of(backend)
    cache = cache_in("contiguous", 1, 4, dtype=torch.int8, device=device)
    k, v = tokens(4, torch.float32, (1,))
    caches.append(cache, 1e5 * k.to(device), v.to(device), backend=backend)
    q = 1e-4 * torch.randn(1, HEADS_Q, 40 if many else 1, DIM, device=device).half()
    out, lse = attention(q, cache=cache, return_lse=True, backend=backend)
    k, v = decoded(cache, 0, 4)
    scores = q.cpu().double() @ k.repeat_interleave(2, 1).mT / 4
    torch.testing.assert_close(lse.cpu().double(), scores.logsumexp(-1), rtol=2e-3, atol=2e-3)
    expected = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-3, atol=2e-3)
