"""The table of docs/features.md: every row of it is called, forward and backward, on both backends."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedattn.support as support
from bench import support as page
from fusedattn import (
    FP8,
    KVCache,
    QKNorm,
    Rope,
    ScoreMod,
    attention,
    attention_varlen,
    attention_weights,
    biases,
    caches,
    linear_attention,
    masks,
    merge,
)
from fusedattn.support import FEATURES
from fusedattn.testing import triton_functions
from tests.conftest import BACKENDS, DEVICE, INTERPRETING
from tests.helpers import quick

pytestmark = pytest.mark.usefixtures("_seed")

BATCH, HEADS, SEQLEN_Q, SEQLEN_K, HEAD_DIM = 2, 4, 5, 9, 8

Call = Callable[..., Tensor]


def qkv(heads_kv: int = 2, head_dim: int = HEAD_DIM, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    sizes = ((HEADS, SEQLEN_Q), (heads_kv, SEQLEN_K), (heads_kv, SEQLEN_K))
    return [torch.randn(BATCH, h, n, head_dim, dtype=dtype, device=DEVICE, requires_grad=True) for h, n in sizes]


def with_options(make: Callable[[], dict[str, Any]], **of_inputs: Any) -> Callable[[str], Tensor]:
    return lambda backend: attention(*qkv(**of_inputs), **make(), backend=backend)


def ids(n: int) -> Tensor:
    return torch.arange(n, device=DEVICE)[None].expand(BATCH, -1) // 3


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bool, device=DEVICE)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, requires_grad=True)


def mask_function() -> masks.Mask:
    return triton_functions.mask_function(BATCH, HEADS, torch.Generator()).to(DEVICE)


def score_function() -> ScoreMod:
    return triton_functions.score_function(HEADS, torch.Generator()).to(DEVICE)


def learned_score_function() -> ScoreMod:
    score_mod = score_function()
    return score_mod.with_learned(score_mod.learned.requires_grad_())


def of_shaw(backend: str) -> Tensor:
    q, k, v = qkv()
    return attention(q, k, v, bias=biases.shaw(q, normal(7, HEAD_DIM)), backend=backend)


def of_tokens(mask: masks.Mask, n: int, backend: str) -> Tensor:
    q, k, v = (normal(BATCH, heads, n, HEAD_DIM) for heads in (HEADS, 2, 2))
    return attention(q, k, v, mask=mask, backend=backend)


def of_a_grid(backend: str) -> Tensor:
    mask = masks.sliding_tiles((2, 3), 2, (1, 2))
    return of_tokens(masks.neighborhood((3, 4), (3, 2)), 12, backend) + of_tokens(mask, 12, backend)


def of_diffusion(backend: str) -> Tensor:
    return of_tokens(masks.block_diffusion(6, 2), 12, backend)


def of_packed(backend: str) -> Tensor:
    q, k, v = (x[0].transpose(0, 1) for x in qkv())
    stops_q, stops_k = (torch.tensor([0, 2, n], dtype=torch.int32, device=DEVICE) for n in (SEQLEN_Q, SEQLEN_K))
    return attention_varlen(q, k, v, stops_q, stops_k, backend=backend)


def of_nested(backend: str) -> Tensor:
    parts = [torch.randn(n, HEADS, HEAD_DIM, device=DEVICE, requires_grad=True) for n in (3, 5)]
    x = torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    return attention(x, x, x, mask=masks.causal(), backend=backend).values()


def of_weights(backend: str) -> Tensor:
    q, k, v = qkv()
    return attention_weights(q, k, attention(q, k, v, return_lse=True, backend=backend)[1], rows=slice(1))


def of_parts(backend: str) -> Tensor:
    q, k, v = qkv()
    parts = [attention(q, *x, return_lse=True, backend=backend) for x in zip(k.split(6, 2), v.split(6, 2), strict=True)]
    return merge(*zip(*parts, strict=True))[0]


def of_lse(backend: str) -> Tensor:
    return attention(*qkv(), return_lse=True, backend=backend)[1]


def of_largest(backend: str) -> Tensor:
    out, largest = attention(*qkv(), return_max=True, backend=backend)
    return out * largest[..., None]


def of_second_order(backend: str) -> Tensor:
    q, k, v = qkv()
    if backend == "torch":  # not every kernel of torch for CPUs has second derivatives
        return attention(q, k, v, backend=backend)
    (dq,) = torch.autograd.grad(attention(q, k, v, backend=backend).sum(), q, create_graph=True)
    return dq


def of_compiled(backend: str) -> Tensor:
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        return attention(*qkv(), mask=masks.causal(), backend=backend)


def of_linear(backend: str) -> Tensor:
    q = normal(BATCH, HEADS, SEQLEN_K, HEAD_DIM)
    return linear_attention(q, *qkv()[1:], backend=backend)


def of_other_values(backend: str) -> Tensor:
    q, k, _ = qkv()
    return attention(q, k, normal(BATCH, 2, SEQLEN_K, 24), backend=backend)


def of_cache(backend: str, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    cache = KVCache.contiguous(BATCH, 2, 2 * SEQLEN_K, HEAD_DIM, dtype=dtype, device=DEVICE, **options)
    for _ in range(3 if cache.overwrites else 1):
        caches.append(
            cache, normal(BATCH, 2, SEQLEN_K, HEAD_DIM), normal(BATCH, 2, SEQLEN_K, HEAD_DIM), backend=backend
        )
    return attention(normal(BATCH, HEADS, SEQLEN_Q, HEAD_DIM), cache=cache, backend=backend)


def of_latent_keys(backend: str) -> Tensor:
    k = normal(BATCH, 1, SEQLEN_K, 576)
    return attention(normal(BATCH, HEADS, SEQLEN_Q, 576), k, k[..., :512], backend=backend)


def of_codes(backend: str) -> Tensor:
    with torch.no_grad():
        return attention(*qkv(), precision=FP8(), backend=backend)


# The rows of the table, in its order, up to the first that no backend has.
CALLS: tuple[Callable[[str], Tensor], ...] = (
    with_options(lambda: {}),
    with_options(lambda: {}, heads_kv=1),
    with_options(lambda: {}, head_dim=272),
    of_other_values,
    with_options(lambda: {}, dtype=torch.bfloat16),
    with_options(lambda: {}, dtype=torch.float64),
    with_options(lambda: {"mask": masks.causal()}),
    with_options(lambda: {"mask": masks.window(3, 1)}),
    with_options(lambda: {"mask": masks.prefix_lm(torch.tensor([2, 7], device=DEVICE))}),
    with_options(lambda: {"mask": masks.padding(ones(BATCH, SEQLEN_K))}),
    with_options(lambda: {"mask": masks.documents(ids(SEQLEN_Q), ids(SEQLEN_K))}),
    with_options(lambda: {"mask": ones(BATCH, 1, 1, SEQLEN_K)}),
    with_options(lambda: {"mask": masks.block_sparse(ones(1, HEADS, 1, 1), 16)}),
    with_options(lambda: {"mask": masks.tree(ones(SEQLEN_Q, SEQLEN_Q))}),
    with_options(lambda: {"mask": masks.strided(3) & masks.window(4, 0)}),
    with_options(lambda: {"mask": masks.dilated(2, 2, 2, global_tokens=1)}),
    with_options(lambda: {"mask": masks.bigbird(2)}),
    with_options(lambda: {"mask": masks.top_blocks(normal(BATCH, HEADS, SEQLEN_Q, SEQLEN_K), 2, (1, 1))}),
    of_a_grid,
    of_diffusion,
    with_options(lambda: {"mask": mask_function()}),
    with_options(lambda: {"mask": masks.causal() & masks.window(5, 2) & masks.padding(ones(BATCH, SEQLEN_K))}),
    with_options(lambda: {"bias": normal(HEADS, 1, SEQLEN_K)}),
    with_options(lambda: {"bias": biases.alibi(normal(HEADS))}),
    with_options(lambda: {"bias": biases.t5(normal(32, HEADS))}),
    of_shaw,
    with_options(lambda: {"qk_norm": QKNorm(normal(HEAD_DIM), normal(2, HEAD_DIM), across_heads=True)}),
    with_options(lambda: {"rope": Rope.from_theta(HEAD_DIM, SEQLEN_K, device=DEVICE), "mask": masks.causal()}),
    with_options(lambda: {"softcap": 3.0}),
    with_options(lambda: {"score_mod": score_function()}),
    with_options(lambda: {"score_mod": learned_score_function()}),
    with_options(lambda: {"sinks": normal(HEADS)}),
    with_options(lambda: {"dropout_p": 0.1}),
    of_packed,
    of_nested,
    of_codes,
    of_lse,
    of_largest,
    of_weights,
    of_parts,
    with_options(lambda: {}),
    with_options(lambda: {"deterministic": False}),
    of_compiled,
    of_second_order,
    of_linear,
    of_cache,
    lambda backend: of_cache(backend, torch.float8_e4m3fn),
    lambda backend: of_cache(backend, overwrites=True, n_sinks=4),
    of_latent_keys,
)


N_WITH_GRADIENTS = len(CALLS) - 4  # the last ones are for inference
WITHOUT_GRADIENTS = (of_codes, *CALLS[N_WITH_GRADIENTS:])
ON_ONE_BACKEND = {of_codes: "triton"}


def test_the_table_is_that_of_the_package():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.document(text) == text, "run: python -m bench.support"
    assert [feature.triton[:2] not in ("no", "") for feature in FEATURES] == [
        i < len(CALLS) for i in range(len(FEATURES))
    ]
    for call, feature in zip(CALLS, FEATURES, strict=False):
        assert (feature.torch[:2] == "no") == (ON_ONE_BACKEND.get(call) == "triton"), feature.name


@quick.every(5)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", range(len(CALLS)), ids=lambda i: FEATURES[i].name)
def test_supported_features_run(row, backend):
    if FEATURES[row].name == "float64" and backend == "triton" and not INTERPRETING:
        pytest.skip("a GPU has no float64 kernels")
    call = CALLS[row]
    if ON_ONE_BACKEND.get(call, backend) != backend:
        with pytest.raises(NotImplementedError, match=f"cannot run on backend '{backend}'"):
            call(backend)
        return
    with torch.set_grad_enabled(call not in WITHOUT_GRADIENTS):
        out = call(backend)
    assert out.isfinite().all()
    if call not in WITHOUT_GRADIENTS:
        out.float().square().sum().backward()


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        ({"triton": "3.6.0", "numpy": "2.4.6"}, "numpy: got 2.4.6, allowed are versions before 2.4"),
        ({"triton": "3.6.0+git1", "numpy": "2.3.5"}, ""),
        ({"triton": "3.7.1", "numpy": "2.4.6"}, ""),
        ({"triton": "3.7.1"}, "numpy: not installed"),
    ],
    ids=str,
)
def test_requirements_of_the_interpreter(monkeypatch, installed, reason):
    """NumPy 2.4 and later makes no number of an array with dimensions, and Triton before 3.7 requires it."""

    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed.get(name))
    reasons = support._interpreter_reasons()
    assert [found for found in reasons if reason in found] == reasons
    assert len(reasons) == bool(reason)
    if INTERPRETING and reason:
        monkeypatch.setattr(support, "INTERPRETER_REASONS", reasons)
        with pytest.raises(NotImplementedError, match="numpy"):
            attention(*qkv(), backend="triton")


def test_a_gpu_without_a_config_hides_no_other_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "interpreting", lambda: False)
    monkeypatch.setattr(support, "device_reasons", lambda device: ["the device"])
    q = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float64)
    dtype, device = support.triton_reasons(q, 64, 64, needs_gradient=False)
    assert dtype.startswith("dtype: got torch.float64")
    assert device == "the device"
