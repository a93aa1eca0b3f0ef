"""Faults in sparse patterns: their definition, their lists of blocks, and their rules in the kernels."""

from tests.mutation.fault import Fault

PATTERNS, TABLES = "fusedattn/patterns.py", "fusedattn/block_tables.py"
BLOCKS, MAKERS = "fusedattn/pattern_blocks.py", "fusedattn/sparse_masks.py"
TOP_BLOCKS = "fusedattn/transformer/top_blocks.py"
RULES, OPERANDS, CHECKS = "kernels/sparse_rules.py", "fusedattn/backends/triton/operands.py", "fusedattn/call_checks.py"

GATHERED, MERGED = "fusedattn/backends/torch/gathered.py", "fusedattn/backends/torch/merged.py"
BOXES, SDPA = "fusedattn/backends/torch/boxes.py", "fusedattn/backends/torch/sdpa.py"

ON_CPU = "tests/torch_backend/test_gathered.py"
PAIRS = "tests/public/test_sparse.py -k pairs_and_blocks"
LISTED = "tests/public/test_sparse.py -k 'pairs_and_blocks or is_what_kernels_visit'"
COUNTED = "tests/public/test_sparse.py -k 'blocks_grow or is_what_kernels_visit'"
WHOLE = "tests/public/test_sparse.py -k need_no_rule"
RANDOM = "tests/public/test_sparse.py -k random"
MOBA = "tests/public/test_sparse.py -k 'moba or choose_nothing'"
HIDDEN_KEYS = "tests/public/test_sparse.py -k no_part_in_means"
REFUSALS = "tests/public/test_sparse.py -k 'refusals or no_backend'"
KERNELS = "tests/public/test_sparse.py -k 'test_accuracy and triton'"
TOGETHER = "tests/public/test_sparse.py -k 'other_parts and triton'"


def top_blocks(words: str) -> str:
    """The layer that chooses blocks, by the tests whose names have these words."""
    return f"tests/transformer/test_top_blocks.py -k 'not triton and ({words})'"


# fmt: off
FAULTS = (
    Fault(PATTERNS, "(distance.abs() < self.stride)", "(distance.abs() <= self.stride - 2)", "strided: a window one key short", PAIRS),
    Fault(PATTERNS, "near = (nearest < self.stride) & (furthest > -self.stride)", "near = (nearest < self.stride - 1) & (furthest > -self.stride)", "strided: a block of the window is not listed", PAIRS),
    Fault(PATTERNS, "return near | _has_multiple(nearest, furthest, self.stride)", "return near | (nearest >= 0)", "strided: every block is listed", COUNTED),
    Fault(PATTERNS, "(k % self.stride >= self.stride - self.expressivity)", "(k % self.stride > self.stride - self.expressivity)", "fixed: one summary too few", PAIRS),
    Fault(PATTERNS, "(self._summaries(k.last + 1) > self._summaries(k.first))", "(self._summaries(k.last) > self._summaries(k.first))", "fixed: a summary at the end of a block is not listed", PAIRS),
    Fault(PATTERNS, "near = near & (ahead % self.dilation == 0)", "near = near & (ahead.abs() % self.dilation <= 1)", "dilated: two keys at each step", PAIRS),
    Fault(PATTERNS, "near | of_queries | tokens[:, None, None, k]", "near | tokens[:, None, None, k]", "dilated: global tokens do not see all", PAIRS),
    Fault(PATTERNS, "& (index >= 0) & (index < n)", "& (index < n)", "dilated: queries before all keys are global tokens", PAIRS),
    Fault(PATTERNS, "counts[:, (span.last + 1).clamp(0, n)]", "counts[:, span.last.clamp(0, n)]", "dilated: a global token at the end of a block is not listed", PAIRS),
    Fault(PATTERNS, "(place - window // 2).clamp(0, size - window)", "(place - window // 2).clamp(min=0)", "neighborhood: a window beyond the edge", PAIRS),
    Fault(PATTERNS, "breaks = breaks | (first != last)", "breaks = breaks & (first != last)", "neighborhood: blocks of several lines have one column", PAIRS),
    Fault(PATTERNS, "(block_k < block_q + clean_q.long())", "(block_k < block_q)", "block diffusion: clean tokens do not see their block", PAIRS),
    Fault(PATTERNS, "return whole.seqlen_k - whole.seqlen_q if self.align", "return whole.seqlen_q - whole.seqlen_k if self.align", "patterns: positions the wrong way round", PAIRS),
    Fault(TABLES, "seen & ((row >= 0) & (row < n_rows))[:, None]", "seen & (row < n_rows)[:, None]", "tables: queries before all keys see what the first row does", PAIRS),
    Fault(TABLES, "above, below = counts[:, :, top], counts[:, :, bottom]", "above, below = counts[:, :, top], counts[:, :, top + 1]", "tables: only the first row of a block is listed", PAIRS),
    Fault(TABLES, "table.repeat_interleave(nheads // table.shape[1], dim=1)", "table.repeat(1, nheads // table.shape[1], 1, 1)", "tables: groups of heads in another order", PAIRS),
    Fault(TABLES, "chosen, True) & ~taken", "chosen, True)", "BigBird, causal: later blocks drawn", RANDOM, equivalent="the band hides later blocks, and blocks of the window are visible anyway"),
    Fault(TABLES, ".masked_fill(taken, _LAST)", "", "BigBird: random blocks that are visible anyway", RANDOM),
    Fault(TABLES, "_noise(rows * n + columns, self.seed)", "_noise(rows * n + columns, 0)", "BigBird: the seed is not used", RANDOM),
    Fault(TABLES, "torch.where((listed >= 0) & (listed < n), listed, n)", "torch.where(listed < n, listed, n).clamp(min=0)", "selected blocks: -1 selects the first", PAIRS),
    Fault(BLOCKS, "shown = shown & (k.first <= q.last[:, None] + upper)", "shown = shown & (k.first < q.first[:, None] + upper)", "lists: blocks on the diagonal left out", LISTED),
    Fault(BLOCKS, "shown = shown & (k.last >= q.first[:, None] + lower)", "shown = shown & (k.last > q.last[:, None] + lower)", "lists: blocks at the start of a window left out", TOGETHER),
    Fault(BLOCKS, "blocks = blocks & layout.blocks", "blocks = blocks | layout.blocks", "lists: a pattern or a layout", TOGETHER),
    Fault(BLOCKS, "all(start % size == 0 for size, start in zip(own, starts, strict=True))", "True", "tables: queries inside a block begin one", WHOLE),
    Fault(BLOCKS, "fits = fits and all(", "fits = fits and not all(", "tables: rules for whole blocks", WHOLE),
    Fault(GATHERED, "h * x.shape[1] // by_head", "h % x.shape[1]", "gathered: a list of another head", ON_CPU),
    Fault(GATHERED, "x[b : b + 1] if x.dim() > 1", "x[:1] if x.dim() > 1", "gathered: lists of the first batch for all", ON_CPU),
    Fault(GATHERED, "seen = seen & some(mask.valid, 0)", "seen = seen & mask.valid[0]", "gathered: padding of the first batch for all", ON_CPU),
    Fault(GATHERED, "range(int(keys[0]), int(keys[-1]) + 1)", "range(int(keys[0]), int(keys[-1]))", "gathered: the last key of a range is lost", ON_CPU),
    Fault(MERGED, "near = others & Mask(bands=frozenset({Band(stride - 1, stride - 1, align)}))", "near = others & Mask(bands=frozenset({Band(stride, stride - 1, align)}))", "merged: a key of the window counts twice", ON_CPU),
    Fault(MERGED, "start = (place - shift) % stride", "start = place % stride", "merged: queries of another residue", ON_CPU),
    Fault(MERGED, "left = max(start + shift + max(first, 1 - stride), 0)", "left = max(start + shift + max(first, 2 - stride), 0)", "merged: the first key of a window is lost", ON_CPU),
    Fault(MERGED, "if (first > -stride) if is_before else (last < stride):", "if not is_before:", "merged: no keys far ahead", ON_CPU),
    Fault(MERGED, "part_lse = part_lse.masked_fill(empty, -math.inf)", "part_lse = part_lse + 0.0", "merged: a part adds to queries that see none of its keys", ON_CPU),
    Fault(MERGED, "whole = whole.masked_fill(empty, math.inf)  # weights of 0", "pass", "merged: gradients through keys that a query does not see", ON_CPU),
    Fault(MERGED, "dout = dout.masked_fill(blind[..., None], 0.0)", "pass", "merged: NaN in the gradient of a row that sees nothing", ON_CPU),
    Fault(MERGED, "key = part.mask.bands, len(rows), len(keys), *steps, int(rows[0] - keys[0])", "key = part.mask.bands, len(rows), len(keys), *steps", "merged: the mask of a part elsewhere", ON_CPU),
    Fault(BOXES, "index_add_(2, tokens, part.to(wide))", "index_copy_(2, tokens, part.to(wide))", "boxes: only the last gradient of a gathered key", ON_CPU),
    Fault(SDPA, "i = own.heads.start // group // n_kv", "i = own.heads.start % len(keys)", "gathered: the keys of another head", ON_CPU),
    Fault(SDPA, "elsewhere=-math.inf", "elsewhere=0.0", "gathered: 0 in lse of rows that no part has", ON_CPU, nth=1),
    Fault(MAKERS, "best.indices.masked_fill(best.values == -math.inf, -1)", "best.indices", "top blocks: those of -inf too", MOBA),
    Fault(MAKERS, "known = scores.detach().masked_fill(scores.isnan(), -math.inf)", "known = scores.detach()", "top blocks: NaN is the best score", MOBA),
    Fault(MAKERS, "F.pad(real, (0, missing))", "F.pad(real, (0, missing), value=True)", "means of blocks: the last one counts keys that it lacks", MOBA),
    Fault(MAKERS, "scores.masked_fill(block * block_size > position, -math.inf).masked_fill(own, math.inf)", "scores.masked_fill(block * block_size > position, -math.inf)", "scores of blocks: a query's own one may be left out", MOBA),
    Fault(MAKERS, "F.pad(k.masked_fill(~real[:, None, :, None], 0.0), (0, 0, 0, missing))", "F.pad(k, (0, 0, 0, missing))", "means of blocks: of hidden keys, too", HIDDEN_KEYS),
    Fault(MAKERS, "(counts[:, :, None] == 0, -math.inf)", "(counts[:, :, None] < 0, -math.inf)", "scores of blocks: one of hidden keys may be chosen", HIDDEN_KEYS),
    Fault(MAKERS, "with torch.autocast(q.device.type, enabled=False):", "with torch.autocast(q.device.type, enabled=torch.is_autocast_enabled(q.device.type)):", "scores of blocks: rounded by autocast", "tests/public/test_sparse.py -k rounded_by_autocast"),
    Fault(TOP_BLOCKS, "masks.top_blocks(scores, self.k,", "masks.top_blocks(scores, self.k + 1,", "top-block layer: one block too many", top_blocks("moba")),
    Fault(TOP_BLOCKS, "causal=causal, valid=valid)", "causal=False, valid=valid)", "top-block layer: later blocks are chosen", top_blocks("moba")),
    Fault(TOP_BLOCKS, "causal=causal, valid=valid)", "causal=causal)", "top-block layer: padding has a part in the choice", top_blocks("padding_holds")),
    Fault(TOP_BLOCKS, "mask & chosen", "chosen", "top-block layer: the mask is forgotten", top_blocks("moba")),
    Fault(TOP_BLOCKS, "            q, k = rope.rotate(q, k)\n", "            q, k = rope.rotate(q, k)[0], k\n", "top-block layer: keys are not rotated", top_blocks("rotated")),
    Fault(TOP_BLOCKS, "if cache is not None:", "if cache is None and False:", "top-block layer: a cache is ignored", top_blocks("generating")),
    Fault("fusedattn/transformer/gpt.py", "attention=copy.deepcopy(core),", "attention=core,", "reference Transformer: one module of attention in all blocks", top_blocks("every_block")),
    Fault("fusedattn/fusion.py", "isinstance(module, (TopBlockAttention, *_twins()))", "isinstance(module, (*_twins(),))", "top-block layer: a process chooses from its own tokens alone", "tests/distributed/test_refusals.py -k 'no_context and top'"),
    Fault(CHECKS, "if packed is not None and mask.pattern is not None:", "if False:", "packed: a pattern is not refused", REFUSALS),
    Fault(OPERANDS, "if pattern is not None and pattern.rule:", "if pattern is not None and not pattern.rule:", "kernels: no rule inside blocks", KERNELS),
    Fault(RULES, "(tl.abs(distance) < args[1])", "(tl.abs(distance) < args[1] - 1)", "strided in kernels: a window one key short", KERNELS),
    Fault(RULES, "own = (position >= 0) & (position // args[1] == key // args[1])", "own = position // args[1] == key // args[1]", "fixed in kernels: queries before all keys are in the first block", "tests/public/test_sparse.py -k 'test_accuracy and triton and 70-33'"),
    Fault(RULES, "(key % args[1] >= args[2])", "(key % args[1] > args[2])", "fixed in kernels: one summary too few", KERNELS),
    Fault(RULES, "(ahead % args[3] == 0)", "(ahead % args[3] <= 0)", "dilated in kernels: all keys before the query", KERNELS),
    Fault(RULES, "mask=(position >= 0) & (position < tl.load(args[0] + 2))", "mask=position < tl.load(args[0] + 2)", "dilated in kernels: global tokens before the first", "tests/public/test_sparse.py -k 'test_accuracy and triton and 70-33'"),
    Fault(RULES, "return near | of_query |", "return near |", "dilated in kernels: global tokens do not see all", KERNELS),
    Fault(RULES, "head // tl.load(numbers + 3) * tl.load(numbers + 2)", "head * tl.load(numbers + 2)", "tables in kernels: a table for each query head", KERNELS),
    Fault(RULES, "tl.cast(batch, tl.int64) * tl.load(numbers + 1)", "tl.cast(batch, tl.int64) * 0", "tables in kernels: the first batch for all", KERNELS),
    Fault(RULES, "(row < tl.load(numbers + 4))", "(row <= tl.load(numbers + 4))", "tables in kernels: read beyond the last row", KERNELS, equivalent="only queries behind all keys have such rows, and a position is at most seqlen_k - 1"),
    Fault(RULES, "tl.minimum(tl.maximum(place - window // 2, 0), size - window)", "tl.maximum(place - window // 2, 0)", "neighborhood in kernels: a window beyond the edge", KERNELS),
    Fault(RULES, "own | (is_clean_k & (block_k < block_q))", "own | (is_clean_k & (block_k <= block_q))", "block diffusion in kernels: noisy tokens see their clean block", KERNELS),
)
# fmt: on
