"""Faults in shards: what a part of an attention counts through the whole, and how parts are cut, sent and merged."""

from tests.mutation.fault import Fault

SHARD, KERNEL_SHARD, MASKING = "fusedattn/shard.py", "kernels/shard.py", "kernels/masking.py"
DROPOUT, CUTTING, PLAN = (
    "kernels/dropout.py",
    "fusedattn/distributed/cutting.py",
    "fusedattn/backends/torch/mask_plan.py",
)
RING, SPLIT, HEADS = (
    "fusedattn/distributed/ring.py",
    "fusedattn/distributed/split.py",
    "fusedattn/distributed/kv_heads.py",
)
COLLECTIVES, WHOLE = "fusedattn/distributed/collectives.py", "fusedattn/distributed/whole_keys.py"
AGREEMENT, CONTEXT = "fusedattn/distributed/agreement.py", "fusedattn/distributed/context.py"
DTENSOR = "fusedattn/distributed/dtensor.py"
BY_KERNELS = "tests/public/test_shard.py -k triton"
BY_TORCH = "tests/public/test_shard.py -k torch"
PROCESSES = "tests/distributed/test_context.py -k '2-torch'"
ERRORS = "tests/distributed/test_agreement.py"
DTENSORS = "tests/distributed/test_dtensor.py"
BACKWARD_OF_A_PART = "tests/integrations/test_torch_flash.py -k some_of_the_keys"

# fmt: off
FAULTS = (
    Fault(KERNEL_SHARD, "place.seqlen_k - place.seqlen_q + place.shard.shift", "place.seqlen_k - place.seqlen_q", "shard: alignment within the shard", BY_KERNELS),
    Fault(KERNEL_SHARD, "place.shard.first_query - place.shard.first_key", "place.shard.first_query", "shard: alignment at the start forgets the first key", BY_KERNELS),
    Fault(KERNEL_SHARD, "place.sequence + place.shard.first_batch", "place.sequence", "shard: batches counted from 0", BY_KERNELS),
    Fault(KERNEL_SHARD, "place.head + place.shard.first_head", "place.head", "shard: heads counted from 0", BY_KERNELS),
    Fault(DROPOUT, "keys = block.keys + place.shard.first_key", "keys = block.keys", "shard: dropout counts keys from 0", BY_KERNELS),
    Fault(MASKING, "tl.load(mask.prefix_ptr + place.sequence) - place.shard.first_key", "tl.load(mask.prefix_ptr + place.sequence)", "shard: a prefix of the shard", BY_KERNELS),
    Fault(MASKING, "return diagonal_at_end(place) - place.shard.first_query", "return diagonal_at_end(place)", "shard: keys older than a tree", BY_KERNELS),
    Fault(SHARD, "whole_k - whole_q + self.first_query - self.first_key", "whole_k - whole_q + self.first_query", "shard: diagonal forgets the first key", BY_KERNELS),
    Fault(PLAN, "shift = shard.first_query - shard.first_key", "shift = shard.first_query", "shard, torch: band forgets the first key", BY_TORCH),
    Fault(CUTTING, "return x[:, part.heads] if x.shape[1] > 1 else x\n\n\ndef _layout", "return x\n\n\ndef _layout", "shard: pairs of all heads", BY_TORCH),
    Fault(CUTTING, "queries.stop - 1 + upper < keys.start", "queries.stop + upper <= keys.start + 1", "ring: a pair on the diagonal is skipped", PROCESSES),
    Fault(SPLIT, "self.chunks[owner], self.chunks[len(self.chunks) - 1 - owner]", "self.chunks[2 * owner], self.chunks[2 * owner + 1]", "zigzag: neighbours instead of an early and a late chunk", "tests/distributed/test_split.py"),
    Fault(RING, "return (self.rank - step) % self.keys.n_owners", "return (self.rank + step) % self.keys.n_owners", "ring: keys of the other neighbour", "tests/distributed/test_training.py -k 'ring and rotary and 4'"),
    Fault(RING, "                    of_owner += of_others\n", "                    of_owner.copy_(of_others)\n", "ring: gradients of keys overwritten", PROCESSES),
    Fault(RING, "options = replace(options, sinks=None)", "options = replace(options)", "ring: sinks counted once for each part", PROCESSES),
    Fault(HEADS, "return once if of_queries == [", "return once if True or of_queries == [", "KV heads that do not group", "tests/distributed/test_split.py"),
    Fault(COLLECTIVES, "total = total + part", "total = part", "gather: the gradient of the last process", PROCESSES),
    Fault(WHOLE, "positions_k = keys.whole(positions_k, -1)", "positions_k = positions_k", "positions of own keys", PROCESSES),
    Fault(AGREEMENT, "    if failed:\n", "    if failed and error is not None:\n", "an error of another process is not raised", ERRORS),
    Fault(AGREEMENT, "if not (found[:, N_NUMBERS] == digest).all():", "if False:", "different calls are not refused", ERRORS),
    Fault("fusedattn/distributed/placement.py", "in_groups = (first * ranks.shape[1] + second).flatten()", "in_groups = torch.arange(ranks.numel())", "a mesh: tokens in the order of its places, not of the ranks in its groups", "tests/distributed/test_split.py"),
    Fault(CONTEXT, "return found if self._order is None else found[self._order]", "return found", "a mesh: numbers in the order of ranks", "tests/distributed/test_autograd.py -k 'four and meshes'"),
    Fault(CONTEXT, "        if kind not in self._checked:\n", "        if False:\n", "masks of a wrong shape are not refused", ERRORS),
    Fault(DTENSOR, "into_kv = [Partial() if x != y else y", "into_kv = [y", "DTensor: gradient of shared KV heads is not added up", DTENSORS),
    Fault(DTENSOR, "gradient = [Replicate() if placement.is_replicate() else Partial()", "gradient = [Replicate()", "DTensor: gradient of a bias is not added up", DTENSORS),
    Fault(DTENSOR, "    if own_k.shape[1] * group != n_heads:", "    if False:", "DTensor: all KV heads for some query heads", DTENSORS),
    Fault(CUTTING, "if mask.pattern is None or not mask.pattern.tensors():", "if True:", "sparse: lists of blocks of the whole attention for a part", "tests/distributed/test_dtensor.py -k refused"),
    Fault("fusedattn/parts.py", "into_lse = (dout * (out.to(weight.dtype) - whole_out)).sum(dim=-1)", "into_lse = (dout * out.to(weight.dtype)).sum(dim=-1)", "gradients of a part: of its lse without the whole's out", BACKWARD_OF_A_PART),
    Fault("fusedattn/parts.py", "weight, rest = torch.sigmoid(difference), torch.sigmoid(-difference)", "weight, rest = torch.sigmoid(difference), torch.ones_like(difference)", "ring: earlier keys keep their weight", PROCESSES),
    Fault("fusedattn/integrations/torch_flash.py", "gradients_of_part((out, lse), whole, (dout, None))", "(dout, None)", "torch's flash: the backward ignores lse of more keys", BACKWARD_OF_A_PART),
)
