"""Step 1: attention with whole rows of scores in registers.

    out = softmax(scale * q k^T) v

    q, out    (seqlen_q, head_dim)    float32, contiguous; head_dim is a power of two
    k, v      (seqlen_k, head_dim)    likewise
    grid      (tiles of BLOCK_M queries,)

One program owns one tile of BLOCK_M queries. BLOCK_N, a power of two, has room for every key.
"""

import torch
import triton
import triton.language as tl

BLOCK_M = 4
LOG2E = 1.4426950408889634  # exp(x) == exp2(x * LOG2E); a GPU has an instruction for exp2 alone
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def attention_fwd(
    q_ptr, k_ptr, v_ptr, out_ptr, seqlen_q, seqlen_k, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    start_m = tl.program_id(0) * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    exists = (offs_m < seqlen_q)[:, None]  # the last tile may reach beyond the last query
    key_visible = offs_n < seqlen_k

    q_tile = tl.load(q_ptr + offs_m[:, None] * HEAD_DIM + offs_d, mask=exists, other=0.0)  # (BLOCK_M, HEAD_DIM)
    offs_kv = offs_n[:, None] * HEAD_DIM + offs_d
    k_tile = tl.load(k_ptr + offs_kv, mask=key_visible[:, None], other=0.0)  # (BLOCK_N, HEAD_DIM)
    v_tile = tl.load(v_ptr + offs_kv, mask=key_visible[:, None], other=0.0)

    # A product of two tiles, written out: (BLOCK_M, 1, HEAD_DIM) times (1, BLOCK_N, HEAD_DIM), summed over features.
    scores = tl.sum(q_tile[:, None, :] * k_tile[None, :, :], 2)  # (BLOCK_M, BLOCK_N)
    scores = tl.where(key_visible[None, :], scores, float("-inf"))
    m_i = tl.max(scores, 1)  # (BLOCK_M,); without it exp2 overflows at large scores
    p = tl.math.exp2((scores - m_i[:, None]) * qk_scale)
    l_i = tl.sum(p, 1)  # (BLOCK_M,)
    acc = tl.sum(p[:, :, None] * v_tile[None, :, :], 1)  # (BLOCK_M, HEAD_DIM)
    tl.store(out_ptr + offs_m[:, None] * HEAD_DIM + offs_d, acc / l_i[:, None], mask=exists)


def attention(q, k, v):
    """``softmax(q k^T / sqrt(head_dim)) v``."""
    seqlen_q, head_dim = q.shape
    out = torch.empty_like(q)
    attention_fwd[(triton.cdiv(seqlen_q, BLOCK_M),)](
        q, k, v, out, seqlen_q, k.shape[0], head_dim**-0.5 * LOG2E,
        HEAD_DIM=head_dim, BLOCK_M=BLOCK_M, BLOCK_N=triton.next_power_of_2(k.shape[0]),
    )  # fmt: skip
    return out


def eager(q, k, v):
    """The same in PyTorch, which writes the scores to memory."""
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def main():
    """Compare with float64; the row of scores that a program holds grows with the number of keys."""
    torch.manual_seed(0)
    print("  keys   scores in a program   error of out   error of eager PyTorch")
    for seqlen in (50, 100, 200):
        q, k, v = torch.randn(3, seqlen, 32, device=DEVICE).unbind()
        exact = eager(q.double(), k.double(), v.double())
        ours, theirs = ((x - exact).abs().max() for x in (attention(q, k, v), eager(q, k, v)))
        held = f"{BLOCK_M} x {triton.next_power_of_2(seqlen)}"
        print(f"{seqlen:6}   {held:>19}   {ours:12.1e}   {theirs:22.1e}")


if __name__ == "__main__":
    main()
