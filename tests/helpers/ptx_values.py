"""What a few instructions compute from values of registers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tests.helpers.ptx_kernels import run

_OWN = ".reg .b32 %lane; .reg .b16 %flag; .reg .b64 %at;"
_STORED = {1: torch.int16, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def evaluate(
    code: str,
    results: int | Sequence[int],
    settings: Mapping[str, Any] | None = None,
    **operands: tuple[int, Sequence[int]],
) -> list[Any]:
    """What `code` computes in register %d, or in %d and %e, of so many bits each.

    Operands are (bits, values), one value for each thread, in registers of their names; predicates have one bit.
    """
    widths = dict(zip("de", [results] if isinstance(results, int) else results, strict=False))
    n = max(len(values) for _, values in operands.values())
    n_threads = -(-n // 32) * 32
    tensors = [_tensor(bits, values, n_threads) for bits, values in operands.values()]
    outs = [torch.zeros(n_threads, dtype=_STORED[bits]) for bits in widths.values()]
    registers = widths | {name: bits for name, (bits, _) in operands.items()}
    declared = " ".join(f".reg .{'pred' if bits == 1 else f'b{bits}'} %{name};" for name, bits in registers.items())
    loads = [_load(i, name, bits) for i, (name, (bits, _)) in enumerate(operands.items())]
    stores = [_store(len(tensors) + i, name, bits) for i, (name, bits) in enumerate(widths.items())]
    body = "\n".join(["mov.u32 %lane, %tid.x;", *loads, code, *stores])
    run(body, *tensors, *outs, n_threads=n_threads, registers=f"{declared} {_OWN}", **settings or {})
    columns = [
        [value & (1 << bits) - 1 for value in out[:n].tolist()] for out, bits in zip(outs, widths.values(), strict=True)
    ]
    return columns[0] if isinstance(results, int) else list(zip(*columns, strict=True))


def _tensor(bits: int, values: Sequence[int], n_threads: int) -> torch.Tensor:
    width = max(bits, 16)
    signed = [(value + (1 << width - 1)) % (1 << width) - (1 << width - 1) for value in values]
    return torch.tensor(signed + [0] * (n_threads - len(signed)), dtype=_STORED[bits])


def _at(i: int, bits: int) -> str:
    """The address of element `lane` of tensor `i`."""
    return f"ld.param.b64 %at, [p{i}]; mad.wide.u32 %at, %lane, {max(bits, 16) // 8}, %at;"


def _load(i: int, name: str, bits: int) -> str:
    if bits == 1:
        return f"{_at(i, bits)} ld.global.b16 %flag, [%at]; setp.ne.b16 %{name}, %flag, 0;"
    return f"{_at(i, bits)} ld.global.b{bits} %{name}, [%at];"


def _store(i: int, name: str, bits: int) -> str:
    if bits == 1:
        return f"{_at(i, bits)} selp.b16 %flag, 1, 0, %{name}; st.global.b16 [%at], %flag;"
    return f"{_at(i, bits)} st.global.b{bits} [%at], %{name};"
