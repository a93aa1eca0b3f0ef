"""Tensors of more than 2^31 elements: every offset into them is right, forward and backward.

Only the rows that are read or written take memory: their storage is committed page by page. Results must equal, bit
for bit, those of the same rows packed together. A batch of 2^26 is run for its last sequence alone.
"""

from __future__ import annotations

import errno
import importlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedattn import Rope, masks, testing
from fusedattn.testing import Case
from tests.accesses import checked_accesses
from tests.conftest import DEVICE, INTERPRETING, assert_equal, triton_attention

pytestmark = pytest.mark.usefixtures("_seed")

op = importlib.import_module("fusedattn.attention")  # the name stands for the function in fusedattn

interpreted = pytest.mark.skipif(not INTERPRETING, reason="a GPU commits all memory and runs every program")

FAR = 2**30 + 16  # the third row, head or batch starts beyond 2^31
LIMIT = op.MAX_ROW_STRIDE
DTYPES = (torch.float16, torch.float32)  # each has a kernel of its own for the rows


def lazy(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU of which only the pages that are touched take memory, NaN on a GPU; or skip the test."""
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
    """Bytes of this process that lie in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.fixture(autouse=True)
def _accesses() -> Iterator[None]:
    """Looks at every address that is read or written, and at how much memory was committed."""
    before = resident() if INTERPRETING else 0
    with checked_accesses() if INTERPRETING else nullcontext():
        yield
    assert not INTERPRETING or resident() - before < 2**30


def distant(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros (NaN on a GPU) with large strides."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return lazy(extent, dtype).as_strided(shape, strides)


def far(x: Tensor, dim: int, stride: int) -> tuple[int, ...]:
    """Strides of ``x`` packed but for one dimension."""
    strides = list(x.stride())
    strides[dim] = stride
    return tuple(strides)


@contextmanager
def distant_outputs() -> Iterator[list[Tensor]]:
    """What is allocated like a tensor with large strides has its strides too."""
    empty_like = torch.empty_like
    allocated: list[Tensor] = []

    def like(x: Tensor, **kwargs: Any) -> Tensor:
        if max(x.stride()) < LIMIT or kwargs.get("memory_format") is torch.contiguous_format:
            return empty_like(x, **kwargs)
        # Not a view in the eyes of autograd: an op may return it.
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
    "rotated batches": (replace(SMALL, batch=3, rope="half"), 0, FAR),
    "rotated heads": (replace(SMALL, nheads_q=3, nheads_kv=3, rope="half"), 1, FAR),
    "rotated rows": (replace(SMALL, seqlen_q=530, seqlen_k=18, rope="half"), 2, LIMIT),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in DISTANT for dtype in DTYPES if dtype == torch.float16 or "rotated" not in name],
    ids=str,
)
def test_far_apart(name, dtype):
    """q, k, v, dout, out and the gradients with more than 2^31 elements from their first row to their last."""
    case, dim, stride = DISTANT[name]
    inputs = testing.make_inputs(replace(case, dtype=dtype), DEVICE)
    expected = testing.run(triton_attention, inputs)
    room = 2**18  # in which each tensor finds its place in the storage of all four
    extent = stride * max(inputs.q.shape[dim], inputs.k.shape[dim]) + 4 * room
    storage = lazy(extent, dtype)
    for at, name in enumerate(("q", "k", "v", "dout")):
        x = getattr(inputs, name)
        inputs = replace(inputs, **{name: storage.as_strided(x.shape, far(x, dim, stride), at * room).copy_(x)})
        x = getattr(inputs, name)
        assert (op._tileable(x) is x) == (dim < 2 or stride <= LIMIT)
    with distant_outputs() as allocated:
        got = testing.run(triton_attention, inputs)
    assert_equal(got, expected)
    # out and its rest, dq, dk, dv; contiguous where the inputs had to be copied
    n_outputs = 5 if dtype == torch.float16 else 4
    assert len(allocated) == (n_outputs if dim < 2 or stride <= LIMIT else 0)


def masked(allowed: Tensor, seqlen_q: int, seqlen_k: int) -> testing.Results:
    case = replace(SMALL, batch=allowed.shape[0], nheads_q=allowed.shape[1], seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    inputs = testing.make_inputs(replace(case, causal=None), DEVICE)
    return testing.run(triton_attention, replace(inputs, mask=masks.boolean(allowed)))


@pytest.mark.parametrize(
    ("shape", "dim", "stride"),
    [((3, 1, 9, 9), 0, FAR), ((1, 3, 9, 9), 1, FAR), ((1, 1, 530, 5), 2, LIMIT), ((1, 1, 5, 530), 3, LIMIT),
     ((3, 1, 9, 1), 0, FAR), ((1, 1, 5, 9), 2, FAR), ((1, 1, 5, 9), 3, FAR)],
    ids=["batches", "heads", "queries", "keys", "broadcast", "queries, copied", "keys, copied"],
)  # fmt: skip
def test_boolean_mask(shape, dim, stride):
    """A boolean mask with more than 2^31 elements from its first to its last."""
    seqlen_q, seqlen_k = shape[2], max(shape[3], 9 if shape[3] == 1 else 1)
    allowed = (torch.rand(shape) < 0.6).to(DEVICE)
    strides = list(far(allowed, dim, stride))
    mask = distant(shape, strides, torch.bool)
    mask.copy_(allowed)
    assert_equal(masked(mask, seqlen_q, seqlen_k), masked(allowed, seqlen_q, seqlen_k))


@contextmanager
def last_of(batch: int) -> Iterator[None]:
    """Run only the last programs of a launch, one of `batch`, and allocate lazily; a smaller launch runs as it is.

    The batch is the outermost in every grid: where it is `batch`, only its last sequence is computed.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    run, set_grid_dim, set_grid_idx = interpreter.GridExecutor.__call__, builder.set_grid_dim, builder.set_grid_idx

    def run_last(executor: Any, *args: Any, **kwargs: Any) -> None:
        (n,) = executor.grid
        to_run = n if n < batch else n // batch
        executor.grid = (to_run,)
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
        patch.setattr(torch, "empty", lazily(torch.empty))
        patch.setattr(torch, "empty_like", lazily(torch.empty_like))
        patch.setattr(Tensor, "contiguous", lambda x: x if x.is_contiguous() else last_of_many(x[-1:], batch))
        yield


def run_ops(inputs: testing.Inputs) -> dict[str, Tensor]:
    """Everything that the two ops return."""
    rope, mask = inputs.rope, inputs.mask
    seqlen_q, seqlen_k = inputs.q.shape[2], inputs.k.shape[2]
    diagonal = mask.diagonal(seqlen_q, seqlen_k)
    allowed = mask.allowed
    if allowed is not None:
        allowed = allowed.expand(*inputs.q.shape[:3], seqlen_k)
    tables = (None,) * 4 if rope is None else (rope.cos, rope.sin, rope.positions_q, rope.positions_k)
    constants = (mask.valid, allowed, *tables, False, diagonal is not None, diagonal or 0, 0.25)
    names = ("out", "lse", "row_max", "row_sum", "rest")
    got = dict(zip(names, op.attention_fwd(inputs.q, inputs.k, inputs.v, *constants, True), strict=True))
    out, _, *rows = got.values()
    gradients = op.attention_bwd(
        inputs.dout, inputs.dlse, inputs.q, inputs.k, inputs.v, out, *rows, *constants, True, True
    )
    got |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return got


def last(results: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The last elements of each result, along every dimension as many as `like` has."""
    return {name: x[tuple(slice(-n, None) for n in like[name].shape)] for name, x in results.items()}


def last_of_many(x: Tensor, batch: int, seqlen_first: bool = False) -> Tensor:
    """``x``, of batch 1, as the last of `batch` in a tensor that holds them all."""
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
    """More than 2^31 rows of queries, of keys, of positions and of tables; and of every result."""
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


@interpreted
@pytest.mark.parametrize("positions_dtype", [torch.int32, torch.int64])
def test_long_tables(positions_dtype):
    """Rotary tables of more than 2^31 elements, used at their end."""
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
    """Outputs have the layout of q: in (seqlen, batch, nheads, head_dim), many sequences bring rows far apart."""
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
    """2^27 keys, of which only the last are valid: k, v and their gradients exceed 2^31 elements."""
    from fusedattn.kernels import configs, masking

    seqlen_k, packed = 2**27, configs.INTERPRETER.dkdv.BLOCK_N
    case = replace(SMALL, seqlen_k=packed, causal=None, padding="left", dtype=dtype)
    inputs = testing.make_inputs(case)
    inputs = replace(inputs, mask=replace(inputs.mask, valid=torch.arange(packed)[None] >= 2))

    def at_the_end(x: Tensor) -> Tensor:
        """Its keys are the last of all."""
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
    # Finding it would take a walk over all keys.
    key_range = torch.tensor([[seqlen_k - packed + 2, seqlen_k, 1]], dtype=torch.int32)
    monkeypatch.setattr(masking, "key_range", lambda valid: key_range)
    with last_of(seqlen_k // packed):
        got = run_ops(inputs)
    assert_equal(last(got, expected), expected)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(20, 2**27), (2**27, 20), (2**20, 2**20)])
def test_rows_of_a_boolean_mask_are_near_enough(seqlen_q, seqlen_k):
    """Offsets inside a tile are int32: a mask whose rows are too long is transposed; no test has memory for one."""
    allowed = torch.empty(1, 1, seqlen_q, seqlen_k, dtype=torch.bool, device="meta")
    for mask in (allowed, torch.empty(1, 1, seqlen_k, seqlen_q, dtype=torch.bool, device="meta").mT):
        device_mask = op._device_mask(None, mask, False, 0)
        assert device_mask.allowed.shape == mask.shape
        assert max(device_mask.allowed.stride()[2:]) <= LIMIT


def test_a_transposed_boolean_mask_is_the_same_mask(monkeypatch):
    allowed = (torch.rand(1, 2, 20, 37) < 0.6).to(DEVICE)
    expected = masked(allowed, 20, 37)
    monkeypatch.setattr(op, "MAX_ROW_STRIDE", 36)
    assert op._device_mask(None, allowed, False, 0).allowed.stride()[2:] == (1, 20)
    assert_equal(masked(allowed, 20, 37), expected)
