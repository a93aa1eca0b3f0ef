"""Calls of linear attention as plain data, their truth, and eager PyTorch beside which they are judged.

The truth is the recurrence :mod:`fusedattn.linear.reference` in float64; eager is the quadratic formula, each operation
in the dtype of the inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedattn import LinearState, feature_maps, linear_attention, testing
from fusedattn.feature_maps import AnyFeatureMap, Favor
from fusedattn.linear import packed, reference
from fusedattn.linear.options import LinearOptions
from fusedattn.testing.budget import compare
from tests.conftest import TERMS_LIMIT
from tests.helpers.hostile import call_of

Results = dict[str, Tensor]
Function = Callable[..., tuple[Tensor, LinearState]]
LEAVES = ("q", "k", "v", "kv", "k_sum")
MAPS = ("elu+1", "relu", "softmax", "identity", "jit", "favor", "torch")


@dataclass(frozen=True, repr=False)
class LinearProblem:
    """A call of linear attention; the same numbers on every device.

    Attributes:
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

    def __repr__(self) -> str:
        return call_of(self)

    @property
    def command(self) -> str:
        """The shell command that checks this problem again."""
        return f'python -m tests.tools.reproduce "{self!r}"'

    @property
    def n_features(self) -> int:
        return self.head_dim + 3 if self.feature_map in ("favor", "torch") else self.head_dim


class Inputs(NamedTuple):
    """The tensors of a problem: leaves by name, the gradients that come back, and the other arguments."""

    leaves: dict[str, Tensor]
    back: tuple[Tensor, ...]
    options: dict[str, Any]


def map_of(problem: LinearProblem) -> AnyFeatureMap:
    """The argument `feature_map`."""
    if problem.feature_map == "jit":
        from fusedattn.testing import triton_functions

        return triton_functions.feature_map()
    if problem.feature_map == "favor":
        generator = torch.Generator().manual_seed(problem.seed)
        return Favor.draw(problem.head_dim, problem.n_features, generator=generator)
    if problem.feature_map == "torch":
        return lambda x: torch.cat([x.square() + 0.25, x[..., :1].abs() + 0.5, x[..., :1].exp(), x[..., :1].cosh()], -1)
    return problem.feature_map


def inputs_of(problem: LinearProblem, device: str) -> Inputs:
    """Random tensors that the dtype of the problem holds exactly."""
    generator = torch.Generator().manual_seed(problem.seed)
    p = problem
    seqlen_k = p.seqlen_q if p.seqlen_k is None else p.seqlen_k
    head_dim_v = p.head_dim if p.head_dim_v is None else p.head_dim_v
    n = p.batch if p.lengths is None else len(p.lengths)

    def random(*shape: int, size: float = 1.0, of: torch.dtype = p.dtype) -> Tensor:
        return (size * torch.randn(shape, generator=generator, dtype=torch.float64)).to(of).to(device)

    wide = torch.promote_types(p.dtype, torch.float32)
    leaves = {
        "q": random(p.batch, p.nheads_q, p.seqlen_q, p.head_dim, size=p.size),
        "k": random(p.batch, p.nheads_kv, seqlen_k, p.head_dim, size=p.size),
        "v": random(p.batch, p.nheads_kv, seqlen_k, head_dim_v),
    }
    of_state = (n, p.nheads_kv, p.n_features)
    if p.initial_state:
        # As positive as the features, or the sum of weights would cancel.
        leaves["kv"] = random(*of_state, head_dim_v, of=wide)
        leaves["k_sum"] = 2.0 * random(*of_state, of=wide).abs()
    # The gradient of a sum grows with the length, that of an average does not.
    share = 1.0 if not p.normalize else 1.0 / max(1, seqlen_k)
    back = (
        random(p.batch, p.nheads_q, p.seqlen_q, head_dim_v),
        random(*of_state, head_dim_v, size=share, of=wide),
        random(*of_state, size=share, of=wide),
    )
    valid = _valid(p, seqlen_k, generator)
    cu_seqlens = None if p.lengths is None else torch.tensor([0, *p.lengths]).cumsum(0).int().to(device)
    if p.poisoned:
        hidden = torch.zeros(p.batch, seqlen_k, dtype=torch.bool) if valid is None else ~valid
        computed = p.lengths is None or p.feature_map in ("favor", "torch")
        behind = torch.arange(seqlen_k) >= (seqlen_k if computed else sum(p.lengths or ()))
        for name in "qkv":
            rows = (behind if name == "q" else hidden | behind).to(device)
            if name != "q" or not computed:
                leaves[name] = leaves[name].masked_fill(rows.expand(p.batch, -1)[:, None, :, None], torch.nan)
    if p.transposed:
        for name in "qkv":
            leaves[name] = leaves[name].transpose(1, 2).contiguous().transpose(1, 2)
    feature_map = map_of(p)
    if isinstance(feature_map, Favor):
        feature_map = Favor(feature_map.projection.to(device))
    return Inputs(
        leaves,
        back,
        {
            "feature_map": feature_map,
            "causal": p.causal,
            "normalize": p.normalize,
            "valid": None if valid is None else valid.to(device),
            "cu_seqlens": cu_seqlens,
        },
    )


def _valid(problem: LinearProblem, seqlen: int, generator: torch.Generator) -> Tensor | None:
    drawn = torch.rand(problem.batch, seqlen, generator=generator)
    tokens = torch.arange(seqlen)
    some = {
        None: None,
        "some": drawn > 0.3,
        "last": (tokens < seqlen - seqlen // 3).expand(problem.batch, seqlen),
        "first": (tokens >= seqlen // 3).expand(problem.batch, seqlen),
        "none": (drawn > 0.3) & (torch.arange(problem.batch) > 0)[:, None],
    }
    return some[problem.valid]


def run(function: Function, problem: LinearProblem, inputs: Inputs, dtype: torch.dtype | None = None) -> Results:
    """Out, the state and the gradients of all leaves, of ``function(q, k, v, initial_state=..., ...)``.

    With `dtype`, the same numbers in another one.
    """
    if dtype is not None:
        leaves, back = ({name: x.to(dtype) for name, x in inputs.leaves.items()}, [x.to(dtype) for x in inputs.back])
    else:
        leaves, back = inputs.leaves, list(inputs.back)
    x = {name: y.detach().requires_grad_() for name, y in leaves.items()}
    state = LinearState(x["kv"], x["k_sum"]) if "kv" in x else None
    out, (kv, k_sum) = function(x["q"], x["k"], x["v"], initial_state=state, **inputs.options)
    returned, back = ([out, kv, k_sum], back) if problem.return_state else ([out], back[:1])
    moved = [i for i, y in enumerate(returned) if y.requires_grad]  # without tokens, a new state is a constant
    found = torch.autograd.grad(
        [returned[i] for i in moved], list(x.values()), [back[i] for i in moved], allow_unused=True,
        materialize_grads=True,
    )  # fmt: skip
    gradients = {f"d{name}": gradient for name, gradient in zip(x, found, strict=True)}
    return {"out": out.detach(), "kv": kv.detach(), "k_sum": k_sum.detach()} | gradients


def on_backend(backend: str) -> Function:
    """The public function."""
    return lambda q, k, v, **options: linear_attention(q, k, v, **options, return_state=True, backend=backend)


def _by(attend: packed.Attend) -> Function:
    def function(q: Tensor, k: Tensor, v: Tensor, *, feature_map: AnyFeatureMap, **options: Any) -> Any:
        if options["valid"] is not None:  # before functions of torch, whose derivative of a NaN is NaN
            k = k.masked_fill(~options["valid"][:, None, :, None], 0.0)
        q, k, left = feature_maps.split(feature_map, q, k)
        return attend(q, k, v, LinearOptions(left, **options))

    return function


def eager(q: Tensor, k: Tensor, v: Tensor, options: LinearOptions) -> tuple[Tensor, LinearState]:
    """The quadratic formula in the dtype of the inputs."""
    if options.cu_seqlens is not None:
        return packed.by_sequence(q, k, v, options, eager)
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
    numerator, den = weights @ v.repeat_interleave(group, 1), weights.sum(-1, keepdim=True)
    kv, k_sum = phi_k.mT @ v, phi_k.sum(2)
    if options.initial_state is not None:
        of_kv, of_k_sum = (x.to(q.dtype) for x in options.initial_state)
        numerator = numerator + phi_q @ of_kv.repeat_interleave(group, 1)
        den = den + phi_q @ of_k_sum.repeat_interleave(group, 1)[..., None]
        kv, k_sum = kv + of_kv, k_sum + of_k_sum
    out = numerator
    if options.normalize:
        out = (numerator / torch.where(den == 0, 1.0, den)).masked_fill(den == 0, 0.0)
    wide = torch.promote_types(q.dtype, torch.float32)
    return out, LinearState(kv.to(wide), k_sum.to(wide))


TRUTH, EAGER = _by(reference.attention), _by(eager)


def truth(problem: LinearProblem, inputs: Inputs) -> Results:
    return run(TRUTH, problem, inputs, torch.float64)


def ratios(
    actual: Results, problem: LinearProblem, inputs: Inputs, expected: Results | None = None
) -> dict[str, testing.Ratios]:
    """The share of the error budget that each result uses."""
    expected = truth(problem, inputs) if expected is None else expected
    beside = run(EAGER, problem, inputs)
    return {name: compare(x, expected[name], beside[name]) for name, x in actual.items()}


def beyond_terms(
    actual: Results, problem: LinearProblem, inputs: Inputs, names: Sequence[str], units: float | None = None
) -> list[str]:
    """Those of `names` with an element that is further from the truth than the units of its terms allow."""
    expected, terms = truth(problem, inputs), sums_of_terms(problem, inputs)
    unit = (units or TERMS_LIMIT[problem.dtype]) * torch.finfo(problem.dtype).eps
    return [
        name
        for name in names
        if not ((actual[name].double() - expected[name]).abs() <= unit * terms[name] + 1e-30).all()
    ]


def assert_budget(problem: LinearProblem, backend: str, device: str, *, few: bool = False) -> None:
    """Fail if a result exceeds the error budget.

    With `few`, for problems in which few numbers decide: eager PyTorch may be exact by accident, and a result may
    instead be as near as units in the last place of the sums of its absolute terms.
    """
    inputs = inputs_of(problem, device)
    actual = run(on_backend(backend), problem, inputs)
    found = ratios(actual, problem, inputs)
    bad = {name: x for name, x in found.items() if not x.used <= 1.0}
    if few and bad:
        bad = {name: bad[name] for name in beyond_terms(actual, problem, inputs, list(bad))}
    assert not bad, f"{problem.command} on {backend}: " + "; ".join(
        f"{name} {r.max:.2f}x max, {r.mean:.2f}x mean, {r.row:.2f}x row, {r.used:.3f} of the budget"
        for name, r in bad.items()
    )


def sums_of_terms(problem: LinearProblem, inputs: Inputs) -> dict[str, Tensor]:
    """For each result a bound on the sum of the absolute values of its terms; in float64.

    That of a gradient through features is their derivative by finite terms: the features of -|x| and |x| bound it.
    """
    x = {name: y.double() for name, y in inputs.leaves.items()}
    dout, dkv, dk_sum = (y.double().abs() for y in inputs.back)
    if not problem.return_state:
        dkv, dk_sum = torch.zeros_like(dkv), torch.zeros_like(dk_sum)
    group = problem.nheads_q // problem.nheads_kv
    options = dict(inputs.options)
    sequences = _sequences(problem, options.pop("cu_seqlens"))
    found = {name: torch.zeros_like(x[name]) for name in x}
    out, kv, k_sum = torch.zeros_like(dout), torch.zeros_like(dkv), torch.zeros_like(dk_sum)
    for i, (batch, rows) in enumerate(sequences):
        one = slice(batch, batch + 1)
        q, k, v = (x[name][one, :, rows] for name in "qkv")
        valid = options["valid"]
        shown = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device) if valid is None else valid[one, rows]
        k, v = k.masked_fill(~shown[:, None, :, None], 0.0), v.masked_fill(~shown[:, None, :, None], 0.0)
        (phi_q, slope_q), (phi_k, slope_k) = (
            _features(y, options["feature_map"], is_k) for y, is_k in ((q, 0), (k, 1))
        )
        phi_k = phi_k * shown[:, None, :, None]
        phi_k_all, v_all = phi_k.repeat_interleave(group, 1), v.abs().repeat_interleave(group, 1)
        state = torch.zeros_like(kv[i : i + 1]), torch.zeros_like(k_sum[i : i + 1])
        if "kv" in x:
            state = x["kv"][i : i + 1].abs(), x["k_sum"][i : i + 1].abs()
        of_kv, of_sum = (y.repeat_interleave(group, 1) for y in state)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.float64, device=q.device)
        seen = seen.tril() if problem.causal else seen
        weights = (phi_q @ phi_k_all.mT) * seen
        own = dout[one, :, rows]
        numerator = weights @ v_all + phi_q @ of_kv
        den = torch.ones_like(numerator[..., :1])
        delta = torch.zeros_like(den)
        if problem.normalize:
            den = weights.sum(-1, keepdim=True) + phi_q @ of_sum[..., None]
            den = torch.where(den == 0, torch.inf, den)
            delta = (own * numerator / den).sum(-1, keepdim=True)
        out[one, :, rows] = numerator / den
        kv[i], k_sum[i] = (state[0] + phi_k.mT @ v.abs())[0], (state[1] + phi_k.sum(2))[0]
        own, share = own / den, delta / den
        dweights = (own @ v_all.mT + share) * seen

        def grouped(y: Tensor) -> Tensor:
            return y.unflatten(1, (-1, group)).sum(2)

        dphi_q = dweights @ phi_k_all + own @ of_kv.mT + share * of_sum[:, :, None]
        dphi_k = grouped(dweights.mT @ phi_q) + v.abs() @ dkv[i : i + 1].mT + dk_sum[i : i + 1, :, None]
        found["q"][one, :, rows] = slope_q(dphi_q)
        found["k"][one, :, rows] = slope_k(dphi_k) * shown[:, None, :, None]
        found["v"][one, :, rows] = (grouped(weights.mT @ own) + phi_k @ dkv[i : i + 1]) * shown[:, None, :, None]
        if "kv" in x:
            found["kv"][i] = (dkv[i : i + 1] + grouped(phi_q.mT @ own))[0]
            found["k_sum"][i] = (dk_sum[i : i + 1] + grouped((phi_q * share).sum(2)))[0]
    return {"out": out, "kv": kv, "k_sum": k_sum} | {f"d{name}": y for name, y in found.items()}


def _sequences(problem: LinearProblem, cu_seqlens: Tensor | None) -> list[tuple[int, slice]]:
    if cu_seqlens is None:
        return [(b, slice(None)) for b in range(problem.batch)]
    stops = cu_seqlens.tolist()
    return [(0, slice(start, stop)) for start, stop in itertools.pairwise(stops)]


def _features(x: Tensor, feature_map: Any, of_keys: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The absolute features, and what bounds a gradient of x from one of its features."""
    x = x.detach()
    found = feature_maps.split(feature_map, x, x)
    phi = feature_maps.eager(found[2])(found[of_keys])
    jacobian = torch.func.vmap(torch.func.jacrev(lambda y: _one(y, feature_map, of_keys)))(x.flatten(0, 2))
    jacobian = jacobian.abs().unflatten(0, x.shape[:3])  # (batch, nheads, seqlen, n_features, head_dim)
    return phi.abs(), lambda gradient: (gradient[..., None, :] @ jacobian).squeeze(-2)


def _one(x: Tensor, feature_map: Any, of_keys: int) -> Tensor:
    q, k, left = feature_maps.split(feature_map, x[None], x[None])
    return feature_maps.eager(left)((q, k)[of_keys])[0]


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Fail unless all numbers are the same bits, NaN among them."""
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(actual[name].nan_to_num(7.0), x.nan_to_num(7.0)), name
        assert torch.equal(actual[name].isnan(), x.isnan()), name
