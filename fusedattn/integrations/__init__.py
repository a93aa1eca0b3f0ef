"""Fused attention behind the interfaces of other libraries; each module needs its own, and only when it is imported."""
