"""Check the whole contract of linear attention on one problem, for both backends."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.conftest import BACKENDS, DEVICE
from tests.helpers import linear
from tests.helpers.contract import uninitialised_is_nan
from tests.helpers.linear import LinearProblem


def check(problem: LinearProblem) -> bool:
    """Raise AssertionError, with the command that reproduces it, unless both backends keep the contract.

    Returns:
        True: numbers were compared with the truth.
    """
    for backend in BACKENDS:
        try:
            _check_backend(problem, backend)
        except Exception as error:
            raise AssertionError(f"{problem.command}\n{backend}: {type(error).__name__}: {error}") from error
    return True


def _check_backend(problem: LinearProblem, backend: str) -> None:
    inputs = linear.inputs_of(problem, DEVICE)
    tensors = [*inputs.leaves.values(), *inputs.back, *(x for x in inputs.options.values() if isinstance(x, Tensor))]
    before = [x.clone() for x in tensors]
    with uninitialised_is_nan():
        found = linear.run(linear.on_backend(backend), problem, inputs)
        again = linear.run(linear.on_backend(backend), problem, inputs)
    for x, y in zip(tensors, before, strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num()), "an argument was modified"
    if backend == "triton":
        linear.assert_same(again, found)
    wide = torch.promote_types(problem.dtype, torch.float32)
    for name, x in found.items():
        assert x.dtype == (wide if "k_sum" in name or "kv" in name else problem.dtype), name
        assert x.isfinite().all(), f"{name} is not finite"
    for name, rows in _without_gradient(problem, inputs).items():
        assert found[name].masked_select(rows[:, None, :, None]).eq(0.0).all(), f"{name} of hidden tokens"
    expected = linear.truth(problem, inputs)
    bad = [name for name, x in linear.ratios(found, problem, inputs, expected).items() if not x.used <= 1.0]
    # Problems are small, so that it is luck which of two roundings is nearer.
    bad = linear.beyond_terms(found, problem, inputs, bad) if bad else []
    assert not bad, f"beyond the budget: {', '.join(bad)}"


def _without_gradient(problem: LinearProblem, inputs: linear.LinearInputs) -> dict[str, Tensor]:
    """The tokens whose gradient must be 0."""
    valid, k = inputs.options["valid"], inputs.leaves["k"]
    hidden = torch.zeros(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device) if valid is None else ~valid
    if problem.lengths is not None:
        behind = (torch.arange(k.shape[2], device=k.device) >= sum(problem.lengths))[None]
        return {"dq": behind, "out": behind, "dk": hidden | behind, "dv": hidden | behind}
    return {"dk": hidden, "dv": hidden}
