"""The settings of a process: optional packages, and environment variables with their effect."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fusedattn.cli.machine import version_of
from fusedattn.support import interpreting

# Package -> the part of fusedattn that needs it.
OPTIONAL = {"transformers": "fuse() of its models", "rich": "demo", "matplotlib": "figure of demo"}

PREFIXES = ("FUSEDATTN_", "TRITON_")

# Variables of Triton that change where or how kernels are compiled.
_EFFECTS = {
    "TRITON_CACHE_DIR": "the folder of compiled kernels",
    "TRITON_HOME": "the folder that has Triton's cache",
    "TRITON_ALWAYS_COMPILE": "Triton's cache is not read",
    "TRITON_PTXAS_PATH": "the assembler of kernels",
}
_LONGEST_VALUE = 30


def optional_packages() -> list[str]:
    """Each optional package with its version, or with the part of fusedattn that lacks it."""
    found = []
    for package, use in OPTIONAL.items():
        version = version_of(package)
        found.append(f"{package} {version}" if version else f"{package} not installed (for {use})")
    return found


def variables(is_hopper: bool, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Each variable of this package and of Triton that is set, and its effect.

    Args:
        is_hopper: whether a GPU of compute capability 9.0 is present.
        environ: the environment variables.
    """
    names = sorted(name for name in environ if name.startswith(PREFIXES))
    return [f"{name}={_shortened(environ[name])}: {_effect(name, environ[name], is_hopper)}" for name in names]


def _effect(name: str, value: str, is_hopper: bool) -> str:
    if name == "TRITON_INTERPRET":
        return "kernels run in Triton's interpreter" if interpreting() else "none, kernels are compiled"
    if name == "FUSEDATTN_HOPPER":
        return _effect_of_hopper(value, is_hopper)
    if name.startswith("FUSEDATTN_"):
        return "none, fusedattn does not read it"
    return _EFFECTS.get(name, "read by Triton only")


def _effect_of_hopper(value: str, is_hopper: bool) -> str:
    calls = {"1": "the calls that they made faster", "all": "every call that they can run"}.get(value)
    if calls is None:
        return "none, allowed are 1 and all"
    if interpreting() or not is_hopper:
        return "none without compiled kernels on a GPU of compute capability 9.0"
    return f"kernels in Gluon run {calls}"


def _shortened(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else value[: _LONGEST_VALUE - 3] + "..."
