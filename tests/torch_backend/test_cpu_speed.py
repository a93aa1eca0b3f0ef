"""The torch backend compared with a direct call of torch's function, and the time to import the package.

Times are processor time of one thread, so other load on the machine hardly affects them; a ratio compares medians of
interleaved runs. tests/torch_backend/test_mask_plan.py counts scores, which explain the difference.
"""

from __future__ import annotations

import compileall
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fusedattn
from bench import cpu
from fusedattn import attention, masks
from fusedattn.masks import Mask

NHEADS, SEQLEN, HEAD_DIM = 2, 2048, 64
AT = torch.arange(SEQLEN)[None]

ATTEMPTS = 6

# A mask, and the time allowed relative to torch's function with the same mask.
CASES: dict[str, tuple[Mask, float]] = {
    "full": (masks.full(), 1.05),
    "causal": (masks.causal(), 1.05),
    "half padded": (masks.padding(AT < SEQLEN // 2), 1 / 1.7),
    "half padded to the left": (masks.padding(AT >= SEQLEN // 2), 1 / 1.7),
    "causal, half padded": (masks.causal() & masks.padding(AT < SEQLEN // 2), 1 / 1.8),
    "causal, half padded to the left": (masks.causal() & masks.padding(AT >= SEQLEN // 2), 1 / 2.5),
    "unevenly padded": (masks.padding(torch.tensor([[SEQLEN // 2], [SEQLEN // 4]]) > AT), 1 / 1.7),
    "a window": (masks.window(127, 0), 1 / 2),
    "strided": (masks.strided(45), 1 / 2),
    "fixed": (masks.fixed(64, 8), 1 / 2),
    "dilated": (masks.dilated(45, 45, 2, global_tokens=4), 1 / 1.3),
    "documents": (masks.causal() & masks.documents(AT // (SEQLEN // 8)), 1 / 3),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ratio(function: Callable[[], object], direct: Callable[[], object], rounds: int, bound: float) -> float:
    """The ratio of both times; repeated while above `bound`, and then the smallest one."""
    ratios: list[float] = []
    while len(ratios) < ATTEMPTS and not any(x <= bound for x in ratios):
        times: dict[Callable[[], object], list[float]] = {function: [], direct: []}
        for i in range(rounds + 1):
            for call, of_call in times.items():
                start = time.thread_time()
                call()
                if i:  # the first warms up
                    of_call.append(time.thread_time() - start)
        ratios.append(statistics.median(times[function]) / statistics.median(times[direct]))
    return min(ratios)


@pytest.mark.thorough
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", CASES)
def test_beside_torch(name, backward):
    mask, bound = CASES[name]
    batch = 1 if mask.valid is None else mask.valid.shape[0]
    given: dict[str, object] = {}
    shape = batch, NHEADS, SEQLEN, HEAD_DIM
    if name in ("full", "causal"):  # all scores are computed, and short sequences are harder
        shape = batch, 2 * NHEADS, SEQLEN // 2, HEAD_DIM
        given["is_causal"] = name == "causal"
    else:
        given["attn_mask"] = mask.dense(SEQLEN, SEQLEN)
    q, k, v, dout = (torch.randn(shape) for _ in range(4))

    def ours() -> torch.Tensor:
        return attention(q, k, v, mask=mask, backend="torch")

    def direct() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, **given)

    if not backward:
        assert ratio(ours, direct, 7, bound) <= bound
        return
    for x in (q, k, v):
        x.requires_grad_()
    found = ratio(
        lambda: torch.autograd.grad(ours(), (q, k, v), dout),
        lambda: torch.autograd.grad(direct(), (q, k, v), dout),
        3,
        bound,
    )
    assert found <= bound


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("shape", "requires_grad", "device", "bound"),
    [((8, 64, 64), False, "cpu", 1.3), ((8, 64, 64), True, "cpu", 1.5), ((2, 8, 16), False, "meta", 1.5)],
    ids=["plain", "with a gradient", "without data"],
)
def test_the_cost_of_a_short_call(shape, requires_grad, device, bound, causal):
    """The overhead is three sums, which look for NaN, and attribute reads."""
    q, k, v = (torch.randn(1, *shape, device=device, requires_grad=requires_grad) for _ in "qkv")
    mask = masks.causal() if causal else None

    def ours() -> torch.Tensor:
        return attention(q, k, v, mask=mask, backend="torch")

    def direct() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    assert ratio(ours, direct, 200, bound) <= bound


# Work of bench.cpu, and the time allowed relative to the faster one of torch's function and eager attention.
# Processors differ: one takes 1.31 and 2.09 for two of them, which are therefore allowed a fifth more.
BESIDE_BOTH = {
    "a random mask of each head": 1.3,
    "block_sparse, a quarter visible": 1.3 * 1.2,
    "NaN in padding": 1.3,
    "return_lse, causal": 1.3,
    "soft-cap, causal": 1.3,
    "sinks": 1.3,
    "dropout": 2.0 * 1.2,
}


@pytest.mark.thorough
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", BESIDE_BOTH)
def test_beside_torch_and_eager(name, backward):
    q, k, v, dout = (torch.randn(2, 8, 256, HEAD_DIM) for _ in range(4))
    work = dict(cpu.works(256, k, v))[name]
    runs = {x: run() for x, run in cpu.contestants(work, q, k, v, dout if backward else None)}
    ours = runs.pop("fusedattn")
    bound = BESIDE_BOTH[name]
    assert max(ratio(ours, other, 9, bound) for other in runs.values()) <= bound


@pytest.mark.thorough
def test_an_import_is_short(tmp_path):
    """Less than a twelfth of torch's import, in processor time, from compiled files as in an installed package."""
    package = shutil.copytree(Path(fusedattn.__file__).parent, tmp_path / "fusedattn")
    assert compileall.compile_dir(package, quiet=1)
    code = (
        "import time; start = time.process_time(); import torch; before = time.process_time(); import fusedattn; "
        "print(fusedattn.__file__, (time.process_time() - before) / (before - start))"
    )
    ratios = []
    for _ in range(3):
        printed = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True)
        path, _, ratio_to_torch = printed.strip().rpartition(" ")
        assert Path(path).parent == package
        ratios.append(float(ratio_to_torch))
    assert statistics.median(ratios) < 1 / 12
