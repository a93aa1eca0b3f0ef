"""The model beside what others measured: ring-flash-attention on eight H800.

The figures are those of the README of github.com/zhuzilin/ring-flash-attention at 01c8baf, the settings those of its
folder benchmark at 1342b84 and 556ddaa. Its ring sends what the ring of this package sends, computes nothing again, and
has other operators around attention; its gather computes with contiguous shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bench.scaling import stages
from bench.scaling.clusters import Cluster, h800, unmasked_over_causal
from bench.scaling.stages import BACKWARD, WIDE, Group, Layout, Model, Share, Stage, Transfer
from bench.scaling.times import times

RANKS, TOKENS, MODEL = 8, 8192, Model(32, 8, 128)
RING = Layout("ring", RANKS, 1)

# Iterations a second of flash_attn on one GPU with TOKENS tokens: forward, forward and backward.
ONE_SEQUENCE, PACKED = (591.5, 154.7), (852.4, 225.4)

# The ends of the sequences that are packed into TOKENS tokens; successive iterations take turns with them.
ENDS = ((8192,), (256, 7648, 8192), (4096, 8192), (3104, 6304, 7904, 8064, 8192))

# Heads of k and v that its gather sends at a time.
GATHERED_HEADS = 4


@dataclass(frozen=True)
class Measured:
    """Iterations a second of eight GPUs with TOKENS tokens each: forward, forward and backward.

    Attributes:
        one: of one GPU with TOKENS tokens, which is an eighth of the work of each of the eight.
        found: of the eight.
        efficiencies: the share that `found` is of an eighth of `one`, as the README gives it.
    """

    name: str
    one: tuple[float, float]
    found: tuple[float, float]
    efficiencies: tuple[float, float]


ZIGZAG = Measured("zigzag ring", ONE_SEQUENCE, (63.0, 17.4), (0.852, 0.902))
PACKED_ZIGZAG = Measured("zigzag ring, packed", PACKED, (74.8, 21.4), (0.702, 0.759))
PACKED_GATHER = Measured("gather, packed", PACKED, (60.8, 16.4), (0.570, 0.581))


@dataclass(frozen=True)
class Way:
    """How a ring's products and other operators are counted.

    Attributes:
        merged: bytes for each element of out that a merge reads and writes; None: other operators take no time.
        is_faster: whether rectangles without a masked pair run at the rate of attention without a mask.
    """

    merged: int | None = None
    is_faster: bool = False


FUSED, EAGER = WIDE + MODEL.element_bytes + WIDE, 8 * WIDE + MODEL.element_bytes
WAYS = {
    "transfers alone": Way(),
    "merges in one operator": Way(FUSED),
    "merges in four operators": Way(EAGER),
    "four operators, unmasked pairs faster": Way(EAGER, is_faster=True),
}


def predictions() -> list[tuple[Measured, dict[str, list[float]]]]:
    """The model's efficiencies, forward and forward and backward, of what was measured."""
    packed = visible_share()
    found = [
        (measured, {name: _ring(measured, visible, way) for name, way in WAYS.items()})
        for measured, visible in ((ZIGZAG, 1.0), (PACKED_ZIGZAG, packed))
    ]
    gathers = {name: _gathered(packed, way) for name, way in WAYS.items() if way.merged is None or way.is_faster}
    return [*found, (PACKED_GATHER, gathers)]


def cluster_of(measured: Measured, visible: float) -> Cluster:
    """H800s with the rates that flash_attn reached on one."""
    one, both = (1 / rate for rate in measured.one)
    return h800(visible * stages.operations(Share(MODEL, TOKENS), 1), one, both)


def visible_share() -> float:
    """The visible pairs of packed sequences, over those of one sequence; the mean of ENDS."""
    return sum(_pairs((0, *ends), 0, TOKENS) for ends in ENDS) / len(ENDS) / _pairs((0, TOKENS), 0, TOKENS)


def imbalance() -> float:
    """The work of the rank that has most, over the mean, if each has adjacent tokens; over all of ENDS."""
    largest = total = 0
    for ends in ENDS:
        whole = (0, *(RANKS * end for end in ends))
        shares = [_pairs(whole, rank * TOKENS, (rank + 1) * TOKENS) for rank in range(RANKS)]
        largest, total = largest + max(shares), total + sum(shares)
    return largest * RANKS / total


def _pairs(ends: Sequence[int], start: int, stop: int) -> int:
    """The visible pairs of queries from `start` to `stop`, of packed sequences that end there."""
    found = 0
    for first, last in pairwise(ends):
        queries = range(max(first, start) - first, min(last, stop) - first)
        found += sum(queries) + len(queries)
    return found


def _ring(measured: Measured, visible: float, way: Way) -> list[float]:
    """Efficiencies of the ring on its last rank, which merges all of its rows at each step."""
    share, e = Share(MODEL, TOKENS), MODEL.element_bytes
    rest, others = WIDE + e, RANKS - 1  # to float32 or back, at the first step and at the end
    moved = [0.0, 0.0]
    if way.merged is not None:
        moved[0] = (2 * rest + others * way.merged) * share.q
        moved[1] = (2 * rest + others * (2 * WIDE + e)) * share.q  # dq added
        moved[1] += 2 * (2 * rest + others * (2 * WIDE + e) / 2) * share.k  # dk and dv of half of the keys
    passes = stages.forward(share, RING), stages.backward(share, RING, recomputed=0)
    faster = unmasked_over_causal() if way.is_faster else (1.0, 1.0)
    found = []
    for passed, n_bytes in zip(passes, moved, strict=True):
        rates = [(1.0, 1.0), *[faster] * (len(passed) - 1)]  # only the own keys are masked
        found.append(
            [_with_work(stage, visible, n_bytes / len(passed), rate) for stage, rate in zip(passed, rates, strict=True)]
        )
    return _efficiencies(found, cluster_of(measured, visible), visible)


def _with_work(stage: Stage, visible: float, moved: float, faster: tuple[float, float]) -> Stage:
    """A stage with a part of its products, as if they were fewer where they run faster."""
    forward, backward = visible * stage.forward / faster[0], visible * stage.backward / faster[1]
    return replace(stage, forward=forward, backward=backward, moved=moved)


def _gathered(visible: float, way: Way) -> list[float]:
    """Efficiencies of the gather on its last rank; gradients are sent in 16 bits, summed on the way."""
    share = Share(MODEL, TOKENS)
    rounds = MODEL.kv_heads // GATHERED_HEADS
    sent = MODEL.element_bytes * share.k * (RANKS - 1) / rounds
    transfers = [Stage(transfers=(Transfer("gather", Group(RANKS), sent),))] * (2 * rounds)
    operations = imbalance() * visible * stages.operations(share, RANKS)
    faster = unmasked_over_causal() if way.is_faster else (1.0, 1.0)
    passes = [
        [*transfers, Stage(forward=operations / faster[0])],
        [*transfers, Stage(backward=BACKWARD * operations / faster[1]), *transfers],
    ]
    return _efficiencies(passes, cluster_of(PACKED_GATHER, visible), visible)


def _efficiencies(passes: Sequence[Sequence[Stage]], cluster: Cluster, visible: float) -> list[float]:
    operations = visible * stages.operations(Share(MODEL, TOKENS), RANKS)
    forward = times(passes[0], cluster, operations / cluster.forward)
    backward = times(passes[1], cluster, BACKWARD * operations / cluster.backward)
    return [forward.efficiency, (forward + backward).efficiency]
