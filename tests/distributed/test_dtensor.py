"""Attention on DTensors, beside one process: batches and heads split, tensor parallel and sharded models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fusedattn import QKNorm, attention, fuse, masks, testing
from fusedattn.testing import Case, Inputs
from fusedattn.transformer import GPTModel
from tests.conftest import BACKENDS, assert_results_accurate, inputs_of
from tests.distributed.processes import NEEDS_PROCESSES, in_processes
from tests.helpers import quick

pytestmark = NEEDS_PROCESSES

BASE = Case(batch=2, nheads_q=4, nheads_kv=2, seqlen_q=22, seqlen_k=37, head_dim=16)

# The fields of BASE that each problem changes.
PROBLEMS: dict[str, dict[str, Any]] = {
    "padding, and an empty batch": {"padding": "uneven", "empty_batch": True, "causal": "bottom_right"},
    "documents": {"documents": "packed", "causal": "bottom_right"},
    "prefix": {"prefix": True, "causal": "bottom_right"},
    "boolean": {"boolean": "full"},
    "blocks": {"layout": 16},
    "mask function": {"mask_function": True},
    "positions, interleaved": {"rope": "interleaved", "rope_positions": True, "rope_tables": "per_batch"},
    "norm": {"qk_norm": "per_head", "rope": "half", "causal": "bottom_right"},
    "norm with shared weights": {"qk_norm": "shared"},
    "bias": {"bias": "full", "causal": "bottom_right"},
    "a bias of each batch": {"bias": "per_batch"},
    "a bias of each row": {"bias": "per_query"},
    "alibi and relative": {"alibi": "per_batch", "relative": "per_query"},
    "sinks and soft-cap": {"sinks": True, "softcap": 0.7, "window": (9, 0)},
    "score function": {"score_mod": True},
    "dropout": {"dropout_p": 0.3, "causal": "bottom_right"},
    "three heads of a group": {"nheads_q": 12, "nheads_kv": 4, "causal": "bottom_right"},
    "a KV head for all": {"nheads_kv": 1},
    "bfloat16": {"dtype": torch.bfloat16, "causal": "bottom_right", "rope": "half"},
}

# By the kernels, which the interpreter takes long to run; tests/public/test_shard.py has the others.
INTERPRETED = ("documents", "bias", "dropout")

# Placements of q, and of k and v, on each dimension of a mesh.
Split = tuple[list[Placement], list[Placement]]
SPLITS: dict[str, Split] = {
    "heads": ([Shard(1)], [Shard(1)]),
    "heads of q": ([Shard(1)], [Replicate()]),
    "batches": ([Shard(0)], [Shard(0)]),
    "batches of k": ([Replicate()], [Shard(0)]),
    "nothing": ([Replicate()], [Replicate()]),
    "partial sums": ([Partial()], [Shard(1)]),
}
SPLITS_OF_A_GRID: dict[str, Split] = {
    "batches and heads": ([Shard(0), Shard(1)], [Shard(0), Shard(1)]),
    "heads by heads": ([Shard(1), Shard(1)], [Shard(1), Replicate()]),
}


def case_of(problem: str) -> Case:
    return replace(BASE, name=problem, **PROBLEMS[problem])


def mesh_of(split: str) -> DeviceMesh:
    world = dist.get_world_size()
    return init_device_mesh("cpu", (2, world // 2) if split in SPLITS_OF_A_GRID else (world,))


def distributed(x: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> Tensor:
    """A DTensor of a tensor that all processes have; of partial sums, each has a part."""
    if any(placement.is_partial() for placement in placements):
        rest = x.detach() * (1 - 1 / mesh.size())  # the sum over all processes is x, and the gradient that of x
        return DTensor.from_local(x - rest, mesh, placements)
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim).redistribute(placements=placements)


def solve(inputs: Inputs, split: str, backend: str) -> dict[str, Tensor]:
    """out, lse and the gradients of all leaves, as plain tensors."""
    mesh = mesh_of(split)
    of_q, of_kv = {**SPLITS, **SPLITS_OF_A_GRID}[split]
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.leaves.items()}
    own = inputs.with_leaves(leaves)
    q, k, v = (distributed(x, mesh, p) for x, p in ((own.q, of_q), (own.k, of_kv), (own.v, of_kv)))
    out, lse = (x.full_tensor() for x in attention(q, k, v, **own.options, return_lse=True, backend=backend))
    into_lse = own.dlse.to(lse.dtype).masked_fill(lse == -torch.inf, 0.0)
    found = torch.autograd.grad((out, lse), list(leaves.values()), (own.dout, into_lse), allow_unused=True)
    results = {"out": out.detach(), "lse": lse.detach()}
    for (name, leaf), grad in zip(leaves.items(), found, strict=True):
        results[f"d{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return results


def solve_all(backend: str, splits: list[str], problems: list[str]) -> dict[tuple[str, str], dict[str, Tensor]]:
    """In each process: the results of every problem with every split."""
    return {(split, name): solve(inputs_of(case_of(name)), split, backend) for split in splits for name in problems}


Solved = Callable[..., Any]


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> Solved:
    """The results by number of processes and backend: all problems of one run share processes, which start slowly."""
    directory = tmp_path_factory.mktemp("processes")

    @functools.cache
    def results(world: int, backend: str) -> list[dict[tuple[str, str], dict[str, Tensor]]]:
        splits = [*SPLITS, *(SPLITS_OF_A_GRID if world == 4 else ())]
        problems = list(PROBLEMS) if backend == "torch" else list(INTERPRETED)
        return in_processes(world, directory / f"{world}{backend}", solve_all, backend, splits, problems)

    return results


RUNS = [
    (world, backend, split, problem)
    for world in (2, 4)
    for backend in BACKENDS
    for split in (*SPLITS, *(SPLITS_OF_A_GRID if world == 4 else ()))
    for problem in (PROBLEMS if backend == "torch" else INTERPRETED)
]


@quick.only(world=2, backend="torch")
@pytest.mark.parametrize(("world", "backend", "split", "problem"), RUNS)
def test_dtensors_keep_the_error_budget(solved: Solved, world: int, backend: str, split: str, problem: str) -> None:
    inputs = inputs_of(case_of(problem))
    golden, baseline = testing.golden(inputs), testing.baseline(inputs)
    for found in solved(world, backend):  # every process has the whole gradient
        assert_results_accurate(found[split, problem], inputs, golden, baseline, problem)


VOCABULARY, D_MODEL, N_HEADS, LENGTH = 31, 32, 4, 24


def model_of() -> GPTModel:
    """A model with at least a KV head for each of two processes, or of four."""
    torch.manual_seed(0)
    n_kv_heads = min(max(2, dist.get_world_size()), N_HEADS)
    return GPTModel(VOCABULARY, D_MODEL, N_HEADS, 2, max_len=LENGTH, positions="rotary", n_kv_heads=n_kv_heads)


def tokens() -> tuple[Tensor, Tensor]:
    """(ids, targets), ``(4, LENGTH)`` each."""
    ids = torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    return ids, ids.roll(-1, 1)


def parallel(model: nn.Module, mesh: DeviceMesh, *, local: bool) -> None:
    """Tensor parallel attention: heads split; `local`: activations between layers are plain tensors."""
    for block in model.blocks:  # type: ignore[union-attr]
        plan = {f"self_attention.{name}_proj": ColwiseParallel(use_local_output=local) for name in "qkv"}
        parallelize_module(block, mesh, {**plan, "self_attention.out_proj": RowwiseParallel()})


def trained(model: nn.Module, share: slice = slice(None), forward: Any = None) -> dict[str, Tensor]:
    """The loss on a share of the batches, and the gradients of all parameters, as plain tensors."""
    ids, targets = tokens()
    logits = (model if forward is None else forward)(ids[share])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets[share].flatten())
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    plain = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items() if x is not None}
    return {"loss": loss.detach(), **plain}


def differences(found: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference to the reference model on one process, for the loss and each gradient."""
    expected = trained(model_of())
    return {name: (found[name] - x).abs().max().item() for name, x in expected.items() if name != "loss"}


def train_parallel(local: bool, compiled: bool) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fuse(model_of(), backend="torch")
    parallel(model, mesh, local=local)
    return differences(trained(model, forward=torch.compile(model, backend="aot_eager") if compiled else None))


def train_sharded() -> dict[str, float]:
    """FSDP2 over one dimension of a mesh and tensor parallel over the other."""
    n = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (n, 2), mesh_dim_names=("data", "model"))
    model = fuse(model_of(), backend="torch")
    parallel(model, mesh["model"], local=True)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    size = tokens()[0].shape[0] // n
    rank = mesh["data"].get_local_rank()
    return differences(trained(model, slice(rank * size, (rank + 1) * size)))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_model_with_split_heads_trains_the_same(tmp_path: Path, world: int, local: bool, compiled: bool) -> None:
    for found in in_processes(world, tmp_path, train_parallel, local, compiled):
        assert max(found.values()) < 1e-6, found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_a_model_with_split_heads_and_parameters_trains_the_same(tmp_path: Path, world: int) -> None:
    for found in in_processes(world, tmp_path, train_sharded):
        assert max(found.values()) < 1e-6, found


def refusals() -> dict[str, str]:
    """The errors of calls that no placement allows, and the numbers of collectives of one that does."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0))

    def split(placement: Placement, x: Tensor = whole) -> DTensor:
        return distribute_tensor(x, mesh, [placement])

    blocks = torch.zeros(1, 4, 1, 1, dtype=torch.int64)
    by_heads, odd = split(Shard(1)), split(Replicate(), whole[:, :3])
    calls: dict[str, tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]] = {
        "sequence": ((split(Shard(2)), by_heads, by_heads), {}),
        "head_dim": ((by_heads, split(Shard(3)), by_heads), {}),
        "plain": ((by_heads, whole, whole), {}),
        "heads": ((split(Shard(1), whole[:, :3]), odd, odd), {}),
        "groups": ((by_heads, odd, odd), {}),
        "mask of a part": ((by_heads, by_heads, by_heads), {"mask": masks.padding(torch.ones(1, 6, dtype=torch.bool))}),
        "bias of a part": ((by_heads, by_heads, by_heads), {"bias": torch.zeros(2, 2, 6, 6)}),
        "norm across heads": ((by_heads, by_heads, by_heads), {"qk_norm": QKNorm(across_heads=True)}),
        "lists of blocks": ((by_heads, by_heads, by_heads), {"mask": masks.selected_blocks(blocks, 6)}),
    }
    found = {}
    for name, (qkv, options) in calls.items():
        try:
            attention(*qkv, **options)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    with CommDebugMode() as mode:
        attention(by_heads, by_heads, by_heads, mask=masks.causal())
    found["collectives"] = str(mode.get_total_counts())
    return found


def test_what_cannot_be_split_is_refused_and_nothing_is_copied(tmp_path: Path) -> None:
    expected = {
        "sequence": ("NotImplementedError: q: got the placement S(2)", "fusedattn.distributed.Context"),
        "head_dim": ("NotImplementedError: k: got the placement S(3)", "Shard(1) for heads"),
        "plain": ("TypeError: k: got Tensor beside a DTensor", ""),
        "heads": ("NotImplementedError: q: got 3 heads, split among 2 processes", "multiples of 2"),
        "groups": ("ValueError: ", "nheads"),
        "mask of a part": ("ValueError: mask: padding(valid)", "(2, 6)"),
        "bias of a part": ("ValueError: bias", "(2, 4, 6, 6)"),
        "norm across heads": ("NotImplementedError: qk_norm: got across_heads=True", "allowed is False"),
        "lists of blocks": ("NotImplementedError: attention cannot run on DTensors: mask: got selected", "without"),
        "collectives": ("0", ""),
    }
    for found in in_processes(2, tmp_path, refusals):
        for name, (start, part) in expected.items():
            assert found[name].startswith(start), (name, found.get(name))
            assert part in found[name], (name, found[name])
