"""Asynchronous work that instructions wait for by groups: cp.async, wgmma and bulk copies to global memory.

Work takes effect when it is issued, or not before somebody waits for it: both are allowed, so correct code computes the
same. Until the wait, its sources must not be written and its targets not be touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from fusedattn.virtual_gpu.errors import AsyncError
from fusedattn.virtual_gpu.ptx import Instruction
from fusedattn.virtual_gpu.registers import Array, Mask


class Order:
    """When asynchronous work takes effect, and in which order atomic operations, warps and programs run."""

    def __init__(
        self,
        asynchronous: Literal["early", "late", "random"] = "late",
        seed: int | None = None,
        schedule: Literal["lockstep", "random"] = "lockstep",
    ) -> None:
        """With a seed, atomic operations of one instruction follow it, and whatever is random."""
        self.asynchronous, self.seed, self.schedule = asynchronous, seed, schedule
        self.random = np.random.default_rng(seed or 0)

    def at_once(self, n: int) -> Array:
        """Whether each of `n` parts of some work takes effect now."""
        if self.asynchronous == "random":
            return self.random.random(n) < 0.5
        return np.full(n, self.asynchronous == "early")

    def turn(self, n: int) -> Array:
        """The order of `n` atomic operations that are issued together."""
        return np.arange(n) if self.seed is None else self.random.permutation(n)


@dataclass
class Work:
    """Work that some members of the machine issued together: threads, or groups of four warps.

    `effect` and `end` take those of the members for which the work takes effect, or is waited for. `addresses` are
    those of `size` bytes of global memory with which each member works, ``(members, n)``;
    those that are negative are none.
    """

    member: Array
    effect: Callable[[Array], None]
    end: Callable[[Array], None]
    x: Instruction
    addresses: Array = field(default_factory=lambda: np.zeros((0, 0), dtype="i8"))
    size: int = 0
    group: Array = field(default_factory=lambda: np.zeros(0, dtype="i8"))  # of each member
    done: Array = field(default_factory=lambda: np.zeros(0, dtype=bool))  # by each member: it has taken effect

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """The first and the last address; of none, such that nothing lies between."""
        exist = self.addresses[self.addresses >= 0]
        return (int(exist.min()), int(exist.max())) if exist.size else (0, -self.size)

    def take_effect(self, chosen: Array) -> None:
        """Let the work of some members take effect, if it did not yet."""
        chosen = chosen & ~self.done
        if chosen.any():
            self.effect(chosen)
            self.done |= chosen


class Groups:
    """The groups of one kind of work, counted for each member: a number of threads that issue work together."""

    def __init__(self, n_lanes: int, n_threads: int = 1, *, in_order: bool = False) -> None:
        """With `in_order`, the work of a member takes effect in the order of its issue."""
        self.n_threads, self.in_order = n_threads, in_order
        self.committed = np.zeros(n_lanes // n_threads, dtype="i8")
        self.work: list[Work] = []

    def add(self, work: Work, order: Order) -> None:
        """Issue work, as part of the group that its members commit next."""
        work.group = self.committed[work.member]
        work.done = np.zeros(len(work.member), dtype=bool)
        at_once = order.at_once(len(work.member))
        if at_once.any():
            if self.in_order:
                for before in self.work:
                    before.take_effect(np.isin(before.member, work.member[at_once]))
            work.take_effect(at_once)
        self.work.append(work)

    def commit(self, mask: Mask) -> None:
        self.committed[self._members(mask)] += 1

    def wait(self, pending: int, mask: Mask) -> None:
        """Wait until at most `pending` of the latest committed groups are not complete."""
        waiting = np.zeros(len(self.committed), dtype=bool)
        waiting[self._members(mask)] = True
        left = []
        for work in self.work:
            due = waiting[work.member] & (work.group < self.committed[work.member] - pending)
            if due.any():
                work.take_effect(due)
                work.end(due)
            if not due.all():
                left.append(_rest(work, ~due) if due.any() else work)
        self.work = left

    def check_empty(self) -> None:
        """Fail if a program ends while its work is in flight."""
        if self.work:
            x = self.work[0].x
            raise AsyncError(f"{x.opcode}, at {x.place}: nobody waited for it before the program ended")

    def _members(self, mask: Mask) -> Array | slice:
        return slice(None) if mask is True else np.flatnonzero(mask.reshape(-1, self.n_threads).any(axis=1))


def _rest(work: Work, left: Array) -> Work:
    """The work of the members that are left."""

    def of_all(chosen: Array) -> Array:
        of_work = np.zeros(len(left), dtype=bool)
        of_work[np.flatnonzero(left)[chosen]] = True
        return of_work

    effect, end = work.effect, work.end
    return Work(
        work.member[left],
        lambda chosen: effect(of_all(chosen)),
        lambda chosen: end(of_all(chosen)),
        work.x,
        work.addresses[left] if work.addresses.size else work.addresses,
        work.size,
        work.group[left],
        work.done[left],
    )
