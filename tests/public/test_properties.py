"""Laws that hold for any input, checked on random ones; ``FUZZ_EXAMPLES=1000`` tries more, new ones on every run.

A failure prints the ``Case(...)`` that reproduces it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, note
from hypothesis import strategies as st
from torch import Tensor

from fusedattn import Rope, biases, masks, testing
from fusedattn.testing import Case, Inputs
from tests.conftest import (
    DEVICE,
    EVERYTHING,
    INTERPRETING,
    SMALL,
    assert_accurate,
    assert_equal,
    member,
    sum_of_terms,
    triton_attention,
)
from tests.helpers.strategies import FEATURES, PLACED, cases

pytestmark = [pytest.mark.usefixtures("poison", "_seed")]


def inputs_of(case: Case) -> Inputs:
    note(f"reproduce with {case!r}")
    return testing.make_inputs(case, DEVICE)


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
    """Scores up to 1e4, denormal inputs, and everything between, within the range of the dtype."""
    if case.dtype == torch.float16:
        magnitude = min(max(magnitude, 1e-6), 1e3)
    inputs = inputs_of(case)
    inputs = replace(inputs, **{tensor: (getattr(inputs, tensor).double() * magnitude).to(case.dtype)})
    terms = sum_of_terms(inputs)
    if max((t.max().item() for t in terms.values() if t.numel()), default=0.0) > torch.finfo(case.dtype).max / 16:
        return  # intermediate results overflow, in eager attention or in the kernels
    assert_accurate(triton_attention, inputs, f"{case}, {tensor} * {magnitude}")


def chosen(x: Tensor, batch: Tensor, heads: Tensor) -> Tensor:
    """Select batches and heads of ``(batch, heads, ...)``; a dimension of size 1, which all share, stays."""
    x = x[batch] if x.shape[0] > 1 else x
    return x[:, heads] if x.shape[1] > 1 else x


def permuted(inputs: Inputs, batch: Tensor, heads_kv: Tensor) -> Inputs:
    group = inputs.q.shape[1] // inputs.k.shape[1]
    heads_q = (heads_kv[:, None] * group + torch.arange(group, device=DEVICE)).flatten()

    def of_queries(x: Tensor | None) -> Tensor | None:
        return None if x is None else chosen(x[(None,) * (4 - x.dim())], batch, heads_q)

    mask, rope, bias, sinks = inputs.mask, inputs.rope, inputs.bias, inputs.sinks
    documents, prefix, layout = mask.documents, mask.prefix, mask.layout
    mask = replace(
        mask,
        valid=None if mask.valid is None else mask.valid[batch],
        allowed=of_queries(mask.allowed),
        prefix=None if prefix is None else replace(prefix, lengths=prefix.lengths[batch]),
        documents=None if documents is None else masks.Documents(documents.q[batch], documents.k[batch]),
        layout=None if layout is None else replace(layout, blocks=of_queries(layout.blocks)),
        tree=of_queries(mask.tree),
    )
    if rope is not None:
        per_batch = {
            name: getattr(rope, name)[batch]
            for name, dims in (("cos", 3), ("sin", 3), ("positions_q", 2), ("positions_k", 2))
            if getattr(rope, name) is not None and getattr(rope, name).dim() == dims
        }
        rope = replace(rope, **per_batch)
    if bias is not None:
        slopes = None if bias.slopes is None else chosen(bias.slopes.expand(len(batch), -1), batch, heads_q)
        bias = replace(bias, tensor=of_queries(bias.tensor), slopes=slopes, relative=of_queries(bias.relative))
    return replace(
        inputs,
        q=inputs.q[batch][:, heads_q],
        k=inputs.k[batch][:, heads_kv],
        v=inputs.v[batch][:, heads_kv],
        dout=inputs.dout[batch][:, heads_q],
        dlse=inputs.dlse[batch][:, heads_q],
        mask=mask,
        rope=rope,
        bias=bias,
        sinks=None if sinks is None else sinks[heads_q],
    )


@pytest.mark.thorough
@given(cases(mask_function=False, score_mod=False, dropout_p=0.0), st.randoms(use_true_random=False))
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
    # These are summed over batches and heads, in their order.
    summed = {"dbias", "drelative", "dsinks", "dslopes"} & expected.keys()
    heads = {"out": at_queries, "lse": at_queries, "dq": at_queries, "dk": at_heads, "dv": at_heads}
    assert_equal(
        {name: x for name, x in got.items() if name not in summed},
        {name: chosen(expected[name], at_batch, at) for name, at in heads.items()},
    )
    for name in summed:
        x, y = expected[name], got[name]
        if name in ("dsinks", "dslopes"):
            x = x[at_queries] if x.dim() == 1 else chosen(x, at_batch, at_queries)
            y = y.sum_to_size(x.shape)  # permuted slopes are per batch
        else:
            x = chosen(x[(None,) * (4 - x.dim())], at_batch, at_queries)
        tolerance = 8 * torch.finfo(x.dtype).eps
        torch.testing.assert_close(y, x, rtol=tolerance, atol=tolerance * (1 + x.abs().max().item()))


@given(cases(batch=2, mask_function=False, dropout_p=0.0))
@example(replace(SMALL, dtype=torch.bfloat16))
@example(replace(EVERYTHING, mask_function=False, dropout_p=0.0))
def test_a_batch_is_its_members(case):
    """A member's results do not depend on the others; a tensor that members share gets the sum of their gradients."""
    inputs = inputs_of(case)
    together = testing.run(triton_attention, inputs)
    alone = [testing.run(triton_attention, member(inputs, b)) for b in range(2)]
    for name, x in together.items():
        shapes = {x.shape, alone[0][name].shape}
        if len(shapes) == 2:  # each member has its own row
            assert_equal({name: torch.cat([results[name] for results in alone])}, {name: x})
        else:
            tolerance = 8 * torch.finfo(x.dtype).eps
            expected, size = sum(r[name] for r in alone), max(r[name].abs().max().item() for r in alone)
            torch.testing.assert_close(x, expected, rtol=tolerance, atol=tolerance * (1 + size))


@given(cases(rope="half", head_dim=16, rotary_dim=16, rope_tables="shared", rope_positions=False), st.integers(1, 1000))
def test_rope_knows_differences_only(case, shift):
    """Moving all positions by the same amount changes no result, within the accuracy of eager PyTorch."""
    inputs = inputs_of(replace(case, rope=None))
    generator = torch.Generator().manual_seed(case.seed)
    tables = Rope.from_theta(16, 1064, interleaved=bool(case.seed % 2), device=DEVICE)
    at_q = torch.randint(0, 64, (case.seqlen_q,), generator=generator).to(DEVICE)
    at_k = torch.randint(0, 64, (case.seqlen_k,), generator=generator).to(DEVICE)
    moved = replace(inputs, rope=tables.at(at_q + shift, at_k + shift))
    truth = testing.golden(moved)
    unmoved = testing.golden(replace(inputs, rope=tables.at(at_q, at_k)))
    # The tables are rounded to float32, so even exact arithmetic keeps the law only to that precision.
    for name, x in truth.items():
        finite = torch.where(x.isfinite(), x, 0.0)
        other = torch.where(x.isfinite(), unmoved[name], 0.0)
        assert (finite - other).abs().max() <= 2e-5 * max(1.0, finite.abs().max().item()), name
    assert_accurate(triton_attention, moved, case)


@pytest.mark.thorough
@given(cases(bias_dtype=None), st.sampled_from(["full", "alibi", "relative"]))
def test_a_bias_might_as_well_be_written_out(case, kind):
    """Written out in the dtype of the sum, it gives the same numbers up to rounding, and the same gradients."""
    case = replace(
        case,
        bias="per_query" if kind == "full" else None,
        alibi=kind == "alibi",
        relative="per_query" if kind == "relative" else None,
    )
    inputs = inputs_of(case)
    shape = (*inputs.q.shape[:3], inputs.k.shape[2])
    written = replace(inputs, bias=biases.tensor(inputs.bias.dense(*shape[2:]).expand(shape).contiguous()))
    assert_accurate(triton_attention, written, case)
    got, expected = testing.run(triton_attention, written), testing.run(triton_attention, inputs)
    back = testing.through_bias(inputs, got.pop("dbias"))
    got |= {name: x.to(expected[name].dtype) for name, x in back.items()}
    truth, terms = testing.golden(inputs), sum_of_terms(inputs)
    for name, x in expected.items():
        unit = 8 * torch.finfo(x.dtype).eps
        differ = (got[name].double() - x.double()).abs() > unit * (terms[name] + truth[name].abs())
        assert not differ[truth[name].isfinite()].any(), name


def sliced(inputs: Inputs, start: int, stop: int) -> Inputs:
    """Keep only the keys ``start .. stop - 1`` of the first batch, without padding."""
    mask = replace(inputs.mask, valid=None)
    return replace(inputs, k=inputs.k[:, :, start:stop], v=inputs.v[:, :, start:stop], mask=mask)


@given(
    cases(batch=1, boolean=None, causal=None, padding=None, empty_batch=False, rope=None, **PLACED),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_padding_is_slicing(case, before, after):
    inputs = inputs_of(replace(case, seqlen_k=case.seqlen_k + before + after))
    stop = before + case.seqlen_k
    valid = torch.zeros(1, inputs.k.shape[2], dtype=torch.bool, device=DEVICE)
    valid[:, before:stop] = True
    got = testing.run(triton_attention, replace(inputs, mask=masks.padding(valid)))
    expected = testing.run(triton_attention, sliced(inputs, before, stop))
    for name in ("dk", "dv"):
        assert int((got[name] != 0)[:, :, ~valid[0]].sum()) == 0
        got[name] = got[name][:, :, before:stop]
    assert_same(got, expected)


# Features that count from the end, like the mask.
FROM_THE_END = ("window", "alibi", "relative", "score_mod", "softcap", "head_dim_v", "bias_dtype")
OTHERS = {name: value for name, value in FEATURES.items() if name not in FROM_THE_END}


@pytest.mark.thorough
@given(
    cases(batch=1, boolean=None, causal="bottom_right", padding=None, empty_batch=False, **OTHERS), st.integers(1, 40)
)
def test_left_padding_is_slicing_under_a_causal_mask(case, before):
    """The usual shape of a padded prompt: the causal mask and the positions are aligned to the end."""
    case = replace(case, seqlen_q=case.seqlen_k, rope_tables="shared", rope_positions=False)
    full = inputs_of(replace(case, seqlen_q=case.seqlen_k + before, seqlen_k=case.seqlen_k + before))
    valid = torch.arange(full.k.shape[2], device=DEVICE) >= before
    rope = full.rope
    if rope is not None:  # a key keeps its position when padding moves it
        positions = (torch.arange(full.k.shape[2], device=DEVICE) - before).clamp(min=0)
        full = replace(full, rope=rope.at(positions, positions.clone()))
    got = testing.run(triton_attention, replace(full, mask=full.mask & masks.padding(valid[None])))
    bias = full.bias
    if bias is not None and case.relative == "per_query":
        bias = replace(bias, relative=bias.relative[:, :, before:])
    short = replace(
        full,
        **{n: getattr(full, n)[:, :, before:].contiguous() for n in ("q", "k", "v", "dout", "dlse")},
        rope=rope,
        bias=bias,
    )
    expected = testing.run(triton_attention, short)
    for name in ("out", "dq", "dk", "dv"):
        assert int((got[name][:, :, :before] != 0).sum()) == 0, name
    assert int((got["lse"][:, :, :before] != -math.inf).sum()) == 0
    # Query tiles start at other rows, so sums run in another order.
    for name, x in expected.items():
        eps = torch.finfo(x.dtype).eps if name != "lse" else torch.finfo(torch.float32).eps
        y = got[name] if got[name].shape == x.shape else got[name][:, :, before:]
        torch.testing.assert_close(y, x, rtol=8 * eps, atol=8 * eps * x.abs().max().item())


@given(
    cases(causal=None, padding=None, empty_batch=False, boolean=None, rope=None, **PLACED),
    st.randoms(use_true_random=False),
)
def test_the_order_of_keys_does_not_matter(case, random):
    inputs = inputs_of(case)
    order = list(range(case.seqlen_k))
    random.shuffle(order)
    at = torch.tensor(order, device=DEVICE)
    shuffled = replace(inputs, k=inputs.k[:, :, at], v=inputs.v[:, :, at])
    truth = testing.golden(inputs)
    restored = testing.golden(shuffled)
    back = at.argsort()
    for name in ("dk", "dv"):
        restored[name] = restored[name][:, :, back]
    torch.testing.assert_close(restored, truth)
    assert_accurate(triton_attention, shuffled, case)


def test_a_case_prints_as_the_call_that_makes_it():
    """A failure prints the ``repr``, so it must evaluate to the same case."""
    case = replace(Case(rope="half", dtype=torch.bfloat16, scale=0.3, window=(3, None), bias="full"), name="it's")
    assert eval(repr(case), {"Case": Case, "torch": torch}) == case
