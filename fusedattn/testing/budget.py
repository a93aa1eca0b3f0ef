"""The error budget: run, compare and judge an attention function. :mod:`fusedattn.testing` has the rule."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from fusedattn import dropout, reference
from fusedattn.qk_norm import two_dimensional
from fusedattn.testing.cases import OF_BIAS, Inputs, results_of

MAX_FACTOR = 1.5
MEAN_FACTOR = 1.1
GRADIENTS = ("dq", "dk", "dv")
TENSORS = ("out", "lse", *GRADIENTS)  # of every problem
ALL_TENSORS = (
    *TENSORS,
    "dbias",
    "drelative",
    "dsinks",
    "dslopes",
    "dlearned",
    "dq_weight",
    "dk_weight",
)  # of a problem that has everything

FEW = 64  # results with fewer numbers are also judged by the size of their terms

Results = dict[str, Tensor]
AttentionFunction = Callable[..., tuple[Tensor, Tensor]]


def run(function: AttentionFunction, inputs: Inputs) -> Results:
    """Forward and backward of ``function(q, k, v, **inputs.options, return_lse=True) -> (out, lse)``.

    Returns:
        out, lse and the gradients that :func:`results_of` names, detached. Rows whose lse is ``-inf`` get no gradient
        through lse.

    Raises:
        TypeError, ValueError: the function did not return ``(out, lse)`` in their shapes.
        NotImplementedError: its out has no gradient.
    """
    leaves, returned = _forward(function, inputs, inputs.leaves)
    return _with_gradients(leaves, returned, inputs, through=("out", "lse"))


def _forward(
    function: AttentionFunction, inputs: Inputs, needed: Collection[str], *, lse: bool = True
) -> tuple[dict[str, Tensor], Results]:
    """The `needed` leaves of a new graph, and the returned tensors: out and, if asked for, lse."""
    leaves = {name: x.detach().requires_grad_(name in needed) for name, x in inputs.leaves.items()}
    x = inputs.with_leaves(leaves)
    got: Any = function(x.q, x.k, x.v, **x.options, return_lse=lse)
    names = ("out", "lse") if lse else ("out",)
    tensors: tuple[Any, ...] = tuple(got) if lse and isinstance(got, tuple | list) else (got,)
    if len(tensors) != len(names) or not all(isinstance(x, Tensor) for x in tensors):
        kinds = ", ".join(type(x).__name__ for x in tensors)
        raise TypeError(f"function: returned ({kinds}) with return_lse={lse}, allowed is ({', '.join(names)})")
    returned = dict(zip(names, tensors, strict=True))
    rows = inputs.q.shape[:-1]
    for name, shape in (("out", (*rows, inputs.v.shape[-1])), ("lse", rows)):
        if name in returned and returned[name].shape != shape:
            raise ValueError(
                f"function: returned {name} of shape {tuple(returned[name].shape)}, allowed is {tuple(shape)}"
            )
    if needed and not returned["out"].requires_grad:
        raise NotImplementedError("function: its out does not require grad, so that it has no backward")
    return {name: leaves[name] for name in needed}, returned


def _with_gradients(leaves: dict[str, Tensor], returned: Results, inputs: Inputs, through: Sequence[str]) -> Results:
    """The returned tensors, detached, and the gradients of the leaves through the tensors named in `through`."""
    back = {"out": inputs.dout}
    if "lse" in returned:
        lse = returned["lse"].detach()
        back["lse"] = inputs.dlse.to(lse.dtype).masked_fill(lse == -math.inf, 0.0)
    found = torch.autograd.grad(
        [returned[name] for name in through], list(leaves.values()), [back[name] for name in through]
    )
    gradients = {f"d{name}": gradient for name, gradient in zip(leaves, found, strict=True)}
    return {name: x.detach() for name, x in returned.items()} | gradients


def through_bias(inputs: Inputs, dscores: Tensor) -> Results:
    """The gradients of the parts of a bias, from that of the scores ``(batch, nheads_q, seqlen_q, seqlen_k)``."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.leaves.items() if name in OF_BIAS}
    bias = inputs.with_leaves(leaves).bias
    if not leaves or bias is None:
        return {}
    dense = bias.dense(*dscores.shape[2:]).expand(dscores.shape)
    found = torch.autograd.grad(dense, list(leaves.values()), dscores.to(dense.dtype))
    return {f"d{name}": gradient for name, gradient in zip(leaves, found, strict=True)}


def terms_of_added(inputs: Inputs, dscores: Tensor, products: Tensor) -> Results:
    """Sums of the absolute terms in the gradients of a bias and of learned args, from a positive `dscores`.

    `products` are the scaled products of q and k, in the shape of `dscores`.
    """
    found = {name: x.abs() for name, x in through_bias(inputs, dscores).items()}
    learned = inputs.leaves.get("learned")
    if learned is None or inputs.score_mod is None:
        return found
    learned = learned.detach().requires_grad_()
    score_mod = inputs.score_mod.with_learned(learned)
    changed = reference.modified(
        products, *products.shape[2:], softcap=inputs.softcap, score_mod=score_mod, bias=None
    )  # fmt: skip
    # The derivative of each score by the learned numbers: differentiate the backward by the incoming gradient.
    back = torch.zeros_like(changed, requires_grad=True)
    (gradient,) = torch.autograd.grad(changed, learned, back, create_graph=True)
    (derivative,) = torch.autograd.grad(gradient.sum(), back, retain_graph=True)
    (terms,) = torch.autograd.grad(changed, learned, dscores * derivative.sign())
    return found | {"dlearned": terms}


def _reference(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **kwargs: object) -> tuple[Tensor, Tensor]:
    out, lse, _ = reference.attention(q, k, v, **kwargs)  # type: ignore[arg-type]
    return out, lse


def golden(inputs: Inputs) -> Results:
    """The truth: the reference in float64."""
    return run(_reference, inputs.to(torch.float64))


def baseline(inputs: Inputs) -> Results:
    """Eager PyTorch in the dtype of the inputs."""
    return run(_reference, inputs)


@dataclass(frozen=True)
class Ratios:
    """The errors of one tensor relative to the baseline's, and the share of the budget that they use (1 = all)."""

    max: float
    mean: float
    row: float
    used: float

    @property
    def ok(self) -> bool:
        """Whether the budget is kept."""
        return self.used <= 1.0


def compare(
    actual: Tensor,
    golden: Tensor,
    baseline: Tensor,
    terms: Tensor | None = None,
    unit: torch.dtype | None = None,
) -> Ratios:
    """Measure ``actual`` against the budget.

    Args:
        actual: the result of a function, of any shape ``(..., n)``. Each row along the last dimension is judged by
            itself: along head_dim for out, dq, dk, dv ``(batch, nheads, seqlen, head_dim)``, along the sequence for
            lse ``(batch, nheads_q, seqlen_q)``.
        golden: the truth, float64, of the same shape. Where it is not finite, actual must be the same NaN or infinity.
        baseline: the result of eager PyTorch, of the same shape, in the dtype that actual must have.
        terms: for sums of terms that may cancel, the sums of the absolute terms, of the same shape; the ulp allowed
            below is then relative to these. Meant for results of few numbers, because it is chance which of two such
            results is nearer to the truth.
        unit: the dtype whose unit in the last place is allowed, if it is larger than that of actual.

    Returns:
        The ratios of the errors, and the largest share of its limit that any of them uses. ``ulp`` is the distance
        from 1 to the next number of the dtype, and ``size`` of a row is its root mean square::

            max    max |error|             max(1.5 * that of the baseline, ulp * max |golden|)
            mean   mean |error|            max(1.1 * that of the baseline, ulp * mean |golden|)
            row    max |error| of a row    max(1.5 * size * worst of the baseline, ulp * max |golden|)

        The worst of the baseline is its largest error in a row relative to the size of that row. Rows of size at most
        the ulp that every row is allowed count as zero and are judged among themselves: their errors by the largest of
        the baseline's.

    Raises:
        ValueError: the shapes differ.
        TypeError: golden is not float64, or actual is not in the dtype of baseline.
    """
    for name, x in (("actual", actual), ("baseline", baseline)):
        if x.shape != golden.shape:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, allowed is that of golden, {tuple(golden.shape)}")
    if golden.dtype != torch.float64:
        raise TypeError(f"golden: got dtype {golden.dtype}, allowed is torch.float64")
    if actual.dtype != baseline.dtype:
        raise TypeError(f"actual: got dtype {actual.dtype}, allowed is that of baseline, {baseline.dtype}")
    if golden.numel() == 0:
        return Ratios(0.0, 0.0, 0.0, 0.0)
    ulp = max(torch.finfo(dtype).eps for dtype in (actual.dtype, unit or actual.dtype))
    finite = golden.isfinite()
    if not _same_kind(actual, golden).all():
        return Ratios(math.inf, math.inf, math.inf, math.inf)
    truth = torch.where(finite, golden, 0.0)
    error = torch.where(finite, actual.double() - truth, 0.0).abs()
    eager = torch.where(finite & baseline.isfinite(), baseline.double() - truth, 0.0).abs()

    magnitude = truth.abs() if terms is None else torch.maximum(terms, truth.abs())
    largest, average = magnitude.max(), magnitude.mean()
    max_used = error.max() / torch.maximum(MAX_FACTOR * eager.max(), ulp * largest)
    mean_used = error.mean() / torch.maximum(MEAN_FACTOR * eager.mean(), ulp * average)

    # Rows of a causal result differ in size by orders of magnitude: each is judged relative to itself.
    floor = ulp * largest
    size = truth.pow(2).mean(dim=-1).sqrt()
    row_error, row_eager = error.amax(dim=-1), eager.amax(dim=-1)
    # But the relative error of a row that should be zero is infinite, and would allow the other rows any error.
    is_zero = size <= floor
    worst = torch.where(is_zero, 0.0, _ratio(row_eager, size)).max()
    worst_of_zeros = torch.where(is_zero, row_eager, 0.0).max()
    expected = torch.where(is_zero, worst_of_zeros, worst * size)
    row_used = _ratio(row_error, torch.maximum(MAX_FACTOR * expected, floor)).max()
    return Ratios(
        max=_ratio(error.max(), eager.max()).item(),
        mean=_ratio(error.mean(), eager.mean()).item(),
        row=_ratio(row_error, expected).max().item(),
        used=torch.stack((max_used, mean_used, row_used)).nan_to_num(0.0, posinf=math.inf).max().item(),
    )


def _same_kind(actual: Tensor, golden: Tensor) -> Tensor:
    """Bool: True where both are finite, or both the same NaN or infinity."""
    same = (actual == golden) | (actual.isnan() & golden.isnan())
    return torch.where(golden.isfinite(), actual.isfinite(), same)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """``a / b`` with 0 / 0 = 0."""
    return torch.where(a == 0, 0.0, a / b)


def assert_within_budget(actual: Tensor, golden: Tensor, baseline: Tensor, name: str = "tensor") -> None:
    """Raise AssertionError, with the measured ratios, if ``actual`` exceeds the budget.

    Args:
        actual, golden, baseline: one shape ``(..., n)``; golden float64, the others one dtype. :func:`compare` has the
            formulas and the errors for tensors that cannot be compared.
        name: the name of the tensor in the message.
    """
    ratios = compare(actual, golden, baseline)
    if ratios.ok:
        return
    if note := _note(actual, golden):
        raise AssertionError(f"{name}: {note}")
    raise AssertionError(
        f"{name}: error {ratios.max:.2f}x of eager's at most (allowed {MAX_FACTOR}), {ratios.mean:.2f}x on average "
        f"(allowed {MEAN_FACTOR}), {ratios.row:.2f}x in the worst row (allowed {MAX_FACTOR}); "
        f"{ratios.used:.2f} of the budget used"
    )


def _note(actual: Tensor, golden: Tensor, blind: Tensor | None = None) -> str | None:
    """A sentence if elements are NaN or infinite and should not be, or the other way round; else None.

    `blind`: bool, broadcastable to the tensors, True for rows that see nothing.
    """
    wrong = ~_same_kind(actual, golden)
    if not wrong.any():
        return None
    note = f"{int(wrong.sum())} of {wrong.numel()} elements are NaN or infinite where the truth is not, or conversely"
    if blind is not None and (wrong & blind).any():
        note += f"; {int((wrong & blind).sum())} of them in rows that see nothing"
    return note


def compare_results(
    actual: Results, golden: Results, baseline: Results, dtype: torch.dtype, terms: Results | None = None
) -> dict[str, Ratios]:
    """:func:`compare` of each result by its rows, for inputs of `dtype`.

    A bias, table or sink may have another dtype, but its gradient is a sum of products in the dtype of the inputs.

    A row of dbias runs along its last dimension of more than one element: keys, else queries. dsinks is one row. The
    `terms` apply to results of fewer than :data:`FEW` numbers, and to results that are 0 except for rounding, such as
    the gradient of a bias per query without a gradient of lse.
    """
    found = {}
    for name, x in actual.items():
        rows, truth, eager = (_rows(name, y) for y in (x, golden[name], baseline[name]))
        if name in TENSORS:
            found[name] = compare(rows, truth, eager)
            continue
        sums = None if terms is None else _rows(name, terms[name])
        if sums is not None and x.numel() >= FEW and (truth.abs() > torch.finfo(dtype).eps * sums).any():
            sums = None
        found[name] = compare(rows, truth, eager, sums, unit=dtype)
    return found


def _rows(name: str, x: Tensor) -> Tensor:
    if name in TENSORS:
        return x
    while x.dim() > 1 and x.shape[-1] == 1:
        x = x[..., 0]
    return x.reshape(1) if x.dim() == 0 else x


def bias_terms(inputs: Inputs) -> Results:
    """Sums of the absolute terms of the gradients of all leaves but q, k and v; float64.

    The gradient of a score is ``p (dp - delta + dlse)``, that of a sink ``p_sink (dlse - delta)``.
    """
    if len(inputs.leaves) == len(GRADIENTS):
        return {}
    x = inputs.to(torch.float64)
    _, lse, weights = reference.attention(x.q, x.k, x.v, **x.options)
    dp = (x.dout @ x.v.repeat_interleave(x.q.shape[1] // x.k.shape[1], 1).mT).abs() * keep_factor(x)
    others = (weights * dp).sum(-1, keepdim=True) + x.dlse.abs()[..., None]
    q, k = (x.q, x.k) if x.qk_norm is None else x.qk_norm.apply(x.q, x.k)
    q, k = (q, k) if x.rope is None else x.rope.rotate(q, k)
    scale = x.q.shape[-1] ** -0.5 if x.scale is None else x.scale
    products = scale * (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT)
    found = terms_of_added(x, weights * (dp + others), products)
    if x.sinks is not None:
        found["dsinks"] = ((x.sinks[:, None] - lse).exp() * others[..., 0]).nan_to_num(0.0).sum((0, 2))
    return found | _norm_terms(x)


def _norm_terms(inputs: Inputs) -> Results:
    """Sums of the absolute terms of the gradients of the weights of a norm: one for each row."""
    norm = inputs.qk_norm
    if norm is None:
        return {}
    given, normalized = norm.weights(), replace(norm, q_weight=None, k_weight=None).apply(inputs.q, inputs.k)
    of_rows = [
        two_dimensional(weight)[:, None].expand(x.shape).detach().requires_grad_()
        for weight, x in zip(given.values(), normalized, strict=True)
    ]
    q, k = (x * weight for x, weight in zip(normalized, of_rows, strict=True))
    out, lse, _ = reference.attention(q, k, inputs.v, **inputs.options | {"qk_norm": None})
    dlse = inputs.dlse.to(lse.dtype).masked_fill(lse == -math.inf, 0.0)
    found = torch.autograd.grad([out, lse], of_rows, [inputs.dout, dlse])
    return {
        f"d{name}": x.abs().sum((0, 2)).sum_to_size(two_dimensional(weight).shape).view(weight.shape)
        for (name, weight), x in zip(given.items(), found, strict=True)
    }


def keep_factor(inputs: Inputs) -> Tensor:
    """The factor of each weight under dropout: 0 or ``1 / (1 - dropout_p)``; 1 without dropout."""
    if inputs.dropout_seed is None:
        return torch.ones((), dtype=inputs.q.dtype, device=inputs.q.device)
    shape = (*inputs.q.shape[:3], inputs.k.shape[2])
    return dropout.keep_mask(inputs.dropout_seed, inputs.dropout_p, *shape).to(inputs.q.dtype) / (1 - inputs.dropout_p)


def check(
    function: Callable[..., object], inputs: Inputs, eager: Callable[[Inputs], Results] = baseline
) -> dict[str, Ratios]:
    """Measure every tensor of ``function``, which has the signature of :func:`fusedattn.attention`.

    `eager` gives the results whose error is the unit of the budget.
    """
    actual = run(cast(AttentionFunction, function), inputs)
    return compare_results(actual, golden(inputs), eager(inputs), inputs.q.dtype, bias_terms(inputs))


@dataclass(frozen=True)
class Measurement:
    """The result of :func:`measure`.

    Attributes:
        inputs: the problem that was solved; `dlse` is 0 if the function gives no gradient through lse.
        ratios: for each tensor that the function gives, its ratios.
        missing: for each tensor that it does not give, the reason.
        notes: for each tensor with NaN or infinities that should not be there, how many and where.
    """

    inputs: Inputs
    ratios: dict[str, Ratios]
    missing: dict[str, str]
    notes: dict[str, str]


def measure(function: Callable[..., object], inputs: Inputs) -> Measurement:
    """Like :func:`check`, for a function that may lack some tensors.

    If the function raises NotImplementedError with a reason, it is called again for less: without lse
    (``return_lse=False``, so that the gradients are those of out alone), without the gradients of terms added to the
    scores, without gradients (no input requires grad), and without either. An out that does not require grad means that
    there are no gradients; an lse that does not, that there are none through lse. If the problem has an option that the
    function has no argument for, the function is not called.
    """
    if unknown := _unknown(function, inputs.options):
        return Measurement(inputs, {}, dict.fromkeys(results_of(inputs), unknown), {})
    refused: dict[tuple[bool, tuple[str, ...]], str] = {}
    leaves = tuple(inputs.leaves)
    choices = tuple(dict.fromkeys((leaves, leaves[: len(GRADIENTS)], ())))
    for needed, lse in itertools.product(choices, (True, False)):
        try:
            found, returned = _forward(cast(AttentionFunction, function), inputs, needed, lse=lse)
            through = [name for name, x in returned.items() if x.requires_grad]
            actual = _with_gradients(found, returned, inputs, through) if needed else returned
        except NotImplementedError as error:
            refused[lse, needed] = str(error)
            continue
        missing = {} if lse else {"lse": refused[True, needed]}
        for more in choices[: choices.index(needed)]:
            missing |= {f"d{name}": refused[lse, more] for name in more if name not in needed}
        if needed and "lse" not in through:
            inputs = without_lse_gradient(inputs)
        return _judge(actual, inputs, missing)
    return Measurement(inputs, {}, dict.fromkeys(results_of(inputs), refused[False, ()]), {})


def _unknown(function: Callable[..., object], options: Mapping[str, object]) -> str | None:
    """Why a function cannot be called with these keyword arguments; None if it can, or if that cannot be known."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # it has no signature
        return None
    if any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    unknown = [name for name in options if name not in parameters]
    return f"{', '.join(unknown)}: no argument of this function" if unknown else None


def without_lse_gradient(inputs: Inputs) -> Inputs:
    """The same problem, with gradients through out alone."""
    return replace(inputs, dlse=torch.zeros_like(inputs.dlse))


def _judge(actual: Results, inputs: Inputs, missing: dict[str, str]) -> Measurement:
    truth, eager = golden(inputs), baseline(inputs)
    blind = (truth["lse"] == -math.inf) | ~inputs.visible().any(-1)  # (batch, nheads_q, seqlen_q)
    by_row = {"out": blind[..., None], "lse": blind, "dq": blind[..., None]}
    notes = {name: _note(x, truth[name], by_row.get(name)) for name, x in actual.items()}
    return Measurement(
        inputs,
        ratios=compare_results(actual, truth, eager, inputs.q.dtype, bias_terms(inputs)),
        missing=missing,
        notes={name: note for name, note in notes.items() if note is not None},
    )
