"""The two ways to compute: by the Triton kernels, or by torch's functions. Neither imports the other."""
