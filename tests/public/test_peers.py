"""Other functions with the arguments of ``attention()``: they compute the same, and name the features they lack.

All but one test use CPU tensors.
"""

from __future__ import annotations

import gc
import re
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fusedattn import Rope, masks, testing
from fusedattn.masks import Mask
from fusedattn.testing import CASES, TENSORS, Case, peers
from fusedattn.testing.peers import PEERS
from tests.conftest import DEVICE
from tests.helpers import quick

# FlexAttention has no sinks and no dropout; torch's function also has no soft-cap and no score function.
FOR_FLEX = [case for case in CASES if not (case.sinks or case.dropout_p)]
FOR_SDPA = [case for case in FOR_FLEX if not (case.softcap or case.score_mod)]
SQUARE = Case("square", nheads_q=2, nheads_kv=2, seqlen_q=8, seqlen_k=8, head_dim=16)


def same_as_golden(name: str, case: Case) -> testing.Measurement:
    """Measure a peer in float64, in which any visible difference means a different problem."""
    inputs = testing.make_inputs(replace(case, dtype=torch.float64))
    found = testing.measure(PEERS[name], inputs)
    assert "out" in found.ratios
    assert found.notes == {}
    truth, actual = testing.golden(found.inputs), {}
    leaves = {name: x.detach().requires_grad_(f"d{name}" in found.ratios) for name, x in inputs.leaves.items()}
    x = inputs.with_leaves(leaves)
    if "lse" in found.ratios:
        actual["out"], actual["lse"] = PEERS[name](x.q, x.k, x.v, return_lse=True, **x.options)
    else:
        actual["out"] = PEERS[name](x.q, x.k, x.v, **x.options)
        needed = {f"d{name}": leaf for name, leaf in leaves.items() if leaf.requires_grad}
        if needed:
            grads = torch.autograd.grad(actual["out"], list(needed.values()), inputs.dout)
            actual |= dict(zip(needed, grads, strict=True))
    for tensor, x in actual.items():
        torch.testing.assert_close(x.double(), truth[tensor], atol=1e-9, rtol=1e-7, msg=lambda m, t=tensor: f"{t}: {m}")
    return found


@pytest.mark.parametrize("case", FOR_SDPA, ids=lambda c: c.name)
def test_sdpa_math_computes_the_same(case):
    assert set(same_as_golden("torch.sdpa-math", case).missing) == {"lse"}


# torch's kernel for CPU tensors gives wrong numbers, and NaN, for a negative scale (torch 2.13).
@pytest.mark.parametrize(
    "case", [c for c in FOR_SDPA if (c.scale or 1.0) > 0.0 and c.head_dim_v is None], ids=lambda c: c.name
)
def test_sdpa_flash_computes_the_same(case):
    parts = {"dbias": case.bias, "drelative": case.relative, "dslopes": case.alibi}
    added = {name for name, part in parts.items() if part}
    assert set(same_as_golden("torch.sdpa-flash", case).missing) == {"lse", *added}


@quick.every(3)
@pytest.mark.parametrize(
    "case",
    [
        *(case for case in FOR_FLEX if not (case.rope or case.padding or case.boolean)),
        *(CASES[i] for i in (6, 8)),
        replace(CASES[-1], sinks=False, dropout_p=0.0),
    ],
    ids=lambda c: c.name,
)
def test_flex_computes_the_same_and_has_no_gradients_on_a_cpu(case):
    torch._dynamo.reset()  # it fails to say why it compiles again for functions that capture other things
    found = same_as_golden("flex", case)
    assert set(found.ratios) == {"out", "lse"}
    assert all("backward on CPU" in reason for reason in found.missing.values())


@pytest.mark.parametrize("name", ["torch.sdpa-efficient", "torch.sdpa-cudnn"])
def test_a_peer_that_needs_a_gpu_says_so(name):
    found = testing.measure(PEERS[name], testing.make_inputs(SQUARE))
    assert found.ratios == {}
    assert set(found.missing) == set(TENSORS)
    assert all(reason.startswith("device: got cpu") for reason in found.missing.values())


@pytest.mark.parametrize("name", ["torch.sdpa-math", "torch.sdpa-flash", "flex"])
@pytest.mark.parametrize(
    ("feature", "reason"),
    [
        ({"sinks": True}, "sinks: .* has none"),
        ({"dropout_p": 0.5}, "dropout_p: .* takes no seed, so that it drops other weights"),
        ({"softcap": 1.0}, "softcap: .* has none"),
        ({"score_mod": True}, "score_mod: .* has none"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_a_feature_without_an_argument_is_refused_with_a_reason(name, feature, reason):
    found = testing.measure(PEERS[name], testing.make_inputs(replace(SQUARE, **feature)))
    if name == "flex" and not {"sinks", "dropout_p"} & set(feature):
        assert "out" in found.ratios
        return
    assert found.ratios == {}
    assert all(re.search(reason, text) for t, text in found.missing.items() if t != "lse")


@pytest.mark.parametrize("name", PEERS)
def test_figures_or_a_reason_for_every_tensor_on_this_device(name):
    """On a GPU, figures for every tensor. The limit only tells a different problem from rounding."""
    case = replace(SQUARE, head_dim=64, causal="bottom_right", dtype=torch.bfloat16)
    found = testing.measure(PEERS[name], testing.make_inputs(case, DEVICE))
    assert set(found.ratios) ^ set(found.missing) == set(TENSORS)
    assert all(r.used < 6 for r in found.ratios.values())
    assert all(found.missing.values())


class Call:
    """Replace ``F.scaled_dot_product_attention`` and keep its arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.original = F.scaled_dot_product_attention
        monkeypatch.setattr(F, "scaled_dot_product_attention", self)

    def __call__(self, q, k, v, attn_mask=None, **options):
        self.q, self.attn_mask, self.options = q, attn_mask, options
        flags = torch.backends.cuda
        self.enabled = {
            "math": flags.math_sdp_enabled(),
            "flash": flags.flash_sdp_enabled(),
            "efficient": flags.mem_efficient_sdp_enabled(),
            "cudnn": flags.cudnn_sdp_enabled(),
        }
        return self.original(q, k, v, attn_mask, **options)


@pytest.mark.parametrize(
    ("mask", "seqlen_k", "is_causal"),
    [
        (masks.causal("bottom_right"), 8, True),
        (masks.causal("top_left"), 11, True),
        (masks.causal("bottom_right"), 11, False),
        (masks.causal() & masks.padding(torch.ones(1, 8, dtype=torch.bool)), 8, False),
        (masks.full(), 8, False),
    ],
)
def test_is_causal_only_where_it_means_the_same(monkeypatch, mask, seqlen_k, is_causal):
    call = Call(monkeypatch)
    q, k = torch.randn(1, 2, 8, 16), torch.randn(1, 2, seqlen_k, 16)
    PEERS["torch.sdpa-math"](q, k, k, mask=mask)
    assert call.options["is_causal"] is is_causal
    if is_causal or mask.is_full:
        assert call.attn_mask is None
    else:
        assert torch.equal(call.attn_mask, mask.dense(8, seqlen_k))


@pytest.mark.parametrize("backend", ["math", "flash"])
def test_only_the_one_backend_is_enabled(monkeypatch, backend):
    call = Call(monkeypatch)
    q = torch.randn(1, 2, 8, 16)
    PEERS[f"torch.sdpa-{backend}"](q, q, q)
    assert [name for name, enabled in call.enabled.items() if enabled] == [backend]


def test_rope_is_rounded_to_the_dtype_of_q(monkeypatch):
    call = Call(monkeypatch)
    q, k = torch.randn(2, 1, 2, 8, 16, dtype=torch.bfloat16).unbind()
    rope = Rope.from_theta(16, 8)
    PEERS["torch.sdpa-math"](q, k, k, rope=rope)
    assert torch.equal(call.q, rope.rotate(q, k)[0])
    assert call.q.dtype == torch.bfloat16


def refuse(*_: object, **__: object) -> None:
    """Fail like torch if the one enabled backend cannot run."""
    for text in (
        "Memory efficient kernel not used because: (Triggered internally at a.cpp:1.)",
        "Memory Efficient attention has been runtime disabled. (Triggered internally at a.cpp:2.)",
        "Flash attention kernel not used because: (Triggered internally at a.cpp:3.)",
        "Flash Attention does not support non-null attn_mask. (Triggered internally at a.cpp:4.)",
    ):
        warnings.warn(text, stacklevel=1)
    raise RuntimeError("No available kernel. Aborting execution.")


def test_a_refusal_has_the_reason_of_torch(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(NotImplementedError, match=r"^Flash Attention does not support non-null attn_mask\.$"):
        PEERS["torch.sdpa-flash"](q, q, q)
    found = testing.measure(PEERS["torch.sdpa-flash"], testing.make_inputs(SQUARE))
    assert found.missing["out"].startswith("Flash Attention does not support")


def test_other_errors_of_torch_are_not_refusals(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(F, "scaled_dot_product_attention", fail)
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match="out of luck") as caught:
        PEERS["torch.sdpa-math"](q, q, q)
    assert caught.type is RuntimeError  # not its subclass NotImplementedError


def test_nan_of_a_peer_is_a_finding(monkeypatch):
    """Older torch gives NaN in rows that see nothing; the measurement passes it on."""

    def with_nan(q, k, v, attn_mask, *, scale, **_):
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~attn_mask, -torch.inf)
        return scores.softmax(-1) @ v

    monkeypatch.setattr(F, "scaled_dot_product_attention", with_nan)
    inputs = testing.make_inputs(replace(SQUARE, padding="right", empty_batch=True))
    found = testing.measure(PEERS["torch.sdpa-math"], inputs)
    assert found.notes["out"].endswith("256 of them in rows that see nothing")  # 2 heads, 8 queries, 16 features
    assert not found.ratios["out"].ok


@pytest.mark.parametrize("name", ["torch.sdpa-math", "flex"])
def test_a_mask_is_made_once_and_kept_no_longer_than_it_lives(monkeypatch, name):
    made: list[str] = []

    def counted(name, function):
        def wrapper(*args, **kwargs):
            made.append(name)
            return function(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(Mask, "dense", counted("dense", Mask.dense))
    monkeypatch.setattr(peers, "_block_mask", counted("block", peers._block_mask))
    q = torch.randn(1, 1, 4, 8)
    mask = masks.padding(torch.tensor([[True, True, False, True]]))
    gc.collect()
    before = len(peers._MADE)
    first, second = (PEERS[name](q, q, q, mask=mask) for _ in range(2))
    assert torch.equal(first, second)
    assert made == ["block" if name == "flex" else "dense"]
    longer = torch.randn(1, 1, 6, 8)
    PEERS[name](longer, q, q, mask=mask)  # another shape needs another tensor
    assert len(made) == 2
    del mask
    gc.collect()
    assert len(peers._MADE) == before


def test_find():
    assert peers.find("torch.sdpa-math") == peers.find("sdpa-math") == ("torch.sdpa-math", PEERS["torch.sdpa-math"])
    assert peers.find("flex") == ("flex", PEERS["flex"])
    name = "fusedattn.reference:attention"
    full_name, function = peers.find(name)
    assert full_name == name
    assert function.__module__ == "fusedattn.reference"
    with pytest.raises(
        ValueError, match=r"got 'sdpa', allowed are torch.sdpa-math, .*, flex and package.module:function"
    ):
        peers.find("sdpa")
    with pytest.raises(TypeError, match=r"got 'math:pi', which is a float, allowed are functions"):
        peers.find("math:pi")
    with pytest.raises(ModuleNotFoundError):
        peers.find("no.such.module:attention")
    with pytest.raises(AttributeError):
        peers.find("math:attention")
