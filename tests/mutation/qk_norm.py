"""Faults in the normalisation of q and k."""

from tests.mutation.fault import Fault

NORM, PROLOGUE, FWD = "kernels/qk_norm.py", "kernels/prologue.py", "kernels/attention_fwd.py"
VALUE, REFERENCE, LAUNCHING = "fusedattn/qk_norm.py", "fusedattn/reference.py", "fusedattn/backends/triton/launching.py"
OPERANDS, SUPPORT = "fusedattn/backends/triton/operands.py", "fusedattn/support.py"
AUTOGRAD, CHECKS = "fusedattn/backends/triton/autograd.py", "fusedattn/call_checks.py"
BACKENDS, WEIGHTS = "fusedattn/backends/__init__.py", "fusedattn/weights.py"
ATTENTION, MODULES = "fusedattn/transformer/attention.py", "fusedattn/integrations/modules.py"
OF_MODEL, CONTEXT = "fusedattn/transformer/qk_norm.py", "fusedattn/distributed/context.py"
DTENSOR, OF_PROCESS = "fusedattn/distributed/dtensor.py", "fusedattn/distributed/checks.py"
TRANSFORMERS = "fusedattn/integrations/transformers/norms.py"

_TESTS = "tests/public/test_qk_norm.py"
ACCURACY = f"{_TESTS} -k test_accuracy"
PARTS = f"{_TESTS} -k walks_over"
SHAPES = f"{_TESTS} -k weights_of_any_shape"
NEEDED = f"{_TESTS} -k need_a_gradient"
HIDDEN = f"{_TESTS} -k behind_the_mask"
SEEN = f"{_TESTS} -k is_seen"
SIZES = f"{_TESTS} -k large_and_small"
STRIDES = f"{_TESTS} -k 'strides or any_shape'"
PACKED = f"{_TESTS} -k packed"
DEFINITION = f"{_TESTS} -k the_definition"
REFUSED = f"{_TESTS} -k refused"
CACHED = f"{_TESTS} -k cache"
COPIED = f"{_TESTS} -k copied"
SECOND = f"{_TESTS} -k second"
MODEL = "tests/transformer/test_transformer_qk_norm.py"
IN_CONTEXT = "tests/distributed/test_context.py -k 'torch and ring and norm'"
ON_DTENSORS = "tests/distributed/test_dtensor.py -k 'torch and norm'"
IN_TRANSFORMERS = "tests/integrations/test_transformers.py -k 'norm_inside or norm_that_was or the_rotation_inside'"

# fmt: off
FAULTS = (
    Fault(NORM, "squares * norm.share + norm.eps", "squares * norm.share", "norm: no eps", f"{_TESTS} -k 'zeros or small'"),
    Fault(NORM, "overflow = ~(squares < float(\"inf\"))", "overflow = squares > float(\"inf\")", "norm: squares that overflow make 0", SIZES),
    Fault(NORM, "above = tl.where(overflow, SMALL, 1.0)", "above = 1.0", "norm: a row with large numbers grows", SIZES),
    Fault(NORM, "return tl.load(of_batch + rows, mask=exist, other=0.0)", "return tl.load(of_batch, mask=exist, other=0.0)", "norm across heads: the factor of one token for all", ACCURACY),
    Fault(NORM, "tl.cast(batch, tl.int64) * norm.stride_rb + first", "first", "norm across heads: factors of the first batch", ACCURACY),
    Fault(NORM, "norm.stride_rb + first\n", "norm.stride_rb\n", "norm across heads: factors of the first sequence", PACKED),
    Fault(NORM, "of_head = norm.weight_ptr + tl.cast(head, tl.int64) * norm.stride_wh", "of_head = norm.weight_ptr", "norm: weights of the first head", ACCURACY),
    Fault(NORM, "of_head + offs_d * norm.stride_wd", "of_head + offs_d", "norm: weights are taken as contiguous", STRIDES),
    Fault(NORM, "        y = y * load_weights(norm, head, HEAD_DIM, BLOCK_D, ACC)[None, :]\n", "        y = y\n", "norm: no weights", ACCURACY),
    Fault(NORM, "tl.where(g != 0.0, g * (widen(x, ACC) * r[:, None]), 0.0)", "g * (widen(x, ACC) * r[:, None])", "norm: a hidden NaN reaches the weights", HIDDEN),
    Fault(NORM, "        g = g * weight\n", "", "norm: gradient without the weight", ACCURACY),
    Fault(NORM, "        terms = terms * weight\n", "", "norm: projection without the weight", ACCURACY),
    Fault(NORM, "c = tl.sum(terms, 1) * norm.share", "c = tl.sum(terms, 1)", "norm: projection of a sum, not of a mean", ACCURACY),
    Fault(NORM, "has_gradient = (g != 0.0) | (c != 0.0)[:, None]", "has_gradient = (g == g)", "norm: a hidden NaN gets a gradient", HIDDEN),
    Fault(NORM, "has_gradient = (g != 0.0) | (c != 0.0)[:, None]", "has_gradient = g != 0.0", "norm across heads: no projection in heads without gradient", f"{_TESTS} -k one_head_alone"),
    Fault(NORM, "(g - widen(x, ACC) * r[:, None] * c[:, None])", "(g + widen(x, ACC) * r[:, None] * c[:, None])", "norm: projection added", ACCURACY),
    Fault(NORM, "n = head_dim * (nheads if self.across_heads else 1) if self.of_mean else 1", "n = head_dim if self.of_mean else 1", "norm across heads: the sum of head means", ACCURACY),
    Fault(NORM, "if self.of_mean else 1\n", "\n", "norm of length: of the mean", ACCURACY),
    Fault(NORM, "strides = 0 if shape[0] == 1 else of_weight[0], 0 if shape[1] == 1 else of_weight[1]", "strides = of_weight[0], 0 if shape[1] == 1 else of_weight[1]", "norm: shared weights read as one row per head", ACCURACY),
    Fault(NORM, "0 if shape[1] == 1 else of_weight[1]", "of_weight[1]", "norm: a learned scale read as one number per feature", ACCURACY),
    Fault(NORM, "return self.weight is not None and self.weight.shape[0] > 1", "return False", "norm: weights of the first head for all heads of a tile", f"{_TESTS} -k 'test_accuracy and shape1'"),
    Fault(PROLOGUE, "        return place.first_k, place.seqlen_k\n", "        return place.first_q, place.seqlen_k\n", "prologue: keys from where the queries begin", "tests/public/test_rope.py -k packed_sequences"),
    Fault(PROLOGUE, "g = rotate_tile(g, rotation, place, start, n_positions, BLOCK, BLOCK_D, ACC, OF_QUERIES, TRANSPOSE=True)", "g = rotate_tile(g, rotation, place, start, n_positions, BLOCK, BLOCK_D, ACC, OF_QUERIES, TRANSPOSE=False)", "norm: gradient rotated forward", ACCURACY),
    Fault(PROLOGUE, "tl.range(part * BLOCK, seqlen, n_parts * BLOCK, num_stages=1)", "tl.range(part * BLOCK, tl.minimum(seqlen, (part + 1) * BLOCK), n_parts * BLOCK, num_stages=1)", "norm: one tile of each part", PARTS),
    Fault(PROLOGUE, "        dweight += tl.sum(terms, 0)\n", "        dweight = tl.sum(terms, 0)\n", "norm: the weights get the last tile alone", PARTS),
    Fault(PROLOGUE, "of_part = (tl.cast(sequence, tl.int64) * n_parts + part) * nheads + head", "of_part = part * nheads + head", "norm: the weights get one sequence alone", ACCURACY),
    Fault(PROLOGUE, "            total += squares\n", "            total = squares\n", "norm across heads: the last head alone", ACCURACY),
    Fault(PROLOGUE, "            small += small_squares\n", "            small = small_squares\n", "norm across heads: of large numbers, the last head alone", SIZES),
    Fault(PROLOGUE, "            total += tl.sum(terms, 1)\n", "            total = tl.sum(terms, 1)\n", "norm across heads: projection on the last head", ACCURACY),
    Fault(PROLOGUE, "                terms = terms * load_weights(norm, head, HEAD_DIM, BLOCK_D, ACC)[None, :]\n", "                terms = terms\n", "norm across heads: projection without weights", ACCURACY),
    Fault(PROLOGUE, "        total *= norm.share\n", "        total *= 1.0\n", "norm across heads: projection of a sum", ACCURACY),
    Fault(PROLOGUE, "return dweight.sum(0).sum_to_size(self.norm.weight.shape)", "return dweight[0].sum_to_size(self.norm.weight.shape)", "norm: the weights get the first part alone", ACCURACY),
    Fault(PROLOGUE, "n_parts = max(1, min(n_tiles, PARTS // n_sequences))", "n_parts = min(n_tiles, PARTS // n_sequences)", "norm: no program if there are many sequences", f"{_TESTS} -k many_sequences"),
    Fault(FWD, "q_tile, norm_q, rows.head, place.first_q,", "q_tile, norm_q, 0, place.first_q,", "forward: weights of head 0", ACCURACY),
    Fault(FWD, "q_tile, norm_q, rows.head, place.first_q, rows.queries,", "q_tile, norm_q, rows.head, 0, rows.queries,", "forward: factors of the first sequence", PACKED),
    Fault(LAUNCHING, "norm_k = None if is_cached else _norm(k_weight, constants)", "norm_k = _norm(k_weight, constants)", "norm: keys of a cache normalised twice", CACHED),
    Fault(LAUNCHING, "        and norm_k is None\n", "", "norm: keys rotated in place are not normalised", f"{_TESTS} -k 'test_accuracy and shape1'"),
    Fault(LAUNCHING, "needs_dq, needs_dk = needed[0] or needed[7], needed[1] or needed[8]", "needs_dq, needs_dk = needed[0], needed[1]", "norm: no gradient of the weights alone", NEEDED),
    Fault(LAUNCHING, "    if not needed[0]:\n        dq = None\n", "", "norm: a gradient that nobody asked for", "tests/public/test_compile.py", equivalent="autograd ignores it, and the operator returns it in place of an empty tensor only where the fake's shape is not looked at"),
    Fault(LAUNCHING, "needs_weight=needed[i]", "needs_weight=needed[0]", "norm: the gradient of k_weight only along with that of q_weight", NEEDED),
    Fault(OPERANDS, "norm_of_mean=int(norm is not None and norm.kind == \"rms\")", "norm_of_mean=int(norm is not None)", "norm: length taken for the mean", ACCURACY),
    Fault(OPERANDS, "norm_eps=0.0 if norm is None else float(norm.eps)", "norm_eps=0.0 if norm is None else 1e-6", "norm: always the same eps", f"{_TESTS} -k each_eps"),
    Fault(AUTOGRAD, "replace(norm, q_weight=of_norm[0], k_weight=of_norm[1])", "norm", "second order: the weights are constants", SECOND),
    Fault(CHECKS, "    qk_norm.check(q, nheads_kv)\n", "", "weights that do not fit are not refused", REFUSED),
    Fault(SUPPORT, "if qk_norm is not None and q.shape[-1] > MAX_HEAD_DIM:", "if False:", "a norm of more features than a tile has is not refused", REFUSED),
    Fault(BACKENDS, "k = k if options.cache is not None else options.qk_norm.of_keys(k)", "k = k", "torch backend: keys are not normalised", ACCURACY.replace("test_accuracy", "'largest or any_shape'")),
    Fault(WEIGHTS, "        q, k = qk_norm.apply(q, k)\n", "", "weights of an attention: not normalised", f"{_TESTS} -k weights_of_an_attention"),
    Fault(VALUE, "squares.mean(dims, keepdim=True) if self.kind == \"rms\" else squares.sum(dims, keepdim=True)", "squares.mean(dims, keepdim=True)", "definition: length is the mean", DEFINITION),
    Fault(VALUE, "dims = (1, 3) if self.across_heads else (3,)", "dims = (3,)", "definition: across heads is per head", DEFINITION),
    Fault(VALUE, "torch.rsqrt(size + self.eps * factor.square())", "torch.rsqrt(size)", "definition: no eps", f"{_TESTS} -k 'zeros or definition'"),
    Fault(VALUE, "factor = torch.where(largest > 2.0**60, 2.0**-100, 1.0)", "factor = torch.where(largest > math.inf, 2.0**-100, 1.0)", "definition: squares overflow", SIZES),
    Fault(VALUE, "            wide = zeroed(wide, poisoned)\n", "", "definition: a hidden NaN reaches the weights", HIDDEN),
    Fault(VALUE, "masked_fill(poisoned, math.nan)", "masked_fill(poisoned, 0.0)", "definition: a NaN that is seen counts as 0", SEEN),
    Fault(VALUE, "if not 0.0 < self.eps < math.inf:", "if not 0.0 <= self.eps < math.inf:", "an eps of 0 is not refused", REFUSED),
    Fault(VALUE, "any(n not in (1, allowed) for n", "any(n > allowed for n", "weights of too few heads are not refused", REFUSED),
    Fault(VALUE, "self.q_weight, self.k_weight))\n        return replace", "self.k_weight, self.q_weight))\n        return replace", "mapped: weights exchanged", COPIED),
    Fault(ATTENTION, "                q, k = self.qk_norm().apply(q, k)\n", "                pass\n", "Transformer: a cache keeps keys as they are", MODEL),
    Fault(ATTENTION, "        q, k = qk_norm.apply(q, k)\n    if rope", "        pass\n    if rope", "Transformer: reference without the norm", MODEL),
    Fault(OF_MODEL, "QKNorm(self.q_weight, self.k_weight", "QKNorm(self.k_weight, self.q_weight", "Transformer: weights of queries and keys exchanged", f"{MODEL} -k formula"),
    Fault(MODULES, "            rope=rope,\n            qk_norm=qk_norm,\n", "            rope=rope,\n", "fused module: no norm", MODEL),
    Fault(CONTEXT, "replace(options, qk_norm=None)", "options", "context: normalised twice", IN_CONTEXT),
    Fault(OF_PROCESS, "(*options.qk_norm.apply(q, k), v)", "(q, k, v)", "context: not normalised", IN_CONTEXT),
    Fault(DTENSOR, "options.qk_norm.of_heads(heads, kv_heads(heads, group))", "options.qk_norm.of_heads(slice(0, n_heads), kv_heads(slice(0, n_heads), group))", "DTensors: weights of the first heads for all", ON_DTENSORS),
    Fault(DTENSOR, "q_weight=shared(norm.q_weight)", "q_weight=norm.q_weight", "DTensors: the gradient of the weights is that of one process", ON_DTENSORS),
    Fault(TRANSFORMERS, "1.0 + norm.weight.float() if isinstance(norm, Gemma3RMSNorm) else norm.weight", "norm.weight", "Gemma 3: weights less 1", IN_TRANSFORMERS),
    Fault(TRANSFORMERS, "or any(map(_is_watched, norms))", "", "hooks of a norm are not called", IN_TRANSFORMERS),
    Fault(TRANSFORMERS, "if eps != other or", "if", "two norms with an eps of their own", IN_TRANSFORMERS),
    Fault(TRANSFORMERS, "across_heads = isinstance(norms[0], ACROSS_HEADS)", "across_heads = False", "OLMo: norm across heads runs apart", IN_TRANSFORMERS),
)
