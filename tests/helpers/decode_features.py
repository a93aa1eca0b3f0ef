"""The forward for few queries: its features, as changes to a case, the shapes of its tile, and its tilings.

The interpreter's tile has 16 rows and a split 32 keys (kernels/configs.py), so even short sequences have several.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from fusedattn.kernels import attention_fwd, configs
from fusedattn.kernels.grid import Tiling
from fusedattn.testing import Case

SPLIT = configs.INTERPRETER_FEW_QUERIES.split

BASE = Case(batch=2, seqlen_q=2, seqlen_k=3 * SPLIT + 5, nheads_q=6, nheads_kv=2, head_dim=16)

# (queries, heads that share a KV head): a full tile, a part of one, and groups too large for a tile.
SHAPES = [(1, 1), (1, 3), (1, 7), (1, 8), (1, 16), (1, 20), (2, 4), (2, 7), (4, 3), (5, 2), (5, 1), (16, 1)]

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "causal, top-left": {"causal": "top_left"},
    "right padding": {"padding": "right", "causal": "bottom_right"},
    "left padding": {"padding": "left", "causal": "bottom_right"},
    "padding with gaps": {"padding": "uneven", "empty_batch": True},
    "window": {"window": (40, 0)},
    "window, both sides": {"window": (70, 3), "causal": "top_left"},
    "prefix": {"prefix": True, "causal": "bottom_right"},
    "documents": {"documents": "packed", "seed": 3},
    "shuffled documents": {"documents": "shuffled"},
    "boolean": {"boolean": "full"},
    "broadcast boolean": {"boolean": "broadcast"},
    "block-sparse": {"layout": 16},
    "tree": {"tree": True, "padding": "left"},
    "mask function": {"mask_function": True},
    "bias": {"bias": "full"},
    "bias per head": {"bias": "per_head"},
    "bias per key with -inf": {"bias": "per_key", "bias_inf": True},
    "alibi": {"alibi": True},
    "slopes per batch": {"alibi": "per_batch"},
    "relative": {"relative": "per_head"},
    "relative per query": {"relative": "per_query"},
    "soft-cap": {"softcap": 0.7},
    "score function": {"score_mod": True},
    "sinks": {"sinks": True},
    "rope": {"rope": "half", "causal": "bottom_right"},
    "interleaved rope, in part": {"rope": "interleaved", "rotary_dim": 6, "head_dim": 24},
    "positions": {"rope": "half", "rope_positions": True, "rope_tables": "per_batch"},
    "dropout": {"dropout_p": 0.3},
    "sinks and dropout": {"sinks": True, "dropout_p": 0.3, "causal": "bottom_right"},
    "odd widths": {"head_dim": 20, "head_dim_v": 33},
    "common part": {"offset": 4.0},
    "scale": {"scale": -0.6},
    "everything": {
        "causal": "bottom_right", "padding": "uneven", "boolean": "full", "rope": "half", "rope_positions": True,
        "window": (60, 2), "prefix": True, "documents": "packed", "bias": "full", "alibi": True,
        "relative": "per_query", "softcap": 1.5, "sinks": True, "dropout_p": 0.2, "head_dim_v": 24, "seed": 4,
    },
    "sinks, one split": {"sinks": True, "seqlen_k": SPLIT - 3},
}  # fmt: skip


def shaped(case: Case, queries: int, group: int) -> Case:
    nheads_kv = 1 if group in (8, 16) else 2
    return replace(case, seqlen_q=queries, nheads_q=group * nheads_kv, nheads_kv=nheads_kv)


@contextmanager
def tilings() -> Iterator[list[Tiling]]:
    """The tilings of all forwards in the block."""
    found: list[Tiling] = []
    tiling_of = attention_fwd.tiling_of

    def noted(problem: Any, **named: Any) -> Tiling:
        found.append(tiling_of(problem, **named))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_fwd, "tiling_of", noted)
        yield found
