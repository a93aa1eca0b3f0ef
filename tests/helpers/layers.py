"""Inputs for the layers of the reference Transformer, and the equivalent modules of torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedattn.transformer import GPTModel, MultiHeadAttention

B, H, L, S, D = 2, 4, 5, 7, 8  # batch, heads, seqlen_q, seqlen_k, head_dim
WIDTH = H * D


def qkv(kv_heads=H, dtype=torch.float32, requires_grad=False) -> tuple[Tensor, Tensor, Tensor]:
    shapes = [(B, H, L, D), (B, kv_heads, S, D), (B, kv_heads, S, D)]
    q, k, v = (torch.randn(s, dtype=dtype, requires_grad=requires_grad) for s in shapes)
    return q, k, v


def padding() -> Tensor:
    return torch.tensor([[True] * S, [True] * (S - 3) + [False] * 3])


def complex_rotation(x: Tensor, positions: Tensor, *, theta: float = 10000.0, interleaved: bool = False) -> Tensor:
    """RoFormer's equation 13 by complex multiplication, over all features of ``x``."""
    half = x.shape[-1] // 2
    if interleaved:
        z = torch.complex(x[..., 0::2].double(), x[..., 1::2].double())
    else:
        z = torch.complex(x[..., :half].double(), x[..., half:].double())
    angles = positions[:, None].double() * theta ** (-torch.arange(half).double() / half)
    z = z * torch.polar(torch.ones_like(angles), angles)
    dim = -1 if interleaved else -2
    return torch.stack((z.real, z.imag), dim=dim).flatten(-2).to(x.dtype)


def torch_mha(ours: MultiHeadAttention) -> nn.MultiheadAttention:
    theirs = nn.MultiheadAttention(ours.d_model, ours.n_heads, batch_first=True)
    with torch.no_grad():
        projections = (ours.q_proj, ours.k_proj, ours.v_proj)
        theirs.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        theirs.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
        theirs.out_proj.weight.copy_(ours.out_proj.weight)
        theirs.out_proj.bias.copy_(ours.out_proj.bias)
    return theirs


def assert_learns(model: nn.Module, targets: Tensor, *inputs: Tensor, steps: int, lr: float) -> None:
    """Fail unless the loss falls from above 2.0 to below 0.2."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(*inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 2.0
    assert losses[-1] < 0.2


def assert_generation_continues(model: GPTModel, ids: Tensor) -> None:
    """Fail unless two sequences of different lengths, of 7 tokens at most, each get the text that they have alone.

    The second call goes on where the first one stopped.
    """
    cache = model.make_cache(2)
    model(ids[:1, :4], cache=cache.sequences(0, 1))
    got = model.generate(torch.stack((ids[0, 4:], ids[1, :3])), 3, temperature=0, cache=cache)
    got = torch.cat((got, model.generate(got[:, -1:], 2, temperature=0, cache=cache)[:, 1:]), dim=1)
    for i, n in enumerate((7, 3)):
        assert torch.equal(got[i, 3:], model.generate(ids[i : i + 1, :n], 5, temperature=0)[0, n:])
