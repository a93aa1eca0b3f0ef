"""What a generation step allocates: its output and, if keys are split, the partial sums of the splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusedattn import KVCache, Rope, attention, attention_varlen, caches, masks
from fusedattn.backends.triton import ops
from fusedattn.integrations.flash_attn import flash_attn_with_kvcache
from tests.conftest import DEVICE
from tests.helpers import quick

BATCH, HEADS_Q, HEADS, DIM, CAPACITY, PAGE = 2, 4, 2, 16, 64, 16
LAYOUTS = ("contiguous", "rows", "pages", "ring", "left padding")
FORMS = {"numbers": (torch.float16, None), "int8": (torch.int8, None), "int4": (torch.uint8, 8)}


class Allocations(TorchDispatchMode):
    """Inside, the tensors that get memory of their own: the operator and the shape of each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs or {}))}
        results = func(*args, **(kwargs or {}))
        # In the interpreter a launch makes tensors of its arguments' memory.
        for x in [] if func.overloadpacket is torch.ops.aten.set_ else _tensors(results):
            storage = x.untyped_storage()
            if storage.nbytes() and storage._cdata not in given:
                self.found.append((str(func), tuple(x.shape)))
        return results


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


@pytest.fixture(autouse=True)
def _unobserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counting mode leaves calls on the path that they take without it."""
    monkeypatch.setattr(ops, "is_observed", lambda *_: False)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def new_cache(layout: str, form: str, rope: Rope | None) -> KVCache:
    dtype, group_size = FORMS[form]
    options: dict[str, Any] = {"dtype": dtype, "group_size": group_size, "rope": rope}
    if layout == "pages":
        table = torch.arange(BATCH * CAPACITY // PAGE, dtype=torch.int32, device=DEVICE).view(BATCH, -1)
        return KVCache.paged(table, table.numel(), PAGE, HEADS, DIM, **options)
    if layout == "ring":
        options |= {"overwrites": True, "n_sinks": 2}
    if layout == "left padding":
        options["left_padding"] = ints(0, 3)
    cache = KVCache.contiguous(BATCH, HEADS, 32 if layout == "ring" else CAPACITY, DIM, device=DEVICE, **options)
    if layout != "rows":
        return cache
    return KVCache(**{**vars(cache), "rows": ints(1, 0)})


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).half()


def counted(call: Callable[[], object]) -> list[tuple[str, tuple[int, ...]]]:
    with torch.no_grad(), Allocations() as allocations:
        call()
    return allocations.found


@quick.every(7)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps(layout, form, rotated, num_splits):
    """Appending allocates nothing, also of packed tokens; attention its output, and lse if it is asked for."""
    cache = new_cache(layout, form, Rope.from_theta(DIM, CAPACITY, device=DEVICE) if rotated else None)
    caches.append(cache, *drawn(2, BATCH, HEADS, 40, DIM).unbind(), backend="triton")
    stops = ints(0, 1, 2)
    options: dict[str, Any] = {"mask": masks.causal(), "num_splits": num_splits, "backend": "triton"}
    for step in range(2):
        k, v = drawn(2, BATCH, HEADS, 1, DIM).unbind()
        q = drawn(BATCH, HEADS_Q, 1, DIM)
        found = [
            counted(lambda k=k, v=v: caches.append(cache, k, v, backend="triton")),
            counted(lambda q=q: attention(q, cache=cache, **options)),
            counted(lambda q=q: attention(q, cache=cache, return_lse=True, **options)),
        ]
        k, v, q = (x[:, :, 0] for x in (k, v, q))
        found += [
            counted(lambda k=k, v=v: caches.append(cache, k, v, cu_seqlens=stops, backend="triton")),
            counted(lambda q=q: attention_varlen(q, None, None, stops, None, 1, cache=cache, **options)),
        ]
        if step == 0:
            continue
        shapes = [[shape for _, shape in x if not is_partial(shape)] for x in found]
        out, packed = (BATCH, HEADS_Q, 1, DIM), (1, HEADS_Q, BATCH, DIM)
        assert shapes[0] == shapes[3] == [], found
        assert shapes[1] == [out], found
        assert sorted(shapes[2]) == [out[:3], out], found
        assert [sorted(x) for x in shapes[4]] == [sorted(packed)], found
        partials = [sum(is_partial(shape) for _, shape in x) for x in found]
        assert partials[0] == partials[3] == 0
        assert all((1 <= n <= 3) if num_splits > 1 else n == 0 for n in (partials[1], partials[2], partials[4])), found


def is_partial(shape: tuple[int, ...]) -> bool:
    """Whether this is the memory of partial sums: of each row, or all of it as bytes."""
    return shape[0] == BATCH * HEADS_Q or len(shape) == 1


@pytest.mark.parametrize("rotated", [False, True])
def test_steps_of_flash_attn(rotated, monkeypatch):
    """The output, and the lengths with the new tokens: the caller's are not changed."""
    monkeypatch.setattr("fusedattn.caches.default_backend", lambda _: "triton")
    monkeypatch.setattr("fusedattn.prepare.default_backend", lambda _: "triton")
    cached = [torch.zeros(BATCH, CAPACITY, HEADS, DIM, dtype=torch.float16, device=DEVICE) for _ in range(2)]
    table = Rope.from_theta(DIM, CAPACITY, device=DEVICE)
    tables = {"rotary_cos": table.cos, "rotary_sin": table.sin} if rotated else {}
    for step in range(3):
        q, k, v = drawn(BATCH, 1, HEADS_Q, DIM), *drawn(2, BATCH, 1, HEADS, DIM).unbind()
        lengths = ints(3 + step, 9 + step)
        found = counted(
            lambda q=q, k=k, v=v, lengths=lengths: flash_attn_with_kvcache(
                q, *cached, k, v, **tables, cache_seqlens=lengths, causal=True, num_splits=1
            )
        )
        if step:  # on a CPU, numbers are checked
            assert [shape for _, shape in found if shape] == [(BATCH,), (BATCH, HEADS_Q, 1, DIM)], found
