"""``deterministic=False``: dk, dv and dq in one pass, under every contract of the two kernels; and when it runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import Rope, attention, attention_varlen, masks, testing
from fusedattn.backends.triton.operands import constants_of
from fusedattn.backends.triton.ops import N_DIFFERENTIABLE, attention_bwd, attention_fwd
from fusedattn.kernels import configs, dq_sum
from fusedattn.testing import CASES, Case
from tests.conftest import (
    DEVICE,
    DTYPES,
    EVERYTHING,
    INTERPRETING,
    SMALL,
    assert_accurate,
    assert_budget,
    assert_equal,
    inputs_of,
    leaves,
    triton_attention,
)
from tests.helpers import contract, quick
from tests.helpers.accesses import checked_accesses
from tests.helpers.embedded import embedded, kernels_of, run, smaller
from tests.helpers.hostile import FuzzProblem
from tests.helpers.problems import PROBLEMS

pytestmark = [pytest.mark.usefixtures("poison", "_seed")]

interpreted = pytest.mark.skipif(not INTERPRETING, reason="looks into Triton's interpreter")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

one_pass = functools.partial(attention, backend="triton", deterministic=False)
TWO_KERNELS = {"attention_bwd_dkdv", "attention_bwd_dq"}
ONE_PASS = {"attention_bwd_dkdv", "attention_bwd_dq_sum"}


def launched(function: Callable[..., Any], inputs: testing.Inputs) -> list[str]:
    """The backward kernels of q, k and v that ran."""
    with checked_accesses() as accesses:
        testing.run(function, inputs)
    return [name for name in accesses.launched if name in TWO_KERNELS | ONE_PASS]


@pytest.fixture
def _reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter add through descriptors as TMA does, to whole tiles of a tensor."""
    from triton.runtime import interpreter

    def add(self: Any, kind: Any, descriptor: Any, value: Any, indices: Any) -> Any:
        pointers, mask = descriptor.materialize_pointers(indices)
        if not isinstance(mask, interpreter.TensorHandle):  # before Triton 3.9
            mask = interpreter.TensorHandle(mask, interpreter.tl.int1)
        assert mask.data.all(), "a tile that ends outside of the tensor is an illegal instruction"
        relaxed, gpu = interpreter._ir.MEM_SEMANTIC.RELAXED, interpreter._ir.MEM_SYNC_SCOPE.GPU
        return self.create_atomic_rmw(interpreter._ir.ATOMIC_OP.FADD, pointers, value, mask, relaxed, gpu)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_descriptor_reduce", add, raising=False)
    monkeypatch.setattr(dq_sum, "HAS_REDUCTIONS", True)


@quick.every(11)
@pytest.mark.parametrize(
    "case", [replace(case, dtype=DTYPES[i % 3]) for i, case in enumerate(CASES)], ids=lambda case: case.name
)
def test_budget(case):
    assert_budget(one_pass, inputs_of(case), case)


@pytest.mark.thorough
@dtypes
def test_budget_of_everything(dtype):
    assert_accurate(one_pass, inputs_of(replace(EVERYTHING, dtype=dtype)), dtype)


@quick.every(2)
@interpreted
@pytest.mark.usefixtures("_reductions")
@pytest.mark.parametrize(
    "case",
    [
        Case(batch=2, nheads_q=3, nheads_kv=1, seqlen_q=90, seqlen_k=75, head_dim=24, causal="bottom_right"),
        Case(batch=1, seqlen_q=70, seqlen_k=133, window=(40, 9), padding="left", dtype=torch.bfloat16),
        Case(batch=2, nheads_q=3, nheads_kv=1, seqlen_q=90, seqlen_k=75, head_dim=32, dtype=torch.bfloat16),
        Case(batch=1, seqlen_q=5, seqlen_k=3, head_dim=8, head_dim_v=16, dtype=torch.float16),
        Case(batch=1, seqlen_q=40, seqlen_k=70, head_dim=6, rope="half"),  # unaligned rows: no descriptor
    ],
    ids=str,
)
def test_the_accelerator_adds_the_same(case):
    """The same bits as atomic additions of each element, in the same order here."""
    inputs = inputs_of(case)
    got = testing.run(one_pass, inputs)
    dq_sum.HAS_REDUCTIONS = False
    assert_equal(got, testing.run(one_pass, inputs))


@interpreted
@pytest.mark.usefixtures("_reductions")
def test_the_accelerator_adds_nothing_to_the_next_sequence():
    """TMA takes no mask: rows before and after a packed sequence get 0, although they hold NaN."""
    q, k, v = (torch.randn(n, 2, 16, device=DEVICE) for n in (60, 90, 90))
    q[:7] = k[40:50] = torch.nan
    stops_q, stops_k = (torch.tensor([0, *x], dtype=torch.int32, device=DEVICE) for x in ((7, 28, 60), (40, 50, 90)))
    found = []
    for deterministic in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention_varlen(
            *leaves, stops_q, stops_k, 40, 50, mask=masks.causal(), backend="triton", deterministic=deterministic
        )
        found.append(torch.autograd.grad(out.sum(), leaves))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)
    assert found[0][0][28:].isfinite().all()


@pytest.mark.thorough
@interpreted
def test_the_same_tiles_give_the_same_dk_and_dv(monkeypatch):
    inputs = inputs_of(replace(EVERYTHING, dtype=torch.float32))
    monkeypatch.setattr(configs, "INTERPRETER", replace(configs.INTERPRETER, one_pass=configs.INTERPRETER.dkdv))
    found = [testing.run(function, inputs) for function in (one_pass, triton_attention)]
    of_dq = ("dq", "dq_weight")
    assert_equal(*({name: x for name, x in results.items() if name not in of_dq} for results in found))


@quick.every(3)
@pytest.mark.parametrize("style", ["pointers", "descriptors"])
@pytest.mark.parametrize(("block_m", "block_n", "edge"), [(16, 16, 16), (64, 32, 16), (32, 64, 32)])
@interpreted
def test_other_tiles(monkeypatch, block_m, block_n, edge, style):
    tile = configs.TileConfig(block_m, block_n, 4, 1, style, edge)
    monkeypatch.setattr(configs, "INTERPRETER", replace(configs.INTERPRETER, one_pass=tile))
    case = Case(batch=1, seqlen_q=110, seqlen_k=90, head_dim=24, window=(50, 3), padding="left", rope="interleaved")
    assert_budget(one_pass, inputs_of(case), style)


@quick.only(value=math.inf, case=lambda case: case.layout is None)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(causal="bottom_right"),
        Case(boolean="full", dtype=torch.bfloat16),
        Case(causal="top_left", padding="uneven", rope="interleaved", rotary_dim=8, dtype=torch.float16),
        Case(layout=32, documents="packed"),
        Case(window=(70, 9)),
    ],
    ids=("causal", "boolean", "padding, RoPE", "layout, documents", "window"),
)
def test_a_poisoned_key_reaches_the_same_rows(case, value):
    """NaN or the same numbers in the same places as from two kernels, for keys that some, all or no queries see."""
    inputs = inputs_of(replace(case, batch=1, nheads_q=3, nheads_kv=1, seqlen_q=80, seqlen_k=90, head_dim=16))
    k = inputs.k
    # Some queries give an infinite feature a score of -inf: the key then has no weight, but makes dq NaN.
    k[..., [0, 41, 60], 3] = value
    k[..., 89, :] = value
    got, expected = (testing.run(f, replace(inputs, k=k)) for f in (one_pass, triton_attention))
    assert int(expected["dq"].isnan().sum()) > 0
    for name in ("dq", "dk", "dv"):
        assert torch.equal(got[name].isnan(), expected[name].isnan()), name
        # Sums run in another order.
        terms = expected[name].nan_to_num().abs().max().item() * 2 + 1
        unit = torch.finfo(case.dtype).eps
        torch.testing.assert_close(got[name], expected[name], equal_nan=True, rtol=8 * unit, atol=unit * terms)


HOSTILE = [name for name in PROBLEMS if "scale" not in name]


@quick.every(6)
@pytest.mark.parametrize("name", HOSTILE)
def test_contract(monkeypatch, name):
    """The whole contract for hostile inputs, except that gradients requested alone have the same bits."""
    problem = replace(PROBLEMS[name], needed="qkvbrsl")
    # torch's setting that fills memory with NaN would choose the two kernels; the fixture fills it too.
    monkeypatch.setattr(contract, "uninitialised_is_nan", nullcontext)
    contract._check_function(one_pass, problem, DEVICE, 1.0)


@quick.every(7)
@pytest.mark.parametrize(
    ("poison", "rows"),
    [
        ((("k", "nan", "some rows"),), "some empty"),
        ((("k", "inf", "some rows"), ("v", "nan", "one element")), None),
        ((("q", "nan", "some rows"), ("dout", "inf", "one element")), None),
        ((("k", "nan", "hidden"), ("v", "inf", "hidden")), "one key"),
    ],
)
@dtypes
def test_contract_of_poison(monkeypatch, poison, rows, dtype):
    monkeypatch.setattr(contract, "uninitialised_is_nan", nullcontext)
    case = Case(batch=1, nheads_q=3, nheads_kv=1, seqlen_q=37, seqlen_k=45, head_dim=12, causal="top_left")
    contract._check_function(one_pass, FuzzProblem(replace(case, dtype=dtype), poison=poison, rows=rows), DEVICE, 1.0)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0), (0, 0), (1, 1), (1, 70), (70, 1)])
def test_lengths(seqlen_q, seqlen_k):
    inputs = inputs_of(replace(SMALL, seqlen_q=seqlen_q, seqlen_k=seqlen_k, padding=None))
    got = testing.run(one_pass, inputs)
    if seqlen_q and seqlen_k:
        assert_accurate(one_pass, inputs)
    assert all((got[name] == 0).all() for name in ("dq", "dk", "dv") if not seqlen_q * seqlen_k)


@quick.every(6)
@pytest.mark.parametrize("case", [replace(CASES[1], head_dim=24), CASES[-1]], ids=lambda case: case.name)
@dtypes
@interpreted
def test_memory(case, dtype):
    """Poison around every tensor changes nothing, and all of dq is written; only the total is accumulated."""
    inputs = inputs_of(replace(smaller(case), dtype=dtype))
    poisoned = embedded(inputs)
    before = [x.bits.clone() for x in poisoned.guards]
    with checked_accesses() as accesses:
        got = run(poisoned.inputs, one_pass)
    assert_equal(got, run(inputs, one_pass))
    poisoned.assert_unchanged(before)
    assert set(accesses.launched) == kernels_of(inputs) - {"attention_bwd_dq"} | {"attention_bwd_dq_sum"}
    expected = run(poisoned.inputs)
    assert all(got[name].stride() == expected[name].stride() for name in got)


def test_the_total_is_all_that_it_allocates(monkeypatch):
    """The total is float32, has the shape of q, starts at zero and is freed afterwards."""
    made: list[Tensor] = []
    zeros = dq_sum.zeros

    def counted(q: Tensor) -> Tensor:
        made.append(zeros(q))
        return made[-1]

    monkeypatch.setattr(dq_sum, "zeros", counted)
    inputs = inputs_of(replace(SMALL, dtype=torch.bfloat16))
    testing.run(one_pass, inputs)
    (total,) = made
    assert (total.shape, total.dtype, total.is_contiguous()) == (inputs.q.shape, torch.float32, True)


@interpreted
def test_the_kernels_of_a_call(monkeypatch):
    """Two kernels by default, and if the GPU has no config for one pass."""
    inputs = inputs_of(SMALL)
    assert launched(one_pass, inputs) == ["attention_bwd_dkdv", "attention_bwd_dq_sum"]
    two = ["attention_bwd_dkdv", "attention_bwd_dq"]
    for function in (triton_attention, functools.partial(triton_attention, deterministic=True)):
        assert launched(function, inputs) == two
    monkeypatch.setattr(configs, "INTERPRETER", replace(configs.INTERPRETER, one_pass=None))
    assert launched(one_pass, inputs) == two


@interpreted
def test_torch_overrules_when_the_backward_runs():
    x = leaves(inputs_of(SMALL))
    out = one_pass(*x)
    torch.use_deterministic_algorithms(True)
    try:
        with checked_accesses() as accesses:
            out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(accesses.launched) >= TWO_KERNELS


@interpreted
@pytest.mark.parametrize(("needed", "name"), [("q", "attention_bwd_dq"), ("k", "attention_bwd_dkdv")])
def test_gradients_that_are_not_needed_are_not_computed(needed, name):
    inputs = inputs_of(SMALL)
    x = {name: getattr(inputs, name).detach().requires_grad_(name in needed) for name in "qkv"}
    with checked_accesses() as accesses:
        one_pass(**x).sum().backward()
    assert [kernel for kernel in accesses.launched if kernel in TWO_KERNELS | ONE_PASS] == [name]


@quick.only(group=1)
@interpreted
@pytest.mark.parametrize("group", [1, 3])
def test_gradcheck(group):
    q, k, v = (torch.randn(1, h, n, 4, dtype=torch.float64, requires_grad=True) for h, n in
               ((2 * group, 5), (2, 7), (2, 7)))  # fmt: skip
    rope = Rope.from_theta(4, 16)
    function = functools.partial(one_pass, mask=masks.causal(), rope=rope, return_lse=True)
    assert torch.autograd.gradcheck(function, (q, k, v), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (q, k, v), fast_mode=True)


def test_vmap():
    q, k, v = (torch.randn(3, 1, 2, 9, 8, device=DEVICE) for _ in range(3))
    gradient = torch.func.grad(lambda q, k, v: one_pass(q, k, v).square().sum(), argnums=(0, 1, 2))
    for i, x in enumerate(zip(*torch.func.vmap(gradient)(q, k, v), strict=True)):
        torch.testing.assert_close(x, gradient(q[i], k[i], v[i]))


@pytest.mark.parametrize("needs", [(True, True), (True, False)])
def test_opcheck(needs):
    q, k, v = (torch.randn(1, h, 9, 8, device=DEVICE) for h in (2, 1, 1))
    from fusedattn.options import Options

    options = Options(masks.causal(), scale=0.5, deterministic=False)
    flat = constants_of(options, keep_residual=True).flat()
    nothing = (None,) * (N_DIFFERENTIABLE - 3)
    out, lse, *saved, _ = attention_fwd(q, k, v, *nothing, *flat)
    needed = [*needs, *(False for _ in nothing)]
    call = (torch.randn_like(out), torch.randn_like(lse), q, k, v, *nothing, out, *saved, needed)
    torch.library.opcheck(attention_bwd, (*call, *flat))


@interpreted
def test_compiled():
    """The option is part of the graph; torch's setting at run time overrides it there too."""
    torch._dynamo.reset()
    inputs = inputs_of(replace(SMALL, rope=None))
    compiled = torch.compile(one_pass, backend="aot_eager", fullgraph=True)
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    with checked_accesses() as accesses:
        compiled(q, k, v, mask=inputs.mask).sum().backward()
    assert set(accesses.launched) >= ONE_PASS


def test_a_row_of_scores_of_minus_infinity_gets_no_gradient():
    """Though its product with an infinite key is NaN."""
    q, k, v = (torch.randn(1, 1, n, 16, device=DEVICE) for n in (20, 40, 40))
    q[..., 0], q[0, 0, 3, 0], k[..., 0] = 1.0, -1.0, math.inf
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*inputs, deterministic=False, backend="triton")
    dq, _, _ = torch.autograd.grad(out.sum(), inputs)
    assert (dq[0, 0, 3] == 0).all()
    assert dq[0, 0, [2, 4]].isnan().all()


def test_no_effect_on_torch():
    inputs = inputs_of(SMALL)
    found = [testing.run(functools.partial(attention, backend="torch", deterministic=x), inputs) for x in (False, True)]
    assert_equal(*found)
