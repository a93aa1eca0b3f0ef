"""Attention over a sequence that is split among GPUs, on paper: bytes, operations, times and efficiency of a rank.

``python -m bench scaling`` writes the figures of docs/scaling.md. Nothing here is measured on several GPUs.
"""
