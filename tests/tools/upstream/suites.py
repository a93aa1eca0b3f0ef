"""The files of the checkouts to run, each with its replacement."""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION = "attention or attn or sdp or transformer"


@dataclass(frozen=True)
class Suite:
    """One file of tests under one replacement.

    Attributes:
        project: "pytorch" or "flash-attention", whose checkout has the file.
        path: the path of the file in the checkout.
        replacement: a key of :data:`tests.tools.upstream.replacements.REPLACEMENTS`.
        keywords: the tests of the file to run, in the syntax of pytest's ``-k``.
    """

    project: str
    path: str
    replacement: str
    keywords: str = ""

    def __str__(self) -> str:
        return f"{self.path} under {self.replacement}"


SUITES = [
    Suite("flash-attention", "tests/test_rotary.py", "flash_attn"),
    Suite("flash-attention", "tests/test_flash_attn.py", "flash_attn"),
    *(
        Suite("pytorch", path, replacement, keywords)
        for path, keywords in (
            ("test/nn/test_multihead_attention.py", ""),
            ("test/test_transformers.py", ""),
            ("test/test_modules.py", f"cpu and ({ATTENTION})"),
            ("test/test_nn.py", ATTENTION),
        )
        for replacement in ("replace_sdpa", "fuse")
    ),
]
