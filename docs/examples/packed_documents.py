"""Train on documents that lie one after another in a single row, without padding, and that do not see each other.

    python docs/examples/packed_documents.py

The same loss comes from documents one by one, from a padded batch and from the packed row; the packed row is faster
than the padded batch.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fusedattn import fuse, masks
from fusedattn.transformer import GPTModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N_BYTES = 256  # each byte is a token


def documents_of_library(n: int, longest: int) -> list[Tensor]:
    """Starts of files of Python's standard library as ids ``(seqlen,)``, from a sixteenth of `longest` to all of it."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.stat().st_size)[-n:]
    lengths = torch.logspace(0, -4, n, base=2.0).mul(longest).int().tolist()
    return [torch.tensor(list(path.read_bytes()[:m])) for path, m in zip(paths, lengths, strict=True)]


def packed(documents: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, targets and the number of the document of each token, all ``(1, total)``."""
    ids = torch.cat([x[:-1] for x in documents])
    targets = torch.cat([x[1:] for x in documents])  # never the first token of the next document
    numbers = torch.cat([torch.full((len(x) - 1,), i) for i, x in enumerate(documents)])
    return ids[None].to(DEVICE), targets[None].to(DEVICE), numbers[None].to(DEVICE)


def padded(documents: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, targets (-100 where there is none) and the mask of real tokens, all ``(batch, longest)``."""
    ids = pad_sequence([x[:-1] for x in documents], batch_first=True)
    targets = pad_sequence([x[1:] for x in documents], batch_first=True, padding_value=-100)
    return ids.to(DEVICE), targets.to(DEVICE), (targets != -100).to(DEVICE)


def loss_of(model: GPTModel, ids: Tensor, targets: Tensor, mask: masks.Mask | None) -> Tensor:
    """The mean over all tokens that have a target."""
    return F.cross_entropy(model(ids, mask).flatten(0, 1), targets.flatten())


def ratio_of_times(first: Callable[[], Tensor], second: Callable[[], Tensor], n: int) -> float:
    """Medians of forward and backward, taken in turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(n):
        for function, own in zip((first, second), seconds, strict=True):
            start = time.perf_counter()
            function().backward()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            own.append(time.perf_counter() - start)
    return median(seconds[0]) / median(seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--longest", type=int, default=768, help="tokens of the longest document")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runs", type=int, default=7, help="of each way, to compare their times")
    args = parser.parse_args()
    torch.manual_seed(0)
    documents = documents_of_library(args.documents, args.longest)
    ids, targets, numbers = packed(documents)
    rows, row_targets, real = padded(documents)
    # GPTModel adds the causal mask. Rotary positions count on through the row: only their differences matter.
    model = fuse(GPTModel(N_BYTES, 128, 4, 2, max_len=ids.shape[1], positions="rotary")).to(DEVICE)
    own_documents, own_tokens = masks.documents(numbers), masks.padding(real)
    print(f"{args.documents} documents: {ids.numel()} tokens packed, {rows.numel()} padded")

    def packed_loss() -> Tensor:
        return loss_of(model, ids, targets, own_documents)

    def padded_loss() -> Tensor:
        return loss_of(model, rows, row_targets, own_tokens)

    with torch.no_grad():
        sums = [loss_of(model, x[None, :-1].to(DEVICE), x[None, 1:].to(DEVICE), None) * (len(x) - 1) for x in documents]
        apart = sum(sums) / ids.numel()
        for way, loss in (("padded", padded_loss()), ("packed", packed_loss())):
            torch.testing.assert_close(loss, apart)
            print(f"{way}: loss {loss:.6f}, agrees with documents one by one to {(loss - apart).abs():.1e}")
        other = ids.where(numbers != 0, (ids + 1) % N_BYTES)  # another first document
        change = (model(other, own_documents) - model(ids, own_documents)).abs().amax(-1)
        print(f"another first document changes the logits of the others by {change[numbers != 0].max():.1e}")

    ratio = ratio_of_times(packed_loss, padded_loss, args.runs)
    print(f"forward and backward: packed takes {ratio:.2f} times as long as padded")

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        loss = packed_loss()
        loss.backward()
        optimizer.step()
        if step in (1, args.steps):
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
