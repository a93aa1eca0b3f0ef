"""Step 4: a causal mask by blocks of keys: full, boundary or skipped.

q, k, v, out    (nheads, seqlen, head_dim)    contiguous; head_dim is a power of two, at least 16
counts          (tiles, 2)                    int32, how many full and boundary blocks each tile visits
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
def key_blocks(start_m, upper, seqlen_q, seqlen_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(n_full, n_boundary) of queries ``start_m + arange(BLOCK_M)``; query i sees keys up to ``i + upper``."""
    full_stop = tl.minimum(start_m + upper + 1, seqlen_k)  # every query sees the keys before
    stop = tl.minimum(tl.minimum(start_m + BLOCK_M, seqlen_q) + upper, seqlen_k)  # beyond what the last one sees
    n_full = tl.maximum(full_stop, 0) // BLOCK_N
    return n_full, tl.cdiv(tl.maximum(stop - n_full * BLOCK_N, 0), BLOCK_N)


@triton.jit
def attention_fwd(
    q_ptr, k_ptr, v_ptr, out_ptr, counts_ptr, seqlen_q, seqlen_k, n_tiles, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile, head = n_tiles - 1 - tl.program_id(0) % n_tiles, tl.program_id(0) // n_tiles  # the longest tile first
    start_m, upper = tile * BLOCK_M, seqlen_k - seqlen_q  # the last query sees every key
    rows = (start_m + tl.arange(0, BLOCK_M))[:, None]
    q_tile = load_tile(q_ptr + head * seqlen_q * HEAD_DIM, start_m, seqlen_q, HEAD_DIM, BLOCK_M)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i, acc = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    n_full, n_boundary = key_blocks(start_m, upper, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N)
    for MASKED in tl.static_range(2):  # two copies of the loop: without the mask over full blocks, then with it
        for start_n in range(n_full * BLOCK_N * MASKED, (n_full + n_boundary * MASKED) * BLOCK_N, BLOCK_N):
            k_tile = load_tile(k_ptr + head * seqlen_k * HEAD_DIM, start_n, seqlen_k, HEAD_DIM, BLOCK_N)
            v_tile = load_tile(v_ptr + head * seqlen_k * HEAD_DIM, start_n, seqlen_k, HEAD_DIM, BLOCK_N)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            if MASKED:
                keys = (start_n + tl.arange(0, BLOCK_N))[None, :]
                scores = tl.where((keys <= rows + upper) & (keys < seqlen_k), scores, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(scores, 1))
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: -inf - -inf would be NaN
            p = tl.math.exp2((scores - shift[:, None]) * qk_scale)
            alpha = tl.math.exp2((m_i - shift) * qk_scale)
            m_i, l_i = m_new, l_i * alpha + tl.sum(p, 1)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
    out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]  # 0 for a query that sees nothing
    tl.store(out_ptr + (head * seqlen_q + rows) * HEAD_DIM + tl.arange(0, HEAD_DIM), out, mask=rows < seqlen_q)
    tl.store(counts_ptr + tile * 2, n_full)
    tl.store(counts_ptr + tile * 2 + 1, n_boundary)


def attention(q, k, v):
    """(out, counts)."""
    (nheads, seqlen_q, head_dim), n_tiles = q.shape, triton.cdiv(q.shape[1], BLOCK_M)
    out, counts = torch.empty_like(q), torch.empty(n_tiles, 2, dtype=torch.int32, device=q.device)
    sizes = (seqlen_q, k.shape[1], n_tiles, head_dim**-0.5 * LOG2E, head_dim, BLOCK_M, BLOCK_N)
    attention_fwd[(n_tiles * nheads,)](q, k, v, out, counts, *sizes)
    return out, counts


if __name__ == "__main__":
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 100, 32, device=DEVICE).unbind()
    out, counts = attention(q, k, v)
    hidden = torch.full((100, 100), float("-inf"), dtype=torch.float64, device=DEVICE).triu(1)
    exact = torch.softmax(q.double() @ k.double().mT * 32**-0.5 + hidden, -1) @ v.double()
    print(f"error of out: {(out - exact).abs().max():.1e}")
    for i, (n_full, n_boundary) in enumerate(counts.tolist()):
        print(f"queries from {i * BLOCK_M:2}: {n_full} full and {n_boundary} boundary blocks of 7")
