"""The import law of tests/helpers/import_law.py is kept, and `import fusedattn` loads only the modules it should."""

from __future__ import annotations

import ast
import graphlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import fusedattn
from bench.report.page import with_block
from tests.helpers.compiling import ROOT, output
from tests.helpers.import_law import ALLOWED, LAYERS, table

# Modules in Triton, above such modules, or for another library: others load them only inside functions, so that the
# package imports without them.
ON_DEMAND = {
    "kernels",
    "testing.triton_functions",
    "backends.triton.launching",
    "backends.triton.append_launching",
    "linear.launching",
    "integrations.transformers",
    "virtual_gpu",
}
IMPORTING = ("import_module", "__import__")

# Allowed besides the standard library and torch; only inside functions, except in modules loaded on demand.
ALLOWED_OUTSIDE: dict[str, set[str]] = {
    "kernels": {"triton"},
    "testing.triton_functions": {"triton"},
    "support": {"triton"},
    "linear.launching": {"triton"},
    "virtual_gpu": {"triton", "numpy"},
    "integrations.transformers": {"transformers"},
    "cli": {"triton", "rich", "matplotlib", "numpy"},
    "distributed.example": {"rich", "matplotlib"},
}


@dataclass(frozen=True)
class Import:
    """One imported name: the dotted module it loads, its line, and when it is loaded."""

    module: str
    line: int
    when: str  # "import": with the module; "call": inside a function; "typing": for type checkers


def modules(*folders: str) -> dict[str, Path]:
    """Every module under these folders by its dotted name, with kernels/ standing for fusedattn.kernels."""
    found = {}
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[:2] != ("fusedattn", "kernels"):  # behind the link
            parts = ("fusedattn", *parts) if parts[0] == "kernels" else parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules("fusedattn", "kernels")
EVERY_MODULE = MODULES | modules("bench", "tests")


def unit_of(module: str) -> str:
    """The row of the table: `cli` for `fusedattn.cli.demo.command`, `fusedattn` for the package itself."""
    _, *parts = module.split(".")
    if parts[:2] == ["distributed", "example"]:  # a command
        return "distributed.example"
    depth = {"integrations": 2, "testing": 2, "linear": 2, "backends": 3}.get(parts[0], 1) if parts else 0
    return ".".join(parts[:depth]) or "fusedattn"


def imports_of(source: str | Path, module: str) -> Iterator[Import]:
    """Every import in ``source`` or its file, wherever it stands, with relative names made absolute."""
    is_package = isinstance(source, Path) and source.name == "__init__.py"
    package = module if is_package else module.rpartition(".")[0]

    def visit(node: ast.AST, when: str) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, when)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                # `from fusedattn import masks` loads a module, `... import fuse` a name.
                full = f"{base}.{alias.name}"
                is_module = full in EVERY_MODULE or full == "fusedattn.kernels"
                yield Import(full if is_module else base, node.lineno, when)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in IMPORTING:
            target = node.args[0] if node.args else None
            is_text = isinstance(target, ast.Constant) and isinstance(target.value, str)
            # A computed name could be any module, so the law could not be checked.
            yield Import(target.value if is_text else "<computed name>", node.lineno, when)

        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.body:
                yield from visit(statement, "typing")
            for statement in node.orelse:
                yield from visit(statement, when)
            return
        inside_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, "call" if inside_function and when == "import" else when)

    text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
    return visit(ast.parse(text), "import")


def violations(source: str | Path, module: str) -> list[str]:
    """The imports in ``source``, as the module of that name, that break the law."""
    unit = unit_of(module)
    allowed, outside = ALLOWED.get(unit, set()), ALLOWED_OUTSIDE.get(unit, set())
    found = []
    for item in imports_of(source, module):
        top = item.module.partition(".")[0]
        problem = None
        if top == "fusedattn":
            target = unit_of(item.module)
            if target != unit and target not in allowed:
                problem = f"{unit} may not import {target}"
            elif target in ON_DEMAND - {unit} and unit not in ON_DEMAND and item.when == "import":
                problem = f"{target} loads only inside functions, so that the package imports without what it needs"
        elif top in sys.stdlib_module_names or top == "torch" or (top == "typing_extensions" and item.when == "typing"):
            pass
        elif top not in outside:
            problem = f"{unit} may not import {top}"
        elif unit not in ON_DEMAND and item.when == "import":
            problem = f"{top} loads only inside functions, so that the package imports without it"
        if problem:
            found.append(f"{module}, line {item.line}: {item.module}: {problem}")
    return found


@pytest.mark.parametrize("module", sorted(MODULES))
def test_module_keeps_the_law(module: str) -> None:
    found = violations(MODULES[module], module)
    assert not found, "\n".join(found)


def test_every_module_is_in_the_table() -> None:
    units = {unit_of(module) for module in MODULES}
    assert units - ALLOWED.keys() == set(), "new: give it a row in ALLOWED, as low as it can stand"
    assert ALLOWED.keys() - units == set(), "gone: remove its row from ALLOWED"


def test_layers_have_every_module_once_and_imports_go_down() -> None:
    level = {unit: i for i, layer in enumerate(LAYERS) for unit in layer.units}
    assert level.keys() == ALLOWED.keys()
    assert sum(len(layer.units) for layer in LAYERS) == len(level)
    upward = [(unit, other) for unit, others in ALLOWED.items() for other in others if level[other] < level[unit]]
    assert not upward


def test_the_page_has_the_layers() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert with_block(page, table() + "\n") == page, "run: python -m tests.tools.figures"


def test_the_table_has_no_cycle() -> None:
    assert set(graphlib.TopologicalSorter(ALLOWED).static_order()) == ALLOWED.keys()


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Also inside a package, which the table does not cover, and at any time of the import."""
    graph = {
        module: {item.module for item in imports_of(path, module)} & EVERY_MODULE.keys() - {module, "fusedattn"}
        for module, path in EVERY_MODULE.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_tests_share_helpers_not_each_other() -> None:
    found = [
        f"{module}, line {item.line}: {item.module}"
        for module, path in EVERY_MODULE.items()
        if module.startswith("tests.")
        for item in imports_of(path, module)
        if item.module.startswith("tests.") and item.module.rpartition(".")[2].startswith("test_")
    ]
    assert not found, "move what they share to tests/helpers:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fusedattn.masks", "import triton"),
        ("fusedattn.masks", "from fusedattn import rope"),
        ("fusedattn.rope", "def f():\n    import numpy"),
        ("fusedattn.reference", "def f():\n    from fusedattn.kernels import attention_fwd"),
        ("fusedattn.reference", "def f():\n    from .kernels.attention_fwd import forward"),
        ("fusedattn.transformer.model", "from fusedattn.attention import attention"),
        ("fusedattn.transformer.model", "from ..modules import fuse"),
        ("fusedattn.transformer.model", "from fusedattn import fuse"),
        ("fusedattn.attention", "from fusedattn.kernels import attention_fwd"),
        ("fusedattn.attention", "from fusedattn import kernels"),
        ("fusedattn.attention", "import triton"),
        ("fusedattn.testing.cases", "from fusedattn.testing import triton_functions"),
        ("fusedattn.attention", "class A:\n    from fusedattn.kernels import rope"),
        ("fusedattn.attention", "if True:\n    import fusedattn.kernels.rope"),
        ("fusedattn.attention", "def f():\n    import fusedattn.integrations.modules"),
        ("fusedattn.attention", "import importlib\nimportlib.import_module('fusedattn.integrations.modules')"),
        ("fusedattn.backends.triton.results", "from fusedattn.backends.torch.sdpa import is_finite"),
        ("fusedattn.backends.torch.sdpa", "from fusedattn.backends.triton import ops"),
        ("fusedattn.fusion", "from fusedattn.integrations import transformers"),
        ("fusedattn.integrations.torch_nn", "from fusedattn.integrations.flash_attn import flash_attn_func"),
        ("fusedattn.integrations.flash_attn.bert_padding", "import transformers"),
        ("fusedattn.support", "def f(name):\n    return __import__(name)"),
        ("fusedattn.kernels.rope", "from fusedattn.rope import Rope"),
        ("fusedattn.kernels.rope", "from kernels.primitives import rotate"),
        ("fusedattn.kernels.rope", "import numpy"),
        ("fusedattn.nowhere", "import fusedattn.masks"),
    ],
)
def test_the_check_sees(module: str, source: str) -> None:
    assert violations(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fusedattn.backends.triton.ops", "def f():\n    from fusedattn.backends.triton import launching"),
        ("fusedattn.backends.triton.launching", "from fusedattn.kernels import attention_fwd"),
        ("fusedattn.attention", "from fusedattn import masks\nfrom .rope import Rope\nimport math, torch.nn"),
        ("fusedattn.support", "if TYPE_CHECKING:\n    from fusedattn.kernels.configs import Fwd"),
        ("fusedattn.kernels.rope", "import triton.language as tl\nfrom fusedattn.kernels import primitives"),
        ("fusedattn.cli.demo.command", "def f():\n    import rich.table\n    from fusedattn import fuse"),
    ],
)
def test_the_check_allows(module: str, source: str) -> None:
    assert violations(source, module) == []


WITHOUT_TRITON = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

sys.meta_path.insert(0, NoTriton())
"""


def test_package_works_without_triton() -> None:
    """Every module but the kernels can be imported, and CPU tensors still have a backend."""
    units = sorted(ALLOWED.keys() - ON_DEMAND - {"fusedattn", "__main__"})
    code = WITHOUT_TRITON + (
        "import importlib, torch, fusedattn\n"
        f"for unit in {units!r}:\n"
        "    importlib.import_module(f'fusedattn.{unit}')\n"
        "q = torch.randn(1, 2, 5, 16)\n"
        "out = fusedattn.attention(q, q, q, mask=fusedattn.masks.causal())\n"
        "print(tuple(out.shape), 'triton' in sys.modules)"
    )
    assert output("-c", code) == "(1, 2, 5, 16) False\n"


def test_import_loads_neither_triton_nor_the_kernels_nor_transformers() -> None:
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import fusedattn\n"
        "new = set(sys.modules) - before\n"
        "print(sorted(n for n in new if n.startswith(('triton', 'transformers', 'fusedattn.kernels'))))"
    )
    assert output("-c", code) == "[]\n"


def test_bare_kernels_is_left_to_the_package_of_that_name(tmp_path: Path) -> None:
    """Even if the checkout is first on the path, as for a script run from its root."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    theirs = tmp_path / "kernels" / "__init__.py"
    theirs.parent.mkdir()
    theirs.write_text("")
    path = os.pathsep.join(map(str, (ROOT, tmp_path)))
    assert output("-c", "import kernels; print(kernels.__file__)", PYTHONPATH=path) == f"{theirs}\n"


def test_dir_shows_public_names():
    assert dir(fusedattn) == sorted(fusedattn.__all__)
