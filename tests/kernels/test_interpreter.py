"""The functions that fusedattn.cli.interpreter replaces behave as Triton's own do."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fusedattn.cli.interpreter import _make_numbers_of_arrays, speed_up
from fusedattn.kernels import versions
from tests.conftest import INTERPRETING

pytestmark = pytest.mark.skipif(not INTERPRETING, reason="looks into Triton's interpreter")


@triton.jit
def add(x, y):
    return x + y


@triton.jit
def sums(out_ptr, x, y):
    tl.store(out_ptr + tl.arange(0, 2), tl.zeros([2], tl.int32) + add(add(x, y), 0))


@pytest.mark.skipif(versions.TRITON_VERSION < (3, 7), reason="older interpreters do not look for overflows")
@pytest.mark.parametrize(("x", "y"), [(2**31 - 1, 1), (-(2**31), -1)])
def test_an_overflow_ends_the_launch(x, y):
    with pytest.raises(triton.runtime.errors.InterpreterError, match="int32 overflow detected for operation add"):
        sums[(1,)](torch.zeros(2, dtype=torch.int32), x, y)


def test_the_last_sum_that_fits():
    out = torch.zeros(2, dtype=torch.int32)
    sums[(1,)](out, 2**31 - 2, 1)
    assert out.tolist() == [2**31 - 1] * 2
    sums[(1,)](out, -(2**31) + 1, -1)
    assert out.tolist() == [-(2**31)] * 2


def test_a_launch_leaves_the_language_as_it_was():
    sums[(1,)](torch.zeros(2, dtype=torch.int32), 1, 2)
    assert all(map(tl.core.is_builtin, (tl.load, tl.store, tl.tensor.__add__, tl.math.exp2)))


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (tl.bfloat16, np.uint16),
        (tl.block_type(tl.bfloat16, [2, 4]), np.uint16),
        (tl.int1, bool),
        (tl.float64, np.float64),
        (tl.pointer_type(tl.float32), np.uint64),
        (tl.block_type(tl.pointer_type(tl.int8), [16]), np.uint64),
    ],
    ids=str,
)
def test_dtypes(of, expected):
    from triton.runtime import interpreter

    assert interpreter._get_np_dtype(of) == expected
    assert interpreter._get_np_dtype(of) == expected


def test_once_is_enough():
    from triton.runtime import interpreter

    before = interpreter._patch_lang
    speed_up()
    assert interpreter._patch_lang is before


def test_a_version_that_nobody_has_tried_is_left_as_it_is(monkeypatch):
    from triton.runtime import interpreter

    def patch_lang(fn):
        raise NotImplementedError

    monkeypatch.setattr(versions, "TRITON_VERSION", (4, 0, 0))
    monkeypatch.setattr(interpreter, "_patch_lang", patch_lang)
    speed_up.__wrapped__()
    assert interpreter._patch_lang is patch_lang


def test_an_array_of_one_element_is_an_index():
    """Triton 3.6's interpreter needs this: NumPy 2.4 and later no longer converts such an array to a number."""

    class Scalar:
        handle = types.SimpleNamespace(data=np.array([3]))

    def patch_lang_tensor(tensor, scope):
        tensor.__index__ = lambda self: int(self.handle.data)

    fake = types.SimpleNamespace(_patch_lang_tensor=patch_lang_tensor)
    _make_numbers_of_arrays(fake)
    fake._patch_lang_tensor(Scalar, None)
    assert list(range(Scalar())) == [0, 1, 2]
