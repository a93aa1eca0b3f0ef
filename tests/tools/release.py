"""Build the wheel and the source distribution, and try each where a user would install it.

``python -m tests.tools.release`` builds both into ``dist/``, checks their metadata, and builds a second wheel from the
source distribution. Then, for every Python and every torch, it installs each wheel with its dependencies into a new
virtual environment and runs the commands, every import, a few cases of the kernels and, with the second wheel, some
tests of the unpacked source distribution. Exit status: 0 if all of it passed, 1 if something failed, 2 if there is no
Python to try. The environments need some gigabytes each and are deleted afterwards.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.every_module import EXTRAS, USE

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("python3.10", "python3.11", "python3.12", "python3.13")
NEWEST = "newest"  # the newest torch that the package index has for a Python
TORCHES = ("2.11.0", NEWEST)

IMPORTS = f"{USE}\nassert missing <= {EXTRAS}, missing"
VERSIONS = "from importlib.metadata import version as v; print(*(v(x) for x in ('torch', 'triton', 'numpy')))"

# Of every kind: kernels in the interpreter, both backends, values, errors.
TESTS = ("tests/kernels/test_devices.py", "tests/public/test_masks.py", "tests/public/test_ones.py")


@dataclass
class Row:
    """What one wheel did in one environment."""

    python: str
    wheel: str
    versions: str
    seconds: float = 0.0
    failed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        torch, triton, numpy = self.versions.split() or ("?", "?", "?")
        result = "FAILED: " + ", ".join(self.failed) if self.failed else "ok"
        return f"{self.python:<9} {torch:<14} {triton:<8} {numpy:<8} {self.wheel:<11} {self.seconds:5.0f} s  {result}"


HEAD = f"{'Python':<9} {'torch':<14} {'triton':<8} {'numpy':<8} {'wheel from':<11} {'time':>7}  result"


def environment() -> dict[str, str]:
    """The variables of a user's shell, without those that would lead to the checkout or choose how Triton runs."""
    dropped = ("PYTHONPATH", "TRITON_", "FUSEDATTN_", "PYTEST_")
    return {name: x for name, x in os.environ.items() if not name.startswith(dropped)} | {"OMP_NUM_THREADS": "1"}


def call(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command and keep its output."""
    return subprocess.run(list(map(str, command)), cwd=cwd, env=environment(), capture_output=True, text=True)


def must(*command: str | Path, cwd: Path) -> str:
    """The output of a command that has to succeed."""
    done = call(*command, cwd=cwd)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def found_pythons(names: Sequence[str]) -> list[str]:
    """The paths of those of these interpreters that exist."""
    return [path for name in names if (path := shutil.which(name))]


def build(out: Path) -> tuple[Path, Path]:
    """Build the wheel and the source distribution into `out`, and check what a package index would show of them."""
    shutil.rmtree(out, ignore_errors=True)
    must(sys.executable, "-m", "build", "--sdist", "--wheel", "--outdir", out, cwd=ROOT)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    print(must(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=ROOT), end="", flush=True)
    return wheel, sdist


def wheel_of_sdist(sdist: Path, folder: Path) -> tuple[Path, Path]:
    """The unpacked source distribution, and a wheel that is built from it alone."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)
    (unpacked,) = folder.iterdir()
    must(sys.executable, "-m", "build", "--wheel", "--outdir", folder / "built", unpacked, cwd=folder)
    (wheel,) = (folder / "built").glob("*.whl")
    return unpacked, wheel


@contextmanager
def new_venv(python: str, folder: Path) -> Iterator[Path]:
    """The Python of a new virtual environment, which is deleted afterwards."""
    venv = folder / "venv"
    try:
        must(python, "-m", "venv", venv, cwd=folder)
        yield venv / "bin" / "python"
    finally:
        shutil.rmtree(venv, ignore_errors=True)


def try_wheel(row: Row, python: Path, folder: Path, unpacked: Path | None) -> None:
    """Run what a user runs, and with `unpacked` also some tests there; add what failed to `row`."""
    steps: dict[str, tuple[Path, tuple[str, ...]]] = {
        "dependencies": (folder, ("-m", "pip", "check")),
        "info": (folder, ("-m", "fusedattn", "info")),
        "attention and imports": (folder, ("-c", IMPORTS)),
        "check": (folder, ("-m", "fusedattn", "check", "--quick", "--device", "cpu", "--feature", "causal")),
    }
    if unpacked is not None:
        steps["tests"] = (unpacked, ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not thorough", *TESTS))
    for name, (cwd, arguments) in steps.items():
        done = call(python, *arguments, cwd=cwd)
        if done.returncode:
            row.failed.append(name)
            print(f"--- {name}, {row.python}\n{done.stdout[-6000:]}{done.stderr[-6000:]}", flush=True)


def try_python(python: str, torch: str, wheels: Sequence[tuple[str, Path, Path | None]], folder: Path) -> Iterator[Row]:
    """Install each wheel in turn, with a torch and all dependencies, and try it."""
    name = must(python, "-c", "import platform; print(platform.python_version())", cwd=folder).strip()
    with new_venv(python, folder) as venv:
        install = (venv, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input")
        for source, wheel, unpacked in wheels:
            row = Row(name, source, "")
            began = time.monotonic()
            wanted = ("torch",) if torch == NEWEST else (f"torch=={torch}",)
            tests = ("pytest", "pytest-xdist", "hypothesis") if unpacked is not None else ()
            installed = call(*install, "--force-reinstall", "--no-deps", wheel, cwd=folder)
            if not installed.returncode:
                installed = call(*install, wheel, *wanted, *tests, cwd=folder)
            if installed.returncode:
                row.failed.append("install")
                print(f"--- install, {name}, torch {torch}\n{installed.stderr[-6000:]}", flush=True)
            else:
                row.versions = call(venv, "-c", VERSIONS, cwd=folder).stdout.strip()
                try_wheel(row, venv, folder, unpacked)
            row.seconds = time.monotonic() - began
            yield row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.release", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--python", nargs="*", default=PYTHONS, help="interpreters to try (default: those that exist)")
    parser.add_argument("--torch", nargs="*", default=TORCHES, help="versions of torch (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of both files (default: dist)")
    parser.add_argument("--build-only", action="store_true", help="build and check, and install nothing")
    options = parser.parse_args(arguments)
    wheel, sdist = build(options.out.resolve())
    if options.build_only:
        return 0
    pythons = found_pythons(options.python)
    if not pythons:
        print(f"error: got --python {' '.join(options.python)}, of which none exists", file=sys.stderr)
        return 2
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sdist").mkdir()
        unpacked, rebuilt = wheel_of_sdist(sdist, folder / "sdist")
        wheels: list[tuple[str, Path, Path | None]] = [("checkout", wheel, None), ("sdist", rebuilt, unpacked)]
        for python in pythons:
            for torch in options.torch:
                for row in try_python(python, torch, wheels, folder):
                    print(row, flush=True)
                    rows.append(row)
    print("", HEAD, *rows, sep="\n")
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
