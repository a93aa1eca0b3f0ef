"""Which backend runs a call, and every reason why a backend cannot."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fusedattn.biases import Bias, as_bias
from fusedattn.fp8 import FP8, KEYS_OF_FP8, MAX_HEAD_DIM_OF_FP8
from fusedattn.kv_cache import KVCache
from fusedattn.masks import Mask, as_mask
from fusedattn.options import Options
from fusedattn.qk_norm import QKNorm
from fusedattn.rope import Rope
from fusedattn.score_mod import ScoreMod

Backend = Literal["triton", "torch"]

MAX_HEAD_DIM = 512
MAX_HEAD_DIM_WITHOUT_GRADIENTS = 576  # of q and k


@dataclass(frozen=True)
class Feature:
    """One row of docs/features.md: a feature, how to ask for it, and whether each backend has it."""

    name: str
    how: str
    triton: str = "yes"
    torch: str = "yes"


# Each runs forward and backward, in any combination with the others; tests/public/test_support.py calls every one.
FEATURES = (
    Feature("self-attention and cross-attention of any lengths, 0 included", "`seqlen_q != seqlen_k`"),
    Feature("grouped-query and multi-query attention", "`nheads_q % nheads_kv == 0`"),
    Feature("`head_dim`, also other than powers of two", "1 to 512", torch="any"),
    Feature("values with another `head_dim`", "`v.shape[3]`"),
    Feature("float16, bfloat16, float32 (IEEE; TF32 if torch is allowed it)", "dtype"),
    Feature("float64", "dtype", triton="in the interpreter"),
    Feature("causal masks, bottom-right and top-left", "`masks.causal(align)`"),
    Feature("sliding windows", "`masks.window(left, right)`"),
    Feature("prefix-LM", "`masks.prefix_lm(lengths)`"),
    Feature("key padding in any pattern", "`masks.padding(valid)`"),
    Feature("documents, packed or in any order", "`masks.documents(ids)`"),
    Feature("boolean masks, broadcast too", "`masks.boolean(m)`"),
    Feature("block-sparse masks", "`masks.block_sparse(blocks, size)`"),
    Feature("trees of draft tokens behind a cache", "`masks.tree(m)`"),
    Feature("strided and fixed sparse attention (Child et al.)", "`masks.strided(stride)`, `masks.fixed(stride, c)`"),
    Feature("dilated windows and global tokens (Longformer)", "`masks.dilated(left, right, dilation)`"),
    Feature("window, global and random blocks (BigBird)", "`masks.bigbird(block_size)`"),
    Feature(
        "blocks listed for each query, or with the highest scores (NSA, MoBA)", "`masks.selected_blocks(indices, size)`"
    ),
    Feature("neighborhoods in a grid of 1 to 3 dimensions, sliding tiles", "`masks.neighborhood(shape, window)`"),
    Feature("block diffusion", "`masks.block_diffusion(seqlen, block_size)`"),
    Feature("mask functions", "`masks.function(fn)`", torch="with `eager=`"),
    Feature("any combination of these masks", "`&`"),
    Feature("additive bias, broadcast too, with its gradient", "`bias=tensor`"),
    Feature("ALiBi, with gradients of learned slopes", "`biases.alibi(slopes)`"),
    Feature("T5's bucketed bias, with its gradient, without a tensor of all pairs", "`biases.t5(weight)`"),
    Feature("relative positions (Shaw et al.), with gradients", "`biases.shaw(q, table)`"),
    Feature(
        "QK-norm by root mean square or length, of a head or across heads, with gradients of weights", "`qk_norm=`"
    ),
    Feature("RoPE: half-split, interleaved, partial, per-batch and scaled tables, explicit positions", "`rope=`"),
    Feature("soft-cap", "`softcap=`"),
    Feature("score functions, with their derivatives", "`score_mod=ScoreMod(...)`", torch="with `eager=`"),
    Feature(
        "gradients of tensors that a score function reads", "`ScoreMod(..., arg_gradients=...)`", torch="with `eager=`"
    ),
    Feature("attention sinks, with their gradient", "`sinks=`"),
    Feature("dropout, with equal results on both backends for equal seeds", "`dropout_p=`"),
    Feature("packed sequences", "`attention_varlen(...)`"),
    Feature("nested tensors, jagged", "`attention(nested, ...)`"),
    Feature(
        "products of 8 bits (e4m3), with scales by block or tensor and a rotation, without gradients",
        "`precision=FP8()`",
        triton="on NVIDIA GPUs from sm_89 on, and in the interpreter",
        torch="no",
    ),
    Feature("log-sum-exp and its gradient", "`return_lse=True`"),
    Feature("the largest score of each query, for QK-clip", "`return_max=True`"),
    Feature("weights of chosen queries and keys", "`attention_weights(q, k, lse)`"),
    Feature("partial attentions, over disjoint sets of keys, joined", "`merge(outs, lses)`"),
    Feature("bitwise reproducible gradients", "by default", torch="as torch's"),
    Feature(
        "nondeterministic gradients, with one kernel fewer",
        "`deterministic=False`",
        triton="in the interpreter",
        torch="of no effect",
    ),
    Feature(
        "`torch.compile(fullgraph=True)`, `torch.export`, AOTInductor, autocast, checkpointing, FSDP2", "as they are"
    ),
    Feature("double backward, `torch.func.jvp`, `vmap`, `hessian`", "as they are, by eager formulas", torch="torch's"),
    Feature("linear attention, with a state", "`linear_attention(...)`", triton="up to 256 features"),
    Feature("caches, contiguous or paged, for sequences of uneven lengths, without gradients", "`cache=KVCache(...)`"),
    Feature("quantised caches: e4m3, e5m2, int8, int4", "`cache=`, `k_scale`, `v_scale`"),
    Feature("caches that overwrite old tokens, with sinks", "`KVCache(..., overwrites=True, n_sinks=...)`"),
    Feature("keys of up to 576 features, such as latent ones, without gradients", "`head_dim`", torch="any"),
)


def interpreting() -> bool:
    """Whether Triton runs its kernels on the CPU, through its interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def default_backend(device: torch.device) -> Backend:
    """The backend for ``backend=None``: Triton on a GPU or in its interpreter; torch otherwise."""
    return "triton" if device.type == "cuda" or interpreting() else "torch"


def not_supported_reasons(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache: KVCache | None = None,
    mask: Mask | Tensor | None = None,
    rope: Rope | None = None,
    qk_norm: QKNorm | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    deterministic: bool = True,
    num_splits: int | None = None,
    precision: FP8 | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    backend: Backend | None = None,
) -> list[str]:
    """Every reason why ``attention`` with these arguments would raise NotImplementedError; empty if it would run.

    The arguments are those of :func:`fusedattn.attention`, and must be valid in themselves.
    """
    if cache is not None:
        k, v = cache.k, cache.v
    assert k is not None
    assert v is not None
    options = Options(
        as_mask(mask),
        bias=as_bias(bias),
        score_mod=score_mod,
        sinks=sinks,
        cache=cache,
        qk_norm=qk_norm,
        precision=precision,
    )
    return reasons_of(q, k, v, options, backend or default_backend(q.device))


def reasons_of(q: Tensor, k: Tensor, v: Tensor, options: Options, backend: Backend) -> list[str]:
    """:func:`not_supported_reasons`, from collected arguments; with a cache, k and v are its memory."""
    mask, score_mod, cache, qk_norm = options.mask, options.score_mod, options.cache, options.qk_norm
    reasons: list[str] = []
    if (cache is not None or options.precision is not None) and torch.is_grad_enabled():
        parts = (x for part in (options.bias, score_mod) if part is not None for x in part.tensors().values())
        of_norm = () if qk_norm is None else qk_norm.weights().values()
        if _require_grad((q, k, v, options.sinks, *parts, *of_norm)):
            name = "precision" if cache is None else "cache"
            reasons.append(f"{name}: got tensors that require grad, allowed are others, and torch.no_grad()")
    if options.precision is not None:
        reasons += _reasons_of_fp8(q, v, options, backend)
    if cache is not None and mask.pattern is not None:
        reasons.append("mask: got a sparse pattern with a cache, allowed are all other masks")
    if mask.pattern is not None and mask.function is not None and backend == "triton":
        reasons.append(
            "mask: got a sparse pattern and a function, which kernels cannot combine, allowed is one of the two; write "
            "the rule of the pattern into the function, and pass its blocks as block_sparse"
        )
    if mask.function is not None and _require_grad(mask.function.args):
        reasons.append("mask: got args that require grad, allowed are constant ones: a mask has no derivative")
    if score_mod is not None and backend == "triton":
        missing = [i for i in _require_grad(score_mod.args) if i not in score_mod.learned_args]
        if missing:
            names = ", ".join(f"args[{i}]" for i in missing)
            reasons.append(f"score_mod: got {names} that require grad, allowed are those in arg_gradients=")
    if backend == "torch":
        for name, part in (("mask", mask.function), ("score_mod", score_mod)):
            if part is not None and part.eager is None:
                reasons.append(f"{name}: got a function without eager=, which backend 'torch' runs")
    else:
        needs_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        head_dim_v = v.shape[-1] if cache is None else cache.head_dim_v
        reasons += triton_reasons(q, q.shape[-1], head_dim_v, needs_gradient)
        if qk_norm is not None and q.shape[-1] > MAX_HEAD_DIM:
            reasons.append(f"qk_norm: got a norm with head_dim {q.shape[-1]}, allowed are 1 .. {MAX_HEAD_DIM}")
    return reasons


def _reasons_of_fp8(q: Tensor, v: Tensor, options: Options, backend: Backend) -> list[str]:
    """Every reason why q, k and v cannot be rounded to 8 bits."""
    if backend == "torch":
        return [
            "precision: got FP8 with backend 'torch', allowed is 'triton'; fusedattn.low_precision.attention computes "
            "the same in eager PyTorch"
        ]
    reasons = []
    if options.cache is not None:
        reasons.append("precision: got FP8 with a cache, allowed is one of them")
    if q.dtype == torch.float64:
        reasons.append("precision: got FP8 with torch.float64, allowed are float16, bfloat16, float32")
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM_OF_FP8:
        reasons.append(
            f"precision: got FP8 with head_dim {max(q.shape[-1], v.shape[-1])}, allowed are 1 .. {MAX_HEAD_DIM_OF_FP8}"
        )
    layout = options.mask.layout
    if layout is not None and layout.block_k % KEYS_OF_FP8:
        reasons.append(
            f"precision: got FP8 with block_sparse of {layout.block_k} keys, allowed are multiples of {KEYS_OF_FP8}"
        )
    if HAS_TRITON and HAS_KERNELS and _is_gpu(q.device) and not interpreting():
        from fusedattn.kernels import devices

        capability = devices.capability_of(q.device)
        if capability is None or capability < (8, 9):
            got = "an AMD GPU" if capability is None else f"compute capability {'.'.join(map(str, capability))}"
            reasons.append(f"precision: got FP8 on {got}, allowed are NVIDIA GPUs of compute capability 8.9 and above")
    return reasons


def append_reasons(cache: KVCache, backend: Backend) -> list[str]:
    """Every reason why tokens cannot be appended to a cache."""
    return [] if backend == "torch" else triton_reasons(cache.k, cache.head_dim, cache.head_dim_v, False)


def _require_grad(args: tuple[Any, ...]) -> list[int]:
    """The indices of the args that require grad."""
    return [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.requires_grad]


def triton_reasons(q: Tensor, head_dim: int, head_dim_v: int, needs_gradient: bool) -> list[str]:
    """Every reason why the kernels cannot run on the device, the dtype and the head_dims of a call."""
    reasons = []
    most = MAX_HEAD_DIM if needs_gradient else MAX_HEAD_DIM_WITHOUT_GRADIENTS
    for got, highest in ((head_dim, most), (head_dim_v, MAX_HEAD_DIM)):
        if got > highest:
            reasons.append(
                f"head_dim: got {got}, allowed are 1 .. {MAX_HEAD_DIM} with backend 'triton', and for q and k without "
                f"gradients 1 .. {MAX_HEAD_DIM_WITHOUT_GRADIENTS}"
            )
    if q.dtype == torch.float64 and _is_gpu(q.device) and not interpreting():
        reasons.append(
            "dtype: got torch.float64, allowed are float16, bfloat16, float32 with backend 'triton' on a GPU"
        )
    of_device = device_reasons(q.device)
    if of_device or interpreting():
        return reasons + of_device
    from fusedattn.kernels import configs, devices

    arch = devices.arch_of(q.device)
    if needs_gradient and not configs.has_backward(arch, max(head_dim, head_dim_v), q.dtype):
        reasons.append(
            f"head_dim: got {max(head_dim, head_dim_v)}, allowed are 1 .. 256 with gradients in {q.dtype} on {arch}"
        )
    return reasons


def device_reasons(device: torch.device) -> list[str]:
    """Every reason why no kernel can run on a device."""
    if not HAS_TRITON:
        return ["backend: got 'triton', but Triton is not installed (it exists for Linux)"]
    if not HAS_KERNELS:
        return [
            "backend: got 'triton', but the kernels are missing: fusedattn/kernels is a link to the folder kernels "
            "beside fusedattn, and neither is there"
        ]
    if interpreting():
        if device.type not in ("cpu", "cuda"):
            refused = f"device: got {device}, allowed are cpu and cuda where TRITON_INTERPRET=1 is set"
            return [refused, *INTERPRETER_REASONS]
        return [*INTERPRETER_REASONS]
    if not _is_gpu(device):
        return [
            f"device: got {device}, allowed is a GPU with backend 'triton' (set TRITON_INTERPRET=1 before "
            "starting Python to run the kernels on a CPU, slowly)"
        ]
    from fusedattn.kernels import devices

    try:
        devices.arch_of(device)
    except NotImplementedError as error:
        return [str(error)]
    return []


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # a finder refuses the package, or sys.modules[package] is None
        return False


def _find_kernels() -> bool:
    """Whether the kernels are present. ``fusedattn/kernels`` is a symlink to the folder ``kernels`` beside the package;
    if copying or packing a checkout has lost the link, the package looks in that folder.
    """
    package = Path(__file__).parent
    linked, beside = (folder / "kernels" / "attention_fwd.py" for folder in (package, package.parent))
    if beside.is_file() and not linked.is_file():
        sys.modules[__package__].__path__.append(str(package.parent))
    return is_installed(f"{__package__}.kernels")


def _interpreter_reasons() -> list[str]:
    """Reasons why Triton's interpreter cannot run here."""
    if not is_installed("numpy"):
        return ["numpy: not installed, which Triton's interpreter needs (pip install numpy)"]
    try:
        triton, numpy = map(importlib.metadata.version, ("triton", "numpy"))
    except importlib.metadata.PackageNotFoundError:  # built from source, or under another name
        return []
    if _release(triton) < (3, 7) and _release(numpy) >= (2, 4):
        return [f"numpy: got {numpy}, allowed are versions before 2.4 in Triton {triton}'s interpreter"]
    return []


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version, also of 3.8rc1 or 3.6.0+git."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


# Evaluated once, outside anything that torch.compile traces.
HAS_TRITON = is_installed("triton")
HAS_KERNELS = _find_kernels()
INTERPRETER_REASONS = _interpreter_reasons() if HAS_TRITON else []


def are_dtensors(*tensors: object) -> bool:
    """Whether one of these is a DTensor of ``torch.distributed``, which is not loaded for this."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors)
