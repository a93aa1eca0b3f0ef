"""Faults in linear attention: chunks and their order, states, features and their derivatives, numbers of rows."""

from tests.mutation.fault import Fault

CHUNKS, STATES, OUTPUTS, FEATURES = (
    f"kernels/linear_{name}.py" for name in ("chunks", "states", "outputs", "features")
)
CHUNKED, LAUNCHING, PACKED = (f"fusedattn/linear/{name}.py" for name in ("chunked", "launching", "packed"))
MAPS = "fusedattn/feature_maps.py"
LAYER, CACHE, MODEL_CACHE = (
    f"fusedattn/transformer/{name}.py" for name in ("linear_attention", "state_cache", "cache")
)
TWINS = "fusedattn/integrations/modules.py"


def gradients(words: str) -> str:
    """Gradcheck of the features of a call whose names have these words."""
    return f"tests/linear/test_gradcheck.py -k 'not gradgrad and triton and ({words})'"


def hostile(test: str, backend: str = "triton") -> str:
    return f"tests/linear/test_hostile.py -k '{test} and {backend}'"


def budget(words: str) -> str:
    """The error budget: a difference quotient does not see what is wrong alike in both directions."""
    return f"tests/linear/test_budget.py -k 'test_budget and triton and float32 and ({words})'"


PLAIN, TWO_CHUNKS, GROUPS = gradients("plain"), budget("padding"), budget("grouped")
HIDDEN, PACKED_TESTS, SUMS = budget("hidden or padding"), budget("packed"), gradients("sums")
OUT = budget("plain or fewer")
WIDE = budget("more")
MEMORY = "tests/linear/test_memory.py -k 'causal or packed'"
STEPS = "tests/linear/test_cost.py -k 'one_by_one and triton'"
NAN = hostile("earlier")
NO_WEIGHTS = hostile("without_weights")
BEYOND = hostile("beyond_float16")
BEHIND = hostile("no_sequence")
FAVOR = "tests/linear/test_favor.py"


def generating(words: str) -> str:
    """Generating from states, by the tests whose names have these words."""
    return f"tests/transformer/test_gpt_state.py -k 'not triton and ({words})'"


UNEVEN, MASKED = generating("uneven"), generating("left_padding")

# fmt: off
SHARED = (
    Fault(CHUNKS, "exist = rows < span.seqlen", "exist = rows <= span.seqlen", "linear: a row behind the last is read", MEMORY),
    Fault(CHUNKS, "mask=exist, other=0) != 0)", "mask=exist, other=0) >= 0)", "linear: hidden keys are seen", HIDDEN),
    Fault(CHUNKS, "* n_valid + span.first", "* n_valid", "linear: hidden tokens of the first sequence for all", PACKED_TESTS),
    Fault(CHUNKS, "valid_ptr + tl.cast(span.batch, tl.int64) * n_valid", "valid_ptr + tl.cast(span.batch, tl.int64) * 0", "linear: hidden tokens of the first batch for all", HIDDEN),
    Fault(CHUNKS, "return Span(sequence, 0, first, length,", "return Span(sequence, 0, first, seqlen,", "linear: a sequence as long as all", PACKED_TESTS),
    Fault(CHUNKS, "return Span(sequence, 0, first, length,", "return Span(sequence, 0, 0, length,", "linear: every sequence begins with the first token", PACKED_TESTS),
    Fault(CHUNKS, "return Span(sequence, sequence, 0, seqlen, sequence * n_chunks)", "return Span(sequence, sequence, 0, seqlen, 0)", "linear: chunks of the first batch for all", HIDDEN),
    Fault(CHUNKS, "tl.load(chunks.sequence_ptr + chunk), seqlen", "tl.load(chunks.sequence_ptr), seqlen", "linear: every chunk is of the first sequence", PACKED_TESTS),
    Fault(CHUNKS, "offs_v = first_v + tl.arange(0, tile.BLOCK_DV)[None, :]", "offs_v = tl.arange(0, tile.BLOCK_DV)[None, :]", "linear: the state of the first values for all", WIDE),
    Fault(CHUNKS, "(offs_d < tile.HEAD_DIM) & (offs_v < tile.HEAD_DIM_V)", "(offs_d < tile.HEAD_DIM) & (offs_v < tile.BLOCK_DV)", "linear: states of values that are not there", MEMORY),
    Fault(CHUNKS, "(tl.cast(index, tl.int64) * nheads + head) * (tile.HEAD_DIM * tile.HEAD_DIM_V)", "(tl.cast(index, tl.int64) * nheads) * (tile.HEAD_DIM * tile.HEAD_DIM_V)", "linear: the state of the first head for all", GROUPS),
    Fault(CHUNKS, "(start + offs < span.seqlen)[:, None] & (offs_d < HEAD_DIM)[None, :]", "(start + offs < span.seqlen)[:, None] & (offs_d >= 0)[None, :]", "linear: features behind the last are written", MEMORY),
    Fault(CHUNKS, "(offs[:, None] >= offs[None, :]) & poisoned[None, :]", "(offs[:, None] > offs[None, :]) & poisoned[None, :]", "linear: NaN does not reach the query beside it", NAN),
    Fault(CHUNKS, "if has_nan(acc):", "if False:", "linear: NaN reaches earlier queries of its chunk", NAN),
    Fault(CHUNKS, "if rows.dtype == tl.float16:", "if rows.dtype == tl.float64:", "linear: weights overflow in float16", BEYOND),
    Fault(CHUNKS, "exist = readable[:, None] & (tl.arange(0, x.shape[1])", "exist = (readable | True)[:, None] & (tl.arange(0, x.shape[1])", "linear: hidden keys have the features of 0", HIDDEN),
    Fault(CHUNKS, "exist = readable[:, None] & (tl.arange(0, x.shape[1])[None, :] < HEAD_DIM)", "exist = readable[:, None] & (tl.arange(0, x.shape[1])[None, :] >= 0)", "linear: columns behind the last have the features of 0", OUT),
    Fault(CHUNKS, "return tl.where(x > 0.0, x + 1.0,", "return tl.where(x > 0.0, x,", "elu+1: without the 1", OUT),
    Fault(CHUNKS, "gradient * tl.where(x > 0.0, 1.0, _exp(tl.where(x > 0.0, 0.0, x)))", "gradient * tl.where(x > 0.0, 1.0, 1.0 - _exp(tl.where(x > 0.0, 0.0, x)))", "elu+1: the derivative of negative numbers", PLAIN),
    Fault(CHUNKS, "found = tl.where(x <= 0.0, 0.0, gradient)", "found = tl.where(x <= 0.0, gradient, 0.0)", "relu: the derivative", gradients("relu")),
    Fault(CHUNKS, "found = p * (gradient - tl.sum(p * gradient, 1)[:, None])", "found = p * gradient", "softmax features: the derivative without the mean", gradients("softmax")),
    Fault(CHUNKS, "x = tl.where(exist, x, float(\"-inf\"))", "x = tl.where(exist, x, 0.0)", "softmax features: columns behind the last count", budget("softmax")),
    Fault(CHUNKS, "found = gradient * feature_map.DERIVATIVE(x)", "found = feature_map.DERIVATIVE(x)", "a user's features: the derivative without the gradient", gradients("functions")),
)

OF_STATES = (
    Fault(STATES, "            chunk = last - i\n", "            chunk = i\n", "linear: gradients of states from the first chunk on", TWO_CHUNKS),
    Fault(STATES, "states.kv, span.first_chunk + chunk, head", "states.kv, span.first_chunk + i, head", "linear: gradients of states stored in the other order", TWO_CHUNKS),
    Fault(STATES, "states.k_sum, span.first_chunk + chunk, head", "states.k_sum, span.first_chunk + i, head", "linear: gradients of sums stored in the other order", TWO_CHUNKS),
    Fault(STATES, "k_sum -= sum_along(phi * delta[:, None], 0, ACC)", "k_sum += sum_along(phi * delta[:, None], 0, ACC)", "linear: the sign of delta in the gradient of sums", PLAIN),
    Fault(STATES, "phi = phi * scale[:, None]", "phi = phi * 1.0", "linear: gradients of states without the denominator", PLAIN),
    Fault(STATES, "elif not REVERSED:", "elif True:", "linear: sums of queries in the gradient of sums", SUMS),
    Fault(STATES, "for h in range(head * group, head * group + group):", "for h in range(head * group, head * group + 1):", "linear: gradients of states of one head of a group", GROUPS),
    Fault(STATES, "state += tl.load(ptrs, mask=exist, other=0.0)", "state -= tl.load(ptrs, mask=exist, other=0.0)", "linear: the initial state is taken off", HIDDEN),
    Fault(STATES, "k_sum += tl.load(ptrs, mask=exist, other=0.0)", "k_sum += 0.0 * tl.load(ptrs, mask=exist, other=0.0)", "linear: no initial sum", HIDDEN),
    Fault(STATES, "readable = rows_of_chunk(span, start, valid_ptr,", "readable = rows_of_chunk(span, start, None,", "linear: hidden keys are in the state", HIDDEN),
    Fault(STATES, "mask=exist & (block == 0))", "mask=exist)", "linear: sums of a chunk are stored by every block", MEMORY, nth=0),
    Fault(STATES, "mask=exist & (block == 0))", "mask=exist)", "linear: the last sum is stored by every block", MEMORY, nth=1),
    Fault(STATES, "last = tl.cdiv(span.seqlen, tile.CHUNK) - 1", "last = span.seqlen // tile.CHUNK - 1", "linear: the last tokens are no part of the state", PLAIN),
    Fault(STATES, "sequence = tl.program_id(0) % n_sequences", "sequence = 0 * tl.program_id(0)", "linear: states of the first sequence alone", HIDDEN),
)

OF_OUTPUTS = (
    Fault(OUTPUTS, "tl.where(offs[:, None] >= offs[None, :], products, 0.0)", "tl.where(offs[:, None] > offs[None, :], products, 0.0)", "linear: a query does not see its own key", PLAIN),
    Fault(OUTPUTS, "tl.where(offs[:, None] <= offs[None, :], products, 0.0)", "tl.where(offs[:, None] < offs[None, :], products, 0.0)", "linear: dv without the query beside a value", PLAIN),
    Fault(OUTPUTS, "products = products * scale[None, :]", "products = products * 1.0", "linear: dv without the denominator", PLAIN),
    Fault(OUTPUTS, "head_kv = head // (nheads // nheads_kv)", "head_kv = head % nheads_kv", "linear: the state of another head of keys", GROUPS),
    Fault(OUTPUTS, "index = chunk if CAUSAL else span.sequence", "index = span.sequence", "linear: the state before the first chunk for all", TWO_CHUNKS),
    Fault(OUTPUTS, "index = chunk if CAUSAL else span.sequence", "index = chunk", "linear: not causal, the state of a chunk", PACKED_TESTS),
    Fault(OUTPUTS, "den += sum_along(products, 1, ACC)", "den += 0.0 * sum_along(products, 1, ACC)", "linear: the denominator without the tokens of the chunk", PLAIN),
    Fault(OUTPUTS, "acc = tl.where(den[:, None] == 0.0, 0.0, quotient(", "acc = tl.where(den[:, None] < 0.0, 0.0, quotient(", "linear: a sum of weights of 0 divides by 1", hostile("cancel")),
    Fault(OUTPUTS, "mask=exist & (block == 0))", "mask=exist)", "linear: the denominator is stored by every block", MEMORY),
    Fault(OUTPUTS, "acc = tl.where(valid[:, None], acc, 0.0)", "acc = tl.where(exist[:, None], acc, 0.0)", "linear: NaN in the gradient of a hidden value", hostile("comes_back")),
    Fault(OUTPUTS, "for h in range(head * group, head * group + group):", "for h in range(head * group, head * group + 1):", "linear: dv of one head of a group", GROUPS),
    Fault(OUTPUTS, "of_w = exist if TRANSPOSED else valid", "of_w = exist", "linear: hidden keys are seen inside a chunk", HIDDEN),
    Fault(OUTPUTS, "block = tl.program_id(0) // n_all // nheads", "block = 0 * tl.program_id(0)", "linear: out of the first values alone", WIDE),
)

OF_FEATURES = (
    Fault(FEATURES, "dphi -= delta[:, None] * tl.load(", "dphi += delta[:, None] * tl.load(", "linear: the sign of delta in dq", PLAIN),
    Fault(FEATURES, "ds = tl.where(seen, ds - delta[:, None], 0.0)", "ds = tl.where(seen, ds, 0.0)", "linear: dq without delta inside a chunk", PLAIN),
    Fault(FEATURES, "delta += row_dot(weights, ds, ACC)", "delta += 0.0 * row_dot(weights, ds, ACC)", "linear: delta without the tokens of the chunk", PLAIN),
    Fault(FEATURES, "delta += row_dot(_features(", "delta += 0.0 * row_dot(_features(", "linear: delta without the state", PLAIN),
    Fault(FEATURES, "seen = (offs[:, None] >= offs[None, :])", "seen = (offs[:, None] > offs[None, :])", "linear: dq without the key beside a query", PLAIN),
    Fault(FEATURES, "seen = (offs[:, None] >= offs[None, :])", "seen = (offs[:, None] >= 0 * offs[None, :])", "linear: dq from later keys of a chunk", PLAIN),
    Fault(FEATURES, "empty = den == 0.0", "empty = den < 0.0", "linear: gradients of a query without weights", NO_WEIGHTS),
    Fault(FEATURES, "delta = tl.where(empty, 0.0, divide(delta, den))", "delta = tl.where(empty, 0.0, delta)", "linear: delta without the denominator", PLAIN),
    Fault(FEATURES, "            w_phi = _features(w, span, head_kv, start, of_w, feature_map, tile, ACC)\n            dphi +=", "            w_phi = _features(w, span, 0, start, of_w, feature_map, tile, ACC)\n            dphi +=", "linear: dq by the keys of the first head", GROUPS),
    Fault(FEATURES, "ds = (ds - delta[None, :]) * scale[None, :]", "ds = ds * scale[None, :]", "linear: dk without delta", PLAIN),
    Fault(FEATURES, "ds = tl.where(offs[:, None] <= offs[None, :], ds, 0.0)", "ds = tl.where(offs[:, None] < offs[None, :], ds, 0.0)", "linear: dk without the query beside a key", PLAIN),
    Fault(FEATURES, "dphi += tl.load(ptrs, mask=there, other=0.0)[None, :]", "dphi += 0.0 * tl.load(ptrs, mask=there, other=0.0)[None, :]", "linear: dk without the gradient of sums", PLAIN),
    Fault(FEATURES, "of_x = valid if TRANSPOSED else exist", "of_x = exist", "linear: hidden keys have a gradient", HIDDEN),
    Fault(FEATURES, "index = chunk if CAUSAL else span.sequence", "index = span.sequence", "linear: gradients by the state of the first chunk", TWO_CHUNKS),
    Fault(FEATURES, "found = through_features(x_tile, dphi, of_x,", "found = through_features(x_tile * 0.5, dphi, of_x,", "linear: derivatives of features at another place", PLAIN),
)

ON_TORCH = (
    Fault(CHUNKED, ".triu(1)", ".triu(0)", "linear, torch: a query does not see its own key", "tests/linear/test_budget.py -k 'test_budget and plain and not triton'"),
    Fault(CHUNKED, "k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)", "k, v = k.masked_fill(hidden, 0.0), v", "linear, torch: NaN of a hidden value", hostile("hidden_keys", "torch")),
    Fault(CHUNKED, "phi_k = phi_k.masked_fill(hidden, 0.0)\n    #", "phi_k = phi_k.masked_fill(hidden, 1.0)\n    #", "linear, torch: hidden keys are seen", hostile("all_keys_hidden", "torch")),
    Fault(CHUNKED, "        state = _with_tokens(state, of_k, of_v)\n", "        state = _with_tokens(state, 0.0 * of_k, of_v)\n", "linear, torch: no state", "tests/linear/test_cost.py -k 'one_by_one and torch'"),
    Fault(CHUNKED, "poisoned[:, :, None, :] & ~hidden", "poisoned[:, :, None, :] & hidden", "linear, torch: NaN reaches earlier queries", hostile("earlier", "torch")),
    Fault(CHUNKED, "empty = den == 0", "empty = den < 0", "linear, torch: a sum of weights of 0", hostile("cancel", "torch")),
    Fault(CHUNKED, "with torch.autocast(q.device.type, enabled=False):", "with torch.autocast(q.device.type, enabled=torch.is_autocast_enabled(q.device.type)):", "linear, torch: autocast inside", "tests/linear/test_errors.py -k 'test_autocast and torch'"),
    Fault(CHUNKED, "x.split(CHUNK, dim=-2) for", "[x[..., i : i + CHUNK, :] for i in range(0, x.shape[-2], CHUNK)] for", "linear, torch: a backward of quadratic cost", "tests/linear/test_cost.py -k 'allocation and torch'"),
    Fault(PACKED, "valid[:, start:end]", "valid[:, : end - start]", "linear, torch: hidden tokens of the first sequence for all", "tests/linear/test_hostile.py -k 'hidden_keys and packed and torch'"),
)

CALLS = (
    Fault(LAUNCHING, "None if is_reversed else self.valid,", "None,", "linear: hidden keys are in every state", HIDDEN),
    Fault(LAUNCHING, "return self.valid if self.causal else None", "return None", "linear: hidden keys of a chunk are seen", HIDDEN),
    Fault(LAUNCHING, "(cu_seqlens.diff() + (size - 1)) // size", "cu_seqlens.diff() // size", "linear: no chunk for the last tokens of a sequence", PACKED_TESTS),
    Fault(LAUNCHING, "k.shape[2] // size + n_sequences)", "k.shape[2] // size)", "linear: too few chunks of packed sequences", PACKED_TESTS),
    Fault(LAUNCHING, "like.new_empty if options.cu_seqlens is None else like.new_zeros", "like.new_empty", "linear: tokens of no sequence are not written", BEHIND),
    Fault(MAPS, "directions = directions * triangles.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]", "directions = directions * 1.0", "random features: the signs of QR", FAVOR),
    Fault(MAPS, "(self._exponents(k).exp() / math.sqrt(self.projection.shape[0]))", "(self._exponents(k).exp() / math.sqrt(self.projection.shape[1]))", "random features: divided by the root of head_dim", FAVOR),
    Fault(MAPS, "dim=-1, keepdim=True) / 2\n", "dim=-1, keepdim=True)\n", "random features: without the half of the square", FAVOR),
    Fault(MAPS, "x = x.to(dtype) * head_dim**-0.25", "x = x.to(dtype) * head_dim**-0.5", "random features: of scores that are too small", FAVOR),
)

IN_A_MODEL = (
    Fault(LAYER, "weights = torch.where(total == 0, 0.0, products", "weights = torch.where(total < 0, 0.0, products", "linear layer: weights that add up to 0", "tests/transformer/test_efficient_attention.py -k add_up"),
    Fault(LAYER, "products.tril() if causal else products", "products", "linear layer, with a state: a query sees later tokens of a prompt", UNEVEN),
    Fault(LAYER, "products.tril() if causal else products", "products.tril()", "linear layer, with a state: always causal", generating("without_a_causal_mask")),
    Fault(LAYER, "keepdim=True) + phi_q @ state.k_sum[:, :, None, :, None]", "keepdim=True)", "linear layer, with a state: the sum of weights of the new tokens alone", UNEVEN),
    Fault(LAYER, "output = torch.where(total == 0, 0.0, output / total)", "output = output / total", "linear layer, with a state: NaN where nothing is seen", MASKED),
    Fault(LAYER, "for x in (phi_k, wide_v))", "for x in (phi_k, wide_v)) if causal is None else (phi_k, wide_v)", "linear layer, with a state: hidden tokens are seen", MASKED),
    Fault(LAYER, "valid if shown is None else valid & shown", "valid", "linear layer, with a state: a mask replaces the left padding", MASKED),
    Fault(LAYER, "q, k = cache.rope.at(numbers, numbers).rotate(q, k)", "q, k = cache.rope.rotate(q, k)", "linear layer, with a state: every call rotates from the first position on", UNEVEN),
    Fault(CACHE, "return (self.lengths - n)[:, None] + torch", "return self.lengths[:, None] + torch", "states: new tokens are numbered from the last one on", UNEVEN),
    Fault(CACHE, "self.numbers(n) >= self.left_padding", "self.numbers(n) > self.left_padding", "states: the first token behind the padding is hidden", MASKED),
    Fault(CACHE, "stays = known & ~begins", "stays = known", "states: a sequence begins with the state of another", generating("begins_anew")),
    Fault(CACHE, "known = begins | (start == self.counted)", "known = begins | (start <= self.counted)", "states: tokens that were taken back are seen", generating("not_those_of_the_state")),
    Fault(CACHE, "torch.where(begins, 0.0, math.nan)", "torch.where(begins, 0.0, 0.0)", "states: other lengths are a new sequence where they are not read", generating("not_those_of_the_state")),
    Fault(CACHE, "state=LinearState(*(x[own] for x in self.state))", "state=LinearState(*(x[own].clone() for x in self.state))", "states: a part of a batch has a copy", UNEVEN),
    Fault(CACHE, "counted=self.counted[own],", "counted=self.counted[own].clone(),", "states: a part of a batch counts for itself", UNEVEN),
    Fault(CACHE, "self.left_padding[own]", "self.left_padding[: lengths.shape[0]]", "states: the padding of the first sequence for all parts", generating("parts")),
    Fault(MODEL_CACHE, "                x.copy_(held)\n", "                pass\n", "states: after an error, tokens stay in the first layers", generating("error")),
    Fault(MODEL_CACHE, "except BaseException:", "except Exception:", "states: tokens stay after an interrupt", generating("error")),
    Fault(TWINS, "valid=valid,\n            initial_state=state", "valid=None,\n            initial_state=state", "fused linear layer, with a state: hidden tokens are seen", MASKED),
    Fault(TWINS, "initial_state=state,", "initial_state=None,", "fused linear layer: the state before is forgotten", UNEVEN),
    Fault(TWINS, "causal=causal,\n            valid=valid,", "valid=valid,", "fused linear layer, with a state: always causal", generating("without_a_causal_mask")),
)
# fmt: on

FAULTS = (*SHARED, *OF_STATES, *OF_OUTPUTS, *OF_FEATURES, *ON_TORCH, *CALLS, *IN_A_MODEL)
