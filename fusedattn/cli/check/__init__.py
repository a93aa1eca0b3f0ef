"""`fusedattn check`: the error budget of this installation."""

DTYPES = ("float32", "float16", "bfloat16")  # the default
COMPILED = ("sm_80", "sm_90")  # --compiled
