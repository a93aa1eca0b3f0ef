"""Masks, biases and the other options of attention to a cache: each sequence as if it were alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusedattn import attention, biases, masks, reference
from fusedattn.shard import Shard
from fusedattn.testing import triton_functions
from tests.helpers import quick
from tests.helpers.cache_model import CACHED, DIM, DIM_V, HEADS_Q, Model, append, assert_attends, cache_in, device_of

BATCH, CAPACITY, SEQLEN_Q = 3, 34, 3
LENGTHS = [34, 2, 19]

Own = Callable[[int, int], dict[str, Any]]  # the options of sequence i with n keys
Call = tuple[dict[str, Any], Own]

backends = pytest.mark.parametrize("backend", CACHED)


def same(**options: Any) -> Call:
    """Options that are the same for a sequence alone."""
    return options, lambda i, n: {}


def calls() -> dict[str, Call]:
    """Calls by name."""
    torch.manual_seed(0)
    slopes, sinks, prefix = torch.rand(HEADS_Q), torch.randn(HEADS_Q), torch.tensor([9, 1, 2])
    slopes_of = torch.rand(BATCH, HEADS_Q)
    bias = torch.randn(BATCH, HEADS_Q, SEQLEN_Q, CAPACITY)
    bias[0, 0, 0, ::3] = -torch.inf
    bias[2, 1, 1] = -torch.inf
    bias[0, 1, 2, 3], bias[0, 2, 1] = 1e6, -1e5
    pairs = torch.rand(BATCH, HEADS_Q, SEQLEN_Q, CAPACITY) < 0.6
    pairs[2, 2] = False
    valid = torch.rand(BATCH, CAPACITY) < 0.6
    blocks = torch.tensor([[True, False, True]])
    table = torch.randn(BATCH, HEADS_Q, SEQLEN_Q, 2 * 6 + 1)
    causal = masks.causal()
    found: dict[str, Call] = {
        "causal": same(mask=causal),
        "causal from the start": same(mask=masks.causal("top_left")),
        "a window": same(mask=masks.window(6, 1)),
        "a window from the start": same(mask=masks.window(6, 1, "top_left")),
        "a scale": same(scale=0.3),
        "a negative scale": same(scale=-0.3),
        "soft-cap": same(softcap=0.7, mask=causal),
        "sinks": same(sinks=sinks, mask=causal),
        "sinks of -inf": same(sinks=torch.full((HEADS_Q,), -torch.inf), mask=causal),
        "alibi": same(bias=biases.alibi(slopes), mask=causal),
        "alibi, soft-cap, sinks": same(bias=biases.alibi(slopes), softcap=2.0, sinks=sinks),
    }

    def biased(of: torch.Tensor, **others: Any) -> Call:
        return {"bias": of} | others, lambda i, n: {"bias": biases.tensor(of[i % len(of)][None][..., :n])}

    found |= {
        "alibi of sequences": (
            {"bias": biases.alibi(slopes_of)},
            lambda i, n: {"bias": biases.alibi(slopes_of[i])},
        ),
        "bias": biased(bias),
        "bias, soft-cap, window": biased(bias, softcap=2.0, mask=masks.window(6, 0)),
        "bias of keys": biased(bias[:1, :1, :1]),
        "relative": (
            {"bias": biases.relative(table)},
            lambda i, n: {"bias": biases.relative(table[i : i + 1])},
        ),
        "padding": (
            {"mask": masks.padding(valid) & causal},
            lambda i, n: {"mask": masks.padding(valid[i : i + 1, :n]) & causal},
        ),
        "pairs": (
            {"mask": masks.boolean(pairs), "sinks": sinks},
            lambda i, n: {"mask": masks.boolean(pairs[i : i + 1, ..., :n])},
        ),
        "pairs of all": (
            {"mask": masks.boolean(pairs[0, 0]) & causal},
            lambda i, n: {"mask": masks.boolean(pairs[0, 0, :, :n]) & causal},
        ),
        "prefix_lm": (
            {"mask": masks.prefix_lm(prefix)},
            lambda i, n: {"mask": masks.prefix_lm(prefix[i : i + 1])},
        ),
        "block_sparse": (
            {"mask": masks.block_sparse(blocks, 16)},
            lambda i, n: {"mask": masks.block_sparse(blocks[:, : -(-n // 16)], 16)},
        ),
    }
    return found


CALLS = calls()


@pytest.fixture(autouse=True)
def _drawn(_seed: None) -> None:
    """Every test draws the same numbers."""


@quick.covering()
@quick.pairwise()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "pages of 17"])
@pytest.mark.parametrize("head_dim_v", [DIM, DIM_V])
@pytest.mark.parametrize("name", CALLS)
@backends
def test_each_sequence_alone(name, head_dim_v, layout, dtype, backend):
    options, own = CALLS[name]
    device = device_of(backend)
    cache = cache_in(layout, BATCH, CAPACITY, head_dim_v=head_dim_v, dtype=dtype, device=device)
    model = Model(BATCH)
    append(cache, model, LENGTHS, backend, dtype)

    def moved(x: Any) -> Any:
        return x.to(device) if hasattr(x, "to") else x

    given = {key: moved(x) for key, x in options.items()}
    assert_attends(cache, model, backend, dtype, SEQLEN_Q, of_sequence=lambda i, n: options | own(i, n), **given)


@backends
def test_scale_of_0(backend):
    """In float32: in 16 bits, where all scores are exact, so is the lse of eager PyTorch."""
    device = device_of(backend)
    cache = cache_in("contiguous", BATCH, CAPACITY, device=device)
    model = Model(BATCH)
    append(cache, model, LENGTHS, backend, torch.float32)
    assert_attends(cache, model, backend, torch.float32, SEQLEN_Q, scale=0.0)


@pytest.mark.parametrize("what", ["function", "score_mod", "dropout"])
@backends
def test_functions_get_the_number_of_their_sequence(what, backend):
    """So does dropout."""
    device = device_of(backend)
    cache = cache_in("pages of 16", BATCH, CAPACITY, device=device)
    model = Model(BATCH)
    append(cache, model, LENGTHS, backend, torch.float32)
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {
        "function": {"mask": triton_functions.mask_function(BATCH, HEADS_Q, generator)},
        "score_mod": {"score_mod": triton_functions.score_function(HEADS_Q, generator)},
        "dropout": {"dropout_p": 0.4, "dropout_seed": torch.tensor([5])},
    }[what]
    q = torch.randn(BATCH, HEADS_Q, SEQLEN_Q, DIM)
    given = {name: x.to(device) if hasattr(x, "to") else x for name, x in options.items()}
    results = attention(q.to(device), cache=cache, return_lse=True, backend=backend, **given)
    for i in range(BATCH):
        own = q[i : i + 1], *model.keys_and_values(i)
        golden = reference.attention(*(x.double() for x in own), **options, shard=Shard(i))
        for actual, truth in zip(results, golden, strict=False):
            torch.testing.assert_close(actual[i : i + 1].cpu().double(), truth, rtol=0, atol=2e-6)
