"""The models, numbers of GPUs and lengths that docs/scaling.md shows."""

from __future__ import annotations

from bench.scaling.clusters import GPUS_PER_NODE
from bench.scaling.stages import MODES, Mode, Model

GROUPED, ALL_HEADS = Model(32, 8, 128), Model(64, 64, 128)
MODELS = {"32 query heads, 8 KV heads, as in Llama 3.1 8B": GROUPED, "64 query heads, 64 KV heads": ALL_HEADS}
RANKS = (8, 64)
TOKENS = (8192, 16384, 32768, 131072)  # of a GPU


def name_of(mode: Mode) -> str:
    """The mode as users write it."""
    return str(tuple(mode.split(", "))).replace("'", '"') if is_mesh(mode) else f'"{mode}"'


def is_mesh(mode: Mode) -> bool:
    return "," in mode


def possible(model: Model) -> list[tuple[Mode, int]]:
    """The modes that a model can have on each number of GPUs; two dimensions only on several nodes."""
    return [
        (mode, ranks)
        for ranks in RANKS
        for mode in MODES
        if not (is_mesh(mode) and ranks == GPUS_PER_NODE) and not (mode == "ulysses" and model.heads % ranks)
    ]
