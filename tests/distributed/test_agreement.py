"""One process gets a wrong call, or another one: all of them raise an error, and the next call is right."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from fusedattn import KVCache, Rope, biases, masks
from fusedattn.distributed.split import Split
from tests.distributed.own_tokens import (
    CONTEXTS,
    HEAD_DIM,
    NHEADS,
    PAIRS,
    PLAIN,
    OwnTokens,
    by_one_process,
    context_of,
    own_tokens,
)
from tests.distributed.processes import NEEDS_PROCESSES, Lost, Meeting, Raised, caught, in_steps, without_trouble
from tests.helpers import quick

pytestmark = NEEDS_PROCESSES

Arguments = Callable[[OwnTokens, bool], dict[str, Any]]


class Wrong(NamedTuple):
    """A wrong call of one process.

    Attributes:
        kind: the type of the error on that process; its bases' names would do as well.
        words: a pattern in its message.
        arguments: that the call differs in, of the tokens of a process; True: of the process that is wrong.
    """

    kind: type[Exception]
    words: str
    arguments: Arguments


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def trues(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def rope(n_positions: int, positions_q: Tensor | None = None, positions_k: Tensor | None = None) -> Rope:
    return Rope.from_theta(HEAD_DIM, n_positions).at(positions_q, positions_k)


def only_if(wrong: bool, **arguments: Any) -> dict[str, Any]:
    return arguments if wrong else {}


def mask_without_eager() -> masks.Mask:
    from fusedattn.testing import triton_functions

    return masks.function(triton_functions._sees, None, (torch.zeros(8, dtype=torch.int32), NHEADS))


def nested(x: OwnTokens) -> Tensor:
    return torch.nested.nested_tensor(list(x.q.transpose(1, 2)), layout=torch.jagged).transpose(1, 2)


def distributed(x: OwnTokens, wrong: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # on all processes
    return {name: DTensor.from_local(getattr(x, name), mesh, [Replicate()]) for name in "qkv"} if wrong else {}


# Some would be found in the tokens of one process, others need all keys or the rows of other processes.
WRONG: dict[str, Wrong] = {
    "dtype of q": Wrong(TypeError, "dtype of q", lambda x, wrong: only_if(wrong, q=x.q.float())),
    "integers": Wrong(TypeError, "q: got torch.int64", lambda x, wrong: only_if(wrong, q=x.q.long())),
    "q is a list": Wrong(TypeError, "q: got list", lambda x, wrong: only_if(wrong, q=x.q.tolist())),
    "three dimensions": Wrong(ValueError, "four dimensions", lambda x, wrong: only_if(wrong, k=x.k[0])),
    "no k": Wrong(TypeError, "k", lambda x, wrong: only_if(wrong, k=None)),
    "another batch of v": Wrong(ValueError, "v: got batch 1", lambda x, wrong: only_if(wrong, v=x.v[:1])),
    "a nested q": Wrong(
        Exception, r"nested|dense", lambda x, wrong: only_if(wrong, q=nested(x))
    ),  # ValueError or NotImplementedError
    "nested tensors": Wrong(
        NotImplementedError, "nested", lambda x, wrong: only_if(wrong, q=nested(x), k=nested(x), v=nested(x))
    ),
    "DTensors": Wrong(NotImplementedError, "DTensor", distributed),
    "a mask that is a string": Wrong(TypeError, "mask: got str", lambda x, wrong: only_if(wrong, mask="causal")),
    "a mask of floats": Wrong(
        TypeError, "mask: got a torch.float64", lambda x, wrong: only_if(wrong, mask=zeros(x.length, x.seqlen))
    ),
    "padding of all tokens": Wrong(
        ValueError,
        r"padding\(valid\)",
        lambda x, wrong: {"mask": masks.padding(trues(2, x.seqlen if wrong else x.length))},
    ),
    "documents of all tokens": Wrong(
        ValueError,
        r"documents\(ids_q\)",
        lambda x, wrong: {"mask": masks.documents(trues(2, x.seqlen if wrong else x.length).int())},
    ),
    "prefixes of another batch": Wrong(
        ValueError,
        r"prefix_lm\(lengths\)",
        lambda x, wrong: {"mask": masks.prefix_lm(torch.zeros(3 if wrong else 2, dtype=torch.int32))},
    ),
    "a mask with the rows of all queries": Wrong(
        ValueError,
        "boolean",
        lambda x, wrong: {"mask": masks.boolean(trues(x.seqlen if wrong else x.length, x.seqlen))},
    ),
    "a mask with too few rows": Wrong(
        ValueError,
        "boolean",
        lambda x, wrong: {"mask": masks.boolean(trues(x.length - 3 if wrong else x.length, x.seqlen))},
    ),
    "a mask with own keys": Wrong(
        ValueError,
        "boolean",
        lambda x, wrong: {"mask": masks.boolean(trues(x.length, x.length if wrong else x.seqlen))},
    ),
    "a tree of own queries": Wrong(
        ValueError, "tree", lambda x, wrong: {"mask": masks.tree(trues(x.length, x.length if wrong else x.seqlen))}
    ),
    "blocks of all queries": Wrong(
        ValueError,
        "block_sparse",
        lambda x, wrong: {
            "mask": masks.block_sparse(trues((x.seqlen if wrong else x.length) // 16, x.seqlen // 16), 16)
        },
    ),
    "a bias with the rows of all queries": Wrong(
        ValueError, "bias", lambda x, wrong: {"bias": zeros(x.seqlen if wrong else x.length, x.seqlen)}
    ),
    "a bias with too few rows": Wrong(
        ValueError, "bias", lambda x, wrong: {"bias": zeros(x.length - 3 if wrong else x.length, x.seqlen)}
    ),
    "a bias with own keys": Wrong(
        ValueError, "bias", lambda x, wrong: {"bias": zeros(x.length, x.length if wrong else x.seqlen)}
    ),
    "a bias of other heads": Wrong(
        ValueError, "bias", lambda x, wrong: {"bias": zeros(3 if wrong else NHEADS, x.length, x.seqlen)}
    ),
    "a relative bias of all queries": Wrong(
        ValueError,
        "relative",
        lambda x, wrong: {"bias": biases.relative(zeros(x.seqlen if wrong else x.length, 5))},
    ),
    "slopes of other heads": Wrong(
        ValueError, "slopes", lambda x, wrong: {"bias": biases.alibi(torch.ones(NHEADS + wrong))}
    ),
    "a position outside of the tables": Wrong(
        ValueError,
        "positions_k",
        lambda x, wrong: {"rope": rope(x.seqlen, None, torch.full((x.length,), x.seqlen if wrong else 3))},
    ),
    "positions of all queries": Wrong(
        ValueError,
        "positions_q",
        lambda x, wrong: {"rope": rope(x.seqlen, torch.zeros(x.seqlen if wrong else x.length).int())},
    ),
    "short tables": Wrong(ValueError, "rope", lambda x, wrong: {"rope": rope(x.seqlen - wrong)}),
    "rope is a tensor": Wrong(TypeError, "rope", lambda x, wrong: only_if(wrong, rope=zeros(64, 4))),
    "dropout_p of 2": Wrong(ValueError, "dropout_p: got 2", lambda x, wrong: {"dropout_p": 2.0 if wrong else 0.2}),
    "dropout_p is text": Wrong(TypeError, "dropout_p", lambda x, wrong: only_if(wrong, dropout_p="0.1")),
    "a seed that is a number": Wrong(
        TypeError,
        "dropout_seed",
        lambda x, wrong: {"dropout_p": 0.2, "dropout_seed": 3 if wrong else torch.tensor([3])},
    ),
    "an infinite scale": Wrong(ValueError, "scale: got inf", lambda x, wrong: only_if(wrong, scale=float("inf"))),
    "a negative softcap": Wrong(ValueError, "softcap", lambda x, wrong: {"softcap": -1.0 if wrong else 1.0}),
    "sinks of other heads": Wrong(ValueError, "sinks", lambda x, wrong: {"sinks": zeros(NHEADS + wrong)}),
    "a score function that is none": Wrong(
        TypeError, "score_mod", lambda x, wrong: only_if(wrong, score_mod=torch.exp)
    ),
    "deterministic is None": Wrong(TypeError, "deterministic", lambda x, wrong: only_if(wrong, deterministic=None)),
    "no splits": Wrong(ValueError, "num_splits", lambda x, wrong: only_if(wrong, num_splits=0)),
    "an unknown backend": Wrong(ValueError, "backend: got 'cuda'", lambda x, wrong: only_if(wrong, backend="cuda")),
    "a mask function that torch cannot run": Wrong(
        NotImplementedError, "eager", lambda x, wrong: only_if(wrong, mask=mask_without_eager())
    ),
    "an unknown argument": Wrong(TypeError, "is_causal", lambda x, wrong: only_if(wrong, is_causal=True)),
    "a cache": Wrong(
        NotImplementedError,
        "cache",
        lambda x, wrong: only_if(
            wrong, cache=KVCache.contiguous(2, NHEADS, 80, HEAD_DIM, dtype=torch.float64), k=None, v=None
        ),
    ),
}

# Each is right in itself; True: of the last rank.
DIFFERENT: dict[str, Arguments] = {
    "scale": lambda x, last: {"scale": 0.25 if last else 0.5},
    "causal on one": lambda x, last: {"mask": masks.causal() if last else None},
    "alignment": lambda x, last: {"mask": masks.causal("top_left" if last else "bottom_right")},
    "window": lambda x, last: {"mask": masks.window(5, 6 if last else 5)},
    "padding on one": lambda x, last: {"mask": masks.padding(trues(2, x.length)) if last else masks.full()},
    "block size": lambda x, last: {"mask": masks.block_sparse(trues(1, 1), 64 if last else 128)},
    "dtype": lambda x, last: {name: getattr(x, name).float() for name in "qkv"} if last else {},
    "head_dim": lambda x, last: {name: getattr(x, name)[..., :4] for name in "qk"} if last else {},
    "head_dim_v": lambda x, last: {"v": x.v[..., :4]} if last else {},
    "query heads": lambda x, last: {"q": x.q.repeat(1, 2, 1, 1)} if last else {},
    "KV heads": lambda x, last: {name: getattr(x, name)[:, :2] for name in "kv"} if last else {},
    "batch": lambda x, last: {name: getattr(x, name)[:1] for name in "qkv"} if last else {},
    "softcap on one": lambda x, last: {"softcap": 1.0 if last else None},
    "softcap": lambda x, last: {"softcap": 1.0 if last else 2.0},
    "dropout on one": lambda x, last: {"dropout_p": 0.5 if last else 0.0},
    "dropout_p": lambda x, last: {"dropout_p": 0.5 if last else 0.4},
    "seed on one": lambda x, last: {"dropout_p": 0.5, "dropout_seed": torch.tensor([7]) if last else None},
    "sinks on one": lambda x, last: {"sinks": zeros(NHEADS) if last else None},
    "bias on one": lambda x, last: {"bias": zeros(1, x.seqlen) if last else None},
    "kind of bias": lambda x, last: {"bias": biases.alibi(torch.ones(NHEADS)) if last else zeros(NHEADS, 1, x.seqlen)},
    "rope on one": lambda x, last: {"rope": rope(x.seqlen) if last else None},
    "rotary_dim": lambda x, last: {"rope": Rope.from_theta(HEAD_DIM if last else 4, x.seqlen)},
    "pairing of rope": lambda x, last: {"rope": Rope.from_theta(HEAD_DIM, x.seqlen, interleaved=last)},
    "positions on one": lambda x, last: {"rope": rope(x.seqlen, None, torch.arange(x.length) if last else None)},
    "largest score on one": lambda x, last: {"return_max": last},
    "lse on one": lambda x, last: {"return_lse": last},
}

# Right in itself, of no effect, and of other shapes on the last rank: the result of one process, or an error on all.
RIGHT_OR_REFUSED: dict[str, Arguments] = {
    "positions per batch on one": lambda x, last: {"rope": at_zero(x, torch.int64, *(2,) * last)},
    "positions of two dtypes": lambda x, last: {"rope": at_zero(x, torch.int32 if last else torch.int64)},
    "a bias with rows on one": lambda x, last: {"bias": zeros(1, 1, x.length if last else 1, x.seqlen)},
    "a bias with heads on one": lambda x, last: {"bias": zeros(1, NHEADS if last else 1, x.length, x.seqlen)},
    "a mask with batches on one": lambda x, last: {
        "mask": masks.causal() & masks.boolean(trues(2 if last else 1, 1, x.length, x.seqlen))
    },
    "blocks with rows on one": lambda x, last: {
        "mask": masks.causal() & masks.block_sparse(trues(1, 1, x.length // 16 if last else 1, x.seqlen // 16), 16)
    },
}


def at_zero(x: OwnTokens, dtype: torch.dtype, *batch: int) -> Rope:
    positions = torch.zeros(*batch, x.length, dtype=dtype)
    return rope(1, positions, positions)


def solve(step: str, seqlen: int) -> dict[str, Any]:
    """In each process: a right call, one that is wrong or different on one process, and a right one again."""
    of_context, name = step.split(": ")
    x = own_tokens(context_of(of_context), seqlen)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if name in WRONG:
        arguments = WRONG[name].arguments
        before = caught(lambda: x.call(**arguments(x, False)))
        result = caught(lambda: x.call(**arguments(x, is_last)))
    else:
        arguments = (DIFFERENT | RIGHT_OR_REFUSED)[name]
        before = caught(x.call)
        changes = arguments(x, is_last)
        result = caught(lambda: (x.call if name in DIFFERENT else x.out_and_gradients)(**changes))
    return {"before": before, "result": result, "after": Meeting.here.then(x.out_and_gradients)}


def contexts_of(world: int) -> tuple[str, ...]:
    return PLAIN if world == 2 else (*PLAIN, *PAIRS)


Solved = Callable[..., Any]


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> Solved:
    """The results of each rank by number of processes: all steps share processes, which start slowly."""
    directory = tmp_path_factory.mktemp("processes")

    @functools.cache
    def results(world: int) -> dict[str, list[Any]]:
        steps = [f"{x}: {y}" for x in contexts_of(world) for y in (*WRONG, *DIFFERENT, *RIGHT_OR_REFUSED)]
        return in_steps(world, directory / str(world), solve, steps, 32 * world)

    return results


def runs(names: Any) -> pytest.MarkDecorator:
    rows = [(world, x, name) for world in (2, 4) for x in contexts_of(world) for name in names]
    return pytest.mark.parametrize(("world", "of_context", "name"), rows)


def assert_right(results: list[Any], of_context: str, seqlen: int) -> None:
    """Fail unless the processes have out and gradients of :func:`by_one_process`."""
    assert not any(isinstance(x, Raised | Lost) for x in results), results
    world = len(results)
    for i, whole in enumerate(by_one_process(seqlen)):
        own = joined([x[i] for x in results], of_context, seqlen)
        torch.testing.assert_close(own, whole, rtol=1e-12, atol=1e-12, msg=lambda m, i=i: f"tensor {i} of {world}: {m}")


def joined(shards: list[Tensor], of_context: str, seqlen: int) -> Tensor:
    """The whole tensor, of the tokens of all ranks."""
    kind = CONTEXTS[of_context]
    if of_context in PAIRS:
        pairs = [torch.cat(shards[i : i + 2], 2) for i in range(0, len(shards), 2)]
        return Split(seqlen, len(pairs), "zigzag").joined(pairs, 2)
    balance = "contiguous" if kind["mode"] == "ulysses" else kind.get("balance", "zigzag")
    return Split(seqlen, len(shards), balance).joined(shards, 2)


@quick.only(world=2)
@runs(WRONG)
def test_all_processes_hear_of_an_error_in_one(solved: Solved, world: int, of_context: str, name: str) -> None:
    found = without_trouble(solved(world)[f"{of_context}: {name}"])
    assert not any(isinstance(x["before"], Raised) for x in found), found
    wrong, results = WRONG[name], [x["result"] for x in found]
    assert all(isinstance(x, Raised) for x in results), results
    *others, own = results
    assert wrong.kind is Exception or own.kind == wrong.kind.__name__, own
    assert re.search(wrong.words, own.message), own
    for other in others:  # what is gathered is wrong on all
        assert other in (own, Raised("RuntimeError", f"rank {world - 1}: {own.kind}: {own.message}")), results
    assert_right([x["after"] for x in found], of_context, 32 * world)


@quick.only(world=2)
@runs(DIFFERENT)
def test_different_calls_are_an_error_on_all(solved: Solved, world: int, of_context: str, name: str) -> None:
    found = without_trouble(solved(world)[f"{of_context}: {name}"])
    for x in found:
        assert isinstance(x["result"], Raised), found
        assert x["result"].kind == "ValueError", x["result"]
        assert "different calls on different ranks" in x["result"].message
        calls = [x["result"].message.split(f"rank {rank}: ")[1].split("; rank")[0] for rank in range(world)]
        assert len(set(calls)) == 2, calls
        assert calls[0] != calls[-1]
    assert_right([x["after"] for x in found], of_context, 32 * world)


@quick.only(world=2)
@runs(RIGHT_OR_REFUSED)
def test_tensors_that_broadcast_otherwise(solved: Solved, world: int, of_context: str, name: str) -> None:
    found = without_trouble(solved(world)[f"{of_context}: {name}"])
    results = [x["result"] for x in found]
    if any(isinstance(x, Raised) for x in results):
        assert all(isinstance(x, Raised) and x.kind in ("ValueError", "RuntimeError") for x in results), results
        assert any(x.kind == "ValueError" for x in results), results
    else:
        assert_right(results, of_context, 32 * world)
    assert_right([x["after"] for x in found], of_context, 32 * world)
