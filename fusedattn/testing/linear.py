"""The error budget of linear attention.

The truth is the recurrence :mod:`fusedattn.linear.reference` in float64. Eager PyTorch, whose error is the unit of the
budget, is the quadratic formula, each operation in the dtype of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedattn import feature_maps
from fusedattn.feature_maps import AnyFeatureMap
from fusedattn.linear import packed, reference
from fusedattn.linear.attention import linear_attention
from fusedattn.linear.options import LinearOptions
from fusedattn.linear.state import LinearState
from fusedattn.support import Backend
from fusedattn.testing.budget import Ratios, Results, compare
from fusedattn.testing.linear_cases import LinearCase, LinearInputs, make_linear_inputs
from fusedattn.testing.linear_terms import sums_of_terms

LinearFunction = Callable[..., tuple[Tensor, LinearState]]


def run_linear(
    function: LinearFunction, case: LinearCase, inputs: LinearInputs, dtype: torch.dtype | None = None
) -> Results:
    """Out, the state and the gradients of all leaves, of ``function(q, k, v, initial_state=..., ...)``.

    With `dtype`, the same numbers in another one.
    """
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in inputs.leaves.items()}
    back = [x.to(dtype or x.dtype) for x in inputs.back]
    state = LinearState(leaves["kv"], leaves["k_sum"]) if "kv" in leaves else None
    out, (kv, k_sum) = function(leaves["q"], leaves["k"], leaves["v"], initial_state=state, **inputs.options)
    n = 3 if case.return_state else 1
    # Without tokens, a new state is a constant.
    returned = [(x, y) for x, y in zip((out, kv, k_sum)[:n], back[:n], strict=True) if x.requires_grad]
    found = torch.autograd.grad(
        [x for x, _ in returned],
        list(leaves.values()),
        [y for _, y in returned],
        allow_unused=True,
        materialize_grads=True,
    )
    gradients = {f"d{name}": gradient for name, gradient in zip(leaves, found, strict=True)}
    return {"out": out.detach(), "kv": kv.detach(), "k_sum": k_sum.detach()} | gradients


def linear_on(backend: Backend) -> LinearFunction:
    """The public function on a backend, with its state."""
    return lambda q, k, v, **options: linear_attention(q, k, v, **options, return_state=True, backend=backend)


def _by(attend: packed.Attend) -> LinearFunction:
    def function(q: Tensor, k: Tensor, v: Tensor, *, feature_map: AnyFeatureMap, **options: Any) -> Any:
        if options["valid"] is not None:  # before functions of torch, whose derivative of a NaN is NaN
            k = k.masked_fill(~options["valid"][:, None, :, None], 0.0)
        q, k, left = feature_maps.split(feature_map, q, k)
        return attend(q, k, v, LinearOptions(left, **options))

    return function


def _eager(q: Tensor, k: Tensor, v: Tensor, options: LinearOptions) -> tuple[Tensor, LinearState]:
    """The quadratic formula in the dtype of the inputs."""
    if options.cu_seqlens is not None:
        return packed.by_sequence(q, k, v, options, _eager)
    group, phi = q.shape[1] // k.shape[1], feature_maps.eager(options.feature_map)
    hidden = None if options.valid is None else ~options.valid[:, None, :, None]
    if hidden is not None:
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    phi_q, phi_k = phi(q), phi(k)
    if hidden is not None:
        phi_k = phi_k.masked_fill(hidden, 0.0)
    weights = phi_q @ phi_k.repeat_interleave(group, 1).mT
    if options.causal:
        weights = weights.tril()
    out, den = weights @ v.repeat_interleave(group, 1), weights.sum(-1, keepdim=True)
    kv, k_sum = phi_k.mT @ v, phi_k.sum(2)
    if options.initial_state is not None:
        of_kv, of_k_sum = (x.to(q.dtype) for x in options.initial_state)
        out = out + phi_q @ of_kv.repeat_interleave(group, 1)
        den = den + phi_q @ of_k_sum.repeat_interleave(group, 1)[..., None]
        kv, k_sum = kv + of_kv, k_sum + of_k_sum
    if options.normalize:
        out = (out / torch.where(den == 0, 1.0, den)).masked_fill(den == 0, 0.0)
    wide = torch.promote_types(q.dtype, torch.float32)
    return out, LinearState(kv.to(wide), k_sum.to(wide))


DEFINITION, EAGER = _by(reference.attention), _by(_eager)


def linear_golden(case: LinearCase, inputs: LinearInputs) -> Results:
    """The truth, in float64."""
    return run_linear(DEFINITION, case, inputs, torch.float64)


def linear_baseline(case: LinearCase, inputs: LinearInputs) -> Results:
    """The results of eager PyTorch in the dtype of the inputs."""
    return run_linear(EAGER, case, inputs)


def check_linear(
    case: LinearCase,
    backend: Backend,
    device: torch.device | str = "cpu",
    eager: Callable[[LinearCase, LinearInputs], Results] = linear_baseline,
) -> dict[str, Ratios]:
    """Measure out, the state and every gradient of a case against the error budget."""
    inputs = make_linear_inputs(case, device)
    return compare_linear(case, inputs, run_linear(linear_on(backend), case, inputs), eager)


def compare_linear(
    case: LinearCase,
    inputs: LinearInputs,
    actual: Results,
    eager: Callable[[LinearCase, LinearInputs], Results] = linear_baseline,
) -> dict[str, Ratios]:
    """The share of its budget that each of the results uses."""
    golden, baseline = linear_golden(case, inputs), eager(case, inputs)
    # The quadratic formula subtracts delta from a product of values before it adds up keys; with a state, sums are
    # subtracted. In 16 bits other errors are larger.
    terms = sums_of_terms(case, inputs) if case.dtype == torch.float32 else {}
    return {name: compare(x, golden[name], baseline[name], terms.get(name)) for name, x in actual.items()}
