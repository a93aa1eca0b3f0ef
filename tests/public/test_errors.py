"""A caller's mistakes: the type of the error; its message names the argument, the value and the values allowed."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import fusedattn
from fusedattn import (
    Rope,
    ScoreMod,
    apply_rope,
    attention,
    attention_varlen,
    biases,
    fuse,
    masks,
    not_supported_reasons,
)
from tests.conftest import BACKENDS, DEVICE, INTERPRETING
from tests.helpers import quick

pytestmark = [pytest.mark.usefixtures("_seed")]

backends = pytest.mark.parametrize("backend", BACKENDS)


def tensor(*shape: int, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def bools(*shape: int, device: str = DEVICE) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool, device=device)


def good() -> dict[str, Any]:
    return {"q": tensor(2, 4, 5, 16), "k": tensor(2, 2, 7, 16), "v": tensor(2, 2, 7, 16)}


def rope(rows: int = 16, width: int = 16, device: str = DEVICE) -> Rope:
    return Rope.from_theta(width, rows, device=device)


def numbers(n: int, device: str = DEVICE) -> torch.Tensor:
    return torch.arange(n, device=device)


def stops(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def good_packed() -> dict[str, Any]:
    """Sequences of 4 and 5 queries, and of 5 and 7 keys."""
    q, k, v = tensor(9, 4, 16), tensor(12, 2, 16), tensor(12, 2, 16)
    lengths = {"max_seqlen_q": 5, "max_seqlen_k": 7}
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": stops(0, 4, 9), "cu_seqlens_k": stops(0, 5, 12), **lengths}


@triton.jit
def sees(batch, head, q_index, k_index, args):
    return tl.maximum(q_index, k_index) == q_index


def sees_eager(batch, head, q_index, k_index, args):
    return q_index >= k_index


@triton.jit
def halved(score, batch, head, q_index, k_index, args):
    return score * 0.5


def halved_eager(score, batch, head, q_index, k_index, args):
    return score * 0.5


# Changes to a good call -> the error, and what its message must contain.
WRONG: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "q is no tensor": ({"q": [[0.0]]}, TypeError, ("q", "list", "torch.Tensor")),
    "k is None": ({"k": None}, TypeError, ("k", "NoneType", "torch.Tensor")),
    "v is numpy": ({"v": np.zeros((2, 2, 7, 16))}, TypeError, ("v", "ndarray", "torch.Tensor")),
    "integers": ({"q": tensor(2, 4, 5, 16, dtype=torch.int32)}, TypeError, ("q", "torch.int32", "torch.float16")),
    "complex": ({"q": tensor(2, 4, 5, 16, dtype=torch.complex64)}, TypeError, ("q", "complex64", "float32")),
    "float8": ({"q": tensor(2, 4, 5, 16).to(torch.float8_e4m3fn)}, TypeError, ("q", "float8_e4m3fn", "float32")),
    "mixed dtypes, k": ({"k": tensor(2, 2, 7, 16, dtype=torch.float16)}, TypeError, ("k", "float16", "float32", "q")),
    "mixed dtypes, v": ({"v": tensor(2, 2, 7, 16, dtype=torch.bfloat16)}, TypeError, ("v", "bfloat16", "float32")),
    "mixed devices": ({"k": tensor(2, 2, 7, 16, device="meta")}, ValueError, ("k", "meta", DEVICE, "device")),
    "mixed devices, v": ({"v": tensor(2, 2, 7, 16, device="meta")}, ValueError, ("v", "meta", DEVICE, "device")),
    "q in three dimensions": ({"q": tensor(4, 5, 16)}, ValueError, ("q", "(4, 5, 16)", "four dimensions")),
    "v in five dimensions": ({"v": tensor(1, 2, 2, 7, 16)}, ValueError, ("v", "(1, 2, 2, 7, 16)", "four")),
    "batch of k": ({"k": tensor(3, 2, 7, 16)}, ValueError, ("k", "3", "2", "batch")),
    "batch of v": ({"v": tensor(1, 2, 7, 16)}, ValueError, ("v", "1", "2", "batch")),
    "heads of v": ({"v": tensor(2, 4, 7, 16)}, ValueError, ("v", "(4, 7)", "(2, 7)")),
    "seqlen of v": ({"v": tensor(2, 2, 8, 16)}, ValueError, ("v", "(2, 8)", "(2, 7)")),
    "head_dim of k": ({"k": tensor(2, 2, 7, 8)}, ValueError, ("k", "8", "16", "head_dim")),
    "head_dim 0": (
        {"q": tensor(2, 4, 5, 0), "k": tensor(2, 2, 7, 0), "v": tensor(2, 2, 7, 0)},
        ValueError,
        ("q", "head_dim 0", "1"),
    ),
    "heads that do not divide": (
        {"k": tensor(2, 3, 7, 16), "v": tensor(2, 3, 7, 16)},
        ValueError,
        ("nheads_q = 4", "nheads_kv = 3", "divisible"),
    ),
    "more kv heads than heads": (
        {"k": tensor(2, 8, 7, 16), "v": tensor(2, 8, 7, 16)},
        ValueError,
        ("nheads_q = 4", "nheads_kv = 8", "divisible"),
    ),
    "no kv heads": ({"k": tensor(2, 0, 7, 16), "v": tensor(2, 0, 7, 16)}, ValueError, ("nheads_kv = 0", "divisible")),
    "strides of q": ({"q": tensor(2, 4, 16, 5).mT}, ValueError, ("q", "strides", "(320, 80, 1, 5)", "contiguous")),
    "strides of k": ({"k": tensor(2, 2, 7, 32)[..., ::2]}, ValueError, ("k", "strides", "2)", "contiguous")),
    "expanded head_dim": ({"v": tensor(2, 2, 7, 1).expand(2, 2, 7, 16)}, ValueError, ("v", "strides", "contiguous")),
    "mask is a string": ({"mask": "causal"}, TypeError, ("mask", "str", "Mask", "bool")),
    "mask is True": ({"mask": True}, TypeError, ("mask", "bool", "Mask")),
    "mask of floats": (
        {"mask": tensor(5, 7)}, TypeError, ("mask: got a torch.float32 tensor, allowed is a bool", "bias= adds it"),
    ),
    "mask of integers": (
        {"mask": numbers(7)}, TypeError, ("mask: got a torch.int64 tensor, allowed is a bool", "mask.bool()"),
    ),
    "shape of a mask": ({"mask": bools(5, 8)}, ValueError, ("mask", "(5, 8)", "(2, 4, 5, 7)")),
    "a padding mask passed bare": ({"mask": bools(2, 7)}, ValueError, ("mask", "(2, 7)", "(2, 4, 5, 7)")),
    "kv heads in a mask": ({"mask": bools(2, 2, 5, 7)}, ValueError, ("mask", "(2, 2, 5, 7)", "(2, 4, 5, 7)")),
    "a mask of five dimensions": ({"mask": bools(1, 1, 1, 5, 7)}, ValueError, ("m", "(1, 1, 1, 5, 7)", "batch")),
    "shape of padding": ({"mask": masks.padding(bools(2, 8))}, ValueError, ("padding", "(2, 8)", "(2, 7)")),
    "batch of padding": ({"mask": masks.padding(bools(1, 7))}, ValueError, ("padding", "(1, 7)", "(2, 7)")),
    "device of padding": (
        {"mask": masks.padding(bools(2, 7, device="meta"))}, ValueError, ("padding", "meta", DEVICE, "device"),
    ),
    "device of a mask": ({"mask": bools(5, 7, device="meta")}, ValueError, ("boolean", "meta", DEVICE, "device")),
    "rope is a pair": ({"rope": (tensor(16, 8), tensor(16, 8))}, TypeError, ("rope", "tuple", "Rope")),
    "device of tables": ({"rope": rope(device="meta")}, ValueError, ("rope.cos", "meta", DEVICE, "device")),
    "device of positions": (
        {"rope": rope().at(numbers(5, "meta"), numbers(7))}, ValueError, ("rope.positions_q", "meta", DEVICE),
    ),
    "scale nan": ({"scale": math.nan}, ValueError, ("scale", "nan", "finite")),
    "scale inf": ({"scale": math.inf}, ValueError, ("scale", "inf", "finite")),
    "scale -inf": ({"scale": -math.inf}, ValueError, ("scale", "-inf", "finite")),
    "scale beyond float": ({"scale": 10**400}, ValueError, ("scale", "finite")),
    "scale a string": ({"scale": "0.5"}, TypeError, ("scale", "str", "float")),
    "scale a bool": ({"scale": True}, TypeError, ("scale", "bool", "float")),
    "scale a tensor": ({"scale": torch.tensor(0.5)}, TypeError, ("scale", "Tensor", "float")),
    "scale complex": ({"scale": 1j}, TypeError, ("scale", "complex", "float")),
    "softcap negative": ({"softcap": -1.0}, ValueError, ("softcap", "-1.0", "positive")),
    "softcap zero": ({"softcap": 0.0}, ValueError, ("softcap", "0.0", "positive")),
    "softcap nan": ({"softcap": math.nan}, ValueError, ("softcap", "nan", "positive")),
    "softcap a string": ({"softcap": "x"}, TypeError, ("softcap", "str", "float")),
    "dropout_p negative": ({"dropout_p": -0.1}, ValueError, ("dropout_p", "-0.1", "0 <= dropout_p < 1")),
    "dropout_p one": ({"dropout_p": 1.0}, ValueError, ("dropout_p", "1.0", "0 <= dropout_p < 1")),
    "dropout_p nan": ({"dropout_p": math.nan}, ValueError, ("dropout_p", "nan", "0 <= dropout_p < 1")),
    "deterministic None": ({"deterministic": None}, TypeError, ("deterministic", "NoneType", "bool")),
    "deterministic an int": ({"deterministic": 0}, TypeError, ("deterministic", "int", "bool")),
    "deterministic a string": ({"deterministic": "yes"}, TypeError, ("deterministic", "str", "bool")),
    "dropout_p None": ({"dropout_p": None}, TypeError, ("dropout_p", "NoneType", "float")),
    "bias of bools": ({"bias": bools(5, 7)}, TypeError, ("bias", "torch.bool", "mask=")),
    "bias a float": ({"bias": 0.5}, TypeError, ("bias", "float", "tensor")),
    "shape of bias": ({"bias": tensor(5, 8)}, ValueError, ("bias", "(5, 8)", "(2, 4, 5, 7)")),
    "bias larger than the scores": ({"bias": tensor(3, 4, 5, 7)}, ValueError, ("bias", "(3, 4, 5, 7)", "(2, 4, 5, 7)")),
    "bias of five dimensions": ({"bias": tensor(1, 2, 4, 5, 7)}, ValueError, ("bias", "(1, 2, 4, 5, 7)")),
    "bias of integers": ({"bias": numbers(7)}, TypeError, ("bias", "torch.int64", "floating")),
    "device of bias": ({"bias": tensor(5, 7, device="meta")}, ValueError, ("bias", "meta", DEVICE, "device")),
    "slopes of other heads": (
        {"bias": biases.alibi(tensor(2))}, ValueError, ("bias", "slopes", "(2,)", "(4,)", "(2, 4)"),
    ),
    "slopes of other batches": ({"bias": biases.alibi(tensor(3, 4))}, ValueError, ("slopes", "(3, 4)", "(2, 4)")),
    "rows of a relative bias": (
        {"bias": biases.relative(tensor(4, 6, 9))}, ValueError, ("relative", "(4, 6, 9)", "(2, 4, 5, 9)"),
    ),
    "device of a relative bias": (
        {"bias": biases.relative(tensor(9, device="meta"))}, ValueError, ("relative", "meta", DEVICE),
    ),
    "length of a prefix": (
        {"mask": masks.prefix_lm(numbers(3))}, ValueError, ("prefix_lm(lengths)", "(3,)", "(batch,)", "(2,)"),
    ),
    "device of a prefix": ({"mask": masks.prefix_lm(numbers(2, "meta"))}, ValueError, ("prefix_lm", "meta", DEVICE)),
    "documents of queries alone": (
        {"mask": masks.documents(numbers(10).view(2, 5))}, ValueError, ("documents(ids_k)", "(2, 5)", "(2, 7)"),
    ),
    "batch of documents": (
        {"mask": masks.documents(numbers(5)[None], numbers(7)[None])}, ValueError, ("ids_q", "(1, 5)", "(2, 5)"),
    ),
    "blocks of a layout": (
        {"mask": masks.block_sparse(bools(2, 1), 16)}, ValueError, ("block_sparse(blocks)", "(2, 1)", "(2, 4, 1, 1)"),
    ),
    "device of a layout": (
        {"mask": masks.block_sparse(bools(1, 1, device="meta"), 16)}, ValueError, ("block_sparse", "meta", DEVICE),
    ),
    "a tree of all keys": ({"mask": masks.tree(bools(5, 7))}, ValueError, ("tree(m)", "(5, 7)", "(2, 4, 5, 5)")),
    "device of a tree": (
        {"mask": masks.tree(bools(5, 5, device="meta"))}, ValueError, ("tree(m)", "meta", DEVICE),
    ),
    "device of a mask function": (
        {"mask": masks.function(sees, sees_eager, (numbers(2, "meta"),))}, ValueError, ("args[0]", "meta", DEVICE),
    ),
    "score_mod a function": ({"score_mod": abs}, TypeError, ("score_mod", "builtin", "ScoreMod")),
    "device of a score_mod": (
        {"score_mod": ScoreMod(halved, halved, halved_eager, (tensor(1, device="meta"),))}, ValueError,
        ("score_mod", "args[0]", "meta", DEVICE),
    ),
    "sinks a float": ({"sinks": 0.5}, TypeError, ("sinks", "float", "floating-point tensor")),
    "sinks of integers": ({"sinks": numbers(4)}, TypeError, ("sinks", "torch.int64", "floating-point")),
    "shape of sinks": ({"sinks": tensor(8)}, ValueError, ("sinks", "(8,)", "nheads_q", "(4,)")),
    "device of sinks": ({"sinks": tensor(4, device="meta")}, ValueError, ("sinks", "meta", DEVICE)),
    "dropout_seed an int": ({"dropout_seed": 1}, TypeError, ("dropout_seed", "int", "torch.int64")),
    "dropout_seed of floats": ({"dropout_seed": tensor(1)}, TypeError, ("dropout_seed", "float32", "torch.int64")),
    "dropout_seed of two": ({"dropout_seed": numbers(2)}, ValueError, ("dropout_seed", "(2,)", "(1,)")),
    "device of dropout_seed": (
        {"dropout_seed": numbers(1, "meta")}, ValueError, ("dropout_seed", "meta", DEVICE),
    ),
    "backend unknown": ({"backend": "cuda"}, ValueError, ("backend", "'cuda'", "'triton'", "'torch'", "None")),
    "backend a class": ({"backend": torch.Tensor}, (ValueError, TypeError), ("backend", "Tensor", "'triton'")),  # type: ignore[dict-item]
}  # fmt: skip

# Changes to a good call -> the backends that refuse it, and one message for each reason.
GRADIENT = {"requires_grad": True}
NOT_SUPPORTED: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "learned arguments of a mask": (
        {"mask": masks.function(sees, sees_eager, (torch.ones(4, device=DEVICE, **GRADIENT),))}, BACKENDS,
        ("mask: got args that require grad",),
    ),
    "learned arguments of a score_mod": (
        {"score_mod": ScoreMod(halved, halved, halved_eager, (torch.ones(4, device=DEVICE, **GRADIENT),))}, ("triton",),
        ("score_mod: got args[0] that require grad, allowed are those in arg_gradients=",),
    ),
    "a mask without eager": ({"mask": masks.function(sees)}, ("torch",), ("mask: got a function without eager=",)),
    "a score_mod without eager": (
        {"score_mod": ScoreMod(halved, halved)}, ("torch",), ("score_mod: got a function without eager=",),
    ),
    "head_dim": (
        {name: tensor(2, 2, 3, 513) for name in "qkv"}, ("triton",), ("head_dim: got 513, allowed are 1 .. 512",),
    ),
    "head_dim and learned arguments of a score_mod": (
        {
            **{name: tensor(2, 2, 3, 513) for name in "qkv"},
            "score_mod": ScoreMod(halved, halved, halved_eager, (torch.ones(4, device=DEVICE, **GRADIENT),)),
        },
        ("triton",), ("head_dim: got 513", "score_mod: got args[0] that require grad"),
    ),
    "head_dim of v": ({"v": tensor(2, 2, 7, 600)}, ("triton",), ("head_dim: got 600, allowed are 1 .. 512",)),
    "everything": (
        {
            "mask": masks.function(sees, None, (torch.ones(4, device=DEVICE, **GRADIENT),)),
            "score_mod": ScoreMod(halved, halved),
        },
        ("torch",), ("mask: got args that", "mask: got a function without", "score_mod: got a function without"),
    ),
}  # fmt: skip

# The same for a good call of attention_varlen.
WRONG_PACKED: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "q in four dimensions": ({"q": tensor(1, 4, 9, 16)}, ValueError, ("q", "(1, 4, 9, 16)", "three dimensions")),
    "k is a list": ({"k": [0.0]}, ValueError, ("k", "list", "three dimensions")),
    "heads of v": ({"v": tensor(12, 4, 16)}, ValueError, ("v", "(4, 12)", "(2, 12)")),
    "starts a list": ({"cu_seqlens_q": [0, 4, 9]}, TypeError, ("cu_seqlens_q", "list", "torch.int32")),
    "starts in int64": ({"cu_seqlens_k": stops(0, 5, 12).long()}, TypeError, ("cu_seqlens_k", "int64", "int32")),
    "starts in two dimensions": ({"cu_seqlens_q": stops(0, 4, 9)[None]}, ValueError, ("cu_seqlens_q", "(1, 3)")),
    "no starts at all": ({"cu_seqlens_q": stops()}, ValueError, ("cu_seqlens_q", "(0,)", "n_sequences + 1")),
    "strided starts": (
        {"cu_seqlens_q": stops(0, 1, 4, 1, 9, 1)[::2]}, ValueError, ("cu_seqlens_q", "(3,)", "contiguous"),
    ),
    "other sequences": ({"cu_seqlens_k": stops(0, 12)}, ValueError, ("cu_seqlens_k", "(2,)", "(3,)", "cu_seqlens_q")),
    "device of starts": ({"cu_seqlens_k": stops(0, 5, 12).to("meta")}, ValueError, ("cu_seqlens_k", "meta", DEVICE)),
    "a length that is a float": ({"max_seqlen_q": 5.0}, TypeError, ("max_seqlen_q", "float", "int")),
    "a negative length": ({"max_seqlen_k": -1}, ValueError, ("max_seqlen_k", "-1", "0 and more")),
    "padding for each sequence": (
        {"mask": masks.padding(bools(2, 12))}, ValueError, ("padding(valid)", "(2, 12)", "(1, 12)"),
    ),
    "a prefix for all": ({"mask": masks.prefix_lm(numbers(1))}, ValueError, ("prefix_lm", "(1,)", "(2,)")),
    "a mask of all tokens": ({"mask": bools(9, 12)}, ValueError, ("mask", "(9, 12)", "(2, 4, 5, 7)")),
    "a tree of all tokens": ({"mask": masks.tree(bools(9, 9))}, ValueError, ("tree", "(9, 9)", "(2, 4, 5, 5)")),
    "a bias of all tokens": ({"bias": tensor(9, 12)}, ValueError, ("bias", "(9, 12)", "(2, 4, 5, 7)")),
    "positions for each sequence": (
        {"rope": rope().at(numbers(5), None)}, ValueError, ("rope.positions_q", "(5,)", "(9,)"),
    ),
}  # fmt: skip
ON_A_CPU: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "starts behind 0": ({"cu_seqlens_q": stops(1, 4, 9)}, ("cu_seqlens_q", "[1, 4, 9]", "begins with 0")),
    "starts that decrease": ({"cu_seqlens_q": stops(0, 9, 8)}, ("cu_seqlens_q", "[0, 9, 8]", "does not decrease")),
    "starts beyond the end": ({"cu_seqlens_k": stops(0, 5, 13)}, ("cu_seqlens_k", "[0, 5, 13]", "total_k = 12")),
    "a longer sequence": ({"max_seqlen_q": 4}, ("max_seqlen_q", "4", "the longest length, 5")),
    "tables that are too short": ({"rope": rope(rows=6)}, ("rope", "6")),
}


def assert_message(error: BaseException, contains: tuple[str, ...]) -> None:
    message = str(error)
    for part in contains:
        assert part in message, message
    assert "got" in message, message
    assert "allowed" in message or "must" in message, message


@quick.covering()
@pytest.mark.parametrize("backend", [*BACKENDS, None])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name, backend):
    changes, error, contains = WRONG[name]
    attention(**good(), backend=backend)  # the cache remembers that this passed
    with pytest.raises(error) as caught:
        attention(**{**good(), "backend": backend, **changes})
    assert_message(caught.value, contains)
    assert type(caught.value) in (ValueError, TypeError), "no subclass that says something else"


@backends
@pytest.mark.parametrize("name", [*WRONG_PACKED, *ON_A_CPU])
def test_wrong_packed_sequences(name, backend):
    if name in ON_A_CPU and DEVICE != "cpu":
        pytest.skip("a GPU is not asked where sequences lie")
    changes, error, contains = (
        WRONG_PACKED[name] if name in WRONG_PACKED else (ON_A_CPU[name][0], ValueError, ON_A_CPU[name][1])
    )
    with pytest.raises(error) as caught:
        attention_varlen(**{**good_packed(), "backend": backend, **changes})
    assert_message(caught.value, contains)
    assert type(caught.value) in (ValueError, TypeError)


@backends
def test_good_packed_sequences(backend):
    out, lse = attention_varlen(**good_packed(), return_lse=True, backend=backend)
    assert (out.shape, lse.shape) == ((9, 4, 16), (4, 9))


@backends
@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_unsupported_calls(name, backend):
    """The message lists all reasons at once, the same as not_supported_reasons."""
    changes, refuse, contains = NOT_SUPPORTED[name]
    call = {**good(), "backend": backend, **changes}
    attention(**good(), backend=backend)  # the cache remembers that this runs
    reasons = not_supported_reasons(**call)
    if backend not in refuse and name != "everything":
        assert reasons == []
        assert attention(**call).shape == (*call["q"].shape[:3], call["v"].shape[3])
        return
    assert len(reasons) == (len(contains) if backend in refuse else 1)
    with pytest.raises(NotImplementedError) as caught:
        attention(**call)
    for part in (*(contains if backend in refuse else ()), *reasons, repr(backend)):
        assert part in str(caught.value)


def test_every_good_call_has_no_reason():
    for backend in (*BACKENDS, None):
        everything = {
            "mask": masks.causal() & masks.window(3, None) & masks.function(sees, sees_eager), "rope": rope(),
            "bias": biases.alibi(tensor(4)) + biases.tensor(tensor(5, 7)) + biases.relative(tensor(4, 1, 5)),
            "scale": 0.1, "softcap": 30.0, "score_mod": ScoreMod(halved, halved, halved_eager), "sinks": tensor(4),
            "dropout_p": 0.1, "dropout_seed": numbers(1), "return_lse": True, "backend": backend,
        }  # fmt: skip
        assert not_supported_reasons(**good(), **everything) == []
        out, lse = attention(**good(), **everything)
        assert out.shape == (2, 4, 5, 16)
        assert lse.shape == (2, 4, 5)


@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_meta_tensors(backend):
    """A device that no kernel runs on works or is refused with a reason; it is no RuntimeError from deep inside."""
    q, k, v = (x.to("meta") for x in good().values())
    if backend == "torch":
        assert attention(q, k, v, backend=backend).shape == q.shape
        return
    with pytest.raises(NotImplementedError, match="device: got meta, allowed"):
        attention(q, k, v, backend=backend)


@pytest.mark.skipif(DEVICE != "cpu", reason="about CPU tensors")
def test_cpu_tensors_without_the_interpreter(monkeypatch):
    if INTERPRETING:
        attention(**good(), backend="triton")  # the cache remembers that this runs
    monkeypatch.delenv("TRITON_INTERPRET")
    reasons = not_supported_reasons(**good(), backend="triton")
    assert len(reasons) == 1
    assert re.search(r"device: got cpu, allowed is a GPU.*TRITON_INTERPRET=1", reasons[0])
    with pytest.raises(NotImplementedError, match="device: got cpu"):
        attention(**good(), backend="triton")
    assert torch.equal(attention(**good()), attention(**good(), backend="torch"))
    assert not_supported_reasons(**good()) == []


def test_without_triton_installed(monkeypatch):
    from fusedattn import support

    monkeypatch.setattr(support, "HAS_TRITON", False)
    learned = ScoreMod(halved, halved, None, (torch.ones(4, device=DEVICE, requires_grad=True),))
    reasons = not_supported_reasons(**good(), score_mod=learned, backend="triton")
    assert len(reasons) == 2
    assert "Triton is not installed" in reasons[1]
    with pytest.raises(NotImplementedError, match="Triton is not installed"):
        attention(**good(), backend="triton")


@pytest.mark.skipif(INTERPRETING, reason="needs a GPU")
def test_float64_on_a_gpu():
    call = {name: x.double() for name, x in good().items()}
    with pytest.raises(NotImplementedError, match=r"dtype: got torch\.float64, allowed are float16, bfloat16, float32"):
        attention(**call, backend="triton")
    assert attention(**call, backend="torch").dtype == torch.float64


def test_positional_use():
    """Only q, k and v are positional, so nothing can be mistaken for the mask of another library."""
    with pytest.raises(TypeError):
        attention(*good().values(), None)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        attention(**good(), attn_mask=None)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("is_causal", r"write mask=masks\.causal\('top_left'\), torch's alignment"),
        ("causal", r"write mask=masks\.causal\(\)"),
        ("attn_mask", r"write mask= for a bool tensor \(True = attend\), bias= for a floating-point one"),
        ("key_padding_mask", r"write mask=masks\.padding\(~key_padding_mask\)"),
        ("typo", r"help\(\) lists the known ones"),
    ],
)
def test_words_of_other_functions(argument, instead):
    with pytest.raises(TypeError, match=f"^attention: got an unknown argument {argument}=; {instead}"):
        attention(**good(), **{argument: True})  # type: ignore[call-overload]
    lengths = torch.tensor([0, 2], dtype=torch.int32)
    x = torch.randn(2, 1, 8)
    with pytest.raises(TypeError, match=f"^attention_varlen: got an unknown argument {argument}=; {instead}"):
        fusedattn.attention_varlen(x, x, x, lengths, lengths, **{argument: True})


def test_errors_of_apply_rope():
    x = tensor(1, 1, 5, 8)
    tables = rope(8, 8)
    at = numbers(5)
    assert apply_rope(x, tables.cos, tables.sin, at).shape == x.shape
    wide = rope(8, 10)
    with pytest.raises((ValueError, RuntimeError)):
        apply_rope(x, wide.cos, wide.sin, at)
    with pytest.raises((ValueError, RuntimeError)):
        apply_rope(x, tables.cos, tables.sin, numbers(4))


def test_errors_of_fuse():
    with pytest.raises(TypeError, match="model: got str, allowed is"):
        fuse("model")  # type: ignore[type-var]
    with pytest.raises(ValueError, match="model: got Linear without known attention"):
        fuse(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="backend: got 'gpu', allowed are"):
        fuse(fusedattn.integrations.modules.ScaledDotProductAttention(), backend="gpu")  # type: ignore[arg-type]
