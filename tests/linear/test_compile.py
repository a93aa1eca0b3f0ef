"""Linear attention under ``torch.compile`` and ``torch.export``, its operators, and copies of feature maps."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from fusedattn import LinearState, feature_maps, linear_attention
from fusedattn.feature_maps import AnyFeatureMap, Favor, FeatureMap
from fusedattn.linear.triton_backend import linear_attention_bwd, linear_attention_fwd
from fusedattn.testing import triton_functions
from tests.conftest import BACKENDS, DEVICE
from tests.helpers import linear, quick
from tests.helpers.graphs import in_one_graph
from tests.helpers.linear import LinearProblem

pytestmark = [
    pytest.mark.usefixtures("_seed"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]

backends = pytest.mark.parametrize("backend", BACKENDS)

KINDS: dict[str, LinearProblem] = {
    "plain": LinearProblem(seqlen_q=9),
    "everything": LinearProblem(
        seqlen_q=9, nheads_q=4, batch=2, head_dim_v=24, valid="some", initial_state=True, dtype=torch.float16
    ),
    "not causal": LinearProblem(seqlen_q=9, seqlen_k=5, causal=False, feature_map="jit"),
    "sums": LinearProblem(seqlen_q=9, normalize=False, feature_map="softmax"),
    "packed": LinearProblem(seqlen_q=9, lengths=(3, 0, 5), initial_state=True),
    "no tokens": LinearProblem(seqlen_q=0),
}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def arguments(problem: LinearProblem, *, strided: bool = False) -> tuple[Any, ...]:
    """Those of the forward operator."""
    inputs = linear.inputs_of(problem, DEVICE)
    q, k, v = (inputs.leaves[name] for name in "qkv")
    if strided:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    state = [inputs.leaves.get(name) for name in ("kv", "k_sum")]
    options = inputs.options
    key = feature_maps.key_of(options["feature_map"])
    return q, k, v, *state, options["valid"], options["cu_seqlens"], key, options["causal"], options["normalize"]


@quick.only(kind="everything", strided=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strided", [False, True])
def test_opcheck_forward(strided, kind):
    found = [
        x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in arguments(KINDS[kind], strided=strided)
    ]
    torch.library.opcheck(linear_attention_fwd, tuple(found))


@quick.only(kind="everything", strided=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strided", [False, True])
def test_opcheck_backward(strided, kind):
    q, k, v, *state, valid, stops, key, causal, normalize = arguments(KINDS[kind], strided=strided)
    out, den, kv, k_sum = linear_attention_fwd(q, k, v, *state, valid, stops, key, causal, normalize)
    back = [torch.randn_like(x) for x in (out, kv, k_sum)]
    call = (*back, q, k, v, *state, den, valid, stops, key, causal, normalize)
    torch.library.opcheck(linear_attention_bwd, call)


@quick.only(kind=lambda kind: kind != "not causal")
@backends
@pytest.mark.parametrize("kind", ["everything", "not causal", "packed"])
def test_one_graph_forward_and_backward(kind, backend):
    """The same numbers as without a compiler."""
    problem = KINDS[kind]
    if backend == "torch" and problem.lengths is not None:
        pytest.skip("the torch backend reads the lengths on the host")
    inputs = linear.inputs_of(problem, DEVICE)

    def compiled(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        function = torch.compile(linear.on_backend(backend), fullgraph=True, backend="aot_eager")
        return function(q, k, v, **options)

    found = linear.run(compiled, problem, inputs)
    expected = linear.run(linear.on_backend(backend), problem, inputs)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("feature_map", ["elu+1", "jit", "favor"])
def test_one_graph_for_all_lengths(feature_map):
    """The torch backend writes out its loop over chunks for each length."""
    given = linear.map_of(LinearProblem(feature_map=feature_map))

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(q, k, v, feature_map=given, backend="triton")

    call = in_one_graph(function)
    for n in (5, 17, 33):
        q, k, v = (torch.randn(2, 2, n, 16, device=DEVICE) for _ in range(3))
        torch.testing.assert_close(call(q, k, v), function(q, k, v))


@pytest.mark.thorough
@backends
def test_inductor(backend):
    q, k, v = (torch.randn(1, 2, 70, 16, device=DEVICE, requires_grad=True) for _ in range(3))

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(q * 2, k, v, backend=backend) + 1

    compiled = torch.compile(function, fullgraph=True)
    out, expected = compiled(q, k, v), function(q, k, v)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    for x, y in zip(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


class Layer(nn.Module):
    """Linear attention after a state."""

    def __init__(self, feature_map: AnyFeatureMap, backend: str) -> None:
        super().__init__()
        self.feature_map, self.backend = feature_map, backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, k_sum: Tensor) -> Any:
        state, given = LinearState(kv, k_sum), self.feature_map
        out, after = linear_attention(
            q, k, v, feature_map=given, initial_state=state, return_state=True, backend=self.backend
        )
        return out, *after


@pytest.mark.parametrize("feature_map", ["elu+1", "jit"])
def test_an_exported_program_saved_and_loaded(feature_map):
    """With another length."""
    layer = Layer(linear.map_of(LinearProblem(feature_map=feature_map)), "triton")

    def inputs(n: int) -> tuple[Tensor, ...]:
        qkv = (torch.randn(1, 2, n, 16, device=DEVICE) for _ in range(3))
        return (*qkv, torch.rand(1, 2, 16, 16, device=DEVICE), torch.rand(1, 2, 16, device=DEVICE))

    seqlen = Dim("seqlen", min=2, max=1024)
    shapes = (*({2: seqlen},) * 3, None, None)
    program, file = export(layer, inputs(5), dynamic_shapes=shapes), io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded, given = torch.export.load(file).module(), inputs(9)
    torch.testing.assert_close(loaded(*given), layer(*given))


def test_copies_of_a_feature_map():
    """A copy and an unpickled one have the same functions, so that no kernel is compiled again."""
    given = triton_functions.feature_map()
    for other in (copy.copy(given), copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
        assert isinstance(other, FeatureMap)
        assert (other.function, other.derivative, other.eager) == (given.function, given.derivative, given.eager)
        assert other.key == given.key
        assert feature_maps.of_key(feature_maps.key_of(other)).function is given.function


def test_copies_of_random_features():
    given = Favor.draw(16, 24)
    for other in (copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
        assert torch.equal(other.projection, given.projection)
        assert other.projection is not given.projection


def test_copies_of_a_state():
    state = LinearState(torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3))
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert isinstance(other, LinearState)
        assert all(map(torch.equal, other, state))


def test_a_feature_map_by_the_key_that_another_process_saved(monkeypatch):
    """It is found by its functions, if these are registered."""
    given = triton_functions.feature_map()
    monkeypatch.setattr(feature_maps, "_MADE", {})
    found = feature_maps.of_key(given.key)
    assert (found.function, found.derivative) == (given.function, given.derivative)
    with pytest.raises(KeyError, match=r"function: got 'nowhere\.f#0'"):
        feature_maps.of_key("nowhere.f#0 nowhere.g#0")
