"""Every ```python block of the documentation runs as printed, unless it begins with `# not run:` and a reason."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

from tests.helpers import quick
from tests.helpers.compiling import ROOT, output

README = ROOT / "README.md"

# An opening fence, possibly indented (in a list), up to a closing fence of the same indent.
BLOCK = re.compile(r"^([ \t]*)```python[^\n]*\n(.*?)^\1```[ \t]*$", re.MULTILINE | re.DOTALL)

# As torchrun sets them.
ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}

# One interpreter for all blocks of a file: importing torch costs more than running them. A block does not see the
# names of another, as if a reader pasted it. Line numbers are the file's.
RUNNER = """
import json, sys, traceback
failed = 0
for line, code in json.loads(sys.argv[2]):
    try:
        exec(compile("\\n" * (line - 1) + code, sys.argv[1], "exec"), {"__name__": "__main__"})
    except BaseException:
        failed += 1
        print(f"--- the block at line {line}", file=sys.stderr)
        traceback.print_exc()
sys.exit(failed > 0)
"""


def blocks_of(text: str) -> list[tuple[int, str]]:
    """The ```python blocks to run, each with the line on which its code starts."""
    found = []
    for match in BLOCK.finditer(text):
        code = textwrap.dedent(match[2])
        if not code.lstrip().startswith("# not run:"):
            found.append((text.count("\n", 0, match.start(2)) + 1, code))
    return found


def run_blocks(path: Path, cwd: Path) -> None:
    """The package is importable from anywhere."""
    blocks = blocks_of(path.read_text(encoding="utf-8"))
    assert blocks or path != README, "README.md has no example"
    if blocks:
        environment = {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", **ONE_PROCESS}
        output("-c", RUNNER, path, json.dumps(blocks), cwd=cwd, **environment)


@quick.only(path=README)
@pytest.mark.parametrize(
    "path", [README, *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_blocks_run(path: Path, tmp_path: Path) -> None:
    run_blocks(path, tmp_path)


def test_blocks_are_found_and_failures_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 1\n```\n"
        "- in a list:\n\n  ```python\n  assert 'x' not in globals()\n  ```\n"
        "```text\nnot python\n```\n"
        "```python\n# not run: needs a GPU\nraise SystemExit\n```\n"
    )
    assert blocks_of(page.read_text()) == [(2, "x = 1\n"), (7, "assert 'x' not in globals()\n")]
    run_blocks(page, tmp_path)
    page.write_text("text\n\n```python\nimport math\nmath.nothing\n```\n")
    with pytest.raises(AssertionError, match=r"line 5"):
        run_blocks(page, tmp_path)
