"""The memory that kernels of linear attention touch: inputs lie among NaN, outputs among sentinels.

As in tests/public/test_memory.py: nothing outside a tensor may influence a result, nothing outside an output may be
written, and every element of an output must be written once.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import DEVICE, DTYPES, INTERPRETING
from tests.helpers import linear, quick
from tests.helpers.accesses import checked_accesses
from tests.helpers.guarded import embed, guarded_allocations
from tests.helpers.linear import LinearProblem

pytestmark = pytest.mark.usefixtures("_seed")

BASE = LinearProblem(seqlen_q=70, head_dim=20, head_dim_v=70, batch=2, nheads_q=4, valid="some", initial_state=True)
FORMS: dict[str, dict[str, Any]] = {
    "causal": {},
    "not causal": {"causal": False, "seqlen_k": 33},
    "sums": {"normalize": False},
    "packed": {"batch": 1, "lengths": (5, 0, 50)},
    "functions": {"feature_map": "jit", "head_dim_v": 7},
    "softmax": {"feature_map": "softmax", "seqlen_q": 3, "initial_state": False},
    "one token": {"seqlen_q": 1, "head_dim": 1, "head_dim_v": 1, "valid": None},
}
KERNELS = {"linear_states", "linear_outputs", "linear_features"}


@quick.every(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_memory(form, dtype):
    problem = replace(BASE, **FORMS[form], dtype=dtype)
    inputs = linear.inputs_of(problem, DEVICE)
    leaves = {name: embed(x) for name, x in inputs.leaves.items()}
    back = [embed(x) for x in inputs.back]
    others = {name: embed(x) for name, x in inputs.options.items() if isinstance(x, Tensor) and x.dim() > 0}
    guards = [*leaves.values(), *back, *others.values()]
    before = [x.bits.clone() for x in guards]
    among_nan = linear.LinearInputs(
        {name: x.tensor for name, x in leaves.items()},
        tuple(x.tensor for x in back),
        inputs.options | {name: x.tensor for name, x in others.items()},
    )
    packed = problem.lengths is not None
    with checked_accesses() if INTERPRETING else nullcontext() as accesses, guarded_allocations() as allocations:
        found = linear.run(linear.on_backend("triton"), problem, among_nan)
    linear.assert_same(found, linear.run(linear.on_backend("triton"), problem, inputs))
    assert all(map(torch.equal, (x.bits for x in guards), before))
    allocations.check(in_part=packed)
    assert accesses is None or set(accesses.launched) == KERNELS
