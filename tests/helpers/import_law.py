"""The import law: the modules of fusedattn that each module may import, and the layers that follow from it."""

from __future__ import annotations

from typing import NamedTuple

# Modules of the arguments of attention, without attention itself.
VALUES = {"rope", "qk_norm", "masks", "biases", "score_mod", "dropout", "functions", "indices", "strides"}
VALUES |= {"kv_cache", "quantization", "readable", "shard", "pattern_blocks", "patterns", "block_tables", "mask_parts"}
VALUES |= {"fp8", "zeroed"}

# What the modules of linear attention share.
OF_LINEAR = {"linear.options", "linear.packed", "linear.state", "feature_maps"}

# The units of fusedattn that each unit may import. A unit is a module of fusedattn or one of its packages, whose own
# files may import each other; in integrations, testing, linear and backends each module is a unit. "fusedattn" stands
# for the public names in fusedattn/__init__.py.
ALLOWED: dict[str, set[str]] = {
    "__main__": {"cli"},
    "integrations.kernels_hub": {"fusedattn"},
    "distributed.example": {"fusedattn", "distributed", "cli", "transformer"},
    "cli": {"fusedattn", "attention", "testing", "call_checks", "support", "testing.peers", "transformer", "kernels"}
    | {"testing.fp8", "testing.linear", "testing.linear_cases", "virtual_gpu"},
    "virtual_gpu": {"prepare", "support", "kernels"},
    "fusedattn": {"fusion", "integrations.torch_functions", "attention", "varlen", "weights", "merge", "caches"}
    | {"support", "linear.attention", "linear.state", "feature_maps", *VALUES},
    "fusion": {
        "integrations.modules",
        "integrations.torch_nn",
        "integrations.transformers",
        "call_checks",
        "distributed",
        "support",
        "transformer",
    },
    "integrations.transformers": {"attention", "caches", "weights", "support", *VALUES},
    "integrations.torch_nn": {"attention", "varlen", "weights", "call_checks", "support", *VALUES},
    "integrations.torch_functions": {"attention", "prepare", "call_checks", "support", *VALUES},
    "integrations.modules": {
        "attention",
        "caches",
        "distributed",
        "linear.attention",
        "linear.state",
        "support",
        "transformer",
        *VALUES,
    },
    "integrations.flash_attn": {"attention", "varlen", "weights", "caches", "call_checks", *VALUES},
    "attention": {
        "varlen",
        "backends",
        "backends.torch.fast_path",
        "distributed",
        "prepare",
        "call_checks",
        "options",
        "support",
        *VALUES,
    },
    "distributed": {"backends", "prepare", "parts", "call_checks", "options", "support", *VALUES},
    "varlen": {"backends", "prepare", "call_checks", "options", "support", *VALUES},
    "caches": {"backends", "call_checks", "support", *VALUES},
    "backends": {
        "backends.torch.cached",
        "backends.triton.autograd",
        "backends.triton.appending",
        "backends.torch.largest",
        "reference_varlen",
        "reference_cached",
        "options",
        "support",
        *VALUES,
    },
    "integrations.torch_flash": {
        "backends.triton.ops",
        "parts",
        "prepare",
        "backends.triton.operands",
        "options",
        *VALUES,
    },
    "backends.triton.autograd": {
        "backends.triton.ops",
        "backends.triton.operands",
        "reference_varlen",
        "options",
        *VALUES,
    },
    "backends.triton.appending": {
        "backends.triton.append_launching",
        "backends.triton.ops",
        "backends.triton.operands",
        *VALUES,
    },
    "backends.triton.append_launching": {
        "backends.triton.launching",
        "backends.triton.results",
        "backends.triton.operands",
        "kernels",
    },
    "backends.triton.ops": {"backends.triton.launching", "backends.triton.results", "backends.triton.operands"},
    "backends.triton.launching": {"backends.triton.results", "backends.triton.operands", "kernels", *VALUES},
    "testing": {
        "testing.budget",
        "testing.cached",
        "testing.cases",
        "testing.fp8",
        "testing.linear",
        "testing.linear_cases",
    },
    "testing.linear": {
        "linear.attention",
        "linear.reference",
        "testing.budget",
        "testing.linear_cases",
        "testing.linear_terms",
        "support",
        *OF_LINEAR,
    },
    "testing.linear_terms": {"testing.budget", "testing.linear_cases", "feature_maps"},
    "testing.linear_cases": {"testing.triton_functions", "feature_maps"},
    "testing.fp8": {"attention", "low_precision", "reference", "testing.budget", "testing.cases", "support", *VALUES},
    "testing.cached": {"attention", "caches", "testing.budget", "testing.cases", "support", *VALUES},
    "low_precision": {"call_checks", *VALUES},
    "weights": {"call_checks", "reference", *VALUES},
    "linear.attention": {
        "linear.checks",
        "linear.chunked",
        "linear.triton_backend",
        "prepare",
        "call_checks",
        "support",
        *OF_LINEAR,
    },
    "linear.triton_backend": {"linear.launching", "linear.chunked", "functions", *OF_LINEAR},
    "linear.launching": {"backends.triton.launching", "kernels", *OF_LINEAR},
    "linear.chunked": OF_LINEAR,
    "linear.reference": OF_LINEAR,
    "linear.checks": {"call_checks", "support", *OF_LINEAR},
    "linear.packed": {"linear.options", "linear.state"},
    "linear.options": {"linear.state", "feature_maps"},
    "linear.state": set(),
    "linear": set(),
    "feature_maps": {"functions"},
    "merge": {"call_checks", "parts"},
    "prepare": {"call_checks", "options", "support", *VALUES},
    "backends.torch.fast_path": {"backends.torch.sdpa", "call_checks", "backends.torch.mask_plan", "support", *VALUES},
    "backends.triton.results": {"backends.triton.operands", *VALUES},
    "testing.budget": {"testing.cases", "reference", *VALUES},
    "reference_cached": {"reference_varlen", "options", *VALUES},
    "reference_varlen": {"options", "reference", *VALUES},
    "call_checks": {"options", *VALUES},
    "backends.triton.operands": {"options", *VALUES},
    "backends.torch.sdpa": {
        "backends.torch.eager",
        "options",
        "backends.torch.mask_plan",
        "reference",
        "backends.torch.flash",
        "backends.torch.boxes",
        "backends.torch.gathered",
        "backends.torch.merged",
        *VALUES,
    },
    "backends.torch.merged": {"backends.torch.flash", "backends.torch.mask_plan", "parts", "reference", *VALUES},
    "backends.torch.gathered": {"backends.torch.mask_plan", *VALUES},
    "backends.torch.cached": {
        "backends.torch.sdpa",
        "backends.torch.largest",
        "backends.torch.cache_numbers",
        "backends.torch.cache_tiles",
        "reference_cached",
        "reference_varlen",
        "reference",
        "parts",
        "options",
        *VALUES,
    },
    "backends.torch.cache_numbers": {"backends.torch.cache_tiles", *VALUES},
    "backends.torch.cache_tiles": VALUES,
    "testing.cases": {"testing.triton_functions", *VALUES},
    "options": VALUES,
    "backends.torch.eager": {"reference", *VALUES},
    "backends.torch.largest": {
        "backends.torch.eager",
        "backends.torch.sdpa",
        "reference",
        "reference_varlen",
        "options",
        "readable",
    },
    "testing.triton_functions": {"feature_maps", *VALUES},
    "testing.peers": VALUES,
    "support": {"kernels", "options", *VALUES},
    "reference": VALUES,
    "transformer": {"feature_maps", "linear.state", *VALUES},
    "backends.torch.mask_plan": VALUES,
    "score_mod": {"functions", "indices", "shard"},
    "masks": {"mask", "mask_parts", "sparse_masks"},
    "sparse_masks": {"block_tables", "mask", "mask_parts", "patterns"},
    "pattern_blocks": {"block_tables", "mask", "patterns", "shard"},
    "mask": {"mask_parts", "patterns", "functions", "indices", "shard"},
    "block_tables": {"patterns"},
    "patterns": {"mask_parts", "shard"},
    "mask_parts": {"functions", "indices", "shard"},
    "dropout": {"indices", "shard"},
    "biases": {"indices", "shard"},
    "integrations": set(),
    "functions": set(),
    "kernels": set(),
    "backends.triton": set(),
    "parts": set(),
    "indices": {"shard"},
    "shard": set(),
    "backends.torch.boxes": set(),
    "backends.torch.flash": set(),
    "strides": set(),
    "readable": set(),
    "backends.torch": set(),
    "rope": set(),
    "qk_norm": {"readable", "zeroed"},
    "zeroed": set(),
    "fp8": set(),
    "kv_cache": {"quantization", "readable", "rope", "strides"},
    "quantization": set(),
}


class Layer(NamedTuple):
    """Modules on one level: none imports from a layer above."""

    name: str
    contents: str
    units: tuple[str, ...]


LAYERS = (
    Layer("command line", "`python -m fusedattn`, and the package as a kernel of the Hugging Face Hub",
          ("__main__", "cli", "distributed.example", "integrations.kernels_hub")),
    Layer("public names", "`fusedattn/__init__.py`", ("fusedattn",)),
    Layer("fusing a model", "which module replaces which", ("fusion",)),
    Layer("other libraries", "the interface of each library, over `attention()`; none imports another",
          ("integrations", "integrations.flash_attn", "integrations.modules", "integrations.torch_flash",
           "integrations.torch_functions", "integrations.torch_nn", "integrations.transformers")),
    Layer("error budget", "test cases, and the error that a function may have",
          ("testing", "testing.budget", "testing.cached", "testing.cases", "testing.fp8", "testing.linear",
           "testing.linear_cases", "testing.linear_terms", "testing.peers", "testing.triton_functions")),
    Layer("virtual GPU", "Triton's PTX, run on a CPU", ("virtual_gpu",)),
    Layer("public functions", "signatures and their meaning",
          ("attention", "varlen", "weights", "merge", "caches", "linear.attention")),
    Layer("many processes", "attention over tensors that are split among processes", ("distributed",)),
    Layer("dispatch", "checks and defaults of a call, and the choice of its backend", ("backends", "prepare")),
    Layer("torch backend", "torch's own functions, combined to the same results",
          ("backends.torch", "backends.torch.fast_path", "backends.torch.cached", "backends.torch.cache_numbers",
           "backends.torch.cache_tiles", "backends.torch.sdpa", "backends.torch.mask_plan",
           "backends.torch.boxes", "backends.torch.gathered", "backends.torch.merged",
           "backends.torch.eager", "backends.torch.largest", "backends.torch.flash")),
    Layer("linear attention", "its backends, over operators of its own",
          ("linear", "linear.triton_backend", "linear.launching", "linear.chunked")),
    Layer("triton backend", "autograd, operators, launches",
          ("backends.triton", "backends.triton.autograd", "backends.triton.ops", "backends.triton.launching",
           "backends.triton.appending", "backends.triton.append_launching", "backends.triton.results",
           "backends.triton.operands")),
    Layer("correctness", "the definition of every result, in eager PyTorch",
          ("reference_cached", "reference_varlen", "reference", "parts", "linear.reference", "low_precision")),
    Layer("one call", "its options, checks of its arguments, limits of the backends",
          ("call_checks", "options", "support", "linear.checks", "linear.options",
           "linear.packed")),
    Layer("reference Transformer", "textbook eager PyTorch, without fused kernels",
          ("transformer",)),
    Layer("values", "objects that users build: masks, biases, rotations, score functions, caches",
          ("masks", "sparse_masks", "pattern_blocks", "mask", "block_tables", "patterns", "mask_parts", "rope",
           "qk_norm", "biases", "score_mod", "dropout", "kv_cache", "quantization", "functions",
           "indices", "shard", "strides", "readable", "zeroed", "fp8", "feature_maps", "linear.state")),
    Layer("kernels", "Triton code, which imports nothing from the package", ("kernels",)),
)  # fmt: skip


def table() -> str:
    """Layers, from the top, in Markdown."""
    of_unit = {unit: layer for layer in LAYERS for unit in layer.units}
    rows = ["| layer | contents | modules | imports from |", "| --- | --- | --- | --- |"]
    for layer in LAYERS:
        below = {of_unit[other].name for unit in layer.units for other in ALLOWED[unit]} - {layer.name}
        names = ", ".join(f"`{unit}`" for unit in layer.units)
        imports = ", ".join(other.name for other in LAYERS if other.name in below) or "nothing"
        rows.append(f"| {layer.name} | {layer.contents} | {names} | {imports} |")
    return "\n".join(rows)
