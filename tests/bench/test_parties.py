"""The path of a warp through machine code, found by the events of its PTX."""

from __future__ import annotations

import pytest

from bench.codegen.disassembly import sass_instructions
from bench.codegen.parties import actions_of, label_of, path_of
from fusedattn.virtual_gpu.kinds import Kind
from fusedattn.virtual_gpu.ptx import Instruction
from fusedattn.virtual_gpu.trace import Event, What

# A loop that waits for a tile, multiplies, adds a mask in some blocks, and releases the tile. The code of a wait that
# was not ready lies behind the end.
CODE = """
        /*0000*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R4+URZ+0x28958], R3 ;
        /*0010*/              @!P1 BRA 0x120 ;
        /*0020*/                   BAR.SYNC.DEFER_BLOCKING 0x2, 0x80 ;
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R4+URZ+0x28970], R3 ;
        /*0040*/              @!P1 BRA 0x150 ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR40], RZ, !UPT ;
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR44], R24, gsb0 ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0080*/              @!P2 BRA 0xd0 ;
        /*0090*/                   FSEL R24, R24, -INF , P4 ;
        /*00a0*/                   FSEL R25, R25, -INF , P4 ;
        /*00b0*/                   FSEL R26, R26, -INF , P4 ;
        /*00c0*/                   FSEL R27, R27, -INF , P4 ;
        /*00d0*/                   MUFU.EX2 R24, R24 ;
        /*00e0*/              @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R5+URZ+0x28980], RZ ;
        /*00f0*/               @P3 BRA 0x20 ;
        /*0100*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0110*/                   EXIT ;
        /*0120*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R4+URZ+0x28958], R3 ;
        /*0130*/              @!P1 BRA 0x120 ;
        /*0140*/                   BRA 0x20 ;
        /*0150*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R4+URZ+0x28970], R3 ;
        /*0160*/              @!P1 BRA 0x150 ;
        /*0170*/                   BRA 0x50 ;
"""
PLAIN: dict[Kind, int] = {"exponentials": 1}
MASKED: dict[Kind, int] = {"exponentials": 1, "float": 5}


def event(what: What, barrier: int = 0, amount: int = 0, issued: dict[Kind, int] | None = None) -> Event:
    return Event(what, Instruction(what, ()), issued or {}, barrier, amount)


def block(i: int, before_arrival: dict[Kind, int], *, arrives: bool = True) -> list[Event]:
    products = [event("product", amount=64 * 64 * 16)] * 2
    found = [event("barrier", 2, 128), event("wait", 70, i), *products, event("commit"), event("products")]
    return [*found, *([event("arrive", 80, issued=before_arrival)] if arrives else [])]


def addresses(events: list[Event]) -> list[int]:
    code = sass_instructions(CODE)
    return [code[i].address for i, _ in path_of(events, code)]


def test_a_masked_block_and_a_plain_one() -> None:
    events = [event("init", 70, 1), event("wait", 58, 1), *block(1, MASKED), *block(2, PLAIN), event("barrier", 1)]
    loop = [*range(0x20, 0x100, 0x10)]
    plain = [x for x in loop if not 0x90 <= x < 0xD0]
    assert addresses(events) == [0x0, 0x10, *loop, *plain, 0x100]


def test_an_arrival_of_another_warp() -> None:
    """One warp of four arrives; the path of the others leads past the instruction."""
    events = [event("wait", 58, 1), *block(1, {}, arrives=False), *block(2, PLAIN)]
    assert addresses(events).count(0xE0) == 2


def test_events_that_the_code_does_not_have() -> None:
    events = [event("wait", 58, 1), event("barrier", 2, 128), event("barrier", 2, 128)]
    with pytest.raises(ValueError, match=r"^events: number 2, \('barrier', 2\), does not follow .* at 0x20$"):
        addresses(events)


def test_actions() -> None:
    events = [event("wait", 58, 1), *block(3, PLAIN)]
    actions = actions_of(events, sass_instructions(CODE), frozenset({70}))
    shown = [(x.what, x.barrier, x.amount, x.label) for x in actions if x.what or x.label]
    assert shown == [
        ("wait", 58, 1, "others"),
        ("wait", 70, 3, "tile"),
        *[("", 0, 0, "product")] * 2,
        ("", 0, 0, "products"),
        ("arrive", 80, 0, ""),
    ]
    kinds = [x.step.kind for x in actions]
    assert [kinds.count(kind) for kind in ("wgmma", "wait", "mufu")] == [2, 1, 1]
    assert "barrier" not in kinds  # of four warps that are alike


def test_products_are_named_after_what_they_are_assigned_to() -> None:
    source = label_of.__globals__["KERNELS"] / "hopper_fwd.py"
    lines = source.read_text(encoding="utf-8").splitlines()
    at = next(i for i, line in enumerate(lines, 1) if "values = warpgroup_mma(" in line)
    assert label_of(f"hopper_fwd.py:{at}, called at hopper_fwd.py:1") == "values"
    assert label_of("?") == "product"
