"""Faults in ``fusedattn/``: what the operation means, and the budget that judges it."""

from tests.mutation.fault import Fault
from tests.mutation.suites import FINITE, LARGEST

MASK_PARTS = "fusedattn/mask_parts.py"
MASKS, ROPE, REFERENCE = "fusedattn/mask.py", "fusedattn/rope.py", "fusedattn/reference.py"
INDICES, BIASES, DROPOUT = "fusedattn/indices.py", "fusedattn/biases.py", "fusedattn/dropout.py"
MODULES, FUSION = "fusedattn/integrations/modules.py", "fusedattn/fusion.py"
TESTING, BLOCKS = "fusedattn/testing/budget.py", "fusedattn/transformer/attention.py"
MERGE, SUMS = "fusedattn/merge.py", "fusedattn/parts.py"
GPT, LAYERS, POSITIONS = (f"fusedattn/transformer/{name}.py" for name in ("gpt", "cache", "positions"))
CHECKS, SUPPORT, SCORE_MOD = "fusedattn/call_checks.py", "fusedattn/support.py", "fusedattn/score_mod.py"
FUNCTIONS = "fusedattn/functions.py"

MASKING = "tests/public/test_masking.py"
MASK_VALUES = "tests/public/test_masks.py"
EAGER = "tests/public/test_reference.py"
ROTARY = "tests/public/test_rope.py"
ERRORS = "tests/public/test_errors.py"
ORACLE = "tests/public/test_float64.py"
BUDGET = "tests/public/test_testing.py"
FUSING = "tests/transformer/test_modules.py"
TRANSFORMER = "tests/transformer/test_transformer_attention.py"
CACHED = "tests/transformer/test_gpt_cache.py"
PARTS = "tests/public/test_merge.py -k 'not budget'"

# fmt: off
MEANING = (
    Fault(MASKS, "return max(lower) if lower else None, min(upper)", "return max(lower) if lower else None, max(upper)", "two causal alignments: the weaker wins", MASK_VALUES),
    Fault(MASKS, "return max(lower) if lower", "return min(lower) if lower", "two windows: the wider wins", MASK_VALUES),
    Fault(MASKS, "return seqlen_k - seqlen_q if align", "return seqlen_q - seqlen_k if align", "bottom-right the wrong way round", MASK_VALUES),
    Fault(MASKS, "j <= i + (shifts[band.align] + band.right)", "j < i + (shifts[band.align] + band.right)", "dense: a query does not see itself", MASK_VALUES),
    Fault(MASKS, "j >= i + (shifts[band.align] - band.left)", "j > i + (shifts[band.align] - band.left)", "dense: a window is one key too short", MASK_VALUES),
    Fault(MASKS, "allowed.append(indices.part_of(self.valid", "allowed.append(~indices.part_of(self.valid", "dense: polarity of padding", MASK_VALUES),
    Fault(MASKS, "allowed.append(indices.part_of(self.allowed", "allowed.append(~indices.part_of(self.allowed", "dense: polarity", MASK_VALUES),
    Fault(MASKS, "(behind | (j < ", "(behind & (j < ", "dense: a prefix hides", MASK_VALUES),
    Fault(MASKS, "(ids_q == ids_k)", "(ids_q >= ids_k)", "dense: later documents see earlier ones", MASK_VALUES),
    Fault(MASK_PARTS, "q_index // self.block_q", "q_index // self.block_k", "dense: blocks of queries as long as those of keys", MASK_VALUES),
    Fault(MASKS, "return a & b", "return a | b", "two masks: either suffices", MASK_VALUES),
    Fault(MASKS, "torch.minimum(", "torch.maximum(", "two prefixes: the longer wins", MASK_VALUES),
    Fault(MASKS, "Layout(first & second,", "Layout(first | second,", "two layouts: either suffices", MASK_VALUES),
    Fault(MASKS, "bands=self.bands | other.bands", "bands=self.bands & other.bands", "bands lost when combined", MASK_VALUES),
    Fault(MASKS, "change(documents.k)", "change(documents.q)", "documents of the queries for those of the keys, on another device", MASK_VALUES),
    Fault(INDICES, "torch.arange(shard.first_batch, shard.first_batch + batch, device=device)", "torch.arange(shard.first_batch, shard.first_batch + 1, device=device)", "functions: one batch for all", MASK_VALUES),
    Fault(BIASES, "[None, None] - shift", "[None, None]", "distances as if the first query stood at the first key", "tests/public/test_biases.py"),
    Fault(BIASES, "* distance.abs()", "* (-distance)", "alibi: keys ahead get a reward", "tests/public/test_biases.py"),
    Fault(BIASES, "distance.clamp(-limit, limit) + limit", "distance.clamp(-limit, limit - 1) + limit", "relative: the last column is never read", "tests/public/test_biases.py"),
    Fault(BIASES, ".clamp(-limit, limit) + limit]", ".clamp(-wider, limit) + limit]", "two tables: the narrower is not continued", "tests/public/test_biases.py"),
    Fault(BIASES, "buckets * (distance > 0)", "buckets * (distance < 0)", "t5: past and future exchanged", "tests/public/test_biases.py"),
    Fault(BIASES, "for h in range(1, 2 * (nheads - lower), 2)", "for h in range(2, 2 * (nheads - lower) + 1, 2)", "slopes: the even ones of the next power of two", "tests/public/test_biases.py"),
    Fault(DROPOUT, "_ROUNDS = 10", "_ROUNDS = 7", "Philox of 7 rounds", "tests/public/test_dropout.py"),
    Fault(DROPOUT, "((word >= threshold)", "((word > threshold)", "a word on the threshold is dropped", "tests/public/test_dropout.py"),
    Fault(DROPOUT, "second, first) >= int(", "second, first) > int(", "a word on the threshold is dropped from a part", "tests/public/test_dropout.py"),
    Fault(DROPOUT, "torch.arange(shard.first_batch, shard.first_batch + batch,", "torch.arange(batch,", "a part of the batches draws as the first ones", "tests/public/test_dropout.py"),
    Fault(DROPOUT, "part.start - first * size", "0", "dropout: a part of the rows or keys draws as those before it", "tests/public/test_dropout.py"),
    Fault(DROPOUT, "in ((a, b), (c, d))", "in ((a, c), (b, d))", "dropout: words of queries and keys exchanged", "tests/public/test_dropout.py"),
    Fault(SCORE_MOD, "q_index = indices.select(n_rows, rows,", "q_index = indices.select(n_rows, None,", "score function: a part of the queries counted from 0", EAGER),
    Fault(SCORE_MOD, "*indices.of_scores(batch, nheads, q_index, k_index, shard)", "*indices.of_scores(batch, nheads, q_index, k_index)", "score function: a part of the batches counted from 0", "tests/public/test_reference.py -k keeps_their_numbers"),
    Fault(FUNCTIONS, "#{_NAMES[of_source]}", "", "functions: two of one name under one key", MASK_VALUES),
    Fault(ROPE, "angles = positions[:, None] * theta**-exponents", "angles = positions[:, None] * theta**exponents", "frequencies inverted", ROTARY),
    Fault(ROPE, "torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim", "torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim", "frequencies in float32", ROTARY),
    Fault(ROPE, "torch.stack((a * cos - b * sin, b * cos + a * sin)", "torch.stack((a * cos + b * sin, b * cos - a * sin)", "eager rope, interleaved: turns backwards", ORACLE),
    Fault(ROPE, "torch.cat((a * cos - b * sin, b * cos + a * sin)", "torch.cat((a * cos + b * sin, b * cos - a * sin)", "eager rope: turns backwards", ORACLE),
    Fault(ROPE, "positions_q = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=q.device)", "positions_q = torch.arange(seqlen_q, device=q.device)", "eager rope: queries count from 0", ROTARY),
    Fault(ROPE, "return rows.masked_fill(~inside[..., None], torch.nan)", "return rows.masked_fill(~inside[..., None], 1.0)", "eager rope: a position outside the table", MASKING),
    Fault(ROPE, "low < 0 or high >= self.n_positions", "low < 0 or high > self.n_positions", "one position beyond the tables is allowed", ROTARY),
    Fault(REFERENCE, "scores = products(q, k) * scale", "scores = products(q, k)", "reference: scale dropped", ORACLE),
    Fault(REFERENCE, "k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)", "k, v = k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)", "reference: wrong KV head", ORACLE),
    Fault(REFERENCE, "scores = scores.masked_fill(~visible, -math.inf)", "scores = scores.masked_fill(~visible, 0.0)", "reference: hidden scores are 0", ORACLE),
    Fault(REFERENCE, "weights.masked_fill(~visible | unseen, 0.0)", "weights.masked_fill(~visible, 0.0)", "reference: weights of a row of scores of -inf", EAGER),
    Fault(REFERENCE, "weights.masked_fill(~visible | unseen, 0.0)", "weights.masked_fill(unseen, 0.0)", "reference: a NaN row reaches keys that it does not see", EAGER),
    Fault(REFERENCE, "_softmax(scores.masked_fill(unseen, 0.0), unseen, sinks)", "_softmax(scores, unseen, sinks)", "reference: gradients of a row of scores of -inf", EAGER),
    Fault(REFERENCE, "visible).masked_fill(unseen, 0.0)", "visible).masked_fill(blind, 0.0)", "reference: a row of scores of -inf sees a NaN value", EAGER),
    Fault(REFERENCE, "        scores = scores.masked_fill(~visible, 0.0)  # the", "        pass  # the", "reference: softcap of a hidden NaN", EAGER),
    Fault(REFERENCE, "return largest.masked_fill(largest == math.inf, math.nan).detach()", "return largest.detach()", "reference: an infinite score is the largest", LARGEST),
    Fault(REFERENCE, "return largest.masked_fill(largest == math.inf, math.nan).detach()", "return largest.masked_fill(largest == math.inf, math.nan)", "reference: the largest score has a tangent", LARGEST),
    Fault(REFERENCE, "scores = ((q @ k.mT) * scale)", "scores = (q @ k.mT)", "reference: the largest score is not scaled", LARGEST),
    Fault(REFERENCE, "scores = softcap * torch.tanh", "scores = torch.tanh", "reference: softcap without its height", ORACLE),
    Fault(REFERENCE, "torch.where(unseen[..., 0], sink[..., 0], logsumexp(scores))", "logsumexp(scores)", "reference: a sink beside rows that see nothing", EAGER),
    Fault(REFERENCE, "return torch.where(large, largest[..., 0] + shifted.exp().sum(dim=-1).log(), lse)", "return lse", "reference: the gradient of lse by its value", FINITE),
    Fault(REFERENCE, " / (1.0 - dropout_p))", ")", "reference: what dropout keeps does not grow", ORACLE),
    Fault(REFERENCE, "unseen, 0.0), lse, weights.to(q.dtype)", "unseen, 0.0), lse, kept.to(q.dtype)", "reference: weights after dropout", EAGER),
    Fault(REFERENCE, "    q = q.masked_fill(blind, 0.0)  # not even a NaN of such a query goes anywhere\n", "", "reference: NaN of a row that sees nothing", MASKING),
    Fault(REFERENCE, "scores = q @ zeroed(k, poisoned[..., None]).mT", "scores = q @ k.masked_fill(poisoned[..., None], 0.0).mT", "reference: a NaN key has no gradient", "tests/public/test_masking.py -k 'reaches and torch'"),
    Fault(REFERENCE, "out = weights @ zeroed(v, poisoned)", "out = weights @ v.masked_fill(poisoned, 0.0)", "reference: a NaN value has no gradient", "tests/public/test_fuzz.py -k 'contract and not drawn'"),
    Fault(REFERENCE, "nan = (weights * torch", "nan = (weights.detach() * torch", "reference: a NaN value is lost in dq", "tests/public/test_masking.py -k 'reaches and torch'"),
    Fault(REFERENCE, "return scores + torch.zeros_like(scores[..., :1, :])", "return torch.zeros_like(scores)", "reference: scores beside a NaN key are lost", "tests/public/test_masking.py -k 'reaches and torch'"),
)

OTHERS = (
    Fault(MODULES, "            scale=self.scale,\n", "", "fuse: scale dropped", FUSING, nth=0),
    Fault(MODULES, "            scale=self.scale,\n", "", "fuse: scale dropped with a cache", CACHED, nth=1),
    Fault(MODULES, "            mask=mask,\n            rope=rope,\n            qk_norm=qk_norm,\n            scale", "            mask=None,\n            rope=rope,\n            qk_norm=qk_norm,\n            scale", "fuse: mask dropped", FUSING),
    Fault(MODULES, "self.dropout_p if self.training else 0.0", "0.0", "fuse: dropout silently off", FUSING, nth=0),
    Fault(MODULES, "self.dropout_p if self.training else 0.0", "0.0", "fuse: dropout silently off with a cache", CACHED, nth=1),
    Fault(FUSION, 'if "forward" in module.__dict__', 'if "forwards" in module.__dict__', "fuse: a replaced forward is lost", FUSING),
    Fault(MODULES, "            backend=self.backend,\n", "", "fuse: backend ignored", FUSING, nth=0),
    Fault(MODULES, "            backend=self.backend,\n", "", "fuse: backend ignored with a cache", CACHED, nth=1),
    Fault(MODULES, "counted=True", "counted=False", "fuse: every layer counts the new tokens", CACHED),
    Fault(BLOCKS, "torch.full_like(cache.lengths, n), cache.kept()", "torch.full_like(cache.lengths, n), cache.lengths", "reference Transformer: a ring by the tokens that it dropped", CACHED),
    Fault(BLOCKS, "seen & exists[:, None, None]", "seen", "reference Transformer: slots behind the last token are seen", CACHED),
    Fault(BLOCKS, "(cache.lengths - n)[:, None] + torch.arange(n", "(cache.lengths - n)[:1, None] + torch.arange(n", "reference Transformer: queries rotated as in the first sequence", CACHED),
    Fault(BLOCKS, "    if got != allowed:\n", "    if got is None and allowed:\n", "reference Transformer: a cache that rotates otherwise", CACHED),
    Fault(POSITIONS, ".masked_fill(~inside[..., None], torch.nan)", "", "reference Transformer: a position outside the table", CACHED),
    Fault(GPT, "self.positions(x, 0 if cache is None else cache.lengths)", "self.positions(x, 0 if cache is None else cache.lengths[:1].expand(batch))", "reference Transformer: positions of the first sequence", CACHED),
    Fault(LAYERS, "            self.lengths.sub_(n)\n", "", "reference Transformer: tokens counted that no layer has", CACHED),
    Fault(LAYERS, "layer.k[own]", "layer.k[: lengths.shape[0]]", "reference Transformer: a part of a cache in the first rows", CACHED),
    Fault(BLOCKS, "k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))", "k, v = (x.repeat(1, heads // kv_heads, 1, 1) for x in (k, v))", "reference Transformer: wrong KV head", TRANSFORMER),
    Fault(BLOCKS, "scores.softmax(dim=-1).masked_fill(hidden, 0.0)", "scores.softmax(dim=-1)", "reference Transformer: rows that see nothing", TRANSFORMER),
    Fault(CHECKS, "if nheads_kv == 0 or nheads_q % nheads_kv:", "if nheads_kv == 0:", "heads that do not divide are not refused", ERRORS),
    Fault(CHECKS, "if nheads_kv != nheads_v or seqlen_k != seqlen_v:", "if False:", "lengths of k and v that differ are not refused", ERRORS),
    Fault(CHECKS, "if not lowest <= x <= highest:", "if x < lowest or x > highest:", "a scale of NaN is not refused", ERRORS),
    Fault(CHECKS, "stops_k.shape != stops_q.shape", "stops_k.dim() != stops_q.dim()", "packed: more sequences of keys than of queries are not refused", ERRORS),
    Fault(CHECKS, "if max(lengths, default=0) > longest:", "if min(lengths, default=0) > longest:", "packed: a sequence that is too long is not refused", ERRORS),
    Fault(CHECKS, "stops[-1] > total", "stops[-1] > total + 1", "packed: a sequence beyond the last row is not refused", ERRORS),
    Fault(CHECKS, "if tuple(sinks.shape) != (q.shape[1],):", "if sinks.numel() % q.shape[1]:", "sinks for other heads are not refused", ERRORS),
    Fault(CHECKS, "if tuple(seed.shape) != (1,):", "if seed.dim() != 1:", "two seeds are not refused", ERRORS),
    Fault(SUPPORT, "if isinstance(x, Tensor) and x.requires_grad]", "if isinstance(x, Tensor) and not x.is_leaf]", "arguments of functions that want a gradient are not refused", ERRORS),
    Fault(SUPPORT, "((head_dim, most), (head_dim_v, MAX_HEAD_DIM))", "((head_dim, most),)", "values that are too wide are not refused", ERRORS),
    Fault(TESTING, "MAX_FACTOR = 1.5", "MAX_FACTOR = 15.0", "budget: largest error of ten times as much", BUDGET),
    Fault(TESTING, "MEAN_FACTOR = 1.1", "MEAN_FACTOR = 11.0", "budget: mean error of ten times as much", BUDGET),
    Fault(TESTING, "torch.stack((max_used, mean_used, row_used))", "torch.stack((max_used, mean_used))", "budget: rows are not judged", BUDGET),
    Fault(TESTING, "torch.stack((max_used, mean_used, row_used))", "torch.stack((max_used, row_used))", "budget: the mean is not judged", BUDGET),
    Fault(TESTING, "worst = torch.where(is_zero, 0.0, _ratio(row_eager, size)).max()", "worst = _ratio(row_eager, size).max()", "budget: a row that ought to be zero allows the others anything", BUDGET),
    Fault(TESTING, "floor = ulp * largest", "floor = 100 * ulp * largest", "budget: a hundred units granted", BUDGET),
    Fault(TESTING, "if not _same_kind(actual, golden).all():", "if not _same_kind(actual, golden).any():", "budget: a NaN passes", BUDGET),
)
# fmt: on

# fmt: off
JOINED = (
    Fault(SUMS, ".to(weights.dtype).masked_fill(is_hidden[..., None], 0.0)", ".to(weights.dtype)", "merge: NaN of a part that sees nothing", PARTS),
    Fault(SUMS, "(lses - largest).masked_fill(hidden, 0.0).exp().masked_fill(hidden, 0.0)", "(lses - largest).masked_fill(hidden, 0.0).exp()", "merge: a part that sees nothing has the weight of the largest", PARTS),
    Fault(SUMS, "(lses - largest).masked_fill(hidden, 0.0).exp().masked_fill(hidden, 0.0)", "(lses - largest).exp()", "merge: what comes back NaN reaches an lse of -inf", PARTS),
    Fault(SUMS, "terms.sum(dim=0).masked_fill(hidden.all(dim=0), 1.0)", "terms.sum(dim=0)", "merge: 0 divided by 0", PARTS),
    Fault(SUMS, "return terms / total, largest", "return (lses - (largest + total.log())).exp(), largest", "merge: weights by the value of lse", PARTS),
    Fault(SUMS, "out = out + weight[..., None] * x.to(weights.dtype)", "out = out + weight[..., None].to(x.dtype) * x", "merge: weights rounded to 16 bits", PARTS),
    Fault(SUMS, "hidden.all(dim=0)", "hidden.any(dim=0)", "merge: a row that one part does not see", PARTS),
    Fault(SUMS, "lses.detach().amax", "lses.detach().amin", "merge: weights relative to the least", PARTS),
    Fault(MERGE, "if len(lses) != len(outs):", "if len(lses) > len(outs):", "merge: fewer lses are not refused", PARTS),
)
# fmt: on

FAULTS = (*MEANING, *JOINED, *OTHERS)
