"""Step 5: rotary position embedding in the prologue: a tile of queries is rotated in registers.

q, k, v, out    (nheads, seqlen, head_dim)     contiguous; head_dim is a power of two, 16 or more; seqlen_q <= seqlen_k
cos, sin        (n_positions, head_dim / 2)    float32; feature i forms a pair with feature i + head_dim / 2
grid            (tiles of BLOCK_M queries * nheads,)
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
def rotate_tile(x, cos_ptr, sin_ptr, position, n_positions, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Rotate the pairs of a ``(BLOCK, HEAD_DIM)`` tile, whose first row stands at `position`."""
    HALF: tl.constexpr = HEAD_DIM // 2
    a, b = tl.split(tl.permute(tl.reshape(x.to(tl.float32), (BLOCK, 2, HALF)), (0, 2, 1)))  # left and right half
    cos = load_tile(cos_ptr, position, n_positions, HALF, BLOCK)
    sin = load_tile(sin_ptr, position, n_positions, HALF, BLOCK)
    rotated = tl.join(a * cos - b * sin, b * cos + a * sin)  # (BLOCK, HALF, 2)
    return tl.reshape(tl.permute(rotated, (0, 2, 1)), (BLOCK, HEAD_DIM)).to(x.dtype)


@triton.jit
def attention_fwd(
    q_ptr, k_ptr, v_ptr, out_ptr, cos_ptr, sin_ptr, seqlen_q, seqlen_k, n_tiles, n_positions, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    start_m, head = tl.program_id(0) % n_tiles * BLOCK_M, tl.program_id(0) // n_tiles
    q_tile = load_tile(q_ptr + head * seqlen_q * HEAD_DIM, start_m, seqlen_q, HEAD_DIM, BLOCK_M)
    position = start_m + seqlen_k - seqlen_q  # the last query stands where the last key does
    q_tile = rotate_tile(q_tile, cos_ptr, sin_ptr, position, n_positions, HEAD_DIM, BLOCK_M)
    m_i, l_i = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for start_n in range(0, seqlen_k, BLOCK_N):
        k_tile = load_tile(k_ptr + head * seqlen_k * HEAD_DIM, start_n, seqlen_k, HEAD_DIM, BLOCK_N)
        k_tile = rotate_tile(k_tile, cos_ptr, sin_ptr, start_n, n_positions, HEAD_DIM, BLOCK_N)
        v_tile = load_tile(v_ptr + head * seqlen_k * HEAD_DIM, start_n, seqlen_k, HEAD_DIM, BLOCK_N)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        scores = tl.where((start_n + tl.arange(0, BLOCK_N) < seqlen_k)[None, :], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        p, alpha = tl.math.exp2((scores - m_new[:, None]) * qk_scale), tl.math.exp2((m_i - m_new) * qk_scale)
        m_i, l_i = m_new, l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
    rows = (start_m + tl.arange(0, BLOCK_M))[:, None]
    out = acc / l_i[:, None]
    tl.store(out_ptr + (head * seqlen_q + rows) * HEAD_DIM + tl.arange(0, HEAD_DIM), out, mask=rows < seqlen_q)


def attention(q, k, v, cos, sin):
    (nheads, seqlen_q, d), out, n_tiles = q.shape, torch.empty_like(q), triton.cdiv(q.shape[1], BLOCK_M)
    sizes = (seqlen_q, k.shape[1], n_tiles, cos.shape[0], d**-0.5 * LOG2E, d, BLOCK_M, BLOCK_N)
    attention_fwd[(n_tiles * nheads,)](q, k, v, out, cos, sin, *sizes)
    return out


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


if __name__ == "__main__":
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 100, 32, device=DEVICE).unbind()
    angles = torch.outer(torch.arange(1100.0), 10000.0 ** -(torch.arange(16) / 16)).to(DEVICE)  # by position and pair
    for first in (0, 1000):  # positions of the first key
        cos, sin = angles[first:].cos(), angles[first:].sin()
        q_exact, k_exact = (rotate(x.double(), cos[:100], sin[:100]) for x in (q, k))
        exact = torch.softmax(q_exact @ k_exact.mT * 32**-0.5, -1) @ v.double()
        out = attention(q, k, v, cos, sin)
        print(f"positions from {first:4}: out[0, 0, 0] {out[0, 0, 0]:.4f}, error {(out - exact).abs().max():.1e}")
