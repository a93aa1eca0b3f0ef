"""Faults in attention in few bits: rounding, scales, rotation, smoothing, and the order of the steps."""

from tests.mutation.fault import Fault

FORMATS, SCALING = "fusedattn/low_precision/formats.py", "fusedattn/low_precision/scaling.py"
ROTATION, SMOOTHING = "fusedattn/low_precision/rotation.py", "fusedattn/low_precision/smoothing.py"
ATTENTION, RECIPES = "fusedattn/low_precision/attention.py", "fusedattn/low_precision/recipes.py"

NUMBERS = "tests/low_precision/test_formats.py"
SCALES = "tests/low_precision/test_scaling.py"
SMOOTH = "tests/low_precision/test_smoothing.py"
WHOLE = "tests/low_precision/test_attention.py"
UNCHANGED = "tests/low_precision/test_attention.py -k change_nothing"
HIDDEN = "tests/low_precision/test_attention.py -k 'hidden or kv_head or seen'"

# fmt: off
FAULTS = (
    Fault(FORMATS, 'Format("e4m3", 3, -6, 448.0)', 'Format("e4m3", 3, -6, 480.0)', "e4m3: the code of NaN is a number", NUMBERS),
    Fault(FORMATS, 'Format("e4m3", 3, -6, 448.0)', 'Format("e4m3", 3, -7, 448.0)', "e4m3: subnormal numbers too fine", NUMBERS),
    Fault(FORMATS, 'Format("e5m2", 2, -14, 57344.0)', 'Format("e5m2", 3, -14, 57344.0)', "e5m2: a digit too many", NUMBERS),
    Fault(FORMATS, 'Format("e2m1", 1, 0, 6.0)', 'Format("e2m1", 1, 1, 6.0)', "e2m1: no 0.5", NUMBERS),
    Fault(FORMATS, 'Format("int8", 6, 6, 127.0)', 'Format("int8", 6, 5, 127.0)', "int8: halves", NUMBERS),
    Fault(FORMATS, "    x = x.clamp(-format.largest, format.largest)\n", "", "numbers beyond the largest", NUMBERS),
    Fault(FORMATS, "(x / step).round() * step", "(x / step + 0.5).floor() * step", "ties upwards", NUMBERS),
    Fault(FORMATS, "torch.frexp(x).exponent - 1)", "torch.frexp(x).exponent)", "steps twice as wide", NUMBERS),
    Fault(FORMATS, "math.frexp(self.largest)[1] - 1", "math.frexp(self.largest)[1]", "the exponent of the largest number, one too large", NUMBERS),
    Fault(SCALING, "return largest / format.largest\n", "return largest / (format.largest + 1)\n", "scales: the largest number is cut off", SCALES),
    Fault(SCALING, "(largest.amax() / format.largest)", "(largest.amin() / format.largest)", "one scale, of the least group", SCALES),
    Fault(SCALING, "exponent - 1 - format.largest_exponent", "exponent - format.largest_exponent", "MX: scales twice as large", SCALES),
    Fault(SCALING, "torch.where(mantissa == 0.5, exponent - 1, exponent)", "exponent", "MX, scales up: twice as large for powers of two", SCALES),
    Fault(SCALING, "    exponent = exponent.clamp(SMALLEST_POWER, LARGEST_POWER)\n", "", "MX: scales that E8M0 does not have", SCALES),
    Fault(SCALING, "    numbers = torch.where(groups.isfinite(), numbers, torch.nan)\n", "", "infinities become the largest number", SCALES),
    Fault(SCALING, "return rounded(largest / format.largest, E4M3)", "return largest / format.largest", "NVFP4: scales are not rounded", SCALES),
    Fault(SCALING, "tensor_scale(largest, format) / E4M3.largest", "tensor_scale(largest, format)", "NVFP4: the scale of the tensor 448 times too large", SCALES),
    Fault(SCALING, "e4m3_scales(largest / whole, format), 0.0) * whole", "e4m3_scales(largest / whole, format), 0.0)", "NVFP4: without the scale of the tensor", SCALES),
    Fault(SCALING, "tokens=self.features, features=self.tokens", "tokens=self.tokens, features=self.features", "v: groups of features", SCALES),
    Fault(SCALING, "torch.where(scale > 0, rounded(groups / scale, how.format), 0.0)", "rounded(groups / scale, how.format)", "groups of zeros are NaN", SCALES),
    Fault(SCALING, "torch.where(sizes < math.inf, sizes, 0.0)", "sizes", "numbers that are not finite count for scales", SCALES),
    Fault(SCALING, "F.pad(x, (0, -d % features, 0, -n % tokens))", "F.pad(x, (0, -d % features, 0, -n % tokens), value=1.0)", "groups at the end count numbers that are not there", SCALES),
    Fault(SCALING, "sizes = groups.abs()", "sizes = groups", "negative numbers do not count for a scale", SCALES),
    Fault(SCALING, "Quantisation(format, rule, tokens=1, features=32)", "Quantisation(format, rule, tokens=1, features=16)", "MX: groups of 16", SCALES),
    Fault(SCALING, "Quantisation(E2M1, rule, tokens=1, features=16)", "Quantisation(E2M1, rule, tokens=1, features=32)", "NVFP4: groups of 32", SCALES),
    Fault(SCALING, "torch.full_like(largest, 1.0 / format.largest)", "torch.ones_like(largest)", "weights: without a scale", SCALES),
    Fault(SCALING, "whole = 1.0 / (format.largest * E4M3.largest)", "whole = 1.0 / format.largest", "weights in two levels: scales of 1 and less", SCALES),
    Fault(ROTATION, "torch.stack((a + b, a - b), dim=-2)", "torch.stack((a + b, b - a), dim=-2)", "Hadamard: another matrix", SMOOTH),
    Fault(ROTATION, "return x / math.sqrt(n)", "return x / n", "Hadamard: not orthonormal", SMOOTH),
    Fault(ROTATION, "if n < 1 or n & (n - 1):", "if n < 1:", "Hadamard: sizes that have no such matrix", SMOOTH),
    Fault(ROTATION, " * signs(n).to(x))", ")", "rotation: without signs", SMOOTH),
    Fault(SMOOTHING, "x.masked_fill(~seen[..., None], 0.0).sum", "x.sum", "means: tokens that do not count", SMOOTH),
    Fault(SMOOTHING, "seen.sum(dim=-1)[..., None, None].clamp(min=1)", "seen.shape[-1]", "means: divided by all tokens", SMOOTH),
    Fault(SMOOTHING, "torch.repeat_interleave(means, tokens, dim=-2)", "means.repeat(1, 1, tokens, 1)", "means of other blocks", SMOOTH),
    Fault(ATTENTION, "lost * scale", "lost", "smooth k: lse without the scale of the scores", UNCHANGED),
    Fault(ATTENTION, "k = _zeroed(k - mean, seen)\n", "pass\n", "smooth k: nothing is subtracted", WHOLE),
    Fault(ATTENTION, "return q @ k.mT + of_mean, lost", "return q @ k.mT, lost", "smooth q: the term of the mean is lost", UNCHANGED),
    Fault(ATTENTION, "q = _zeroed(q - mean, asking)\n", "pass\n", "smooth q: nothing is subtracted", UNCHANGED),
    Fault(ATTENTION, "q, k = rotated(q), rotated(k)", "q, k = rotated(q), k", "rotation: only q", UNCHANGED),
    Fault(ATTENTION, "    if recipe.rotate:\n", "    if False:\n", "rotation: never", WHOLE),
    Fault(ATTENTION, "out = _maybe(weights, recipe.weights) @ v", "out = weights @ v", "weights are not rounded", WHOLE),
    Fault(ATTENTION, "v = _maybe(v, recipe.v).repeat", "v = v.repeat", "v is not rounded", WHOLE),
    Fault(ATTENTION, "q, k = _maybe(q, recipe.q), _maybe(k, recipe.k)", "q, k = _maybe(q, recipe.k), _maybe(k, recipe.q)", "q is rounded as k is", WHOLE),
    Fault(ATTENTION, "@ v / weights.sum(dim=-1, keepdim=True)", "@ v / _maybe(weights, recipe.weights).sum(dim=-1, keepdim=True)", "the sum of rounded weights", WHOLE),
    Fault(ATTENTION, ".any(dim=2).any(dim=2)", "[:, :, 0].any(dim=2)", "keys that only the first head of a group sees", HIDDEN),
    Fault(ATTENTION, "(q, asking), (k, seen), (v, seen)", "(q, asking), (k, seen), (v, seen | True)", "hidden values count for scales", HIDDEN),
    Fault(ATTENTION, "(q, asking), (k, seen), (v, seen)", "(q, asking | True), (k, seen), (v, seen)", "queries that see nothing count for scales", HIDDEN),
    Fault(ATTENTION, "_zeroed(k - mean, seen)", "k - mean", "smooth k: the mean counts for scales in place of hidden keys", HIDDEN),
    Fault(ATTENTION, "_zeroed(q - mean, asking)", "q - mean", "smooth q: the mean counts for scales in place of queries that see nothing", HIDDEN),
    Fault(ATTENTION, "(lse + lost * scale).masked_fill(~asking, -math.inf)", "lse + lost * scale", "lse of a query that sees nothing is NaN beside a NaN", HIDDEN),
    Fault(RECIPES, "Recipe(how, how, how.transposed, ", "Recipe(how, how, how, ", "microscaling: values in groups of features", WHOLE),
)
