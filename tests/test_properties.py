"""Laws that hold for any input, checked on drawn ones; ``FUZZ_EXAMPLES=1000`` draws more, and new ones every time.

A failure prints the ``Case(...)`` that makes it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, note
from hypothesis import strategies as st
from torch import Tensor

from fusedattn import Rope, masks, testing
from fusedattn.testing import Case, Inputs
from tests.conftest import DEVICE, INTERPRETING, assert_accurate, assert_equal, sum_of_terms, triton_attention
from tests.strategies import cases

pytestmark = [pytest.mark.usefixtures("poison", "_seed")]


def inputs_of(case: Case) -> Inputs:
    note(f"reproduce with {case!r}")
    return testing.make_inputs(case, DEVICE)


def part(inputs: Inputs, **changes: object) -> Inputs:
    return replace(inputs, **changes)  # type: ignore[arg-type]


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit in the interpreter; a GPU's compiler may order the same operations differently for other shapes."""
    if INTERPRETING:
        assert_equal(actual, expected)
    else:
        torch.testing.assert_close(actual, expected, equal_nan=True)


@given(cases())
@example(Case(seqlen_q=1, seqlen_k=1, head_dim=1, batch=1, nheads_q=1, nheads_kv=1))
def test_accuracy(case):
    assert_accurate(triton_attention, inputs_of(case), case)


@given(cases(scale=None), st.sampled_from([1e-40, 1e-30, 1e-6, 1e2, 1e4]), st.sampled_from("qkv"))
def test_magnitudes(case, magnitude, tensor):
    """Scores up to 1e4, denormal inputs, and everything between, where the dtype can hold them."""
    if case.dtype == torch.float16:
        magnitude = min(max(magnitude, 1e-6), 1e3)
    inputs = inputs_of(case)
    inputs = part(inputs, **{tensor: (getattr(inputs, tensor).double() * magnitude).to(case.dtype)})
    terms = sum_of_terms(inputs)
    if max((t.max().item() for t in terms.values() if t.numel()), default=0.0) > torch.finfo(case.dtype).max / 16:
        return  # eager's results, or the kernels', overflow on the way
    assert_accurate(triton_attention, inputs, f"{case}, {tensor} * {magnitude}")


def permuted(inputs: Inputs, batch: Tensor, heads_kv: Tensor) -> Inputs:
    group = inputs.q.shape[1] // inputs.k.shape[1]
    heads_q = (heads_kv[:, None] * group + torch.arange(group, device=DEVICE)).flatten()
    mask, rope = inputs.mask, inputs.rope
    allowed = mask.allowed
    if allowed is not None:
        allowed = allowed.expand(inputs.q.shape[0], inputs.q.shape[1], -1, -1)[batch][:, heads_q]
    if rope is not None:
        per_batch = {
            name: getattr(rope, name)[batch]
            for name, dims in (("cos", 3), ("sin", 3), ("positions_q", 2), ("positions_k", 2))
            if getattr(rope, name) is not None and getattr(rope, name).dim() == dims
        }
        rope = replace(rope, **per_batch)
    return Inputs(
        q=inputs.q[batch][:, heads_q],
        k=inputs.k[batch][:, heads_kv],
        v=inputs.v[batch][:, heads_kv],
        dout=inputs.dout[batch][:, heads_q],
        dlse=inputs.dlse[batch][:, heads_q],
        mask=replace(mask, valid=None if mask.valid is None else mask.valid[batch], allowed=allowed),
        rope=rope,
        scale=inputs.scale,
    )


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_batches_and_heads_does_not_matter(case, random):
    inputs = inputs_of(case)
    batch, heads_kv = list(range(case.batch)), list(range(case.nheads_kv))
    random.shuffle(batch)
    random.shuffle(heads_kv)
    at_batch, at_heads = torch.tensor(batch, device=DEVICE), torch.tensor(heads_kv, device=DEVICE)
    group = case.nheads_q // case.nheads_kv
    at_queries = (at_heads[:, None] * group + torch.arange(group, device=DEVICE)).flatten()
    got = testing.run(triton_attention, permuted(inputs, at_batch, at_heads))
    expected = testing.run(triton_attention, inputs)
    heads = {"out": at_queries, "lse": at_queries, "dq": at_queries, "dk": at_heads, "dv": at_heads}
    assert_equal(got, {name: x[at_batch][:, heads[name]] for name, x in expected.items()})


@given(cases(batch=2, boolean=None, rope_tables="shared", rope_positions=False))
def test_a_batch_is_its_members(case):
    """What one member gets does not depend on the others."""
    if case.seqlen_q > case.seqlen_k:
        case = replace(case, rope=None)
    inputs = inputs_of(case)
    together = testing.run(triton_attention, inputs)
    for b in range(2):
        alone = part(inputs, **{n: getattr(inputs, n)[b : b + 1] for n in ("q", "k", "v", "dout", "dlse")})
        if inputs.mask.valid is not None:
            alone = part(alone, mask=replace(inputs.mask, valid=inputs.mask.valid[b : b + 1]))
        assert_equal(testing.run(triton_attention, alone), {n: x[b : b + 1] for n, x in together.items()})


@given(cases(rope="half", head_dim=16, rotary_dim=16, rope_tables="shared", rope_positions=False), st.integers(1, 1000))
def test_rope_knows_differences_only(case, shift):
    """All positions moved by the same amount: the same results, as accurately as in eager PyTorch."""
    inputs = inputs_of(replace(case, rope=None))
    generator = torch.Generator().manual_seed(case.seed)
    tables = Rope.from_theta(16, 1064, interleaved=bool(case.seed % 2), device=DEVICE)
    at_q = torch.randint(0, 64, (case.seqlen_q,), generator=generator).to(DEVICE)
    at_k = torch.randint(0, 64, (case.seqlen_k,), generator=generator).to(DEVICE)
    moved = part(inputs, rope=tables.at(at_q + shift, at_k + shift))
    truth = testing.golden(moved)
    unmoved = testing.golden(part(inputs, rope=tables.at(at_q, at_k)))
    # The tables are rounded to float32: in exact arithmetic the law holds to that.
    for name, x in truth.items():
        finite = torch.where(x.isfinite(), x, 0.0)
        other = torch.where(x.isfinite(), unmoved[name], 0.0)
        assert (finite - other).abs().max() <= 2e-5 * max(1.0, finite.abs().max().item()), name
    assert_accurate(triton_attention, moved, case)


def sliced(inputs: Inputs, start: int, stop: int) -> Inputs:
    """Only the keys ``start .. stop - 1`` of the first batch, and no padding."""
    mask = replace(inputs.mask, valid=None)
    return part(inputs, k=inputs.k[:, :, start:stop], v=inputs.v[:, :, start:stop], mask=mask)


@given(
    cases(batch=1, boolean=None, causal=None, padding=None, empty_batch=False, rope=None),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_padding_is_slicing(case, before, after):
    """Keys that are hidden at either end might as well not be there."""
    inputs = inputs_of(replace(case, seqlen_k=case.seqlen_k + before + after))
    stop = before + case.seqlen_k
    valid = torch.zeros(1, inputs.k.shape[2], dtype=torch.bool, device=DEVICE)
    valid[:, before:stop] = True
    got = testing.run(triton_attention, part(inputs, mask=masks.padding(valid)))
    expected = testing.run(triton_attention, sliced(inputs, before, stop))
    for name in ("dk", "dv"):
        assert int((got[name] != 0)[:, :, ~valid[0]].sum()) == 0
        got[name] = got[name][:, :, before:stop]
    assert_same(got, expected)


@given(cases(batch=1, boolean=None, causal="bottom_right", padding=None, empty_batch=False), st.integers(1, 40))
def test_left_padding_is_slicing_under_a_causal_mask(case, before):
    """The usual shape of a padded prompt: the causal mask is aligned to the end, and so are the positions."""
    case = replace(case, seqlen_q=case.seqlen_k, rope_tables="shared", rope_positions=False)
    full = inputs_of(replace(case, seqlen_q=case.seqlen_k + before, seqlen_k=case.seqlen_k + before))
    valid = torch.arange(full.k.shape[2], device=DEVICE) >= before
    rope = full.rope
    if rope is not None:  # a key keeps its position wherever the padding moves it
        positions = (torch.arange(full.k.shape[2], device=DEVICE) - before).clamp(min=0)
        full = part(full, rope=rope.at(positions, positions.clone()))
    got = testing.run(triton_attention, part(full, mask=full.mask & masks.padding(valid[None])))
    short = Inputs(
        **{n: getattr(full, n)[:, :, before:].contiguous() for n in ("q", "k", "v", "dout", "dlse")},
        mask=full.mask, rope=rope, scale=full.scale,
    )  # fmt: skip
    expected = testing.run(triton_attention, short)
    for name in ("out", "dq", "dk", "dv"):
        assert int((got[name][:, :, :before] != 0).sum()) == 0, name
    assert int((got["lse"][:, :, :before] != -math.inf).sum()) == 0
    # Query tiles start elsewhere, so sums run in another order.
    for name, x in expected.items():
        eps = torch.finfo(x.dtype).eps if name != "lse" else torch.finfo(torch.float32).eps
        torch.testing.assert_close(got[name][:, :, before:], x, rtol=8 * eps, atol=8 * eps * x.abs().max().item())


@given(cases(causal=None, padding=None, empty_batch=False, boolean=None, rope=None), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(case, random):
    inputs = inputs_of(case)
    order = list(range(case.seqlen_k))
    random.shuffle(order)
    at = torch.tensor(order, device=DEVICE)
    shuffled = part(inputs, k=inputs.k[:, :, at], v=inputs.v[:, :, at])
    truth = testing.golden(inputs)
    restored = testing.golden(shuffled)
    back = at.argsort()
    for name in ("dk", "dv"):
        restored[name] = restored[name][:, :, back]
    torch.testing.assert_close(restored, truth)
    assert_accurate(triton_attention, shuffled, case)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Case)])
def test_a_case_prints_as_the_call_that_makes_it(field):
    """``repr`` is what a failure prints, so it must evaluate to the same case."""
    case = replace(Case(rope="half", dtype=torch.bfloat16, scale=0.3), name="it's")
    again = eval(repr(case), {"Case": Case, "torch": torch})
    assert getattr(again, field) == getattr(case, field)


def test_make_inputs_is_reproducible():
    case = Case(padding="uneven", boolean="full", rope="half", rope_positions=True, rope_tables="per_batch")
    one, two = testing.make_inputs(case), testing.make_inputs(case)
    other = testing.make_inputs(replace(case, seed=1))
    for name in ("q", "k", "v", "dout", "dlse"):
        assert torch.equal(getattr(one, name), getattr(two, name))
        assert not torch.equal(getattr(one, name), getattr(other, name))
