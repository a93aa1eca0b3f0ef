"""Step 6a: dk and dv. A program owns a tile of keys, recomputes weights from lse, and walks over the queries.

p = exp(scale * q k^T - lse)    ds = p * (dout v^T - delta)    delta = rowsum(dout * out)
dv = p^T dout                   dk = scale * ds^T q

q, out, dout    (nheads, seqlen_q, head_dim)    contiguous; head_dim is a power of two, at least 16
k, v, dk, dv    (nheads, seqlen_k, head_dim)    likewise
lse, delta      (nheads, seqlen_q)              float32; ``shift`` is lse in base 2
grid            (tiles of BLOCK_N keys * nheads,)
"""

import torch
import triton
import triton.language as tl

BLOCK_M, BLOCK_N, LOG2E = 16, 32, 1.4426950408889634
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def load_tile(ptr, start, seqlen, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    offs, offs_d = start + tl.arange(0, BLOCK), tl.arange(0, HEAD_DIM)
    return tl.load(ptr + offs[:, None] * HEAD_DIM + offs_d, mask=(offs < seqlen)[:, None], other=0.0)


@triton.jit
def attention_bwd_dkdv(
    q_ptr, k_ptr, v_ptr, dout_ptr, shift_ptr, delta_ptr, dk_ptr, dv_ptr, seqlen_q, seqlen_k, n_tiles, scale, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    start_n, head = tl.program_id(0) % n_tiles * BLOCK_N, tl.program_id(0) // n_tiles
    k_tile = load_tile(k_ptr + head * seqlen_k * HEAD_DIM, start_n, seqlen_k, HEAD_DIM, BLOCK_N)
    v_tile = load_tile(v_ptr + head * seqlen_k * HEAD_DIM, start_n, seqlen_k, HEAD_DIM, BLOCK_N)
    dk, dv = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32), tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    for start_m in range(0, seqlen_q, BLOCK_M):
        q_tile = load_tile(q_ptr + head * seqlen_q * HEAD_DIM, start_m, seqlen_q, HEAD_DIM, BLOCK_M)
        dout_tile = load_tile(dout_ptr + head * seqlen_q * HEAD_DIM, start_m, seqlen_q, HEAD_DIM, BLOCK_M)
        offs_m = start_m + tl.arange(0, BLOCK_M)
        seen = offs_m < seqlen_q
        shift = tl.load(shift_ptr + head * seqlen_q + offs_m, mask=seen, other=float("inf"))  # no row: p is 0
        delta = tl.load(delta_ptr + head * seqlen_q + offs_m, mask=seen, other=0.0)
        # Transposed, (BLOCK_N, BLOCK_M), so that p and ds are ready for the products below.
        products = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
        p = tl.math.exp2(products * qk_scale - shift[None, :])
        dp = tl.dot(v_tile, tl.trans(dout_tile), input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dv = tl.dot(p.to(dout_tile.dtype), dout_tile, dv, input_precision="ieee")
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    keys = (start_n + tl.arange(0, BLOCK_N))[:, None]
    offs_kv = (head * seqlen_k + keys) * HEAD_DIM + tl.arange(0, HEAD_DIM)
    tl.store(dk_ptr + offs_kv, dk * scale, mask=keys < seqlen_k)
    tl.store(dv_ptr + offs_kv, dv, mask=keys < seqlen_k)


def attention_bwd(q, k, v, out, lse, dout):
    """(dk, dv) from what the forward kept and the gradient of out."""
    (nheads, seqlen_k, head_dim), n_tiles, scale = k.shape, triton.cdiv(k.shape[1], BLOCK_N), k.shape[2] ** -0.5
    dk, dv, shift, delta = torch.empty_like(k), torch.empty_like(v), lse * LOG2E, (dout.float() * out.float()).sum(-1)
    sizes = (q.shape[1], seqlen_k, n_tiles, scale, scale * LOG2E, head_dim, BLOCK_M, BLOCK_N)
    attention_bwd_dkdv[(n_tiles * nheads,)](q, k, v, dout, shift, delta, dk, dv, *sizes)
    return dk, dv


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
        found[name] = torch.autograd.grad(eager(*leaves)[0], leaves[1:], dout.to(dtype))
    for name in ("this kernel", "eager PyTorch"):
        dk, dv = ((x - y).abs().max() for x, y in zip(found[name], found["exact"], strict=True))
        print(f"{name:15}   error of dk {dk:.1e}   error of dv {dv:.1e}")
