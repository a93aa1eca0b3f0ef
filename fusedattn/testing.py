"""The error budget: how far an attention function may be from the truth, and the tools to measure it.

The truth is :mod:`fusedattn.reference` in float64. A function passes if, for the output, lse and every gradient,
its error is at most 1.5 times (maximum) and 1.1 times (mean) that of eager PyTorch in the same dtype, and its worst
row, relative to the size of the row, at most 1.5 times eager's worst. One unit in the last place is always granted.
:func:`compare` has the formulas.

    >>> import torch, fusedattn
    >>> from fusedattn import testing
    >>> inputs = testing.make_inputs(testing.Case(causal="bottom_right", dtype=torch.float32))
    >>> testing.check(fusedattn.attention, inputs)["dq"].ok
    True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from fusedattn import masks, reference
from fusedattn.masks import CausalAlign, Mask
from fusedattn.rope import Rope

MAX_FACTOR = 1.5
MEAN_FACTOR = 1.1
GRADIENTS = ("dq", "dk", "dv")
TENSORS = ("out", "lse", *GRADIENTS)

Results = dict[str, Tensor]
AttentionFunction = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """One attention problem. Everything in it is plain data, so a case prints as the call that makes it."""

    name: str = ""
    batch: int = 2
    nheads_q: int = 4
    nheads_kv: int = 2
    seqlen_q: int = 48
    seqlen_k: int = 48
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    causal: CausalAlign | None = None
    padding: Literal["right", "left", "uneven"] | None = None
    empty_batch: bool = False  # with padding: the last batch sees no key at all
    boolean: Literal["full", "broadcast"] | None = None
    rope: Literal["half", "interleaved"] | None = None
    rotary_dim: int | None = None  # default: head_dim
    rope_tables: Literal["shared", "per_batch"] = "shared"
    rope_positions: bool = False  # random ones, per batch, rather than the default
    scale: float | None = None
    offset: float = 0.0  # of what the keys, and the values, of a head have in common; lse then gets no gradient
    seed: int = 0


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case; `dout` and `dlse` are the gradients that come back to out and lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    mask: Mask
    rope: Rope | None
    scale: float | None

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same problem in another dtype."""
        q, k, v, dout = (x.to(dtype) for x in (self.q, self.k, self.v, self.dout))
        lse_dtype = torch.promote_types(dtype, torch.float32)
        return replace(self, q=q, k=k, v=v, dout=dout, dlse=self.dlse.to(lse_dtype))


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Normally distributed inputs of a case, the same on every device."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, case.dtype)

    q = normal(case.batch, case.nheads_q, case.seqlen_q, case.head_dim)
    k = normal(case.batch, case.nheads_kv, case.seqlen_k, case.head_dim)
    v = normal(case.batch, case.nheads_kv, case.seqlen_k, case.head_dim)
    dout = normal(case.batch, case.nheads_q, case.seqlen_q, case.head_dim)
    dlse = normal(case.batch, case.nheads_q, case.seqlen_q).to(torch.promote_types(case.dtype, torch.float32))
    mask = _make_mask(case, generator).to(device)
    rope = _make_rope(case, generator)
    if case.offset:
        shape = (case.batch, case.nheads_kv, 1, case.head_dim)
        k, v = k + case.offset * normal(*shape), v + case.offset * normal(*shape)
        dlse = torch.zeros_like(dlse)  # its part in dq would hide what does not cancel there
    return Inputs(q, k, v, dout, dlse, mask, None if rope is None else rope.to(device), case.scale)


def _make_mask(case: Case, generator: torch.Generator) -> Mask:
    mask = masks.full() if case.causal is None else masks.causal(case.causal)
    if case.padding is not None:
        positions = torch.arange(case.seqlen_k)
        lengths = torch.randint(1, case.seqlen_k + 1, (case.batch, 1), generator=generator)
        if case.padding == "right":
            valid = positions < lengths
        elif case.padding == "left":
            valid = positions >= case.seqlen_k - lengths
        else:
            valid = torch.rand(case.batch, case.seqlen_k, generator=generator) < 0.7
        if case.empty_batch:
            valid[-1] = False
        mask = mask & masks.padding(valid)
    if case.boolean is not None:
        shape = (case.batch, case.nheads_q, case.seqlen_q, case.seqlen_k)
        if case.boolean == "broadcast":
            shape = (1, case.nheads_q, 1, case.seqlen_k)
        mask = mask & masks.boolean(torch.rand(shape, generator=generator) < 0.6)
    return mask


def _make_rope(case: Case, generator: torch.Generator) -> Rope | None:
    if case.rope is None:
        return None
    n_positions = 2 * max(case.seqlen_q, case.seqlen_k)
    rope = Rope.from_theta(case.rotary_dim or case.head_dim, n_positions, interleaved=case.rope == "interleaved")
    if case.rope_tables == "per_batch":
        # Scaled, so that the transpose of the rotation is not its inverse.
        factor = 0.5 + torch.rand(case.batch, 1, 1, generator=generator)
        rope = replace(rope, cos=rope.cos * factor, sin=rope.sin * factor)
    if case.rope_positions or case.seqlen_q > case.seqlen_k:
        rope = rope.at(
            torch.randint(0, n_positions, (case.batch, case.seqlen_q), generator=generator),
            torch.randint(0, n_positions, (case.batch, case.seqlen_k), generator=generator),
        )
    return rope


def run(function: AttentionFunction, inputs: Inputs) -> Results:
    """Forward and backward of ``function(q, k, v, mask=, rope=, scale=, return_lse=True) -> (out, lse)``.

    Returns:
        ``out lse dq dk dv``, detached. Rows whose lse is ``-inf`` get no gradient through lse.

    Raises:
        TypeError, ValueError: the function returned something else than ``(out, lse)`` in their shapes.
        NotImplementedError: its out has no gradient.
    """
    leaves, returned = _forward(function, inputs)
    return _with_gradients(leaves, returned, inputs, through=("out", "lse"))


def _forward(
    function: AttentionFunction, inputs: Inputs, *, lse: bool = True, gradients: bool = True
) -> tuple[list[Tensor], Results]:
    """q, k, v as leaves of a new graph, and what the function returned: out and, if asked for, lse."""
    leaves = [x.detach().requires_grad_(gradients) for x in (inputs.q, inputs.k, inputs.v)]
    got: Any = function(*leaves, mask=inputs.mask, rope=inputs.rope, scale=inputs.scale, return_lse=lse)
    names = ("out", "lse") if lse else ("out",)
    tensors: tuple[Any, ...] = tuple(got) if lse and isinstance(got, tuple | list) else (got,)
    if len(tensors) != len(names) or not all(isinstance(x, Tensor) for x in tensors):
        kinds = ", ".join(type(x).__name__ for x in tensors)
        raise TypeError(f"function: returned ({kinds}) with return_lse={lse}, allowed is ({', '.join(names)})")
    returned = dict(zip(names, tensors, strict=True))
    for name, shape in (("out", inputs.q.shape), ("lse", inputs.q.shape[:-1])):
        if name in returned and returned[name].shape != shape:
            raise ValueError(
                f"function: returned {name} of shape {tuple(returned[name].shape)}, allowed is {tuple(shape)}"
            )
    if gradients and not returned["out"].requires_grad:
        raise NotImplementedError("function: its out does not require grad, so that it has no backward")
    return leaves, returned


def _with_gradients(leaves: list[Tensor], returned: Results, inputs: Inputs, through: Sequence[str]) -> Results:
    """What was returned, detached, with the gradients ``dq dk dv`` through some of it."""
    back = {"out": inputs.dout}
    if "lse" in returned:
        lse = returned["lse"].detach()
        back["lse"] = inputs.dlse.to(lse.dtype).masked_fill(lse == -math.inf, 0.0)
    found = torch.autograd.grad([returned[name] for name in through], leaves, [back[name] for name in through])
    return {name: x.detach() for name, x in returned.items()} | dict(zip(GRADIENTS, found, strict=True))


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
    """Errors of one tensor over those of the baseline, and the share of the budget that they use (1 = all)."""

    max: float
    mean: float
    row: float
    used: float

    @property
    def ok(self) -> bool:
        """Whether the budget is kept."""
        return self.used <= 1.0


def compare(actual: Tensor, golden: Tensor, baseline: Tensor) -> Ratios:
    """Measure ``actual`` against the budget.

    Args:
        actual: what a function computed, of any shape ``(..., n)`` whose last dimension holds the rows that are
            judged one by one: head_dim for out, dq, dk, dv ``(batch, nheads, seqlen, head_dim)``, the sequence for
            lse ``(batch, nheads_q, seqlen_q)``.
        golden: the truth, float64, of the same shape. Where it is not finite, actual must be the same NaN or infinity.
        baseline: what eager PyTorch computed, of the same shape, in the dtype that actual must have.

    Returns:
        The ratios of the errors, and the largest share of its allowance that any of these uses, with ``ulp`` the
        distance from 1 to the next number of the dtype and ``size`` of a row its root mean square::

            max    max |error|             max(1.5 * that of the baseline, ulp * max |golden|)
            mean   mean |error|            max(1.1 * that of the baseline, ulp * mean |golden|)
            row    max |error| of a row    max(1.5 * size * worst of the baseline, ulp * max |golden|)

        where the worst of the baseline is the largest of its errors in a row over the size of that row. Rows as good
        as zero, no larger than the one ulp that every row is granted, are judged among themselves: their errors by
        the largest of the baseline's.

    Raises:
        ValueError: the shapes differ.
        TypeError: golden is not float64, or actual not in the dtype of baseline.
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
    ulp = torch.finfo(actual.dtype).eps
    finite = golden.isfinite()
    if not _same_kind(actual, golden).all():
        return Ratios(math.inf, math.inf, math.inf, math.inf)
    truth = torch.where(finite, golden, 0.0)
    error = torch.where(finite, actual.double() - truth, 0.0).abs()
    eager = torch.where(finite & baseline.isfinite(), baseline.double() - truth, 0.0).abs()

    largest, average = truth.abs().max(), truth.abs().mean()
    max_used = error.max() / torch.maximum(MAX_FACTOR * eager.max(), ulp * largest)
    mean_used = error.mean() / torch.maximum(MEAN_FACTOR * eager.mean(), ulp * average)

    # Rows of a causal result differ in size by orders of magnitude: each is judged relative to itself.
    floor = ulp * largest
    size = truth.pow(2).mean(dim=-1).sqrt()
    row_error, row_eager = error.amax(dim=-1), eager.amax(dim=-1)
    # But a row that ought to be zero is infinitely wrong, relative to itself, and would allow the others anything.
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
    """Bool: where both are finite, or both the same NaN or infinity."""
    same = (actual == golden) | (actual.isnan() & golden.isnan())
    return torch.where(golden.isfinite(), actual.isfinite(), same)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """``a / b`` with 0 / 0 = 0."""
    return torch.where(a == 0, 0.0, a / b)


def assert_within_budget(actual: Tensor, golden: Tensor, baseline: Tensor, name: str = "tensor") -> None:
    """Raise AssertionError, with the measured ratios, where ``actual`` exceeds the budget.

    Args:
        actual, golden, baseline: one shape ``(..., n)``; golden float64, the others one dtype; see :func:`compare`,
            which also has the formulas and what is raised for tensors that cannot be compared.
        name: of the tensor, for the message.
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
    """A sentence if elements are NaN or infinite and should not be, or the other way round.

    `blind`: bool, broadcastable to the tensors, where the rows see nothing.
    """
    wrong = ~_same_kind(actual, golden)
    if not wrong.any():
        return None
    note = f"{int(wrong.sum())} of {wrong.numel()} elements are NaN or infinite where the truth is not, or conversely"
    if blind is not None and (wrong & blind).any():
        note += f"; {int((wrong & blind).sum())} of them in rows that see nothing"
    return note


def check(function: Callable[..., object], inputs: Inputs) -> dict[str, Ratios]:
    """Measure every tensor of ``function``, which has the signature of :func:`fusedattn.attention`."""
    actual = run(cast(AttentionFunction, function), inputs)
    truth, eager = golden(inputs), baseline(inputs)
    return {name: compare(actual[name], truth[name], eager[name]) for name in TENSORS}


@dataclass(frozen=True)
class Measurement:
    """What :func:`measure` found.

    Attributes:
        inputs: the problem that was solved: with `dlse` 0 where the function gives no gradient through lse.
        ratios: of each tensor that the function gives.
        missing: for each tensor that it does not give, its reason.
        notes: for each tensor with NaN or infinities that should not be there, how many and where.
    """

    inputs: Inputs
    ratios: dict[str, Ratios]
    missing: dict[str, str]
    notes: dict[str, str]


def measure(function: Callable[..., object], inputs: Inputs) -> Measurement:
    """Like :func:`check`, for a function that need not give every tensor.

    It says so by raising NotImplementedError with a reason: it is then asked without lse (``return_lse=False``, so that
    dq, dk and dv are those of out alone), without gradients (inputs that require none), and without both. An output
    that does not require grad says that there are no gradients, such an lse that there are none through it.
    """
    refused: dict[tuple[bool, bool], str] = {}
    for lse, gradients in ((True, True), (False, True), (True, False), (False, False)):
        try:
            leaves, returned = _forward(cast(AttentionFunction, function), inputs, lse=lse, gradients=gradients)
            through = [name for name, x in returned.items() if x.requires_grad]
            actual = _with_gradients(leaves, returned, inputs, through) if gradients else returned
        except NotImplementedError as error:
            refused[lse, gradients] = str(error)
            continue
        missing = {} if lse else {"lse": refused[True, gradients]}
        if not gradients:
            missing |= dict.fromkeys(GRADIENTS, refused[lse, True])
        elif "lse" not in through:
            inputs = without_lse_gradient(inputs)
        return _judge(actual, inputs, missing)
    return Measurement(inputs, {}, dict.fromkeys(TENSORS, refused[False, False]), {})


def without_lse_gradient(inputs: Inputs) -> Inputs:
    """The same problem, with gradients through out alone."""
    return replace(inputs, dlse=torch.zeros_like(inputs.dlse))


def _judge(actual: Results, inputs: Inputs, missing: dict[str, str]) -> Measurement:
    truth, eager = golden(inputs), baseline(inputs)
    blind = truth["lse"] == -math.inf  # (batch, nheads_q, seqlen_q)
    by_row = {"out": blind[..., None], "lse": blind, "dq": blind[..., None]}
    notes = {name: _note(x, truth[name], by_row.get(name)) for name, x in actual.items()}
    return Measurement(
        inputs,
        ratios={name: compare(x, truth[name], eager[name]) for name, x in actual.items()},
        missing=missing,
        notes={name: note for name, note in notes.items() if note is not None},
    )


# One case a feature, and their combination; small enough for Triton's interpreter.
CASES = (
    Case("full attention", nheads_kv=4),
    Case("causal", causal="bottom_right", nheads_kv=4),
    Case("causal, top-left, more keys", causal="top_left", seqlen_k=75),
    Case("causal, more queries than keys", causal="bottom_right", seqlen_q=61, seqlen_k=40),
    Case("right padding", padding="right"),
    Case("left padding", padding="left", causal="bottom_right"),
    Case("uneven padding, one batch empty", batch=3, padding="uneven", empty_batch=True),
    Case("boolean mask", boolean="full"),
    Case("boolean mask, broadcast", boolean="broadcast"),
    Case("cross attention", seqlen_q=21, seqlen_k=83),
    Case("grouped queries, 8:2", nheads_q=8, nheads_kv=2, causal="bottom_right"),
    Case("multi-query, 6:1", nheads_q=6, nheads_kv=1),
    Case("head_dim 80", head_dim=80, seqlen_q=33, seqlen_k=33),
    Case("head_dim 256", head_dim=256, seqlen_q=33, seqlen_k=33, nheads_q=2, nheads_kv=1),
    Case("RoPE", rope="half", causal="bottom_right"),
    Case("RoPE, interleaved", rope="interleaved", causal="bottom_right"),
    Case("RoPE, partial, 24 of 40", rope="half", head_dim=40, rotary_dim=24),
    Case("RoPE, tables and positions per batch", rope="interleaved", rope_tables="per_batch", rope_positions=True),
    Case("scale", scale=0.37),
    Case("negative scale", scale=-0.2, causal="bottom_right"),
    Case("keys and values with a common part", offset=1.0, causal="bottom_right"),
    Case(
        "everything together", batch=3, seqlen_q=45, seqlen_k=70, causal="bottom_right", padding="uneven",
        empty_batch=True, boolean="full", rope="interleaved", rotary_dim=20, rope_tables="per_batch",
        rope_positions=True, scale=0.3,
    ),
)  # fmt: skip
