"""Faults in what the kernels of ``kernels/`` see: blocks that are visited, pairs that are visible, and their tensors."""

from tests.mutation.fault import Fault
from tests.mutation.suites import (
    BLOCKS,
    BOOLEAN,
    CAUSAL,
    DOCUMENTS,
    EMPTY,
    EXACT,
    LARGE,
    MASK_FUNCTION,
    MEMORY,
    PADDING,
    PREFIX,
    SPARSE,
    STRIDES,
    WINDOW,
    budget,
    pair,
)

MASKING, ARGUMENTS = "kernels/masking.py", "kernels/mask_arguments.py"
KEY_RANGE, PAIRS, CONFIGS = "kernels/key_range.py", "kernels/pairs.py", "kernels/configs.py"

# fmt: off
VISITED = (
    Fault(MASKING, "stop = tl.minimum(stop, last + bounds.upper + 1)", "stop = tl.minimum(stop, last + bounds.upper)", "key_blocks: stops one key early", BLOCKS),
    Fault(MASKING, "last = tl.minimum(start_m + BLOCK_M, place.seqlen_q) - 1", "last = start_m + BLOCK_M - 1", "key_blocks: visits blocks in vain", BLOCKS),
    Fault(MASKING, "tl.minimum(full_stop, start_m + bounds.upper + 1)", "tl.minimum(full_stop, start_m + bounds.upper + 2)", "key_blocks: a full block reaches over the diagonal", BLOCKS),
    Fault(MASKING, "// BLOCK_N * bounds.contiguous", "// BLOCK_N", "key_blocks: gaps in the padding overlooked", BLOCKS),
    Fault(MASKING, "n_full = tl.maximum(full_stop - first_full, 0) // BLOCK_N * bounds.contiguous", "n_full = (full_stop - first_full) // BLOCK_N * bounds.contiguous", "key_blocks: a negative number of full blocks", BLOCKS),
    Fault(MASKING, "start = tl.maximum(start, start_n - bounds.upper)", "start = tl.maximum(start, start_n - bounds.upper + 1)", "query_blocks: starts one query late", BLOCKS),
    Fault(MASKING, "start = tl.maximum(start, start_n - bounds.upper)", "start = tl.maximum(start, 0)", "query_blocks: visits blocks in vain", BLOCKS),
    Fault(MASKING, "full_start = tl.maximum(full_start, last - bounds.upper)", "full_start = tl.maximum(full_start, last - 1 - bounds.upper)", "query_blocks: a full block reaches over the diagonal", BLOCKS),
    Fault(MASKING, "| (start_n >= bounds.key_stop)", "| (start_n + 1 >= bounds.key_stop)", "query_blocks: the last key left out", BLOCKS),
    Fault(MASKING, "(start_n + BLOCK_N <= bounds.key_start) |", "(start_n + BLOCK_N < bounds.key_start) |", "query_blocks: a tile that ends at the first key is visited in vain", BLOCKS),
    Fault(MASKING, "(start_n >= bounds.key_start) & (last < bounds.key_stop) &", "(start_n >= bounds.key_start) &", "query_blocks: full beyond the last key", BLOCKS),
    Fault(MASKING, "(start_n >= bounds.key_start) & (last < bounds.key_stop) &", "(last < bounds.key_stop) &", "query_blocks: full before the first key", BLOCKS),
    Fault(MASKING, " & (bounds.contiguous != 0)", "", "query_blocks: gaps in the padding overlooked", BLOCKS),
    Fault(MASKING, "tl.where(i >= blocks.n_left, blocks.n_full, 0)", "0", "boundary blocks on the right fall on full ones", BLOCKS),
    Fault(MASKING, "tl.where(i >= blocks.n_left, blocks.n_full, 0)", "blocks.n_full", "boundary blocks on the left fall on full ones", BLOCKS),
    Fault(MASKING, "start_n = blocks.start + (blocks.n_left + i) * BLOCK_N", "start_n = blocks.start + i * BLOCK_N", "any_keys: full blocks start at the boundary", WINDOW),
    Fault(MASKING, "boundary_keys(i - blocks.n_full, blocks,", "boundary_keys(i, blocks,", "any_keys: boundary blocks counted from the full ones", EXACT),
    Fault(MASKING, "n = blocks.n_full + blocks.n_boundary\n", "n = blocks.n_boundary\n", "tile_visited: as if there were no full blocks", budget("bias")),
    Fault(MASKING, "(start_n + BLOCK_N > blocks.start)", "(start_n >= blocks.start)", "tile_visited: a tile that blocks begin in is left out", budget("bias")),
    Fault(MASKING, "(start_n < blocks.start + n * BLOCK_N)", "(start_n + BLOCK_N <= blocks.start + n * BLOCK_N)", "tile_visited: a tile that blocks end in is left out", budget("bias")),
    Fault(MASKING, "(start_m < place.seqlen_q) & (n > 0) & inside", "(start_m < place.seqlen_q) & inside", "tile_visited: tiles of queries that visit nothing", BLOCKS),
    Fault(ARGUMENTS, "mask.allowed is not None or mask.layout is not None or", "mask.layout is not None or", "boolean: full blocks without a look at it", BOOLEAN),
    Fault(ARGUMENTS, "mask.layout is not None or mask.function is not None", "mask.layout is not None", "mask function: full blocks without a call of it", MASK_FUNCTION),
)

PARTS = (
    Fault(MASKING, "(keys >= bounds.key_start) & (keys < bounds.key_stop)", "(keys >= bounds.key_start) & (keys <= bounds.key_stop)", "one key beyond the last", MEMORY),
    Fault(MASKING, "(tl.load(mask.valid_ptr + place.key_base + keys, mask=inside, other=0) != 0)", "(tl.load(mask.valid_ptr + place.key_base + keys, mask=inside, other=0) != 2)", "padding between valid keys is visible", budget("uneven")),
    Fault(MASKING, "mask.valid_ptr + place.key_base + keys", "mask.valid_ptr + keys", "forward: padding of batch 0 for all", budget("uneven")),
    Fault(MASKING, "(keys <= rows + bounds.upper)", "(keys < rows + bounds.upper)", "causal: a query does not see itself", CAUSAL),
    Fault(MASKING, "(keys <= rows + bounds.upper)", "(keys <= rows + bounds.upper + 1)", "causal: a query sees one ahead", CAUSAL),
    Fault(MASKING, "upper = tl.minimum(upper_start, upper_end + at_end)", "upper = tl.minimum(upper_start, upper_end)", "causal: the last query not aligned to the last key", CAUSAL),
    Fault(MASKING, "upper = tl.minimum(upper_start, upper_end + at_end)", "upper = tl.maximum(upper_start, upper_end + at_end)", "causal: the weaker of two alignments", CAUSAL),
    Fault(MASKING, "pairs = pairs & (tl.load(ptrs, mask=pairs, other=0) != 0)", "pairs = pairs & (tl.load(ptrs, mask=pairs, other=0) == 0)", "boolean: polarity", BOOLEAN),
    Fault(MASKING, "tl.load(ptrs, mask=pairs, other=0)", "tl.load(ptrs)", "boolean: read beyond its rows", MEMORY),
    Fault(PAIRS, "(rows - start_m) * x.stride_q + (keys - start_n) * x.stride_k", "(rows - start_m) * x.stride_k + (keys - start_n) * x.stride_q", "boolean: transposed", BOOLEAN),
    Fault(PAIRS, "tl.cast(start_m, tl.int64) * x.stride_q", "start_m * x.stride_q", "boolean: int32 offset of a tile", LARGE),
    Fault(PAIRS, "tl.cast(start_n, tl.int64) * x.stride_k", "start_n * x.stride_k", "boolean: int32 offset of a tile of keys", LARGE),
    Fault(PAIRS, "tl.cast(place.sequence, tl.int64) * x.stride_b", "place.sequence * x.stride_b", "boolean: int32 offset of a batch", LARGE),
    Fault(PAIRS, "tl.cast(place.head, tl.int64) * x.stride_h", "0 * place.head", "boolean: head 0 for all", BOOLEAN),
    Fault(PAIRS, "0 if size == 1 else stride", "stride", "boolean: a broadcast one read as if written out", MEMORY),
    Fault(PAIRS, "x = x.contiguous() if x.shape[3] <= MAX_ROW_STRIDE else x.mT.contiguous().mT", "x = x.contiguous()", "boolean masks whose rows are too long for int32", LARGE),
    Fault(PAIRS, "if max(x.stride()[2:]) > MAX_ROW_STRIDE:", "if x.stride(2) > MAX_ROW_STRIDE:", "boolean masks whose keys are too far apart for int32", LARGE),
    Fault(ARGUMENTS, "mask.valid.contiguous().view(torch.uint8)", "mask.valid.view(torch.uint8)", "strides of the padding mask", STRIDES),
    Fault(ARGUMENTS, "_SWITCH[by_pair or irregular]", "_SWITCH[by_pair]", "dk: NaN of a row that a window or its document empties", EMPTY),
    Fault(KEY_RANGE, "tl.store(base, tl.minimum(first, stop))", "tl.store(base, first)", "key range: nothing valid", "tests/test_blocks.py -k key_range"),
    Fault(KEY_RANGE, "tl.where(seen, offs + 1, 0)", "tl.where(seen, offs, 0)", "key range: the last key left out", BLOCKS),
    Fault(KEY_RANGE, "count += tl.sum(seen.to(tl.int32), 0)", "count = tl.sum(seen.to(tl.int32), 0)", "key range: gaps counted in the last block only", "tests/test_blocks.py -k key_range"),
    Fault(KEY_RANGE, "first = tl.minimum(first, tl.min(", "first = tl.minimum(place.seqlen_k, tl.min(", "key range: first key of the last block", "tests/test_blocks.py -k key_range"),
    Fault(KEY_RANGE, "tl.load(row + offs, mask=offs < place.seqlen_k, other=0)", "tl.load(row + offs)", "key range: reads beyond its row", MEMORY),
    Fault(MASKING, "mask.key_range_ptr + tl.cast(place.sequence, tl.int64) * 3", "mask.key_range_ptr + 0 * place.sequence", "key range of batch 0 for all", PADDING),
)

BAND = (
    Fault(MASKING, "(keys >= rows + bounds.lower)", "(keys > rows + bounds.lower)", "window: one key too short on the left", WINDOW),
    Fault(MASKING, "(keys >= rows + bounds.lower)", "(keys >= rows + bounds.lower - 1)", "window: one key too long on the left", WINDOW),
    Fault(MASKING, "    if mask.HAS_LOWER:\n        pairs = pairs & (keys >= rows + bounds.lower)\n", "", "window: nothing hidden on the left", WINDOW),
    Fault(MASKING, "lower = tl.maximum(lower_start, lower_end + at_end)", "lower = tl.maximum(lower_start, lower_end)", "window: its left side not aligned to the last key", WINDOW),
    Fault(MASKING, "lower = tl.maximum(lower_start, lower_end + at_end)", "lower = tl.minimum(lower_start, lower_end + at_end)", "window: the wider of two", WINDOW),
    Fault(MASKING, "start = tl.maximum(start, start_m + bounds.lower)", "start = tl.maximum(start, start_m + bounds.lower + 1)", "key_blocks: starts one key late under a window", BLOCKS),
    Fault(MASKING, "        if mask.HAS_LOWER:\n            start = tl.maximum(start, start_m + bounds.lower)\n", "        if mask.HAS_LOWER:\n", "key_blocks: visits blocks before a window in vain", BLOCKS),
    Fault(MASKING, "full_start = tl.maximum(full_start, last + bounds.lower)", "full_start = tl.maximum(full_start, last + bounds.lower - 1)", "key_blocks: a full block reaches over the left of a window", BLOCKS),
    Fault(MASKING, "tl.cdiv(tl.maximum(tl.minimum(full_start, stop) - start, 0), BLOCK_N)", "tl.cdiv(tl.maximum(full_start - start, 0), BLOCK_N)", "key_blocks: boundary blocks behind the last key", BLOCKS),
    Fault(MASKING, "tl.minimum(last, bounds.key_stop - 1) - bounds.lower + 1)", "tl.minimum(last, bounds.key_stop - 1) - bounds.lower)", "query_blocks: stops one query early under a window", BLOCKS),
    Fault(MASKING, "tl.minimum(last, bounds.key_stop - 1) - bounds.lower + 1)", "last - bounds.lower + 1)", "query_blocks: visits queries behind a window in vain", BLOCKS),
    Fault(MASKING, "full_stop = tl.minimum(full_stop, start_n - bounds.lower + 1)", "full_stop = tl.minimum(full_stop, start_n - bounds.lower + 2)", "query_blocks: a full block reaches over the left of a window", BLOCKS),
    Fault(MASKING, "tl.cdiv(tl.maximum(stop - tl.maximum(full_stop, start), 0), BLOCK_M)", "tl.cdiv(tl.maximum(stop - full_stop, 0), BLOCK_M)", "query_blocks: boundary blocks before the first query", BLOCKS),
    Fault(ARGUMENTS, "(-far if name.startswith(\"lower\") else far) if bound is None else max(-far, min(far, bound))", "(-far if name.startswith(\"lower\") else far) if bound is None else bound", "window: one that is longer than int32", WINDOW),
    Fault(ARGUMENTS, "return self.lower_start is not None or self.lower_end is not None", "return self.lower_start is not None", "window: its left side seen at the first key only", WINDOW),
    Fault(ARGUMENTS, "return self.upper_start is not None or self.upper_end is not None", "return self.upper_end is not None", "causal: top-left never seen", CAUSAL),
)

PREFIXES = (
    Fault(MASKING, "| (keys < bounds.prefix))", "| (keys <= bounds.prefix))", "prefix: one key too long", PREFIX),
    Fault(MASKING, "((keys <= rows + bounds.prefix_upper) |", "((keys <= rows + bounds.prefix_upper) &", "prefix: it hides", PREFIX),
    Fault(MASKING, "(keys <= rows + bounds.prefix_upper)", "(keys < rows + bounds.prefix_upper)", "prefix: a query does not see itself", PREFIX),
    Fault(MASKING, "tl.load(mask.prefix_ptr + place.sequence)", "tl.load(mask.prefix_ptr)", "prefix: of batch 0 for all", PREFIX),
    Fault(MASKING, "            prefix_upper = at_end\n", "            prefix_upper = 0\n", "prefix: the last query not aligned to the last key", PREFIX),
    Fault(MASKING, "tl.minimum(stop, tl.maximum(last + bounds.prefix_upper + 1, bounds.prefix))", "tl.minimum(stop, last + bounds.prefix_upper + 1)", "key_blocks: a prefix ahead is not visited", BLOCKS),
    Fault(MASKING, "tl.maximum(start_m + bounds.prefix_upper + 1, bounds.prefix)", "tl.maximum(last + bounds.prefix_upper + 1, bounds.prefix)", "key_blocks: a full block reaches over the diagonal of a prefix", BLOCKS),
    Fault(MASKING, "tl.maximum(start_m + bounds.prefix_upper + 1, bounds.prefix)", "tl.maximum(start_m + bounds.prefix_upper + 1, bounds.prefix + 1)", "key_blocks: a full block reaches over the end of a prefix", BLOCKS),
    Fault(MASKING, "tl.where(start_n < bounds.prefix, 0, start_n - bounds.prefix_upper)", "start_n - bounds.prefix_upper", "query_blocks: who sees a prefix only is not visited", BLOCKS),
    Fault(MASKING, "tl.where(last < bounds.prefix, 0, last - bounds.prefix_upper)", "tl.where(start_n < bounds.prefix, 0, last - bounds.prefix_upper)", "query_blocks: full where a prefix ends inside", BLOCKS),
    Fault(ARGUMENTS, "mask.prefix.to(torch.int32).contiguous()", "mask.prefix.to(torch.int32)", "prefix: strides of the lengths", STRIDES),
)

DOCUMENT = (
    Fault(MASKING, "(of_query == of_key)", "(of_query >= of_key)", "documents: later ones see earlier ones", DOCUMENTS),
    Fault(MASKING, "mask.documents.q_ptr + place.query_base + rows", "mask.documents.q_ptr + rows", "documents: of batch 0 for all queries", DOCUMENTS),
    Fault(MASKING, "mask.documents.k_ptr + place.key_base + keys", "mask.documents.k_ptr + keys", "documents: of batch 0 for all keys", DOCUMENTS),
    Fault(MASKING, "mask.documents.k_ptr + place.key_base + keys, mask=key_visible, other=-2", "mask.documents.k_ptr + place.key_base + keys", "documents: read beyond the keys", MEMORY),
    Fault(ARGUMENTS, "torch.searchsorted(sorted_k, ids_k.contiguous())", "torch.searchsorted(ids_q.sort(dim=-1).values, ids_k.contiguous())", "documents: queries and keys numbered apart", DOCUMENTS),
    Fault(ARGUMENTS, "torch.where(found, left, -1)", "left", "documents: one without keys has the number of the next", BLOCKS),
    Fault(ARGUMENTS, "torch.where(found, first, UNBOUNDED.value)", "first", "key_blocks: visits for a document without keys in vain", BLOCKS),
    Fault(ARGUMENTS, "stop = torch.where(found, last + 1, 0)", "stop = torch.where(found, last, 0)", "documents: the last key left out", BLOCKS),
    Fault(ARGUMENTS, "torch.where(last - first == right - left - 1, stop, 0)", "stop", "documents: full although others lie between", BLOCKS),
    Fault(ARGUMENTS, "first = index.gather(-1, left", "first = index.gather(-1, (right - 1)", "documents: they begin with their last key", BLOCKS),
    Fault(ARGUMENTS, "        stride_rk=ids_k.numel(),\n", "        stride_rk=ids_q.numel(),\n", "documents: ranges of keys as far apart as those of queries", DOCUMENTS),
    Fault(MASKING, "tl.max(tl.where(exists, starts, 0), 0)", "tl.min(starts, 0)", "documents: full from the first of a tile's documents on", BLOCKS),
    Fault(MASKING, "tl.max(tl.where(exists, starts, 0), 0), tl.min(full_stops, 0)", "tl.max(tl.where(exists, starts, 0), 0), tl.max(stops, 0)", "documents: full to the last of a tile's documents", BLOCKS),
    Fault(MASKING, "tl.load(ptrs + stride, mask=exists, other=0)", "tl.load(ptrs, mask=exists, other=0)", "documents: they stop where they start", DOCUMENTS),
    Fault(MASKING, "place.key_base, keys, keys < place.seqlen_k", "place.query_base, keys, keys < place.seqlen_k", "query_blocks: documents of another batch", DOCUMENTS),
    Fault(MASKING, "rows < place.seqlen_q\n            )", "rows < place.seqlen_q + 1\n            )", "documents: the range of a query beyond the last", MEMORY),
)

LAYOUTS = (
    Fault(MASKING, "place.head * layout.stride_h", "0 * place.head", "layout: head 0 for all", SPARSE),
    Fault(MASKING, "tl.cast(place.sequence, tl.int64) * layout.stride_b", "0 * place.sequence", "layout: batch 0 for all", BLOCKS),
    Fault(MASKING, "mask.layout.key_lists_ptr + row * mask.layout.n_k", "mask.layout.key_lists_ptr + row * mask.layout.n_q", "layout: lists of keys as long as those of queries", SPARSE),
    Fault(MASKING, "mask.layout.query_lists_ptr + column * mask.layout.n_q", "mask.layout.query_lists_ptr + column * mask.layout.n_k", "layout: lists of queries as long as those of keys", SPARSE),
    Fault(MASKING, "tl.load(mask.layout.key_counts_ptr + row) * (mask.layout.block_k // BLOCK_N)", "tl.load(mask.layout.key_counts_ptr + row)", "key_blocks: the first tile of each block of a layout only", BLOCKS),
    Fault(MASKING, "block * mask.layout.block_k + i % parts * BLOCK_N", "block * mask.layout.block_k", "key_blocks: the first part of a block of a layout for all", BLOCKS),
    Fault(MASKING, "n * (mask.layout.block_q // BLOCK_M))", "n)", "query_blocks: the first tile of each block of a layout only", BLOCKS),
    Fault(MASKING, "block * mask.layout.block_q + i % parts * BLOCK_M", "block * mask.layout.block_q", "query_blocks: the first part of a block of a layout for all", BLOCKS),
    Fault(MASKING, "            n = tl.maximum(n, tl.load(mask.layout.query_counts_ptr + next_column))\n", "            n = n + 0 * next_column\n", "query_blocks: as many blocks of a layout as the first head of a group has", SPARSE),
    Fault(MASKING, "tl.cast(i, tl.int64) * mask.layout.stride_h * mask.layout.n_k", "tl.cast(i, tl.int64) * mask.layout.stride_h", "query_blocks: the next head of a group is the next column", SPARSE),
    Fault(MASKING, "in_list = i < tl.load(mask.layout.query_counts_ptr + column) * parts", "in_list = i >= 0", "layout: hidden blocks follow where another head has more", SPARSE),
    Fault(MASKING, "n = tl.where(keys_hidden, 0, n *", "n = tl.where(keys_hidden, n, n *", "query_blocks: padding visits blocks of a layout in vain", BLOCKS),
    Fault(MASKING, "start_n // mask.layout.block_k) != 0", "start_n // mask.layout.block_k) != 2", "tile_visited: hidden blocks of a layout too", pair("blocks", "bias")),
    Fault(MASKING, "(start_n + BLOCK_N > bounds.key_start)\n", "(start_n >= bounds.key_start)\n", "tile_visited: the first tile of keys of a layout left out", budget("everything")),
    Fault(ARGUMENTS, "_lists(blocks.mT)", "_lists(blocks)", "layout: blocks of queries by row", SPARSE),
    Fault(ARGUMENTS, "(~blocks).to(torch.uint8).argsort", "blocks.to(torch.uint8).argsort", "layout: hidden blocks first", SPARSE),
    Fault(ARGUMENTS, "first_k <= first_q + mask.block_q - 1 + upper", "first_k <= first_q + upper", "layout: blocks on the diagonal hidden", SPARSE),
    Fault(ARGUMENTS, "first_k + mask.block_k - 1 >= first_q + lower", "first_k >= first_q + lower", "layout: blocks on the left of a window hidden", BLOCKS),
    Fault(ARGUMENTS, "            blocks = blocks & _blocks_in_band(mask, *band.at(shape))\n", "            pass\n", "layout: blocks above the diagonal visited in vain", BLOCKS),
    Fault(ARGUMENTS, "lower = max(sizes[\"lower_start\"], sizes[\"lower_end\"] + at_end)\n        return lower, min(sizes[\"upper_start\"], sizes[\"upper_end\"] + at_end)", "lower = max(sizes[\"lower_start\"], sizes[\"lower_end\"] + at_end)\n        return lower, min(sizes[\"upper_start\"], sizes[\"upper_end\"])", "layout: the last query not aligned to the last key", SPARSE),
    Fault(CONFIGS, "min(tile, block & -block)", "min(tile, block)", "layout: a tile that does not divide its block", "tests/test_properties.py -k accuracy"),
)

FUNCTIONS = (
    Fault(MASKING, "pairs = pairs & mask.FUNCTION(", "pairs = pairs | mask.FUNCTION(", "mask function: it adds", MASK_FUNCTION),
    Fault(MASKING, "place.sequence, place.head, clamped(rows, place.seqlen_q), clamped(keys, place.seqlen_k), mask", "place.sequence, place.head, clamped(keys, place.seqlen_k), clamped(rows, place.seqlen_q), mask", "mask function: queries and keys exchanged", MASK_FUNCTION),
    Fault(MASKING, "place.sequence, place.head, clamped(rows", "place.head, place.sequence, clamped(rows", "mask function: batches and heads exchanged", MASK_FUNCTION),
    Fault(MASKING, "place.sequence, place.head, clamped(rows", "place.sequence, 0, clamped(rows", "mask function: head 0 for all", MASK_FUNCTION),
    Fault(MASKING, "return tl.minimum(tl.maximum(offs, 0), seqlen - 1)", "return tl.minimum(offs, seqlen - 1)", "functions: a query before the first", MEMORY),
    Fault(MASKING, "return tl.minimum(tl.maximum(offs, 0), seqlen - 1)", "return tl.maximum(offs, 0)", "functions: a key beyond the last", MEMORY),
    Fault(MASKING, "return tl.minimum(tl.maximum(offs, 0), seqlen - 1)", "return tl.minimum(tl.maximum(offs, 0), seqlen)", "functions: one beyond the last", MEMORY),
)
# fmt: on

FAULTS = (*VISITED, *PARTS, *BAND, *PREFIXES, *DOCUMENT, *LAYOUTS, *FUNCTIONS)
