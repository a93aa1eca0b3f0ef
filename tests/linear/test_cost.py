"""The costs of linear attention by count: linear in the length, and for one more token independent of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedattn import linear_attention
from tests.conftest import BACKENDS, DEVICE, INTERPRETING
from tests.helpers import quick
from tests.helpers.accesses import checked_accesses

pytestmark = pytest.mark.usefixtures("_seed")

backends = pytest.mark.parametrize("backend", BACKENDS)


def qkv(n: int, **options: Any) -> tuple[Tensor, ...]:
    q, k, v = (torch.randn(1, h, n, 16, device=DEVICE, **options) for h in (4, 2, 2))
    return q, k, v


class Allocated(TorchDispatchMode):
    """The sizes of all results of operators, which include all memory but for scratch inside of one."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.operators[str(func)] += 1
        for x in found if isinstance(found, tuple | list) else [found]:
            if isinstance(x, Tensor):
                self.sizes.append(x.numel())
        return found


@contextmanager
def kept() -> Iterator[Callable[[], int]]:
    """Bytes of all storages that autograd keeps for the backward."""
    storages: dict[int, Any] = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield lambda: sum(x.nbytes() for x in storages.values())


@backends
@pytest.mark.parametrize("causal", [True, False])
def test_what_is_kept_for_the_backward_grows_linearly(causal, backend):
    """Four times as long, at most four times as much; the kernels keep nothing but their arguments and results."""

    def bytes_kept(n: int) -> tuple[int, int]:
        given = qkv(n, requires_grad=True)
        with kept() as so_far:
            out = linear_attention(*given, causal=causal, backend=backend)
        return so_far(), sum(x.nbytes for x in (*given, out))

    (short, _), (long, own) = bytes_kept(128), bytes_kept(512)
    assert long <= 4 * short
    if backend == "triton":
        assert long <= 1.1 * own


@backends
@pytest.mark.parametrize("causal", [True, False])
def test_no_allocation_grows_faster_than_the_length(causal, backend):
    """Neither the largest one, forward and backward, nor all together."""

    def sizes(n: int) -> list[int]:
        given = qkv(n, requires_grad=True)
        with Allocated() as allocated:
            out = linear_attention(*given, causal=causal, backend=backend)
            torch.autograd.grad(out, given, torch.ones_like(out))
        return allocated.sizes

    short, long = sizes(128), sizes(512)
    assert max(long) <= 4 * max(short)
    assert sum(long) <= 4.2 * sum(short)


@pytest.mark.skipif(not INTERPRETING, reason="counts what the interpreter reads")
def test_keys_are_read_once_for_each_chunk_of_queries():
    """So that the work grows linearly: no token of a longer sequence is read more often."""

    def reads(n: int) -> dict[str, int]:
        # Two launches of a kernel have q and k as the same argument, whose reads are added.
        given = [torch.randn(1, 2, n, 16, requires_grad=True) for _ in range(3)]
        with checked_accesses(count_reads=True) as accesses:
            out = linear_attention(*given, backend="triton")
            torch.autograd.grad(out, given, torch.ones_like(out))
        return {name: int(x.max()) for name, x in accesses.reads.items() if name.split(".")[-1] == "ptr"}

    assert reads(64) == reads(256)


@backends
def test_the_size_of_a_state_does_not_depend_on_the_length(backend):
    for n in (0, 1, 64, 200):
        q, k, v = qkv(n)
        _, state = linear_attention(q, k, v, return_state=True, backend=backend)
        assert (state.kv.shape, state.k_sum.shape) == ((1, 2, 16, 16), (1, 2, 16))
        assert sum(x.untyped_storage().nbytes() for x in state) <= 2 * 2 * 16 * 17 * 4


@quick.only(normalize=True)
@backends
@pytest.mark.parametrize("normalize", [True, False])
def test_tokens_one_by_one_are_one_call(normalize, backend):
    """Out of each token and the last state; also in pieces of other sizes."""
    n = 70
    q, k, v = (x.double() if INTERPRETING else x for x in qkv(n))
    options: dict[str, Any] = {"normalize": normalize, "return_state": True, "backend": backend}
    out, after = linear_attention(q, k, v, **options)
    for sizes in ([1] * n, [64, 1, 5], [0, 3, 0, 66, 1]):
        state, outs, start = None, [], 0
        for size in sizes:
            piece = slice(start, start + size)
            found, state = linear_attention(
                q[:, :, piece], k[:, :, piece], v[:, :, piece], initial_state=state, **options
            )
            outs.append(found)
            start += size
        torch.testing.assert_close(torch.cat(outs, 2), out)
        torch.testing.assert_close(tuple(state), tuple(after))


@backends
def test_gradients_go_back_through_states(backend):
    """Training on pieces, each after the state of the one before, is training on the whole."""
    given = qkv(70, requires_grad=True)
    dout = torch.randn(1, 4, 70, 16, device=DEVICE)
    expected = torch.autograd.grad(linear_attention(*given, backend=backend), given, dout)
    state, outs = None, []
    for piece in (slice(0, 30), slice(30, 31), slice(31, 70)):
        one = [x[:, :, piece] for x in given]
        out, state = linear_attention(*one, initial_state=state, return_state=True, backend=backend)
        outs.append(out)
    found = torch.autograd.grad(torch.cat(outs, 2), given, dout)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@backends
def test_one_more_token_costs_the_same_after_any_number(backend, monkeypatch):
    """The operators, all their results, the launched programs and the numbers that they read."""
    one = qkv(1)

    def cost(n: int) -> tuple[Any, ...]:
        _, state = linear_attention(*qkv(n), return_state=True, backend=backend)
        return counted(lambda: linear_attention(*one, initial_state=state, return_state=True, backend=backend))

    def counted(call: Callable[[], object]) -> tuple[Any, ...]:
        with Allocated() as allocated:
            call()
        if backend == "torch" or not INTERPRETING:
            return allocated.operators, sorted(allocated.sizes)
        with checked_accesses(count_reads=True) as accesses:
            call()
        reads = {name: int(x.sum()) for name, x in accesses.reads.items()}
        return allocated.operators, sorted(allocated.sizes), accesses.launched, reads

    assert cost(1) == cost(65) == cost(200)
