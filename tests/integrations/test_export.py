"""``torch.export``, saved and loaded, and packages of AOTInductor."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from fusedattn import Rope, attention, attention_varlen, biases, functions, fuse, masks
from fusedattn.testing import triton_functions
from fusedattn.transformer import GPTModel
from tests.conftest import BACKENDS, DEVICE

pytestmark = [
    pytest.mark.usefixtures("_seed"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]

backends = pytest.mark.parametrize("backend", BACKENDS)

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
LENGTHS = ((2, 5, 7), (3, 9, 9), (5, 2, 33))  # batch, seqlen_q, seqlen_k; exported with the first


class Layer(nn.Module):
    """Attention of q, k, v and a padding mask, with the options that its kind names."""

    def __init__(self, kind: str, backend: str) -> None:
        super().__init__()
        self.kind, self.backend = kind, backend
        self.rope = Rope.from_theta(8, 64, device=DEVICE)
        self.sinks = nn.Parameter(torch.randn(HEADS, device=DEVICE))
        self.t5 = nn.Parameter(torch.randn(8, HEADS, device=DEVICE))
        generator = torch.Generator().manual_seed(0)
        self.score_mod = triton_functions.score_function(HEADS, generator).to(DEVICE)
        self.of_pairs = triton_functions.mask_function(5, HEADS, generator).to(DEVICE)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Any:
        mask = masks.causal() & masks.padding(valid)
        options: dict[str, Any] = {
            "padding": {"mask": mask},
            "rope, lse": {"mask": masks.padding(valid), "rope": self.rope, "return_lse": True},
            "bias, sinks, soft-cap": {"mask": mask & masks.window(9, 1), "bias": biases.t5(self.t5, max_distance=9),
                                      "sinks": self.sinks, "softcap": 2.0},
            "functions": {"mask": self.of_pairs, "score_mod": self.score_mod},
            "dropout": {"mask": mask, "dropout_p": 0.3},
        }[self.kind]  # fmt: skip
        return attention(q, k, v, backend=self.backend, **options)


def inputs_of(batch: int, seqlen_q: int, seqlen_k: int) -> tuple[Tensor, ...]:
    sizes = ((HEADS, seqlen_q), (KV_HEADS, seqlen_k), (KV_HEADS, seqlen_k))
    qkv = (torch.randn(batch, heads, n, HEAD_DIM, device=DEVICE) for heads, n in sizes)
    return *qkv, torch.rand(batch, seqlen_k, device=DEVICE) < 0.8


DYNAMIC = {**{name: {0: Dim.AUTO, 2: Dim.AUTO} for name in "qkv"}, "valid": {0: Dim.AUTO, 1: Dim.AUTO}}


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def assert_same(actual: Callable[..., Any], expected: Callable[..., Any], *inputs: Tensor) -> None:
    """With the same seed for both, in case a function draws dropout."""
    results = []
    for function in (actual, expected):
        torch.manual_seed(7)
        results.append(function(*inputs))
    torch.testing.assert_close(*results)


@backends
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["padding", "rope, lse", "bias, sinks, soft-cap", "functions", "dropout"])
def test_export(kind, strict, backend):
    layer = Layer(kind, backend)
    program = saved_and_loaded(export(layer, inputs_of(*LENGTHS[0]), dynamic_shapes=DYNAMIC, strict=strict))
    for lengths in LENGTHS:
        assert_same(program.module(), layer, *inputs_of(*lengths))


@pytest.mark.parametrize("strict", [False, True])
def test_the_exported_node_is_the_operator(strict):
    """On the Triton backend: one node, and no operation of eager attention."""
    program = export(Layer("padding", "triton"), inputs_of(*LENGTHS[0]), dynamic_shapes=DYNAMIC, strict=strict)
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called.count("fusedattn.attention_fwd.default") == 1
    assert not any("softmax" in name or "matmul" in name for name in called)
    assert_same(program.run_decompositions().module(), Layer("padding", "triton"), *inputs_of(*LENGTHS[1]))


def test_an_exported_program_has_gradients():
    layer = Layer("bias, sinks, soft-cap", "triton")
    program = saved_and_loaded(export(layer, inputs_of(*LENGTHS[0]), dynamic_shapes=DYNAMIC)).module()
    inputs = inputs_of(*LENGTHS[1])
    program(*inputs).square().sum().backward()
    layer(*inputs).square().sum().backward()
    for name, parameter in program.named_parameters():
        torch.testing.assert_close(parameter.grad, getattr(layer, name).grad)


def test_a_program_without_its_function_says_so(monkeypatch):
    """As in a process that never made the mask; no other function may take its place."""
    layer = Layer("functions", "triton")
    program = saved_and_loaded(export(layer, inputs_of(*LENGTHS[0]), dynamic_shapes=DYNAMIC))
    monkeypatch.setattr(functions, "_FUNCTIONS", {})
    with pytest.raises(KeyError, match="make it before a saved program calls it"):
        program.module()(*inputs_of(*LENGTHS[0]))


OTHER_PROCESS = """
import torch
from fusedattn.testing import triton_functions
generator = torch.Generator()
other = triton_functions.score_function(4, generator)  # further functions, made first
print(triton_functions.mask_function(2, 4, generator).function.key)
"""


def test_functions_have_the_same_keys_in_every_process():
    """A saved program calls functions by these keys."""
    mask = triton_functions.mask_function(2, HEADS, torch.Generator())
    found = subprocess.check_output([sys.executable, "-c", OTHER_PROCESS], text=True, timeout=120)
    assert found.strip() == mask.function.key


class Packed(nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, stops: Tensor) -> tuple[Tensor, Tensor]:
        options = {"mask": masks.causal(), "return_lse": True, "backend": self.backend}
        return attention_varlen(q, k, v, stops, stops, 12, 12, **options)


@backends
def test_export_of_packed_sequences(backend):
    def inputs(*lengths: int) -> tuple[Tensor, ...]:
        stops = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
        qkv = (torch.randn(sum(lengths) + 1, h, HEAD_DIM, device=DEVICE) for h in (HEADS, KV_HEADS, KV_HEADS))
        return *qkv, stops

    shapes = {name: {0: Dim.AUTO} for name in ("q", "k", "v", "stops")}
    program = saved_and_loaded(export(Packed(backend), inputs(5, 0, 3), dynamic_shapes=shapes))
    for lengths in ((5, 0, 3), (12, 1, 7, 9, 2)):
        assert_same(program.module(), Packed(backend), *inputs(*lengths))


@backends
def test_export_of_a_fused_model(backend):
    model = fuse(GPTModel(11, 32, 4, 1, max_len=32, positions="rotary", n_kv_heads=2).to(DEVICE), backend=backend)
    ids = torch.randint(11, (2, 5), device=DEVICE)
    program = export(model.eval(), (ids,), dynamic_shapes={"ids": {0: Dim.AUTO, 1: Dim.AUTO}})
    for shape in ((2, 5), (3, 17)):
        assert_same(program.module(), model, torch.randint(11, shape, device=DEVICE))


@backends
@pytest.mark.skipif(DEVICE == "cpu" and shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_a_package_of_aot_inductor(backend, tmp_path, monkeypatch):
    """Compiled in advance for changing lengths; on the Triton backend, C++ calls the op."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layer = Layer("padding", backend)
    with torch.no_grad():
        program = export(layer, inputs_of(*LENGTHS[0]), dynamic_shapes=DYNAMIC)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        package = torch._inductor.aoti_load_package(path)
        for lengths in LENGTHS:
            assert_same(package, layer, *inputs_of(*lengths))
