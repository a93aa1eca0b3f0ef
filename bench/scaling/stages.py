"""What a rank computes and sends in each mode of fusedattn.distributed, as stages that follow one another.

Causal, self-attention, the same number of tokens on each rank, zigzag where tokens are split. n ranks pass keys and
values around or gather them; u ranks share the heads. tests/distributed/test_counted.py compares all bytes with
those of the real modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Mode = Literal["ring", "all_gather", "ulysses", "ring, ulysses", "all_gather, ulysses"]
MODES: tuple[Mode, ...] = ("ring", "all_gather", "ulysses", "ring, ulysses", "all_gather, ulysses")

WIDE = 4  # bytes of float32, in which the ring merges outputs and sums gradients
BACKWARD = 2.5  # operations of a backward for each one of a forward: five matrix products for two


@dataclass(frozen=True)
class Model:
    """An attention: its heads, and the bytes of an element of q, k, v and out."""

    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int = 2


@dataclass(frozen=True)
class Share:
    """The tokens of one rank in one attention; q and out have `q` elements, k and v have `k` each."""

    model: Model
    tokens: float

    @property
    def q(self) -> float:
        return self.tokens * self.model.heads * self.model.head_dim

    @property
    def k(self) -> float:
        return self.tokens * self.model.kv_heads * self.model.head_dim


@dataclass(frozen=True)
class Group:
    """Ranks that exchange tensors: every `stride`-th rank."""

    size: int
    stride: int = 1


@dataclass(frozen=True)
class Transfer:
    """A message to the next rank ("pass"), to all others the same one ("gather"), or to each its own ("exchange").

    Attributes:
        sent: bytes from this rank to all others together.
    """

    pattern: Literal["pass", "gather", "exchange"]
    group: Group
    sent: float

    @property
    def messages(self) -> int:
        return 1 if self.pattern == "pass" else self.group.size - 1


@dataclass(frozen=True)
class Stage:
    """Work of a rank, and transfers that run beside it.

    Attributes:
        forward, backward: operations of matrix products, of a forward and of a backward.
        moved: bytes that operators besides attention read from memory and write to it: each operand of
            head_dim features once, each result once, views nothing.
    """

    forward: float = 0.0
    backward: float = 0.0
    moved: float = 0.0
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True)
class Layout:
    """How ranks share an attention: `n` of them the tokens by `tokens_by`, groups of `u` adjacent ones the heads."""

    tokens_by: Literal["ring", "all_gather"] | None
    n: int
    u: int

    @property
    def of_tokens(self) -> Group:
        return Group(self.n, self.u)

    @property
    def of_heads(self) -> Group:
        return Group(self.u)


def layout(mode: Mode, ranks: int, per_node: int) -> Layout:
    """The layout of a mode; with two dimensions, the heads are shared within a node."""
    if mode == "ulysses":
        return Layout(None, 1, ranks)
    if mode == "ring":
        return Layout("ring", ranks, 1)
    if mode == "all_gather":
        return Layout("all_gather", ranks, 1)
    return Layout("ring" if mode == "ring, ulysses" else "all_gather", ranks // per_node, per_node)


def share_of_heads(share: Share, u: int) -> Share:
    """The tokens of `u` ranks, in the heads that one of them gets.

    Raises:
        ValueError: the heads cannot be shared evenly.
    """
    model = share.model
    heads, group = model.heads // u, model.heads // model.kv_heads
    if model.heads % u or (heads % group and group % heads):
        raise ValueError(
            f"model: got {model.heads} query heads and {model.kv_heads} KV heads for {u} ranks that share them, "
            "allowed are multiples of the ranks, and ranks that have whole groups of query heads or a part of one"
        )
    # Ranks with query heads of one KV head each get a copy of it.
    kv_heads = max(1, heads // group)
    return Share(replace(model, heads=heads, kv_heads=kv_heads), share.tokens * u)


def operations(share: Share, n: int) -> float:
    """Operations of a forward on one of `n` ranks that share the tokens of a causal attention."""
    seqlen = share.tokens * n
    return 4 * seqlen * seqlen * share.model.head_dim * share.model.heads / 2 / n


def forward(share: Share, plan: Layout) -> list[Stage]:
    """The stages of a forward. q, k and v lie in memory by token, as models have them."""
    if plan.u == 1:
        return _forward(share, plan, by_token=True)
    e, own = share.model.element_bytes, share_of_heads(share, plan.u)
    k = own.k  # with the copies of KV heads
    # Contiguous parts, one tensor of all, tokens or heads of all ranks joined.
    of_q = Stage(moved=(_copied(own.model.heads) + 4) * e * share.q)
    of_k = Stage(moved=(_copied(own.model.kv_heads) + 4) * e * k)
    return [
        of_q,
        _exchange(e * share.q, plan.of_heads),
        *(stage for _ in "kv" for stage in (of_k, _exchange(e * k, plan.of_heads))),
        *_forward(own, plan, by_token=False),
        of_q,
        _exchange(e * share.q, plan.of_heads),
    ]


def backward(share: Share, plan: Layout, recomputed: int) -> list[Stage]:
    """The stages of a backward; the ring's computes each partial forward again `recomputed` times."""
    if plan.u == 1:
        return _backward(share, plan, recomputed)
    e, u, own = share.model.element_bytes, plan.u, share_of_heads(share, plan.u)
    k = own.k
    of_q, of_k = _copied(own.model.heads), _copied(own.model.kv_heads)
    # Each rank's part of the heads becomes a tensor of all heads, and these are added.
    dq = (of_q + 2) * e * share.q + (u + 1) * e * share.q + (u - 1) * 3 * e * share.q
    dk = (of_k + 2) * e * k + (u - 1) * 3 * e * share.k
    if own.model.kv_heads < share.model.kv_heads:  # else each part is the whole already
        dk += u * e * share.k + e * k
    return [
        Stage(moved=(of_q + 4) * e * share.q),
        _exchange(e * share.q, plan.of_heads),
        *_backward(own, plan, recomputed),
        *(stage for _ in "kv" for stage in (Stage(moved=dk), _exchange(e * k, plan.of_heads))),
        Stage(moved=dq),
        _exchange(e * share.q, plan.of_heads),
    ]


def _copied(heads: int) -> int:
    """How often tokens of these heads are read and written to make them contiguous; those of one head are."""
    return 2 if heads > 1 else 0


def _exchange(held: float, group: Group) -> Stage:
    """Each rank keeps one part of what it held, and sends the others."""
    return Stage(transfers=(Transfer("exchange", group, held * (group.size - 1) / group.size),))


def _forward(share: Share, plan: Layout, by_token: bool) -> list[Stage]:
    if plan.tokens_by == "ring":
        return _ring_forward(share, plan.of_tokens)
    return _gathered_forward(share, plan.of_tokens, by_token)


def _backward(share: Share, plan: Layout, recomputed: int) -> list[Stage]:
    if plan.tokens_by == "ring":
        return _ring_backward(share, plan.of_tokens, recomputed)
    return _gathered_backward(share, plan.of_tokens)


def _ring_forward(share: Share, group: Group) -> list[Stage]:
    e, n = share.model.element_bytes, group.size
    # out of a part widened 1, out times a weight 2, the part times its weight added 3.
    merged = 6 * WIDE + e
    found = []
    for step in range(n):
        moved = _rectangles(step) * merged * share.q
        if step == 0:
            moved += WIDE * share.q + 4 * e * share.k  # zeros; k and v into a buffer
        if step == n - 1:
            moved += (WIDE + e) * share.q  # out in the dtype of q
        transfers = _keys_and_values(share, group) if step < n - 1 else ()
        found.append(Stage(operations(share, n) / n, 0.0, moved, transfers))
    return found


def _ring_backward(share: Share, group: Group, recomputed: int) -> list[Stage]:
    e, n = share.model.element_bytes, group.size
    # dout times weight 2, out widened 1, less out 3, times dout 3, summed 1, in 16 bits 1, dq added 2.
    of_rows, of_keys = 13 * WIDE + 3 * e, 2 * (2 * WIDE + e)
    gradients = Transfer("pass", group, 2 * WIDE * share.k)
    one = operations(share, n) / n
    found = []
    for step in range(n):
        moved = _rectangles(step) * (of_rows * share.q + of_keys * share.k)
        moved += 2 * WIDE * share.k  # zeros for dk and dv
        if step == 0:
            moved += (2 * WIDE + e) * share.q + 4 * e * share.k  # dout widened, zeros for dq; k and v into a buffer
        else:
            moved += 6 * WIDE * share.k  # gradients of other ranks added
        transfers = _keys_and_values(share, group) if step < n - 1 else ()
        if step > 0:
            transfers += (gradients,)
        found.append(Stage(recomputed * one, BACKWARD * one, moved, transfers))
    last = Stage(moved=(WIDE + e) * (share.q + 2 * share.k))  # gradients in the dtype of q, k and v
    return [*found, Stage(transfers=(gradients,)), last]


def _rectangles(step: int) -> float:
    """How often a rank visits its rows, and as many keys: its own two chunks make three rectangles, others two."""
    return 1.5 if step == 0 else 1.0


def _keys_and_values(share: Share, group: Group) -> tuple[Transfer, ...]:
    return (Transfer("pass", group, 2 * share.model.element_bytes * share.k),)


def _gathered_forward(share: Share, group: Group, by_token: bool) -> list[Stage]:
    e, n = share.model.element_bytes, group.size
    attention = Stage(operations(share, n), moved=2 * e * share.q)  # and chunks of out joined
    if n == 1:
        return [attention]
    # Contiguous, zeros 1, copied 2; chunks of all ranks joined 2.
    own = ((_copied(share.model.kv_heads) if by_token else 0) + 3) * e * share.k
    whole = 2 * e * share.k * n
    gathers = Stage(transfers=(Transfer("gather", group, e * share.k * (n - 1)),))
    return [*(stage for _ in "kv" for stage in (Stage(moved=own), gathers, Stage(moved=whole))), attention]


def _gathered_backward(share: Share, group: Group) -> list[Stage]:
    e, n = share.model.element_bytes, group.size
    if n == 1:
        return [Stage(backward=BACKWARD * operations(share, n))]
    # Gradients of two chunks of queries added: dq of both as a tensor of all, dk and dv of all keys.
    moved = 6 * e * share.q + 2 * 3 * e * share.k * n
    attention = Stage(backward=BACKWARD * operations(share, n), moved=moved)
    # Chunks of a rank joined 2, all ranks' as one tensor 2.
    sent = Stage(moved=4 * e * share.k * n)
    exchanged = Stage(transfers=(Transfer("exchange", group, e * share.k * (n - 1)),))
    summed = Stage(moved=((n - 1) * (2 * WIDE + e) + 2 * (WIDE + e)) * share.k)
    return [attention, *(stage for _ in "kv" for stage in (sent, exchanged, summed))]


def sent_bytes(stages: Sequence[Stage]) -> float:
    """Bytes that a rank sends to others."""
    return sum(transfer.sent for stage in stages for transfer in stage.transfers)


def messages(stages: Sequence[Stage]) -> int:
    """Messages that a rank sends."""
    return sum(transfer.messages for stage in stages for transfer in stage.transfers)


def moved_bytes(stages: Sequence[Stage]) -> float:
    """Bytes that operators besides attention read and write."""
    return sum(stage.moved for stage in stages)


def kept_bytes(share: Share, plan: Layout) -> float:
    """Bytes that a forward keeps for its backward besides q, k, v, out and lse of the rank."""
    e = share.model.element_bytes
    own = share if plan.u == 1 else share_of_heads(share, plan.u)
    kept = 0.0 if plan.u == 1 else e * (own.q + (0 if plan.tokens_by == "all_gather" else 2 * own.k))
    if plan.tokens_by == "ring":
        return kept + WIDE * own.q  # out before it is rounded
    if plan.tokens_by == "all_gather":
        kept += 2 * e * own.k * plan.n
    return kept + e * own.q  # out of each chunk, or of the own heads


# Further shares of k and v in the buffers of a ring, in a forward and in a backward; one of gradients counts as two.
SHARES_UNDER_WAY = (2, 2 + 3 * 2)
