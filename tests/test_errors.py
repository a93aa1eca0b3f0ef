"""What a caller gets wrong: the type of the error, and a message that names the argument, what it got and may get."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

import fusedattn
from fusedattn import Rope, apply_rope, attention, fuse, masks, not_supported_reasons
from tests.conftest import BACKENDS, DEVICE, INTERPRETING

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


# What is changed in a good call -> the error, and what its message must contain.
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
    "mask of floats": ({"mask": tensor(5, 7)}, TypeError, ("m", "float32", "bool")),
    "mask of bytes": ({"mask": tensor(5, 7, dtype=torch.uint8)}, TypeError, ("m", "uint8", "bool")),
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
    "rope too wide": ({"rope": rope(width=18)}, ValueError, ("rope", "18", "16", "head_dim")),
    "rope too short": ({"rope": rope(rows=6)}, ValueError, ("rope", "6", "0 .. 6")),
    "device of tables": ({"rope": rope(device="meta")}, ValueError, ("rope.cos", "meta", DEVICE, "device")),
    "device of positions": (
        {"rope": rope().at(numbers(5, "meta"), numbers(7))}, ValueError, ("rope.positions_q", "meta", DEVICE),
    ),
    "shape of positions_q": (
        {"rope": rope().at(numbers(6), None)}, ValueError, ("rope.positions_q", "(6,)", "(5,)", "(2, 5)"),
    ),
    "shape of positions_k": (
        {"rope": rope().at(None, numbers(5))}, ValueError, ("rope.positions_k", "(5,)", "(7,)", "(2, 7)"),
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
    "dropout_p None": ({"dropout_p": None}, TypeError, ("dropout_p", "NoneType", "float")),
    "bias of bools": ({"bias": bools(5, 7)}, TypeError, ("bias", "torch.bool", "mask=")),
    "bias a float": ({"bias": 0.5}, TypeError, ("bias", "float", "tensor")),
    "shape of bias": ({"bias": tensor(5, 8)}, ValueError, ("bias", "(5, 8)", "(2, 4, 5, 7)")),
    "bias larger than the scores": ({"bias": tensor(3, 4, 5, 7)}, ValueError, ("bias", "(3, 4, 5, 7)", "(2, 4, 5, 7)")),
    "bias of five dimensions": ({"bias": tensor(1, 2, 4, 5, 7)}, ValueError, ("bias", "(1, 2, 4, 5, 7)")),
    "backend unknown": ({"backend": "cuda"}, ValueError, ("backend", "'cuda'", "'triton'", "'torch'", "None")),
    "backend a class": ({"backend": torch.Tensor}, (ValueError, TypeError), ("backend", "Tensor", "'triton'")),  # type: ignore[dict-item]
}  # fmt: skip

NOT_SUPPORTED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "bias": ({"bias": tensor(5, 7)}, ("bias",)),
    "softcap": ({"softcap": 30.0}, ("softcap", "30.0", "None")),
    "dropout": ({"dropout_p": 0.1}, ("dropout_p", "0.1", "0.0")),
    "head_dim of v": ({"v": tensor(2, 2, 7, 8)}, ("v", "head_dim 8", "16")),
    "everything": (
        {"bias": tensor(5, 7), "softcap": 30.0, "dropout_p": 0.1, "v": tensor(2, 2, 7, 8)},
        ("bias", "softcap", "dropout_p", "head_dim"),
    ),
}


@backends
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name, backend):
    changes, error, contains = WRONG[name]
    with pytest.raises(error) as caught:
        attention(**{**good(), "backend": backend, **changes})
    message = str(caught.value)
    for part in contains:
        assert part in message, message
    assert "got" in message, message
    assert "allowed" in message or "must" in message, message
    assert type(caught.value) in (ValueError, TypeError), "no subclass that says something else"


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_of_the_default_backend(name):
    changes, error, _ = WRONG[name]
    with pytest.raises(error):
        attention(**{**good(), **changes})


@backends
@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_what_is_not_supported(name, backend):
    """All reasons at once, the same that not_supported_reasons lists."""
    changes, contains = NOT_SUPPORTED[name]
    call = {**good(), "backend": backend, **changes}
    reasons = not_supported_reasons(**call)
    assert len(reasons) == len(contains) if name == "everything" else len(reasons) == 1
    with pytest.raises(NotImplementedError) as caught:
        attention(**call)
    for part in (*contains, *reasons, repr(backend)):
        assert part in str(caught.value)


def test_not_supported_reasons_of_the_kernels():
    big = [tensor(2, 2, 3, 257) for _ in "qkv"]
    reasons = not_supported_reasons(*big, softcap=1.0, backend="triton")
    assert len(reasons) == 2
    assert any(re.search(r"head_dim: got 257, allowed are 1 \.\. 256", r) for r in reasons)
    with pytest.raises(NotImplementedError, match=r"head_dim: got 257"):
        attention(*big, backend="triton")
    assert not_supported_reasons(*big, backend="torch") == []
    assert attention(*big, backend="torch").shape == (2, 2, 3, 257)
    assert attention(*(x[..., :256] for x in big), backend="triton").shape == (2, 2, 3, 256)


def test_every_good_call_has_no_reason():
    for backend in (*BACKENDS, None):
        everything = {"mask": masks.causal(), "rope": rope(), "scale": 0.1, "return_lse": True, "backend": backend}
        assert not_supported_reasons(**good(), **everything) == []
        out, lse = attention(**good(), **everything)
        assert out.shape == (2, 4, 5, 16)
        assert lse.shape == (2, 4, 5)


@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_meta_tensors(backend):
    """A device that no kernel runs on is a reason, or works; it is no RuntimeError from the depths."""
    q, k, v = (x.to("meta") for x in good().values())
    if backend == "torch":
        assert attention(q, k, v, backend=backend).shape == q.shape
        return
    with pytest.raises(NotImplementedError, match="device: got meta, allowed"):
        attention(q, k, v, backend=backend)


@pytest.mark.skipif(DEVICE != "cpu", reason="about CPU tensors")
def test_cpu_tensors_without_the_interpreter(monkeypatch):
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

    monkeypatch.setattr(support, "_has_triton", lambda: False)
    reasons = not_supported_reasons(**good(), softcap=1.0, backend="triton")
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
    """Only q, k, v go by position: nothing can be mistaken for the mask of another library."""
    with pytest.raises(TypeError):
        attention(*good().values(), None)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        attention(**good(), attn_mask=None)  # type: ignore[call-overload]


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
    with pytest.raises(ValueError, match="model: got Linear without attention"):
        fuse(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="backend: got 'gpu', allowed are"):
        fuse(fusedattn.modules.ScaledDotProductAttention(), backend="gpu")  # type: ignore[arg-type]
