"""With only torch, Triton, NumPy and pytest, and after the link to the kernels got lost."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tests.helpers.compiling import ROOT, run
from tests.helpers.every_module import EXTRAS, USE

DEPENDENCIES = ("torch", "triton", "numpy")
ALONE = (*DEPENDENCIES, "pytest")


def distributions(names: tuple[str, ...]) -> Iterator[metadata.Distribution]:
    """The installed distributions of these names, and their requirements."""
    seen: set[str] = set()
    left = list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name not in seen:
            seen.add(name)
            try:
                found = metadata.distribution(name)
            except metadata.PackageNotFoundError:  # for another platform, or built from source
                continue
            yield found
            left += [re.split(r"[^\w.-]", need)[0] for need in found.requires or () if "extra ==" not in need]


def site_of(names: tuple[str, ...], folder: Path) -> Path:
    """Link these packages and their requirements into a folder."""
    for found in distributions(names):
        for top in {path.parts[0] for path in found.files or ()} - {"..", "__pycache__"}:
            source = Path(str(found.locate_file(top)))
            if source.exists() and not (folder / top).is_symlink():
                (folder / top).symlink_to(source)
    if not (folder / "torch").exists():
        pytest.skip("torch was not installed as a package")
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with only :data:`ALONE` and its requirements."""
    return site_of(ALONE, tmp_path_factory.mktemp("site"))


def python(site: Path, *arguments: str, cwd: Path = ROOT, status: int = 0, path: str = "") -> str:
    """The output of a Python that finds no other packages, and the modules under `path`."""
    done = run("-S", *arguments, cwd=cwd, PYTHONPATH=f"{site}{os.pathsep}{path}" if path else str(site))
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_optional_packages_are_absent(site: Path) -> None:
    names = ("rich", "matplotlib", "hypothesis", "xdist", "pytest_benchmark", "transformers", "PIL", "fusedattn")
    code = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    assert python(site, "-c", code, cwd=site) == "[]\n"


def test_the_package_imports_its_dependencies_alone(tmp_path: Path) -> None:
    """The names that are missing are those of the extras demo and transformers."""
    missing = python(site_of(DEPENDENCIES, tmp_path), "-c", USE).split()
    assert set(missing) <= EXTRAS


def test_tests_run_and_name_the_modules_left_out(site: Path) -> None:
    without_hypothesis = tuple(
        f"tests/public/test_{name}.py" for name in ("properties", "fuzz", "fuzz_cached", "fp8_fuzz")
    )
    without_hypothesis += ("tests/linear/test_fuzz.py",)
    modules = ("tests/kernels/test_devices.py", "tests/bench/test_terminal.py", *without_hypothesis)
    out = python(site, "-m", "pytest", "-q", "-p", "no:cacheprovider", *modules, "bench/test_speed.py")
    assert re.search(r"\d+ passed, 7 skipped", out)
    assert "left out: tests/bench/test_terminal.py: matplotlib is not installed" in out
    for name in without_hypothesis:
        assert f"left out: {name}: hypothesis is not installed" in out


@pytest.mark.thorough
def test_a_module_that_is_broken_is_an_error(site: Path, tmp_path: Path) -> None:
    """Only names listed as optional are skipped."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_it.py").write_text("import no_such_package\n")
    arguments = ("-p", "no:cacheprovider", "--import-mode=importlib", "test_it.py")
    out = python(site, "-m", "pytest", *arguments, cwd=tmp_path, status=2, path=str(ROOT))
    assert "No module named 'no_such_package'" in out


@pytest.mark.thorough
def test_the_check_and_the_timings_run(site: Path, tmp_path: Path) -> None:
    assert "1 of 1 within" in python(site, "-m", "fusedattn", "check", "--quick", "--feature", "negative")
    arguments = ("--quick", "--suite", "forward", "--filter", "seqlen 64", "--out", str(tmp_path))
    out = python(site, "-m", "bench", "run", *arguments, "--device", "cpu")
    assert re.search(r"^ +64 +[\d.]+ us +\d+%", out, re.MULTILINE)
    assert "2 of 2 measured" in out
    (path,) = (tmp_path / "cpu").iterdir()
    code = (
        "import sys; from bench.__main__ import main\n"
        "sys.exit(main(['compare', *sys.argv[1:]]) or main(['plot', sys.argv[1]]))"
    )
    assert "matplotlib: not installed" in python(site, "-c", code, str(path), str(path), status=2)


@pytest.mark.thorough
def test_the_first_jobs_of_a_gpu_begin(site: Path, tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--jobs", "1", "--budget", "5", "--out", str(tmp_path))
    assert "call it again with --out" in python(site, "-m", "bench", "first", *arguments)
    assert (tmp_path / "summary.txt").exists()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package and the kernels, without the link."""
    folder = tmp_path_factory.mktemp("checkout")
    for name, left_out in (("kernels", ()), ("fusedattn", ("kernels",))):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", *left_out))
    return folder


WHERE = "import fusedattn.kernels.configs as c; from fusedattn.kernels import rope; print(c.__file__, rope.__file__)"


@pytest.mark.thorough
@pytest.mark.parametrize("became", ["nothing", "a file", "a copy"])
def test_kernels_are_found_where_the_link_was_lost(site: Path, checkout: Path, became: str) -> None:
    link = checkout / "fusedattn" / "kernels"
    if became == "a file":
        link.write_text("../kernels")
    elif became == "a copy":
        shutil.copytree(checkout / "kernels", link)
    try:
        folder = link if became == "a copy" else checkout / "kernels"
        assert python(site, "-c", WHERE, cwd=checkout).split() == [str(folder / x) for x in ("configs.py", "rope.py")]
    finally:
        link.unlink() if link.is_file() else shutil.rmtree(link, ignore_errors=True)


@pytest.mark.thorough
def test_kernels_that_are_nowhere_are_a_reason(site: Path, checkout: Path, tmp_path: Path) -> None:
    shutil.copytree(checkout / "fusedattn", tmp_path / "fusedattn")
    code = (
        "import torch, fusedattn; q = torch.randn(1, 1, 4, 16)\n"
        "assert fusedattn.attention(q, q, q).shape == q.shape\n"
        "print(fusedattn.not_supported_reasons(q, q, q, backend='triton'))"
    )
    out = python(site, "-c", code, cwd=tmp_path)
    assert "the kernels are missing: fusedattn/kernels is a link to the folder kernels beside fusedattn" in out
