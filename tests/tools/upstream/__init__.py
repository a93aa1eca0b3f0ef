"""Run the test suites of PyTorch and FlashAttention against the drop-ins of this package."""
