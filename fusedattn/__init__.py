"""Fused scaled-dot-product attention for PyTorch, in Triton."""

from fusedattn import masks
from fusedattn.attention import attention
from fusedattn.modules import Replacement, fuse, fusion_report, unfuse
from fusedattn.rope import Rope, apply_rope
from fusedattn.support import not_supported_reasons

__version__ = "0.1.0"

__all__ = [
    "Replacement",
    "Rope",
    "__version__",
    "apply_rope",
    "attention",
    "fuse",
    "fusion_report",
    "masks",
    "not_supported_reasons",
    "unfuse",
]
