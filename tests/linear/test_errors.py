"""Arguments of linear attention that do not fit, what a backend refuses, and autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedattn import LinearState, linear_attention
from fusedattn.feature_maps import Favor, FeatureMap
from fusedattn.testing import triton_functions
from tests.conftest import BACKENDS, DEVICE

pytestmark = pytest.mark.usefixtures("_seed")

backends = pytest.mark.parametrize("backend", BACKENDS)

Q = torch.zeros(2, 4, 5, 16, device=DEVICE)
K, V = (torch.zeros(2, 2, 5, n, device=DEVICE) for n in (16, 24))
STATE = LinearState(torch.zeros(2, 2, 16, 24, device=DEVICE), torch.zeros(2, 2, 16, device=DEVICE))
VALID = torch.ones(2, 5, dtype=torch.bool, device=DEVICE)
STOPS = torch.tensor([0, 5], dtype=torch.int32, device=DEVICE)
FAVOR = Favor.draw(16, 16, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)
ONE = {"q": Q[:1], "k": K[:1], "v": V[:1]}

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no tensor": ({"q": None}, TypeError, "q: got NoneType, allowed is a torch.Tensor"),
    "a list": ({"v": [1.0]}, TypeError, "v: got list, allowed is a torch.Tensor"),
    "dimensions": ({"q": Q[0]}, ValueError, r"q: got shape \(4, 5, 16\)"),
    "dtype": ({"q": Q.int()}, TypeError, "q: got .*int32"),
    "dtypes": ({"k": K.half()}, TypeError, "k: got .*float16"),
    "batch": ({"v": V[:1]}, ValueError, "v: got batch 1, allowed is that of q, 2"),
    "heads": ({"q": Q[:, :3]}, ValueError, "q, k: got nheads_q = 3 and nheads_kv = 2, allowed are"),
    "head_dim": ({"k": K[..., :8]}, ValueError, "k: got head_dim 8, allowed is that of q, 16"),
    "lengths of keys and values": ({"v": V[:, :, :3]}, ValueError, "v: got .*, allowed is that of k"),
    "strides": ({"q": torch.zeros(2, 4, 16, 5, device=DEVICE).mT}, ValueError, "q: got strides .* whose last is 1"),
    "device": ({"k": K.to("meta")}, ValueError, "k: got .*meta"),
    "no features": ({"q": Q[..., :0], "k": K[..., :0]}, ValueError, "q: got head_dim 0, allowed is 1 and more"),
    "causal lengths": ({"q": Q[:, :, :3]}, ValueError, "got seqlen_q = 3 and seqlen_k = 5, allowed with causal=True"),
    "causal": ({"causal": 1}, TypeError, "causal: got int, allowed is a bool"),
    "normalize": ({"normalize": None}, TypeError, "normalize: got NoneType, allowed is a bool"),
    "backend": ({"backend": "cuda"}, ValueError, r"backend: got 'cuda', allowed are \('triton', 'torch'\) and None"),
    "a name": ({"feature_map": "elu"}, ValueError, r"feature_map: got 'elu', allowed are 'elu\+1', 'relu', 'softmax'"),
    "no feature map": ({"feature_map": 3}, TypeError, "feature_map: got int, allowed are a name, a FeatureMap"),
    "features of another shape": (
        {"feature_map": lambda x: x.sum(-1)}, ValueError, r"feature_map: got \(2, 4, 5\) for q of shape \(2, ",
    ),
    "features that are no tensor": ({"feature_map": lambda x: 1}, ValueError, "feature_map: got int for q of shape"),
    "features of another dtype": ({"feature_map": lambda x: x.half()}, TypeError, "float16"),
    "a projection of another head_dim": (
        {"feature_map": Favor(torch.zeros(32, 8))}, ValueError, "q, k: got head_dim 16, allowed is that of the .*, 8",
    ),
    "valid is no tensor": ({"valid": [True]}, TypeError, "valid: got list, allowed is a torch.bool tensor"),
    "valid of integers": ({"valid": VALID.int()}, TypeError, "valid: got torch.int32, allowed is a torch.bool tensor"),
    "valid of another shape": ({"valid": VALID[:, :3]}, ValueError, r"valid: got shape \(2, 3\), allowed .*\(2, 5\)"),
    "valid of all heads": ({"valid": VALID[None]}, ValueError, r"valid: got shape \(1, 2, 5\)"),
    "valid elsewhere": ({"valid": VALID.to("meta")}, ValueError, "valid: got device meta, allowed is the device of q"),
    "a state of one tensor": ({"initial_state": STATE.kv}, TypeError, "initial_state: got Tensor, allowed is a Linear"),
    "a state that is a plain tuple": (
        {"initial_state": tuple(STATE)}, TypeError, "initial_state: got tuple, allowed is a LinearState of two tensors",
    ),
    "a state without sums": (
        {"initial_state": LinearState(STATE.kv, None)}, TypeError, "initial_state: got LinearState, allowed is .* two ",
    ),
    "a state of other values": (
        {"initial_state": LinearState(STATE.kv[..., :3], STATE.k_sum)}, ValueError,
        r"initial_state.kv: got shape \(2, 2, 16, 3\), allowed is \(2, 2, 16, 24\)",
    ),
    "a state of other features": (
        {"initial_state": LinearState(STATE.kv, STATE.k_sum[..., :3])}, ValueError,
        r"initial_state.k_sum: got shape \(2, 2, 3\), allowed is \(2, 2, 16\)",
    ),
    "a state of query heads": (
        {"initial_state": LinearState(*(x.repeat_interleave(2, 1) for x in STATE))}, ValueError,
        r"initial_state.kv: got shape \(2, 4, 16, 24\), allowed is \(2, 2, 16, 24\)",
    ),
    "a state of 16 bits": (
        {"initial_state": LinearState(STATE.kv.half(), STATE.k_sum)}, TypeError,
        "initial_state.kv: got torch.float16, allowed is torch.float32",
    ),
    "a state elsewhere": (
        {"initial_state": LinearState(STATE.kv, STATE.k_sum.to("meta"))}, ValueError,
        "initial_state.k_sum: got device meta, allowed is the device of q",
    ),
    "packed batches": ({"cu_seqlens": STOPS}, ValueError, "got batch 2 .*, allowed with cu_seqlens= are a batch of 1"),
    "stops of int64": (ONE | {"cu_seqlens": STOPS.long()}, TypeError, "cu_seqlens: got torch.int64, allowed is .*32"),
    "no stops": (ONE | {"cu_seqlens": STOPS[:0]}, ValueError, r"cu_seqlens: got shape \(0,\), allowed is \(n_seq"),
    "stops elsewhere": (ONE | {"cu_seqlens": STOPS.to("meta")}, ValueError, "cu_seqlens: got device meta"),
    "packed queries of other keys": (
        ONE | {"q": Q[:1, :, :3], "cu_seqlens": STOPS[:1], "causal": False}, ValueError,
        "got batch 1 and lengths 3 and 5, allowed with cu_seqlens= are",
    ),
    "a state of one of two sequences": (
        ONE | {"cu_seqlens": torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE),
               "initial_state": LinearState(STATE.kv[:1], STATE.k_sum[:1])},
        ValueError, r"initial_state.kv: got shape \(1, 2, 16, 24\), allowed is \(2, 2, 16, 24\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@backends
def test_wrong_arguments(backend, name):
    """Alike on both backends: the message names the argument, what it got and what is allowed."""
    changes, error, message = WRONG[name]
    arguments = {"q": Q, "k": K, "v": V, "backend": backend} | changes
    with pytest.raises(error, match=message):
        linear_attention(**arguments)


@pytest.mark.skipif(DEVICE != "cpu", reason="values on a GPU are not read")
@pytest.mark.parametrize("stops", [[1, 5], [0, 4, 3], [0, 6], [0, -1, 5]], ids=str)
@backends
def test_wrong_stops(backend, stops):
    cu_seqlens = torch.tensor(stops, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_seqlens: got \[.*\], allowed begins with 0"):
        linear_attention(**ONE, cu_seqlens=cu_seqlens, backend=backend)


@backends
def test_all_right_ones_are_taken(backend):
    """So that no row above fails for another reason."""
    found = linear_attention(Q, K, V, valid=VALID, initial_state=STATE, return_state=True, backend=backend)
    assert found[0].shape == (2, 4, 5, 24)
    assert linear_attention(**ONE, cu_seqlens=STOPS, backend=backend).shape == (1, 4, 5, 24)


def test_refusals():
    """Each with every reason."""
    x = torch.zeros(1, 1, 3, 257, device=DEVICE)
    with pytest.raises(NotImplementedError, match=r"backend 'triton': .*got 257 features, allowed are 1 .. 256"):
        linear_attention(x, x, x[..., :16], backend="triton")
    with pytest.raises(NotImplementedError, match=r"got 300 features, allowed are 1 .. 256 with backend 'triton'"):
        linear_attention(x[..., :16], x[..., :16], x[..., :16], feature_map=lambda y: y[..., :1].repeat(1, 1, 1, 300),
                         backend="triton")  # fmt: skip
    assert linear_attention(x, x, x[..., :16], backend="torch").shape == (1, 1, 3, 16)
    given = triton_functions.feature_map()
    without = FeatureMap(given.function, given.derivative)
    with pytest.raises(NotImplementedError, match=r"FeatureMap\(..., eager=None\), allowed is a function of torch"):
        linear_attention(Q, K, V, feature_map=without, backend="torch")
    assert linear_attention(Q, K, V, feature_map=without, backend="triton").shape == (2, 4, 5, 24)


def test_a_feature_map_without_eager_has_first_derivatives_only():
    """That of gradients needs it, and says so."""
    given = triton_functions.feature_map()
    without = FeatureMap(given.function, given.derivative)
    q, k, v = (torch.randn(1, 1, 5, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    out = linear_attention(q, k, v, feature_map=without, backend="triton")
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="eager=None"):
        torch.autograd.grad(dq.sum(), q)


def test_what_makes_no_feature_map():
    given = triton_functions.feature_map()
    with pytest.raises(TypeError, match=r"function: got function, allowed is a @triton.jit function"):
        FeatureMap(lambda x: x, given.derivative)
    with pytest.raises(TypeError, match=r"derivative: got NoneType, allowed is a @triton.jit function"):
        FeatureMap(given.function, None)
    with pytest.raises(TypeError, match="eager"):
        FeatureMap(given.function, given.derivative, 3)
    with pytest.raises(TypeError, match=r"projection: got torch\.int64, allowed is a floating-point tensor"):
        Favor(torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(TypeError, match="projection: got list, allowed is a floating-point tensor"):
        Favor([[1.0]])
    with pytest.raises(ValueError, match=r"projection: got shape \(3,\), allowed is \(n_features, head_dim\)"):
        Favor(torch.zeros(3))
    for sizes, name in (((0, 4), "head_dim"), ((4, 0), "n_features"), ((4, -1), "n_features")):
        with pytest.raises(ValueError, match=f"{name}: got .*, allowed are positive numbers"):
            Favor.draw(*sizes)


@pytest.fixture
def mesh(tmp_path):
    """Of one process."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available() or DEVICE != "cpu", reason="a process on a CPU")
@backends
def test_a_dtensor_is_refused(backend, mesh):
    from torch.distributed.tensor import DTensor, Replicate

    q, k, v = (DTensor.from_local(x, mesh, [Replicate()]) for x in (Q, K, V))
    with pytest.raises(NotImplementedError, match="q, k, v, initial_state: got a DTensor, allowed are tensors of one"):
        linear_attention(q, k, v, backend=backend)


@backends
@pytest.mark.parametrize("feature_map", ["elu+1", "softmax", FAVOR, torch.nn.functional.softplus], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(backend, dtype, feature_map):
    """float32 inputs are cast to the autocast dtype, and out has it; the state and the gradients stay float32.

    Nothing is computed in fewer bits than without autocast. A function of torch may be, but may also return float32.
    """
    q, k, v = (torch.randn(1, 2, 9, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    state = LinearState(torch.rand(1, 2, 16, 16, device=DEVICE), torch.rand(1, 2, 16, device=DEVICE))
    options: dict[str, Any] = {
        "initial_state": state, "return_state": True, "feature_map": feature_map, "backend": backend
    }  # fmt: skip
    with torch.autocast(DEVICE, dtype=dtype):
        out, after = linear_attention(q, k, v, **options)
    assert (out.dtype, after.kv.dtype, after.k_sum.dtype) == (dtype, torch.float32, torch.float32)
    cast = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    expected, expected_after = linear_attention(*cast, **options)
    assert expected.dtype == dtype
    assert torch.equal(out, expected)
    assert all(map(torch.equal, after, expected_after))
    dout = torch.randn_like(out)
    found, other = torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, cast, dout)
    assert all(x.dtype == torch.float32 and torch.equal(x, y.float()) for x, y in zip(found, other, strict=True))
