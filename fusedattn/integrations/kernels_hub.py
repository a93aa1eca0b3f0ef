"""The core of the package as a kernel for Hugging Face's ``kernels`` library.

``python -m fusedattn.integrations.kernels_hub OUT`` writes it. Such a kernel is a Python package that is loaded
from a path under a name unique to its content, possibly beside other versions of itself. It imports itself only
relatively, imports nothing else but torch and Triton, and registers its torch operators in its own namespace.
https://huggingface.co/docs/kernels/kernel-requirements has the rules.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType

import fusedattn

NAME = "fusedattn"
BACKENDS = ("cpu", "cuda", "rocm")
LICENSE = "bsd-3-clause"  # as the Hub spells it
VERSION = int(fusedattn.__version__.partition(".")[0])  # on the Hub, where version 0 may still change

# Public names from these modules are left out: they concern models of other libraries and of this package.
LEFT_OUT = ("fusedattn.fusion", "fusedattn.integrations")

PACKAGE = Path(fusedattn.__file__).parent

# The list of files that an export wrote, in the format of sha256sum.
RECORD = ".fusedattn-export"

OPS = '''"""The namespace of the operators: the name that this package was imported under, unique in a process."""

_NAMESPACE = __package__.replace(".", "_")


def add_op_namespace_prefix(name: str) -> str:
    """The qualified name of an operator."""
    return f"{_NAMESPACE}::{name}"
'''

LAYERS = '''"""Layers without state, for the ``kernelize`` of Hugging Face's ``kernels``."""

from __future__ import annotations

from torch import Tensor, nn

from . import masks
from .attention import attention


class Attention(nn.Module):
    """Attention of q ``(batch, nheads_q, seqlen_q, head_dim)`` over k and v ``(batch, nheads_kv, seqlen_k, ...)``.

    ``mask`` is a mask of this kernel, or a bool tensor broadcastable to ``(batch, nheads_q, seqlen_q, seqlen_k)`` in
    which True means "may attend". A query that may attend to nothing has out 0.
    """

    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask | Tensor | None = None) -> Tensor:
        return attention(q, k, v, mask=mask)


class CausalAttention(nn.Module):
    """As ``Attention``, where the last query sees all keys, the one before it all but the last, and so on."""

    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=masks.causal())
'''

FLAKE = """{
  description = "fusedattn, a kernel for the Hugging Face Hub";

  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""


def export(out: str | os.PathLike[str], repo_id: str | None = None) -> list[Path]:
    """Write the kernel into the folder ``out``; the same tree gives the same bytes.

    ``out`` gets ``build.toml``, ``flake.nix``, ``CARD.md``, ``LICENSE`` and ``torch-ext/fusedattn``, the source from
    which ``kernel-builder`` builds; and ``build/torch-cpu``, ``build/torch-cuda`` and ``build/torch-rocm``, which
    ``kernels.get_local_kernel(out)`` loads and ``kernel-builder upload`` publishes. The operators of a variant are
    ``torch.ops.<id>``, with the ``id`` of its ``metadata.json``, which is made from the content.

    Args:
        out: a folder that is new, or empty, or that an earlier export wrote; other files in it are left alone.
        repo_id: the Hub repository, ``owner/name``, for ``build.toml`` and the card; None for none.

    Returns:
        The files, sorted.

    Raises:
        ValueError: ``out`` has files but no record of an earlier export, or has files of that export that have changed
            since, or other files where the export would write; or ``repo_id`` is not ``owner/name``.
        NotImplementedError: a module of the package cannot be exported; the message says why.
    """
    if repo_id is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id):
        raise ValueError(f"repo_id: got {repo_id!r}, allowed are owner/name and None")
    folder, files = Path(out), _files(repo_id)
    recorded = _recorded(folder, files)
    for path in recorded.keys() - files.keys():
        (folder / path).unlink(missing_ok=True)
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    record = "".join(f"{_sha256(content).hex()}  {path}\n" for path, content in files.items())
    (folder / RECORD).write_bytes(record.encode())
    return [folder / path for path in files]


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _recorded(folder: Path, files: dict[str, bytes]) -> dict[str, str]:
    """Path and hash of each file of an earlier export into ``folder``; raises if `files` must not be written."""
    allowed = "allowed is a folder that is new, or empty, or as an earlier export left it"
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return {}
    if not (folder / RECORD).is_file():
        raise ValueError(f"out: got {folder}, which is not empty and has no {RECORD}; {allowed}")
    lines = (folder / RECORD).read_text(encoding="utf-8").splitlines()
    recorded = {path: digest for digest, _, path in (line.partition("  ") for line in lines)}
    changed = [
        path
        for path in sorted(recorded.keys() | files.keys())
        if os.path.lexists(folder / path)
        and not ((folder / path).is_file() and _sha256((folder / path).read_bytes()).hex() == recorded.get(path))
    ]
    if changed:
        raise ValueError(f"out: got {folder}, where an export did not write {', '.join(changed)}; {allowed}")
    return recorded


def _files(repo_id: str | None) -> dict[str, bytes]:
    """Content of all files, by path relative to the folder, sorted."""
    source = {path: text.encode() for path, text in {**_modules(), "layers.py": LAYERS}.items()}
    license_text = _license_text().encode()
    card = _card(repo_id).encode()
    files = {
        "build.toml": _build_toml(repo_id).encode(),
        "flake.nix": FLAKE.encode(),
        "CARD.md": card,
        "build/CARD.md": card,
        "LICENSE": license_text,
        # kernel-builder adds its own _ops.py.
        **{f"torch-ext/{NAME}/{path}": content for path, content in source.items()},
    }
    variant = {**source, "_ops.py": OPS.encode(), "LICENSE": license_text}
    content_hash = _sha256(b"".join(path.encode() + _sha256(variant[path]) for path in sorted(variant))).hex()[:12]
    for backend in BACKENDS:
        described = {**variant, "metadata.json": _metadata(backend, content_hash, variant)}
        files.update({f"build/torch-{backend}/{path}": content for path, content in described.items()})
    return dict(sorted(files.items()))


def _build_toml(repo_id: str | None) -> str:
    backends = ", ".join(f'"{backend}"' for backend in BACKENDS)
    hub = "" if repo_id is None else f'\n[general.hub]\nrepo-id = "{repo_id}"\n'
    return (
        f'[general]\nname = "{NAME}"\nversion = {VERSION}\nedition = 5\nlicense = "{LICENSE}"\n'
        f"backends = [{backends}]\n{hub}\n[torch-noarch]\n"
    )


def _metadata(backend: str, content_hash: str, files: dict[str, bytes]) -> bytes:
    digests = {path: base64.b64encode(_sha256(files[path])).decode() for path in sorted(files)}
    content = {
        "name": NAME,
        "id": f"_{NAME}_{backend}_{content_hash}",
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def _card(repo_id: str | None) -> str:
    functions = "".join(f"- `{name}`\n" for name in sorted(_public()))
    return f"""---
library_name: kernels
license: {LICENSE}
---

# {NAME}

Fused scaled-dot-product attention for PyTorch in Triton, forward and backward: masks, RoPE, biases, dropout,
grouped-query attention, packed sequences. This is the core of {NAME} {fusedattn.__version__}. It needs Python 3.10,
torch 2.11 and, on a GPU, Triton 3.6 or newer.

```python
from kernels import get_kernel

kernel = get_kernel("{repo_id or f"OWNER/{NAME}"}", version={VERSION})
out = kernel.attention(q, k, v, mask=kernel.masks.causal())  # q: (batch, nheads, seqlen, head_dim)
```

GPU tensors run the Triton kernels, CPU tensors `torch.nn.functional.scaled_dot_product_attention`. Masks, biases and
rotary tables are those of the kernel; values of an installed `{NAME}` are of other types, and refused.

## Names

{functions}
## Layers

- `Attention`: `forward(q, k, v, mask=None)`
- `CausalAttention`: `forward(q, k, v)`
"""


def _license_text() -> str:
    """The licence of the checkout, or of the installed package."""
    if (PACKAGE.parent / "pyproject.toml").is_file():
        return (PACKAGE.parent / "LICENSE").read_text(encoding="utf-8")
    text = metadata.distribution(NAME).read_text("licenses/LICENSE")
    if text is None:
        raise NotImplementedError(f"LICENSE: not found beside {PACKAGE} nor in the installed package")
    return text


def _public() -> dict[str, str]:
    """The module that each public name of the kernel is imported from; for a module, its parent."""
    found = {}
    for name in fusedattn.__all__:
        value = getattr(fusedattn, name)
        module = (
            value.__name__.rpartition(".")[0] if isinstance(value, ModuleType) else getattr(value, "__module__", "")
        )
        if module and not f"{module}.".startswith(tuple(f"{left_out}." for left_out in LEFT_OUT)):
            found[name] = module
    return found


def _init_source(public: dict[str, str]) -> str:
    names_of: dict[str, list[str]] = {".": ["layers"]}
    for name, module in sorted(public.items()):
        names_of.setdefault(_relative(module, NAME), []).append(name)
    imports = "".join(
        f"from {module} import {', '.join(sorted(names))}\n" for module, names in sorted(names_of.items())
    )
    exported = "".join(f'    "{name}",\n' for name in sorted([*public, "__version__", "layers"]))
    version = fusedattn.__version__
    return f'"""The core of {NAME}."""\n\n{imports}\n__version__ = "{version}"\n\n__all__ = [\n{exported}]\n'


def _modules() -> dict[str, str]:
    """Rewritten source of the modules of public names and of all their imports, by path relative to the package."""
    public = _public()
    found = {"__init__.py": _init_source(public)}
    waiting = [f"{NAME}.{name}" if module == NAME else module for name, module in public.items()]
    seen = {NAME}
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        path = _path_of(module)
        if path is None:
            raise NotImplementedError(f"{module}: imported from {NAME}, but no module of it")
        source, imported = _rewritten(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
        found[path.relative_to(PACKAGE).as_posix()] = source
        package = module.rpartition(".")[0]
        waiting += [*imported, package] if _path_of(package) else imported
    return found


def _path_of(module: str) -> Path | None:
    stem = PACKAGE.joinpath(*module.split(".")[1:])
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


def _relative(module: str, package: str) -> str:
    """The module as ``from ... import`` names it inside `package`."""
    here, there = package.split("."), module.split(".")
    shared = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
    return "." * (len(here) - shared + 1) + ".".join(there[shared:])


def _rewritten(source: str, module: str, is_package: bool) -> tuple[str, list[str]]:
    """``source`` with its imports of the package made relative and its operators renamed; the modules it imports."""
    package = module if is_package else module.rpartition(".")[0]
    source = _without_typing(source)
    tree = ast.parse(source)
    edits: list[tuple[int, int, str, str]] = []  # line, column in bytes, old text, new text
    imported: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            target = _target_of(node, package)
            if target.split(".")[0] == NAME:
                written = "." * node.level + (node.module or "")
                new = f"from {_relative(target, package)} import"
                edits.append((node.lineno, node.col_offset, f"from {written} import", new))
                submodules = (f"{target}.{alias.name}" for alias in node.names)
                imported += [submodule if _path_of(submodule) else target for submodule in submodules]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            operator = re.fullmatch(rf"{NAME}::(\w+)", node.value)
            if operator:
                new = f'add_op_namespace_prefix("{operator[1]}")'
                edits.append((node.lineno, node.col_offset, f'"{node.value}"', new))
    lines = source.encode().splitlines(keepends=True)
    for line, column, old, new in sorted(edits, reverse=True):
        before, after = lines[line - 1][:column], lines[line - 1][column:]
        if not after.startswith(old.encode()):
            raise NotImplementedError(f"{module}, line {line}: {old} has a form that the export cannot rewrite")
        lines[line - 1] = before + new.encode() + after[len(old.encode()) :]
    if any(new.startswith("add_op_namespace_prefix") for *_, new in edits):
        last = max(node.end_lineno or 0 for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)))
        lines.insert(last, f"from {_relative(f'{NAME}._ops', package)} import add_op_namespace_prefix\n".encode())
    text = b"".join(lines).decode()
    if problems := list(_problems(text)):
        raise NotImplementedError(f"{module}: {'; '.join(problems)}")
    return text, imported


def _without_typing(source: str) -> str:
    """``source`` without the imports that only type checkers see, which may name other packages."""
    lines = source.splitlines(keepends=True)
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            lines[node.lineno - 1 : node.end_lineno] = []
    return "".join(lines)


def _target_of(node: ast.ImportFrom, package: str) -> str:
    """The full name of the module that names are imported from."""
    parents = package.split(".")
    base = parents[: len(parents) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def _problems(source: str) -> Iterator[str]:
    """References in a rewritten module to code outside the kernel."""
    tree = ast.parse(source)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (_foreign(alias.name, node.lineno) for alias in node.names if not _may_import(alias.name))
        elif isinstance(node, ast.ImportFrom):
            if not node.level and not _may_import(node.module or ""):
                yield _foreign(node.module or "", node.lineno)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in (NAME, "import_module", "__import__"):
                yield f"line {node.lineno}: got {name}, which may find what is installed"
        elif isinstance(node, ast.Constant) and f"{NAME}::" in str(node.value) and id(node) not in texts:
            yield f"line {node.lineno}: got {node.value!r}, allowed are names of operators written out"


def _may_import(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names | {"torch", "triton"}


def _foreign(module: str, line: int) -> str:
    return f"line {line}: got an import of {module}, allowed are the standard library, torch and triton"


def main(arguments: Sequence[str] | None = None) -> int:
    """Export as the command line says; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fusedattn.integrations.kernels_hub",
        description="Export the core of fusedattn as a kernel for Hugging Face's kernels library.",
    )
    parser.add_argument("out", metavar="OUT", help="folder to write: new, empty, or of an earlier export")
    parser.add_argument("--repo-id", metavar="OWNER/NAME", help="repository on the Hub, for build.toml and the card")
    options = parser.parse_args(arguments)
    try:
        files = export(options.out, options.repo_id)
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {len(files)} files to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
