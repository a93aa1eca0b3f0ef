"""What calls of ``attention()`` launch, compiled for a GPU that need not be there.

The package is called as a user calls it. Triton sees a driver that knows a target but no device, and each launch
becomes a compilation, specialised by Triton itself from the arguments that the launcher passed: there is no second
list of constants, types and alignments that could differ from the launchers'.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from fusedattn import Rope, attention, masks, support
from fusedattn.kernels import configs

TARGETS: dict[configs.Arch, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

# What a call may ask for. The last two need the most registers, without and with a boolean mask.
FEATURES: dict[str, frozenset[str]] = {
    "plain": frozenset(),
    "causal": frozenset({"causal"}),
    "causal+rope": frozenset({"causal", "rope"}),
    "all but boolean": frozenset({"causal", "padding", "rope", "positions"}),
    "all": frozenset({"causal", "padding", "boolean", "rope", "positions"}),
}

# Triton compiles another kernel for a number that is 1 or a multiple of 16. Those of heads are neither here, nor is the
# row stride of a boolean mask; what depends on head_dim is a multiple of 16.
BATCH, NHEADS_Q, NHEADS_KV, SEQLEN_Q, SEQLEN_K = 2, 8, 2, 256, 264


@dataclass(frozen=True)
class Launch:
    """One compiled launch: values of the kernel's constexpr parameters and launch options, and what came of it.

    `compiled` is Triton's CompiledKernel, or None where `error` says why there is none; `log` is what ptxas printed.
    """

    kernel: str
    constants: dict[str, Any]
    options: dict[str, int]
    compiled: Any
    log: str
    error: str


@dataclass(frozen=True)
class NoDevice:
    """As much of a Triton driver as compiling takes."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        """What kernels are compiled for."""
        return self.target

    def get_current_device(self) -> int:
        """A name under which Triton keeps what it compiled."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Asked for, and not used."""
        return 0


@contextmanager
def compiling(arch: configs.Arch, kernels: Collection[str] = ()) -> Iterator[list[Launch]]:
    """Inside, launches compile for `arch` and are collected, each different one once; all, or those of `kernels`."""
    launches: list[Launch] = []
    seen: dict[JITFunction, list[Any]] = {}
    run = JITFunction.run

    def compile_instead(fn: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        if kernels and fn.__name__ not in kernels:
            return
        parameters = {name: value for name, value in named.items() if name in fn.signature.parameters}
        arguments = fn.signature.bind(*args, **parameters).arguments
        log, compiled, error = io.StringIO(), None, ""
        try:
            with redirect_stdout(log):  # what ptxas says
                compiled = run(fn, *args, grid=grid, warmup=True, **named)
        except Exception as raised:  # one of many, which must not keep the others from being seen
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
        if compiled is not None and compiled in seen.setdefault(fn, []):
            return
        seen.setdefault(fn, []).append(compiled)
        launches.append(
            Launch(
                kernel=fn.__name__,
                constants={p.name: arguments[p.name] for p in fn.params if p.is_constexpr},
                options={name: value for name, value in named.items() if name in ("num_warps", "num_stages")},
                compiled=compiled,
                log=log.getvalue(),
                error=error,
            )
        )

    triton.runtime.driver.set_active(NoDevice(TARGETS[arch]))
    with (
        patch.object(JITFunction, "run", compile_instead),
        patch.object(configs, "arch_of", lambda device: arch),
        patch.object(support, "_triton_reasons", lambda q: []),
        triton.knobs.compilation.scope(),
        triton.knobs.nvidia.scope(),
    ):
        # Of a kernel that comes out of the cache on disk ptxas says nothing.
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        try:
            yield launches
        finally:
            for fn in seen:
                fn.device_caches.clear()  # they would not notice that the target changes


def call(head_dim: int, dtype: torch.dtype, features: frozenset[str], *, training: bool = True) -> None:
    """Call ``attention()`` on the CPU, forward and (training) backward, with every gradient and that of lse."""
    shape_q, shape_k = (BATCH, NHEADS_Q, SEQLEN_Q, head_dim), (BATCH, NHEADS_KV, SEQLEN_K, head_dim)
    q, k, v = (torch.zeros(shape, dtype=dtype, requires_grad=training) for shape in (shape_q, shape_k, shape_k))
    mask = masks.full()
    if "causal" in features:
        mask = mask & masks.causal()
    if "padding" in features:
        mask = mask & masks.padding(torch.ones(BATCH, SEQLEN_K, dtype=torch.bool))
    if "boolean" in features:
        mask = mask & masks.boolean(torch.ones(BATCH, 1, SEQLEN_Q, SEQLEN_K, dtype=torch.bool))
    results = attention(q, k, v, mask=mask, rope=_rope(head_dim, features), return_lse=True, backend="triton")
    if training:
        torch.autograd.grad(results, (q, k, v), [torch.zeros_like(x) for x in results])


def _rope(head_dim: int, features: frozenset[str]) -> Rope | None:
    if "rope" not in features:
        return None
    rotary_dim = head_dim // 2 * 2
    positions: dict[str, Tensor] = {}
    if "positions" in features:
        positions = {"positions_q": torch.arange(SEQLEN_Q), "positions_k": torch.arange(SEQLEN_K)}
    table = torch.zeros(SEQLEN_K, rotary_dim // 2)
    return Rope(table, table, interleaved="interleaved" in features, **positions)
