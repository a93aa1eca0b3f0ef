"""Append to a cache by a kernel."""
