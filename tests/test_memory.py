"""What the kernels touch: inputs lie among NaN, outputs among sentinels, and the interpreter's addresses are checked.

Every tensor has gaps between its rows, heads and batches, and starts at an odd offset. Nothing outside a tensor may
influence a result, nothing outside an output may be written, and each element of each output must be.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import testing
from fusedattn.testing import Case
from tests.accesses import checked_accesses
from tests.conftest import DEVICE, DTYPES, INTERPRETING, assert_equal, triton_attention
from tests.guarded import Guarded, embed, guarded_allocations

pytestmark = pytest.mark.usefixtures("_seed")


def smaller(case: Case) -> Case:
    """With half the heads, and no longer than a few tiles, the last of them ragged."""
    heads = {"nheads_q": case.nheads_q // 2, "nheads_kv": max(1, case.nheads_kv // 2)}
    return replace(case, seqlen_q=min(case.seqlen_q, 41), seqlen_k=min(case.seqlen_k, 43), **heads)


CASES = (
    *map(smaller, testing.CASES),
    Case("four heads", batch=1, seqlen_q=21, seqlen_k=21, boolean="full", padding="uneven"),
    Case("one query, one key", seqlen_q=1, seqlen_k=1, head_dim=1),
    Case("one query", seqlen_q=1, seqlen_k=37, head_dim=24, padding="left", rope="half", rope_tables="per_batch"),
    Case("one key, which one batch hides", seqlen_q=5, seqlen_k=1, padding="right", empty_batch=True, boolean="full"),
    Case("nothing to see", batch=1, seqlen_q=7, seqlen_k=19, padding="right", empty_batch=True),
    Case("one more than a tile", batch=1, seqlen_q=33, seqlen_k=17, causal="top_left", head_dim=33, rope="half",
         rotary_dim=6, rope_positions=True),
    Case("one less than a tile", batch=1, seqlen_q=31, seqlen_k=63, causal="bottom_right", head_dim=65,
         boolean="broadcast"),
)  # fmt: skip


@dataclass(frozen=True)
class Embedded:
    """The inputs of a case, each among values that must not matter."""

    inputs: testing.Inputs
    guards: list[Guarded]

    def assert_unchanged(self, before: list[Tensor]) -> None:
        for guarded, bits in zip(self.guards, before, strict=True):
            assert torch.equal(guarded.bits, bits), f"an input of shape {tuple(guarded.tensor.shape)} was written"


def embedded(inputs: testing.Inputs, *, poisoned: bool = True) -> Embedded:
    guards: list[Guarded] = []

    def put(x: Tensor, order: tuple[int, ...] | None = None) -> Tensor:
        guards.append(embed(x, order, poisoned=poisoned))
        return guards[-1].tensor

    def put_all(owner: Any, *names: str) -> Any:
        return replace(owner, **{name: put(x) for name in names if (x := getattr(owner, name)) is not None})

    mask = put_all(inputs.mask, "valid", "allowed")
    rope = inputs.rope
    if rope is not None:
        rope = put_all(rope, "cos", "sin", "positions_q", "positions_k")
    inputs = replace(
        inputs,
        q=put(inputs.q, (0, 1, 2)),
        k=put(inputs.k, (0, 2, 1)),
        v=put(inputs.v, (2, 0, 1)),
        dout=put(inputs.dout, (1, 0, 2)),
        dlse=put(inputs.dlse),
        mask=mask,
        rope=rope,
    )
    return Embedded(inputs, guards)


def run(inputs: testing.Inputs) -> testing.Results:
    """As testing.run, but the gradients that come in are passed as they are."""
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out, lse = triton_attention(q, k, v, mask=inputs.mask, rope=inputs.rope, scale=inputs.scale, return_lse=True)
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (inputs.dout, inputs.dlse))
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def check(case: Case) -> None:
    """Poisoned and packed inputs give the same bits, and nothing but the outputs is written, all of it."""
    inputs = testing.make_inputs(case, DEVICE)
    poisoned = embedded(inputs)
    before = [x.bits.clone() for x in poisoned.guards]
    # On a GPU it is compute-sanitizer that looks at addresses.
    with checked_accesses() if INTERPRETING else nullcontext() as accesses, guarded_allocations() as allocations:
        got = run(poisoned.inputs)
    # Compiled code may sum in another order where addresses are aligned otherwise.
    expected = run(inputs if INTERPRETING else embedded(inputs, poisoned=False).inputs)
    assert_equal(got, expected)
    poisoned.assert_unchanged(before)
    allocations.check()
    assert (got["dk"].stride(), got["dv"].stride()) == (poisoned.inputs.k.stride(), poisoned.inputs.v.stride())
    assert len(allocations.new) >= 8  # out, lse, row_max, row_sum; delta and shift or factor; dq, dk, dv
    assert accesses is None or {"attention_fwd", "attention_bwd_dkdv", "attention_bwd_dq"} <= set(accesses.launched)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_memory(case):
    check(replace(case, dtype=DTYPES[CASES.index(case) % 3]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tile_larger_than_the_sequence(dtype, monkeypatch):
    from fusedattn.kernels import configs

    tile = configs.TileConfig(64, 64, 4, 1)
    monkeypatch.setattr(configs, "for_tensor", lambda x, dense_mask: configs.KernelConfigs(tile, tile, tile))
    monkeypatch.setattr(configs, "exact_rows_for_tensor", lambda x: tile)
    check(replace(testing.CASES[-1], seqlen_q=13, seqlen_k=21, head_dim=24, dtype=dtype))
