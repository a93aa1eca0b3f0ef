"""Faults in caches of keys and values: where tokens lie, their codes, and attention to them on a CPU."""

from __future__ import annotations

from tests.mutation.fault import Fault

KV_CACHE, QUANTIZATION = "fusedattn/kv_cache.py", "fusedattn/quantization.py"
CHECKS, EAGER, GROWING = "fusedattn/call_checks.py", "fusedattn/reference_cached.py", "fusedattn/caches.py"
CACHED, TILES = "fusedattn/backends/torch/cached.py", "fusedattn/backends/torch/cache_tiles.py"
NUMBERS = "fusedattn/backends/torch/cache_numbers.py"
PUBLIC, CODES, ERRORS = (f"tests/public/test_{name}.py" for name in ("caches", "cache_codes", "cache_errors"))
MEMORY = "tests/public/test_cache_memory.py"
OPTIONS, ON_CPU = "tests/public/test_cached_options.py", "tests/torch_backend/test_cached.py"
PACKED, PADDED = (f"tests/public/test_fuzz_cached.py -k 'contract and {name}'" for name in ("packed", "padded"))

FAULTS = (
    Fault(KV_CACHE, "% ring)", "% self.capacity)", "cache: a ring that forgets its sinks", f"{PUBLIC} -k ring"),
    Fault(KV_CACHE, "near % self.k.shape[2]", "near % max(16, self.k.shape[2] - 1)", "cache: pages of another size", f"{PUBLIC} -k lengths"),
    Fault(KV_CACHE, "torch.where(keys < self.n_sinks, keys, keys + dropped)", "keys + dropped", "cache: sinks are the oldest of the last tokens", f"{PUBLIC} -k ring"),
    Fault(KV_CACHE, "self.lengths.clamp(max=self.capacity) if self.overwrites", "self.lengths.clamp(max=self.capacity - 1) if self.overwrites", "cache: a ring that keeps one token less", f"{PUBLIC} -k ring"),
    Fault(KV_CACHE, "tokens >= self.left_padding", "tokens > self.left_padding", "cache: one token of padding too many, in eager PyTorch", f"{PUBLIC} -k left_padding"),
    Fault(KV_CACHE, "positions = tokens if positions is None", "positions = number if positions is None", "cache: each append counts positions from 0", f"{PUBLIC} -k rope_on_appending"),
    Fault(KV_CACHE, "exists & (number < counts[:, None])", "exists & (number <= counts[:, None])", "cache: one packed token too many", PACKED),
    Fault(KV_CACHE, ">= self.lengths[:, None] - self.capacity + self.n_sinks", ">= self.lengths[:, None] - self.capacity", "cache: overwritten tokens are written too", f"{PUBLIC} -k ring", equivalent="on a CPU, the last of several writes to one place stays"),
    Fault(QUANTIZATION, "torch.where(scale < SMALLEST_SCALE, 0.0, scale)", "scale", "codes: a scale whose reciprocal is infinite", f"{CODES} -k no_scale"),
    Fault(QUANTIZATION, "code = code.nan_to_num(0.0).round()", "code = code.nan_to_num(0.0).trunc()", "codes: integers are cut", f"{CODES} -k hard_numbers"),
    Fault(QUANTIZATION, "low | (high << 4)", "high | (low << 4)", "codes: the halves of a byte change places", f"{CODES} -k codes_of"),
    Fault(QUANTIZATION, "(1.0 / scale)", "(1.0 / scale + 0.0001)", "codes: another factor", f"{CODES} -k codes_of"),
    Fault(QUANTIZATION, "largest < torch.inf", "largest <= torch.inf", "codes: an infinite scale", f"{CODES} -k no_scale"),
    Fault(QUANTIZATION, ".unflatten(-1, (n_groups, -1)).abs()", ".unflatten(-1, (-1, n_groups)).transpose(-1, -2).abs()", "codes: groups of features far apart", f"{CODES} -k codes_of_tokens"),
    Fault(EAGER, "positions = None if positions is None else positions.reshape(-1)[at]", "positions = None if positions is None else positions.reshape(-1)[: at.shape[1]]", "cache: packed tokens get the positions of the first sequence", f"{PUBLIC} -k rope_on_appending"),
    Fault(EAGER, "torch.arange(length - q.shape[2], length", "torch.arange(length - q.shape[2] + 1, length + 1", "cache: queries are one position ahead", f"{PUBLIC} -k rope_on_appending"),
    Fault(EAGER, "else positions_q[rows]", "else positions_q[: rows.stop - rows.start]", "cache: packed queries get the positions of the first sequence", PACKED),
    Fault(EAGER, "lse_dtype  # codes", "q.dtype  # codes", "cache: codes in float16", f"{CODES} -k beyond_float16"),
    Fault(EAGER, "    rows, rope = cache.rows, cache.rope\n    if rows is not None and", "    rows, rope = cache.rows, cache.rope\n    if False and", "cache: two sequences are appended to one row", f"{ERRORS} -k appending"),
    Fault(EAGER, "        rope.check_lengths(0, longest)\n", "", "cache: keys at positions outside the tables", f"{ERRORS} -k appending"),
    Fault(CHECKS, "min(lefts) + longest > room", "min(lefts) > room", "cache: a window that was overwritten", f"{ERRORS} -k attending"),
    Fault(CHECKS, "                cache.rope.check_lengths(length_q, length)\n", "                pass\n", "cache: queries at positions outside the tables", f"{ERRORS} -k attending"),
    Fault(GROWING, "new[:, :, : self.length] = x[:, :, : self.length]", "new[:, :, : self.length - 1] = x[:, :, : self.length - 1]", "growing cache: the last token is lost", f"{PUBLIC} -k growing"),
    Fault(TILES, "self.padding - (self.length - self.kept)", "self.padding", "tiles: padding of a ring that is gone", f"{PUBLIC} -k left_padding"),
    Fault(TILES, "(self.cache.capacity - turn, self.cache.capacity, turn - ring)", "(self.cache.capacity - turn, self.cache.capacity, turn)", "tiles: a ring that does not turn", ON_CPU),
    Fault(TILES, "dropped % ring if dropped else 0", "dropped % self.cache.capacity if dropped else 0", "tiles: a ring that forgets its sinks", ON_CPU),
    Fault(TILES, "sum(runs[-1]) == at", "sum(runs[-1]) >= at", "tiles: pages that only seem adjacent", ON_CPU),
    Fault(TILES, "first // size, :, own", "start // size, :, own", "tiles: the first page of a run for all", f"{ON_CPU} -k in_order"),
    Fault(KV_CACHE, "exists = slots == near", "exists = slots <= near + self.capacity", "cache: tokens beyond the capacity overwrite the last", f"{MEMORY} -k without_a_place"),
    Fault(KV_CACHE, "exists & (rows == near_rows)", "exists", "cache: a row that is not there is the next one", f"{MEMORY} -k without_a_place"),
    Fault(KV_CACHE, "exists = exists & (kept <= self.capacity)", "exists = exists & (kept >= 0)", "cache: a sequence longer than the cache is cut", f"{MEMORY} -k without_a_place"),
    Fault(KV_CACHE, "torch.where(is_kept, math.nan, 0.0)", "torch.where(is_kept, 1.0, 0.0)", "cache: tokens without a place are those of others", f"{MEMORY} -k without_a_place"),
    Fault(KV_CACHE, "exists.int().argmax()), exists.any()", "exists.int().argmax()), torch.ones_like(exists.any())", "cache: if no token has a place, one is written nevertheless", f"{MEMORY} -k no_token"),
    Fault(KV_CACHE, "self.head_dim * n_v == self.head_dim_v * n", "True", "cache: groups of latent values unlike those of keys", f"{ERRORS} -k appended_to"),
    Fault(CHECKS, '(("k", "v"), ("k_scale", "v_scale"))', '(("k_scale", "v_scale"),)', "cache: values that overlap keys", f"{ERRORS} -k appended_to"),
    Fault("fusedattn/strides.py", "any(size > 1 and stride == 0", "any(size > 9 and stride == 0", "cache: sequences that share memory", f"{ERRORS} -k appended_to"),
    Fault(CACHED, "(stops[0] <= number) & (number < stops[-1])", "stops[0] <= number", "decoding on a CPU: sinks of queries that belong to no sequence", "tests/public/test_fuzz_cached.py -k 'contract and belonging'"),
    Fault("fusedattn/backends/triton/appending.py", "    torch.autograd.graph.increment_version([x for x in memory if x is not None])", "    pass", "append: autograd does not see what the kernel writes", f"{MEMORY} -k gradients"),
    Fault(TILES, "together and alike", "together", "tiles: all sequences as long as the first", f"{PUBLIC} -k lengths"),
    Fault(CACHED, "rows = torch.cat((rows, -rows[:, :, :1]), dim=2)", "rows = torch.cat((rows, rows[:, :, :1]), dim=2)", "decoding on a CPU: an infinite key with a score of -inf", f"{ON_CPU} -k not_finite"),
    Fault(CACHED, " and out.any(dim=-1).all())", ")", "decoding on a CPU: a row whose only key is NaN", f"{ON_CPU} -k only_key"),
    Fault(CACHED, "max(start, lower + n_queries - 1)", "max(start, lower)", "decoding on a CPU: the start of a window of several queries", OPTIONS),
    Fault(CACHED, "min(max(first, upper + 1), stop)", "stop", "decoding on a CPU: later keys are seen", OPTIONS),
    Fault(CACHED, "slice(at, at + k.shape[2])", "slice(start, start + k.shape[2])", "decoding on a CPU: the mask of the first tile for all", f"{ON_CPU} -k many_tiles"),
    Fault(CACHED, "rotated(x, cache.rope, j,", "rotated(x, cache.rope, i,", "decoding on a CPU: sequences of one length get the positions of the first", PADDED),
    Fault(CACHED, "blind = ~visible.any(dim=-1, keepdim=True)", "blind = ~visible.all(dim=-1, keepdim=True)", "decoding on a CPU: rows that see something count as blind", OPTIONS),
    Fault(CACHED, "visible = visible & (bias != -math.inf)", "visible = visible & (bias > -1e4)", "decoding on a CPU: a large bias hides", OPTIONS),
    Fault(CACHED, "return sum_of_parts(outs, lses)", "return outs[-1], lses[-1]", "decoding on a CPU: the last tile alone", f"{ON_CPU} -k many_tiles"),
    Fault(CACHED, ".nan_to_num(0.0)[..., None]", "[..., None]", "decoding on a CPU: sinks of -inf and no key", OPTIONS),
    Fault(CACHED, 'torch.autocast("cpu", enabled=False)', 'torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu"))', "decoding on a CPU: autocast rounds scores", f"{ON_CPU} -k autocast"),
    Fault("fusedattn/backends/triton/results.py", " if sizes.return_lse or not is_cached else None", "", "cache: results that nothing reads", "tests/public/test_cache_allocations.py -k steps"),
    Fault("fusedattn/backends/__init__.py", ".sub_(cu_seqlens[:-1])", "", "append: lengths count the tokens of the sequences before", f"{PUBLIC} -k lengths"),
    Fault(NUMBERS, ".max() == 0x7F", ".max() > 0x7F", "numbers of codes: a NaN of e4m3 is 480", CODES),
    Fault(NUMBERS, "bits.bitwise_and_(~0x4000)", "bits", "numbers of codes: a negative e4m3", f"{ON_CPU} -k other_dtypes"),
    Fault(NUMBERS, "if dtype == torch.float64:", "if False:", "numbers of codes: scales of float64 are rounded later", CODES),
)  # fmt: skip
