"""Cross-compile every launch configuration, without a GPU, and read what the compiler made of it.

    python -m bench.codegen [--target sm_90] [--kernel attention_fwd] [--features all] [--json]

Registers, spills and shared memory come from ptxas, tensor-core instructions and the length of the main loop from
the disassembly. For AMD targets the compiler's own metadata gives spills and registers.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # interpreted kernels cannot be compiled

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedattn.kernels import attention_bwd, attention_bwd_rows, attention_fwd, configs
from fusedattn.kernels.primitives import accumulator, block_d, is_exact

TARGETS: dict[configs.Arch, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

KERNELS: dict[str, Any] = {
    "attention_fwd": attention_fwd.attention_fwd,
    "attention_bwd_exact_rows": attention_bwd_rows.attention_bwd_exact_rows,
    "attention_bwd_dkdv": attention_bwd.attention_bwd_dkdv,
    "attention_bwd_dq": attention_bwd.attention_bwd_dq,
}

DTYPES: dict[torch.dtype, str] = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

# What a launch may ask of a kernel. The last two need the most registers, without and with a boolean mask.
FEATURES: dict[str, dict[str, bool]] = {
    "plain": {},
    "causal": {"IS_CAUSAL": True},
    "causal+rope": {"IS_CAUSAL": True, "ROPE": True},
    "all but boolean": {"IS_CAUSAL": True, "HAS_PADDING": True, "ROPE": True, "HAS_POSITIONS": True},
    "all": {"IS_CAUSAL": True, "HAS_PADDING": True, "HAS_ALLOWED": True, "ROPE": True, "HAS_POSITIONS": True},
}


@dataclass(frozen=True)
class Compilation:
    """One kernel to compile: for which target, at which config, with which features."""

    kernel: str
    target: configs.Arch
    head_dim: int
    dtype: torch.dtype
    features: str
    config: configs.TileConfig


@dataclass(frozen=True)
class Report:
    """What the compiler made of it. `spill_bytes` counts stores and loads; `hgmma` and `hmma` are instructions."""

    kernel: str
    config: dict[str, int]
    target: str
    head_dim: int
    dtype: str
    features: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    hgmma: int
    hmma: int
    loop_instructions: list[int]
    serialized_wgmma: bool

    @property
    def faults(self) -> list[str]:
        """Why this code is not fit to be launched."""
        faults = []
        if self.spill_bytes and self.target != "gfx942":
            faults.append(f"spills {self.spill_bytes} bytes")
        if self.shared_bytes > configs.SHARED_MEMORY[self.target]:  # type: ignore[index]
            faults.append(f"uses {self.shared_bytes} bytes of shared memory")
        if self.serialized_wgmma:
            faults.append("serialises wgmma")
        # At head_dim 256 the accumulators of a 64-row tile, which HGMMA needs, leave too few registers for the rest.
        if self.target == "sm_90" and self.dtype != "fp32" and self.head_dim <= 128 and not self.hgmma:
            faults.append("has no HGMMA")
        return faults


def compilations(
    targets: list[configs.Arch],
    kernels: list[str],
    head_dims: list[int],
    dtypes: list[torch.dtype],
    features: list[str],
) -> Iterator[Compilation]:
    """Every matrix-product kernel of the config table that the arguments select."""
    for target, dtype, head_dim, name in itertools.product(targets, dtypes, head_dims, features):
        entry = configs.lookup(target, head_dim, dtype, dense_mask=FEATURES[name].get("HAS_ALLOWED", False))
        tiles = {
            "attention_fwd": entry.fwd,
            "attention_bwd_exact_rows": configs.lookup_exact_rows(target, head_dim),
            "attention_bwd_dkdv": entry.dkdv,
            "attention_bwd_dq": entry.dq,
        }
        for kernel in kernels:
            if kernel == "attention_bwd_exact_rows" and not is_exact(dtype):
                continue
            yield Compilation(kernel, target, head_dim, dtype, name, tiles[kernel])


def compile_kernel(what: Compilation) -> Report:
    """Compile one kernel as a launch would, with 16-byte aligned pointers and strides."""
    fn = KERNELS[what.kernel]
    element = DTYPES[what.dtype]
    flags = FEATURES[what.features]
    constants = {name: value for name, value in _constants(what, flags).items() if name in fn.arg_names}
    signature: dict[str, str] = {}
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = _type(name, element)
        aligned = name.endswith("_ptr") or (name.startswith("stride_") and name not in ("stride_aq", "stride_ak"))
        if aligned:
            attrs[(index,)] = [["tt.divisibility", 16]]
    options = {"num_warps": what.config.num_warps, "num_stages": what.config.num_stages}
    source = ASTSource(fn, signature=signature, constexprs=constants, attrs=attrs)
    # Triton prints what ptxas says only when it calls it, so not for a kernel that comes out of the cache.
    log = io.StringIO()
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True
        compiled = triton.compile(source, target=TARGETS[what.target], options=options)
    return _report(what, compiled, log.getvalue())


def _constants(what: Compilation, flags: dict[str, bool]) -> dict[str, Any]:
    """The constants of all kernels."""
    has_rope = bool(flags.get("ROPE"))
    constants: dict[str, Any] = {
        "IS_CAUSAL": bool(flags.get("IS_CAUSAL")),
        "HAS_PADDING": bool(flags.get("HAS_PADDING")),
        "HAS_ALLOWED": bool(flags.get("HAS_ALLOWED")),
        "INTERLEAVED": False,
        "HAS_POSITIONS": bool(flags.get("HAS_POSITIONS")),
        "ROTARY_DIM": what.head_dim if has_rope else 0,
        "HEAD_DIM": what.head_dim,
        "BLOCK_M": what.config.BLOCK_M,
        "BLOCK_N": what.config.BLOCK_N,
        "BLOCK_D": block_d(what.head_dim),
        "ACC": accumulator(what.dtype),
        "PRECISION": "ieee",
        "KEEP_REST": not is_exact(what.dtype),
        "EXACT": is_exact(what.dtype),
        "HAS_DLSE": True,
    }
    # Pointers that a launch would pass as None.
    constants |= {"rest_ptr": None} if is_exact(what.dtype) else {"factor_ptr": None}
    if not constants["HAS_PADDING"]:
        constants |= {"key_range_ptr": None, "valid_ptr": None}
    if not constants["HAS_ALLOWED"]:
        constants |= {"allowed_ptr": None}
    else:
        constants |= {"stride_ak": 1}
    if not has_rope:
        constants |= {"cos_ptr": None, "sin_ptr": None}
    if not constants["HAS_POSITIONS"]:
        constants |= {"positions_ptr": None}
    return constants


def _type(name: str, element: str) -> str:
    if not name.endswith("_ptr"):
        return "fp32" if name in ("scale", "qk_scale") else "i32"
    special = {
        "lse_ptr": "*fp32",
        "row_max_ptr": "*fp32",
        "row_sum_ptr": "*fp32",
        "shift_ptr": "*fp32",
        "rest_ptr": "*i8",
        "factor_ptr": "*fp32",
        "delta_ptr": "*fp32",
        "dlse_ptr": "*fp32",
        "cos_ptr": "*fp32",
        "sin_ptr": "*fp32",
        "positions_ptr": "*i64",
        "key_range_ptr": "*i32",
        "valid_ptr": "*u8",
        "allowed_ptr": "*u8",
    }
    return special.get(name, f"*{element}")


def _report(what: Compilation, compiled: Any, log: str) -> Report:
    if TARGETS[what.target].backend == "hip":
        numbers = _amd_numbers(compiled.asm["amdgcn"])
    else:
        numbers = _nvidia_numbers(compiled.asm["cubin"], log)
    return Report(
        kernel=what.kernel,
        config=asdict(what.config),
        target=what.target,
        head_dim=what.head_dim,
        dtype=DTYPES[what.dtype],
        features=what.features,
        shared_bytes=compiled.metadata.shared,
        **numbers,
    )


def _nvidia_numbers(cubin: bytes, log: str) -> dict[str, Any]:
    """Registers, spills and warnings by ptxas; instructions by the disassembly of the cubin."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        sass = subprocess.run([str(cuobjdump), "-sass", str(path)], capture_output=True, text=True, check=True).stdout
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    if spills is None or registers is None:
        raise RuntimeError(f"ptxas printed no register count:\n{log}")
    instructions = _instructions(sass)
    return {
        "registers": int(registers[1]),
        "spill_bytes": int(spills[1]) + int(spills[2]),
        "hgmma": sum(op.startswith("HGMMA") for _, op, _ in instructions),
        "hmma": sum(op.startswith("HMMA") for _, op, _ in instructions),
        "loop_instructions": _product_loops(instructions),
        "serialized_wgmma": "serializ" in log,
    }


def _amd_numbers(assembly: str) -> dict[str, Any]:
    def number(field: str) -> int:
        found = re.search(rf"\.{field}:\s+(\d+)", assembly)
        return int(found[1]) if found else 0

    return {
        "registers": number("vgpr_count"),
        "spill_bytes": 4 * number("vgpr_spill_count"),
        "hgmma": 0,
        "hmma": assembly.count("v_mfma"),
        "loop_instructions": [],
        "serialized_wgmma": False,
    }


Instruction = tuple[int, str, int | None]  # address, opcode, branch target


def _instructions(sass: str) -> list[Instruction]:
    pattern = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);")
    found = []
    for line in sass.splitlines():
        match = pattern.search(line)
        if match:
            target = re.search(r"0x([0-9a-f]+)\s*$", match[3]) if match[2].startswith("BRA") else None
            found.append((int(match[1], 16), match[2], int(target[1], 16) if target else None))
    return found


def _product_loops(instructions: list[Instruction]) -> list[int]:
    """Lengths of the innermost loops with a matrix product, in program order: backward branches and their bodies."""
    loops = [(target, address) for address, _, target in instructions if target is not None and target < address]
    products = [address for address, op, _ in instructions if op.startswith(("HGMMA", "HMMA", "UTCHMMA"))]
    with_product = [(a, b) for a, b in loops if any(a <= p <= b for p in products)]
    innermost = [x for x in with_product if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in with_product)]
    return [sum(a <= address <= b for address, _, _ in instructions) for a, b in sorted(set(innermost))]


def table(reports: list[Report]) -> Iterator[str]:
    """One aligned line a report."""
    yield f"{'kernel':24} {'target':7} {'D':>3} {'dtype':5} {'features':15} {'tile':>14} regs spill shared mma   loops"
    for r in reports:
        c = r.config
        tile = f"{c['BLOCK_M']}x{c['BLOCK_N']} w{c['num_warps']} s{c['num_stages']}"
        yield (
            f"{r.kernel:24} {r.target:7} {r.head_dim:3} {r.dtype:5} {r.features:15} {tile:>14} {r.registers:4} "
            f"{r.spill_bytes:5} {r.shared_bytes:6} {r.hgmma or r.hmma:4}  {r.loop_instructions} {'; '.join(r.faults)}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Print the reports; exit code 1 where a configuration is not fit to be launched."""
    parser = argparse.ArgumentParser(prog="python -m bench.codegen", description=__doc__.splitlines()[0])
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default: all")
    parser.add_argument("--kernel", action="append", choices=list(KERNELS), help="default: all")
    parser.add_argument("--head-dim", action="append", type=int, help="default: 64, 128, 256")
    parser.add_argument("--dtype", action="append", choices=list(DTYPES.values()), help="default: bf16, fp32")
    parser.add_argument("--features", action="append", choices=list(FEATURES), help="default: the last two")
    parser.add_argument("--json", action="store_true", help="a list of objects instead of a table")
    options = parser.parse_args(arguments)
    names = {name: dtype for dtype, name in DTYPES.items()}
    selected = compilations(
        options.target or list(TARGETS),
        options.kernel or list(KERNELS),
        options.head_dim or [64, 128, 256],
        [names[name] for name in options.dtype or ["bf16", "fp32"]],
        options.features or list(FEATURES)[-2:],
    )
    reports = [compile_kernel(what) for what in selected]
    if options.json:
        print(json.dumps([asdict(report) | {"faults": report.faults} for report in reports], indent=1))
    else:
        print(f"Triton {triton.__version__}")
        print("\n".join(table(reports)))
    return int(any(report.faults for report in reports))


if __name__ == "__main__":
    sys.exit(main())
