"""Attention of e4m3 codes: every call that it does not take, and the reason it gives."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fusedattn import FP8, KVCache, QKNorm, attention, attention_varlen, biases, masks, not_supported_reasons, support
from fusedattn.backends.triton import autograd
from fusedattn.distributed import Context
from fusedattn.pattern_blocks import blocks_and_rule
from tests.conftest import DEVICE, triton_attention
from tests.helpers.interpreted import interpreted

pytestmark = pytest.mark.usefixtures("poison", "_seed")

GRADIENT = "precision: got tensors that require grad, allowed are others, and torch.no_grad()"
IN_A_TRANSFORM = "precision: got FP8 in a transform that differentiates, allowed is None"


def qkv(n: int = 5, head_dim: int = 16, **options: Any) -> list[Tensor]:
    return [torch.randn(1, 2, n, head_dim, device=DEVICE, **options) for _ in range(3)]


def packed(*x: Tensor) -> tuple[Any, ...]:
    """The arguments of one sequence."""
    n = x[0].shape[2]
    ends = torch.tensor([0, n], dtype=torch.int32, device=DEVICE)
    return *(y[0].transpose(0, 1) for y in x), ends, ends, n, n


def reasons(*x: Tensor, **options: Any) -> list[str]:
    """Those of not_supported_reasons, which the call itself must give too."""
    options = {"precision": FP8(), "backend": "triton"} | options
    found = not_supported_reasons(*x, **options)
    if found:
        with pytest.raises(NotImplementedError) as error:
            attention(*x, **options)
        assert str(error.value) == f"attention cannot run on backend {options['backend']!r}: " + "; ".join(found)
    return found


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "slopes", "sinks", "q_weight", "k_weight"])
def test_tensors_that_require_grad(name: str) -> None:
    """Unless nothing is recorded."""
    q, k, v = qkv()
    x = {"q": q, "k": k, "v": v, "bias": torch.randn(2, 5, 5), "slopes": torch.rand(2), "sinks": torch.randn(2),
         "q_weight": torch.rand(16), "k_weight": torch.rand(16)}  # fmt: skip
    x = {key: y.to(DEVICE) for key, y in x.items()}
    x[name].requires_grad_()
    bias = biases.tensor(x["bias"]) + biases.alibi(x["slopes"])
    options: Any = {"bias": bias, "sinks": x["sinks"], "qk_norm": QKNorm(x["q_weight"], x["k_weight"])}
    assert reasons(x["q"], x["k"], x["v"], **options) == [GRADIENT]
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert reasons(x["q"], x["k"], x["v"], **options) == []
            out = triton_attention(x["q"], x["k"], x["v"], **options, precision=FP8())
        assert not out.requires_grad
    x[name].requires_grad_(False)
    assert reasons(x["q"], x["k"], x["v"], **options) == []


def test_a_known_call_is_refused_again() -> None:
    """Also after the same call without a gradient, or without a precision."""
    q, k, v = qkv()
    triton_attention(q, k, v, precision=FP8())
    triton_attention(q.requires_grad_(), k, v)
    with pytest.raises(NotImplementedError, match="require grad"):
        triton_attention(q, k, v, precision=FP8())


def test_transforms_that_differentiate() -> None:
    q, k, v = qkv()

    def function(q: Tensor) -> Tensor:
        return triton_attention(q, k, v, precision=FP8())

    for differentiate in (torch.func.grad(lambda q: function(q).sum()), torch.func.jacrev(function)):
        with pytest.raises(NotImplementedError, match="precision: got tensors that require grad"):
            differentiate(q)
    with pytest.raises(NotImplementedError, match=IN_A_TRANSFORM):
        torch.func.jvp(function, (q,), (q,))
    for grad in (True, False):
        with torch.set_grad_enabled(grad), forward_ad.dual_level():
            dual = forward_ad.make_dual(q, torch.ones_like(q))
            with pytest.raises(NotImplementedError, match=IN_A_TRANSFORM):
                function(dual)


def test_the_torch_backend() -> None:
    q, k, v = qkv()
    assert reasons(q, k, v, backend="torch") == [
        "precision: got FP8 with backend 'torch', allowed is 'triton'; fusedattn.low_precision.attention computes the "
        "same in eager PyTorch"
    ]
    with pytest.raises(NotImplementedError, match="precision: got FP8 with backend 'torch'"):
        attention_varlen(*packed(q, k, v), precision=FP8(), backend="torch")


def test_a_cache() -> None:
    cache = KVCache.contiguous(1, 2, 32, 16, dtype=torch.float32, device=DEVICE)
    (q, *_), options = qkv(), {"precision": FP8(), "backend": "triton"}
    found = not_supported_reasons(q, cache=cache, **options)
    assert found == ["precision: got FP8 with a cache, allowed is one of them"]
    with pytest.raises(NotImplementedError, match=found[0]):
        attention(q, cache=cache, **options)
    found = not_supported_reasons(q.requires_grad_(), cache=cache, **options)
    assert found[0].startswith("cache: got tensors that require grad")


@interpreted
def test_float64() -> None:
    x = qkv(dtype=torch.float64)
    assert reasons(*x) == ["precision: got FP8 with torch.float64, allowed are float16, bfloat16, float32"]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(257, 16), (16, 257), (300, 512)])
def test_more_features_than_a_tile_has(head_dim: int, head_dim_v: int) -> None:
    q, k, _ = qkv(head_dim=head_dim)
    v = qkv(head_dim=head_dim_v)[2]
    most = max(head_dim, head_dim_v)
    assert reasons(q, k, v) == [f"precision: got FP8 with head_dim {most}, allowed are 1 .. 256"]


@pytest.mark.parametrize("size", [16, 48, (32, 16), (64, 80)])
def test_blocks_with_too_few_keys(size: Any) -> None:
    """A product sums 32 bytes; blocks of queries may have any size."""
    block_q, block_k = size if isinstance(size, tuple) else (size, size)
    x = qkv(100)
    shape = -(-100 // block_q), -(-100 // block_k)
    expected = f"precision: got FP8 with block_sparse of {block_k} keys, allowed are multiples of 32"
    blocks = torch.ones(1, 1, *shape, dtype=torch.bool, device=DEVICE)
    assert reasons(*x, mask=masks.block_sparse(blocks, size)) == [expected]
    assert reasons(*x, mask=masks.top_blocks(torch.rand(1, 1, *shape, device=DEVICE), 1, size)) == []
    assert not_supported_reasons(*x, mask=masks.block_sparse(blocks.mT, (block_k, 32)), precision=FP8()) == []


@pytest.mark.parametrize(("precision", "least"), [(FP8(), 32), (None, 16)])
def test_patterns_of_fewer_keys_become_rules(
    precision: FP8 | None, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU nothing else shows it: the interpreter sums any number of bytes."""
    made = []

    def recorded(*arguments: Any) -> Any:
        made.append(blocks_and_rule(*arguments))
        return made[-1]

    monkeypatch.setattr(autograd, "blocks_and_rule", recorded)
    mask = masks.top_blocks(torch.rand(1, 1, 7, 7, device=DEVICE), 2, 16)
    triton_attention(*qkv(100), mask=mask, precision=precision)
    assert [(x.block_k % least, bool(x.rule)) for x in made] == [(0, precision is not None)]


def test_every_reason_at_once() -> None:
    x = [y.requires_grad_() for y in qkv(20, 257)]
    mask = masks.block_sparse(torch.ones(1, 1, 2, 2, dtype=torch.bool, device=DEVICE), 16)
    assert len(reasons(*x, mask=mask)) == 3


@interpreted
@pytest.mark.parametrize(
    ("capability", "got"),
    [
        ((7, 5), "compute capability 7.5"),
        ((8, 0), "compute capability 8.0"),
        ((8, 6), "compute capability 8.6"),
        ((8, 9), None),
        ((9, 0), None),
        ((10, 0), None),
        ((12, 0), None),
        (None, "an AMD GPU"),
    ],
)
def test_other_gpus(capability: Any, got: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedattn.kernels import devices

    monkeypatch.setattr(devices, "capability_of", lambda device: capability)
    monkeypatch.setattr(support, "_is_gpu", lambda device: True)
    monkeypatch.setattr(support, "interpreting", lambda: False)
    expected = [f"precision: got FP8 on {got}, allowed are NVIDIA GPUs of compute capability 8.9 and above"]
    found = not_supported_reasons(*qkv(), precision=FP8(), backend="triton")
    assert [reason for reason in found if "precision" in reason] == (expected if got else [])
    assert "precision" not in str(not_supported_reasons(*qkv(), backend="triton"))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("row",), ValueError, "precision.scales: got 'row', allowed are 'block' and 'tensor'"),
        ((None,), ValueError, "precision.scales: got None"),
        (("block", 1), TypeError, "precision.rotate: got int, allowed are True and False"),
        (("block", None), TypeError, "precision.rotate: got NoneType"),
    ],
)
def test_wrong_precisions(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        FP8(*arguments)


@pytest.mark.parametrize("precision", ["fp8", FP8, torch.float8_e4m3fn, True, 8])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_other_arguments(precision: Any, backend: Any) -> None:
    text = f"precision: got {type(precision).__name__}, allowed are fusedattn.FP8 and None"
    q, k, v = qkv()
    with pytest.raises(TypeError, match=text):
        attention(q, k, v, precision=precision, backend=backend)
    with pytest.raises(TypeError, match=text):
        attention_varlen(*packed(q, k, v), precision=precision, backend=backend)


def test_precisions_are_values() -> None:
    for precision in (FP8(), FP8("tensor", rotate=True)):
        for other in (copy.deepcopy(precision), pickle.loads(pickle.dumps(precision))):
            assert other == precision
            assert hash(other) == hash(precision)
    assert FP8() != FP8("tensor")
    assert FP8() == FP8("block", rotate=False)


@interpreted
def test_the_kernels_for_hopper_take_no_codes() -> None:
    """They would multiply the numbers themselves, of keys that nothing has rotated."""
    from fusedattn.kernels import attention_fwd, hopper

    seen = []

    def takes(q: Tensor, k: Tensor, v: Tensor, results: Any, problem: Any) -> bool:
        seen.append(hopper.reasons_against(q, k, v, results, problem))
        return False

    x = qkv(1100, 128, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "chosen", "all")
        patch.setattr(hopper, "takes", takes)
        patch.setattr(attention_fwd.launcher, "launch", lambda *_: None)
        for precision in (None, FP8()):
            triton_attention(*x, precision=precision)
    assert "codes" not in seen[0]
    assert "codes" in seen[1]


def test_configurations_of_codes() -> None:
    """Each tile lies within 128 tokens, and full blocks begin where boundary blocks do."""
    from fusedattn.kernels import fp8_configs

    found = [tile for tiles in fp8_configs.TILES.values() for tile in tiles.values()]
    for tile in (*found, fp8_configs.INTERPRETER):
        for fitted in (tile, tile.within(160, 96), tile.within(16, 32), tile.within(128, 128)):
            assert fitted.BLOCK_M <= 128
            assert fp8_configs.LEAST_KEYS <= fitted.BLOCK_N <= 128
            assert fitted.boundary_of_keys["BOUNDARY"] == fitted.BLOCK_N
            assert fitted.style == "pointers"
    assert max(fp8_configs.TILES) == support.MAX_HEAD_DIM_OF_FP8
    assert fp8_configs.lookup_fp8("interpreter", 64, "streamed") == fp8_configs.INTERPRETER
    for head_dim, largest in ((1, 64), (64, 64), (65, 128), (128, 128), (129, 256), (256, 256)):
        for work, tile in fp8_configs.TILES[largest].items():
            assert fp8_configs.lookup_fp8("sm_90", head_dim, work) == tile


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """One process, which is a group by itself."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@interpreted
def test_a_context(mesh: DeviceMesh) -> None:
    with pytest.raises(NotImplementedError, match="precision: got FP8 and a context, allowed is one of them"):
        attention(*qkv(), context=Context(mesh), precision=FP8(), backend="triton")
    attention(*qkv(), context=Context(mesh), backend="triton")


@interpreted
def test_scales_of_tensors_that_no_process_holds(mesh: DeviceMesh) -> None:
    x = qkv()
    parts = [DTensor.from_local(y, mesh, [Shard(1)]) for y in x]
    text = "precision.scales: got 'tensor' and DTensors, allowed is 'block'"
    with pytest.raises(NotImplementedError, match=text):
        triton_attention(*parts, precision=FP8("tensor"))
    assert torch.equal(triton_attention(*parts, precision=FP8()).to_local(), triton_attention(*x, precision=FP8()))
