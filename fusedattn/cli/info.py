"""``info``: versions, devices, and which backend runs a given attention."""

from __future__ import annotations

import argparse
import os
from typing import get_args

import torch
from torch import Tensor

from fusedattn import call_checks, not_supported_reasons
from fusedattn.cli import machine
from fusedattn.cli.columns import line
from fusedattn.cli.errors import CommandError
from fusedattn.support import Backend, default_backend

BACKENDS: tuple[Backend, ...] = ("triton", "torch")


def run(options: argparse.Namespace) -> int:
    """Print the facts; return exit status 0."""
    if options.shape is None and (options.bias or options.softcap is not None or options.dropout):
        raise CommandError("--bias, --softcap and --dropout describe a case: give its --shape too")
    device = machine.choose_device(options.device)
    facts = [
        *machine.versions().items(),
        ("GPU", _gpus()),
        ("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "not set")),
        ("default backend", f"{default_backend(device)}, for tensors on {device}"),
    ]
    width = max(len(name) for name, _ in facts) + 1
    for fact in facts:
        print(line(fact, (width, 0)))
    if options.shape is not None:
        print()
        _print_case(options, device)
    return 0


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none"
    names = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        names.append(f"{torch.cuda.get_device_name(index)} (compute capability {major}.{minor})")
    return ", ".join(names)


def _print_case(options: argparse.Namespace, device: torch.device) -> None:
    batch, nheads_q, nheads_kv, seqlen_q, seqlen_k, head_dim = options.shape
    dtype: torch.dtype = getattr(torch, options.dtype)
    row = torch.empty(head_dim, dtype=dtype, device=device)
    q = row.expand(batch, nheads_q, seqlen_q, head_dim)  # any shape takes the memory of one row
    k = row.expand(batch, nheads_kv, seqlen_k, head_dim)
    bias = row[0].expand(batch, nheads_q, seqlen_q, seqlen_k) if options.bias else None
    try:
        call_checks.check_qkv(q, k, k)
    except (TypeError, ValueError) as error:
        raise CommandError(str(error)) from None

    extras = [
        *(["a bias"] if options.bias else []),
        *([f"softcap {options.softcap}"] if options.softcap is not None else []),
        *([f"dropout {options.dropout}"] if options.dropout else []),
    ]
    print(f"q {tuple(q.shape)}, k and v {tuple(k.shape)}, {options.dtype} on {device}"
          + "".join(f", {extra}" for extra in extras))  # fmt: skip
    for backend in BACKENDS:
        reasons = not_supported_reasons(
            q, k, k, bias=bias, softcap=options.softcap, dropout_p=options.dropout, backend=backend
        )
        default = ", the default" if backend == default_backend(device) else ""
        print(f"\nbackend {backend}: {'no' if reasons else 'yes'}{default}")
        for reason in reasons:
            print(f"  - {reason}")
        if backend == "triton" and not reasons:
            _print_launches(q)


def _print_launches(q: Tensor) -> None:
    from fusedattn.kernels import configs, devices

    arch = devices.arch_of(q.device)
    print(f"  launches on {arch}: tile of queries x keys, warps, pipeline stages")
    widths = (6, 20, 20, 20, 0)
    print("  " + line(("", "most masks", "a mask by pair", "scores changed", "both"), widths))
    found = [configs.lookup(arch, q.shape[-1], q.dtype, work) for work in get_args(configs.Work)]
    for kernel in ("fwd", "dkdv", "dq"):
        tiles = [
            f"{tile.BLOCK_M} x {tile.BLOCK_N}, {tile.num_warps}, {tile.num_stages}"
            for tile in (getattr(config, kernel) for config in found)
        ]
        print("  " + line((kernel, *tiles), widths))
