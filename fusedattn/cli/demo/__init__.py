"""`fusedattn demo`: train the reference GPT with fused attention, and compare it with the eager model."""
