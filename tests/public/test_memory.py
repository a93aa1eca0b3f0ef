"""The memory that kernels touch: inputs lie among NaN, outputs among sentinels, and addresses are checked.

Every tensor has gaps between its rows, heads and batches, and starts at an odd offset. Nothing outside a tensor may
influence a result, nothing outside an output may be written, and every element of an output must be written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import attention_varlen, testing
from fusedattn.testing import Case
from tests.conftest import DEVICE, DTYPES, INTERPRETING, assert_equal, triton_attention
from tests.helpers import quick
from tests.helpers.accesses import checked_accesses
from tests.helpers.embedded import (
    each_tensor,
    embedded,
    kernels_of,
    run,
    smaller,
    splits_keys,
)
from tests.helpers.guarded import embed, guarded_allocations

pytestmark = pytest.mark.usefixtures("_seed")


CASES = (
    *map(smaller, testing.CASES),
    Case("four heads", batch=1, seqlen_q=21, seqlen_k=21, boolean="full", padding="uneven"),
    Case("one query, one key", seqlen_q=1, seqlen_k=1, head_dim=1),
    Case("one query", seqlen_q=1, seqlen_k=37, head_dim=24, padding="left", rope="half", rope_tables="per_batch"),
    Case("one key, which one batch hides", seqlen_q=5, seqlen_k=1, padding="right", empty_batch=True, boolean="full"),
    Case("nothing to see", batch=1, seqlen_q=7, seqlen_k=19, padding="right", empty_batch=True),
    Case("one more than a tile", batch=1, seqlen_q=33, seqlen_k=17, causal="top_left", head_dim=33, rope="half",
         rotary_dim=6, rope_positions=True),
    Case("few queries in splits", seqlen_q=2, seqlen_k=75, nheads_q=6, head_dim=24, padding="right", rope="half",
         sinks=True, head_dim_v=9),
    Case("few queries in one split", seqlen_q=2, seqlen_k=19, nheads_q=6, head_dim=24, sinks=True, head_dim_v=9),
    Case("few queries, dropout", seqlen_q=1, seqlen_k=133, nheads_q=20, nheads_kv=1, padding="right", dropout_p=0.2),
    Case("one less than a tile", batch=1, seqlen_q=31, seqlen_k=63, causal="bottom_right", head_dim=65,
         boolean="broadcast"),
)  # fmt: skip
ALSO_QUICK = (
    "few queries in splits", "few queries in one split", "score function", "documents in any order",
    "relative per query, soft-cap",
)  # fmt: skip

# Changes to the case with every feature: the arguments that each packed sequence has for itself.
PER_SEQUENCE = {"batch": 3, "nheads_q": 2, "nheads_kv": 1, "causal": "bottom_right", "padding": None,
                "empty_batch": False, "documents": None}  # fmt: skip


def check(case: Case) -> None:
    """Poisoned and packed inputs give the same bits. Every output is written completely, and nothing else is."""
    check_inputs(testing.make_inputs(case, DEVICE))


def check_inputs(
    inputs: testing.Inputs, function: Callable[..., Any] = triton_attention, *, in_part: bool = False
) -> None:
    poisoned = embedded(inputs)
    before = [x.bits.clone() for x in poisoned.guards]
    # On a GPU, compute-sanitizer checks the addresses.
    with checked_accesses() if INTERPRETING else nullcontext() as accesses, guarded_allocations() as allocations:
        got = run(poisoned.inputs, function)
    # Compiled code may sum in another order if addresses are aligned differently.
    expected = run(inputs if INTERPRETING else embedded(inputs, poisoned=False).inputs, function)
    assert_equal(got, expected)
    poisoned.assert_unchanged(before)
    # A split without keys leaves its part unwritten; the address check covers the rest.
    allocations.check(in_part=in_part or splits_keys(inputs))
    if function is triton_attention:  # the other functions pass views of q, k and v
        assert (got["dk"].stride(), got["dv"].stride()) == (poisoned.inputs.k.stride(), poisoned.inputs.v.stride())
    assert len(allocations.new) >= 8  # out, lse, row_max, row_sum; delta and shift or factor; dq, dk, dv
    assert accesses is None or set(accesses.launched) == kernels_of(inputs)


@quick.only(case=lambda case: case in CASES[:57:4] or case.name in ALSO_QUICK)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_memory(case):
    check(replace(case, dtype=DTYPES[CASES.index(case) % 3]))


@pytest.mark.thorough
@pytest.mark.parametrize("behind", [0, 3], ids=["to the end", "rows behind"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_sequences(dtype, behind):
    """With every argument that is per sequence or per token; one sequence has no queries."""
    lengths_q, lengths_k = (21, 0, 33), (37, 5, 18)
    n, longest_q, longest_k = len(lengths_q), max(lengths_q), max(lengths_k)
    stops_q, stops_k = (
        embed(torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)).tensor
        for lengths in (lengths_q, lengths_k)
    )
    case = replace(
        testing.CASES[-1], nheads_q=2, nheads_kv=1, dtype=dtype, boolean=None, layout=None, window=None, prefix=False,
        tree=False, mask_function=False, bias=None, alibi=False, relative=None,
    )  # fmt: skip
    inputs = testing.make_inputs(
        replace(case, batch=1, seqlen_q=sum(lengths_q) + behind, seqlen_k=sum(lengths_k) + behind, empty_batch=False,
                rope_tables="shared")
    )  # fmt: skip
    sequences = testing.make_inputs(replace(testing.CASES[-1], **PER_SEQUENCE, seqlen_q=longest_q, seqlen_k=longest_k))
    assert sequences.q.shape[0] == n
    inputs = replace(inputs, mask=inputs.mask & sequences.mask, bias=sequences.bias)

    def packed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out, lse = attention_varlen(q, k, v, stops_q, stops_k, longest_q, longest_k, backend="triton", **options)
        return out.transpose(0, 1)[None], lse[None]

    inputs = each_tensor(inputs, lambda x: x.to(DEVICE))
    check_inputs(inputs, packed, in_part=behind > 0)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tile_larger_than_the_sequence(dtype, monkeypatch):
    from fusedattn.kernels import configs

    tile = configs.TileConfig(64, 64, 4, 1)
    monkeypatch.setattr(configs, "lookup", lambda *asked: configs.KernelConfigs(tile, tile, tile))
    monkeypatch.setattr(configs, "lookup_exact_rows", lambda arch, head_dim: tile)
    # With a layout the tiles would be smaller.
    check(replace(testing.CASES[-1], seqlen_q=13, seqlen_k=21, head_dim=24, layout=None, dtype=dtype))
    check(replace(testing.CASES[-1], seqlen_q=13, seqlen_k=21, head_dim=24, layout=64, dtype=dtype))
