"""The model of many GPUs in bench/scaling: its work, its times, and the page and plot that show them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.scaling import clusters, published, stages
from bench.scaling.cases import ALL_HEADS, GROUPED, MODELS, RANKS, TOKENS, possible
from bench.scaling.clusters import h200
from bench.scaling.stages import Group, Layout, Model, Share, Stage, Transfer
from bench.scaling.times import hidden_from, predict, times, without_moved
from fusedattn import masks
from fusedattn.distributed.cutting import may_see
from fusedattn.distributed.split import Split, length_of


@pytest.mark.parametrize(("n", "seqlen"), [(2, 32), (5, 60), (8, 128)])
def test_each_step_of_a_zigzag_ring_has_the_same_pairs(n: int, seqlen: int) -> None:
    """As many as the model says but for the diagonal; and as many rows, and keys, in rectangles."""
    split, own = Split(seqlen, n, "zigzag"), seqlen // n
    expected = stages.operations(Share(Model(1, 1, 1), own), n) / n / 4
    for rank, owner in product(range(n), repeat=2):
        pairs = rows = keys = 0
        for of_q, of_k in product(split.of(rank), split.of(owner)):
            if may_see(masks.causal(), of_q, of_k, seqlen, seqlen):
                pairs += sum(max(0, min(q + 1, of_k.stop) - of_k.start) for q in range(of_q.start, of_q.stop))
                rows, keys = rows + length_of(of_q), keys + length_of(of_k)
        assert pairs - (own / 2 if owner == rank else 0) == expected
        assert rows == keys == own * stages._rectangles((rank - owner) % n)


def test_bytes_of_a_ring_by_hand() -> None:
    """1,000 tokens, 2 KV heads of 8 features: 32,000 bytes of k and of v, 64,000 of each gradient."""
    share, plan = Share(Model(4, 2, 8), 1000), Layout("ring", 3, 1)
    assert stages.sent_bytes(stages.forward(share, plan)) == 2 * 2 * 32_000
    assert stages.sent_bytes(stages.backward(share, plan, recomputed=1)) == 2 * 2 * 32_000 + 3 * 2 * 64_000


@pytest.mark.parametrize(("model", "ranks"), [(Model(6, 2, 64), 4), (Model(12, 4, 64), 6)])
def test_heads_that_cannot_be_shared_are_refused(model: Model, ranks: int) -> None:
    with pytest.raises(ValueError, match="query heads and"):
        stages.share_of_heads(Share(model, 8), ranks)


@pytest.mark.parametrize(("kv_heads", "ranks", "expected"), [(8, 8, 1), (8, 4, 2), (2, 8, 1), (32, 8, 4)])
def test_ranks_get_kv_heads_for_their_query_heads(kv_heads: int, ranks: int, expected: int) -> None:
    own = stages.share_of_heads(Share(Model(32, kv_heads, 64), 10), ranks)
    assert (own.model.heads, own.model.kv_heads, own.tokens) == (32 // ranks, expected, 10 * ranks)


def test_time_of_transfers() -> None:
    cluster, start = h200(), clusters.START
    near, far = clusters.NVLINK_LATENCY, clusters.NETWORK_LATENCY

    def seconds(pattern, group: Group) -> float:
        return cluster.seconds(Transfer(pattern, group, 1e9))

    assert seconds("pass", Group(8)) == start + near + 1e9 / cluster.nvlink
    assert seconds("pass", Group(64)) == seconds("pass", Group(8, 8)) == start + far + 1e9 / cluster.network
    assert seconds("gather", Group(16)) == start + 14 * near + far + 1e9 / min(cluster.nvlink, 8 * cluster.network)
    assert seconds("gather", Group(8, 8)) == pytest.approx(start + 7 * far + 1e9 / cluster.network)
    assert seconds("exchange", Group(8)) == start + 7 * near + 1e9 / cluster.nvlink
    assert seconds("exchange", Group(16)) == pytest.approx(start + 7 * near + 8 * far + 8 / 15 * 1e9 / cluster.network)


def test_transfers_are_exposed_where_they_take_longer() -> None:
    cluster = h200()
    transfer = Transfer("pass", Group(8), cluster.nvlink)  # a second and its latency
    rest = cluster.seconds(transfer)
    stage = Stage(forward=0.25 * cluster.forward, moved=0.5 * cluster.memory, transfers=(transfer,))
    found = times([stage, Stage(), Stage(transfers=(transfer,))], cluster, ideal=0.2)
    assert (found.ideal, found.recomputed, found.moved) == pytest.approx((0.2, 0.05, 0.5))
    assert found.exposed == pytest.approx(rest - 0.75 + rest)
    assert found.efficiency == pytest.approx(0.2 / (0.75 + found.exposed))


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
@pytest.mark.parametrize(("n", "u"), [(8, 1), (64, 1), (8, 8)])
@pytest.mark.parametrize("recomputed", [None, 0, 1])
def test_a_ring_waits_below_its_crossover(model: Model, n: int, u: int, recomputed: int | None) -> None:
    plan, cluster = Layout("ring", n, u), h200()

    def exposed(tokens: int) -> float:
        share = Share(model, tokens)
        passed = stages.forward(share, plan) if recomputed is None else stages.backward(share, plan, recomputed)
        steps = [stage for stage in without_moved(passed) if stage.forward or stage.backward]
        return times(steps, cluster, 0.0).exposed

    crossover = hidden_from(model, plan, cluster, recomputed)
    assert exposed(crossover // 2) > exposed(2 * crossover) == 0.0
    if n == 64:
        assert crossover == hidden_from(model, Layout("ring", 128, u), cluster, recomputed)


def test_crossovers_without_latency() -> None:
    """K e F / (H B) tokens, as the page says."""
    cluster, share = h200(), Share(GROUPED, 10_000)
    step = stages.forward(share, Layout("ring", 8, 1))[0]
    ratio = step.forward / cluster.forward / (step.transfers[0].sent / cluster.nvlink)
    model = GROUPED
    crossover = model.kv_heads * model.element_bytes * cluster.forward / (model.heads * cluster.nvlink)
    assert share.tokens / ratio == pytest.approx(crossover)


def test_efficiencies() -> None:
    """They rise with the length, and what computes less again is faster."""
    for model in MODELS.values():
        for mode, ranks in possible(model):
            found = [predict(model, mode, ranks, tokens, h200()) for tokens in TOKENS]
            for of_pass in ([x.forward.efficiency for x in found], [x.both.efficiency for x in found]):
                assert of_pass == sorted(of_pass)
                assert 0.0 < min(of_pass) < max(of_pass) < 1.0
            best = predict(model, mode, ranks, TOKENS[0], h200(), recomputed=0, with_moved=False)
            assert found[0].both.efficiency < best.both.efficiency <= 1.0
    assert {mode for model in (GROUPED, ALL_HEADS) for mode, _ in possible(model)} == set(stages.MODES)
    assert {ranks for _, ranks in possible(GROUPED)} == set(RANKS)


def test_adjacent_tokens_are_not_balanced() -> None:
    """Of one sequence, the last of n ranks has 2 n - 1 of n * n parts of the pairs."""
    n, own = 8, 100
    shares = [published._pairs((0, n * own), rank * own, (rank + 1) * own) for rank in range(n)]
    assert sum(shares) == n * own * (n * own + 1) / 2
    assert max(shares) * n / sum(shares) == pytest.approx((2 * n - 1) / n, rel=0.01)
    assert published._pairs((0, 3, 5), 2, 4) == 3 + 1


def test_published_efficiencies_follow_from_the_published_rates() -> None:
    for measured in (published.ZIGZAG, published.PACKED_ZIGZAG, published.PACKED_GATHER):
        ratios = [found * published.RANKS / one for found, one in zip(measured.found, measured.one, strict=True)]
        assert ratios == pytest.approx(measured.efficiencies, abs=0.003)


def test_rates_are_those_of_the_page_of_speed() -> None:
    page = (Path(__file__).parents[2] / "docs/performance.md").read_text(encoding="utf-8")
    assert f"| {clusters.SEQLEN} | **{h200().forward / 1e12:.0f} (2.02 ms)**" in page
    seconds = stages.operations(Share(Model(16, 16, 128), clusters.SEQLEN), 1) * (
        1 / h200().forward + stages.BACKWARD / h200().backward
    )
    assert f"| {clusters.SEQLEN} | **436 ({seconds * 1e3:.2f} ms)**" in page


def test_the_page_and_the_plot_are_current(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bench.scaling import page, plot

    text = page.PAGE.read_text(encoding="utf-8")
    assert page.with_figures(text) == text, "run: python -m bench scaling"
    plot.draw(tmp_path / "a.svg")
    plot.draw(tmp_path / "b.svg")
    drawn, again, committed = (
        x.read_text(encoding="utf-8") for x in (tmp_path / "a.svg", tmp_path / "b.svg", page.PLOT)
    )
    assert drawn == again
    assert [plotted(x) for x in (drawn, committed)] == [plot.description()] * 2, "run: python -m bench scaling"


def plotted(svg: str) -> str | None:
    """The efficiencies that a plot says it shows."""
    return ElementTree.fromstring(svg).findtext(".//{http://purl.org/dc/elements/1.1/}description")
