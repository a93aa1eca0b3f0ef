"""Faults in the kernels for Hopper: waits and arrivals, phases and slots of rings, fences, and products in flight."""

from tests.mutation.fault import Fault

PARTS, FWD, BWD = "kernels/hopper_parts.py", "kernels/hopper_fwd.py", "kernels/hopper_bwd.py"
CALLS = "tests/virtual_gpu/test_hopper.py -k calls"
PROBLEMS = "tests/virtual_gpu/test_hopper.py -k problems"
TURNS = "tests/virtual_gpu/test_planted.py -k turns"  # a problem with several tiles of one program

# fmt: off
FAULTS = (
    Fault(FWD, "mbarrier.wait(q.empty.index(0), jobs & 1 ^ 1)", "mbarrier.wait(q.empty.index(0), 1)", "hopper, forward: the phase of free queries", PROBLEMS),
    Fault(FWD, "                mbarrier.wait(q.empty.index(1), jobs & 1 ^ 1)\n", "", "hopper, forward: queries of the second group are requested without a wait", PROBLEMS),
    Fault(FWD, "            mbarrier.wait(k.empty.index(slot), phase ^ 1)\n", "", "hopper, forward: keys are requested without a wait", PROBLEMS),
    Fault(FWD, "            mbarrier.arrive(q.empty.index(GROUP), count=1)\n", "", "hopper, forward: queries are never released", PROBLEMS),
    Fault(FWD, "mbarrier.wait(q.full.index(GROUP), jobs & 1)", "mbarrier.wait(q.full.index(GROUP), 0)", "hopper, forward: the phase of queries", PROBLEMS),
    Fault(FWD, "mbarrier.wait(v.full.index(before), (now - 1) // STAGES & 1)\n", "mbarrier.wait(v.full.index(before), now // STAGES & 1)\n", "hopper, forward: the phase of values", PROBLEMS),
    Fault(FWD, "        mbarrier.wait(v.full.index(before), (now - 1) // STAGES & 1)  # a branch, over which ptxas moves nothing\n", "", "hopper, forward: no branch before the wait for a product", PROBLEMS, equivalent="the wait before it is for the same phase; the branch only keeps the assembler from moving instructions"),
    Fault(FWD, "            slot = (total - 1) % STAGES\n", "            slot = total % STAGES\n", "hopper, forward: the place of the last values", PROBLEMS),
    Fault(FWD, "    mbarrier.arrive(turns.index(0), count=1)\n", "", "hopper, forward: no group begins", PROBLEMS),
    Fault(FWD, "mbarrier.wait(turns.index(GROUP), now & 1)", "mbarrier.wait(turns.index(GROUP), now & 1 ^ 1)", "hopper, forward: the phase of turns", TURNS),
    Fault(FWD, "            s = warpgroup_mma_wait(1, deps=[scores])\n", "            s = warpgroup_mma_wait(2, deps=[scores])\n", "hopper, forward: scores in flight are read", CALLS),
    Fault(FWD, "        mbarrier.arrive(k.empty.index(slot), count=1)\n        if MASKED:", "        mbarrier.arrive(k.empty.index(before), count=1)\n        if MASKED:", "hopper, forward: the keys before are released", PROBLEMS),
    Fault(FWD, "        end_stores()  # shared memory ends with the program\n", "        pass\n", "hopper, forward: a program ends while the accelerator reads its memory", PROBLEMS),
    Fault(PARTS, "    end_stores()\n    tile.store(values)\n", "    tile.store(values)\n", "hopper: a box is overwritten while the accelerator reads it", PROBLEMS),
    Fault(PARTS, "    fence_async_shared()\n", "", "hopper: a box is stored without a fence", PROBLEMS, equivalent="Triton inserts this fence itself; without it in the PTX, the race is seen"),
    Fault(PARTS, "mbarrier.init(full.index(i), count=WRITERS)", "mbarrier.init(full.index(i), count=1)", "hopper: a tile is full before its statistics are there", PROBLEMS),
    Fault(BWD, "        mbarrier.wait(dout.empty.index(slot), phase ^ 1)\n", "", "hopper, dk and dv: dout is requested without a wait", PROBLEMS, equivalent="each group releases dout before the queries, whose wait comes first"),
    Fault(BWD, "        mbarrier.arrive(dout.full.index(slot), count=1)\n", "", "hopper, dk and dv: statistics never arrive", PROBLEMS),
    Fault(BWD, "    mbarrier.arrive(dout.empty.index(before), count=1, pred=i > 0)\n", "    mbarrier.arrive(dout.empty.index(slot), count=1, pred=i > 0)\n", "hopper, dk and dv: dout is released while products read it", PROBLEMS),
    Fault(BWD, "    dp = warpgroup_mma_wait(1, deps=[dpt])\n", "    dp = warpgroup_mma_wait(2, deps=[dpt])\n", "hopper, dk and dv: products in flight are read", PROBLEMS),
    Fault(BWD, "    mbarrier.wait(own.full.index(1), 0)\n", "", "hopper, dk and dv: no wait for values", PROBLEMS),
    Fault(BWD, "    before = (i + STAGES - 1) % STAGES\n", "    before = i % STAGES\n", "hopper, dk and dv: tiles are released while products read them", PROBLEMS),
    Fault(BWD, "    mbarrier.wait(dout.full.index(GROUP), 0)\n", "", "hopper, dq: no wait for dout", PROBLEMS),
    Fault(BWD, "    mbarrier.arrive(v.empty.index(slot), count=1)\n", "", "hopper, dq: values are never released", PROBLEMS),
    Fault(BWD, "    mbarrier.wait(v.full.index(slot), phase)\n", "", "hopper, dq: no wait for values", PROBLEMS),
    Fault(BWD, "    mbarrier.wait(v.full.index(slot), phase)  # a branch, over which the assembler moves nothing\n", "", "hopper, dq: no branch before the wait for a product", PROBLEMS, equivalent="the wait before it is for the same phase; the branch only keeps the assembler from moving instructions"),
    Fault(BWD, "        mbarrier.wait(v.empty.index(slot), phase ^ 1)\n", "", "hopper, dq: values are requested without a wait", PROBLEMS, equivalent="each group releases values before their keys, whose wait comes first"),
)
