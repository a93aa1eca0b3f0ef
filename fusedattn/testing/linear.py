"""Calls of linear attention and their error budget.

The truth is the recurrence :mod:`fusedattn.linear.reference` in float64. Eager PyTorch, whose error is the unit of the
budget, is the quadratic formula, each operation in the dtype of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedattn import feature_maps
from fusedattn.feature_maps import AnyFeatureMap, Favor
from fusedattn.linear import packed, reference
from fusedattn.linear.attention import linear_attention
from fusedattn.linear.options import LinearOptions
from fusedattn.linear.state import LinearState
from fusedattn.support import Backend
from fusedattn.testing.budget import Ratios, Results, compare

LinearFunction = Callable[..., tuple[Tensor, LinearState]]
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
    LinearCase("linear, causal, head_dim 64", head_dim=64, seqlen_q=130),
    LinearCase("linear, every key, other lengths", causal=False, seqlen_q=37, seqlen_k=130),
    LinearCase("linear, padding, GQA 4:2", valid="some", nheads_q=4, batch=2, seqlen_q=100),
    LinearCase("linear, from a state, head_dim 40 and 24", initial_state=True, head_dim=40, head_dim_v=24),
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


def run_linear(
    function: LinearFunction, case: LinearCase, inputs: LinearInputs, dtype: torch.dtype | None = None
) -> Results:
    """Out, the state and the gradients of all leaves, of ``function(q, k, v, initial_state=..., ...)``.

    With `dtype`, the same numbers in another one.
    """
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in inputs.leaves.items()}
    back = [x.to(dtype or x.dtype) for x in inputs.back]
    state = LinearState(leaves["kv"], leaves["k_sum"]) if "kv" in leaves else None
    out, (kv, k_sum) = function(leaves["q"], leaves["k"], leaves["v"], initial_state=state, **inputs.options)
    n_returned = 3 if case.return_state else 1
    found = torch.autograd.grad(
        [out, kv, k_sum][:n_returned],
        list(leaves.values()),
        back[:n_returned],
        allow_unused=True,
        materialize_grads=True,
    )
    gradients = {f"d{name}": gradient for name, gradient in zip(leaves, found, strict=True)}
    return {"out": out.detach(), "kv": kv.detach(), "k_sum": k_sum.detach()} | gradients


def linear_on(backend: Backend) -> LinearFunction:
    """The public function on a backend, with its state."""
    return lambda q, k, v, **options: linear_attention(q, k, v, **options, return_state=True, backend=backend)


def _by(attend: packed.Attend) -> LinearFunction:
    def function(q: Tensor, k: Tensor, v: Tensor, *, feature_map: AnyFeatureMap, **options: Any) -> Any:
        q, k, left = feature_maps.split(feature_map, q, k)
        return attend(q, k, v, LinearOptions(left, **options))

    return function


def _eager(q: Tensor, k: Tensor, v: Tensor, options: LinearOptions) -> tuple[Tensor, LinearState]:
    """The quadratic formula in the dtype of the inputs."""
    if options.cu_seqlens is not None:
        return packed.by_sequence(q, k, v, options, _eager)
    group, phi = q.shape[1] // k.shape[1], feature_maps.eager(options.feature_map)
    hidden = None if options.valid is None else ~options.valid[:, None, :, None]
    if hidden is not None:
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    phi_q, phi_k = phi(q), phi(k)
    if hidden is not None:
        phi_k = phi_k.masked_fill(hidden, 0.0)
    weights = phi_q @ phi_k.repeat_interleave(group, 1).mT
    if options.causal:
        weights = weights.tril()
    out, den = weights @ v.repeat_interleave(group, 1), weights.sum(-1, keepdim=True)
    kv, k_sum = phi_k.mT @ v, phi_k.sum(2)
    if options.initial_state is not None:
        of_kv, of_k_sum = (x.to(q.dtype) for x in options.initial_state)
        out = out + phi_q @ of_kv.repeat_interleave(group, 1)
        den = den + phi_q @ of_k_sum.repeat_interleave(group, 1)[..., None]
        kv, k_sum = kv + of_kv, k_sum + of_k_sum
    if options.normalize:
        out = (out / torch.where(den == 0, 1.0, den)).masked_fill(den == 0, 0.0)
    wide = torch.promote_types(q.dtype, torch.float32)
    return out, LinearState(kv.to(wide), k_sum.to(wide))


DEFINITION, EAGER = _by(reference.attention), _by(_eager)


def linear_golden(case: LinearCase, inputs: LinearInputs) -> Results:
    """The truth, in float64."""
    return run_linear(DEFINITION, case, inputs, torch.float64)


def linear_baseline(case: LinearCase, inputs: LinearInputs) -> Results:
    """The results of eager PyTorch in the dtype of the inputs."""
    return run_linear(EAGER, case, inputs)


def check_linear(
    case: LinearCase,
    backend: Backend,
    device: torch.device | str = "cpu",
    eager: Callable[[LinearCase, LinearInputs], Results] = linear_baseline,
) -> dict[str, Ratios]:
    """Measure out, the state and every gradient of a case against the error budget."""
    inputs = make_linear_inputs(case, device)
    actual = run_linear(linear_on(backend), case, inputs)
    golden, baseline = linear_golden(case, inputs), eager(case, inputs)
    return {name: compare(x, golden[name], baseline[name]) for name, x in actual.items()}
