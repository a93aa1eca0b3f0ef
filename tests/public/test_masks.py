"""Masks as values: the pairs that each kind shows, the meaning of ``&``, and the refusals."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from fusedattn import functions, masks
from fusedattn.masks import Band, Mask

pytestmark = pytest.mark.usefixtures("_seed")

B, H = 2, 2
SHAPES = [(4, 4), (3, 6), (6, 3), (1, 5), (5, 1), (0, 3), (3, 0), (20, 37), (37, 20)]

Visible = Callable[[int, int, int, int], bool]


@triton.jit
def chequered(batch, head, q_index, k_index, args):
    return (q_index + k_index + batch + head) % args[1] != 0


def chequered_in_torch(batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor, args: tuple[Any, ...]) -> Tensor:
    return (q_index + k_index + args[0][batch] + head) % args[1] != 0


def kinds(n: int, m: int) -> dict[str, tuple[Mask, Visible]]:
    """Every kind of mask for ``n`` queries and ``m`` keys, with a function: does batch b, head h show pair (i, j)?"""
    valid = torch.rand(B, m) < 0.6
    allowed, per_key, per_head = torch.rand(B, H, n, m) < 0.6, torch.rand(m) < 0.6, torch.tensor([True, False])
    lengths = torch.tensor([m // 2, -1])
    stops = lengths.tolist()
    ids_q, ids_k = torch.randint(0, 3, (B, n)), torch.randint(0, 3, (B, m), dtype=torch.int32)
    blocks, row = torch.rand(B, H, -(-n // 16), -(-m // 32)) < 0.6, torch.rand(-(-m // 16)) < 0.6
    number, tree, column = torch.arange(B), torch.rand(B, H, n, n) < 0.6, torch.rand(n) < 0.6
    found: dict[str, tuple[Mask, Visible]] = {
        "full": (masks.full(), lambda b, h, i, j: True),
        "causal": (masks.causal(), lambda b, h, i, j: m - 1 - j >= n - 1 - i),
        "causal, top-left": (masks.causal("top_left"), lambda b, h, i, j: j <= i),
        "window": (masks.window(2, 1), lambda b, h, i, j: i + m - n - 2 <= j <= i + m - n + 1),
        "window, left": (masks.window(3, None), lambda b, h, i, j: j >= i + m - n - 3),
        "window, top-left": (masks.window(1, 4, "top_left"), lambda b, h, i, j: -1 <= j - i <= 4),
        "window, none": (masks.window(None, None), lambda b, h, i, j: True),
        "band, apart": (
            Mask(bands=frozenset({Band(-1, 3, "top_left")})),
            lambda b, h, i, j: i + 1 <= j <= i + 3,
        ),
        "prefix": (
            masks.prefix_lm(lengths),
            lambda b, h, i, j: j <= i + m - n or j < stops[b],
        ),
        "prefix, other": (
            masks.prefix_lm(lengths.flip(0).int()),
            lambda b, h, i, j: j <= i + m - n or j < stops[1 - b],
        ),
        "prefix, top-left": (
            masks.prefix_lm(lengths, "top_left"),
            lambda b, h, i, j: j <= i or j < stops[b],
        ),
        "padding": (masks.padding(valid), lambda b, h, i, j: bool(valid[b, j])),
        "boolean": (masks.boolean(allowed), lambda b, h, i, j: bool(allowed[b, h, i, j])),
        "boolean, per key": (masks.boolean(per_key), lambda b, h, i, j: bool(per_key[j])),
        "boolean, per head": (masks.boolean(per_head[:, None, None]), lambda b, h, i, j: bool(per_head[h])),
        "documents": (masks.documents(ids_q, ids_k), lambda b, h, i, j: bool(ids_q[b, i] == ids_k[b, j])),
        "blocks": (masks.block_sparse(blocks, (16, 32)), lambda b, h, i, j: bool(blocks[b, h, i // 16, j // 32])),
        "blocks, per key": (masks.block_sparse(row, 16), lambda b, h, i, j: bool(row[j // 16])),
        "blocks, per batch": (
            masks.block_sparse(blocks[:, :1], (16, 32)),
            lambda b, h, i, j: bool(blocks[b, 0, i // 16, j // 32]),
        ),
        "function": (
            masks.function(chequered, chequered_in_torch, (number, 3)),
            lambda b, h, i, j: (i + j + b + h) % 3 != 0,
        ),
    }
    found["tree"] = masks.tree(tree), lambda b, h, i, j: j < m - n or bool(tree[b, h, i, j - (m - n)])
    found["tree, per key"] = masks.tree(column), lambda b, h, i, j: j < m - n or bool(column[j - (m - n)])
    found["tree, per batch and query"] = (
        masks.tree(tree[:, :1, :, :1]),
        lambda b, h, i, j: j < m - n or bool(tree[b, 0, i, 0]),
    )
    if n == m:
        found["documents, packed"] = (masks.documents(ids_q), lambda b, h, i, j: bool(ids_q[b, i] == ids_q[b, j]))
    return found


def brute_force(visible: Visible, n: int, m: int) -> Tensor:
    dense = torch.empty(B, H, n, m, dtype=torch.bool)
    for b, h, i, j in itertools.product(range(B), range(H), range(n), range(m)):
        dense[b, h, i, j] = visible(b, h, i, j)
    return dense


def dense(mask: Mask, n: int, m: int, **selection: Any) -> Tensor:
    mask.check(B, H, n, m)
    found = mask.dense(n, m, batch=B, nheads=H, **selection)
    assert found.dtype == torch.bool
    return found.expand(B, H, -1, -1)


INCOMPATIBLE = [{"prefix", "prefix, top-left"}, {"prefix, other", "prefix, top-left"}, {"blocks", "blocks, per key"}]
INCOMPATIBLE += [{"blocks, per batch", "blocks, per key"}, {"documents", "documents, packed"}]
TOGETHER = ("causal", "padding", "boolean", "prefix", "documents", "blocks", "tree", "function")


@pytest.mark.parametrize(("n", "m"), SHAPES)
def test_dense_and_the_laws_of_and(n, m):
    some = {name: (mask, brute_force(visible, n, m)) for name, (mask, visible) in kinds(n, m).items()}
    for name, (mask, expected) in some.items():
        assert torch.equal(dense(mask, n, m), expected), name
        assert torch.equal(dense(mask & mask, n, m), expected), name
        assert torch.equal(dense(mask & masks.full(), n, m), expected), name
        assert torch.equal(dense(masks.full() & mask, n, m), expected), name
        assert mask.is_full == (name in ("full", "window, none"))
        assert mask.only_bands == name.startswith(("full", "causal", "window", "band"))
    for (name, (a, seen_by_a)), (other, (b, seen_by_b)) in itertools.combinations(some.items(), 2):
        if {name, other} in INCOMPATIBLE:
            with pytest.raises(ValueError, match=r"mask: .*to combine, allowed"):
                a & b
            continue
        assert torch.equal(dense(a & b, n, m), seen_by_a & seen_by_b), (name, other)
        assert torch.equal(dense(b & a, n, m), seen_by_a & seen_by_b), (name, other)
    together, expected = masks.full(), torch.ones(B, H, n, m, dtype=torch.bool)
    for name in ("window", *TOGETHER):
        together, expected = together & some[name][0], expected & some[name][1]
    assert torch.equal(dense(together, n, m), expected)


@pytest.mark.parametrize(
    ("rows", "keys"),
    [
        (slice(3, 17), slice(None)),
        (slice(None), slice(30, None, 3)),
        (torch.tensor([19, 0, 7, 7]), torch.tensor([36, 16, 15])),
        (torch.tensor([5]), None),
        (None, torch.tensor([], dtype=torch.int64)),
        (slice(0, 0), torch.tensor([1, 2])),
    ],
)
def test_a_part_is_that_of_the_whole(rows, keys):
    n, m = 20, 37
    for name, (mask, _) in kinds(n, m).items():
        whole = dense(mask, n, m)
        expected = whole[:, :, slice(None) if rows is None else rows][..., slice(None) if keys is None else keys]
        assert torch.equal(dense(mask, n, m, rows=rows, keys=keys), expected), name


def test_band():
    assert masks.full().band(3, 5) == (None, None)
    assert masks.padding(torch.ones(1, 5, dtype=torch.bool)).band(3, 5) == (None, None)
    assert masks.causal().band(3, 5) == (None, 2)
    assert masks.causal().band(5, 3) == (None, -2)
    assert masks.causal("top_left").band(3, 5) == (None, 0)
    both = masks.causal("top_left") & masks.causal()
    assert [both.band(*shape)[1] for shape in ((3, 5), (5, 3), (4, 4))] == [0, -2, 0]
    assert masks.window(2, 1).band(3, 5) == (0, 3)
    assert masks.window(2, None, "top_left").band(3, 5) == (-2, None)
    assert (masks.window(2, 1) & masks.window(1, 4, "top_left")).band(3, 5) == (0, 3)
    assert (masks.window(2, 1) & masks.window(1, 4, "top_left")).band(5, 3) == (-1, -1)
    assert (masks.causal() & masks.window(7, None)).band(4, 4) == (-7, 0)


def test_a_mask_is_a_value():
    mask = masks.causal() & masks.padding(torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(dataclasses.FrozenInstanceError):
        mask.bands = frozenset()  # type: ignore[misc]
    combined = mask & masks.padding(torch.zeros(1, 2, dtype=torch.bool))
    assert mask.valid.all()
    assert not combined.valid.any()
    assert (masks.full() & masks.full()).is_full
    assert not (masks.full() & masks.window(0, 0)).is_full
    assert masks.full().to("meta").is_full


def test_tensors_and_where_they_are():
    some = kinds(20, 37)
    mask = functools.reduce(operator.and_, (some[name][0] for name in TOGETHER))
    assert list(mask.tensors()) == [
        "padding(valid)", "boolean(m)", "tree(m)", "prefix_lm(lengths)", "documents(ids_q)", "documents(ids_k)",
        "block_sparse(blocks)", "function(args[0])",
    ]  # fmt: skip
    moved = mask.to("meta")
    assert list(moved.tensors()) == list(mask.tensors())
    assert all(x.is_meta for x in moved.tensors().values())
    assert moved.bands == mask.bands
    assert moved.function.args[1] == 3
    assert moved.function.key == mask.function.key
    assert (moved.prefix.align, moved.layout.block_q, moved.layout.block_k) == ("bottom_right", 16, 32)
    assert torch.equal(dense(mask.to("cpu"), 20, 37), dense(mask, 20, 37))
    assert not masks.causal().tensors()


def test_as_mask():
    allowed = torch.ones(3, 3, dtype=torch.bool)
    assert masks.as_mask(None).is_full
    assert masks.as_mask(allowed).allowed is allowed
    mask = masks.causal()
    assert masks.as_mask(mask) is mask


def test_functions_have_names():
    def make(remainder: int) -> Any:
        @triton.jit
        def odd(batch, head, q_index, k_index, args):
            return k_index % 2 == remainder

        return odd

    first, second = make(0), make(1)
    key = functions.register(first)
    assert key == functions.register(first) == masks.function(first).function.key
    assert key != functions.register(second)
    assert functions.registered(key) is first
    assert functions.registered(functions.register(second)) is second
    assert key.startswith(f"{__name__}.test_functions_have_names.<locals>.make.<locals>.odd#")
    with pytest.raises(KeyError):
        functions.registered("nobody#0")


def test_a_function_is_written_out_by_eager_alone():
    mask = masks.function(chequered)
    mask.check(B, H, 3, 3)
    with pytest.raises(
        NotImplementedError, match=r"mask: got function\(fn\) with eager=None.*pass function\(fn, eager"
    ):
        mask.dense(3, 3, batch=B, nheads=H)
    mask = masks.function(chequered, chequered_in_torch, (torch.arange(B), 3))
    with pytest.raises(ValueError, match=r"batch, nheads: got None and 2, allowed are ints"):
        mask.dense(3, 3, nheads=2)
    mask = masks.function(chequered, lambda b, h, i, j, args: i + j)
    with pytest.raises(TypeError, match=r"eager's result: got a torch.int64 tensor, allowed is .*bool"):
        mask.dense(3, 3, batch=B, nheads=H)


@pytest.mark.parametrize("dynamic", [False, True])
def test_masks_in_a_compiled_function(dynamic):
    """For any number of queries and keys, and any window; a mask function is made outside the graph."""
    function = masks.function(chequered, chequered_in_torch, (torch.arange(B), 3))

    def call(x: Tensor, valid: Tensor, lengths: Tensor, ids: Tensor, blocks: Tensor, tree: Tensor, left: int) -> Tensor:
        n = x.shape[0]
        mask = masks.causal() & masks.window(left, 2, "top_left") & masks.padding(valid) & masks.prefix_lm(lengths)
        mask = mask & masks.documents(ids) & masks.block_sparse(blocks, 16) & masks.tree(tree) & function
        mask.check(B, H, n, n)
        return mask.dense(n, n, batch=B, nheads=H)

    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=dynamic)
    for n, left in ((20, 5), (33, 7)):
        blocks = -(-n // 16)
        x = (torch.zeros(n), torch.rand(B, n) < 0.8, torch.tensor([3, 9]), torch.randint(0, 2, (B, n)))
        arguments = (*x, torch.rand(H, blocks, blocks) < 0.7, torch.rand(H, n, n) < 0.9, left)
        assert torch.equal(compiled(*arguments), call(*arguments))


BOOL = torch.ones(2, 3, dtype=torch.bool)
IDS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: masks.causal("bottom"), ValueError, r"align: got 'bottom', allowed are .*bottom_right.*top_left"),
        (lambda: masks.window(1, 1, "top"), ValueError, r"align: got 'top', allowed are .*bottom_right.*top_left"),
        (lambda: masks.window(-1, 0), ValueError, r"left: got -1, allowed are 0 and more, and None"),
        (lambda: masks.window(0, -2), ValueError, r"right: got -2, allowed are 0 and more, and None"),
        (lambda: masks.window(1.5, 0), TypeError, r"left: got float, allowed are an int and None"),
        (lambda: masks.window(0, True), TypeError, r"right: got bool, allowed are an int and None"),
        (
            lambda: masks.prefix_lm(IDS[0].float()),
            TypeError,
            r"lengths: got a torch.float32 tensor, allowed is an int32",
        ),
        (lambda: masks.prefix_lm(3), TypeError, r"lengths: got int, allowed is an int32"),
        (lambda: masks.prefix_lm(IDS), ValueError, r"lengths: got shape \(2, 3\), allowed is \(batch,\)"),
        (lambda: masks.prefix_lm(IDS[0], "left"), ValueError, r"align: got 'left'"),
        (lambda: masks.prefix_lm(IDS[0]) & masks.prefix_lm(IDS[0, :2]), ValueError, r"lengths.*\(3,\) and \(2,\)"),
        (
            lambda: masks.prefix_lm(IDS[0]) & masks.prefix_lm(IDS[0], "top_left"),
            ValueError,
            r"prefix_lm of align 'bottom_right' and 'top_left'.*boolean\(m\)",
        ),
        (lambda: masks.documents(IDS[0]), ValueError, r"ids_q: got shape \(3,\), allowed is \(batch, seqlen_q\)"),
        (lambda: masks.documents(IDS, IDS.short()), TypeError, r"ids_k: got a torch.int16 tensor, allowed is an int32"),
        (lambda: masks.documents(IDS) & masks.documents(IDS), ValueError, r"of documents\(\).*allowed is one; number"),
        (lambda: masks.block_sparse(BOOL.int(), 16), TypeError, r"blocks: got .*int32.*, allowed is .*bool"),
        (lambda: masks.block_sparse(BOOL[None, None, None], 16), ValueError, r"blocks: got shape \(1, 1, 1, 2, 3\)"),
        (lambda: masks.block_sparse(BOOL, 24), ValueError, r"block_size: got 24, allowed are positive multiples of 16"),
        (lambda: masks.block_sparse(BOOL, (16, 0)), ValueError, r"block_size: got 0, allowed"),
        (lambda: masks.block_sparse(BOOL, 16.0), TypeError, r"block_size: got float, allowed are an int and two"),
        (lambda: masks.block_sparse(BOOL, (16, 16, 16)), ValueError, r"block_size: got \(16, 16, 16\), allowed"),
        (lambda: masks.block_sparse(BOOL, 16).check(2, 4, 32, 32), ValueError, r"\(2, 3\), allowed.* \(2, 4, 2, 2\)"),
        (lambda: masks.block_sparse(BOOL, 16).check(2, 4, 33, 48), ValueError, r"\(2, 3\), allowed.* \(2, 4, 3, 3\)"),
        (
            lambda: masks.block_sparse(BOOL, 16) & masks.block_sparse(BOOL, (16, 32)),
            ValueError,
            r"block sizes \(16, 16\) and \(16, 32\) to combine, allowed is one",
        ),
        (
            lambda: masks.block_sparse(BOOL, 16) & masks.block_sparse(BOOL[:, :2], 16),
            ValueError,
            r"blocks.*\(2, 3\) and \(2, 2\)",
        ),
        (lambda: masks.function(chequered_in_torch), TypeError, r"function: got function, allowed is a @triton.jit"),
        (lambda: masks.function(chequered, 3), TypeError, r"eager: got int, allowed are a function of torch and None"),
        (lambda: masks.function(chequered, None, [1]), TypeError, r"args: got list, allowed is a tuple"),
        (lambda: masks.function(chequered, None, (1, "2")), TypeError, r"args\[1\]: got str, allowed are tensors"),
        (
            lambda: masks.function(chequered) & masks.function(chequered),
            ValueError,
            r"function\(\).*write one function",
        ),
        (lambda: masks.padding(BOOL.int()), TypeError, r"valid: got .*int32.*, allowed is .*bool"),
        (lambda: masks.padding(BOOL.tolist()), TypeError, r"valid: got list, allowed is .*bool"),
        (lambda: masks.padding(BOOL[0]), ValueError, r"valid: got shape \(3,\), allowed is \(batch, seqlen_k\)"),
        (lambda: masks.boolean(BOOL.float()), TypeError, r"m: got .*float32.*, allowed is .*bool"),
        (lambda: masks.boolean(BOOL[None, None, None]), ValueError, r"m: got shape \(1, 1, 1, 2, 3\), allowed"),
        (lambda: masks.tree(BOOL.int()), TypeError, r"m: got .*int32.*, allowed is .*bool"),
        (
            lambda: masks.tree(BOOL[None, None, None]),
            ValueError,
            r"m: got shape \(1, 1, 1, 2, 3\).*seqlen_q, seqlen_q\)",
        ),
        (lambda: masks.tree(BOOL).check(2, 4, 2, 3), ValueError, r"tree\(m\): got shape \(2, 3\).* \(2, 4, 2, 2\)"),
        (lambda: masks.tree(BOOL) & masks.tree(BOOL[:, :2]), ValueError, r"tree.*\(2, 3\) and \(2, 2\)"),
        (lambda: masks.causal() & BOOL, TypeError, r"unsupported operand"),
        (lambda: masks.padding(BOOL) & masks.padding(BOOL[:, :2]), ValueError, r"valid.*\(2, 3\) and \(2, 2\)"),
        (lambda: masks.boolean(BOOL) & masks.boolean(BOOL[:, :2]), ValueError, r"allowed.*\(2, 3\) and \(2, 2\)"),
        (lambda: Mask(valid=torch.ones(2, 3)), TypeError, r"valid: got .*float32"),
        (lambda: Mask(allowed=torch.ones(2, 3)), TypeError, r"float32"),
        (lambda: Band(None, 0, "diagonal"), ValueError, r"diagonal"),
    ],
)
def test_errors_of_masks(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (1, 3), (4, 1, 3), (1, 4, 2, 1), (2, 1, 1, 3)])
def test_shapes_that_boolean_takes(shape):
    masks.boolean(torch.ones(shape, dtype=torch.bool)).check(2, 4, 2, 3)


@pytest.mark.parametrize("shape", [(), (2,), (2, 2), (1, 2), (4, 1, 2), (1, 4, 2, 1), (2, 1, 1, 2), (2, 4, 2, 2)])
def test_shapes_that_tree_takes(shape):
    masks.tree(torch.ones(shape, dtype=torch.bool)).check(2, 4, 2, 3)


def test_a_mask_is_neither_true_nor_false():
    """``causal() and padding(v)`` would be ``padding(v)`` alone."""
    one, other = masks.causal(), masks.padding(torch.ones(1, 3, dtype=torch.bool))
    for use in (lambda: one and other, lambda: one or other, lambda: not one, lambda: 1 if other else 0):
        with pytest.raises(TypeError, match="'and', 'or', 'not' or 'if' on a mask; a & b"):
            use()


@pytest.mark.parametrize("union", [lambda a, b: a | b, lambda a, b: b.valid | a], ids=["mask", "tensor"])
def test_there_is_no_union_and_no_complement(union):
    one, other = masks.causal(), masks.padding(torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match=r"got '\|', allowed are '&' and masks.boolean\(a.dense"):
        union(one, other)
    with pytest.raises(NotImplementedError, match=r"got '~', allowed are '&' and masks.boolean\(~mask.dense"):
        one.__invert__()


def test_numbers_of_functions_keep_every_digit():
    numbers = (0.1234567890123, 2**40 + 1, -1e-300)
    assert functions.read(functions.written(numbers), iter(())) == numbers
