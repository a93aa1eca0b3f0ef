"""The Triton kernels as PyTorch operators with gradients."""
