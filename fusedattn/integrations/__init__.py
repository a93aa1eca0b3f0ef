"""Fused attention behind the interfaces of other libraries; a module needs its library only when it is imported."""
