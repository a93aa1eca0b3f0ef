"""Whether a compiled warp-specialised kernel may be launched.

Hopper's compiler splits loops between warps by itself. If it cannot, it raises, or keeps the loop whole, with spills,
or lets the assembler wait after each product; some of its versions have made kernels that hang or are wrong. Such a
kernel is therefore launched only on GPUs and under versions of Triton for which its machine code has been inspected,
and only after the kernel compiled for the call at hand has passed too. The verdict is kept: later calls look up a key.

FUSEDATTN_WARP_SPECIALIZE=0 in the environment refuses all of them.
"""

import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Hashable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton

from fusedattn.kernels.devices import SHARED_MEMORY

SWITCH = "FUSEDATTN_WARP_SPECIALIZE"
VERSIONS = ("3.6.0", "3.7.1", "3.9.0")
CAPABILITY = (9, 0)

_allowed = os.environ.get(SWITCH, "1") != "0"
_reasons: dict[Hashable, str] = {}  # why the kernel of a key is not launched; empty if it is


def knows(device: torch.device) -> bool:
    """Whether a compiled kernel is worth inspecting; in the interpreter, always: nothing can go wrong there."""
    return triton.knobs.runtime.interpret or (
        _allowed
        and triton.__version__ in VERSIONS
        and _is_known(device.index if device.index is not None else torch.cuda.current_device())
    )


@lru_cache
def _is_known(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) == CAPABILITY


def accepts(key: Hashable, compiled: Callable[[], Any]) -> bool:
    """Whether to launch the kernel of `key`. `compiled` returns it, and is called for a new key only.

    Warns:
        RuntimeWarning: the kernel is refused, with the reason; once.
    """
    if triton.knobs.runtime.interpret:
        return True
    if key not in _reasons:
        _reasons[key] = reason(compiled)
        if _reasons[key]:
            warnings.warn(f"a warp-specialised kernel is not launched: {_reasons[key]}", RuntimeWarning, stacklevel=2)
    return not _reasons[key]


def reason(compiled: Callable[[], Any]) -> str:
    """Why the kernel that `compiled` returns, Triton's CompiledKernel, must not be launched; empty if it may be."""
    try:
        kernel = compiled()
        asm, shared_bytes = kernel.asm, kernel.metadata.shared
        if "ttg.warp_specialize" not in asm["ttgir"]:
            return "its loop was not split between warps"
        cubin, log = _assembled(asm["ptx"])
    except Exception as error:  # whatever the error, there is another kernel
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if cubin != asm["cubin"]:
        return "its machine code is not what the assembler gives for it"
    if shared_bytes > SHARED_MEMORY["sm_90"]:
        return f"it takes {shared_bytes} bytes of shared memory"
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    if not spills or any(map(int, spills)):
        return "it spills registers"
    if "serializ" in log:
        return "its products wait for each other"
    return ""


def _assembled(ptx: str) -> tuple[bytes, str]:
    """(machine code, log of ptxas) of a kernel for sm_90a, with the options of Triton, which itself keeps no log."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [get_ptxas(90).path, "-lineinfo", "-v", "--regAllocOptLevel=2", "--gpu-name=sm_90a", source]
        done = subprocess.run([*command, "-o", result], capture_output=True, text=True, check=True)
        return result.read_bytes(), done.stderr
