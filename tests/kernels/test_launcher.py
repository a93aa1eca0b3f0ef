"""Launches: a stored one serves another only if Triton would compile the same kernel, and gets the same arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
from triton.knobs import HookChain

from fusedattn import testing
from fusedattn.backends.triton import launching
from fusedattn.kernels import replay, start
from fusedattn.kernels.launcher import LAUNCH_OPTIONS, KernelConstants
from fusedattn.kernels.prologue import qk_prologue
from tests.conftest import DEVICE, INTERPRETING, assert_equal, triton_attention
from tests.helpers.compiling import compiling

ROOT = Path(__file__).resolve().parents[2]
KERNEL: Any = SimpleNamespace(run=None, function=None, packed_metadata=None)  # never launched


def test_repeated_launches(tmp_path: Path) -> None:
    """In its own process, because kernels must not be interpreted; most calls are replayed."""
    result = compiling("-W", "ignore", "-m", "tests.helpers.launched", cache=tmp_path)
    assert result.returncode == 0, result.stderr[-4000:]
    found = re.fullmatch(r"(\d+) of (\d+) calls replayed", result.stdout.strip())
    assert found is not None, result.stdout
    assert int(found[1]) >= 0.7 * int(found[2]), result.stdout


def test_every_launch_goes_through_the_launcher() -> None:
    """The launcher passes the options that no launch may leave to the defaults of a Triton version."""
    for path in (ROOT / "kernels").glob("*.py"):
        launches = [
            ast.unparse(node)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
        ]
        assert path.name in ("launcher.py", "start.py") or not launches, (path.name, launches)


def test_constants_have_the_launch_options() -> None:
    constants = KernelConstants(qk_prologue, num_warps=4, BLOCK=16)
    assert constants.named == {"BLOCK": 16, "num_warps": 4, **LAUNCH_OPTIONS}
    assert constants.in_order == (16,)
    assert KernelConstants(qk_prologue, num_warps=4, num_stages=2, BLOCK=16).named["num_stages"] == 2


def test_a_tensor_that_nobody_knows_of_is_not_replayed() -> None:
    known, unknown = torch.zeros(2, 8)

    def call(x: torch.Tensor, *, more: bool = False) -> None:
        replay.note(KERNEL, (1, 1, 1), ((x, 3), known))
        if more:
            replay.give_up()

    assert replay.recorded(lambda: call(known), [known]) is not None
    assert replay.recorded(lambda: call(unknown), [known]) is None
    assert replay.recorded(lambda: None, [known]) is None
    assert replay.recorded(lambda: call(known, more=True), [known]) is None
    assert replay.recorded(lambda: call(replay.scratch(known, (2, 3), torch.float32)), [known]) is not None


def test_a_call_that_fails_leaves_no_recording() -> None:
    x = torch.zeros(8)

    def fail() -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        replay.recorded(fail, [x])
    replay.note(KERNEL, (1, 1, 1), (x,))
    assert replay.recorded(lambda: None, [x]) is None


def test_replays_of_other_tensors() -> None:
    """Addresses replace tensors, scratch tensors do not overlap, and each replay takes the current stream."""
    launched: list[Any] = []

    def run(x: int, y: int, z: int, stream: int, *given: Any) -> None:
        assert (x, y, z, *given[:5]) == (4, 1, 1, "function", "metadata", None, None, None)
        launched.append((stream, given[5:]))

    kernel: Any = SimpleNamespace(run=run, function="function", packed_metadata="metadata")

    def call(x: torch.Tensor) -> None:
        for _ in range(2):
            made = replay.scratch(x, (3,), torch.float32)
            replay.note(kernel, (4, 1, 1), (x, (7, made), None))

    first, then = torch.zeros(2, 64).unbind()
    found = replay.recorded(lambda: call(first), [first])
    streams = iter((5, 6))
    driver = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: next(streams))
    with patch.object(replay.triton.runtime, "driver", SimpleNamespace(active=driver)):
        for _ in range(2):
            found.run([then], [then.data_ptr()])
    assert [stream for stream, _ in launched] == [5, 5, 6, 6]
    (_, (a, (seven, scratch), nothing)), (_, (_, (_, other), _)), *_ = launched
    assert (a, seven, nothing) == (then.data_ptr(), 7, None)
    assert other - scratch == replay.ALIGNMENT


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_who_is_told_of_launches(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Hook chains that are not empty, and any object that replaces a chain."""

    class Counter:
        calls = 0

    chain = HookChain()  # type: ignore[var-annotated]
    for hook, is_told in ((None, False), (chain, False), (Counter(), True), (print, True)):
        monkeypatch.setattr(triton.knobs.runtime, name, hook)
        assert start.watched() == is_told
    chain.add(print)
    monkeypatch.setattr(triton.knobs.runtime, name, chain)
    assert start.watched()


def test_a_release_of_triton_that_nobody_has_looked_at_is_asked_in_public(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
            return lambda *arguments, stream: launched.append((grid, stream, arguments))

    monkeypatch.setattr(start, "_KNOWN", False)
    begin, before = start.start_of(Kernel())
    begin(4, 1, 1, 7, *before, "x")
    assert launched == [((4, 1, 1), 7, ("x",))]


@pytest.mark.skipif(INTERPRETING, reason="replays are of compiled kernels")
@pytest.mark.parametrize("case", testing.CASES, ids=str)
def test_replayed_calls_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, case: testing.Case) -> None:
    """The third and fourth calls are replayed, if the call can be."""
    given = [testing.make_inputs(replace(case, dtype=torch.bfloat16, seed=seed), DEVICE) for seed in (0, 1)]
    expected = [testing.run(triton_attention, inputs) for inputs in given]
    monkeypatch.setattr(launching, "MOST_REPLAYS", 256)
    for inputs, results in zip(given * 2, expected * 2, strict=True):
        assert_equal(testing.run(triton_attention, inputs), results)
