"""The masks and biases of the gallery, ``docs/masks.md``: the call that makes each, and what it is for."""

from __future__ import annotations

from dataclasses import dataclass

from bench.measuring.environment import slug


@dataclass(frozen=True)
class Entry:
    """A mask or a bias. `source` is the text that runs and that the page shows."""

    title: str
    source: str
    use: str
    seqlen_q: int = 128
    seqlen_k: int = 128
    tile: int = 16  # queries and keys of a block

    @property
    def name(self) -> str:
        """Of the picture's file."""
        return slug(self.title)


def _long(title: str, source: str, use: str) -> Entry:
    """A rule that decides pairs in blocks of 64 by 64."""
    return Entry(title, source, use, 512, 512, 64)


MASKS = (
    Entry("Full", "masks.full()", "Encoders without padding, such as ViT (Dosovitskiy et al., 2021)."),
    Entry("Causal", "masks.causal()", "Language models such as GPT-2 (Radford et al., 2019)."),
    Entry(
        "Causal, fewer queries than keys", "masks.causal()",
        "A chunk of a prompt against a cache: the last query stands at the last key.", seqlen_q=64,
    ),
    Entry(
        "Causal, from the top left", 'masks.causal("top_left")',
        "The alignment of `is_causal` in torch: query 0 stands at key 0.", seqlen_q=64,
    ),
    Entry(
        "Sliding window", "masks.window(39, 0)",
        "The query's own key and 39 before it, as in Mistral 7B with 4,096 (Jiang et al., 2023).",
    ),
    Entry(
        "Window on both sides", "masks.window(20, 20)",
        "Encoders for long texts: Longformer (Beltagy et al., 2020), ModernBERT (Warner et al., 2024).",
    ),
    Entry(
        "Prefix", "masks.prefix_lm(torch.tensor([40]))",
        "Every query sees the prompt, and the rest is causal: prefix LM (Raffel et al., 2020), PaliGemma (Beyer et "
        "al., 2024).",
    ),
    Entry(
        "Padding", "masks.padding(torch.arange(128)[None] < 84)",
        "Batches of texts of different lengths, as in BERT (Devlin et al., 2019).",
    ),
    Entry(
        "Documents", "masks.documents(torch.arange(3).repeat_interleave(torch.tensor([40, 56, 32]))[None])",
        "Several texts in one sequence, each on its own (Krell et al., 2021).",
    ),
    Entry(
        "Blocks", "masks.block_sparse((torch.arange(8)[:, None] - torch.arange(8)) % 3 == 0, 16)",
        "Any choice of whole blocks, as in the kernels of Sparse Transformers (Child et al., 2019).",
    ),
    Entry(
        "Boolean tensor", "masks.boolean(torch.ones(128, 128, dtype=torch.bool).tril(20).triu(-40))",
        "Any mask, as `attn_mask` of torch's function; every block is visited.",
    ),
    Entry(
        "Tree of draft tokens",
        "masks.tree(torch.tensor([[j + 1 in [(i + 1) >> s for s in range(6)] for j in range(32)] for i in range(32)]))",
        "Speculative decoding checks a tree in one call (SpecInfer, Miao et al., 2024; Medusa, Cai et al., 2024).",
        seqlen_q=32,
    ),
    Entry(
        "Function", "masks.function(checkers, checkers_eager, (24,))",
        "Any rule in Triton, like `mask_mod` of FlexAttention (Dong et al., 2024); every block is visited. "
        "`bench/mask_function.py` has this one.",
    ),
)  # fmt: skip

SPARSE = (
    _long("Strided", "masks.strided(128)", "Sparse Transformers on images and music (Child et al., 2019)."),
    _long("Fixed", "masks.fixed(128, 16)", "Sparse Transformers on text (Child et al., 2019)."),
    _long("Dilated", "masks.dilated(16, 16, 4)", "A wider window at the same cost (Longformer, Beltagy et al., 2020)."),
    _long(
        "Window and global tokens", "masks.dilated(48, 48, global_tokens=8)",
        "The first 8 tokens see everything and are seen by all (Longformer).",
    ),
    Entry(
        "BigBird", "masks.bigbird(16, n_random=1)",
        "Window, global and random blocks, for long documents and genomes (Zaheer et al., 2020).", 256, 256,
    ),
    Entry(
        "Selected blocks",
        "masks.selected_blocks(torch.tensor([[0], [5], [2], [7], [1], [4], [3], [6]])[None, None], 16)",
        "Each block of queries, or each query, lists its blocks of keys (native sparse attention, Yuan et al., 2025).",
    ),
    _long(
        "Top blocks", "masks.top_blocks(masks.mean_pooled_scores(q, k, 64, causal=True), 3, (1, 64)) & masks.causal()",
        "Each query sees the 3 blocks with the best means (MoBA, Lu et al., 2025). Here q and k are random, so "
        "some query of each tile wants every earlier block.",
    ),
    _long(
        "Neighborhood", "masks.neighborhood((16, 32), (5, 7))",
        "Pixels of an image see those around them (Neighborhood Attention Transformer, Hassani et al., 2023).",
    ),
    Entry(
        "Sliding tiles", "masks.sliding_tiles((2, 2, 4), 16, (1, 2, 3))",
        "Tiles of a video see the tiles around them (Zhang et al., 2025).", 256, 256,
    ),
    _long(
        "Block diffusion", "masks.block_diffusion(256, 32)",
        "Training on 256 noisy tokens and the same tokens without noise (Arriola et al., 2025).",
    ),
)  # fmt: skip

COMBINATIONS = (
    Entry(
        "Causal and padding", "masks.causal() & masks.padding(torch.arange(128)[None] < 84)",
        "Fine-tuning on texts of different lengths.",
    ),
    Entry(
        "Causal and padding on the left", "masks.causal() & masks.padding(torch.arange(128)[None] >= 40)",
        "Generation for a batch of prompts that end together.",
    ),
    Entry(
        "Causal and documents",
        "masks.causal() & masks.documents(torch.arange(3).repeat_interleave(torch.tensor([40, 56, 32]))[None])",
        "Pretraining on packed texts, as Llama 3 does for long contexts (Grattafiori et al., 2024).",
    ),
    Entry(
        "Window and documents",
        "masks.window(23, 0) & masks.documents(torch.arange(3).repeat_interleave(torch.tensor([40, 56, 32]))[None])",
        "The same in layers with a sliding window, as in Gemma 2 (Gemma Team, 2024).",
    ),
    Entry(
        "Prefix and padding",
        "masks.prefix_lm(torch.tensor([40])) & masks.padding(torch.arange(128)[None] < 108)",
        "Prompts and answers of different lengths, with a prompt that sees all of itself.",
    ),
    Entry(
        "Blocks and causal",
        "masks.block_sparse((torch.arange(8)[:, None] - torch.arange(8)) % 3 == 0, 16) & masks.causal()",
        "A choice of blocks for a language model.",
    ),
    _long(
        "Window and first tokens", "masks.dilated(96, 0, global_tokens=4) & masks.causal()",
        "The first tokens stay visible while the window moves on (StreamingLLM, Xiao et al., 2024).",
    ),
    _long(
        "Strided and padding", "masks.strided(128) & masks.padding(torch.arange(512)[None] < 420)",
        "A sparse pattern takes padding like any other mask.",
    ),
)  # fmt: skip

BIASES = (
    Entry(
        "ALiBi", "biases.alibi(biases.alibi_slopes(8)[:1])",
        "Scores fall with the distance, in each head at another rate (Press et al., 2022; BLOOM, MPT).",
    ),
    Entry(
        "T5", "biases.t5(torch.arange(32.0)[:, None])",
        "A learned number for each bucket of distances (Raffel et al., 2020); the picture shows the buckets' numbers.",
    ),
    Entry(
        "Relative positions", "biases.shaw(q[:, :, :128], torch.randn(2 * 16 + 1, 64, generator=generator))",
        "Queries times learned vectors, one for each distance up to 16 (Shaw et al., 2018).",
    ),
)  # fmt: skip
