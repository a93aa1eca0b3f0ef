"""Step 2: the online softmax; a program holds the scores of BLOCK_N keys at a time.

    out = softmax(scale * q k^T) v

    q, out    (seqlen_q, head_dim)    float32, contiguous; head_dim is a power of two
    k, v      (seqlen_k, head_dim)    likewise
    grid      (tiles of BLOCK_M queries,)

After each block, ``acc / l_i`` is the attention over the keys seen so far (Milakov and Gimelshein, 2018).
"""

import torch
import triton
import triton.language as tl

BLOCK_M = 4
LOG2E = 1.4426950408889634
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def softmax_update(scores, m_i, l_i, qk_scale):
    """(p, alpha, m_i, l_i) after one more block of scores; earlier sums must be multiplied by alpha."""
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    p = tl.math.exp2((scores - m_new[:, None]) * qk_scale)
    alpha = tl.math.exp2((m_i - m_new) * qk_scale)  # 0 at the first block: m_i is -inf
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def attention_fwd(
    q_ptr, k_ptr, v_ptr, out_ptr, seqlen_q, seqlen_k, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    start_m = tl.program_id(0) * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    exists = (offs_m < seqlen_q)[:, None]
    q_tile = tl.load(q_ptr + offs_m[:, None] * HEAD_DIM + offs_d, mask=exists, other=0.0)  # (BLOCK_M, HEAD_DIM)

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for start_n in range(0, seqlen_k, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        key_visible = offs_n < seqlen_k
        offs_kv = offs_n[:, None] * HEAD_DIM + offs_d
        k_tile = tl.load(k_ptr + offs_kv, mask=key_visible[:, None], other=0.0)  # (BLOCK_N, HEAD_DIM)
        v_tile = tl.load(v_ptr + offs_kv, mask=key_visible[:, None], other=0.0)
        scores = tl.sum(q_tile[:, None, :] * k_tile[None, :, :], 2)  # (BLOCK_M, BLOCK_N)
        scores = tl.where(key_visible[None, :], scores, float("-inf"))
        p, alpha, m_i, l_i = softmax_update(scores, m_i, l_i, qk_scale)
        acc = acc * alpha[:, None] + tl.sum(p[:, :, None] * v_tile[None, :, :], 1)
    tl.store(out_ptr + offs_m[:, None] * HEAD_DIM + offs_d, acc / l_i[:, None], mask=exists)


def attention(q, k, v, block_n=16):
    """``softmax(q k^T / sqrt(head_dim)) v``."""
    seqlen_q, head_dim = q.shape
    out = torch.empty_like(q)
    attention_fwd[(triton.cdiv(seqlen_q, BLOCK_M),)](
        q, k, v, out, seqlen_q, k.shape[0], head_dim**-0.5 * LOG2E,
        HEAD_DIM=head_dim, BLOCK_M=BLOCK_M, BLOCK_N=block_n,
    )  # fmt: skip
    return out


def main():
    """Compare with float64; blocks of any size give the same result but for rounding."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 100, 32, device=DEVICE).unbind()
    exact = torch.softmax(q.double() @ k.double().mT * 32**-0.5, -1) @ v.double()
    print("  BLOCK_N   blocks   error of out")
    for block_n in (8, 32, 128):
        error = (attention(q, k, v, block_n) - exact).abs().max()
        print(f"{block_n:9}   {triton.cdiv(100, block_n):6}   {error:12.1e}")


if __name__ == "__main__":
    main()
