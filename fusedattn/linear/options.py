"""The options of one call of linear attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fusedattn.feature_maps import FeatureMap
from fusedattn.linear.state import LinearState


@dataclass
class LinearOptions:
    """All arguments of :func:`fusedattn.linear_attention` but q, k and v, with defaults filled in."""

    feature_map: str | FeatureMap
    causal: bool
    normalize: bool
    valid: Tensor | None
    initial_state: LinearState | None
    cu_seqlens: Tensor | None
