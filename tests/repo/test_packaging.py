"""Wheel and sdist: they hold the kernels once and work away from the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.helpers.compiling import ROOT, output

KERNELS = {path.name: path.read_bytes() for path in (ROOT / "kernels").glob("*.py")}
# Not by tomllib, which Python 3.10 lacks.
(VERSION,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
INFO = f"fusedattn-{VERSION}.dist-info"
IS_GIT_CHECKOUT = (ROOT / ".git").exists() and shutil.which("git") is not None

pytest.importorskip("setuptools", minversion="77", reason="the build backend of the package")


def git(*arguments: str) -> str:
    # git refuses a checkout of another user (a mounted volume) without this; these commands only read.
    command = ["git", "-c", f"safe.directory={ROOT}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout


def copy_checkout(destination: Path) -> Path:
    """Copy the checkout, so that no build folder appears in it; links stay links."""
    if not IS_GIT_CHECKOUT:
        ignore = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
        return shutil.copytree(ROOT, destination, symlinks=True, ignore=ignore)
    for name in git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        source, target = ROOT / name, destination / name
        if name and os.path.lexists(source):  # not deleted since it was tracked
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return destination


def build_wheel(source: Path, destination: Path) -> Path:
    """Build the wheel of a folder or an archive with pip and the installed setuptools."""
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", destination)
    output("-m", "pip", "wheel", *options, source, cwd=destination.parent, PYTHONPATH="")
    (wheel,) = destination.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return build_wheel(copy_checkout(folder / "checkout"), folder / "built")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    checkout = copy_checkout(folder / "checkout")
    code = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"
    output("-c", code, folder, cwd=checkout, PYTHONPATH="")
    (archive,) = folder.glob("*.tar.gz")
    return archive


def contents_of(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def message_in(wheel: Path, name: str) -> Message:
    """A file of the metadata."""
    return Parser().parsestr(contents_of(wheel)[f"{INFO}/{name}"].decode())


def names_in(sdist: Path) -> list[str]:
    """The files behind the folder of the release, which alone the archive holds."""
    with tarfile.open(sdist) as archive:
        folders, _, names = zip(*(name.partition("/") for name in archive.getnames()), strict=True)
    assert set(folders) == {f"fusedattn-{VERSION}"}
    return list(names)


def test_kernels_in_the_package_are_a_tracked_link() -> None:
    if not IS_GIT_CHECKOUT:
        pytest.skip("not a git checkout")
    listed = git("ls-files", "-s", "fusedattn/kernels").split()
    assert listed, "fusedattn/kernels is not tracked"
    assert (listed[0], listed[-1]) == ("120000", "fusedattn/kernels")
    assert (ROOT / "fusedattn" / "kernels").readlink() == Path("../kernels")


def test_wheel_holds_the_package_and_the_kernels_byte_for_byte(wheel: Path) -> None:
    contents = contents_of(wheel)
    assert {name.partition("/")[0] for name in contents} == {"fusedattn", INFO}
    inside = {name: content for name, content in contents.items() if name.startswith("fusedattn/")}
    assert KERNELS, "no kernels in the checkout"
    assert {name: inside.pop(f"fusedattn/kernels/{name}") for name in KERNELS} == KERNELS
    in_checkout = (path.relative_to(ROOT) for path in (ROOT / "fusedattn").rglob("*.py"))
    own = {path.as_posix() for path in in_checkout if path.parts[1] != "kernels"}
    assert inside.keys() == own | {"fusedattn/py.typed"}


def test_wheel_is_pure_python_of_the_right_version(wheel: Path) -> None:
    assert wheel.name == f"fusedattn-{VERSION}-py3-none-any.whl"
    metadata = message_in(wheel, "METADATA")
    assert metadata["Version"] == VERSION
    assert metadata["Requires-Python"] == ">=3.10"
    assert message_in(wheel, "WHEEL")["Root-Is-Purelib"] == "true"


def test_the_wheel_asks_for_what_it_needs_and_nothing_else(wheel: Path) -> None:
    """tests/repo/test_alone.py runs the package with no other package but pytest."""
    asked = message_in(wheel, "METADATA").get_all("Requires-Dist", [])
    needed = {name.replace('"', "'") for name in asked if "extra ==" not in name}
    assert needed == {"torch>=2.11", "triton>=3.6; platform_system == 'Linux'", "numpy"}


def test_the_changelog_has_an_entry_for_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(VERSION)} - \d{{4}}-\d{{2}}-\d{{2}}$", changelog, re.MULTILINE)
    assert changelog.index("## Unreleased\n") < changelog.index(f"## {VERSION} - ")


def test_description_has_no_link_that_a_package_index_cannot_follow(wheel: Path) -> None:
    metadata = message_in(wheel, "METADATA")
    description = metadata.get_payload()
    assert "pip install fusedattn" in description
    assert metadata["Description-Content-Type"].startswith("text/markdown")
    assert not re.findall(r"\]\((?!https://)|src=\"(?!https://)", description)


def test_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import fusedattn, fusedattn.kernels.configs as configs\n"
        "print(fusedattn.__file__, configs.__file__, fusedattn.__version__, sep='\\n')"
    )
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    shown = output(*safe_path, "-c", code, cwd=elsewhere, PYTHONPATH=str(site)).splitlines()
    assert shown == [*(str(site / "fusedattn" / name) for name in ("__init__.py", "kernels/configs.py")), VERSION]


def test_sdist_holds_the_kernels_once(sdist: Path) -> None:
    names = names_in(sdist)
    for name in KERNELS:
        assert [found for found in names if found.endswith(f"kernels/{name}")] == [f"kernels/{name}"]


def test_sdist_holds_tests_and_pages(sdist: Path) -> None:
    names = set(names_in(sdist))
    top = {"README.md", "CHANGELOG.md", "Makefile", "constraints.txt"}
    assert {"docs/learn/softmax.py", "docs/images/learn/blocks.png"} <= names
    assert top | {"docs/attention.md", "docs/images/demo.png", "tests/conftest.py", "bench/__main__.py"} <= names


def test_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    rebuilt = build_wheel(sdist, tmp_path / "built")
    assert rebuilt.name == wheel.name
    assert contents_of(rebuilt) == contents_of(wheel)
