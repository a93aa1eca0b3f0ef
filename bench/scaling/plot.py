"""The plot of docs/scaling.md: predicted efficiency against tokens on a GPU, mode by mode, on 8 and 64 GPUs."""

from __future__ import annotations

from pathlib import Path

from matplotlib.ticker import PercentFormatter

from bench.report.style import CEILING, COLORS, OURS, SVG_STYLE, drawing
from bench.scaling.cases import GROUPED, RANKS, name_of, possible
from bench.scaling.clusters import h200
from bench.scaling.stages import MODES, Mode
from bench.scaling.times import predict

LENGTHS = [2**i for i in range(12, 19)]
LOOKS: dict[Mode, tuple[str, str]] = dict(zip(MODES, zip((OURS, *COLORS), "os^Dv", strict=False), strict=False))


def points() -> dict[tuple[int, Mode], tuple[list[float], list[float]]]:
    """Efficiencies of forward and backward at LENGTHS: as the code is, and of products and transfers alone."""
    found = {}
    for mode, ranks in possible(GROUPED):
        as_is = [predict(GROUPED, mode, ranks, n, h200()).both.efficiency for n in LENGTHS]
        alone = [predict(GROUPED, mode, ranks, n, h200(), recomputed=0, with_moved=False) for n in LENGTHS]
        found[ranks, mode] = as_is, [x.both.efficiency for x in alone]
    return found


def description() -> str:
    """The plotted efficiencies, which the file keeps: a test compares them."""
    return "; ".join(
        f"{ranks} {mode}: {' '.join(f'{100 * x:.0f}' for x in (*as_is, *alone))}"
        for (ranks, mode), (as_is, alone) in points().items()
    )


def draw(path: Path) -> None:
    """Write the plot as an SVG."""
    with drawing((10.5, 4.6), 110, SVG_STYLE, (0.12, 0.1)) as figure:
        figure.suptitle(
            "Predicted, not measured: forward and backward on H200s, causal, "
            f"{GROUPED.heads} query heads, {GROUPED.kv_heads} KV heads",
            x=0.01, ha="left", fontsize=11,
        )  # fmt: skip
        panels = dict(zip(RANKS, figure.subplots(1, len(RANKS), sharey=True), strict=True))
        shown = {}
        for (ranks, mode), (as_is, alone) in points().items():
            color, marker = LOOKS[mode]
            panels[ranks].plot(LENGTHS, alone, color=color, linewidth=1.1, linestyle=":")
            (shown[name_of(mode)],) = panels[ranks].plot(LENGTHS, as_is, color=color, marker=marker, markersize=4)
        for ranks, axes in panels.items():
            axes.axhline(1.0, color=CEILING, linewidth=1)
            axes.set(title=f"{ranks} GPUs", xlabel="tokens on each GPU")
            axes.set_xscale("log", base=2)
            axes.set_xticks(LENGTHS, [f"{n // 1024}k" for n in LENGTHS])
            axes.minorticks_off()
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            axes.set_ylim(0.4, 1.02)
        panels[RANKS[0]].set_ylabel("ideal time / predicted time")
        (shown["without other operators, nothing computed again"],) = panels[RANKS[0]].plot(
            [], [], color=CEILING, linestyle=":"
        )
        figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=3)
        figure.savefig(path, metadata={"Date": None, "Description": description()})
