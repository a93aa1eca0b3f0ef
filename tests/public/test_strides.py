"""Layouts: whatever the strides of a tensor, the same numbers."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusedattn import attention, masks, strides, testing
from tests.conftest import (
    BACKENDS,
    DEVICE,
    EVERYTHING,
    SMALL,
    assert_accurate,
    assert_equal,
    inputs_of,
    leaves,
    options,
    triton_attention,
)
from tests.helpers import quick
from tests.helpers.hostile import LAYOUTS, strided

pytestmark = [pytest.mark.usefixtures("poison", "_seed")]

backends = pytest.mark.parametrize("backend", BACKENDS)


KINDS = (
    "transposed", "seqlen_first", "sliced", "every_other", "over_batch", "over_heads", "over_seqlen", "windows",
)  # fmt: skip


@pytest.mark.parametrize("head_dim_v", [1, 3])
@pytest.mark.parametrize("negated", [False, True])
@backends
def test_heads_of_one_feature(backend, negated, head_dim_v):
    """A dimension of one element may have any stride: as large as that of channels, it means ``channels_last``."""
    case = replace(SMALL, nheads_kv=2, seqlen_q=3, head_dim=1, head_dim_v=head_dim_v, rope=None, padding=None)
    inputs = inputs_of(replace(case, scale=-0.5 if negated else None))
    q, k = (x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for x in (inputs.q, inputs.k))
    assert q.stride(3) == k.stride(3) == 2
    assert_accurate(functools.partial(attention, backend=backend), replace(inputs, q=q, k=k))


@quick.only(seqlen_q=5, layout=lambda layout: layout in ("seqlen_first", "sliced", "over_heads", "windows"))
@pytest.mark.parametrize(
    ("layout", "seqlen_q"),
    [*((layout, 5) for layout in KINDS), ("seqlen_first", 37), ("sliced", 37), ("windows", 37)],
)
@backends
def test_strides(layout, backend, seqlen_q):
    """Any strides whose last is 1, of the inputs and of the incoming gradient, give the same numbers."""
    # With other options, the torch backend would copy its inputs before calling torch's own function.
    plain = {"causal": None, "padding": None, "rope": None} if backend == "torch" else {"padding": "right"}
    inputs = inputs_of(replace(SMALL, seqlen_q=seqlen_q, **plain))
    inputs = replace(inputs, **{name: LAYOUTS[layout](getattr(inputs, name)) for name in ("q", "k", "v", "dout")})
    packed = replace(inputs, **{name: getattr(inputs, name).contiguous() for name in ("q", "k", "v", "dout")})
    function = functools.partial(attention, backend=backend)
    got, expected = testing.run(function, inputs), testing.run(function, packed)
    out = function(inputs.q, inputs.k, inputs.v, **options(inputs))
    out_packed = function(packed.q, packed.k, packed.v, **options(packed))
    if backend == "triton":
        assert_equal({**got, "no lse": out}, {**expected, "no lse": out_packed})
        if layout in ("transposed", "seqlen_first"):
            assert out.stride() == inputs.q.stride()
            assert got["dq"].stride() == inputs.q.stride()
            assert got["dk"].stride() == inputs.k.stride()
    else:
        torch.testing.assert_close({**got, "no lse": out}, {**expected, "no lse": out_packed})


def test_only_rows_that_share_a_part_of_their_memory_overlap():
    """Expanded rows share all of their memory: they are read in place, and need no copy."""
    x = torch.randn(2, 3, 7, 16)
    overlap = {layout: strides.rows_overlap(LAYOUTS[layout](x)) for layout in KINDS}
    assert overlap == {layout: layout == "windows" for layout in KINDS}


@quick.every(2)
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_strides_of_one_tensor_alone(name):
    """No tensor is read or written with the strides of another."""
    packed = inputs_of(SMALL)
    inputs = replace(packed, **{name: LAYOUTS["seqlen_first"](getattr(packed, name))})
    assert_equal(testing.run(triton_attention, inputs), testing.run(triton_attention, packed))


@quick.every(2)
@pytest.mark.parametrize(
    "layout",
    [LAYOUTS["over_batch"], LAYOUTS["over_seqlen"], lambda x: x[..., :1].expand(x.shape)],
    ids=["over_batch", "over_seqlen", "over_head_dim"],
)
def test_strides_of_the_gradient_alone(layout):
    """``out.sum().backward()`` gives a gradient whose strides are all 0."""
    inputs = inputs_of(SMALL)
    inputs = replace(inputs, dout=layout(inputs.dout), dlse=inputs.dlse[:1, :1, :1].expand(inputs.dlse.shape))
    packed = replace(inputs, dout=inputs.dout.contiguous(), dlse=inputs.dlse.contiguous())
    assert_equal(testing.run(triton_attention, inputs), testing.run(triton_attention, packed))


@quick.only(dtype=torch.float32)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_of_the_gradient_of_lse(dtype):
    """``lse.sum().backward()`` gives one whose strides are all 0; another is transposed."""
    inputs = inputs_of(replace(SMALL, dtype=dtype, padding=None))

    def gradients(dlse: Tensor) -> dict[str, Tensor]:
        x = leaves(inputs)
        _, lse = triton_attention(*x, **options(inputs), return_lse=True)
        return dict(zip("qkv", torch.autograd.grad(lse, x, dlse), strict=True))

    for dlse in (inputs.dlse[:1, :1, :1].expand(inputs.dlse.shape), inputs.dlse.mT.contiguous().mT):
        assert_equal(gradients(dlse), gradients(dlse.contiguous()))


def test_strides_of_masks_tables_and_positions():
    case = replace(EVERYTHING, rope_tables="per_batch", empty_batch=False, boolean="full")
    inputs = inputs_of(case)
    tables = strided(inputs.rope)
    other = replace(
        inputs,
        mask=strided(inputs.mask),
        rope=replace(tables, positions_q=tables.positions_q.int()),
        bias=strided(inputs.bias),
        sinks=strided(inputs.sinks),
        dropout_seed=strided(inputs.dropout_seed),
    )
    assert_equal(testing.run(triton_attention, other), testing.run(triton_attention, inputs))


def test_strides_of_lengths():
    """Those of int32, the kernels' own dtype, are not copied by a cast."""
    q, k = torch.randn(2, 1, 20, 16, device=DEVICE), torch.randn(2, 1, 40, 16, device=DEVICE)
    lengths = torch.tensor([24, 0, 30, 0], dtype=torch.int32, device=DEVICE)[::2]
    got, expected = (
        {"out": triton_attention(q, k, k, mask=masks.prefix_lm(x))} for x in (lengths, lengths.contiguous())
    )
    assert_equal(got, expected)


@quick.covering()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("repacked", ["floating point", "int8", "all"])
def test_saved_tensors_may_come_back_in_another_layout(repacked, dtype):
    """Hooks that offload or compress saved tensors may change their strides."""
    inputs = inputs_of(replace(SMALL, dtype=dtype))
    inputs = replace(inputs, **{name: LAYOUTS["transposed"](getattr(inputs, name)) for name in ("q", "k", "v", "dout")})
    chosen = {
        "floating point": lambda x: x.is_floating_point(),
        "int8": lambda x: x.dtype == torch.int8,
        "all": lambda x: True,
    }[repacked]

    def other_layout(x: Tensor) -> Tensor:
        return x.mT.contiguous().mT if chosen(x) and x.dim() > 1 else x

    expected = testing.run(triton_attention, inputs)
    with torch.autograd.graph.saved_tensors_hooks(other_layout, lambda x: x):
        assert_equal(testing.run(triton_attention, inputs), expected)


@pytest.mark.parametrize(("nheads_q", "seqlen_k"), [(0, 3), (2, 0)])
def test_gradients_of_nothing_have_the_strides_of_their_tensors(nheads_q, seqlen_k):
    """There are no queries, or no keys."""
    q, k, v = (
        torch.randn(2, n, seqlen, 16, device=DEVICE).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for n, seqlen in ((nheads_q, 5), (2, seqlen_k), (2, seqlen_k))
    )
    grads = torch.autograd.grad(triton_attention(q, k, v).sum(), (q, k, v))
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert not grad.any()
        if x.numel() > 0:
            assert grad.stride() == x.stride()


def test_out_has_the_memory_order_of_q_and_the_width_of_v():
    q, k = (torch.randn(1, n, 2, 24, device=DEVICE).transpose(1, 2) for n in (20, 30))
    out = attention(q, k, torch.randn(1, 2, 30, 40, device=DEVICE), backend="triton")
    assert (out.shape, out.stride()) == ((1, 2, 20, 40), (1600, 40, 80, 1))
