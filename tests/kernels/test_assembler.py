"""Kernels for Hopper are assembled by a ptxas without the fault of 12.8, or not at all."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from tests.helpers.compiling import output

pytest.importorskip("triton")

from fusedattn.kernels import assembler

# Values of 16 features: ptxas 12.8 lost a descriptor of this forward. Prints the reads of registers that may not have
# been written, and whether Triton's own choice is restored.
COMPILE = """
import torch
from triton import knobs
from bench.codegen import launches
from bench.codegen.compilations import machine_code_of
from fusedattn import attention, support

support.interpreting = lambda: True  # so that CPU tensors take the Triton backend
support.INTERPRETER_REASONS = []
before = knobs.nvidia.ptxas
q, k = (torch.zeros(1, 2, 41, 24, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
v = torch.zeros(1, 2, 41, 16, dtype=torch.bfloat16)
with launches.compiling("sm_90", ["attention_fwd"]) as found:
    attention(q, k, v, backend="triton")
(launch,) = found
print(launch.error or machine_code_of(launch).undefined, knobs.nvidia.ptxas == before)
"""


def tool(version: str) -> SimpleNamespace:
    return SimpleNamespace(path=f"ptxas-{version}", version=version)


@pytest.mark.parametrize(
    ("own", "other", "driver", "chosen"),
    [
        ("12.8", "12.9", 12, "12.9"),  # Triton 3.6
        ("12.8", "13.1", 13, "13.1"),  # Triton 3.7
        ("12.8", "13.1", None, "13.1"),  # compiled without a GPU
        ("12.9", "13.4", 12, "12.9"),  # Triton 3.8 and later
        ("13.0", "12.9", 13, "13.0"),  # named by TRITON_PTXAS_PATH
    ],
)
def test_the_assembler_for_hopper(own: str, other: str, driver: int | None, chosen: str) -> None:
    assert assembler.choose(tool(own), tool(other), driver) == f"ptxas-{chosen}"


@pytest.mark.parametrize(("other", "driver"), [("13.1", 12), ("12.8", 13), ("12.8", None)])
def test_no_assembler_that_is_sound_and_fits_the_driver(other: str, driver: int | None) -> None:
    with pytest.raises(NotImplementedError, match=r"ptxas: got release 12\.8 .*allowed are releases from 12\.9 on"):
        assembler.choose(tool("12.8"), tool(other), driver)


def test_one_thread_does_not_end_the_choice_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembler, "_is_hopper", lambda: True)
    monkeypatch.setattr(assembler, "choose", lambda *asked: assembler.knobs.nvidia.ptxas_blackwell.path)
    found: list[bool] = []
    entered, may_end = threading.Event(), threading.Event()

    def first() -> None:
        with assembler.sound_assembler():
            entered.set()
            may_end.wait(10)

    def second() -> None:
        entered.wait(10)
        with assembler.sound_assembler():
            beginning.join(10)
            found.append(assembler.knobs.nvidia.ptxas == assembler.knobs.nvidia.ptxas_blackwell)

    before = assembler.knobs.nvidia.ptxas
    beginning, following = threading.Thread(target=first), threading.Thread(target=second)
    beginning.start()
    following.start()
    entered.wait(10)
    following.join(0.2)  # time enough to enter, if it may
    may_end.set()
    beginning.join()
    following.join()
    assert found == [True]
    assert assembler.knobs.nvidia.ptxas == before


def test_compiled_kernels_read_no_register_that_was_not_written() -> None:
    assert output("-c", COMPILE, TRITON_INTERPRET="0").split() == ["()", "True"]
