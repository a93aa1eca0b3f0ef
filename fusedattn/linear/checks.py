"""Checks of the arguments of linear attention, for any backend."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedattn import call_checks, feature_maps
from fusedattn.linear.options import LinearOptions
from fusedattn.linear.state import LinearState
from fusedattn.support import Backend, are_dtensors, triton_reasons

MAX_FEATURES = 256  # a program holds all features of a token


def check(q: Tensor, k: Tensor, v: Tensor, options: LinearOptions) -> None:
    """Raise TypeError or ValueError unless q and k, of which features remain to be computed, v and the options fit."""
    call_checks.check_qkv(q, k, v)
    for name, x in (("causal", options.causal), ("normalize", options.normalize)):
        if not isinstance(x, bool):
            raise TypeError(f"{name}: got {type(x).__name__}, allowed is a bool")
    if options.causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q, k: got seqlen_q = {q.shape[2]} and seqlen_k = {k.shape[2]}, allowed with causal=True are equal "
            "lengths; earlier keys go into initial_state="
        )
    if options.valid is not None:
        check_valid(options.valid, k)
    n_sequences = q.shape[0]
    if options.cu_seqlens is not None:
        call_checks.check_offsets("cu_seqlens", options.cu_seqlens, q)
        call_checks.check_longest("", options.cu_seqlens, q.shape[2], q.shape[2])
        if q.shape[0] != 1 or q.shape[2] != k.shape[2]:
            raise ValueError(
                f"q, k: got batch {q.shape[0]} and lengths {q.shape[2]} and {k.shape[2]}, allowed with cu_seqlens= "
                "are a batch of 1 and equal lengths"
            )
        n_sequences = options.cu_seqlens.shape[0] - 1
    if options.initial_state is not None:
        _check_state(options.initial_state, n_sequences, k, v)


def check_valid(valid: Tensor, k: Tensor) -> None:
    """Raise TypeError or ValueError unless `valid` tells which tokens of k are real."""
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool:
        got = valid.dtype if isinstance(valid, Tensor) else type(valid).__name__
        raise TypeError(f"valid: got {got}, allowed is a torch.bool tensor (True = a real token)")
    allowed = (k.shape[0], k.shape[2])
    if tuple(valid.shape) != allowed:
        raise ValueError(f"valid: got shape {tuple(valid.shape)}, allowed is (batch, seqlen_k) = {allowed}")
    if valid.device != k.device:
        raise ValueError(f"valid: got device {valid.device}, allowed is the device of q, {k.device}")


def _check_state(state: LinearState, n: int, k: Tensor, v: Tensor) -> None:
    if not isinstance(state, LinearState) or not all(isinstance(x, Tensor) for x in state):
        raise TypeError(f"initial_state: got {type(state).__name__}, allowed is a LinearState of two tensors")
    shape = (n, k.shape[1], k.shape[3], v.shape[3])
    dtype = torch.promote_types(k.dtype, torch.float32)
    for name, x, allowed in (("kv", state[0], shape), ("k_sum", state[1], shape[:3])):
        if tuple(x.shape) != allowed:
            raise ValueError(f"initial_state.{name}: got shape {tuple(x.shape)}, allowed is {allowed}")
        if x.dtype != dtype:
            raise TypeError(f"initial_state.{name}: got {x.dtype}, allowed is {dtype}")
        if x.device != k.device:
            raise ValueError(f"initial_state.{name}: got device {x.device}, allowed is the device of q, {k.device}")


def reasons_of(q: Tensor, k: Tensor, v: Tensor, options: LinearOptions, backend: Backend) -> list[str]:
    """Every reason why a backend cannot run a call of checked arguments."""
    reasons = []
    state = options.initial_state or ()
    if are_dtensors(q, k, v, *state):
        reasons.append("q, k, v, initial_state: got a DTensor, allowed are tensors of one process")
    if backend == "torch":
        try:
            feature_maps.eager(options.feature_map)
        except NotImplementedError as error:
            reasons.append(str(error))
        return reasons
    if k.shape[3] > MAX_FEATURES:
        reasons.append(f"feature_map: got {k.shape[3]} features, allowed are 1 .. {MAX_FEATURES} with backend 'triton'")
    return reasons + triton_reasons(q, k.shape[3], v.shape[3], needs_gradient=False)
