"""FlashAttention's tests on a CPU, with ``flash_attn`` as this package provides it.

The tests need two functions outside the interface: ``apply_rotary_emb_torch``, the expected rotation, is taken from the
checkout, and ``_get_block_size_n`` is a stub. The latter serves ``normalize_flash_attn_S``, which undoes a scaling of
``S_dmask`` that this package does not apply (docs/integrations/flash_attn.md), and is replaced by the identity.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

import fusedattn.integrations.flash_attn
from fusedattn.integrations.flash_attn import flash_attn_interface
from fusedattn.integrations.flash_attn.layers import rotary

FILES = ("test_flash_attn", "test_rotary")
CAPABILITY = (9, 0)  # most cases run for it
MEMORY = 2**40  # in bytes: cases are sampled by length instead


def install(checkout: Path) -> None:
    """Put this package in place of ``flash_attn``, and stubs in place of calls for a GPU."""
    for module in (fusedattn.integrations.flash_attn, flash_attn_interface, rotary):
        sys.modules[module.__name__.removeprefix("fusedattn.integrations.")] = module
    vars(rotary)["apply_rotary_emb_torch"] = _of_file(
        checkout / "flash_attn/layers/rotary.py", ("rotate_half", "apply_rotary_emb_torch")
    )
    vars(flash_attn_interface)["_get_block_size_n"] = lambda *_: None
    vars(torch.cuda).update(
        get_device_capability=lambda *_: CAPABILITY,
        get_device_properties=lambda *_: SimpleNamespace(total_memory=MEMORY),
        synchronize=lambda *_: None,
    )


def write_for_cpu(source: Path, target: Path) -> None:
    """A copy of a file of tests with tensors on the CPU."""
    target.write_text(source.read_text().replace('"cuda"', '"cpu"').replace("'cuda'", "'cpu'"))


def modules_of_tests() -> list[ModuleType]:
    """The imported test modules."""
    return [sys.modules[name] for name in FILES if name in sys.modules]


def prepare_modules() -> None:
    """Replace the functions that undo a scaling of ``S_dmask`` by the identity."""
    for module in modules_of_tests():
        if hasattr(module, "normalize_flash_attn_S"):
            vars(module)["normalize_flash_attn_S"] = lambda attn_unnorm, *_, **__: attn_unnorm


def _of_file(path: Path, names: tuple[str, ...]) -> Any:
    """The last of these functions, from a file whose imports need a GPU."""
    from einops import rearrange, repeat

    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    namespace: dict[str, Any] = {"torch": torch, "rearrange": rearrange, "repeat": repeat}
    exec(compile(tree, str(path), "exec"), namespace)
    return namespace[names[-1]]
