"""Kinds of instructions, by the part of a multiprocessor that carries them out."""

from __future__ import annotations

from typing import Literal, get_args

Kind = Literal[
    "products",
    "exponentials",
    "float",
    "integer",
    "moves",
    "shuffles",
    "shared",
    "global",
    "synchronisation",
    "control",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

_FLOATS = ("f16", "bf16", "f32", "f64", "tf32", "f16x2", "bf16x2")

# The beginning of an opcode -> kind; the longest one decides. Others are arithmetic, of floats or integers by their
# types.
_BEGINNINGS: dict[str, Kind] = {
    **dict.fromkeys(("mma", "wgmma.mma_async"), "products"),
    "ex2": "exponentials",
    **dict.fromkeys(("mov", "cvta", "ld.param"), "moves"),
    **dict.fromkeys(("shfl", "redux", "vote", "match", "elect", "activemask"), "shuffles"),
    **dict.fromkeys(("ld.shared", "st.shared", "ldmatrix", "stmatrix"), "shared"),
    **dict.fromkeys(("ld.global", "st.global", "atom.global", "red.global", "cp.async", "cp.reduce"), "global"),
    **dict.fromkeys(("cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all"), "synchronisation"),
    **dict.fromkeys(("cp.async.bulk.commit_group", "cp.async.bulk.wait_group"), "synchronisation"),
    **dict.fromkeys(("bar", "barrier", "mbarrier", "fence", "membar", "wgmma"), "synchronisation"),
    **dict.fromkeys(("bra", "ret", "exit"), "control"),
}


def kind_of(opcode: str) -> Kind:
    """The kind of an instruction."""
    words = opcode.split(".")
    for n in range(len(words), 0, -1):
        kind = _BEGINNINGS.get(".".join(words[:n]))
        if kind is not None:
            return kind
    return "float" if any(word in _FLOATS for word in words) else "integer"
