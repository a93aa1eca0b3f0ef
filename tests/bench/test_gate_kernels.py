"""Every kernel timed on a GPU has been checked: the same kernels, as Triton distinguishes them."""

from __future__ import annotations

import json

import pytest

from tests.helpers.compiling import output


@pytest.mark.thorough
def test_every_kernel_that_is_timed_is_in_the_check_ahead_of_it() -> None:
    found = json.loads(output("-m", "tests.helpers.timed_kernels"))
    assert found["unchecked"] == {}
    assert found["works"] > 100
    assert found["timed"] > 50
