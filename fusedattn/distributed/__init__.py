"""Attention over sequences that are split among processes, on ``torch.distributed``."""

from fusedattn.distributed.context import Context

__all__ = ["Context"]
