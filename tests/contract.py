"""Everything the contract of ``attention()`` says about one problem, checked on the kernels and the torch backend.

What a NaN or an infinity may reach follows from what is computed from what (decision 0003). One in a key or value
reaches the queries that see it and, through their gradients, the keys that these see. One in a query or in the
gradient of its output reaches the gradients of the keys that the query sees, and may reach those of other keys of its
head: eager PyTorch, too, multiplies it there by a weight of 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusedattn import testing
from fusedattn.testing import Inputs, Results
from tests.conftest import (
    DEVICE,
    TORCH_LIMIT,
    assert_equal,
    assert_results_accurate,
    sum_of_terms,
    torch_attention_beside_lse,
    triton_attention,
)
from tests.hostile import Problem


def check(problem: Problem) -> bool:
    """Raise AssertionError, with the command that reproduces it, unless both backends do what they promise.

    Returns:
        Whether the numbers could be compared with the truth: False where they overflow on the way.
    """
    try:
        return _check(problem)
    except Exception as error:
        raise AssertionError(f"{problem.command}\n{type(error).__name__}: {error}") from error


def _check(problem: Problem) -> bool:
    fits = _check_function(triton_attention, problem, DEVICE, 1.0)
    # The torch backend promises less: not the strides, a wider budget; denormals, overflow and a NaN in dout are left
    # to torch's own kernel.
    limit, poison = TORCH_LIMIT[problem.case.dtype], tuple(p for p in problem.poison if p[0] != "dout")
    tamer = replace(problem, magnitudes={}, poison=poison)
    try:
        _check_function(torch_attention_beside_lse, tamer, "cpu", limit, strides=False)
    except AssertionError as error:
        raise AssertionError(f"torch backend: {error}") from error
    return fits


def _check_function(
    function: Callable[..., Any], problem: Problem, device: str, limit: float, *, strides: bool = True
) -> bool:
    inputs = problem.inputs(device)
    before = {name: _memory(x).clone() for name, x in _tensors(inputs).items()}
    with _uninitialised_is_nan():
        results = _run(function, inputs, "qkv", problem.dlse)
        again = _run(function, inputs, problem.needed, problem.dlse)
        alone = function(inputs.q, inputs.k, inputs.v, mask=inputs.mask, rope=inputs.rope, scale=inputs.scale)
    for name, x in _tensors(inputs).items():
        assert torch.equal(_memory(x), before[name]), f"{name} was modified, or the memory around it"
    _assert_made_alike(results, inputs, strides)
    # The second run, of some of the gradients; without lse and without gradients.
    assert_equal(again, {name: results[name] for name in again})
    assert_equal({"out without lse": alone}, {"out without lse": results["out"]})

    reach = Reach.of(inputs, problem.dlse)
    _assert_empty_is_zero(results, reach)
    if inputs.q.numel() == 0:
        return True
    clean = _clean(inputs if problem.dlse else replace(inputs, dlse=torch.zeros_like(inputs.dlse)))
    truth, eager = testing.golden(clean), testing.baseline(clean)
    fits = _fits(clean, truth, eager)
    _assert_nothing_is_lost(results, inputs, reach, problem, fits)
    if fits:
        # Of what no NaN or infinity may reach.
        left_out = {name: _like(reach.may[name], x) for name, x in results.items()}
        assert_results_accurate(results, clean, truth, eager, left_out=left_out, limit=limit)
    return fits


def _run(function: Callable[..., Any], inputs: Inputs, needed: str, with_dlse: bool) -> Results:
    """out, lse and the gradients of the inputs that need one."""
    x = {name: getattr(inputs, name).detach().requires_grad_(name in needed) for name in "qkv"}
    out, lse = function(**x, mask=inputs.mask, rope=inputs.rope, scale=inputs.scale, return_lse=True)
    with_dlse = with_dlse and lse.requires_grad  # eager: not where only v does
    outputs, douts = ((out, lse), (inputs.dout, inputs.dlse)) if with_dlse else ((out,), (inputs.dout,))
    grads = torch.autograd.grad(outputs, [x[name] for name in needed], douts)
    gradients = {f"d{name}": grad for name, grad in zip(needed, grads, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **gradients}


@contextmanager
def _uninitialised_is_nan() -> Iterator[None]:
    """Memory that is allocated and not filled starts as NaN, and integers as their largest."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _tensors(inputs: Inputs) -> dict[str, Tensor]:
    found = {name: getattr(inputs, name) for name in ("q", "k", "v", "dout", "dlse")}
    found |= {name: getattr(inputs.mask, name) for name in ("valid", "allowed")}
    found |= {name: getattr(inputs.rope, name, None) for name in ("cos", "sin", "positions_q", "positions_k")}
    return {name: x for name, x in found.items() if x is not None}


def _memory(x: Tensor) -> Tensor:
    """All bytes of the memory that ``x`` is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _assert_made_alike(results: Results, inputs: Inputs, strides: bool) -> None:
    """Shapes, dtypes and, with `strides`, these; every result has memory of its own."""
    for name, like in (("out", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
        x, y = results[name], getattr(inputs, like)
        assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device), f"{name} is {x.shape} {x.dtype}"
        if not strides:
            continue
        assert _is_dense(x), f"{name} has strides {x.stride()}, with gaps or overlaps"
        if _is_dense(y) and y.numel() > 0:
            assert _strides(x) == _strides(y), f"{name} has strides {x.stride()}, {like} {y.stride()}"
    lse = results["lse"]
    dtype = torch.promote_types(inputs.q.dtype, torch.float32)
    assert (lse.shape, lse.dtype) == (inputs.q.shape[:3], dtype), f"lse is {lse.shape} {lse.dtype}"
    own = [x.untyped_storage().data_ptr() for x in results.values() if x.numel()]
    others = {x.untyped_storage().data_ptr() for x in _tensors(inputs).values()}
    assert len(set(own) - others) == len(own), "results share memory, with each other or with the inputs"


def _strides(x: Tensor) -> list[int]:
    """Those that matter: of dimensions with more than one element."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def _is_dense(x: Tensor) -> bool:
    """Whether ``x`` uses each element of its part of the memory exactly once."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    dims = sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)
    apart = all(b[0] >= a[0] * a[1] for a, b in itertools.pairwise(dims)) and all(s > 0 for s, _ in dims)
    return x.numel() == 0 or (apart and extent == x.numel())


@dataclass(frozen=True)
class Reach:
    """Where a NaN or an infinity of the inputs must show in the results, and where it may.

    Attributes:
        sees: ``(batch, nheads_q, seqlen_q)``, queries that see a key.
        seen: ``(batch, nheads_kv, seqlen_k)``, keys that a query sees.
        must, may: for each result, its rows.
    """

    sees: Tensor
    seen: Tensor
    must: dict[str, Tensor]
    may: dict[str, Tensor]

    @classmethod
    def of(cls, inputs: Inputs, with_dlse: bool) -> Reach:
        """Of these inputs; `with_dlse` if a gradient comes back to lse."""
        batch, nheads_q, seqlen_q, _ = inputs.q.shape
        nheads_kv, seqlen_k = inputs.k.shape[1:3]
        group = nheads_q // nheads_kv
        pairs = inputs.mask.dense(seqlen_q, seqlen_k, device=inputs.q.device).expand(batch, nheads_q, -1, -1)
        sees = pairs.any(-1)

        def per_key(x: Tensor) -> Tensor:  # (batch, nheads_q, ...) -> (batch, nheads_kv, ...)
            return x.unflatten(1, (nheads_kv, group)).any(2)

        def rows_that_see(keys: Tensor) -> Tensor:
            return (pairs & keys.repeat_interleave(group, 1)[:, :, None]).any(-1)

        def keys_seen_by(rows: Tensor) -> Tensor:
            return per_key((pairs & rows[..., None]).any(-2))

        def head_of(rows: Tensor) -> Tensor:
            return per_key(rows.any(-1))[..., None]

        bad = {name: ~getattr(inputs, name).isfinite().all(-1) for name in ("q", "k", "v", "dout")}
        weights = rows_that_see(bad["k"]) | (bad["q"] & sees)
        out = weights | rows_that_see(bad["v"])
        scores = out | (bad["dout"] & sees)  # their gradient
        if with_dlse:
            scores = scores | (~inputs.dlse.isfinite() & sees)
        must = {
            "out": out,
            "lse": weights,
            "dq": scores,
            "dk": keys_seen_by(scores),
            "dv": keys_seen_by(weights | (bad["dout"] & sees)),
        }
        may = {**must, "dk": must["dk"] | head_of(bad["q"] & sees), "dv": must["dv"] | head_of(bad["dout"] & sees)}
        return cls(sees, per_key(pairs.any(-2)), must, may)


def _like(rows: Tensor, x: Tensor) -> Tensor:
    return rows[..., None] if x.dim() == 4 else rows


def _assert_empty_is_zero(results: Results, reach: Reach) -> None:
    """Queries that see nothing, and keys that nobody sees."""
    empty = ~reach.sees
    for name, rows in (
        ("out", empty),
        ("dq", empty),
        ("dk", ~reach.seen & ~reach.may["dk"]),
        ("dv", ~reach.seen & ~reach.may["dv"]),
    ):
        assert (results[name][rows.expand(results[name].shape[:3])] == 0).all(), f"{name} of what sees nothing is not 0"
    assert not results["out"][empty].signbit().any(), "out of what sees nothing is -0.0"
    assert (results["lse"][empty] == -math.inf).all(), "lse of what sees nothing is not -inf"


def _assert_nothing_is_lost(results: Results, inputs: Inputs, reach: Reach, problem: Problem, fits: bool) -> None:
    """A NaN shows wherever it must; an infinity is never as if it were not there."""
    nan = {name: x.isnan().any(-1) if x.dim() == 4 else x.isnan() for name, x in results.items()}
    assert not (nan["out"] & ~nan["dq"]).any(), "out is NaN where dq is not"
    infinite = {name for name, value, _ in problem.poison if value != "nan"}
    if not fits or infinite & {"q", "k"}:  # the weight of a score of -inf is 0
        return
    assert not (results["lse"][reach.sees] == -math.inf).any(), "lse is -inf of a query that sees something"
    for name, rows in reach.must.items():
        lost = rows & ~(
            nan[name] if not infinite else ~results[name].isfinite().all(-1) if name != "lse" else nan[name]
        )
        assert not lost.any(), f"{name}: a NaN or infinity is lost in (batch, head, row) {lost.nonzero()[:3].tolist()}"


def _clean(inputs: Inputs) -> Inputs:
    """With 0 for each NaN and infinity."""
    names = ("q", "k", "v", "dout", "dlse")
    return replace(inputs, **{name: getattr(inputs, name).nan_to_num(0.0, 0.0, 0.0) for name in names})


def _fits(clean: Inputs, truth: Results, eager: Results) -> bool:
    """Whether neither the results nor the sums on the way to them overflow, here or in eager PyTorch."""
    largest = max((x.max().item() for x in sum_of_terms(clean).values() if x.numel()), default=0.0)
    if not largest <= torch.finfo(clean.q.dtype).max / 16:
        return False
    return all(bool((eager[name].isfinite() | ~truth[name].isfinite()).all()) for name in truth)
