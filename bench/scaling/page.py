"""``python -m bench scaling``: write the figures and the plot of docs/scaling.md."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from bench.report.page import table_of, with_block
from bench.scaling import clusters, plot, published, stages
from bench.scaling.cases import GROUPED, MODELS, RANKS, TOKENS, name_of, possible
from bench.scaling.clusters import h200
from bench.scaling.published import PACKED_GATHER, ZIGZAG
from bench.scaling.stages import MODES, Layout, Model, Share
from bench.scaling.times import hidden_from, predict

ROOT = Path(__file__).resolve().parents[2]
PAGE, PLOT = ROOT / "docs" / "scaling.md", ROOT / "docs" / "images" / "scaling.svg"
COMMAND = "python -m bench scaling"

SHOWN_TOKENS = 32768
RINGS = {
    "within a node": Layout("ring", 8, 1),
    "over 8 nodes": Layout("ring", 64, 1),
    "between 8 nodes, Ulysses within": Layout("ring", 8, 8),
}


def run(options: argparse.Namespace) -> int:
    PAGE.write_text(with_figures(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    plot.draw(PLOT)
    return 0


def with_figures(page: str) -> str:
    """The page with all figures between their comments."""
    for name, block in BLOCKS.items():
        page = with_block(page, block() + "\n", f"{COMMAND}, {name}")
    return page


def assumptions() -> str:
    """The constants of the cluster, with their sources."""
    cluster = h200()
    measured = f"one H200 with this package, {clusters.SEQLEN:,} tokens: [Speed](performance.md#figures), "
    rows = [
        ("what", "figure", "source"),
        ("forward, causal, bfloat16, head_dim 128", tera(cluster.forward),
         f"{measured}`{clusters.H200_RESULTS.relative_to(ROOT)}`"),
        ("backward", tera(cluster.backward), "the same run: forward and backward less the forward"),
        ("other operators", giga(cluster.memory), "the copy of the same run, bytes read and written"),
        ("NVLink, each GPU and direction", giga(cluster.nvlink),
         f"NCCL's share of {giga(clusters.NVLINK_LINE)}: [nccl-tests 212](https://github.com/NVIDIA/nccl-tests/issues/212)"),
        ("network, each GPU and direction", giga(cluster.network),
         f"of {giga(clusters.NETWORK_LINE)}, 400 Gb/s: [nccl-tests 267](https://github.com/NVIDIA/nccl-tests/issues/267)"),
        ("start of an operation of NCCL", micro(clusters.START), "`src/graph/tuning.cc` of NCCL at 01afd20"),
        ("each message by NVLink, by network",
         f"{micro(clusters.NVLINK_LATENCY)}, {micro(clusters.NETWORK_LATENCY)}", "the same file"),
        ("GPUs of a node", str(cluster.gpus_per_node), ""),
    ]  # fmt: skip
    return (
        f"{table_of(rows)}\n\nOne rate serves for all lengths. Rectangles have {TOKENS[0] // 2:,} queries and keys or "
        "more in the predictions. Those at the crossovers below are shorter: attention is slower there, and hides "
        "transfers from fewer tokens on."
    )


def work() -> str:
    """Operations, bytes and messages of a rank."""
    head = ("mode", "GPUs", "products, TFLOP", "sent, GB", "messages", "moved, GB")
    rows: list[tuple[object, ...]] = [head]
    for mode, ranks in possible(GROUPED):
        share, plan = Share(GROUPED, SHOWN_TOKENS), stages.layout(mode, ranks, h200().gpus_per_node)
        passes = stages.forward(share, plan), stages.backward(share, plan, recomputed=1)
        products = [sum(stage.forward + stage.backward for stage in x) / 1e12 for x in passes]
        sent, moved = ([count(x) / 1e9 for x in passes] for count in (stages.sent_bytes, stages.moved_bytes))
        cells = ([f"{x:,.0f}" for x in products], [f"{x:.2f}" for x in sent], [str(stages.messages(x)) for x in passes],
                 [f"{x:.1f}" for x in moved])  # fmt: skip
        rows.append((name_of(mode), ranks, *(", ".join(pair) for pair in cells)))
    intro = f"{heads_of(GROUPED)}, {SHOWN_TOKENS:,} tokens on each GPU; each pair is forward, backward:"
    return f"{intro}\n\n{table_of(rows)}"


def crossovers() -> str:
    """From how many tokens on a GPU the ring hides its transfers."""
    head = ("ring", "heads", "forward", "backward", "backward that computes nothing again")
    rows: list[tuple[object, ...]] = [head]
    for name, plan in RINGS.items():
        for model in MODELS.values():
            lengths = (hidden_from(model, plan, h200(), recomputed) for recomputed in (None, 1, 0))
            rows.append((name, heads_of(model), *(f"{length:,}" for length in lengths)))
    return table_of(rows)


def memory() -> str:
    """What a rank keeps for the backward, and the shares of keys that a ring has in buffers."""
    head = ("mode", "GPUs", *(f"{heads_of(model)}, GiB" for model in MODELS.values()))
    rows: list[tuple[object, ...]] = [head]
    own = [2 * model.element_bytes * (share.q + share.k) for model, share in _shown()]
    rows.append(("q, k, v and out of a GPU", "", *(f"{x / 2**30:.2f}" for x in own)))
    for mode in MODES:
        for ranks in RANKS:
            cells = [
                f"{stages.kept_bytes(share, stages.layout(mode, ranks, h200().gpus_per_node)) / 2**30:.2f}"
                if (mode, ranks) in possible(model)
                else "–"
                for model, share in _shown()
            ]
            if any(cell != "–" for cell in cells):
                rows.append((name_of(mode), ranks, *cells))
    forward, backward = stages.SHARES_UNDER_WAY
    return (
        f"{SHOWN_TOKENS:,} tokens on each GPU, one attention of one layer. The first row is there in any case; the "
        f"others are kept besides:\n\n{table_of(rows)}\n\nWhile a ring runs, its buffers hold up to {forward} further "
        f"shares of k and v in the forward, and {backward} in the backward. A share of gradients counts as two, "
        "because it is in float32."
    )


def _shown() -> list[tuple[Model, Share]]:
    return [(model, Share(model, SHOWN_TOKENS)) for model in MODELS.values()]


def predictions() -> str:
    """Efficiencies, and where the time goes."""
    parts = []
    for name, model in MODELS.items():
        parts.append(f"**{name}**, as the code is:")
        parts.append(_efficiencies(model))
        parts.append("Without other operators, and nothing computed again:")
        parts.append(_efficiencies(model, recomputed=0, with_moved=False))
    parts.append(f"Where the time of a forward and backward goes, {heads_of(GROUPED)}:")
    rows: list[tuple[object, ...]] = [
        ("mode", "GPUs", "tokens", "products", "computed again", "other operators", "waiting")
    ]
    for mode, ranks in possible(GROUPED):
        for tokens in (TOKENS[0], SHOWN_TOKENS):
            both = predict(GROUPED, mode, ranks, tokens, h200()).both
            spent = (both.ideal, both.recomputed, both.moved, both.exposed)
            rows.append((name_of(mode), ranks, f"{tokens:,}", *(f"{x / both.total:.1%}" for x in spent)))
    return "\n\n".join([*parts, table_of(rows)])


def _efficiencies(model: Model, recomputed: int = 1, with_moved: bool = True) -> str:
    rows: list[tuple[object, ...]] = [("mode", "GPUs", *(f"{tokens:,} tokens" for tokens in TOKENS))]
    for mode, ranks in possible(model):
        found = (predict(model, mode, ranks, tokens, h200(), recomputed, with_moved) for tokens in TOKENS)
        rows.append((name_of(mode), ranks, *(pair(x.forward.efficiency, x.both.efficiency) for x in found)))
    return table_of(rows)


def beside() -> str:
    """The model's predictions of what others measured, and what can be said about the differences."""
    found = dict(published.predictions())
    rows: list[tuple[object, ...]] = [("", "published", *published.WAYS)]
    for measured, ways in found.items():
        cells = (exact_pair(*ways[name]) if name in ways else "" for name in published.WAYS)
        rows.append((measured.name, exact_pair(*measured.efficiencies), *cells))
    cluster = published.cluster_of(ZIGZAG, 1.0)
    forward, both = ZIGZAG.efficiencies
    alone, one, four, unmasked = (found[ZIGZAG][name] for name in published.WAYS)
    faster = clusters.unmasked_over_causal()
    gather = found[PACKED_GATHER]
    own = predict(published.MODEL, "ring", published.RANKS, published.TOKENS, cluster)
    return "\n\n".join(
        (
            f"Assumed of an H800: flash_attn at {tera(cluster.forward)} forward and {tera(cluster.backward)} backward, "
            f"from {ZIGZAG.one[0]} and {ZIGZAG.one[1]} iterations a second on one GPU; {giga(cluster.memory)} for "
            f"other operators, the copy of an H100 (`{clusters.H100_RESULTS.relative_to(ROOT)}`); "
            f"{giga(cluster.nvlink)} by NVLink, of {giga(clusters.H800_NVLINK_LINE)} "
            "([DeepEP 16](https://github.com/deepseek-ai/DeepEP/issues/16)). Each pair is forward, then forward and "
            "backward.",
            table_of(rows),
            f"- **Zigzag ring.** Its transfers are hidden: with them alone, the model has {exact_pair(*alone)}. Merges "
            f"bring the forward to {four[0]:.1%} in four operators, and to {one[0]:.1%} in one; {forward:.1%} is "
            "published. It is not known which of the two `torch.jit.script` ran. Forward and backward are predicted "
            f"{100 * (four[1] - both):.1f} to {100 * (one[1] - both):.1f} points too high. The model has no time for "
            "launches, and lets NCCL take no multiprocessor from attention. If rectangles without a masked pair run "
            f"{faster[0]:.2f} times as fast in the forward and {faster[1]:.2f} times in the backward, as with torch's "
            f"flash kernel on an H200, the prediction is {exact_pair(*unmasked)}, and more is unexplained.",
            f"- **Zigzag ring, packed.** The sequences have {published.visible_share():.0%} of the pairs of one "
            "sequence, and merges cost as much as before. The prediction falls, but less than the published figure. "
            "The model leaves out that this ring selects rows by an index at each step, and that its rectangles are "
            "small.",
            f"- **Gather, packed.** A rank has adjacent tokens, and the last one {published.imbalance():.2f} times the "
            "mean work. That is nearly all of the loss: gathers before attention cost "
            f"{100 * (1 / published.imbalance() - gather['transfers alone'][0]):.1f} points of the forward. The "
            "prediction is too low with one rate for all rectangles, and closer with a faster one for the last rank, "
            'whose pairs are nearly all unmasked. `"all_gather"` with `balance="zigzag"` has no such imbalance.',
            "The ring of this package, with the kernels and GPUs of the first row, would have "
            f"{exact_pair(own.forward.efficiency, own.both.efficiency)}: its merges have more operators, and its "
            "backward computes the forward again.",
        )
    )


def heads_of(model: Model) -> str:
    """The heads of a model in a few words."""
    return f"{model.heads} query heads, {model.kv_heads} KV heads"


def tera(rate: float) -> str:
    return f"{rate / 1e12:.0f} TFLOP/s"


def giga(rate: float) -> str:
    return f"{rate / 1e9:,.0f} GB/s"


def micro(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def pair(forward: float, both: float) -> str:
    """Two efficiencies: forward, forward and backward."""
    return f"{forward:.0%}, {both:.0%}"


def exact_pair(forward: float, both: float) -> str:
    """The same, more exactly."""
    return f"{forward:.1%}, {both:.1%}"


BLOCKS: dict[str, Callable[[], str]] = {
    "assumptions": assumptions,
    "work": work,
    "crossovers": crossovers,
    "memory": memory,
    "predictions": predictions,
    "published": beside,
}
