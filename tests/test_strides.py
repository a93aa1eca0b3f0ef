"""Layouts: whatever the strides of a tensor, the same numbers."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn import Rope, attention, sdpa, testing
from tests.conftest import (
    BACKENDS,
    EVERYTHING,
    SMALL,
    assert_equal,
    inputs_of,
    leaves,
    options,
    triton_attention,
)

pytestmark = [pytest.mark.usefixtures("poison", "_seed")]

backends = pytest.mark.parametrize("backend", BACKENDS)


def transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def seqlen_first(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def sliced(x: Tensor) -> Tensor:
    return F.pad(x, (3, 5), value=math.nan)[..., 3:-5]


def every_other(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=2)[:, :, ::2]


def over_batch(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape)


def over_heads(x: Tensor) -> Tensor:
    return x[:, :1].expand(x.shape)


def over_seqlen(x: Tensor) -> Tensor:
    return x[:, :, :1].expand(x.shape)


def windows(x: Tensor) -> Tensor:
    """Rows that overlap: each is the one before, shifted by one."""
    seqlen, head_dim = x.shape[2:]
    return torch.cat((x[:, :, 0], x[:, :, :, 0]), dim=-1)[..., : seqlen + head_dim - 1].unfold(-1, head_dim, 1)


LAYOUTS = (transposed, seqlen_first, sliced, every_other, over_batch, over_heads, over_seqlen, windows)


@pytest.mark.parametrize(
    ("layout", "seqlen_q"),
    [*((layout, 5) for layout in LAYOUTS), (seqlen_first, 37), (sliced, 37), (windows, 37)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
@backends
def test_strides(layout, backend, seqlen_q):
    """Any strides whose last is 1, of inputs and of the gradient that comes back: the same numbers."""
    # Nothing that would have the torch backend copy its inputs before torch's own function gets them.
    plain = {"causal": None, "padding": None, "rope": None} if backend == "torch" else {"padding": "right"}
    inputs = inputs_of(replace(SMALL, seqlen_q=seqlen_q, **plain))
    inputs = replace(inputs, **{name: layout(getattr(inputs, name)) for name in ("q", "k", "v", "dout")})
    packed = replace(inputs, **{name: getattr(inputs, name).contiguous() for name in ("q", "k", "v", "dout")})
    function = functools.partial(attention, backend=backend)
    got, expected = testing.run(function, inputs), testing.run(function, packed)
    out = function(inputs.q, inputs.k, inputs.v, **options(inputs))
    out_packed = function(packed.q, packed.k, packed.v, **options(packed))
    if backend == "triton":
        assert_equal({**got, "no lse": out}, {**expected, "no lse": out_packed})
        if layout in (transposed, seqlen_first):
            assert out.stride() == inputs.q.stride()
            assert got["dq"].stride() == inputs.q.stride()
            assert got["dk"].stride() == inputs.k.stride()
    else:
        torch.testing.assert_close({**got, "no lse": out}, {**expected, "no lse": out_packed})


def test_only_rows_that_share_a_part_of_their_memory_overlap():
    """Expanded ones share all of it: they are read where they are, without the copy that expanding avoids."""
    x = torch.randn(2, 3, 7, 16)
    overlap = {layout.__name__: sdpa.rows_overlap(layout(x)) for layout in LAYOUTS}
    assert overlap == {layout.__name__: layout is windows for layout in LAYOUTS}


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_strides_of_one_tensor_alone(name):
    """None is read or written with the strides of another."""
    packed = inputs_of(SMALL)
    inputs = replace(packed, **{name: seqlen_first(getattr(packed, name))})
    assert_equal(testing.run(triton_attention, inputs), testing.run(triton_attention, packed))


@pytest.mark.parametrize("layout", [over_batch, over_seqlen, lambda x: x[..., :1].expand(x.shape)])
def test_strides_of_the_gradient_alone(layout):
    """``out.sum().backward()`` brings a gradient whose strides are all 0."""
    inputs = inputs_of(SMALL)
    inputs = replace(inputs, dout=layout(inputs.dout), dlse=inputs.dlse[:1, :1, :1].expand(inputs.dlse.shape))
    packed = replace(inputs, dout=inputs.dout.contiguous(), dlse=inputs.dlse.contiguous())
    assert_equal(testing.run(triton_attention, inputs), testing.run(triton_attention, packed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_of_the_gradient_of_lse(dtype):
    """``lse.sum().backward()`` brings one whose strides are all 0; another is transposed."""
    inputs = inputs_of(replace(SMALL, dtype=dtype, padding=None))

    def gradients(dlse: Tensor) -> dict[str, Tensor]:
        x = leaves(inputs)
        _, lse = triton_attention(*x, **options(inputs), return_lse=True)
        return dict(zip("qkv", torch.autograd.grad(lse, x, dlse), strict=True))

    for dlse in (inputs.dlse[:1, :1, :1].expand(inputs.dlse.shape), inputs.dlse.mT.contiguous().mT):
        assert_equal(gradients(dlse), gradients(dlse.contiguous()))


def test_strides_of_masks_tables_and_positions():
    """Whatever their layout, the same numbers."""
    case = replace(EVERYTHING, rope_tables="per_batch", empty_batch=False, boolean="full")
    inputs = inputs_of(case)
    assert inputs.rope is not None
    mask, rope = inputs.mask, inputs.rope
    assert mask.valid is not None
    assert mask.allowed is not None
    assert rope.positions_q is not None

    def strided(x: Tensor) -> Tensor:
        """Every second element of every second row of something larger."""
        big = torch.stack((x, ~x if x.dtype == torch.bool else x + 1), dim=-1).flatten(-2)
        return torch.stack((big, big), dim=-2).flatten(-3, -2)[..., ::2, ::2]

    assert torch.equal(strided(mask.valid), mask.valid)
    other = replace(
        inputs,
        mask=replace(mask, valid=strided(mask.valid), allowed=strided(mask.allowed)),
        rope=Rope(
            strided(rope.cos),
            strided(rope.sin),
            rope.interleaved,
            strided(rope.positions_q).int(),
            strided(rope.positions_k) if rope.positions_k is not None else None,
        ),
    )
    assert_equal(testing.run(triton_attention, other), testing.run(triton_attention, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("repacked", ["floating point", "int8", "all"])
def test_saved_tensors_may_come_back_in_another_layout(repacked, dtype):
    """Hooks that offload or compress what is saved need not keep its strides."""
    inputs = inputs_of(replace(SMALL, dtype=dtype))
    inputs = replace(inputs, **{name: transposed(getattr(inputs, name)) for name in ("q", "k", "v", "dout")})
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
