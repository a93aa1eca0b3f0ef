"""The state of a kernel's programs: registers, memory, and asynchronous work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from fusedattn.virtual_gpu.counters import Counters
from fusedattn.virtual_gpu.errors import MemoryAccessError
from fusedattn.virtual_gpu.global_memory import GlobalMemory
from fusedattn.virtual_gpu.global_work import GlobalWork
from fusedattn.virtual_gpu.groups import Groups, Order
from fusedattn.virtual_gpu.mbarriers import MBarriers
from fusedattn.virtual_gpu.noise import Noise
from fusedattn.virtual_gpu.products import Products
from fusedattn.virtual_gpu.ptx import Instruction, Kernel
from fusedattn.virtual_gpu.registers import Array, Mask, Registers
from fusedattn.virtual_gpu.shared_memory import BASE, SharedMemory
from fusedattn.virtual_gpu.stores import Stores
from fusedattn.virtual_gpu.tensor_map import TensorMap
from fusedattn.virtual_gpu.trace import What
from fusedattn.virtual_gpu.wgmma_registers import GROUP, Fences, InFlight

_SPECIAL = {f"%{name}.{axis}": 32 for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"} | {"%laneid": 32}
_PARAMETERS = 128  # the first address in the space of the kernel's parameters
PARAMETER_WINDOW = 2**46  # generic addresses of that space begin here: nothing else of a process lies there


class BoxCopy(Protocol):
    """A copy by the tensor memory accelerator that has not arrived."""

    x: Instruction
    cta: int

    def complete(self) -> None: ...


class Machine:
    """What the threads of `n_ctas` programs of a kernel work on."""

    def __init__(
        self,
        kernel: Kernel,
        n_ctas: int,
        shared_bytes: int,
        counters: Counters,
        *,
        order: Order,
        products: Products,
        noise: Noise,
        strict: bool = False,
        fenced_copies: bool = True,
    ) -> None:
        self.kernel, self.n_ctas, self.n_threads = kernel, n_ctas, kernel.n_threads
        self.strict = strict
        self.order, self.products, self.noise, self.counters = order, products, noise, counters
        addresses = {"global_smem": BASE}
        self.parameter_addresses: dict[str, int] = {}
        at = _PARAMETERS
        for parameter in kernel.parameters:
            self.parameter_addresses[parameter.name] = at
            at += max(parameter.n_bytes, 128)
        n_lanes = n_ctas * kernel.n_threads
        self.registers = Registers(kernel.registers | _SPECIAL, n_lanes, addresses | self.parameter_addresses)
        self.shared = SharedMemory(kernel, n_ctas, kernel.n_threads, shared_bytes, fenced_copies=fenced_copies)
        self.memory, self.stores = GlobalMemory([]), Stores(self.shared)
        self.parameters = {p.name: np.zeros(1, dtype=f"u{p.n_bytes}") for p in kernel.parameters if not p.opaque}
        self.maps: dict[int, TensorMap] = {}
        self.fences = Fences(kernel, max(1, n_lanes // GROUP), counters.tolerated, strict=strict)
        self._clear()

    def _clear(self) -> None:
        self.registers.clear()
        self.shared.clear()
        n_lanes = self.registers.n_lanes
        self.copies = Groups(n_lanes)
        self.bulk, self.box_writes = Groups(n_lanes), Groups(n_lanes)  # boxes to tensors: as they are read, and written
        self.global_work = GlobalWork(self.copies, self.box_writes)
        self.wgmma = Groups(n_lanes, GROUP, in_order=True)
        self.fences.clear()
        self.in_flight, self.mbarriers = InFlight(), MBarriers()
        self.boxes: list[BoxCopy] = []
        self.stalled = np.zeros(self.registers.n_lanes, dtype=bool)  # threads that wait for an mbarrier
        self.stalled_by: Instruction | None = None

    def begin(
        self,
        programs: Sequence[int],
        grid: tuple[int, int, int],
        parameters: dict[str, int],
        maps: dict[str, TensorMap],
        memory: GlobalMemory,
    ) -> None:
        """The state at the beginning of programs, which are at most as many as there is place for."""
        self._clear()
        self.memory = memory
        self.stores.begin(memory, programs)
        self.maps = {PARAMETER_WINDOW + self.parameter_addresses[name]: tensor for name, tensor in maps.items()}
        for name, value in parameters.items():
            self.parameters[name][...] = value
        thread = np.arange(self.n_threads, dtype="u4")
        numbers = np.zeros(self.n_ctas, dtype="u4")
        numbers[: len(programs)] = programs
        self.program = number = np.repeat(numbers, self.n_threads)  # of each lane
        values: dict[str, Any] = {
            "%tid.x": np.tile(thread, self.n_ctas),
            "%laneid": np.tile(thread % 32, self.n_ctas),
            "%ntid.x": self.n_threads,
            "%ctaid.x": number % grid[0],
            "%ctaid.y": number // grid[0] % grid[1],
            "%ctaid.z": number // (grid[0] * grid[1]),
            "%tid.y": 0,
            "%tid.z": 0,
            "%ntid.y": 1,
            "%ntid.z": 1,
        } | {f"%nctaid.{axis}": n for axis, n in zip("xyz", grid, strict=True)}
        for name, value in values.items():
            self.registers.row(name, "u4")[...] = value

    def stall(self, lanes: Array, x: Instruction) -> None:
        """Threads wait for an mbarrier."""
        self.stalled[lanes] = True
        self.stalled_by = x

    def wake(self, cta: int) -> None:
        """A phase of an mbarrier of a program has ended: its threads ask again."""
        self.stalled[cta * self.n_threads : (cta + 1) * self.n_threads] = False

    def warps(self, mask: Mask) -> Array:
        """The warps that have a thread in the mask, counted over all programs."""
        if mask is True:
            return np.arange(self.registers.n_lanes // 32)
        return np.flatnonzero(mask.reshape(-1, 32).any(axis=1))

    def note(self, what: What, x: Instruction, warps: Iterable[int], barrier: int = 0, amount: int = 0) -> None:
        """An instruction is an event of warps, counted over all programs: see :mod:`fusedattn.virtual_gpu.trace`."""
        if self.counters.trace is not None:
            self.counters.trace.note(what, x, warps, barrier, amount)

    def note_all(self, what: What, x: Instruction, mask: Mask, barrier: int = 0, amount: int = 0) -> None:
        """The same, of the warps of a mask."""
        if self.counters.trace is not None:
            self.counters.trace.note(what, x, self.warps(mask), barrier, amount)

    def tensor_map(self, address: int, x: Instruction) -> TensorMap:
        if address not in self.maps:
            raise MemoryAccessError(f"{x.opcode}, at {x.place}: there is no tensor map at {address:#x}")
        return self.maps[address]
