"""The table of configs: which entry a call gets."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import get_args
from unittest.mock import patch

import pytest
import torch

from fusedattn import attention
from fusedattn.kernels import configs
from fusedattn.kernels.configs import Entry, KernelConfigs, TileConfig
from fusedattn.testing import Case, make_inputs, run
from tests.conftest import DEVICE
from tests.helpers.decode_features import tilings


def test_each_kind_of_work_gets_its_own_configs():
    entry = configs.TABLE["sm_90"][2][64]
    found = {work: configs.lookup("sm_90", 50, torch.float16, work) for work in get_args(configs.Work)}
    assert found == {work: getattr(entry, work) for work in found}
    assert len(set(found.values())) == len(found)


@pytest.mark.parametrize(
    ("work", "features"),
    [
        ("streamed", {"causal": "bottom_right", "padding": "right", "rope": "half"}),
        ("pairwise", {"boolean": "broadcast"}),
        ("pairwise", {"mask_function": True}),
        ("biased", {"bias": "per_head", "causal": "bottom_right"}),
        ("biased", {"alibi": True, "sinks": True}),
        ("scored", {"bias": "per_head", "softcap": 2.0}),
        ("scored", {"alibi": True, "dropout_p": 0.5}),
        ("scored", {"relative": "per_head"}),
        ("scored", {"score_mod": True}),
        ("combined", {"bias": "per_head", "documents": "packed"}),
    ],
    ids=str,
)
def test_the_work_of_a_call(work, features):
    case = Case(seqlen_q=20, seqlen_k=20, dtype=torch.float16, **features)
    with patch.object(configs, "lookup", wraps=configs.lookup) as lookup:
        run(partial(attention, backend="triton"), make_inputs(case, DEVICE))
    assert {call.args[-1] for call in lookup.call_args_list} == {work}


def test_work_that_takes_more_registers_gets_smaller_tiles_by_default():
    tile = TileConfig(128, 64, 8, 2)
    entry = Entry(KernelConfigs(tile, tile, tile))
    works = (entry.pairwise, entry.scored, entry.combined)
    assert (entry.pairwise, entry.biased) == (entry.streamed, entry.scored)
    assert [(x.fwd.BLOCK_M, x.fwd.BLOCK_N) for x in works] == [(128, 64), (64, 64), (64, 32)]
    assert [(x.dkdv.BLOCK_M, x.dkdv.BLOCK_N) for x in works] == [(128, 64), (64, 64), (32, 64)]


def test_no_tile_is_smaller_than_a_matrix_instruction():
    assert TileConfig(16, 16, 4, 1).smaller() == TileConfig(16, 16, 4, 1)
    assert TileConfig(64, 128, 4, 1).within(48, 96) == TileConfig(16, 32, 4, 1)


@pytest.mark.parametrize("arch", configs.TABLE)
def test_a_head_dim_gets_the_entry_for_the_next_larger_one(arch):
    table = configs.TABLE[arch][2]
    for smaller, larger in zip(table, list(table)[1:], strict=False):
        assert configs.lookup(arch, smaller, torch.bfloat16) is table[smaller].streamed
        assert configs.lookup(arch, smaller + 1, torch.bfloat16) is table[larger].streamed
    with pytest.raises(NotImplementedError, match="head_dim: got 513"):
        configs.lookup(arch, 513, torch.bfloat16)


def test_a_forward_that_keeps_nothing_for_a_backward_has_its_own_stages(monkeypatch):
    own = replace(configs.INTERPRETER.fwd, num_stages=3, inference_stages=2)
    monkeypatch.setattr(configs, "lookup", lambda *asked: replace(configs.INTERPRETER, fwd=own))
    q, k, v = (torch.randn(1, 2, 40, 16, dtype=torch.float16, device=DEVICE) for _ in range(3))
    with tilings() as found:
        attention(q, k, v, backend="triton")
        attention(q.requires_grad_(), k, v, backend="triton")
    assert [tiling.config.num_stages for tiling in found] == [2, 3]


@pytest.mark.parametrize("field", ["persistent", "inference_stages"])
def test_numbers_of_a_config_are_not_negative(field):
    with pytest.raises(ValueError, match=f"{field}: got -1, allowed are 0 and more"):
        TileConfig(16, 16, 4, 1, **{field: -1})
