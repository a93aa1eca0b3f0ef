"""Fused scaled-dot-product attention for PyTorch, in Triton.

Nothing is imported lazily: exported programs need the operators that importing this package registers.
"""

from fusedattn import biases, caches, dropout, feature_maps, masks
from fusedattn.attention import attention
from fusedattn.fp8 import FP8
from fusedattn.fusion import Replacement, fuse, fusion_report, unfuse
from fusedattn.integrations.torch_functions import replace_sdpa, scaled_dot_product_attention
from fusedattn.kv_cache import KVCache
from fusedattn.linear.attention import linear_attention
from fusedattn.linear.state import LinearState
from fusedattn.merge import merge
from fusedattn.qk_norm import QKNorm
from fusedattn.rope import Rope, apply_rope
from fusedattn.score_mod import ArgGradient, ScoreMod
from fusedattn.support import not_supported_reasons
from fusedattn.varlen import attention_varlen
from fusedattn.weights import attention_weights

__version__ = "0.1.0"

__all__ = [
    "FP8",
    "ArgGradient",
    "KVCache",
    "LinearState",
    "QKNorm",
    "Replacement",
    "Rope",
    "ScoreMod",
    "__version__",
    "apply_rope",
    "attention",
    "attention_varlen",
    "attention_weights",
    "biases",
    "caches",
    "dropout",
    "feature_maps",
    "fuse",
    "fusion_report",
    "linear_attention",
    "masks",
    "merge",
    "not_supported_reasons",
    "replace_sdpa",
    "scaled_dot_product_attention",
    "unfuse",
]


def __dir__() -> list[str]:
    """The public names, without the submodules that their imports add here."""
    return sorted(__all__)
