"""Philox as its authors published it and as Triton implements it, and the pairs that dropout keeps."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedattn import dropout
from fusedattn.shard import Shard
from tests.conftest import DEVICE


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (
            (0x00000000, 0x00000000, 0x00000000, 0x00000000),
            (0x00000000, 0x00000000),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_the_known_answers_of_random123(counter, key, words):
    low, high = key
    seed = high << 32 | low
    seed = torch.tensor([seed - (1 << 64) if seed >> 63 else seed])
    got = dropout.philox(seed, *(torch.tensor([word]) for word in counter))
    assert tuple(word.item() for word in got) == words


@triton.jit
def four_words(out_ptr, seed_ptr, index, N_ROWS: tl.constexpr, N_KEYS: tl.constexpr):
    i, j = tl.arange(0, N_ROWS)[:, None], tl.arange(0, N_KEYS)[None, :]
    zeros = tl.zeros((N_ROWS, N_KEYS), tl.int32)
    words = tl.philox(tl.load(seed_ptr), zeros + j, zeros + i, zeros + index, zeros, n_rounds=10)
    for n in tl.static_range(4):
        tl.store(out_ptr + (n * N_ROWS + i) * N_KEYS + j, words[n].to(tl.int64) & 0xFFFFFFFF)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1, -1, -(2**63), 0x299F31D0A4093822])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_triton_keeps_the_same(seed, dropout_p):
    """Pairs whose query and key differ only in bit 3 use the words of one counter, whose index omits that bit."""
    batch, nheads, seqlen_q, seqlen_k, first = 2, 3, 21, 61, 5
    seed = torch.tensor([seed], device=DEVICE)
    keep = dropout.keep_mask(seed, dropout_p, batch, nheads, seqlen_q, seqlen_k, shard=Shard(first))
    assert keep.shape == (batch, nheads, seqlen_q, seqlen_k)
    assert keep.dtype == torch.bool
    assert keep.device.type == DEVICE
    i, j = torch.arange(seqlen_q, device=DEVICE)[:, None], torch.arange(seqlen_k, device=DEVICE)
    row, key = ((x & 7) + (x >> 4) * 8 for x in (i, j))
    for b in range(batch):
        for h in range(nheads):
            words = torch.empty(4, 16, 32, dtype=torch.int64, device=DEVICE)
            four_words[(1,)](words, seed, (first + b) * nheads + h, N_ROWS=16, N_KEYS=32)
            own = words[(i >> 3 & 1) * 2 + (j >> 3 & 1), row, key]
            assert torch.equal(keep[b, h], own >= math.floor(dropout_p * 2**32))


def keep_mask(dropout_p: float, *shape: int, **options: object) -> Tensor:
    return dropout.keep_mask(torch.tensor([1234567890123]), dropout_p, *shape, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dropout_p", [0.0, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_the_fraction_kept(dropout_p):
    keep = keep_mask(dropout_p, 2, 4, 128, 256).double()
    for each in (keep, keep[0], keep[1, 2], keep[..., 7], keep[:, :, 100]):
        deviation = math.sqrt(dropout_p * (1 - dropout_p) / each.numel())
        assert abs(each.mean().item() - (1 - dropout_p)) <= 5 * deviation
    assert dropout_p > 0 or keep.all()


def test_every_pair_draws_for_itself():
    """Masks that differ in a single index or in the seed agree in half of their pairs, by chance."""
    keep = keep_mask(0.5, 2, 2, 64, 64)
    other = dropout.keep_mask(torch.tensor([1234567890124]), 0.5, 2, 2, 64, 64)
    for a, b in (
        (keep[0], keep[1]),
        (keep[:, 0], keep[:, 1]),
        (keep[:, :, :-1], keep[:, :, 1:]),
        (keep[..., :-1], keep[..., 1:]),
        (keep[..., :-8], keep[..., 8:]),
        (keep[:, :, :-8], keep[:, :, 8:]),
        (keep[:, :, :-8, :-8], keep[:, :, 8:, 8:]),
        (keep, keep.mT),
        (keep, other),
    ):
        agree = (a == b).double()
        assert abs(agree.mean().item() - 0.5) <= 5 * 0.5 / math.sqrt(agree.numel() / 2)


@pytest.mark.parametrize(
    ("rows", "keys"),
    [(slice(13, 25), slice(None)), (None, slice(1, None, 4)), (torch.tensor([26, 9, 9, 0]), torch.tensor([38, 2, 10]))],
)
def test_a_part_is_that_of_the_whole(rows, keys):
    whole = keep_mask(0.4, 3, 2, 27, 39)
    expected = whole[:, :, slice(None) if rows is None else rows][..., slice(None) if keys is None else keys]
    assert torch.equal(keep_mask(0.4, 3, 2, 27, 39, rows=rows, keys=keys), expected)
    expected = expected[1:]
    assert torch.equal(keep_mask(0.4, 2, 2, 27, 39, rows=rows, keys=keys, shard=Shard(1)), expected)


@pytest.mark.parametrize("rows", [range(27), range(16, 27), range(9, 24), range(5, 6), range(3, 3)], ids=str)
@pytest.mark.parametrize("keys", [range(39), range(7, 33), range(31, 32)], ids=str)
def test_some_heads_are_those_of_the_whole(rows, keys):
    whole = keep_mask(0.4, 3, 2, 27, 39)
    streams = torch.tensor([5, 2])  # the last head of the last batch, and the first of the second
    got = dropout.kept(torch.tensor([1234567890123]), 0.4, streams, rows, keys)
    expected = torch.stack((whole[2, 1], whole[1, 0]))[:, rows.start : rows.stop, keys.start : keys.stop]
    assert torch.equal(got, expected)


def test_a_weight_is_dropped_below_the_threshold_alone():
    word = dropout.philox(torch.tensor([1234567890123]), *torch.tensor([2, 1, 0, 0]).split(1))[0].item()
    assert keep_mask(word / 2**32, 1, 1, 2, 3)[0, 0, 1, 2]
    assert not keep_mask((word + 1) / 2**32, 1, 1, 2, 3)[0, 0, 1, 2]
    of_part = {"rows": slice(1, 2), "keys": slice(2, 3)}
    assert keep_mask(word / 2**32, 1, 1, 2, 3, **of_part).item()
    assert not keep_mask((word + 1) / 2**32, 1, 1, 2, 3, **of_part).item()


def test_seeds_that_are_mapped():
    """Seeds with a batch dimension, as ``torch.vmap(..., randomness="different")`` draws them."""
    seeds = torch.tensor([[1234567890123], [5]])
    got = torch.vmap(lambda seed: dropout.keep_mask(seed, 0.4, 2, 3, 27, 39))(seeds)
    assert torch.equal(got, torch.stack([dropout.keep_mask(seed, 0.4, 2, 3, 27, 39) for seed in seeds]))


def test_seeds():
    torch.manual_seed(3)
    first, second = dropout.draw_seed("cpu"), dropout.draw_seed("cpu")
    assert first.shape == (1,)
    assert first.dtype == torch.int64
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(dropout.draw_seed("cpu"), first)
    assert int(max(dropout.draw_seed("cpu").item() for _ in range(50))).bit_length() > 60


def test_dropout_in_a_compiled_function():
    def call(seed: Tensor, x: Tensor) -> Tensor:
        return dropout.keep_mask(seed, 0.3, 2, 2, x.shape[0], x.shape[1]) & dropout.keep_mask(
            dropout.draw_seed("cpu"), 0.0, 2, 2, x.shape[0], x.shape[1]
        )

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for n, m in ((4, 7), (6, 5), (9, 12)):
        seed = torch.tensor([n])
        assert torch.equal(compiled(seed, torch.zeros(n, m)), call(seed, torch.zeros(n, m)))
