"""The Python interface of the ``flash_attn`` package, version 2, on :func:`fusedattn.attention`.

Modules, names, arguments and layouts are those of ``flash_attn``, so code written for it only changes its import.
"""

from fusedattn.integrations.flash_attn.bert_padding import pad_input, unpad_input
from fusedattn.integrations.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from fusedattn.integrations.flash_attn.layers.rotary import apply_rotary_emb

__version__ = "2.8.3"  # the version of flash_attn with this interface; callers compare it

__all__ = [
    "__version__",
    "apply_rotary_emb",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "pad_input",
    "unpad_input",
]
