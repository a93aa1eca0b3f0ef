"""The kernels behind torch's flash attention operators, registered for tensors of the tests' device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.attention
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedattn import attention, attention_varlen, masks
from fusedattn.integrations import torch_flash
from tests.conftest import DEVICE
from tests.helpers.sdpa import CLOSE, DTYPE, normal

pytestmark = [
    pytest.mark.usefixtures("_seed"),
    pytest.mark.skipif(not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="no registration"),
]

sdpa_op = torch.ops.aten._scaled_dot_product_flash_attention
flash_op = torch.ops.aten._flash_attention_forward


@pytest.fixture(autouse=True)
def _activated() -> Iterator[None]:
    torch_flash.register(dispatch_key=DEVICE.upper())
    torch.nn.attention.activate_flash_attention_impl("fusedattn")  # type: ignore[arg-type]
    yield
    torch.nn.attention.restore_flash_attention_impl()


def by_mathematics(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """out and lse of ``(batch, nheads, seqlen, head_dim)``."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~visible, -torch.inf)
    empty = ~visible.any(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return weights @ v, scores.logsumexp(-1)


def leaves_of(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [normal(shape).requires_grad_() for shape in shapes]


def band(seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> Tensor:
    """The visible keys, counted from the last query and key."""
    distance = torch.arange(seqlen_k, device=DEVICE) - torch.arange(seqlen_q, device=DEVICE)[:, None]
    distance = distance - (seqlen_k - seqlen_q)
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=DEVICE)
    if left is not None:
        visible = visible & (distance >= -left)
    return visible if right is None else visible & (distance <= right)


def assert_same(
    results: Sequence[Tensor], leaves: list[Tensor], expected: Sequence[Tensor], **tolerance: float
) -> None:
    """Compare out, and lse if expected, and the gradients of out; up to CLOSE unless a tolerance is given."""
    close, dout = tolerance or CLOSE, torch.randn_like(expected[0])
    torch.testing.assert_close(results[: len(expected)], expected, **close)
    actual, wanted = (torch.autograd.grad(x[0], leaves, dout) for x in (results, expected))
    torch.testing.assert_close(actual, wanted, **close)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("lengths", "scale"), [((5, 9), None), ((9, 5), None), ((1, 6), None), ((5, 9), 0.7), ((5, 9), -0.3), ((5, 9), 0.0)]
)
def test_dense(lengths: tuple[int, int], is_causal: bool, scale: float | None) -> None:
    """Grouped heads; causal masks end with the last key, and queries before the first key see nothing."""
    seqlen_q, seqlen_k = lengths
    leaves = leaves_of((2, 4, seqlen_q, 8), *[(2, 2, seqlen_k, 8)] * 2)
    results = sdpa_op(*leaves, 0.0, is_causal, scale=scale)
    visible = band(*lengths, None, 0 if is_causal else None)
    assert_same(results, leaves, by_mathematics(*leaves, visible, scale))
    assert results[4:6] == (seqlen_q, seqlen_k)


@pytest.mark.parametrize("window", [(None, None), (-1, -1), (2, -1), (-1, 1), (1, 2), (0, 0)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_dense_with_heads_last_and_windows(window: tuple[int | None, int | None], is_causal: bool) -> None:
    leaves = leaves_of((1, 5, 2, 8), *[(1, 7, 2, 8)] * 2)
    left, right = window
    scale = None if left is None else -0.7
    options = {"window_size_left": left, "window_size_right": right, "scale": scale}
    results = flash_op(*leaves, None, None, 5, 7, 0.0, is_causal, False, **options)
    limits = [None if x is None or x < 0 else x for x in window]
    visible = band(5, 7, *limits) & band(5, 7, None, 0 if is_causal else None)
    out, lse = by_mathematics(*(x.transpose(1, 2) for x in leaves), visible, scale)
    assert_same(results, leaves, (out.transpose(1, 2), lse))


STOPS_Q, STOPS_K = [0, 3, 3, 8], [0, 4, 6, 9]
STOPS = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (STOPS_Q, STOPS_K)]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (1, 0), (2, 1)])
def test_packed(window: tuple[int, int]) -> None:
    """Some rows belong to no sequence; the operator that writes into a given tensor is tested too."""
    leaves = leaves_of((10, 4, 8), *[(9, 2, 8)] * 2)
    arguments = (*leaves, *STOPS, 5, 4, 0.0, window == (-1, 0), False)
    windows = dict(zip(("window_size_left", "window_size_right"), window, strict=True))
    results = flash_op(*arguments, **windows)
    out, lse = torch.zeros_like(leaves[0]), torch.full((4, 10), -torch.inf, dtype=DTYPE, device=DEVICE)
    for i in range(3):
        queries, keys = slice(STOPS_Q[i], STOPS_Q[i + 1]), slice(STOPS_K[i], STOPS_K[i + 1])
        q, k, v = (x[s].transpose(0, 1)[None] for x, s in zip(leaves, (queries, keys, keys), strict=True))
        visible = band(q.shape[2], k.shape[2], *(None if x < 0 else x for x in window))
        own, own_lse = by_mathematics(q, k, v, visible, None)
        out[queries], lse[:, queries] = own[0].transpose(0, 1), own_lse[0]
    assert_same(results, leaves, (out, lse))

    inplace = getattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace", None)
    if inplace is not None:
        with torch.no_grad():
            written = torch.full_like(leaves[0], torch.nan)
            assert torch.equal(inplace(written, *arguments, **windows), results[1])
        assert torch.equal(written, results[0])


USED = [3, 0, 2]  # keys of each sequence


def used_keys(page_size: int | None, *, used: list[int] = USED) -> tuple[list[Tensor], dict[str, Any]]:
    """Keys and values of each sequence; and those tensors among NaN, packed or in pages, with the arguments."""
    own = [normal(2, n, 2, 8) for n in used]
    seqused_k = torch.tensor(used, dtype=torch.int32, device=DEVICE)
    if page_size is None:
        starts = [sum(used[:i]) + 3 * i for i in range(len(used) + 1)]  # 3 more of room for each
        kept = torch.full((2, starts[-1], 2, 8), torch.nan, dtype=DTYPE, device=DEVICE)
        for start, x in zip(starts, own, strict=False):
            kept[:, start : start + x.shape[1]] = x
        cum_seq_k = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        return own, {"kept": kept, "cum_seq_k": cum_seq_k, "seqused_k": seqused_k, "block_table": None}
    n_pages = -(-max(used) // page_size)
    table = torch.randperm(len(used) * n_pages).view(len(used), n_pages)
    kept = torch.full((2, table.numel() + 1, page_size, 2, 8), torch.nan, dtype=DTYPE, device=DEVICE)
    for i, x in enumerate(own):
        for t in range(x.shape[1]):
            kept[:, table[i, t // page_size], t % page_size] = x[:, t]
        table[i, -(-x.shape[1] // page_size) :] = -(10**6)  # pages that are not reached
    block_table = table.to(DEVICE, torch.int32)
    return own, {"kept": kept, "cum_seq_k": None, "seqused_k": seqused_k, "block_table": block_table}


def by_sequence(q: Tensor, own: list[Tensor], window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """out and lse of packed queries that attend to a sequence's keys each."""
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=DTYPE, device=DEVICE)
    for i, (k, v) in enumerate(own):
        queries = slice(STOPS_Q[i], STOPS_Q[i + 1])
        query, k, v = (x.transpose(0, 1)[None] for x in (q[queries], k, v))
        visible = band(query.shape[2], k.shape[2], *(None if x < 0 else x for x in window))
        found, own_lse = by_mathematics(query, k, v, visible, None)
        out[queries], lse[:, queries] = found[0].transpose(0, 1), own_lse[0]
    return out, lse


needs_pages = pytest.mark.skipif("block_table" not in str(flash_op.default._schema), reason="this torch has no pages")


@needs_pages
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (1, 0)])
@pytest.mark.parametrize("page_size", [None, 1, 2, 16])
def test_used_keys(page_size: int | None, window: tuple[int, int]) -> None:
    """Keys behind those that are used are NaN; one sequence uses none, and some queries belong to none."""
    q = normal(10, 4, 8)
    own, given = used_keys(page_size, used=[5, 0, 3])
    kept, cum_seq_k = given.pop("kept"), given.pop("cum_seq_k")
    arguments = (q, *kept, STOPS[0], cum_seq_k, 5, 9, 0.0, window == (-1, 0), False)
    windows = dict(zip(("window_size_left", "window_size_right"), window, strict=True))
    found = flash_op(*arguments, **windows, **given)
    torch.testing.assert_close(found[:2], by_sequence(q, own, window), **CLOSE)
    written = torch.full_like(q, torch.nan)
    lse = torch.ops.aten._flash_attention_forward_no_dropout_inplace(written, *arguments, **windows, **given)
    assert torch.equal(lse, found[1])
    assert torch.equal(written, found[0])


@needs_pages
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_splits(num_splits: int, page_size: int | None) -> None:
    """Over more than a block of keys."""
    q = normal(3, 2, 8)
    stops = torch.tensor([0, 1, 1, 3], dtype=torch.int32, device=DEVICE)
    own, given = used_keys(page_size, used=[150, 3, 70])
    kept, cum_seq_k = given.pop("kept"), given.pop("cum_seq_k")
    out, lse, *_ = flash_op(q, *kept, stops, cum_seq_k, 2, 150, 0.0, False, False, num_splits=num_splits, **given)
    for i, queries in ((0, slice(0, 1)), (2, slice(1, 3))):
        query, k, v = (x.transpose(0, 1)[None] for x in (q[queries], *own[i]))
        expected, own_lse = by_mathematics(query, k, v, band(query.shape[2], k.shape[2], None, None), None)
        torch.testing.assert_close(out[queries], expected[0].transpose(0, 1), **CLOSE)
        torch.testing.assert_close(lse[:, queries], own_lse[0], **CLOSE)


@needs_pages
def test_keys_are_not_copied_and_splits_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    forward = torch_flash.ops.forward

    def spy(inputs: Any, constants: Any) -> Any:
        seen.append((inputs[1].data_ptr(), inputs[2].data_ptr(), constants.sizes.num_splits))
        return forward(inputs, constants)

    monkeypatch.setattr(torch_flash.ops, "forward", spy)
    for page_size in (None, 2):
        _, given = used_keys(page_size)
        k, v = given.pop("kept")
        cum_seq_k = given.pop("cum_seq_k")
        flash_op(normal(10, 4, 8), k, v, STOPS[0], cum_seq_k, 5, 9, 0.0, False, False, num_splits=3, **given)
        assert seen.pop() == (k.data_ptr(), v.data_ptr(), 3)
    q = normal(1, 5, 2, 8)
    flash_op(q, q, q, None, None, 5, 5, 0.0, False, False, num_splits=2)
    assert seen.pop()[2] == 2


@needs_pages
@pytest.mark.parametrize("page_size", [None, 2])
def test_varlen_attn_with_used_keys(page_size: int | None) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q = normal(8, 4, 8)
    own, given = used_keys(page_size)
    kept, cum_seq_k = given.pop("kept"), given.pop("cum_seq_k")
    options = {"window_size": (-1, 0), "enable_gqa": True, "num_splits": 1, **given}
    out, lse = varlen.varlen_attn(
        q, *kept, STOPS[0], cum_seq_k, 5, 9, return_aux=varlen.AuxRequest(lse=True), **options
    )
    torch.testing.assert_close((out, lse), by_sequence(q, own, (-1, 0)), **CLOSE)
    written = varlen.varlen_attn_out(torch.full_like(q, torch.nan), q, *kept, STOPS[0], cum_seq_k, 5, 9, **options)
    assert torch.equal(written, out)


@needs_pages
@pytest.mark.parametrize("page_size", [None, 2])
def test_used_keys_have_no_gradients(page_size: int | None) -> None:
    """The backward operator would not know which keys were used."""
    _, given = used_keys(page_size)
    kept, cum_seq_k = given.pop("kept"), given.pop("cum_seq_k")
    q = normal(10, 4, 8).requires_grad_()
    arguments = (q, *kept, STOPS[0], cum_seq_k, 5, 9, 0.0, False, False)
    with pytest.raises(NotImplementedError, match="seqused_k: got a tensor and inputs that require grad"):
        flash_op(*arguments, **given)
    with torch.no_grad():
        assert flash_op(*arguments, **given)[0].isfinite().all()


@needs_pages
@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"seqused_k": None}, ValueError, "block_table: got a tensor without seqused_k"),
        ({"block_table": None}, ValueError, "cum_seq_k: got None without block_table"),
        ({"seqused_k": torch.tensor([3, 0, 2], device=DEVICE)}, ValueError, r"seqused_k: got torch.int64 \(3,\)"),
        ({"block_table": torch.zeros(3, 2, device=DEVICE)}, TypeError, "block_table: got torch.float32"),
    ],
)
def test_wrong_used_keys(changed: dict[str, Any], error: type[Exception], match: str) -> None:
    _, given = used_keys(2)
    kept, cum_seq_k = given.pop("kept"), given.pop("cum_seq_k")
    with pytest.raises(error, match=match):
        flash_op(normal(10, 4, 8), *kept, STOPS[0], cum_seq_k, 5, 9, 0.0, False, False, **{**given, **changed})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_are_those_of_attention_bit_for_bit(dtype: torch.dtype) -> None:
    leaves = [torch.randn(2, n, 4, 16, device=DEVICE).to(dtype).requires_grad_() for n in (5, 9, 9)]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    dout = torch.randn(2, 4, 5, 16, device=DEVICE).to(dtype)
    found = []
    for function in (
        lambda: sdpa_op(q, k, v, 0.0, True)[:2],
        lambda: attention(q, k, v, mask=masks.causal(), return_lse=True),
    ):
        out, lse = function()
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        assert out.stride() == q.stride()
        found.append((out, lse, *torch.autograd.grad(out, leaves, dout)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads_first", [True, False])
def test_gradients_of_some_of_the_keys(dtype: torch.dtype, heads_first: bool) -> None:
    """torch's ring attention calls the backward for a part of the keys, with out and lse of all."""
    tensors = [normal(2, 3, n, 16).to(dtype).requires_grad_() for n in (8, 12, 12)]
    visible, dout = band(8, 12, None, None), normal(2, 3, 8, 16).to(dtype)
    out, lse = by_mathematics(*(x.double() for x in tensors), visible, None)
    exact = torch.autograd.grad(out, tensors, dout.double())
    eager = torch.autograd.grad(by_mathematics(*tensors, visible, None)[0], tensors, dout)
    q, k, v = (x.detach() for x in tensors)
    whole = out.detach().to(dtype), lse.detach().float()
    found = []
    for keys in (slice(0, 5), slice(5, 12)):
        given = dout, q, k[:, :, keys], v[:, :, keys], whole[0]
        nothing = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        others = whole[1], None, None, 8, keys.stop - keys.start, 0.0, False, nothing, nothing
        if heads_first:
            grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(*given, *others)
        else:
            op = torch.ops.aten._flash_attention_backward
            grads = [x.transpose(1, 2) for x in op(*(x.transpose(1, 2) for x in given), *others)]
        found.append(grads)
    (dq, *first), (more_dq, *second) = found
    joined = [dq + more_dq, *(torch.cat(parts, dim=2) for parts in zip(first, second, strict=True))]
    for actual, right, other in zip(joined, exact, eager, strict=True):
        error, allowed = (actual - right).abs(), (other - right).abs()
        assert error.max() <= 1.5 * allowed.max() + torch.finfo(dtype).eps * right.abs().max()


@pytest.mark.parametrize("packed", [False, True])
def test_dropout_drops_the_same_weights_backwards(packed: bool) -> None:
    leaves = leaves_of(*((n, 2, 8) if packed else (2, 2, n, 8) for n in (8, 9, 9)))

    def call() -> tuple[Tensor, ...]:
        return flash_op(*leaves, *STOPS, 5, 4, 0.4, False, False) if packed else sdpa_op(*leaves, 0.4)

    out, *_, rng_state, _, _ = call()
    seed = rng_state.view(torch.int64).reshape(-1)[:1]
    options: dict[str, Any] = {"dropout_p": 0.4, "dropout_seed": seed, "backend": "triton"}
    expected = attention_varlen(*leaves, *STOPS, 5, 4, **options) if packed else attention(*leaves, **options)
    assert_same([out], leaves, [expected], rtol=0, atol=0)
    assert not torch.equal(out, call()[0])


def test_strides_and_empty_sizes() -> None:
    q, k, v = normal(2, 4, 8, 5).mT, normal(2, 1, 7, 8).expand(2, 4, 7, 8), normal(8).expand(2, 4, 7, 8)
    visible = band(5, 7, None, None)
    torch.testing.assert_close(sdpa_op(q, k, v)[0], by_mathematics(q, k, v, visible, None)[0], **CLOSE)
    out, lse, *_ = sdpa_op(q, k[:, :, :0], v[:, :, :0])
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    leaf = q[:, :, :0].clone().requires_grad_()
    out, *_ = sdpa_op(leaf, k, v)
    assert out.shape == (2, 4, 0, 8)
    assert torch.autograd.grad(out.sum(), leaf)[0].shape == leaf.shape


def test_varlen_attn_of_torch() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    leaves = leaves_of((8, 4, 8), *[(9, 4, 8)] * 2)
    out = varlen.varlen_attn(*leaves, *STOPS, 5, 4, window_size=(-1, 0))
    expected = attention_varlen(*leaves, *STOPS, 5, 4, mask=masks.causal(), backend="triton")
    assert_same([out], leaves, [expected], rtol=0, atol=0)


@pytest.mark.parametrize("packed", [False, True])
def test_results_are_those_that_torchs_compiler_expects(packed: bool) -> None:
    q, k = (torch.randn(2, n, 4, 8, device=DEVICE).transpose(1, 2) for n in (5, 7))
    arguments: tuple[Any, ...] = (q, k, k, 0.0, True)
    operator = sdpa_op.default
    if packed:
        q, k = torch.randn(8, 4, 8, device=DEVICE), torch.randn(9, 4, 8, device=DEVICE)
        arguments = (q, k, k, *STOPS, 5, 4, 0.0, True, False)
        operator = flash_op.default
    real = operator(*arguments)
    with FakeTensorMode() as mode:
        fake = operator(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments))

    def described(results: Any) -> list[Any]:
        return [(x.shape, x.dtype, x.stride()) if isinstance(x, Tensor) else x for x in results]

    assert described(real) == described(fake)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled() -> None:
    torch._dynamo.reset()
    leaves = leaves_of(*((2, 2, n, 8) for n in (5, 7, 7)))
    call = torch.compile(lambda *x: sdpa_op(*x, 0.0, True)[0] * 2, backend="aot_eager", fullgraph=True)
    assert_same([call(*leaves)], leaves, [2 * by_mathematics(*leaves, band(5, 7, None, 0), None)[0]])


def test_unsupported_calls_are_refused_with_every_reason() -> None:
    q = normal(2, 5, 2, 8)
    slopes = torch.rand(2, device=DEVICE)
    used = torch.tensor([3, 4], dtype=torch.int32, device=DEVICE)
    with pytest.raises(NotImplementedError, match=r"return_debug_mask: .*seqused_k: .*alibi_slopes: "):
        flash_op(q, q, q, None, None, 5, 5, 0.0, False, True, seqused_k=used, alibi_slopes=slopes)
    with pytest.raises(NotImplementedError, match="return_debug_mask"):
        sdpa_op(q, q, q, 0.0, False, True)
    with pytest.raises(NotImplementedError, match=r"value: got head_dim 4, allowed is that of key, 8"):
        sdpa_op(q, q, q[..., :4])
    if "num_splits" in str(flash_op.default._schema):
        with pytest.raises(NotImplementedError, match="block_table: got a tensor, allowed is None unless queries are"):
            flash_op(q, q, q, None, None, 5, 5, 0.0, False, False, block_table=used)
        assert torch.equal(flash_op(q, q, q, None, None, 5, 5, 0.0, False, False, num_splits=1)[0],
                           flash_op(q, q, q, None, None, 5, 5, 0.0, False, False)[0])  # fmt: skip
    with pytest.raises(ValueError, match=r"^cum_seq_q, cum_seq_k: got a tensor and None"):
        flash_op(q[0], q[0], q[0], used, None, 5, 5, 0.0, False, False)
    with pytest.raises(TypeError, match=r"^cu_seqlens_k: got torch\.int64"):
        flash_op(q[0], q[0], q[0], used, used.long(), 5, 5, 0.0, False, False)
    with pytest.raises(ValueError, match="dropout_p"):
        sdpa_op(q, q, q, 1.0)


def test_activated_and_restored() -> None:
    q = normal(1, 2, 5, 8)
    assert "fusedattn" in torch.nn.attention.list_flash_attention_impls()
    assert torch.nn.attention.current_flash_attention_impl() == "fusedattn"
    names = list(torch_flash._KERNELS)
    torch.nn.attention.activate_flash_attention_impl("fusedattn")  # type: ignore[arg-type]
    expected = sdpa_op(q, q, q)[0]
    assert all(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", DEVICE.upper()) for name in names)
    torch.nn.attention.restore_flash_attention_impl()
    assert torch.nn.attention.current_flash_attention_impl() is None
    if DEVICE == "cpu":  # torch itself has none for CPUs
        held = torch_flash._Overrides("CPU")
        held.remove()
        assert not any(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU") for name in names)
        with pytest.raises(NotImplementedError, match="'CPU' backend"):
            sdpa_op(q, q, q)
    torch.nn.attention.activate_flash_attention_impl("fusedattn")  # type: ignore[arg-type]
    assert torch.equal(sdpa_op(q, q, q)[0], expected)


def test_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^dispatch_key: got 'cuda', allowed are 'CUDA', 'CPU'"):
        torch_flash.register(dispatch_key="cuda")
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(NotImplementedError, match=r"as 2\.13 has it"):
        torch_flash.register()
