"""The same bits: on every run, in every batch, and for a prompt that is computed in pieces that are not small.

The result of a query depends on its keys, the head_dim, the dtype and whether an argument asks for other tiles (dense
masks, biases and the like, layouts, few queries), and on nothing else in the call. For few queries see
tests/kernels/test_decode.py too.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusedattn import masks, testing
from fusedattn.kernels import configs, devices
from fusedattn.testing import CASES, Case
from tests.conftest import DEVICE, INTERPRETING, assert_equal, triton_attention
from tests.helpers import quick

pytestmark = [pytest.mark.usefixtures("poison", "_seed")]

ROOT = Path(__file__).parents[2]
EVERYTHING = replace(CASES[-1], nheads_q=2, nheads_kv=1, seqlen_q=21, seqlen_k=37)
KINDS = {
    "causal": Case(seqlen_q=37, seqlen_k=37, nheads_q=2, nheads_kv=1, head_dim=16, causal="bottom_right"),
    "padding": Case(seqlen_q=19, seqlen_k=37, nheads_q=2, nheads_kv=1, head_dim=16, padding="uneven"),
    "everything": EVERYTHING,
}
kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture
def _deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@quick.only(kind="causal")
@dtypes
@kinds
def test_the_same_bits_every_time(kind, dtype):
    inputs = testing.make_inputs(replace(KINDS[kind], dtype=dtype), DEVICE)
    expected = testing.run(triton_attention, inputs)
    for _ in range(1 if INTERPRETING else 20):
        assert_equal(testing.run(triton_attention, inputs), expected)


@pytest.mark.thorough
@pytest.mark.usefixtures("_deterministic_algorithms")
def test_deterministic_algorithms_change_nothing():
    """torch then fills uninitialised memory with a fixed value; no result may depend on it, and nothing may raise."""
    inputs = testing.make_inputs(replace(EVERYTHING, dtype=torch.bfloat16), DEVICE)
    got = testing.run(triton_attention, inputs)
    torch.use_deterministic_algorithms(False)
    assert_equal(got, testing.run(triton_attention, inputs))


def test_no_kernel_adds_atomically():
    """On a GPU, atomic additions come in any order; the interpreter would not show it. Exact ones are allowed, as are
    those of dq_sum.py, which only run for a call that asks for them (tests/kernels/test_one_pass.py).
    """
    names = {
        (path.name, node.attr)
        for path in (ROOT / "kernels").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert ("attention_bwd_bias.py", "store") in names
    assert {file for file, name in names if name.startswith("atomic")} == {"exact_sum.py", "dq_sum.py"}


def test_tiles_do_not_depend_on_batch_or_length():
    """Otherwise a sequence would be summed in another order if its neighbours changed."""
    assert set(inspect.signature(configs.lookup).parameters) == {"arch", "head_dim", "dtype", "work"}
    assert set(inspect.signature(configs.lookup_exact_rows).parameters) == {"arch", "head_dim"}
    assert set(inspect.signature(configs.lookup_few_queries).parameters) == {
        "arch",
        "head_dim",
        "dtype",
        "work",
        "of_cache",
    }


@dtypes
def test_a_sequence_does_not_depend_on_its_batch(dtype):
    """Other contents, other lengths, even NaN: the bits of the first member stay the same."""
    case = Case(seqlen_q=37, seqlen_k=37, nheads_q=2, nheads_kv=1, head_dim=16, dtype=dtype, causal="bottom_right")
    inputs = testing.make_inputs(replace(case, padding="right"), DEVICE)
    other = replace(
        inputs,
        **{name: getattr(inputs, name).clone() for name in ("q", "k", "v", "dout", "dlse")},
        mask=replace(inputs.mask, valid=inputs.mask.valid.clone()),
    )
    for x in (other.q, other.k, other.v, other.dout, other.dlse):
        x[1] = torch.nan
    other.mask.valid[1] = torch.arange(37, device=DEVICE) % 3 == 0  # type: ignore[index]
    got, expected = testing.run(triton_attention, other), testing.run(triton_attention, inputs)
    assert_equal({name: x[:1] for name, x in got.items()}, {name: x[:1] for name, x in expected.items()})


@quick.only(dtype=torch.float32, pieces=lambda pieces: len(pieces) == 3)
@dtypes
@pytest.mark.parametrize("pieces", [(1, 36), (16, 16, 5), (30, 7), (12, 9, 16)], ids=str)
def test_a_prompt_in_pieces(pieces, dtype):
    """Queries come a few at a time, with all keys so far in a cache: out, lse and dq have the bits of a single call.

    The exception is a piece so short that a small tile holds its queries of both heads: it is close, and as accurate.
    """
    case = Case(batch=1, nheads_q=2, nheads_kv=1, seqlen_q=37, seqlen_k=37, head_dim=16, dtype=dtype, rope="half")
    inputs = replace(testing.make_inputs(case, DEVICE), mask=masks.causal())
    expected = testing.run(triton_attention, inputs)
    few = configs.lookup_few_queries(devices.arch_of(inputs.q.device), 16, inputs.q.dtype)
    stop = 0
    for n in pieces:
        start, stop = stop, stop + n
        piece = replace(
            inputs,
            q=inputs.q[:, :, start:stop], k=inputs.k[:, :, :stop], v=inputs.v[:, :, :stop],
            dout=inputs.dout[:, :, start:stop], dlse=inputs.dlse[:, :, start:stop],
        )  # fmt: skip
        got = testing.run(triton_attention, piece)
        names = ("out", "lse", "dq")
        if 2 * n > few.config.BLOCK_M:
            assert_equal({n: got[n] for n in names}, {n: expected[n][:, :, start:stop] for n in names})
        else:
            for name in names:
                own = expected[name][:, :, start:stop]
                eps = torch.finfo(own.dtype).eps
                torch.testing.assert_close(got[name], own, rtol=4 * eps, atol=4 * eps * own.abs().max().item())
    assert stop == 37
