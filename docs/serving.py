"""Serve many requests from one paged cache in fp8, and check every token and logit against runs of one request alone.

    python docs/serving.py

The page docs/serving.md explains it.
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fusedattn import fuse
from fusedattn.transformer import GPTModel

N_REQUESTS = 64
VOCAB = 97
SLOTS = 6  # the requests that a step continues: the batch of every step
PAGE = 16  # tokens
N_PAGES = 16  # one is for idle slots
LONGEST = 56  # tokens of a request
DTYPE = torch.float8_e4m3fn
TOLERANCE = 0.5  # of logits, between keys and values in fp8 and in float32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Request:
    """A prompt, ``(1, seqlen)``, and the logits from which the tokens after it were chosen, ``(VOCAB,)`` each."""

    prompt: Tensor
    n_new: int
    logits: list[Tensor] = field(default_factory=list)

    @property
    def n_pages(self) -> int:
        """The pages for its tokens; the last one is never attended to."""
        return -(-(self.prompt.shape[1] + self.n_new - 1) // PAGE)

    @property
    def is_done(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.logits) == self.n_new

    def tokens(self) -> Tensor:
        """The tokens that were chosen, ``(n_new,)``: the likeliest."""
        return torch.stack(self.logits).argmax(dim=-1)


class Pages:
    """The pages that no request uses. Page 0 is never among them: idle slots write to it."""

    def __init__(self, n_pages: int) -> None:
        self.free = deque(range(1, n_pages))
        self.n_pages = n_pages
        self.n_taken = self.most_used = 0

    def take(self, n: int) -> list[int]:
        """The numbers of `n` pages, or none if fewer are free."""
        if n > len(self.free):
            return []
        self.n_taken += n
        taken = [self.free.popleft() for _ in range(n)]
        self.most_used = max(self.most_used, self.n_pages - 1 - len(self.free))
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """Return pages, whose tokens the next request overwrites."""
        self.free.extend(pages)


class Server:
    """Continues up to SLOTS requests at a time, by one token in each step."""

    def __init__(self, model: GPTModel) -> None:
        self.model = model
        self.pages = Pages(N_PAGES)
        self.table = torch.zeros(SLOTS, -(-LONGEST // PAGE), dtype=torch.int32, device=DEVICE)
        self.cache = model.make_paged_cache(self.table, N_PAGES, PAGE, dtype=DTYPE)
        self.newest = torch.zeros(SLOTS, 1, dtype=torch.long, device=DEVICE)
        self.running: dict[int, tuple[Request, list[int]]] = {}  # slot -> a request and its pages
        self.n_steps = 0

    def serve(self, requests: Sequence[Request]) -> None:
        """Answer the requests in order; one enters as soon as a slot and its pages are free."""
        waiting = deque(requests)
        while waiting or self.running:
            while waiting and self.enter(waiting[0]):
                waiting.popleft()
            for slot in [slot for slot, (request, _) in self.running.items() if request.is_done]:
                self.leave(slot)
            if self.running:
                self.step()

    def enter(self, request: Request) -> bool:
        """Compute a prompt in a free slot; returns whether there was room."""
        slot = next((slot for slot in range(SLOTS) if slot not in self.running), None)
        pages = [] if slot is None else self.pages.take(request.n_pages)
        if slot is None or not pages:
            return False
        self.running[slot] = request, pages
        self.table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self.cache.lengths[slot] = 0
        logits = self.model(request.prompt, cache=self.cache.sequences(slot, slot + 1))
        self.add(slot, logits[0, -1])
        return True

    def step(self) -> None:
        """Add a token to every running request; the other slots compute something that nobody reads."""
        self.n_steps += 1
        logits = self.model(self.newest, cache=self.cache)[:, -1]
        for slot in range(SLOTS):
            if slot in self.running:
                self.add(slot, logits[slot])
            else:
                self.cache.lengths[slot] = 0

    def add(self, slot: int, logits: Tensor) -> None:
        """Choose the next token of a request."""
        self.running[slot][0].logits.append(logits)
        self.newest[slot] = logits.argmax()

    def leave(self, slot: int) -> None:
        """Free a slot and its pages."""
        _, pages = self.running.pop(slot)
        self.pages.give(pages)
        self.table[slot] = 0
        self.cache.lengths[slot] = 0


def alone(model: GPTModel, request: Request) -> Request:
    """The same request without others, in the first slot and in a contiguous cache of its own."""
    own = Request(request.prompt, request.n_new)
    cache = model.make_cache(SLOTS, LONGEST, dtype=DTYPE)
    own.logits.append(model(own.prompt, cache=cache.sequences(0, 1))[0, -1])
    while not own.is_done:
        cache.lengths[1:] = 0
        newest = own.logits[-1].argmax().expand(SLOTS, 1)
        own.logits.append(model(newest, cache=cache)[0, -1])
    return own


def unquantised(model: GPTModel, request: Request) -> Request:
    """The logits of the same text with keys and values in float32."""
    text = torch.cat((request.prompt[0], request.tokens()))[None, :-1]
    logits = model(text, cache=model.make_cache(1, LONGEST))[0]
    return Request(request.prompt, request.n_new, list(logits[-request.n_new :]))


def make_model() -> GPTModel:
    """A small GPT. It is not trained; its weights are large, so that its texts vary."""
    torch.manual_seed(0)
    model = GPTModel(VOCAB, d_model=64, n_heads=4, n_layers=2, n_kv_heads=2, max_len=LONGEST, positions="rotary")
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.18)
    return fuse(model.to(DEVICE).eval(), backend="triton" if DEVICE == "cuda" else "torch")


def make_requests() -> list[Request]:
    """Prompts of 1 to 40 tokens, and 1 to 16 new ones."""
    draw = random.Random(0)
    sizes = [(draw.randint(1, 40), draw.randint(1, 16)) for _ in range(N_REQUESTS)]
    return [Request(torch.randint(VOCAB, (1, seqlen)).to(DEVICE), n_new) for seqlen, n_new in sizes]


@torch.no_grad()
def main() -> int:
    """Serve, check and print; returns 0 if all tokens are as they should be."""
    torch.set_num_threads(1)  # the products are small
    model, start = make_model(), time.perf_counter()
    requests, server = make_requests(), Server(model)
    server.serve(requests)
    n_new, pages = sum(request.n_new for request in requests), server.pages
    print(f"{N_REQUESTS} requests, {n_new} new tokens, {server.n_steps} steps, {time.perf_counter() - start:.1f} s")
    print(f"{N_PAGES - 1} pages of {PAGE} tokens; at most {pages.most_used} in use, taken {pages.n_taken} times")

    served = torch.cat([torch.stack(request.logits) for request in requests])
    single = torch.cat([torch.stack(alone(model, request).logits) for request in requests])
    exact = torch.cat([torch.stack(unquantised(model, request).logits) for request in requests])
    wrong = int((served.argmax(dim=-1) != single.argmax(dim=-1)).sum())
    difference, error = (served - single).abs().max().item(), (served - exact).abs().max().item()
    changed = int((served.argmax(dim=-1) != exact.argmax(dim=-1)).sum())
    print(f"each request alone: {wrong} of {n_new} tokens differ, logits by at most {difference:.1e}")
    print(
        f"keys and values in float32: {changed} of {n_new} tokens differ, logits by at most {error:.2f} "
        f"(allowed {TOLERANCE}; their standard deviation is {exact.std().item():.2f})"
    )
    returned = len(pages.free) == N_PAGES - 1
    return 0 if wrong == 0 and error <= TOLERANCE and returned else 1


if __name__ == "__main__":
    sys.exit(main())
