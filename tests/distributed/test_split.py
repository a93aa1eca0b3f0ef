"""Which tokens and heads each process has; without processes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist

from fusedattn import masks
from fusedattn.biases import Bias
from fusedattn.distributed.cutting import Rectangle, cut, may_see
from fusedattn.distributed.placement import order_of
from fusedattn.distributed.split import Balance, Split, length_of
from fusedattn.distributed.ulysses import Heads
from fusedattn.mask_parts import Band
from fusedattn.masks import Mask
from fusedattn.options import Options
from fusedattn.shard import Shard

BALANCES: tuple[Balance, ...] = ("zigzag", "contiguous")
LENGTHS = (*range(34), 63, 64, 65, 97, 128, 1000, 1001, 2**20 + 7)
OWNERS = (1, 2, 3, 4, 5, 7, 8, 16)

balances = pytest.mark.parametrize("balance", BALANCES)


@balances
def test_chunks_cut_the_sequence_into_equal_parts(balance: Balance) -> None:
    for seqlen, n in itertools.product(LENGTHS, OWNERS):
        split = Split(seqlen, n, balance)
        bounds = [0, *(chunk.stop for chunk in split.chunks)]
        assert [chunk.start for chunk in split.chunks] == bounds[:-1], split
        assert bounds[-1] == seqlen, split
        sizes = [length_of(chunk) for chunk in split.chunks]
        assert min(sizes) >= 0, split
        assert max(sizes) - min(sizes) <= 1, split
        assert len(sizes) == (2 * n if balance == "zigzag" else n), split


@balances
def test_each_token_has_one_owner(balance: Balance) -> None:
    for seqlen, n in itertools.product(LENGTHS[:-1], OWNERS):
        split = Split(seqlen, n, balance)
        held = [[token for chunk in split.of(owner) for token in range(chunk.start, chunk.stop)] for owner in range(n)]
        assert sorted(itertools.chain(*held)) == list(range(seqlen)), split
        assert [len(tokens) for tokens in held] == list(split.lengths), split
        assert all(tokens == sorted(tokens) for tokens in held), split  # early ones first


def test_zigzag_gives_all_owners_the_same_work_under_a_causal_mask() -> None:
    """Token ``i`` sees ``i + 1`` keys."""
    for seqlen, n in itertools.product(LENGTHS, OWNERS):
        split = Split(seqlen, n, "zigzag")
        pairs = [
            sum((chunk.start + chunk.stop + 1) * length_of(chunk) // 2 for chunk in split.of(owner))
            for owner in range(n)
        ]
        assert sum(pairs) == seqlen * (seqlen + 1) // 2
        spread = max(pairs) - min(pairs)
        assert spread == 0 if seqlen % (2 * n) == 0 else spread <= seqlen, (split, pairs)


@balances
@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -2, -3, -4])
def test_joined_shards_are_the_whole(balance: Balance, dim: int) -> None:
    for seqlen, n in itertools.product((0, 1, 2, 3, 7, 8, 29), OWNERS):
        shape = [2, 3, 1, 2]
        shape[dim] = seqlen
        x = torch.arange(torch.Size(shape).numel()).view(shape)
        split = Split(seqlen, n, balance)
        shards = [split.shard(x, owner, dim) for owner in range(n)]
        assert [shard.shape[dim] for shard in shards] == list(split.lengths)
        assert torch.equal(split.joined(shards, dim), x), (split, dim)


@balances
def test_shards_of_strided_tensors_and_their_gradients(balance: Balance) -> None:
    x = torch.randn(5, 13, 2, dtype=torch.float64).transpose(0, 1).requires_grad_()  # 13 tokens
    split = Split(13, 3, balance)
    factors = torch.randn(13, 5, 2, dtype=torch.float64)
    joined = split.joined([split.shard(x, owner, 0) for owner in range(3)], 0)
    (gradient,) = torch.autograd.grad((joined * factors).sum(), x)
    assert torch.equal(gradient, factors)
    (own,) = torch.autograd.grad(split.shard(x, 1, 0).sum(), x)
    of_owner = [token for chunk in split.of(1) for token in range(chunk.start, chunk.stop)]
    assert own.sum((1, 2)).tolist() == [10.0 if token in of_owner else 0.0 for token in range(13)]


@balances
def test_places_are_those_of_the_shard(balance: Balance) -> None:
    for seqlen, n in itertools.product((0, 1, 2, 5, 16, 29), OWNERS):
        split = Split(seqlen, n, balance)
        tokens = torch.arange(seqlen)
        for owner in range(n):
            own = split.shard(tokens, owner, 0)
            places = split.places(owner)
            assert tuple(chunk for _, chunk in places) == split.of(owner)
            assert [x for at, _ in places for x in range(at.start, at.stop)] == list(range(split.lengths[owner]))
            assert all(torch.equal(own[at], tokens[chunk]) for at, chunk in places)


def test_zigzag_holds_an_early_and_a_late_chunk() -> None:
    assert Split(16, 2, "zigzag").of(0) == (slice(0, 4), slice(12, 16))
    assert Split(16, 2, "zigzag").of(1) == (slice(4, 8), slice(8, 12))
    assert Split(3, 4, "contiguous").lengths == (0, 1, 1, 1)


HEADS = [
    (n * of_process, nheads_kv, n)
    for n in (1, 2, 3, 4, 8)
    for of_process in (1, 2, 3, 4, 6)
    for nheads_kv in range(1, n * of_process + 1)
    if (n * of_process) % nheads_kv == 0
]


def test_each_process_has_the_kv_heads_of_its_query_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    for nheads_q, nheads_kv, n in HEADS:
        monkeypatch.setattr(dist, "get_world_size", lambda group=None, n=n: n)
        heads = Heads(None, nheads_q, nheads_kv, [0] * n, [0] * n)
        found: list[int] = []
        for rank in range(n):
            queries, kv = range(nheads_q)[heads.queries(rank)], heads.kv(rank)
            found += queries
            assert len(queries) % len(kv) == 0, (nheads_q, nheads_kv, n, rank)
            group = len(queries) // len(kv)  # as grouped attention repeats them
            wanted = [head // (nheads_q // nheads_kv) for head in queries]
            assert [kv[i // group] for i in range(len(queries))] == wanted, (nheads_q, nheads_kv, n, rank)
            if nheads_kv % n == 0:
                assert len(kv) == nheads_kv // n, (nheads_q, nheads_kv, n)  # nothing is sent twice
        assert found == list(range(nheads_q))


def random_mask(rng: random.Random) -> Mask:
    def side() -> int | None:
        return rng.choice((None, rng.randint(-4, 9)))

    aligns = ("bottom_right", "top_left")
    return Mask(bands=frozenset(Band(side(), side(), rng.choice(aligns)) for _ in range(rng.randint(0, 2))))


@pytest.mark.parametrize(
    ("ranks", "order"),
    [
        ([[0, 1], [2, 3]], [0, 1, 2, 3]),
        ([[0, 2], [1, 3]], [0, 2, 1, 3]),
        ([[4, 7], [5, 9], [6, 11]], [0, 3, 1, 4, 2, 5]),  # the other processes of the world are in no group
        ([[5, 3, 4]], [0, 1, 2]),  # a group counts its ranks in increasing order
    ],
)
def test_processes_of_a_mesh_in_the_order_of_their_tokens(ranks: list[list[int]], order: list[int]) -> None:
    assert order_of(torch.tensor(ranks)).tolist() == order


def test_a_mesh_that_gives_two_processes_the_same_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"group: got a mesh of ranks \[\[3, 1\], \[0, 2\]\], allowed are ranks that"):
        order_of(torch.tensor([[3, 1], [0, 2]]))


def test_rectangles_that_see_nothing_are_left_out_and_no_others() -> None:
    rng = random.Random(0)
    for _ in range(4000):
        seqlen_q, seqlen_k, mask = rng.randint(1, 12), rng.randint(1, 12), random_mask(rng)
        queries, keys = (slice(*sorted(rng.choices(range(n + 1), k=2))) for n in (seqlen_q, seqlen_k))
        visible = bool(mask.dense(seqlen_q, seqlen_k)[..., queries, keys].any())
        found = may_see(mask, queries, keys, seqlen_q, seqlen_k)
        lower, upper = mask.band(seqlen_q, seqlen_k)
        if lower is not None and upper is not None and lower > upper:
            assert found >= visible, (mask, queries, keys, seqlen_q, seqlen_k)  # bands that exclude each other
        else:
            assert found == visible, (mask, queries, keys, seqlen_q, seqlen_k)


def test_masks_without_bands_leave_nothing_out() -> None:
    valid = torch.zeros(1, 9, dtype=torch.bool)
    assert may_see(masks.padding(valid), slice(0, 1), slice(8, 9), 9, 9)
    assert not may_see(masks.full(), slice(3, 3), slice(0, 9), 9, 9)
    assert not may_see(masks.full(), slice(0, 9), slice(9, 9), 9, 9)


def blocks_of(n_q: int, n_k: int) -> torch.Tensor:
    return torch.rand(2, 3, n_q, n_k, generator=torch.Generator().manual_seed(0)) < 0.5


def part_of(rows: slice, keys: slice) -> Rectangle:
    return Rectangle(Shard(0, 1, rows.start, keys.start, 3, 64, 96), slice(1, 3), rows, keys, slice(1, 2))


@pytest.mark.parametrize(
    ("rows", "keys", "name"),
    [
        (slice(8, 32), slice(0, 96), "block_q"),
        (slice(1, 2), slice(0, 96), "block_q"),
        (slice(0, 64), slice(16, 96), "block_k"),
        (slice(16, 64), slice(31, 33), "block_k"),
    ],
)
def test_a_part_that_begins_inside_a_block_is_refused(rows: slice, keys: slice, name: str) -> None:
    options = Options(masks.block_sparse(blocks_of(4, 3), (16, 32)))
    wrong = (rows if name == "block_q" else keys).start
    with pytest.raises(ValueError, match=rf"mask: block_sparse: got {name} = \d+ and a shard from token {wrong} on"):
        cut(options, part_of(rows, keys))


@pytest.mark.parametrize(
    ("rows", "keys"),
    [
        (slice(0, 64), slice(0, 96)),
        (slice(16, 17), slice(64, 65)),  # ends inside of blocks
        (slice(48, 64), slice(32, 96)),
        (slice(16, 16), slice(32, 32)),
        (slice(16, 60), slice(0, 90)),
    ],
)
def test_blocks_of_a_part_are_those_of_the_whole(rows: slice, keys: slice) -> None:
    mask = masks.block_sparse(blocks_of(4, 3), (16, 32))
    part = cut(Options(mask), part_of(rows, keys)).mask
    n_q, n_k = rows.stop - rows.start, keys.stop - keys.start
    assert torch.equal(part.dense(n_q, n_k), mask.dense(64, 96)[1:, 1:, rows, keys])


@pytest.mark.parametrize("shape", [(2, 3, 64, 96), (3, 64, 96), (1, 1, 1, 96), (64, 1), (96,), (1, 3, 1, 1)])
def test_parts_of_tensors_that_broadcast_are_those_of_the_whole(shape: tuple[int, ...]) -> None:
    rows, keys = slice(5, 30), slice(40, 77)
    x = torch.randn(shape)
    whole = x.expand(2, 3, 64, 96)[1:, 1:, rows, keys]
    options = cut(Options(masks.boolean(x > 0), bias=Bias(x)), part_of(rows, keys))
    assert options.bias is not None
    assert options.bias.tensor is not None
    assert options.mask.allowed is not None
    assert torch.equal(options.bias.tensor.expand(whole.shape), whole)
    assert torch.equal(options.mask.allowed.expand(whole.shape), whole > 0)
