"""``fuse(model)``: fused attention in place of the reference attention, sharing everything else.

All attention of the reference Transformer happens in one class without parameters,
``ScaledDotProductAttention``. Fusing a model changes the class of those modules in place, so that parameters,
buffers, hooks, names, optimizers and every reference to a module stay what they were.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from fusedattn.attention import attention
from fusedattn.checks import check_backend
from fusedattn.masks import Mask
from fusedattn.rope import Rope
from fusedattn.support import Backend
from fusedattn.transformer import ScaledDotProductAttention

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


class FusedScaledDotProductAttention(ScaledDotProductAttention):
    """The fused twin of ``ScaledDotProductAttention``: same arguments, same result, nothing quadratic stored.

    With ``need_weights=True`` the reference runs instead: the weights *are* the quadratic matrix.
    """

    backend: Backend | None = None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        rope: Rope | None = None,
        need_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """``(output, weights)``, or ``(output, None)`` without ``need_weights``."""
        if need_weights:
            return super().forward(q, k, v, mask, rope=rope)
        if q.dim() == k.dim() == v.dim() == 3:  # one head, without a dimension for it
            if isinstance(mask, Tensor) and mask.dim() == 3:
                mask = mask.unsqueeze(1)
            out, _ = self.forward(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), mask, rope=rope, need_weights=False)
            return out.squeeze(1), None
        dropout_p = self.dropout_p if self.training else 0.0
        out = attention(
            q,
            k,
            v,
            mask=mask,
            rope=rope,
            scale=self.scale,
            dropout_p=dropout_p,
            backend=self.backend,
        )
        return out, None


@dataclass(frozen=True)
class Replacement:
    """One fused module: its name in the model, and the classes before and after."""

    name: str
    reference: str
    fused: str

    def __str__(self) -> str:
        return f"{self.name or '(the model itself)'}: {self.reference} -> {self.fused}"


def fuse(model: Model, *, backend: Backend | None = None) -> Model:
    """Run every reference attention in ``model`` through :func:`fusedattn.attention`, in place.

    Args:
        model: any module with reference attention somewhere in its tree, or one itself. Parameters,
            ``state_dict`` keys, hooks and modes are untouched; fusing twice is fusing once.
        backend: passed on to :func:`fusedattn.attention`; None chooses by device.

    Returns:
        ``model`` itself. :func:`fusion_report` lists what was replaced, :func:`unfuse` undoes it.

    Raises:
        NotImplementedError: some module cannot be replaced faithfully; the message has every reason, and the
            model is left as it was.
        ValueError: there is no reference attention in ``model``, or ``backend`` is unknown.
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, allowed is a torch.nn.Module")
    check_backend(backend)
    reasons = [
        f"{name or '(the model itself)'}: {reason}"
        for name, module in model.named_modules()
        for reason in _reasons(module)
    ]
    if reasons:
        raise NotImplementedError("model: cannot be fused faithfully: " + "; ".join(reasons))
    cores = [module for module in model.modules() if isinstance(module, ScaledDotProductAttention)]
    if not cores:
        raise ValueError(
            f"model: got {type(model).__name__} without attention of fusedattn.transformer, "
            "allowed are models with at least one such module"
        )
    for core in cores:
        core.__class__ = FusedScaledDotProductAttention
        core.__dict__["backend"] = backend
    for replacement in fusion_report(model):
        logger.info("fused %s", replacement)
    return model


def unfuse(model: Model) -> Model:
    """Undo :func:`fuse`, in place; returns ``model``."""
    for module in model.modules():
        if type(module) is FusedScaledDotProductAttention:
            module.__dict__.pop("backend", None)
            module.__class__ = ScaledDotProductAttention  # type: ignore[assignment]
    return model


def fusion_report(model: nn.Module) -> list[Replacement]:
    """What is fused in ``model`` now, in the order of its modules."""
    return [
        Replacement(name, ScaledDotProductAttention.__name__, type(module).__name__)
        for name, module in model.named_modules()
        if isinstance(module, FusedScaledDotProductAttention)
    ]


def _reasons(module: nn.Module) -> list[str]:
    """Why this one module cannot be fused, or cannot be left aside."""
    if isinstance(module, nn.MultiheadAttention):
        return ["torch.nn.MultiheadAttention is not supported yet; use fusedattn.transformer.MultiHeadAttention"]
    if not isinstance(module, ScaledDotProductAttention):
        return []
    reasons = []
    if type(module) not in (ScaledDotProductAttention, FusedScaledDotProductAttention):
        reasons.append(f"{type(module).__name__} is a subclass, which may compute something else")
    elif "forward" in module.__dict__:
        reasons.append("its forward was replaced on the instance")
    return reasons
