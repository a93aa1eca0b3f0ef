"""Asynchronous work that instructions wait for by groups: cp.async, wgmma and bulk copies to global memory.

Work takes effect when it is issued, or not before somebody waits for it: both are allowed, so correct code computes the
same. Until the wait, its sources must not be written and its targets not be touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fusedattn.virtual_gpu.errors import AsyncError
from fusedattn.virtual_gpu.ptx import Instruction
from fusedattn.virtual_gpu.registers import Array, Mask


class Order:
    """When asynchronous work takes effect, and in which order atomic operations and programs run."""

    def __init__(self, asynchronous: Literal["early", "late", "random"] = "late", seed: int | None = None) -> None:
        """With a seed, atomic operations of one instruction, and the schedule of warps, follow it."""
        if asynchronous not in ("early", "late", "random"):
            raise ValueError(f"asynchronous: got {asynchronous!r}, allowed are early, late and random")
        self.asynchronous, self.seed = asynchronous, seed
        self.random = np.random.default_rng(seed or 0)

    def at_once(self) -> bool:
        """Whether work takes effect now."""
        if self.asynchronous == "random":
            return bool(self.random.random() < 0.5)
        return self.asynchronous == "early"

    def turn(self, n: int) -> Array:
        """The order of `n` atomic operations that are issued together."""
        return np.arange(n) if self.seed is None else self.random.permutation(n)


@dataclass
class Work:
    """Work that some parts of the machine issued together: threads, or groups of warps.

    `warp` is a warp of each part. `effect` and `end` take the parts for which the work takes effect, or is waited for.
    """

    warp: Array
    effect: Callable[[Array], None]
    end: Callable[[Array], None]
    x: Instruction
    group: Array | None = None  # of each part
    done: bool = False  # it has taken effect


class Groups:
    """The groups of one kind of work, counted for each warp."""

    def __init__(self, n_warps: int, *, in_order: bool = False) -> None:
        """With `in_order`, work takes effect in the order of its issue."""
        self.in_order = in_order
        self.committed = np.zeros(n_warps, dtype="i8")
        self.work: list[Work] = []

    def add(self, work: Work, order: Order) -> None:
        """Issue work, as part of the group that its warps commit next."""
        work.group = self.committed[work.warp]
        if order.at_once():
            for earlier in [*self.work, work] if self.in_order else [work]:
                if not earlier.done:
                    earlier.effect(np.ones(len(earlier.warp), dtype=bool))
                    earlier.done = True
        self.work.append(work)

    def commit(self, mask: Mask) -> None:
        self.committed[self._warps(mask)] += 1

    def wait(self, pending: int, mask: Mask) -> None:
        """Wait until at most `pending` of the latest committed groups are not complete."""
        waiting = np.zeros(len(self.committed), dtype=bool)
        waiting[self._warps(mask)] = True
        left = []
        for work in self.work:
            assert work.group is not None
            due = waiting[work.warp] & (work.group < self.committed[work.warp] - pending)
            if due.any():
                if not work.done:
                    work.effect(due)
                work.end(due)
            if not due.all():
                left.append(_rest(work, ~due) if due.any() else work)
        self.work = left

    def check_empty(self) -> None:
        """Fail if a program ends while its work is in flight."""
        if self.work:
            x = self.work[0].x
            raise AsyncError(f"{x.opcode}, at {x.place}: nobody waited for it before the program ended")

    @staticmethod
    def _warps(mask: Mask) -> Array | slice:
        return slice(None) if mask is True else np.flatnonzero(mask.reshape(-1, 32).any(axis=1))


def _rest(work: Work, left: Array) -> Work:
    """The work of the parts that are left."""

    def of_all(chosen: Array) -> Array:
        parts = np.zeros(len(left), dtype=bool)
        parts[np.flatnonzero(left)[chosen]] = True
        return parts

    assert work.group is not None
    effect, end = work.effect, work.end
    return Work(
        work.warp[left],
        lambda chosen: effect(of_all(chosen)),
        lambda chosen: end(of_all(chosen)),
        work.x,
        work.group[left],
        work.done,
    )
