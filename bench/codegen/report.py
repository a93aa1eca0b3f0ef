"""A report on one compiled kernel, and its faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bench.codegen.in_flight import Touch
from bench.codegen.loops import Loop
from bench.codegen.register_budget import Plan, Stretch, faults_of
from bench.codegen.undefined import Undefined
from fusedattn.kernels.devices import SHARED_MEMORY


@dataclass(frozen=True)
class Report:
    """One compilation. head_dim is 0 and dtype "any" for kernels that depend on neither; `config` is the tile, warps
    and stages; the figures are those of :class:`bench.codegen.machine_code.MachineCode`, and 0 with an `error`.
    `ones` names a call with sizes of 1: no baseline has its figures, and it need not be fast. `is_known` says that the
    kernel was not compiled, because the baseline has its `fingerprint`. `plan` has the registers of groups of warps, in
    a kernel that gives them different tasks: one in Gluon."""

    kernel: str
    target: str
    head_dim: int
    dtype: str
    features: str
    config: dict[str, int] = field(hash=False)
    has_products: bool
    fingerprint: str = ""
    is_known: bool = False
    error: str = ""
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    ctas_per_sm: int = 0
    hgmma: int = 0
    tensor_core: int = 0
    loop_instructions: tuple[int, ...] = ()
    loop_spills: tuple[int, ...] = ()
    serialized_wgmma: bool = False
    loops: tuple[Loop, ...] = ()
    touches: tuple[Touch, ...] = ()
    undefined: tuple[Undefined, ...] = ()
    stretches: tuple[Stretch, ...] = ()
    plan: Plan | None = None
    transposed_products: int = 0
    rearranged_products: int = 0
    ones: str = ""

    @property
    def key(self) -> str:
        """The name of this compilation, whatever its config."""
        return f"{self.kernel} {self.target} {self.dtype} {self.head_dim} {self.named_features}"

    @property
    def named_features(self) -> str:
        """The features, prefixed with the name in `ones`, if any."""
        return f"{self.ones}:{self.features}" if self.ones else self.features

    @property
    def walks_over(self) -> str:
        """The side of the tile that a program of an attention kernel moves along."""
        return "BLOCK_M" if self.kernel.endswith("bwd_dkdv") else "BLOCK_N"

    @property
    def boundary(self) -> int:
        """The size of a boundary block along that side."""
        return self.config.get("BOUNDARY", self.config.get(self.walks_over, 0))

    @property
    def tile(self) -> str:
        """The config in short: queries x keys, warps, stages; the size of boundary blocks and the style, if special."""
        blocks = [self.config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK") if name in self.config]
        text = f"{'x'.join(map(str, blocks))} w{self.config['num_warps']} s{self.config['num_stages']}"
        boundary = f" b{self.boundary}" if self.boundary != self.config.get(self.walks_over, 0) else ""
        style = next((f" {name}" for name in ("pipelined", "descriptors") if self.config.get(name)), "")
        return text + boundary + style + (" persistent" if self.config.get("persistent") else "")

    @property
    def faults(self) -> list[str]:
        """Reasons against launching this code; spills of float32 on AMD are only shown, and are none."""
        faults = self.certain_faults
        if self.touches:
            ordered = sum(touch.is_ordered for touch in self.touches)
            faults.append(
                f"touches registers of wgmma in flight: {len(self.touches)} instructions, "
                f"{ordered or 'none'} of them ordered by a scoreboard"
            )
        return faults

    @property
    def certain_faults(self) -> list[str]:
        """The faults without registers of products in flight, which a GPU may show to be harmless."""
        if self.error:
            return [f"does not compile: {self.error}"]
        faults = [] if self.ones else list(self._slow)
        if self.shared_bytes > SHARED_MEMORY[self.target]:  # type: ignore[index]
            faults.append(f"uses {self.shared_bytes} bytes of shared memory")
        if self.plan is not None:
            faults += faults_of(self.stretches, self.registers, self.plan)
        if self.undefined:
            faults.append(f"reads uniform registers that may not have been written: {len(self.undefined)} instructions")
        if self.target == "sm_90" and self.transposed_products:
            faults.append(f"transposes {self.transposed_products} products, which Triton before 3.7.1 miscompiles")
        return faults

    @property
    def _slow(self) -> Iterator[str]:
        """Faults that make the code slow, but not wrong."""
        if self.spill_bytes and self.target != "gfx942":
            in_loops = "instructions in its loops: " + ", ".join(map(str, self.loop_spills))
            where = in_loops if any(self.loop_spills) else "outside of loops"
            yield f"spills {self.spill_bytes} bytes, {where}"
        if self.serialized_wgmma:
            yield "serialises wgmma"
        if self.rearranged_products and self.kernel == "attention_fwd":  # others store, or add up, their tiles
            yield f"rearranges products between threads in its loops: {self.rearranged_products}"
        idle = [(loop.idle_exponentials, loop.counts["mufu"]) for loop in self.loops if self.plan is not None]
        if any(2 * alone > n for alone, n in idle):
            shown = ", ".join(f"{alone} of {n}" for alone, n in idle)
            yield f"computes exponentials while none of its products runs, in its loops: {shown}"
        if self.has_products and self.dtype != "fp32":
            # At head_dim 256 the accumulators of a 64-row tile, which HGMMA needs, leave too few registers. Few queries
            # do not fill one.
            is_few = self.kernel == "attention_fwd" and self.config.get("BLOCK_M", 64) < 64
            needs_hgmma = self.target == "sm_90" and self.dtype != "tf32" and self.head_dim <= 128 and not is_few
            needs_hgmma |= self.plan is not None
            if needs_hgmma and not self.hgmma:
                yield "has no HGMMA"
            elif not self.tensor_core:
                yield "has no tensor-core instruction"

    def as_object(self) -> dict[str, Any]:
        """The report for JSON, without the steps of the loops."""
        return asdict(replace(self, loops=())) | {"faults": self.faults}


HEADER = (
    f"{'kernel':24} {'target':6} {'dtype':5} {'D':>3} {'features':42} {'tile':>14} regs spill shared CTAs  mma  "
    "instructions of each loop"
)


def lines(reports: list[Report]) -> Iterator[str]:
    """A table with one aligned line per report."""
    yield HEADER
    for r in reports:
        yield (
            f"{r.kernel:24} {r.target:6} {r.dtype:5} {r.head_dim:3} {r.named_features:42} {r.tile:>14} {r.registers:4} "
            f"{r.spill_bytes:5} {r.shared_bytes:6} {r.ctas_per_sm:4} {r.tensor_core:4}  "
            f"{' '.join(map(str, r.loop_instructions))}"
        )
