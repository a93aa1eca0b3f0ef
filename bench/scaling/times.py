"""The time of stages on a cluster, and from which length on the ring's transfers are hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.scaling import stages
from bench.scaling.clusters import Cluster
from bench.scaling.stages import Layout, Mode, Model, Share, Stage

LONGEST = 2**24  # tokens of a GPU up to which a crossover is looked for


@dataclass(frozen=True)
class Times:
    """Seconds of a pass on one rank.

    Attributes:
        ideal: of the matrix products that one GPU would need for its share of the whole.
        recomputed: of those that it repeats.
        moved: of other operators, at the rate of a copy.
        exposed: in which it only waits for others.
    """

    ideal: float
    recomputed: float
    moved: float
    exposed: float

    @property
    def total(self) -> float:
        return self.ideal + self.recomputed + self.moved + self.exposed

    @property
    def efficiency(self) -> float:
        return self.ideal / self.total

    def __add__(self, other: Times) -> Times:
        return Times(
            self.ideal + other.ideal, self.recomputed + other.recomputed, self.moved + other.moved,
            self.exposed + other.exposed,
        )  # fmt: skip


def times(passed: Sequence[Stage], cluster: Cluster, ideal: float) -> Times:
    """The times of the stages of one pass; `ideal` are the seconds of its necessary products."""
    products = moved = exposed = 0.0
    for stage in passed:
        products += _products(stage, cluster)
        moved += stage.moved / cluster.memory
        busy = _products(stage, cluster) + stage.moved / cluster.memory
        exposed += max(0.0, sum(map(cluster.seconds, stage.transfers)) - busy)
    return Times(ideal, products - ideal, moved, exposed)


@dataclass(frozen=True)
class Prediction:
    """Forward, and forward and backward, of one mode."""

    forward: Times
    both: Times


def predict(
    model: Model, mode: Mode, ranks: int, tokens: float, cluster: Cluster, recomputed: int = 1, with_moved: bool = True
) -> Prediction:
    """The times of a mode with `tokens` on each of `ranks`.

    Args:
        recomputed: how often the ring's backward repeats the forward of each rectangle.
        with_moved: with the operators besides attention.
    """
    share, plan = Share(model, tokens), stages.layout(mode, ranks, cluster.gpus_per_node)
    passes = stages.forward(share, plan), stages.backward(share, plan, recomputed)
    if not with_moved:
        passes = without_moved(passes[0]), without_moved(passes[1])
    operations = stages.operations(share, ranks)
    forward = times(passes[0], cluster, operations / cluster.forward)
    backward = times(passes[1], cluster, stages.BACKWARD * operations / cluster.backward)
    return Prediction(forward, forward + backward)


def without_moved(passed: Sequence[Stage]) -> list[Stage]:
    """The stages as if operators besides attention took no time."""
    return [replace(stage, moved=0.0) for stage in passed]


def hidden_from(model: Model, plan: Layout, cluster: Cluster, recomputed: int | None) -> int:
    """The fewest tokens of a GPU with which products hide all transfers beside them.

    Args:
        plan: with a ring.
        recomputed: None for the forward; for the backward, how often it repeats the forward.
    """

    def are_hidden(tokens: int) -> bool:
        share = Share(model, tokens)
        passed = stages.forward(share, plan) if recomputed is None else stages.backward(share, plan, recomputed)
        return all(
            sum(map(cluster.seconds, stage.transfers)) <= _products(stage, cluster)
            for stage in passed
            if stage.forward or stage.backward
        )

    low, high = 1, LONGEST
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if are_hidden(middle) else (middle + 1, high)
    return low


def _products(stage: Stage, cluster: Cluster) -> float:
    return stage.forward / cluster.forward + stage.backward / cluster.backward
