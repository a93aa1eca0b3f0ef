"""The tests that see a fault first, by what they look at."""


def budget(*words: str, dtype: str = "float32") -> str:
    """The error budget of the cases whose names have one of these words."""
    return f"tests/test_attention.py -k 'test_budget and {dtype} and ({' or '.join(words)})'"


def gradients(*words: str) -> str:
    """Gradcheck of the features whose names have one of these words."""
    return f"tests/test_gradcheck.py -k 'of_a_feature and ({' or '.join(words)})'"


def pair(one: str, other: str) -> str:
    """Gradcheck of two features together."""
    return f"tests/test_gradcheck.py -k 'of_a_pair and {one} and {other}'"


def integration(library: str, *words: str) -> str:
    """The tests beside a library whose names have one of these words."""
    return f"tests/integrations/test_{library}.py -k '{' or '.join(words)}'"


GRADIENTS = "tests/test_gradcheck.py -k of_a_feature"
EXACT = "tests/test_attention.py -k 'test_budget and float32'"
HALVES = "tests/test_attention.py -k 'test_budget and bfloat16'"
COMMON = "tests/test_attention.py -k common"
BLOCKS = "tests/test_blocks.py"
MEMORY = "tests/test_memory.py"
LARGE = "tests/test_large_tensors.py"
ORDER = "tests/test_order.py"
STYLES = "tests/test_styles.py"
IN_PIECES = "tests/test_styles.py -k pieces"
STRIDES = "tests/test_strides.py -k 'not torch'"
PACKED = "tests/test_varlen.py"
PACKED_BLOCKS = "tests/test_blocks.py -k packed"
SECOND_ORDER = "tests/test_second_order.py"

ACCURATE_TESTS = "tests/test_accurate.py"
NOISE = "tests/test_hardware_noise.py -k 'test_budget and float32'"
COMMON_STRONG = "tests/test_hardware_noise.py -k common"
FINITE = "tests/test_fuzz.py -k 'contract and (lowest or highest)'"
NAN = "tests/test_masking.py -k 'triton and (reaches or infinite or nan or no_query)'"
EMPTY = "tests/test_masking.py -k 'triton and nothing'"
MINUS_INFINITY = "tests/test_gradcheck.py -k 'of_a_feature and inf'"
ROTARY = gradients("rope", "tables", "positions", "more")
TURNED = budget("RoPE")
TABLES = "tests/test_rope.py"

WINDOW = budget("window", "everything")
CAUSAL = budget("causal")
BANDS = "tests/test_masking.py -k bands"
PREFIX = budget("prefix", "everything")
DOCUMENTS = budget("documents", "everything")
SPARSE = budget("block-sparse", "everything")
BOOLEAN = budget("boolean")
MASK_FUNCTION = budget("mask")
PADDING = budget("padding")
WIDTHS = budget("values")
WIDE = "tests/test_wide.py"
SOFTCAP = gradients("soft-cap")
SCORE = budget("score", "everything")
BIAS = budget("bias")
ALIBI = budget("ALiBi", "everything")
RELATIVE = budget("relative", "everything")
SINKS = budget("sinks")
DROPPED = budget("dropout")

MODEL_MASKS = "tests/integrations/test_transformers_masks.py"
WRITTEN_OUT = "tests/test_weights.py -k 'hidden or dropout or 16_bits or another or hide'"
INFINITE = "tests/test_biases.py -k infinite"
