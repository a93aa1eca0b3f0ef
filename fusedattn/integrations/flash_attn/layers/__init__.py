"""Layers of ``flash_attn``: only its rotary position embedding."""
