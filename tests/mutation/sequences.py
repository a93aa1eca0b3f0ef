"""Faults of packed sequences, and of where the rows of a batch lie, in ``kernels/``."""

from tests.mutation.fault import Fault
from tests.mutation.suites import BROADCAST_BIAS, EXACT, IN_PLACE, LARGE, PACKED, PACKED_BLOCKS

SEQUENCES, PAIRS, SCORES = "kernels/sequences.py", "kernels/pairs.py", "kernels/scores.py"
GROUPED = "kernels/grouped_heads.py"
FWD, BWD, ROWS = "kernels/attention_fwd.py", "kernels/attention_bwd.py", "kernels/attention_bwd_rows.py"
DBIAS, ROPE, DROPOUT = "kernels/attention_bwd_bias.py", "kernels/rope.py", "kernels/dropout.py"
PROLOGUE, LAUNCHING = "kernels/prologue.py", "fusedattn/backends/triton/launching.py"
GRADIENT = "kernels/score_gradient.py"
MASKING, ARGUMENTS, PRIMITIVES = "kernels/masking.py", "kernels/mask_arguments.py", "kernels/primitives.py"

# fmt: off
PLACES = (
    Fault(SEQUENCES, "(tl.cast(place.batch, tl.int64) * place.nheads + place.head) * place.n_rows", "(place.batch * place.nheads + place.head) * place.n_rows", "int32 row offsets", LARGE),
    Fault(SEQUENCES, "wide = tl.cast(sequence, tl.int64)", "wide = sequence", "int32 offset of the padding mask", LARGE),
    Fault(SEQUENCES, "key_base = wide * seqlen_k", "key_base = wide * seqlen_q", "keys of a batch where its queries are", EXACT),
    Fault(SEQUENCES, "first_k = tl.load(sequences.cu_k_ptr + sequence)", "first_k = tl.load(sequences.cu_q_ptr + sequence)", "packed: keys begin where queries do", PACKED),
    Fault(SEQUENCES, "tl.load(sequences.cu_k_ptr + sequence + 1) - first_k", "tl.load(sequences.cu_q_ptr + sequence + 1) - first_q", "packed: as many keys as queries", PACKED),
    Fault(SEQUENCES, "tl.load(sequences.cu_q_ptr + sequence + 1) - first_q", "tl.load(sequences.cu_q_ptr + sequence + 1)", "packed: queries to the end of the sequence from the first of all", PACKED),
    Fault(SEQUENCES, "        query_base = first_q\n", "        query_base = first_q * 0\n", "packed: documents of the first queries for all", PACKED),
    Fault(SEQUENCES, "        key_base = first_k\n", "        key_base = first_k * 0\n", "packed: padding of the first keys for all", PACKED),
    Fault(SEQUENCES, "* place.n_rows + place.first_q", "* place.n_rows", "packed: lse and delta of the first rows for all", PACKED),
    Fault(SEQUENCES, "        place.first_q,\n", "        0,\n", "packed: dk, dv of the first queries for all", PACKED),
    Fault(PRIMITIVES, "tl.cast(first, tl.int64) * x.stride_s", "first * x.stride_s", "packed: int32 offset of a sequence", LARGE),
    Fault(PRIMITIVES, "return head_ptr + tl.cast(first, tl.int64) * x.stride_s", "return head_ptr + tl.cast(first, tl.int64) * x.stride_h", "packed: sequences as far apart as heads", PACKED),
)

OFFSETS = (
    Fault(GROUPED, "x_head = head_of(x, place.batch, rows.head, place.first_q)", "x_head = head_of(x, place.batch, rows.head, 0)", "forward: queries of the first sequence for all", PACKED, nth=0),
    Fault(FWD, "k = head_of(inputs.k, place.batch, head_kv, place.first_k)", "k = head_of(inputs.k, place.batch, head_kv, 0)", "forward: keys of the first sequence for all", PACKED),
    Fault(FWD, "v = head_of(inputs.v, place.batch, head_kv, place.first_k)", "v = head_of(inputs.v, place.batch, head_kv, place.first_q)", "forward: values from where the queries begin", PACKED),
    Fault(GROUPED, "x_head = head_of(x, place.batch, rows.head, place.first_q)", "x_head = head_of(x, place.batch, rows.head, place.first_k)", "forward: out where the keys begin", PACKED, nth=1),
    Fault(FWD, "if start_m >= place.seqlen_q:", "if start_m + tile.BLOCK_M > place.seqlen_q:", "forward: the last tile of a sequence left out", PACKED),
    Fault(FWD, "            if start_m >= place.seqlen_q:\n                return\n", "            pass\n", "forward: tiles behind the last of a sequence", PACKED,
          equivalent="rows that do not exist are neither read nor written; leaving them out saves time"),
    Fault(ROPE, "        first = place.first_q\n", "        first = 0\n", "rope: positions of the first sequence for all queries", PACKED),
    Fault(BWD, "k_head = head_of(k, place.batch, head_kv, place.first_k)", "k_head = head_of(k, place.batch, head_kv, 0)", "dk, dv: keys of the first sequence for all", PACKED, nth=0),
    Fault(BWD, "q = head_of(queries.q, place.batch, place.head, place.first_q)", "q = head_of(queries.q, place.batch, place.head, 0)", "dk, dv: queries of the first sequence for all", PACKED, nth=0),
    Fault(BWD, "dout = head_of(queries.dout, place.batch, place.head, place.first_q)", "dout = head_of(queries.dout, place.batch, place.head, 0)", "dk, dv: dout of the first sequence for all, in full blocks", PACKED, nth=1),
    Fault(BWD, "dk_head = head_of(dk_out, place.batch, head_kv, place.first_k)", "dk_head = head_of(dk_out, place.batch, head_kv, place.first_q)", "dk: written where the queries begin", PACKED),
    Fault(BWD, "dv_head = head_of(dv_out, place.batch, head_kv, place.first_k)", "dv_head = head_of(dv_out, place.batch, head_kv, place.first_q)", "dv: written where the queries begin", PACKED),
    Fault(ROPE, "        first = place.first_k\n", "        first = 0\n", "rope: positions of the first sequence for all keys", PACKED),
    Fault(BWD, "if start_n >= place.seqlen_k:", "if start_n + tile.BLOCK_N > place.seqlen_k:", "dk, dv: the last tile of a sequence left out", PACKED),
    Fault(BWD, "if start_m >= place.seqlen_q:", "if start_m + tile.BLOCK_M > place.seqlen_q:", "dq: the last tile of a sequence left out", PACKED),
    Fault(BWD, "q_head = head_of(q, place.batch, head, place.first_q)", "q_head = head_of(q, place.batch, head, 0)", "dq: queries of the first sequence for all", PACKED),
    Fault(BWD, "v_head = head_of(v, place.batch, head_kv, place.first_k)", "v_head = head_of(v, place.batch, head_kv, 0)", "dq: values of the first sequence for all", PACKED, nth=1),
    Fault(BWD, "dq_head = head_of(dq_out, place.batch, head, place.first_q)", "dq_head = head_of(dq_out, place.batch, head, place.first_k)", "dq: written where the keys begin", PACKED),
    Fault(BWD, "triton.cdiv(shape.max_seqlen_k, config.BLOCK_N)", "triton.cdiv(shape.max_seqlen_q, config.BLOCK_N)", "dk, dv: as many tiles as queries have", EXACT),
    Fault(ROWS, "out_head = head_of(out, place.batch, head, place.first_q)", "out_head = head_of(out, place.batch, head, 0)", "delta: out of the first sequence for all, 16 bits", PACKED, nth=0),
    Fault(ROWS, "residual_head = head_of(rounding_residual, place.batch, head, place.first_q)", "residual_head = head_of(rounding_residual, place.batch, head, 0)", "delta: rounding residual of the first sequence for all", PACKED),
    Fault(ROWS, "dout_head = head_of(dout, place.batch, head, place.first_q)", "dout_head = head_of(dout, place.batch, head, 0)", "delta: dout of the first sequence for all, float32", PACKED, nth=1),
    Fault(ROWS, "v_head = head_of(v, place.batch, head_kv, place.first_k)", "v_head = head_of(v, place.batch, head_kv, 0)", "delta: values of the first sequence for all", PACKED),
    Fault(GRADIENT, "v = head_of(inputs.v, place.batch, head_kv, place.first_k)", "v = head_of(inputs.v, place.batch, head_kv, 0)", "dbias: values of the first sequence for all", PACKED),
    Fault(GRADIENT, "q = head_of(inputs.q, place.batch, place.head, place.first_q)", "q = head_of(inputs.q, place.batch, place.head, place.first_k)", "dbias: queries from where the keys begin", PACKED),
    Fault(DBIAS, "place_of(call.sequences, own_sequence + i // heads_each, head,", "place_of(call.sequences, own_sequence, head,", "dbias: sums the first sequence over and over", PACKED),
    Fault(DBIAS, "triton.cdiv(shape.max_seqlen_k, config.BLOCK_N)", "triton.cdiv(shape.max_seqlen_q, config.BLOCK_N)", "dbias: as many tiles of keys as of queries", BROADCAST_BIAS),
    Fault(DBIAS, "size = (shape.n_sequences, shape.nheads_q, n_rows, n_columns)", "size = (q.shape[0], shape.nheads_q, n_rows, n_columns)", "drelative: room for the first sequence only", PACKED),
    Fault(ROPE, "rotation.stride_pb + first", "rotation.stride_pb", "rope: positions of the first sequence for all", PACKED),
    Fault(PROLOGUE, "y = load_tile(head_of(x, place.batch, head, first),", "y = load_tile(head_of(x, place.batch, head, 0),", "rope: rows of the first sequence for all", PACKED),
    Fault(PROLOGUE, "store_tile(head_of(out, place.batch, head, first)", "store_tile(head_of(out, place.batch, head, 0)", "rope: written over the first sequence", PACKED),
    Fault(LAUNCHING, "n_positions, shape.max_seqlen_k, False", "n_positions, shape.max_seqlen_q, False", "rope: as many tiles of keys as of queries", IN_PLACE),
    Fault(PROLOGUE, "return place.first_q, place.seqlen_q", "return place.first_k, place.seqlen_q", "rope: queries from where the keys begin", PACKED),
)

WHAT_BELONGS_TO_A_SEQUENCE = (
    Fault(DROPOUT, "stream = sequence * nheads + head", "stream = place.batch * nheads + head", "packed: sequences drop the same", PACKED),
    Fault(PAIRS, "tl.cast(place.sequence, tl.int64) * x.stride_b", "tl.cast(place.batch, tl.int64) * x.stride_b", "packed: bias of the first sequence for all", PACKED),
    Fault(SCORES, "place.sequence * score.slopes_stride + place.head", "place.batch * score.slopes_stride + place.head", "packed: slopes of the first sequence for all", PACKED),
    Fault(SCORES, "tl.cast(place.sequence, tl.int64) * score.relative.stride_b", "tl.cast(place.batch, tl.int64) * score.relative.stride_b", "packed: relative of the first sequence for all", PACKED),
    Fault(MASKING, "tl.load(mask.prefix_ptr + place.sequence)", "tl.load(mask.prefix_ptr + place.batch)", "packed: prefix of the first sequence for all", PACKED),
    Fault(MASKING, "mask.key_range_ptr + tl.cast(place.sequence, tl.int64) * 3", "mask.key_range_ptr + tl.cast(place.batch, tl.int64) * 3", "packed: key range of the first sequence for all", PACKED),
    Fault(MASKING, "tl.cast(place.sequence, tl.int64) * layout.stride_b", "tl.cast(place.batch, tl.int64) * layout.stride_b", "packed: layout of the first sequence for all", PACKED),
    Fault(MASKING, "mask.FUNCTION(sequence, head,", "mask.FUNCTION(place.batch, head,", "packed: mask function of the first sequence for all", PACKED),
    Fault(SCORES, "score.FUNCTION(scores, sequence,", "score.FUNCTION(scores, place.batch,", "packed: score function of the first sequence for all", "tests/public/test_learned.py -k packed"),
    Fault(MASKING, "first - place.first_k)", "first)", "packed: documents visited from where they lie in the tensor", PACKED_BLOCKS, nth=0),
    Fault(MASKING, "end - place.first_k)", "end)", "packed: documents full to where they end in the tensor", PACKED_BLOCKS, nth=1),
    Fault(MASKING, "first - place.first_q)", "first)", "packed: dk, dv of documents from where they lie in the tensor", PACKED_BLOCKS, nth=0),
    Fault(ARGUMENTS, "if sequences.cu_q_ptr is None and sequences.lengths_ptr is None and sequences.shard_ptr is None:", "if sequences.lengths_ptr is None and sequences.shard_ptr is None:", "packed: blocks of a layout aligned as if the batch were one sequence", PACKED_BLOCKS),
)
# fmt: on

FAULTS = (*PLACES, *OFFSETS, *WHAT_BELONGS_TO_A_SEQUENCE)
