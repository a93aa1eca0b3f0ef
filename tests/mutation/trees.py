"""Faults in trees of draft tokens: what they mean, the blocks that read them, and their way to the kernels."""

from tests.mutation.fault import Fault

MASKS, PLAN = "fusedattn/mask.py", "fusedattn/backends/torch/mask_plan.py"
MASKING, ARGUMENTS = "kernels/masking.py", "kernels/mask_arguments.py"
OPERANDS, REFERENCE_VARLEN = "fusedattn/backends/triton/operands.py", "fusedattn/reference_varlen.py"

MASK_VALUES = "tests/public/test_masks.py"
FULL = "tests/kernels/test_blocks.py -k a_tree_leaves"
ACCURACY = "tests/public/test_tree.py -k 'test_accuracy and not backend'"
ADDRESSES = "tests/public/test_tree.py -k addresses"
PACKED = "tests/public/test_tree.py -k packed"
EMPTY = "tests/public/test_tree.py -k 'nothing and triton'"

# fmt: off
FAULTS = (
    Fault(MASKS, 'j - shifts["bottom_right"], whole_q', "j, whole_q", "dense: a tree of the oldest keys", MASK_VALUES),
    Fault(MASKS, "(newest + 1).clamp(0, n)", "newest.clamp(0, n)", "dense: a tree one key late", MASK_VALUES),
    Fault(MASKS, "F.pad(columns, (1, 0), value=True)", "F.pad(columns, (1, 0), value=False)", "dense: a tree hides older keys", MASK_VALUES),
    Fault(MASKS, "columns = indices.part_of(m, rows, None)", "columns = indices.part_of(m, None, None)", "dense: all rows of a tree for some queries", MASK_VALUES),
    Fault(MASKS, "tree=_both(self.tree, other.tree, \"tree\")", "tree=other.tree if self.tree is None else self.tree", "two trees: the second one lost", MASK_VALUES),
    Fault(MASKS, "self.tree is not None or self.pattern is not None\n", "self.pattern is not None\n", "a tree counts as no mask", MASK_VALUES),
    Fault(MASKS, "full = (batch, nheads, seqlen_q, shard.lengths(seqlen_q, seqlen_k)[0])", "full = (batch, nheads, seqlen_q, seqlen_k)", "check: a tree of all keys is accepted", MASK_VALUES),
    Fault(PLAN, " and mask.tree is None and mask.pattern", " and mask.pattern", "pieces: a tree forgotten", "tests/torch_backend/test_mask_plan.py"),
    Fault(REFERENCE_VARLEN, "pairs_of(mask.tree, i, n_queries, n_queries)", "pairs_of(mask.tree, 0, n_queries, n_queries)", "eager packed: the tree of the first sequence for all", PACKED),
    Fault(REFERENCE_VARLEN, "pairs_of(mask.tree, i, n_queries, n_queries)", "pairs_of(mask.tree, i, n_queries, n_keys)", "eager packed: as many columns of a tree as keys", PACKED),
    Fault(OPERANDS, "or tree is not None or bool(", "or bool(", "kernels: a tree alone counts as no mask", ACCURACY),
    Fault(MASKING, "full_stop = tl.minimum(full_stop, _older_keys(place))", "full_stop = tl.minimum(full_stop, _older_keys(place) + 1)", "key_blocks: a full block reaches into a tree", FULL),
    Fault(MASKING, "full_stop = tl.minimum(full_stop, _older_keys(place))", "full_stop = tl.minimum(full_stop, 0)", "key_blocks: no full blocks before a tree", FULL),
    Fault(MASKING, "keys_full & (last < _older_keys(place))", "keys_full & (last <= _older_keys(place))", "query_blocks: full where a tree begins", FULL),
    Fault(MASKING, "keys_full & (last < _older_keys(place))", "keys_full & (last < 0)", "query_blocks: no full blocks of keys before a tree", FULL),
    Fault(MASKING, "pairs = pairs & (tl.load(ptrs, mask=pairs & (newest.keys >= 0), other=1) != 0)", "pairs = pairs & (tl.load(ptrs, mask=pairs & (newest.keys >= 0), other=1) == 0)", "tree: polarity", ACCURACY),
    Fault(MASKING, "pairs & (newest.keys >= 0), other=1", "pairs & (newest.keys > 0), other=1", "tree: every query sees the first of the newest keys", ACCURACY),
    Fault(MASKING, "pairs & (newest.keys >= 0), other=1", "pairs & (newest.keys >= 0), other=0", "tree: older keys of a boundary block are hidden", ACCURACY),
    Fault(MASKING, "mask=pairs & (newest.keys >= 0), other=1", "mask=pairs, other=1", "tree: read before its first column", ADDRESSES),
    Fault(MASKING, "mask=pairs & (newest.keys >= 0), other=1", "mask=newest.keys >= 0, other=1", "tree: read beyond its rows and columns", ADDRESSES),
    Fault(MASKING, "Block(block.start_m, block.start_n - older, rows, keys - older)", "Block(block.start_m, block.start_n, rows, keys)", "tree: columns counted from the oldest key", ACCURACY),
    Fault(MASKING, "pair_pointers(mask.tree, place, newest)", "pair_pointers(mask.tree, place, Block(newest.start_n, newest.start_m, newest.keys, rows))", "tree: transposed", ACCURACY),
    Fault(ARGUMENTS, "mask.documents_q is not None or mask.tree is not None", "mask.documents_q is not None", "dk: NaN of a row that a tree empties", EMPTY),
)
# fmt: on
