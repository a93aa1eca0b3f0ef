"""What processes send: the tensors of any dtype and shape arrive, and no more bytes leave than each mode needs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusedattn import attention, masks
from fusedattn.distributed.collectives import (
    Passing,
    Spec,
    as_bytes,
    exchange,
    from_bytes,
    gather,
    n_bytes,
    spec_of,
    views,
)
from tests.distributed.own_tokens import BATCH, HEAD_DIM, NHEADS, PLAIN, context_of, own_tokens
from tests.distributed.processes import NEEDS_PROCESSES, Steps, in_steps, new_group, without_trouble
from tests.helpers import quick

pytestmark = NEEDS_PROCESSES

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.int32,
    torch.uint8, torch.bool,
)  # fmt: skip
WORLDS = (2, 4)

step = Steps()


def run(name: str) -> Any:
    return step[name]()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], list[Any]]:
    """The results of a step in so many processes, by rank."""

    @functools.cache
    def of_world(world: int) -> dict[str, list[Any]]:
        return in_steps(world, tmp_path_factory.mktemp(f"processes{world}"), run, list(step))

    def results(world: int, name: str) -> list[Any]:
        return without_trouble(of_world(world)[name])

    return results


worlds = pytest.mark.parametrize("world", WORLDS)


def numbers(dtype: torch.dtype, *shape: int, start: int = 0) -> Tensor:
    n = torch.Size(shape).numel()
    return ((torch.arange(n) + start) % 13).view(shape).to(dtype)


def sent(source: int, target: int, dtype: torch.dtype) -> Tensor:
    """What one rank sends to another: of other sizes for each pair, some empty, none contiguous."""
    return numbers(dtype, 3, (source + 2 * target) % 4, 2, start=5 * source + target).transpose(0, 2)


@step
def exchanged() -> list[Tensor]:
    """Every dtype between all pairs."""
    group, rank, world = new_group(), dist.get_rank(), dist.get_world_size()
    results = []
    for dtype in DTYPES:
        specs = [spec_of(sent(source, rank, dtype)) for source in range(world)]
        results += exchange([sent(rank, target, dtype) for target in range(world)], specs, group)
    return results


@quick.only(world=2)
@worlds
def test_exchanged_tensors_arrive(found: Callable[[int, str], list[Any]], world: int) -> None:
    for rank, results in enumerate(found(world, "exchanged")):
        wanted = [sent(source, rank, dtype) for dtype in DTYPES for source in range(world)]
        assert_same(results, wanted)


def assert_same(results: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(results) == len(wanted)
    for x, y in zip(results, wanted, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert torch.equal(x.double(), y.double())


def own_part(rank: int, dtype: torch.dtype) -> Tensor:
    """Of other sizes on each rank, empty on the first, not contiguous."""
    return numbers(dtype, 2, rank, 3, start=rank)[..., ::2].transpose(1, 2)


@step
def gathered() -> list[Tensor]:
    group, rank, world = new_group(), dist.get_rank(), dist.get_world_size()
    results = []
    for dtype in DTYPES:
        specs = [spec_of(own_part(source, dtype)) for source in range(world)]
        results += gather(own_part(rank, dtype), specs, group)
    return results


def passing(tensors: Sequence[Tensor], specs: Sequence[Spec], group: dist.ProcessGroup) -> Callable[[], list[Tensor]]:
    """Send tensors to the next process; the function returns those from the one before, which have these `specs`."""
    under_way = Passing(
        torch.cat([as_bytes(x) for x in tensors]), torch.empty(n_bytes(specs), dtype=torch.uint8), group
    )
    return lambda: views(under_way.received(), specs)


@step
def passed() -> list[Tensor]:
    """Every dtype around the ring, two tensors at once, and two messages under way at the same time."""
    group, rank, world = new_group(), dist.get_rank(), dist.get_world_size()
    before = (rank - 1) % world
    results = []
    for dtype in DTYPES:
        held = [sent(rank, i, dtype) for i in range(4)]
        specs = [spec_of(sent(before, i, dtype)) for i in range(4)]
        first, second = passing(held[:3], specs[:3], group), passing(held[3:], specs[3:], group)
        results += [*first(), *second()]
    return results


@quick.only(world=2)
@worlds
@pytest.mark.parametrize("name", ["gathered", "passed"])
def test_gathered_and_passed_tensors_arrive(found: Callable[[int, str], list[Any]], world: int, name: str) -> None:
    for rank, results in enumerate(found(world, name)):
        if name == "gathered":
            wanted = [own_part(source, dtype) for dtype in DTYPES for source in range(world)]
        else:
            wanted = [sent((rank - 1) % world, i, dtype) for dtype in DTYPES for i in range(4)]
        assert_same(results, wanted)


@step
def mixed() -> list[Tensor]:
    """Dtypes of 1, 8 and 2 bytes in one message, so that numbers do not begin at multiples of their size."""
    group, world = new_group(), dist.get_world_size()
    parts = [numbers(torch.bool, 3), numbers(torch.float64, 2, 2), numbers(torch.bfloat16, 5), numbers(torch.int64)]
    own = dist.get_rank()
    from_all = exchange(parts[:world], [spec_of(parts[own])] * world, group)
    return from_all


@quick.only(world=2)
@worlds
def test_tensors_of_several_dtypes_arrive_in_one_message(found: Callable[[int, str], list[Any]], world: int) -> None:
    parts = [numbers(torch.bool, 3), numbers(torch.float64, 2, 2), numbers(torch.bfloat16, 5), numbers(torch.int64)]
    for rank, results in enumerate(found(world, "mixed")):
        assert_same(results, [parts[rank]] * world)


@step
def empty() -> list[Tensor]:
    """Nothing to send for any process."""
    group, world = new_group(), dist.get_world_size()
    x = torch.zeros(2, 0, 3, requires_grad=True)
    found = exchange([x] * world, [spec_of(x)] * world, group) + gather(x, [spec_of(x)] * world, group)
    (gradient,) = torch.autograd.grad(sum(y.sum() for y in found), x)
    return [*(y.detach() for y in found), gradient]


@step
def empty_passed() -> list[Tensor]:
    x = torch.zeros(2, 0, 3)
    return passing([x, x], [spec_of(x)] * 2, new_group())()


@quick.only(world=2)
@worlds
@pytest.mark.parametrize("name", ["empty", "empty_passed"])
def test_nothing_to_send(found: Callable[[int, str], list[Any]], world: int, name: str) -> None:
    for results in found(world, name):
        assert results
        assert all(x.shape == (2, 0, 3) for x in results)


@step
def adjoint() -> dict[str, Tensor]:
    """``<f(x), y> - <x, gradient by x of <f(x), y>>`` summed over all ranks, relative to a sum of absolute terms."""
    group, rank, world = new_group(), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    parts = [sent(rank, target, torch.float64).requires_grad_() for target in range(world)]
    own = own_part(rank, torch.float64).requires_grad_()
    functions: dict[str, tuple[list[Tensor], Callable[[], list[Tensor]]]] = {
        "exchange": (
            parts,
            lambda: exchange(parts, [spec_of(sent(source, rank, torch.float64)) for source in range(world)], group),
        ),
        "gather": (
            [own],
            lambda: gather(own, [spec_of(own_part(source, torch.float64)) for source in range(world)], group),
        ),
    }
    results = {}
    for name, (leaves, function) in functions.items():
        found = function()
        back = [torch.randn_like(x) for x in found]
        gradients = torch.autograd.grad(found, leaves, back)
        assert all(x.shape == y.shape for x, y in zip(gradients, leaves, strict=True))
        forward = torch.stack([(x * y).sum() for x, y in zip(found, back, strict=True)]).sum()
        backward = torch.stack([(x * y).sum() for x, y in zip(gradients, leaves, strict=True)]).sum()
        sums = torch.stack([forward - backward, forward.abs()]).detach()
        dist.all_reduce(sums)
        results[name] = sums[0].abs() / sums[1]
    return results


@quick.only(world=2)
@worlds
def test_gradients_take_the_way_back(found: Callable[[int, str], list[Any]], world: int) -> None:
    for results in found(world, "adjoint"):
        assert all(x < 1e-14 for x in results.values()), results


@step
def partly_needed() -> list[Any]:
    """One part needs a gradient, and one result of several is used; integers beside it; 16 bits summed in float32."""
    group, rank, world = new_group(), dist.get_rank(), dist.get_world_size()
    x, other = torch.ones(3, requires_grad=True), torch.ones(3)
    parts = [x if target == 0 else other for target in range(world)]
    (by_part,) = torch.autograd.grad(exchange(parts, [spec_of(x)] * world, group)[0].sum() * (rank + 1), x)
    y = torch.ones(2, requires_grad=True)
    (of_last,) = torch.autograd.grad(gather(y, [spec_of(y)] * world, group)[-1].sum() * (rank + 1), y)
    whole = gather(torch.arange(2), [spec_of(torch.arange(2))] * world, group)
    z = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    into = torch.tensor([256.0 if rank == 0 else 0.75], dtype=torch.bfloat16)  # 256.75 is 256 in bfloat16, 257.5 is 258
    (of_sum,) = torch.autograd.grad(gather(z, [spec_of(z)] * world, group), z, [into] * world)
    return [by_part, of_last, any(i.requires_grad for i in whole), of_sum]


@quick.only(world=2)
@worlds
def test_gradients_of_some(found: Callable[[int, str], list[Any]], world: int) -> None:
    total = world * (world + 1) / 2
    for rank, (by_part, of_last, needs, of_sum) in enumerate(found(world, "partly_needed")):
        assert by_part.tolist() == [1.0 if rank == 0 else 0.0] * 3  # the first rank's result of rank 0
        assert of_last.tolist() == [total if rank == world - 1 else 0.0] * 2
        assert not needs
        wanted = torch.tensor(256.0 + 0.75 * (world - 1)).bfloat16()
        assert of_sum.dtype == torch.bfloat16
        assert of_sum.item() == wanted.item()


def test_bytes_of_a_tensor() -> None:
    for dtype in DTYPES:
        x = numbers(dtype, 2, 3, 4).transpose(0, 2)
        assert as_bytes(x).dtype == torch.uint8
        assert_same([from_bytes(as_bytes(x), spec_of(x))], [x])
        shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), as_bytes(x)])[1:]
        assert_same([from_bytes(shifted, spec_of(x))], [x])
        assert as_bytes(x[:0]).shape == (0,)


class Sent(TorchDispatchMode):
    """The bytes that leave this process in each operator of c10d, and how often it runs; agreements apart."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._opname
            if name == "_allgather_base_" and args[1].dtype == torch.int64:
                name = "agreement"
            self.counts[name] += 1
            self.bytes[name] += _leaving(name, args)
        return func(*args, **(kwargs or {}))


def _leaving(name: str, args: Any) -> int:
    rank, world = dist.get_rank(), dist.get_world_size()
    if name == "send":
        return sum(x.nbytes for x in args[0])
    if name == "alltoall_base_":
        return args[1].nbytes - args[4][rank] * args[1].itemsize
    return 0 if name == "recv_" else args[1].nbytes * (world - 1)


@step
def counted() -> dict[str, Any]:
    """(operators, bytes) of the forward and the backward of each mode, and what CommDebugMode counts."""
    results: dict[str, Any] = {}
    for mode in PLAIN:
        for dtype in (torch.float32, torch.bfloat16):
            x = own_tokens(context_of(mode), SEQLEN, dtype)
            with Sent() as first:
                x.call()
            leaves = [y.requires_grad_() for y in (x.q, x.k, x.v)]
            with Sent() as forward, CommDebugMode() as debug:
                out = x.call()
            with Sent() as backward, CommDebugMode() as debug_backward:
                torch.autograd.grad(out.float().square().sum(), leaves)
            counts = [dict(y.counts) for y in (first, forward, backward)]
            sizes = [{name: n for name, n in y.bytes.items() if n and name != "agreement"} for y in (forward, backward)]
            of_debug = [{str(op): n for op, n in y.get_comm_counts().items()} for y in (debug, debug_backward)]
            results[f"{mode}, {dtype}"] = counts, sizes, of_debug
    return results


SEQLEN = 16


@quick.only(world=2)
@worlds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", PLAIN)
def test_no_more_is_sent_than_needed(
    found: Callable[[int, str], list[Any]], mode: str, dtype: torch.dtype, world: int
) -> None:
    share = BATCH * NHEADS * SEQLEN // world * HEAD_DIM  # numbers of q, k, v or out of one process
    size, others = dtype.itemsize, world - 1
    operators: list[dict[str, int]]
    sizes: list[dict[str, int]]
    if mode == "ring":  # k and v pass together; in the backward again, and their gradients, in float32, to their owner
        operators = [{"send": others, "recv_": others}, {"send": 2 * world - 1, "recv_": 2 * world - 1}]
        sizes = [{"send": others * 2 * share * size}, {"send": others * 2 * share * size + world * 2 * share * 4}]
    elif mode == "all_gather":
        operators = [{"_allgather_base_": 2}, {"alltoall_base_": 2}]
        sizes = [{"_allgather_base_": 2 * others * share * size}, {"alltoall_base_": 2 * others * share * size}]
    else:  # q, k, v and out, and lse in float32, which needs no gradient
        of_others = 4 * share * size * others // world
        operators = [{"alltoall_base_": 4}] * 2
        sizes = [
            {"alltoall_base_": of_others},
            {"alltoall_base_": of_others},
        ]
    for results in found(world, "counted"):
        (first, *counts), found_sizes, of_debug = results[f"{mode}, {dtype}"]
        assert first == {"agreement": 2, **operators[0]}  # what all processes check together, once
        assert counts == [{"agreement": 1, **operators[0]}, operators[1]]
        assert found_sizes == sizes
        seen = [{f"c10d.{name}": n for name, n in y.items() if name not in ("send", "recv_")} for y in operators]
        seen[0]["c10d._allgather_base_"] = seen[0].get("c10d._allgather_base_", 0) + 1
        assert of_debug == seen


class _OfAll(torch.autograd.Function):
    """A tensor that all processes have; its gradient is their sum, divided by their number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()


@step
def gradcheck() -> list[str]:
    """gradcheck of the whole problem, in step on all ranks, which have all of its tokens and its result."""
    failed = []
    for mode in PLAIN:
        context = context_of(mode)

        def function(q: Tensor, k: Tensor, v: Tensor, context: Any = context) -> tuple[Tensor, Tensor]:
            own = [context.shard(_OfAll.apply(x), 2) for x in (q, k, v)]
            found = attention(*own, mask=masks.causal(), context=context, backend="torch", return_lse=True)
            out, lse = (context.unshard(x, 2) for x in found)
            return out, lse

        torch.manual_seed(0)
        seqlen = dist.get_world_size() + 1
        leaves = [torch.randn(1, n, seqlen, 2, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2)]
        try:
            torch.autograd.gradcheck(function, leaves, fast_mode=dist.get_world_size() > 2)  # slow
        except Exception as error:
            failed.append(f"{mode}: {error}")
    return failed


@quick.only(world=2)
@worlds
def test_gradcheck(found: Callable[[int, str], list[Any]], world: int) -> None:
    for failed in found(world, "gradcheck"):
        assert not failed, failed
