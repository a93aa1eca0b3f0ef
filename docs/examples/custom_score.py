"""A score function and a mask function of your own, compiled into the kernels, with a tensor that is learned.

    TRITON_INTERPRET=1 python docs/examples/custom_score.py   # on a GPU, without TRITON_INTERPRET

The scores are bounded, and each head adds a learned number for the distance of query and key. Results and gradients
are compared with the formula in eager PyTorch, in float64.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedattn import ArgGradient, ScoreMod, attention, masks, not_supported_reasons

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAR = 4  # keys that every query sees; beyond them, every second one
BOUND = 5.0  # of the scores


# The kernels call these for tiles of scores. args: the table (nheads, n_distances), n_distances, the bound.


@triton.jit
def bounded_with_distance(score, batch, head, q_index, k_index, args):
    distance = tl.minimum(q_index - k_index, args[1] - 1)
    return score / (1.0 + tl.abs(score) / args[2]) + tl.load(args[0] + head * args[1] + tl.maximum(distance, 0))


@triton.jit
def score_derivative(score, batch, head, q_index, k_index, args):
    slope = 1.0 / (1.0 + tl.abs(score) / args[2])
    return slope * slope


@triton.jit
def table_index(batch, head, q_index, k_index, args):
    """Which entry of the flattened table a pair reads."""
    return head * args[1] + tl.maximum(tl.minimum(q_index - k_index, args[1] - 1), 0)


@triton.jit
def table_derivative(score, batch, head, q_index, k_index, args):
    """Of the result with respect to that entry."""
    return 0.0 * score + 1.0


@triton.jit
def near_or_even(batch, head, q_index, k_index, args):
    distance = q_index - k_index
    return (distance < args[0]) | (distance % 2 == 0)


# The same in PyTorch, for CPUs and second derivatives.


def eager_score(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor, args: Any) -> Tensor:
    table, n_distances, bound = args
    return score / (1.0 + score.abs() / bound) + table[head, (q_index - k_index).clamp(0, n_distances - 1)]


def eager_mask(batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor, args: Any) -> Tensor:
    return (q_index - k_index < args[0]) | ((q_index - k_index) % 2 == 0)


def score_function(table: Tensor) -> ScoreMod:
    learned = ArgGradient(0, table_index, table_derivative)
    return ScoreMod(bounded_with_distance, score_derivative, eager_score, (table, table.shape[1], BOUND), (learned,))


def formula(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """The attention that is meant, with all scores written out: ``(batch, nheads, seqlen, seqlen)``."""
    index = torch.arange(q.shape[2], device=q.device)
    distance = index[:, None] - index
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores / (1.0 + scores.abs() / BOUND) + table[:, distance.clamp(0, table.shape[1] - 1)]
    visible = (distance >= 0) & ((distance < NEAR) | (distance % 2 == 0))
    return scores.masked_fill(~visible, -torch.inf).softmax(dim=-1) @ v


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=100)
    parser.add_argument("--steps", type=int, default=60, help="of learning the table")
    args = parser.parse_args()
    torch.manual_seed(0)
    mask = masks.causal() & masks.function(near_or_even, eager_mask, (NEAR,))
    sizes = {"dtype": torch.float64, "device": DEVICE}
    q, k, v = (torch.randn(2, 4, args.seqlen, 32, **sizes, requires_grad=True) for _ in range(3))
    table = torch.randn(4, 16, **sizes, requires_grad=True)
    inputs, dout = (q, k, v, table), torch.randn(2, 4, args.seqlen, 32, **sizes)

    expected = formula(*inputs)
    gradients = torch.autograd.grad(expected, inputs, dout)
    for backend in ("torch", "triton"):
        options = {"mask": mask, "score_mod": score_function(table), "backend": backend}
        if reasons := not_supported_reasons(q, k, v, **options):
            print(f"{backend}: not run, because {'; '.join(reasons)}")
            continue
        out = attention(q, k, v, **options)
        found = out, *torch.autograd.grad(out, inputs, dout)
        torch.testing.assert_close(found, (expected, *gradients))
        error = max((x - y).abs().max().item() for x, y in zip(found, (expected, *gradients), strict=True))
        print(f"{backend}: output and gradients of q, k, v and the table agree with the formula to {error:.1e}")

    # From outputs alone, learn the table that made them.
    q, k, v, target = (x.detach().float() for x in (q, k, v, expected))
    learned = torch.zeros(4, 16, device=DEVICE, requires_grad=True)
    optimizer = torch.optim.Adam([learned], lr=0.1)
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        # On a CPU the torch backend, because the interpreter is slow.
        backend = "triton" if DEVICE == "cuda" else "torch"
        out = attention(q, k, v, mask=mask, score_mod=score_function(learned), backend=backend)
        loss = (out - target).square().mean()
        loss.backward()
        optimizer.step()
        if step in (1, args.steps):
            print(f"learning the table, step {step}: mean squared error {loss.item():.1e}")


if __name__ == "__main__":
    main()
