"""Which access of shared memory is ordered before which: by barriers, by waits and by fences between proxies.

Time counts the accesses of shared memory by the program. For each granule (the smallest access of the kernel) there is
the time and warp of its last write, and for each warp that of its last read. ``known[cta, w, a]`` is the time up to
which everything that warp ``a`` did is ordered before what warp ``w`` does next (*happens before*); a barrier makes
the rows of its warps equal. An access races with an earlier one of another warp, one of both being a write, if that
is later than what is known of its warp. Accesses of one warp are taken as ordered. By one instruction, warps may write
the same value with nothing that orders them, as a layout with copies does: either write is the last, and the other is
`redundant`; all else must be ordered after both.

Writes of the tensor memory accelerator have agents of their own, after the warps: one for each mbarrier on which they
arrive, since a wait for one mbarrier orders nothing that arrives on another. Of generic writes, the async proxy sees
those before ``fenced``: known to a warp when it, or one whose barrier it passed, executed ``fence.proxy.async``. PTX
ISA, "memory consistency model"; FastTrack (Flanagan and Freund, 2009) for the bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fusedattn.virtual_gpu.errors import AsyncError, MemoryAccessError, RaceError
from fusedattn.virtual_gpu.ptx import Instruction
from fusedattn.virtual_gpu.registers import Array

# In place of the time of a write: nobody has written, asynchronous work is writing, or an mbarrier lies there. Times of
# the accelerator's writes are above BY_TMA, so that one comparison finds everything that needs a closer look.
NEVER = 2**31 - 1
IN_FLIGHT = 2**31 - 2
MBARRIER = 2**31 - 3
BY_TMA = 2**30

Equal = Callable[[], Array]


class Races:
    """The accesses of the shared memory of `n_ctas` programs, each with `n_warps`."""

    def __init__(self, n_ctas: int, n_warps: int, n_granules: int, *, fenced_copies: bool = True) -> None:
        """Without `fenced_copies`, what cp.async wrote needs no fence."""
        self.fenced_copies = fenced_copies
        self.n_ctas, self.n_warps, self.n_granules = n_ctas, n_warps, n_granules
        self.instruction_at: list[Instruction | None] = [None]  # by time
        self.agent_of: dict[int, int] = {}  # by the address of an mbarrier: the agent of writes that arrive on it
        self.known = np.zeros((n_ctas, n_warps, n_warps), dtype="i4")
        self.fenced = np.zeros((n_ctas, n_warps, n_warps), dtype="i4")
        self.horizon = np.zeros((n_ctas, n_warps), dtype="i4")  # everything of every warp up to it is known
        self.fenced_horizon = np.zeros((n_ctas, n_warps), dtype="i4")
        self.written = np.full(n_ctas * n_granules, NEVER, dtype="i4")
        self.writer = np.full(n_ctas * n_granules, -1, dtype="i2")
        self.by_copy = np.zeros(n_ctas * n_granules, dtype=bool)  # the last write was cp.async
        self.last_read = np.zeros(n_ctas * n_granules, dtype="i4")  # of all warps
        self.read_by = np.zeros((n_warps, n_ctas * n_granules), dtype="i4")
        self.being_read = np.zeros(n_ctas * n_granules, dtype="i2")  # by asynchronous work, so often
        self.begun = np.zeros(n_ctas * n_granules, dtype="i4")  # when asynchronous work on it was started
        # When each warp wrote what another wrote too, ``(n_warps, n)``, and the latest of these; or nobody did.
        self.redundant: Array | None = None
        self.last_redundant: Array | None = None

    @property
    def now(self) -> int:
        return len(self.instruction_at) - 1

    def tick(self, x: Instruction) -> int:
        """The time of a new access."""
        self.instruction_at.append(x)
        if self.now >= BY_TMA:
            raise OverflowError("more accesses of shared memory than can be told apart")
        return self.now

    def read(self, granules: Array, cta: Array, warp: Array, x: Instruction) -> None:
        """Warps read granules ``(n, k)``; `cta` and `warp` have ``(n, 1)`` elements."""
        now = self.tick(x)
        late = self.written[granules] > self.horizon[cta, warp]
        if late.any():
            self._examine_writes(granules, cta, warp, late, x, of_async=False)
        self._examine_redundant(granules, cta, warp, x, of_async=False)
        self.last_read[granules] = now
        self.read_by[warp, granules] = now

    def write(self, granules: Array, cta: Array, warp: Array, x: Instruction, equal: Equal | None = None) -> int:
        """Warps write granules ``(n, k)``; returns the time. `equal` finds those whose value does not change."""
        now = self.tick(x)
        self._examine_overwriting(granules, cta, warp, x, of_async=False, equal=equal)
        self.written[granules] = now
        self.writer[granules] = warp
        self.by_copy[granules] = False
        others = self.writer[granules] != warp
        if others.any():
            self._add_redundant(granules[others], np.broadcast_to(warp, others.shape)[others], now)
        return now

    def _add_redundant(self, granules: Array, warps: Array, times: Any) -> None:
        """Warps wrote granules at times, which are not their last writes although nothing orders these after them."""
        if self.redundant is None or self.last_redundant is None:
            self.redundant, self.last_redundant = np.zeros_like(self.read_by), np.zeros_like(self.last_read)
        np.maximum.at(self.redundant, (warps, granules), times)
        np.maximum.at(self.last_redundant, granules, times)

    def begin_write(self, granules: Array, cta: Array, warp: Array, x: Instruction, *, of_async: bool = False) -> None:
        """Asynchronous work that a warp starts will write these granules."""
        now = self.tick(x)
        self._examine_overwriting(granules, cta, warp, x, of_async=of_async)
        self.written[granules] = IN_FLIGHT
        self.writer[granules] = warp
        self.begun[granules] = now
        if (self.writer[granules] != warp).any():
            raise RaceError(f"{x.opcode}, at {x.place}: several warps write the same bytes")

    def end_write(self, granules: Array, x: Instruction) -> None:
        """The work has written, as if by the warp that started it, now."""
        self.written[granules] = self.tick(x)
        self.by_copy[granules] = True

    def end_write_by_tma(self, granules: Array, address: int, x: Instruction) -> tuple[Array, Array]:
        """The accelerator has written, and arrives on the mbarrier at an address; returns what it releases."""
        now, agent = self.tick(x), self._agent(address)
        self.written[granules] = now + BY_TMA
        self.writer[granules] = agent
        self.by_copy[granules] = False
        known, fenced = (np.zeros(self.known.shape[2], dtype="i4") for _ in range(2))
        known[agent] = now
        return known, fenced

    def _agent(self, address: int) -> int:
        """The agent of the writes that arrive on the mbarrier at an address."""
        if address not in self.agent_of:
            self.agent_of[address] = self.n_warps + len(self.agent_of)
            self.known, self.fenced = (np.pad(table, ((0, 0), (0, 0), (0, 1))) for table in (self.known, self.fenced))
        return self.agent_of[address]

    def known_of_tma(self, cta: int, warps: Array, address: int) -> Array:
        """The time up to which warps know the writes of the accelerator that arrive on the mbarrier at an address."""
        agent = self._agent(address)
        return self.known[cta, warps, agent]

    def knows_of_tma(self, cta: int, time: int, address: int) -> bool:
        """Whether a warp of a program knows what arrived by a time on the mbarrier at an address."""
        return bool((self.known[cta, :, self._agent(address)] >= time).any())

    def begin_reads(self, granules: Array, cta: Array, warps: Array, x: Instruction) -> None:
        """Asynchronous work of several parts will read granules ``(parts, n)``, until :meth:`end_reads`.

        `cta` has ``(parts, 1)`` elements, `warps` ``(parts, k)``: the k warps of which each reads all of them.
        """
        now = self.tick(x)
        late = self.written[granules] > self.fenced_horizon[cta, warps].min(axis=1, keepdims=True)
        if late.any():
            for warp in warps.T:
                self._examine_writes(granules, cta, warp[:, None], late, x, of_async=True)
        for warp in warps.T:
            self._examine_redundant(granules, cta, warp[:, None], x, of_async=True)
        self.begun[granules] = now
        for part in _apart(cta):
            self.being_read[granules[part]] += 1

    def end_reads(self, granules: Array, cta: Array, warps: Array, x: Instruction) -> None:
        """Warps have waited for the reads of granules; all as in :meth:`begin_reads`."""
        now = self.tick(x)
        for part in _apart(cta):
            self.being_read[granules[part]] -= 1
        self.last_read[granules] = now
        for warp in warps.T:
            self.read_by[warp[:, None], granules] = now

    def make_mbarrier(self, granules: Array, cta: int, warp: int, x: Instruction) -> int:
        """An mbarrier begins to be where these granules are; returns the time."""
        now = self.write(granules, np.array([[cta]]), np.array([[warp]]), x)
        self.written[granules] = MBARRIER
        self.begun[granules] = now
        return now

    def end_mbarrier(self, granules: Array, cta: int, warp: int, used: Array, x: Instruction) -> None:
        """A warp ends an mbarrier that warps have used at the times `used`, ``(n_warps,)``."""
        now = self.tick(x)
        for by in np.flatnonzero(used):
            self.require(int(used[by]), int(by), cta, warp, x)
        self.written[granules] = now
        self.writer[granules] = warp

    def require(self, time: int, by: int, cta: int, warp: int, x: Instruction) -> None:
        """Fail unless what a warp did at a time is ordered before what another does now."""
        if by != warp and time > self.known[cta, warp, by]:
            first = _of(self.instruction_at[time])
            raise RaceError(f"{x.opcode}, at {x.place}, by warp {warp}: nothing orders it after {first}, by warp {by}")

    def sees(self, time: int, by: int, cta: int, warp: int) -> bool:
        """Whether work of the async proxy that a warp starts now sees what another did at a time."""
        return bool(time <= self.fenced[cta, warp, by])

    def _examine_overwriting(
        self,
        granules: Array,
        cta: Array,
        warp: Array,
        x: Instruction,
        *,
        of_async: bool,
        equal: Equal | None = None,
    ) -> None:
        horizon = self.horizon[cta, warp]
        late = (self.last_read[granules] > horizon) | (self.being_read[granules] > 0)
        if late.any():
            self._examine_reads(granules, cta, warp, late, x)
        before = self.fenced_horizon[cta, warp] if of_async else horizon
        late = self.written[granules] > before
        if late.any():
            self._examine_writes(granules, cta, warp, late, x, of_async=of_async, overwriting=True, equal=equal)
        self._examine_redundant(granules, cta, warp, x, of_async=of_async, equal=equal)

    def _examine_writes(
        self,
        granules: Array,
        cta: Array,
        warp: Array,
        late: Array,
        x: Instruction,
        *,
        of_async: bool,
        overwriting: bool = False,
        equal: Equal | None = None,
    ) -> None:
        """Fail if one of these writes is not ordered before what the warp does now."""
        at, of_cta, me = (np.broadcast_to(y, late.shape)[late] for y in (granules, cta, warp))
        written, writer = self.written[at], self.writer[at]
        if overwriting:
            written = np.where(written == NEVER, 0, written)
        elif (written == NEVER).any():
            raise MemoryAccessError(f"{x.opcode}, at {x.place}: reads shared memory that nobody has written")
        if (written == IN_FLIGHT).any():
            i = int(np.argmax(written == IN_FLIGHT))
            start = self.instruction_at[int(self.begun[at[i]])]
            raise RaceError(f"{x.opcode}, at {x.place}, touches what {_of(start)} has not finished writing")
        if (written == MBARRIER).any():
            start = self.instruction_at[int(self.begun[at[int(np.argmax(written == MBARRIER))]])]
            raise AsyncError(f"{x.opcode}, at {x.place}, touches the mbarrier of {_of(start)}")
        by_tma = written > BY_TMA
        time = np.where(by_tma, written - BY_TMA, written)
        unordered = (time > self.known[of_cta, me, writer]) & (writer != me)
        if equal is not None and unordered.any():
            same = unordered & ~by_tma & equal()[late] & self._are_by(x, time)
            self._add_redundant(at[same], writer[same], time[same])
            unordered &= ~same
        if unordered.any():
            i = int(np.argmax(unordered))
            raise RaceError(
                f"{x.opcode}, at {x.place}, by warp {me[i]}: nothing orders it after "
                f"{_of(self.instruction_at[int(time[i])])}, by "
                + ("the tensor memory accelerator" if by_tma[i] else f"warp {writer[i]}")
            )
        if of_async:
            unfenced = (time > self.fenced[of_cta, me, writer]) & ~by_tma
            if not self.fenced_copies:
                unfenced &= ~self.by_copy[at]
            if unfenced.any():
                first = self.instruction_at[int(time[np.argmax(unfenced)])]
                raise RaceError(f"{x.opcode}, at {x.place}: no fence.proxy.async after {_of(first)}")

    def _examine_redundant(
        self,
        granules: Array,
        cta: Array,
        warp: Array,
        x: Instruction,
        *,
        of_async: bool,
        equal: Equal | None = None,
    ) -> None:
        """Fail if a redundant write is not ordered before what the warp does now, unless it writes the same."""
        if self.redundant is None or self.last_redundant is None:
            return
        late = self.last_redundant[granules] > (self.fenced_horizon if of_async else self.horizon)[cta, warp]
        if not late.any():
            return
        at, of_cta, me = (np.broadcast_to(y, late.shape)[late] for y in (granules, cta, warp))
        times, n = self.redundant[:, at], self.n_warps  # (n_warps, n)
        unordered = times > self.known[of_cta, me, :n].T
        unordered[me, np.arange(len(me))] = False
        if equal is not None and unordered.any():
            unordered &= ~(equal()[late] & self._are_by(x, times))
        unfenced = times > self.fenced[of_cta, me, :n].T if of_async else unordered
        for bad, says in ((unordered, "nothing orders it after"), (unfenced, "no fence.proxy.async after")):
            if bad.any():
                by, i = (int(y) for y in np.argwhere(bad)[0])
                first = self.instruction_at[int(times[by, i])]
                raise RaceError(f"{x.opcode}, at {x.place}, by warp {me[i]}: {says} {_of(first)}, by warp {by}")

    def _are_by(self, x: Instruction, times: Array) -> Array:
        """Whether accesses were by an instruction."""
        return np.array([self.instruction_at[time] is x for time in times.flat], dtype=bool).reshape(times.shape)

    def _examine_reads(self, granules: Array, cta: Array, warp: Array, late: Array, x: Instruction) -> None:
        """Fail if one of the reads of these granules is not ordered before what the warp writes now."""
        at, of_cta, me = (np.broadcast_to(y, late.shape)[late] for y in (granules, cta, warp))
        if self.being_read[at].any():
            i = int(np.argmax(self.being_read[at]))
            reader = self.instruction_at[int(self.begun[at[i]])]
            raise RaceError(f"{x.opcode}, at {x.place}, overwrites what {_of(reader)} is still reading")
        reads = self.read_by[:, at]  # (n_warps, n)
        bad = reads > self.known[of_cta, me, : self.n_warps].T
        bad[me, np.arange(len(me))] = False
        if bad.any():
            by, i = (int(y) for y in np.argwhere(bad)[0])
            first = self.instruction_at[int(reads[by, i])]
            raise RaceError(
                f"{x.opcode}, at {x.place}, by warp {me[i]}: nothing orders it after the read by {_of(first)}, "
                f"by warp {by}"
            )

    def join_all(self, ctas: Any) -> None:
        """A barrier of all warps of programs: what one knows, all know."""
        now, n = self.now, self.n_warps
        for table in (self.known, self.fenced):
            table[ctas] = table[ctas].max(axis=1, keepdims=True)
        self.known[ctas, :, :n] = now
        self.horizon[ctas] = now
        self.fenced_horizon[ctas] = self.fenced[ctas, :, :n].min(axis=2)

    def join(self, cta: int, warps: Array) -> None:
        """A barrier of some warps of one program."""
        for table in (self.known, self.fenced):
            table[cta, warps] = table[cta, warps].max(axis=0)
        self.known[cta, warps[:, None], warps] = self.now
        self._renew(cta)

    def fence(self, cta: Array, warp: Array) -> None:
        """fence.proxy.async, by warps: the async proxy sees the generic writes that they know."""
        self.fenced[cta, warp] = np.maximum(self.fenced[cta, warp], self.known[cta, warp])
        self.fenced[cta, warp, warp] = self.now
        self.fenced_horizon[cta, warp] = self.fenced[cta, warp, : self.n_warps].min(axis=1)

    def release(self, cta: int, warp: int) -> tuple[Array, Array]:
        """What a warp knows and has done, for those who acquire it."""
        known = self.known[cta, warp].copy()
        known[warp] = self.now
        return known, self.fenced[cta, warp].copy()

    def acquire(self, cta: int, warps: Array, released: tuple[Array, Array]) -> None:
        """Warps of a program know what others released."""
        for table, part in zip((self.known, self.fenced), released, strict=True):
            n = len(part)  # without the agents that came later
            table[cta, warps, :n] = np.maximum(table[cta, warps, :n], part)
        self._renew(cta)

    def _renew(self, cta: int) -> None:
        """The horizons of a program: what a warp knows of all others, and of itself."""
        n = self.n_warps
        known = self.known[cta, :, :n].copy()
        known[np.arange(n), np.arange(n)] = NEVER
        self.horizon[cta] = known.min(axis=1) if n > 1 else self.now
        self.fenced_horizon[cta] = self.fenced[cta, :, :n].min(axis=1)


def _apart(cta: Array) -> list[Any]:
    """Indices of parts ``(parts, 1)``, which are sorted by program, such that no two of one index share a program."""
    of_parts = cta[:, 0]
    rank = np.arange(len(of_parts)) - np.searchsorted(of_parts, of_parts)
    most = int(rank.max())
    return [rank == i for i in range(most + 1)] if most else [slice(None)]


def _of(x: Instruction | None) -> str:
    return "an earlier access" if x is None else f"{x.opcode} at {x.place}"
