"""What autograd, autocast, seeds, contexts and groups do to attention over tokens that are split among processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from fusedattn import Rope, attention, biases, masks
from fusedattn.distributed import Context
from tests.distributed.own_tokens import (
    HEAD_DIM,
    NHEADS,
    OwnTokens,
    by_one_process,
    context_of,
    own_tokens,
    whole_tokens,
)
from tests.distributed.processes import NEEDS_PROCESSES, Raised, Steps, caught, in_steps, new_group, without_trouble

pytestmark = NEEDS_PROCESSES

SEQLEN = 13
NAMES = ("ring", "contiguous ring", "all_gather", "ulysses")

step = Steps()  # for each context
once = Steps()  # of two processes
of_four = Steps()  # of four


def run(name: str) -> Any:
    of_context, _, rest = name.partition(": ")
    return step[rest](of_context) if rest else (once | of_four)[name]()


Found = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results of a step, by rank."""

    @functools.cache
    def of_world(world: int) -> dict[str, list[Any]]:
        names = list(of_four) if world == 4 else [*(f"{x}: {y}" for y in step for x in NAMES), *once]
        return in_steps(world, tmp_path_factory.mktemp(f"processes{world}"), run, names)

    def results(name: str, world: int = 2) -> list[Any]:
        return without_trouble(of_world(world)[name])

    return results


contexts = pytest.mark.parametrize("of_context", NAMES)


def close(found: Any, wanted: Any, digits: int = 12) -> bool:
    """Whether two lists of tensors agree."""
    return len(found) == len(wanted) and all(
        torch.allclose(x.double(), y.double(), rtol=10.0**-digits, atol=10.0**-digits, equal_nan=True)
        for x, y in zip(found, wanted, strict=True)
    )


def equal(found: Any, wanted: Any) -> bool:
    """Whether two lists of tensors have the same bits."""
    return len(found) == len(wanted) and all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def shares(x: OwnTokens, of_whole: list[Tensor]) -> list[Tensor]:
    """The tokens of this process."""
    return [x.context.shard(y, 2) for y in of_whole]


def everything(x: OwnTokens) -> dict[str, Any]:
    """Options with tensors of every kind, as leaves where they may be."""
    generator = torch.Generator().manual_seed(1)
    valid = torch.rand(2, x.seqlen, generator=generator) < 0.8
    ids = torch.randint(0, 2, (2, x.seqlen), generator=generator)
    rows = torch.randn(1, NHEADS, x.seqlen, x.seqlen, generator=generator, dtype=torch.float64)
    positions = torch.arange(x.seqlen)
    mask = masks.prefix_lm(torch.tensor([3, 9])) & masks.padding(x.context.shard(valid))
    mask &= masks.documents(x.context.shard(ids)) & masks.boolean(x.context.shard(rows > -1.0, 2))
    bias = biases.tensor(x.context.shard(rows, 2).requires_grad_())
    slopes = torch.rand(NHEADS, generator=generator).requires_grad_()
    own_positions = x.context.shard(positions, 0)
    return {
        "mask": mask,
        "bias": bias + biases.alibi(slopes),
        "rope": Rope.from_theta(HEAD_DIM, x.seqlen).at(own_positions, own_positions.clone()),
        "sinks": torch.randn(NHEADS, generator=generator, dtype=torch.float64).requires_grad_(),
        "dropout_p": 0.2,
        "dropout_seed": torch.tensor([5]),
        "softcap": 2.0,
    }


def tensors_of(options: dict[str, Any]) -> list[Tensor]:
    rope = options["rope"]
    of_rope = [rope.cos, rope.sin, rope.positions_q, rope.positions_k]
    others = [options["sinks"], options["dropout_seed"], *of_rope]
    return [*options["mask"].tensors().values(), *options["bias"].tensors().values(), *others]


@step
def inputs_stay(of_context: str) -> Any:
    """Whether bits and versions of all inputs are those from before."""
    x = own_tokens(context_of(of_context), SEQLEN)
    options = everything(x)
    tensors = [x.q, x.k, x.v, *tensors_of(options)]
    before = [(y.detach().clone(), y._version) for y in tensors]
    out = x.call(q=x.q.requires_grad_(), k=x.k.requires_grad_(), v=x.v.requires_grad_(), **options)
    back = torch.ones_like(out)
    out.backward(back, retain_graph=True)
    return [
        *(torch.equal(y, z) and y._version == n for y, (z, n) in zip(tensors, before, strict=True)),
        back._version == 0,
    ]


@step
def same_bits(of_context: str) -> Any:
    """Results of two calls, and of two backwards of one."""
    x = own_tokens(context_of(of_context), SEQLEN, torch.float32)
    options = everything(x)
    options["bias"] = biases.tensor(options["bias"].tensor.detach().float().requires_grad_())
    leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, options["bias"].tensor, options["sinks"])]
    results = []
    for _ in range(2):
        out, lse = x.call(**options, return_lse=True)
        through = out.square().sum() + lse.masked_fill(lse.isinf(), 0.0).sum()
        for retain in (True, False):
            gradients = torch.autograd.grad(through, leaves, retain_graph=retain)
            results.append([out.detach(), lse.detach(), *gradients])
    return [equal(y, results[0]) for y in results[1:]]


LEAVES = ("q", "k", "v", "sinks", "bias")


def of_one_leaf(of_context: str, leaf: str) -> Any:
    """Whether the gradient of one leaf alone is that among all."""
    x = own_tokens(context_of(of_context), SEQLEN)
    sinks = torch.randn(NHEADS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bias = torch.zeros(NHEADS, 1, x.seqlen, dtype=torch.float64)
    tensors = dict(zip(LEAVES, (x.q, x.k, x.v, sinks, bias), strict=True))

    def gradients(*names: str) -> list[Tensor]:
        leaves = {name: y.detach().requires_grad_(name in names) for name, y in tensors.items()}
        out = x.call(**leaves)
        return list(torch.autograd.grad(out.square().sum(), [leaves[name] for name in names]))

    return close(gradients(leaf), [gradients(*LEAVES)[LEAVES.index(leaf)]])


step |= {f"of {leaf}": functools.partial(of_one_leaf, leaf=leaf) for leaf in LEAVES}


@step
def through_lse(of_context: str, seqlen: int = SEQLEN) -> Any:
    """Gradients through lse alone, through out alone though lse is returned, and through both."""
    x = own_tokens(context_of(of_context), seqlen)
    wholes = [y.requires_grad_() for y in whole_tokens(seqlen)]
    leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]
    results = []
    of_whole = attention(*wholes, mask=masks.causal(), return_lse=True, backend="torch")
    own = x.call(**dict(zip("qkv", leaves, strict=True)), return_lse=True)
    for of_out, of_lse in ((0, 1), (1, 0), (1, 1)):
        gradients = []
        for (out, lse), needed in ((own, leaves), (of_whole, wholes)):
            through = [y.square().sum() for y, n in ((out, of_out), (lse, of_lse)) if n]
            found = torch.autograd.grad(through, needed, retain_graph=True, allow_unused=True)
            gradients.append([torch.zeros_like(y) if g is None else g for g, y in zip(found, needed, strict=True)])
        results.append(close(gradients[0], shares(x, gradients[1])))
    return [*results, close([own[1].detach()], shares(x, [of_whole[1].detach()]))]


@step
def through_lse_of_one(of_context: str) -> Any:
    """Of one token: a process has none."""
    return through_lse(of_context, 1)


@step
def expanded_gradients(of_context: str) -> Any:
    """Gradients that come as one number for all, or in another order in memory."""
    x = own_tokens(context_of(of_context), SEQLEN)
    leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]
    out = x.call(**dict(zip("qkv", leaves, strict=True)))
    ones = torch.ones_like(out)
    backs = ones, ones[:1, :1, :1, :1].expand(out.shape), ones.transpose(0, 3).contiguous().transpose(0, 3)
    first, *others = (torch.autograd.grad(out, leaves, back, retain_graph=True) for back in backs)
    return [close(y, first) for y in others]


@step
def one_tensor(of_context: str) -> Any:
    """q, k and v are one tensor, whose gradient is the sum."""
    context, whole = context_of(of_context), whole_tokens(SEQLEN)[0].requires_grad_()
    own = context.shard(whole.detach(), 2).requires_grad_()
    results = []
    for y, options in ((whole, {}), (own, {"context": context})):
        out = attention(y, y, y, mask=masks.causal(), backend="torch", **options)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), y)])
    return close(results[1], [context.shard(y, 2) for y in results[0]])


@step
def without_gradients(of_context: str) -> Any:
    x = own_tokens(context_of(of_context), SEQLEN)
    wanted = x.call(**everything(x))
    results = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = own_tokens(x.context, SEQLEN)
            out = y.call(q=y.q.requires_grad_() if mode is torch.no_grad else y.q, **everything(y))
            results.append(not out.requires_grad and close([out], [wanted.detach()]))
    return results


@step
def autocast(of_context: str) -> Any:
    """float32 inputs as bfloat16 ones, float64 ones as they are; no effect on a backward of another forward."""
    context = context_of(of_context)
    x, wide = own_tokens(context, SEQLEN, torch.float32), own_tokens(context, SEQLEN)
    narrow = own_tokens(context, SEQLEN, torch.bfloat16)
    sinks = torch.randn(NHEADS, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, lse = x.call(sinks=sinks, return_lse=True)
        uncast = wide.out_and_gradients()
    wanted = narrow.call(sinks=sinks, return_lse=True)
    leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]
    gradients = []
    for region in (nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16)):
        out = x.call(**dict(zip("qkv", leaves, strict=True)))
        with region:
            gradients.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    return {
        "dtypes": (cast.dtype, lse.dtype),
        "as bfloat16": equal([cast, lse], wanted),
        "float64": close(uncast, wide.out_and_gradients()),
        "a backward in a region": equal(gradients[1], gradients[0]),
    }


@step
def second_order(of_context: str) -> Any:
    """An error on all ranks, or the numbers of one process; with a soft-cap, since torch's own functions have none."""
    x = own_tokens(context_of(of_context), SEQLEN)
    wholes = [y.requires_grad_() for y in whole_tokens(SEQLEN)]
    leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]

    def second(out: Tensor, needed: list[Tensor]) -> list[Tensor]:
        loss = out.square().sum()
        penalty = sum(y.square().sum() for y in torch.autograd.grad(loss, needed, create_graph=True))
        (loss + penalty).backward()
        return [y.grad for y in needed]

    own = caught(lambda: second(x.call(**dict(zip("qkv", leaves, strict=True)), softcap=2.0), leaves))
    of_whole = second(attention(*wholes, mask=masks.causal(), softcap=2.0, backend="torch"), wholes)
    return (own if isinstance(own, Raised) else close(own, shares(x, of_whole), 9),)


@step
def forward_mode(of_context: str) -> Any:
    """An error on all ranks, or the numbers of one process."""
    x = own_tokens(context_of(of_context), SEQLEN)
    wholes = whole_tokens(SEQLEN)

    def derivative(call: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
        return [torch.func.jvp(call, tuple(tensors), tuple(tensors))[1]]

    own = caught(lambda: derivative(lambda q, k, v: x.call(q=q, k=k, v=v, softcap=2.0), [x.q, x.k, x.v]))
    of_whole = derivative(lambda q, k, v: attention(q, k, v, mask=masks.causal(), softcap=2.0, backend="torch"), wholes)
    return (own if isinstance(own, Raised) else close(own, shares(x, of_whole)),)


@step
def dropout_with_a_seed(of_context: str) -> Any:
    """Which weights are dropped (values are unit vectors), and gradients; of several seeds."""
    context = context_of(of_context)
    q, k, _ = whole_tokens(SEQLEN)
    v = torch.eye(SEQLEN, dtype=torch.float64).expand(2, NHEADS, -1, -1)
    results = []
    for seed in (0, 5, -(2**62), 2**63 - 1):
        found = []
        for of_call in ({}, {"context": context}):
            leaves = [(context.shard(y, 2) if of_call else y).detach().requires_grad_() for y in (q, k, v)]
            options: dict[str, Any] = {"dropout_p": 0.4, "dropout_seed": torch.tensor([seed]), **of_call}
            out = attention(*leaves, mask=masks.causal(), backend="torch", **options)
            found.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
        wanted = [context.shard(y, 2) for y in found[0]]
        results.append(torch.equal(found[1][0] == 0.0, wanted[0] == 0.0) and close(found[1], wanted))
    return results


@once
def dropout_without_a_seed() -> Any:
    """Every process draws from a generator of its own; all modes drop the same, as they have one seed, then others."""
    found = []
    for of_context in NAMES:
        context = context_of(of_context)
        torch.manual_seed(100 + dist.get_rank())
        q, k = torch.zeros(2, 1, NHEADS, SEQLEN, HEAD_DIM, dtype=torch.float64)
        v = torch.eye(SEQLEN, dtype=torch.float64).expand(1, NHEADS, -1, -1)
        own = [context.shard(y, 2) for y in (q, k, v)]
        calls = [attention(*own, dropout_p=0.4, context=context, backend="torch") for _ in range(2)]
        found.append([context.unshard(y, 2) == 0.0 for y in calls])
    share = found[0][0].double().mean().item()
    return [equal(y, found[0]) for y in found], torch.equal(*found[0]), share


@step
def generators(of_context: str) -> Any:
    """A call without dropout draws no number."""
    x = own_tokens(context_of(of_context), SEQLEN)
    before = torch.get_rng_state()
    x.out_and_gradients()
    return torch.equal(before, torch.get_rng_state())


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "seed": lambda options: options["dropout_seed"].add_(1),
    "padding": lambda options: options["mask"].valid.logical_not_(),
    "documents": lambda options: options["mask"].documents.q.zero_(),
    "boolean": lambda options: options["mask"].allowed.logical_not_(),
    "prefix": lambda options: options["mask"].prefix.lengths.zero_(),
    "positions": lambda options: options["rope"].positions_q.zero_(),
    "tables": lambda options: options["rope"].cos.zero_(),
}


@step
def changed_behind_the_forward(of_context: str) -> dict[str, Any]:
    """Gradients after a tensor was changed in place between forward and backward: an error, or those from before."""
    context = context_of(of_context)
    results: dict[str, Any] = {}
    for name, change in CHANGES.items():
        x = own_tokens(context, SEQLEN)
        leaves = [y.requires_grad_() for y in (x.q, x.k, x.v)]
        options = everything(x)
        out = x.call(**options)
        wanted = torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)
        change(options)
        gradients = caught(lambda out=out, leaves=leaves: torch.autograd.grad(out.square().sum(), leaves))
        results[name] = gradients if isinstance(gradients, Raised) else close(gradients, wanted)
    return results


@step
def recomputed(of_context: str) -> Any:
    """Activation checkpointing, with dropout from the generator."""
    x = own_tokens(context_of(of_context), SEQLEN)
    results = []
    for wrap in (lambda f, *args: f(*args), functools.partial(checkpoint, use_reentrant=False)):
        torch.manual_seed(3)
        leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]
        out = wrap(lambda q, k, v: x.call(q=2 * q, k=k, v=v, dropout_p=0.3).square(), *leaves)
        results.append([out.detach(), *torch.autograd.grad(out.sum(), leaves)])
    return equal(*results)


@step
def largest_scores(of_context: str) -> Any:
    """With rows that see nothing, NaN and infinity; alone and with lse."""
    context = context_of(of_context)
    q, k, v = whole_tokens(SEQLEN)
    k[0, 0, 4] = torch.nan
    q[1, 1, 11], k[1, 1, 7] = 1e200, 1e200  # whose product is infinite
    seen = torch.rand(SEQLEN, SEQLEN, generator=torch.Generator().manual_seed(2)) < 0.3
    seen[[0, 9]] = False
    results = []
    for of_call in ({}, {"return_lse": True}):
        mask = masks.boolean(seen)
        *_, whole = attention(q, k, v, mask=mask, return_max=True, backend="torch", **of_call)
        own = [context.shard(y, 2) for y in (q, k, v)]
        mask = masks.boolean(context.shard(seen, 0))
        *_, largest = attention(*own, mask=mask, return_max=True, context=context, backend="torch", **of_call)
        results.append(close([largest], [context.shard(whole, 2)], 14) and not largest.requires_grad)
    return results


@step
def two_contexts(of_context: str) -> Any:
    """Forwards and backwards of two contexts in turn."""
    first, second = context_of(of_context), context_of("ring")
    x, y = own_tokens(first, SEQLEN), own_tokens(second, 2 * SEQLEN)
    leaves = [[z.detach().requires_grad_() for z in (a.q, a.k, a.v)] for a in (x, y)]
    outs = [a.call(**dict(zip("qkv", b, strict=True))) for a, b in zip((x, y), leaves, strict=True)]
    outs += [a.call(**dict(zip("qkv", b, strict=True))) for a, b in zip((x, y), leaves, strict=True)]
    gradients = [torch.autograd.grad(outs[i].square().sum(), leaves[i % 2]) for i in (1, 0, 2, 3)]
    wanted = [shares(a, by_one_process(a.seqlen)[1:]) for a in (x, y)]
    return [close(g, wanted[i]) for g, i in zip(gradients, (1, 0, 0, 1), strict=True)]


@step
def default_device(of_context: str) -> Any:
    """The numbers of an agreement are on the CPU whatever torch's default device is."""
    x = own_tokens(context_of(of_context), SEQLEN)
    wanted = x.call()
    with torch.device("meta"):
        return equal([x.call()], [wanted]) and torch.equal(x.context.positions(x.length).cpu(), own_positions(x))


def own_positions(x: OwnTokens) -> Tensor:
    return x.context.shard(torch.arange(x.seqlen, device="cpu"), 0)


@once
def groups_of_one() -> Any:
    """Each process is a group of its own, in every mode."""
    groups = [new_group([rank]) for rank in range(dist.get_world_size())]
    results = []
    for mode in ("ring", "all_gather", "ulysses"):
        results.append(_is_right(Context(groups[dist.get_rank()], mode=mode)))
    return results


@once
def groups_of_some() -> Any:
    """One process is in more groups than the other."""
    alone = [new_group([rank]) for rank in range(dist.get_world_size())]
    if dist.get_rank() == 0:
        Context(alone[0])
    return [_is_right(context_of("ring"))]


@of_four
def subgroups() -> Any:
    """Two pairs of processes that are not neighbours, in different modes at the same time."""
    pairs = [new_group([0, 2]), new_group([1, 3])]
    rank, side = dist.get_rank(), dist.get_rank() % 2
    context = Context(pairs[side], mode=("ring", "all_gather")[side])
    x = own_tokens(context, SEQLEN + side)
    found = [x.out_and_gradients(), x.out_and_gradients()]
    errors = caught(lambda: x.call(scale=torch.inf if rank == 3 else 1.0))
    if side:
        assert isinstance(errors, Raised)
        assert rank == 3 or errors.message.startswith("rank 3: ValueError: scale"), errors
    return [close(y, shares(x, by_one_process(SEQLEN + side))) for y in found]


def _is_right(context: Context) -> bool:
    x = own_tokens(context, SEQLEN)
    return close(x.out_and_gradients(), shares(x, by_one_process(SEQLEN)))


@of_four
def meshes() -> Any:
    """Meshes whose ranks are in another order, right or refused; and two dimensions of three."""
    results = []
    for ranks, mode in (
        ([[0, 2], [1, 3]], ("ring", "ulysses")),
        ([[3, 1], [0, 2]], ("all_gather", "ulysses")),
        ([[0, 1, 2, 3]], ("ring", "ulysses")),
        ([[2], [0], [3], [1]], ("ring", "ulysses")),
        ([3, 1, 0, 2], "ring"),
        ([3, 1, 0, 2], "ulysses"),
    ):
        mesh = DeviceMesh("cpu", ranks)
        result = caught(lambda mesh=mesh, mode=mode: _is_right(Context(mesh, mode=mode)))
        refused = isinstance(result, Raised) and result.kind == "ValueError" and result.message.startswith("group: got")
        results.append(True if refused else result)
    cube = DeviceMesh("cpu", torch.arange(4).view(2, 2, 1), mesh_dim_names=("data", "tokens", "heads"))
    return [*results, _is_right(Context(cube["tokens", "heads"], mode=("ring", "ulysses")))]


@of_four
def subgroups_of_some() -> Any:
    """Two of four processes have a context of their own, then all have one."""
    some = new_group([1, 3])
    rank = dist.get_rank()
    results = []
    if rank % 2:
        results.append(_is_right(Context(some)))
    return [*results, _is_right(context_of("ring"))]


ALL_TRUE = (
    "inputs_stay", "same_bits", "through_lse", "through_lse_of_one", "expanded_gradients", "one_tensor",
    "without_gradients", "dropout_with_a_seed", "generators", "recomputed", "largest_scores", "two_contexts",
)  # fmt: skip


@contexts
@pytest.mark.parametrize("name", ALL_TRUE)
def test_results(found: Found, of_context: str, name: str) -> None:
    for result in found(f"{of_context}: {name}"):
        assert result if isinstance(result, bool) else all(result) and result, result


@contexts
def test_agreement_on_another_default_device(found: Found, of_context: str) -> None:
    assert all(result is True for result in found(f"{of_context}: default_device")), of_context


@contexts
@pytest.mark.parametrize("leaf", LEAVES)
def test_one_leaf_needs_a_gradient(found: Found, of_context: str, leaf: str) -> None:
    assert all(found(f"{of_context}: of {leaf}"))


@contexts
@pytest.mark.parametrize("what", ["as bfloat16", "float64", "a backward in a region"])
def test_autocast(found: Found, of_context: str, what: str) -> None:
    for results in found(f"{of_context}: autocast"):
        assert results["dtypes"] == (torch.bfloat16, torch.float32)
        assert results[what]


@contexts
@pytest.mark.parametrize("name", ["second_order", "forward_mode"])
def test_other_derivatives_are_right_or_refused(found: Found, of_context: str, name: str) -> None:
    results = [x for (x,) in found(f"{of_context}: {name}")]
    assert all(x is True for x in results) or all(isinstance(x, Raised) for x in results), results


@contexts
@pytest.mark.parametrize("change", CHANGES)
def test_changes_behind_the_forward(found: Found, of_context: str, change: str) -> None:
    for results in found(f"{of_context}: changed_behind_the_forward"):
        result = results[change]
        refused = isinstance(result, Raised) and "modified by an inplace operation" in result.message
        assert result is True or refused, result


def test_dropout_without_a_seed_is_that_of_one_seed(found: Found) -> None:
    for same, repeated, share in found("dropout_without_a_seed"):
        assert all(same)
        assert not repeated
        assert 0.3 < share < 0.5


@pytest.mark.parametrize("name", ["groups_of_one", "groups_of_some"])
def test_groups(found: Found, name: str) -> None:
    for results in found(name):
        assert all(x is True for x in results), results


@pytest.mark.thorough
@pytest.mark.parametrize("name", of_four)
def test_groups_of_four(found: Found, name: str) -> None:
    for results in found(name, 4):
        assert all(x is True for x in results), results
