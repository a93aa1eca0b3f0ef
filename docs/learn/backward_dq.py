"""Step 6b: dq. A program owns a tile of queries, recomputes weights from lse, and walks over the keys.

p = exp(scale * q k^T - lse)    ds = p * (dout v^T - delta)    delta = rowsum(dout * out)
dq = scale * ds k

q, out, dout, dq    (nheads, seqlen_q, head_dim)    contiguous; head_dim is a power of two, at least 16
k, v                (nheads, seqlen_k, head_dim)    likewise
lse, delta          (nheads, seqlen_q)              float32; ``shift`` is lse in base 2
grid                (tiles of BLOCK_M queries * nheads,)
"""

import torch
import triton
import triton.language as tl

BLOCK_M, BLOCK_N, LOG2E = 32, 16, 1.4426950408889634
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def load_tile(ptr, start, seqlen, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    offs, offs_d = start + tl.arange(0, BLOCK), tl.arange(0, HEAD_DIM)
    return tl.load(ptr + offs[:, None] * HEAD_DIM + offs_d, mask=(offs < seqlen)[:, None], other=0.0)


@triton.jit
def attention_bwd_dq(
    q_ptr, k_ptr, v_ptr, dout_ptr, shift_ptr, delta_ptr, dq_ptr, seqlen_q, seqlen_k, n_tiles, scale, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    start_m, head = tl.program_id(0) % n_tiles * BLOCK_M, tl.program_id(0) // n_tiles
    q_tile = load_tile(q_ptr + head * seqlen_q * HEAD_DIM, start_m, seqlen_q, HEAD_DIM, BLOCK_M)
    dout_tile = load_tile(dout_ptr + head * seqlen_q * HEAD_DIM, start_m, seqlen_q, HEAD_DIM, BLOCK_M)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    shift = tl.load(shift_ptr + head * seqlen_q + offs_m, mask=offs_m < seqlen_q, other=float("inf"))
    delta = tl.load(delta_ptr + head * seqlen_q + offs_m, mask=offs_m < seqlen_q, other=0.0)
    dq = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for start_n in range(0, seqlen_k, BLOCK_N):
        k_tile = load_tile(k_ptr + head * seqlen_k * HEAD_DIM, start_n, seqlen_k, HEAD_DIM, BLOCK_N)
        v_tile = load_tile(v_ptr + head * seqlen_k * HEAD_DIM, start_n, seqlen_k, HEAD_DIM, BLOCK_N)
        products = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
        p = tl.math.exp2(products * qk_scale - shift[:, None])
        dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        # Rows of k_tile beyond the last key are 0, and so is what they add.
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")
    rows = (head * seqlen_q + offs_m)[:, None]
    tl.store(dq_ptr + rows * HEAD_DIM + tl.arange(0, HEAD_DIM), dq * scale, mask=(offs_m < seqlen_q)[:, None])


def attention_bwd(q, k, v, out, lse, dout):
    """dq from what the forward kept and the gradient of out."""
    (nheads, seqlen_q, head_dim), n_tiles, scale = q.shape, triton.cdiv(q.shape[1], BLOCK_M), q.shape[2] ** -0.5
    dq, shift, delta = torch.empty_like(q), lse * LOG2E, (dout.float() * out.float()).sum(-1)
    sizes = (seqlen_q, k.shape[1], n_tiles, scale, scale * LOG2E, head_dim, BLOCK_M, BLOCK_N)
    attention_bwd_dq[(n_tiles * nheads,)](q, k, v, dout, shift, delta, dq, *sizes)
    return dq


def eager(q, k, v):
    """(out, lse) in PyTorch."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


if __name__ == "__main__":
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 2, 100, 32, device=DEVICE).unbind()
    found = {"this kernel": attention_bwd(q, k, v, *eager(q, k, v), dout)}
    for name, dtype in (("eager PyTorch", torch.float32), ("exact", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        (found[name],) = torch.autograd.grad(eager(*leaves)[0], leaves[:1], dout.to(dtype))
    for name in ("this kernel", "eager PyTorch"):
        print(f"{name:15}   error of dq {(found[name] - found['exact']).abs().max():.1e}")
