"""Functions that torch.compile traces once for all sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend


def in_one_graph(
    function: Callable[..., Any], *, backend: str = "aot_eager", dynamic: bool | None = True
) -> Callable[..., Any]:
    """Compile a function without breaks; its calls fail unless the graph of the first serves all of them."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=dynamic)
    graphs = set()

    def call(*args: Any) -> Any:
        out = compiled(*args)
        graphs.add(counter.frame_count)
        assert len(graphs) == 1, graphs
        return out

    return call
