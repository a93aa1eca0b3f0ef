"""Write the table of supported features in docs/features.md, from fusedattn/support.py.

    python -m bench.support

rewrites it; a test checks that it is current.
"""

from __future__ import annotations

from pathlib import Path

from bench.report.page import table_of, with_block
from fusedattn.support import FEATURES

PAGE = Path(__file__).parents[1] / "docs" / "features.md"


def document(text: str) -> str:
    rows = ((feature.name, feature.how, feature.triton, feature.torch) for feature in FEATURES)
    return with_block(
        text, table_of([("feature", "argument", "`triton`", "`torch`"), *rows]) + "\n", "python -m bench.support"
    )


if __name__ == "__main__":
    PAGE.write_text(document(PAGE.read_text()))
