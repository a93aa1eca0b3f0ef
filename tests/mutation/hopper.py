"""Faults in the kernels for Hopper: which calls they take, barriers, phases, and what they compute."""

from tests.mutation.fault import Fault

RULE, PARTS = "kernels/hopper.py", "kernels/hopper_parts.py"
FWD, BWD = "kernels/hopper_fwd.py", "kernels/hopper_bwd.py"
CALLS = "tests/virtual_gpu/test_hopper.py -k calls"
PROBLEMS = "tests/virtual_gpu/test_hopper.py -k problems"

# fmt: off
FAULTS = (
    Fault("kernels/attention_fwd.py", "hopper.chosen and hopper.takes(", "hopper.takes(", "hopper: taken though not chosen", CALLS),
    Fault(RULE, '"dropout": call.dropout.seed_ptr is not None', '"dropout": False', "hopper: dropout is dropped", CALLS),
    Fault(RULE, '"codes": problem.codes is not None', '"codes": False', "hopper: 8 bits become 16", CALLS),
    Fault(RULE, "    odd = odd or upper < 0\n", "", "hopper: gradients of keys with rows that see nothing", CALLS),
    Fault(RULE, "odd = odd or shape.seqlen_q % 4 != 0", "pass", "hopper: statistics at an address that is not aligned", CALLS),
    Fault(RULE, "return in_band or mask.key_range_ptr", "return mask.key_range_ptr", "hopper: NaN behind a diagonal", CALLS),
    Fault(PARTS, "mbarrier.init(empty.index(i), count=READERS)", "mbarrier.init(empty.index(i), count=1)", "hopper: a tile is free when one of two groups has read it", PROBLEMS),
    Fault(PARTS, "mask=exist[:, None]", "mask=(rows >= 0)[:, None]", "hopper: rows behind the last are stored", PROBLEMS),
    Fault(PARTS, "ring.tiles.index(slot))\n\n\n@gluon.jit\ndef request_line", "ring.tiles.index(0))\n\n\n@gluon.jit\ndef request_line", "hopper: every tile at the place of the first", PROBLEMS),
    Fault(FWD, "mbarrier.wait(k.full.index(slot), now // STAGES & 1)", "mbarrier.wait(k.full.index(slot), now & 1)", "hopper, forward: the phase of keys", PROBLEMS),
    Fault(FWD, "mbarrier.wait(v.empty.index(slot), phase ^ 1)", "mbarrier.wait(v.empty.index(slot), phase)", "hopper, forward: values overwritten, or never requested", PROBLEMS),
    Fault(FWD, "        mbarrier.arrive(v.empty.index(before), count=1)\n", "", "hopper, forward: values are never released", PROBLEMS),
    Fault(FWD, "        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, VALUES))[:, None]\n", "", "hopper, forward: values are not rescaled", PROBLEMS),
    Fault(FWD, "            rounded = rounded * gl.convert_layout(alpha, gl.SliceLayout(1, rounded.type.layout))[:, None]\n", "", "hopper, forward: rounded weights are not rescaled", PROBLEMS),
    Fault(FWD, "acc, rounded, p, next_p = warpgroup_mma_wait(0, deps=[values, counts, p, next_p])", "acc, rounded, next_p = warpgroup_mma_wait(0, deps=[values, counts, next_p])", "hopper, forward: registers of weights in flight", PROBLEMS),
    Fault(FWD, "key = place.first_k + job.blocks.start + (job.n - 1 - i) * BLOCK_N", "key = place.first_k + job.blocks.start + i * BLOCK_N", "hopper, forward: blocks in another order than they are masked", PROBLEMS),
    Fault(FWD, "gl.max((acc != acc).to(gl.int32), 1)", "gl.max((acc > acc).to(gl.int32), 1)", "hopper, forward: NaN is not marked", CALLS),
    Fault(BWD, "        p = tl.where(pairs, p, 0.0)\n", "", "hopper, dk and dv: pairs that are not visible", PROBLEMS),
    Fault(BWD, "head = first_head + i // n_boundary", "head = first_head", "hopper, dk and dv: one head for its whole group", PROBLEMS),
    Fault(BWD, "    mbarrier.arrive(q.empty.index(1 - slot), count=1, pred=i > 0)\n", "", "hopper, dk and dv: queries are never released", PROBLEMS),
    Fault(BWD, "    dk *= numbers.scale\n", "", "hopper: dk without its scale", PROBLEMS),
    Fault(BWD, "        ds = tl.where(_pairs_of_queries(i, walk, call, queries), ds, 0.0)\n", "        pass\n", "hopper, dq: pairs that are not visible", PROBLEMS),
    Fault(BWD, "mbarrier.arrive(k.empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)", "mbarrier.arrive(k.empty.index(slot), count=1, pred=i > 0)", "hopper, dq: keys are released while products read them", PROBLEMS),
    Fault(BWD, "bad = gl.max((dq != dq)", "bad = gl.max((dq > dq)", "hopper, dq: NaN is not marked", CALLS),
)
