"""The name under which transformers finds this package's attention, and who may choose it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from fusedattn.integrations.transformers.attention import attention_function
from fusedattn.integrations.transformers.masks import mask_function
from fusedattn.integrations.transformers.sources import reasons_by_name

NAME = "fusedattn"

_asked_before = False  # whether what chooses the name has been asked about every module of the model


def register() -> None:
    """Register attention and masks under the name ``fusedattn``, for ``attn_implementation="fusedattn"``.

    Both, because transformers builds no masks at all, not even of padding, for a name that has only an attention
    function. A model that does not look its attention up, and would ignore the name or misread the masks, is refused
    with a ``ValueError`` when it is made with this name, or given it. To call it again changes nothing.
    """
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)
    check = PreTrainedModel.get_correct_attn_implementation
    if not hasattr(check, "_of_fusedattn"):
        PreTrainedModel.get_correct_attn_implementation = _with_refusal(check)


@contextmanager
def without_refusal() -> Iterator[None]:
    """For who has looked at the modules of a model, and need not judge by the file of its class."""
    global _asked_before
    _asked_before = True
    try:
        yield
    finally:
        _asked_before = False


def _with_refusal(check: Any) -> Any:
    """transformers' own check of a name, before which ours may refuse."""

    @functools.wraps(check)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
    ) -> str:
        if requested_attention == NAME and not _asked_before:
            reasons = reasons_by_name(type(self), NAME)
            if reasons:
                raise ValueError(
                    f"attn_implementation: got {NAME!r}, but {'; '.join(reasons)}. Choose another for it; if it "
                    'is a part of a larger one, name the others by their configs, as in {"text_config": "fusedattn"}'
                )
        return check(self, requested_attention, *args, **kwargs)

    get_correct_attn_implementation._of_fusedattn = True  # type: ignore[attr-defined]
    return get_correct_attn_implementation
