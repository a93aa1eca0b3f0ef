"""The cases of linear attention that ``python -m fusedattn check`` runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusedattn.testing import LINEAR_CASES, check_linear
from tests.conftest import BACKENDS, DEVICE, DTYPES
from tests.helpers import quick


def test_each_case_has_a_name_of_its_own() -> None:
    assert len({case.name for case in LINEAR_CASES}) == len(LINEAR_CASES)


@quick.covering()
@pytest.mark.parametrize("case", LINEAR_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_case_keeps_the_budget(backend, dtype, case) -> None:
    ratios = check_linear(replace(case, dtype=dtype), backend, DEVICE)
    assert all(x.ok for x in ratios.values()), ratios
