"""Faults in what ``deterministic=False`` permits: dq added up by the kernel of dk and dv."""

from tests.mutation.fault import Fault

DQ_SUM, BWD, MASKING = "kernels/dq_sum.py", "kernels/attention_bwd.py", "kernels/masking.py"
LAUNCHING, OPERANDS = "fusedattn/backends/triton/launching.py", "fusedattn/backends/triton/operands.py"


def one_pass(words: str) -> str:
    """The tests of one pass whose names have one of these words."""
    return f"tests/kernels/test_one_pass.py -k '{words}'"


SUMS = one_pass("gradcheck")
POISON = one_pass("poison")
ACCELERATOR = one_pass("accelerator")
PACKED = "tests/public/test_varlen.py -k 'meaning and one and pass'"
WHO = one_pass("kernels_of_a_call or overrules")

# fmt: off
FAULTS = (
    Fault(DQ_SUM, "mask=row_seen[:, None] & (offs_d", "mask=(offs_d", "one pass: rows that are not there are added to", one_pass("memory")),
    Fault(DQ_SUM, " & (offs_d < HEAD_DIM)[None, :]", "", "one pass: features beyond the last are added to", one_pass("memory and causal")),
    Fault(DQ_SUM, "ptr = head_base(dq_total, place.batch, place.head, place.first_q)", "ptr = head_base(dq_total, place.batch, place.head, 0)", "one pass: rows of the first sequence are added to", PACKED),
    Fault(DQ_SUM, "[place.batch, place.head, place.first_q + start_m, 0]", "[place.batch, place.head, start_m, 0]", "one pass: the accelerator adds to the first sequence", ACCELERATOR),
    Fault(DQ_SUM, "[place.batch, place.head, place.first_q + start_m, 0]", "[0, place.head, place.first_q + start_m, 0]", "one pass: the accelerator adds to the first batch", ACCELERATOR),
    Fault(DQ_SUM, " and head_dim == block_d(head_dim)", "", "one pass: the accelerator adds to features beyond the last", ACCELERATOR),
    Fault(DQ_SUM, "seen = shift != float(\"inf\")", "seen = offs_m < place.seqlen_q", "one pass: dq of a row of scores of -inf", "tests/kernels/test_one_pass.py -k gets_no_gradient"),
    Fault(DQ_SUM, "OF_QUERIES=True, TRANSPOSE=True", "OF_QUERIES=False, TRANSPOSE=True", "one pass: dq rotated back as if queries counted from 0", SUMS),
    Fault(DQ_SUM, "OF_QUERIES=True, TRANSPOSE=True", "OF_QUERIES=True, TRANSPOSE=False", "one pass: dq rotated forward, not back", SUMS),
    Fault(DQ_SUM, "store_tile(dq_head, start_m, place.seqlen_q, dq * scale,", "store_tile(dq_head, start_m, place.seqlen_q, dq,", "one pass: scale dropped", SUMS),
    Fault(DQ_SUM, "return torch.zeros(q.shape", "return torch.empty(q.shape", "one pass: the dq_total is not filled with zeros", SUMS),
    Fault(BWD, "key_visible & ~poisoned, ", "key_visible, ", "one pass: NaN of keys that a query does not see", POISON),
    Fault(BWD, "if tl.max(poisoned.to(tl.int32)) != 0:", "if start_n < 0:", "one pass: an infinite key that a query sees becomes 0", POISON),
    Fault(BWD, "exists[None, :], poisoned[:, None]", "exists[None, :], (poisoned | (keys[:, 0] >= 0))[:, None]", "one pass: NaN for queries that see any key of a tile", POISON),
    Fault(BWD, "with_head(place, place.head + i // n_blocks)", "place", "one pass: NaN for the first head of a group only", POISON),
    Fault(BWD, "add_dq(dq_total, dq_total_tiles, place, start_m, offs >= 0,", "add_dq(dq_total, dq_total_tiles, own.place, start_m, offs >= 0,", "one pass: full blocks of the first head of a group", one_pass("budget")),
    Fault(BWD, " and problem.nondeterministic", "", "one pass: nobody asked for it", WHO),
    Fault(BWD, "dq is not None and dkdv is not None and problem.nondeterministic", "dkdv is not None and problem.nondeterministic", "one pass: dq where nobody needs it", one_pass("not_needed")),
    Fault(MASKING, "start_m = blocks.start + (blocks.n_left + i) * BLOCK_M", "start_m = blocks.start + i * BLOCK_M", "one pass: NaN for the boundary twice, and not for the last full block", POISON),
    Fault(MASKING, "boundary_queries(i - blocks.n_full, blocks", "boundary_queries(i, blocks", "one pass: NaN not for all of the boundary", POISON),
    Fault(LAUNCHING, "not (sizes.deterministic or torch.are_deterministic_algorithms_enabled())", "not sizes.deterministic", "one pass: torch does not overrule", WHO),
    Fault(OPERANDS, "deterministic=int(deterministic)", "deterministic=1", "one pass: never", WHO),
)
# fmt: on
