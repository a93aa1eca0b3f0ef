"""What a context refuses: lengths, heads, blocks, models and arguments; on all processes, with the reason."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fusedattn import attention, biases, fuse, masks, unfuse
from fusedattn.distributed import Context
from fusedattn.transformer import GPTModel, MultiHeadAttention, PositionalEncoding, TopBlockAttention
from tests.distributed.own_tokens import HEAD_DIM, OwnTokens, context_of, own_tokens
from tests.distributed.processes import NEEDS_PROCESSES, Lost, Meeting, Raised, Steps, caught, in_steps, new_group

pytestmark = NEEDS_PROCESSES

step = Steps()  # of two processes


def run(name: str) -> Any:
    return step[name]()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return in_steps(2, tmp_path_factory.mktemp("processes"), run, list(step))


def assert_all_raised(results: list[Any], kind: str, words: str) -> None:
    assert len(results) == 2
    for x in results:
        assert isinstance(x, Raised), results
        assert x.kind == kind, results
        assert re.search(words, x.message), results


def assert_one_raised(results: list[Any], rank: int, kind: str, words: str) -> None:
    """Fail unless one rank has an error of its own, and the other one hears of it."""
    assert all(isinstance(x, Raised) for x in results), results
    assert results[rank].kind == kind, results
    assert re.search(words, results[rank].message), results
    assert results[1 - rank].kind == "RuntimeError", results
    assert results[1 - rank].message == f"rank {rank}: {kind}: {results[rank].message}"


def with_lengths(of_context: str, lengths_q: list[int], lengths_k: list[int]) -> tuple[Any, Any]:
    """What a call returns if the ranks have so many tokens; and the next one, of 13 tokens."""
    context, rank = context_of(of_context), dist.get_rank()
    q, k = (torch.randn(1, 4, lengths[rank], HEAD_DIM) for lengths in (lengths_q, lengths_k))
    result = caught(lambda: attention(q, k, k, context=context, backend="torch"))
    return result, Meeting.here.then(own_tokens(context, 13).call)


LENGTHS = {
    "far from half": ("all_gather", [10, 30], [20, 20], r"got \[10, 30\] tokens .* for 40 tokens are \[20, 20\]"),
    "swapped": ("ring", [6, 7], [7, 6], r"got \[6, 7\] tokens .* for 13 tokens are \[7, 6\]"),
    "of another balance": ("contiguous ring", [7, 6], [6, 7], r"got \[7, 6\] tokens .* are \[6, 7\]"),
    "of keys": ("ulysses", [6, 7], [8, 4], r"got \[8, 4\] tokens .* for 12 tokens are \[6, 6\]"),
    "none on one": ("ring", [0, 1], [1, 0], r"got \[0, 1\] tokens .* are \[1, 0\]"),
}


@step
def lengths() -> dict[str, Any]:
    return {name: with_lengths(*row[:3]) for name, row in LENGTHS.items()}


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_that_shard_does_not_give_are_refused(found: dict[str, list[Any]], name: str) -> None:
    assert not any(isinstance(x, Raised | Lost) for x in found["lengths"]), found["lengths"]
    assert_all_raised([x[name][0] for x in found["lengths"]], "ValueError", LENGTHS[name][3])
    assert all(isinstance(x[name][1], Tensor) for x in found["lengths"])  # the next call


@step
def heads() -> Any:
    x = own_tokens(context_of("ulysses"), 8)
    results = caught(lambda: x.call(**{name: getattr(x, name)[:, :3] for name in "qkv"})), caught(x.call)
    context = context_of("ulysses")
    y = OwnTokens(context, *(torch.randn(1, n, 4, 8) for n in (2, 1, 1)), 8)
    return *results, caught(y.call)


def test_heads_that_cannot_be_divided_are_refused(found: dict[str, list[Any]]) -> None:
    assert_all_raised([x[0] for x in found["heads"]], "ValueError", "got 3 query heads .* multiples of 2")
    assert all(isinstance(y, Tensor) for x in found["heads"] for y in x[1:])


BLOCKS = {
    "ring": ("ring", 72, masks.full(), 64),
    "ring, causal": ("ring", 72, masks.causal(), 64),
    "contiguous ring": ("contiguous ring", 72, masks.full(), 32),
    "contiguous ring, causal": ("contiguous ring", 72, masks.causal(), 32),
    "all_gather": ("all_gather", 72, masks.causal(), 64),
    "ulysses": ("ulysses", 72, masks.causal(), 32),
}


def with_blocks(of_context: str, seqlen: int, mask: masks.Mask) -> tuple[Any, Any]:
    x = own_tokens(context_of(of_context), seqlen)
    rows = torch.ones(-(-x.length // 16), -(-seqlen // 16), dtype=torch.bool)
    result = caught(lambda: x.call(mask=mask & masks.block_sparse(rows, 16)))
    return result, Meeting.here.then(x.call)


step |= {f"blocks, {name}": functools.partial(with_blocks, *row[:3]) for name, row in BLOCKS.items()}


@pytest.mark.parametrize("name", BLOCKS)
def test_shares_that_begin_inside_a_block_are_refused(found: dict[str, list[Any]], name: str) -> None:
    """On every process, with the multiple that would do."""
    results = found[f"blocks, {name}"]
    assert not any(isinstance(x, Raised | Lost) for x in results), results
    assert_all_raised([x[0] for x in results], "ValueError", rf"block_sparse: .*multiple of {BLOCKS[name][3]}\b")
    assert all(isinstance(x[1], Tensor) for x in results)


@step
def parts_of_other_kinds() -> Any:
    """Tensors of a shape that was right as another part of the call."""
    x = own_tokens(context_of("contiguous ring"), 10)
    table = torch.zeros(4, 1, 5, dtype=torch.float64)
    right = caught(lambda: x.call(bias=biases.relative(table)))
    wrong = caught(lambda: x.call(bias=biases.tensor(table)))
    return right, wrong, Meeting.here.then(x.call)


def test_checks_of_one_part_do_not_count_for_another(found: dict[str, list[Any]]) -> None:
    results = found["parts_of_other_kinds"]
    assert not any(isinstance(x, Raised | Lost) for x in results), results
    assert all(isinstance(x[0], Tensor) for x in results)
    assert_all_raised([x[1] for x in results], "ValueError", r"bias: got shape \(4, 1, 5\)")
    assert all(isinstance(x[2], Tensor) for x in results)


MODES_THAT_ARE_NONE: tuple[Any, ...] = (
    "tree", ["ring"], None, ("ulysses", "ring"), ("ring", "ring"), ("ring", "ulysses", "ring"), ()
)  # fmt: skip


@step
def arguments() -> dict[str, Any]:
    group, lone = new_group(), DeviceMesh("cpu", torch.arange(2))
    pair = DeviceMesh("cpu", torch.arange(2).view(1, 2))
    of_mode = {f"mode {mode!r}": caught(lambda mode=mode: Context(group, mode=mode)) for mode in MODES_THAT_ARE_NONE}
    return of_mode | {
        "a balance": caught(lambda: Context(group, balance="even")),
        "no group": caught(lambda: Context(None)),
        "ranks": caught(lambda: Context([0, 1])),
        "a pair for a group": caught(lambda: Context(group, mode=("ring", "ulysses"))),
        "a pair for one dimension": caught(lambda: Context(lone, mode=("ring", "ulysses"))),
        "one for two dimensions": caught(lambda: Context(pair, mode="ring")),
        "right": caught(lambda: [Context(group), Context(lone), Context(pair, mode=("ring", "ulysses")), None][3]),
        "a context that is none": caught(lambda: attention(*(torch.randn(1, 1, 4, 8),) * 3, context="ring")),
        "a model's context that is none": caught(lambda: fuse(MultiHeadAttention(8, 2), context="ring")),
    }


ARGUMENTS = {
    "mode 'tree'": ("ValueError", "mode: got 'tree', allowed are 'ring', 'all_gather', 'ulysses'"),
    "mode ['ring']": ("ValueError", "mode: got"),
    "mode None": ("ValueError", "mode: got None"),
    "mode ('ulysses', 'ring')": ("ValueError", r"allowed are .*\('ring', 'ulysses'\)"),
    "mode ('ring', 'ring')": ("ValueError", "mode: got"),
    "mode ('ring', 'ulysses', 'ring')": ("ValueError", "mode: got"),
    "mode ()": ("ValueError", "mode: got"),
    "a balance": ("ValueError", "balance: got 'even', allowed are .*zigzag"),
    "no group": ("TypeError", "group: got NoneType, allowed are a ProcessGroup and a DeviceMesh"),
    "ranks": ("TypeError", "group: got list"),
    "a pair for a group": ("ValueError", "mode: got .* for 1 dimensions"),
    "a pair for one dimension": ("ValueError", "mode: got .* for 1 dimensions"),
    "one for two dimensions": ("ValueError", "mode: got 'ring' for 2 dimensions"),
    "a context that is none": ("TypeError", "context: got str"),
    "a model's context that is none": ("TypeError", "context: got str"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_wrong_arguments_of_a_context(found: dict[str, list[Any]], name: str) -> None:
    assert not any(isinstance(x, Raised | Lost) for x in found["arguments"]), found["arguments"]
    assert all(x["right"] is None for x in found["arguments"])
    assert_all_raised([x[name] for x in found["arguments"]], *ARGUMENTS[name])


def gpt(positions: str = "rotary", max_len: int = 64) -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(11, 16, 2, 2, max_len=max_len, positions=positions).double()


def whole_ids(seqlen: int = 20) -> Tensor:
    return torch.arange(3 * seqlen).view(3, seqlen) ** 2 % 11


@step
def models() -> dict[str, Any]:
    """What a fused model refuses on all processes."""
    context = context_of("ring")
    fused = fuse(gpt(), context=context, backend="torch")
    ids, layer = context.shard(whole_ids()), fuse(MultiHeadAttention(8, 2), context=context, backend="torch")
    return {
        "need_weights": caught(lambda: layer(torch.randn(1, 4, 8), need_weights=True)),
        "cache": caught(lambda: fused(ids, cache=fused.make_cache(3))),
        "generate": caught(lambda: fused.generate(ids, 2)),
        "offset": caught(lambda: fuse(nn.Sequential(PositionalEncoding(8), layer), context=context)[0](
            torch.randn(1, 4, 8), 1
        )),
        "nn.MultiheadAttention": caught(lambda: fuse(nn.MultiheadAttention(8, 2), context=context)),
        "nn.TransformerEncoderLayer": caught(
            lambda: fuse(nn.ModuleDict({"a": nn.TransformerEncoderLayer(8, 2), "b": layer}), context=context)
        ),
        "top blocks": caught(
            lambda: fuse(MultiHeadAttention(8, 2, attention=TopBlockAttention(4, 1)), context=context)
        ),
        "right": caught(lambda: fused(ids)),
    }  # fmt: skip


@step
def lists_of_blocks() -> Any:
    """A sparse mask with a tensor of the whole attention."""
    context = context_of("ring")
    mask = masks.selected_blocks(torch.zeros(1, 1, 1, 1, dtype=torch.int64), 16)
    q = torch.randn(1, 4, 8, HEAD_DIM)
    return caught(lambda: attention(q, q, q, mask=mask, context=context, backend="torch"))


def test_sparse_masks_with_tensors_are_refused(found: dict[str, list[Any]]) -> None:
    assert_all_raised(
        found["lists_of_blocks"], "NotImplementedError", r"mask: got selected_blocks\(indices\) and tensors"
    )


MODELS = {
    "need_weights": ("NotImplementedError", "need_weights: got True with a context"),
    "cache": ("NotImplementedError", "cache"),
    "generate": ("NotImplementedError", "cache"),
    "offset": ("NotImplementedError", "offset"),
    "nn.MultiheadAttention": ("NotImplementedError", r"the model itself\): takes no context"),
    "nn.TransformerEncoderLayer": ("NotImplementedError", "a.self_attn: takes no context"),
    "top blocks": ("NotImplementedError", "attention: takes no context"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_take_no_context(found: dict[str, list[Any]], name: str) -> None:
    assert not any(isinstance(x, Raised | Lost) for x in found["models"]), found["models"]
    assert_all_raised([x[name] for x in found["models"]], *MODELS[name])
    assert all(isinstance(x["right"], Tensor) for x in found["models"])


@step
def hugging_face() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=11
    )
    model = transformers.LlamaForCausalLM(config)
    before = model.config._attn_implementation
    refused = caught(lambda: fuse(model, context=context_of("ring")))
    return refused, before == model.config._attn_implementation


def test_models_of_transformers_take_no_context(found: dict[str, list[Any]]) -> None:
    pytest.importorskip("transformers")
    assert_all_raised([x[0] for x in found["hugging_face"]], "NotImplementedError", "takes no context")
    assert all(x[1] for x in found["hugging_face"])


@step
def unfused() -> dict[str, Any]:
    """Logits of a model of each kind of position: of all tokens before and behind, of own ones between."""
    results = {}
    for positions in ("sinusoidal", "learned", "rotary"):
        context, model, ids = context_of("ring"), gpt(positions), whole_ids()
        kinds = [type(module) for module in model.modules()]
        before = model(ids)
        own = fuse(model, context=context, backend="torch")(context.shard(ids))
        other = context_of("all_gather")
        own_of_other = fuse(model, context=other, backend="torch")(other.shard(ids))
        without = fuse(model, backend="torch")(ids)
        unfuse(model)
        left = [name for name, module in model.named_modules() if "context" in vars(module)]
        same = [type(module) for module in model.modules()] == kinds
        gathered = [context.unshard(own), other.unshard(own_of_other), without, model(ids)]
        results[positions] = [before, *gathered], left, same
    return results


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
def test_a_model_with_a_context_and_without(found: dict[str, list[Any]], positions: str) -> None:
    assert not any(isinstance(x, Raised | Lost) for x in found["unfused"]), found["unfused"]
    for x in found["unfused"]:
        (before, own, own_of_other, without, behind), left, same = x[positions]
        assert same
        assert not left
        assert torch.equal(before, behind)
        for result in (own, own_of_other, without):
            torch.testing.assert_close(result, before, rtol=1e-10, atol=1e-10)


@step
def positions_of_one() -> Any:
    """A learned position outside of the table, which one process needs alone."""
    context = context_of("contiguous ring")
    model = fuse(gpt("learned", max_len=16), context=context, backend="torch")
    result = caught(lambda: model(context.shard(whole_ids(20))))
    return result, Meeting.here.then(lambda: model(context.shard(whole_ids(16))))


@step
def weights_of_one() -> Any:
    context = context_of("ring")
    layer = fuse(MultiHeadAttention(8, 2), context=context, backend="torch")
    result = caught(lambda: layer(torch.randn(1, 4, 8), need_weights=dist.get_rank() == 0))
    return result, Meeting.here.then(lambda: layer(torch.randn(1, 4, 8)))


@step
def caches_of_one() -> Any:
    context = context_of("ring")
    model = fuse(gpt(), context=context, backend="torch").requires_grad_(False)
    ids = context.shard(whole_ids())
    result = caught(lambda: model(ids, cache=model.make_cache(3) if dist.get_rank() == 0 else None))
    return result, Meeting.here.then(lambda: model(ids))


OF_ONE = {
    "positions_of_one": (1, "ValueError", "positions"),
    "weights_of_one": (0, "NotImplementedError", "need_weights"),
    "caches_of_one": (0, "NotImplementedError", "cache"),
}


@pytest.mark.parametrize("name", OF_ONE)
def test_all_processes_hear_of_an_error_of_a_model(found: dict[str, list[Any]], name: str) -> None:
    assert not any(isinstance(x, Raised | Lost) for x in found[name]), found[name]
    assert_one_raised([x[0] for x in found[name]], *OF_ONE[name])
    assert all(isinstance(x[1], Tensor) for x in found[name])


@step
def unshard_of_other_widths() -> Any:
    context, rank = context_of("ring"), dist.get_rank()
    result = caught(lambda: context.unshard(torch.zeros(2, 4, 3 + rank)))
    return result, Meeting.here.then(lambda: context.unshard(torch.zeros(2, 4, 3)))


def test_unshard_refuses_parts_of_other_shapes(found: dict[str, list[Any]]) -> None:
    results = found["unshard_of_other_widths"]
    assert not any(isinstance(x, Raised | Lost) for x in results), results
    assert_all_raised([x[0] for x in results], "ValueError", "different calls on different ranks")
    assert all(x[1].shape == (2, 8, 3) for x in results)


@step
def unshard_without_the_dimension() -> Any:
    context, rank = context_of("ring"), dist.get_rank()
    result = caught(lambda: context.unshard(torch.zeros(2, 4), dim=1 + rank))
    return result, Meeting.here.then(lambda: context.unshard(torch.zeros(2, 4)))


@step
def positions_of_a_wrong_length() -> Any:
    context, rank = context_of("ring"), dist.get_rank()
    result = caught(lambda: context.positions(-3 if rank else 4))
    return result, Meeting.here.then(lambda: context.positions(4))


@pytest.mark.parametrize("name", ["unshard_without_the_dimension", "positions_of_a_wrong_length"])
def test_no_process_waits_for_one_with_a_wrong_argument(found: dict[str, list[Any]], name: str) -> None:
    assert not any(isinstance(x, Raised | Lost) for x in found[name]), found[name]
    assert all(isinstance(x[0], Raised) for x in found[name]), found[name]
    assert all(isinstance(x[1], Tensor) for x in found[name]), found[name]
