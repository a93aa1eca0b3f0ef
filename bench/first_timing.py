"""A first timing of forward and backward against the backends of F.scaled_dot_product_attention.

    python -m bench.first_timing [--device cuda] [--rounds 30] [--seqlens 1024 4096] [--out bench/results]

Each case runs every implementation in turn, round after round, so that drifting clocks hit all alike; L2 is
flushed between runs. What is written are medians, and ratios to the fastest torch backend that ran.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusedattn
from fusedattn import masks

PEERS = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}
L2_BYTES = 256 * 2**20  # more than the L2 cache of any GPU


@dataclass(frozen=True)
class Case:
    """One attention layer; `padded` is the share of every sequence that is padding, on the right."""

    seqlen: int
    head_dim: int = 128
    nheads: int = 16
    nheads_kv: int = 16
    tokens: int = 16384
    causal: bool = False
    padded: float = 0.0
    dtype: str = "bfloat16"

    @property
    def batch(self) -> int:
        """As many sequences as make up `tokens`."""
        return max(1, self.tokens // self.seqlen)

    def flops(self, backward: bool) -> float:
        """The usual count: 4 B H N M D forward and 10 backward, half of it when causal, padding not deducted."""
        products = self.batch * self.nheads * self.seqlen**2 * self.head_dim
        return (10 if backward else 4) * products * (0.5 if self.causal else 1.0)


def cases(seqlens: list[int], tokens: int) -> list[Case]:
    """Causal and not, two head_dims, grouped queries, and half-padded batches."""
    found = []
    for seqlen in seqlens:
        for causal in (False, True):
            found += [
                Case(seqlen, tokens=tokens, causal=causal),
                Case(seqlen, tokens=tokens, causal=causal, head_dim=64),
                Case(seqlen, tokens=tokens, causal=causal, nheads_kv=4),
                Case(seqlen, tokens=tokens, causal=causal, padded=0.5),
            ]
    return found


def implementations(case: Case, device: str) -> dict[str, Callable[[], tuple[Tensor, list[Tensor], Tensor]]]:
    """Name -> a function that runs the forward and returns (out, inputs, gradient of out)."""
    dtype = getattr(torch, case.dtype)

    def make(nheads: int) -> Tensor:
        return torch.randn(case.batch, nheads, case.seqlen, case.head_dim, dtype=dtype, device=device).requires_grad_()

    q, k, v = make(case.nheads), make(case.nheads_kv), make(case.nheads_kv)
    dout = torch.randn_like(q)
    mask = masks.causal() if case.causal else masks.full()
    if case.padded:
        visible = torch.arange(case.seqlen, device=device) < round(case.seqlen * (1 - case.padded))
        mask = mask & masks.padding(visible.expand(case.batch, -1).contiguous())
    dense = mask.dense(case.seqlen, case.seqlen, device=device) if case.padded else None

    def ours() -> tuple[Tensor, list[Tensor], Tensor]:
        return fusedattn.attention(q, k, v, mask=mask), [q, k, v], dout

    def peer(backend: SDPBackend) -> Callable[[], tuple[Tensor, list[Tensor], Tensor]]:
        def run() -> tuple[Tensor, list[Tensor], Tensor]:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=dense,
                    is_causal=case.causal and dense is None,
                    enable_gqa=case.nheads != case.nheads_kv,
                )
            return out, [q, k, v], dout

        return run

    return {"fusedattn": ours, **{name: peer(backend) for name, backend in PEERS.items()}}


def milliseconds(device: str, flush: Tensor, work: Callable[[], object]) -> float:
    """One timed run of ``work``, after a flush of the L2 cache."""
    flush.zero_()
    if device != "cuda":
        start = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - start)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def measure(case: Case, device: str, rounds: int) -> dict[str, object]:
    """Medians of every implementation that can run the case; why not, for the others."""
    flush = torch.empty(L2_BYTES if device == "cuda" else 1, dtype=torch.uint8, device=device)
    runnable, refused = {}, {}
    for name, run in implementations(case, device).items():
        try:
            out, inputs, dout = run()
            torch.autograd.grad(out, inputs, dout)
            runnable[name] = run
        except (RuntimeError, NotImplementedError) as error:
            refused[name] = str(error).splitlines()[0]
    forward: dict[str, list[float]] = {name: [] for name in runnable}
    backward: dict[str, list[float]] = {name: [] for name in runnable}
    for _ in range(rounds):
        for name, run in runnable.items():
            with torch.no_grad():
                forward[name].append(milliseconds(device, flush, run))
            out, inputs, dout = run()
            grad = lambda out=out, inputs=inputs, dout=dout: torch.autograd.grad(out, inputs, dout)  # noqa: E731
            backward[name].append(milliseconds(device, flush, grad))
    row: dict[str, object] = {"case": asdict(case) | {"batch": case.batch}, "refused": refused}
    for direction, times in (("forward", forward), ("backward", backward)):
        medians = {name: median(values) for name, values in times.items()}
        best = min((ms for name, ms in medians.items() if name != "fusedattn"), default=None)
        row[direction] = {
            "ms": medians,
            "tflops": {name: case.flops(direction == "backward") / ms / 1e9 for name, ms in medians.items()},
            "speedup_over_best_peer": None if best is None else best / medians["fusedattn"],
        }
    return row


def environment(device: str) -> dict[str, str]:
    """What the numbers were measured on."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "commit": commit or "unknown",
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a line a case, and write the JSON file."""
    parser = argparse.ArgumentParser(prog="python -m bench.first_timing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seqlens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--tokens", type=int, default=16384, help="batch * seqlen")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("first_timing: no CUDA device; nothing measured", file=sys.stderr)
        return 1
    rows = []
    for case in cases(options.seqlens, options.tokens):
        row = measure(case, options.device, options.rounds)
        rows.append(row)
        ratios = " ".join(f"{way} {row[way]['speedup_over_best_peer']:.2f}x" for way in ("forward", "backward"))  # type: ignore[index]
        print(f"{case}: {ratios} of the fastest torch backend", flush=True)
    found = environment(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"first-timing-{found['device'].replace(' ', '-')}-{found['commit'][:10]}.json"
    path.write_text(json.dumps({"environment": found, "results": rows}, indent=1) + "\n")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
