"""Random features of the softmax kernel: without bias, orthogonal, and nearer to softmax with more features."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn import linear_attention
from fusedattn.feature_maps import Favor
from tests.conftest import BACKENDS, DEVICE

HEAD_DIM = 16


def products(q: Tensor, k: Tensor, n_features: int, n_draws: int, *, orthogonal: bool, seed: int = 0) -> Tensor:
    """``phi(q) . phi(k)`` of many draws, float64, without the division by the largest feature of q."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(n_draws):
        favor = Favor.draw(HEAD_DIM, n_features, generator=generator, orthogonal=orthogonal)
        # Features of keys are not divided by anything; those of queries are like them but for that.
        found.append((favor.of_keys(q) * favor.of_keys(k)).sum(-1))
    return torch.stack(found)


def pair(size: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k = (size * torch.randn(HEAD_DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    return q, k


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("size", [0.3, 0.5])
def test_without_bias(size, orthogonal):
    """The mean of 2,000 draws is within four standard errors of ``exp(q . k / sqrt(head_dim))``."""
    q, k = pair(size)
    found = products(q, k, 8, 2000, orthogonal=orthogonal)
    error = found.std() / math.sqrt(len(found))
    expected = (q @ k / math.sqrt(HEAD_DIM)).exp()
    assert (found.mean() - expected).abs() < 4 * error
    assert error < 0.1 * expected


def test_orthogonal_rows():
    """In each block of head_dim rows, and of the lengths that normal rows have."""
    favor = Favor.draw(HEAD_DIM, 40, generator=torch.Generator().manual_seed(0))
    assert favor.projection.shape == (40, HEAD_DIM)
    for block in favor.projection.split(HEAD_DIM):
        directions = F.normalize(block.double(), dim=1)
        torch.testing.assert_close(
            directions @ directions.T, torch.eye(len(block), dtype=torch.float64), rtol=0, atol=1e-6
        )
    many = Favor.draw(HEAD_DIM, 3200, generator=torch.Generator().manual_seed(0)).projection
    squares = many.double().square().sum(1)  # chi-squared: mean head_dim, variance 2 head_dim
    assert abs(squares.mean() - HEAD_DIM) < 4 * math.sqrt(2 * HEAD_DIM / 3200)
    assert 0.8 < squares.var() / (2 * HEAD_DIM) < 1.2


def test_rows_have_no_direction():
    """Each number of the matrix has mean 0 and variance 1, also of orthogonal ones; QR prefers some signs."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([Favor.draw(4, 4, generator=generator).projection for _ in range(4000)]).double()
    assert drawn.mean(0).abs().max() < 5 / math.sqrt(4000)
    assert (drawn.var(0) - 1).abs().max() < 5 * math.sqrt(2 / 4000)


def test_less_variance_than_independent_rows():
    q, k = pair(0.4)
    variances = [products(q, k, HEAD_DIM, 4000, orthogonal=x).var() for x in (True, False)]
    assert variances[0] < 0.95 * variances[1]


def test_the_same_draw_by_the_same_generator():
    draws = [Favor.draw(8, 20, generator=torch.Generator().manual_seed(3)).projection for _ in range(2)]
    assert torch.equal(*draws)
    assert draws[0].dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
def test_nearer_to_softmax_attention_with_more_features(causal, backend):
    """Four times the features halve the error, within the noise of 8 draws."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (0.5 * torch.randn(1, 2, 40, HEAD_DIM, generator=generator).to(DEVICE) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def error(n_features: int) -> float:
        total = 0.0
        for _ in range(8):
            favor = Favor(Favor.draw(HEAD_DIM, n_features, generator=generator).projection.to(DEVICE))
            out = linear_attention(q, k, v, feature_map=favor, causal=causal, backend=backend)
            total += float((out - expected).square().mean())
        return math.sqrt(total / 8)

    few, more, many = error(16), error(64), error(256)
    assert few > 1.4 * more > 1.4 * 1.4 * many
    assert many < 0.3 * float(expected.square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_features_of_queries_do_not_overflow(dtype):
    """The largest is 1 whatever the query; the quotients between them are those of the features of keys."""
    favor = Favor.draw(HEAD_DIM, 32, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, HEAD_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for size in (1e-3, 1.0, 30.0):
        features = favor.of_queries((size * x).to(dtype))
        assert features.dtype == dtype
        assert features.amax(dim=-1).eq(1.0).all()
    exact, of_keys = favor.of_queries(x), favor.of_keys(x)
    torch.testing.assert_close(exact, of_keys / of_keys.amax(dim=-1, keepdim=True))


def test_gradients_of_queries_go_through_normalised_attention():
    """The division by the largest feature is a constant for autograd, and cancels: gradients are those without it."""
    favor = Favor.draw(HEAD_DIM, 32, generator=torch.Generator().manual_seed(0))
    q, k, v = (torch.randn(1, 1, 9, HEAD_DIM, dtype=torch.float64, requires_grad=True) for _ in range(3))
    scale = math.sqrt(32)

    def undivided(x: Tensor) -> Tensor:
        return favor.of_keys(x) * scale

    dout = torch.randn(1, 1, 9, HEAD_DIM, dtype=torch.float64)
    found, expected = (
        torch.autograd.grad(linear_attention(q, k, v, feature_map=x, backend="torch"), (q, k, v), dout)
        for x in (favor, undivided)
    )
    torch.testing.assert_close(found, expected)
