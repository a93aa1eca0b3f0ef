"""Throughputs of one multiprocessor, from public documents: all that bench/codegen/model.py knows of a GPU.

A multiprocessor has four schedulers, each with its own registers, pipes and tensor core. The figure of a pipe is the
clocks that one warp instruction occupies it: 32 lanes over a quarter of the results per clock that the CUDA C++
Programming Guide ("Arithmetic Instructions", table of throughputs) gives for a multiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusedattn.kernels.configs import Arch

SCHEDULERS = 4


@dataclass(frozen=True)
class Machine:
    """One GPU. Bytes and multiply-adds are per multiprocessor and clock, clocks are those of one scheduler.

    Attributes:
        multiprocessors: their number.
        hertz: the clock rate under load; an assumption, which scales every TFLOP/s alike.
        wgmma_macs, mma_macs: multiply-adds of 16-bit numbers, by instructions of warp groups and of warps.
        pipes: clocks of a warp instruction by its kind; others take an issue slot only.
        latencies: clocks until the result of an instruction, by its kind, if scoreboards track it; "memory" is the L2
            cache, "near" the cache of the multiprocessor, `hbm_latency` the memory behind both.
        shared_bytes: bytes of shared memory.
        l2_bytes: from the L2 cache to each multiprocessor while all of them read.
        port_bytes: from the L2 cache to one multiprocessor at most.
        hbm_bytes_per_second: the bandwidth of memory.
    """

    multiprocessors: int
    hertz: float
    wgmma_macs: float
    mma_macs: float
    pipes: dict[str, int]
    latencies: dict[str, int]
    shared_bytes: int
    l2_bytes: float
    port_bytes: int
    hbm_latency: int
    hbm_bytes_per_second: float

    def seconds(self, clocks: float) -> float:
        return clocks / self.hertz

    @property
    def peak(self) -> float:
        """Operations per second of the fastest matrix instructions; a multiply-add counts as two."""
        return 2 * max(self.wgmma_macs, self.mma_macs) * self.multiprocessors * self.hertz


MACHINES: dict[Arch, Machine] = {
    # H200 SXM. 989.4 TFLOP/s dense at 1.83 GHz are 4096 operations per clock of each of 132 multiprocessors (NVIDIA
    # H100 white paper). Instructions of single warps reach 0.629 of that on average (Luo et al., "Benchmarking and
    # Dissecting the Nvidia Hopper GPU Architecture", arXiv:2402.13499, which also has the latencies of memories).
    # Latencies of shuffles, special functions and mma are assumed: Jia et al., arXiv:1804.06826, measured about the
    # same on older GPUs. L2: 9.7 TB/s on an H200, if it ran at 1.98 GHz (github.com/te42kyfo/gpu-benches,
    # gpu-l2-cache/h200.txt); a smaller H100 reached 5.5 TB/s (chipsandcheese.com, "Nvidia's H100: Funny L2, and Tons of
    # Bandwidth"). The port is assumed as wide as in older generations. Memory: 4.3 TB/s by a copy kernel, 4.8 nominal.
    "sm_90": Machine(
        multiprocessors=132,
        hertz=1.755e9,
        wgmma_macs=2048,
        mma_macs=0.629 * 2048,
        pipes={"fma": 1, "imad": 2, "alu": 2, "mufu": 8, "shuffle": 4},
        latencies={"shared": 29, "near": 41, "memory": 263, "shuffle": 23, "mufu": 20, "mma": 32},
        shared_bytes=128,
        l2_bytes=37,
        port_bytes=64,
        hbm_latency=479,
        hbm_bytes_per_second=4.3e12,
    ),
    # A100 SXM 80 GB: 312 TFLOP/s dense at 1.41 GHz, 2.0 TB/s nominal (NVIDIA A100 white paper). L2: 5.4 TB/s measured
    # (the same benchmark, a100_80.txt); memory 1.73 TB/s (same source). Latencies: as above.
    "sm_80": Machine(
        multiprocessors=108,
        hertz=1.41e9,
        wgmma_macs=0,
        mma_macs=1024,
        pipes={"fma": 2, "imad": 2, "alu": 2, "mufu": 8, "shuffle": 4},
        latencies={"shared": 29, "near": 38, "memory": 262, "shuffle": 23, "mufu": 20, "mma": 33},
        shared_bytes=128,
        l2_bytes=35,
        port_bytes=64,
        hbm_latency=466,
        hbm_bytes_per_second=1.73e12,
    ),
}
