"""Copies of values and models through files."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def through_pickle(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


def through_torch_save(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
