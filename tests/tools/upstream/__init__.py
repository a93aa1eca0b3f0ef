"""Test suites of PyTorch and FlashAttention, run against the drop-ins of this package."""
