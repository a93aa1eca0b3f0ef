"""The kernels for Hopper on the timeline: compiled to machine code, traced by the virtual GPU, and replayed.

A :class:`Variant` is a kernel with one of its configs. Problems are small: what a block of a loop takes, and what a
tile takes besides its blocks, follow from replays of few blocks.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from unittest.mock import patch

import torch
import triton

from bench.codegen import launches
from bench.codegen.disassembly import Instruction, branch_tables, sass_instructions
from bench.codegen.hardware import MACHINES
from bench.codegen.launches import Sizes
from bench.codegen.parties import actions_of
from bench.codegen.timeline import Action, Timeline, replay
from fusedattn.kernels import hopper_configs, hopper_fwd
from fusedattn.kernels.problem import programs_of
from fusedattn.virtual_gpu.attention import compiled_attention, launches_for
from fusedattn.virtual_gpu.driver import SHARED_MEMORY
from fusedattn.virtual_gpu.trace import Event

H200 = MACHINES["sm_90"]
TILE = 128  # rows of a program
KERNELS = {"fwd": "hopper_fwd", "dkdv": "hopper_bwd_dkdv", "dq": "hopper_bwd_dq"}
TABLES = {"fwd": hopper_configs.FORWARD, "dkdv": hopper_configs.DKDV, "dq": hopper_configs.DQ}
OWN_TENSORS = {"fwd": 1, "dkdv": 2, "dq": 2}  # of which a program keeps a tile
ITEMSIZE = 2
FEW, MANY = 4, 10  # blocks


@dataclass(frozen=True)
class Variant:
    """A kernel ("fwd", "dkdv", "dq") at a head_dim, causal or not, with changes of its config.

    Attributes:
        config: fields of HopperConfig that differ from the table's.
        options: "turns" and "persistent" of the forward, if they are not the launcher's.
        training: with the results that a backward needs.
    """

    part: str
    head_dim: int
    causal: bool = False
    config: tuple[tuple[str, int], ...] = ()
    options: tuple[tuple[str, bool], ...] = ()
    training: bool = False

    @property
    def block(self) -> int:
        """Rows of a block."""
        return dict(self.config).get("BLOCK", TABLES[self.part][self.head_dim].BLOCK)

    @property
    def row_bytes(self) -> int:
        return self.head_dim * ITEMSIZE

    @property
    def is_persistent(self) -> bool:
        return dict(self.options).get("persistent", self.part == "fwd" and not self.causal)


@dataclass(frozen=True)
class Code:
    """Machine code of a variant, and what is known of it."""

    instructions: tuple[Instruction, ...]
    shared_bytes: int
    spill_bytes: int


@dataclass(frozen=True)
class Program:
    """One replayed program.

    Attributes:
        actions: of each party.
    """

    timeline: Timeline
    actions: dict[str, list[Action]] = field(repr=False)

    @property
    def clocks(self) -> float:
        return max(max(issued) for issued in self.timeline.issued.values())

    @cached_property
    def fetched(self) -> int:
        """Bytes of all tiles."""
        return sum(x.amount for x in self.actions["producer"] if x.what == "copy")


def sizes_of(variant: Variant, tiles: int, blocks: int) -> Sizes:
    """The sizes of a call with so many programs, or tiles of one program, that walk over so many blocks each."""
    own, walked = TILE * tiles, variant.block * blocks
    queries, keys = (walked, own) if variant.part == "dkdv" else (own, walked)
    if variant.causal:
        queries = keys = TILE * tiles
    return Sizes(1, 1, 1, queries, keys)


@contextmanager
def configured(variant: Variant) -> Iterator[None]:
    """Inside, calls run the kernels for Hopper with a variant's config."""
    table = TABLES[variant.part]
    config = type(table[variant.head_dim])(**vars(table[variant.head_dim]) | dict(variant.config))
    options = dict(variant.options)
    constants = hopper_fwd._constants
    with ExitStack() as stack:
        stack.enter_context(patch.dict(table, {variant.head_dim: config}))
        if "turns" in options:
            with_turns = options["turns"]
            stack.enter_context(
                patch.object(hopper_fwd, "_constants", lambda stages, turns: constants(stages, turns=with_turns))
            )
        if "persistent" in options:
            persistent = int(options["persistent"])
            stack.enter_context(
                patch.object(hopper_fwd, "programs_of", lambda _, n, device: programs_of(persistent, n, device))
            )
        yield


def call(variant: Variant, sizes: Sizes) -> None:
    features = frozenset({"hopper", *(["causal"] if variant.causal else [])})
    training = variant.training or variant.part != "fwd"
    launches.call(variant.head_dim, torch.bfloat16, features, training=training, sizes=sizes)


def compiled(variant: Variant) -> Code:
    """The machine code of a variant.

    Raises:
        ValueError: it does not compile, or the call takes another kernel.
    """
    name = KERNELS[variant.part]
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope(), configured(variant):
        triton.knobs.cache.dir = folder
        with launches.compiling("sm_90", [name]) as found:
            call(variant, sizes_of(variant, 4, 4))
        if not found or found[0].compiled is None:
            raise ValueError(f"{variant}: {found[0].error if found else 'the call takes another kernel'}")
        path = Path(folder, "kernel.cubin")
        path.write_bytes(found[0].compiled.asm["cubin"])
        tool = Path(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
        sass, elf = (
            subprocess.run([tool, what, path], capture_output=True, text=True, check=True).stdout
            for what in ("-sass", "-elf")
        )
        [spilled] = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", found[0].log)
        return Code(
            tuple(sass_instructions(sass, branch_tables(elf))),
            found[0].compiled.metadata.shared,
            sum(map(int, spilled)),
        )


def programs(variant: Variant, code: Code, tiles: int, blocks: int) -> list[Program]:
    """Every program of a call, replayed; a persistent one walks over all tiles."""
    with configured(variant), compiled_attention("sm_90", tracing=True, asynchronous="early") as gpu:
        with launches_for("sm_90", multiprocessors=1):
            call(variant, sizes_of(variant, tiles, blocks))
        trace = gpu.counters[KERNELS[variant.part]].trace
    assert trace is not None
    found = []
    for program in sorted({program for program, _ in trace.events}):
        found.append(_replayed({warp: x for (p, warp), x in trace.events.items() if p == program}, code))
    return found


def _replayed(events: dict[int, list[Event]], code: Code) -> Program:
    """The parties of a program are two groups of four warps, the first to multiply, and the warp that copies."""
    every = [x for of_warp in events.values() for x in of_warp]
    tiles = frozenset(x.barrier for x in every if x.what == "copy")
    arrivals = {x.barrier: x.amount for x in every if x.what == "init"}
    groups = [warp for warp in sorted(events)[::4] if any(x.what == "product" for x in events[warp])]
    [producer] = [warp for warp in events if any(x.what == "copy" for x in events[warp])]
    actions, begun = {}, []
    for name, warp in zip(("group 1", "group 2", "producer"), (*groups, producer), strict=True):
        first, arrived = _beginning(events[warp])
        begun += arrived
        actions[name] = actions_of(events[warp][first:], code.instructions, tiles)
    return Program(replay(actions, H200, arrivals, begun), actions)


def _beginning(events: list[Event]) -> tuple[int, list[int]]:
    """The first event of a task, and the mbarriers on which the warp has arrived before, on behalf of all."""
    start = max((i for i, x in enumerate(events[: len(events) // 2]) if x.what == "init"), default=-1) + 1
    first = next(i for i, x in enumerate(events[start:], start) if x.what == "barrier" and x.amount > TILE)
    return first, [x.barrier for x in events[:first] if x.what == "arrive"]


@dataclass(frozen=True)
class Fit:
    """Clocks of a variant, as replays of few blocks show them.

    Attributes:
        block: from one block to the next, with both groups.
        tile: of a tile besides its blocks; of a persistent program, the tile after another.
        busy: the share of the clocks of a long program for which the tensor core is busy.
        waits: the share of the first group's clocks, by what it waits for.
        rows: of a block.
    """

    variant: Variant
    block: float
    tile: float
    busy: float
    waits: dict[str, float]
    rows: int
    persistent: bool
    shared_bytes: int
    spill_bytes: int


def fit(variant: Variant) -> Fit:
    """What a block and a tile take, but at least as long as the L2 cache needs for all multiprocessors."""
    code = compiled(variant)
    if code.shared_bytes > SHARED_MEMORY[90]:
        raise ValueError(f"{code.shared_bytes:,} bytes of shared memory, of {SHARED_MEMORY[90]:,}")
    if variant.causal:
        found = sorted(programs(variant, code, 7, 0), key=lambda program: program.fetched)
        few, many = found[len(found) // 2], found[-1]
        n_few, n_many = (_blocks(variant, program) for program in (few, many))
        block = (many.clocks - few.clocks) / (n_many - n_few)
        tile = many.clocks - n_many * block
    else:
        [few], [many] = (programs(variant, code, 1, n) for n in (FEW, MANY))
        block = (many.clocks - few.clocks) / (MANY - FEW)
        tile = few.clocks - FEW * block
        if variant.is_persistent:
            [two] = programs(variant, code, 2, FEW)
            tile = two.clocks - few.clocks - FEW * block
    block = max(block, 2 * variant.block * variant.row_bytes / H200.l2_bytes)
    start, end = 0.4 * many.clocks, 0.8 * many.clocks
    waits = many.timeline.waiting("group 1", start, end)
    return Fit(
        variant,
        block,
        tile,
        many.timeline.busy(start, end),
        {label: round(clocks / (end - start), 3) for label, clocks in waits.items()},
        variant.block,
        variant.is_persistent,
        code.shared_bytes,
        code.spill_bytes,
    )


def _blocks(variant: Variant, program: Program) -> int:
    """Blocks that a program fetched, besides the tiles that it keeps."""
    own = OWN_TENSORS[variant.part] * TILE
    return (program.fetched // variant.row_bytes - own) // (2 * variant.block)
