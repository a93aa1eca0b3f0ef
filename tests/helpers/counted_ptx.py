"""Run PTX by hand on the virtual GPU, and return what it counts."""

from __future__ import annotations

import numpy as np
import torch

from fusedattn.virtual_gpu import ptx
from fusedattn.virtual_gpu.counters import Counters
from fusedattn.virtual_gpu.global_memory import GlobalMemory
from fusedattn.virtual_gpu.groups import Order
from fusedattn.virtual_gpu.machine import Machine
from fusedattn.virtual_gpu.noise import Noise
from fusedattn.virtual_gpu.products import Products
from fusedattn.virtual_gpu.programs import Programs
from fusedattn.virtual_gpu.tensor_map import TensorMap

KERNEL = """
.visible .entry kernel(
    .param .u64 .ptr .global .align 16 a,
    .param .u64 .ptr .global .align 16 offsets,
    .param .align 64 .b8 map[128]
)
.reqntid {n_threads}
{{
    .reg .pred %p<8>;
    .reg .b16 %h<8>;
    .reg .b32 %r<200>;
    .reg .b64 %rd<16>;
    ld.param.b64 %rd0, [a];
    ld.param.b64 %rd1, [offsets];
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %rd2, %r0, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.cg.b32 %r1, [%rd3];
    mov.b32 %r2, global_smem;
    add.s32 %r3, %r2, %r1;
    cvt.u64.u32 %rd4, %r1;
    add.s64 %rd5, %rd0, %rd4;
    shl.b32 %r4, %r0, 4;
    add.s32 %r5, %r2, %r4;
{filling}
{body}
    ret;
}}
"""
SHARED = 16384


def kernel_of(body: str, n_threads: int = 32, *, fills: bool = False) -> ptx.Kernel:
    """A kernel of this body.

    The body has the thread in %r0, its offset in %r1, global_smem in %r2, the offset from it in %r3 and from a tensor
    at %rd0 in %rd5. With `fills` all of shared memory has been written before, 16 bytes by each thread at a time.
    """
    rows = range(0, SHARED, 16 * n_threads) if fills else ()
    filling = [f"st.shared.v4.b32 [%r5+{row}], {{%r0, %r0, %r0, %r0}};" for row in rows]
    filling += ["bar.sync 0;"] if fills else []
    return ptx.parse(KERNEL.format(n_threads=n_threads, body=body, filling="\n".join(filling)))


def counted(
    kernel: ptx.Kernel,
    offsets: list[int] | None = None,
    *,
    n_programs: int = 1,
    tensor: torch.Tensor | None = None,
    box: tuple[int, int] = (1, 16),
    counting: bool = True,
) -> Counters:
    """The counts of programs of a kernel: each thread has an offset, and the box is one of 8 rows of 32 float32."""
    n_threads = kernel.n_threads
    counters = Counters(counting=counting)
    machine = Machine(kernel, n_programs, SHARED, counters, order=Order(), products=Products(), noise=Noise(False, 0))
    programs = Programs(machine)
    given = torch.zeros(n_threads, dtype=torch.int32) if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    tensor = aligned(4096) if tensor is None else tensor
    tensor_map = TensorMap(tensor.data_ptr(), (8, 32), (128, 4), box, 4, 0, is_float=True)
    values = {"a": tensor.data_ptr(), "offsets": given.data_ptr()}
    memory = GlobalMemory([tensor, given])
    with np.errstate(all="ignore"):
        programs.run(list(range(n_programs)), (n_programs, 1, 1), values, {"map": tensor_map}, memory)
    programs.count()
    return counters


def aligned(n: int) -> torch.Tensor:
    """Zeros of float32 at a multiple of 128 bytes."""
    found = torch.zeros(n + 32)
    return found[-found.data_ptr() // 4 % 32 :][:n]
