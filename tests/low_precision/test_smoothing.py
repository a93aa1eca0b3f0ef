"""Rotation and smoothing: exact matrices and means, and what they do to outliers."""

from __future__ import annotations

import pytest
import torch

from fusedattn.low_precision import E2M1, by_token, hadamard, mean_of_blocks, mean_of_tokens, quantised, rotated
from fusedattn.low_precision.rotation import signs
from tests.conftest import DEVICE

pytestmark = pytest.mark.usefixtures("_seed")


def test_hadamard_of_four() -> None:
    expected = [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    assert (2 * hadamard(torch.eye(4, device=DEVICE))).int().tolist() == expected


@pytest.mark.parametrize("n", [1, 2, 32, 256])
def test_hadamard_is_orthonormal(n: int) -> None:
    eye = torch.eye(n, dtype=torch.float64, device=DEVICE)
    matrix = hadamard(eye)
    torch.testing.assert_close(matrix @ matrix.mT, eye)
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, n**-0.5))


@pytest.mark.parametrize("n", [0, 3, 96])
def test_hadamard_of_other_sizes_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=f"x: got {n} features, allowed are powers of two"):
        hadamard(torch.zeros(2, n))


@pytest.mark.parametrize(("head_dim", "n"), [(1, 32), (64, 64), (80, 128)])
def test_a_rotation_keeps_products(head_dim: int, n: int) -> None:
    q, k = torch.randn(2, 1, 2, 9, head_dim, dtype=torch.float64, device=DEVICE)
    assert rotated(q).shape == (1, 2, 9, n)
    torch.testing.assert_close(rotated(q) @ rotated(k).mT, q @ k.mT)


def test_a_rotation_spreads_one_feature_and_equal_features() -> None:
    """Without signs, equal features would become one."""
    one = torch.nn.functional.one_hot(torch.tensor(5, device=DEVICE), 64).float()
    assert torch.equal(rotated(one).abs(), torch.full((64,), 0.125, device=DEVICE))
    assert rotated(torch.ones(64, device=DEVICE)).abs().max() < 4
    assert sorted(set(signs(64).tolist())) == [-1.0, 1.0]
    assert torch.equal(signs(64), signs(64))


def test_a_rotation_helps_against_outliers() -> None:
    x = torch.randn(1, 1, 100, 128, device=DEVICE)
    x[..., 3] *= 50
    direct = (quantised(x, by_token(E2M1)) - x).norm()
    turned = rotated(x)
    assert (quantised(turned, by_token(E2M1)) - turned).norm() < 0.75 * direct


def test_mean_of_tokens() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 6.0], [100.0, 100.0]], device=DEVICE)[None, None].repeat(1, 2, 1, 1)
    seen = torch.tensor([[[True, True, False], [False, False, False]]], device=DEVICE)
    assert mean_of_tokens(x, seen).tolist() == [[[[2.0, 4.0]], [[0.0, 0.0]]]]
    x[0, 0, 2] = torch.nan
    assert mean_of_tokens(x, seen)[0, 0].tolist() == [[2.0, 4.0]]


def test_mean_of_blocks() -> None:
    """The last block has one token; a token that does not count takes the mean of its block."""
    x = torch.arange(5.0, device=DEVICE)[None, None, :, None].repeat(1, 2, 1, 3)
    x[:, 1] *= 10
    seen = torch.ones(1, 2, 5, dtype=torch.bool, device=DEVICE)
    seen[0, 1, 0] = False
    means = mean_of_blocks(x, seen, 2)
    assert means.shape == x.shape
    assert means[0, 0, :, 0].tolist() == [0.5, 0.5, 2.5, 2.5, 4.0]
    assert means[0, 1, :, 2].tolist() == [10.0, 10.0, 25.0, 25.0, 40.0]
    assert mean_of_blocks(x[:, :, :0], seen[:, :, :0], 2).shape == (1, 2, 0, 3)
    assert mean_of_blocks(x, torch.ones_like(seen), 128)[0, 0, :, 0].tolist() == [2.0] * 5
