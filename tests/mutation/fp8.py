"""Faults in attention of e4m3 codes."""

from tests.mutation.fault import Fault

FP8, CODES, CONFIGS = "kernels/fp8.py", "kernels/fp8_codes.py", "kernels/fp8_configs.py"
FWD, MASKING, HOPPER = "kernels/attention_fwd.py", "kernels/masking.py", "kernels/hopper.py"
SUPPORT, PREPARE = "fusedattn/support.py", "fusedattn/prepare.py"
LAUNCHING, OPERANDS = "fusedattn/backends/triton/launching.py", "fusedattn/backends/triton/operands.py"
AUTOGRAD, ATTENTION, VARLEN = "fusedattn/backends/triton/autograd.py", "fusedattn/attention.py", "fusedattn/varlen.py"
CHECKS, VALUE = "fusedattn/call_checks.py", "fusedattn/fp8.py"
OF_PROCESS, DTENSOR = "fusedattn/distributed/checks.py", "fusedattn/distributed/dtensor.py"

_TESTS, _HOSTILE = "tests/public/test_fp8.py", "tests/public/test_fp8_hostile.py"
_REFUSED, _CODES = "tests/public/test_fp8_refusals.py", "tests/kernels/test_fp8_codes.py"
STEPS = f"{_TESTS} -k 'equals_its_steps and not after'"
PREPARED = f"{_TESTS} -k after_a_norm"
PACKED = f"{_TESTS} -k packed_sequences"
BEHIND = f"{_TESTS} -k behind_the_last_key"
WINDOWS = f"{_TESTS} -k 'equals_its_steps and (window or padding)'"
LAUNCHES = f"{_TESTS} -k launch"
DROPPED = f"{_TESTS} -k dropout"
DIFFERENT = f"{_HOSTILE} -k scales_that_differ"
SEEN = f"{_HOSTILE} -k 'reaches_those or behind_a_window'"
HIDDEN = f"{_HOSTILE} -k padding_hides"
ALONE = f"{_HOSTILE} -k 'head_alone or later_blocks'"
CODED = f"{_CODES} -k those_of_the_definition"
BEFORE = f"{_CODES} -k done_before"
INFINITE = f"{_CODES} -k not_finite"
SIZES = f"{_CODES} -k sizes"
HIDDEN_CODES = f"{_CODES} -k padding_hides"
OF_SEQUENCES = f"{_CODES} -k packed_sequences"
OUTSIDE = f"{_CODES} -k outside"
FAR = f"{_CODES} -k far_apart"
FITTING = f"{_REFUSED} -k configurations"
GRADIENTS = f"{_REFUSED} -k 'require_grad or known'"

# fmt: off
FAULTS = (
    Fault(FP8, "first_q = (first_q // TOKENS + place.sequence) * TOKENS", "first_q = first_q // TOKENS * TOKENS", "codes: packed queries share blocks", PACKED),
    Fault(FP8, "first_k = (first_k // TOKENS + place.sequence) * TOKENS", "first_k = first_k // TOKENS * TOKENS", "codes: packed keys share blocks", PACKED),
    Fault(FP8, "first_k = (first_k // TOKENS + place.sequence) * TOKENS", "first_k = (first_q // TOKENS + place.sequence) * TOKENS", "codes: packed keys begin where the queries do", f"{_TESTS} -k packed_sequences_are"),
    Fault(FP8, "((tl.cast(place.batch, tl.int64) * nheads + head) * n + first // TOKENS)", "(head * n + first // TOKENS)", "codes: scales of the first batch", STEPS),
    Fault(FP8, "((tl.cast(place.batch, tl.int64) * nheads + head) * n + first // TOKENS)", "((tl.cast(place.batch, tl.int64) * nheads + head) * n)", "codes: scales of the first block", CODED),
    Fault(FP8, "nheads_q, place, head, place.first_q + start_m)", "nheads_q, place, head, place.first_q)", "codes: all queries have the scale of the first block", STEPS),
    Fault(FP8, "nheads_q, place, head, place.first_q + start_m)", "nheads_q, place, head_kv, place.first_q + start_m)", "codes: queries have the scale of another head", STEPS),
    Fault(FP8, "scales.k_scale_ptr, scales.n_k, nheads_kv", "scales.k_scale_ptr, scales.n_q, nheads_kv", "codes: scales of keys lie as those of queries", f"{_HOSTILE} -k many_keys"),
    Fault(FP8, "scale_pointer(scales.v_scale_ptr,", "scale_pointer(scales.k_scale_ptr,", "codes: values have the scale of the keys", STEPS),
    Fault(FP8, "nheads_kv, place, head_kv, place.first_k),\n        tl.maximum(", "nheads_kv, place, head_kv, 0),\n        tl.maximum(", "codes: packed values have the scale of the first sequence", PACKED),
    Fault(FP8, "tl.maximum(place.seqlen_k - 1, 0) // BLOCK_N * BLOCK_N", "tl.maximum(place.seqlen_k, 0) // BLOCK_N * BLOCK_N", "codes: blocks of a mask read behind the last key", BEHIND),
    Fault(FP8, "return tl.minimum(start_n, scales.last)", "return start_n", "codes: blocks of a mask read behind the codes", BEHIND),
    Fault(FP8, "scale = scales.q * tl.load(scales.k_ptr + with_keys(scales, start_n) // TOKENS)", "scale = tl.load(scales.k_ptr + with_keys(scales, start_n) // TOKENS)", "codes: scores without the scale of the queries", STEPS),
    Fault(FP8, "tl.load(scales.k_ptr + with_keys(scales, start_n) // TOKENS)", "tl.load(scales.k_ptr)", "codes: all keys have the scale of the first block", STEPS),
    Fault(FP8, "return tl.minimum(scale, 3.4028234663852886e38)", "return scale", "codes: the product of two scales overflows", DIFFERENT),
    Fault(FP8, "return tl.load(scales.v_ptr + with_keys(scales, start_n) // TOKENS)", "return tl.load(scales.v_ptr)", "codes: all values have the scale of the first block", STEPS),
    Fault(FP8, "return tl.load(scales.v_ptr + with_keys(scales, start_n) // TOKENS)", "return tl.load(scales.v_ptr + start_n // TOKENS)", "codes: the scale of values behind the last is read", BEHIND),
    Fault(FP8, "head_base(v, place.batch, head_kv, 0) + place.first_k", "head_base(v, place.batch, head_kv, 0)", "codes: packed values of the first sequence", PACKED),
    Fault(FP8, "stride = tl.cast(v.stride_s, tl.int64)", "stride = v.stride_s", "codes: features of values further apart than int32 reaches", FAR),
    Fault(FP8, "features = tl.arange(0, BLOCK_D) < HEAD_DIM", "features = tl.arange(0, BLOCK_D) < BLOCK_D", "codes: features of values behind the last are read", f"{_TESTS} -k 'equals_its_steps and (24 or 40)'"),
    Fault(FP8, "\"e4m3\", True, tl.float32) * 256.0", "\"e4m3\", True, tl.float32) * 128.0", "codes: half of each number", STEPS),
    Fault(FP8, "    p = p * LARGEST\n", "", "codes: weights in a 448th of the codes", STEPS),
    Fault(FP8, "v_scale * (1.0 / LARGEST), acc)", "v_scale, acc)", "codes: values times 448", STEPS),
    Fault(FP8, "p = codes_of(p, \"e4m3\").to(tl.uint8)", "p = codes_of(p * 0.999, \"e4m3\").to(tl.uint8)", "codes: weights rounded down", STEPS),
    Fault(FP8, "poisoned = (bits & 0x7F) == 0x7F", "poisoned = bits == 0x7F", "codes: a NaN with a sign goes on", f"{_HOSTILE} -k reaches_those", equivalent="the quantising kernel writes NaN without a sign"),
    Fault(FP8, "tl.max(poisoned.to(tl.int32), 1) != 0", "tl.max(poisoned.to(tl.int32), 1) > 1", "codes: a NaN among the values counts as 0", SEEN),
    Fault(FP8, "bits = tl.where(poisoned, 0, bits).to(tl.int8)", "bits = bits.to(tl.int8)", "codes: a hidden NaN among the values shows", SEEN),
    Fault(CODES, "return tl.reshape(tl.permute(tl.join(a + b, a - b)", "return tl.reshape(tl.permute(tl.join(a + b, b - a)", "rotation: differences with the other sign", CODED),
    Fault(CODES, "57 * d * d + 17 * d + 97", "57 * d * d + 17 * d + 98", "rotation: other signs", CODED),
    Fault(CODES, "x = tl.where(((57 * d * d + 17 * d + 97) % 509 % 2)[None, :] != 0, -x, x)", "x = x", "rotation: no signs", CODED),
    Fault(CODES, "tl.static_range(0, _log2(N))", "tl.static_range(0, _log2(N) - 1)", "rotation: halves stay apart", CODED),
    Fault(CODES, "return divide(x, tl.full(x.shape, _sqrt(N), tl.float32))", "return x", "rotation: numbers grow", CODED),
    Fault(CODES, "y = normalize_tile(y, norm, head, first, rows, exist", "y = normalize_tile(y, norm, 0, first, rows, exist", "codes: the norm of the first head", BEFORE),
    Fault(CODES, "        y = rotate_tile(y, rotation, place, start, n_positions, ROWS, BLOCK_D, ACC, OF_QUERIES, TRANSPOSE=False)\n", "        y = rotate_tile(y, rotation, place, start, n_positions, ROWS, BLOCK_D, ACC, True, TRANSPOSE=False)\n", "codes: keys at the positions of queries", PREPARED),
    Fault(CODES, "    y = tl.where(exist[:, None], y, 0.0)\n", "", "codes: rows that padding hides are NaN where tables end", f"{_CODES} -k beyond_the_tables"),
    Fault(CODES, "return y, tl.abs(y) < float(\"inf\")", "return y, tl.abs(y) <= float(\"inf\")", "codes: an infinity is the largest number", INFINITE),
    Fault(CODES, "    block = tile * TOKENS\n", "    block = tile * ROWS\n", "codes: blocks overlap", CODED),
    Fault(CODES, "range_of_keys = KeyRange(tl.load(range_ptr), tl.load(range_ptr + 1))", "range_of_keys = KeyRange(0, tl.load(range_ptr + 1))", "codes: keys before the first valid are read", HIDDEN_CODES, equivalent="they are not valid either; only the reads are saved"),
    Fault(CODES, "keys.key_range_ptr + tl.cast(sequence, tl.int64) * 3", "keys.key_range_ptr", "codes: padding of the first sequence", HIDDEN_CODES),
    Fault(CODES, "        largest = tl.load(whole_ptr)\n", "        largest = tl.load(whole_ptr) * 0.5\n", "codes: numbers of a tensor beyond the largest code", CODED),
    Fault(CODES, "            largest = tl.maximum(largest, tl.max(tl.where(finite, tl.abs(y), 0.0)))", "            largest = tl.max(tl.where(finite, tl.abs(y), 0.0))", "codes: the scale of the last rows of a block", CODED),
    Fault(CODES, "tl.max(tl.where(finite, tl.abs(y), 0.0))", "tl.max(tl.abs(y))", "codes: an infinity makes the scale", INFINITE),
    Fault(CODES, "tl.store(largest_ptr + tl.program_id(0), largest)", "tl.store(largest_ptr + tile, largest)", "codes: the largest number of the last head", f"{_CODES} -k many_blocks"),
    Fault(CODES, "elif block < seqlen:", "elif block >= 0:", "codes: a short sequence writes into the next one", OUTSIDE),
    Fault(CODES, "scale = tl.where(scale < SMALLEST_SCALE, 0.0, scale)", "scale = scale", "codes: scales without a reciprocal", SIZES),
    Fault(CODES, "first_code, _ = rows_of_side(of_codes, OF_QUERIES)", "first_code, _ = rows_of_side(of_codes, True)", "codes: packed keys lie where the queries do", OF_SEQUENCES),
    Fault(CODES, "divisor = tl.where(scale > 0.0, scale, float(\"inf\"))", "divisor = scale", "codes: a block of zeros is NaN", INFINITE),
    Fault(CODES, "divide(y, tl.zeros_like(y) + divisor), float(\"nan\"))", "divide(y, tl.zeros_like(y) + divisor), 0.0)", "codes: what is not finite is 0", INFINITE),
    Fault(CODES, "y = tl.where(finite, divide(y, tl.zeros_like(y) + divisor), float(\"nan\"))", "y = tl.where(finite, y * (1.0 / divisor), float(\"nan\"))", "codes: numbers times a rounded reciprocal", f"{CODED} or sizes".replace("those_of_the_definition or sizes", "'those_of_the_definition or sizes'")),
    Fault(CODES, "ptrs += offs_d[:, None].to(tl.int64) * codes.stride_s", "ptrs += offs_d[:, None] * codes.stride_s", "codes: features of values written where int32 wraps", FAR),
    Fault(CODES, "mask=(offs_d < HEAD_DIM)[:, None]", "mask=(offs_d < BLOCK_D)[:, None]", "codes: features of values behind the last are written", CODED),
    Fault(CODES, "head, first_code) + tl.cast(start, tl.int64) * codes.stride_s", "head, first_code) + tl.cast(block, tl.int64) * codes.stride_s", "codes: all rows of a block in the first", CODED),
    Fault(CODES, "largest = tl.maximum(largest, tl.load(x_ptr + offs, mask=offs < n, other=0.0))", "largest = tl.load(x_ptr + offs, mask=offs < n, other=0.0)", "codes: of a tensor, the last 1024 blocks count", f"{_CODES} -k many_blocks"),
    Fault(CODES, "_Side(v, problem.prologue_k.done, True)", "_Side(v, problem.prologue_k, True)", "codes: values are normalised and rotated", PREPARED),
    Fault(CODES, "how.rotates and not side.transposed", "how.rotates", "codes: values are rotated", CODED),
    Fault(CODES, "return max(LEAST_KEYS, block_d(head_dim))", "return block_d(head_dim)", "codes: fewer bytes than a product sums", CODED),
    Fault(CODES, "seqlen // TOKENS.value + shape.n_sequences", "-(-seqlen // TOKENS.value) + 1", "codes: too few blocks for packed sequences", OF_SEQUENCES),
    Fault(CODES, "NO_HIDDEN_KEYS if prologue.of_queries else", "NO_HIDDEN_KEYS if True else", "codes: hidden keys are in the scales", HIDDEN_CODES),
    Fault(CODES, "NO_HIDDEN_KEYS if prologue.of_queries else", "NO_HIDDEN_KEYS if False else", "codes: the padding of keys hides queries", HIDDEN_CODES),
    Fault(CODES, "    if how.of_tensor:\n", "    if False:\n", "codes: a scale for each block of a tensor", CODED),
    Fault(CONFIGS, "if head_dim <= largest)", "if head_dim < largest)", "configs of codes: those of wider heads", FITTING),
    Fault(CONFIGS, "    if arch == \"interpreter\":\n", "    if False:\n", "configs of codes: the interpreter has those of a GPU", FITTING),
    Fault(CONFIGS, "\"scored\": _T(64, 32, 8, 3, BOUNDARY=32)", "\"scored\": _T(64, 64, 8, 3, BOUNDARY=32)", "configs of codes: full blocks that begin in the middle of a tile", FITTING),
    Fault(CONFIGS, "\"combined\": _T(16, 32, 8, 1, BOUNDARY=32)", "\"combined\": _T(16, 16, 8, 1, BOUNDARY=16)", "configs of codes: fewer keys than a product sums", FITTING),
    Fault(FWD, "p, v_tile, fp8.scale_of_values(walk.scales, block.start_n))", "p, v_tile, fp8.scale_of_values(walk.scales, walk.start_m))", "codes: values have the scale of a block of queries", STEPS),
    Fault(FWD, "acc = fp8.add_values(sums.acc * alpha[:, None], p, v_tile", "acc = fp8.add_values(sums.acc, p, v_tile", "codes: earlier values are relative to an earlier score", STEPS),
    Fault(FWD, "load_tile(x, fp8.with_keys(walk.scales, start_n), None", "load_tile(x, start_n, None", "codes: keys behind the last are read", f"{_CODES} -k no_memory"),
    Fault(FWD, "        start_n = fp8.with_keys(walk.scales, start_n)\n", "", "codes: values behind the last are read", f"{_CODES} -k no_memory"),
    Fault(FWD, "v_tile, poisoned = fp8.split_poison(v_tile)", "v_tile, poisoned = split_poison(v_tile, dtype_of(tile.ACC))", "codes: NaN is looked for among numbers", SEEN),
    Fault(FWD, "acc = fp8.add_values(acc, p, v_tile, fp8.scale_of_values(walk.scales, start_n))", "acc = fp8.add_values(acc, p, v_tile, 1.0)", "codes: values beside a NaN have no scale", SEEN),
    Fault(FWD, "place_of_q = fp8.place_of_codes(place, call.sequences)", "place_of_q = place", "codes: packed sequences are read where they begin in q", PACKED),
    Fault(FWD, "k = head_of(inputs.k, place.batch, head_kv, place_of_q.first_k)", "k = head_of(inputs.k, place.batch, head_kv, place.first_k)", "codes: packed keys are read where they begin in k", PACKED),
    Fault(FWD, "load_rows(inputs.q, place_of_q, rows", "load_rows(inputs.q, place, rows", "codes: packed queries are read where they begin in q", PACKED),
    Fault(FWD, "ALIGNED=inputs.scales.q_scale_ptr is not None", "ALIGNED=False", "codes: tiles reach into the next block", WINDOWS),
    Fault(FWD, "        q, k, v, scales = fp8_codes.quantized(q, k, v, problem)\n        prologue_q = prologue_q.done\n", "        q, k, v, scales = fp8_codes.quantized(q, k, v, problem)\n", "codes: queries are normalised and rotated twice", PREPARED),
    Fault(MASKING, "            start = start // BLOCK_N * BLOCK_N\n        if IS_SPLIT", "            start = start\n        if IS_SPLIT", "masking: aligned tiles begin anywhere", WINDOWS),
    Fault(MASKING, "if mask.HAS_LOWER or mask.documents is not None or ALIGNED:", "if mask.HAS_LOWER or mask.documents is not None:", "masking: keys before the first of an aligned tile are shown", WINDOWS),
    Fault(HOPPER, "        \"codes\": problem.codes is not None,\n", "", "the kernel for Hopper takes a call of codes", f"{_REFUSED} -k hopper"),
    Fault(LAUNCHING, "    if sizes.fp8:\n        tiles", "    if False:\n        tiles", "codes: tiles of other kernels", STEPS),
    Fault(LAUNCHING, "if tensors.layout is None and not sizes.fp8:", "if tensors.layout is None:", "codes: few queries share a tile", f"{_TESTS} -k 'equals_its_steps and query'"),
    Fault(LAUNCHING, "        and norm_k is None\n        and not sizes.fp8\n", "        and norm_k is None\n", "codes: keys are rotated twice", PREPARED),
    Fault(LAUNCHING, "problem.codes is None and k.numel() > 0", "k.numel() > 0", "codes: keys are prepared twice", PREPARED),
    Fault(LAUNCHING, "FP8_SCALES[sizes.fp8] == \"tensor\"", "FP8_SCALES[sizes.fp8] == \"block\"", "codes: scales of blocks for tensors", STEPS),
    Fault(LAUNCHING, "bool(sizes.fp8_rotated)) if sizes.fp8", "False) if sizes.fp8", "codes: never rotated", STEPS),
    Fault(OPERANDS, "fp8=0 if fp8 is None else FP8_SCALES.index(fp8.scales)", "fp8=0 if fp8 is None else 1", "codes: always scales of blocks", STEPS),
    Fault(OPERANDS, "fp8_rotated=int(fp8 is not None and fp8.rotate)", "fp8_rotated=int(fp8 is not None)", "codes: always rotated", STEPS),
    Fault(OPERANDS, "    has_tensors = has_tensors or fp8 is not None\n", "", "codes: forgotten where the mask is one of bands", STEPS),
    Fault(AUTOGRAD, "        if options.precision is not None:\n            raise NotImplementedError(\"precision: got FP8 in", "        if False:\n            raise NotImplementedError(\"precision: got FP8 in", "codes: derivatives of another function", f"{_REFUSED} -k transforms"),
    Fault(ATTENTION, "plainly = plainly and precision is None and not return_lse", "plainly = plainly and not return_lse", "the fast path forgets the precision", f"{_REFUSED} -k other_arguments"),
    Fault(VARLEN, "qk_norm=qk_norm,\n        precision=precision,\n", "qk_norm=qk_norm,\n", "packed sequences without codes", PACKED),
    Fault(PREPARE, " or options.precision is not None:", ":", "a known call with codes is not refused", GRADIENTS),
    Fault(SUPPORT, "if (cache is not None or options.precision is not None) and torch.is_grad_enabled():", "if cache is not None and torch.is_grad_enabled():", "codes of tensors that require grad are not refused", GRADIENTS),
    Fault(SUPPORT, "_require_grad((q, k, v, options.sinks, *parts, *of_norm))", "_require_grad((q, k, v, *parts, *of_norm))", "codes: sinks that require grad are not refused", GRADIENTS),
    Fault(SUPPORT, "name = \"precision\" if cache is None else \"cache\"", "name = \"precision\"", "a cache that requires grad is refused as a precision", f"{_REFUSED} -k cache"),
    Fault(SUPPORT, "    if backend == \"torch\":\n        return [\n            \"precision", "    if False:\n        return [\n            \"precision", "codes on the torch backend are not refused", f"{_REFUSED} -k torch_backend"),
    Fault(SUPPORT, "reasons.append(\"precision: got FP8 with a cache, allowed is one of them\")", "pass", "codes with a cache are not refused", f"{_REFUSED} -k cache"),
    Fault(SUPPORT, "reasons.append(\"precision: got FP8 with torch.float64, allowed are float16, bfloat16, float32\")", "pass", "codes of float64 are not refused", f"{_REFUSED} -k float64"),
    Fault(SUPPORT, "if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM_OF_FP8:", "if q.shape[-1] > MAX_HEAD_DIM_OF_FP8:", "codes of wide values are not refused", f"{_REFUSED} -k features"),
    Fault(VALUE, "MAX_HEAD_DIM_OF_FP8 = 256", "MAX_HEAD_DIM_OF_FP8 = 512", "codes of wide heads are not refused", f"{_REFUSED} -k features"),
    Fault(VALUE, "KEYS_OF_FP8 = 32", "KEYS_OF_FP8 = 16", "codes: blocks of 16 keys are not refused", f"{_REFUSED} -k too_few"),
    Fault(AUTOGRAD, "16 if options.precision is None else KEYS_OF_FP8", "16", "codes: patterns of 16 keys by blocks", f"{_REFUSED} -k become_rules"),
    Fault(SUPPORT, "if capability is None or capability < (8, 9):", "if capability is None or capability < (8, 0):", "codes on GPUs without them are not refused", f"{_REFUSED} -k other_gpus"),
    Fault(SUPPORT, "if capability is None or capability < (8, 9):", "if capability is not None and capability < (8, 9):", "codes on GPUs of AMD are not refused", f"{_REFUSED} -k other_gpus"),
    Fault(CHECKS, "if options.precision is not None and not isinstance(options.precision, FP8):", "if False:", "other precisions are not refused", f"{_REFUSED} -k other_arguments"),
    Fault(VALUE, "if self.scales not in get_args(Scales):", "if False:", "unknown scales are not refused", f"{_REFUSED} -k wrong"),
    Fault(VALUE, "if not isinstance(self.rotate, bool):", "if self.rotate not in (True, False):", "rotate=1 is not refused", f"{_REFUSED} -k wrong"),
    Fault(OF_PROCESS, "raise NotImplementedError(\"precision: got FP8 and a context, allowed is one of them\")", "pass", "codes with a context are not refused", f"{_REFUSED} -k a_context"),
    Fault(DTENSOR, "if options.precision is not None and options.precision.scales == \"tensor\":", "if False:", "codes: the scale of a part of a DTensor", f"{_REFUSED} -k no_process"),
)
