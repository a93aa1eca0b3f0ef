"""``attention()`` against the reference: every feature and dtype, gradients, autograd's rules."""

from __future__ import annotations

import functools
import inspect
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import attention, masks, reference, support, testing
from fusedattn.testing import CASES, Case
from tests.conftest import (
    BACKENDS,
    DEVICE,
    DTYPES,
    EVERYTHING,
    INTERPRETING,
    SMALL,
    TORCH_LIMIT,
    assert_accurate,
    assert_budget,
    assert_equal,
    assert_ratios,
    inputs_of,
    leaves,
    options,
    torch_attention,
    torch_attention_beside_lse,
    triton_attention,
)
from tests.helpers import quick

pytestmark = [pytest.mark.usefixtures("poison", "_seed")]

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))

# In cases with an offset, terms cancel; kernels that compute delta from the rounded out, as torch's do, lose them.
CASES_FOR_TORCH = [case for case in CASES if not case.offset]
backends = pytest.mark.parametrize("backend", BACKENDS)


# float16 and bfloat16 run the same code, and the interpreter is slow: there, only every third case runs in float16.
BUDGETS = [
    replace(case, dtype=dtype)
    for i, case in enumerate(CASES)
    for dtype in DTYPES
    if i % 3 == 0 or dtype != torch.float16 or not INTERPRETING
]


@quick.only(
    case=lambda case: (
        case in BUDGETS[2::18]
        or case.dtype == torch.float32
        or case.name in ("sinks", "dropout, causal, bias per head")
        or case.name.startswith("values of")
    )
)
@pytest.mark.parametrize("case", BUDGETS, ids=lambda c: f"{c.name}-{str(c.dtype).removeprefix('torch.')}")
def test_budget(case):
    assert_budget(triton_attention, inputs_of(case), case)


def test_budget_of_many_keys_in_float32():
    """Hundreds of blocks, each of which rounds the sum of the weights: an error that all gradients of the row share."""
    case = Case("many keys", batch=1, nheads_q=1, nheads_kv=1, seqlen_q=33, seqlen_k=4096, dtype=torch.float32)
    assert_budget(triton_attention, testing.make_inputs(case), case)


@quick.covering(pairs=True)
@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "lse"])
@dtypes
@pytest.mark.parametrize("case", CASES_FOR_TORCH, ids=lambda c: c.name)
def test_torch_backend_budget(case, dtype, with_lse):
    inputs = testing.make_inputs(replace(case, dtype=dtype))
    function = torch_attention if with_lse else torch_attention_beside_lse
    inputs = inputs if with_lse else testing.without_lse_gradient(inputs)
    assert_ratios(testing.check(function, inputs), case, TORCH_LIMIT[dtype])


@quick.only(case=lambda case: case.name in ("added to the scores", "window"), block_n=16)
@pytest.mark.skipif(not INTERPRETING, reason="the tiles of a GPU are those of its table, which the cases run")
@pytest.mark.parametrize(
    ("block_m", "block_n", "style", "edge"),
    [(16, 16, "pointers", 16), (16, 64, "pipelined", 16), (64, 16, "descriptors", 16), (128, 64, "pointers", 32)],
)
@pytest.mark.parametrize(
    "case",
    [
        replace(EVERYTHING, batch=1, seqlen_q=67, seqlen_k=131, empty_batch=False, layout=64),
        Case(
            "added to the scores",
            batch=1,
            nheads_q=2,
            nheads_kv=1,
            seqlen_q=67,
            seqlen_k=131,
            window=(70, 20),
            documents="packed",
            bias="per_head",
            alibi=True,
            relative="per_query",
            softcap=2.0,
            dropout_p=0.1,
        ),
        Case("window", batch=1, nheads_q=1, nheads_kv=1, seqlen_q=67, seqlen_k=131, window=(70, 20)),
        Case("padded", nheads_q=1, nheads_kv=1, seqlen_q=70, seqlen_k=91, causal="bottom_right", padding="left"),
        Case("more queries", nheads_q=1, nheads_kv=1, seqlen_q=90, seqlen_k=51, causal="bottom_right", head_dim=16),
    ],
    ids=lambda c: c.name,
)
def test_other_tiles(monkeypatch, case, block_m, block_n, style, edge):
    from fusedattn.kernels import configs

    tile = configs.TileConfig(block_m, block_n, 4, 1, style, edge)
    monkeypatch.setattr(configs, "INTERPRETER", configs.KernelConfigs(fwd=tile, dkdv=tile, dq=tile))
    assert_accurate(triton_attention, inputs_of(case), case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_of_lse_alone(dtype):
    """Out has no gradient at all; dv is then exactly zero."""
    inputs = inputs_of(replace(SMALL, dtype=dtype, empty_batch=True))
    inputs = replace(inputs, dout=torch.zeros_like(inputs.dout))
    assert_accurate(triton_attention, inputs)
    q, k, v = leaves(inputs)
    _, lse = triton_attention(q, k, v, return_lse=True, **options(inputs))
    dlse = inputs.dlse.masked_fill(lse == -math.inf, 0.0)
    dq, dk, dv = torch.autograd.grad(lse, (q, k, v), dlse)
    expected = testing.run(triton_attention, inputs)
    assert_equal({"dq": dq, "dk": dk, "dv": dv}, {name: expected[name] for name in ("dq", "dk", "dv")})
    assert (dv == 0).all()


@backends
def test_gradient_of_out_alone(backend):
    """Whether lse is not returned, unused, or used with a gradient of zero."""
    inputs = testing.without_lse_gradient(inputs_of(SMALL))
    function = functools.partial(attention, backend=backend)
    x = leaves(inputs)
    expected = testing.run(function, inputs)
    expected.pop("lse")
    for out in (function(*x, **options(inputs)), function(*x, **options(inputs), return_lse=True)[0]):
        grads = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, x, inputs.dout), strict=True))
        if backend == "triton":
            assert_equal({"out": out.detach(), **grads}, expected)
        else:
            torch.testing.assert_close({"out": out.detach(), **grads}, expected)


@quick.covering()
@backends
@pytest.mark.parametrize("needed", ["q", "k", "v", "qk", "qv", "kv"])
def test_gradients_of_some_inputs(needed, backend):
    inputs = inputs_of(SMALL)
    function = functools.partial(attention, backend=backend, **options(inputs))
    x = {name: getattr(inputs, name).detach().requires_grad_() for name in "qkv"}
    expected = dict(zip("qkv", torch.autograd.grad(function(**x), tuple(x.values()), inputs.dout), strict=True))
    x = {name: getattr(inputs, name).detach().requires_grad_(name in needed) for name in "qkv"}
    function(**x).backward(inputs.dout)
    for name, tensor in x.items():
        if name not in needed:
            assert tensor.grad is None
        elif backend == "triton":
            assert torch.equal(tensor.grad, expected[name])
        else:
            torch.testing.assert_close(tensor.grad, expected[name])


@pytest.mark.parametrize(("needed", "launched"), [("q", "dq"), ("k", "dkdv"), ("v", "dkdv"), ("qk", "dq dkdv")])
def test_only_the_kernels_that_are_needed_run(monkeypatch, needed, launched):
    from fusedattn.kernels import attention_bwd

    names = []
    launch = attention_bwd.launch

    def spy(*args, **kwargs):
        given = inspect.signature(launch).bind(*args, **kwargs).arguments
        names.append(" ".join(name for name in ("dq", "dkdv") if given[name] is not None))
        launch(*args, **kwargs)

    monkeypatch.setattr(attention_bwd, "launch", spy)
    inputs = inputs_of(SMALL)
    x = {name: getattr(inputs, name).detach().requires_grad_(name in needed) for name in "qkv"}
    triton_attention(**x).sum().backward()
    assert names == [launched]


# One in float16, and the strong ones in the other dtypes.
@quick.every(12, start=4, case=lambda case: case.offset == 16.0, dtype=lambda dtype: dtype != torch.float16)
@dtypes
@pytest.mark.parametrize(
    "case",
    [
        Case("mild", batch=1, seqlen_q=110, seqlen_k=110, nheads_q=2, nheads_kv=1, offset=1.0, causal="bottom_right"),
        Case("strong", seqlen_q=50, seqlen_k=90, nheads_q=2, nheads_kv=1, offset=16.0, padding="uneven"),
        # The weights do not add up to 1; the rounding residual that is kept is relative to their sum.
        Case("dropout", batch=1, seqlen_q=50, seqlen_k=90, nheads_q=2, nheads_kv=1, offset=16.0, dropout_p=0.3),
        Case("sinks", batch=1, seqlen_q=50, seqlen_k=90, nheads_q=2, nheads_kv=1, offset=16.0, sinks=True),
    ],
    ids=lambda case: case.name,
)
def test_parts_that_keys_and_values_share_cancel(case, dtype):
    """dq multiplies an error of delta by the sum of the keys: out rounded to 16 bits would be error enough."""
    inputs = inputs_of(replace(case, dtype=dtype))
    assert_budget(triton_attention, inputs, case)
    # Without a rounding residual, which only delta needs, out has the same bits.
    with torch.no_grad():
        plain, _ = triton_attention(inputs.q, inputs.k, inputs.v, **options(inputs), return_lse=True)
    assert torch.equal(plain, testing.run(triton_attention, inputs)["out"])


def test_nothing_is_kept_for_a_backward_that_cannot_come(monkeypatch):
    from fusedattn.kernels import attention_fwd

    inputs = inputs_of(replace(SMALL, dtype=torch.float16))
    q = inputs.q.detach().requires_grad_()
    kept = []
    forward = functools.partial(triton_attention, k=inputs.k, v=inputs.v)
    launch = attention_fwd.launch

    def spy(*args, **kwargs):
        kept.append(inspect.signature(launch).bind(*args, **kwargs).arguments["results"].rounding_residual is not None)
        launch(*args, **kwargs)

    monkeypatch.setattr(attention_fwd, "launch", spy)
    forward(q)
    forward(inputs.q)
    with torch.no_grad():
        forward(q)
    forward(q.float(), k=inputs.k.float(), v=inputs.v.float())
    assert kept == [True, False, False, False]


def test_shared_inputs():
    """Self-attention without projections: one tensor is q, k and v, and its gradient is the sum."""
    inputs = inputs_of(Case(nheads_kv=4, seqlen_q=19, seqlen_k=19, head_dim=16))
    x = inputs.q.detach().requires_grad_()
    (got,) = torch.autograd.grad(triton_attention(x, x, x), x, inputs.dout)
    three = [inputs.q.detach().requires_grad_() for _ in range(3)]
    expected = torch.autograd.grad(triton_attention(*three), three, inputs.dout)
    torch.testing.assert_close(got, sum(expected))


@backends
def test_inputs_are_not_modified(backend):
    inputs = inputs_of(EVERYTHING)
    tensors = {n: getattr(inputs, n) for n in ("q", "k", "v", "dout", "dlse")}
    tensors |= {n: getattr(inputs.mask, n) for n in ("valid", "allowed")}
    tensors |= {n: getattr(inputs.rope, n) for n in ("cos", "sin", "positions_q", "positions_k")}
    before = {name: x.clone() for name, x in tensors.items()}
    versions = {name: x._version for name, x in tensors.items()}
    testing.run(functools.partial(attention, backend=backend), inputs)
    assert_equal(tensors, before)
    assert {name: x._version for name, x in tensors.items()} == versions


def test_saved_tensors_grow_linearly():
    """No tensor of seqlen_q x seqlen_k is kept, unless the caller's own mask, layout, tree or bias has that size."""

    def saved(seqlen: int) -> int:
        own = {"boolean": "broadcast", "layout": None, "bias": "per_key", "tree": False}
        case = replace(EVERYTHING, seqlen_q=seqlen, seqlen_k=seqlen, empty_batch=False, **own)
        inputs = inputs_of(case)
        storages: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            triton_attention(*leaves(inputs), return_lse=True, **options(inputs))
        return sum(storages.values())

    assert 0 < saved(64) <= 2 * saved(32)


def test_allocations_grow_linearly(monkeypatch):
    sizes: list[int] = []
    for name in ("empty", "empty_like"):
        allocate = getattr(torch, name)

        def spy(*args: Any, allocate: Callable[..., Tensor] = allocate, **kwargs: Any) -> Tensor:
            out = allocate(*args, **kwargs)
            sizes.append(out.numel())
            return out

        monkeypatch.setattr(torch, name, spy)
    inputs = inputs_of(Case(seqlen_q=96, seqlen_k=96, head_dim=16, rope="half", padding="right"))
    sizes.clear()
    testing.run(triton_attention, inputs)
    assert max(sizes) <= inputs.q.numel()


@backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(backend, dtype):
    """float32 inputs are cast to the autocast dtype, and out has it; lse and the gradients stay float32."""
    inputs = inputs_of(Case(seqlen_q=19, seqlen_k=21, head_dim=16, causal="bottom_right", rope="half"))
    function = functools.partial(attention, backend=backend, return_lse=True, **options(inputs))
    x = leaves(inputs)
    with torch.autocast(DEVICE, dtype=dtype):
        out, lse = function(*x)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    grads = torch.autograd.grad(out, x, inputs.dout.to(dtype))
    assert all(g.dtype == torch.float32 for g in grads)
    y = [t.detach().to(dtype).requires_grad_() for t in x]
    expected, expected_lse = function(*y)
    expected_grads = torch.autograd.grad(expected, y, inputs.dout.to(dtype))
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert all(torch.equal(g, e.float()) for g, e in zip(grads, expected_grads, strict=True))


@backends
def test_autocast_of_mixed_inputs(backend):
    """The output of a cast layer together with a float32 tensor, as torch's own function allows."""
    inputs = inputs_of(Case(seqlen_q=5, seqlen_k=7, head_dim=16))
    q, k, v = inputs.q.bfloat16(), inputs.k, inputs.v
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert attention(q, k, v, backend=backend).dtype == torch.bfloat16
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=False), pytest.raises(TypeError, match="k: got"):
        attention(q, k, v, backend=backend)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@backends
def test_without_gradients(mode, backend):
    inputs = inputs_of(SMALL)
    function = functools.partial(attention, backend=backend, return_lse=True, **options(inputs))
    x = leaves(inputs)
    expected, expected_lse = function(*x)
    with mode():
        out, lse = function(*x)
    assert not out.requires_grad
    assert not lse.requires_grad
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert not function(*(t.detach() for t in x))[0].requires_grad


@pytest.mark.parametrize("deterministic", [True, False])
def test_double_backward_is_that_of_the_reference(deterministic):
    inputs = inputs_of(SMALL)

    def second(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        q, k, v = leaves(inputs)
        out = function(q, k, v, **options(inputs))
        (dq,) = torch.autograd.grad(out, q, inputs.dout, create_graph=True)
        return torch.autograd.grad(dq.square().sum(), (q, k, v))

    expected = second(lambda *x, **kwargs: reference.attention(*x, **kwargs)[0])
    got = second(functools.partial(triton_attention, deterministic=deterministic))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


def test_forward_mode_is_that_of_the_reference():
    inputs = inputs_of(SMALL)
    q, k, v = (x.detach() for x in leaves(inputs))
    tangent = torch.ones_like(q)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, tangent)
        got = torch.autograd.forward_ad.unpack_dual(triton_attention(dual, k, v, **options(inputs))).tangent
    found = torch.func.jvp(lambda x: reference.attention(x, k, v, **options(inputs))[0], (q,), (tangent,))
    torch.testing.assert_close(got, found[1], rtol=1e-4, atol=1e-5)


@quick.every(2)
@pytest.mark.parametrize("name", ["q", "k", "v", "valid", "allowed", "cos", "positions_k"])
def test_a_change_between_forward_and_backward_raises(name):
    inputs = inputs_of(EVERYTHING)
    x = {n: getattr(inputs, n).detach().requires_grad_() * 1 for n in "qkv"}
    out = triton_attention(**x, **options(inputs))
    tensors = {**x, "valid": inputs.mask.valid, "allowed": inputs.mask.allowed, "cos": inputs.rope.cos}
    tensors["positions_k"] = inputs.rope.positions_k
    with torch.no_grad():
        tensors[name].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("scale", [0.0, -0.0, 5e-324, -1e-45, 1e-40, 1e-6, 2, -1, 8.0])
def test_scales(scale):
    case = Case(seqlen_q=19, seqlen_k=21, nheads_q=2, head_dim=16, causal="bottom_right", scale=scale)
    assert_accurate(triton_attention, inputs_of(case), case)


@backends
@pytest.mark.parametrize("scale", [5e-324, -1e-45, 1e-40, 2.0**-126])
def test_rows_that_see_nothing_under_the_smallest_scales(scale, backend):
    """Kernels get their factors in float32; some of these become 0, which turns -inf into NaN."""
    q, k, v = (torch.randn(1, 2, 19, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    allowed = torch.ones(19, 19, dtype=torch.bool, device=DEVICE).tril(-1)
    out, lse = attention(q, k, v, mask=allowed, scale=scale, return_lse=True, backend=backend)
    assert (out[:, :, 0] == 0).all()
    assert (lse[:, :, 0] == -torch.inf).all()
    expected = torch.arange(1.0, 19, device=DEVICE).log().expand(1, 2, -1)
    torch.testing.assert_close(lse[:, :, 1:], expected)
    grads = torch.autograd.grad(out.sum() + lse[:, :, 1:].sum(), (q, k, v))
    assert all(x.isfinite().all() for x in grads)


@quick.every(4)
@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 1), (), (3,), (2, 1, 3, 1), (1, 2, 1, 3)])
@pytest.mark.parametrize("mask", [masks.full(), masks.causal()], ids=["full", "causal"])
def test_layouts_are_broadcast(shape, mask):
    """Over blocks too: kernels read lists of all blocks."""
    blocks = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7
    inputs = inputs_of(Case(nheads_q=2, nheads_kv=1, seqlen_q=40, seqlen_k=45, head_dim=16))
    inputs = replace(inputs, mask=mask & masks.block_sparse(blocks.to(DEVICE), 16))
    assert_ratios(testing.check(triton_attention, inputs), Case(), 1.0)


def test_blocks_of_a_layout_need_not_be_square():
    blocks = torch.tensor([[True, False], [False, True], [True, True]], device=DEVICE)
    inputs = inputs_of(Case(nheads_q=2, nheads_kv=1, seqlen_q=40, seqlen_k=45, head_dim=16))
    inputs = replace(inputs, mask=masks.block_sparse(blocks, (16, 32)))
    assert_ratios(testing.check(triton_attention, inputs), Case(), 1.0)


@backends
@pytest.mark.parametrize("scale", [None, 0.3, -0.2, 0.0])
@pytest.mark.parametrize(
    "mask", [masks.full(), masks.causal(), masks.causal("top_left")], ids=["full", "causal", "top_left"]
)
def test_scales_and_causal_masks(mask, scale, backend):
    inputs = inputs_of(Case(seqlen_q=17, seqlen_k=17, head_dim=16))
    inputs = replace(inputs, mask=mask, scale=scale)
    out = attention(inputs.q, inputs.k, inputs.v, mask=mask, scale=scale, backend=backend)
    torch.testing.assert_close(out, testing.baseline(inputs)["out"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [1, 2, 7, 8, 16, 17, 64, 96, 128, 160, 255, 256])
def test_head_dims(head_dim):
    case = Case(seqlen_q=5, seqlen_k=18, head_dim=head_dim, nheads_q=2, batch=1, causal="bottom_right")
    assert_accurate(triton_attention, inputs_of(case), case)


def test_tiles_are_as_wide_as_a_product_needs():
    """At least 16 features, and a power of two; the interpreter would accept any width."""
    from fusedattn.kernels.primitives import block_d

    assert [block_d(head_dim) for head_dim in (1, 8, 16, 17, 80, 128, 255)] == [16, 16, 16, 32, 128, 128, 256]


@quick.covering()
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 33), (2, 31), (33, 2), (16, 16), (32, 64), (31, 65)])
@pytest.mark.parametrize("causal", [None, "bottom_right", "top_left"])
def test_lengths(seqlen_q, seqlen_k, causal):
    case = Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=16, nheads_q=2, batch=1, causal=causal)
    assert_accurate(triton_attention, inputs_of(case), case)


def test_grouped_queries_equal_repeated_keys():
    inputs = inputs_of(replace(SMALL, nheads_q=6, nheads_kv=2))
    repeated = replace(inputs, k=inputs.k.repeat_interleave(3, 1), v=inputs.v.repeat_interleave(3, 1))
    got, expected = testing.run(triton_attention, inputs), testing.run(triton_attention, repeated)
    for name in ("out", "lse", "dq"):
        assert torch.equal(got[name], expected[name])
    for name in ("dk", "dv"):
        torch.testing.assert_close(got[name], expected[name].unflatten(1, (2, 3)).sum(2))


def test_a_bool_tensor_is_a_mask():
    inputs = inputs_of(Case(seqlen_q=9, seqlen_k=18, head_dim=16, boolean="full"))
    mask = inputs.mask.allowed
    for backend in BACKENDS:
        out = attention(inputs.q, inputs.k, inputs.v, mask=mask, backend=backend)
        assert torch.equal(out, attention(inputs.q, inputs.k, inputs.v, mask=masks.boolean(mask), backend=backend))
        for shape in ((18,), (9, 18), (1, 9, 18), (4, 1, 18), (2, 1, 1, 18), ()):
            small = torch.rand(shape, device=DEVICE) < 0.7
            got = attention(inputs.q, inputs.k, inputs.v, mask=small, backend=backend)
            full = small.expand(2, 4, 9, 18).contiguous()
            torch.testing.assert_close(got, attention(inputs.q, inputs.k, inputs.v, mask=full, backend=backend))


def test_default_backend(monkeypatch):
    assert support.default_backend(torch.device("cuda")) == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert support.default_backend(torch.device("cpu")) == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    assert support.default_backend(torch.device("cpu")) == "torch"


def test_no_backend_named_is_the_default_one():
    inputs = inputs_of(SMALL)
    x = (inputs.q, inputs.k, inputs.v)
    assert torch.equal(attention(*x, **options(inputs)), triton_attention(*x, **options(inputs)))


def test_float32_matmul_precision_may_be_set_either_way():
    """torch has an older and a newer switch for TF32, and refuses to read one after the other was set."""
    code = (
        "import os; os.environ.setdefault('TRITON_INTERPRET', '1')\n"
        "import torch, fusedattn\n"
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        f"q = torch.randn(1, 1, 5, 16, device={DEVICE!r})\n"
        "print(fusedattn.attention(q, q, q, backend='triton').isfinite().all().item())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.skipif(torch.version.hip is not None, reason="AMD's kernels have no TF32")
@pytest.mark.parametrize(("setting", "expected"), [("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")])
def test_float32_precision_is_that_of_torch(setting, expected):
    """TF32 only if the user allowed it, and only for float32; the interpreter ignores both."""
    from fusedattn.backends.triton.launching import precision_of

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        assert precision_of(torch.float32) == expected
        assert precision_of(torch.bfloat16) == precision_of(torch.float64) == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)
