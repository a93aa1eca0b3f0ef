"""The performance goals of the package on a Hopper GPU, and the verdict of a result file on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.report.results import Report
from bench.work.work import OWN, Place

Figure = Callable[[Report], float | None]


def over_best_other(row: Report) -> float | None:
    """The speed of the faster of our own contestants, relative to the best other."""
    return row["speedup"]


def default_over_best_other(row: Report) -> float | None:
    """The relative speed of a call without options, whose gradients are the same bit for bit on every run."""
    own, peer = row["contestants"].get(OWN, {}), row["contestants"].get(row["best_peer"], {})
    return peer["ms"]["median"] / own["ms"]["median"] if "ms" in own and "ms" in peer else None


def of_ceiling(row: Report) -> float | None:
    """The rate relative to that of a large matrix product, or of a copy."""
    return row["of_ceiling"]


def memory_of_best_other(row: Report) -> float | None:
    """The peak memory of the fastest other contestant relative to that of the faster of our own."""
    own, peer = (row["contestants"].get(row[key], {}).get("peak_bytes") for key in ("best_own", "best_peer"))
    return peer / own if own and peer else None


@dataclass(frozen=True)
class Goal:
    """`figure` must be `at_least` this number in each result of the suite on these pages and panels, at these x."""

    name: str
    figure: Figure
    at_least: float
    suite: str
    pages: tuple[str, ...]
    panels: tuple[str, ...]
    xs: tuple[float, ...]

    def concerns(self, suite: str, page: str, panel: str, x: float) -> bool:
        return suite == self.suite and page in self.pages and panel in self.panels and x in self.xs

    @property
    def n_results(self) -> int:
        """The number of results when everything is measured."""
        return len(self.pages) * len(self.panels) * len(self.xs)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a goal: `figures` by the name of the result, None for a missing figure."""

    goal: Goal
    figures: dict[str, float | None]

    @property
    def lowest(self) -> tuple[str, float] | None:
        found = [(name, figure) for name, figure in self.figures.items() if figure is not None]
        return min(found, key=lambda pair: pair[1], default=None)

    @property
    def n_found(self) -> int:
        """The number of results that have the figure."""
        return sum(figure is not None for figure in self.figures.values())

    @property
    def is_reached(self) -> bool | None:
        """Whether the goal is reached; None if no figure is too low but results are missing."""
        if self.lowest is not None and self.lowest[1] < self.goal.at_least:
            return False
        return True if self.n_found == self.goal.n_results else None


_PANELS = ("head_dim 128, causal", "head_dim 128, not causal")
_BOTH = ("forward and backward",)
_LENGTHS = (2048, 4096, 8192, 16384)
_TRAINING = ("GPT of 124M parameters",)

GOALS = (
    Goal("forward", over_best_other, 1.0, "forward", ("bfloat16, as many KV heads",), _PANELS, _LENGTHS),
    Goal(
        "forward, of the ceiling", of_ceiling, 0.8,
        "forward", ("bfloat16, as many KV heads",), ("head_dim 128, not causal",), (16384,),
    ),
    Goal(
        "forward and backward", over_best_other, 1.0,
        "backward", ("bfloat16, as many KV heads, forward and backward",), _PANELS, _LENGTHS,
    ),
    Goal(
        "the same, the same bits every time", default_over_best_other, 0.95,
        "backward", ("bfloat16, as many KV heads, forward and backward",), _PANELS, _LENGTHS,
    ),
    Goal(
        "RoPE inside", over_best_other, 1.15,
        "rope", ("as many KV heads", "grouped queries 4:1"), _BOTH, (1024, 2048, 4096),
    ),
    Goal("half padded", over_best_other, 1.8, "padding", ("causal", "not causal"), ("forward", *_BOTH), (50,)),
    Goal(
        "causal, padding and a learned bias", over_best_other, 2.0,
        "bias", ("per head, learned, half padded",), _BOTH, (2048, 4096),
    ),
    Goal("decode, of the copy", of_ceiling, 0.92, "decode", ("grouped queries 4:1",), ("batch 32",), (4096,)),
    Goal("a step of training", over_best_other, 1.0, "training", _TRAINING, ("one step",), (1024,)),
    Goal("a step of training, memory", memory_of_best_other, 1.0, "training", _TRAINING, ("one step",), (1024,)),
)  # fmt: skip


def concerned(place: Place) -> list[int]:
    """The indices of the goals for which a piece of work is needed."""
    return [i for i, goal in enumerate(GOALS) if goal.concerns(place.suite, place.page, place.panel, place.x)]


def verdicts(report: Report) -> Iterator[Verdict]:
    """One verdict per goal, in order; none for a CPU or ``--quick``, whose work is smaller."""
    is_whole = report["environment"]["is_gpu"] and not report["arguments"]["quick"]
    for goal in GOALS if is_whole else ():
        rows = [row for row in report["results"] if goal.concerns(*(row[k] for k in ("suite", "page", "panel", "x")))]
        yield Verdict(goal, {row["name"]: goal.figure(row) for row in rows})
