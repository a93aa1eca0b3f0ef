"""Kernels that multiply e4m3, run on a virtual GPU: one line of JSON for each run."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedattn.virtual_gpu.driver import virtual_gpu
from fusedattn.virtual_gpu.errors import KernelError

LARGEST, NAN, MINUS_ZERO = 448.0, 0x7F, 0x80
N_KEYS = 256
instructions: set[str] = set()  # products and conversions of the kernel that ran


@triton.jit
def product(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, APART: tl.constexpr):
    """c = a b^T of tiles (M, K) and (N, K); sums of APART terms are added up in registers, but for 0."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + n[:, None] * K + k[None, :])
    tl.store(c_ptr + m[:, None] * N + n[None, :], tl.dot(a, tl.trans(b), max_num_imprecise_acc=APART or K))


@triton.jit
def two_products(
    q_ptr, k_ptr, v_ptr, o_ptr, n_keys, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    STAGES: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """o = P v, where P = 448 exp2(q k^T / 4) becomes e4m3. v is (D, n_keys): a product takes keys that lie together."""
    m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    q = tl.load(q_ptr + m[:, None] * D + d[None, :])
    acc = tl.zeros((M, D), tl.float32)
    for start in tl.range(0, n_keys, N, num_stages=STAGES):
        if DESCRIPTORS:
            k = k_ptr.load([start, 0])
            v = v_ptr.load([0, start])
        else:
            k = tl.load(k_ptr + (start + n[:, None]) * D + d[None, :])
            v = tl.load(v_ptr + d[:, None] * n_keys + start + n[None, :])
        p = tl.exp2(tl.dot(q, tl.trans(k)) * 0.25) * 448
        acc = tl.dot(p.to(tl.float8e4nv), tl.trans(v), acc)
    tl.store(o_ptr + m[:, None] * D + d[None, :], acc)


@triton.jit
def widened(x_ptr, y_ptr, N: tl.constexpr, BETWEEN: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(y_ptr + n, tl.load(x_ptr + n).to(BETWEEN).to(tl.float32))


@triton.jit
def narrowed(x_ptr, y_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(y_ptr + n, tl.load(x_ptr + n).to(tl.float8e4nv))


def _codes(*shape: int, largest: int) -> Tensor:
    """Whole numbers, of which all sums below are exact; a few are -0."""
    draw = torch.Generator().manual_seed(sum(shape))
    x = torch.randint(-largest, largest + 1, shape, generator=draw).float().to(torch.float8_e4m3fn)
    x.view(torch.uint8).view(-1)[::37] = MINUS_ZERO
    return x


def _nan(x: Tensor, row: int, column: int) -> None:
    x.view(torch.uint8)[row, column] = NAN | column % 2 * 128


def rounded(x: Tensor) -> Tensor:
    """float32 as e4m3 that is saturated, in float64. For sm_89, Triton before 3.9 cuts it off to float16 first."""
    if "cvt.rz.f16.f32" in instructions:
        x = (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).double()


def run_product(m: int, n: int, k: int, num_warps: int, apart: int = 0) -> bool:
    """Whether the product is exact, and NaN where an operand is."""
    a, b = _codes(m, k, largest=8), _codes(n, k, largest=8)
    _nan(a, 5, 3)
    _nan(b, 9, k - 2)
    c = torch.zeros(m, n)
    product[(1,)](a, b, c, m, n, k, apart, num_warps=num_warps)  # type: ignore[index]
    return torch.equal(c.double().nan_to_num(1e9), (a.double() @ b.double().T).nan_to_num(1e9))


def run_two_products(m: int, n: int, d: int, num_warps: int, stages: int, descriptors: bool) -> bool:
    """Whether the result errs by no more than a rounding of each sum."""
    q, k, v = _codes(m, d, largest=1), _codes(N_KEYS, d, largest=1), _codes(d, N_KEYS, largest=8)
    k[7] = q[3]  # saturates
    _nan(q, 6, 1)
    _nan(v, 11, N_KEYS - 1)
    given: list[Any] = [k, v]
    if descriptors:
        given = [
            TensorDescriptor(x, x.shape, x.stride(), block) for x, block in zip(given, ([n, d], [d, n]), strict=True)
        ]
    o = torch.zeros(m, d)
    two_products[(1,)](q, *given, o, N_KEYS, m, n, d, stages, descriptors, num_warps=num_warps)  # type: ignore[index]
    scores = q.double() @ k.double().T
    p = rounded(torch.exp2(scores * 0.25).float() * 448)
    exact, of_magnitudes = p @ v.double().T, p @ v.double().abs().T
    wrong = (o - exact).abs() > N_KEYS * 2.0**-24 * of_magnitudes
    return torch.equal(o.isnan(), exact.isnan()) and not wrong.any()


def run_widened(between: str) -> bool:
    x = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    y = torch.zeros(256)
    widened[(1,)](x, y, 256, getattr(tl, between))  # type: ignore[index]
    same = y.view(torch.int32) == x.float().view(torch.int32)
    return bool((same | y.isnan() & x.float().isnan()).all())


def run_narrowed() -> bool:
    """Numbers of all sizes, ties and their neighbours."""
    finite = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (finite[1:] + finite[:-1]) / 2
    x = torch.cat([finite, ties, *(torch.nextafter(ties, torch.tensor(s)) for s in (0.0, 1e9)), torch.zeros(7)])
    x[-7:] = torch.tensor([torch.inf, torch.nan, 1e-30, 1e30, 464.0, 465.0, 1e-40])
    x = torch.cat([x, -x])
    x = torch.cat([x, torch.randn(2048 - len(x), generator=torch.Generator().manual_seed(0))])
    y = torch.zeros(2048, dtype=torch.float8_e4m3fn)
    narrowed[(1,)](x, y, 2048)  # type: ignore[index]
    return torch.equal(y.double().nan_to_num(1e9), rounded(x).nan_to_num(1e9)) and torch.equal(
        y.float().signbit()[~x.isnan()], x.signbit()[~x.isnan()]
    )


RUNS = {"product": run_product, "two products": run_two_products, "widened": run_widened, "narrowed": run_narrowed}


def outcome(kind: str, capability: int, sizes: list[Any], removed: str, settings: dict[str, Any]) -> Any:
    """ "right", "wrong", or the error that is raised; and the products and conversions. `removed`: lines of PTX."""

    def rewrite(_: str, text: str) -> str:
        instructions.update(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)\S+|\bcvt\.\S+", text))
        shorter = re.sub(rf"^\s*(?:@\S+\s+)?{removed}.*$", "", text, flags=re.MULTILINE) if removed else text
        if removed and shorter == text:
            raise ValueError(f"{kind} {sizes}: no line has {removed}")
        return shorter

    instructions.clear()
    try:
        with virtual_gpu(capability, **settings) as gpu:
            gpu.rewrite = rewrite
            said = "right" if RUNS[kind](*sizes) else "wrong"
    except KernelError as error:
        said = f"{type(error).__name__}: {error}"
    return said, sorted(instructions)


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(outcome(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
