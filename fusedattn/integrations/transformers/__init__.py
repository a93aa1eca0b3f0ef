"""Fused attention for Hugging Face transformers 5: ``register()``, then ``attn_implementation="fusedattn"``."""

import inspect

import transformers
from transformers import masking_utils

# Before 5.4, mask functions got the positions of queries as a tensor, without q_offset.
if "q_offset" not in inspect.signature(masking_utils.sdpa_mask).parameters:
    raise ImportError(f"transformers: got {transformers.__version__}, allowed are 5.4 and newer")

from fusedattn.integrations.transformers.attention import attention_function
from fusedattn.integrations.transformers.cache import PreallocatedCache
from fusedattn.integrations.transformers.masks import mask_function
from fusedattn.integrations.transformers.models import (
    fuse,
    implementations,
    is_bypassed,
    is_fused,
    models_in,
    reasons,
    unfuse,
)
from fusedattn.integrations.transformers.registration import NAME, register
from fusedattn.integrations.transformers.rotary import TWINS

# On import, so that a pickled fused model finds its attention when it is loaded.
register()

__all__ = [
    "NAME",
    "TWINS",
    "PreallocatedCache",
    "attention_function",
    "fuse",
    "implementations",
    "is_bypassed",
    "is_fused",
    "mask_function",
    "models_in",
    "reasons",
    "register",
    "unfuse",
]
