"""Compile kernels beforehand, without a GPU, and put them into Triton's cache.

Triton names a cached kernel by a hash of its own files, of the kernel's source, types, alignments and options, and of
the assembler's version, but not by the path of the source or the cache. So the calls of all jobs are made here as on
the GPU, with a driver that launches nothing, and the code and its description are packed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.runtime import cache

from bench.codegen import launches
from bench.first import jobs
from bench.first.jobs import Before, Job
from bench.measuring import gate
from bench.work import attention
from bench.work.model import ModelWork
from fusedattn import support
from fusedattn.kernels.configs import Arch

FOLDER = Path(__file__).resolve().parents[2] / "prebuilt"
MANIFEST = "manifest.json"
KEPT = (".json", ".cubin", ".hsaco")  # files of a launch: the code and its description
SMALLEST: dict[str, Any] = {"n_layers": 1, "vocab_size": 64}  # a model whose attention launches the same kernels


def path_of(arch: Arch, folder: Path = FOLDER) -> Path:
    """The path of the archive for a GPU and this Triton."""
    return folder / f"triton-{triton.__version__}-{arch}.tar.xz"


def identity(target: Any, libtriton: Path | None = None) -> dict[str, str]:
    """The parts of every name that do not depend on the kernel; `libtriton` is that of another Python."""
    from triton.compiler import make_backend

    return {
        "triton": triton.__version__,
        "target": f"{target.backend} {target.arch}",
        "triton_key": hashlib.sha256(_key(libtriton).encode()).hexdigest(),
        "libtriton": _sha256(libtriton or _own_libtriton()),
        "assembler": make_backend(target).hash(),
    }


def _key(libtriton: Path | None) -> str:
    """Triton's own key, or that of the same release for another Python, whose `libtriton` is another file."""
    key = cache.triton_key()
    return key if libtriton is None else key.replace(_sha256(_own_libtriton()), _sha256(libtriton))


def _own_libtriton() -> Path:
    return Path(str(triton._C.libtriton.__file__))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Compiled:
    """The result of one job: hashes of its kernels, reasons for missing ones, and the seconds that it took."""

    job: str
    kernels: set[str]
    errors: set[str]
    seconds: float


def compile_job(job: Job, *, arch: Arch, folder: Path, libtriton: Path | None) -> Compiled:
    """Compile the launches of a job for a GPU of this kind, into a folder with the layout of Triton's cache."""
    began = _cpu_seconds()
    torch.set_num_threads(1)
    key, own = _key(libtriton), attention.own
    with ExitStack() as stack:
        stack.enter_context(triton.knobs.cache.scope())
        triton.knobs.cache.dir = str(folder)
        found = stack.enter_context(launches.compiling(arch))
        triton.knobs.compilation.always_compile = False  # other jobs share kernels
        patches: tuple[Any, ...] = (
            patch.object(cache, "triton_key", lambda: key),
            patch.object(support, "interpreting", lambda: True),  # so that CPU tensors take the Triton backend
            patch.object(support, "INTERPRETER_REASONS", []),  # nothing is interpreted
            patch.object(attention, "own", lambda direction, device: own(direction, torch.device("cuda"))),
            *(patch.object(module, "is_hopper", lambda _: arch == "sm_90") for module in (attention, gate, jobs)),
        )
        for patched in patches:
            stack.enter_context(patched)
        _small(job).run(torch.device("cpu"))
    compiled = {launch.compiled.hash for launch in found if launch.compiled is not None}
    errors = {f"{launch.kernel}: {launch.error}" for launch in found if launch.error}
    return Compiled(f"{job.part}, {job.name}", compiled, errors, _cpu_seconds() - began)


def _cpu_seconds() -> float:
    """CPU seconds of this process and of the assemblers that it has waited for."""
    return sum(os.times()[:4])


def _small(job: Job) -> Job:
    """The job with a model of one layer and few words."""
    if isinstance(job, Before) and isinstance(job.work, ModelWork):
        work = replace(job.work, size=replace(job.work.size, **SMALLEST), batch=2, compiled=False)
        return replace(job, work=work)
    return job


def pack(folder: Path, path: Path, manifest: dict[str, Any]) -> int:
    """Write the files of a folder that launches need into an archive; returns the number of kernels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    kernels = sorted(x for x in folder.iterdir() if any(x.glob("__grp__*.json")))
    with tarfile.open(new, "w:xz") as archive:
        _add(archive, MANIFEST, json.dumps(manifest | {"kernels": len(kernels)}, indent=1).encode())
        for kernel in kernels:
            for file in sorted(kernel.iterdir()):
                if file.suffix in KEPT and not file.name.startswith("__grp__"):
                    _add(archive, f"{kernel.name}/{file.name}", file.read_bytes())
    new.replace(path)
    return len(kernels)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def unpack(path: Path, here: dict[str, str], folder: Path) -> tuple[int, str]:
    """Put the kernels of an archive into Triton's cache, unless they were made by another compiler.

    Returns:
        The number of kernels, 0 if they do not fit this machine; and a line that says so.
    """
    with tarfile.open(path) as archive:
        members = iter(archive)
        manifest = json.loads(_content(archive, next(members)))
        differ = [name for name, x in here.items() if manifest[name] != x]
        if differ:
            what = "; ".join(f"{name} is {here[name]} here, {manifest[name]} there" for name in differ)
            return 0, f"{path.name}: made by another compiler, so that kernels are compiled here: {what}"
        kernels: dict[str, dict[str, str]] = {}
        for member in members:
            kernel, file = member.name.split("/")
            target = folder / kernel / file
            target.parent.mkdir(parents=True, exist_ok=True)
            new = target.with_name(f"{file}.{os.getpid()}")
            new.write_bytes(_content(archive, member))
            new.replace(target)
            kernels.setdefault(kernel, {})[file] = str(target)
    for kernel, files in kernels.items():  # last, because it makes the other files valid; with the paths of this cache
        (description,) = (name for name in files if name.endswith(".json"))
        new = folder / kernel / f"{os.getpid()}"
        new.write_text(json.dumps({"child_paths": files}))
        new.replace(folder / kernel / f"__grp__{description}")
    return len(kernels), f"{path.name}: {len(kernels)} kernels that need not be compiled"


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    if file is None:
        raise ValueError(f"{member.name}: got no file, allowed are files alone")
    return file.read()
