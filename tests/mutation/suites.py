"""The tests that see a fault first, by what they look at."""


def budget(*words: str, dtype: str = "float32") -> str:
    """The error budget of the cases whose names have one of these words."""
    return f"tests/public/test_attention.py -k 'test_budget and {dtype} and ({' or '.join(words)})'"


def gradients(*words: str) -> str:
    """Gradcheck of the features whose names have one of these words."""
    return f"tests/public/test_gradcheck.py -k 'of_a_feature and ({' or '.join(words)})'"


def pair(one: str, other: str) -> str:
    """Gradcheck of two features together."""
    return f"tests/public/test_gradcheck.py -k 'of_a_pair and {one} and {other}'"


def integration(library: str, *words: str) -> str:
    """The tests beside a library whose names have one of these words."""
    return f"tests/integrations/test_{library}.py -k '{' or '.join(words)}'"


GRADIENTS = "tests/public/test_gradcheck.py -k of_a_feature"
EXACT = "tests/public/test_attention.py -k 'test_budget and float32'"
HALVES = "tests/public/test_attention.py -k 'test_budget and bfloat16'"
COMMON = "tests/public/test_attention.py -k share"
BLOCKS = "tests/kernels/test_blocks.py"
MEMORY = "tests/public/test_memory.py"
LARGE = "tests/public/test_large_tensors.py"
ORDER = "tests/kernels/test_order.py"
STYLES = "tests/kernels/test_styles.py"
IN_PLACE = "tests/kernels/test_styles.py -k rotated_in_place"
IN_PIECES = "tests/kernels/test_styles.py -k pieces"
STRIDES = "tests/public/test_strides.py -k 'not torch'"
PACKED = "tests/public/test_varlen.py"
PACKED_BLOCKS = "tests/kernels/test_blocks.py -k packed"
SECOND_ORDER = "tests/public/test_second_order.py"

ACCURATE_TESTS = "tests/kernels/test_accurate_math.py"
NOISE = "tests/kernels/test_hardware_noise.py -k 'test_budget and float32'"
COMMON_STRONG = "tests/kernels/test_hardware_noise.py -k common"
FINITE = "tests/public/test_fuzz.py -k 'contract and (lowest or highest)'"
NAN = "tests/public/test_masking.py -k 'triton and (reaches or infinite or nan or no_query)'"
EMPTY = "tests/public/test_masking.py -k 'triton and nothing'"
ROTARY = gradients("rope", "tables", "positions", "more")
ROTATED = budget("RoPE")
TABLES = "tests/public/test_rope.py"

WINDOW = budget("window", "everything")
CAUSAL = budget("causal")
BANDS = "tests/public/test_masking.py -k bands"
PREFIX = budget("prefix", "everything")
DOCUMENTS = budget("documents", "everything")
SPARSE = budget("block-sparse", "everything")
BOOLEAN = budget("boolean")
MASK_FUNCTION = budget("mask")
PADDING = budget("padding")
WIDTHS = budget("values")
WIDE = "tests/kernels/test_wide.py"
SOFTCAP = gradients("soft-cap")
SCORE = budget("score", "everything")
BIAS = budget("bias")
BROADCAST_BIAS = "tests/public/test_biases.py -k broadcast_bias"
ALIBI = budget("ALiBi", "everything")
RELATIVE = budget("relative", "everything")
SINKS = budget("sinks")
LARGEST = "tests/public/test_max.py -k 'not budget'"
DROPPED = budget("dropout")

MODEL_MASKS = "tests/integrations/test_transformers_masks.py"
WRITTEN_OUT = "tests/public/test_weights.py -k 'hidden or dropout or 16_bits or another or hide'"
FUNCTION_INDICES = "tests/public/test_learned.py -k that_are_there"
INFINITE = "tests/public/test_biases.py -k infinite"
