"""Replay warps with different tasks on one scheduler of a multiprocessor, in clocks: who waits for what, and when the
tensor core is busy.

The four schedulers are alike, so each group of four warps is one warp here, and the warp that requests tiles is
another. A warp runs a list of :class:`Action`. Issue, pipes and products are those of bench/codegen/model.py. Besides,
warps wait for mbarriers, which complete a phase when all arrivals and bytes are there. Copies arrive one after the
other, as fast as one multiprocessor can read the L2 cache, after its latency. How fast all can read it together is a
bound of the result, not a delay.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bench.codegen.hardware import Machine
from bench.codegen.loops import Step
from bench.codegen.model import Warp, begin, tensor_clocks

TENSOR, COPIES = "tensor core", "copies"


@dataclass(frozen=True)
class Action:
    """An instruction of a warp, and what it does to an mbarrier.

    Attributes:
        amount: of a "wait", the phases that must have ended; of an "arrive", the bytes that it expects; of a "copy",
            its bytes.
        label: what is multiplied, or waited for.
    """

    step: Step
    what: Literal["", "wait", "arrive", "copy"] = ""
    barrier: int = 0
    amount: int = 0
    label: str = ""


@dataclass(frozen=True)
class Interval:
    """From `start` to `end`, in clocks: a wait of a party, or the tensor core or a copy is busy for it."""

    place: str  # the party, TENSOR or COPIES
    label: str
    start: float
    end: float
    party: str


@dataclass
class Timeline:
    """What a replay shows: its intervals, and the clock at which each action of a party was issued."""

    intervals: list[Interval] = field(default_factory=list)
    issued: dict[str, list[float]] = field(default_factory=dict)

    def busy(self, start: float, end: float) -> float:
        """The share of the clocks between two for which the tensor core is busy."""
        parts = [min(x.end, end) - max(x.start, start) for x in self.intervals if x.place == TENSOR]
        return sum(part for part in parts if part > 0) / (end - start)

    def waiting(self, party: str, start: float, end: float) -> dict[str, float]:
        """The clocks that a party waits between two, by what it waits for."""
        found: dict[str, float] = {}
        for x in self.intervals:
            overlap = min(x.end, end) - max(x.start, start)
            if x.place == party and overlap > 0:
                found[x.label] = found.get(x.label, 0.0) + overlap
        return found


@dataclass
class _MBarrier:
    """Arrivals of the phase that has not ended, and the clocks at which others have."""

    expected: int
    arrivals: int = 0
    bytes: int = 0
    latest: float = 0.0
    ended: list[float] = field(default_factory=list)

    def arrive(self, at: float, arrivals: int, n_bytes: int) -> None:
        self.arrivals += arrivals
        self.bytes += n_bytes
        self.latest = max(self.latest, at)
        if self.arrivals == self.expected and not self.bytes:
            self.ended.append(self.latest)
            self.arrivals, self.latest = 0, 0.0


@dataclass
class _Party:
    name: str
    actions: Sequence[Action]
    warp: Warp
    since: float | None = None  # when the wait began in which it is

    @property
    def action(self) -> Action:
        return self.actions[self.warp.at]


class _Replay:
    """The state of a scheduler and its warps."""

    def __init__(self, parties: Mapping[str, Sequence[Action]], machine: Machine, arrivals: Mapping[int, int]) -> None:
        self.machine, self.found = machine, Timeline()
        self.mbarriers = {barrier: _MBarrier(n) for barrier, n in arrivals.items()}
        self.free: dict[str, float] = {}  # when a pipe is free
        self.held: dict[int, list[_Party]] = {}  # until a phase of an mbarrier ends whose end is not known
        self.turns = itertools.count()  # if two warps are ready, the one that has waited longer goes first
        self.ready: list[tuple[float, int, _Party]] = []
        for i, (name, actions) in enumerate(parties.items()):
            self.found.issued[name] = []
            if actions:
                self.later(0.0, _Party(name, actions, Warp(i)))

    def later(self, time: float, party: _Party) -> None:
        heapq.heappush(self.ready, (time, next(self.turns), party))

    def run(self) -> None:
        while self.ready:
            now, turn, party = heapq.heappop(self.ready)
            start = self._start(now, party)
            if start is None:
                self.held.setdefault(party.action.barrier, []).append(party)
            elif start > now:
                heapq.heappush(self.ready, (start, turn, party))  # it keeps its turn
            else:
                self._issue(now, party)

    def _start(self, now: float, party: _Party) -> float | None:
        """When the next action of a party can be issued, as far as is known now; None if that is not known."""
        action, step = party.action, party.action.step
        start = max(now, self.free.get("issue", 0.0))
        if step.kind in self.machine.pipes or step.kind == "mma":
            start = max(start, self.free.get(step.kind, 0.0))
        arrived: float | None = party.warp.ready(step)
        if action.what == "wait":
            ended = self.mbarriers[action.barrier].ended
            arrived = None if len(ended) < action.amount else ended[action.amount - 1] if action.amount else 0.0
        if (action.what or step.kind) == "wait" and (arrived is None or arrived > now) and party.since is None:
            party.since = now
        return None if arrived is None else max(start, arrived)

    def _issue(self, now: float, party: _Party) -> None:
        action, step = party.action, party.action.step
        if party.since is not None:
            self._note(party.name, party, party.since, now)
            party.since = None
        self.found.issued[party.name].append(now)
        self.free["issue"] = now + 1
        begin(step, party.warp, now, self.free, self.machine)
        if step.macs:
            end = self.free[step.kind]
            self._note(TENSOR, party, end - tensor_clocks(step, self.machine), end)
        then = now + step.order.stall
        if action.what == "wait":
            then += self.machine.latencies["shared"]
        elif action.what:
            self._arrive(now, party)
        party.warp.at += 1
        if party.warp.at < len(party.actions):
            self.later(then, party)

    def _arrive(self, now: float, party: _Party) -> None:
        """A warp arrives on an mbarrier, or a copy that it asks for will."""
        action = party.action
        if action.what == "copy":
            self.free["port"] = max(now, self.free.get("port", 0.0)) + action.amount / self.machine.port_bytes
            arrived = self.free["port"] + self.machine.latencies["memory"]
            self.mbarriers[action.barrier].arrive(arrived, 0, -action.amount)
            self.found.intervals.append(Interval(COPIES, action.label, now, arrived, party.name))
        else:
            self.mbarriers[action.barrier].arrive(now, 1, action.amount)
        for other in self.held.pop(action.barrier, []):
            self.later(now, other)

    def _note(self, place: str, party: _Party, start: float, end: float) -> None:
        label, intervals = party.action.label, self.found.intervals
        last = next((x for x in reversed(intervals) if x.place == place), None)
        if last and (last.label, last.party, last.end) == (label, party.name, start):
            intervals.remove(last)
            start = last.start
        if end > start:
            intervals.append(Interval(place, label, start, end, party.name))


def replay(
    parties: Mapping[str, Sequence[Action]], machine: Machine, arrivals: Mapping[int, int], begun: Sequence[int] = ()
) -> Timeline:
    """Run all parties to their ends. `arrivals` are those of a phase of each mbarrier; on those of `begun` there is one
    at the beginning.

    Raises:
        ValueError: some parties wait for ever.
    """
    state = _Replay(parties, machine, arrivals)
    for barrier in begun:
        state.mbarriers[barrier].arrive(0.0, 1, 0)
    state.run()
    if state.held:
        names = ", ".join(sorted(party.name for waiting in state.held.values() for party in waiting))
        raise ValueError(f"parties: {names} wait for ever")
    return state.found
