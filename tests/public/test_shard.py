"""Shards: rectangles of the scores, each computed alone, are parts of the whole attention."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import backends, dropout, merge, testing
from fusedattn.biases import Bias, as_bias
from fusedattn.distributed.cutting import Rectangle, cut
from fusedattn.masks import as_mask
from fusedattn.options import Options
from fusedattn.prepare import prepared, scale_of
from fusedattn.shard import WHOLE, Shard
from fusedattn.testing import Case, Inputs
from tests.conftest import BACKENDS, DEVICE, assert_results_accurate, inputs_of
from tests.helpers import quick

BASE = Case(batch=2, nheads_q=4, nheads_kv=2, seqlen_q=45, seqlen_k=70, head_dim=16)

# The fields of BASE that each problem changes.
PROBLEMS: dict[str, dict[str, Any]] = {
    "causal": {"causal": "bottom_right"},
    "window from the start": {"causal": "top_left", "window": (20, 3)},
    "prefix": {"prefix": True, "causal": "bottom_right"},
    "prefix from the start": {"prefix": True, "causal": "top_left"},
    "padding": {"padding": "uneven", "causal": "bottom_right"},
    "boolean": {"boolean": "broadcast"},
    "documents": {"documents": "shuffled"},
    "blocks": {"layout": 16, "causal": "bottom_right"},
    "tree": {"tree": True},
    "mask function": {"mask_function": True},
    "strided": {"sparse": "strided"},
    "fixed": {"sparse": "fixed"},
    "BigBird": {"sparse": "bigbird"},
    "score function": {"score_mod": True},
    "alibi": {"alibi": "per_batch"},
    "relative": {"relative": "per_query"},
    "bias": {"bias": "full", "causal": "bottom_right"},
    "rope": {"rope": "half", "causal": "bottom_right"},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.4, "causal": "bottom_right"},
}

ROWS, KEYS, HEADS, BATCHES = (0, 16, 45), (0, 48, 70), (0, 2, 4), (0, 1, 2)


def options_of(inputs: Inputs) -> Options:
    given = inputs.options
    rope = given.pop("rope")
    if rope is not None and rope.positions_q is None:
        n, m = inputs.q.shape[2], inputs.k.shape[2]
        rope = rope.at(torch.arange(m - n, m, device=DEVICE), torch.arange(m, device=DEVICE))
    scale = scale_of(given.pop("scale"), inputs.q)
    mask, bias = as_mask(given.pop("mask")), as_bias(given.pop("bias", None))
    return Options(mask=mask, bias=bias, rope=rope, scale=scale, return_lse=True, **given)


def in_shards(inputs: Inputs, backend: str) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of the whole, from its shards."""
    q, k, v = inputs.q, inputs.k, inputs.v
    group = q.shape[1] // k.shape[1]
    whole = Shard(nheads=q.shape[1], seqlen_q=q.shape[2], seqlen_k=k.shape[2])

    def one(batches: slice, heads: slice, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
        shard = whole.part(batches.start, heads.start, rows.start, keys.start)
        options = cut(options_of(inputs), Rectangle(shard, heads, rows, keys, batches))
        if keys.start:
            options.sinks = None
        of_kv = slice(heads.start // group, heads.stop // group)
        parts = q[batches, heads, rows], k[batches, of_kv, keys], v[batches, of_kv, keys]
        *prepared_parts, chosen = prepared(*parts, options, backend)
        out, lse, _ = backends.attention(*prepared_parts, options, chosen)
        assert lse is not None
        return out, lse

    def pieces(stops: tuple[int, ...]) -> list[slice]:
        return [slice(a, b) for a, b in itertools.pairwise(stops)]

    of_batches = []
    for batches in pieces(BATCHES):
        of_heads = []
        for heads in pieces(HEADS):
            of_rows = [
                merge(*zip(*(one(batches, heads, rows, keys) for keys in pieces(KEYS)), strict=True))
                for rows in pieces(ROWS)
            ]
            of_heads.append([torch.cat(parts, dim=2) for parts in zip(*of_rows, strict=True)])
        of_batches.append([torch.cat(parts, dim=1) for parts in zip(*of_heads, strict=True)])
    out, lse = (torch.cat(parts) for parts in zip(*of_batches, strict=True))
    return out, lse


@quick.only(backend="torch", problem="dropout")
@quick.every(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_shards_are_parts_of_the_whole(problem: str, backend: str) -> None:
    inputs = inputs_of(replace(BASE, name=problem, **PROBLEMS[problem]))

    def function(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        own = replace(
            inputs,
            q=q,
            k=k,
            v=v,
            bias=options.get("bias"),
            sinks=options.get("sinks"),
            score_mod=options.get("score_mod"),
        )
        return in_shards(own, backend)

    actual = testing.run(function, inputs)
    assert_results_accurate(actual, inputs, testing.golden(inputs), testing.baseline(inputs), problem)


def test_a_part_of_dropout_is_that_of_the_whole() -> None:
    seed = torch.tensor([7])
    whole = dropout.keep_mask(seed, 0.5, 2, 4, 40, 50)
    part = dropout.keep_mask(seed, 0.5, 1, 2, 13, 21, shard=Shard(1, 2, 9, 17, nheads=4))
    assert torch.equal(part, whole[1:, 2:, 9:22, 17:38])


def test_the_distances_of_a_part_are_those_of_the_whole() -> None:
    bias = Bias(slopes=torch.rand(2))
    part = bias.dense(5, 6, shard=Shard(first_query=3, first_key=8, seqlen_q=10, seqlen_k=20))
    assert torch.equal(part, bias.dense(10, 20)[:, :, 3:8, 8:14])


def test_numbers_are_made_once() -> None:
    """A copy to the device for each call would take longer than a short call."""
    numbers = Shard(1, 2, 3, 4, 8, 50, 60).numbers(2, 10, 20, torch.device(DEVICE))
    assert numbers.tolist() == [1, 2, 8, 3, 4, -1]
    assert numbers is Shard(1, 2, 3, 4, 8, 50, 60).numbers(2, 10, 20, torch.device(DEVICE))
    assert WHOLE.numbers(2, 10, 20, torch.device(DEVICE)).tolist() == [0, 0, 2, 0, 0, 0]
