"""``info``: versions, devices, and which backend runs a given attention."""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter
from typing import Any, get_args

import torch
from torch import Tensor

from fusedattn import call_checks, not_supported_reasons, support
from fusedattn.cli import environment, machine
from fusedattn.cli.columns import line
from fusedattn.cli.errors import CommandError
from fusedattn.support import Backend, default_backend, device_reasons, interpreting

BACKENDS: tuple[Backend, ...] = ("triton", "torch")
WIDTH = 80
_WRAPPING: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def run(options: argparse.Namespace) -> int:
    """Print the facts; return exit status 0."""
    if options.shape is None and (options.bias or options.softcap is not None or options.dropout):
        raise CommandError("--bias, --softcap and --dropout describe a case: give its --shape too")
    device = machine.choose_device(options.device)
    facts = _facts()
    width = max(len(name) for name, _ in facts) + 1
    for name, text in facts:
        start = line((name, ""), (width, 0)).ljust(width + 1)
        print(textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=" " * (width + 1), **_WRAPPING))
    if options.shape is not None:
        print()
        _print_case(options, device)
    return 0


def _facts() -> list[tuple[str, str]]:
    """Name and text of each line."""
    gpus = _gpus()
    return [
        *machine.versions().items(),
        ("optional", ", ".join(environment.optional_packages())),
        ("GPU", _names(gpus)),
        ("CPU tensors", _backend_for(torch.device("cpu"))),
        *_listed("GPU tensors", _backends_for(gpus), "none: torch sees no GPU"),
        ("kernels", _how_kernels_run(gpus)),
        ("configs", _configs(gpus)),
        *_listed("variables", environment.variables(_has_hopper(gpus)), "no FUSEDATTN_* or TRITON_* is set"),
        *_listed("limits", _limits(), "none known for these versions"),
    ]


def _listed(name: str, texts: list[str], otherwise: str) -> list[tuple[str, str]]:
    """A line for each text, the first with the name."""
    return [(name if i == 0 else "", text) for i, text in enumerate(texts or [otherwise])]


def _gpus() -> list[torch.device]:
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", index) for index in range(n_gpus)]


def _names(gpus: list[torch.device]) -> str:
    counts = Counter(_name(gpu) for gpu in gpus)
    return ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items()) or "none"


def _name(gpu: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(gpu)
    return f"{torch.cuda.get_device_name(gpu)} (compute capability {major}.{minor})"


def _has_hopper(gpus: list[torch.device]) -> bool:
    return torch.version.hip is None and any(torch.cuda.get_device_capability(gpu) == (9, 0) for gpu in gpus)


def _backend_for(device: torch.device) -> str:
    """The default backend for tensors on a device, and the reason."""
    backend = default_backend(device)
    if backend == "torch":
        return "backend torch: kernels for a GPU cannot run on a CPU"
    if reasons := device_reasons(device):
        return f"backend triton, which refuses every call: {'; '.join(reasons)}"
    if interpreting():
        return "backend triton, interpreted: TRITON_INTERPRET is set"
    return "backend triton: the kernels are compiled for a GPU"


def _backends_for(gpus: list[torch.device]) -> list[str]:
    """:func:`_backend_for` each GPU, in one text if all are alike."""
    texts = {_name(gpu): _backend_for(gpu) for gpu in gpus}
    if len(set(texts.values())) <= 1:
        return list(texts.values())[:1]
    return [f"{name.partition(' (compute')[0]}: {text}" for name, text in texts.items()]


def _how_kernels_run(gpus: list[torch.device]) -> str:
    if not support.HAS_TRITON:
        return "none: Triton is not installed"
    if not support.HAS_KERNELS:
        return "none: the folder of kernels is missing"
    if interpreting():
        return "interpreted on the CPU, slowly"
    return "compiled at the first call" if gpus else "not run here; TRITON_INTERPRET=1 would interpret them, slowly"


def _configs(gpus: list[torch.device]) -> str:
    """Whether the table of launch configurations has an entry for each GPU."""
    if not support.HAS_TRITON or not support.HAS_KERNELS:
        return "not loaded: the kernels cannot run"
    from fusedattn.kernels import devices

    if interpreting():
        return "interpreter, in the table"
    found: dict[str, None] = {}  # without repetitions, in order
    for gpu in gpus:
        try:
            found[f"{devices.arch_of(gpu)}, in the table"] = None
        except NotImplementedError as error:
            found[f"no entry in the table ({error})"] = None
    return "; ".join([*found, "nothing is tuned here"]) if found else "no GPU to look up in the table"


def _limits() -> list[str]:
    """What the installed versions cannot do together."""
    if not support.HAS_TRITON:
        return ["no kernels: only backend torch runs"]
    return [f"in Triton's interpreter: {reason}" for reason in support.INTERPRETER_REASONS]


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
    widths = (6, 13, 13, 13, 13, 0)
    print("  " + line(("", "most masks", "mask by pair", "bias", "other scores", "both"), widths))
    found = [configs.lookup(arch, q.shape[-1], q.dtype, work) for work in get_args(configs.Work)]
    for kernel in ("fwd", "dkdv", "dq"):
        tiles = [
            f"{tile.BLOCK_M}x{tile.BLOCK_N}, {tile.num_warps}, {tile.num_stages}"
            for tile in (getattr(config, kernel) for config in found)
        ]
        print("  " + line((kernel, *tiles), widths))
