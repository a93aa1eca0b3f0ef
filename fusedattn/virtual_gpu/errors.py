"""Errors of kernels; a message names the instruction and its line in the source."""

from __future__ import annotations


class UnknownPTXError(NotImplementedError):
    """An instruction, modifier or directive that is not known. Nothing is skipped."""


class KernelError(RuntimeError):
    """A kernel broke a rule of the hardware."""


class MemoryAccessError(KernelError):
    """An access outside of a tensor or of shared memory, not aligned, or of memory that nobody wrote."""


class RaceError(KernelError):
    """Two accesses of the same bytes, of which one writes, that nothing orders."""


class AsyncError(KernelError):
    """Registers or barriers of asynchronous work used against its rules."""


class DeadlockError(KernelError):
    """All threads wait, and nothing can end it."""
