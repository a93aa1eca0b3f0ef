"""A place in the table of configs, the problems that measure its config, and how to try another one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from bench.measuring.timing import SetUp, Timed
from bench.work.attention import as_models_have_them, differentiable
from fusedattn import attention
from fusedattn.kernels import configs
from fusedattn.kernels.configs import Arch, FewQueries, TileConfig, Work
from fusedattn.testing.cases import Case, Inputs, make_inputs

# Fields of KernelConfigs, and the config of few queries, which has a separate table.
Part = Literal["fwd", "dkdv", "dq", "one_pass", "few"]
Candidate = TileConfig | FewQueries | None  # None: two kernels instead of one pass
Pass = Literal["inference", "training", "backward"]

# The gradients for which only this kernel of the backward runs, besides its preparation.
WANTED: dict[Part, tuple[str, ...]] = {"dkdv": ("k", "v"), "dq": ("q",), "one_pass": ("q", "k", "v")}

WIDTH, TOKENS, SEQLEN = 2048, 16384, 4096  # nheads * head_dim, batch * seqlen
CAUSAL: dict[str, Any] = {"causal": "bottom_right"}
FIELDS: dict[Work, dict[str, dict[str, Any]]] = {
    "streamed": {"causal": CAUSAL, "not causal": {}},
    "pairwise": {"documents": CAUSAL | {"documents": "packed"}, "boolean": {"boolean": "broadcast"}},
    "biased": {"bias": CAUSAL | {"bias": "per_head"}, "ALiBi": CAUSAL | {"alibi": True}},
    "scored": {"soft-cap": CAUSAL | {"softcap": 20.0}, "dropout": CAUSAL | {"dropout_p": 0.1}},
    "combined": {"bias, documents": CAUSAL | {"bias": "per_head", "documents": "packed"}},
}
ROTATED: dict[str, Any] = CAUSAL | {"rope": "half", "padding": "right"}
DECODED = {"32 x 4k": (32, 4096), "8 x 16k": (8, 16384), "1 x 64k": (1, 65536)}  # batch, cached tokens
SMALL_LENGTHS = (384, 333)
SMALL_CACHES = (4096, 4133)
FEW_HEADS = (32, 8)


# One pass is compiled and tested with this config, but is in no table: docs/decisions/0013.
ONE_PASS = TileConfig(64, 64, 4, 2, "descriptors", 32)


@dataclass(frozen=True)
class Slot:
    """The domain of one config: a kernel, the work for each pair, a dtype, and head_dims up to this one."""

    part: Part
    work: Work
    dtype: torch.dtype
    head_dim: int

    @property
    def name(self) -> str:
        """One line, unique."""
        return f"{self.part} {self.work} {str(self.dtype).removeprefix('torch.')} {self.head_dim}"

    def config(self, arch: Arch) -> Candidate:
        if self.part == "few":
            return configs.lookup_few_queries(arch, self.head_dim, self.dtype, self.work)
        return getattr(configs.lookup(arch, self.head_dim, self.dtype, self.work), self.part)

    @contextmanager
    def holding(self, candidate: Candidate) -> Iterator[None]:
        """Inside, every call finds the candidate in this place, and in every other place of its part."""
        if isinstance(candidate, FewQueries):
            with patch.object(configs, "lookup_few_queries", lambda *asked: candidate):
                yield
        else:
            lookup = configs.lookup

            def with_candidate(*asked: Any) -> configs.KernelConfigs:
                changed: dict[str, Any] = {self.part: candidate}
                return replace(lookup(*asked), **changed)

            with patch.object(configs, "lookup", with_candidate):
                yield

    def cases(self) -> dict[str, Case]:
        """The cases to time, by name."""
        if self.part == "few":
            return {name: self._case(batch, 1, cached) for name, (batch, cached) in DECODED.items()}
        batch = TOKENS // SEQLEN
        return {name: self._case(batch, SEQLEN, SEQLEN, **fields) for name, fields in self._fields.items()}

    def small_cases(self) -> dict[str, Case]:
        """The cases that must be correct first, by name: with lengths that tiles divide, and with others.

        For the former Triton compiles the kernels that are timed: strides are multiples of 16. Queries are grouped, and
        there are more tiles than multiprocessors.
        """
        if self.part == "few":
            fields: tuple[tuple[int, dict[str, Any]], ...] = ((1, {}), (3, CAUSAL))
            return {
                f"{n} queries, {cached} keys": self._case(2, n, cached, **x)
                for (n, x), cached in itertools.product(fields, SMALL_CACHES)
            }
        return {
            f"{name}, seqlen {n}": self._case(2, n, n, group=2, **fields)
            for (name, fields), n in itertools.product(self._fields.items(), SMALL_LENGTHS)
        }

    @property
    def _fields(self) -> dict[str, dict[str, Any]]:
        """Fields of cases by name; RoPE only for the forward, which alone rotates in its own programs."""
        rotates = self.part == "fwd" and self.work == "streamed"
        return FIELDS[self.work] | ({"causal, RoPE, padding": ROTATED} if rotates else {})

    def _case(self, batch: int, seqlen_q: int, seqlen_k: int, *, group: int = 1, **fields: Any) -> Case:
        nheads = max(16, WIDTH // self.head_dim)
        heads = FEW_HEADS if self.part == "few" else (group * nheads, nheads)
        fields |= {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": self.head_dim}
        return Case(nheads_q=heads[0], nheads_kv=heads[1], dtype=self.dtype, **fields)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes to time: in 16 bits, a forward that keeps results for the backward is another kernel."""
        if self.part == "few":
            return ("inference",)
        return ("inference", "training") if self.part == "fwd" else ("backward",)

    def set_ups(
        self, case: Case, device: torch.device, candidates: Mapping[str, Candidate]
    ) -> dict[Pass, dict[str, SetUp]]:
        """Setups by pass, then by the name of the candidate, all on the same tensors."""
        inputs = as_models_have_them(make_inputs(case, device, drawn_there=True))
        return {
            which: {name: functools.partial(self._set_up, x, inputs, which) for name, x in candidates.items()}
            for which in self.passes
        }

    def _set_up(self, candidate: Candidate, inputs: Inputs, which: Pass) -> Timed:
        x, wanted = differentiable(inputs, WANTED.get(self.part, ("q", "k", "v") if which == "training" else ()))

        def forward() -> Tensor:
            with self.holding(candidate):
                deterministic = self.part != "one_pass"
                return attention(x.q, x.k, x.v, backend="triton", deterministic=deterministic, **x.options)

        if which != "backward":
            return forward
        out = forward()

        def backward() -> object:
            with self.holding(candidate):
                return torch.autograd.grad(out, wanted, x.dout)

        return backward


def holding_one_pass() -> AbstractContextManager[None]:
    """Inside, a call that does not ask for determinism computes its gradients in one pass, at every head_dim."""
    return Slot("one_pass", "streamed", torch.bfloat16, 64).holding(ONE_PASS)
