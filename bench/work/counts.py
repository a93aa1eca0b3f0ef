"""The operations and bytes of attention, which turn times into rates."""

from __future__ import annotations

from typing import Literal

from fusedattn.testing.cases import Case

Direction = Literal["forward", "backward", "both"]

# Matrix products per pair of query and key, times 2 for multiply and add: q k^T and p v; backward those of dv, dp, dq,
# dk and q k^T once more.
FLOPS_PER_PAIR: dict[Direction, int] = {"forward": 4, "backward": 10, "both": 14}


def pairs(case: Case) -> float:
    """The number of pairs of query and key per head: half of all if causal; with a window, those in it.

    Padding is not deducted, so that a kernel that skips it shows a higher rate.
    """
    if case.window is not None:
        return float(_pairs_in_window(case))
    return case.seqlen_q * case.seqlen_k * (0.5 if case.causal else 1.0)


def _pairs_in_window(case: Case) -> int:
    left, right = case.window or (None, None)
    if case.causal:
        right = 0 if right is None else min(right, 0)
    shift = 0 if case.causal == "top_left" else case.seqlen_k - case.seqlen_q
    total = 0
    for i in range(shift, shift + case.seqlen_q):
        first = 0 if left is None else max(0, i - left)
        last = case.seqlen_k - 1 if right is None else min(case.seqlen_k - 1, i + right)
        total += max(0, last - first + 1)
    return total


def flops(case: Case, direction: Direction) -> float:
    """The usual count, ``4 B H N M D`` forward, 10 backward, 14 both, with :func:`pairs` for ``N M``."""
    return FLOPS_PER_PAIR[direction] * case.batch * case.nheads_q * pairs(case) * case.head_dim


def bytes_read_and_written(case: Case) -> int:
    """The least bytes that a forward must move: q, k and v read once and out written once."""
    q_and_out = 2 * case.nheads_q * case.seqlen_q
    k_and_v = 2 * case.nheads_kv * case.seqlen_k
    return case.batch * (q_and_out + k_and_v) * case.head_dim * case.dtype.itemsize
