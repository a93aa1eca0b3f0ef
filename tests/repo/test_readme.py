"""Every ```python block of the documentation runs as printed, unless it begins with `# not run:` and a reason.

A ```text block right behind it is what it prints. A block that begins with `# needs Triton` runs in Triton's
interpreter.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

from tests.helpers import quick
from tests.helpers.compiling import ROOT, output

README = ROOT / "README.md"

# An opening fence, possibly indented (in a list), up to a closing fence of the same indent; then its output, if shown.
BLOCK = re.compile(
    r"^([ \t]*)```python[^\n]*\n(.*?)^\1```[ \t]*$(?:\n+\1```text\n(.*?)^\1```[ \t]*$)?", re.MULTILINE | re.DOTALL
)
NEEDS_TRITON = "# needs Triton"

# As torchrun sets them.
ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}

# One interpreter for all blocks of a file: importing torch costs more than running them. A block does not see the
# names of another, as if a reader pasted it. Line numbers are the file's.
RUNNER = """
import contextlib, io, json, sys, traceback
failed = 0
for line, code, shown in json.loads(sys.argv[2]):
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile("\\n" * (line - 1) + code, sys.argv[1], "exec"), {"__name__": "__main__"})
        assert shown in (None, printed.getvalue()), f"shown: {shown}printed: {printed.getvalue()}"
    except BaseException:
        failed += 1
        print(f"--- the block at line {line}", file=sys.stderr)
        traceback.print_exc()
sys.exit(failed > 0)
"""

Block = tuple[int, str, str | None]


def blocks_of(text: str, *, triton: bool = False) -> list[Block]:
    """The ```python blocks to run, each with the line on which its code starts and the output that is shown.

    With `triton`, those that need Triton, otherwise the others.
    """
    found = []
    for match in BLOCK.finditer(text):
        code, shown = textwrap.dedent(match[2]), match[3] and textwrap.dedent(match[3])
        if not code.startswith("# not run:") and code.startswith(NEEDS_TRITON) == triton:
            found.append((text.count("\n", 0, match.start(2)) + 1, code, shown))
    return found


def run_blocks(path: Path, cwd: Path, *, triton: bool = False) -> None:
    """The package is importable from anywhere."""
    blocks = blocks_of(path.read_text(encoding="utf-8"), triton=triton)
    assert blocks or path != README, "README.md has no example"
    if blocks:
        environment = {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", **ONE_PROCESS}
        if triton:
            environment["TRITON_INTERPRET"] = "1"
        output("-c", RUNNER, path, json.dumps(blocks), cwd=cwd, **environment)


PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
TRITON_PAGES = [path for path in PAGES if NEEDS_TRITON in path.read_text(encoding="utf-8")]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@quick.only(path=README)
@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_blocks_run(path: Path, tmp_path: Path) -> None:
    run_blocks(path, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("path", TRITON_PAGES, ids=name_of)
def test_blocks_that_need_triton_run(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run_blocks(path, tmp_path, triton=True)


def test_blocks_are_found_and_failures_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 1\n```\n"
        "- in a list:\n\n  ```python\n  assert 'x' not in globals()\n  print(1)\n  ```\n\n  ```text\n  1\n  ```\n"
        "```text\nnot python\n```\n"
        "```python\n# not run: needs a GPU\nraise SystemExit\n```\n"
        "```python\n# needs Triton\nimport os\nassert os.environ['TRITON_INTERPRET'] == '1'\n```\n"
    )
    assert blocks_of(page.read_text()) == [
        (2, "x = 1\n", None),
        (7, "assert 'x' not in globals()\nprint(1)\n", "1\n"),
    ]
    assert [line for line, *_ in blocks_of(page.read_text(), triton=True)] == [22]
    run_blocks(page, tmp_path)
    run_blocks(page, tmp_path, triton=True)
    page.write_text("text\n\n```python\nimport math\nmath.nothing\n```\n")
    with pytest.raises(AssertionError, match=r"line 5"):
        run_blocks(page, tmp_path)
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match=r"shown: 2\nprinted: 1"):
        run_blocks(page, tmp_path)
