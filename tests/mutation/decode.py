"""Faults where there are few queries: rows of several heads, keys in splits, and the sum of these."""

from tests.mutation.fault import Fault

FWD, MASKING, GROUPED = "kernels/attention_fwd.py", "kernels/masking.py", "kernels/grouped_heads.py"
COMBINE, EPILOGUE, TILING = "kernels/combine.py", "kernels/epilogue.py", "kernels/grid.py"
ROPE, ARGUMENTS = "kernels/rope.py", "kernels/mask_arguments.py"
PROBLEM, LAUNCHING = "kernels/problem.py", "fusedattn/backends/triton/launching.py"

SHAPES = "tests/kernels/test_decode.py -k 'shapes or lengths'"
LENGTHS = "tests/kernels/test_decode.py -k lengths"
FEATURES = "tests/kernels/test_decode.py -k 'accuracy and (alibi or sinks or everything)'"
ROPES = "tests/kernels/test_decode.py -k 'accuracy and (rope or positions)'"
NOT_FINITE = "tests/kernels/test_decode.py -k 'finite or hidden'"
ALONE = "tests/kernels/test_decode.py -k alone"
UNSEEN = "tests/kernels/test_decode.py -k no_key_of_some"
KEPT = "tests/kernels/test_decode.py -k rounding_residual"
WINDOWS = "tests/kernels/test_decode.py -k window"
LARGE = "tests/public/test_large_tensors.py -k few"
MEMORY = "tests/public/test_memory.py -k few"

# fmt: off
ROWS = (
    Fault(GROUPED, "queries = start_m + offs // HEADS", "queries = start_m + offs % HEADS", "grouped: queries and heads exchanged", SHAPES),
    Fault(GROUPED, "exist = (queries < place.seqlen_q) & (heads < stop_head)", "exist = queries < place.seqlen_q", "grouped: heads of the next group", SHAPES),
    Fault(GROUPED, "exist = (queries < place.seqlen_q) & (heads < stop_head)", "exist = heads < stop_head", "grouped: queries beyond the last", SHAPES),
    Fault(GROUPED, "return TileRows(start_m, head, tl.minimum(heads, stop_head - 1), queries, exist)", "return TileRows(start_m, head, heads, queries, exist)", "grouped: what heads have that do not exist is read", MEMORY),
    Fault(GROUPED, "return tile, head_kv * group + part % parts * HEADS, head_kv, sequence", "return tile, head_kv * group, head_kv, sequence", "grouped: the first part of a group for all", SHAPES),
    Fault(GROUPED, "head_kv = part // parts", "head_kv = part % nheads_kv", "grouped: wrong KV head", SHAPES),
    Fault(GROUPED, "return with_head(place, rows.heads[:, None])", "return place", "grouped: scores of the first head for all", FEATURES),
    Fault(GROUPED, "row_base(with_head(place, rows.heads))", "row_base(with_head(place, rows.head))", "grouped: lse of the first head for all", SHAPES),
    Fault(GROUPED, "(offs % HEADS).to(tl.int64) * x.stride_h", "offs % HEADS * x.stride_h", "grouped: int32 offset of a head", LARGE),
    Fault(GROUPED, "offs // HEADS * x.stride_s", "offs * x.stride_s", "grouped: every row another query", SHAPES),
    Fault(GROUPED, "mask=rows.exist[:, None] & (offs_d < HEAD_DIM), other=0.0)", "mask=rows.exist[:, None], other=0.0)", "grouped: features beyond head_dim read", MEMORY),
    Fault(GROUPED, "mask=rows.exist[:, None] & (offs_d < HEAD_DIM))", "mask=rows.exist[:, None])", "grouped: features beyond head_dim written", MEMORY),
    Fault(ROPE, "rows = start + tl.arange(0, BLOCK) // HEADS", "rows = start + tl.arange(0, BLOCK)", "grouped: every row at another position", ROPES),
    Fault(EPILOGUE, "tl.load(sinks_ptr + rows.heads)", "tl.load(sinks_ptr + rows.head)", "grouped: the sink of the first head for all", FEATURES),
    Fault(PROBLEM, "return self.call.mask.FUNCTION is None and self.call.score.FUNCTION is None", "return True", "grouped: functions get the heads of a tile", "tests/kernels/test_decode.py -k branch"),
)

SPLITS = (
    Fault(MASKING, "            start += split * split_keys\n", "", "splits: all begin at the first key", LENGTHS),
    Fault(MASKING, "stop = tl.minimum(stop, start + split_keys)", "stop = stop", "splits: none ends", LENGTHS),
    Fault(MASKING, "            full_stop = tl.minimum(full_stop, stop)\n", "", "splits: full blocks of the next ones", LENGTHS),
    Fault(FWD, "            start_m = 0\n", "            start_m = number * (tile.BLOCK_M // tile.HEADS)\n", "splits: each of other queries", SHAPES),
    Fault(FWD, "if blocks.n_full + blocks.n_boundary == 0:", "if blocks.n_full == 0:", "splits: of boundary blocks alone left out", LENGTHS),
    Fault(FWD, "(partials.rounded_sum if IS_SPLIT else results.rounding_residual) is not None", "(partials.kept_sum if IS_SPLIT else results.rounding_residual) is not None", "splits: rounded weights are not summed", KEPT),
    Fault(EPILOGUE, "tl.full([tile.BLOCK_M], NOTHING, dtype_of(tile.ACC))", "tl.full([tile.BLOCK_M], 0.0, dtype_of(tile.ACC))", "splits: what nobody wrote is read", ALONE),
    Fault(EPILOGUE, "row_offsets(place, rows) * n_splits + split\n    tl.store(partials.row_max + stats, sums.m_i", "row_offsets(place, rows) * n_splits\n    tl.store(partials.row_max + stats, sums.m_i", "splits: all leave theirs in one place", SHAPES),
    Fault(TILING, "n_keys = min(shape.max_seqlen_k, problem.band.width + shape.max_seqlen_q - 1)", "n_keys = shape.max_seqlen_k", "splits: launched where a window hides all", WINDOWS),
    Fault(TILING, "problem.band.width + shape.max_seqlen_q - 1", "problem.band.width", "splits: as many as one query sees", "tests/kernels/test_decode.py -k 'accuracy or window'"),
    Fault(TILING, "if n_rows <= few.config.BLOCK_M:", "if shape.max_seqlen_q <= few.config.BLOCK_M:", "splits: of more rows than a tile has", "tests/kernels/test_decode.py -k usual"),
    Fault(TILING, "triton.cdiv(group, heads)", "1", "grouped: a part of the group only", SHAPES),
    Fault(ARGUMENTS, 'sizes[f"upper_{end}"] - sizes[f"lower_{end}"] + 1 for', 'sizes[f"upper_{end}"] - sizes[f"lower_{end}"] for', "splits: a window of one key less", WINDOWS),
    Fault(LAUNCHING, "    if tensors.layout is None and not sizes.fp8:\n        few", "    if True:\n        few", "splits: of a layout", "tests/kernels/test_decode.py -k 'accuracy and sparse'"),
)

SUMS = (
    Fault(COMBINE, "l_i += tl.sum(tl.where(visited, l_s, 0.0) * alpha, 0)", "l_i += tl.sum(tl.where(visited, l_s, 0.0), 0)", "combine: sums not rescaled", SHAPES),
    Fault(COMBINE, "acc += tl.sum(values * alpha[:, None], 0)[None, :]", "acc += tl.sum(values, 0)[None, :]", "combine: values not rescaled", SHAPES),
    Fault(COMBINE, "tl.load(ptr + first + offs, mask=visited, other=0.0) * alpha, 0)", "tl.load(ptr + first + offs, mask=visited, other=0.0), 0)", "combine: what is kept for the backward not rescaled", KEPT),
    Fault(COMBINE, "visited = exists & ((l_s >= 0.0) | (l_s != l_s))", "visited = exists & (l_s >= 0.0)", "combine: a NaN is nothing", NOT_FINITE),
    Fault(COMBINE, "visited = exists & ((l_s >= 0.0) | (l_s != l_s))", "visited = exists & ((l_s > 0.0) | (l_s != l_s))", "combine: a NaN of no weight is nothing", "tests/kernels/test_decode.py -k weight"),
    Fault(COMBINE, "shift = tl.where(m_i == float(\"-inf\"), 0.0, m_i)", "shift = m_i", "combine: -inf minus -inf", UNSEEN),
    Fault(COMBINE, "m_i = tl.max(largest, 0)", "m_i = tl.min(largest, 0)", "combine: the least maximum", SHAPES),
    Fault(COMBINE, "first = (row_base(place) + query) * n_splits", "first = row_base(place) + query * n_splits", "combine: rows of other heads", SHAPES),
    Fault(COMBINE, "        if query >= place.seqlen_q:\n            return\n", "        pass\n", "combine: rows behind a sequence", ALONE),
    Fault(COMBINE, "offs < n_splits\n        largest", "offs < n_splits - 1\n        largest", "combine: the last maximum left out", UNSEEN),
    Fault(COMBINE, "new() if has_residual and dropped else None", "None", "combine: kept weights are not summed", KEPT),
)
# fmt: on

FAULTS = (*ROWS, *SPLITS, *SUMS)
