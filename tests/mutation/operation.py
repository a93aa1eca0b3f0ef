"""Faults in how ``fusedattn/`` runs the kernels: their arguments, their results, and all their derivatives."""

from tests.mutation.fault import Fault
from tests.mutation.suites import (
    ALIBI,
    BANDS,
    CAUSAL,
    COMMON,
    DOCUMENTS,
    EMPTY,
    FINITE,
    LARGE,
    MASK_FUNCTION,
    PACKED,
    PREFIX,
    SCORE,
    SECOND_ORDER,
    SINKS,
    SPARSE,
    WIDTHS,
    WINDOW,
    budget,
    gradients,
    integration,
)

LAUNCHING, RESULTS = "fusedattn/launching.py", "fusedattn/results.py"
PREPARE, OPS, FUSED, CONSTANTS = (
    "fusedattn/prepare.py",
    "fusedattn/ops.py",
    "fusedattn/fused.py",
    "fusedattn/constants.py",
)
VARLEN, EAGER_PACKED, SDPA = "fusedattn/varlen.py", "fusedattn/eager_packed.py", "fusedattn/sdpa.py"
NESTED, PLAIN = "fusedattn/nested.py", "fusedattn/plain.py"
PLAN, CUTS = "fusedattn/pieces.py", "fusedattn/cuts.py"
FUNCTIONS, CONFIGS, DEVICES = "fusedattn/functions.py", "kernels/configs.py", "kernels/devices.py"

NESTED_TENSORS = "tests/test_varlen.py -k nested"
LSE = "tests/test_attention.py -k lse"
PLAIN_CALLS = "tests/test_dispatch.py -k plain_call"
STRIDES = "tests/test_strides.py"
COMPILE = "tests/test_compile.py"
OPCHECK = "tests/test_compile.py -k opcheck"
BY_ITSELF = "tests/test_compile.py -k by_itself"
SCALES = "tests/test_attention.py -k scales"
TORCH = "tests/test_attention.py -k torch"
MASKING = "tests/test_masking.py"
PIECES = "tests/test_pieces.py"
FEATURES = "tests/test_gradcheck.py -k of_a_feature"
QUEUED = "tests/test_gradcheck.py -k 'of_a_feature and positions'"

# fmt: off
OPERATION = (
    Fault(PLAIN, "math.isfinite(q.sum()) and ", "", "plain calls: a NaN of a query is lost", PLAIN_CALLS),
    Fault(PLAIN, " and math.isfinite(v.sum())", "", "plain calls: a hidden NaN of a value", PLAIN_CALLS),
    Fault(PLAIN, '!= "torch" or _intercepted():', '!= "torch":', "plain calls under autocast and in vmap", PLAIN_CALLS),
    Fault(PLAIN, "last == 1 and min(strides) >= head_dim", "last == 1", "plain calls: rows that overlap", PLAIN_CALLS),
    Fault(PLAIN, "last == 1 and min(strides)", "min(strides)", "plain calls: features apart", PLAIN_CALLS),
    Fault(PLAIN, "lower is not None or upper not in (None, 0)", "upper not in (None, 0)", "plain calls: a window is off", PLAIN_CALLS),
    Fault(PLAIN, "is_causal = upper is not None", "is_causal = False", "plain calls: not causal", PLAIN_CALLS),
    Fault(FUSED, "if torch.is_grad_enabled() or ops.transforming():", "if ops.transforming():", "gradients that are constant for create_graph", SECOND_ORDER),
    Fault(FUSED, "if torch.is_grad_enabled() or ops.transforming():", "if torch.is_grad_enabled():", "no derivative in forward mode of the gradients", "tests/test_dispatch.py -k transforms"),
    Fault(FUSED, "if not needs_gradient and not ops.transforming():", "if not needs_gradient:", "no derivative in forward mode", SECOND_ORDER),
    Fault(LAUNCHING, "(x.stride(3) == 1 or x.shape[3] == 1) and x.stride(2) <= results.MAX_ROW_STRIDE", "x.stride(3) == 1 or x.shape[3] == 1", "rows too far apart for int32 are not copied", LARGE),
    Fault(RESULTS, "unfit = x.stride(2) > MAX_ROW_STRIDE or sdpa.rows_overlap(x)", "unfit = x.stride(2) > MAX_ROW_STRIDE", "outputs whose rows overlap", STRIDES),
    Fault(RESULTS, "unfit = x.stride(2) > MAX_ROW_STRIDE or sdpa.rows_overlap(x)", "unfit = sdpa.rows_overlap(x)", "outputs whose rows are too far apart for int32", LARGE),
    Fault(RESULTS, "key=lambda d: -x.stride()[d]", "key=lambda d: x.stride()[d]", "out of another head_dim_v in the opposite layout of q", "tests/test_compile.py -k head_dim"),
    Fault(RESULTS, "shape = (*x.shape[:3], n)", "shape = (*x.shape[:3], x.shape[3])", "out as wide as q", WIDTHS),
    Fault(LAUNCHING, "if rest is not None and rest.stride() != out.stride():", "if rest is not None and rest.shape != out.shape:", "rest in another layout than out", "tests/test_strides.py -k come_back"),
    Fault(LAUNCHING, 'allowed = torch.get_float32_matmul_precision() != "highest"', 'allowed = torch.get_float32_matmul_precision() == "highest"', "TF32 where it was not allowed", "tests/test_attention.py -k precision"),
    Fault(LAUNCHING, "k = rope.rotated(k, problem.rotation_k, sequences, shape, of_queries=False)", "k = rope.rotated(k, problem.rotation_q, sequences, shape, of_queries=False)", "backward: keys at the positions of queries", QUEUED),
    Fault(LAUNCHING, "q = rope.rotated(q, problem.rotation_q, sequences, shape, of_queries=True)", "q = rope.rotated(q, problem.rotation_q, sequences, shape, of_queries=False)", "backward: queries rotated as keys are", gradients("rope")),
    Fault(LAUNCHING, "k = rope.rotated(k, problem.rotation_k, problem.call.sequences,", "k = rope.rotated(k, problem.rotation_q, problem.call.sequences,", "forward: keys at the positions of queries", budget("RoPE")),
    Fault(LAUNCHING, "if dout.numel() == 0 or k.numel() == 0:", "if dout.numel() == 0:", "backward: no keys", "tests/test_masking.py -k nothing_there",
          equivalent="the kernels then run over no keys and give the same zeros; the shortcut saves launches"),
    Fault(LAUNCHING, "dlse = None if dlse is None else dlse.contiguous()", "pass", "strides of the gradient of lse", STRIDES),
    Fault(LAUNCHING, "else (dk, dv), problem)", "else (dv, dk), problem)", "dk for dv", FEATURES),
    Fault(OPS, "ask = [needs_dq, needs_dk or needs_dv, *others]", "ask = [needs_dq, needs_dk, *others]", "no gradient of v without that of k", "tests/test_attention.py -k gradients_of_some"),
    Fault(RESULTS, "constants.keep_rest and q.dtype.itemsize == 2 else", "constants.keep_rest and q.dtype == torch.bfloat16 else", "no rest in float16", COMMON),
    Fault(LAUNCHING, "None if abs(bound) == UNBOUNDED else bound", "None if abs(bound) == UNBOUNDED or not bound else bound", "a causal mask on the main diagonal is dropped", CAUSAL),
    Fault(LAUNCHING, "softcap=constants.softcap or None,", "softcap=None,", "kernels: softcap silently off", budget("soft-cap")),
    Fault(LAUNCHING, "has_sinks=sinks is not None", "has_sinks=False", "sinks: scores silently unscaled", SINKS),
    Fault(LAUNCHING, "dropout_arguments(tensors.dropout_seed, constants.dropout_p)", "dropout_arguments(None, constants.dropout_p)", "kernels: dropout silently off", budget("dropout")),
    Fault(LAUNCHING, "tiles = tiles.within(sizes.block_q, sizes.block_k)", "tiles = tiles", "layout: tiles larger than its blocks", SPARSE),
    Fault(LAUNCHING, "prefix_at_end=bool(sizes.prefix_at_end)", "prefix_at_end=False", "prefix: alignment lost on the way to the kernels", PREFIX),
    Fault(LAUNCHING, "documents_k=tensors.documents_k", "documents_k=tensors.documents_q", "documents of the queries for those of the keys, in the kernels", DOCUMENTS),
    Fault(LAUNCHING, "(constants.tensors.positions_q, constants.tensors.positions_k)", "(constants.tensors.positions_q, constants.tensors.positions_q)", "positions of the queries for those of the keys", budget("RoPE")),
    Fault(LAUNCHING, "(x if x.dim() == dim else x[None]).contiguous()", "(x if x.dim() == dim else x[None])", "strides of the tables and of positions", STRIDES),
    Fault(LAUNCHING, "return -(weight * delta).sum((0, 2))", "return (weight * delta).sum((0, 2))", "dsinks: sign", gradients("sinks")),
    Fault(LAUNCHING, "weight = torch.where(unseen, 1.0, torch.exp(sinks[:, None] - statistics.row_max) / statistics.row_sum)", "weight = torch.exp(sinks[:, None] - statistics.row_max) / statistics.row_sum", "dsinks: rows that see nothing", budget("empty")),
    Fault(LAUNCHING, "delta = torch.where(unseen, -statistics.dlse, delta)", "delta = torch.where(unseen, statistics.dlse, delta)", "dsinks: sign of dlse in rows that see nothing", budget("empty")),
    Fault(LAUNCHING, "torch.exp(sinks[:, None] - statistics.row_max) / statistics.row_sum", "torch.exp(sinks[:, None] - statistics.row_max)", "dsinks: weights not divided by their sum", gradients("sinks")),
    Fault(LAUNCHING, "delta = torch.where(unseen, 0.0, delta)", "delta = torch.where(unseen, 1.0, delta)", "dsinks: rows that see nothing, without dlse", "tests/test_gradcheck.py -k each_result"),
    Fault(LAUNCHING, "found[5].copy_(dlse.sum((0, 2)))", "pass", "dsinks: no keys at all", EMPTY),
    Fault(OPS, "zip(rest_of_inputs, needed[2:], strict=True)", "zip(rest_of_inputs, needed[1:], strict=False)", "fake: drelative where dbias is needed", OPCHECK),
    Fault(RESULTS, "(dq, new_like(k), new_like(v))", "(dq, new_like(k), new_like(k))", "dv in the shape of dk", WIDTHS),
    Fault(OPS, "dout = torch.zeros_like(kept[0]) if dout is None else dout", "dout = torch.ones_like(kept[0]) if dout is None else dout", "the op by itself: no gradient of out is taken for ones", BY_ITSELF),
    Fault(OPS, "return saved[:n], saved[n : n + N_KEPT], saved[n + N_KEPT :]", "return saved[:n], saved[n : n + 4], saved[n + 3 : -1]", "constants of the backward off by one", FEATURES),
    Fault(PREPARE, "return -q, replace(options, scale=-scale)", "return q, replace(options, scale=-scale)", "sign of a negative scale", SCALES),
    Fault(PREPARE, "return q * (scale / SMALLEST_SCALE), replace(options", "return q, replace(options", "a scale of 0", SCALES),
    Fault(PREPARE, "if scale >= SMALLEST_SCALE:", "if scale > 0:", "a scale below the numbers of float32", "tests/test_attention.py -k smallest_scales"),
    Fault(PREPARE, "scale = 1.0 / math.sqrt(q.shape[-1])", "scale = 1.0 / math.sqrt(k.shape[-2])", "default scale from the wrong dimension", budget("cross")),
    Fault(PREPARE, "scale = 1.0 / math.sqrt(q.shape[-1])", "scale = 1.0 / math.sqrt(v.shape[-1])", "default scale from the width of values", WIDTHS),
    Fault(PREPARE, "        rope.check_positions()\n", "        pass\n", "positions outside the tables are not refused", "tests/test_rope.py"),
    Fault(PREPARE, "return x.to(torch.get_autocast_dtype(device))", "return x", "autocast ignored", "tests/test_attention.py -k autocast"),
    Fault(PREPARE, "if dropout_p and dropout_seed is None:", "if dropout_seed is None and dropout_p > 0.99:", "dropout: no seed drawn", "tests/test_compile.py -k checkpointing"),
    Fault(CONFIGS, "return getattr(entry, work)", "return entry.streamed", "configs of the boolean mask never used", "tests/test_codegen.py"),
    Fault(CONFIGS, "self.dense.smaller())", "self.dense)", "configs of changed scores as large as those of a mask", "tests/test_codegen.py"),
    Fault(CONFIGS, 'return not (arch == "sm_86" and dtype.itemsize == 4 and head_dim > 256)', "return True", "a backward that does not fit into shared memory is not refused", "tests/test_codegen.py"),
    Fault(CONFIGS, "if head_dim <= largest:", "if head_dim < largest:", "config of the next head_dim", "tests/test_codegen.py"),
    Fault(DEVICES, "capability in ((8, 0), (8, 7))", "capability >= (8, 0)", "consumer GPUs with the shared memory of others", "tests/test_devices.py"),
    Fault(DEVICES, "if properties.major in (10, 11):", "if properties.major >= 10:", "consumer Blackwell with the tiles of data centers", "tests/test_devices.py"),
)

CARRIED = (
    Fault(CONSTANTS, "max(lower[band.align], -band.left)", "-band.left if lower[band.align] == -UNBOUNDED else min(lower[band.align], -band.left)", "kernels: the wider of two windows", integration("transformers_attention", "other_positions")),
    Fault(CONSTANTS, "max(lower[band.align], -band.left)", "max(lower[band.align], -band.left - 1)", "kernels: a window is one key longer", WINDOW),
    Fault(CONSTANTS, "bounds = lower[\"top_left\"]", "bounds = lower[\"bottom_right\"]", "kernels: a window of the last query aligned to the first", BANDS),
    Fault(CONSTANTS, "min(upper[band.align], band.right)", "band.right if upper[band.align] == UNBOUNDED else max(upper[band.align], band.right)", "kernels: the weaker of two causal masks", BANDS),
    Fault(CONSTANTS, "for band in bands:", "for band in (x for x in bands if x.align != 'top_left'):", "kernels: top-left bands dropped", CAUSAL),
    Fault(CONSTANTS, 'mask.prefix.align == "bottom_right"', 'mask.prefix.align == "top_left"', "kernels: alignment of a prefix the wrong way round", PREFIX),
    Fault(CONSTANTS, "mask.layout.block_k,\n            interleaved", "mask.layout.block_q,\n            interleaved", "kernels: blocks of keys as long as those of queries", "tests/test_fuzz.py -k contract"),
    Fault(CONSTANTS, "            read(keys.mask_numbers, rest) if keys.mask else (),\n            read(keys.score_numbers, rest) if keys.score else (),\n", "            read(keys.score_numbers, rest) if keys.score else (),\n            read(keys.mask_numbers, rest) if keys.mask else (),\n", "kernels: arguments of mask and score function exchanged", SCORE),
    Fault(CONSTANTS, "args = (*self.mask_args, *self.score_args)", "args = (*self.score_args, *self.mask_args)", "kernels: arguments of the score function first", budget("everything")),
    Fault(FUNCTIONS, 'int(text) if text.lstrip("-").isdigit() else float(text)', "float(text)", "functions: whole numbers become broken ones", MASK_FUNCTION),
    Fault(FUNCTIONS, '"" if isinstance(x, Tensor) else repr(x)', '"" if isinstance(x, Tensor) else f"{x:g}"', "functions: numbers rounded to six digits", "tests/test_masks.py"),
    Fault(FUNCTIONS, "_number(number) if number else next(tensors)", "next(tensors) if number else next(tensors)", "functions: tensors in the place of numbers", MASK_FUNCTION),
    Fault(CONSTANTS, 'else score_mod.derivative_key,', 'else score_mod.function_key,', "kernels: a score function is its own derivative", SCORE),
    Fault(FUSED, "else torch.atleast_2d(bias.slopes)", "else torch.atleast_2d(bias.slopes)[:1]", "kernels: slopes of batch 0 for all", ALIBI),
    Fault(CONSTANTS, "return x[(None,) * (4 - x.dim())]", "return x[(..., *(None,) * (4 - x.dim()))]", "kernels: dimensions of a bias are added behind", budget("query")),
    Fault(CONSTANTS, "positions_k=None if rope is None else rope.positions_k", "positions_k=None if rope is None else rope.positions_q", "kernels: keys at the positions of queries", budget("RoPE")),
    Fault(CONSTANTS, "interleaved=int(rope is not None and rope.interleaved)", "interleaved=0", "kernels: pairs of the other kind of RoPE", budget("RoPE")),
    Fault(CONSTANTS, "scale=self.scale,", "scale=1.0,", "kernels: scale dropped", budget("scale")),
)

DIFFERENTIATED = (
    Fault(FUSED, "dout = torch.zeros_like(kept[0]) if dout is None else dout", "dout = torch.ones_like(kept[0]) if dout is None else dout", "no gradient of out is taken for ones", LSE),
    Fault(FUSED, "options.constants(keep_rest=needs_gradient, ", "options.constants(keep_rest=False, ", "no rest kept for the backward", COMMON),
    Fault(FUSED, "options.constants(keep_rest=needs_gradient, ", "options.constants(keep_rest=True, ", "rest kept without a backward", "tests/test_attention.py -k kept"),
    Fault(FUSED, "ctx.save_for_backward(*inputs, out, row_max", "ctx.save_for_backward(*inputs[:2], inputs[1], *inputs[3:], out, row_max", "k saved for v", FEATURES),
    Fault(FUSED, "added = None if bias is None or bias.tensor is None else four_dimensional(bias.tensor)", "added = None if bias is None or bias.tensor is None else four_dimensional(bias.tensor).detach()", "no gradient of a bias", gradients("bias")),
    Fault(FUSED, "return transposed((dout, _or_zeros(dlse, lse)))", "return transposed((dout, torch.zeros_like(lse)))", "second order: gradient of lse lost", SECOND_ORDER),
    Fault(FUSED, "return eager(*(changed.get(i, x) for i, x in enumerate(inputs)))", "return eager(*(x if x is None else changed.get(i, x.detach()) for i, x in enumerate(inputs)))", "second order: constant in what needs no gradient", SECOND_ORDER),
    Fault(FUSED, "*(by_input.get(i) for i in range(N_BACKWARD))", "*(by_input.get(i) if i else None for i in range(N_BACKWARD))", "second order: dout gets no gradient", SECOND_ORDER),
    Fault(FUSED, "*(by_input.get(i) for i in range(N_BACKWARD))", "*(by_input.get(i) if i != 1 else None for i in range(N_BACKWARD))", "second order: dlse gets no gradient", SECOND_ORDER),
    Fault(FUSED, "found = transposed(tuple(_or_zeros(grad, x)", "found = transposed(tuple(torch.zeros_like(x) if grad is None else -grad", "second order: sign", SECOND_ORDER),
    Fault(FUSED, "replace(bias, tensor=added, relative=relative,", "replace(bias, tensor=added,", "second order: relative is a constant", SECOND_ORDER),
    Fault(FUSED, "replace(bias, tensor=added, relative=relative,", "replace(bias, relative=relative,", "second order: bias is a constant", SECOND_ORDER),
    Fault(FUSED, "changed = replace(options, bias=parts, score_mod=score_mod, sinks=sinks)", "changed = replace(options, bias=parts, score_mod=score_mod)", "second order: sinks are constants", SECOND_ORDER),
    Fault(FUSED, "changed = replace(options, bias=parts, score_mod=score_mod, sinks=sinks)", "changed = replace(options, bias=parts, score_mod=score_mod, sinks=sinks, softcap=None)", "second order: softcap forgotten", SECOND_ORDER),
    Fault(FUSED, "        if packed is not None:\n            return eager_packed.attention(q, k, v, changed, packed)\n", "", "second order: packed sequences are one", "tests/test_second_order.py -k packed"),
    Fault(FUSED, "    added, relative, sinks, slopes, learned = others\n", "    relative, added, sinks, slopes, learned = others\n", "second order: bias and relative exchanged", SECOND_ORDER),
    Fault(FUSED, "product(tuple(_or_zeros(tangents[i], inputs[i]) for i in moving))", "product(tuple(torch.zeros_like(inputs[i]) if i else tangents[i] for i in moving))", "jvp: along q only", "tests/test_second_order.py -k jvp"),
    Fault(FUSED, "_pushed(ctx.eager, inputs, tangents[: ops.N_DIFFERENTIABLE])", "_pushed(ctx.eager, inputs, tangents[1 : 1 + ops.N_DIFFERENTIABLE])", "jvp: tangents off by one", "tests/test_second_order.py -k jvp"),
    Fault(FUSED, "return tuple(next(found) if needs else nothing for needs in ctx.needed)", "return tuple(-next(found) if needs else nothing for needs in ctx.needed)", "jvp of gradients: sign", SECOND_ORDER),
    Fault(FUSED, "x.select(dim, i) if isinstance", "x.select(0, i) if isinstance", "vmap: always over the first dimension", "tests/test_second_order.py -k vmap"),
    Fault(FUSED, "x.select(dim, i) if isinstance", "x.select(dim, 0) if isinstance", "vmap: the first call for all", "tests/test_second_order.py -k vmap"),
    Fault(FUSED, "torch.stack(results) for results in", "torch.stack(results[::-1]) for results in", "vmap: results in reverse", "tests/test_second_order.py -k vmap"),
)

PACKING = (
    Fault(RESULTS, "        out.zero_()\n", "", "packed: rows of no sequence have no out", PACKED),
    Fault(RESULTS, "lse.fill_(-torch.inf)", "lse.fill_(0.0)", "packed: rows of no sequence have a finite lse", PACKED),
    Fault(RESULTS, "row_max.fill_(torch.inf)", "row_max.fill_(0.0)", "packed: rows of no sequence count as seen by their sink", PACKED),
    Fault(RESULTS, "    if packed:  # what", "    if False:  # what", "packed: rows of no sequence have no gradient", PACKED),
    Fault(RESULTS, "        for x in found:\n", "        for x in found[:1]:\n", "packed: keys of no sequence have no gradient", PACKED),
    Fault(LAUNCHING, "sizes.max_seqlen_q, sizes.max_seqlen_k)", "sizes.max_seqlen_q, sizes.max_seqlen_q)", "packed: keys as long as queries", PACKED),
    Fault(LAUNCHING, "n_sequences = cu_seqlens_q.shape[0] - 1", "n_sequences = cu_seqlens_q.shape[0] - 2", "packed: the last sequence left out", PACKED),
    Fault(LAUNCHING, "Sequences(cu_seqlens_q, cu_seqlens_k)", "Sequences(cu_seqlens_q, cu_seqlens_q)", "packed: keys where the queries are", PACKED),
    Fault(CONSTANTS, "max_seqlen_q=0 if packed is None else packed.max_seqlen_q", "max_seqlen_q=0 if packed is None else packed.max_seqlen_k", "packed: queries as long as keys", PACKED),
    Fault(VARLEN, "k.shape[2] if max_seqlen_k is None else max_seqlen_k", "q.shape[2] if max_seqlen_k is None else max_seqlen_k", "packed: keys at most as many as all queries", PACKED),
    Fault(VARLEN, "    q, options = with_positive_scale(q, options)\n", "", "packed: a negative scale", PACKED),
    Fault(VARLEN, "out, lse = fused.attention(q, k, v, options, deterministic=deterministic, packed=packed)", "out, lse = eager_packed.attention(q, k, v, options, packed)", "packed: the kernels never run", PACKED),
    Fault(NESTED, "offsets_q, offsets_k = q.offsets(), k.offsets()", "offsets_q, offsets_k = q.offsets(), q.offsets()", "nested: keys where the queries are", integration("torch_functions", "jagged")),
    Fault(NESTED, "x._ragged_idx != 2 or", "", "nested: ragged elsewhere is not refused", NESTED_TENSORS),
    Fault(NESTED, "_longest(q), _longest(k)", "_longest(q), _longest(q)", "nested: keys at most as many as queries", integration("torch_functions", "jagged")),
    Fault(EAGER_PACKED, "**vars(own), first_batch=i", "**vars(own), first_batch=0", "eager packed: sequences drop the same", PACKED),
    Fault(EAGER_PACKED, "mask.valid[:, keys]", "mask.valid[:, queries]", "eager packed: padding of the queries' tokens", PACKED),
    Fault(EAGER_PACKED, "prefix.lengths[i : i + 1]", "prefix.lengths[:1]", "eager packed: prefix of the first sequence for all", PACKED),
    Fault(EAGER_PACKED, "Documents(documents.q[:, queries], documents.k[:, keys])", "Documents(documents.q[:, queries], documents.k[:, : keys.stop - keys.start])", "eager packed: documents of the first keys for all", PACKED),
    Fault(EAGER_PACKED, "slopes = slopes[i]", "slopes = slopes[0]", "eager packed: slopes of the first sequence for all", PACKED),
    Fault(EAGER_PACKED, "x = x[i : i + 1] if x.shape[0] > 1 else x", "x = x[:1]", "eager packed: pairs of the first sequence for all", PACKED),
    Fault(EAGER_PACKED, "-(-lengths[0] // layout.block_q), -(-lengths[1]", "lengths[0] // layout.block_q, -(-lengths[1]", "eager packed: a ragged block of a layout left out", PACKED),
    Fault(EAGER_PACKED, "_pairs_of(relative, i, lengths[0], relative.shape[-1])", "_pairs_of(relative, 0, lengths[0], relative.shape[-1])", "eager packed: relative of the first sequence for all", PACKED),
    Fault(EAGER_PACKED, "positions_k[..., keys]", "positions_k[..., queries]", "eager packed: keys at the positions of queries", PACKED),
    Fault(EAGER_PACKED, "(1, q.shape[1], n_rest), -torch.inf,", "(1, q.shape[1], n_rest), 0.0,", "eager packed: rows of no sequence have a finite lse", PACKED),
)

TORCH_BACKEND = (
    Fault(SDPA, "if lower is None and upper in (None, 0):", "if lower is None and (upper is None or upper >= 0):", "torch backend: top-left for bottom-right", TORCH),
    Fault(SDPA, "if lower is None and upper in (None, 0):", "if upper in (None, 0):", "torch backend: the left side of a window lost", TORCH),
    Fault(SDPA, "return reference.large_rows(largest) is not None", "return False", "torch backend: weights by an lse without digits", FINITE),
    Fault(SDPA, "if added is None and mask.only_bands:", "if mask.only_bands:", "bias silently off", TORCH),
    Fault(SDPA, "else visible | empty", "else visible", "torch backend: NaN where nothing is visible", "tests/test_masking.py -k any_kernel"),
    Fault(SDPA, "_Rows(torch.where(visible, added, hidden), empty)", "_Rows(added, empty)", "torch backend: a bias takes the place of the mask", TORCH),
    Fault(SDPA, "return out.masked_fill(rows.empty, 0.0)", "return out", "torch backend: a number where nothing is visible", "tests/test_masking.py -k 'see_nothing and torch'"),
    Fault(SDPA, "if in_band and own is None:", "if in_band:", "pieces: the bias of another place", PIECES),
    Fault(SDPA, "hidden = torch.where(empty, 0.0, -torch.inf).to(added.dtype)", "pass", "torch backend: NaN where nothing is visible, with a bias", "tests/test_masking.py -k any_kernel"),
    Fault(SDPA, "return x.contiguous() if rows_overlap(x) else x", "return x", "torch backend: rows that overlap", STRIDES),
    Fault(SDPA, "0 < stride < x.shape[3]", "0 <= stride < x.shape[3]", "rows that are expanded count as overlapping", "tests/test_strides.py -k share"),
    Fault(SDPA, "return math.isfinite(sum(sums)) or", "return True or", "torch backend: 0 times a hidden NaN", MASKING),
    Fault(SDPA, "not (highest < math.inf and _finite(", "not (_finite(", "torch backend: a NaN in a bias", "tests/test_masking.py -k no_number", equivalent="the kernel of torch 2.13 hands one of a bias on"),
    Fault(SDPA, "is_causal = piece.hidden == \"later\"", "is_causal = False", "pieces: a diagonal forgotten", PIECES),
    Fault(SDPA, "piece.keys.start - piece.rows.start", "0", "pieces: the band of another place", PIECES),
    Fault(SDPA, "if mask.valid is not None and piece.hidden == \"keys\":", "if mask.valid is not None:", "pieces: nothing but padding beside padding", PIECES),
    Fault(SDPA, "or any(map(wrapped, tensors))", "", "pieces: torch.func in the midst of a plan", PIECES),
    Fault(SDPA, "if added is not None and added.requires_grad:", "if False:", "pieces: a bias with a gradient in parts", PIECES, equivalent="slower, but as right"),
    Fault(PLAN, "max(rows.start, keys.start - upper)", "max(rows.start, keys.start - upper + 1)", "pieces: the first query that sees something", PIECES),
    Fault(PLAN, "min(rows.stop, keys.stop - lower)", "min(rows.stop, keys.stop - lower - 1)", "pieces: the last query that sees something", PIECES),
    Fault(PLAN, "max(keys.start, start + lower)", "max(keys.start, start + lower + 1)", "pieces: the first key of a window", PIECES),
    Fault(PLAN, "min(keys.stop, stop + upper)", "min(keys.stop, stop + upper - 1)", "pieces: the last key of a window", PIECES),
    Fault(PLAN, "and start + upper == first:", ":", "pieces: a diagonal that starts elsewhere", PIECES),
    Fault(PLAN, "part.rows.start + self.upper < part.keys.stop - 1", "part.rows.start + self.upper < part.keys.stop - 2", "pieces: one later key is shown", PIECES),
    Fault(PLAN, "part.rows.stop - 1 + self.lower > part.keys.start", "part.rows.stop - 2 + self.lower > part.keys.start", "pieces: one earlier key is shown", PIECES),
    Fault(PLAN, "\"nothing\" if n == j - i else \"keys\"", "\"nothing\"", "pieces: gaps in the padding", PIECES),
    Fault(PLAN, "spans[name] = range(spans[name][0].start, run.stop), \"pairs\"", "spans[name] = range(spans[name][0].start, run.stop), \"nothing\"", "pieces: what lies between two runs of a document", PIECES),
    Fault(PLAN, "length - shift, rows.start", "length - shift + 1, rows.start", "pieces: where a prefix ends", PIECES),
    Fault(PLAN, "upper = shift if band.upper is None else min(band.upper, shift)", "upper = shift", "pieces: a prefix without the band beside it", PIECES),
    Fault(PLAN, "if block[..., keys.start : keys.stop].all() else", "if block[:1, :, keys.start : keys.stop].all() else", "pieces: the mask of the first head", PIECES),
    Fault(PLAN, "range(own[0], own[-1] + 1)", "range(own[0], own[0] + 1)", "pieces: one batch of those that are alike", PIECES),
    Fault(PLAN, "valid if mask.valid is None else mask.valid & valid", "valid", "pieces: padding lost beside a boolean of keys", PIECES),
    Fault(CUTS, "wide = torch.promote_types(dtype, torch.float32) if overlap else dtype", "wide = dtype", "cuts: sums rounded to 16 bits again and again", PIECES),
    Fault(CUTS, "own.add_(part)", "own.copy_(part)", "cuts: the last of parts that overlap", PIECES),
    Fault(CUTS, "if overlap or not _covers(boxes, batch, seqlen) else", "if overlap else", "cuts: nothing where there is no part", PIECES),
    Fault(CUTS, "a[0] == b[0] and b[1] < a[2]", "a[0] == b[0] and b[1] < a[1]", "cuts: parts that overlap pass for apart", PIECES),
    Fault(SDPA, "and not options.dropout_p", "", "dropout silently off", TORCH),
    Fault(SDPA, "(options.softcap, options.score_mod, options.sinks)", "(options.score_mod, options.sinks)", "softcap silently off", TORCH),
    Fault(SDPA, "(options.softcap, options.score_mod, options.sinks)", "(options.softcap, options.sinks)", "score function silently off", TORCH),
    Fault(SDPA, "(options.softcap, options.score_mod, options.sinks)", "(options.softcap, options.score_mod)", "sinks silently off", TORCH),
)
# fmt: on

FAULTS = (*OPERATION, *CARRIED, *DIFFERENTIATED, *PACKING, *TORCH_BACKEND)
