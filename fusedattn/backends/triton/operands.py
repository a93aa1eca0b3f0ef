"""All arguments of a call that get no gradient, as a torch operator can carry them: tensors, numbers and a string."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedattn.functions import read, without_learned, written
from fusedattn.indices import four_dimensional
from fusedattn.masks import Band, Mask
from fusedattn.options import Options
from fusedattn.pattern_blocks import BlocksAndRule

NO_BOUND = 2**62
FP8_SCALES = ("", "block", "tensor")  # by :attr:`ConstantSizes.fp8`

# All that gets no gradient, as arguments of the operators.
Flat = tuple[list[Tensor | None], list[int], str, float, float, float, float, bool]


class ConstantTensors(NamedTuple):
    """Tensors without a gradient, or None. :func:`fusedattn.kernels.mask_arguments.mask_arguments`,
    :func:`fusedattn.kernels.dropout.dropout_arguments` and :class:`fusedattn.Rope` give their shapes.

    `cu_seqlens_q` and `cu_seqlens_k` are int32 ``(n_sequences + 1,)``: sequences are packed into a batch of 1. With
    `lengths`, k and v are the memory of a cache, and the tensors from there on those of :class:`fusedattn.KVCache`, but
    `shard`, which is :meth:`fusedattn.shard.Shard.numbers`.
    """

    valid: Tensor | None = None
    allowed: Tensor | None = None
    prefix: Tensor | None = None
    documents_q: Tensor | None = None
    documents_k: Tensor | None = None
    layout: Tensor | None = None
    tree: Tensor | None = None
    dropout_seed: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    positions_q: Tensor | None = None
    positions_k: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    lengths: Tensor | None = None
    block_table: Tensor | None = None
    rows: Tensor | None = None
    left_padding: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    shard: Tensor | None = None


NO_TENSORS = ConstantTensors()
OF_CACHE = ("lengths", "block_table", "rows", "left_padding", "k_scale", "v_scale")


class ConstantSizes(NamedTuple):
    """Integers. The bounds are those of :class:`fusedattn.kernels.mask_arguments.BandBounds`, +-NO_BOUND for none.

    `deterministic` is 0 if gradients may be summed in any order, `num_splits` 0 if the package chooses. `n_sinks` is
    -1 unless a cache overwrites tokens; `rotated` is 1 if its keys are rotated already. `return_max` is 1 if the
    forward returns largest scores, `return_lse` 0 if it need not return lse, which only attention to a cache can omit.
    The next two say how q and k are normalised, if they are: :class:`fusedattn.kernels.qk_norm.Norm`. `fp8` is the
    index in FP8_SCALES of what shares a scale, 0 if nothing is rounded to 8 bits; `fp8_rotated` is 1 if q and k are
    multiplied by a Hadamard matrix before.
    """

    lower_start: int = -NO_BOUND
    upper_start: int = NO_BOUND
    lower_end: int = -NO_BOUND
    upper_end: int = NO_BOUND
    prefix_at_end: int = 0
    block_q: int = 16
    block_k: int = 16
    interleaved: int = 0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    deterministic: int = 1
    num_splits: int = 0
    n_sinks: int = -1
    rotated: int = 0
    return_max: int = 0
    return_lse: int = 1
    norm_of_mean: int = 0
    norm_across_heads: int = 0
    fp8: int = 0
    fp8_rotated: int = 0


class AppendTensors(NamedTuple):
    """The tensors of a cache that are only read, and the starts of packed tokens, int32 ``(batch + 1,)``."""

    lengths: Tensor
    block_table: Tensor | None
    rows: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    positions: Tensor | None
    cu_seqlens: Tensor | None


class Functions(NamedTuple):
    """Keys of users' functions in :mod:`fusedattn.functions`, and the numbers of their args; empty for none.

    `readers` has the functions that give learned args their gradient.
    """

    mask: str = ""
    mask_numbers: str = ""
    score: str = ""
    derivative: str = ""
    score_numbers: str = ""
    readers: str = ""


NO_FUNCTIONS = Functions()


@dataclass(eq=False)  # not frozen: making a frozen one takes a fiftieth of a short call
class Constants:
    """All arguments of a call that get no gradient; no tuple, because ``torch.func`` would transform its elements.

    Attributes:
        mask_args, score_args: tensors and numbers for the user's functions.
        scale: positive.
        softcap, dropout_p, norm_eps: 0 for none.
        keep_residual: keep the rounding residual of 16-bit outputs; gradients are less precise without it.
    """

    tensors: ConstantTensors
    sizes: ConstantSizes
    mask_args: tuple[Any, ...]
    score_args: tuple[Any, ...]
    functions: Functions
    scale: float
    softcap: float
    dropout_p: float
    norm_eps: float
    keep_residual: bool

    @property
    def hides_by_tensors(self) -> bool:
        """Whether the mask is more than bounds."""
        valid, allowed, prefix, documents_q, _, layout, tree, *_ = self.tensors
        in_tensors = not (valid is None and allowed is None and prefix is None and documents_q is None)
        return in_tensors or layout is not None or tree is not None or bool(self.functions.mask)

    @property
    def numbers(self) -> Hashable:
        """The part that launches depend on besides the tensors, if no function has arguments."""
        if self.tensors is NO_TENSORS:  # made by `_of_numbers`
            return self
        return self.sizes, self.functions, self.scale, self.softcap, self.dropout_p, self.norm_eps

    @property
    def changes_scores(self) -> bool:
        """Whether scores are capped, or a function of the user's changes them."""
        return bool(self.softcap or self.functions.score)

    def flat(self) -> Flat:
        """As arguments of the operators."""
        args = (*self.mask_args, *self.score_args)
        return (
            [*self.tensors, *(x for x in args if isinstance(x, Tensor))],
            list(self.sizes),
            "\n".join(self.functions),
            self.scale,
            self.softcap,
            self.dropout_p,
            self.norm_eps,
            self.keep_residual,
        )

    def split(self) -> tuple[Sequence[Tensor | None], Any]:
        """(tensors, everything else), for :meth:`joined`; autograd saves the tensors apart."""
        if self.tensors is NO_TENSORS and not self.mask_args and not self.score_args:
            return (), self
        tensors, *numbers = self.flat()
        return tensors, numbers

    @staticmethod
    def joined(tensors: Sequence[Tensor | None], rest: Any) -> Constants:
        """The inverse of :meth:`split`."""
        return rest if isinstance(rest, Constants) else Constants.of(list(tensors), *rest)

    @staticmethod
    def of(tensors: list[Tensor | None], sizes: list[int], functions: str, *others: Any) -> Constants:
        """The inverse of :meth:`flat`."""
        n = len(ConstantTensors._fields)
        rest: Any = iter(tensors[n:])
        keys = Functions(*functions.split("\n"))
        return Constants(
            ConstantTensors(*tensors[:n]),
            ConstantSizes(*sizes),
            read(keys.mask_numbers, rest) if keys.mask else (),
            read(keys.score_numbers, rest) if keys.score else (),
            keys,
            *others,
        )


def constants_of(
    options: Options, *, keep_residual: bool, shard: Tensor | None = None, pattern: BlocksAndRule | None = None
) -> Constants:
    """The options that get no gradient, and the other arguments of the operators.

    `pattern` is that of the mask and holds its layout; it says everything if the mask has a pattern.
    """
    mask, rope, score_mod, packed, cache = options.mask, options.rope, options.score_mod, options.packed, options.cache
    norm, fp8 = options.qk_norm, options.precision
    if cache is not None:
        rope = rope or cache.rope
    # torch.compile would trace through the cache, and make an input of everything that is read.
    has_tensors = not mask.only_bands or score_mod is not None or packed is not None or cache is not None
    has_tensors = has_tensors or options.num_splits is not None or shard is not None or norm is not None
    has_tensors = has_tensors or fp8 is not None
    if not torch.compiler.is_compiling() and not has_tensors and not options.dropout_p:
        interleaved = rope is not None and bool(rope.interleaved)
        found = _of_numbers(
            mask.bands, interleaved, options.deterministic, options.scale, options.softcap or 0.0, keep_residual,
            options.return_max,
        )  # fmt: skip
        if rope is None:
            return found
        tables = ConstantTensors(cos=rope.cos, sin=rope.sin, positions_q=rope.positions_q, positions_k=rope.positions_k)
        return Constants(tables, found.sizes, (), (), NO_FUNCTIONS, found.scale, found.softcap, 0.0, 0.0, keep_residual)
    layout = mask.layout if pattern is None else pattern
    mask_args, mask_key, mask_numbers = _mask_function(mask, pattern)
    tensors = ConstantTensors(
        valid=mask.valid,
        allowed=None if mask.allowed is None else four_dimensional(mask.allowed),
        prefix=None if mask.prefix is None else mask.prefix.lengths,
        documents_q=None if mask.documents is None else mask.documents.q,
        documents_k=None if mask.documents is None else mask.documents.k,
        layout=None if layout is None else four_dimensional(layout.blocks),
        tree=None if mask.tree is None else four_dimensional(mask.tree),
        dropout_seed=options.dropout_seed if options.dropout_p else None,
        cos=None if rope is None else rope.cos,
        sin=None if rope is None else rope.sin,
        positions_q=None if rope is None else rope.positions_q,
        positions_k=None if rope is None else rope.positions_k,
        cu_seqlens_q=None if packed is None else packed.cu_seqlens_q,
        cu_seqlens_k=None if packed is None else packed.cu_seqlens_k,
        **({} if cache is None else {name: getattr(cache, name) for name in OF_CACHE}),
        shard=shard,
    )
    sizes = _sizes_of(mask.bands, options.deterministic, options.return_max)._replace(
        prefix_at_end=int(mask.prefix is not None and mask.prefix.align == "bottom_right"),
        block_q=16 if layout is None else layout.block_q,
        block_k=16 if layout is None else layout.block_k,
        interleaved=int(rope is not None and rope.interleaved),
        max_seqlen_q=0 if packed is None else packed.max_seqlen_q,
        max_seqlen_k=0 if packed is None else packed.max_seqlen_k,
        num_splits=options.num_splits or 0,
        n_sinks=cache.n_sinks if cache is not None and cache.overwrites else -1,
        rotated=int(cache is not None and cache.rope is not None),
        return_lse=int(cache is None or options.return_lse),
        norm_of_mean=int(norm is not None and norm.kind == "rms"),
        norm_across_heads=int(norm is not None and norm.across_heads),
        fp8=0 if fp8 is None else FP8_SCALES.index(fp8.scales),
        fp8_rotated=int(fp8 is not None and fp8.rotate),
    )
    return Constants(
        tensors=tensors,
        sizes=sizes,
        mask_args=mask_args,
        score_args=() if score_mod is None else without_learned(score_mod.args, score_mod.learned_args),
        functions=Functions(
            mask_key,
            mask_numbers,
            "" if score_mod is None else score_mod.function_key,
            "" if score_mod is None else score_mod.derivative_key,
            "" if score_mod is None else score_mod.numbers,
            "" if score_mod is None else score_mod.readers,
        ),
        scale=options.scale,
        softcap=options.softcap or 0.0,
        dropout_p=options.dropout_p,
        norm_eps=0.0 if norm is None else float(norm.eps),
        keep_residual=keep_residual,
    )


def _mask_function(mask: Mask, pattern: BlocksAndRule | None) -> tuple[tuple[Any, ...], str, str]:
    """The arguments of the function of a mask, its key and its numbers; it is the user's, or the rule of a pattern."""
    if pattern is not None and pattern.rule:
        return pattern.args, rule_key(pattern.rule), written(pattern.args)
    if mask.function is None:
        return (), "", ""
    return mask.function.args, mask.function.key, mask.function.numbers


def rule_key(rule: str) -> str:
    """The key of a function of :mod:`fusedattn.kernels.sparse_rules`, which this module cannot load to register it."""
    return f"fusedattn.kernels.sparse_rules.{rule}#0"


@lru_cache(maxsize=256)
def _of_numbers(
    bands: frozenset[Band],
    interleaved: bool,
    deterministic: bool,
    scale: float,
    softcap: float,
    keep_residual: bool,
    return_max: bool,
) -> Constants:
    """The constants of a call without constant tensors: the same object for the same numbers."""
    sizes = _sizes_of(bands, deterministic, return_max)._replace(interleaved=int(interleaved))
    return Constants(NO_TENSORS, sizes, (), (), NO_FUNCTIONS, scale, softcap, 0.0, 0.0, keep_residual)


def _sizes_of(bands: frozenset[Band], deterministic: bool, return_max: bool) -> ConstantSizes:
    """Sizes with (lower, upper) of the bands that count from the first key, and of those that count from the last."""
    lower = {"top_left": -NO_BOUND, "bottom_right": -NO_BOUND}
    upper = {"top_left": NO_BOUND, "bottom_right": NO_BOUND}
    for band in bands:
        if band.left is not None:
            lower[band.align] = max(lower[band.align], -band.left)
        if band.right is not None:
            upper[band.align] = min(upper[band.align], band.right)
    bounds = lower["top_left"], upper["top_left"], lower["bottom_right"], upper["bottom_right"]
    return ConstantSizes(*bounds, deterministic=int(deterministic), return_max=int(return_max))
