"""The kernels as PyTorch operators: what they take and return, their fakes, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedattn import sdpa
from fusedattn.constants import UNBOUNDED, Constants
from fusedattn.functions import readers_of, registered, with_learned

if TYPE_CHECKING:
    from fusedattn.kernels.mask_arguments import Band
    from fusedattn.kernels.problem import Problem
    from fusedattn.kernels.rope import Rotation

# A kernel's offsets inside one tile are int32: what lies further apart than this is copied together first.
MAX_ROW_STRIDE = 2**31 // 512

N_DIFFERENTIABLE = 8  # q, k, v, bias, relative, sinks, slopes, learned
N_KEPT = 4  # of the forward, for the backward: out, row_max, row_sum, rest


def _tileable(x: Tensor) -> Tensor:
    """``x`` with a contiguous last dimension and rows near enough for int32 offsets inside a tile."""
    if (x.stride(3) == 1 or x.shape[3] == 1) and x.stride(2) <= MAX_ROW_STRIDE:
        return x
    return x.contiguous()


def _new_like(x: Tensor, n: int | None = None) -> Tensor:
    """An uninitialised tensor of the shape, dtype and layout of ``x``, contiguous where that fits no tile.

    With `n` features, where ``x`` has another number, the dimensions follow each other in memory as those of ``x`` do.
    """
    overlaps = not x.is_contiguous() and sdpa.rows_overlap(x)
    unfit = overlaps or x.stride(2) > MAX_ROW_STRIDE
    if n is not None and n != x.shape[3]:
        shape = (*x.shape[:3], n)
        order = [0, 1, 2] if unfit else sorted(range(3), key=lambda d: -x.stride()[d])
        empty = torch.empty([shape[d] for d in order] + [n], dtype=x.dtype, device=x.device)
        return empty.permute(*(order.index(d) for d in range(3)), 3)
    layout = torch.contiguous_format if unfit else torch.preserve_format
    return torch.empty_like(x, memory_format=layout)


def _on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of its arguments."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _precision(dtype: torch.dtype) -> str:
    """How float32 products are computed: as IEEE float32, unless the user has allowed TF32 to torch."""
    if dtype != torch.float32 or torch.version.hip:
        return "ieee"
    try:
        allowed = torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it was set through torch's newer names, which this function refuses to translate
        allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed else "ieee"


def _rotations(constants: Constants) -> tuple[Rotation | None, Rotation | None]:
    """Of the queries and of the keys."""
    from fusedattn.kernels.rope import Rotation

    cos, sin = constants.tensors.cos, constants.tensors.sin
    if cos is None or sin is None:
        return None, None
    cos, sin = (_contiguous(x, 3) for x in (cos, sin))
    interleaved = bool(constants.sizes.interleaved)
    of_queries, of_keys = (
        Rotation(cos, sin, None if positions is None else _contiguous(positions, 2), interleaved)
        for positions in (constants.tensors.positions_q, constants.tensors.positions_k)
    )
    return of_queries, of_keys


def _contiguous(x: Tensor, dim: int) -> Tensor:
    """``x``, contiguous, with that many dimensions or one less, for a batch of 1."""
    return (x if x.dim() == dim else x[None]).contiguous()


@lru_cache(maxsize=256)
def _band(*bounds: int) -> Band:
    from fusedattn.kernels.mask_arguments import Band

    return Band(*(None if abs(bound) == UNBOUNDED else bound for bound in bounds))


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    constants: Constants,
    bias: Tensor | None = None,
    relative: Tensor | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    learned: Tensor | None = None,
) -> Problem:
    """The attention for the launchers; called where the kernels run, as it may run some."""
    from fusedattn.kernels import configs, devices
    from fusedattn.kernels.dropout import dropout_arguments
    from fusedattn.kernels.mask_arguments import MaskTensors, mask_arguments
    from fusedattn.kernels.problem import Problem
    from fusedattn.kernels.scores import UNMODIFIED, score_arguments
    from fusedattn.kernels.sequences import Sequences, Shape
    from fusedattn.kernels.tile import Call

    tensors, sizes = constants.tensors, constants.sizes
    packed = tensors.cu_seqlens_q is not None
    sequences = Sequences(tensors.cu_seqlens_q, tensors.cu_seqlens_k)
    shape = Shape(
        n_sequences=tensors.cu_seqlens_q.shape[0] - 1 if tensors.cu_seqlens_q is not None else q.shape[0],
        nheads_q=q.shape[1],
        nheads_kv=k.shape[1],
        seqlen_q=q.shape[2],
        seqlen_k=k.shape[2],
        max_seqlen_q=sizes.max_seqlen_q if packed else q.shape[2],
        max_seqlen_k=sizes.max_seqlen_k if packed else k.shape[2],
    )
    band = _band(sizes.lower_start, sizes.upper_start, sizes.lower_end, sizes.upper_end)
    mask_key, _, score_key, derivative_key, *_ = constants.functions
    mask_function = registered(mask_key) if mask_key else None
    score_function = registered(score_key) if score_key else None
    mask = MaskTensors(
        valid=tensors.valid,
        allowed=tensors.allowed,
        prefix=tensors.prefix,
        prefix_at_end=bool(sizes.prefix_at_end),
        documents_q=tensors.documents_q,
        documents_k=tensors.documents_k,
        layout=tensors.layout,
        block_q=sizes.block_q,
        block_k=sizes.block_k,
        function=mask_function,
        function_args=constants.mask_args,
    )
    score = score_arguments(
        softcap=constants.softcap or None,
        function=score_function,
        derivative=registered(derivative_key) if derivative_key else None,
        function_args=with_learned(constants.score_args, learned),
        bias=bias,
        slopes=slopes,
        relative=None if relative is None else _tileable(relative),
        has_sinks=sinks is not None,
    )
    by_pair = tensors.allowed is not None or tensors.documents_q is not None or mask_function is not None
    scored = score is not UNMODIFIED or tensors.dropout_seed is not None
    work: Any = ("combined" if by_pair else "scored") if scored else "dense" if by_pair else "streamed"
    head_dim = max(q.shape[3], v.shape[3])
    arch = devices.arch_of(q.device)
    tiles, exact_rows = configs.lookup(arch, head_dim, q.dtype, work), configs.lookup_exact_rows(arch, head_dim)
    if tensors.layout is not None:
        tiles = tiles.within(sizes.block_q, sizes.block_k)
        exact_rows = exact_rows.within(sizes.block_q, sizes.block_k)
    rotation_q, rotation_k = _rotations(constants)
    return Problem(
        shape=shape,
        call=Call(
            mask_arguments(mask, band, sequences, shape),
            score,
            dropout_arguments(tensors.dropout_seed, constants.dropout_p),
            sequences,
        ),
        band=band,
        rotation_q=rotation_q,
        rotation_k=rotation_k,
        sinks=None if sinks is None else sinks.contiguous(),
        scale=constants.scale,
        precision=_precision(q.dtype),
        configs=tiles,
        exact_rows=exact_rows,
        few_queries=None if tensors.layout is not None else configs.lookup_few_queries(arch, head_dim, q.dtype, work),
        rotates_in_place=tensors.cos is not None
        and shape.max_seqlen_q * shape.nheads_q <= configs.ROTATION_IN_PLACE * shape.nheads_kv,
        open_order=not (sizes.deterministic or torch.are_deterministic_algorithms_enabled()),
        l2_bytes=devices.L2_BYTES[arch],
    )


@torch.library.custom_op("fusedattn::attention_fwd", mutates_args=())
def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    relative: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    learned: Tensor | None,
    tensors: list[Tensor | None],
    sizes: list[int],
    functions: str,
    scale: float,
    softcap: float,
    dropout_p: float,
    keep_rest: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(out, lse, row_max, row_sum, rest)`` by the Triton kernels; the last three are for the backward.

    rest is empty unless `keep_rest` asks for it and the inputs have 16 bits. `bias` and `relative` are
    four-dimensional, `slopes` has two dimensions, `learned`, what the score function's args with a gradient are, one;
    `sinks` are float32 or float64; the rest is what :meth:`Constants.flat` makes.
    """
    from fusedattn.kernels import attention_fwd as kernel
    from fusedattn.kernels import attention_fwd_specialized as specialized
    from fusedattn.kernels.epilogue import Results
    from fusedattn.kernels.rope import rotated

    if not scale > 0:
        raise ValueError(f"scale: got {scale}, allowed are positive numbers")
    constants = Constants.of(tensors, sizes, functions, scale, softcap, dropout_p, keep_rest)
    out, lse, row_max, row_sum, rest = _attention_fwd_empty(q, v, constants)
    if out.numel() == 0:
        return out, lse, row_max, row_sum, rest
    q, k, v = _tileable(q), _tileable(k), _tileable(v)
    with _on_device_of(q):
        problem = _problem(q, k, v, constants, bias, relative, sinks, slopes, learned)
        if problem.rotation_k is not None and not problem.rotates_in_place and k.numel() > 0:
            k = rotated(k, problem.rotation_k, problem.call.sequences, problem.shape, of_queries=False)
        results = Results(out, lse, row_max, row_sum, rest if rest.numel() else None)
        launch = specialized.launch if specialized.takes(q, k, v, problem) else kernel.launch
        launch(q, k, v, results, problem)
    return out, lse, row_max, row_sum, rest


def _attention_fwd_empty(q: Tensor, v: Tensor, constants: Constants) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
    row_max, row_sum = torch.empty_like(lse), torch.empty_like(lse)
    out = _new_like(q, v.shape[3])
    if constants.keep_rest and q.dtype.itemsize == 2:
        rest = torch.empty_like(out, dtype=torch.int8)
    else:
        rest = torch.empty(0, dtype=torch.int8, device=q.device)
    if constants.tensors.cu_seqlens_q is not None:  # rows behind the last sequence see nothing
        out.zero_()
        lse.fill_(-torch.inf)
        row_max.fill_(torch.inf)
        row_sum.fill_(1.0)
    return out, lse, row_max, row_sum, rest


@attention_fwd.register_fake
def _attention_fwd_fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _attention_fwd_empty(q, v, Constants.of(*others[N_DIFFERENTIABLE - 3 :]))


@torch.library.custom_op("fusedattn::attention_bwd", mutates_args=())
def attention_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    relative: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    learned: Tensor | None,
    out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    rest: Tensor,
    needed: list[bool],
    tensors: list[Tensor | None],
    sizes: list[int],
    functions: str,
    scale: float,
    softcap: float,
    dropout_p: float,
    keep_rest: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(dq, dk, dv, dbias, drelative, dsinks, dslopes, dlearned)`` by the Triton kernels.

    Of dq, dk and dv, and each of the others, those that are not `needed` come back empty.
    """
    from fusedattn.kernels import attention_bwd as kernel
    from fusedattn.kernels import attention_bwd_bias as bias_kernel
    from fusedattn.kernels import attention_bwd_learned as learned_kernel
    from fusedattn.kernels import attention_bwd_rows as rows_kernel
    from fusedattn.kernels.rope import rotated

    constants = Constants.of(tensors, sizes, functions, scale, softcap, dropout_p, keep_rest)
    if out.numel() == 0 or k.numel() == 0:
        found = _attention_bwd_empty((q, k, v, bias, relative, sinks, slopes, learned), needed)
        for x in found:
            x.zero_()
        if dlse is not None and needed[4]:  # lse of what sees nothing is the sink
            found[5].copy_(dlse.sum((0, 2)))
        return found  # type: ignore[return-value]
    # The others come from their launchers.
    nothing = (None,) * (N_DIFFERENTIABLE - 3)
    dq, dk, dv, dbias, drelative, dsinks, dslopes, dlearned = _attention_bwd_empty((q, k, v, *nothing), needed)
    if constants.tensors.cu_seqlens_q is not None:  # what lies behind the last sequence gets no gradient
        for x in (dq, dk, dv):
            x.zero_()
    # Hooks on saved tensors may have changed the layout of some of them.
    q, k, v, dout, out = _tileable(q), _tileable(k), _tileable(v), _tileable(dout), _tileable(out)
    if dlse is not None and needed[4] and constants.tensors.cu_seqlens_q is not None:  # lse of no sequence is no sink's
        dlse = dlse.masked_fill(torch.arange(dlse.shape[2], device=q.device) >= constants.tensors.cu_seqlens_q[-1], 0.0)
    dlse = None if dlse is None else dlse.contiguous()
    statistics = rows_kernel.Statistics(row_max.contiguous(), row_sum.contiguous(), dlse)
    if rest.numel() and rest.stride() != out.stride():
        rest = torch.empty_like(out, dtype=torch.int8).copy_(rest)
    with _on_device_of(q):
        problem = _problem(q, k, v, constants, bias, relative, sinks, slopes, learned)
        sequences, shape = problem.call.sequences, problem.shape
        if problem.rotation_q is not None and problem.rotation_k is not None:
            q = rotated(q, problem.rotation_q, sequences, shape, of_queries=True)
            k = rotated(k, problem.rotation_k, sequences, shape, of_queries=False)
        rows = rows_kernel.launch(q, k, v, out, rest if rest.numel() else None, dout, statistics, problem)
        kernel.launch(
            q, k, v, dout, rows, dq if needed[0] else None, (dk, dv) if needed[1] else None, problem
        )  # fmt: skip
        if needed[2]:
            assert bias is not None
            dbias = bias_kernel.launch_dbias(q, k, v, dout, rows, bias, problem)
        if needed[3]:
            assert relative is not None
            drelative = bias_kernel.launch_drelative(q, k, v, dout, rows, relative, problem)
        if needed[4]:
            assert sinks is not None
            dsinks = _sinks_gradient(sinks, rows.delta, statistics)
        if needed[5]:
            assert slopes is not None
            whole = [(0, slopes.numel(), None, None)]
            dslopes = learned_kernel.launch(q, k, v, dout, rows, slopes, whole, problem)
        if needed[6]:
            assert learned is not None
            readers = readers_of(constants.functions[5], constants.score_args)
            dlearned = learned_kernel.launch(q, k, v, dout, rows, learned, readers, problem)
    return dq, dk, dv, dbias, drelative, dsinks, dslopes, dlearned


def _sinks_gradient(sinks: Tensor, delta: Tensor, statistics: Any) -> Tensor:
    """The weight of a sink has no value: its score gets ``-weight * delta``, summed over queries."""
    unseen = statistics.row_max == torch.inf
    # With sinks the scores are in natural units. A large maximum would leave lse no digits for the sum.
    weight = torch.where(unseen, 1.0, torch.exp(sinks[:, None] - statistics.row_max) / statistics.row_sum)
    if statistics.dlse is None:
        delta = torch.where(unseen, 0.0, delta)
    else:
        delta = torch.where(unseen, -statistics.dlse, delta)
    return -(weight * delta).sum((0, 2))


def _attention_bwd_empty(inputs: Sequence[Tensor | None], needed: Sequence[bool]) -> tuple[Tensor, ...]:
    """Uninitialised gradients of q, k, v and what else is there, in the order of the op's results."""
    q, k, v, *others = inputs
    assert q is not None
    assert k is not None
    assert v is not None

    def like(x: Tensor | None, needs: bool) -> Tensor:
        if x is None or not needs:
            return q.new_empty(0)
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    return (
        _new_like(q) if needed[0] else q.new_empty(0),
        _new_like(k) if needed[1] else k.new_empty(0),
        _new_like(v) if needed[1] else v.new_empty(0),
        *(like(x, needs) for x, needs in zip(others, needed[2:], strict=True)),
    )


@attention_bwd.register_fake
def _attention_bwd_fake(dout: Tensor, dlse: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    return _attention_bwd_empty(others[:N_DIFFERENTIABLE], others[N_DIFFERENTIABLE + N_KEPT])


def parts_of(saved: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Saved tensors: what is differentiable, (out, row_max, row_sum, rest), and the constants'."""
    n = N_DIFFERENTIABLE
    return saved[:n], saved[n : n + N_KEPT], saved[n + N_KEPT :]


def gradients(
    dout: Tensor,
    dlse: Tensor | None,
    tensors: Sequence[Tensor | None],
    needed: Sequence[bool],
    *flat: Any,
) -> tuple[Tensor, ...]:
    """Of q, k, v, bias, relative, sinks, slopes and learned, empty where not needed.

    `tensors` are these and what the forward kept, `flat` what :meth:`Constants.flat` makes.
    """
    needs_dq, needs_dk, needs_dv, *others = needed
    ask = [needs_dq, needs_dk or needs_dv, *others]
    found = attention_bwd(dout, dlse, *tensors, ask, *flat)
    if needs_dk != needs_dv:  # they come together
        found = tuple(x if needs else x.new_empty(0) for x, needs in zip(found, needed, strict=True))
    return found


# The op by itself is differentiable too: a compiler takes it as it is.
def _op_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, _, row_max, row_sum, rest = output
    tensors, *ctx.numbers = inputs[N_DIFFERENTIABLE:]
    ctx.save_for_backward(*inputs[:N_DIFFERENTIABLE], out, row_max, row_sum, rest, *tensors)
    ctx.mark_non_differentiable(row_max, row_sum, rest)
    ctx.set_materialize_grads(False)


def _op_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    inputs, kept, tensors = parts_of(ctx.saved_tensors)
    needed = ctx.needs_input_grad[:N_DIFFERENTIABLE]
    dout = torch.zeros_like(kept[0]) if dout is None else dout
    found = gradients(dout, dlse, (*inputs, *kept), needed, list(tensors), *ctx.numbers)
    wanted = (x if needs else None for x, needs in zip(found, needed, strict=True))
    return (*wanted, *(None,) * (1 + len(ctx.numbers)))


attention_fwd.register_autograd(_op_backward, setup_context=_op_setup_context)
