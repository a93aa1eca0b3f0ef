"""`fusedattn demo`: train the reference GPT, fused and eager, and show the difference."""
