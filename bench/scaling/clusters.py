"""Clusters: what one GPU computes, measured, and what links carry, as others report it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from bench.report import results
from bench.report.results import Report
from bench.scaling.stages import BACKWARD, Group, Transfer

RESULTS = Path(__file__).parents[1] / "results"
H200_RESULTS = RESULTS / "nvidia-h200/2026-11-27-565a2b0.json"
H100_RESULTS = RESULTS / "nvidia-h100-80gb-hbm3/2026-11-27-0245134.json"
FORWARD_OF = "forward, bfloat16, as many KV heads, head_dim 128, {}, seqlen {}"
BOTH_OF = "backward, bfloat16, as many KV heads, forward and backward, head_dim 128, {}, seqlen {}"
SEQLEN = 16384
FLASH, FLASH_SEQLEN = "torch.sdpa-flash", 8192

# Bytes a second of a GPU in one direction. Of 450 GB/s of the line NCCL carries 370, about 20 % being protocol
# (github.com/NVIDIA/nccl-tests, issue 212). H800: 200 GB/s, of which 160 were measured (github.com/deepseek-ai/DeepEP,
# issue 16).
NVLINK_LINE, NVLINK = 450e9, 370e9
H800_NVLINK_LINE, H800_NVLINK = 200e9, 160e9
# A ConnectX-7 at 400 Gb/s: 48 to 49 GB/s (github.com/NVIDIA/nccl-tests, issue 267).
NETWORK_LINE, NETWORK = 50e9, 48e9
# NCCL's own model, ring, protocol Simple (github.com/NVIDIA/nccl, src/graph/tuning.cc at 01afd20): seconds to start an
# operation, and of each message by NVLink and by network.
START, NVLINK_LATENCY, NETWORK_LATENCY = 8.4e-6, 3.4e-6, 9.6e-6
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Cluster:
    """GPUs, in nodes; rates are those of one GPU.

    Attributes:
        forward, backward: operations a second of causal attention.
        memory: bytes a second that a copy reads and writes.
        nvlink, network: bytes a second in one direction, to other GPUs of the node and to other nodes.
    """

    name: str
    forward: float
    backward: float
    memory: float
    nvlink: float
    network: float = NETWORK
    gpus_per_node: int = GPUS_PER_NODE

    def seconds(self, transfer: Transfer) -> float:
        """The time of a transfer that has the links to itself.

        All ranks of a group send at the same time. NCCL gathers in a ring that enters a node through the adapters of
        all its ranks; messages to single ranks leave through the adapter of the sender.
        """
        size, near = transfer.group.size, self._in_a_node(transfer.group)
        if near == size:
            return START + transfer.messages * NVLINK_LATENCY + transfer.sent / self.nvlink
        if transfer.pattern == "pass":
            return START + NETWORK_LATENCY + transfer.sent / self.network
        nodes = size // near
        if transfer.pattern == "gather":
            rate = min(self.nvlink, near * self.network)
            return START + (size - nodes) * NVLINK_LATENCY + (nodes - 1) * NETWORK_LATENCY + transfer.sent / rate
        of_one = transfer.sent / (size - 1)
        latency = (near - 1) * NVLINK_LATENCY + (size - near) * NETWORK_LATENCY
        return START + latency + max((near - 1) * of_one / self.nvlink, (size - near) * of_one / self.network)

    def _in_a_node(self, group: Group) -> int:
        """The ranks of a group in one node."""
        return max(1, min(group.size, self.gpus_per_node // group.stride))


@lru_cache
def h200() -> Cluster:
    """H200s with the rates of this package that docs/performance.md has for one of them."""
    report = results.read_green(H200_RESULTS)
    forward, both = (_timed(report, name.format("causal", SEQLEN)) for name in (FORWARD_OF, BOTH_OF))
    operations = forward["amount"] * 1e12
    seconds = _seconds(both) - _seconds(forward)
    return Cluster(
        "H200", operations / _seconds(forward), BACKWARD * operations / seconds,
        report["ceilings"]["copy"] * 1e9, NVLINK,
    )  # fmt: skip


def h800(operations: float, forward: float, both: float) -> Cluster:
    """H800s of which one takes `forward` seconds for these operations, and `both` with their backward.

    They have the memory of an H100 on which this package was timed.
    """
    memory = results.read_green(H100_RESULTS)["ceilings"]["copy"] * 1e9
    return Cluster("H800", operations / forward, BACKWARD * operations / (both - forward), memory, H800_NVLINK)


def unmasked_over_causal() -> tuple[float, float]:
    """The rates of torch's flash kernel without a mask over those under a causal one, forward and backward, on an H200.

    ring-flash-attention calls kernels of the same kind.
    """
    report = results.read_green(H200_RESULTS)
    panels = ("not causal", "causal")
    forward = [_timed(report, FORWARD_OF.format(panel, FLASH_SEQLEN)) for panel in panels]
    both = [_timed(report, BOTH_OF.format(panel, FLASH_SEQLEN)) for panel in panels]
    whole, half = (_seconds(row, FLASH) for row in forward)
    whole_both, half_both = (_seconds(row, FLASH) for row in both)
    return 2 * half / whole, 2 * (half_both - half) / (whole_both - whole)


def _timed(report: Report, name: str) -> Report:
    (row,) = (row for row in report["results"] if row["name"] == name)
    return row


def _seconds(row: Report, contestant: str = "fusedattn") -> float:
    return row["contestants"][contestant]["ms"]["median"] / 1e3
