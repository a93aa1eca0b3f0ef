"""The reference GPT with caches, compared with the same model without one, for each sequence by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import KVCache, attention, fuse, masks
from fusedattn.integrations import modules
from fusedattn.transformer import (
    GPTModel,
    LearnedPositionalEncoding,
    ModelCache,
    MultiHeadAttention,
    PositionalEncoding,
    RotaryPositionalEmbedding,
    ScaledDotProductAttention,
)
from tests.conftest import DEVICE, INTERPRETING
from tests.helpers import quick
from tests.helpers.layers import assert_generation_continues

pytestmark = pytest.mark.usefixtures("_seed")

VOCAB, WIDTH, HEADS, LAYERS, MAX_LEN = 17, 32, 4, 2, 24
POSITIONS = ("sinusoidal", "learned", "rotary")
KINDS = ("eager", "torch", "triton")  # the reference, and the fused model on each backend
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)

kinds = pytest.mark.parametrize("kind", KINDS)
positions = pytest.mark.parametrize("positions", POSITIONS)


def device_of(kind: str) -> str:
    return DEVICE if kind == "triton" else "cpu"


def model_of(kind: str, **options: Any) -> GPTModel:
    """Weights so large that rounding does not decide a token."""
    model = GPTModel(VOCAB, WIDTH, HEADS, LAYERS, max_len=MAX_LEN, **{"n_kv_heads": 2} | options).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=0.4)
    model = model.to(device_of(kind)).requires_grad_(False)
    return model if kind == "eager" else fuse(model, backend=kind)


def ids_of(model: GPTModel, batch: int, seqlen: int) -> Tensor:
    return torch.randint(VOCAB, (batch, seqlen)).to(model.embedding.weight.device)


def caches_of(model: GPTModel, batch: int, capacity: int, **options: Any) -> dict[str, ModelCache]:
    """Empty caches in each layout: rows, and pages in an order of their own."""
    size = 4
    width = -(-capacity // size)
    table = torch.randperm(batch * width + 2, dtype=torch.int32)[: batch * width].reshape(batch, width)
    table = table.to(model.embedding.weight.device)
    return {
        "contiguous": model.make_cache(batch, capacity, **options),
        "paged": model.make_paged_cache(table, batch * width + 2, size, **options),
    }


def close(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@quick.covering()
@quick.pairwise()
@positions
@kinds
@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_uneven_lengths(kind, positions, layout):
    """Prompts of 5, 1 and 8 tokens, in one piece or several; then all sequences together."""
    model = model_of(kind, positions=positions)
    prompts = [5, 1, 8]
    ids = ids_of(model, 3, 14)
    want = model(ids)  # each sequence counts from 0
    cache = caches_of(model, 3, 14)[layout]
    for i, n in enumerate(prompts):
        own = cache.sequences(i, i + 1)
        got = [model(piece, cache=own) for piece in ids[i : i + 1, :n].split([1, 3, 4] if n == 8 else n, dim=1)]
        close(torch.cat(got, dim=1), want[i : i + 1, :n])
    assert cache.lengths.tolist() == prompts
    for n in (1, 3, 1, 1):
        at = cache.lengths[:, None].long() + torch.arange(n, device=ids.device)
        logits = model(ids.gather(1, at), cache=cache)
        close(logits, want.gather(1, at[..., None].expand(-1, -1, VOCAB)))
    assert cache.lengths.tolist() == [n + 6 for n in prompts]


@quick.covering()
@quick.pairwise()
@positions
@kinds
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("layout", ["default", "contiguous", "paged"])
def test_generate_is_as_without_a_cache(kind, positions, temperature, layout):
    """Token for token, greedy and drawn."""
    model = model_of(kind, positions=positions)
    ids = ids_of(model, 2, 6)

    def generate(**options: Any) -> Tensor:
        generator = torch.Generator(ids.device).manual_seed(3)
        return model.generate(ids, 8, temperature=temperature, generator=generator, **options)

    cache = None if layout == "default" else caches_of(model, 2, 14)[layout]
    got = generate(cache=cache)
    assert torch.equal(got, generate(use_cache=False))
    assert torch.equal(got[:, :6], ids)
    assert cache is None or cache.lengths.tolist() == [13, 13]


@kinds
def test_generate_continues_a_cache(kind):
    model = model_of(kind, positions="rotary")
    assert_generation_continues(model, ids_of(model, 2, 7))


def test_a_step_reads_and_writes_the_cache_alone(monkeypatch):
    """One query a step, and the same memory in all of them: no tensor grows."""
    model, seen = model_of("eager"), []
    original = ScaledDotProductAttention.cached

    def spy(self, q, k, v, cache, *args, **kwargs):
        seen.append((q.shape[2], k.shape[2], cache.k.data_ptr(), cache.capacity, cache.lengths.tolist()))
        return original(self, q, k, v, cache, *args, **kwargs)

    monkeypatch.setattr(ScaledDotProductAttention, "cached", spy)
    model.generate(ids_of(model, 2, 6), 3)
    steps = seen[::LAYERS]
    assert [step[:2] for step in steps] == [(6, 6), (1, 1), (1, 1)]
    assert [step[4] for step in steps] == [[6, 6], [7, 7], [8, 8]]
    assert len({step[2:4] for step in steps}) == 1
    assert len({step[2] for step in seen}) == LAYERS


@quick.covering()
@quick.pairwise()
@kinds
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_codes(kind, dtype, layout):
    """Near the model without a cache, but not equal to it; and what the first layer holds is its keys, in codes."""
    model = model_of(kind, positions="rotary")
    ids = ids_of(model, 2, 10)
    cache = caches_of(model, 2, 10, dtype=dtype, group_size=4 if dtype == torch.uint8 else None)[layout]
    got = torch.cat([model(piece, cache=cache) for piece in ids.split([6, 1, 3], dim=1)], dim=1)
    want = model(ids)
    # 2 or 3 bits of a number are kept by e5m2 and by codes of 4 bits; logits have a standard deviation of 2.
    assert 1e-4 < (got - want).abs().mean() < (0.2 if dtype in (torch.float8_e4m3fn, torch.int8) else 0.7)
    held, _, exists = cache.layers[0].dense()
    assert exists[:, :10].all()
    block = model.blocks[0]
    keys = block.self_attention.k_proj(block.self_attention_residual.norm(model.embedding(ids)))
    keys = model.blocks[0].self_attention.rope(keys.unflatten(-1, (2, 8)).transpose(1, 2))
    step = keys.abs().amax(dim=-1, keepdim=True) * (0.15 if dtype in (torch.float8_e5m2, torch.uint8) else 0.04)
    assert ((held[:, :, :10] - keys).abs() <= step).all()


@kinds
def test_left_padding_and_masks(kind):
    """Tokens that no query sees, by the cache and by a mask over its capacity: rotations are relative."""
    model = model_of(kind, positions="rotary")
    ids = ids_of(model, 2, 9)
    device = ids.device
    want = model(ids[:1, 2:])[0], model(ids[1:])[0]
    hidden = torch.tensor([2, 0], dtype=torch.int32, device=device)
    padded = model.make_cache(2, 12, left_padding=hidden)
    masked = model.make_cache(2, 12)
    valid = torch.ones(2, 12, dtype=torch.bool, device=device)
    valid[0, :2] = False
    for cache, mask in (
        (padded, None),
        (masked, valid),
        (masked, masks.padding(valid)),
        (masked, valid[:, None, None]),
    ):
        cache.lengths.zero_()
        got = torch.cat([model(piece, mask, cache=cache) for piece in ids.split([5, 1, 3], dim=1)], dim=1)
        close(got[0, 2:], want[0])
        close(got[1], want[1])


@kinds
def test_a_window_in_a_ring(kind):
    """A cache that overwrites keeps what a window needs."""
    model = model_of(kind, positions="rotary")
    ids = ids_of(model, 2, 20)
    window = masks.window(4, 0)
    cache = model.make_cache(2, 8)
    ring = ModelCache([replace(layer, overwrites=True) for layer in cache.layers])
    got = torch.cat([model(piece, window, cache=ring) for piece in ids.split([3, 1, 3, 3, 1, 4, 3, 1, 1], dim=1)], 1)
    close(got, model(ids, window))


@quick.covering()
@kinds
@pytest.mark.parametrize("rotary_dim", [None, 8, 4])
def test_a_layer_with_weights(kind, rotary_dim):
    """Weights have a column for each slot of the cache."""
    rope = None if rotary_dim is None else RotaryPositionalEmbedding(rotary_dim, 12, interleaved=True)
    layer = MultiHeadAttention(WIDTH, HEADS, n_kv_heads=2, rope=rope).requires_grad_(False).to(device_of(kind))
    x = torch.randn(2, 9, WIDTH, device=device_of(kind))
    want, weights = layer(x, mask=masks.causal(), need_weights=True)
    if kind != "eager":
        fuse(layer, backend=kind)
    tables = None if rope is None else rope.tables()
    cache = KVCache.contiguous(2, 2, 12, 8, dtype=torch.float32, rope=tables, device=x.device)
    start = 0
    for n in (4, 1, 4):
        cache.lengths.add_(n)
        rows = slice(start, start + n)
        plain = layer(x[:, rows], mask=masks.causal(), cache=cache)
        out, shown = layer(x[:, rows], mask=masks.causal(), cache=cache, need_weights=True)  # writes the same again
        close(plain, want[:, rows], 1e-5)
        close(out, want[:, rows], 1e-5)
        close(shown[..., :9], weights[:, :, rows], 1e-5)
        assert not shown[..., 9:].any()
        start += n


@quick.covering()
@kinds
@pytest.mark.parametrize("mask", ["full", "causal", "prefix", "window"])
def test_attention_to_a_cache(kind, mask):
    """Eager and fused alike: the definition of the package, for sequences with their own lengths."""
    prefix = masks.prefix_lm(torch.tensor([3, 0], device=device_of(kind)))
    chosen = {"full": masks.full(), "causal": masks.causal(), "prefix": prefix, "window": masks.window(2, 0)}[mask]
    core = ScaledDotProductAttention(dropout=0.5, scale=0.3).eval()
    core = core if kind == "eager" else fuse(core, backend=kind)
    lengths = torch.tensor([9, 4], dtype=torch.int32, device=device_of(kind))
    before = KVCache.contiguous(2, 2, 12, 16, dtype=torch.float32, lengths=lengths, device=lengths.device)
    before.k.normal_()
    before.v.normal_()
    after = replace(before, k=before.k.clone(), v=before.v.clone())
    q, k, v = (torch.randn(2, nheads, 3, 16, device=lengths.device) for nheads in (4, 2, 2))
    for i, n in enumerate((9, 4)):
        after.k[i, :, n - 3 : n], after.v[i, :, n - 3 : n] = k[i], v[i]
    want = attention(q.cpu(), cache=_on_cpu(after), mask=chosen.to("cpu"), scale=0.3, backend="torch")
    out, weights = core(q, k, v, chosen, cache=before, need_weights=False)
    close(out.cpu(), want, 1e-5)
    assert weights is None
    assert torch.equal(before.k, after.k)
    core.train()
    assert (core(q, k, v, chosen, cache=before, need_weights=False)[0].cpu() - want).abs().max() > 0.1


def _on_cpu(cache: KVCache) -> KVCache:
    return replace(cache, k=cache.k.cpu(), v=cache.v.cpu(), lengths=cache.lengths.cpu())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_fused_layer_hands_on_its_options(backend, monkeypatch):
    seen: dict[str, dict[str, Any]] = {}
    for name in ("append", "attention"):
        original = getattr(modules, name)
        monkeypatch.setattr(
            modules,
            name,
            lambda *args, of=original, to=name, **kwargs: seen.update({to: kwargs}) or of(*args, **kwargs),
        )
    core = fuse(ScaledDotProductAttention().to(device_of(backend)), backend=backend, deterministic=False)
    lengths = torch.ones(1, dtype=torch.int32, device=device_of(backend))
    cache = KVCache.contiguous(1, 1, 2, 16, dtype=torch.float32, lengths=lengths, device=lengths.device)
    core(*torch.ones(3, 1, 1, 1, 16, device=lengths.device), cache=cache, need_weights=False)
    assert seen["append"] == {"counted": True, "backend": backend}
    assert seen["attention"]["backend"] == backend
    assert seen["attention"]["deterministic"] is False


@pytest.mark.parametrize("encoding", [PositionalEncoding, LearnedPositionalEncoding])
def test_positions_of_sequences_are_not_read(encoding):
    """Each sequence has its own rows. One outside the table is an error, or NaN where reading offsets would wait."""
    module = encoding(6, 10)
    x = torch.randn(3, 2, 6)
    offsets = torch.tensor([0, 5, 8], dtype=torch.int32)
    got = module(x, offsets)
    for i, offset in enumerate((0, 5, 8)):
        assert torch.equal(got[i : i + 1], module(x[i : i + 1], offset))
    for wrong in ([0, 5, 9], [-1, 0, 0]):
        with pytest.raises(ValueError, match="positions"):
            module(x, torch.tensor(wrong, dtype=torch.int32))
    with pytest.raises(ValueError, match="offset"):
        module(x, offsets[:2])
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    beyond = compiled(x, torch.tensor([0, 9, -1], dtype=torch.int32))
    assert torch.equal(beyond.isnan().all(dim=-1), torch.tensor([[False, False], [False, True], [True, False]]))


@kinds
def test_an_error_leaves_the_cache(kind):
    model = model_of(kind, positions="learned")
    ids = ids_of(model, 2, 6)
    cache = model.make_cache(2, 8)
    model(ids, cache=cache)
    held = cache.layers[0].k[:, :, :6].clone()
    for wrong, error, message in (
        (lambda: model(ids[:, :3], cache=cache), ValueError, "full"),
        (lambda: model.generate(ids[:, :1], 3, cache=cache), ValueError, "full"),
        (lambda: model.generate(ids[:, :1], 19, cache=cache), ValueError, "max_new_tokens"),
        (lambda: model.generate(ids[:, :1], 1, cache=cache, use_cache=False), ValueError, "use_cache"),
        (lambda: model(ids[:1, :1], cache=cache), ValueError, "sequences"),
        (lambda: model(ids[:, :1], torch.ones(2, 3, 5, 7, dtype=torch.bool), cache=cache), ValueError, "mask"),
        (lambda: model.double()(ids[:, :1], cache=cache), TypeError, "float64"),
        (lambda: model.float().requires_grad_()(ids[:, :1], cache=cache), NotImplementedError, "grad"),
    ):
        if device_of(kind) != "cpu" and message == "full":
            continue
        with pytest.raises(error, match=message):
            wrong()
        assert cache.lengths.tolist() == [6, 6], message
        assert torch.equal(cache.layers[0].k[:, :, :6], held), message
    model.requires_grad_(False)
    assert model.generate(ids[:, :1], 2, cache=cache).shape == (2, 3)
    assert cache.lengths.tolist() == [8, 8]


@pytest.mark.skipif(INTERPRETING, reason="needs a GPU")
@positions
def test_a_step_in_a_cuda_graph(positions):
    """Captured once, replayed with other tokens and lengths."""
    model = model_of("triton", positions=positions)
    ids = ids_of(model, 2, 10)
    want = model(ids)
    cache = model.make_cache(2, 12)
    model(ids[:, :6], cache=cache)
    newest = ids[:, 6:7].clone()
    with torch.cuda.stream(torch.cuda.Stream()):
        model(newest, cache=cache)  # compiles the kernels
    torch.cuda.synchronize()
    cache.lengths.fill_(6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(newest, cache=cache)
    for t in range(6, 10):
        newest.copy_(ids[:, t : t + 1])
        graph.replay()
        close(logits, want[:, t : t + 1])
    assert cache.lengths.tolist() == [10, 10]


def test_model_cache_rejects():
    model = model_of("eager")
    first, second = model.make_cache(2, 8), model.make_cache(2, 8)
    with pytest.raises(ValueError, match="layers"):
        ModelCache([])
    with pytest.raises(ValueError, match="lengths in layer 1"):
        ModelCache([first.layers[0], second.layers[1]])
    with pytest.raises(ValueError, match="layers"):
        model(ids_of(model, 2, 3), cache=ModelCache(first.layers[:1]))


def test_a_layer_rejects_other_rotations():
    layer = MultiHeadAttention(WIDTH, HEADS, rope=RotaryPositionalEmbedding(8, 12)).requires_grad_(False)
    plain = MultiHeadAttention(WIDTH, HEADS).requires_grad_(False)
    x = torch.randn(1, 1, WIDTH)
    ropes = {"none": None, "own": layer.rope.tables(), "narrow": RotaryPositionalEmbedding(4, 12).tables()}
    ropes["pairs"] = RotaryPositionalEmbedding(8, 12, interleaved=True).tables()
    for name, rope in ropes.items():
        one = torch.ones(1, dtype=torch.int32)
        cache = KVCache.contiguous(1, HEADS, 12, 8, dtype=torch.float32, rope=rope, lengths=one)
        for module, fitting in ((layer, "own"), (plain, "none")):
            if name == fitting:
                assert module(x, cache=cache).shape == x.shape
            else:
                with pytest.raises(ValueError, match="rope"):
                    module(x, cache=cache)


@pytest.mark.parametrize(
    ("k", "v", "lengths"),
    [
        (torch.zeros(2, 2, 2, 8), torch.zeros(2, 2, 2, 8), 1),  # fewer tokens than are new
        (torch.zeros(2, 2, 2, 8), torch.zeros(2, 2, 2, 8), 6),  # more than there is room for
        (torch.zeros(3, 2, 2, 8), torch.zeros(3, 2, 2, 8), 2),
        (torch.zeros(2, 1, 2, 8), torch.zeros(2, 1, 2, 8), 2),
        (torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8), 2),
        (torch.zeros(2, 2, 2, 8), torch.zeros(2, 2, 2, 4), 2),
        (torch.zeros(2, 2, 8), torch.zeros(2, 2, 8), 2),
    ],
)
def test_cached_attention_rejects(k, v, lengths):
    cache = KVCache.contiguous(2, 2, 5, 8, dtype=torch.float32, lengths=torch.full((2,), lengths, dtype=torch.int32))
    q = torch.zeros(k.shape[0], 4, 2, 8) if k.dim() == 4 else k
    with pytest.raises(ValueError, match="allowed"):
        ScaledDotProductAttention()(q, k, v, cache=cache)
    assert not cache.k.any()


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_half_models(kind, dtype):
    """A cache has the dtype of the projections, whoever decides it."""
    model = model_of(kind, positions="rotary")
    ids = ids_of(model, 2, 5)
    with torch.autocast(device_of(kind), dtype=dtype):
        assert model.make_cache(1).layers[0].k.dtype == dtype
        assert model.generate(ids, 4).shape == (2, 9)
    model.to(dtype)
    cache = model.make_cache(2)
    got = torch.cat([model(piece, cache=cache) for piece in ids.split([3, 1, 1], dim=1)], dim=1)
    assert got.dtype == cache.layers[0].k.dtype == dtype
    torch.testing.assert_close(got, model(ids), atol=64 * torch.finfo(dtype).eps, rtol=0.1)
