"""Attention problems as plain data, hostile ones too: a :class:`Problem` prints as the call that makes it.

What a :class:`fusedattn.testing.Case` cannot say is added here: where tensors lie in memory, how large their values
are, which rows see how many keys, and where there is a NaN or an infinity.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn import Rope, masks, testing
from fusedattn.masks import Mask
from fusedattn.testing import Case, Inputs

GUARD = 64  # elements that hold NaN, at least, before and behind every tensor

VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, repr=False)
class Problem:
    """A case, and what is hostile about it; the same inputs on every device.

    Attributes:
        layouts: for q, k, v and dout, a name of :data:`LAYOUTS`; contiguous without.
        storage_offset: where each tensor begins in its memory, in elements beyond a multiple of 64.
        strided_constants: masks, tables and positions are every second element of every second row.
        magnitudes: factors of q, k, v, dout and dlse.
        rows: of each query, only one key stays visible; or every third query sees nothing, or none anything.
        poison: triples of a tensor (q, k, v, dout, dlse), a name of :data:`VALUES`, and which of its rows get it: those
            that are hidden (keys that no query sees, queries that see no key), one element of one row, or some rows.
        dlse: whether a gradient comes back to lse, or to out alone.
        needed: which of q, k and v need a gradient, in a second run that must agree with the first.
    """

    case: Case
    layouts: Mapping[str, str] = field(default_factory=dict)
    storage_offset: int = 0
    strided_constants: bool = False
    magnitudes: Mapping[str, float] = field(default_factory=dict)
    rows: Literal["one key", "some empty", "all empty"] | None = None
    poison: tuple[tuple[str, str, str], ...] = ()
    dlse: bool = True
    needed: str = "qkv"

    def __repr__(self) -> str:
        return _call(self)

    @property
    def command(self) -> str:
        """The shell command that checks this problem again."""
        return f'python -m tests.reproduce "{self!r}"'

    def inputs(self, device: torch.device | str) -> Inputs:
        """The tensors of this problem."""
        inputs = testing.make_inputs(self.case)
        generator = torch.Generator().manual_seed(self.case.seed)
        x = {name: getattr(inputs, name) for name in ("q", "k", "v", "dout", "dlse")}
        for name, factor in self.magnitudes.items():
            x[name] = (x[name].double() * factor).to(x[name].dtype)
        mask = inputs.mask if self.rows is None else inputs.mask & masks.boolean(self._allowed(generator))
        for name, value, where in self.poison:
            x[name] = x[name].masked_fill(self._poisoned(x[name], name, where, mask, generator), VALUES[value])
        for name in x:
            layout = self.layouts.get(name, "")
            x[name] = _relocated(LAYOUTS[layout](x[name]) if layout else x[name], self.storage_offset, device)
            if layout == "negated":
                x[name] = torch._neg_view(x[name])
        mask, rope = mask.to(device), inputs.rope if inputs.rope is None else inputs.rope.to(device)
        if self.strided_constants:
            mask, rope = strided_mask(mask), rope if rope is None else strided_rope(rope)
        return Inputs(**x, mask=mask, rope=rope, scale=inputs.scale)

    def _allowed(self, generator: torch.Generator) -> Tensor:
        case = self.case
        allowed = torch.zeros(case.batch, case.nheads_q, case.seqlen_q, case.seqlen_k, dtype=torch.bool)
        if self.rows == "one key" and case.seqlen_k > 0:
            chosen = torch.randint(0, case.seqlen_k, allowed.shape[:3], generator=generator)
            allowed.scatter_(-1, chosen[..., None], True)
        elif self.rows == "some empty":
            allowed[:, :, torch.arange(case.seqlen_q) % 3 != 1] = True
        return allowed

    def _poisoned(self, x: Tensor, name: str, where: str, mask: Mask, generator: torch.Generator) -> Tensor:
        """Which elements of ``x`` are replaced, broadcastable to it."""
        rows = torch.zeros(x.shape[:3], dtype=torch.bool)
        if where == "hidden":
            case = self.case
            pairs = mask.dense(case.seqlen_q, case.seqlen_k).expand(case.batch, case.nheads_q, -1, -1)
            hidden = ~pairs.any(dim=-2 if name in "kv" else -1)
            rows = hidden.unflatten(1, (case.nheads_kv, -1)).all(2) if name in "kv" else hidden
        elif where == "some rows":
            rows = torch.rand(x.shape[:3], generator=generator) < 0.1
        elif x.numel() > 0:
            element = torch.zeros_like(x, dtype=torch.bool).flatten()
            element[int(torch.randint(0, x.numel(), (), generator=generator))] = True
            return element.view(x.shape)
        return rows[..., None] if x.dim() == 4 else rows


def _call(x: Problem | Case) -> str:
    """The call that makes ``x``, with what differs from the defaults."""
    arguments = []
    for f in dataclasses.fields(x):
        value = getattr(x, f.name)
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if value != default:
            arguments.append(f"{f.name}={_call(value) if isinstance(value, Case) else repr(value)}")
    return f"{type(x).__name__}({', '.join(arguments)})"


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _seqlen_first(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def _packed(x: Tensor) -> Tensor:
    """As in a projection whose output is q, k and v: (batch, seqlen, 3, nheads, head_dim)."""
    y = x.transpose(1, 2)
    return torch.stack((torch.full_like(y, math.nan), y, torch.full_like(y, math.nan)), dim=2)[:, :, 1].transpose(1, 2)


def _sliced(x: Tensor) -> Tensor:
    return F.pad(x, (3, 5), value=math.nan)[..., 3:-5]


def _every_other(x: Tensor) -> Tensor:
    return torch.stack((x, torch.full_like(x, math.nan)), dim=3).flatten(2, 3)[:, :, ::2]


def _windows(x: Tensor) -> Tensor:
    """Rows that overlap: each is the one before, shifted by one."""
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
    "negated": lambda x: -x,  # a lazy negation of which is then taken
    "over_everything": lambda x: x[:1, :1, :1, :1].expand(x.shape),  # what out.sum() brings back; dout only
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


def _strided(x: Tensor | None) -> Tensor | None:
    """``x`` as every second element of every second row of something that is wrong elsewhere."""
    if x is None or x.dim() == 0:
        return x
    other = ~x if x.dtype == torch.bool else torch.full_like(x, math.nan if x.is_floating_point() else 2**30)
    y = torch.stack((x, other), dim=-1).flatten(-2)
    if y.dim() == 1:
        return y[::2]
    return torch.stack((y, y.roll(1, -1)), dim=-2).flatten(-3, -2)[..., ::2, ::2]


def strided_mask(mask: Mask) -> Mask:
    """The same mask, of strided tensors."""
    return replace(mask, valid=_strided(mask.valid), allowed=_strided(mask.allowed))


def strided_rope(rope: Rope) -> Rope:
    """The same tables and positions, strided."""
    return replace(
        rope, **{name: _strided(getattr(rope, name)) for name in ("cos", "sin", "positions_q", "positions_k")}
    )  # type: ignore[arg-type]
