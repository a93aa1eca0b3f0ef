"""The forward by warps with different tasks: its results in the interpreter, and the calls that it takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedattn import attention, attention_varlen, masks, testing
from fusedattn.kernels import attention_fwd, attention_fwd_specialized, configs
from fusedattn.testing.cases import Case
from tests.conftest import DEVICE, INTERPRETING, assert_budget, assert_equal, inputs_of, triton_attention
from tests.helpers import quick
from tests.helpers.accesses import checked_accesses

pytestmark = [
    pytest.mark.usefixtures("poison", "_seed"),
    pytest.mark.skipif(not INTERPRETING, reason="the style of a GPU is that of its table"),
]

TILE = configs.TileConfig(32, 16, 4, 2, "specialized")


def use(monkeypatch: pytest.MonkeyPatch, tile: configs.TileConfig = TILE) -> None:
    tiles = configs.INTERPRETER
    monkeypatch.setattr(configs, "INTERPRETER", configs.KernelConfigs(tile, tiles.dkdv, tiles.dq))
    monkeypatch.setattr(configs, "ROTATION_IN_PLACE", 0)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the launched kernels, with the config below."""
    use(monkeypatch)
    names: list[str] = []

    def counted(name: str, launch: Callable[..., None]) -> Callable[..., None]:
        def counting(*args: Any, only_nan: bool = False, **named: Any) -> None:
            names.append("repair" if only_nan else name)
            launch(*args, **named, **({"only_nan": True} if only_nan else {}))

        return counting

    for module, name in ((attention_fwd, "attention_fwd"), (attention_fwd_specialized, "specialized")):
        monkeypatch.setattr(module, "launch", counted(name, module.launch))
    return names


TAKEN = [
    Case("full", batch=1, seqlen_q=70, seqlen_k=64, dtype=torch.float16),
    Case("groups of three", batch=1, nheads_q=6, nheads_kv=2, seqlen_q=33, seqlen_k=48, head_dim=24, head_dim_v=40,
         dtype=torch.bfloat16),
    Case("causal", batch=1, seqlen_q=70, seqlen_k=91, causal="bottom_right", dtype=torch.bfloat16),
    Case("causal, top-left", batch=1, seqlen_q=70, seqlen_k=33, causal="top_left", dtype=torch.float16),
    Case("empty rows", batch=1, seqlen_q=90, seqlen_k=51, causal="bottom_right", dtype=torch.bfloat16),
    Case("window", batch=1, seqlen_q=91, seqlen_k=91, window=(37, 9), dtype=torch.float16),
    Case("behind", batch=1, seqlen_q=40, seqlen_k=91, window=(37, None), dtype=torch.bfloat16),
    Case("nine queries", seqlen_q=9, seqlen_k=33, causal="bottom_right", dtype=torch.float16),
    Case("one key", batch=1, seqlen_q=33, seqlen_k=1, causal="top_left", dtype=torch.float16),
    Case("RoPE", batch=1, seqlen_q=50, seqlen_k=60, causal="bottom_right", rope="half", dtype=torch.bfloat16),
    Case("partial RoPE", batch=1, seqlen_q=33, seqlen_k=32, rope="interleaved", rotary_dim=12, rope_positions=True,
         head_dim=40, dtype=torch.float16),
    Case("offset", batch=1, seqlen_q=33, seqlen_k=64, offset=30.0, dtype=torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_budget(launched, case):
    """Outputs, and gradients from the kept statistics, keep the same budget as the other styles."""
    assert_budget(triton_attention, inputs_of(case), case)
    masked = case.causal is not None or case.window is not None
    assert set(launched) == ({"specialized", "repair"} if masked else {"specialized"})


NOT_TAKEN = [
    Case("float32", seqlen_q=33, seqlen_k=32),
    Case("keys that are no whole blocks", seqlen_q=33, seqlen_k=33, dtype=torch.float16),
    Case("few queries", seqlen_q=8, seqlen_k=32, causal="bottom_right", dtype=torch.float16),
    Case("padding", seqlen_q=33, seqlen_k=32, padding="left", dtype=torch.float16),
    Case("boolean", seqlen_q=33, seqlen_k=32, boolean="full", dtype=torch.float16),
    Case("documents", seqlen_q=32, seqlen_k=32, documents="packed", dtype=torch.float16),
    Case("prefix", seqlen_q=32, seqlen_k=32, prefix=True, dtype=torch.float16),
    Case("layout", seqlen_q=32, seqlen_k=32, layout=16, dtype=torch.float16),
    Case("mask function", seqlen_q=32, seqlen_k=32, mask_function=True, dtype=torch.float16),
    Case("soft-cap", seqlen_q=32, seqlen_k=32, softcap=2.0, dtype=torch.float16),
    Case("sinks", seqlen_q=32, seqlen_k=32, sinks=True, dtype=torch.float16),
    Case("dropout", seqlen_q=32, seqlen_k=32, dropout_p=0.5, dtype=torch.float16),
]


@pytest.mark.parametrize("case", NOT_TAKEN, ids=lambda case: case.name)
def test_calls_that_are_not_taken(launched, monkeypatch, case):
    """They run like the same config without specialisation."""
    inputs = inputs_of(case)
    got = triton_attention(inputs.q, inputs.k, inputs.v, **inputs.options)
    assert launched == ["attention_fwd"]
    use(monkeypatch, TILE.plain)
    assert_equal({"out": got}, {"out": triton_attention(inputs.q, inputs.k, inputs.v, **inputs.options)})


def test_tensors_that_are_not_taken(launched):
    """Tensors that descriptors cannot address, packed tensors and empty ones."""
    q, k, v = (torch.randn(1, 2, 32, 16, dtype=torch.float16) for _ in range(3))
    for i in range(3):
        tensors = [q, k, v]
        tensors[i] = torch.zeros(1, 2, 32, 17, dtype=torch.float16)[..., :16].copy_(tensors[i])
        assert_equal(
            {"out": triton_attention(*tensors, mask=masks.causal())},
            {"out": triton_attention(q, k, v, mask=masks.causal())},
        )
        assert launched == ["attention_fwd", "specialized", "repair"]
        launched.clear()
    cu_seqlens = torch.tensor([0, 20, 32], dtype=torch.int32)
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    attention_varlen(*packed, cu_seqlens, cu_seqlens, 20, 20, backend="triton")
    triton_attention(q, k[:, :, :0], v[:, :, :0])
    assert launched == ["attention_fwd", "attention_fwd"]


def test_keys_rotated_in_place_are_not_taken(launched, monkeypatch):
    monkeypatch.setattr(configs, "ROTATION_IN_PLACE", 440)
    inputs = inputs_of(Case(seqlen_q=5, seqlen_k=32, rope="half", dtype=torch.float16))
    triton_attention(inputs.q, inputs.k, inputs.v, **inputs.options)
    assert launched == ["attention_fwd"]


@quick.covering()
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # from NumPy, in the interpreter
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_what_is_not_finite_reaches_who_sees_it(launched, monkeypatch, tensor, value):
    """The same rows as in the other styles, with the value in the first block, in a middle one and in the last."""
    for causal, keys in (("bottom_right", (0, 20, 45)), ("top_left", (20,)), (None, (3,))):
        case = Case("", 1, 2, 1, seqlen_q=40, seqlen_k=50 if causal else 48, causal=causal, dtype=torch.float16)
        inputs = inputs_of(case)
        for key in keys:
            poisoned = {"k": inputs.k.clone(), "v": inputs.v.clone()}
            poisoned[tensor][:, :, key, 5] = value
            found = []
            for tile in (TILE, TILE.plain):
                use(monkeypatch, tile)
                found.append(triton_attention(inputs.q, **poisoned, mask=inputs.mask, return_lse=True))
            (out, lse), (plain, plain_lse) = found
            assert torch.equal(out.isfinite().all(-1), plain.isfinite().all(-1)), (causal, key)
            finite = plain.isfinite().all(-1)
            # Weights are rounded to 16 bits relative to another maximum.
            torch.testing.assert_close(out[finite], plain[finite], atol=2**-11, rtol=2**-10)
            torch.testing.assert_close(lse, plain_lse, equal_nan=True)
    assert "specialized" in launched


def test_values_behind_a_mask_that_are_not_finite_change_no_gradient(launched):
    inputs = inputs_of(Case("", batch=1, seqlen_q=40, seqlen_k=48, causal="top_left", dtype=torch.bfloat16))
    poisoned = replace(inputs, v=inputs.v.index_fill(2, torch.tensor([40, 47]), math.nan))
    got, truth, eager = testing.run(triton_attention, poisoned), testing.golden(inputs), testing.baseline(inputs)
    for name, x in got.items():
        testing.assert_within_budget(x, truth[name], eager[name], name)


def test_the_repair_turns_nothing_again(launched):
    """A hidden NaN with rotated queries and keys: the second kernel must not rotate q again."""
    inputs = inputs_of(
        Case("", batch=1, seqlen_q=40, seqlen_k=48, causal="top_left", rope="half", dtype=torch.float16)
    )  # fmt: skip
    v = inputs.v.index_fill(2, torch.tensor([40]), math.nan)
    out = triton_attention(inputs.q, inputs.k, v, **inputs.options)
    assert launched == ["specialized", "repair"]
    truth, eager = testing.golden(inputs), testing.baseline(inputs)
    testing.assert_within_budget(out, truth["out"], eager["out"], "out")


def test_every_element_is_written_once(launched):
    q = torch.randn(2, 3, 50, 32, dtype=torch.float16)[:, :, 3:, :24]
    k, v = (torch.randn(2, 50, 1, n, dtype=torch.float16).transpose(1, 2)[:, :, 1:49] for n in (24, 40))
    with checked_accesses() as accesses:
        triton_attention(q, k, v)
    assert accesses.launched == ["attention_fwd_specialized"]


def test_no_allocator_of_a_user_is_replaced(launched):
    """The user's allocator, or its absence, is restored."""
    from triton.runtime import _allocation

    before = _allocation._allocator.get()
    q = torch.randn(1, 1, 32, 16, dtype=torch.float16, device=DEVICE)
    attention(q, q, q, backend="triton")
    assert launched == ["specialized"]
    assert _allocation._allocator.get() is before


def test_configs_that_cannot_be():
    with pytest.raises(ValueError, match="num_warps, persistent: got 8, 0, allowed with specialized are 4, 0"):
        configs.TileConfig(128, 64, 8, 2, "specialized")
    with pytest.raises(ValueError, match="num_warps, persistent: got 4, 1"):
        replace(TILE, persistent=1)
    with pytest.raises(ValueError, match="persistent: got -1"):
        configs.TileConfig(128, 64, 8, 2, persistent=-1)
    tiles = configs.INTERPRETER
    with pytest.raises(ValueError, match="dq: got persistent=0 and specialized"):
        configs.KernelConfigs(tiles.fwd, tiles.dkdv, TILE)
    with pytest.raises(ValueError, match="dkdv: got persistent=1"):
        configs.KernelConfigs(tiles.fwd, replace(tiles.dkdv, persistent=1), tiles.dq)


def test_the_plain_config():
    """The same tile without specialisation; a plain config is its own."""
    specialized, plain = (configs.TileConfig(128, 128, *x) for x in ((4, 2, "specialized"), (8, 2, "descriptors")))
    assert specialized.plain == plain == plain.plain
    assert specialized.rotating == plain.rotating
