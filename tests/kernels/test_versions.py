"""The version of Triton is that of the package, as numbers."""

from __future__ import annotations

import pytest
import triton

from fusedattn.kernels.versions import TRITON_VERSION, release


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("3.7.1", (3, 7, 1)),
        ("3.10.0", (3, 10, 0)),
        ("3.8.0rc1", (3, 8, 0)),
        ("3.8rc1", (3, 8)),
        ("3.6.0+git7f3a1", (3, 6, 0)),
        ("4", (4,)),
        ("main", ()),
    ],
)
def test_numbers_of_a_version(version: str, expected: tuple[int, ...]) -> None:
    assert release(version) == expected


def test_the_version_of_triton() -> None:
    text = ".".join(map(str, TRITON_VERSION))
    assert TRITON_VERSION >= (3,)
    assert triton.__version__.startswith(text)
    assert not triton.__version__.startswith((f"{text}.0", *(f"{text}{digit}" for digit in range(10))))
