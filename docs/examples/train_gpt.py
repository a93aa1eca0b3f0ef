"""Train a small GPT with fused attention on a text of yours, byte by byte, then let it write.

    python docs/examples/train_gpt.py --text my.txt --save my.pt

If the file named by --save exists, training goes on from there, with the same batches as without a break.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedattn import fuse
from fusedattn.transformer import GPTModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N_BYTES = 256  # each byte is a token


def read_text(path: Path | None) -> Tensor:
    """The bytes of a file as uint8 tokens; by default those of Python's standard library."""
    if path is None:
        text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    else:
        text = path.read_bytes()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def random_batch(tokens: Tensor, batch: int, seqlen: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Windows of the text and the byte after each of their bytes, both ``(batch, seqlen)``."""
    starts = torch.randint(len(tokens) - seqlen, (batch, 1), generator=generator)
    windows = tokens[starts + torch.arange(seqlen + 1)].to(DEVICE, torch.long)
    return windows[:, :-1], windows[:, 1:]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, metavar="FILE", help="by default Python's standard library")
    parser.add_argument("--steps", type=int, default=500, help="train until this step")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seqlen", type=int, default=128)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--n-layers", type=int, default=2)
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--new", type=int, default=120, help="bytes to write in the end")
    parser.add_argument("--save", type=Path, metavar="FILE", help="a checkpoint: read if it exists, written in the end")
    parser.add_argument("--compile", action="store_true", help="train the model under torch.compile")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    tokens = read_text(args.text)
    if len(tokens) <= args.seqlen:
        raise SystemExit(f"--text: got {len(tokens)} bytes, needed are more than --seqlen = {args.seqlen}")
    max_len = max(args.seqlen, len(args.prompt.encode()) + args.new)
    model = GPTModel(N_BYTES, args.d_model, n_heads=4, n_layers=args.n_layers, max_len=max_len, positions="rotary")
    model = fuse(model).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    batches = torch.Generator().manual_seed(0)
    done = 0
    if args.save is not None and args.save.exists():
        checkpoint = torch.load(args.save, map_location=DEVICE)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        batches.set_state(checkpoint["batches"].cpu())
        done = checkpoint["step"]
        print(f"resumed after step {done}")

    step_model = torch.compile(model) if args.compile else model  # both have the same parameters
    for step in range(done + 1, args.steps + 1):
        ids, targets = random_batch(tokens, args.batch, args.seqlen, batches)
        loss = F.cross_entropy(step_model(ids).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step in (1, args.steps) or step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f} nats per byte")

    if args.save is not None:
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(checkpoint | {"batches": batches.get_state(), "step": max(done, args.steps)}, args.save)
        print(f"saved {args.save}")

    prompt = torch.tensor([list(args.prompt.encode())], device=DEVICE)  # (1, seqlen)
    written = model.generate(prompt, args.new, temperature=0.8, top_k=40)[0]
    print("---", bytes(written.tolist()).decode(errors="replace"), sep="\n")


if __name__ == "__main__":
    main()
