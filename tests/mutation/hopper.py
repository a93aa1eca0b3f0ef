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
    Fault(RULE, "upper < max(0, ", "upper < min(0, ", "hopper: rows that see nothing, or that nobody sees, have NaN", CALLS),
    Fault(RULE, "        or problem.call.sequences.cu_k_ptr is not None\n", "", "hopper: NaN of the sequence beside", CALLS),
    Fault(RULE, "return band.has_upper or band.has_lower or hides_rows", "return hides_rows", "hopper: NaN behind a diagonal", CALLS),
    Fault(PARTS, "mbarrier.init(empty.index(i), count=READERS)", "mbarrier.init(empty.index(i), count=1)", "hopper: a tile is free when one of two groups has read it", PROBLEMS),
    Fault(PARTS, "mask=exist[:, None]", "mask=(rows >= 0)[:, None]", "hopper: rows behind the last are stored", PROBLEMS),
    Fault(PARTS, "ring.tiles.index(slot))", "ring.tiles.index(0))", "hopper: every tile at the place of the first", PROBLEMS),
    Fault(FWD, "mbarrier.wait(k.full.index(slot), now // STAGES & 1)", "mbarrier.wait(k.full.index(slot), now & 1)", "hopper, forward: the phase of keys", PROBLEMS),
    Fault(FWD, "mbarrier.wait(v.empty.index(slot), phase ^ 1)", "mbarrier.wait(v.empty.index(slot), phase)", "hopper, forward: values overwritten, or never requested", PROBLEMS),
    Fault(FWD, "        mbarrier.arrive(v.empty.index(before), count=1)\n", "", "hopper, forward: values are never released", PROBLEMS),
    Fault(FWD, "        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, VALUES))[:, None]\n", "", "hopper, forward: values are not rescaled", PROBLEMS),
    Fault(FWD, "            rounded = rounded * gl.convert_layout(alpha, gl.SliceLayout(1, rounded.type.layout))[:, None]\n", "", "hopper, forward: rounded weights are not rescaled", PROBLEMS),
    Fault(FWD, "acc, rounded, p, next_p = warpgroup_mma_wait(0, deps=[values, counts, p, next_p])", "acc, rounded, next_p = warpgroup_mma_wait(0, deps=[values, counts, next_p])", "hopper, forward: registers of weights in flight", PROBLEMS),
    Fault(FWD, "key = place.first_k + job.blocks.start + (job.n - 1 - i) * BLOCK_N", "key = place.first_k + job.blocks.start + i * BLOCK_N", "hopper, forward: blocks in another order than they are masked", PROBLEMS),
    Fault(FWD, "gl.max((acc != acc).to(gl.int32), 1)", "gl.max((acc > acc).to(gl.int32), 1)", "hopper, forward: NaN is not marked", CALLS),
    Fault(BWD, "        p = tl.where(_pairs_of_keys(i, walk, call, keys, BLOCK), p, 0.0)\n", "        pass\n", "hopper, dk and dv: pairs that are not visible", PROBLEMS),
    Fault(BWD, "head = first_head + i // n_boundary", "head = first_head", "hopper, dk and dv: one head for its whole group", PROBLEMS),
    Fault(BWD, "    mbarrier.arrive(q.empty.index(before), count=1, pred=i > 0)\n", "", "hopper, dk and dv: queries are never released", PROBLEMS),
    Fault(BWD, "    dk *= numbers.scale\n", "", "hopper: dk without its scale", PROBLEMS),
    Fault(BWD, "        ds = tl.where(_pairs_of_queries(i, walk, call, queries, BLOCK), ds, 0.0)\n", "        pass\n", "hopper, dq: pairs that are not visible", PROBLEMS),
    Fault(BWD, "mbarrier.arrive(k.empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)", "mbarrier.arrive(k.empty.index(slot), count=1, pred=i > 0)", "hopper, dq: keys are released while products read them", PROBLEMS),
    Fault("kernels/hopper_configs.py", "256: HopperConfig(64, 2)", "256: HopperConfig(128, 2)", "hopper: tiles that exceed shared memory", CALLS),
    Fault(RULE, '"slower": chosen != "all" and not', '"slower": chosen == "all" and not', "hopper: run where they are slower", CALLS),
    Fault(RULE, "chosen = before", "pass", "hopper: a choice outlasts its block", "tests/bench/test_bench.py -k chosen"),
    Fault(FWD, "problem.call.sequences.cu_q_ptr is None and is_addressable(out)", "is_addressable(out)", "hopper, forward: boxes of out end in the next sequence", CALLS),
    Fault(FWD, "0, GROUP)\n        _store_values(right, queries, exist, unseen, factor, residual_of, results, job, boxes, shared, HALF", "0, GROUP)\n        _store_values(right, queries, exist, unseen, factor, residual_of, results, job, boxes, shared, 0", "hopper, forward: both halves of a wide out at its begin", CALLS),
    Fault(FWD, "out = tl.where(unseen, 0.0, acc * factor)", "out = (acc * factor)", "hopper, forward: rows of scores of -inf have NaN", CALLS),
    Fault(BWD, "key = walk.place.first_k + walk.start", "key = walk.start", "hopper, dk and dv: keys of the first sequence", PROBLEMS),
    Fault(BWD, "row = walk.place.first_k + _keys_of", "row = _keys_of", "hopper, dq: keys of the first sequence", PROBLEMS),
    Fault(BWD, "zeros - delta[None, :], is_async", "zeros, is_async", "hopper, dk and dv: delta is left out", PROBLEMS),
    Fault(BWD, 'mask=exist, other=float("inf")))', 'mask=queries < walk.place.seqlen_q, other=float("inf")))', "hopper, dk and dv: statistics before the first row", PROBLEMS),
    Fault(BWD, "    problem.prologue_k.prepared(dk, back=True)", "    pass", "hopper: dk is not rotated back", PROBLEMS),
    Fault(BWD, "    problem.prologue_q.prepared(dq, back=True)", "    pass", "hopper: dq is not rotated back", PROBLEMS),
    Fault("kernels/prologue.py", "self.of_queries, TRANSPOSE=back)", "self.of_queries, TRANSPOSE=False)", "hopper: gradients are rotated further", PROBLEMS),
    Fault("kernels/sequences.py", "* nheads_kv + head_kv) * seqlen_k + place.first_k", "* nheads_kv + head_kv) * seqlen_k", "hopper: NaN of keys is marked in the first sequence", CALLS),
    Fault(BWD, "bad = gl.max((dq != dq)", "bad = gl.max((dq > dq)", "hopper, dq: NaN is not marked", CALLS),
)
