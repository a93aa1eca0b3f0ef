"""The attention of one rectangle of the scores, and the tensors of a call that may get gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from fusedattn import backends
from fusedattn.biases import Bias
from fusedattn.distributed.cutting import Rectangle, cut
from fusedattn.options import Options
from fusedattn.prepare import prepared
from fusedattn.support import Backend


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, part: Rectangle, backend: Backend
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(out, lse, largest)`` of a rectangle; largest is None if not asked for.

    Args:
        q, k, v: the queries, keys and values of the rectangle.
        options: of the call, before they are cut.
    """
    own = cut(options, part)
    own.return_lse = True
    q, k, v, backend = prepared(q, k, v, own, backend)
    out, lse, largest = backends.attention(q, k, v, own, backend)
    assert lse is not None
    return out, lse, largest


N_LEARNED = 5


def learned_of(options: Options) -> list[Tensor | None]:
    """The tensors besides q, k and v that may get gradients: bias, slopes, relative bias, sinks, args of score_mod."""
    bias = options.bias or Bias()
    learned = None if options.score_mod is None else options.score_mod.learned
    return [bias.tensor, bias.slopes, bias.relative, options.sinks, learned]


def with_learned(options: Options, learned: Sequence[Tensor | None]) -> Options:
    """`options` with other tensors, in the order of :func:`learned_of`."""
    tensor, slopes, relative, sinks, args = learned
    score_mod = options.score_mod
    if score_mod is not None and args is not None:
        score_mod = score_mod.with_learned(args)
    bias = None if options.bias is None else Bias(tensor, slopes, relative)
    return replace(options, bias=bias, sinks=sinks, score_mod=score_mod)


def constants_of(options: Options) -> list[Tensor]:
    """The other tensors of a call: those of the mask, rope and score function, and the seed of dropout."""
    rope, score_mod = options.rope, options.score_mod
    found = list(options.mask.tensors().values())
    if rope is not None:
        found += [x for x in (rope.cos, rope.sin, rope.positions_q, rope.positions_k) if x is not None]
    if score_mod is not None:
        found += score_mod.tensors().values()
    return found if options.dropout_seed is None else [*found, options.dropout_seed]
