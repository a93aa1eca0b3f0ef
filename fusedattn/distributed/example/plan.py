"""What a process does: from the options, the machine and the number of processes."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fusedattn.cli import machine
from fusedattn.cli.demo import corpus
from fusedattn.cli.demo.corpus import Corpus
from fusedattn.cli.demo.settings import Sizes
from fusedattn.cli.errors import CommandError
from fusedattn.distributed import Context
from fusedattn.distributed.example import processes
from fusedattn.distributed.example.options import MODES, build_parser
from fusedattn.distributed.example.shares import Shares
from fusedattn.distributed.example.sizes import CPU, GPU
from fusedattn.distributed.split import Balance


@dataclass(frozen=True)
class Plan:
    """What is trained, and how; all but the device is the same in every process."""

    sizes: Sizes
    device: torch.device
    backend: Literal["torch", "triton"]
    mode: str
    shares: Shares
    positions: str
    text: Corpus
    seed: int
    compares: bool
    out: Path


def plan_of(arguments: Sequence[str] | None) -> Plan:
    """The plan for these arguments.

    Raises:
        CommandError: the machine, the number of processes or a file does not allow it.
        SystemExit: they ask for help.
    """
    options = build_parser().parse_args(arguments)
    missing = [package for package in ("rich", "matplotlib") if importlib.util.find_spec(package) is None]
    if missing:
        raise CommandError(f"{' and '.join(missing)} not installed: pip install 'fusedattn[demo]'")
    device = processes.device_of(options.device)
    backend: Literal["torch", "triton"] = options.backend or ("triton" if device.type == "cuda" else "torch")
    if backend == "triton":
        machine.choose_how_triton_runs(device)
        if problems := machine.triton_problems(device):
            raise CommandError(machine.no_triton(problems))
    sizes = GPU if device.type == "cuda" else CPU
    sizes = replace(sizes, steps=options.steps or sizes.steps, seqlen=options.seqlen or sizes.seqlen)
    return Plan(
        sizes=sizes,
        device=device,
        backend=backend,
        mode=options.mode,
        shares=shares_of(options.mode, options.balance, sizes, dist.get_world_size()),
        positions=options.positions,
        text=corpus.read_corpus(options.text, sizes.seqlen),
        seed=options.seed,
        compares=device.type == "cpu" if options.compare is None else options.compare,
        out=_picture(options.out),
    )


def context_of(plan: Plan) -> Context:
    """The context of all processes."""
    mode, balance = MODES[plan.mode], plan.shares.balance
    if isinstance(mode, tuple):
        mesh = init_device_mesh(plan.device.type, (plan.shares.n_parts, plan.shares.n_sharing))
        return Context(mesh, mode, balance=balance)
    group = dist.group.WORLD
    assert group is not None
    return Context(group, mode, balance=balance)


def shares_of(mode: str, balance: Balance | None, sizes: Sizes, world: int) -> Shares:
    """Who has which tokens, for ``--mode`` and ``--balance`` and so many processes.

    Raises:
        CommandError: the number of processes does not allow the mode.
    """
    if "ulysses" not in mode:
        return Shares(sizes.seqlen, world, 1, balance or "zigzag")
    if mode == "ulysses":
        if balance == "zigzag":
            raise CommandError("--balance: got zigzag with --mode ulysses, allowed is contiguous")
        if sizes.n_heads % world:
            raise CommandError(
                f"--mode: got ulysses for {world} processes, allowed are numbers that divide the {sizes.n_heads} heads"
            )
        return Shares(sizes.seqlen, 1, world, "contiguous")
    sharing = [n for n in range(2, world) if world % n == 0 and sizes.n_heads % n == 0]
    if not sharing:
        raise CommandError(
            f"--mode: got {mode} for {world} processes, allowed are products of two numbers above 1, one of which "
            f"divides the {sizes.n_heads} heads, such as 4"
        )
    return Shares(sizes.seqlen, world // sharing[-1], sharing[-1], balance or "zigzag")


def _picture(name: str) -> Path:
    path = Path(name)
    if path.suffix.lower() != ".png" or path.is_dir():
        raise CommandError(f"--out: got {name!r}, allowed are names of files that end in .png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--out: cannot make the folder {str(path.parent)!r}: {error.strerror}") from None
    return path
