"""Faults in ``fusedattn/``: the operation, what it means, and the budget that judges it."""

from tests.mutation.fault import Fault

OP, MASKS, ROPE, REFERENCE = (
    "fusedattn/attention.py",
    "fusedattn/masks.py",
    "fusedattn/rope.py",
    "fusedattn/reference.py",
)
SDPA, MODULES, TESTING = "fusedattn/sdpa.py", "fusedattn/modules.py", "fusedattn/testing.py"
CHECKS, SUPPORT, CONFIGS = "fusedattn/checks.py", "fusedattn/support.py", "kernels/configs.py"
BLOCKS = "fusedattn/transformer/attention.py"

ATTENTION = "tests/test_attention.py -k lse"
MASKING = "tests/test_masking.py"
ROTARY = "tests/test_rope.py"
ERRORS = "tests/test_errors.py"
COMMON = "tests/test_attention.py -k common"
STRIDES = "tests/test_strides.py"
TORCH = "tests/test_attention.py -k torch"
ORACLE = "tests/test_float64.py"
BUDGET = "tests/test_testing.py"
FUSING = "tests/test_modules.py"
LARGE = "tests/test_large_tensors.py"
TRANSFORMER = "tests/test_transformer_attention.py"

# fmt: off
OPERATION = (
    Fault(OP, "(x.stride(3) == 1 or x.shape[3] == 1) and x.stride(2) <= MAX_ROW_STRIDE", "x.stride(3) == 1 or x.shape[3] == 1", "rows too far apart for int32 are not copied", LARGE),
    Fault(OP, "unfit = sdpa.rows_overlap(x) or x.stride(2) > MAX_ROW_STRIDE", "unfit = x.stride(2) > MAX_ROW_STRIDE", "outputs whose rows overlap", STRIDES),
    Fault(OP, "unfit = sdpa.rows_overlap(x) or x.stride(2) > MAX_ROW_STRIDE", "unfit = sdpa.rows_overlap(x)", "outputs whose rows are too far apart for int32", LARGE),
    Fault(OP, "allowed.contiguous() if allowed.shape[3] <= MAX_ROW_STRIDE else allowed.mT.contiguous().mT", "allowed.contiguous()", "boolean masks whose rows are too long for int32", LARGE),
    Fault(OP, "if rest.numel() and rest.stride() != out.stride():", "if rest.numel() and rest.shape != out.shape:", "rest in another layout than out", "tests/test_strides.py -k come_back"),
    Fault(OP, 'allowed = torch.get_float32_matmul_precision() != "highest"', 'allowed = torch.get_float32_matmul_precision() == "highest"', "TF32 where it was not allowed", "tests/test_attention.py -k precision"),
    Fault(OP, "rotation_q = _rotation(cos, sin, positions_q, k.shape[2] - q.shape[2], interleaved)", "rotation_q = _rotation(cos, sin, positions_q, 0, interleaved)", "forward: queries count from 0", "tests/test_gradcheck.py -k 'of_a_pair and rope and queries'", nth=0),
    Fault(OP, "rotation_q = _rotation(cos, sin, positions_q, k.shape[2] - q.shape[2], interleaved)", "rotation_q = _rotation(cos, sin, positions_q, 0, interleaved)", "backward: queries count from 0", "tests/test_gradcheck.py -k 'of_a_pair and rope and queries'", nth=1),
    Fault(OP, "q, k = rotated(q, rotation_q), rotated(k, rotation_k)", "q, k = rotated(q, rotation_q), rotated(k, rotation_q)", "backward: keys at the positions of queries", "tests/test_gradcheck.py -k 'of_a_feature and positions'"),
    Fault(OP, "if out.numel() == 0 or k.numel() == 0:", "if out.numel() == 0:", "backward: no keys", "tests/test_masking.py -k nothing_there",
          equivalent="the kernels then run over no keys and give the same zeros; the shortcut saves launches"),
    Fault(OP, "dlse = None if dlse is None else dlse.contiguous()", "pass", "strides of the gradient of lse", STRIDES),
    Fault(OP, "            dout = torch.zeros_like(out)\n", "            dout = torch.ones_like(out)\n", "no gradient of out is taken for ones", ATTENTION),
    Fault(OP, "needs_dq, needs_dk or needs_dv\n", "needs_dq, needs_dk\n", "no gradient of v without that of k", "tests/test_attention.py -k gradients_of_some"),
    Fault(OP, "dv if needs_dv else None, *nones)", "dk if needs_dv else None, *nones)", "dk for dv", "tests/test_gradcheck.py -k of_a_feature"),
    Fault(OP, "torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),", "False,", "no rest kept for the backward", COMMON),
    Fault(OP, "torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),", "True,", "rest kept without a backward", "tests/test_attention.py -k kept"),
    Fault(OP, "diagonal is not None,\n        0 if", "bool(diagonal),\n        0 if", "a causal mask on the main diagonal is dropped", "tests/test_attention.py -k 'test_budget and causal'"),
    Fault(OP, "(-q, -scale) if scale < 0", "(q, -scale) if scale < 0", "sign of a negative scale", "tests/test_attention.py -k scales"),
    Fault(OP, "else (q * 0.0, torch", "else (q, torch", "a scale of 0", "tests/test_attention.py -k scales"),
    Fault(OP, "scale = 1.0 / math.sqrt(q.shape[-1])", "scale = 1.0 / math.sqrt(k.shape[-2])", "default scale from the wrong dimension", "tests/test_attention.py -k 'test_budget and cross'"),
    Fault(OP, "        rope.check_positions()\n", "        pass\n", "positions outside the tables are not refused", ROTARY),
    Fault(OP, "ctx.save_for_backward(q, k, v, out, row_max, row_sum, rest, *tensors)", "ctx.save_for_backward(q, k, k, out, row_max, row_sum, rest, *tensors)", "k saved for v", "tests/test_gradcheck.py -k of_a_feature"),
    Fault(OP, "return x.to(torch.get_autocast_dtype(device))", "return x", "autocast ignored", "tests/test_attention.py -k autocast"),
    Fault(OP, "valid = valid.contiguous().view(torch.uint8)", "valid = valid.view(torch.uint8)", "strides of the padding mask", STRIDES),
    Fault(OP, "if keep_rest and q.dtype.itemsize == 2:", "if keep_rest and q.dtype == torch.bfloat16:", "no rest in float16", COMMON),
    Fault(CONFIGS, "return entry.dense if dense_mask else entry.streamed", "return entry.streamed", "configs of the boolean mask never used", "tests/test_codegen.py"),
    Fault(CONFIGS, "if head_dim <= largest:", "if head_dim < largest:", "config of the next head_dim", "tests/test_codegen.py"),
)

MEANING = (
    Fault(MASKS, "return min(0 if align", "return max(0 if align", "both causal alignments: the weaker wins", "tests/test_masking.py -k diagonal"),
    Fault(MASKS, 'seqlen_k - seqlen_q for align', 'seqlen_q - seqlen_k for align', "bottom-right the wrong way round", "tests/test_masking.py -k 'diagonal or dense'"),
    Fault(MASKS, "dense = dense.tril(diagonal)", "dense = dense.tril(diagonal - 1)", "dense: a query does not see itself", ORACLE),
    Fault(MASKS, "dense = dense & self.valid[:, None, None, :]", "dense = dense | self.valid[:, None, None, :]", "dense: padding adds", ORACLE),
    Fault(MASKS, "dense = dense & self.allowed", "dense = dense & ~self.allowed", "dense: polarity", ORACLE),
    Fault(MASKS, "return a & b", "return a | b", "two masks: either suffices", MASKING),
    Fault(MASKS, "causal=self.causal | other.causal", "causal=self.causal & other.causal", "causal lost when combined", MASKING),
    Fault(ROPE, "angles = positions[:, None] * theta**-exponents", "angles = positions[:, None] * theta**exponents", "frequencies inverted", ROTARY),
    Fault(ROPE, "torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim", "torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim", "frequencies in float32", ROTARY),
    Fault(ROPE, "torch.stack((a * cos - b * sin, b * cos + a * sin)", "torch.stack((a * cos + b * sin, b * cos - a * sin)", "eager rope, interleaved: turns backwards", ORACLE),
    Fault(ROPE, "torch.cat((a * cos - b * sin, b * cos + a * sin)", "torch.cat((a * cos + b * sin, b * cos - a * sin)", "eager rope: turns backwards", ORACLE),
    Fault(ROPE, "positions_q = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=q.device)", "positions_q = torch.arange(seqlen_q, device=q.device)", "eager rope: queries count from 0", ROTARY),
    Fault(ROPE, "return rows.masked_fill(~inside[..., None], torch.nan)", "return rows.masked_fill(~inside[..., None], 1.0)", "eager rope: a position outside the table", MASKING),
    Fault(ROPE, "low < 0 or high >= self.n_positions", "low < 0 or high > self.n_positions", "one position beyond the tables is allowed", ROTARY),
    Fault(REFERENCE, "scores = _scores(q, k) * scale", "scores = _scores(q, k)", "reference: scale dropped", ORACLE),
    Fault(REFERENCE, "k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)", "k, v = k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)", "reference: wrong KV head", ORACLE),
    Fault(REFERENCE, "scores = scores.masked_fill(~visible, -math.inf)", "scores = scores.masked_fill(~visible, 0.0)", "reference: hidden scores are 0", ORACLE),
    Fault(REFERENCE, "hidden = ~visible | (lse == -math.inf)[..., None]", "hidden = ~visible", "reference: NaN where nothing is visible", "tests/test_masking.py -k minus_infinity"),
    Fault(REFERENCE, "    q = q.masked_fill(blind, 0.0)  # not even a NaN of such a query goes anywhere\n", "", "reference: NaN of a row that sees nothing", MASKING),
    Fault(REFERENCE, "scores = q @ _Zeroed.apply(k, poisoned[..., None]).mT", "scores = q @ k.masked_fill(poisoned[..., None], 0.0).mT", "reference: a NaN key has no gradient", "tests/test_masking.py -k 'reaches and torch'"),
    Fault(REFERENCE, "out = weights @ _Zeroed.apply(v, poisoned)", "out = weights @ v.masked_fill(poisoned, 0.0)", "reference: a NaN value has no gradient", "tests/test_fuzz.py -k 'contract and not drawn'"),
    Fault(REFERENCE, "nan = (weights * torch", "nan = (weights.detach() * torch", "reference: a NaN value is lost in dq", "tests/test_masking.py -k 'reaches and torch'"),
    Fault(REFERENCE, "return scores + torch.zeros_like(scores[..., :1, :])", "return torch.zeros_like(scores)", "reference: scores beside a NaN key are lost", "tests/test_masking.py -k 'reaches and torch'"),
)

OTHERS = (
    Fault(SDPA, "diagonal in (None, 0)", "diagonal is None or diagonal >= 0", "torch backend: top-left for bottom-right", TORCH),
    Fault(SDPA, "attn_mask=visible | empty", "attn_mask=visible", "torch backend: NaN where nothing is visible", "tests/test_masking.py -k any_kernel"),
    Fault(SDPA, "return out.masked_fill(empty, 0.0)", "return out", "torch backend: a number where nothing is visible", "tests/test_masking.py -k 'see_nothing and torch'"),
    Fault(SDPA, "return x.contiguous() if rows_overlap(x) else x", "return x", "torch backend: rows that overlap", STRIDES),
    Fault(SDPA, "0 < stride < x.shape[3]", "0 <= stride < x.shape[3]", "rows that are expanded count as overlapping", "tests/test_strides.py -k share"),
    Fault(SDPA, "return all(bool(torch.isfinite(bound)) for x in tensors", "return True or all(bool(torch.isfinite(bound)) for x in tensors", "torch backend: 0 times a hidden NaN", MASKING),
    Fault(MODULES, "            scale=self.scale,\n", "", "fuse: scale dropped", FUSING),
    Fault(MODULES, "            mask=mask,\n            rope=rope,\n            scale", "            mask=None,\n            rope=rope,\n            scale", "fuse: mask dropped", FUSING),
    Fault(MODULES, "self.dropout_p if self.training else 0.0", "0.0", "fuse: dropout silently off", FUSING),
    Fault(MODULES, 'elif "forward" in module.__dict__:', 'elif "forwards" in module.__dict__:', "fuse: a replaced forward is lost", FUSING),
    Fault(MODULES, "            backend=self.backend,\n", "", "fuse: backend ignored", FUSING),
    Fault(BLOCKS, "k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))", "k, v = (x.repeat(1, heads // kv_heads, 1, 1) for x in (k, v))", "reference Transformer: wrong KV head", TRANSFORMER),
    Fault(BLOCKS, "scores.softmax(dim=-1).masked_fill(hidden, 0.0)", "scores.softmax(dim=-1)", "reference Transformer: rows that see nothing", TRANSFORMER),
    Fault(CHECKS, "if nheads_kv == 0 or nheads_q % nheads_kv:", "if nheads_kv == 0:", "heads that do not divide are not refused", ERRORS),
    Fault(CHECKS, "if k.shape[1:3] != v.shape[1:3]:", "if False:", "lengths of k and v that differ are not refused", ERRORS),
    Fault(CHECKS, "if not lowest <= x <= highest:", "if x < lowest or x > highest:", "a scale of NaN is not refused", ERRORS),
    Fault(SUPPORT, "    if dropout_p:\n", "    if dropout_p > 0.9:\n", "dropout silently off", ERRORS),
    Fault(SUPPORT, "    if softcap is not None:\n", "    if softcap is not None and softcap < 0:\n", "softcap silently off", ERRORS),
    Fault(SUPPORT, "    if bias is not None:\n", "    if bias is not None and bias.dim() > 4:\n", "bias silently off", ERRORS),
    Fault(TESTING, "MAX_FACTOR = 1.5", "MAX_FACTOR = 15.0", "budget: largest error of ten times as much", BUDGET),
    Fault(TESTING, "MEAN_FACTOR = 1.1", "MEAN_FACTOR = 11.0", "budget: mean error of ten times as much", BUDGET),
    Fault(TESTING, "torch.stack((max_used, mean_used, row_used))", "torch.stack((max_used, mean_used))", "budget: rows are not judged", BUDGET),
    Fault(TESTING, "torch.stack((max_used, mean_used, row_used))", "torch.stack((max_used, row_used))", "budget: the mean is not judged", BUDGET),
    Fault(TESTING, "worst = torch.where(is_zero, 0.0, _ratio(row_eager, size)).max()", "worst = _ratio(row_eager, size).max()", "budget: a row that ought to be zero allows the others anything", BUDGET),
    Fault(TESTING, "floor = ulp * largest", "floor = 100 * ulp * largest", "budget: a hundred units granted", BUDGET),
    Fault(TESTING, "if not _same_kind(actual, golden).all():", "if not _same_kind(actual, golden).any():", "budget: a NaN passes", BUDGET),
)
# fmt: on

FAULTS = (*OPERATION, *MEANING, *OTHERS)
