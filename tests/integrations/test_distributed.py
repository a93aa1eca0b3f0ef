"""Fused models under DDP and FSDP2: two CPU processes, compared with one model on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fusedattn import fuse
from fusedattn.transformer import GPTModel
from tests.conftest import INTERPRETING
from tests.distributed.processes import in_processes

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")

# No GPU is needed: the subject is how processes share parameters, which stay on the CPU here.
BACKENDS = ("torch", *(["triton"] if INTERPRETING else []))
WORLD, BATCH, SEQLEN, VOCAB = 2, 4, 6, 11


class Encoder(nn.Module):
    """torch's own encoder over embedded tokens, with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).layers
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x, hidden = self.embedding(ids), ids == 0
        for block in self.blocks:
            x = block(x, src_key_padding_mask=hidden)
        return self.head(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": partial(GPTModel, VOCAB, 16, 2, 2, max_len=8, positions="rotary"),
    "torch.nn": Encoder,
}


def whole_batch() -> Tensor:
    ids = torch.randint(1, VOCAB, (BATCH, SEQLEN), generator=torch.Generator().manual_seed(1))
    ids[1::2, -2:] = 0
    return ids


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.roll(-1, 1).flatten())


def train_a_step(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Train one step. Returns the loss after the step, and its gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss_of(model, ids).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    optimizer.step()
    with torch.no_grad():
        return loss_of(model, ids), {name: whole(grad) for name, grad in found.items() if grad is not None}


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


CASES = (("gpt", "ddp"), ("gpt", "fsdp2"), ("gpt", "fsdp2, bfloat16"), ("torch.nn", "fsdp2"))


def spread(model: Any, how: str) -> Any:
    """Distribute the model over all processes."""
    if how == "ddp":
        return DistributedDataParallel(model)
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (WORLD,))}
    if "bfloat16" in how:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train_each_case(backend: str) -> list[Any]:
    """(loss, gradients by name) of each case, in this process of two."""
    share = BATCH // WORLD
    mine = whole_batch()[dist.get_rank() * share :][:share]
    found = []
    for name, how in CASES:
        torch.manual_seed(0)
        model = spread(fuse(MODELS[name](), backend=backend), how)
        loss, grads = train_a_step(model, mine)
        dist.all_reduce(loss)
        found.append((loss / WORLD, {key.removeprefix("module."): grad for key, grad in grads.items()}))
    return found


@pytest.fixture(scope="module", params=BACKENDS)
def results(request, tmp_path_factory) -> list[Any]:
    """Results of each process, in the order of the cases; all cases share processes, which are slow to start."""
    return in_processes(WORLD, tmp_path_factory.mktemp("processes"), train_each_case, request.param)


@pytest.mark.parametrize("case", range(len(CASES)), ids=map(" by ".join, CASES))
def test_two_processes_train_as_one_does(results, case):
    """Up to the loss after the step, computed with the parameters that all processes then have."""
    (loss, grads), (other_loss, other_grads) = (of_rank[case] for of_rank in results)
    name, how = CASES[case]
    torch.manual_seed(0)
    expected_loss, expected = train_a_step(MODELS[name](), whole_batch())
    assert torch.equal(loss, other_loss)
    assert set(grads) == set(expected)
    tolerance = {"rtol": 5e-2, "atol": 1e-2} if "bfloat16" in how else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(loss, expected_loss, **tolerance)
    for key, grad in grads.items():
        assert torch.equal(grad, other_grads[key])
        torch.testing.assert_close(grad, expected[key], **tolerance)


def test_the_comparison_sees_a_wrong_gradient():
    """Half of the batch gives it, as if one process trained without the other."""
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    _, expected = train_a_step(copy.deepcopy(model), whole_batch())
    _, half = train_a_step(model, whole_batch()[:2])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(half, expected, rtol=5e-2, atol=1e-2)
