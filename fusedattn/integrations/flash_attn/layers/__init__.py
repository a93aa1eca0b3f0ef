"""The layers of ``flash_attn`` that are here: its rotary position embedding."""
