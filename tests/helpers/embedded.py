"""Inputs surrounded by values that must not matter, and the kernels that they must launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusedattn import testing
from fusedattn.testing import Case
from tests.conftest import triton_attention
from tests.helpers.guarded import Guarded, embed


def smaller(case: Case) -> Case:
    """The case with half the heads and at most a few tiles, the last of them partial."""
    heads = {"nheads_q": case.nheads_q // 2, "nheads_kv": max(1, case.nheads_kv // 2)}
    return replace(case, seqlen_q=min(case.seqlen_q, 41), seqlen_k=min(case.seqlen_k, 43), **heads)


@dataclass(frozen=True)
class Embedded:
    """The inputs of a case, each surrounded by values that must not matter."""

    inputs: testing.Inputs
    guards: list[Guarded]

    def assert_unchanged(self, before: list[Tensor]) -> None:
        for guarded, bits in zip(self.guards, before, strict=True):
            assert torch.equal(guarded.bits, bits), f"an input of shape {tuple(guarded.tensor.shape)} was written"


ORDERS = {"q": (0, 1, 2), "k": (0, 2, 1), "v": (2, 0, 1), "dout": (1, 0, 2)}


def each_tensor(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``x``, a mask, a bias, tables or arguments of functions, with every tensor in it changed."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, tuple):
        return tuple(each_tensor(y, change) for y in x)
    if not dataclasses.is_dataclass(x):
        return x
    return replace(x, **{f.name: each_tensor(getattr(x, f.name), change) for f in dataclasses.fields(x) if f.init})


def embedded(inputs: testing.Inputs, *, poisoned: bool = True) -> Embedded:
    guards: list[Guarded] = []

    def put(x: Tensor, order: tuple[int, ...] | None = None) -> Tensor:
        guards.append(embed(x, order, poisoned=poisoned))
        return guards[-1].tensor

    large = {name: put(getattr(inputs, name), order) for name, order in ORDERS.items()}
    others = {f.name: each_tensor(getattr(inputs, f.name), put) for f in dataclasses.fields(inputs)}
    found = Embedded(replace(inputs, **(others | large)), guards)
    constants = [x for x in (inputs.mask, inputs.bias, inputs.score_mod) if x is not None for _ in x.tensors()]
    assert len(guards) >= len(ORDERS) + len(constants)
    return found


def run(inputs: testing.Inputs, function: Callable[..., Any] = triton_attention) -> testing.Results:
    """As testing.run, but the incoming gradients are passed unchanged."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.leaves.items()}
    x = inputs.with_leaves(leaves)
    out, lse = function(x.q, x.k, x.v, **x.options, return_lse=True)
    gradients = torch.autograd.grad((out, lse), tuple(leaves.values()), (inputs.dout, inputs.dlse))
    found = {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **found}


def kernels_of(inputs: testing.Inputs) -> set[str]:
    """The kernels that must have been launched."""
    found = {"attention_fwd", "attention_bwd_dkdv", "attention_bwd_dq"}
    found |= {"attention_bwd_rows"} if inputs.q.dtype.itemsize == 2 else {"attention_bwd_exact_rows"}
    found |= {"qk_prologue"} if inputs.rope is not None or inputs.qk_norm is not None else set()
    if inputs.qk_norm is not None:
        found |= {"qk_prologue_bwd", *(["qk_norm_rows"] if inputs.qk_norm.across_heads else [])}
    found |= {"_key_range"} if inputs.mask.valid is not None else set()
    found |= {"attention_combine"} if splits_keys(inputs) else set()
    found |= {"attention_bwd_dbias"} if "bias" in inputs.leaves else set()
    found |= {"attention_bwd_learned"} if {"slopes", "learned"} & set(inputs.leaves) else set()
    return found | ({"attention_bwd_drelative"} if "relative" in inputs.leaves else set())


def splits_keys(inputs: testing.Inputs) -> bool:
    """Whether keys are split; no case here has both a window and few queries."""
    from fusedattn.kernels import configs

    few = configs.INTERPRETER_FEW_QUERIES
    _, nheads, seqlen_q, _ = inputs.q.shape
    group = 1 if inputs.mask.function or inputs.score_mod else 1 << (nheads // inputs.k.shape[1] - 1).bit_length()
    fits = min(group, few.config.BLOCK_M) * seqlen_q <= few.config.BLOCK_M
    return fits and inputs.k.shape[2] > few.split and inputs.mask.layout is None
