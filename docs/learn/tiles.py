"""Step 3: tiles in the loop order of FlashAttention-2, for all heads, with ``tl.dot`` and lse.

q, k, v, out    (batch, nheads, seqlen, head_dim)    contiguous; head_dim is a power of two, at least 16
lse             (batch, nheads, seqlen_q)            float32, log(sum(exp(scale * q k^T))) of each query
grid            (tiles of BLOCK_M queries * nheads * batch,)
"""

import torch
import triton
import triton.language as tl

BLOCK_M, BLOCK_N, LOG2E = 32, 16, 1.4426950408889634
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def load_tile(ptr, start, seqlen, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Rows ``start + arange(BLOCK)`` of one head, ``(BLOCK, HEAD_DIM)``; rows beyond the sequence are 0."""
    offs, offs_d = start + tl.arange(0, BLOCK), tl.arange(0, HEAD_DIM)
    return tl.load(ptr + offs[:, None] * HEAD_DIM + offs_d, mask=(offs < seqlen)[:, None], other=0.0)


@triton.jit
def softmax_update(scores, m_i, l_i, qk_scale):
    """(p, alpha, m_i, l_i) after one more block of scores; earlier sums must be multiplied by alpha."""
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    p = tl.math.exp2((scores - m_new[:, None]) * qk_scale)
    alpha = tl.math.exp2((m_i - m_new) * qk_scale)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def attention_fwd(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, seqlen_q, seqlen_k, n_tiles, scale, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    start_m, head = tl.program_id(0) % n_tiles * BLOCK_M, tl.program_id(0) // n_tiles  # heads of all batches
    k_head, v_head = k_ptr + head * seqlen_k * HEAD_DIM, v_ptr + head * seqlen_k * HEAD_DIM
    q_tile = load_tile(q_ptr + head * seqlen_q * HEAD_DIM, start_m, seqlen_q, HEAD_DIM, BLOCK_M)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i, acc = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for start_n in range(0, seqlen_k, BLOCK_N):
        k_tile = load_tile(k_head, start_n, seqlen_k, HEAD_DIM, BLOCK_N)
        v_tile = load_tile(v_head, start_n, seqlen_k, HEAD_DIM, BLOCK_N)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # (BLOCK_M, BLOCK_N), float32
        scores = tl.where((start_n + tl.arange(0, BLOCK_N) < seqlen_k)[None, :], scores, float("-inf"))
        p, alpha, m_i, l_i = softmax_update(scores, m_i, l_i, qk_scale)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
    offs_m, offs_d = start_m + tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    rows, exists = head * seqlen_q + offs_m, offs_m < seqlen_q
    tl.store(lse_ptr + rows, m_i * scale + tl.log(l_i), mask=exists)
    tl.store(out_ptr + rows[:, None] * HEAD_DIM + offs_d, acc / l_i[:, None], mask=exists[:, None])


def attention(q, k, v):
    """(out, lse)."""
    batch, nheads, seqlen_q, head_dim = q.shape
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    n_tiles, scale = triton.cdiv(seqlen_q, BLOCK_M), head_dim**-0.5
    attention_fwd[(n_tiles * nheads * batch,)](
        q, k, v, out, lse, seqlen_q, k.shape[2], n_tiles, scale, scale * LOG2E, head_dim, BLOCK_M, BLOCK_N
    )
    return out, lse


def eager(q, k, v):
    """The same in PyTorch."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


if __name__ == "__main__":
    torch.manual_seed(0)
    print("                           error of out   error of lse")
    for dtype in (torch.float32, torch.float16):
        q, k, v = torch.randn(3, 2, 2, 100, 32, device=DEVICE).to(dtype).unbind()
        for name, function in (("these tiles", attention), ("eager PyTorch", eager)):
            exact, found = eager(q.double(), k.double(), v.double()), function(q, k, v)
            out, lse = ((x.double() - y).abs().max() for x, y in zip(found, exact, strict=True))
            print(f"{str(dtype)[6:]}, {name:15}   {out:12.1e}   {lse:12.1e}")
