"""The reference GPT with linear attention, generating from states, compared with the same model without a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedattn import KVCache, fuse, masks
from fusedattn.feature_maps import Favor
from fusedattn.integrations import modules
from fusedattn.transformer import (
    GPTModel,
    LinearAttention,
    ModelCache,
    MultiHeadAttention,
    RotaryPositionalEmbedding,
    ScaledDotProductAttention,
    StateCache,
)
from tests.conftest import DEVICE, INTERPRETING
from tests.helpers import quick
from tests.helpers.layers import assert_generation_continues

pytestmark = pytest.mark.usefixtures("_seed")

VOCAB, WIDTH, HEADS, LAYERS, MAX_LEN = 17, 32, 4, 2, 96
POSITIONS = ("sinusoidal", "learned", "rotary")
KINDS = ("eager", "torch", "triton")  # the reference, and the fused model on each backend

kinds = pytest.mark.parametrize("kind", KINDS)
positions = pytest.mark.parametrize("positions", POSITIONS)


def device_of(kind: str) -> str:
    return DEVICE if kind == "triton" else "cpu"


def model_of(kind: str, **options: Any) -> GPTModel:
    """Weights so large that rounding does not decide a token."""
    given = {"max_len": MAX_LEN, "n_kv_heads": 2, "attention": "linear"} | options
    model = GPTModel(VOCAB, WIDTH, HEADS, LAYERS, **given).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=0.4)
    model = model.to(device_of(kind)).requires_grad_(False)
    return model if kind == "eager" else fuse(model, backend=kind)


def ids_of(model: GPTModel, batch: int, seqlen: int) -> Tensor:
    return torch.randint(VOCAB, (batch, seqlen)).to(model.embedding.weight.device)


def in_pieces(model: GPTModel, ids: Tensor, sizes: list[int], cache: ModelCache) -> Tensor:
    return torch.cat([model(piece, cache=cache) for piece in ids.split(sizes, dim=1)], dim=1)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def numbers_in(cache: ModelCache) -> int:
    """The elements of all tensors of a cache."""
    return sum(x.numel() for layer in cache.layers for x in (layer.lengths, *layer.tensors()))


@quick.covering()
@kinds
@positions
def test_uneven_lengths(kind, positions):
    """Prompts of 5, 1 and 8 tokens, in one piece or several; then all sequences together."""
    model = model_of(kind, positions=positions)
    ids = ids_of(model, 3, 14)
    want = model(ids)  # each sequence counts from 0
    cache = model.make_cache(3)
    for i, sizes in enumerate(([5], [1], [1, 3, 4])):
        n = sum(sizes)
        close(in_pieces(model, ids[i : i + 1, :n], sizes, cache.sequences(i, i + 1)), want[i : i + 1, :n])
    assert cache.lengths.tolist() == [5, 1, 8]
    for n in (1, 3, 1, 1):
        at = cache.lengths[:, None].long() + torch.arange(n, device=ids.device)
        close(model(ids.gather(1, at), cache=cache), want.gather(1, at[..., None].expand(-1, -1, VOCAB)))
    assert cache.lengths.tolist() == [11, 7, 14]


@quick.covering()
@kinds
@positions
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("batch", "seqlen"), [(2, 6), (1, 1)])
def test_generate_is_as_without_a_cache(kind, positions, temperature, batch, seqlen):
    """Token for token, greedy and drawn; by definition, one full forward for each."""
    model = model_of(kind, positions=positions)
    ids = ids_of(model, batch, seqlen)

    def generate(**options: Any) -> Tensor:
        generator = torch.Generator(ids.device).manual_seed(3)
        return model.generate(ids, 8, temperature=temperature, generator=generator, **options)

    got = generate()
    assert torch.equal(got, generate(use_cache=False))
    cache = model.make_cache(batch)
    assert torch.equal(got, generate(cache=cache))
    assert cache.lengths.tolist() == [seqlen + 7] * batch
    if temperature == 0:
        assert torch.equal(got[:, seqlen:], model(got)[:, seqlen - 1 : -1].argmax(dim=-1))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_fused_and_not_fused_are_alike(kind):
    """The same text and the same states."""
    torch.manual_seed(1)
    fused = model_of(kind, positions="rotary")
    torch.manual_seed(1)
    eager = model_of("eager", positions="rotary").to(device_of(kind))
    ids = ids_of(fused, 2, 5)
    caches = fused.make_cache(2), eager.make_cache(2)
    texts = [model.generate(ids, 6, temperature=0, cache=c) for model, c in zip((fused, eager), caches, strict=True)]
    assert torch.equal(*texts)
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        close(one.state.kv, other.state.kv)
        close(one.state.k_sum, other.state.k_sum)
        assert one.counted.tolist() == other.counted.tolist() == [10, 10]


@kinds
def test_generate_continues_a_cache(kind):
    model = model_of(kind, positions="rotary")
    assert_generation_continues(model, ids_of(model, 2, 7))


class Allocated(TorchDispatchMode):
    """The sizes of all results of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        results = found if isinstance(found, tuple | list) else [found]
        self.sizes += [x.numel() for x in results if isinstance(x, Tensor)]
        return found


@kinds
def test_a_token_costs_the_same_after_one_and_after_fifty(kind):
    """A cache has the same numbers, in the same memory, and a step makes results of the same sizes."""
    model = model_of(kind, positions="rotary")
    cache, found = model.make_cache(2), []
    places = [x.data_ptr() for layer in cache.layers for x in layer.tensors()]
    for length in range(1, 51):
        with Allocated() as allocated:
            model(ids_of(model, 2, 1), cache=cache)
        if length in (1, 50):
            found.append((numbers_in(cache), sum(allocated.sizes), max(allocated.sizes)))
    assert cache.lengths.tolist() == [50, 50]
    assert found[0] == found[1]
    assert places == [x.data_ptr() for layer in cache.layers for x in layer.tensors()]
    # Heads of keys, features, features of a value and one for the sum; lengths, and what they were for each layer.
    assert found[0][0] == LAYERS * (2 * 2 * 8 * (8 + 1) + 2 * 2)


def test_the_fused_prompt_is_one_call(monkeypatch):
    """The prompt goes through the chunks of one call, each token through another, with the options of the layer."""
    calls: list[tuple[int, Any, bool]] = []
    original = modules.linear_attention

    def spy(q: Tensor, *args: Any, **options: Any) -> Any:
        calls.append((q.shape[2], options["backend"], options["initial_state"] is not None and options["return_state"]))
        return original(q, *args, **options)

    monkeypatch.setattr(modules, "linear_attention", spy)
    model = model_of("torch")
    model.generate(ids_of(model, 2, 6), 3)
    assert calls == [(n, "torch", True) for n in (6, 1, 1) for _ in range(LAYERS)]


@quick.covering()
@kinds
@positions
@pytest.mark.parametrize("hidden", [[2, 0], [0, 9], [9, 9]], ids=str)
def test_left_padding_and_masks(kind, positions, hidden):
    """Tokens that no query sees, by the cache and by masks over the new tokens, as by a mask over all of them."""
    model = model_of(kind, positions=positions)
    ids = ids_of(model, 2, 9)
    padding = torch.tensor(hidden, dtype=torch.int32, device=ids.device)
    first = padding * torch.tensor([1, 0], dtype=torch.int32, device=ids.device)
    valid, of_second = (torch.arange(9, device=ids.device) >= x[:, None] for x in (padding, padding - first))
    want = model(ids, valid)
    for of_cache, of_mask, wrap in (
        (padding, None, None),
        (None, valid, lambda x: x),
        (None, valid, masks.padding),
        (first, of_second, masks.padding),  # the padding of one sequence in the cache, of the other in the mask
    ):
        cache = model.make_cache(2, left_padding=of_cache)
        for changed in (ids, torch.where(valid, ids, (ids + 1) % VOCAB)):
            cache.lengths.zero_()
            pieces = [slice(0, 1), slice(1, 5), slice(5, 6), slice(6, 9)]
            own = [None if of_mask is None else wrap(of_mask[:, at]) for at in pieces]
            got = [model(changed[:, at], mask, cache=cache) for at, mask in zip(pieces, own, strict=True)]
            shown = torch.ones_like(valid) if changed is ids else valid
            close(torch.cat(got, dim=1)[shown], want[shown])


@kinds
def test_parts_of_a_batch_keep_their_padding(kind):
    model = model_of(kind, positions="learned")
    ids = ids_of(model, 3, 6)
    padding = torch.tensor([0, 2, 3], dtype=torch.int32, device=ids.device)
    cache = model.make_cache(3, left_padding=padding)
    valid = torch.arange(6, device=ids.device) >= padding[:, None]
    want = model(ids, valid)
    got = [in_pieces(model, ids[i : i + 2], [4, 2], cache.sequences(i, i + 2))[-1] for i in (0, 1)]
    for i, own in enumerate(got, 1):
        close(own, want[i])


@kinds
def test_padding_inside(kind):
    """What is hidden once stays hidden."""
    model = model_of(kind, positions="rotary")
    ids = ids_of(model, 2, 9)
    valid = torch.ones(2, 9, dtype=torch.bool, device=ids.device)
    valid[1, 3:5] = False
    want, cache = model(ids, valid), model.make_cache(2)
    got = torch.cat((model(ids[:, :5], valid[:, :5], cache=cache), in_pieces(model, ids[:, 5:], [1, 3], cache)), dim=1)
    close(got[valid], want[valid])


@kinds
def test_generating_from_left_padded_prompts(kind):
    """The text of full forwards with the padding as a mask, whatever the padding holds."""
    model = model_of(kind, positions="rotary")
    ids = ids_of(model, 2, 6)
    padding = torch.tensor([4, 0], dtype=torch.int32, device=ids.device)
    want = ids
    for n in range(6, 12):
        valid = torch.arange(n, device=ids.device) >= padding[:, None]
        want = torch.cat((want, model(want, valid)[:, -1].argmax(-1, keepdim=True)), dim=1)
    changed = torch.where(torch.arange(6, device=ids.device) < padding[:, None], (ids + 1) % VOCAB, ids)
    for prompt in (ids, changed):
        got = model.generate(prompt, 6, temperature=0, cache=model.make_cache(2, left_padding=padding))
        assert torch.equal(got[:, 6:], want[:, 6:])


@kinds
def test_a_length_of_0_begins_anew(kind):
    """Even after NaN; the others go on."""
    model = model_of(kind, positions="learned")
    ids = ids_of(model, 2, 8)
    cache = model.make_cache(2)
    model(ids[:, :4], cache=cache)
    for layer in cache.layers:
        layer.state.kv[1] = torch.nan
    cache.lengths[1] = 0
    got = model(torch.stack((ids[0, 4:], ids[1, :4])), cache=cache)
    close(got[0], model(ids[:1])[0, 4:])
    close(got[1], model(ids[1:, :4])[0])


def test_lengths_that_are_not_those_of_the_state():
    """A state forgets nothing: other lengths are an error, or NaN where reading them would wait."""
    model = model_of("eager", positions="rotary")
    cache = model.make_cache(3)
    model(ids_of(model, 3, 4), cache=cache)
    cache.lengths.copy_(torch.tensor([3, 4, 0]))
    with pytest.raises(
        ValueError, match=r"lengths: got \[3, 4, 0\] before the new tokens, allowed .* \[4, 4, 4\] and 0"
    ):
        model(ids_of(model, 3, 1), cache=cache)
    assert cache.lengths.tolist() == [3, 4, 0]
    layer = cache.layers[0]
    layer.lengths.add_(1)
    state = torch.compile(lambda: layer.before(1), backend="eager", fullgraph=True)()
    assert state.kv.isnan().flatten(1).all(dim=1).tolist() == [True, False, False]
    assert state.k_sum.isnan().flatten(1).all(dim=1).tolist() == [True, False, False]
    assert torch.equal(state.kv[1], layer.state.kv[1])
    assert not state.kv[2].any()


@kinds
def test_an_error_leaves_the_cache(kind):
    model = model_of(kind, positions="learned")
    ids = ids_of(model, 2, 6)
    cache = model.make_cache(2)
    model(ids, cache=cache)
    held = [x.clone() for layer in cache.layers for x in layer.tensors()]
    last = model.blocks[-1].self_attention.out_proj

    def interrupted() -> Tensor:
        def interrupt(*args: Any) -> None:
            raise KeyboardInterrupt("stop")

        handle = last.register_forward_hook(interrupt)
        try:
            return model(ids[:, :1], cache=cache)
        finally:
            handle.remove()

    two_by_two = torch.ones(2, 2, dtype=torch.bool, device=ids.device)
    wrongs: list[tuple[Callable[[], Tensor], type[BaseException], str]] = [
        (lambda: model.generate(ids[:, :1], 1, cache=cache, use_cache=False), ValueError, "use_cache"),
        (lambda: model.generate(ids[:, :0], 1, cache=cache), ValueError, "ids"),
        (lambda: model(ids[:1, :1], cache=cache), ValueError, "sequences"),
        (lambda: model(ids[:, :1], torch.ones(2, 3, 5, 7, dtype=torch.bool), cache=cache), ValueError, "mask"),
        (lambda: model(ids[:, :1], masks.padding(two_by_two), cache=cache), ValueError, "valid"),
        (lambda: model(ids[:, :2], two_by_two[None], cache=cache), NotImplementedError, "mask: got another mask"),
        (lambda: model(ids[:, :2], masks.window(1, 0), cache=cache), NotImplementedError, "mask: got another mask"),
        (interrupted, KeyboardInterrupt, "stop"),
        (lambda: model.double()(ids[:, :1], cache=cache), TypeError, "float64"),
        (lambda: model.float().requires_grad_()(ids[:, :1], cache=cache), NotImplementedError, "grad"),
    ]
    if device_of(kind) == "cpu":
        wrongs.append((lambda: model.generate(ids[:, :1], MAX_LEN, cache=cache), ValueError, "max_new_tokens"))
    for wrong, error, message in wrongs:
        with pytest.raises(error, match=message):
            wrong()
        assert cache.lengths.tolist() == [6, 6], message
        for x, before in zip((x for layer in cache.layers for x in layer.tensors()), held, strict=True):
            assert torch.equal(x, before), message
    model.requires_grad_(False)
    assert model.generate(ids[:, :1], 2, cache=cache).shape == (2, 3)
    assert cache.lengths.tolist() == [8, 8]


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_half_models(kind, dtype):
    """States stay float32, whatever the projections have."""
    model = model_of(kind, positions="rotary")
    ids = ids_of(model, 2, 5)
    with torch.autocast(device_of(kind), dtype=dtype):
        cache = model.make_cache(2)
        assert cache.layers[0].state.kv.dtype == torch.float32
        close(in_pieces(model, ids, [3, 1, 1], cache), model(ids), 64 * torch.finfo(dtype).eps)
        assert model.generate(ids, 4).shape == (2, 9)
    model.to(dtype)
    cache = model.make_cache(2)
    got = in_pieces(model, ids, [3, 1, 1], cache)
    assert got.dtype == dtype
    assert cache.layers[0].state.kv.dtype == cache.layers[0].state.k_sum.dtype == torch.float32
    torch.testing.assert_close(got, model(ids), atol=64 * torch.finfo(dtype).eps, rtol=0.1)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_float64_keeps_states_of_float64(kind):
    model = model_of(kind).double()
    ids, cache = ids_of(model, 2, 7), model.make_cache(2)
    close(in_pieces(model, ids, [4, 1, 2], cache), model(ids), 1e-10)
    assert cache.layers[0].state.kv.dtype == torch.float64


def test_generating_in_training_mode_restores_it():
    model = model_of("eager", dropout=0.5).train()
    ids = ids_of(model, 1, 3)
    assert torch.equal(model.generate(ids, 5, temperature=0), model.generate(ids, 5, temperature=0))
    assert all(module.training for module in model.modules())


@kinds
@pytest.mark.parametrize("rope", [None, RotaryPositionalEmbedding(8, 12, interleaved=True)], ids=["plain", "rope"])
@pytest.mark.parametrize(
    "feature_map",
    ["relu", "softmax", Favor.draw(8, 12, generator=torch.Generator().manual_seed(0)), lambda x: x.sigmoid() + 1],
    ids=["relu", "softmax", "favor", "function"],
)
def test_a_layer_of_any_features(kind, feature_map, rope):
    """States have as many features as the map makes."""
    if isinstance(feature_map, Favor):
        feature_map = Favor(feature_map.projection.to(device_of(kind)))
    core = LinearAttention(feature_map)
    layer = MultiHeadAttention(WIDTH, HEADS, n_kv_heads=2, rope=rope, attention=core)
    layer = layer.requires_grad_(False).to(device_of(kind))
    x = torch.randn(2, 9, WIDTH, device=device_of(kind))
    want = layer(x, mask=masks.causal())
    if kind != "eager":
        fuse(layer, backend=kind)
    tables = None if rope is None else layer.rope.tables()
    lengths = torch.zeros(2, dtype=torch.int32, device=x.device)
    n_features = core.n_features(8, x)
    cache = StateCache.empty(2, n_features, 8, lengths=lengths, rope=tables)
    assert n_features == (12 if isinstance(feature_map, Favor) else 8)
    for piece in x.split([4, 1, 4], dim=1):
        cache.lengths.add_(piece.shape[1])
        start = int(cache.lengths[0]) - piece.shape[1]
        close(layer(piece, mask=masks.causal(), cache=cache), want[:, start : start + piece.shape[1]], 1e-5)


@kinds
def test_without_a_causal_mask_each_query_sees_all_tokens(kind):
    layer = LinearAttention() if kind == "eager" else fuse(LinearAttention(), backend=kind)
    q, k, v = (torch.randn(2, heads, 7, 8, device=device_of(kind)) for heads in (4, 2, 2))
    cache = StateCache.empty(2, 8, 8, lengths=torch.full((2,), 3, dtype=torch.int32, device=q.device))
    first, last = [x[:, :, :3] for x in (q, k, v)], [x[:, :, 3:] for x in (q, k, v)]
    close(layer(*first, cache=cache, need_weights=False)[0], LinearAttention()(*first)[0], 1e-5)
    cache.lengths.add_(4)
    close(layer(*last, cache=cache, need_weights=False)[0], LinearAttention()(last[0], k, v)[0], 1e-5)


@kinds
def test_linear_and_softmax_layers_in_one_model(kind):
    """Each layer has the cache that it needs."""
    model = model_of("eager", positions="rotary")
    model.blocks[1].self_attention.attention = ScaledDotProductAttention()
    model = model.to(device_of(kind))
    model = model if kind == "eager" else fuse(model, backend=kind)
    ids = ids_of(model, 2, 9)
    want, cache = model(ids), model.make_cache(2, 16)
    assert [type(layer) for layer in cache.layers] == [StateCache, KVCache]
    close(in_pieces(model, ids[:, :7], [5, 1, 1], cache), want[:, :7])
    close(in_pieces(model, ids[:, 7:], [1, 1], cache), want[:, 7:])
    assert torch.equal(model.generate(ids, 5, temperature=0), model.generate(ids, 5, temperature=0, use_cache=False))


def test_refusals():
    model = model_of("eager")
    table = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"make_paged_cache: got a model with linear attention"):
        model.make_paged_cache(table, 2, 4)
    with pytest.raises(NotImplementedError, match=r"dtype, group_size: got torch.int8, None with linear attention"):
        model.make_cache(2, dtype=torch.int8)
    with pytest.raises(NotImplementedError, match=r"dtype, group_size: got None, 4 with linear attention"):
        model.make_cache(2, group_size=4)
    for wrong, error in ((torch.ones(2), TypeError), (torch.ones(3, dtype=torch.int32), ValueError)):
        with pytest.raises(error, match="left_padding: got"):
            model.make_cache(2, left_padding=wrong)
    softmax = model_of("eager", attention="softmax")
    with pytest.raises(TypeError, match="cache: got a StateCache, allowed is a KVCache"):
        softmax(ids_of(model, 2, 3), cache=model.make_cache(2))
    with pytest.raises(TypeError, match="cache: got a KVCache, allowed is a StateCache"):
        model(ids_of(model, 2, 3), cache=softmax.make_cache(2))
    with pytest.raises(TypeError, match="cache: got a StateCache, allowed is a KVCache"):
        fuse(softmax)(ids_of(model, 2, 3), cache=model.make_cache(2))
    lengths = torch.zeros(2, dtype=torch.int32)
    rope = RotaryPositionalEmbedding(8, 12).tables(*torch.arange(6).view(2, 3))
    with pytest.raises(ValueError, match="rope: got positions"):
        StateCache.empty(2, 8, 8, lengths=lengths, rope=rope)
    cache = StateCache.empty(2, 8, 8, lengths=lengths)
    q, k, v = (torch.randn(2, heads, 3, 8) for heads in (4, 2, 2))
    lengths.add_(3)
    for layer in (LinearAttention(), fuse(LinearAttention(), backend="torch")):
        with pytest.raises(NotImplementedError, match="need_weights: got True"):
            layer(q, k, v, cache=cache)
        with pytest.raises(ValueError, match="k, v: got"):
            layer(q, k[:, :, :2], v[:, :, :2], cache=cache, need_weights=False)
        with pytest.raises(ValueError, match="k, v: got"):
            layer(q, k, v[..., :4], cache=cache, need_weights=False)


@pytest.mark.skipif(INTERPRETING, reason="needs a GPU")
@positions
def test_a_step_in_a_cuda_graph(positions):
    """Captured once, replayed with other tokens."""
    model = model_of("triton", positions=positions)
    ids = ids_of(model, 2, 10)
    want, cache = model(ids), model.make_cache(2)
    newest = ids[:, 6:7].clone()
    with torch.cuda.stream(torch.cuda.Stream()):
        model(newest, cache=model.make_cache(2))  # compiles the kernels
    torch.cuda.synchronize()
    model(ids[:, :6], cache=cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(newest, cache=cache)
    for t in range(6, 10):
        newest.copy_(ids[:, t : t + 1])
        graph.replay()
        close(logits, want[:, t : t + 1])
    assert cache.lengths.tolist() == [10, 10]
