"""Faults in how kernels are launched, and calls done again."""

from tests.mutation.fault import Fault

LAUNCHER, REPLAY, START = "kernels/launcher.py", "kernels/replay.py", "kernels/start.py"
LAUNCHING, OPS = "fusedattn/backends/triton/launching.py", "fusedattn/backends/triton/ops.py"
PIPELINING, STAGES = "kernels/pipelining.py", "tests/kernels/test_pipelining.py"
ASSEMBLER, ASSEMBLED = "kernels/assembler.py", "tests/kernels/test_assembler.py"
OPERANDS, PREPARE = "fusedattn/backends/triton/operands.py", "fusedattn/prepare.py"
TESTS = "tests/kernels/test_launcher.py"

FAULTS = (
    Fault(LAUNCHER, "return ptr.dtype, ptr.data_ptr() % SPECIALIZED == 0, strides", "return ptr.dtype, strides", "launches: addresses of any alignment by one kernel", TESTS),
    Fault(LAUNCHER, "if together % SPECIALIZED == 0 and 0 <= together < 2**31:", "if 0 <= together < 2**31:", "launches: strides of any alignment by one kernel", TESTS),
    Fault(LAUNCHER, "    return x.dtype, x.data_ptr() % SPECIALIZED == 0\n", "    return x.dtype\n", "launches: rows of any alignment by one kernel", TESTS),
    Fault(REPLAY, 'f"scratch + {self.n_bytes}"', '"scratch"', "replays: scratch tensors at one address", TESTS),
    Fault(REPLAY, "        raise _UnknownTensorError\n", '        return "0", "0"\n', "replays: of a tensor that nobody knows of", TESTS),
    Fault(REPLAY, "step(given, addresses, scratch, stream)", "step(given, addresses, scratch, 0)", "replays: on the default stream", TESTS),
    Fault(OPERANDS, "return self.sizes, self.functions, self.scale, ", "return self.sizes, self.functions, ", "replays: with the scale of another call", TESTS),
    Fault(OPERANDS, "return self.sizes, self.functions, ", "return self.functions, ", "replays: with the bounds of another call", TESTS),
    Fault(OPERANDS, "mask.bands, interleaved, options.deterministic, options.scale", "frozenset(), interleaved, options.deterministic, options.scale", "numbers: those of a call without bands for all", "tests/public/test_attention.py"),
    Fault(OPERANDS, "mask.bands, interleaved, options.deterministic, options.scale", "mask.bands, False, options.deterministic, options.scale", "numbers: pairs of features of the other kind", "tests/public/test_rope.py"),
    Fault(LAUNCHING, "(x.dtype, x.shape, x.stride())", "(x.dtype, x.shape)", "replays: with the strides of another call", TESTS),
    Fault(LAUNCHING, "        _all_aligned(addresses) or tuple([x % SPECIALIZED for x in addresses]),\n", "", "replays: at addresses of another alignment", TESTS),
    Fault(LAUNCHING, "        None if len(set(addresses)) == len(addresses) else tuple(map(addresses.index, addresses)),\n", "", "replays: of one tensor for several", TESTS),
    Fault(PREPARE, "        *(k.device, k.dtype, k.shape, k.stride()),\n", "", "checks: not done again for another k", "tests/public/test_errors.py -k wrong_arguments"),
    Fault(PREPARE, "        q.is_cuda or interpreting(),\n", "", "checks: of what was interpreted, for what is not", "tests/public/test_errors.py -k without_the_interpreter"),
    Fault(PREPARE, "if known is None or asked or options.qk_norm is not None or options.precision is not None:", "if known is None:", "checks: functions of a known kind of call not looked at", "tests/public/test_errors.py -k unsupported"),
    Fault(LAUNCHER, "        replay.give_up()  # it would not have this launch\n", "", "replays: of the launches that had been compiled before", TESTS),
    Fault(PREPARE, "if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():", "if False:", "checks: sizes that are symbols looked up", "tests/torch_backend/test_dispatch.py -k symbols"),
    Fault(START, "bool(hook.calls) if", "False if", "launches: hooks of Triton passed by", "tests/bench/test_host_time.py -k hooks"),
    Fault(OPS, "if torch._C._dispatch_keys(x).raw_repr() not in plain:", "if False:", "operators: not called for tensors of a transform", "tests/torch_backend/test_dispatch.py -k transforms"),
    Fault("kernels/versions.py", r"(?:\.\d+)*", r"(?:\.\d)*", "versions: 3.10 taken for 3.1", "tests/kernels/test_versions.py"),
    Fault("fusedattn/backends/triton/launching.py", "\"biased\" if is_simple and not drops else", "\"biased\" if is_simple else", "configs: those of a bias for dropout", "tests/kernels/test_configs.py"),
    Fault("kernels/configs.py", "object.__setattr__(self, \"biased\", self.scored)", "object.__setattr__(self, \"biased\", self.pairwise)", "configs: a bias gets the tiles of masks by default", "tests/kernels/test_configs.py"),
    Fault("kernels/grid.py", "problem.configs.fwd if for_backward else", "problem.configs.fwd if not for_backward else", "stages: those of inference in training", "tests/kernels/test_configs.py"),
    Fault(ASSEMBLER, "with _one_at_a_time, knobs", "with knobs", "assembler: one thread ends the choice of another", ASSEMBLED),
    Fault(ASSEMBLER, "SOUND = (12, 9)", "SOUND = (12, 8)", "assembler: one that loses the first value of a register", ASSEMBLED),
    Fault(ASSEMBLER, "driver >= release(other.version)[0]", "driver > 0", "assembler: one whose code the driver cannot load", ASSEMBLED),
    Fault(PIPELINING, "async_products and not FENCES_COPIES and config.style", "async_products and config.style", "stages: full blocks first although the boundary is pipelined", STAGES),
    Fault(PIPELINING, "if n_copied == 0 or (FENCES_COPIES and n_copied == len(tiles)):", "if n_copied == 0 or FENCES_COPIES:", "stages: copies beside tiles in registers", STAGES),
    Fault(PIPELINING, "if n_copied == 0 or (FENCES_COPIES and n_copied == len(tiles)):", "if n_copied == 0 or n_copied == len(tiles):", "stages: copies without fences", STAGES),
    Fault(PIPELINING, "if n_copied == 0 or (FENCES_COPIES and n_copied == len(tiles)):", "if FENCES_COPIES and n_copied == len(tiles):", "stages: one although nothing is copied", STAGES),
    Fault(PIPELINING, "rows < ASYNC_ROWS:", "rows <= ASYNC_ROWS:", "stages: copies without fences for products of 64 rows", STAGES),
    Fault(PIPELINING, " or rows < ASYNC_ROWS:", ":", "stages: one for operands that threads load", STAGES),
    Fault(PIPELINING, "has_descriptors and all(", "all(", "stages: descriptors where a kernel has none", STAGES),
    Fault(PIPELINING, "is not None for x in tiles)", "is not None for x in tiles[:1])", "stages: descriptors of one tile for both", STAGES),
    Fault(PIPELINING, "    if x.itemsize >= 4:\n        return True\n", "", "stages: 4 bytes taken for registers", STAGES),
    Fault(LAUNCHING, 'async_products=arch in ASYNC_PRODUCTS and (bool(sizes.fp8) or q.itemsize == 2 or precision == "tf32"),', "async_products=False,", "stages: products on Hopper taken for those of threads", "tests/virtual_gpu/test_compiled.py -k quick"),
)  # fmt: skip
