"""The package's version of torch's scaled_dot_product_attention; test_replace_sdpa.py puts it in torch's place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as bound_early

from fusedattn import attention, masks
from fusedattn.integrations.torch_functions import replace_sdpa, scaled_dot_product_attention
from fusedattn.support import _release
from tests.conftest import BACKENDS, DEVICE, INTERPRETING
from tests.helpers.sdpa import CLOSE, DTYPE, Overriding, normal

pytestmark = pytest.mark.usefixtures("_seed")

L, S, E, EV = 5, 7, 8, 6

# The treatment of arguments is the same for all backends, and the interpreter is slow.
on_fastest_backend = pytest.mark.parametrize("backend", ["torch" if INTERPRETING else "triton"], indirect=True)


def random_mask(*shape: int) -> Tensor:
    return torch.rand(shape, device=DEVICE) < 0.6


@pytest.fixture(autouse=True, params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the default backend as users do: by the variable, or by the device."""
    if INTERPRETING:
        monkeypatch.setenv("TRITON_INTERPRET", "1" if request.param == "triton" else "0")
    elif request.param == "torch":
        pytest.skip("a GPU's tensors run the kernels by default")
    return str(request.param)


def by_mathematics(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's documented formula, by broadcasting; rows that see nothing are 0."""
    assert dropout_p == 0.0
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    if is_causal:
        visible = visible.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = visible & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
    scores = scores.masked_fill(~visible, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ value


def assert_same(
    actual: Callable[..., Tensor], expected: Callable[..., Tensor], tensors: dict[str, Any], **options: Any
) -> None:
    """Compare out and the gradients of all floating-point tensors."""
    results = []
    for function in (actual, expected):
        inputs = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in tensors.items()}
        out = function(**inputs, **options)
        leaves = [x for x in inputs.values() if x.requires_grad]
        torch.manual_seed(1)
        dout = torch.randn(out.shape, dtype=torch.float64, device=out.device).to(out.dtype)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    torch.testing.assert_close(*results, **CLOSE)


def assert_as_in_torch(tensors: dict[str, Any], **options: Any) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert_same(scaled_dot_product_attention, F.scaled_dot_product_attention, tensors, **options)


Q, K, V = (2, 4, L, E), (2, 4, S, E), (2, 4, S, EV)


def drawn(query: tuple[int, ...] = Q, key: tuple[int, ...] = K, value: tuple[int, ...] = V) -> dict[str, Tensor]:
    return {"query": normal(query), "key": normal(key), "value": normal(value)}


SHAPES = {
    "two dimensions": ((L, E), (S, E), (S, EV)),
    "three": ((3, L, E), (3, S, E), (3, S, EV)),
    "four": (Q, K, V),
    "five": ((2, 3, 2, L, E), (2, 3, 2, S, E), (2, 3, 2, S, EV)),
    "six": ((2, 1, 2, 2, L, E), (2, 1, 2, 2, S, E), (2, 1, 2, 2, S, EV)),
    "different ones": ((L, E), (2, 3, S, E), (3, S, EV)),
    "batches of the key": ((1, 2, L, E), (3, 2, S, E), (2, S, EV)),
    "batches of the value": ((1, 2, L, E), (2, S, E), (3, 2, S, EV)),
    "crossed batches": ((2, 1, 2, L, E), (1, 3, 2, S, E), (3, 2, S, EV)),
    "one KV head": ((2, 4, L, E), (2, 1, S, E), (2, 1, S, EV)),
    "one KV head of all batches": ((2, 4, L, E), (1, 1, S, E), (S, EV)),
    "one key head": ((2, 4, L, E), (2, 1, S, E), (2, 4, S, EV)),
    "one query head": ((2, 1, L, E), (2, 3, S, E), (2, 3, S, EV)),
    "one query": ((2, 2, 1, E), (2, 2, S, E), (2, 2, S, EV)),
    "one key": ((2, 2, L, E), (2, 2, 1, E), (2, 2, 1, EV)),
    "no keys": ((2, 2, L, E), (2, 2, 0, E), (2, 2, 0, EV)),
    "no queries": ((2, 2, 0, E), (2, 2, S, E), (2, 2, S, EV)),
    "no batches": ((0, 2, L, E), (1, 2, S, E), (0, 2, S, EV)),
    "no heads": ((2, 0, L, E), (2, 0, S, E), (2, 1, S, EV)),
    "no features of the value": (Q, K, (2, 4, S, 0)),
    "no features of the key": ((2, 4, L, 0), (2, 4, S, 0), V),
}


@on_fastest_backend
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes(shapes: tuple[tuple[int, ...], ...], is_causal: bool) -> None:
    assert_as_in_torch(drawn(*shapes), is_causal=is_causal)


GQA = {
    "two groups": ((2, 6, L, E), (2, 2, S, E), (2, 2, S, EV)),
    "one KV head": ((2, 6, L, E), (2, 1, S, E), (2, 1, S, EV)),
    "as many": ((2, 6, L, E), (2, 6, S, E), (2, 6, S, EV)),
    "different numbers": ((2, 6, L, E), (2, 2, S, E), (2, 3, S, EV)),
    "three dimensions": ((6, L, E), (2, S, E), (2, S, EV)),
    "five dimensions": ((2, 1, 6, L, E), (2, 3, 2, S, E), (3, 2, S, EV)),
    "no heads": ((2, 0, L, E), (2, 2, S, E), (2, 2, S, EV)),
}


@on_fastest_backend
@pytest.mark.parametrize("shapes", GQA.values(), ids=GQA)
def test_grouped_queries(shapes: tuple[tuple[int, ...], ...]) -> None:
    assert_as_in_torch(drawn(*shapes), enable_gqa=True)


@pytest.mark.parametrize("shapes", [GQA["different numbers"], SHAPES["one KV head"], SHAPES["different ones"]])
def test_shapes_on_every_backend(shapes: tuple[tuple[int, ...], ...]) -> None:
    attn_mask = normal(shapes[0][-3] if len(shapes[0]) > 2 else 1, L, S)
    assert_as_in_torch(drawn(*shapes) | {"attn_mask": attn_mask}, enable_gqa=shapes is GQA["different numbers"])


@on_fastest_backend
@pytest.mark.parametrize("kind", [torch.bool, DTYPE, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [
        (L, S),
        (L, 1),
        (1, S),
        (4, L, S),
        (1, L, S),
        (2, 1, L, S),
        (2, 1, 1, S),
        (1, 4, L, 1),
        (2, 4, 1, 1),
        (2, 4, L, S),
    ],
    ids=str,
)
def test_masks(shape: tuple[int, ...], kind: torch.dtype) -> None:
    attn_mask = random_mask(*shape) if kind == torch.bool else normal(shape).to(kind)
    assert_as_in_torch(drawn() | {"attn_mask": attn_mask})


@on_fastest_backend
@pytest.mark.parametrize(
    "shape", [(), (S,), (2, 1, 2, L, S), (2, 3, 1, 1, S), (1, 1, 2, L, S), (1, 3, 1, L, 1)], ids=str
)
def test_masks_of_several_batches_and_of_fewer_dimensions_than_torch_takes(shape: tuple[int, ...]) -> None:
    tensors = drawn((2, 3, 2, L, E), (2, 3, 2, S, E), (2, 3, 2, S, EV))
    for attn_mask in (random_mask(*shape), normal(shape)):
        assert_same(scaled_dot_product_attention, by_mathematics, tensors | {"attn_mask": attn_mask})


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_is_causal_beside_a_mask_is_both(kind: str) -> None:
    """As in torch's CPU kernel before 2.15; now all of its paths raise."""
    tensors = drawn(value=K)
    attn_mask = random_mask(L, S) if kind == "bool" else normal(L, S)
    assert_same(scaled_dot_product_attention, by_mathematics, tensors | {"attn_mask": attn_mask}, is_causal=True)
    if DEVICE == "cpu" and _release(torch.__version__) < (2, 15):
        expected = F.scaled_dot_product_attention(*tensors.values(), attn_mask, is_causal=True)
        actual = scaled_dot_product_attention(*tensors.values(), attn_mask, is_causal=True)
        torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (6, 6), (1, 4)])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_causal_biases(make: Callable[..., Tensor], lengths: tuple[int, int]) -> None:
    seqlen_q, seqlen_k = lengths
    visible = torch.ones(lengths, dtype=torch.bool, device=DEVICE)
    visible = visible.tril(seqlen_k - seqlen_q if make is causal_lower_right else 0)
    ours = partial(scaled_dot_product_attention, attn_mask=make(*lengths))
    keys = (2, 2, seqlen_k, E)
    assert_same(ours, partial(by_mathematics, attn_mask=visible), drawn((2, 2, seqlen_q, E), keys, keys))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_that_see_nothing_are_0_as_torchs_are(kind: str) -> None:
    visible = random_mask(L, S)
    visible[2] = False
    attn_mask = (
        visible if kind == "bool" else torch.zeros(L, S, dtype=DTYPE, device=DEVICE).masked_fill(~visible, -torch.inf)
    )
    tensors = drawn() | {"attn_mask": attn_mask}
    assert_as_in_torch(tensors)
    query = tensors["query"].requires_grad_()
    out = scaled_dot_product_attention(**tensors)
    assert out[:, :, 2].eq(0).all()
    assert torch.autograd.grad(out.sum(), query)[0][:, :, 2].eq(0).all()


def test_nan_behind_a_mask_stays_there() -> None:
    query, key, value = drawn().values()
    clean = scaled_dot_product_attention(query, key[:, :, :-1], value[:, :, :-1])
    key[:, :, -1], value[:, :, -1] = torch.nan, torch.inf
    visible = torch.ones(S, dtype=torch.bool, device=DEVICE)
    visible[-1] = False
    torch.testing.assert_close(scaled_dot_product_attention(query, key, value, visible[None]), clean, **CLOSE)


@pytest.mark.parametrize("scale", [0.3, -0.5, 0.0, 2, torch.tensor(0.3), np.float32(0.3)], ids=repr)
def test_scales(scale: Any) -> None:
    assert_as_in_torch(drawn(), scale=scale)


def test_strides() -> None:
    """Transposed, with another contiguous dimension than the last, and expanded."""
    query = normal(2, L, 4, E).transpose(1, 2)
    key = normal(2, 4, E, S).mT
    value = normal(EV).expand(2, 4, S, EV)
    attn_mask = normal(S, L).mT
    tensors = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    before = {name: x.clone() for name, x in tensors.items()}
    expected = by_mathematics(**tensors)
    torch.testing.assert_close(scaled_dot_product_attention(**tensors), expected, **CLOSE)
    broad = normal(1).expand(2, 4, S, EV)
    torch.testing.assert_close(
        scaled_dot_product_attention(query, key, broad), by_mathematics(query, key, broad), **CLOSE
    )
    assert all(torch.equal(x, before[name]) for name, x in tensors.items())


def test_one_kv_head_and_shared_batches_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.extend((q, k, v))
        return attention(q, k, v, **options)

    monkeypatch.setattr("fusedattn.integrations.torch_functions.attention", spy)
    query, key, value = normal(3, 4, L, E), normal(1, 1, S, E), normal(S, EV)
    scaled_dot_product_attention(query, key, value)
    assert [x.shape for x in seen] == [(3, 4, L, E), (3, 1, S, E), (3, 1, S, EV)]
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in (query, key, value)]
    # A single head of queries is not copied either.
    scaled_dot_product_attention(query[:, :1], key.expand(3, 4, S, E), value.expand(3, 4, S, EV))
    assert seen[3].shape == (3, 4, L, E)
    assert seen[3].data_ptr() == query.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_it_is_attention(dtype: torch.dtype) -> None:
    query, key, value = (x.to(dtype) for x in drawn().values())
    attn_mask = torch.randn(4, L, S, device=DEVICE)
    actual = scaled_dot_product_attention(query, key, value, attn_mask, is_causal=True, scale=0.2)
    expected = attention(query, key, value, bias=attn_mask, mask=masks.causal("top_left"), scale=0.2)
    assert actual.dtype == dtype
    assert torch.equal(actual, expected)


def test_dropout_follows_the_generator() -> None:
    tensors = normal(2, 2, 4, E), normal(2, 2, 20, E), normal(2, 2, 20, E)
    found = []
    for function in (scaled_dot_product_attention, scaled_dot_product_attention, attention):
        torch.manual_seed(3)
        found.append(function(*tensors, dropout_p=0.5))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], scaled_dot_product_attention(*tensors, dropout_p=0.5))


@pytest.mark.skipif(DEVICE != "cpu", reason="torch's autocast of other devices is tested there by torch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_autocast_casts_as_torch_does(dtype: torch.dtype) -> None:
    query, key, value, attn_mask = (torch.randn(shape).to(dtype) for shape in (Q, K, V, (L, S)))
    with torch.autocast("cpu", torch.bfloat16):
        actual = scaled_dot_product_attention(query, key, value, attn_mask)
        assert actual.dtype == F.scaled_dot_product_attention(query, key, value, attn_mask).dtype
    if dtype != torch.float64:
        query, key, value, attn_mask = (x.bfloat16() for x in (query, key, value, attn_mask))
    assert torch.equal(actual, scaled_dot_product_attention(query, key, value, attn_mask))
    visible = random_mask(L, S)
    with torch.autocast("cpu", torch.bfloat16):
        actual = scaled_dot_product_attention(query, key, value, visible)
    assert torch.equal(actual, scaled_dot_product_attention(query, key, value, visible))


@pytest.mark.parametrize("is_causal", [False, True])
def test_jagged_tensors(is_causal: bool) -> None:
    lengths_q, lengths_k = (3, 1, 6), (4, 9, 2)
    rows = [[normal(n, 2, E) for n in lengths] for lengths in (lengths_q, lengths_k, lengths_k)]
    query, key, value = (
        torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2).detach() for parts in rows
    )
    out = scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    for i, actual in enumerate(out.unbind()):
        expected = by_mathematics(*(parts[i].transpose(0, 1) for parts in rows), is_causal=is_causal)
        torch.testing.assert_close(actual, expected, **CLOSE)
    with replace_sdpa() as replaced:
        again = bound_early(query, key, value, is_causal=is_causal)
    assert replaced.fused == 1
    assert torch.equal(again.values(), out.values())


def test_options_of_jagged_tensors() -> None:
    parts = [normal(n, 2, E) for n in (3, 1, 6)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2).detach()
    found = []
    for function in (scaled_dot_product_attention, attention):
        torch.manual_seed(3)
        found.append(function(x, x, x, dropout_p=0.5, scale=0.3).values())
    assert torch.equal(*found)


WRONG: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "not a tensor": (TypeError, "^query: got list", {"query": [1.0]}),
    "no tensor": (TypeError, "^value: got NoneType", {"value": None}),
    "mask, not a tensor": (TypeError, "^attn_mask: got list", {"attn_mask": [[True]]}),
    "int": (TypeError, r"^query: got torch.int64", {"query": torch.zeros(Q, dtype=torch.int64)}),
    "dtypes": (TypeError, r"^key: got torch.float16, allowed is the dtype of query", {"key": torch.zeros(K).half()}),
    "mask dtype": (TypeError, r"^attn_mask: got torch.int32", {"attn_mask": torch.zeros(L, S, dtype=torch.int32)}),
    "mask of fewer bits": (TypeError, r"^attn_mask: got torch.float16", {"attn_mask": torch.zeros(L, S).half()}),
    "device": (ValueError, "^key: got device meta", {"key": torch.zeros(K, device="meta")}),
    "mask device": (ValueError, "^attn_mask: got device meta", {"attn_mask": torch.zeros(L, S, device="meta")}),
    "one dimension": (ValueError, r"^query: got shape \(8,\)", {"query": torch.zeros(8)}),
    "features": (ValueError, r"^query, key, value: got shapes .* last dimension", {"key": torch.zeros(2, 4, S, E + 1)}),
    "lengths": (ValueError, r"^query, key, value: .* second last", {"value": torch.zeros(2, 4, S + 1, EV)}),
    "heads": (ValueError, "heads that broadcast, or enable_gqa=True", {"query": torch.zeros(2, 8, L, E)}),
    "gqa heads": (ValueError, "a multiple", {"query": torch.zeros(2, 6, L, E), "enable_gqa": True}),
    "gqa, two dimensions": (ValueError, "three dimensions", {"query": torch.zeros(L, E), "enable_gqa": True}),
    "batches": (ValueError, "before the heads that broadcast", {"query": torch.zeros(3, 4, L, E)}),
    "mask shape": (ValueError, r"^attn_mask: got shape \(5, 8\)", {"attn_mask": torch.zeros(L, S + 1)}),
    "mask dimensions": (ValueError, r"^attn_mask: got shape \(1, 2,", {"attn_mask": torch.zeros(1, 2, 4, L, S)}),
    "lengths of a causal bias": (ValueError, "^attn_mask: got a CausalBias", {"attn_mask": causal_upper_left(4, 4)}),
    "keys of a causal bias": (ValueError, "^attn_mask: got a CausalBias", {"attn_mask": causal_upper_left(L, 4)}),
    "causal twice": (ValueError, "^is_causal", {"attn_mask": causal_upper_left(L, S), "is_causal": True}),
    "is_causal": (TypeError, "^is_causal: got int", {"is_causal": 1}),
    "enable_gqa": (TypeError, "^enable_gqa: got int", {"enable_gqa": 1}),
    "dropout_p": (ValueError, "^dropout_p: got 1.5", {"dropout_p": 1.5}),
    "negative dropout_p": (ValueError, "^dropout_p: got -0.5", {"dropout_p": -0.5}),
    "scale": (TypeError, "^scale: got str", {"scale": "1"}),
    "infinite scale": (ValueError, "^scale: got inf", {"scale": float("inf")}),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_wrong_arguments(case: tuple[type[Exception], str, dict[str, Any]]) -> None:
    error, message, wrong = case
    on_cpu = {"query": torch.zeros(Q), "key": torch.zeros(K), "value": torch.zeros(V), **wrong}
    arguments = {name: x.to(DEVICE) if type(x) is Tensor and not x.is_meta else x for name, x in on_cpu.items()}
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(**arguments)
    # The context does not hide the error.
    with replace_sdpa(fallback=True) as replaced, pytest.raises((error, TypeError)):
        F.scaled_dot_product_attention(**arguments)
    assert replaced.left_to_torch == 0


def test_an_unsupported_call_is_refused_with_every_reason() -> None:
    query, key, value = drawn().values()
    with pytest.raises(NotImplementedError, match=r"query: got Overriding.*dropout_p: got 1\.0"):
        scaled_dot_product_attention(query.as_subclass(Overriding), key, value, dropout_p=1.0)
    without_functions = type("Plain", (Tensor,), {})
    found = scaled_dot_product_attention(query.as_subclass(without_functions), key, value).as_subclass(Tensor)
    torch.testing.assert_close(found, by_mathematics(query, key, value), **CLOSE)
    # Not transposed, so ragged in the place of the heads.
    ragged = torch.nested.nested_tensor([normal(3, 2, E), normal(4, 2, E)], layout=torch.jagged)
    with pytest.raises(NotImplementedError, match=r"query: got a nested tensor .*; key: .*; attn_mask: "):
        scaled_dot_product_attention(ragged, ragged, ragged, attn_mask=normal(2, 2))
    starts, lengths = torch.tensor([[1, 0], [3, 4]], device=DEVICE)
    gaps = torch.nested.narrow(normal(2, 6, 2, E), 1, starts, lengths, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(NotImplementedError, match=r"query: got a nested tensor .* without gaps"):
        scaled_dot_product_attention(gaps, gaps, gaps)


def test_a_nested_tensor_beside_dense_ones_is_an_error() -> None:
    nested = torch.nested.nested_tensor([normal(3, 2, E)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(ValueError, match=r"^key: got a dense tensor, allowed is a nested one"):
        scaled_dot_product_attention(nested, normal(1, 2, 3, E), nested)
