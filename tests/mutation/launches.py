"""Faults in how kernels are launched, and calls done again."""

from tests.mutation.fault import Fault

LAUNCHER, REPLAY = "kernels/launcher.py", "kernels/replay.py"
LAUNCHING, OPS = "fusedattn/launching.py", "fusedattn/ops.py"
TESTS = "tests/test_launcher.py"

FAULTS = (
    Fault(LAUNCHER, "return ptr.dtype, ptr.data_ptr() % SPECIALIZED == 0, strides", "return ptr.dtype, strides", "launches: addresses of any alignment by one kernel", TESTS),
    Fault(LAUNCHER, "if together % SPECIALIZED == 0 and 0 <= together < 2**31:", "if 0 <= together < 2**31:", "launches: strides of any alignment by one kernel", TESTS),
    Fault(LAUNCHER, "    return x.dtype, x.data_ptr() % SPECIALIZED == 0\n", "    return x.dtype\n", "launches: rows of any alignment by one kernel", TESTS),
    Fault(REPLAY, 'f"scratch + {self.n_bytes}"', '"scratch"', "replays: scratch tensors at one address", TESTS),
    Fault(REPLAY, "        raise _UnknownTensorError\n", '        return "0", "0"\n', "replays: of a tensor that nobody knows of", TESTS),
    Fault(REPLAY, "launch(*fill(given, addresses, scratch), stream=stream)", "launch(*fill(given, addresses, scratch), stream=0)", "replays: on the default stream", TESTS),
    Fault(LAUNCHING, "        constants.scale,\n", "", "replays: with the scale of another call", TESTS),
    Fault(LAUNCHING, "        constants.sizes,\n", "", "replays: with the bounds of another call", TESTS),
    Fault(LAUNCHING, "(x.dtype, x.shape, x.stride())", "(x.dtype, x.shape)", "replays: with the strides of another call", TESTS),
    Fault(LAUNCHING, "        tuple([x % SPECIALIZED for x in addresses]),\n", "", "replays: at addresses of another alignment", TESTS),
    Fault(LAUNCHING, "        None if len(set(addresses)) == len(addresses) else tuple(map(addresses.index, addresses)),\n", "", "replays: of one tensor for several", TESTS),
    Fault(OPS, " or torch._C._dispatch_keys(x).raw_repr() not in plain", "", "operators: not called for tensors of a transform", "tests/test_dispatch.py -k transforms"),
)  # fmt: skip
