"""The name under which transformers finds this package's attention, and the check of the models that choose it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from fusedattn.integrations.transformers.attention import attention_function
from fusedattn.integrations.transformers.masks import mask_function
from fusedattn.integrations.transformers.sources import reasons_by_name

NAME = "fusedattn"

_is_judged = ContextVar("_is_judged", default=False)  # True if every module of the model has been checked already


def register() -> None:
    """Register attention and masks under the name ``fusedattn``, for ``attn_implementation="fusedattn"``.

    Both are needed: for a name with only an attention function, transformers builds no masks, not even for padding. A
    model that does not look its attention up would ignore the name or misread the masks: a ``ValueError`` refuses it,
    on construction and in ``set_attn_implementation``. For this, ``PreTrainedModel.get_correct_attn_implementation`` is
    wrapped; other names pass through unchanged. A second call does nothing.
    """
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)
    check = PreTrainedModel.get_correct_attn_implementation
    if not hasattr(check, "_of_fusedattn"):
        PreTrainedModel.get_correct_attn_implementation = _with_refusal(check)


@contextmanager
def without_refusal() -> Iterator[None]:
    """Switch the check off for ``fuse``, which has checked every module; the check sees only the file of the class."""
    token = _is_judged.set(True)
    try:
        yield
    finally:
        _is_judged.reset(token)


def _with_refusal(check: Any) -> Any:
    """transformers' own check of a name, preceded by the check of this package."""

    @functools.wraps(check)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
    ) -> str:
        if requested_attention == NAME and not _is_judged.get():
            reasons = reasons_by_name(type(self), NAME)
            if reasons:
                raise ValueError(
                    f"attn_implementation: got {NAME!r}, but {'; '.join(reasons)}. Choose another for it; if it "
                    'is a part of a larger one, name the others by their configs, as in {"text_config": "fusedattn"}'
                )
        return check(self, requested_attention, *args, **kwargs)

    get_correct_attn_implementation._of_fusedattn = True  # type: ignore[attr-defined]
    return get_correct_attn_implementation
