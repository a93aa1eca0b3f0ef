"""Global memory: which bytes a launch may use."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fusedattn.virtual_gpu.errors import MemoryAccessError
from fusedattn.virtual_gpu.global_memory import GlobalMemory
from fusedattn.virtual_gpu.ptx import Instruction
from tests.helpers.ptx_programs import fails, run

X = Instruction("ld.global.b8", (), place="kernel.py:1")


def _allowed(tensors: list[torch.Tensor], address: int, size: int) -> bool:
    memory = GlobalMemory(tensors)
    try:
        memory.check(np.array([address]), size, X)
    except MemoryAccessError:
        return False
    return True


def _bytes_of(x: torch.Tensor) -> set[int]:
    """The addresses of the bytes of all elements."""
    found: set[int] = set()
    for index in itertools.product(*(range(n) for n in x.shape)):
        at = x.data_ptr() + x.itemsize * sum(i * s for i, s in zip(index, x.stride(), strict=True))
        found |= set(range(at, at + x.itemsize))
    return found


BASE = torch.zeros(6, 10, dtype=torch.float32)
VIEWS = {
    "whole": [BASE],
    "columns": [BASE[:, 2:7]],
    "every other": [BASE[:, ::2]],
    "transposed": [BASE.T[3:]],
    "one": [BASE[2, 3]],
    "expanded": [BASE[1, :4].expand(5, 4)],
    "sliding": [BASE.reshape(-1).as_strided((4, 5), (2, 1), 3)],
    "bytes": [BASE.view(torch.uint8)[:, 1:8]],
    "halves": [BASE.view(torch.float16)[1:3, 3:6]],
    "two apart": [BASE[:, :2], BASE[:, 5:7]],
    "two that overlap": [BASE[1:4, 2:6], BASE[3:, 4:]],
    "one inside another": [BASE[1:5], BASE[2:3, ::3]],
    "interleaved": [BASE[:, ::2], BASE[:, 1::2]],
    "empty": [BASE[:0]],
    "empty and not": [BASE[:, 3:3], BASE[4]],
    "none": [],
}


@pytest.mark.parametrize("name", VIEWS)
def test_bounds_are_those_of_elements_to_the_byte(name: str) -> None:
    allowed: set[int] = set().union(*map(_bytes_of, VIEWS[name]))
    start = BASE.data_ptr()
    for size in (1, 2, 4, 8, 16):
        for address in range(start - 32, start + 240 + 32, size):
            expected = all(address + i in allowed for i in range(size))
            assert _allowed(VIEWS[name], address, size) == expected, (size, address - start)


def test_one_of_many_addresses() -> None:
    memory = GlobalMemory([BASE[:, :5]])
    good = BASE.data_ptr() + 40 * np.arange(6)
    memory.check(good, 4, X)
    memory.check(good + 16, 4, X)
    for bad in (good[3] + 20, good[0] - 4, good[5] + 20, 0, -4, 2**40):
        with pytest.raises(MemoryAccessError, match=r"ld\.global\.b8, at kernel\.py:1"):
            memory.check(np.append(good, bad), 4, X)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_alignment(size: int) -> None:
    raw = torch.zeros(64, dtype=torch.uint8)
    first = raw.data_ptr() + -raw.data_ptr() % 16
    assert _allowed([raw], first, size)
    for offset in range(1, 16):
        assert _allowed([raw], first + offset, size) == (offset % size == 0)


def test_two_tensors_side_by_side_are_not_one() -> None:
    x = torch.zeros(8, dtype=torch.int32)
    left, right = x[:3], x[3:]
    for offset, size in ((8, 8), (0, 16)):
        assert (x.data_ptr() + offset) % size or not _allowed([left, right], x.data_ptr() + offset, size)
    assert _allowed([left, right], x.data_ptr() + 12, 4)


ADDRESS = "mul.wide.u32 %rd1, %t, 4;\nadd.s64 %rd1, %rd1, %x;"


@pytest.mark.parametrize("access", [
    "ld.global.b32 %r1, [%rd1+{at}];",
    "st.global.b32 [%rd1+{at}], %t;",
    "red.global.gpu.relaxed.add.u32 [%rd1+{at}], %t;",
    "atom.global.gpu.relaxed.max.u32 %r1, [%rd1+{at}], %t;",
    "cp.async.ca.shared.global [%a], [%rd1+{at}], 4;",
])  # fmt: skip
def test_every_instruction_is_checked(access: str) -> None:
    wait = "\ncp.async.wait_all;"
    x = torch.zeros(66, dtype=torch.int32)[1:65]
    run(f"{ADDRESS}\n{access.format(at=0)}{wait}", tensors={"x": x})
    for at, says in ((4, "at byte 256 of a tensor of the launch that has 256"), (2, "is not a multiple of 4")):
        fails(MemoryAccessError, f"{ADDRESS}\n{access.format(at=at)} // it{wait}", "it", tensors={"x": x}, says=says)
    before = f"{ADDRESS}\nadd.s64 %rd1, %rd1, -4;\n{access.format(at=0)} // it{wait}"
    fails(MemoryAccessError, before, "it", tensors={"x": x}, says="4 bytes before a tensor")
    # Lanes that do not take part may point anywhere.
    masked = f"{ADDRESS}\nsetp.lt.u32 %p1, %t, 63;\n@%p1 {access.format(at=4)}{wait}"
    run(masked, tensors={"x": x})


def test_elements_between_which_others_lie() -> None:
    x = torch.arange(128, dtype=torch.int32)
    load = "ld.global.b32 %r2, [%rd2]; // load\nst.global.b32 [%o], %r2;"
    body = f"mul.wide.u32 %rd1, %t, 8;\nadd.s64 %rd2, %rd1, %x;\n{load}"
    np.testing.assert_array_equal(run(body, tensors={"x": x[::2]})[0], 2 * np.arange(64))
    fails(MemoryAccessError, body.replace("%t, 8", "%t, 4"), "load", tensors={"x": x[::2]}, says="are not elements")


def test_a_vector_across_the_end_of_a_tensor() -> None:
    x = torch.zeros(16, dtype=torch.int32)
    x = x[-x.data_ptr() % 16 // 4 :][:6]
    body = "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%x+16]; // load"
    fails(MemoryAccessError, body, "load", tensors={"x": x}, says="16 bytes at byte 16 of a tensor")
