"""Kernels of the kinds that Triton has miscompiled on Hopper, run on a virtual GPU: one line of JSON for each run."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedattn.virtual_gpu.driver import virtual_gpu
from fusedattn.virtual_gpu.errors import KernelError


@triton.jit
def transposed_result(
    q_ptr, dout_ptr, v_ptr, dk_ptr, n_blocks, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr
):
    """dk += trans(ds) q, where ds is itself a product: the A operand of the second wgmma lies in registers."""
    rows, columns, features = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    of_rows, of_columns = rows[:, None] * D + features[None, :], columns[:, None] * D + features[None, :]
    v = tl.load(v_ptr + of_columns)
    dk = tl.zeros([N, D], tl.float32)
    for i in tl.range(0, n_blocks, num_stages=STAGES):
        dout = tl.load(dout_ptr + i * M * D + of_rows)
        q = tl.load(q_ptr + i * M * D + of_rows)
        ds = tl.dot(dout, tl.trans(v)) * 0.5
        dk += tl.dot(tl.trans(ds.to(q.dtype)), q)
    tl.store(dk_ptr + of_columns, dk)


@triton.jit
def tile_with_two_uses(x_ptr, y_ptr, out_ptr, sum_ptr, n_blocks, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """A product with tiles y that are also summed in registers."""
    offs = tl.arange(0, BLOCK)
    tile = offs[:, None] * BLOCK + offs[None, :]
    out = tl.zeros([BLOCK, BLOCK], tl.float32)
    total = 0.0
    for i in tl.range(0, n_blocks, num_stages=STAGES):
        x = tl.load(x_ptr + i * BLOCK * BLOCK + tile)
        y = tl.load(y_ptr + i * BLOCK * BLOCK + tile)
        total += tl.sum(y.to(tl.float32))
        out += tl.dot(x, y)
    tl.store(out_ptr + tile, out)
    tl.store(sum_ptr, total)


N_BLOCKS = 4


def _whole_numbers(*shape: int) -> Tensor:
    """Numbers from -2 to 2, so that all sums below are exact; bfloat16."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def run_transposed(m: int, n: int, d: int, num_warps: int, stages: int) -> bool:
    """Whether dk is exact."""
    q, dout, v = _whole_numbers(N_BLOCKS, m, d), _whole_numbers(N_BLOCKS, m, d).flip(1), _whole_numbers(n, d)
    dk = torch.full((n, d), torch.nan)
    transposed_result[(1,)](q, dout, v, dk, N_BLOCKS, m, n, d, stages, num_warps=num_warps)  # type: ignore[index]
    ds = (dout.double() @ v.double().T * 0.5).bfloat16().double()
    return torch.equal(dk.double(), (ds.mT @ q.double()).sum(0))


def run_two_uses(block: int, num_warps: int, stages: int) -> bool:
    """Whether the product and the sum are exact."""
    x, y = _whole_numbers(N_BLOCKS, block, block), _whole_numbers(N_BLOCKS, block, block).flip(1)
    out, total = torch.full((block, block), torch.nan), torch.full((1,), torch.nan)
    tile_with_two_uses[(1,)](x, y, out, total, N_BLOCKS, block, stages, num_warps=num_warps)  # type: ignore[index]
    return torch.equal(out.double(), (x.double() @ y.double()).sum(0)) and total.item() == y.double().sum().item()


def outcome(kind: str, sizes: list[int], settings: dict[str, Any]) -> str:
    """ "right", "wrong", or the error that is raised."""
    function = {"transposed": run_transposed, "two uses": run_two_uses}[kind]
    try:
        with virtual_gpu(90, **settings):
            return "right" if function(*sizes) else "wrong"
    except KernelError as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(outcome(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
