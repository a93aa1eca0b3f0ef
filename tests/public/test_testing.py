"""The error budget itself: what it must reject, what it must pass, and how ``measure`` reports missing results."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from bench import accuracy
from fusedattn import masks, reference, testing
from fusedattn.testing import CACHED_CASES, CASES, GRADIENTS, TENSORS, Case, assert_within_budget, budget, compare
from tests.conftest import DTYPES, assert_equal

SMALL = Case("small", nheads_q=2, nheads_kv=1, seqlen_q=9, seqlen_k=13, head_dim=8, causal="bottom_right")
BLIND = replace(SMALL, padding="uneven", empty_batch=True)
ROWS = (2, 3, 16, 32)  # batch, heads, sequence, head_dim
NOISE = 1e-4  # of the baseline, relative to the size of each row


def three(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """An ``actual`` as good as its baseline, golden, and the baseline; the sizes of the rows fall from 1 to 1/1000."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(0, -3, ROWS[2], dtype=torch.float64)[:, None]
    golden, a, b = (sizes * torch.randn(ROWS, generator=generator, dtype=torch.float64) for _ in range(3))
    return (golden + NOISE * a).to(dtype), golden, (golden + NOISE * b).to(dtype)


def test_results_as_good_as_the_baseline_pass() -> None:
    actual, golden, baseline = three()
    assert_within_budget(actual, golden, baseline)
    assert_within_budget(baseline, golden, baseline)
    assert compare(golden.float(), golden, baseline).used < 0.01
    ratios = compare(baseline, golden, baseline)
    assert (ratios.max, ratios.mean, ratios.row) == (1.0, 1.0, 1.0)
    assert ratios.used == pytest.approx(1 / testing.MEAN_FACTOR)


def test_a_fault_of_one_row() -> None:
    """In the smallest row, far below the largest error of the whole tensor."""
    actual, golden, baseline = three()
    actual[1, 2, -1] *= 1.005
    ratios = compare(actual, golden, baseline)
    assert ratios.max < testing.MAX_FACTOR
    assert ratios.mean < testing.MEAN_FACTOR
    assert ratios.row > 3
    with pytest.raises(AssertionError, match=r"^dq: .* in the worst row \(allowed 1.5\); \d+\.\d+ of the budget used$"):
        assert_within_budget(actual, golden, baseline, "dq")


def test_a_row_that_ought_to_be_zero_gives_no_licence_to_the_others() -> None:
    actual, golden, baseline = three()
    golden[0, 0, 3] = 0.0
    actual[0, 0, 3] = baseline[0, 0, 3] = 0.0
    baseline[0, 0, 3, 5] = 1e-9
    assert_within_budget(actual, golden, baseline)
    faulty = actual.clone()
    faulty[1, 2, -1] *= 1.005
    assert not compare(faulty, golden, baseline).ok
    # Rows whose truth is zero are compared with each other.
    baseline[0, 0, 3, 5] = 1e-5
    actual[0, 0, 3, 6] = 1.4e-5
    assert compare(actual, golden, baseline).ok
    actual[0, 0, 3, 6] = 1.6e-5
    assert not compare(actual, golden, baseline).ok


def test_a_fault_of_one_element() -> None:
    actual, golden, baseline = three()
    actual[0, 1, 0, 7] += 2 * testing.MAX_FACTOR * (baseline - golden).abs().max()
    baseline[0, 0, -1] = (golden + 10 * (baseline - golden))[0, 0, -1]  # so that the comparison by rows would pass
    ratios = compare(actual, golden, baseline)
    assert ratios.mean < testing.MEAN_FACTOR
    assert ratios.row < testing.MAX_FACTOR
    assert not ratios.ok


def test_a_fault_of_the_mean_alone() -> None:
    actual, golden, baseline = three()
    actual = (golden + 1.2 * (baseline.double() - golden)).float()
    ratios = compare(actual, golden, baseline)
    assert max(ratios.max, ratios.row) < testing.MAX_FACTOR
    assert not ratios.ok


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_results(value: float) -> None:
    actual, golden, baseline = three()
    actual[0, 0, 0, 0] = value
    with pytest.raises(AssertionError, match=r"^out: 1 of 3072 elements are NaN or infinite"):
        assert_within_budget(actual, golden, baseline, "out")
    golden[0, 0, 0, 0] = value
    assert_within_budget(actual, golden, baseline)  # the baseline may be finite there
    actual[0, 0, 0, 0] = 1.0
    assert not compare(actual, golden, baseline).ok
    actual[0, 0, 0, 0] = -math.inf if value == math.inf else math.inf
    assert not compare(actual, golden, baseline).ok


def test_shapes_and_dtypes_that_cannot_be_compared() -> None:
    actual, golden, baseline = three()
    with pytest.raises(
        ValueError, match=r"actual: got shape \(2, 3, 16\), allowed is that of golden, \(2, 3, 16, 32\)"
    ):
        compare(actual[..., 0], golden, baseline)
    with pytest.raises(ValueError, match=r"baseline: got shape \(1, 3, 16, 32\)"):
        compare(actual, golden, baseline[:1])
    with pytest.raises(
        TypeError, match=r"actual: got dtype torch.bfloat16, allowed is that of baseline, torch.float32"
    ):
        compare(golden.bfloat16(), golden, baseline)
    with pytest.raises(TypeError, match=r"golden: got dtype torch.float32, allowed is torch.float64"):
        compare(actual, golden.float(), baseline)


def test_all_zero() -> None:
    golden, zero = torch.zeros(2, 5, dtype=torch.float64), torch.zeros(2, 5)
    assert compare(zero, golden, zero).used == 0.0
    wrong = zero.clone()
    wrong[0, 0] = 1e-30
    assert not compare(wrong, golden, zero).ok
    assert compare(wrong, golden, wrong).ok
    assert not compare(2 * wrong, golden, wrong).ok


def test_nothing_to_compare() -> None:
    nothing = torch.zeros(2, 0, 8)
    assert compare(nothing, nothing.double(), nothing).ok


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_one_unit_in_the_last_place_is_granted_and_no_more(dtype: torch.dtype) -> None:
    baseline = torch.ones(4, 8, dtype=dtype)  # exact
    actual = baseline.clone()
    actual[2, 3] += torch.finfo(dtype).eps
    assert compare(actual, baseline.double(), baseline).used == pytest.approx(1.0)
    actual[2, 3] += torch.finfo(dtype).eps
    assert compare(actual, baseline.double(), baseline).used == pytest.approx(2.0)


def test_a_result_of_a_few_numbers_is_judged_by_its_terms() -> None:
    """One unit in the last place of their terms is allowed: eager's error in so few numbers is a matter of luck."""
    golden = {"dsinks": torch.tensor([0.5, -0.25], dtype=torch.float64)}
    exact = {"dsinks": golden["dsinks"].float()}
    terms = {"dsinks": torch.tensor([100.0, 200.0], dtype=torch.float64)}
    unit = 200.0 * torch.finfo(torch.float32).eps
    near = {"dsinks": exact["dsinks"] + 0.9 * unit / 2}
    assert not testing.compare_results(near, golden, exact, torch.float32)["dsinks"].ok
    assert testing.compare_results(near, golden, exact, torch.float32, terms)["dsinks"].ok
    far = {"dsinks": exact["dsinks"] + 1.1 * unit}
    assert not testing.compare_results(far, golden, exact, torch.float32, terms)["dsinks"].ok
    # With many numbers the errors can be compared, so their terms do not count.
    *many, sums = [{"dbias": x["dsinks"].repeat(40)} for x in (near, golden, exact, terms)]
    assert not testing.compare_results(*many, torch.float32, sums)["dbias"].ok


def test_cancelling_sums_are_judged_by_their_terms() -> None:
    """A bias per query changes nothing: without a gradient of lse, its gradient is 0 up to rounding."""
    inputs = testing.without_lse_gradient(testing.make_inputs(replace(SMALL, seqlen_q=64, bias="per_query")))
    truth, terms = testing.golden(inputs), testing.bias_terms(inputs)
    assert truth["dbias"].numel() > budget.FEW
    assert truth["dbias"].abs().max() < 1e-12
    assert testing.check(eager(), inputs)["dbias"].ok
    wrong = {**testing.baseline(inputs)}
    for size, ok in ((0.2, True), (2.0, False)):
        wrong["dbias"] = (size * torch.finfo(torch.float32).eps * terms["dbias"]).float()
        assert testing.compare_results(wrong, truth, truth_in_float32(truth), torch.float32, terms)["dbias"].ok is ok


def truth_in_float32(truth: testing.Results) -> testing.Results:
    return {name: x.float() for name, x in truth.items()}


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((2, 3, 5, 7), (2, 3, 5, 7)), ((1, 1, 1, 7), (1, 1, 1, 7)), ((3, 5, 1), (3, 5)), ((2, 1, 1, 1), (2,)), ((), (1,))],
)
def test_rows_of_a_bias(shape, rows) -> None:
    """A row holds keys, else queries, else the last dimension there is; for out, dq, dk and dv always head_dim."""
    x = torch.zeros(shape)
    assert budget._rows("dbias", x).shape == rows
    assert budget._rows("dq", x).shape == shape


def eager(
    *,
    lse: bool = True,
    gradients: bool = True,
    through_lse: bool = True,
    change: Callable[[Tensor], Tensor] = lambda out: out,
) -> Callable[..., object]:
    """The reference, without the results whose argument is False; `change` is applied to its out."""

    def function(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: object) -> object:
        if return_lse and not lse:
            raise NotImplementedError("no lse")
        if q.requires_grad and not gradients:
            raise NotImplementedError("no gradients")
        out, row_lse, _ = reference.attention(q, k, v, **options)
        row_lse = row_lse if through_lse else row_lse.detach()
        return (change(out), row_lse) if return_lse else change(out)

    return function


def test_measure_of_a_complete_function_is_check() -> None:
    inputs = testing.make_inputs(SMALL)
    found = testing.measure(eager(), inputs)
    assert found.ratios == testing.check(eager(), inputs)
    assert set(found.ratios) == set(TENSORS)
    assert (found.missing, found.notes) == ({}, {})
    assert found.inputs is inputs
    assert {r.max for r in found.ratios.values()} == {1.0}


@pytest.mark.parametrize(
    ("function", "missing", "through_lse"),
    [
        (eager(lse=False), {"lse": "no lse"}, False),
        (eager(gradients=False), dict.fromkeys(GRADIENTS, "no gradients"), True),
        (eager(lse=False, gradients=False), {"lse": "no lse"} | dict.fromkeys(GRADIENTS, "no gradients"), True),
        (eager(through_lse=False), {}, False),
    ],
    ids=["lse", "gradients", "both", "gradient of lse"],
)
def test_measure_of_the_results_there_are(function, missing, through_lse) -> None:
    """The function is the reference, so all ratios are 1."""
    inputs = testing.make_inputs(SMALL)
    found = testing.measure(function, inputs)
    assert found.missing == missing
    assert set(found.ratios) == set(TENSORS) - set(missing)
    for r in found.ratios.values():
        assert (r.max, r.mean, r.row) == pytest.approx((1.0, 1.0, 1.0))
    assert bool(found.inputs.dlse.any()) == through_lse


BIASED = replace(SMALL, bias="per_head", relative="per_query", sinks=True, alibi=True, score_mod=True, qk_norm="shared")


def test_measure_without_the_gradients_of_biases() -> None:
    """The gradients of q, k and v are still measured."""

    def function(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: object) -> object:
        if options["bias"].tensor.requires_grad:
            raise NotImplementedError("bias: no gradient")
        return eager(lse=False)(q, k, v, return_lse=return_lse, **options)

    inputs = testing.make_inputs(BIASED)
    found = testing.measure(function, inputs)
    assert set(found.ratios) == {"out", "dq", "dk", "dv"}
    reasons = dict.fromkeys(set(testing.ALL_TENSORS) - set(TENSORS), "bias: no gradient")
    assert found.missing == {"lse": "no lse", **reasons}
    assert set(testing.check(eager(), inputs)) == set(testing.results_of(inputs)) == set(testing.ALL_TENSORS)


def test_a_gradient_that_a_function_forgets_is_no_refusal() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor, **options: object) -> object:
        return eager()(q, k, v, sinks=sinks.detach(), **options)

    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        testing.measure(function, testing.make_inputs(BIASED))


def test_a_function_without_an_argument_is_not_called() -> None:
    """An argument left at its default is not passed: a function need not know features that a problem does not use."""

    def function(q, k, v, *, mask, rope, scale, return_lse):
        called.append(1)
        return eager()(q, k, v, mask=mask, rope=rope, scale=scale, return_lse=return_lse)

    called: list[int] = []
    found = testing.measure(function, testing.make_inputs(replace(BIASED, softcap=2.0, dropout_p=0.1)))
    assert not called
    unknown = "qk_norm, bias, softcap, score_mod, sinks, dropout_p, dropout_seed: no argument of this function"
    assert found.missing == dict.fromkeys(testing.ALL_TENSORS, unknown)
    assert set(testing.measure(function, testing.make_inputs(SMALL)).ratios) == set(TENSORS)


def test_measure_of_nothing_gives_the_reason() -> None:
    def function(*_: object, **__: object) -> object:
        raise NotImplementedError("not on a Monday")

    found = testing.measure(function, testing.make_inputs(SMALL))
    assert found.ratios == {}
    assert found.missing == dict.fromkeys(TENSORS, "not on a Monday")


def test_an_output_without_history_has_no_backward() -> None:
    function = eager(change=Tensor.detach, through_lse=False)
    found = testing.measure(function, testing.make_inputs(SMALL))
    assert set(found.ratios) == {"out", "lse"}
    assert "does not require grad" in found.missing["dq"]
    with pytest.raises(NotImplementedError, match="does not require grad"):
        testing.check(function, testing.make_inputs(SMALL))


def test_check_insists_on_a_gradient_through_lse() -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        testing.check(eager(through_lse=False), testing.make_inputs(SMALL))


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (lambda q: q, TypeError, r"returned \(Tensor\) with return_lse=True, allowed is \(out, lse\)"),
        (lambda q: (q, None), TypeError, r"returned \(Tensor, NoneType\)"),
        (
            lambda q: (q[..., :4], q[..., 0]),
            ValueError,
            r"returned out of shape \(2, 2, 9, 4\), allowed is \(2, 2, 9, 8\)",
        ),
        (lambda q: (q, q[..., :1]), ValueError, r"returned lse of shape \(2, 2, 9, 1\), allowed is \(2, 2, 9\)"),
    ],
)
def test_results_that_a_function_may_not_return(returned, error, message) -> None:
    with pytest.raises(error, match=message):
        testing.check(lambda q, k, v, **_: returned(q), testing.make_inputs(SMALL))


def test_nan_in_rows_that_see_nothing_is_named() -> None:
    """Softmax gives NaN for a row of -inf."""
    inputs = testing.make_inputs(BLIND)
    blind = ~inputs.mask.dense(9, 13).any(-1).expand(2, 2, 9)
    assert blind[-1].all()
    function = eager(change=lambda out: out.masked_fill(blind[..., None], math.nan))
    found = testing.measure(function, inputs)
    n = 8 * int(blind.sum())
    assert found.notes["out"].startswith(f"{n} of 288 elements are NaN or infinite")
    assert found.notes["out"].endswith(f"; {n} of them in rows that see nothing")
    assert not found.ratios["out"].ok
    assert found.ratios["lse"].ok


def test_inputs_are_the_same_each_time_and_in_each_dtype() -> None:
    for case in CASES:
        first, second = testing.make_inputs(case), testing.make_inputs(replace(case, dtype=torch.float64))
        tensors, others = first.tensors(), second.tensors()
        assert_equal(testing.make_inputs(case).tensors(), tensors)
        assert tensors.keys() == others.keys()
        for name, x in tensors.items():
            torch.testing.assert_close(x.to(others[name].dtype), others[name], atol=1e-6, rtol=1e-6)
        assert torch.equal(first.visible(), second.visible())
        assert {x.dtype for x in first.to(torch.float64).leaves.values()} == {torch.float64}
        wide = {first.to(torch.bfloat16).leaves[name].dtype for name in first.leaves.keys() & {"slopes", "learned"}}
        assert wide <= {torch.float32}
    other = testing.make_inputs(replace(CASES[-1], seed=CASES[-1].seed + 1)).tensors()
    assert not any(torch.equal(x, other[name]) for name, x in first.tensors().items())


def test_the_cases_have_every_feature() -> None:
    """Every field of a case, and every word allowed in it."""
    for field in fields(Case):
        if field.name in ("name", "dtype"):
            continue
        values = {getattr(case, field.name) for case in (*CASES, *CACHED_CASES)}
        assert len(values) > 1, field.name
    words = {"bias": 6, "documents": 2, "relative": 2, "padding": 3, "boolean": 2, "causal": 2, "cache": 2, "codes": 4}
    words["sparse"] = 7
    for name, number in words.items():
        assert len({getattr(case, name) for case in (*CASES, *CACHED_CASES)} - {None}) == number, name
    assert len({case.name for case in (*CASES, *CACHED_CASES)}) == len(CASES) + len(CACHED_CASES)


def test_enough_is_visible_in_every_case() -> None:
    for case in CASES:
        inputs = testing.make_inputs(case)
        assert inputs.visible().any(-1).float().mean() > 0.4, case.name
        assert inputs.visible().float().mean() > 0.05, case.name


def test_a_problem_of_other_leaves() -> None:
    inputs = testing.make_inputs(CASES[-1])
    assert [f"d{name}" for name in inputs.leaves] == [name for name in testing.ALL_TENSORS if name.startswith("d")]
    other = inputs.with_leaves({name: x + 1 for name, x in inputs.leaves.items()})
    for name, x in other.leaves.items():
        assert torch.equal(x, inputs.leaves[name] + 1)
    changed = {name for name, x in other.tensors().items() if not torch.equal(x, inputs.tensors()[name])}
    of_values = {"tensor(x)", "relative(table)", "alibi(slopes)", "score_mod(args[0])", "q_weight", "k_weight"}
    assert changed == {"q", "k", "v", "sinks", *of_values}
    assert set(testing.make_inputs(SMALL).options) == {"mask", "rope", "scale"}
    assert set(inputs.options) == {
        "mask", "rope", "scale", "bias", "softcap", "score_mod", "sinks", "dropout_p", "dropout_seed", "qk_norm"
    }  # fmt: skip


def test_a_bias_of_another_dtype() -> None:
    inputs = testing.make_inputs(replace(BIASED, dtype=torch.bfloat16, bias_dtype=torch.float32))
    assert {x.dtype for x in (inputs.bias.tensor, inputs.bias.relative, inputs.sinks)} == {torch.float32}
    found = testing.run(eager(), inputs)
    assert {found[name].dtype for name in ("dbias", "drelative", "dsinks")} == {torch.float32}
    assert {found[name].dtype for name in ("out", "dq", "dk", "dv")} == {torch.bfloat16}


def test_the_sums_of_terms_bound_the_gradients() -> None:
    for case in CASES:
        inputs = testing.make_inputs(case)
        truth, terms = testing.golden(inputs), testing.bias_terms(inputs)
        assert set(terms) == set(truth) - set(TENSORS)
        for name, x in terms.items():
            assert (truth[name].abs() <= x * (1 + 1e-9) + 1e-12).all(), (case.name, name)


def test_the_terms_of_learned_arguments_do_not_cancel() -> None:
    inputs = testing.make_inputs(Case(batch=1, seqlen_q=2, seqlen_k=3, score_mod=True)).to(torch.float64)
    products = torch.tensor([-3.0, -1.0, 0.5, 0.0, 1.0, 2.5], dtype=torch.float64).view(1, 1, 2, 3).repeat(1, 4, 1, 1)
    terms = testing.terms_of_added(inputs, torch.full_like(products, 2.0), products)["dlearned"]
    torch.testing.assert_close(terms, (2.0 * products / (1.0 + products.abs())).abs().sum((0, 2, 3)))


def test_triton_is_needed_for_functions_alone() -> None:
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "from fusedattn import testing\n"
        "for case in testing.CASES:\n"
        "    try:\n"
        "        testing.make_inputs(case)\n"
        "    except ModuleNotFoundError:\n"
        "        assert case.needs_triton\n"
        "    else:\n"
        "        assert not case.needs_triton\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_golden_is_the_textbook() -> None:
    """Compared with attention written out here: float64, no mask but a causal one, one head."""
    inputs = testing.make_inputs(replace(SMALL, nheads_q=1))
    truth = testing.golden(inputs)
    assert {x.dtype for x in truth.values()} == {torch.float64}
    q, k, v = (x.double() for x in (inputs.q, inputs.k, inputs.v))
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(~masks.causal().dense(9, 13), -math.inf)
    torch.testing.assert_close(truth["out"], scores.softmax(-1) @ v)
    torch.testing.assert_close(truth["lse"], scores.logsumexp(-1))


@pytest.fixture
def committed() -> dict:
    return json.loads(accuracy.RESULTS.read_text(encoding="utf-8"))


def test_the_figures_of_the_page_are_those_of_the_json(committed: dict) -> None:
    page = accuracy.PAGE.read_text(encoding="utf-8")
    assert accuracy.with_figures(page, committed) == page, "run: python -m bench.accuracy"
    committed["features"][0]["mean"] += 0.01
    assert accuracy.with_figures(page, committed) != page


def test_the_json_has_every_case_and_the_kernels_keep_the_budget(committed: dict) -> None:
    cases = (*CASES, *CACHED_CASES)
    expected = [(case.name, str(dtype).removeprefix("torch.")) for case in cases for dtype in DTYPES]
    for rows in (committed["features"], *(peer["features"] for peer in committed["against"])):
        assert [(row["case"], row["dtype"]) for row in rows] == expected, "measure again: see bench/accuracy.py"
    assert committed["ok"] is True
    assert all(row["ok"] for row in committed["results"])
    assert [peer["name"] for peer in committed["against"]] == ["torch.sdpa-math", "torch.sdpa-flash", "flex"]
