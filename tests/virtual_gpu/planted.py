"""Faults to plant in the PTX of this package's kernels: what a line becomes, and the problem that must show it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from fusedattn.kernels.configs import Arch
from fusedattn.testing import Case

# Four full blocks, so that loops of three stages use each buffer again, and two boundary blocks; or no boundary at all.
_RAGGED = Case(batch=1, nheads_q=1, nheads_kv=1, seqlen_q=306, seqlen_k=612, head_dim=64, dtype=torch.float16)
_WHOLE = replace(_RAGGED, seqlen_q=256, seqlen_k=512)
_STEEP = replace(_RAGGED, seqlen_q=70, seqlen_k=150, scale=16.0)  # the maxima of rows matter
_SHORT = replace(_RAGGED, seqlen_k=286, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Problem:
    """Cases that the same kernels solve.

    Attributes:
        arch, cases, options: the architecture, the cases, and options of the call.
        orders: settings of the virtual GPU, with which each case is solved until a fault is noticed.
        only: the kernel in which faults are planted, if it is one; see planting.py.
        by_hopper: by the kernels for Hopper, which must have the fence after an mbarrier.init that others need not have.
    """

    arch: Arch
    cases: tuple[Case, ...]
    options: dict[str, Any] = field(default_factory=dict)
    orders: tuple[dict[str, Any], ...] = ({},)
    only: str = ""
    by_hopper: bool = False


PROBLEMS = {
    "descriptors": Problem("sm_90", (_RAGGED, _WHOLE)),
    "descriptors, steep": Problem("sm_90", (_STEEP,)),
    "wide": Problem("sm_90", (replace(_RAGGED, seqlen_q=70, seqlen_k=150, head_dim=128),)),
    "one pass": Problem("sm_90", (_RAGGED, _WHOLE), {"deterministic": False}),
    "atomics": Problem("sm_90", (replace(_RAGGED, head_dim=62),), {"deterministic": False}),
    "pointers": Problem("sm_90", (replace(_RAGGED, boolean="full"),)),
    "ampere, steep": Problem("sm_80", (replace(_STEEP, dtype=torch.bfloat16),)),
    "ampere": Problem(
        "sm_80",
        (_SHORT, replace(_WHOLE, seqlen_k=256, dtype=torch.bfloat16), replace(_STEEP, dtype=torch.bfloat16)),
    ),
}


class Of(NamedTuple):
    """Lines of PTX that come from lines of Python with this text; of these the nth, or all."""

    text: str
    nth: int | None = None


New = str | Callable[["re.Match[str]"], str]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        what: what is wrong, in a few words.
        problem, kernel: where.
        old, new: a regular expression that finds its lines of PTX, and what replaces it there.
        nth: the line among those that are executed, from 0; None for each of them, one at a time.
        harmless: lines whose change breaks nothing, counted as `nth` or by what they come from, and the reasons.
    """

    what: str
    problem: str
    kernel: str
    old: str
    new: New
    nth: int | None = None
    harmless: tuple[tuple[int | Of, str], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.what}: {self.problem}, {self.kernel}"


BARRIER = r"bar\.sync.*"

FWD, DKDV, DQ = "attention_fwd", "attention_bwd_dkdv", "attention_bwd_dq"
_TMA = (("descriptors", FWD), ("descriptors", DKDV), ("descriptors", DQ), ("one pass", DKDV))
_POINTERS = (("pointers", FWD), ("pointers", DKDV), ("pointers", DQ))
_AMPERE = (("ampere", FWD), ("ampere", DKDV), ("ampere", DQ))
_HOPPER = (*_TMA, *_POINTERS)
_ALL = (*_HOPPER, *_AMPERE)
# Kernels that copy by cp.async.
_COPYING = (*_TMA, ("pointers", FWD), ("pointers", DQ), ("ampere", FWD), ("ampere", DKDV))

# Of these, kernels whose waits are for all copies.
_DRAINED = tuple(place for place in _COPYING if place not in (("descriptors", DKDV), ("ampere", FWD)))


def _one_more(found: re.Match[str]) -> str:
    return f"{found[1]}{int(found[2]) + 1}"


def _descriptor(change: int) -> Callable[[re.Match[str]], str]:
    """Change bits of the constant part of a matrix descriptor."""

    def changed(found: re.Match[str]) -> str:
        value = (int(found[2]) % 2**64) ^ change
        return f"{found[1]}{value - 2**64 if value >= 2**63 else value}"

    return changed


DESCRIPTOR = r"((?:or|add)\.[bs]64\s+%rd\d+, %rd\d+, )(-?\d{19})"
TMA = r"^.*(cp\.async\.bulk\.tensor.*\{%\w+, (%r\d+), .*)$"


def _on(
    places: tuple[tuple[str, str], ...],
    what: str,
    old: str,
    new: New,
    nth: int | None = None,
    harmless: dict[tuple[str, str], tuple[tuple[int, str], ...]] | None = None,
) -> Iterator[Fault]:
    for problem, kernel in places:
        yield Fault(what, problem, kernel, old, new, nth, (harmless or {}).get((problem, kernel), ()))


_NEXT_WAIT = "the next wait comes before every use of its results and operands"
_REST = "what it leaves is zeros beyond the end, and the next wait comes before anything else uses their memory"
_UNUSED = "the registers of its products were not used since the fence before"
_FENCED = "a fence before it has ordered the same writes"
_TWICE = f"{_FENCED}, and no product reads what cp.async copies there"
_BEFORE = "the barrier before it has ordered the same accesses: only work of the accelerator is issued in between"
_LAST = "the last barrier of the loop follows its last reads, and each thread has waited for its own copies"
_LOOP = (
    "the barriers of the loop follow its last wait for a copy, and the next one comes before its memory is used again"
)
_EARLY = "it precedes the wait for the copies, and another fence follows"

# fmt: off
FAULTS = (
    # Order between threads and asynchronous work: each place of it.
    *_on((("descriptors", FWD), ("descriptors", DKDV), ("ampere", DKDV)), "a barrier removed", BARRIER, "", harmless={("descriptors", FWD): ((5, _LOOP),), ("descriptors", DKDV): tuple((n, _BEFORE) for n in (4, 5, 6, 9, 10)), ("ampere", DKDV): ((5, _LAST),)}),
    *_on(_DRAINED, "a commit of copies removed", r"cp\.async\.commit_group.*", ""),
    *_on((("descriptors", DKDV), ("ampere", FWD)), "a commit of copies in a loop removed", r"cp\.async\.commit_group.*", "", -1),
    *_on(_COPYING, "a wait for copies removed", r"cp\.async\.wait_group.*", ""),
    *_on(_COPYING, "a wait for copies leaves one more group", r"(cp\.async\.wait_group\S*\s+)(\d+)", _one_more, harmless={("one pass", DKDV): ((1, _REST),), ("ampere", FWD): ((1, _REST),)}),
    *_on(_HOPPER, "a wait for products removed", r"wgmma\.wait_group.*", "", harmless={("descriptors", FWD): ((1, _NEXT_WAIT),), ("one pass", DKDV): ((3, _NEXT_WAIT), (7, _NEXT_WAIT))}),
    *_on(_HOPPER, "a wait for products leaves one more group", r"(wgmma\.wait_group\S*\s+)(\d+)", _one_more, harmless={("descriptors", FWD): ((1, _NEXT_WAIT),), ("one pass", DKDV): ((3, _NEXT_WAIT), (7, _NEXT_WAIT)), ("pointers", DKDV): ((1, _NEXT_WAIT), (2, _NEXT_WAIT))}),
    *_on(_HOPPER, "a commit of products removed", r"wgmma\.commit_group.*", ""),
    *_on(_HOPPER, "a fence of products removed", r"wgmma\.fence.*", "", harmless={("descriptors", FWD): ((3, _UNUSED),), ("descriptors", DKDV): tuple((n, _UNUSED) for n in (1, 3, 5)), ("descriptors", DQ): tuple((n, _UNUSED) for n in (1, 3, 4)), ("one pass", DKDV): tuple((n, _UNUSED) for n in (1, 3, 4, 6, 9)), ("pointers", DKDV): ((1, _UNUSED),), ("pointers", DQ): ((1, _UNUSED),)}),
    *_on(_HOPPER, "a fence between proxies removed", r"fence\.proxy\.async.*", "", harmless={("descriptors", FWD): ((1, _EARLY),), ("descriptors", DKDV): ((0, _EARLY), (3, _TWICE)), ("descriptors", DQ): ((1, _EARLY),), ("one pass", DKDV): ((0, _EARLY), (4, _TWICE)), ("pointers", FWD): ((0, _EARLY),), ("pointers", DKDV): ((2, _FENCED), (3, _FENCED)), ("pointers", DQ): ((0, _EARLY),)}),
    *_on((("one pass", DKDV),), "a wait for an addition removed", r"cp\.async\.bulk\.wait_group.*", ""),
    *_on((("one pass", DKDV),), "a commit of an addition removed", r"cp\.async\.bulk\.commit_group.*", ""),
    *_on((("one pass", DKDV),), "an addition removed", r"@%p\d+ cp\.reduce.*", ""),
    # The accelerator and its barriers.
    *_on(_TMA, "an mbarrier waits for two arrivals", r"(mbarrier\.init.*), 1;", r"\1, 2;"),
    *_on(_TMA, "an arrival with bytes removed", r"@%p\d+ mbarrier\.arrive\.expect_tx.*", ""),
    *_on(_TMA, "an mbarrier expects more bytes", r"(expect_tx.*, )(\d+);", lambda found: f"{found[1]}{int(found[2]) + 16};"),
    *_on(_TMA, "an mbarrier expects fewer bytes", r"(expect_tx.*, )(\d+);", lambda found: f"{found[1]}{int(found[2]) // 2};"),
    *_on(_TMA, "the parity of a wait is always 0", r"(try_wait.*\], )%r\d+;", r"\g<1>0;"),
    *_on(_TMA, "the parity of a wait is always 1", r"(try_wait.*\], )%r\d+;", r"\g<1>1;"),
    *_on(_TMA, "a tile of the accelerator starts 64 rows later", TMA, r"add.s32 \2, \2, 64;\n\g<0>\nsub.s32 \2, \2, 64;", -1),
    # Matrices in shared memory. Registers begin as NaN, and attention_bwd_dq computes a tile with NaN once more, without
    # it: so it would hide that a product adds to them.
    *_on(_HOPPER, "the swizzle mode of a descriptor", DESCRIPTOR, _descriptor(1 << 63), 0),
    *_on(_HOPPER, "another swizzle mode of a descriptor", DESCRIPTOR, _descriptor(1 << 62), -1),
    *_on(_HOPPER, "the stride of a descriptor", DESCRIPTOR, _descriptor(1 << 37), 0),
    *_on(_HOPPER, "the stride of the last descriptor", DESCRIPTOR, _descriptor(1 << 37), -1),
    *_on(_HOPPER, "the start of a descriptor", DESCRIPTOR, _descriptor(1 << 1), 0),
    *_on((("wide", FWD),), "the leading offset of a descriptor", DESCRIPTOR, _descriptor(1 << 22), 20),
    *_on(tuple(x for x in _HOPPER if x[1] != DQ), "a product adds to what was there before", r"(\}, %rd\d+, %rd\d+, )0(, 1, 1)", r"\g<1>1\2", 0),
    *_on(_HOPPER, "a product forgets the sum so far", r"(\}, %rd\d+, %rd\d+, )%p\d+(, 1, 1)", r"\g<1>0\2", 0),
    *_on(_HOPPER, "the operands of wgmma exchanged", r"\}, (%rd\d+), (%rd\d+),", r"}, \2, \1,", 0),
    *_on(_AMPERE, "a pair of operands of mma exchanged", r"\{ (%r\d+), (%r\d+) \}, \{", r"{ \2, \1 }, {", 0),
    *_on(_AMPERE, "rows of an operand of mma exchanged", r"\}, \{ (%r\d+), (%r\d+), ", r"}, { \2, \1, ", 0),
    *_on(_AMPERE, "ldmatrix without .trans", r"\.trans\.shared", ".shared", 0),
    *_on(_AMPERE, "ldmatrix with .trans", r"x4\.shared", "x4.trans.shared", 0),
    *_on((("descriptors", FWD), ("pointers", FWD), ("ampere", FWD)), "a bit of a swizzle", r"(xor\.b32\s+%r\d+, %r\d+, )16;", r"\g<1>48;", -1),
    *_on(tuple(x for x in _ALL if x[1] != FWD and x[0] != "one pass"), "another bit of a swizzle", r"(xor\.b32\s+%r\d+, %r\d+, )64;", r"\g<1>96;", -1),
    # Addresses and predicates.
    *_on(_COPYING, "no zeros after the end of a tensor", r"(cp\.async\.c[ag].*, (?:0x10|16|4), )%r\d+;", lambda found: found[1] + re.findall(r"0x\w+|\b\d+(?=,)", found[1])[-1] + ";", -1),
    *_on(_ALL, "shared memory written 16 bytes further", r"(st\.shared\.v4\.b32 \[ %r\d+ \+ )0", r"\g<1>16", 0),
    *_on(_ALL, "global memory read one element further", r"(ld\.global\.v4\.b32 .*\[ %rd\d+ \+ )0", r"\g<1>2", 0),
    *_on(_ALL, "global memory read eight elements further", r"(ld\.global\.v4\.b32 .*\[ %rd\d+ \+ )0", r"\g<1>16", 0),
    *_on((("descriptors", FWD), ("pointers", FWD), ("ampere", FWD)), "a statistic written one element further", r"(st\.global\.b32 \[ %rd\d+ \+ )0", r"\g<1>4", 0),
    *_on(_ALL, "a result written eight elements further", r"(st\.global\.v4\.b32 \[ %rd\d+ \+ )0", r"\g<1>16", 0),
    *_on(_ALL, "the predicate of a store negated", r"@(%p\d+ st\.global)", r"@!\1", 0),
    *_on((("descriptors", FWD), ("descriptors", DKDV), ("one pass", DKDV), ("ampere", DKDV)), "the branch of a loop negated", r"@(%p\d+ bra\s+\$L__BB0_\d+)", r"@!\1", -1),
    # Arithmetic.
    *_on((("descriptors", FWD), ("pointers", FWD), ("ampere", FWD)), "a lane distance of a shuffle", r"(shfl\.sync\.bfly.*, )1, 31", r"\g<1>4, 31", 0),
    *_on((("descriptors, steep", FWD), ("ampere, steep", FWD)), "a maximum becomes a minimum", r"max\.f32", "min.f32", 0),
    *_on((("pointers", DQ),), "the sign of an exponent", r"ex2\.approx\.ftz\.f32\s+%r\d+, (%r\d+);", r"neg.f32 \1, \1;\n\g<0>\nneg.f32 \1, \1;", 0),
    *_on(tuple(x for x in _ALL if x != ("pointers", DQ)), "the sign of an exponent", r"ex2\.approx\.ftz\.f32\s+%r\d+, (%r\d+);", r"neg.f32 \1, \1;\n\g<0>\nneg.f32 \1, \1;", -1),
    *_on((("atomics", DKDV),), "an atomic addition becomes a store", r"(?:atom|red)\.global\.gpu\.relaxed\.add(\.v\d)?\.f32 (?:[^\[]*, )?(\[)", r"st.global\1.b32 \2", -1),
)
# fmt: on
