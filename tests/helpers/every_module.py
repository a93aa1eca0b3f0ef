"""A script for a clean Python: attention on a CPU, then every module; it prints what the modules lack."""

EXTRAS = {"matplotlib", "rich", "transformers"}  # packages of demo and transformers

USE = """
import importlib, pkgutil, torch, fusedattn
from fusedattn import *
q = torch.randn(1, 2, 64, 16, requires_grad=True)
attention(q, q, q, mask=masks.causal()).sum().backward()
assert q.grad is not None and q.grad.isfinite().all()
missing, n = set(), 0
for module in pkgutil.walk_packages(fusedattn.__path__, "fusedattn."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
            n += 1
        except ModuleNotFoundError as error:
            missing.add(error.name.partition(".")[0])
assert n > 100, n
print(*sorted(missing))
"""
