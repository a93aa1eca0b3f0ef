"""What the virtual GPU counts of PTX by hand."""

from __future__ import annotations

import torch

from fusedattn.virtual_gpu.counters import Counters
from fusedattn.virtual_gpu.ptx import Kernel
from fusedattn.virtual_gpu.tensor_map import TensorMap
from tests.helpers import ptx_programs
from tests.helpers.ptx_kernels import launch

SHARED = 16384
_BEFORE = (
    "mul.wide.u32 %rd1, %t, 4; add.s64 %rd1, %rd1, %offsets; ld.global.cg.b32 %r1, [%rd1]; add.s32 %r3, %s, %r1;"
    "cvt.u64.u32 %rd5, %r1; add.s64 %rd5, %rd5, %x; mad.lo.s32 %r5, %t, 16, %s;"
)


def kernel_of(body: str, n_threads: int = 32, *, fills: bool = False) -> Kernel:
    """A kernel of this body, which finds an offset of its thread in %r1.

    The address at this offset from the begin of shared memory is in %r3, from that of a tensor %x in %rd5; 16 bytes of
    shared memory for each thread begin at %r5. With `fills` all of it has been written before.
    """
    rows = range(0, SHARED, 16 * n_threads) if fills else ()
    filling = [f"st.shared.v4.b32 [%r5+{row}], {{%t, %t, %t, %t}};" for row in rows] + ["bar.sync 0;"] * fills
    return ptx_programs.kernel_of(" ".join([_BEFORE, *filling, body]), ["x", "offsets"], ["map"], n_threads=n_threads)


def counted(
    kernel: Kernel,
    offsets: list[int] | None = None,
    *,
    n_programs: int = 1,
    tensor: torch.Tensor | None = None,
    box: tuple[int, int] = (1, 16),
    counting: bool = True,
) -> Counters:
    """The counts of programs of a kernel: each thread has an offset, and the box is one of 8 rows of 32 float32."""
    given = torch.tensor(offsets or [0] * kernel.n_threads, dtype=torch.int32)
    tensor = aligned(4096) if tensor is None else tensor
    tensor_map = TensorMap(tensor.data_ptr(), (8, 32), (128, 4), box, 4, 0, is_float=True)
    tensors = {"out": given, "x": tensor, "offsets": given}
    grid = (n_programs, 1, 1)
    return launch(kernel, tensors, {"map": tensor_map}, grid=grid, shared_bytes=SHARED, counting=counting).counters


def aligned(n: int) -> torch.Tensor:
    """Zeros of float32 at a multiple of 128 bytes."""
    found = torch.zeros(n + 32)
    return found[-found.data_ptr() // 4 % 32 :][:n]
