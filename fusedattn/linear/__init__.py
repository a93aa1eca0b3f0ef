"""Linear attention: its function, its definition, and its two backends."""
