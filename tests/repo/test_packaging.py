"""Wheel and sdist: they hold the kernels once and work away from the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = {path.name: path.read_bytes() for path in (ROOT / "kernels").glob("*.py")}
IS_GIT_CHECKOUT = (ROOT / ".git").exists() and shutil.which("git") is not None

pytest.importorskip("setuptools", minversion="77", reason="the build backend of the package")


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Run a command and return its output; a failure shows output and errors."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=inherited | env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def git(*arguments: str) -> str:
    # git refuses a checkout of another user (a mounted volume) without this; these commands only read.
    return run("git", "-c", f"safe.directory={ROOT}", *arguments, cwd=ROOT)


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
    options = (
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--quiet",
        "--wheel-dir",
        destination,
    )
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=destination.parent)
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
    run(sys.executable, "-c", code, folder, cwd=checkout)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def version_in_pyproject() -> str:
    # Not tomllib, which Python 3.10 lacks.
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    return found[1]


def test_kernels_in_the_package_are_a_tracked_link() -> None:
    if not IS_GIT_CHECKOUT:
        pytest.skip("not a git checkout")
    listed = git("ls-files", "-s", "fusedattn/kernels").split()
    assert listed, "fusedattn/kernels is not tracked"
    assert (listed[0], listed[-1]) == ("120000", "fusedattn/kernels")
    assert (ROOT / "fusedattn" / "kernels").readlink() == Path("../kernels")


def test_wheel_holds_the_kernels_byte_for_byte(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {
            name.rpartition("/")[2]: archive.read(name)
            for name in archive.namelist()
            if name.startswith("fusedattn/kernels/")
        }
    assert KERNELS, "no kernels in the checkout"
    assert inside == KERNELS


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = names_in(wheel)
    info = f"fusedattn-{version_in_pyproject()}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"fusedattn", info}
    in_checkout = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "fusedattn").rglob("*.py")
        if (ROOT / "fusedattn" / "kernels") not in path.parents
    }
    assert {n for n in names if n.startswith("fusedattn/") and "/kernels/" not in n} == (
        in_checkout | {"fusedattn/py.typed"}
    )


def test_wheel_is_pure_python_of_the_right_version(wheel: Path) -> None:
    version = version_in_pyproject()
    assert wheel.name == f"fusedattn-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        info = f"fusedattn-{version}.dist-info"
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        tags = Parser().parsestr(archive.read(f"{info}/WHEEL").decode())
    assert metadata["Version"] == version
    assert metadata["Requires-Python"] == ">=3.10"
    assert tags["Root-Is-Purelib"] == "true"


def test_description_has_no_link_that_a_package_index_cannot_follow(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"fusedattn-{version_in_pyproject()}.dist-info"
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
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
    out = run(sys.executable, *safe_path, "-c", code, cwd=elsewhere, PYTHONPATH=str(site))
    assert out.splitlines() == [
        str(site / "fusedattn" / "__init__.py"),
        str(site / "fusedattn" / "kernels" / "configs.py"),
        version_in_pyproject(),
    ]


def test_sdist_holds_the_kernels_once(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getnames()
    for name in KERNELS:
        found = [member for member in members if member.endswith(f"kernels/{name}")]
        assert found == [f"fusedattn-{version_in_pyproject()}/kernels/{name}"]


def test_sdist_holds_what_is_needed_to_test_and_to_read(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    top = {"README.md", "CHANGELOG.md", "Makefile", "constraints.txt"}
    assert {"docs/learn/softmax.py", "docs/images/learn/blocks.png"} <= members
    assert top | {"docs/attention.md", "docs/images/demo.png", "tests/conftest.py", "bench/__main__.py"} <= members


def test_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    rebuilt = build_wheel(sdist, tmp_path / "built")
    assert rebuilt.name == wheel.name
    with zipfile.ZipFile(rebuilt) as theirs, zipfile.ZipFile(wheel) as ours:
        assert {n: theirs.read(n) for n in theirs.namelist()} == {n: ours.read(n) for n in ours.namelist()}
