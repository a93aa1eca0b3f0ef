"""torch's own context parallelism, whose ring calls the kernels as torch's flash attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.attention
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

from fusedattn.integrations import torch_flash
from tests.distributed.processes import NEEDS_PROCESSES, in_processes
from tests.helpers import quick

pytestmark = [
    *NEEDS_PROCESSES,
    pytest.mark.skipif(not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="no registration"),
]


def inputs() -> list[Tensor]:
    """q, k, v and the gradient of out, ``(1, 2, 32, 16)``."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 32, 16, generator=generator) for _ in range(4)]


def solve() -> list[Tensor]:
    """out, dq, dk and dv of causal attention, whole."""
    torch_flash.register(dispatch_key="CPU")
    torch.nn.attention.activate_flash_attention_impl("fusedattn")  # type: ignore[arg-type]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    own = inputs()
    with context_parallel(mesh, buffers=own, buffer_seq_dims=[2] * 4):  # each process has its tokens of `own` here
        q, k, v, dout = (DTensor.from_local(x.clone(), mesh, [Shard(2)]) for x in own)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        # On a GPU F.scaled_dot_product_attention calls this operator; on a CPU it has one of its own.
        out = torch.ops.aten._scaled_dot_product_flash_attention(*leaves, 0.0, True)[0]
        found = [out, *torch.autograd.grad(out, leaves, dout)]
        local = [x.to_local().detach() for x in found]
        return list(context_parallel_unshard(mesh, local, [2] * 4))


@quick.only(world=2)
@pytest.mark.parametrize("world", [2, 4])
def test_a_ring_of_torch_has_the_results_of_one_process(tmp_path: Path, world: int) -> None:
    *qkv, dout = (x.double() for x in inputs())
    leaves = [x.requires_grad_() for x in qkv]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    expected = [out, *torch.autograd.grad(out, leaves, dout)]
    for found in in_processes(world, tmp_path, solve):
        for actual, right in zip(found, expected, strict=True):
            assert (actual - right).abs().max() < 2e-6
