"""Tensors of more than 2^31 elements: every offset into them is right, forward and backward.

Only the rows that are read or written take memory: their storage is committed page by page. Results must equal, bit
for bit, those of the same rows packed together. For a batch of 2^26, only the last sequence is run.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import Rope, biases, caches, masks, testing
from fusedattn.backends.triton import launching
from fusedattn.backends.triton.operands import constants_of
from fusedattn.backends.triton.ops import attention_bwd, attention_fwd
from fusedattn.backends.triton.results import MAX_ROW_STRIDE
from fusedattn.kernels.pairs import pairs
from fusedattn.options import Options, Packed
from fusedattn.testing import Case
from tests.conftest import DEVICE, INTERPRETING, assert_equal, triton_attention
from tests.helpers import quick
from tests.helpers.accesses import checked_accesses
from tests.helpers.cached_truth import attend, filled

pytestmark = pytest.mark.usefixtures("_seed")

interpreted = pytest.mark.skipif(not INTERPRETING, reason="a GPU commits all memory and runs every program")

FAR = 2**30 + 16  # the third row, head or batch starts beyond 2^31
LIMIT = MAX_ROW_STRIDE
ENOUGH = 2**24  # a tensor with at most this many elements is really filled
DTYPES = (torch.float16, torch.float32)  # float32 has its own backward kernel for the rows


def lazy(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU, whose untouched pages take no memory; NaN on a GPU. Skip the test if they do not fit."""
    if not INTERPRETING:
        if numel * dtype.itemsize > 0.9 * torch.cuda.mem_get_info()[0]:
            pytest.skip(f"needs {numel * dtype.itemsize / 2**30:.0f} GiB of GPU memory")
        return torch.full((numel,), torch.nan if dtype.is_floating_point else 1, dtype=dtype, device=DEVICE)
    noreserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreserve
        memory = mmap.mmap(-1, numel * dtype.itemsize, flags=flags)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        pytest.skip(f"needs {numel * dtype.itemsize / 2**30:.0f} GiB of address space: {error}")
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.fixture(autouse=True)
def _accesses() -> Iterator[None]:
    """Check every address that is read or written, and how much memory was committed."""
    before = resident() if INTERPRETING else 0
    with checked_accesses() if INTERPRETING else nullcontext():
        yield
    assert not INTERPRETING or resident() - before < 2**30


def distant(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros (NaN on a GPU) with large strides."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return lazy(extent, dtype).as_strided(shape, strides)


def far(x: Tensor, dim: int, stride: int) -> tuple[int, ...]:
    """Strides of ``x``, packed except along `dim`."""
    strides = list(x.stride())
    strides[dim] = stride
    return tuple(strides)


@contextmanager
def distant_outputs() -> Iterator[list[Tensor]]:
    """Tensors allocated like one with large strides get its strides too."""
    empty_like = torch.empty_like
    allocated: list[Tensor] = []

    def like(x: Tensor, **kwargs: Any) -> Tensor:
        if max(x.stride()) < LIMIT or kwargs.get("memory_format") is torch.contiguous_format:
            return empty_like(x, **kwargs)
        # Autograd does not see a view, so an op may return it.
        out = distant(x.shape, x.stride(), kwargs.get("dtype", x.dtype))
        allocated.append(x.new_empty(0, dtype=out.dtype).set_(out.untyped_storage(), 0, x.shape, x.stride()))
        return allocated[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", like)
        yield allocated


SMALL = Case(batch=1, nheads_q=1, nheads_kv=1, seqlen_q=20, seqlen_k=20, head_dim=16, causal="bottom_right")
DISTANT = {
    "batches": (replace(SMALL, batch=3, nheads_q=2, padding="right"), 0, FAR),
    "heads": (replace(SMALL, nheads_q=3, nheads_kv=3), 1, FAR),
    "query rows": (replace(SMALL, seqlen_q=530, seqlen_k=18), 2, LIMIT),
    "key rows": (replace(SMALL, seqlen_q=18, seqlen_k=530, causal=None), 2, LIMIT),
    "rows beyond what a tile can hold": (replace(SMALL, seqlen_q=33, seqlen_k=33), 2, LIMIT + 16),
    "rows beyond int32": (replace(SMALL, seqlen_q=3, seqlen_k=3), 2, 2**31 + 16),
    "heads of few queries": (replace(SMALL, nheads_q=3, seqlen_q=2, seqlen_k=70), 1, FAR),
    "batches of few queries": (replace(SMALL, batch=3, nheads_q=3, seqlen_q=2, seqlen_k=70), 0, FAR),
    "rotated batches": (replace(SMALL, batch=3, rope="half"), 0, FAR),
    "rotated heads": (replace(SMALL, nheads_q=3, nheads_kv=3, rope="half"), 1, FAR),
    "rotated rows": (replace(SMALL, seqlen_q=530, seqlen_k=18, rope="half"), 2, LIMIT),
}


@quick.only(dtype=torch.float16)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in DISTANT for dtype in DTYPES if dtype == torch.float16 or "rotated" not in name],
    ids=str,
)
def test_far_apart(name, dtype):
    """q, k, v, dout, out and the gradients span more than 2^31 elements from their first row to their last."""
    case, dim, stride = DISTANT[name]
    inputs = testing.make_inputs(replace(case, dtype=dtype), DEVICE)
    expected = testing.run(triton_attention, inputs)
    room = 2**18  # each tensor starts somewhere within this part of their common storage
    extent = stride * max(inputs.q.shape[dim], inputs.k.shape[dim]) + 4 * room
    storage = lazy(extent, dtype)
    for at, name in enumerate(("q", "k", "v", "dout")):
        x = getattr(inputs, name)
        inputs = replace(inputs, **{name: storage.as_strided(x.shape, far(x, dim, stride), at * room).copy_(x)})
        x = getattr(inputs, name)
        assert (launching.tileable(x) is x) == (dim < 2 or stride <= LIMIT)
    with distant_outputs() as allocated:
        got = testing.run(triton_attention, inputs)
    assert_equal(got, expected)
    # out and its rounding residual, dq, dk, dv; contiguous if the inputs had to be copied
    n_outputs = 5 if dtype == torch.float16 else 4
    assert len(allocated) == (n_outputs if dim < 2 or stride <= LIMIT else 0)


def results_with(kind: str, x: Tensor, seqlen_q: int, seqlen_k: int) -> testing.Results:
    """All results of a call with the batches and heads of ``x``, which is its mask or a part of its bias."""
    case = replace(SMALL, batch=x.shape[0], nheads_q=x.shape[1], seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    if kind == "mask":
        inputs = replace(testing.make_inputs(case, DEVICE), mask=masks.boolean(x))
    else:
        bias = biases.tensor(x) if kind == "bias" else biases.relative(x)
        inputs = replace(testing.make_inputs(replace(case, dtype=x.dtype), DEVICE), bias=bias)
    return testing.run(triton_attention, inputs)


@quick.every(2)
@pytest.mark.parametrize("kind", ["mask", "bias", "relative"])
@pytest.mark.parametrize(
    ("shape", "dim", "stride"),
    [((3, 1, 9, 9), 0, FAR), ((1, 3, 9, 9), 1, FAR), ((1, 1, 530, 5), 2, LIMIT), ((1, 1, 5, 531), 3, LIMIT),
     ((3, 3, 1, 9), 0, FAR), ((3, 1, 9, 1), 0, FAR), ((1, 1, 5, 9), 2, FAR), ((1, 1, 5, 9), 3, FAR)],
    ids=["batches", "heads", "queries", "keys", "of all queries", "of all keys", "queries, copied", "keys, copied"],
)  # fmt: skip
def test_what_is_read_by_pair(kind, shape, dim, stride):
    """A boolean mask, a bias, and a relative bias, whose last dimension is that of distances."""
    seqlen_q, seqlen_k = (9 if n == 1 else n for n in shape[2:])
    x = torch.randn(shape)
    x = (x < 0.25).to(DEVICE) if kind == "mask" else x.to(DEVICE, torch.float16)
    far_x = distant(shape, far(x, dim, stride), x.dtype).copy_(x)
    assert_equal(results_with(kind, far_x, seqlen_q, seqlen_k), results_with(kind, x, seqlen_q, seqlen_k))


def test_a_transposed_boolean_mask_is_the_same_mask(monkeypatch):
    allowed = (torch.rand(1, 2, 20, 37) < 0.6).to(DEVICE)
    expected = results_with("mask", allowed, 20, 37)
    monkeypatch.setattr("fusedattn.kernels.pairs.MAX_ROW_STRIDE", 36)
    assert pairs(allowed).ptr.stride()[2:] == (1, 20)
    assert_equal(results_with("mask", allowed, 20, 37), expected)


@contextmanager
def last_of(batch: int) -> Iterator[None]:
    """Run only the last of the `batch` parts of a launch, and allocate lazily; run a smaller launch as it is.

    The batch is the outermost dimension of every grid: if it is `batch`, only its last sequence is computed. Heads of
    different sequences never run side by side.
    """
    from triton.runtime import interpreter

    from fusedattn.kernels import devices

    builder = interpreter.interpreter_builder
    run, set_grid_dim, set_grid_idx = interpreter.GridExecutor.__call__, builder.set_grid_dim, builder.set_grid_idx

    def run_last(executor: Any, *args: Any, **kwargs: Any) -> None:
        n, *_ = executor.grid
        to_run = n if n < batch else n // batch
        executor.grid = (to_run, 1, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(builder, "set_grid_dim", lambda *_: set_grid_dim(n, 1, 1))
            patch.setattr(builder, "set_grid_idx", lambda x, y, z: set_grid_idx(n - to_run + x, y, z))
            run(executor, *args, **kwargs)

    def lazily(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            like = allocate(*args, **{**kwargs, "device": "meta"})
            if like.numel() == 0:
                return allocate(*args, **kwargs)
            out = distant(like.shape, like.stride(), like.dtype)
            return torch.tensor([], dtype=like.dtype).set_(out.untyped_storage(), 0, like.shape, like.stride())

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", run_last)
        patch.setitem(devices.L2_BYTES, "interpreter", 0)
        patch.setattr(torch, "empty", lazily(torch.empty))
        patch.setattr(torch, "empty_like", lazily(torch.empty_like))
        patch.setattr(torch, "zeros", lazily(torch.zeros))
        patch.setattr(Tensor, "new_empty", lazily(Tensor.new_empty))
        for name in ("zero_", "fill_"):
            fill = getattr(Tensor, name)
            patch.setattr(Tensor, name, lambda x, *args, fill=fill: x if x.numel() > ENOUGH else fill(x, *args))
        patch.setattr(Tensor, "contiguous", lambda x: x if x.is_contiguous() else last_of_many(x[-1:], batch))
        yield


def run_ops(inputs: testing.Inputs, packed: Packed | None = None) -> dict[str, Tensor]:
    """All results of the two ops."""
    options = Options(inputs.mask, inputs.rope, inputs.bias, 0.25, packed=packed, return_max=True)
    constants = constants_of(options, keep_residual=True).flat()
    added, relative = (inputs.leaves.get(name) for name in ("bias", "relative"))
    slopes = None if inputs.bias is None or inputs.bias.slopes is None else torch.atleast_2d(inputs.bias.slopes)
    x = (inputs.q, inputs.k, inputs.v, added, relative, None, slopes, None, None, None)
    names = ("out", "lse", "row_max", "row_sum", "rounding_residual", "largest")
    got = dict(zip(names, attention_fwd(*x, *constants), strict=True))
    out, _, *rows, _ = got.values()
    needed = [True, True, added is not None, relative is not None, *(False for _ in x[5:])]
    gradients = attention_bwd(inputs.dout, inputs.dlse, *x, out, *rows, needed, *constants)
    got |= dict(zip(("dq", "dk", "dv", "dbias", "drelative"), gradients, strict=False))
    return {name: x for name, x in got.items() if x.numel() > 0}


def last(results: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The last elements of each result: as many along every dimension as `like` has."""
    return {name: x[tuple(slice(-n, None) for n in like[name].shape)] for name, x in results.items()}


def last_of_many(x: Tensor, batch: int, seqlen_first: bool = False) -> Tensor:
    """Make ``x``, of batch 1, the last sequence of a tensor with `batch` sequences."""
    shape = (batch, *x.shape[1:])
    strides = torch.empty(shape, device="meta").stride()
    if seqlen_first:
        _, nheads, _, head_dim = shape
        strides = (nheads * head_dim, head_dim, batch * nheads * head_dim, 1)
    out = distant(shape, strides, x.dtype)
    out[-1:] = x
    return out


@interpreted
@pytest.mark.parametrize(
    ("dtype", "boolean"), [(torch.float16, None), (torch.float32, None), (torch.float32, "broadcast")], ids=str
)
def test_many_sequences(dtype, boolean):
    """More than 2^31 rows of queries, keys, positions, tables and every result."""
    batch, seqlen = 2**26, 50
    case = Case(
        batch=1, nheads_q=2, nheads_kv=1, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=16, dtype=dtype,
        causal="bottom_right", padding="right", boolean=boolean, seed=1,
        rope="half", rotary_dim=4, rope_tables="per_batch", rope_positions=True,
    )  # fmt: skip
    inputs = testing.make_inputs(case)
    inputs = replace(inputs, mask=replace(inputs.mask, valid=torch.arange(seqlen)[None] < 45))
    expected = run_ops(inputs)

    def many(owner: Any, *names: str) -> Any:
        return replace(owner, **{name: last_of_many(getattr(owner, name), batch) for name in names})

    inputs = replace(
        many(inputs, "q", "k", "v", "dout", "dlse"),
        mask=many(inputs.mask, "valid"),
        rope=many(inputs.rope, "cos", "sin", "positions_q", "positions_k"),
    )
    assert batch * seqlen > 2**31
    with last_of(batch):
        got = run_ops(inputs)
    assert_equal(last(got, expected), expected)


@quick.only(dtype=torch.float16)
@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_biases(dtype):
    """A bias and a relative bias of more than 2^31 elements, read per pair, and their gradients."""
    batch, seqlen = 2**22, 50
    case = Case(
        batch=1, nheads_q=2, nheads_kv=1, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=16, dtype=dtype, seed=1,
        causal="bottom_right", prefix=True, bias="full", relative="per_query", bias_dtype=torch.float32,
        alibi="per_batch",
    )  # fmt: skip
    inputs = testing.make_inputs(case)
    expected = run_ops(inputs)
    large = {name: last_of_many(x, batch) for name, x in inputs.leaves.items()}
    assert min(x.numel() for name, x in large.items() if name in ("bias", "relative")) > 2**31
    bias, prefix = inputs.bias, inputs.mask.prefix
    inputs = replace(
        inputs,
        bias=replace(bias, slopes=last_of_many(bias.slopes, batch)),
        mask=replace(inputs.mask, prefix=replace(prefix, lengths=last_of_many(prefix.lengths, batch))),
        dout=last_of_many(inputs.dout, batch),
        dlse=last_of_many(inputs.dlse, batch),
    ).with_leaves(large)
    with last_of(batch):
        got = run_ops(inputs)
    assert_equal(last(got, expected), expected)


@quick.only(dtype=torch.float16)
@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_packed_sequences(dtype):
    """2^30 queries and keys of four heads: rows and statistics of the last sequence begin beyond 2^31."""
    total, seqlen_q, seqlen_k, behind = 2**30, 20, 37, 5
    case = replace(
        SMALL, nheads_q=4, nheads_kv=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype, padding="uneven",
        rope="half", boolean="full", bias="full", relative="per_query", bias_dtype=torch.float32,
    )  # fmt: skip
    inputs = testing.make_inputs(case)

    def last_rows(x: Tensor, dim: int) -> Tensor:
        """Put the rows of ``x`` behind many others, with the heads of a row side by side."""
        shape = [*x.shape]
        shape[dim] = total
        strides = torch.empty(shape, device="meta").stride()
        if x.dim() == 4:
            _, nheads, _, head_dim = shape
            strides = (total * nheads * head_dim, head_dim, nheads * head_dim, 1)
        out = distant(shape, strides, x.dtype)
        out.narrow(dim, total - behind - x.shape[dim], x.shape[dim]).copy_(x)
        return out

    def second_of(x: Tensor) -> Tensor:
        """Make ``x`` the second of two sequences."""
        return torch.cat((torch.zeros_like(x), x))

    def rows_of(results: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, x in results.items():
            if name in ("dbias", "drelative"):
                found[name] = x[-1:]
                continue
            dim, n = (2, seqlen_k if name in ("dk", "dv") else seqlen_q)
            found[name] = x.narrow(dim, x.shape[dim] - behind - n, n) if x.shape[dim] == total else x
        return found

    expected = run_ops(inputs)
    stops_q, stops_k = (
        torch.tensor([0, total - behind - n, total - behind], dtype=torch.int32) for n in (seqlen_q, seqlen_k)
    )
    mask, bias = inputs.mask, inputs.bias
    inputs = replace(
        inputs,
        **{name: last_rows(getattr(inputs, name), 2) for name in ("q", "k", "v", "dout", "dlse")},
        mask=replace(mask, valid=last_rows(mask.valid, 1), allowed=second_of(mask.allowed)),
        bias=replace(bias, tensor=second_of(bias.tensor), relative=second_of(bias.relative)),
    )
    with last_of(2):
        got = run_ops(inputs, Packed(stops_q, stops_k, seqlen_q, seqlen_k))
    assert_equal(rows_of(got), expected)


@interpreted
@pytest.mark.parametrize("positions_dtype", [torch.int32, torch.int64])
def test_long_tables(positions_dtype):
    """Rotary tables of more than 2^31 elements, of which only the end is used."""
    inputs = testing.make_inputs(replace(SMALL, rope="interleaved", dtype=torch.float16))
    rope = inputs.rope
    at = torch.randint(0, rope.n_positions, (20,), dtype=positions_dtype)
    expected = testing.run(triton_attention, replace(inputs, rope=rope.at(at, at)))
    n_positions = 2**30
    cos, sin = (distant((n_positions, 8), (8, 1), torch.float32) for _ in range(2))
    cos[-rope.n_positions :], sin[-rope.n_positions :] = rope.cos, rope.sin
    at = at + (n_positions - rope.n_positions)
    got = testing.run(triton_attention, replace(inputs, rope=Rope(cos, sin, True, at, at)))
    assert_equal(got, expected)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_with_far_rows(dtype):
    """Outputs have the layout of q. In (seqlen, batch, nheads, head_dim), many sequences put rows far apart."""
    batch = 2**22
    inputs = testing.make_inputs(replace(SMALL, nheads_q=2, nheads_kv=2, dtype=dtype))
    expected = run_ops(inputs)
    inputs = replace(
        inputs,
        dlse=last_of_many(inputs.dlse, batch),
        **{name: last_of_many(getattr(inputs, name), batch, seqlen_first=True) for name in ("q", "k", "v", "dout")},
    )
    assert batch * inputs.q[0].numel() > 2**31
    with last_of(batch):
        got = run_ops(inputs)
    assert_equal(last(got, expected), expected)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_keys(dtype, monkeypatch):
    """2^27 keys, only the last of them valid: k, v and their gradients exceed 2^31 elements."""
    from fusedattn.kernels import configs, mask_arguments

    seqlen_k, packed = 2**27, configs.INTERPRETER.dkdv.BLOCK_N
    case = replace(SMALL, seqlen_k=packed, causal=None, padding="left", dtype=dtype)
    inputs = testing.make_inputs(case)
    inputs = replace(inputs, mask=replace(inputs.mask, valid=torch.arange(packed)[None] >= 2))

    def at_the_end(x: Tensor) -> Tensor:
        """Make the keys of ``x`` the last of all keys."""
        dim = 2 if x.dtype == dtype else -1
        shape = [*x.shape]
        shape[dim] = seqlen_k
        out = distant(shape, torch.empty(shape, device="meta").stride(), x.dtype)
        out.narrow(dim, seqlen_k - packed, packed).copy_(x)
        return out

    expected = run_ops(inputs)
    inputs = replace(
        inputs,
        k=at_the_end(inputs.k),
        v=at_the_end(inputs.v),
        mask=replace(inputs.mask, valid=at_the_end(inputs.mask.valid)),
    )
    # Computing it would visit all keys.
    key_range = torch.tensor([[seqlen_k - packed + 2, seqlen_k, 1]], dtype=torch.int32)
    monkeypatch.setattr(mask_arguments, "key_range", lambda *_: key_range)
    with last_of(seqlen_k // packed):
        got = run_ops(inputs)
    assert_equal(last(got, expected), expected)


CACHES = {"rows": 0, "heads": 1, "slots": 2}


@quick.covering()
@pytest.mark.parametrize("seqlen_q", [2, 40], ids=["few", "many"])
@pytest.mark.parametrize("form", ["numbers", "e4m3", "int4, groups of 4", "int8, given"])
@pytest.mark.parametrize("far_apart", CACHES)
def test_a_large_cache(far_apart, form, seqlen_q):
    """Rows, heads or slots of keys, values and scales lie more than 2^31 elements apart; read and appended to."""
    dim, stride = CACHES[far_apart], 2**31 // 15 if far_apart == "slots" else FAR
    case = Case(batch=2, nheads_q=6, nheads_kv=3, seqlen_q=seqlen_q, seqlen_k=34, head_dim=16, dtype=torch.float16)
    inputs = testing.make_inputs(case, DEVICE)
    near = filled("pages of 17", inputs, [20, 34], form)
    moved = {}
    for name in ("k", "v", "k_scale", "v_scale"):
        x = getattr(near, name)
        if x is not None and x.dim() > dim:
            strides = list(x.stride())
            if dim == 2:
                strides[:2] = [16 * (2 if x.itemsize > 1 else 1) * n for n in (x.shape[1], 1)]
            strides[dim] = stride + (16 if dim < 2 else 0)
            moved[name] = distant(x.shape, strides, x.dtype).copy_(x)
    large = replace(near, lengths=near.lengths.clone(), **moved)
    assert_equal(attend(inputs, large), attend(inputs, near))
    k, v = (x[:, :, :11].contiguous() for x in (inputs.v, inputs.k))
    for cache in (near, large):
        cache.lengths.copy_(torch.tensor([31, 20]))
        caches.append(cache, k, v, counted=True, backend="triton")
    for name, x in moved.items():
        bits = (y.contiguous().view(torch.uint8) for y in (x, getattr(near, name)))
        assert torch.equal(*bits), name


@interpreted
def test_new_tokens_far_apart():
    """Offsets inside a tile of 64 tokens would exceed int32: in (n, batch, nheads, head_dim), many sequences do so."""
    inputs = testing.make_inputs(replace(SMALL, seqlen_k=64, dtype=torch.float16), DEVICE)
    found = []
    for stride in (None, 2**31 // 40):
        cache = filled("contiguous", inputs, [0])
        cache.lengths.zero_()
        k, v = inputs.k, inputs.v
        if stride is not None:
            k, v = (distant(x.shape, far(x, 2, stride), x.dtype).copy_(x) for x in (k, v))
        caches.append(cache, k, v, backend="triton")
        found.append({"k": cache.k, "v": cache.v})
    assert_equal(*found)


@interpreted
def test_a_large_block_table():
    """The entries of the third sequence lie behind 2^31 others."""
    inputs = testing.make_inputs(replace(SMALL, batch=3, seqlen_k=48), DEVICE)
    near = filled("pages of 16", inputs, [20, 9, 48])
    assert near.block_table is not None
    table = distant((3, 3), (FAR, 1), torch.int32).copy_(near.block_table)
    large = replace(near, block_table=table, lengths=near.lengths.clone())
    assert_equal(attend(inputs, large), attend(inputs, near))
    caches.append(large, inputs.k[:, :, :5], inputs.v[:, :, :5], counted=True, backend="triton")
    after = large.k.clone()
    caches.append(near, inputs.k[:, :, :5], inputs.v[:, :, :5], counted=True, backend="triton")
    assert torch.equal(after.nan_to_num(), near.k.nan_to_num())


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(20, 2**27), (2**27, 20), (2**20, 2**20)])
def test_rows_of_a_boolean_mask_are_near_enough(seqlen_q, seqlen_k):
    """Offsets inside a tile are int32, so a mask whose rows are too long is transposed. No test has memory for one."""
    allowed = torch.empty(1, 1, seqlen_q, seqlen_k, dtype=torch.bool, device="meta")
    for mask in (allowed, torch.empty(1, 1, seqlen_k, seqlen_q, dtype=torch.bool, device="meta").mT):
        near = pairs(mask)
        assert near.ptr.shape == mask.shape
        assert max(near.ptr.stride()[2:]) <= LIMIT
        assert near[1:] == tuple(
            0 if n == 1 else stride for n, stride in zip(mask.shape, near.ptr.stride(), strict=True)
        )
