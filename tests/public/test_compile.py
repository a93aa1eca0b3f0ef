"""``torch.compile``, ``torch.library.opcheck`` and activation checkpointing."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fusedattn import QKNorm, Rope, attention, attention_varlen, attention_weights, biases, fuse, masks, testing
from fusedattn.backends.triton.operands import constants_of
from fusedattn.backends.triton.ops import N_DIFFERENTIABLE, attention_bwd, attention_fwd
from fusedattn.masks import Mask
from fusedattn.options import Options
from fusedattn.testing import Case, triton_functions
from fusedattn.transformer import GPTModel
from tests.conftest import BACKENDS, DEVICE
from tests.helpers import quick
from tests.helpers.graphs import in_one_graph

pytestmark = [
    pytest.mark.usefixtures("_seed"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32 tensor cores"),
]

backends = pytest.mark.parametrize("backend", BACKENDS)

BATCH, HEADS, KV_HEADS, SEQLEN_Q, SEQLEN_K, HEAD_DIM = 2, 4, 2, 5, 7, 16


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(seqlen_q: int = SEQLEN_Q, seqlen_k: int = SEQLEN_K, requires_grad: bool = True) -> list[Tensor]:
    sizes = ((HEADS, seqlen_q), (KV_HEADS, seqlen_k), (KV_HEADS, seqlen_k))
    return [torch.randn(BATCH, h, n, HEAD_DIM, device=DEVICE, requires_grad=requires_grad) for h, n in sizes]


def op_arguments(kind: str) -> tuple[Any, ...]:
    """Arguments of attention_fwd."""
    q, k, v = qkv(requires_grad=False)
    others: list[Tensor | None] = [None] * (N_DIFFERENTIABLE - 3)
    given: dict[str, Any] = {
        **dict.fromkeys(("rope", "bias", "softcap", "score_mod", "sinks", "dropout_seed")), "mask": masks.full(),
        "scale": 0.25, "dropout_p": 0.0, "qk_norm": None,
    }  # fmt: skip
    if kind == "expanded":
        q, k, v = q[:1].expand_as(q), k[:, :1].expand_as(k), v[:, :, :1].expand_as(v)
    elif kind == "transposed":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif kind == "overlapping":
        q = torch.randn(BATCH, HEADS, SEQLEN_Q + HEAD_DIM - 1, device=DEVICE).unfold(-1, HEAD_DIM, 1)
    elif kind == "empty":
        q = q[:, :, :0]
    elif kind == "no keys":
        k, v = k[:, :, :0], v[:, :, :0]
    elif kind == "another head_dim of values":
        v = torch.randn(BATCH, KV_HEADS, SEQLEN_K, 24, device=DEVICE).transpose(1, 2).contiguous().transpose(1, 2)
    elif kind == "everything":
        at = [torch.arange(n, device=DEVICE) for n in (SEQLEN_Q, SEQLEN_K)]
        generator = torch.Generator().manual_seed(0)
        score_mod = triton_functions.score_function(HEADS, generator).to(DEVICE)
        others = [torch.randn(1, HEADS, SEQLEN_Q, 1), torch.randn(BATCH, 1, 1, 5), torch.randn(HEADS)]
        others += [torch.rand(1, HEADS), score_mod.learned, torch.rand(HEADS, HEAD_DIM), torch.rand(KV_HEADS, 1)]
        others = [x.to(DEVICE) for x in others if x is not None]
        given |= {
            "mask": everything_masked(generator),
            "rope": Rope.from_theta(8, 32, device=DEVICE).at(*at),
            "bias": biases.alibi(torch.rand(HEADS, device=DEVICE)),
            "softcap": 2.0,
            "score_mod": score_mod,
            "qk_norm": QKNorm(*others[-2:], across_heads=True),
            "dropout_p": 0.2,
            "dropout_seed": torch.tensor([3], device=DEVICE),
        }
    elif kind.startswith("half"):
        q, k, v = (x.half().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    if kind == "half, with biases":
        score_mod = triton_functions.score_function(HEADS, torch.Generator()).to(DEVICE)
        given["score_mod"] = replace(score_mod, args=(score_mod.args[0].half(), *score_mod.args[1:]))
        bias, relative = torch.randn(1, HEADS, SEQLEN_Q, 1), torch.randn(BATCH, 1, 1, 5)
        others = [x.half().to(DEVICE) for x in (bias, relative)] + [None, None, given["score_mod"].learned, None, None]
    given["sinks"] = others[2]
    constants = constants_of(Options(**given), keep_residual=kind != "half, inference")
    return (q, k, v, *others, *constants.flat())


def everything_masked(generator: torch.Generator) -> Mask:
    mask = masks.causal() & masks.window(5, None, "top_left") & masks.prefix_lm(torch.tensor([1, 3]))
    mask = mask & masks.padding(torch.rand(BATCH, SEQLEN_K, generator=generator) < 0.7)
    mask = mask & masks.boolean(torch.rand(BATCH, 1, SEQLEN_Q, SEQLEN_K, generator=generator) < 0.7)
    mask = mask & masks.documents(torch.zeros(BATCH, SEQLEN_Q).int(), torch.zeros(BATCH, SEQLEN_K).int())
    mask = mask & masks.block_sparse(torch.ones(1, HEADS, 1, 1, dtype=torch.bool), 16)
    mask = mask & masks.tree(torch.rand(HEADS, SEQLEN_Q, SEQLEN_Q, generator=generator) < 0.7)
    return (mask & triton_functions.mask_function(BATCH, HEADS, generator)).to(DEVICE)


KINDS = (
    "plain", "expanded", "transposed", "overlapping", "empty", "no keys", "half", "half, inference",
    "another head_dim of values", "everything",
)  # fmt: skip


@quick.only(kind=lambda kind: kind in ("overlapping", "half"))
@pytest.mark.parametrize(("kind", "requires_grad"), [*((kind, True) for kind in KINDS), ("plain", False)])
def test_opcheck_forward(kind, requires_grad):
    arguments = op_arguments(kind)
    q, k, v = (x.detach().requires_grad_(requires_grad) for x in arguments[:3])
    torch.library.opcheck(attention_fwd, (q, k, v, *arguments[3:]))


@quick.only(kind=lambda kind: kind in ("overlapping", "no keys", "half", "half, with biases"))
@pytest.mark.parametrize(
    ("kind", "dlse", "needs"),
    [
        *((kind, True, (True, True)) for kind in KINDS),
        ("plain", False, (True, True)),
        ("plain", False, (True, False)),
        ("plain", False, (False, True)),
        ("half, with biases", False, (True, False)),
        ("everything", False, (True, False)),
    ],
)
def test_opcheck_backward(kind, dlse, needs):
    arguments = op_arguments(kind)
    out, lse, *saved, _ = attention_fwd(*arguments)
    needed = [*needs, *(x is not None for x in arguments[3:N_DIFFERENTIABLE])]
    dout = torch.randn(1, device=DEVICE).expand_as(out) if kind == "expanded" else torch.randn_like(out)
    inputs, constants = arguments[:N_DIFFERENTIABLE], arguments[N_DIFFERENTIABLE:]
    call = (dout, torch.randn_like(lse) if dlse else None, *inputs, out, *saved, needed, *constants)
    torch.library.opcheck(attention_bwd, call)


@pytest.mark.parametrize("scale", [0.0, -0.25, float("nan")])
def test_the_op_takes_positive_scales(scale):
    """attention() takes any scale: it moves the sign into q."""
    *arguments, _, softcap, dropout_p, norm_eps, keep_residual = op_arguments("plain")
    with pytest.raises(ValueError, match="scale: got"):
        attention_fwd(*arguments, scale, softcap, dropout_p, norm_eps, keep_residual)


def test_the_op_by_itself_is_differentiable():
    """torch.compile and torch.func see only the op; its gradients are those of attention()."""
    q, k, v = qkv()
    by_itself = attention_fwd(q, k, v, *op_arguments("plain")[3:])[:2]
    called = attention(q, k, v, scale=0.25, return_lse=True, backend="triton")
    for used in (slice(0, 2), slice(0, 1), slice(1, 2)):  # both results, or out or lse alone
        got, expected = (
            torch.autograd.grad(sum(x.sum() for x in found[used]), (q, k, v), retain_graph=True, materialize_grads=True)
            for found in (by_itself, called)
        )
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


Problem = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def problem(kind: str, backend: str) -> Problem:
    """Return a function of q, k, v, a padding mask and positions, which builds its other arguments itself."""
    call = functools.partial(attention, backend=backend)
    rope = Rope.from_theta(HEAD_DIM, 64, device=DEVICE)
    slopes = biases.alibi_slopes(HEADS).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    of_pairs = triton_functions.mask_function(BATCH, HEADS, generator).to(DEVICE)
    of_scores = triton_functions.score_function(HEADS, generator).to(DEVICE)

    def function(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, at: Tensor) -> Tensor:
        if kind == "causal":
            return call(q, k, v, mask=masks.causal())
        if kind == "padding":
            return call(q, k, v, mask=masks.causal() & masks.padding(valid))
        if kind == "boolean":
            return call(q, k, v, mask=valid[:, None, None, :])
        if kind == "rope, positions":
            return call(q, k, v, rope=rope.at(at[-q.shape[2] :], at))
        if kind == "lse":
            out, lse = call(q, k, v, return_lse=True)
            return out * lse[..., None]
        if kind == "bias, sinks, soft-cap":
            added = biases.tensor(q[:, :, :, :1]) + biases.relative(k[0, :1, :1, :5]) + biases.alibi(slopes)
            return call(q, k, v, mask=masks.window(9, 1), bias=added, sinks=v[0, 0, 0, :HEADS], softcap=2.0)
        if kind == "documents, prefix":
            numbers = (at // 5)[None].expand(BATCH, -1)
            mask = masks.documents(numbers[:, -q.shape[2] :], numbers) & masks.prefix_lm(at[:BATCH])
            return call(q, k, v, mask=mask)
        if kind == "functions":
            return call(q, k, v, mask=of_pairs, score_mod=of_scores)
        if kind == "dropout":
            return call(q, k, v, dropout_p=0.3, dropout_seed=at[:1])
        if kind == "block-sparse":
            blocks = torch.ones(1, HEADS, 3, 4, dtype=torch.bool, device=q.device).tril()
            return call(
                q, k, v, mask=masks.block_sparse(blocks[:, :, : -(-q.shape[2] // 16), : -(-k.shape[2] // 16)], 16)
            )
        if kind == "weights":
            options = {"mask": masks.causal() & masks.padding(valid), "rope": rope, "softcap": 2.0}
            out, lse = call(q, k, v, return_lse=True, **options)
            weights = attention_weights(q, k, lse, rows=slice(-2, None), **options)
            return out[:, :, -2:] + weights @ v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        if kind == "dropout, no seed":
            return call(q, k, v, dropout_p=0.3)
        if kind == "packed":
            stops = at[1 : q.shape[2]].int()[:3] * (q.shape[2] - 1)
            stops = torch.cat((torch.zeros_like(stops[:1]), stops[:1]))
            packed = (x[0].transpose(0, 1) for x in (q, k, v))
            out = attention_varlen(*packed, stops, stops, mask=masks.causal(), backend=backend)
            return out.transpose(0, 1)[None]
        if kind == "everything":
            mask = masks.causal() & masks.padding(valid) & masks.boolean(valid[:, None, None, :])
            return call(q, k, v, mask=mask, rope=rope.at(at[-q.shape[2] :], at), scale=0.3)
        return call(q, k, v)

    return function


PROBLEMS = (
    "plain", "causal", "padding", "boolean", "rope, positions", "lse", "bias, sinks, soft-cap", "documents, prefix",
    "functions", "dropout", "dropout, no seed", "weights", "packed", "everything",
)  # fmt: skip


def results(function: Problem, seqlen_q: int, seqlen_k: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q * 100 + seqlen_k)
    torch.manual_seed(seqlen_q)
    x = qkv(seqlen_q, seqlen_k)
    torch.manual_seed(seqlen_k)  # for dropout
    valid = (torch.rand(BATCH, seqlen_k, generator=generator) < 0.8).to(DEVICE)
    out = function(*x, valid, torch.arange(seqlen_k, device=DEVICE))
    return [out.detach(), *torch.autograd.grad(out.square().sum(), x)]


def assert_same(actual: list[Tensor], expected: list[Tensor], backend: str) -> None:
    for a, e in zip(actual, expected, strict=True):
        if backend == "triton":
            assert torch.equal(a, e)
        else:
            torch.testing.assert_close(a, e)


@quick.only(kind="everything")
@backends
@pytest.mark.parametrize("kind", ["plain", "lse", "bias, sinks, soft-cap", "block-sparse", "everything"])
def test_compile_with_fixed_lengths(kind, backend):
    function = problem(kind, backend)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same(results(compiled, 5, 7), results(function, 5, 7), backend)


@quick.only(kind=lambda kind: kind in ("documents, prefix", "packed"), backend="triton")
@backends
@pytest.mark.parametrize("kind", PROBLEMS)
def test_compile_with_changing_lengths(kind, backend):
    """dynamic=True: one graph for all lengths."""
    function = problem(kind, backend)
    compiled = in_one_graph(function)
    for lengths in ((5, 7), (17, 33)):
        assert_same(results(compiled, *lengths), results(function, *lengths), backend)


@quick.only(backend="torch")
@backends
def test_compile_finds_out_that_lengths_change(backend):
    """By default: one graph for the first length, one for all others."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(problem("padding", backend), fullgraph=True, backend=counter)
    graphs = []
    for n in (5, 7, 9, 17):
        results(compiled, n, n)
        graphs.append(counter.frame_count)
    assert graphs[1:] == graphs[1:2] * 3, graphs


@backends
def test_compile_with_shared_inputs(backend):
    """One tensor is q, k and v, and one is both positions."""
    x = torch.randn(2, 2, 6, 16, device=DEVICE, requires_grad=True)
    at = torch.arange(6, device=DEVICE)
    rope = Rope.from_theta(16, 16, device=DEVICE).at(at, at)

    def function(x: Tensor) -> Tensor:
        return attention(x, x, x, mask=masks.causal(), rope=rope, backend=backend)

    out = torch.compile(function, fullgraph=True, backend="aot_eager")(x)
    expected = function(x)
    assert_same([out], [expected], backend)
    dout = torch.randn_like(out)
    got, want = torch.autograd.grad(out, x, dout), torch.autograd.grad(expected, x, dout)
    torch.testing.assert_close(got, want)


@backends
def test_compile_without_gradients(backend):
    q, k, v = qkv(requires_grad=False)
    function = functools.partial(attention, mask=masks.causal(), backend=backend)
    with torch.no_grad():
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert_same([compiled(q, k, v)], [function(q, k, v)], backend)


@backends
def test_compile_under_autocast(backend):
    q, k, v = qkv(requires_grad=False)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return attention(q, k, v, backend=backend)

    out = torch.compile(function, fullgraph=True, backend="aot_eager")(q, k, v)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, function(q, k, v))


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("triton", {}),
        ("torch", {}),
        # In the paths that write the scores out.
        ("torch", {"return_lse": True}),
        ("torch", {"softcap": 2.0}),
        ("torch", {"sinks": torch.zeros(HEADS, device=DEVICE)}),
    ],
    ids=str,
)
def test_compiled_padding_hides_nan(backend, options):
    """A compiled graph cannot look for NaN, but it has the mask; forward and backward."""
    q, k, v = qkv(6, 6)
    valid = torch.ones(BATCH, 6, dtype=torch.bool, device=DEVICE)
    valid[:, 4:] = False
    with torch.no_grad():
        k[:, :, 4:], v[:, :, 4:] = torch.nan, torch.inf

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = masks.causal() & masks.padding(valid)
        found = attention(q, k, v, mask=mask, backend=backend, **options)
        return found if isinstance(found, Tensor) else found[0]

    out, expected = torch.compile(function, fullgraph=True, backend="aot_eager")(q, k, v), function(q, k, v)
    dout = torch.randn_like(out)
    found, wanted = ((x, *torch.autograd.grad(x, (q, k, v), dout)) for x in (out, expected))
    assert all(x.isfinite().all() for x in found)
    torch.testing.assert_close(found, wanted)


@backends
def test_compile_raises_as_eager_does(backend):
    q, k, v = qkv(requires_grad=False)
    compiled = torch.compile(functools.partial(attention, backend=backend), backend="aot_eager")
    with pytest.raises(ValueError, match="v: got batch 1"):
        compiled(q, k, v[:1])
    x = torch.zeros(1, 1, 1, 513, device=DEVICE)
    with pytest.raises(NotImplementedError, match="head_dim: got 513"):
        torch.compile(functools.partial(attention, backend="triton"), backend="aot_eager")(x, x, x)


@quick.only(autocast=True)
@pytest.mark.parametrize("autocast", [False, True])
def test_compile_a_fused_model(autocast):
    """A break in each layer makes a compiled step of training slower than one that is not compiled."""
    model = fuse(GPTModel(11, 32, 4, 2, max_len=32, positions="rotary", n_kv_heads=2).to(DEVICE), backend="triton")
    compiled = in_one_graph(model)
    for n in (5, 13):
        ids = torch.randint(11, (2, n), device=DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            torch.testing.assert_close(compiled(ids), model(ids))


@quick.only(kind=lambda kind: kind in ("bias, sinks, soft-cap", "dropout, no seed"))
@backends
@pytest.mark.parametrize("kind", ["padding", "lse", "bias, sinks, soft-cap", "dropout, no seed", "everything"])
def test_activation_checkpointing(kind, backend):
    """Without a seed, one is drawn again from the restored generator, so the second forward drops the same."""
    function = problem(kind, backend)

    def checkpointed(*x: Tensor) -> Tensor:
        return checkpoint(function, *x, use_reentrant=False)

    assert_same(results(checkpointed, 5, 7), results(function, 5, 7), backend)


@pytest.mark.thorough
def test_arguments_may_come_from_a_compiled_region():
    """The graph breaks around attention, not inside: a mask is built outside, and the scale changes."""
    function = functools.partial(attention, backend="triton")
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    q, k, v = qkv(requires_grad=False)
    valid = torch.rand(BATCH, SEQLEN_K, device=DEVICE) < 0.8
    for mask, scale in itertools.product((masks.causal(), masks.padding(valid)), (None, 0.1, 0.2, 0.3)):
        assert torch.equal(compiled(q, k, v, mask=mask, scale=scale), function(q, k, v, mask=mask, scale=scale))


@pytest.mark.thorough
@backends
@pytest.mark.parametrize("kind", ["t5", "shaw", "slopes", "sinks", "learned"])
def test_compile_gives_learned_tensors_their_gradient(kind, backend):
    generator = torch.Generator().manual_seed(0)
    of_scores = triton_functions.score_function(HEADS, generator).to(DEVICE)
    shape = {"t5": (8, HEADS), "shaw": (9, HEAD_DIM)}.get(kind, (HEADS,))
    learned = of_scores.args[0] if kind == "learned" else torch.rand(shape, device=DEVICE)
    learned.requires_grad_()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {
            "t5": lambda: {"bias": biases.t5(learned, max_distance=20)},
            "shaw": lambda: {"bias": biases.shaw(q, learned)},
            "slopes": lambda: {"bias": biases.alibi(learned)},
            "sinks": lambda: {"sinks": learned},
            "learned": lambda: {"score_mod": of_scores},
        }[kind]()
        return attention(q, k, v, mask=masks.causal(), backend=backend, **options)

    def run(f: Problem) -> list[Tensor]:
        return list(torch.autograd.grad(f(*x).square().sum(), [*x, learned]))

    compiled = in_one_graph(function)
    for lengths in ((5, 7), (17, 33)):
        x = qkv(*lengths)
        assert_same(run(compiled), run(function), backend)


@pytest.mark.thorough
@backends
@pytest.mark.parametrize("dynamic", [True, None])
def test_compile_takes_a_mask_from_outside(backend, dynamic):
    """Its numbers are then inputs of the graph, and may change."""
    function = functools.partial(attention, backend=backend)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    q, k, v = qkv(7, 9)
    for left in (3, 4, 5, 6):
        mask = masks.window(left, 2) & masks.window(None, left, "top_left")
        assert_same([compiled(q, k, v, mask=mask)], [function(q, k, v, mask=mask)], backend)


@backends
def test_compile_of_any_batch_size(backend):
    """Batch and length are marked as dynamic; without marks, torch detects the change at the second size."""
    function = functools.partial(attention, mask=masks.causal(), backend=backend)
    compiled = in_one_graph(function, dynamic=None)
    for batch, seqlen in ((2, 5), (3, 9), (5, 6)):
        x = [torch.randn(batch, heads, seqlen, HEAD_DIM, device=DEVICE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        for tensor in x:
            torch._dynamo.mark_dynamic(tensor, (0, 2))
        assert_same([compiled(*x)], [function(*x)], backend)


@pytest.mark.thorough
def test_compile_loses_no_tangent():
    """torch lets a custom op drop tangents silently. A call that may leave the graph is therefore computed eagerly."""
    q, k, v = qkv(requires_grad=False)
    function = functools.partial(attention, k=k, v=v, mask=masks.causal(), backend="triton")
    compiled = torch.compile(function, backend="eager")
    torch.testing.assert_close(compiled(q), function(q))
    _, expected = torch.func.jvp(function, (q,), (torch.ones_like(q),))
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(compiled(forward_ad.make_dual(q, torch.ones_like(q))))
    torch.testing.assert_close(out.tangent, expected)

    @torch.compile(backend="eager", fullgraph=True)
    def whole(q: Tensor) -> Tensor:
        return torch.func.jvp(function, (q,), (torch.ones_like(q),))[1]

    with pytest.raises(Exception, match=r"forward-mode differentiation inside torch\.compile"):
        whole(q)


@pytest.mark.thorough
@pytest.mark.skipif(DEVICE == "cpu" and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(("kind", "backend"), [("everything", "triton"), ("padding", "torch")])
def test_compile_by_inductor(kind, backend, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    function = problem(kind, backend)
    compiled = torch.compile(function, fullgraph=True)
    for a, e in zip(results(compiled, 5, 7), results(function, 5, 7), strict=True):
        torch.testing.assert_close(a, e)


def test_compile_keeps_the_arguments_of_two_functions_apart():
    inputs = testing.make_inputs(Case(seqlen_q=5, seqlen_k=7, mask_function=True, score_mod=True), DEVICE)
    # An argument that gets a gradient would be passed apart.
    given = inputs.options | {"score_mod": replace(inputs.score_mod, arg_gradients=())}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, backend="triton", **given)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(inputs.q, inputs.k, inputs.v), call(inputs.q, inputs.k, inputs.v))
