"""Faults in the gradients of ALiBi's slopes and of tensors that score functions read, and in exact sums."""

from tests.mutation.fault import Fault
from tests.mutation.suites import ALIBI, MEMORY, PACKED

LEARNED, SUM = "kernels/attention_bwd_learned.py", "kernels/exact_sum.py"
FUNCTIONS, SCORE_MOD, OPERANDS = (
    "fusedattn/functions.py",
    "fusedattn/score_mod.py",
    "fusedattn/backends/triton/operands.py",
)
LAUNCHING, AUTOGRAD = "fusedattn/backends/triton/launching.py", "fusedattn/backends/triton/autograd.py"
TESTING, CASES = "fusedattn/testing/budget.py", "fusedattn/testing/cases.py"

TESTS = "tests/public/test_learned.py"
ARGS = "tests/public/test_learned.py -k 'args'"
SLOPES = "tests/public/test_learned.py -k 'slopes or batches'"
SUMS = "tests/public/test_learned.py -k 'sums'"

# fmt: off
KERNEL = (
    Fault(LEARNED, "tl.range(0, blocks.n_full + blocks.n_boundary, ", "tl.range(0, blocks.n_full, ", "learned: boundary blocks left out", ARGS),
    Fault(LEARNED, "numbers_of_pairs(place, block.rows, block.keys)", "(place.sequence, place.head, block.rows, block.keys)", "learned: queries and keys beyond the last", TESTS),
    Fault(LEARNED, "scores, _ = capped(products, call.score, scale)", "scores = products * scale", "learned: derivative of scores without the soft-cap", ARGS),
    Fault(LEARNED, "scores, _ = capped(products, call.score, scale)", "scores = products", "learned: derivative of products without their scale", ARGS),
    Fault(LEARNED, "DERIVATIVE(scores, of_sequence, of_head, query, key,", "DERIVATIVE(scores, of_sequence, 0, query, key,", "learned: derivative of head 0 for all", ARGS),
    Fault(LEARNED, "DERIVATIVE(scores, of_sequence, of_head, query, key,", "DERIVATIVE(scores, 0, of_head, query, key,", "learned: derivative of batch 0 for all", ARGS),
    Fault(LEARNED, "INDEX(of_sequence, of_head, query, key,", "INDEX(of_sequence, of_head, key, query,", "learned: queries and keys exchanged", ARGS),
    Fault(LEARNED, "INDEX(of_sequence, of_head, query, key,", "INDEX(0, of_head, query, key,", "learned: index of batch 0 for all", ARGS),
    Fault(LEARNED, "terms = tl.where(pairs, ds * tl.cast(derivative, dtype_of(tile.ACC)), 0.0)", "terms = ds * tl.cast(derivative, dtype_of(tile.ACC))", "learned: derivatives of hidden pairs", "tests/public/test_fuzz.py"),
    Fault(LEARNED, "ds * tl.cast(derivative, dtype_of(tile.ACC))", "ds * derivative", "learned: terms in the dtype of the args", ARGS),
    Fault(LEARNED, "index = sequence * call.score.slopes_stride + head", "index = head", "dslopes: those of all batches in the first", SLOPES),
    Fault(LEARNED, "index = sequence * call.score.slopes_stride + head", "index = place.batch * call.score.slopes_stride + head", "dslopes: those of all sequences in the first", PACKED),
    Fault(LEARNED, "terms = -ds * tl.abs(distance_of(place, block)).to(dtype_of(tile.ACC))", "terms = ds * tl.abs(distance_of(place, block)).to(dtype_of(tile.ACC))", "dslopes: sign", ALIBI),
    Fault(LEARNED, "tl.abs(distance_of(place, block)).to(dtype_of(tile.ACC))", "distance_of(place, block).to(dtype_of(tile.ACC))", "dslopes: distances with their signs", SLOPES),
    Fault(LEARNED, "    if index.shape[0] == 1:\n            terms = tl.sum(terms, 0, keep_dims=True)\n", "    pass\n", "learned: nothing summed over queries", TESTS),
    Fault(LEARNED, "terms = tl.sum(terms, 1, keep_dims=True)", "terms = tl.max(terms, 1, keep_dims=True)", "learned: the largest over keys", ARGS),
    Fault(LEARNED, "(index >= 0) & (index < n_entries)", "index < n_entries", "learned: written before the first entry", TESTS),
    Fault(LEARNED, "(index >= 0) & (index < n_entries)", "index >= 0", "learned: written beyond the last entry", TESTS),
    Fault(LEARNED, "x[start:] for x in sums", "x for x in sums", "learned: all parts in the first", ARGS),
    Fault(LEARNED, ".to(learned.dtype)", "", "learned: gradient in float32", "tests/public/test_compile.py -k opcheck"),
)

SUMS_OF_TERMS = (
    Fault(SUM, "WORDS = tl.constexpr(12)", "WORDS = tl.constexpr(11)", "exact sums: a word too few", SUMS),
    Fault(SUM, "BITS = tl.constexpr(24)", "BITS = tl.constexpr(25)", "exact sums: words of 25 bits, cut at 24", SUMS),
    Fault(SUM, "SMALLEST = -149", "SMALLEST = -150", "exact sums: half of them", SUMS),
    Fault(SUM, "tl.where(exponent > 0, fraction | 0x800000, fraction)", "fraction | 0x800000", "exact sums: subnormal terms with a leading 1", SUMS),
    Fault(SUM, "tl.maximum(exponent, 1) - 1", "tl.maximum(exponent, 1)", "exact sums: twice of them", SUMS),
    Fault(SUM, "tl.where(bits < 0, -1, 1)", "tl.where(bits < 0, 1, 1)", "exact sums: of absolute terms", SUMS),
    Fault(SUM, "torch.where(sums.special_ptr == 0, total.float(), sums.special_ptr)", "total.float() + sums.special_ptr", "exact sums: of infinities and what overflows", SUMS),
    Fault(SUM, "mask=mask & (exponent == 255)", "mask=mask & (exponent == 256)", "exact sums: infinities lost", SUMS),
    Fault(SUM, "tl.atomic_add(words + 1, sign * (value >> BITS)", "tl.atomic_add(words + 1, (value >> BITS)", "exact sums: upper words without a sign", SUMS),
    Fault(SUM, "columns[i + 1] = columns[i + 1] + (columns[i] >> BITS.value)", "columns[i + 1] = columns[i + 1] + 0", "exact sums: carries lost", SUMS),
    Fault(SUM, "        columns[i] = columns[i] & (2**BITS.value - 1)\n", "", "exact sums: carries counted twice", SUMS),
    Fault(SUM, "for i in reversed(range(len(columns))):", "for i in range(len(columns)):", "exact sums: rounded from below", SUMS),
    Fault(SUM, "torch.zeros(n, WORDS.value,", "torch.empty(n, WORDS.value,", "exact sums: not 0 before", SUMS),
    Fault(SUM, "return ExactSums(words, torch.zeros(n, device=device))", "return ExactSums(words, torch.empty(n, device=device))", "exact sums: what is not finite is not 0 before", SUMS),
    Fault(SUM, "torch.zeros(n, dtype=dtype, device=device)", "torch.empty(n, dtype=dtype, device=device)", "exact sums: float64 ones not 0 before", ARGS),
)

HOST = (
    Fault(FUNCTIONS, "next(parts) if isinstance(x, LearnedArg)", "learned if isinstance(x, LearnedArg)", "learned: every part is read from the first", ARGS),
    Fault(FUNCTIONS, "found.append((start, args[i].n_entries", "found.append((0, args[i].n_entries", "learned: every part is written to the first", ARGS),
    Fault(FUNCTIONS, "registered(index), registered(derivative)", "registered(derivative), registered(index)", "learned: index and derivative exchanged", ARGS),
    Fault(SCORE_MOD, "tuple(sorted({gradient.arg for gradient in self.arg_gradients}))", "tuple({gradient.arg: 0 for gradient in self.arg_gradients})", "learned: parts in the order of their gradients", ARGS),
    Fault(SCORE_MOD, "dtype = functools.reduce(torch.promote_types, (x.dtype for x in parts))", "dtype = parts[0].dtype", "learned: args in the dtype of the first", ARGS),
    Fault(SCORE_MOD, "    if not x.is_contiguous():\n", "    if False:\n", "learned: strides of args not checked", TESTS),
    Fault(OPERANDS, '"" if score_mod is None else score_mod.readers', '""', "learned: nothing is read", ARGS),
    Fault(LAUNCHING, "    if needed[5]:\n", "    if slopes is not None:\n", "dslopes: computed though nobody needs it", TESTS),
    Fault(LAUNCHING, "function_args=with_learned(constants.score_args, learned)", "function_args=with_learned(constants.score_args, learned.detach().zero_() if learned is not None else None)", "learned: args zeroed", MEMORY),
    Fault(AUTOGRAD, "slopes=slopes)", "slopes=bias.slopes)", "eager: derivatives by the slopes lost", TESTS),
    Fault(AUTOGRAD, "score_mod = score_mod.with_learned(learned)", "score_mod = options.score_mod", "eager: derivatives by the args lost", TESTS),
    Fault(TESTING, "dscores * derivative.sign()", "dscores", "testing: terms of args cancel", "tests/public/test_testing.py"),
    Fault(TESTING, "{name: x.abs() for name, x in through_bias", "{name: x for name, x in through_bias", "testing: terms of slopes are negative", "tests/public/test_testing.py"),
    Fault(CASES, "wide if name in _WIDE else dtype", "dtype", "testing: slopes in 16 bits", "tests/public/test_testing.py"),
)
# fmt: on

FAULTS = (*KERNEL, *SUMS_OF_TERMS, *HOST)
