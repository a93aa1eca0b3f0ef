"""Attention problems as plain data, hostile ones too: a :class:`FuzzProblem` prints as the call that makes it.

It adds to a :class:`fusedattn.testing.Case` the layout of tensors in memory, the size of their values, the number of
keys that rows see, and places of NaN and infinity.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn import masks, testing
from fusedattn.testing import Case, Inputs

Constants = TypeVar("Constants")

GUARD = 64  # at least this many NaN before and behind every tensor

# Special values by dtype: NaN, infinities, and the largest and the lowest number.
VALUES: dict[str, Callable[[torch.dtype], float]] = {
    "nan": lambda _: math.nan,
    "inf": lambda _: math.inf,
    "-inf": lambda _: -math.inf,
    "highest": lambda dtype: torch.finfo(dtype).max,
    "lowest": lambda dtype: torch.finfo(dtype).min,
}


@dataclass(frozen=True, repr=False)
class FuzzProblem:
    """A case with hostile properties; the same inputs on every device.

    Attributes:
        layouts: for q, k, v, dout and a full bias, a name of :data:`LAYOUTS`; default contiguous.
        storage_offset: the start of each tensor in its storage, in elements beyond a multiple of 64.
        broadcast: for the tensors of masks and biases in :data:`BROADCAST`, the dimensions of size 1.
        strided_constants: masks, tables, positions, biases and sinks are every second element of every second row.
        magnitudes: factors for the tensors q, k, v, dout, dlse, bias, relative and sinks.
        rows: each query sees one key; every third query sees nothing; or no query sees anything.
        poison: triples of a tensor, a name of :data:`VALUES`, and the elements that get it: hidden ones (keys that no
            query sees, queries that see no key, biases of hidden scores), one element of one row, some elements, some
            rows, or all.
        dlse: whether lse gets a gradient, or out alone.
        needed: first letters of the tensors that get a gradient in a second run, which must agree with the first.
    """

    case: Case
    layouts: Mapping[str, str] = field(default_factory=dict)
    storage_offset: int = 0
    broadcast: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    strided_constants: bool = False
    magnitudes: Mapping[str, float] = field(default_factory=dict)
    rows: Literal["one key", "some empty", "all empty"] | None = None
    poison: tuple[tuple[str, str, str], ...] = ()
    dlse: bool = True
    needed: str = "qkvbrsl"

    def __repr__(self) -> str:
        return call_of(self)

    @property
    def command(self) -> str:
        """The shell command that checks this problem again."""
        return f'python -m tests.tools.reproduce "{self!r}"'

    def inputs(self, device: torch.device | str) -> Inputs:
        """The tensors of this problem."""
        inputs = testing.make_inputs(self.case)
        for name, dims in self.broadcast.items():
            inputs = _with_ones(inputs, BROADCAST[name][0], dims)
        generator = torch.Generator().manual_seed(self.case.seed)
        x = {**inputs.leaves, "dout": inputs.dout, "dlse": inputs.dlse}
        for name, factor in self.magnitudes.items():
            if name in x:  # a bias of -inf, which hides a pair, stays
                x[name] = torch.where(x[name].isinf(), x[name], (x[name].double() * factor).to(x[name].dtype))
        mask = inputs.mask if self.rows is None else inputs.mask & masks.boolean(self._allowed(generator))
        inputs = replace(inputs, mask=mask)
        for name, value, where in self.poison:
            if name in x:
                x[name] = _filled(x[name], value, _poisoned(x[name], name, where, inputs, generator))
        for name in x:
            layout = self.layouts.get(name, "")
            x[name] = _relocated(LAYOUTS[layout](x[name]) if layout else x[name], self.storage_offset, device)
            if layout == "negated":
                x[name] = torch._neg_view(x[name])
        inputs = replace(inputs, dout=x.pop("dout"), dlse=x.pop("dlse")).with_leaves(x)
        moved = {name: getattr(inputs, name) for name in ("mask", "rope", "bias", "score_mod", "dropout_seed")}
        moved = {name: part if part is None else part.to(device) for name, part in moved.items()}
        if self.strided_constants:
            constants = ("mask", "rope", "bias", "dropout_seed")
            moved |= {name: strided(moved[name]) for name in constants} | {"sinks": strided(inputs.sinks)}
        return replace(inputs, **moved)

    def needed_of(self, inputs: Inputs) -> list[str]:
        """The names of the leaves that need a gradient in the second run: at least one."""
        names = [name for name in inputs.leaves if name[0] in self.needed]
        return names or ["q"]

    def _allowed(self, generator: torch.Generator) -> Tensor:
        case = self.case
        allowed = torch.zeros(case.batch, case.nheads_q, case.seqlen_q, case.seqlen_k, dtype=torch.bool)
        if self.rows == "one key" and case.seqlen_k > 0:
            chosen = torch.randint(0, case.seqlen_k, allowed.shape[:3], generator=generator)
            allowed.scatter_(-1, chosen[..., None], True)
        elif self.rows == "some empty":
            allowed[:, :, torch.arange(case.seqlen_q) % 3 != 1] = True
        return allowed


# Tensors that may be broadcast: the path of attributes, and the number of leading dimensions that may be 1.
BROADCAST = {
    "boolean": (("mask", "allowed"), 4),
    "layout": (("mask", "layout", "blocks"), 4),
    "tree": (("mask", "tree"), 4),
    "bias": (("bias", "tensor"), 4),
    "relative": (("bias", "relative"), 3),
    "slopes": (("bias", "slopes"), 1),
}


def broadcast_tensors(case: Case) -> list[str]:
    """The names in :data:`BROADCAST` of tensors that a case has."""
    return [name for name in BROADCAST if (case.alibi == "per_batch" if name == "slopes" else getattr(case, name))]


def _with_ones(owner: Any, path: tuple[str, ...], dims: tuple[int, ...]) -> Any:
    """`owner` with the tensor at `path` reduced to its first element in `dims`."""
    if path:
        return replace(owner, **{path[0]: _with_ones(getattr(owner, path[0]), path[1:], dims)})
    for dim in dims:
        if dim < owner.dim():
            owner = owner.narrow(dim, 0, min(1, owner.shape[dim]))
    return owner


def _filled(x: Tensor, value: str, where: Tensor) -> Tensor:
    """``x`` with one of :data:`VALUES` at `where`; a finite value does not replace NaN or infinity."""
    filling = VALUES[value](x.dtype)
    return x.masked_fill(where & x.isfinite() if math.isfinite(filling) else where, filling)


def _poisoned(x: Tensor, name: str, where: str, inputs: Inputs, generator: torch.Generator) -> Tensor:
    """A mask of the elements of ``x`` to replace, broadcastable to it."""
    if where == "hidden":
        return _hidden(x, name, inputs)
    if where == "all":
        return torch.ones_like(x, dtype=torch.bool)
    if where == "some elements":
        return torch.rand(x.shape, generator=generator) < 0.5
    if where == "some rows":
        rows = x.shape if name in ("dlse", "sinks") else x.shape[:-1]
        chosen = torch.rand(rows, generator=generator) < 0.1
        return chosen if chosen.dim() == x.dim() else chosen[..., None]
    element = torch.zeros_like(x, dtype=torch.bool).flatten()
    if x.numel() > 0:
        element[int(torch.randint(0, x.numel(), (), generator=generator))] = True
    return element.view(x.shape)


def _hidden(x: Tensor, name: str, inputs: Inputs) -> Tensor:
    """A mask of the elements of ``x`` that no visible pair uses, broadcastable to it."""
    pairs = inputs.visible()
    if name == "sinks":
        return torch.zeros_like(x, dtype=torch.bool)
    if name in ("bias", "relative"):
        return testing.through_bias(inputs, pairs.double())[f"d{name}"] == 0
    rows = ~pairs.any(dim=-2 if name in "kv" else -1)
    if name in "kv":
        rows = rows.unflatten(1, (inputs.k.shape[1], -1)).all(2)
    return rows[..., None] if x.dim() == 4 else rows


def added_leaves(case: Case) -> list[str]:
    """The names of the leaves of a case besides q, k and v, without slopes and learned args of functions."""
    return [name for name in ("bias", "relative", "sinks") if getattr(case, name)]


def call_of(x: Any) -> str:
    """The call that makes a dataclass, such as a Case, with the arguments that differ from the defaults."""
    arguments = []
    for f in dataclasses.fields(x):
        value = getattr(x, f.name)
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if value != default:
            arguments.append(f"{f.name}={call_of(value) if isinstance(value, Case) else repr(value)}")
    return f"{type(x).__name__}({', '.join(arguments)})"


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _seqlen_first(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def _packed(x: Tensor) -> Tensor:
    """The layout of a joint projection of q, k and v: (batch, seqlen, 3, nheads, head_dim)."""
    y = x.transpose(1, 2)
    return torch.stack((torch.full_like(y, math.nan), y, torch.full_like(y, math.nan)), dim=2)[:, :, 1].transpose(1, 2)


def _sliced(x: Tensor) -> Tensor:
    return F.pad(x, (3, 5), value=math.nan)[..., 3:-5]


def _every_other(x: Tensor) -> Tensor:
    return torch.stack((x, torch.full_like(x, math.nan)), dim=3).flatten(2, 3)[:, :, ::2]


def _windows(x: Tensor) -> Tensor:
    """Rows that overlap: each is the previous one, shifted by one element."""
    seqlen, head_dim = x.shape[2:]
    if x.numel() == 0:
        return x
    return torch.cat((x[:, :, 0], x[:, :, :, 0]), dim=-1)[..., : seqlen + head_dim - 1].unfold(-1, head_dim, 1)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": _transposed,
    "seqlen_first": _seqlen_first,
    "packed": _packed,
    "sliced": _sliced,
    "every_other": _every_other,
    "windows": _windows,
    "over_batch": lambda x: x[:1].expand(x.shape),
    "over_heads": lambda x: x[:, :1].expand(x.shape),
    "over_seqlen": lambda x: x[:, :, :1].expand(x.shape),
    "negated": lambda x: -x,  # then a lazy negation of this is taken
    "over_everything": lambda x: x[:1, :1, :1, :1].expand(x.shape),  # the gradient of out.sum(); dout only
}


def _relocated(x: Tensor, storage_offset: int, device: torch.device | str) -> Tensor:
    """``x`` with the same strides on `device`, behind `storage_offset` elements and between NaN."""
    if x.numel() == 0:
        return x.to(device)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    start = GUARD + storage_offset
    storage = torch.full((start + extent + GUARD,), math.nan, dtype=x.dtype)
    storage[start : start + extent] = x.as_strided((extent,), (1,), x.storage_offset())
    return storage.to(device).as_strided(x.shape, x.stride(), start)


def _strided(x: Tensor) -> Tensor:
    """``x`` as every second element of every second row of a tensor with wrong values elsewhere."""
    if x.dim() == 0:
        return x
    other = ~x if x.dtype == torch.bool else torch.full_like(x, math.nan if x.is_floating_point() else 2**30)
    y = torch.stack((x, other), dim=-1).flatten(-2)
    if y.dim() == 1:
        return y[::2]
    return torch.stack((y, y.roll(1, -1)), dim=-2).flatten(-3, -2)[..., ::2, ::2]


def strided(x: Constants) -> Constants:
    """The same mask, bias, tables or tensor, strided. Args of a user's function stay: it knows their strides."""
    if isinstance(x, Tensor):
        return _strided(x)  # type: ignore[return-value]
    if not dataclasses.is_dataclass(x):
        return x
    parts = {f.name: strided(getattr(x, f.name)) for f in dataclasses.fields(x) if f.init and f.name != "args"}
    return replace(x, **parts)  # type: ignore[type-var]
