"""Check the whole contract of ``attention()`` on one problem, for the kernels and the torch backend.

The results that a NaN or an infinity may reach follow from the dependences of the computation (decision 0003). One in a
key or value reaches the queries that see it and, through their gradients, the keys that these see. One in a query or in
the gradient of its output reaches the gradients of the keys that the query sees, and may reach those of other keys of
its head: eager PyTorch also multiplies it there by a weight of 0. One in a bias reaches the queries to whose visible
scores it is added, one in a sink those of its head. A bias of -inf counts as finite; it hides its pairs.
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

from fusedattn import reference, testing
from fusedattn.testing import Inputs, Results
from tests.conftest import (
    DEVICE,
    TORCH_LIMIT,
    assert_equal,
    assert_results_accurate,
    sum_of_terms,
    torch_attention,
    torch_attention_beside_lse,
    triton_attention,
)
from tests.helpers.hostile import FuzzProblem


def check(problem: FuzzProblem) -> bool:
    """Raise AssertionError, with the command that reproduces it, unless both backends keep the contract.

    Returns:
        Whether the numbers could be compared with the truth: False if intermediate numbers overflow.
    """
    try:
        return _check(problem)
    except Exception as error:
        raise AssertionError(f"{problem.command}\n{type(error).__name__}: {error}") from error


def _check(problem: FuzzProblem) -> bool:
    fits = _check_function(triton_attention, problem, DEVICE, 1.0)
    # The torch backend promises less: no strides, a wider budget, the same numbers only from the same kernel of torch;
    # denormals, overflow and a NaN in dout or dlse are left to that kernel.
    limit, poison = TORCH_LIMIT[problem.case.dtype], tuple(p for p in problem.poison if p[0] not in ("dout", "dlse"))
    tamer = replace(problem, magnitudes={}, poison=poison)
    for function in (torch_attention, torch_attention_beside_lse):  # with lse, another code path runs
        try:
            _check_function(function, tamer, "cpu", limit, strides=False)
        except AssertionError as error:
            raise AssertionError(f"torch backend: {error}") from error
    return fits


def _check_function(
    function: Callable[..., Any], problem: FuzzProblem, device: str, limit: float, *, strides: bool = True
) -> bool:
    inputs = problem.inputs(device)
    before = {name: memory_of(x).clone() for name, x in inputs.tensors().items()}
    with uninitialised_is_nan():
        results = _run(function, inputs, list(inputs.leaves), problem.dlse)
        again = _run(function, inputs, problem.needed_of(inputs), problem.dlse)
        alone = function(inputs.q, inputs.k, inputs.v, **inputs.options)
    for name, x in inputs.tensors().items():
        assert torch.equal(memory_of(x), before[name]), f"{name} was modified, or the memory around it"
    _assert_layouts(results, inputs, strides)
    # Further runs: with some of the gradients; without lse and without gradients.
    found = [results]
    same_kernel = inputs.q.shape[3] == inputs.v.shape[3] and all(name != "q" for name, *_ in problem.poison)
    if strides or (same_kernel and not {"bias", "relative", "slopes"} & set(inputs.leaves)):
        assert_equal(again, {name: results[name] for name in again})
        assert_equal({"out without lse": alone}, {"out without lse": results["out"]})
    else:  # torch runs other kernels if a bias, values of another width, or a NaN in a query get no gradient
        found += [{**results, **again}, {**results, "out": alone}]

    reach = Reach.of(inputs, problem.dlse)
    for results in found:
        _assert_empty_is_zero(results, inputs, reach.hidden, reach)
    if inputs.q.numel() == 0:
        return True
    clean = _clean(inputs if problem.dlse else testing.without_lse_gradient(inputs))
    truth, eager = testing.golden(clean), testing.baseline(clean)
    fits = _fits(clean, truth, eager)
    left_out = {name: _like(rows, name) for name, rows in reach.may.items()}  # rows that a NaN or infinity may reach
    for results in found:
        _assert_nothing_is_lost(results, inputs, reach, problem, fits)
        if fits:
            _assert_empty_is_zero(results, inputs, reach.weightless, reach)
            assert_results_accurate(results, clean, truth, eager, left_out=left_out, limit=limit)
    return fits


def _run(function: Callable[..., Any], inputs: Inputs, needed: list[str], with_dlse: bool) -> Results:
    """out, lse and the gradients of the leaves that need one."""
    leaves = {name: x.detach().requires_grad_(name in needed) for name, x in inputs.leaves.items()}
    x = inputs.with_leaves(leaves)
    out, lse = function(q=x.q, k=x.k, v=x.v, **x.options, return_lse=True)
    with_dlse = with_dlse and lse.requires_grad  # eager: lse does not if only v does
    outputs, douts = ((out, lse), (inputs.dout, inputs.dlse)) if with_dlse else ((out,), (inputs.dout,))
    grads = torch.autograd.grad(outputs, [leaves[name] for name in needed], douts)
    gradients = {f"d{name}": grad for name, grad in zip(needed, grads, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **gradients}


@contextmanager
def uninitialised_is_nan() -> Iterator[None]:
    """Inside, uninitialised memory holds NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def memory_of(x: Tensor) -> Tensor:
    """All bytes of the memory that ``x`` is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _assert_layouts(results: Results, inputs: Inputs, strides: bool) -> None:
    """Check shapes, dtypes and, with `strides`, strides; and that no results share memory."""
    rows, head_dim_v = inputs.q.shape[:3], inputs.v.shape[3]
    out_like = inputs.q if inputs.q.shape[3] == head_dim_v else inputs.q.new_empty(*rows, head_dim_v)
    for name, y in (("out", out_like), *((f"d{name}", x) for name, x in inputs.leaves.items())):
        x = results[name]
        assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device), f"{name} is {x.shape} {x.dtype}"
        if not strides or name not in testing.TENSORS:
            continue
        assert _is_dense(x), f"{name} has strides {x.stride()}, with gaps or overlaps"
        if _is_dense(y) and y.numel() > 0 and (name != "out" or y is inputs.q):
            like = "q" if name == "out" else name[1:]
            assert _strides(x) == _strides(y), f"{name} has strides {x.stride()}, {like} {y.stride()}"
    lse = results["lse"]
    dtype = torch.promote_types(inputs.q.dtype, torch.float32)
    assert (lse.shape, lse.dtype) == (inputs.q.shape[:3], dtype), f"lse is {lse.shape} {lse.dtype}"
    own = [x.untyped_storage().data_ptr() for x in results.values() if x.numel()]
    others = {x.untyped_storage().data_ptr() for x in inputs.tensors().values()}
    assert len(set(own) - others) == len(own), "results share memory, with each other or with the inputs"


def _strides(x: Tensor) -> list[int]:
    """The strides of dimensions with more than one element."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def _is_dense(x: Tensor) -> bool:
    """Whether ``x`` uses each element of its part of the memory exactly once."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    dims = sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)
    apart = all(b[0] >= a[0] * a[1] for a, b in itertools.pairwise(dims)) and all(s > 0 for s, _ in dims)
    return x.numel() == 0 or (apart and extent == x.numel())


@dataclass(frozen=True)
class Hidden:
    """The results that must be exactly 0, because all of their pairs are hidden.

    Attributes:
        queries: ``(batch, nheads_q, seqlen_q)``.
        dq: likewise; fewer if all heads of a token share a norm.
        keys: ``(batch, nheads_kv, seqlen_k)``, likewise, for dk.
        added: for each gradient of a bias, sink or learned tensor, a mask in its shape.
    """

    queries: Tensor
    dq: Tensor
    keys: Tensor
    added: dict[str, Tensor]

    @classmethod
    def of(cls, pairs: Tensor, inputs: Inputs) -> Hidden:
        """The hidden results if `pairs` are all visible pairs."""
        queries, keys = pairs.any(-1), per_key(pairs.any(-2), inputs)
        sums = _in_sums(inputs, pairs) | _in_weights(inputs, queries, keys)
        queries, keys = across_heads(queries, inputs), across_heads(keys, inputs)
        return cls(~pairs.any(-1), ~queries, ~keys, {name: ~x for name, x in sums.items()})


@dataclass(frozen=True)
class Reach:
    """The places where a NaN or an infinity of the inputs must show in the results, and where it may.

    Attributes:
        hidden: results that the mask hides.
        weightless: results that the mask or a bias of -inf hides.
        must, may: for each result, its rows; its elements if it has no rows of head_dim.
    """

    hidden: Hidden
    weightless: Hidden
    must: dict[str, Tensor]
    may: dict[str, Tensor]

    @classmethod
    def of(cls, inputs: Inputs, with_dlse: bool) -> Reach:
        """The reach for these inputs; `with_dlse` if lse gets a gradient."""
        pairs = inputs.visible()
        bias = torch.zeros_like(pairs, dtype=torch.float64)
        if inputs.bias is not None:
            bias = inputs.bias.dense(*pairs.shape[2:]).expand(pairs.shape)
        live = pairs & (bias != -math.inf)
        added = pairs & (bias.isnan() | (bias == math.inf))
        kept = live & (testing.keep_factor(inputs) != 0)
        return cls(
            Hidden.of(pairs, inputs),
            Hidden.of(live, inputs),
            must=_reached(inputs, live, kept, added, with_dlse),
            may=_reached(inputs, pairs, pairs, added, with_dlse, everywhere=True),
        )


def _in_sums(inputs: Inputs, pairs: Tensor) -> dict[str, Tensor]:
    """Masks of the elements, in gradients of biases, sinks and learned tensors, with a term from one of these pairs."""
    found = {name: x != 0 for name, x in testing.through_bias(inputs, pairs.double()).items()}
    by_head = pairs.any(-1).any(-1)  # (batch, nheads_q)
    if "slopes" in inputs.leaves:
        shape = inputs.leaves["slopes"].shape
        found["dslopes"] = by_head.double().sum_to_size(shape) > 0
    if "learned" in inputs.leaves:  # a gain for each head
        found["dlearned"] = by_head.any(0)
    return found


def _in_weights(inputs: Inputs, queries: Tensor, keys: Tensor) -> dict[str, Tensor]:
    """Masks of the elements, in gradients of the weights of a norm, with a term from one of these rows."""
    found = {}
    for name, rows in (("q_weight", queries), ("k_weight", keys)):
        if name in inputs.leaves:
            weight = inputs.leaves[name]
            of_heads = rows.any(-1).any(0)[:, None]  # (nheads, 1)
            of_heads = of_heads if weight.dim() == 2 else of_heads.any(0)
            found[f"d{name}"] = of_heads.expand(weight.shape)
    return found


def across_heads(rows: Tensor, inputs: Inputs) -> Tensor:
    """``(batch, nheads, rows)``, with True for all heads of a token if it is so for one and they share a norm."""
    if inputs.qk_norm is None or not inputs.qk_norm.across_heads:
        return rows
    return rows.any(1, keepdim=True).expand(rows.shape)


def per_key(x: Tensor, inputs: Inputs) -> Tensor:
    """``(batch, nheads_q, ...)`` -> ``(batch, nheads_kv, ...)``: True if True for any query head of a group."""
    nheads_kv = inputs.k.shape[1]
    return x.unflatten(1, (nheads_kv, x.shape[1] // nheads_kv)).any(2)


def _reached(
    inputs: Inputs, pairs: Tensor, kept: Tensor, added: Tensor, with_dlse: bool, *, everywhere: bool = False
) -> dict[str, Tensor]:
    """The rows of each result that depend on a NaN or an infinity through `pairs`, of which dropout keeps `kept`.

    `added` are the pairs with such a bias. `everywhere` includes rows reached by a product with 0.
    """
    group = inputs.q.shape[1] // inputs.k.shape[1]
    sees = pairs.any(-1)

    def rows_that_see(keys: Tensor, pairs: Tensor) -> Tensor:
        return (pairs & keys.repeat_interleave(group, 1)[:, :, None]).any(-1)

    def keys_seen_by(rows: Tensor, pairs: Tensor) -> Tensor:
        return per_key((pairs & rows[..., None]).any(-2), inputs)

    def head_of(rows: Tensor) -> Tensor:
        return per_key(rows.any(-1), inputs)[..., None]

    bad = {name: ~getattr(inputs, name).isfinite().all(-1) for name in ("q", "k", "v", "dout")}
    bad |= {name: across_heads(bad[name], inputs) for name in "qk"}
    weights = rows_that_see(bad["k"], pairs) | (bad["q"] & sees) | added.any(-1)
    lse, bad_dlse = weights, ~inputs.dlse.isfinite() & with_dlse
    of_sink = torch.zeros_like(sees)
    if inputs.sinks is not None:
        of_sink = ~inputs.sinks.isfinite()[:, None].expand(sees.shape)
        weights = weights | (of_sink & sees)
        lse = weights | of_sink if everywhere else weights
    out = weights | rows_that_see(bad["v"], kept)
    scores = out | ((bad["dout"] | bad_dlse) & sees)  # their gradient
    found = {
        "out": out,
        "lse": lse,
        "dq": scores,
        "dk": keys_seen_by(scores, pairs),
        "dv": keys_seen_by(weights | (bad["dout"] & sees), kept),
    }
    found |= _in_sums(inputs, pairs & scores[..., None])
    if inputs.sinks is not None:
        found["dsinks"] = (scores | bad_dlse | lse).any(-1).any(0)
    if everywhere:
        found["dk"] = found["dk"] | head_of(bad["q"] & (sees | of_sink))
        found["dv"] = found["dv"] | head_of(bad["dout"] & (sees | of_sink))
    found |= _in_weights(inputs, found["dq"], found["dk"])
    return found | {name: across_heads(found[name], inputs) for name in ("dq", "dk")}


ADDED = ("bias", "relative", "sinks")
ROWS = ("out", "dq", "dk", "dv")  # results that are judged by rows of head_dim


def _like(rows: Tensor, name: str) -> Tensor:
    return rows[..., None] if name in ROWS else rows


def _assert_empty_is_zero(results: Results, inputs: Inputs, hidden: Hidden, reach: Reach) -> None:
    """Check the results of queries that see nothing, unseen keys, and biases added to no visible score."""
    empty = hidden.queries & ~reach.may["out"]
    zeros = {"out": empty, "dq": hidden.dq & ~reach.may["dq"], "dk": hidden.keys, "dv": hidden.keys}
    for name, rows in {**zeros, **hidden.added}.items():
        here = rows & ~reach.may[name]
        assert (results[name][here.expand(results[name].shape[: here.dim()])] == 0).all(), (
            f"{name} of what sees nothing is not 0"
        )
    assert not results["out"][empty].signbit().any(), "out of what sees nothing is -0.0"
    lse, expected = results["lse"], torch.full_like(results["lse"], -math.inf)
    if inputs.sinks is not None:
        expected = inputs.sinks.to(expected.dtype)[:, None].expand(expected.shape)
    rows = empty & ~reach.may["lse"]
    torch.testing.assert_close(
        lse[rows],
        expected[rows],
        equal_nan=True,
        msg=lambda m: f"lse of what sees nothing is neither -inf nor that of its sink: {m}",
    )


def _assert_nothing_is_lost(results: Results, inputs: Inputs, reach: Reach, problem: FuzzProblem, fits: bool) -> None:
    """Check that a NaN shows wherever it must, and that no infinity is ignored."""
    nan = {name: x.isnan().any(-1) if name in ROWS else x.isnan() for name, x in results.items()}
    assert not (nan["out"] & ~nan["dq"]).any(), "out is NaN where dq is not"
    infinite = {name for name, value, _ in problem.poison if value in ("inf", "-inf")}
    if not fits or infinite - {"v", "dout", "dlse"}:  # the weight of a score of -inf is 0
        return
    sees = ~reach.weightless.queries
    assert not (results["lse"][sees] == -math.inf).any(), "lse is -inf of a query that sees something"
    for name, rows in reach.must.items():
        found = nan[name]
        if infinite and name != "lse":
            found = ~results[name].isfinite()
            found = found.any(-1) if name in ROWS else found
        lost = rows & ~found
        assert not lost.any(), f"{name}: a NaN or infinity is lost in (batch, head, row) {lost.nonzero()[:3].tolist()}"


def _clean(inputs: Inputs) -> Inputs:
    """The inputs with 0 for each NaN and infinity; a bias of -inf stays, because it hides its pairs."""
    leaves = {
        name: x.nan_to_num(0.0, 0.0, -math.inf if name in ("bias", "relative") else 0.0)
        for name, x in inputs.leaves.items()
    }
    other = inputs.with_leaves(leaves)
    return replace(other, **{name: getattr(inputs, name).nan_to_num(0.0, 0.0, 0.0) for name in ("dout", "dlse")})


def _fits(clean: Inputs, truth: Results, eager: Results) -> bool:
    """Whether neither results nor intermediate sums overflow, here or in eager PyTorch, and the results are determined
    by the inputs.
    """
    # A large bias or sink decides the softmax alone, and is in no sum after it.
    leaves = {name: x.clamp(-1e3, 1e3) if name in ADDED else x for name, x in clean.leaves.items()}
    # Kernels multiply dq and dk by the scale after summing.
    sums = sum_of_terms(clean.with_leaves(leaves), least_scale=1.0)
    largest = max((x.max().item() for x in sums.values() if x.numel()), default=0.0)
    if not largest <= torch.finfo(clean.q.dtype).max / 16:
        return False
    if not all(bool((eager[name].isfinite() | ~truth[name].isfinite()).all()) for name in truth):
        return False
    return not (residual_is_lost(clean, truth) or rounding_decides(clean))


def residual_is_lost(inputs: Inputs, truth: Results) -> bool:
    """Whether out is too small to keep its rounding error, which delta then misses (decision 0005)."""
    if inputs.q.dtype != torch.bfloat16 or truth["out"].numel() == 0:
        return False
    return 0.0 < truth["out"].abs().max().item() < torch.finfo(torch.bfloat16).tiny


def rounding_decides(inputs: Inputs) -> bool:
    """Whether a quarter of some query's weight moves to another key if a rotation is rounded to 16 bits.

    The contract says that it is rounded once; with scores of 10,000, that may decide which is the largest.
    """
    if inputs.rope is None or inputs.q.dtype.itemsize > 2 or inputs.qk_norm is not None:  # a norm bounds scores
        return False
    exact = inputs.to(torch.float64)
    rotated = (x.to(inputs.q.dtype).double() for x in inputs.rope.rotate(inputs.q.float(), inputs.k.float()))
    rounded = replace(exact, **dict(zip("qk", rotated, strict=True)), rope=None)
    weights, others = (reference.attention(x.q, x.k, x.v, **x.options)[2] for x in (exact, rounded))
    return weights.numel() > 0 and not (weights - others).abs().max() < 0.25
