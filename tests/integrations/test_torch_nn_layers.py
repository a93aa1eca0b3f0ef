"""The layers of ``torch.nn`` around ``FusedMultiheadAttention``: torch's fast paths, nested tensors, compilation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from fusedattn import attention, fuse, unfuse
from fusedattn.integrations import torch_nn
from fusedattn.integrations.torch_nn import FusedMultiheadAttention
from tests.conftest import DEVICE
from tests.helpers.torch_layers import BATCH, HEADS, SEQLEN_K, SEQLEN_Q, WARNINGS, WIDTH, assert_same, backends, exact

pytestmark = [pytest.mark.usefixtures("_seed"), pytest.mark.filterwarnings(*WARNINGS)]

# The derivative of ReLU has a jump; torch's fused layer supports only ReLU and GELU.
LAYER: dict[str, Any] = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": 24, "dropout": 0.0, "activation": "gelu"}

CAUSAL, PADDED = "causal mask", "padding"
STACKS = ("encoder layer", "encoder", "encoder of nested tensors", "decoder layer", "decoder", "transformer")


def stack(name: str, **options: Any) -> nn.Module:
    options = {**LAYER, **options}
    if name == "transformer":
        return nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **options)
    side, *rest = name.split(" ")
    layer = (nn.TransformerEncoderLayer if side == "encoder" else nn.TransformerDecoderLayer)(**options)
    if rest == ["layer"]:
        return layer
    if side == "decoder":
        return nn.TransformerDecoder(layer, 1)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=bool(rest))


def calls_of(name: str) -> int:
    """The number of attention modules."""
    return {"encoder layer": 1, "transformer": 3}.get(name, 2)


def arguments_of(name: str, dtype: torch.dtype, batch_first: bool, wanted: str) -> tuple[list[Tensor], dict[str, Any]]:
    def draw(length: int) -> Tensor:
        x = torch.randn(BATCH, length, WIDTH, device=DEVICE, dtype=dtype)
        return (x if batch_first else x.transpose(0, 1)).detach().requires_grad_()

    inputs = [draw(SEQLEN_Q)] if name.startswith("encoder") else [draw(SEQLEN_K), draw(SEQLEN_Q)]
    options: dict[str, Any] = {}
    of_first = "src" if len(inputs) == 1 or name == "transformer" else "tgt"
    length = inputs[0].shape[1 if batch_first else 0]
    if CAUSAL in wanted:
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=DEVICE, dtype=dtype)
        options["mask" if name in STACKS[1:3] else f"{of_first}_mask"] = mask
    if PADDED in wanted:
        options[f"{of_first}_key_padding_mask"] = padding = torch.zeros(BATCH, length, dtype=torch.bool, device=DEVICE)
        padding[0, 3:] = True
    return inputs, options


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The queries of calls of the fused forward. Hooks cannot collect them: with any, torch leaves its fast path."""
    seen: list[Tensor] = []
    forward = FusedMultiheadAttention.forward

    def watched(self: FusedMultiheadAttention, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(query)
        return forward(self, query, *args, **kwargs)

    monkeypatch.setattr(FusedMultiheadAttention, "forward", watched)
    return seen


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize(("norm_first", "batch_first"), [(False, True), (True, False)])
@pytest.mark.parametrize("wanted", ["", PADDED, f"{CAUSAL}, {PADDED}"])
def test_layers_of_torch(name, norm_first, batch_first, wanted, queries):
    backend = "triton" if name == "encoder layer" and wanted else "torch"
    reference = stack(name, norm_first=norm_first, batch_first=batch_first).to(DEVICE, exact(backend))
    fused = fuse(copy.deepcopy(reference), backend=backend)
    inputs, options = arguments_of(name, exact(backend), batch_first, wanted)
    for training in (True, False):
        results = []
        for model in (reference.train(training), fused.train(training)):
            queries.clear()
            out = model(*inputs, **options)
            assert len(queries) == (calls_of(name) if model is fused else 0)
            results.append([out, *torch.autograd.grad(out.square().sum(), [*inputs, *model.parameters()])])
        assert_same(results[1], results[0])

    queries.clear()
    with torch.no_grad():
        # Nested tensors give zeros in padding, in both.
        assert_same([fused(*inputs, **options)], [reference(*inputs, **options)])
    assert len(queries) == calls_of(name)


def test_nested_tensors_reach_the_module(queries):
    """Otherwise the test above would prove nothing about nested tensors."""
    model = fuse(stack("encoder of nested tensors", batch_first=True), backend="torch").eval()
    (x,), options = arguments_of("encoder", torch.float32, True, PADDED)
    with torch.no_grad():
        out = model.to(DEVICE)(x, **options)
    assert [query.is_nested for query in queries] == [True, True]
    assert out[0, 3:].eq(0).all()
    assert out[0, :3].ne(0).all()


def test_encoder_of_fused_layers():
    """Built from a fused layer, it does not nest tensors, and torch warns so."""
    layer = fuse(stack("encoder layer", batch_first=True), backend="torch")
    with pytest.warns(UserWarning, match="_qkv_same_embed_dim was not True"):
        model = nn.TransformerEncoder(layer, 2).eval()
    (x,), options = arguments_of("encoder", torch.float32, True, PADDED)
    plain = unfuse(copy.deepcopy(model)).to(DEVICE)
    with torch.no_grad():
        assert_same([model.to(DEVICE)(x, **options)[:, :3]], [plain(x, **options)[:, :3]])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_encoder_calls_the_fused_attention(training, monkeypatch):
    """As torch's own test of a fast path does; options and padding arrive."""
    model = fuse(stack("encoder", batch_first=True), backend="torch", deterministic=False).train(training)
    x = torch.randn(BATCH, SEQLEN_Q, WIDTH)
    padding = torch.arange(SEQLEN_Q) >= torch.tensor([[SEQLEN_Q]] + [[2]] * (BATCH - 1))
    expected = model(x, src_key_padding_mask=padding)
    scripted = torch.jit.script(model)
    found: list[dict[str, Any]] = []

    def watched(*tensors: Tensor, **options: Any) -> Any:
        found.append(options)
        return attention(*tensors, **options)

    monkeypatch.setattr(torch_nn, "attention", watched)
    assert torch.equal(scripted(x, src_key_padding_mask=padding), expected)
    assert [(options["backend"], options["deterministic"]) for options in found] == [("torch", False)] * 2


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_padding_before_a_causal_mask(training, nested):
    """The first queries of a left-padded batch see nothing; torch gives NaN in some modes, and then everywhere."""
    layer = nn.TransformerEncoderLayer(**LAYER, batch_first=True)
    model = fuse(nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested), backend="torch").to(DEVICE)
    (x,), options = arguments_of("encoder", torch.float32, True, CAUSAL)
    padding = torch.tensor([[True, True, False, False, False], [False] * 5], device=DEVICE)
    out = model.train(training)(x, **options, src_key_padding_mask=padding, is_causal=True)
    assert out.isfinite().all()
    alone = model(x[:1, 2:], mask=options["mask"][2:, 2:], is_causal=True)
    torch.testing.assert_close(out[:1, 2:], alone)


@backends
def test_compile(backend):
    """A layer in training; the graph of the first length serves all others."""
    torch._dynamo.reset()
    model = fuse(stack("encoder layer", batch_first=True), backend=backend).to(DEVICE)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    graphs = []
    for length in (5, 9, 12):
        x = torch.randn(BATCH, length, WIDTH, device=DEVICE, requires_grad=True)
        mask = torch.ones(length, length, dtype=torch.bool, device=DEVICE).triu(1)
        padding = torch.arange(length, device=DEVICE) >= torch.tensor([length, 3], device=DEVICE)[:, None]
        options = {"src_mask": mask, "src_key_padding_mask": padding, "is_causal": True}
        results = []
        for function in (compiled, model):
            out = function(x, **options)
            results.append([out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])])
        assert_same(*results)
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1
