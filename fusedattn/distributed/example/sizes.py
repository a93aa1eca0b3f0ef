"""The model and its training: for CPUs in about a minute, and for GPUs."""

from __future__ import annotations

from fusedattn.cli.demo.settings import Sizes

CPU = Sizes(d_model=128, n_heads=8, n_layers=2, seqlen=512, batch=2, steps=100, learning_rate=3e-3)
GPU = Sizes(d_model=512, n_heads=8, n_layers=8, seqlen=8192, batch=4, steps=300, learning_rate=1e-3)
