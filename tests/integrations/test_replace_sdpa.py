"""The context in which torch's scaled_dot_product_attention is the package's."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as bound_early
from torch.utils.checkpoint import CheckpointError, checkpoint

from fusedattn import attention
from fusedattn.integrations import torch_functions
from fusedattn.integrations.torch_functions import SdpaReplacement, replace_sdpa
from fusedattn.support import Backend
from tests.conftest import BACKENDS, DEVICE, INTERPRETING
from tests.helpers.sdpa import CLOSE, DTYPE, Overriding, normal

pytestmark = pytest.mark.usefixtures("_seed")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param  # type: ignore[no-any-return]


def operands() -> tuple[Tensor, Tensor, Tensor]:
    return normal(2, 4, 5, 8), normal(2, 4, 7, 8), normal(2, 4, 7, 6)


def test_replaced_inside_and_only_there(backend: Backend) -> None:
    query, key, value = operands()
    expected = attention(query, key, value, backend=backend)
    outside = F.scaled_dot_product_attention(query, key, value)
    with replace_sdpa(backend=backend) as replaced:
        assert torch.equal(F.scaled_dot_product_attention(query, key, value), expected)
        assert torch.equal(bound_early(query, key, value=value), expected)
        assert torch.equal(torch._C._nn.scaled_dot_product_attention(query, key, value), expected)
    assert (replaced.fused, replaced.left_to_torch, replaced.reasons) == (3, 0, {})
    assert torch.equal(bound_early(query, key, value), outside)
    assert replaced.fused == 3
    if backend == "triton":
        assert not torch.equal(expected, outside), "this would prove nothing"


def test_contexts_inside_each_other_and_exceptions(backend: Backend) -> None:
    inputs = operands()
    with replace_sdpa(backend=backend) as outer:
        with replace_sdpa(backend=backend) as inner:
            F.scaled_dot_product_attention(*inputs)
        assert (outer.fused, inner.fused) == (0, 1)
        with pytest.raises(KeyError), inner:
            raise KeyError(F.scaled_dot_product_attention(*inputs))
        with pytest.raises(ValueError, match=r"^query"):
            F.scaled_dot_product_attention(inputs[0][..., :2], *inputs[1:])
        F.scaled_dot_product_attention(*inputs)
        with outer:
            F.scaled_dot_product_attention(*inputs)
    F.scaled_dot_product_attention(*inputs)
    assert (outer.fused, inner.fused) == (2, 2)


def test_decorator(backend: Backend) -> None:
    replaced = replace_sdpa(backend=backend)

    @replaced
    def factorial_of_calls(n: int) -> int:
        """Documented."""
        F.scaled_dot_product_attention(*operands())
        return 1 if n <= 1 else n * factorial_of_calls(n - 1)

    assert factorial_of_calls(3) == 6
    assert replaced.fused == 3
    assert factorial_of_calls.__doc__ == "Documented."
    F.scaled_dot_product_attention(*operands())
    assert replaced.fused == 3

    def generator() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match="generator"):
        replaced(generator)


def test_other_threads_are_not_replaced(backend: Backend) -> None:
    done: list[SdpaReplacement] = []

    def elsewhere() -> None:
        with replace_sdpa(backend=backend) as own:
            F.scaled_dot_product_attention(*operands())
        F.scaled_dot_product_attention(*operands())
        done.append(own)

    with replace_sdpa(backend=backend) as replaced:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert replaced.fused == 0
    assert done[0].fused == 1


def test_another_thread_is_replaced_during_a_call(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, done, compute = operands(), [], torch_functions._attention

    def elsewhere() -> None:
        with replace_sdpa(backend=backend) as own:
            F.scaled_dot_product_attention(*inputs)
        done.append(own.fused)

    def with_another(*args: Any, **kwargs: Any) -> Tensor:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        return compute(*args, **kwargs)

    monkeypatch.setattr(torch_functions, "_attention", with_another)
    with replace_sdpa(backend=backend) as replaced:
        F.scaled_dot_product_attention(*inputs)
    assert (replaced.fused, done) == (1, [1])


def test_fallback_counts_and_logs_each_reason_once(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    query, key, value = operands()
    with caplog.at_level(logging.WARNING), replace_sdpa(backend=backend, fallback=True) as replaced:
        for _ in range(2):
            assert F.scaled_dot_product_attention(query, key, value, dropout_p=1.0).eq(0).all()
        assert F.scaled_dot_product_attention(query.as_subclass(Overriding), key, value) == "its own"
        F.scaled_dot_product_attention(query, key, value)
    assert (replaced.fused, replaced.left_to_torch) == (1, 3)
    assert sorted(replaced.reasons.values()) == [1, 2]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "dropout_p: got 1.0" in messages[0]
    assert "query: got Overriding" in messages[1]
    with replace_sdpa(backend=backend) as strict, pytest.raises(NotImplementedError, match=r"dropout_p: got 1\.0"):
        F.scaled_dot_product_attention(query, key, value, dropout_p=1.0)
    assert (strict.fused, strict.left_to_torch) == (0, 0)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["multihead attention", "encoder layer"])
def test_modules_of_torch(backend: Backend, kind: str, training: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, device=DEVICE, dtype=DTYPE).train(training)
    x = normal(2, 5, 16)
    call = partial(layer, x)
    if kind == "multihead attention":
        padding = torch.arange(5, device=DEVICE) >= torch.tensor([[5], [3]], device=DEVICE)
        call = partial(layer.self_attn, x, x, x, key_padding_mask=padding, need_weights=False)
    with torch.set_grad_enabled(training):
        expected = call()
        with replace_sdpa(backend=backend) as replaced, warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)  # Triton 3.6, interpreted
            actual = call()
    assert replaced.fused == 1
    torch.testing.assert_close(actual, expected, **CLOSE)


def test_a_model_of_transformers(backend: Backend) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(DEVICE, DTYPE).eval()
    ids = torch.randint(30, (2, 5), device=DEVICE)
    seen = torch.arange(5, device=DEVICE) >= torch.tensor([[0], [2]], device=DEVICE)
    expected = model(ids, attention_mask=seen.long()).logits
    with replace_sdpa(backend=backend) as replaced:
        actual = model(ids, attention_mask=seen.long()).logits
    assert replaced.fused == 2
    torch.testing.assert_close(actual[seen], expected[seen], **CLOSE)


# torch has no autograd.grad through reentrant checkpoints.
@pytest.mark.parametrize(
    ("use_reentrant", "call"),
    [(False, "method"), (False, "function"), (False, "grad"), (True, "method"), (True, "function")],
)
def test_checkpointing_recomputes_inside(backend: Backend, use_reentrant: bool, call: str) -> None:
    query, key, value = operands()
    runs: list[int] = []

    def layer(x: Tensor) -> Tensor:
        # Later operations let the recomputation finish attention.
        out = F.scaled_dot_product_attention(x * 1, key, value).sin().exp()
        runs.append(replaced.fused)
        return out * out

    with replace_sdpa(backend=backend) as replaced:
        leaf = query.clone().requires_grad_()
        out = checkpoint(layer, leaf, use_reentrant=use_reentrant).sum()
        if call == "method":
            out.backward()
        elif call == "function":
            torch.autograd.backward([out])
        else:
            (leaf.grad,) = torch.autograd.grad(out, leaf)
        assert replaced.fused == 2
    other = query.clone().requires_grad_()
    layer(other).sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad, **CLOSE)


@pytest.mark.skipif(not INTERPRETING, reason="what torch's own function saves differs from device to device")
def test_checkpointing_that_recomputes_outside_is_noticed_or_harmless(backend: Backend) -> None:
    query, key, value = operands()
    leaf = query.clone().requires_grad_()
    with replace_sdpa(backend=backend) as replaced:
        out = checkpoint(lambda x: F.scaled_dot_product_attention(x * 1, key, value), leaf, use_reentrant=False)
    if backend == "triton":
        with pytest.raises(CheckpointError):
            out.sum().backward()
    else:
        out.sum().backward()
        other = query.clone().requires_grad_()
        F.scaled_dot_product_attention(other, key, value).sum().backward()
        torch.testing.assert_close(leaf.grad, other.grad, **CLOSE)
    assert replaced.fused == 1


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms(backend: Backend) -> None:
    query, key, value = operands()

    def summed(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, key, value).square().sum()

    transformed = {
        "grad": lambda: torch.func.grad(summed)(query),
        "jvp": lambda: torch.func.jvp(summed, (query,), (query,))[1],
        "vmap": lambda: torch.func.vmap(F.scaled_dot_product_attention)(query, key, value),
    }
    expected = {name: function() for name, function in transformed.items()}
    for name, function in transformed.items():
        with replace_sdpa(backend=backend) as replaced:
            torch.testing.assert_close(function(), expected[name], **CLOSE)
        assert replaced.fused == 1


def compiled(function: Callable[..., Tensor], graphs: list[str], **options: Any) -> Callable[..., Tensor]:
    """Compile with dynamo alone; `graphs` collects the attention functions that each graph calls."""
    torch._dynamo.reset()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        targets = [str(node.target) for node in graph.graph.nodes]
        graphs.append("fused" if any("fusedattn.attention_fwd" in target for target in targets) else
                      "torch" if any("scaled_dot_product" in target for target in targets) else "")  # fmt: skip
        return graph.forward

    return torch.compile(function, backend=backend, **options)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_compiled(backend: Backend) -> None:
    """Compiled inside, or outside and called inside: compiled code depends on the context."""
    graphs: list[str] = []

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * 1, k, v, is_causal=True, scale=q.shape[-1] ** -0.4) + 1

    inputs = operands()
    inside = "fused" if backend == "triton" else "torch"
    for begin_inside in (False, True):
        graphs.clear()
        call = compiled(function, graphs, fullgraph=True, dynamic=begin_inside)
        expected = function(*inputs)
        if not begin_inside:
            call(*inputs)
            assert graphs == ["torch"]
        with replace_sdpa(backend=backend) as replaced:
            torch.testing.assert_close(call(*inputs), expected, **CLOSE)
            longer = (inputs[0], *(torch.cat((x, x), -2) for x in inputs[1:]))
            torch.testing.assert_close(call(*longer), function(*longer), **CLOSE)
        assert replaced.fused == 3
        assert inside in graphs
        torch.testing.assert_close(call(*inputs), expected, **CLOSE)
        assert replaced.fused == 3
        assert graphs[-1 if begin_inside else 0] == "torch"


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_compiled_modules_and_fallback(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    graphs: list[str] = []
    module = nn.MultiheadAttention(16, 2, batch_first=True, device=DEVICE, dtype=DTYPE)
    x = normal(2, 5, 16)
    expected, _ = module(x, x, x, need_weights=False)
    call = compiled(lambda x: module(x, x, x, need_weights=False)[0], graphs)
    with replace_sdpa(backend=backend) as replaced:
        torch.testing.assert_close(call(x), expected, **CLOSE)
    assert replaced.fused == 1
    call = compiled(lambda *inputs: F.scaled_dot_product_attention(*inputs, dropout_p=1.0), graphs)
    with caplog.at_level(logging.WARNING), replace_sdpa(backend=backend, fallback=True) as replaced:
        assert call(*operands()).eq(0).all()
    assert replaced.left_to_torch == 1
    assert [record.name for record in caplog.records if record.levelno >= logging.WARNING] == [
        "fusedattn.integrations.torch_functions"
    ]


def test_wrong_arguments_of_the_context() -> None:
    with pytest.raises(ValueError, match=r"^backend: got 'cuda'"):
        replace_sdpa(backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^fallback: got str"):
        replace_sdpa(fallback="yes")  # type: ignore[arg-type]
