"""Replacements that the suites run under. Each counts the calls that this package has served."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn

from fusedattn import fuse, replace_sdpa
from fusedattn.integrations import flash_attn
from fusedattn.integrations.flash_attn.layers import rotary
from fusedattn.integrations.torch_nn import FusedMultiheadAttention
from tests.tools.upstream import flash_attn_on_cpu

MODULES = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.Transformer,
)


class Served:
    """The number of calls that have returned a result of this package."""

    def __init__(self) -> None:
        self.calls = 0

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.calls += 1
            return result

        return counted


@contextmanager
def nothing(served: Served) -> Iterator[None]:
    """No replacement, for comparison."""
    yield


@contextmanager
def sdpa(served: Served) -> Iterator[None]:
    """``F.scaled_dot_product_attention`` is this package's, on the torch backend."""
    with replace_sdpa(backend="torch") as replaced:
        try:
            yield
        finally:
            served.calls += replaced.fused


@contextmanager
def fused_modules(served: Served) -> Iterator[None]:
    """Modules of ``torch.nn`` are fused at their first call, as a user fuses a finished model."""

    def fusing(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def fused(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if any(type(module) is nn.MultiheadAttention for module in self.modules()):
                fuse(self, backend="torch")
            return call(self, *args, **kwargs)

        return fused

    attend = FusedMultiheadAttention._attend
    patches = [mock.patch.object(kind, "__call__", fusing(kind.__call__)) for kind in MODULES]
    patches.append(mock.patch.object(FusedMultiheadAttention, "_attend", served.counting(attend)))
    with _all(patches):
        yield


@contextmanager
def functions_of_flash_attn(served: Served) -> Iterator[None]:
    """Count calls in the test modules; the functions of ``flash_attn`` are already this package's."""
    originals = [
        function
        for module in (flash_attn, rotary)
        for name, function in vars(module).items()
        if name.startswith(("flash_attn_", "apply_rotary")) and callable(function)
    ]
    patches = [
        mock.patch.object(module, name, served.counting(function))
        for module in flash_attn_on_cpu.modules_of_tests()
        for name, function in vars(module).items()
        if any(function is original for original in originals)
    ]
    with _all(patches):
        yield


@contextmanager
def _all(patches: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


REPLACEMENTS: dict[str, Callable[[Served], AbstractContextManager[None]]] = {
    "nothing": nothing,
    "replace_sdpa": sdpa,
    "fuse": fused_modules,
    "flash_attn": functions_of_flash_attn,
}
