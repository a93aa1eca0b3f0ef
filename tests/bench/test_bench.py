"""The bench harness: counts, rounds and medians, the contestants, and the checks that come before a timing."""

from __future__ import annotations

import functools
import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.measuring import ceilings, timing
from bench.measuring.gate import Gate
from bench.measuring.measure import measure
from bench.measuring.timing import Budget, HostStopwatch, OutOfTimeError, Rounds, Spread, interleaved, spread
from bench.work import attention as attention_work
from bench.work import counts, functions, libraries, model, suites
from bench.work.attention import AttentionWork, own
from bench.work.launch import LaunchWork
from bench.work.model import ModelSize, ModelWork
from bench.work.work import Contestant, Place, Work
from fusedattn import Rope, attention, fuse, masks
from fusedattn.testing import CASES, peers
from fusedattn.testing.cases import Case, make_inputs
from tests.conftest import DEVICE

CPU = torch.device("cpu")
SMALL = Case(batch=2, nheads_q=4, nheads_kv=2, seqlen_q=8, seqlen_k=8, head_dim=16, causal="bottom_right", seed=1)
PLACE = Place("forward", "page", "panel", "seqlen", 8)
WORK = AttentionWork(PLACE, 0, SMALL, compiled=False)
ROUNDS = Rounds(least=2, most=2)


@pytest.fixture(autouse=True)
def _torch_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, the tests use Triton's interpreter, which takes seconds; the torch backend takes none."""
    of_torch = functools.partial(attention, backend="torch")
    monkeypatch.setattr("bench.work.attention.attention", of_torch)
    monkeypatch.setattr("bench.work.launch.attention", of_torch)
    monkeypatch.setattr("bench.work.model.fuse", functools.partial(fuse, backend="torch"))


class Clock:
    """Time that passes only when something spends it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("fields", "pairs"),
    [
        ({}, 32.0),  # half of 8 * 8
        ({"causal": None}, 64.0),
        ({"causal": None, "seqlen_k": 3}, 24.0),
        ({"window": (0, 0)}, 8.0),  # each query its own key
        ({"window": (2, 0)}, 1 + 2 + 6 * 3.0),
        ({"window": (2, None)}, 1 + 2 + 6 * 3.0),  # still causal
        ({"window": (None, 1), "causal": None}, 2 + 3 + 4 + 5 + 6 + 7 + 8 + 8.0),
        ({"window": (1, 0), "seqlen_q": 2}, 4.0),  # the last two queries
        ({"window": (1, 0), "seqlen_q": 2, "causal": "top_left"}, 3.0),  # the first two
        ({"padding": "right"}, 32.0),  # not deducted
    ],
)
def test_pairs(fields: dict[str, Any], pairs: float) -> None:
    assert counts.pairs(replace(SMALL, **fields)) == pairs


@pytest.mark.parametrize(("direction", "factor"), [("forward", 4), ("backward", 10), ("both", 14)])
def test_flops(direction: Any, factor: int) -> None:
    """2 batches, 4 heads, 32 pairs, 16 features."""
    assert counts.flops(SMALL, direction) == factor * 2 * 4 * 32 * 16


def test_bytes() -> None:
    """In each of 2 batches: q and out of 4 heads, one query; k and v of 2 heads, 100 keys; 16 features of 2 bytes."""
    case = replace(SMALL, seqlen_q=1, seqlen_k=100, dtype=torch.bfloat16)
    assert counts.bytes_read_and_written(case) == 2 * (2 * 4 + 2 * 2 * 100) * 16 * 2
    work = AttentionWork(PLACE, 0, case)
    assert (work.unit, work.amount) == ("GB/s", counts.bytes_read_and_written(case) / 1e9)


def test_every_contestant_has_a_turn_in_every_round_in_an_order_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SHUFFLE", random.Random(0))
    clock, order, setups = Clock(), [], []
    seconds = {"a": itertools.cycle([1.0, 3.0, 2.0]), "b": itertools.cycle([5.0])}

    def set_up(name: str):
        setups.append(name)
        clock.spend(100.0)  # counted in no figure

        def timed() -> None:
            order.append(name)
            clock.spend(next(seconds[name]))

        return timed

    runs = {name: functools.partial(set_up, name) for name in seconds}
    stopwatch = HostStopwatch(CPU, clock=clock)
    samples, failures = interleaved(runs, stopwatch, Rounds(3, 12, 1e9), Budget())
    assert failures == {}
    assert setups == order
    assert samples == {"a": [1e3, 3e3, 2e3] * 4, "b": [5e3] * 12}
    rounds = {tuple(order[i : i + 2]) for i in range(0, 24, 2)}
    assert rounds == {("a", "b"), ("b", "a")}, "both have a turn in each round, and the order changes"


def test_rounds_end_by_number_by_time_or_by_the_budget() -> None:
    clock = Clock()
    runs = {"a": lambda: lambda: clock.spend(1.0)}

    def count(rounds: Rounds, budget: float | None = None) -> int:
        stopwatch = HostStopwatch(CPU, clock=clock)
        samples, _ = interleaved(runs, stopwatch, rounds, Budget(budget, clock))
        return len(samples["a"])

    assert count(Rounds(2, 50, 5.0)) == 5
    assert count(Rounds(8, 50, 5.0)) == 8
    assert count(Rounds(2, 4, 1e9)) == 4
    assert count(Rounds(3, 50, 1e9), budget=6.0) == 6
    with pytest.raises(OutOfTimeError):  # too few to report
        count(Rounds(3, 50, 1e9), budget=2.0)


def test_a_contestant_that_fails_in_its_turn_takes_no_further() -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("no room")

    runs = {"a": lambda: lambda: None, "b": lambda: fail}
    samples, failures = interleaved(runs, HostStopwatch(CPU), Rounds(3, 3), Budget())
    assert len(samples.pop("a")) == 3
    assert samples == {}
    assert str(failures["b"]) == "no room"
    assert failures["b"].__traceback__ is None, "which would keep its tensors"


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([3.0], Spread(3.0, 3.0, 3.0, 1)),
        ([1.0, 3.0], Spread(2.0, 1.5, 2.5, 2)),
        ([5.0, 1.0, 2.0, 4.0, 3.0], Spread(3.0, 2.0, 4.0, 5)),
    ],
)
def test_spread(samples: list[float], expected: Spread) -> None:
    assert spread(samples) == expected


def measured(work: Work, peers_: dict[str, Any], gate: Gate | None = None) -> dict[str, Any]:
    gate = gate or Gate(CPU)
    gate.used |= dict.fromkeys(work.cases(), 0.5)  # other tests check the kernels
    return measure(work, CPU, peers_, gate, {"matmul": {"float32": 2.0}}, ROUNDS, Budget())


def test_a_result_has_times_rates_ratios_and_reasons() -> None:
    def cannot(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("rope: has none\nand more")

    row = measured(WORK, {"math": peers.PEERS["torch.sdpa-math"], "cannot": cannot})
    own, other = (row["contestants"][name] for name in ("fusedattn", "math"))
    assert row["contestants"]["cannot"] == {"reason": "rope: has none"}
    assert own["rate"] == pytest.approx(counts.flops(SMALL, "forward") / 1e12 / (own["ms"]["median"] / 1e3))
    assert row["speedup"] == other["ms"]["median"] / own["ms"]["median"]
    assert row["of_ceiling"] == own["rate"] / 2.0
    assert (row["best_own"], row["best_peer"], own["ms"]["n"]) == ("fusedattn", "math", 2)
    json.dumps(row, allow_nan=False)


def test_a_peer_that_computes_something_else_is_not_timed() -> None:
    def other_scale(q, k, v, **options):
        return peers.PEERS["torch.sdpa-math"](q, k, v, **options | {"scale": 0.1})

    def nan(q, k, v, **options):
        return torch.full_like(q, float("nan"))

    gate = Gate(CPU)
    every = {"other": other_scale, "nan": nan, "math": peers.PEERS["torch.sdpa-math"]}
    row = measured(WORK, every, gate)
    for name in ("other", "nan"):
        assert row["contestants"][name]["reason"].startswith("ArithmeticError: computes something")
    assert "ms" in row["contestants"]["math"]
    assert gate.report()["ok"]
    measured(WORK, {"other": other_scale}, gate)
    assert "differs from every other" in gate.failures[WORK.name]
    assert not gate.report()["ok"]


def test_our_failures_are_red_and_unsupported_work_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(CPU)
    for error, n_failures in ((NotImplementedError("head_dim: too large"), 0), (RuntimeError("illegal access"), 1)):

        def fail(*args: Any, error: Exception = error, **kwargs: Any) -> None:
            raise error

        monkeypatch.setattr("bench.work.attention.attention", fail)
        row = measured(WORK, {"math": peers.PEERS["torch.sdpa-math"]}, gate)
        assert str(error) in row["contestants"]["fusedattn"]["reason"]
        assert (row["best_own"], row["speedup"], len(gate.failures)) == (None, None, n_failures)


def test_nothing_beyond_the_budget_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate really measures: it is red for attention without its mask."""
    monkeypatch.setattr("fusedattn.cli.check.command.attention", lambda *a, mask, **k: attention(*a, mask=None, **k))
    gate = Gate(CPU)
    row = measure(WORK, CPU, {}, gate, {}, ROUNDS, Budget())
    assert row["contestants"] == {"fusedattn": {"reason": "not timed, because it is not within the error budget"}}
    assert gate.report()["ok"] is False
    assert all("causal=bottom_right" in name for name in gate.failures)


def test_a_forward_without_gradients_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run another kernel."""
    monkeypatch.setattr("bench.measuring.gate.attention", lambda *a, mask, **k: attention(*a, mask=None, **k))
    gate = Gate(CPU)
    assert not gate.passes(WORK.cases())
    (failure,) = gate.failures.values()
    assert failure.startswith("of the error budget out without gradients uses")


def test_kernels_that_must_be_chosen_are_checked_and_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for Hopper: while they are chosen, attention is called without its mask, and only they are red."""
    from fusedattn.kernels import hopper

    def broken(*args: Any, mask: masks.Mask, **options: Any) -> Any:
        seen.append(hopper.chosen)
        return attention(*args, mask=None if hopper.chosen == "all" else mask, **options)

    seen: list[Any] = []
    monkeypatch.setattr("fusedattn.cli.check.command.attention", broken)
    gate = Gate(CPU)
    assert gate.passes(WORK.cases())
    for module in ("bench.measuring.gate", "bench.work.attention"):
        monkeypatch.setattr(f"{module}.is_hopper", lambda device: True)
    gate = Gate(CPU)
    assert not gate.passes(WORK.cases())
    (failure,) = gate.failures.values()
    assert "by the kernels for Hopper" in failure
    assert set(seen) == {None, "all"}
    assert hopper.chosen is None


def test_contestants_by_kernels_that_must_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedattn.kernels import hopper

    def noting(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        seen.append(hopper.chosen)
        return q

    seen: list[Any] = []
    monkeypatch.setattr("bench.work.attention.is_hopper", lambda device: True)
    monkeypatch.setattr("bench.work.attention.attention", noting)
    work = replace(WORK, case=replace(WORK.case, dtype=torch.bfloat16))
    contestant = work.contestants(CPU, {})["fusedattn, for Hopper"]()
    contestant.set_up()()
    assert seen == ["all"]
    assert hopper.chosen is None
    assert "fusedattn, for Hopper" not in WORK.contestants(CPU, {})  # float32


def test_the_gate_is_green_only_for_checks_that_ran_and_passed() -> None:
    gate = Gate(CPU)
    assert gate.report()["ok"] is False
    assert gate.passes(WORK.cases())
    assert gate.report()["ok"] is True
    assert 0.0 < gate.report()["most_used"] <= gate.limit


def test_the_check_is_the_timed_work_in_small() -> None:
    """At every scale: few heads in the same ratio, equal head_dim, dtype and features, lengths that no tile divides."""
    for scale in (suites.GPU, suites.CPU, suites.QUICK):
        for work in suites.works(list(suites.SUITES), scale):
            for case in work.cases():
                assert case.dtype == work.dtype
                assert case.batch * case.nheads_q * case.seqlen_q * case.seqlen_k < 2e7
            if isinstance(work, AttentionWork):
                sizes = dict.fromkeys(("batch", "nheads_q", "nheads_kv", "seqlen_q", "seqlen_k"), 1)
                for case in work.cases():
                    assert replace(case, **sizes, window=None, padding=None) == replace(work.case, **sizes, window=None)
                    assert case.nheads_q // case.nheads_kv == work.case.nheads_q // work.case.nheads_kv
                    assert (case.padding is None) == (work.padded == 0.0)
                    assert (case.window is None) == (work.case.window is None)
    lengths = {case.seqlen_q for case in suites.works(["forward"], suites.GPU)[0].cases()}
    assert any(n % 128 == 0 for n in lengths)
    assert any(n % 16 for n in lengths)


@pytest.mark.parametrize("direction", ["forward", "both", "backward"])
@pytest.mark.parametrize("fields", [{}, {"rope": "half"}, {"bias": "per_head"}, {"alibi": True}, {"window": (3, 0)}])
def test_the_torch_functions_agree_with_ours(direction: Any, fields: dict[str, Any]) -> None:
    work = replace(WORK, case=replace(SMALL, **fields), direction=direction, padded=0.25)
    row = measured(work, {"torch.sdpa-math": peers.PEERS["torch.sdpa-math"]})
    assert len(row["contestants"]) == 2
    assert all("ms" in found for found in row["contestants"].values()), row


def test_padding_is_the_share_it_says() -> None:
    for padded, n_real in ((0.0, 8), (0.25, 6), (0.75, 2)):
        inputs = replace(WORK, padded=padded).inputs(CPU)
        assert inputs.visible()[:, :, -1].sum(-1).unique().tolist() == [n_real]


def test_tensors_lie_in_memory_as_models_have_them() -> None:
    inputs = WORK.inputs(CPU)
    assert all(x.transpose(1, 2).is_contiguous() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    cache = replace(WORK, case=replace(SMALL, seqlen_q=1)).inputs(CPU)
    assert all(x.is_contiguous() for x in (cache.k, cache.v))


def test_contestants_may_write_over_their_inputs() -> None:
    """Liger's rotation does; later contestants must still get the original inputs."""

    def overwriting(q, k, v, **options):
        out = peers.PEERS["torch.sdpa-math"](q, k, v, **options)
        q.zero_(), k.zero_()
        return out

    inputs = WORK.inputs(CPU)
    before = inputs.q.clone()
    attention_work._answer(overwriting, inputs)
    assert torch.equal(inputs.q, before)


def test_every_name_of_work_is_unique_and_the_most_important_comes_first() -> None:
    for scale in (suites.GPU, suites.CPU, suites.QUICK):
        found = suites.works(list(suites.SUITES), scale)
        assert len({work.name for work in found}) == len(found)
        assert [work.priority for work in found] == sorted(work.priority for work in found)
        assert {work.place.suite for work in found} == set(suites.SUITES)
        assert found[0].place.suite == "forward"
    assert all(work.amount > 0 for work in suites.works(list(suites.SUITES), suites.GPU))


def test_the_work_of_a_gpu_is_that_of_the_page() -> None:
    cases = [work.case for work in suites.works(["forward"], suites.GPU) if isinstance(work, AttentionWork)]
    assert {case.head_dim for case in cases} == {64, 128, 256}
    assert {case.nheads_q * case.head_dim for case in cases} == {2048}
    assert {case.batch * case.seqlen_q for case in cases} == {16384, 32768}
    assert {case.seqlen_q for case in cases} == {2**i for i in range(9, 16)}
    assert {case.nheads_q // case.nheads_kv for case in cases} == {1, 4}
    decode = [work.case for work in suites.works(["decode"], suites.GPU) if isinstance(work, AttentionWork)]
    assert {case.batch for case in decode} == {1, 8, 32, 128}
    assert {case.seqlen_k for case in decode} == {1024, 4096, 8192, 32768, 131072}


@pytest.mark.parametrize("task", ["training", "generate"])
def test_models_compute_the_same_and_train(task: Any) -> None:
    work = ModelWork(PLACE, 0, ModelSize("20k", 32, 4, 1, 1, 17), task, 2, 6, 3, torch.float32, compiled=False)
    row = measured(work, {})
    assert {name for name, found in row["contestants"].items() if "ms" in found} == {"fusedattn", "sdpa", "textbook"}
    assert row["amount"] == (12 if task == "training" else 6)


def test_torchs_function_generates_the_same() -> None:
    size = ModelSize("20k", 32, 4, 2, 2, 17)
    textbook = ModelWork(PLACE, 0, size, "generate", 2, 6, 5, torch.float32)._model(torch.device("cpu")).eval()
    for p in textbook.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.4)
    ids = torch.randint(17, (2, 6))
    want = textbook.generate(ids, 5, temperature=0)
    assert torch.equal(model.with_attention(textbook).generate(ids, 5, temperature=0), want)


def test_a_backend_of_torchs_function_is_chosen_while_it_is_timed() -> None:
    def enabled() -> torch.Tensor:
        cuda = torch.backends.cuda
        return torch.tensor([cuda.flash_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.math_sdp_enabled()])

    free = Contestant(lambda: enabled, enabled)
    flash = model._by_backend(free, model.BACKENDS["sdpa-flash"][1])
    assert flash.answer().tolist() == [True, False, False]
    assert flash.set_up()().tolist() == [True, False, False]
    cudnn = model._by_backend(free, model.BACKENDS["sdpa-cudnn"][1])
    assert cudnn.answer().tolist() == [False, True, False]
    assert enabled().all()
    assert model._by_backend(free, None) is free


def test_a_model_is_compiled_for_each_backend() -> None:
    """Code compiled for one backend must not run under the name of another."""
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    work = ModelWork(PLACE, 0, ModelSize("20k", 32, 4, 1, 1, 17), "training", 2, 6, 3, torch.float32)
    ids = torch.zeros(2, 6, dtype=torch.int64)
    for attention_class in (model.TorchAttention, *(of for of, _ in model.BACKENDS.values())):
        known = len(graphs)
        torch.compile(model.with_attention(work._model(CPU), attention_class), dynamic=False, backend=compiler)(ids)
        assert len(graphs) > known, attention_class


def test_launches_are_counted_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 in 40 ms are 2 ms each, and 500 per second."""
    monkeypatch.setattr(LaunchWork, "stopwatch", lambda *_: lambda timed: 40.0)
    own = measured(LaunchWork(PLACE, 0, SMALL, "called", True), {})["contestants"]["fusedattn"]
    assert (own["ms"]["median"], own["rate"]) == (2.0, 500.0)
    graph = measured(LaunchWork(PLACE, 0, SMALL, "CUDA graph", True), {})
    assert all("CUDA graphs are of a GPU" in found["reason"] for found in graph["contestants"].values())


def test_ceilings_go_by_unit() -> None:
    found = {"matmul": {"float32": 4.0}, "copy": 100.0}
    assert ceilings.ceiling(found, "TFLOP/s", "float32") == 4.0
    assert ceilings.ceiling(found, "TFLOP/s", "float16") is None
    assert ceilings.ceiling(found, "GB/s", "float16") == 100.0
    assert ceilings.ceiling(found, "tokens/s", "float32") is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_inputs_drawn_on_the_device_are_the_same_problem(case: Case) -> None:
    here, there = make_inputs(case), make_inputs(case, DEVICE, drawn_there=True)
    names = set(here.tensors())
    assert names == set(there.tensors())
    for name in names:
        a, b = here.tensors()[name], there.tensors()[name]
        assert (a.shape, a.dtype, b.device.type) == (b.shape, b.dtype, DEVICE)


def test_rope_is_applied_before_each_function_once() -> None:
    inputs = make_inputs(replace(SMALL, rope="half"))
    found = functions.for_case(replace(SMALL, rope="half"), {"math": peers.PEERS["torch.sdpa-math"]}, compiled=True)
    assert [name for name in found if "liger" not in name] == ["math after compiled rope", "math after eager rope"]
    out = found["math after eager rope"](inputs.q, inputs.k, inputs.v, **inputs.options)
    torch.testing.assert_close(out, attention(inputs.q, inputs.k, inputs.v, **inputs.options))


@pytest.mark.parametrize(
    ("mask", "band"),
    [
        (None, (None, None)),
        (masks.causal(), (None, 0)),
        (masks.causal("top_left"), (None, -3)),
        (masks.window(4, 0), (4, 0)),
        (masks.window(4, 2), (4, 2)),
    ],
)
def test_bands_of_other_libraries(mask: Any, band: tuple[int | None, int | None]) -> None:
    """Relative to the diagonal that ends at the last key, for 5 queries and 8 keys."""
    assert libraries._band("f", mask, 5, 8) == band


def test_other_libraries_are_called_in_their_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Fake:
        @staticmethod
        def flash_attn_func(q, k, v, *, softmax_scale, causal, window_size):
            calls.append((tuple(q.shape), causal, window_size))
            out = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
            )
            return out.transpose(1, 2), None

    monkeypatch.setattr(libraries.importlib, "import_module", lambda name: Fake)
    inputs = make_inputs(SMALL)
    for name, unlimited in (("flash-attn 2", -1), ("flash-attn 4", None)):
        out = libraries.LIBRARIES[name](inputs.q, inputs.k, inputs.v, **inputs.options)
        torch.testing.assert_close(out, attention(inputs.q, inputs.k, inputs.v, **inputs.options))
        assert calls.pop() == ((2, 8, 4, 16), True, (unlimited, unlimited))
        libraries.LIBRARIES[name](inputs.q, inputs.k, inputs.v, mask=masks.window(3, 0))
        assert calls.pop()[1:] == (True, (3, 0))
        libraries.LIBRARIES[name](inputs.q, inputs.k, inputs.v, mask=masks.window(None, 2))
        assert calls.pop()[1:] == (False, (unlimited, 2))
    with pytest.raises(NotImplementedError, match=r"bias: flash_attn\.flash_attn_func has none"):
        libraries.LIBRARIES["flash-attn 2"](inputs.q, inputs.k, inputs.v, bias=inputs.q)
    padded = masks.padding(torch.ones(2, 8, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match=r"mask: .* causal masks and windows only"):
        libraries.LIBRARIES["flash-attn 2"](inputs.q, inputs.k, inputs.v, mask=padded)


def test_ligers_tables_are_both_halves() -> None:
    rope = Rope.from_theta(8, 10)
    cos, sin = libraries._liger_tables(rope, 6, torch.float32)
    assert cos.shape == sin.shape == (1, 6, 8)
    assert torch.equal(cos[0, :, :4], rope.cos[:6])
    assert torch.equal(sin[0, :, 4:], rope.sin[:6])
    q = torch.randn(1, 2, 6, 8)
    with pytest.raises(NotImplementedError, match="half-split"):
        libraries.liger_rope(Rope.from_theta(8, 10, interleaved=True), q, q)
    with pytest.raises(NotImplementedError, match="one length"):
        libraries.liger_rope(rope, q, q[:, :, :3])


def test_one_pass_is_measured_beside_ours_in_a_backward_on_a_gpu():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert list(own("forward", gpu)) == ["fusedattn"]
    assert list(own("both", cpu)) == ["fusedattn"]
    assert list(own("backward", gpu)) == ["fusedattn", "fusedattn, one pass"]
    one_pass = own("both", gpu)["fusedattn, one pass"]
    assert isinstance(one_pass, functools.partial)
    assert one_pass.keywords["deterministic"] is False
