"""The address checker: it rejects each kind of wrong access, and no right one."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.conftest import INTERPRETING
from tests.helpers import accesses

pytestmark = pytest.mark.skipif(not INTERPRETING, reason="looks into Triton's interpreter")


@triton.jit
def copy_rows(x_ptr, out_ptr, stride_x, stride_out, n_rows, n_cols, shift, BLOCK: tl.constexpr, AGAIN: tl.constexpr):
    """Copy BLOCK rows per program; `shift` moves the addresses it reads, and AGAIN reads the rows it writes."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x = tl.load(x_ptr + shift + rows[:, None] * stride_x + cols[None, :], mask=mask, other=0.0)
    if AGAIN:
        x += tl.load(out_ptr + rows[:, None] * stride_out + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + rows[:, None] * stride_out + cols[None, :], x, mask=mask)


def launch(programs=2, n_rows=6, n_cols=3, shift=0, stride_out=5, again=False):
    """Copy ``(6, 3)`` between tensors whose rows are 4 and 5 elements apart."""
    x = torch.arange(64.0).as_strided((6, 3), (4, 1), 7)
    out = torch.zeros(64).as_strided((6, 3), (5, 1), 9)
    copy_rows[(programs,)](x, out, 4, stride_out, n_rows, n_cols, shift, BLOCK=4, AGAIN=again)
    return x, out


@pytest.fixture(autouse=True)
def _outputs(monkeypatch):
    monkeypatch.setitem(accesses.OUTPUTS, "copy_rows", {"out_ptr"})


def test_right():
    with accesses.checked_accesses() as seen:
        x, out = launch()
    assert torch.equal(x, out)
    assert seen.launched == ["copy_rows"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shift": -1}, "reads outside its inputs"),
        ({"shift": 1}, "reads outside its inputs"),  # the gap between rows
        ({"n_rows": 7}, "reads outside its inputs"),
        ({"n_cols": 4}, "reads outside its inputs"),
        ({"stride_out": 4}, "writes outside its outputs"),
        ({"again": True}, "reads outside its inputs"),  # another program might not have written it yet
        ({"stride_out": 0}, "twice"),
        ({"programs": 1}, "leaves 6 elements of out_ptr unwritten"),
        ({"n_rows": 5}, "leaves 3 elements of out_ptr unwritten"),
    ],
    ids=str,
)
def test_wrong(wrong, message):
    with pytest.raises(Exception, match=message), accesses.checked_accesses():
        launch(**wrong)


def test_overlapping_rows():
    """An address in overlapping rows has no unique row."""
    with pytest.raises(ValueError, match="overlapping rows"):
        accesses.Argument("x_ptr", torch.zeros(9).as_strided((4, 3), (2, 1)), False)


def test_large_strides():
    x = accesses.Argument("x_ptr", torch.empty_strided((2, 3, 4), (2**40, 2**33, 1), device="meta"), False)
    at = accesses.np.array([0, 2**42, 2**42 + 2 * 2**35 + 12])
    assert x.index(x.start + at).tolist() == [0, 12, 23]
    assert x.index(x.start + at + 16) is None
    assert x.index(x.start + at - 4) is None
