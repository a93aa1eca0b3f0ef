"""``torch.compile`` of packed sequences and nested tensors: one graph for any lengths, which a graph cannot read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from fusedattn import Rope, attention, attention_varlen, biases, masks
from fusedattn.testing import triton_functions
from tests.conftest import BACKENDS, DEVICE, INTERPRETING
from tests.helpers import quick
from tests.helpers.graphs import in_one_graph

pytestmark = [
    pytest.mark.usefixtures("_seed"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]

backends = pytest.mark.parametrize("backend", BACKENDS)

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


PACKED = {
    "no maximum": lambda x: {"mask": masks.causal(), "return_lse": True},
    "masks by token": lambda x: {"mask": masks.padding(x["valid"]) & masks.documents(x["ids_q"], x["ids_k"])},
    "masks by sequence": lambda x: {
        "mask": masks.window(4, 1) & masks.prefix_lm(x["prefix"]) & masks.boolean(x["scores"] > -1) & x["of_pairs"]
    },
    "blocks, top left": lambda x: {"mask": masks.causal("top_left") & masks.block_sparse(x["blocks"], 16)},
    "tree": lambda x: {"mask": masks.tree(x["tree"])},
    "rope": lambda x: {"rope": x["rope"], "mask": masks.padding(x["valid"])},
    "rope, positions": lambda x: {"rope": x["rope"].at(x["at_q"], x["at_k"])},
    "biases": lambda x: {"bias": biases.tensor(x["scores"]) + biases.relative(x["table"]) + biases.alibi(x["slopes"])},
    "scores": lambda x: {"softcap": 3.0, "sinks": x["slopes"][0], "score_mod": x["of_scores"]},
    "dropout": lambda x: {"dropout_p": 0.3},
}


@pytest.mark.thorough
@backends
@pytest.mark.parametrize("kind", PACKED)
def test_compile_packed_sequences_of_any_lengths(kind, backend):
    """With every option; some sequences have no queries, no keys or fewer queries; some tokens have no sequence."""
    generator = torch.Generator().manual_seed(0)
    of_pairs = triton_functions.mask_function(3, HEADS, generator).to(DEVICE)
    of_scores = triton_functions.score_function(HEADS, generator).to(DEVICE)
    rope = Rope.from_theta(HEAD_DIM, 32, device=DEVICE)
    dtype = torch.float64 if backend == "torch" or INTERPRETING else torch.float32

    def function(q: Tensor, k: Tensor, v: Tensor, stops: list[Tensor], given: dict[str, Tensor]) -> list[Tensor]:
        options = PACKED[kind]({**given, "rope": rope, "of_pairs": of_pairs, "of_scores": of_scores})
        maximum = (None, None) if kind == "no maximum" else (13, 14)
        found = attention_varlen(q, k, v, *stops, *maximum, backend=backend, **options)
        return [found] if isinstance(found, Tensor) else list(found)

    def run(f: Any, lengths_q: tuple[int, ...], lengths_k: tuple[int, ...]) -> list[Tensor]:
        torch.manual_seed(sum(lengths_q))
        total_q, total_k = sum(lengths_q) + 2, sum(lengths_k) + 1
        shapes = ((total_q, HEADS), (total_k, KV_HEADS), (total_k, KV_HEADS))
        x = [torch.randn(*shape, HEAD_DIM, dtype=dtype, device=DEVICE, requires_grad=True) for shape in shapes]
        stops = [torch.tensor([0, *ns], device=DEVICE).cumsum(0).int() for ns in (lengths_q, lengths_k)]
        given = {
            "valid": torch.rand(1, total_k) < 0.8,
            "ids_q": torch.randint(2, (1, total_q)),
            "ids_k": torch.randint(2, (1, total_k)),
            "prefix": torch.randint(4, (3,)),
            "scores": torch.randn(3, HEADS, 13, 14),
            "blocks": torch.rand(3, 1, 1, 1) < 0.8,
            "tree": torch.rand(3, HEADS, 13, 13) < 0.6,
            "table": torch.randn(3, HEADS, 1, 7),
            "slopes": torch.rand(3, HEADS),
            "at_q": torch.randint(32, (1, total_q)),
            "at_k": torch.randint(32, (1, total_k)),
        }
        out = f(*x, stops, {name: y.to(DEVICE) for name, y in given.items()})
        loss = sum(y.nan_to_num(neginf=0.0).square().sum() for y in out)
        return [*(y.detach() for y in out), *torch.autograd.grad(loss, x)]

    compiled = in_one_graph(function, backend="eager")
    for lengths in (((5, 7, 1), (9, 7, 3)), ((10, 0, 11), (13, 4, 0)), ((4, 6, 13), (4, 8, 13))):
        for found, expected in zip(run(compiled, *lengths), run(function, *lengths), strict=True):
            if backend == "triton":
                assert torch.equal(found, expected)
            else:
                torch.testing.assert_close(found, expected)


@quick.only(backend="triton", known=False)
@backends
@pytest.mark.parametrize("known", [True, False])
def test_compile_nested_tensors(backend, known):
    """Whether or not they store their longest length, which a compiled graph could not read."""

    def inputs(lengths: tuple[int, ...]) -> list[Any]:
        torch.manual_seed(0)
        offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
        longest = max(lengths) if known else None
        return [
            torch.nested.nested_tensor_from_jagged(
                torch.randn(sum(lengths), heads, HEAD_DIM, device=DEVICE, requires_grad=True),
                offsets, min_seqlen=None if longest is None else 1, max_seqlen=longest,
            ).transpose(1, 2)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]  # fmt: skip

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=masks.causal(), backend=backend)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    graphs = []
    for lengths in ((5, 7, 3), (17, 2, 4), (9, 1, 30)):
        found, expected = (f(*inputs(lengths)) for f in (compiled, function))
        assert found.shape[0] == 3
        torch.testing.assert_close(found.values(), expected.values())
        graphs.append(counter.frame_count)
    assert graphs[1] == graphs[2], graphs
