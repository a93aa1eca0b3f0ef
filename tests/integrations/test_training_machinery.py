"""Tools that trainers apply to a model: checkpointing, accumulation, hooks, offloading, pickling, CUDA graphs."""

from __future__ import annotations

import contextlib
import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fusedattn import Rope, ScoreMod, attention, attention_varlen, biases, call_checks, fuse, masks
from fusedattn.backends.triton import ops
from fusedattn.kernels import attention_bwd, attention_fwd
from fusedattn.masks import Mask
from fusedattn.testing import triton_functions
from fusedattn.transformer import GPTModel
from tests.conftest import BACKENDS, DEVICE, INTERPRETING
from tests.helpers.copies import through_pickle, through_torch_save

pytestmark = pytest.mark.usefixtures("_seed")

backends = pytest.mark.parametrize("backend", BACKENDS)

BATCH, HEADS, KV_HEADS, SEQLEN, HEAD_DIM = 2, 2, 1, 7, 8

Function = Callable[..., Tensor]


def leaves() -> list[Tensor]:
    """q, k, v, a bias and sinks."""
    shapes = [(BATCH, heads, SEQLEN, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [
        torch.randn(shape, device=DEVICE, requires_grad=True)
        for shape in (*shapes, (BATCH, 1, SEQLEN, SEQLEN), (HEADS,))
    ]


def attend(backend: str, **options: Any) -> Function:
    """Attention as a function of the leaves, with most options."""
    rope = Rope.from_theta(4, SEQLEN, device=DEVICE)

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        mask = masks.causal() & masks.window(4, None)
        return attention(q, k, v, mask=mask, rope=rope, bias=bias, sinks=sinks, backend=backend, **options)

    return function


def gradients(function: Function, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(*inputs).square().sum(), inputs)


def assert_equal(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.fixture
def launches(monkeypatch) -> dict[str, int]:
    """The number of calls of each launcher."""
    counts = {"forward": 0, "backward": 0}

    def counted(name: str, launch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return launch(*args, **kwargs)

    for name, module in (("forward", attention_fwd), ("backward", attention_bwd)):
        monkeypatch.setattr(module, "launch", partial(counted, name, module.launch))
    return counts


@backends
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_checkpointing(backend, use_reentrant, dropout_p):
    """The second computation draws the same dropout. Reentrant checkpoints support backward() only."""
    inputs, function = leaves(), attend(backend, dropout_p=dropout_p)
    torch.manual_seed(5)
    checkpoint(function, *inputs, use_reentrant=use_reentrant).square().sum().backward()
    torch.manual_seed(5)
    assert_equal([x.grad for x in inputs], gradients(function, inputs))


@pytest.mark.parametrize("saved", [True, False])
def test_selective_checkpointing(launches, saved):
    """If attention's results are saved, only the rest of the block is computed again."""
    inputs, function = leaves(), attend("triton", dropout_p=0.3)
    runs = 0

    def block(*x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return function(*x).tanh()

    def context_fn() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.fusedattn.attention_fwd.default] if saved else [])

    torch.manual_seed(5)
    found = gradients(lambda *x: checkpoint(block, *x, use_reentrant=False, context_fn=context_fn), inputs)
    assert runs == 2
    assert launches == {"forward": 1 if saved else 2, "backward": 1}
    torch.manual_seed(5)
    assert_equal(found, gradients(block, inputs))


def test_selective_checkpointing_by_a_policy(launches):
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        ours = op is torch.ops.fusedattn.attention_fwd.default
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    model = fuse(GPTModel(11, 16, 2, 2, max_len=16, positions="rotary").to(DEVICE), backend="triton")
    ids = torch.randint(11, (1, SEQLEN), device=DEVICE)
    context_fn = partial(create_selective_checkpoint_contexts, policy)
    checkpoint(model, ids, use_reentrant=False, context_fn=context_fn).sum().backward()
    assert launches == {"forward": 2, "backward": 2}
    found = [parameter.grad for parameter in model.parameters()]
    assert_equal(found, torch.autograd.grad(model(ids).sum(), list(model.parameters())))


@backends
def test_accumulated_gradients_are_those_of_all_batches(backend):
    """The sum over parts of the batch is the same up to the order of addition."""
    inputs, function = leaves(), attend(backend)
    expected = gradients(function, inputs)
    *by_batch, sinks = inputs
    for part in (slice(0, 1), slice(1, 2)):
        function(*(x[part] for x in by_batch), sinks).square().sum().backward()
    torch.testing.assert_close([x.grad for x in inputs], list(expected))


@backends
def test_a_kept_graph_gives_the_same_again(backend):
    inputs = leaves()
    loss = attend(backend)(*inputs).square().sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    assert_equal(torch.autograd.grad(loss, inputs), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, inputs)


@backends
def test_gradients_of_one_input_alone(backend):
    inputs, function = leaves(), attend(backend)
    expected = gradients(function, inputs)
    for i, x in enumerate(inputs):
        (found,) = torch.autograd.grad(function(*inputs).square().sum(), x)
        torch.testing.assert_close(found, expected[i])
        alone = function(*(y if y is x else y.detach() for y in inputs)).square().sum()
        torch.testing.assert_close(torch.autograd.grad(alone, x)[0], expected[i])


@backends
def test_one_of_two_results(backend):
    """A gradient of out or lse alone equals one with zeros for the other."""
    inputs, function = leaves(), attend(backend, return_lse=True)
    out, lse = function(*inputs)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    for chosen, given, other in ((out, dout, lse), (lse, dlse, out)):
        found = torch.autograd.grad(chosen, inputs, given, retain_graph=True, allow_unused=True)
        grads = (given, torch.zeros_like(other))
        expected = torch.autograd.grad((chosen, other), inputs, grads, retain_graph=True)
        for f, e in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.zeros_like(e) if f is None else f, e)


def in_another_layout(x: Tensor) -> Tensor:
    """Keep the numbers, with gaps between elements of the last dimension."""
    return torch.stack((x, x), dim=-1)[..., 0]


on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="pinned memory is for a GPU")
HOOKS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "double, on the CPU": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda x: (x.device, x.dtype, x.double().cpu() if x.is_floating_point() else x.cpu()),
        lambda packed: packed[2].to(*packed[:2]),
    ),
    "another layout": lambda: torch.autograd.graph.saved_tensors_hooks(in_another_layout, lambda x: x),
    "nothing": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "on the CPU": torch.autograd.graph.save_on_cpu,
    "pinned": partial(torch.autograd.graph.save_on_cpu, pin_memory=True),
}


@backends
@pytest.mark.parametrize("kind", [*list(HOOKS)[:-1], pytest.param("pinned", marks=on_a_gpu)])
def test_hooks_on_saved_tensors(backend, kind):
    inputs, function = leaves(), attend(backend)
    with HOOKS[kind]():
        loss = function(*inputs).square().sum()
    found, expected = torch.autograd.grad(loss, inputs), gradients(function, inputs)
    if kind == "another layout":
        torch.testing.assert_close(found, expected)
    else:
        assert_equal(found, expected)


def test_hooks_that_change_the_layout_of_16_bits():
    """16-bit inputs save one more tensor: the rounding residual of out."""
    inputs = [x.detach().half().requires_grad_() for x in leaves()[:3]]
    function = partial(attention, mask=masks.causal(), backend="triton")
    with torch.autograd.graph.saved_tensors_hooks(in_another_layout, lambda x: x):
        loss = function(*inputs).float().square().sum()
    assert_equal(torch.autograd.grad(loss, inputs), gradients(lambda *x: function(*x).float(), inputs))


def test_a_saved_tensor_that_was_overwritten_is_noticed():
    inputs = leaves()
    k = inputs[1] * 1.0
    loss = attend("triton")(inputs[0], k, *inputs[2:]).sum()
    k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_on_tensors_and_nodes():
    inputs, seen, accumulated = leaves(), [], []
    out = attend("triton")(*inputs)
    out.register_hook(lambda grad: 2.0 * grad)
    out.grad_fn.register_hook(lambda dinputs, douts: seen.append(type(out.grad_fn).__name__))
    inputs[0].register_hook(torch.zeros_like)
    inputs[1].register_post_accumulate_grad_hook(lambda x: accumulated.append(x.grad))
    out.sum().backward()
    assert "Attention" in seen[0]
    assert inputs[0].grad.eq(0).all()
    fresh = [x.detach().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(attend("triton")(*fresh).sum() * 2.0, fresh[1])
    assert_equal(accumulated, expected)


@backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(backend, dtype):
    """As if the inputs had been cast explicitly; the gradients come back in float32."""
    q, k, v = leaves()[:3]
    function = partial(attention, mask=masks.causal(), backend=backend)
    with torch.autocast(DEVICE, dtype=dtype):
        out = function(q, k, v)
    assert out.dtype == dtype
    found = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    cast = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(function(*cast).float().square().sum(), cast)
    assert all(x.dtype == torch.float32 for x in found)
    assert_equal(found, [x.float() for x in expected])
    with torch.autocast(DEVICE, dtype=dtype), torch.autocast(DEVICE, enabled=False):
        assert function(q, k, v).dtype == torch.float32


@backends
def test_autocast_and_checkpointing(backend):
    inputs, function = leaves()[:3], partial(attention, mask=masks.causal(), backend=backend)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = checkpoint(function, *inputs, use_reentrant=False).float().square().sum()
        expected = function(*inputs).float().square().sum()
    assert_equal(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs))


def test_autocast_of_packed_sequences():
    q, k, v = (torch.randn(9, heads, HEAD_DIM, device=DEVICE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    stops = torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = attention_varlen(q, k, v, stops, stops, 5, 5, backend="triton")
    expected = attention_varlen(*(x.bfloat16() for x in (q, k, v)), stops, stops, 5, 5, backend="triton")
    assert torch.equal(out, expected)


class OwnScores(nn.Module):
    """A layer whose score function has learned parameters."""

    def __init__(self) -> None:
        super().__init__()
        score_mod = triton_functions.score_function(HEADS, torch.Generator()).to(DEVICE)
        self.gains = nn.Parameter(score_mod.args[0])
        self.score_mod = replace(score_mod, args=(self.gains, *score_mod.args[1:]))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, score_mod=self.score_mod)


def options_of_every_kind() -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.ones(1, HEADS, 1, 1, dtype=torch.bool)
    valid = torch.rand(BATCH, SEQLEN, generator=generator) < 0.8
    ids = torch.arange(SEQLEN).expand(BATCH, -1) // 3
    every = masks.causal() & masks.padding(valid) & masks.documents(ids) & masks.prefix_lm(torch.arange(BATCH))
    rope = Rope.from_theta(8, 32)
    return {
        "mask": {"mask": every & masks.boolean(valid[:, None, None]) & masks.block_sparse(blocks, 16)},
        "mask function": {"mask": triton_functions.mask_function(BATCH, HEADS, generator)},
        "rope": {"rope": rope.at(None, torch.arange(SEQLEN) + 3).at(torch.arange(SEQLEN), None)},
        "bias": {"bias": biases.alibi(biases.alibi_slopes(HEADS)) + biases.t5(torch.randn(8, HEADS))},
        "score function": {"score_mod": triton_functions.score_function(HEADS, generator)},
    }


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize("kind", options_of_every_kind())
def test_values_are_copied_and_pickled(kind, copied):
    options = {name: x.to(DEVICE) for name, x in options_of_every_kind()[kind].items()}
    again = {name: copied(x) for name, x in options.items()}
    q, k, v, *_ = leaves()
    assert torch.equal(attention(q, k, v, **again), attention(q, k, v, **options))
    assert all(again[name] is not x for name, x in options.items())


@pytest.mark.parametrize("copied", [copy.deepcopy, through_torch_save])
def test_a_model_is_copied_with_the_parameters_of_its_function(copied):
    model = OwnScores()
    again = copied(model)
    assert again.score_mod.args[0] is again.gains
    assert again.gains is not model.gains
    q, k, v, *_ = leaves()
    again(q, k, v).square().sum().backward()
    model(q, k, v).square().sum().backward()
    assert torch.equal(again.gains.grad, model.gains.grad)
    assert model.gains.grad.abs().min() > 0


@pytest.mark.parametrize("value", ["mask", "score_mod"])
def test_a_function_inside_a_function_is_not_pickled_but_copied(value):
    @triton.jit
    def inner(batch, head, q_index, k_index, args):
        return q_index >= k_index

    made: Any = masks.function(inner) if value == "mask" else ScoreMod(inner, inner)
    with pytest.raises(pickle.PicklingError, match=r"function: got .*<locals>.*at the top of a module"):
        pickle.dumps(made)
    assert copy.deepcopy(made) is not made


OTHER_PROCESS = """
import pickle, sys
import torch
from fusedattn import attention
options, q, expected = pickle.load(open(sys.argv[1], "rb"))
assert torch.equal(attention(q, q, q, **options), expected)
"""


def test_functions_keep_their_meaning_in_another_process(tmp_path):
    """The other process has registered functions in another order, or none at all."""
    generator = torch.Generator().manual_seed(0)
    options = {
        "mask": triton_functions.mask_function(BATCH, HEADS, generator).to(DEVICE),
        "score_mod": triton_functions.score_function(HEADS, generator).to(DEVICE),
    }
    q = torch.randn(BATCH, HEADS, SEQLEN, HEAD_DIM, device=DEVICE)
    path = tmp_path / "call.pickle"
    path.write_bytes(pickle.dumps((options, q, attention(q, q, q, **options))))
    subprocess.run([sys.executable, "-c", OTHER_PROCESS, str(path)], check=True, timeout=120)


@pytest.fixture
def graph_stream() -> Iterator[torch.cuda.Stream]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.current_stream().wait_stream(stream)


def captured(step: Callable[[], tuple[Tensor, ...]], stream: torch.cuda.Stream) -> tuple[Any, tuple[Tensor, ...]]:
    """A graph of one step, and the tensors that it writes; steps before the capture compile the kernels."""
    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        return graph, step()


def masks_for_graphs(valid: Tensor, ids: Tensor) -> dict[str, Mask]:
    return {
        "causal": masks.causal(),
        "padding": masks.causal() & masks.padding(valid),
        "documents": masks.causal() & masks.documents(ids),
        "blocks": masks.block_sparse(torch.ones(1, 1, 1, 1, dtype=torch.bool, device=DEVICE), 16),
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("kind", ["causal", "padding", "documents", "blocks"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_cuda_graph(kind, dropout_p, graph_stream):
    """Capture forward and backward once; replay with other numbers, masks and, with dropout, seeds.

    During a capture, the host's work depends only on shapes, strides, dtypes and Python numbers. Checks read no tensor
    on a GPU. The arguments of masks are computed on the device, by torch functions whose results have the shapes of
    their inputs (sort, searchsorted, cumulative sums). Launchers choose tiles and grids by shape. The dropout seed is
    drawn on the device, and a graph advances its generator at each replay.
    """
    valid = torch.ones(BATCH, SEQLEN, dtype=torch.bool, device=DEVICE)
    ids = torch.zeros(BATCH, SEQLEN, dtype=torch.int64, device=DEVICE)
    inputs = leaves()
    seed = torch.tensor([3], device=DEVICE)
    rope = Rope.from_theta(4, SEQLEN, device=DEVICE)

    def step() -> tuple[Tensor, ...]:
        q, k, v, bias, sinks = inputs
        out = attention(
            q, k, v, mask=masks_for_graphs(valid, ids)[kind], rope=rope, bias=bias, sinks=sinks, dropout_p=dropout_p,
            dropout_seed=seed,
        )  # fmt: skip
        return (out, *torch.autograd.grad(out.square().sum(), inputs))

    graph, results = captured(step, graph_stream)
    for round_ in range(3):
        with torch.no_grad():
            for x in inputs:
                x.normal_()
        valid.copy_(torch.rand(BATCH, SEQLEN, device=DEVICE) < 0.6)
        ids.copy_(torch.randint(3, (BATCH, SEQLEN), device=DEVICE))
        seed.fill_(round_)
        graph.replay()
        assert_equal(results, step())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_cuda_graph_draws_other_dropout_each_time(graph_stream):
    q, k, v, *_ = leaves()

    def step() -> tuple[Tensor, ...]:
        out = attention(q, k, v, dropout_p=0.5)
        return (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))

    graph, results = captured(step, graph_stream)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(results[0].clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_cuda_graph_of_packed_sequences(graph_stream):
    """Replayed with sequences of other lengths: the maximum is fixed, and the device reads their starts."""
    x = [torch.randn(20, heads, HEAD_DIM, device=DEVICE, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    stops = torch.tensor([0, 4, 9, 20], dtype=torch.int32, device=DEVICE)

    def step() -> tuple[Tensor, ...]:
        out = attention_varlen(*x, stops, stops, 12, 12, mask=masks.causal())
        return (out, *torch.autograd.grad(out.square().sum(), x))

    graph, results = captured(step, graph_stream)
    for others in ([0, 12, 12, 15], [0, 1, 2, 3], [0, 8, 16, 20]):
        stops.copy_(torch.tensor(others, dtype=torch.int32))
        graph.replay()
        assert_equal(results, step())


@pytest.mark.skipif(not INTERPRETING, reason="without a GPU the launches can be left out")
@pytest.mark.parametrize("packed", [False, True])
def test_the_host_reads_no_tensor(monkeypatch, packed):
    """Neither before the forward's launches nor the backward's: tensors here have no data, and reading one raises."""
    monkeypatch.setattr(triton.runtime.interpreter.InterpretedFunction, "__getitem__", lambda *_: lambda *_, **__: None)
    for name in ("attention_fwd", "attention_bwd"):
        monkeypatch.setattr(ops, name, getattr(ops, name)._init_fn)
    # These read tensors on a CPU only.
    monkeypatch.setattr(Rope, "check_positions", lambda self: None)
    if packed:
        monkeypatch.setattr(call_checks, "check_packed", lambda *_: None)
        monkeypatch.setattr(call_checks, "check_rope", lambda *_: None)

    with FakeTensorMode():
        kinds, (q, k, v, bias, sinks) = options_of_every_kind(), leaves()
        mask = kinds["mask"]["mask"]
        if packed:  # one sequence per batch
            mask = replace(mask, valid=mask.valid.reshape(1, -1), documents=None)
        score_mod = kinds["score function"]["score_mod"]
        score_mod.args[0].requires_grad_()
        options = {
            "mask": mask & kinds["mask function"]["mask"], "rope": kinds["rope"]["rope"].at(None, None),
            "bias": biases.tensor(bias), "sinks": sinks, "score_mod": score_mod,
            "dropout_p": 0.2, "return_lse": True, "backend": "triton",
        }  # fmt: skip
        if packed:
            stops = torch.arange(BATCH + 1, dtype=torch.int32) * SEQLEN
            rows = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
            out, lse = attention_varlen(*rows, stops, stops, SEQLEN, SEQLEN, **options)
        else:
            out, lse = attention(q, k, v, **options)
        wanted = (q, k, v, bias, sinks, score_mod.args[0])
        found = torch.autograd.grad(out.sum() + lse.sum(), wanted)
        assert [x.shape for x in found] == [x.shape for x in wanted]
        with pytest.raises(DataDependentOutputException):
            bool(found[0].isfinite().all())
