"""``python -m tests.tools.release`` builds the wheel and the sdist into dist/, and tries both in clean environments.

Each environment is a Python and a torch: it installs the file with what the file asks for, then runs the package in an
empty folder. From the sdist, some of its tests run too. Exit status 1 if anything fails. The environments need some
gigabytes each, one at a time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.report.page import table_of

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
OLDEST, NEWEST = "2.11.0", "newest"  # of torch; pyproject.toml has the oldest

RUN = """
import importlib, pkgutil, torch, fusedattn
from fusedattn import attention, masks
for module in pkgutil.walk_packages(fusedattn.__path__, "fusedattn."):
    if not module.name.endswith("__main__") and not module.name.startswith(OPTIONAL):
        importlib.import_module(module.name)
q = torch.randn(1, 2, 8, 16, requires_grad=True)
attention(q, q, q, mask=masks.causal()).sum().backward()
assert "site-packages" in fusedattn.__file__ and q.grad.isfinite().all()
"""
# What needs an extra or another library.
OPTIONAL = ("fusedattn.cli.demo", "fusedattn.integrations.transformers", "fusedattn.integrations.kernels_hub")
TESTS = ("tests/public/test_attention.py", "tests/public/test_biases.py", "tests/repo/test_packaging.py")


@dataclass
class Environment:
    """A virtual environment with one torch, and what happened in it."""

    folder: Path
    python: str
    torch: str
    done: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def run(self, name: str, *command: str | Path, cwd: Path | None = None, **variables: str) -> bool:
        """Run a command of the environment in an empty folder, and keep whether it succeeded."""
        empty = self.folder / "empty"
        empty.mkdir(exist_ok=True)
        program, *arguments = map(str, command)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "TRITON"))}
        result = subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=cwd or empty,
            env=environment | variables,
            capture_output=True,
            text=True,
        )
        (self.failed if result.returncode else self.done).append(name)
        if result.returncode:
            print(f"FAILED {name}, {self.python}, torch {self.torch}", result.stdout[-3000:], result.stderr[-3000:])
        return result.returncode == 0

    def version(self, name: str) -> str:
        """That of Python or of an installed package."""
        code = "import platform; print(platform.python_version())"
        if name != "python":
            code = f"from importlib.metadata import version; print(version({name!r}))"
        command = [self.folder / "bin/python", "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def build() -> tuple[Path, Path]:
    """The wheel and the sdist, newly built in dist/."""
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", DIST, ROOT], check=True, stdout=subprocess.DEVNULL)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist], check=True)
    return wheel, sdist


def try_in(folder: Path, python: str, torch: str, wheel: Path, sdist: Path) -> list[str]:
    """A row of the table: a Python, a torch, and what failed when both files were installed and run there."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    here = Environment(folder, python, torch)
    pip = ("python", "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check", "install")
    wanted = "torch" if torch == NEWEST else f"torch=={torch}"
    if here.run("install the wheel", *pip, wanted, wheel):
        _use(here, "wheel")
    if here.run("install the sdist", *pip, "--force-reinstall", "--no-deps", "--no-cache-dir", sdist):
        _use(here, "sdist")
    if here.run("install pytest", *pip, "pytest", "hypothesis", "setuptools>=77"):
        with tarfile.open(sdist) as archive:
            archive.extractall(folder / "unpacked")
        (source,) = (folder / "unpacked").iterdir()
        here.run("tests of the sdist", "python", "-m", "pytest", "-q", "-m", "not thorough", *TESTS, cwd=source)
    versions = [here.version(name) for name in ("python", "torch", "triton", "numpy")]
    return [*versions, str(len(here.done)), ", ".join(here.failed) or "none"]


def _use(here: Environment, kind: str) -> None:
    here.run(f"import ({kind})", "python", "-W", "error::SyntaxWarning", "-c", f"OPTIONAL = {OPTIONAL!r}{RUN}")
    here.run(f"info ({kind})", "fusedattn", "info")
    here.run(f"check ({kind})", "fusedattn", "check", "--quick", "--feature", "causal")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", action="append", help="default: each python3.10 to python3.13 that is found")
    parser.add_argument("--torch", action="append", help=f"a version or {NEWEST}; default: {OLDEST} and {NEWEST}")
    parser.add_argument("--only-build", action="store_true", help="build and check the files, install nothing")
    options = parser.parse_args(arguments)
    wheel, sdist = build()
    if options.only_build:
        return 0
    pythons = options.python or [path for version in VERSIONS if (path := shutil.which(f"python{version}"))]
    rows = [["python", "torch", "triton", "numpy", "passed", "failed"]]
    for python in pythons:
        for torch in options.torch or (OLDEST, NEWEST):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(try_in(Path(folder), python, torch, wheel, sdist))
                print(rows[-1], flush=True)
    print(table_of(rows))
    return int(any(row[-1] != "none" for row in rows[1:]))


if __name__ == "__main__":
    sys.exit(main())
