"""Neither the way in which tiles are loaded nor the order of products changes a bit of a result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedattn import Rope, attention_varlen, masks, testing
from fusedattn.kernels import configs
from fusedattn.kernels.descriptors import tiles_of
from fusedattn.testing.cases import Case
from tests.conftest import DEVICE, INTERPRETING, assert_accurate, assert_equal, inputs_of, triton_attention
from tests.helpers import quick
from tests.helpers.interpreted import seen_launches

pytestmark = [pytest.mark.usefixtures("poison", "_seed")]

interpreted = pytest.mark.skipif(not INTERPRETING, reason="the style of a GPU is that of its table")

CASES = [
    Case("plain", batch=1, seqlen_q=70, seqlen_k=133, dtype=torch.float16),
    Case("causal", batch=1, seqlen_q=90, seqlen_k=140, causal="bottom_right", rope="half", head_dim=24),
    Case("window", batch=1, seqlen_q=140, seqlen_k=140, window=(70, 9), padding="left", dtype=torch.bfloat16),
    Case("one key more", seqlen_q=1, seqlen_k=65, head_dim=40, head_dim_v=16),
    Case("less than a block", seqlen_q=5, seqlen_k=3),
    Case("dropout", batch=1, seqlen_q=70, seqlen_k=133, dropout_p=0.3, causal="top_left", dtype=torch.float16),
]


def use_style(monkeypatch: pytest.MonkeyPatch, style: configs.Style, *, persistent: int = 0) -> None:
    names = ("fwd", "dkdv", "dq")
    tiles = {name: replace(getattr(configs.INTERPRETER, name), style=style) for name in names}
    tiles["fwd"] = replace(tiles["fwd"], persistent=persistent)
    monkeypatch.setattr(configs, "INTERPRETER", configs.KernelConfigs(**tiles))


@quick.every(3, start=2)
@interpreted
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_styles_agree_bit_for_bit(monkeypatch, case):
    inputs = inputs_of(case)
    use_style(monkeypatch, "pointers")
    expected = testing.run(triton_attention, inputs)
    for style in ("descriptors", "pipelined"):
        use_style(monkeypatch, style)
        assert_equal(testing.run(triton_attention, inputs), expected)


@quick.every(3)
@interpreted
@pytest.mark.parametrize(
    "case",
    [
        Case("half", batch=2, nheads_q=4, nheads_kv=2, seqlen_q=70, seqlen_k=90, causal="bottom_right", rope="half"),
        Case("some", batch=1, nheads_q=2, seqlen_q=70, seqlen_k=300, rope="interleaved", dtype=torch.float16),
        testing.CASES[-1],
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_queries_that_are_rotated_before_are_the_same_bit_for_bit(monkeypatch, case):
    inputs = inputs_of(case)
    with seen_launches() as launches:
        expected = testing.run(triton_attention, inputs)
    before = [kernel for kernel, _ in launches].count("qk_prologue")
    rotating = replace(configs.INTERPRETER, fwd=replace(configs.INTERPRETER.fwd, prerotate_q=True))
    monkeypatch.setattr(configs, "INTERPRETER", rotating)
    with seen_launches() as launches:
        found = testing.run(triton_attention, inputs)
    assert [kernel for kernel, _ in launches].count("qk_prologue") == before + 1
    assert_equal(found, expected)


@interpreted
@pytest.mark.parametrize(
    ("rope", "features"),
    [("half", {}), ("interleaved", {"dropout_p": 0.2, "sinks": True}), (None, {"dtype": torch.float32})],
    ids=["half", "interleaved", "float32"],
)
def test_large_tiles_are_finished_in_pieces(monkeypatch, rope, features):
    """The number of features is no power of two: the last piece is partial, and one may be empty."""
    forward = configs.TileConfig(128, 64, 4, 1, "pipelined", 16)
    keys = configs.TileConfig(64, 128, 4, 1, "descriptors", 16)
    monkeypatch.setattr(configs, "INTERPRETER", configs.KernelConfigs(fwd=forward, dkdv=keys, dq=forward))
    case = Case(
        "wide", batch=1, nheads_q=1, nheads_kv=1, seqlen_q=70, seqlen_k=90, head_dim=256, head_dim_v=200,
        causal="bottom_right", rope=rope, **{"dtype": torch.bfloat16, **features},
    )  # fmt: skip
    assert_accurate(triton_attention, inputs_of(case), case)


@quick.every(5)
@interpreted
@pytest.mark.parametrize("case", [*CASES, testing.CASES[-1]], ids=lambda case: case.name)
def test_persistent_programs_agree_bit_for_bit(monkeypatch, case):
    """The number of programs does not divide tiles, heads or sequences, or exceeds the number of tiles."""
    inputs = inputs_of(case)
    found = []
    for persistent in (0, 1, 1000):
        use_style(monkeypatch, "pipelined", persistent=persistent)
        out, lse = triton_attention(inputs.q, inputs.k, inputs.v, return_lse=True, **inputs.options)
        found.append({"out": out, "lse": lse})
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


@interpreted
def test_persistent_programs_pass_over_tiles_that_packed_sequences_lack(monkeypatch):
    q, k, v = (torch.randn(n, 2, 16) for n in (120, 90, 90))
    cu_seqlens = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 100, 120], [0, 40, 50, 88, 90])]
    found = []
    for persistent in (0, 1):
        use_style(monkeypatch, "pipelined", persistent=persistent)
        out, lse = attention_varlen(
            q, k, v, *cu_seqlens, 97, 40, mask=masks.causal(), return_lse=True, backend="triton"
        )  # fmt: skip
        found.append({"out": out, "lse": lse})
    assert_equal(*found)


@interpreted
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_values_reach_the_same_rows(monkeypatch, value):
    """Visible to all, some or no queries; also in the first block, for which the pipelined order has no weights yet."""
    inputs = inputs_of(Case("", batch=1, nheads_q=1, nheads_kv=1, seqlen_q=80, seqlen_k=90, causal="bottom_right"))
    for place in (0, 40, 85):
        v = inputs.v.clone()
        v[:, :, place] = value
        results = {}
        for style in ("pointers", "pipelined"):
            use_style(monkeypatch, style)
            results[style] = {"out": triton_attention(inputs.q, inputs.k, v, mask=inputs.mask)}
        assert torch.equal(results["pointers"]["out"].isfinite(), results["pipelined"]["out"].isfinite())
        assert torch.equal(
            results["pointers"]["out"].nan_to_num(7.0), results["pipelined"]["out"].nan_to_num(7.0)
        ), place  # fmt: skip


def test_tensors_that_descriptors_address():
    def addressed(x):
        return tiles_of(x, 32, "descriptors") is not None

    x = torch.zeros(2, 4, 32, 16, dtype=torch.float16, device=DEVICE)
    assert addressed(x)
    assert addressed(x.transpose(1, 2).contiguous().transpose(1, 2))
    assert addressed(x[:, 1:, 5:])
    assert addressed(x[:1].expand(1, 4, 32, 16))
    assert not addressed(x[:1].expand(2, 4, 32, 16))  # stride 0
    assert not addressed(x[:, :, :0])
    assert not addressed(x.flatten()[1:-15].view(-1, 16)[None, None])  # an unaligned address
    assert not addressed(torch.zeros(1, 1, 32, 20, dtype=torch.float16, device=DEVICE)[..., :16])  # odd strides
    assert addressed(torch.zeros(1, 1, 32, 20, device=DEVICE)[..., :16])
    # Strides of dimensions of size 1 do not matter.
    one = torch.zeros(1, 1, 1, 16, dtype=torch.float16, device=DEVICE).as_strided((1, 1, 1, 16), (3, 5, 7, 1))
    tiles = tiles_of(one, 32, "descriptors")
    assert all(stride % 16 == 0 for stride in tiles.strides[:-1])
    assert tiles_of(x, 32, "pointers") is None


@interpreted
def test_tensors_that_cannot_be_described_are_loaded_by_pointers():
    inputs = inputs_of(Case("", nheads_q=2, nheads_kv=2, seqlen_q=70, seqlen_k=100, head_dim=16, head_dim_v=24))
    expected = testing.run(triton_attention, inputs)
    changed = {}
    for name in ("k", "v"):
        x = getattr(inputs, name)
        wide = torch.zeros(*x.shape[:3], x.shape[3] + 1, dtype=x.dtype, device=x.device)
        changed[name] = wide[..., :-1].copy_(x)
        assert tiles_of(changed[name], 16, "descriptors") is None
    assert_equal(testing.run(triton_attention, replace(inputs, **changed)), expected)


ROTATED = [
    Case("causal", nheads_q=4, nheads_kv=2, seqlen_q=5, seqlen_k=70, causal="bottom_right", rope="half", head_dim=16),
    Case("interleaved", seqlen_q=33, seqlen_k=40, rope="interleaved", head_dim=16, dtype=torch.float16),
    Case(
        "partial",
        seqlen_q=1,
        seqlen_k=70,
        rope="half",
        rotary_dim=12,
        head_dim=40,
        padding="uneven",
        dtype=torch.bfloat16,
    ),
    Case("positions", seqlen_q=9, seqlen_k=40, rope="half", head_dim=16, rope_positions=True, padding="left"),
]


@pytest.mark.parametrize("case", ROTATED, ids=lambda case: case.name)
def test_keys_rotated_in_place(monkeypatch, case):
    """The same bits as with a separate rotation kernel, which does not run."""
    inputs = inputs_of(case)
    group = case.nheads_q // case.nheads_kv
    found: dict[int, Any] = {}
    for limit in (group * case.seqlen_q - 1, group * case.seqlen_q):
        monkeypatch.setattr(configs, "ROTATION_IN_PLACE", limit)
        with seen_launches() as launches:
            found[limit] = triton_attention(inputs.q, inputs.k, inputs.v, return_lse=True, **inputs.options)
        assert [kernel for kernel, _ in launches].count("qk_prologue") == (limit < group * case.seqlen_q)
    before, in_place = ({"out": out, "lse": lse} for out, lse in found.values())
    assert_equal(in_place, before)


def test_keys_rotated_in_place_by_the_repair(monkeypatch):
    """A NaN among hidden keys, found because their values are multiplied by weights of zero."""
    inputs = inputs_of(Case("", seqlen_q=5, seqlen_k=70, causal="top_left", rope="half", head_dim=16))
    v = inputs.v.clone()
    v[:, :, 4] = torch.nan  # only the last query sees it
    found = []
    for limit in (0, 440):
        monkeypatch.setattr(configs, "ROTATION_IN_PLACE", limit)
        found.append({"out": triton_attention(inputs.q, inputs.k, v, **inputs.options)})
    assert found[0]["out"][:, :, :4].isfinite().all()
    assert_equal(found[1], found[0])


def test_packed_keys_rotated_in_place(monkeypatch):
    q, k, v = (torch.randn(n, 2, 16, device=DEVICE) for n in (7, 90, 90))
    stops_q, stops_k = (torch.tensor([0, *x], dtype=torch.int32, device=DEVICE) for x in ((3, 3, 7), (40, 50, 88)))
    rope = Rope.from_theta(16, 64, device=DEVICE)
    found = []
    for limit in (3, 4):
        monkeypatch.setattr(configs, "ROTATION_IN_PLACE", limit)
        out = attention_varlen(q, k, v, stops_q, stops_k, 4, 50, mask=masks.causal(), rope=rope, backend="triton")
        found.append({"out": out})
    assert_equal(*found)
