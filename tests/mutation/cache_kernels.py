"""Faults in caches: places of tokens, codes and their scales, lengths, and what is read or stored."""

from tests.mutation.fault import Fault

CACHED, APPEND, QUANTIZING = "kernels/cached.py", "kernels/cache_append.py", "kernels/quantizing.py"
FWD, SEQUENCES, ROPE, MASKING = (
    "kernels/attention_fwd.py", "kernels/sequences.py", "kernels/rope.py", "kernels/masking.py",
)  # fmt: skip
ARGUMENTS, LAUNCHING = "kernels/mask_arguments.py", "fusedattn/backends/triton/launching.py"
APPENDING = "fusedattn/backends/triton/append_launching.py"

FORMS = "tests/kernels/test_cached.py -k 'test_sizes and 1e-6'"
SIZES = "tests/kernels/test_cached.py -k 'test_sizes and hidden and float16 and few and int8'"
ANOTHER = "tests/kernels/test_cached.py -k another_query"
NOT_FINITE = "tests/kernels/test_cached.py -k 'finite and few'"
LAYOUT = "tests/kernels/test_cached.py -k 'window_over and few'"
PACKED = "tests/kernels/test_cached_addresses.py -k 'bits_of_a_sequence and numbers'"
ROTATED = "tests/kernels/test_cached.py -k rotated"
READ_ONCE = "tests/kernels/test_cached_addresses.py -k 'read_once and 17'"
ADDRESSES = "tests/kernels/test_cached_addresses.py -k masks"
NO_PAGE = "tests/kernels/test_cached_addresses.py -k 'page_that_is_not and few'"
NO_ROW = "tests/kernels/test_cached_addresses.py -k row_that_is_not"
TOO_LONG = "tests/kernels/test_cached_addresses.py -k 'more_tokens and few and contiguous'"
STORED = "tests/kernels/test_cache_append.py -k 'tokens_and_scales and (rows or 17)'"
RING_STORED = "tests/kernels/test_cache_append.py -k a_ring"
BEYOND = "tests/kernels/test_cache_append.py -k beyond"
LEFT_OUT = "tests/kernels/test_cache_append.py -k left_out"
RING = "tests/public/test_caches.py -k 'test_a_ring and triton'"
PADDING = "tests/public/test_caches.py -k 'left_padding and triton'"
ROPES = "tests/public/test_caches.py -k 'rope_on_appending and triton'"
CODES = "tests/kernels/test_quantizing.py -k nearest"
DEFINITION = "tests/kernels/test_quantizing.py -k definition"
DECODED = "tests/kernels/test_quantizing.py -k decoded"
LARGE = "tests/public/test_large_tensors.py -k 'large_cache and few'"
FAR_TOKENS = "tests/public/test_large_tensors.py -k new_tokens"
LARGE_TABLE = "tests/public/test_large_tensors.py -k block_table"

# fmt: off
PLACES = (
    Fault(CACHED, "cache.N_SINKS + behind % cache.ring", "behind % cache.ring", "ring: the slots of the sinks are part of it", RING_STORED),
    Fault(CACHED, "tokens = tl.where(keys < cache.N_SINKS, keys, keys + place.dropped)", "tokens = keys + place.dropped", "ring: sinks are read where they are not", RING),
    Fault(CACHED, "tokens = tl.where(keys < cache.N_SINKS, keys, keys + place.dropped)", "tokens = keys", "ring: read from its first slot on", RING),
    Fault(CACHED, "readable = readable & (place.dropped == 0)", "readable = readable & (place.dropped >= 0)", "a sequence longer than its cache gets numbers", TOO_LONG),
    Fault(CACHED, "(behind >= place.dropped)", "(behind >= 0)", "ring: tokens are stored that others of the call overwrite", RING_STORED),
    Fault(CACHED, "exist = exist & (tokens >= 0) & (tokens < place.seqlen_k)", "exist = exist & (tokens >= 0)", "append: tokens behind the last slot are stored", BEYOND),
    Fault(CACHED, "exist = exist & (tokens >= 0) & (tokens < place.seqlen_k)", "exist = exist & (tokens < place.seqlen_k)", "append: tokens before the first are stored", BEYOND),
    Fault(CACHED, "exist = exist & (tokens >= 0) & ((behind", "exist = exist & ((behind", "ring: tokens before the first are stored", BEYOND),
    Fault(CACHED, "+ slots // cache.PAGE", "+ slots % cache.PAGE", "pages: the entry of the slot", STORED),
    Fault(CACHED, "return row, slots % cache.PAGE, exist", "return row, slots, exist", "pages: slots are counted from the first page on", STORED),
    Fault(CACHED, "tl.cast(place.sequence, tl.int64) * cache.table_stride", "place.sequence * cache.table_stride", "pages: int32 offset of a row of the table", LARGE_TABLE),
    Fault(CACHED, "exist & (row >= 0) & (row < cache.n_rows)", "exist & (row < cache.n_rows)", "pages: negative entries are followed", NO_PAGE),
    Fault(CACHED, "exist & (row >= 0) & (row < cache.n_rows)", "exist & (row >= 0)", "pages: entries beyond the memory are followed", NO_PAGE),
    Fault(CACHED, "row = tl.load(entries, mask=exist, other=0)", "row = tl.load(entries)", "pages: entries behind the last are read", ADDRESSES),
    Fault(CACHED, "exists = (row >= 0) & (row < cache.n_rows)", "exists = row >= 0", "rows: beyond the memory", NO_ROW),
    Fault(CACHED, "exists = (row >= 0) & (row < cache.n_rows)", "exists = row < cache.n_rows", "rows: negative ones", NO_ROW),
    Fault(CACHED, "row = tl.load(cache.rows_ptr + place.sequence)", "row = tl.load(cache.rows_ptr)", "rows: the first for all sequences", STORED),
    Fault(CACHED, "return row, slots, exist & row_exists", "return row, slots, exist", "rows: one that is not there is row 0", NO_ROW),
    Fault(CACHED, "tl.load(cache.first_ptr + place.sequence) - tl.maximum(place.dropped, 0)", "tl.load(cache.first_ptr + place.sequence)", "left padding: counted from what a ring keeps", PADDING),
    Fault(CACHED, "tl.load(cache.first_ptr + place.sequence)", "tl.load(cache.first_ptr)", "left padding: of the first sequence for all", PADDING),
    Fault(MASKING, "tl.maximum(bounds.key_start, first)", "bounds.key_start", "left padding: none", PADDING),
    Fault(SEQUENCES, "length_k = tl.minimum(tl.maximum(length, 0), seqlen_k)", "length_k = tl.maximum(length, 0)", "a ring of more tokens than it keeps", RING),
    Fault(SEQUENCES, "dropped = length - length_k", "dropped = 0", "nothing is ever overwritten", RING),
    Fault(ROPE, "            position_offset += place.dropped\n", "            position_offset += 0\n", "rotated queries of a ring stand at the end of what it keeps", ROTATED),
    Fault(LAUNCHING, "        seqlen_k *= tensors.block_table.shape[1]\n", "        seqlen_k *= 1\n", "pages: room for the tokens of one", FORMS),
    Fault(CACHED, "ring=None if n_sinks < 0 else n_slots - n_sinks", "ring=None if n_sinks < 0 else n_slots", "ring: as long as with its sinks", RING),
    Fault(LAUNCHING, "max_seqlen_k = seqlen_k if is_cached else", "max_seqlen_k = seqlen_k // 2 if is_cached else", "packed queries: half of the cache", PACKED),
    Fault(CACHED, "ring=None if n_sinks < 0 else n_slots - n_sinks", "ring=None if n_sinks < 0 else n_slots", "append: a ring as long as with its sinks", RING_STORED),
    Fault("fusedattn/support.py", "_require_grad((q, k, v, options.sinks, *parts, *of_norm))", "_require_grad((q, k, v))", "cache: a bias gets a gradient, of keys in another order", "tests/public/test_cache_errors.py -k learned"),
    Fault(ARGUMENTS, "sequences.cu_q_ptr is None and sequences.lengths_ptr is None", "sequences.cu_q_ptr is None", "layout: bounds at the end of the cache", LAYOUT),
)

READ = (
    Fault(CACHED, "head_ptr = x.ptr + tl.cast(head, tl.int64) * x.stride_h", "head_ptr = x.ptr + head * x.stride_h", "cache: int32 offset of a head", LARGE),
    Fault(CACHED, "head_ptr + (tl.cast(row, tl.int64) * x.stride_b +", "head_ptr + (row * x.stride_b +", "cache: int32 offset of a row", LARGE),
    Fault(CACHED, "slots.to(tl.int64) * x.stride_s", "slots * x.stride_s", "cache: int32 offset of a slot", LARGE),
    Fault(CACHED, "mask = mask & (offs < HEAD_DIM // PER_ELEMENT)[None, :]", "mask = mask & (offs < HEAD_DIM)[None, :]", "read: features behind the last of int4", READ_ONCE),
    Fault(CACHED, "tl.reshape(tl.join(low, high), (keys.shape[0], BLOCK_D))", "tl.reshape(tl.join(high, low), (keys.shape[0], BLOCK_D))", "int4: the halves of an element exchanged", FORMS),
    Fault(CACHED, "high = (codes >> 4).to(tl.float32) - 8.0", "high = (codes >> 4).to(tl.float32) - 7.0", "int4: odd features are one code too large", FORMS),
    Fault(CACHED, "[:, None] + groups[None, :]\n", "[:, None] + 0 * groups[None, :]\n", "int4: the scale of the first group for all", READ_ONCE),
    Fault(CACHED, "groups = FIRST // scale.GROUP + tl.arange(0, N_GROUPS)", "groups = tl.arange(0, N_GROUPS)", "int4: scales of the first features for those behind the 512th", "tests/public/test_cache_codes.py -k groups_of_keys"),
    Fault(CACHED, "(groups * scale.GROUP < HEAD_DIM)[None, :]", "(groups >= 0)[None, :]", "int4: scales behind the last group are read", READ_ONCE),
    Fault(CACHED, "numbers = tl.reshape(numbers, (keys.shape[0], N_GROUPS, scale.GROUP)) * factors[:, :, None]", "numbers = tl.reshape(numbers, (keys.shape[0], N_GROUPS, scale.GROUP)) * (1.0 + 0.0 * factors)[:, :, None]", "int4: codes of groups without their scales", FORMS),
    Fault(CACHED, "factors = tl.load(slot_pointers(scale, head_kv, row, slots)", "factors = tl.load(slot_pointers(scale, 0, row, slots)", "scales of the first head for all", READ_ONCE),
    Fault(CACHED, "factors = tl.load(slot_pointers(scale, head_kv, row, slots)", "factors = tl.load(slot_pointers(scale, head_kv, row, slots * 0)", "scales of the first slot for all", READ_ONCE),
    Fault(CACHED, "lost = tl.where(readable & ~exists, float(\"nan\"), 1.0).to(ACC)", "lost = tl.where(readable & ~exists, 0.0, 1.0).to(ACC)", "a token without a place has the score 0", NO_PAGE),
    Fault(CACHED, "if cache.FORMAT == \"e4m3\" or cache.FORMAT == \"e5m2\":", "if cache.FORMAT == \"e4m3\":", "the factor 256 of e5m2 is lost", FORMS),
    Fault(CACHED, "if cache.FORMAT == \"e4m3\" or cache.FORMAT == \"e5m2\":", "if cache.FORMAT == \"e5m2\":", "the factor 256 of e4m3 is lost", FORMS),
    Fault(CACHED, "bitcast=True) * 0.00390625", "bitcast=True) * 0.0078125", "e5m2: codes over 128", DECODED),
    Fault(CACHED, "numbers = tl.where(magnitude > (0x7C if E5M2 else 0x7E), float(\"nan\"), numbers)", "pass", "decoded: NaN is a number", DECODED),
    Fault(CACHED, "((bits << 7) & -0x4080)", "(bits << 7)", "e4m3: the sign is a bit of the exponent", DECODED),
    Fault(FWD, "products * _factors(call.cache.k_scale,", "products * _factors(call.cache.v_scale,", "scores by the scales of the values", FORMS),
    Fault(FWD, "factors = _factors(call.cache.v_scale, walk, block.keys, call, tile)\n        acc =", "factors = _factors(call.cache.k_scale, walk, block.keys, call, tile)\n        acc =", "weights by the scales of the keys", FORMS),
    Fault(FWD, "unit = tl.maximum(largest, 1.1754943508222875e-38)", "unit = tl.maximum(largest, 1.0)", "coded values: small weights are lost in float16", SIZES),
    Fault(FWD, "largest = tl.max(tl.where(sizes < float(\"inf\"), sizes, 0.0), 1)", "largest = tl.max(tl.where(sizes < float(\"inf\"), sizes, 0.0)) + 0.0 * tl.max(sizes, 1)", "coded values: one unit for all rows", ANOTHER),
    Fault(FWD, "dtype_of(tile.ACC), tile.PRECISION) * unit[:, None]", "dtype_of(tile.ACC), tile.PRECISION)", "coded values: the unit is lost", SIZES),
    Fault(FWD, "tl.where((poisoned | ~finite)[None, :], float(\"nan\"), p)", "tl.where(poisoned[None, :], float(\"nan\"), p)", "repaired: a scale that is NaN is 0", NOT_FINITE),
    Fault(FWD, "_add_coded(acc, p, tl.where(finite, factors, 0.0), v_tile, tile)", "_add_coded(acc, p, factors, v_tile, tile)", "repaired: a scale that is NaN reaches all queries", NOT_FINITE),
)

STORES = (
    Fault(APPEND, "tokens = place.seqlen_k + place.dropped - place.seqlen_q + rows", "tokens = place.seqlen_k - place.seqlen_q + rows", "append: tokens of a ring are counted from what it keeps", RING_STORED),
    Fault(APPEND, "exist = rows < place.seqlen_q", "exist = rows <= place.seqlen_q", "append: a token of the next sequence", STORED),
    Fault(APPEND, "ACC, OF_QUERIES=True, TRANSPOSE=False", "ACC, OF_QUERIES=False, TRANSPOSE=False", "append: keys are rotated from the first position on", ROPES),
    Fault(APPEND, "codes = low | (high << 4)", "codes = high | (low << 4)", "append: the halves of an element exchanged", STORED),
    Fault(APPEND, "there = stored[:, None] & (groups * scale.GROUP < HEAD_DIM)[None, :]", "there = stored[:, None] & (groups >= 0)[None, :]", "append: scales behind the last group", STORED),
    Fault(APPEND, "mask = stored[:, None] & (offs < HEAD_DIM // PER_ELEMENT)[None, :]", "mask = stored[:, None] & (offs < HEAD_DIM)[None, :]", "append: features behind the last of int4", STORED),
    Fault(APPEND, "mask = stored[:, None] & (offs < HEAD_DIM // PER_ELEMENT)[None, :]", "mask = (stored | ~stored)[:, None] & (offs < HEAD_DIM // PER_ELEMENT)[None, :]", "append: tokens without a place are stored", LEFT_OUT),
    Fault(APPEND, "tl.store(ptrs, factors, mask=stored)", "tl.store(ptrs, factors, mask=stored & (row == 0))", "append: scales of one row alone", STORED),
    Fault(APPEND, "slot_pointers(into, head, row, slots)", "slot_pointers(into, head, row, slots * 0)", "append: all tokens in the first slot", STORED),
    Fault(APPENDING, "            tileable(k),\n", "            k,\n", "append: int32 offset of a new token", FAR_TOKENS),
    Fault(APPEND, "slot_pointers(scale, head, row, slots)", "slot_pointers(scale, 0, row, slots)", "append: scales of all heads in one place", STORED),
    Fault(APPEND, "_store(v_tile, v_cache, cache.v_scale,", "_store(v_tile, v_cache, cache.k_scale,", "append: values by the scales of keys", STORED),
    Fault(QUANTIZING, " + ((magnitude >> DROPPED) & 1)", "", "codes: ties away from the even one", CODES),
    Fault(QUANTIZING, "MAGIC: tl.constexpr = (127 + 1 - BIAS + DROPPED) << 23", "MAGIC: tl.constexpr = (127 - BIAS + DROPPED) << 23", "codes: subnormal ones of half the unit", CODES),
    Fault(QUANTIZING, "magnitude < ((128 - BIAS) << 23)", "magnitude < ((127 - BIAS) << 23)", "codes: the smallest normal ones", CODES),
    Fault(QUANTIZING, "x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))", "x = tl.where(x > LARGEST, LARGEST, x)", "codes: numbers below the lowest", CODES),
    Fault(QUANTIZING, "tl.where(magnitude > 0x7F800000, 0x7F, code)", "code", "codes: NaN is a number", CODES),
    Fault(QUANTIZING, "x = tl.where(x == x, x, 0.0)", "x = tl.where(x == x, x, 1.0)", "codes: NaN is 1", CODES),
    Fault(QUANTIZING, "tl.where(scale < SMALLEST_SCALE, 0.0, scale)", "scale", "scales: without a finite reciprocal", DEFINITION),
    Fault(QUANTIZING, "is_scale = scale >= SMALLEST_SCALE", "is_scale = scale > 0.0", "codes: of a scale without a finite reciprocal", DEFINITION),
    Fault(QUANTIZING, "finite = tl.min((tl.abs(x) < float(\"inf\")).to(tl.int32), last) != 0", "finite = tl.max((tl.abs(x) < float(\"inf\")).to(tl.int32), last) != 0", "scales: a token that is not finite has one", DEFINITION),
)
# fmt: on

FAULTS = (*PLACES, *READ, *STORES)
