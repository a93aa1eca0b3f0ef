"""The name under which transformers finds this package's attention."""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from fusedattn.integrations.transformers.attention import attention_function
from fusedattn.integrations.transformers.masks import mask_function

NAME = "fusedattn"


def register() -> None:
    """Register attention and masks under the name ``fusedattn``, for ``attn_implementation="fusedattn"``.

    Both, because transformers builds no masks at all, not even of padding, for a name that has only an attention
    function. To call it again changes nothing.
    """
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)
