"""Export a fused model, compile it in advance with AOTInductor, load the package and compare.

    python docs/examples/export.py

It needs a C++ compiler on a CPU. The package serves any batch and length.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from torch.export import Dim

from fusedattn import fuse
from fusedattn.transformer import GPTModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--max-len", type=int, default=256)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the two files here")
    args = parser.parse_args()
    if DEVICE == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise SystemExit("AOTInductor needs a C++ compiler, such as g++")
    torch.manual_seed(0)
    model = GPTModel(VOCAB, 128, 4, args.layers, max_len=args.max_len, positions="rotary", n_kv_heads=2)
    model = fuse(model).to(DEVICE).eval()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_and_compare(model, folder, args.max_len)


@torch.no_grad()
def write_and_compare(model: GPTModel, folder: Path, max_len: int) -> None:
    # Dim.AUTO leaves a size open: batch and length, neither of which is 1 here, because torch would fix it.
    ids = torch.randint(VOCAB, (2, 10), device=DEVICE)
    program = torch.export.export(model, (ids,), dynamic_shapes={"ids": {0: Dim.AUTO, 1: Dim.AUTO}})
    torch.export.save(program, folder / "model.exported.pt2")
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.compiled.pt2"))

    # Another process that loads a package made on a GPU imports fusedattn first, for the operator of its kernels.
    ways = {
        "exported program": torch.export.load(folder / "model.exported.pt2").module(),
        "compiled package": torch._inductor.aoti_load_package(package),
    }
    for name, run in ways.items():
        largest = 0.0
        for batch, seqlen in ((2, 10), (3, 33), (5, max_len)):
            ids = torch.randint(VOCAB, (batch, seqlen), device=DEVICE)
            actual, expected = run(ids), model(ids)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
            largest = max(largest, (actual - expected).abs().max().item())
        print(f"{name}: logits of three shapes agree with the model to {largest:.1e}")


if __name__ == "__main__":
    main()
