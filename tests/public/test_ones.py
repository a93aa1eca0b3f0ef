"""Arguments that are 1, which Triton makes constants: a loop loses none of them, and every kernel compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl

from fusedattn.kernels import sparse_rules
from fusedattn.kernels.attention_bwd_rows import BackwardRows
from fusedattn.kernels.cached import CacheArguments, Scales
from fusedattn.kernels.dropout import DropoutArguments
from fusedattn.kernels.epilogue import OptionalRows, Partials, Results
from fusedattn.kernels.exact_sum import ExactSums
from fusedattn.kernels.masking import DocumentArguments, LayoutArguments, MaskArguments
from fusedattn.kernels.pairs import Pairs
from fusedattn.kernels.parameters import Call
from fusedattn.kernels.primitives import Strided
from fusedattn.kernels.rope import RotationArguments
from fusedattn.kernels.scores import ScoreArguments
from fusedattn.kernels.sequences import Sequences
from fusedattn.testing import triton_functions

ROOT = Path(__file__).resolve().parents[2]
X = torch.zeros(1)
ON = tl.constexpr(True)

STRIDED = Strided(X, 1, 1, 1)
ROWS = OptionalRows(X)
PAIRS = Pairs(X, 1, 1, 1, 1)
MASK = MaskArguments(
    HAS_LOWER=ON, HAS_UPPER=ON, BY_PAIR=ON, MAY_HIDE_ROWS=ON, valid_ptr=X, key_range_ptr=X, allowed=PAIRS,
    prefix_ptr=X, PREFIX_AT_END=ON, documents=DocumentArguments(X, X, X, X, 1, 1),
    layout=LayoutArguments(X, X, X, X, X, 1, 1, 1, 1, 1, 1), tree=PAIRS, function_args=(X, 1, 1.0), FUNCTION=None,
)  # fmt: skip
SCORE = ScoreArguments(
    softcap=1.0, slopes_ptr=X, slopes_stride=1, reach=1, function_args=(1, X, 1.0), bias=PAIRS, relative=STRIDED,
    FUNCTION=None, DERIVATIVE=None, MODIFIED=ON, UNBOUNDED=ON,
)  # fmt: skip
SCALES = Scales(X, 1, 1, 1, GROUP=tl.constexpr(1), GIVEN=tl.constexpr(True))
# One row, or one page of one slot, with a stride of 1; a ring of one slot.
CACHE = CacheArguments(
    table_ptr=X, table_stride=1, rows_ptr=X, first_ptr=X, n_rows=1, ring=1, k_scale=SCALES, v_scale=SCALES,
    N_SINKS=tl.constexpr(1), PAGE=tl.constexpr(1), FORMAT=tl.constexpr("int4"),
)  # fmt: skip
TUPLES: dict[str, tuple[Any, ...]] = {
    "results": Results(lse=ROWS, row_max=ROWS, row_sum=ROWS, out=STRIDED, rounding_residual=STRIDED, largest=None),
    "results without a residual": Results(ROWS, ROWS, ROWS, out=STRIDED, rounding_residual=None, largest=None),
    "results of a cache": Results(None, None, None, out=STRIDED, rounding_residual=None, largest=None),
    "results of a cache, with lse": Results(ROWS, None, None, out=STRIDED, rounding_residual=None, largest=None),
    "results with the largest scores": Results(ROWS, ROWS, ROWS, out=STRIDED, rounding_residual=STRIDED, largest=ROWS),
    "results with these alone": Results(ROWS, ROWS, ROWS, out=STRIDED, rounding_residual=None, largest=ROWS),
    "partials": Partials(X, X, X, X, None),
    "mask": MASK,
    "mask of a function": MASK._replace(FUNCTION=triton_functions._sees),
    "mask of a stride": MASK._replace(function_args=(X, 1), FUNCTION=sparse_rules.strided),
    "mask of a table": MASK._replace(function_args=(X, X, 1, 1), FUNCTION=sparse_rules.block_table),
    "mask of a tree alone": MASK._replace(allowed=None, documents=None, layout=None),
    "mask of a prefix alone": MASK._replace(valid_ptr=None, key_range_ptr=None, allowed=Pairs(None, 0, 0, 0, 0)),
    "score": SCORE,
    "score without slopes, of one distance": SCORE._replace(softcap=None, slopes_ptr=None, slopes_stride=0, reach=0),
    "score of far distances": SCORE._replace(slopes_stride=16, reach=32),
    "call": Call(MASK, SCORE, DropoutArguments(X, 1, 1.0), Sequences(X, X)),
    "scales": SCALES,
    "cache": CACHE,
    "cache of numbers": CACHE._replace(k_scale=None, v_scale=None),
    "cache in rows": CACHE._replace(table_ptr=None, table_stride=None, ring=None),
    "call with a cache": Call(MASK, SCORE, DropoutArguments(X, 1, 1.0), Sequences(X, None, X), CACHE),
    "rotation": RotationArguments(X, X, X, 1, 1, ON, ON, tl.constexpr(2)),
    "sums": ExactSums(X, X),
    "rows": BackwardRows(X, X, X),
    "rows of 16 bits": BackwardRows(X, None, X),
}


class Argument:
    """A tuple inside a kernel of Triton 3.6: its values, and their known types and constants, all that a loop keeps.

    Values are filled in first, then constants. Each step updates the known values of its own tuple, but not their copy
    in the tuple around it.
    """

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = [Argument(x) if isinstance(x, tuple) else None for x in values]
        self.known = list(map(_known, values))

    def fill(self, values: tuple[Any, ...], *, constants: bool) -> None:
        for i, x in enumerate(values):
            inner = self.values[i]
            if isinstance(inner, Argument):
                inner.fill(x, constants=constants)
            elif _is_constant(x) == constants:
                self.values[i] = _known(x)
                self.known = [y.known if isinstance(y, Argument) else y for y in self.values]


def _is_constant(x: Any) -> bool:
    """Whether Triton compiles a kernel for this value."""
    is_one = isinstance(x, int) and x == 1
    return is_one or x is None or isinstance(x, tl.constexpr) or (callable(x) and not isinstance(x, torch.Tensor))


def _known(x: Any) -> Any:
    if isinstance(x, tuple):
        return list(map(_known, x))
    return x if _is_constant(x) else type(x).__name__


@pytest.mark.parametrize("name", TUPLES)
def test_a_loop_loses_no_argument_that_is_1(name: str) -> None:
    """See docs/decisions/0007. Triton 3.7 keeps all of them in any order."""
    argument = Argument(TUPLES[name])
    for constants in (False, True):
        argument.fill(TUPLES[name], constants=constants)
    assert argument.known == _known(TUPLES[name])


# The calls of bench/codegen/ones.py with the most ones; `python -m bench.codegen --ones` compiles all of them.
CALLS = ("one feature", "one of each", "one query", "one packed", "args of 1", "one number")


# Sparse masks for 64 queries and 64 keys, the second of each rule with ones.
SPARSE = (
    "strided(5)", "strided(1)", "fixed(5, 2)", "fixed(1)", "dilated(3, 2, 4)", "dilated(1, 1, 1)",
    "dilated(3, 2, 4, global_tokens=2)", "dilated(1, 1, global_tokens=1)", "bigbird(5)", "bigbird(1)",
    "neighborhood((8, 8), (3, 2))", "neighborhood(64, 1)", "block_diffusion(32, 4)", "block_diffusion(32, 1)",
    "selected_blocks(torch.zeros(2, 2, 64, 3, dtype=torch.int64), (1, 16))",
)  # fmt: skip


@pytest.mark.thorough
def test_rules_of_sparse_masks_become_kernels(tmp_path: Path) -> None:
    """As far as the last step, for an H100; forward and backward."""
    script = f"""
import torch
from bench.codegen import launches
from fusedattn import attention, masks

for name in {SPARSE}:
    q, k, v = (torch.zeros(2, heads, 64, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
    with launches.compiling("sm_90") as found:
        attention(q, k, v, mask=eval("masks." + name), backend="triton").sum().backward()
    for launch in found:
        print(name, launch.kernel, launch.error or "is compiled", sep=": ")
"""
    lines = _lines(script, tmp_path)
    assert [line for line in lines if not line.endswith(": is compiled")] == []
    assert {line.partition(": ")[0] for line in lines} == set(SPARSE)


@pytest.mark.thorough
def test_calls_in_which_numbers_are_1_become_kernels(tmp_path: Path) -> None:
    """Only as far as Triton's own IR, the step that may lose an argument; forward and backward."""
    script = f"""
from unittest.mock import patch
import torch
import triton.compiler
from triton._C.libtriton import ir
from triton.compiler import make_backend
from bench.codegen import launches, ones

def read(src, target, options):
    backend, context = make_backend(target), ir.context()
    options = backend.parse_options(options)
    ir.load_dialects(context)
    backend.load_dialects(context)
    src.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )

for name in {CALLS}:
    with launches.compiling("sm_90") as found, patch.object(triton.compiler, "compile", read):
        launches.call(ones.head_dim_of(name), torch.bfloat16, ones.ONES[name])
    for launch in found:
        print(name, launch.kernel, launch.error or "is read", sep=": ")
"""
    lines = _lines(script, tmp_path)
    assert [line for line in lines if not line.endswith(": is read")] == []
    assert {line.partition(":")[0] for line in lines} == set(CALLS)
    assert {"attention_fwd", "attention_combine", "attention_bwd_rows", "attention_bwd_dkdv", "attention_bwd_dq"} | {
        "attention_bwd_dbias", "attention_bwd_drelative", "attention_bwd_learned", "qk_prologue"
    } == {line.split(": ")[1] for line in lines}  # fmt: skip


def _lines(script: str, tmp_path: Path) -> list[str]:
    """What a script writes, in a process of its own, in which kernels are compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()
