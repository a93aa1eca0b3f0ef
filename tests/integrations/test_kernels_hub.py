"""The exported kernel: alone, beside the installed package and a copy of itself, and loaded by the library."""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedattn
from fusedattn import masks
from fusedattn.integrations import kernels_hub
from fusedattn.integrations.kernels_hub import BACKENDS, RECORD, export, main
from fusedattn.testing import triton_functions
from tests.conftest import DEVICE, INTERPRETING

pytestmark = pytest.mark.usefixtures("_seed")

VARIANT = f"build/torch-{'rocm' if DEVICE == 'cuda' and torch.version.hip else DEVICE}"
# The library chooses by the build of torch, whether or not there is a GPU.
BUILT_FOR = "cuda" if torch.version.cuda else "rocm" if torch.version.hip else "cpu"
SOURCE = "torch-ext/fusedattn"

# The loaded kernel must not reach an installed fusedattn, wherever it is.
ALONE = """
import json, sys
from pathlib import Path

class NoFusedattn:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "fusedattn":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoFusedattn())
"""

# Load a kernel as the library does, without the library.
LOAD = """
import importlib.util

def load(folder, name):
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

folder = Path(sys.argv[1])
kernel = load(folder, json.loads((folder / "metadata.json").read_text())["id"])
"""

COMPUTE = """
import torch

given = torch.load(sys.argv[2])
results = {}
for backend in ("triton", "torch"):
    leaves = [x.clone().requires_grad_() for x in given["qkv"]]
    mask = kernel.masks.causal() & kernel.masks.padding(given["valid"])
    out, lse = kernel.attention(*leaves, mask=mask, return_lse=True, backend=backend)
    results[backend] = [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, given["dout"])]
torch.save(results, sys.argv[3])
print(json.dumps({
    "modules": sorted(name for name in sys.modules if name.partition(".")[0] == "fusedattn"),
    "name": kernel.__name__,
    "namespaces": [name for name in vars(torch.ops) if "fusedattn" in name],
}))
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "out"
    export(out)
    return out


def run_python(code: str, *arguments: Path, cwd: Path) -> str:
    """Run ``code`` in a fresh interpreter away from the checkout, and return its last line of output."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture
def load(exported: Path) -> Iterator[Any]:
    """A function that imports this machine's variant under a given name."""
    names: list[str] = []

    def load_as(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, exported / VARIANT / "__init__.py")
        module = importlib.util.module_from_spec(spec)
        names.append(name)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    yield load_as
    for module in [m for m in sys.modules if m.partition(".")[0] in names]:
        del sys.modules[module]


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    shapes = (2, 4, 7, 16), (2, 2, 11, 16), (2, 2, 11, 8)
    valid = torch.ones(2, 11, dtype=torch.bool)
    valid[0, 8:] = False
    valid[1] = False  # its rows see nothing
    qkv = [torch.randn(shape, dtype=dtype) for shape in shapes]
    qkv[2][0, :, 9] = torch.nan  # behind the mask
    dout = torch.randn(2, 4, 7, 8, dtype=dtype)
    return {"qkv": [x.to(DEVICE) for x in qkv], "valid": valid.to(DEVICE), "dout": dout.to(DEVICE)}


def by_formula(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, dout: Tensor) -> list[Tensor]:
    """out, lse, dq, dk and dv of causal attention; the last query is aligned to the last key."""
    v = v.nan_to_num()
    group = q.shape[1] // k.shape[1]
    i, j = torch.arange(7, device=q.device)[:, None], torch.arange(11, device=q.device)
    sees = (j <= i + 4) & valid[:, None, None]
    repeated_k, repeated_v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ repeated_k.mT / 4.0).masked_fill(~sees, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(~sees, 0.0)
    out = weights @ repeated_v
    dweights = dout @ repeated_v.mT
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True)) / 4.0
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dscores.mT @ q, weights.mT @ dout))
    return [out, lse, dscores @ repeated_k, dk, dv]


def computed(package: Any, given: dict[str, Any], backend: str) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in given["qkv"]]
    mask = package.masks.causal() & package.masks.padding(given["valid"])
    out, lse = package.attention(*leaves, mask=mask, return_lse=True, backend=backend)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, given["dout"])]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def computed_alone(load: str, folder: Path, tmp_path: Path) -> tuple[dict[str, Any], dict[str, list[Tensor]], str]:
    """The inputs, the results of each backend in another process, and the name that the kernel has there."""
    given = inputs(torch.float64 if INTERPRETING else torch.float32)
    torch.save(given, tmp_path / "given.pt")
    code, paths = load + COMPUTE, (tmp_path / "given.pt", tmp_path / "results.pt")
    said = json.loads(run_python(code, folder, *paths, cwd=tmp_path))
    assert said["modules"] == []
    assert said["namespaces"] == [said["name"]]
    return given, torch.load(tmp_path / "results.pt"), said["name"]


def test_stands_alone(exported: Path, tmp_path: Path) -> None:
    given, results, _ = computed_alone(ALONE + LOAD, exported / VARIANT, tmp_path)
    expected = by_formula(*(x.double() for x in given["qkv"]), given["valid"], given["dout"].double())
    for backend in ("triton", "torch"):
        if INTERPRETING:
            torch.testing.assert_close(results[backend], expected, rtol=1e-12, atol=1e-12)
        else:
            assert_same(results[backend], computed(fusedattn, given, backend))


def test_beside_the_package_and_itself(load: Any) -> None:
    given = inputs()
    first, second = load("hub_kernel_first"), load("hub_kernel_second")
    for backend in ("triton", "torch"):
        expected = computed(fusedattn, given, backend)
        for package in (first, second, fusedattn, first):  # no copy has replaced the operators of another
            assert_same(computed(package, given, backend), expected)
    assert all(hasattr(torch.ops, name) for name in ("fusedattn", "hub_kernel_first", "hub_kernel_second"))
    one, other = (x.attention.__globals__["backends"].autograd.ops.attention_fwd for x in (first, second))
    assert one is not other


def test_values_of_another_copy_are_refused(load: Any) -> None:
    kernel, q = load("hub_kernel"), inputs()["qkv"][0]
    with pytest.raises(TypeError, match="mask: got Mask"):
        kernel.attention(q, q, q, mask=masks.causal())


def test_functions_of_the_user(load: Any) -> None:
    """They are found by name in a table that each copy has for itself."""
    kernel = load("hub_kernel")
    q, k, _ = inputs()["qkv"]
    theirs = triton_functions.score_function(4, torch.Generator().manual_seed(0)).to(DEVICE)
    ours = kernel.ScoreMod(theirs.function, theirs.derivative, theirs.eager, theirs.args)
    expected = fusedattn.attention(q, k, k, score_mod=theirs, backend="triton")
    assert_same([kernel.attention(q, k, k, score_mod=ours, backend="triton")], [expected])


def test_rope_bias_dropout_and_packed_sequences(load: Any) -> None:
    kernel = load("hub_kernel")
    q, k, _ = inputs()["qkv"]
    stops_q, stops_k = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 0, 6, 7], [0, 1, 10, 11]))
    seed, slopes = torch.tensor([3], device=DEVICE), torch.rand(4, device=DEVICE)

    def results(package: Any, backend: str) -> list[Tensor]:
        options = {"dropout_p": 0.3, "dropout_seed": seed, "backend": backend}
        options |= {"rope": package.Rope.from_theta(16, 32).to(DEVICE), "bias": package.biases.alibi(slopes)}
        packed = [x[0].transpose(0, 1) for x in (q, k, k)]
        return [
            package.attention(q, k, k, **options),
            package.attention_varlen(*packed, stops_q, stops_k, mask=package.masks.causal(), **options),
        ]

    for backend in ("triton", "torch"):
        assert_same(results(kernel, backend), results(fusedattn, backend))


def test_layers(load: Any) -> None:
    kernel = load("hub_kernel")
    q, k, _ = inputs()["qkv"]
    layers = kernel.layers
    assert_same([layers.Attention()(q, k, k)], [fusedattn.attention(q, k, k)])
    assert_same([layers.CausalAttention()(q, k, k)], [fusedattn.attention(q, k, k, mask=masks.causal())])
    visible = torch.rand(1, 1, 7, 11, device=DEVICE) < 0.5
    assert_same([layers.Attention()(q, k, k, visible)], [fusedattn.attention(q, k, k, mask=visible)])
    for layer in (layers.Attention, layers.CausalAttention):  # the library requires this of a layer
        assert layer.__init__ is torch.nn.Module.__init__
        public = {name for name in vars(layer) if not name.startswith("_")}
        assert public == {"has_backward", "can_torch_compile", "forward"}


def test_layers_compile(load: Any) -> None:
    q, k, _ = (x.requires_grad_() for x in inputs()["qkv"])
    layer = load("hub_kernel").layers.CausalAttention()
    outs = [function(q, k, k) for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager"))]
    assert_same(*([out, *torch.autograd.grad(out.sum(), (q, k))] for out in outs))


@pytest.fixture
def library() -> None:
    """Skip if the library is not installed; its import name is also that of the folder of the kernels."""
    try:
        metadata.version("kernels")
    except metadata.PackageNotFoundError:
        pytest.skip("Hugging Face's kernels is not installed")


@pytest.mark.usefixtures("library")
def test_loads_through_the_library(exported: Path, tmp_path: Path) -> None:
    load = f"import kernels\n{ALONE}\nkernel = kernels.get_local_kernel(Path(sys.argv[1]))\n"
    given, results, name = computed_alone(load, exported, tmp_path)
    assert name == json.loads((exported / f"build/torch-{BUILT_FOR}/metadata.json").read_text())["id"]
    for backend, found in results.items():
        torch.testing.assert_close(found, computed(fusedattn, given, backend), rtol=1e-12, atol=1e-12)


KERNELIZE = """
import torch
from torch import nn

@kernels.use_kernel_forward_from_hub("Attention")
class Attention(nn.Module):
    def forward(self, q, k, v, mask=None):
        raise AssertionError("the layer was not replaced")

layer = kernels.LocalLayerRepository(repo_path=Path(sys.argv[1]), layer_name="Attention")
model = nn.Sequential(Attention())
mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
device = "rocm" if torch.version.hip else sys.argv[2]
with kernels.use_kernel_mapping({"Attention": {device: layer}}, inherit_mapping=False):
    kernels.kernelize(model, mode=mode, device=device, use_fallback=False)
q = torch.randn(1, 2, 5, 16, device=sys.argv[2])
expected = nn.functional.scaled_dot_product_attention(q, q, q)
print((model[0](q, q, q) - expected).abs().max().item())
"""


@pytest.mark.usefixtures("library")
def test_kernelizes_through_the_library(exported: Path, tmp_path: Path) -> None:
    said = run_python(f"import kernels\n{ALONE}{KERNELIZE}", exported, Path(DEVICE), cwd=tmp_path)
    assert float(said) < 1e-5


@pytest.mark.usefixtures("library")
def test_the_library_reads_the_files(exported: Path, tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from kernels._rust import Build, Metadata

Build.open(Path(sys.argv[1]))
found = [Metadata.read_from_file(path) for path in sorted(Path(sys.argv[1]).glob("build/*/metadata.json"))]
print([(x.name.python_name, x.version, str(x.backend.backend_type)) for x in found])
"""
    expected = [("fusedattn", kernels_hub.VERSION, backend) for backend in BACKENDS]
    assert ast.literal_eval(run_python(code, exported, cwd=tmp_path)) == expected


def python_files(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.py"))
    assert found
    return found


def test_nothing_but_torch_and_triton_is_imported(exported: Path) -> None:
    allowed = sys.stdlib_module_names | {"torch", "triton"}
    found = []
    for path in python_files(exported):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                package = path.parent
                for _ in range(node.level - 1):
                    package = package.parent
                target = package.joinpath(*(node.module or "").split("."))
                assert not node.level or package.is_relative_to(exported / SOURCE) or "build" in package.parts
                assert not node.level or target.is_dir() or target.with_suffix(".py").is_file() or node.module == "_ops"
                names = [] if node.level else [node.module or ""]
            found += [f"{path}: {name}" for name in names if name.partition(".")[0] not in allowed]
    assert not found, "\n".join(found)


def test_operators_are_named_by_the_prefix(exported: Path) -> None:
    """kernel-builder checks it in the same way: the call itself stands in the place of the name."""
    count = 0
    for path in python_files(exported / SOURCE):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "custom_op":
                assert ast.unparse(node.args[0]).startswith("add_op_namespace_prefix("), path
                count += 1
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert "fusedattn::" not in node.value, path
    sources = (path.read_text() for path in Path(fusedattn.__file__).parent.rglob("*.py"))
    assert count == sum(source.count('custom_op("fusedattn::') for source in sources) > 0


def test_build_toml(exported: Path, tmp_path: Path) -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    build = tomllib.loads((exported / "build.toml").read_text())
    general = {"name": "fusedattn", "version": int(fusedattn.__version__.split(".")[0]), "edition": 5}
    general |= {"license": "bsd-3-clause", "backends": ["cpu", "cuda", "rocm"]}
    assert build == {"general": general, "torch-noarch": {}}
    export(tmp_path / "named", "owner/name")
    named = tomllib.loads((tmp_path / "named" / "build.toml").read_text())
    assert named["general"].pop("hub") == {"repo-id": "owner/name"}
    assert named == build


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_layout(exported: Path) -> None:
    files = {path for path in contents(exported) if "__pycache__" not in path}
    source = {path.removeprefix(f"{SOURCE}/") for path in files if path.startswith(f"{SOURCE}/")}
    assert {"__init__.py", "layers.py", "attention.py", "kernels/attention_fwd.py", "kernels/rope.py"} <= source
    # Not kernel-builder's own _ops.py, and nothing that `import kernels` could mistake for the library.
    assert not source & {"_ops.py", "fusedattn", "kernels/__init__.py"}
    assert not {"testing.py", "fusion.py", "transformer/__init__.py", "cli/__init__.py"} & source
    top = {"build.toml", "flake.nix", "CARD.md", "LICENSE", "build/CARD.md", RECORD}
    built = source | {"_ops.py", "LICENSE", "metadata.json"}
    variants = {f"build/torch-{backend}/{path}" for backend in BACKENDS for path in built}
    assert files == top | {f"{SOURCE}/{path}" for path in source} | variants
    license_text = (Path(fusedattn.__file__).parents[1] / "LICENSE").read_text()
    assert (exported / "LICENSE").read_text() == license_text
    assert all(f"- `{name}`" in (exported / "CARD.md").read_text() for name in ("attention", "Rope", "masks"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_metadata(exported: Path, backend: str) -> None:
    variant = exported / "build" / f"torch-{backend}"
    described = json.loads((variant / "metadata.json").read_text())
    assert re.fullmatch(rf"_fusedattn_{backend}_[0-9a-f]{{12}}", described["id"])
    assert described["backend"] == {"type": backend}
    assert described["digest"]["algorithm"] == "sha256"
    hashes = {
        path: base64.b64encode(hashlib.sha256(content).digest()).decode()
        for path, content in contents(variant).items()
        if path != "metadata.json" and "__pycache__" not in path
    }
    assert described["digest"]["files"] == hashes


def test_public_names(load: Any) -> None:
    kernel = load("hub_kernel")
    core = {"attention", "attention_varlen", "attention_weights", "not_supported_reasons", "masks", "biases", "dropout"}
    core |= {"Rope", "apply_rope", "ScoreMod", "ArgGradient", "__version__"}
    assert core | {"layers"} <= set(kernel.__all__) <= {*fusedattn.__all__, "layers"}
    assert not set(kernel.__all__) & {"fuse", "unfuse", "fusion_report", "Replacement"}
    assert all(hasattr(kernel, name) for name in kernel.__all__)
    assert kernel.__version__ == fusedattn.__version__


def test_is_deterministic(tmp_path: Path) -> None:
    written = export(tmp_path / "a")
    export(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert {*written, tmp_path / "a" / RECORD} == {path for path in (tmp_path / "a").rglob("*") if path.is_file()}


def test_id_follows_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(tmp_path / "a")
    monkeypatch.setattr(kernels_hub, "OPS", kernels_hub.OPS + "\n")
    export(tmp_path / "b")
    ids = [json.loads((tmp_path / x / "build/torch-cpu/metadata.json").read_text())["id"] for x in "ab"]
    assert ids[0] != ids[1]


def test_writes_over_an_earlier_export(tmp_path: Path) -> None:
    export(tmp_path)
    expected = contents(tmp_path)
    # An earlier export had a file that no longer exists, and the folder has become a repository.
    gone = "build/torch-cpu/gone.py"
    (tmp_path / gone).write_bytes(b"")
    with (tmp_path / RECORD).open("a") as record:
        record.write(f"{hashlib.sha256(b'').hexdigest()}  {gone}\n")
    (tmp_path / "CARD.md").unlink()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("theirs")
    export(tmp_path)
    assert contents(tmp_path) == {**expected, ".git/config": b"theirs"}


@pytest.mark.parametrize("case", ["not empty", "a file", "changed", "another's where it writes"])
def test_refuses_files_that_it_did_not_write(case: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    what = "out: got"
    if case == "a file":
        out.write_text("mine")
    elif case == "not empty":
        out.mkdir()
        (out / "mine").write_text("mine")
    else:
        export(out)
        (out / "build.toml").write_text("mine")
        what = r"did not write build\.toml; allowed"
        if case == "another's where it writes":
            lines = (out / RECORD).read_text().splitlines(keepends=True)
            (out / RECORD).write_text("".join(line for line in lines if not line.endswith("  build.toml\n")))
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=what):
        export(out)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("repo_id", ["name", "owner/name/more", 'owner/"name', ""])
def test_refuses_a_wrong_repository(repo_id: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="repo_id: got"):
        export(tmp_path, repo_id)
    assert not contents(tmp_path)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import numpy", "import of numpy"),
        ("def f():\n    from numpy.linalg import norm", "import of numpy.linalg"),
        ("import fusedattn.masks", "import of fusedattn.masks"),
        ("from  fusedattn import masks", "cannot rewrite"),
        ("import importlib\nimportlib.import_module('fusedattn.masks')", "import_module"),
        ("f = torch.ops.fusedattn.attention_fwd", "got fusedattn"),
        ("library.define('fusedattn::f() -> ()')", "operators"),
        ("@custom_op('fusedattn::f')\ndef f(): ...", "cannot rewrite"),  # only double quotes are understood
    ],
)
def test_refuses_to_reach_out(source: str, what: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"^fusedattn\.some.*{what}"):
        kernels_hub._rewritten(source, "fusedattn.some", is_package=False)


@pytest.mark.parametrize(
    ("module", "source", "expected", "imported"),
    [
        ("a", "from fusedattn import masks, rope", "from . import masks, rope", ["masks", "rope"]),
        ("a", "from fusedattn.rope import (  # why\n    Rope\n)", "from .rope import (  # why\n    Rope\n)", ["rope"]),
        ("a", "if x:\n  from fusedattn.kernels import grid", "if x:\n  from .kernels import grid", ["kernels.grid"]),
        ("a", "from .masks import Mask", "from .masks import Mask", ["masks"]),
        ("a", "if TYPE_CHECKING:\n    from others import X\nx = 1", "x = 1", []),
        ("kernels.a", "from fusedattn.kernels import grid", "from . import grid", ["kernels.grid"]),
        ("kernels.a", "from fusedattn.kernels.weights import drop", "from .weights import drop", ["kernels.weights"]),
        ("kernels.a", "from fusedattn.masks import Mask", "from ..masks import Mask", ["masks"]),
        ("kernels.a", "from ..masks import Mask", "from ..masks import Mask", ["masks"]),
        ("a", '"""See fusedattn.masks, fusedattn::f."""', '"""See fusedattn.masks, fusedattn::f."""', []),
    ],
)  # fmt: skip
def test_imports_become_relative(module: str, source: str, expected: str, imported: list[str]) -> None:
    found = kernels_hub._rewritten(source, f"fusedattn.{module}", is_package=False)
    assert found == (expected, [f"fusedattn.{name}" for name in imported])


@pytest.mark.parametrize(("module", "dots"), [("a", "."), ("kernels.a", "..")])
def test_operators_get_the_prefix(module: str, dots: str) -> None:
    source = 'import torch\n\n\n@op("é", "fusedattn::f", x)\ndef f(): ...\n'
    expected = (
        f"import torch\nfrom {dots}_ops import add_op_namespace_prefix\n\n\n"
        '@op("é", add_op_namespace_prefix("f"), x)\ndef f(): ...\n'
    )
    assert kernels_hub._rewritten(source, f"fusedattn.{module}", is_package=False) == (expected, [])


def test_license_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"licenses/LICENSE": "theirs"}
    monkeypatch.setattr(kernels_hub, "PACKAGE", tmp_path / "fusedattn")
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(read_text=texts.get))
    (tmp_path / "LICENSE").write_text("of another package")
    assert kernels_hub._license_text() == "theirs"
    texts.clear()
    with pytest.raises(NotImplementedError, match="LICENSE: not found"):
        kernels_hub._license_text()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "out"), "--repo-id", "owner/name"]) == 0
    assert capsys.readouterr().out.startswith("wrote ")
    assert 'get_kernel("owner/name"' in (tmp_path / "out" / "CARD.md").read_text()
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path)])
    assert "out: got" in capsys.readouterr().err
