"""The picture and the tables of docs/low-precision.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from bench.report.page import table_of
from bench.report.style import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Report = dict[str, Any]

SOURCES = {"normal": "N(0, 1)", "outliers": "N(0, 1) with outliers", "MiniLM": "MiniLM", "GPT": "GPT"}
COLORS = dict(zip(SOURCES, ("#9a9a9a", "#d1743c", "#7a5195", "#0b6e6e"), strict=True))
MARKERS = dict(zip(SOURCES, "Xd^o", strict=True))


def recipes_of(report: Report) -> list[str]:
    """The recipes, in order, without their parts."""
    return [name for name in report["losses"] if name != "exact"]


def of_layers(report: Report, source: str, recipe: str, name: str = "error") -> list[float]:
    """One quantity in each layer of a source."""
    return [row[name] for row in report["rows"] if (row["source"], row["recipe"]) == (source, recipe)]


def loss_added(report: Report, recipe: str) -> float:
    """How much larger the loss of the GPT is, in nats per byte."""
    return float(report["losses"][recipe] - report["losses"]["exact"])


def cosine_lost(report: Report, recipe: str) -> float:
    """1 minus the mean cosine of an embedding with the exact one."""
    return 1.0 - mean(report["cosines"][recipe])


def draw(report: Report, picture: Path) -> None:
    """For each recipe: errors of an attention, and what the two models lose; as a PNG."""
    recipes = recipes_of(report)
    with drawing((12, 6.6), 150) as figure:
        of_error, of_loss, of_cosine = figure.subplots(1, 3, sharey=True, width_ratios=(1.5, 1.1, 1))
        _draw_errors(of_error, report, recipes)
        _draw_lost(of_loss, [loss_added(report, recipe) for recipe in recipes], COLORS["GPT"])
        _draw_lost(of_cosine, [cosine_lost(report, recipe) for recipe in recipes], COLORS["MiniLM"])
        of_error.set_title("Error of an attention, relative to its size")
        of_error.set_xlabel("median and range of the layers, log scale")
        of_loss.set(title="Loss added to the GPT", xlabel="nats per byte, log scale (hollow: it fell)")
        of_cosine.set(title="Cosine lost by MiniLM", xlabel="1 - mean cosine, log scale")
        of_error.set_yticks(range(len(recipes)), recipes)
        of_error.set_ylim(len(recipes) - 0.5, -0.5)
        figure.legend(*of_error.get_legend_handles_labels(), loc="outside lower center", ncols=len(SOURCES))
        figure.savefig(picture)


def _draw_errors(axes: Axes, report: Report, recipes: list[str]) -> None:
    """The median of layers, and a bar from the least to the largest."""
    for i, (source, label) in enumerate(SOURCES.items()):
        places = [y + 0.18 * (i - 1.5) for y in range(len(recipes))]
        found = [of_layers(report, source, recipe) for recipe in recipes]
        color = COLORS[source]
        axes.hlines(places, [min(x) for x in found], [max(x) for x in found], color=color, alpha=0.4, linewidth=2)
        axes.plot([median(x) for x in found], places, MARKERS[source], color=color, markersize=5, label=label)
    axes.set_xscale("log")
    ticks = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    axes.set_xticks(ticks, [f"{100 * x:g}%" for x in ticks])
    axes.minorticks_off()


def _draw_lost(axes: Axes, lost: list[float], color: str) -> None:
    """Hollow: the model got better by so much."""
    for y, x in enumerate(lost):
        axes.plot(abs(x), y, "o", color=color, markersize=6, fillstyle="full" if x >= 0 else "none")
    axes.set_xscale("log")
    axes.grid(visible=True, axis="y")


def tables(report: Report) -> str:
    """Markdown: the versions, and the tables."""
    packages = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    head = f"{packages}. Text of the GPT: {report['text']}; its exact loss: {report['losses']['exact']:.4f}."
    return "\n\n".join([head, *(f"{title}\n\n{table_of(rows)}" for title, rows in _tables(report))]) + "\n"


def _tables(report: Report) -> Iterator[tuple[str, list[list[str]]]]:
    recipes = recipes_of(report)
    yield (
        "Error of out relative to its size, in percent: median of the layers (largest of the layers). Then the loss "
        "that the GPT gains in nats per byte, and `1 - cosine` of MiniLM's embeddings, mean and largest of the texts.",
        [
            ["recipe", *SOURCES.values(), "GPT, loss", "MiniLM, 1 - cosine"],
            *(
                [
                    recipe,
                    *(_percent(of_layers(report, source, recipe)) for source in SOURCES),
                    f"{loss_added(report, recipe):+.5f}",
                    f"{cosine_lost(report, recipe):.1e} ({1 - min(report['cosines'][recipe]):.1e})",
                ]
                for recipe in recipes
            ),
        ],
    )
    yield (
        "The largest error relative to the largest number of out, in percent, and `1 - cosine` of out: medians of the "
        "layers.",
        _by_source(report, recipes, lambda source, recipe: _largest_and_cosine(report, source, recipe)),
    )
    yield (
        "Errors in percent, as above, if only some operands are rounded.",
        _by_source(report, _parts(report), lambda source, recipe: _percent(of_layers(report, source, recipe))),
    )
    yield "What rotation and smoothing can change: the range over the layers.", _statistics(report)


def _by_source(report: Report, recipes: list[str], cell: Callable[[str, str], str]) -> list[list[str]]:
    """A table with a column for each source."""
    body = [[recipe, *(cell(source, recipe) for source in SOURCES)] for recipe in recipes]
    return [["recipe", *SOURCES.values()], *body]


def _parts(report: Report) -> list[str]:
    """The recipes that round only some operands."""
    known = recipes_of(report)
    return list(dict.fromkeys(row["recipe"] for row in report["rows"] if row["recipe"] not in known))


def _percent(found: list[float]) -> str:
    shown = f"{100 * median(found):.2g}"
    return shown if len(found) == 1 else f"{shown} ({100 * max(found):.2g})"


def _largest_and_cosine(report: Report, source: str, recipe: str) -> str:
    largest, cosine = (median(of_layers(report, source, recipe, name)) for name in ("largest", "cosine"))
    return f"{100 * largest:.2g}, {1 - cosine:.1e}"


def _statistics(report: Report) -> list[list[str]]:
    """Least and largest of the layers."""
    rows = [["source", "q, largest / rms", "k, largest / rms", "q, share of the mean", "k, share of the mean"]]
    for source, label in SOURCES.items():
        found = [row["statistics"] for row in report["statistics"] if row["source"] == source]
        cells = []
        for name, form in (("q, largest", ".1f"), ("k, largest", ".1f"), ("q, mean", ".0%"), ("k, mean", ".0%")):
            values = [x[name] for x in found]
            cells.append(" to ".join(dict.fromkeys(format(x, form) for x in (min(values), max(values)))))
        rows.append([label, *cells])
    return rows
