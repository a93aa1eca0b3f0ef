"""Calls of linear attention as plain data, and their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedattn.feature_maps import AnyFeatureMap, Favor

MAPS = ("elu+1", "relu", "softmax", "identity", "jit", "favor", "torch")


@dataclass(frozen=True)
class LinearCase:
    """A call of linear attention; the same numbers on every device.

    Attributes:
        name: for people.
        seqlen_k: None: seqlen_q.
        head_dim_v: None: head_dim.
        feature_map: one of MAPS: a name, or the kind of function.
        valid: which tokens are hidden: some, the last ones, the first ones, or all of one batch.
        initial_state: whether there is one.
        return_state: whether gradients also come back through the state.
        lengths: of packed sequences; seqlen_q may be more.
        size: the magnitude of q and k.
        poisoned: keys and values of hidden tokens are NaN, and so are all tokens of no sequence, unless a function of
            torch computes features of these too.
        transposed: the heads of a token lie together.
    """

    name: str = ""
    seqlen_q: int = 65
    seqlen_k: int | None = None
    head_dim: int = 16
    head_dim_v: int | None = None
    batch: int = 1
    nheads_q: int = 2
    nheads_kv: int = 2
    feature_map: str = "elu+1"
    causal: bool = True
    normalize: bool = True
    valid: str | None = None
    initial_state: bool = False
    return_state: bool = True
    lengths: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    size: float = 1.0
    poisoned: bool = False
    transposed: bool = False
    seed: int = 0

    @property
    def n_features(self) -> int:
        """The features of a token."""
        return self.head_dim + 3 if self.feature_map in ("favor", "torch") else self.head_dim

    @property
    def needs_triton(self) -> bool:
        """Whether building the inputs needs Triton."""
        return self.feature_map == "jit"


LINEAR_CASES = (
    LinearCase("linear, 64 features", head_dim=64, seqlen_q=130),
    LinearCase("linear, every key, other lengths", causal=False, seqlen_q=37, seqlen_k=130),
    LinearCase("linear, padding, GQA 4:2", valid="some", nheads_q=4, batch=2, seqlen_q=100),
    LinearCase("linear, from a state, 40 features", initial_state=True, head_dim=40, head_dim_v=24),
    LinearCase("linear, packed", lengths=(3, 0, 64, 30), seqlen_q=101, initial_state=True),
    LinearCase("linear, softmax features, not normalized", feature_map="softmax", normalize=False),
    LinearCase("linear, relu features", feature_map="relu"),
    LinearCase("linear, user's features", feature_map="jit"),
    LinearCase("linear, FAVOR+", feature_map="favor", size=0.5),
    LinearCase("linear, 256 features", head_dim=256, nheads_q=1, nheads_kv=1, seqlen_q=70),
)


class LinearInputs(NamedTuple):
    """The tensors of a case: leaves by name, the gradients that come back, and the other arguments."""

    leaves: dict[str, Tensor]
    back: tuple[Tensor, ...]
    options: dict[str, Any]


def feature_map_of(case: LinearCase) -> AnyFeatureMap:
    """The argument `feature_map`."""
    if case.feature_map == "jit":
        from fusedattn.testing import triton_functions

        return triton_functions.feature_map()
    if case.feature_map == "favor":
        generator = torch.Generator().manual_seed(case.seed)
        return Favor.draw(case.head_dim, case.n_features, generator=generator)
    if case.feature_map == "torch":
        return _features_in_torch
    return case.feature_map


def _features_in_torch(x: Tensor) -> Tensor:
    first = x[..., :1]
    return torch.cat([x.square() + 0.25, first.abs() + 0.5, first.exp(), first.cosh()], dim=-1)


def make_linear_inputs(case: LinearCase, device: torch.device | str = "cpu") -> LinearInputs:
    """Random tensors that the dtype of the case holds exactly."""
    generator = torch.Generator().manual_seed(case.seed)
    seqlen_k = case.seqlen_q if case.seqlen_k is None else case.seqlen_k
    head_dim_v = case.head_dim if case.head_dim_v is None else case.head_dim_v
    wide = torch.promote_types(case.dtype, torch.float32)

    def random(*shape: int, size: float = 1.0, of: torch.dtype = case.dtype) -> Tensor:
        return (size * torch.randn(shape, generator=generator, dtype=torch.float64)).to(of).to(device)

    leaves = {
        "q": random(case.batch, case.nheads_q, case.seqlen_q, case.head_dim, size=case.size),
        "k": random(case.batch, case.nheads_kv, seqlen_k, case.head_dim, size=case.size),
        "v": random(case.batch, case.nheads_kv, seqlen_k, head_dim_v),
    }
    of_state = (case.batch if case.lengths is None else len(case.lengths), case.nheads_kv, case.n_features)
    if case.initial_state:
        # As positive as the features, or the sum of weights would cancel.
        leaves["kv"] = random(*of_state, head_dim_v, of=wide)
        leaves["k_sum"] = 2.0 * random(*of_state, of=wide).abs()
    # The gradient of a sum grows with the length, that of an average does not.
    share = 1.0 if not case.normalize else 1.0 / max(1, seqlen_k)
    back = (
        random(case.batch, case.nheads_q, case.seqlen_q, head_dim_v),
        random(*of_state, head_dim_v, size=share, of=wide),
        random(*of_state, size=share, of=wide),
    )
    valid = _valid(case, seqlen_k, generator)
    cu_seqlens = None if case.lengths is None else torch.tensor([0, *case.lengths]).cumsum(0).int().to(device)
    if case.poisoned:
        _poison(leaves, case, valid)
    if case.transposed:
        for name in "qkv":
            leaves[name] = leaves[name].transpose(1, 2).contiguous().transpose(1, 2)
    feature_map = feature_map_of(case)
    if isinstance(feature_map, Favor):
        feature_map = Favor(feature_map.projection.to(device))
    options = {
        "feature_map": feature_map,
        "causal": case.causal,
        "normalize": case.normalize,
        "valid": None if valid is None else valid.to(device),
        "cu_seqlens": cu_seqlens,
    }
    return LinearInputs(leaves, back, options)


def _poison(leaves: dict[str, Tensor], case: LinearCase, valid: Tensor | None) -> None:
    seqlen_k = leaves["k"].shape[2]
    hidden = torch.zeros(case.batch, seqlen_k, dtype=torch.bool) if valid is None else ~valid
    computed = case.lengths is None or case.feature_map in ("favor", "torch")
    behind = torch.arange(seqlen_k) >= (seqlen_k if computed else sum(case.lengths or ()))
    for name in "qkv":
        if name != "q" or not computed:
            rows = (behind if name == "q" else hidden | behind).expand(case.batch, -1)[:, None, :, None]
            leaves[name] = leaves[name].masked_fill(rows.to(leaves[name].device), torch.nan)


def _valid(case: LinearCase, seqlen: int, generator: torch.Generator) -> Tensor | None:
    drawn = torch.rand(case.batch, seqlen, generator=generator)
    tokens = torch.arange(seqlen)
    some = {
        None: None,
        "some": drawn > 0.3,
        "last": (tokens < seqlen - seqlen // 3).expand(case.batch, seqlen),
        "first": (tokens >= seqlen // 3).expand(case.batch, seqlen),
        "none": (drawn > 0.3) & (torch.arange(case.batch) > 0)[:, None],
    }
    return some[case.valid]
