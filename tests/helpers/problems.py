"""Problems that random ones rarely contain, and problems that have failed."""

from __future__ import annotations

from dataclasses import replace

import torch

from fusedattn.testing import Case
from tests.helpers.hostile import FuzzProblem

SMALL = Case(batch=1, nheads_q=2, nheads_kv=1, seqlen_q=19, seqlen_k=21, head_dim=8, dtype=torch.float32)


HALF = replace(SMALL, dtype=torch.bfloat16)


PROBLEMS = {
    "a query that is NaN": FuzzProblem(replace(SMALL, seqlen_k=5), poison=(("q", "nan", "one element"),)),
    "only a NaN visible": FuzzProblem(
        replace(SMALL, nheads_q=1, seqlen_k=2), rows="one key", poison=(("k", "nan", "one element"),), needed="v"
    ),
    "one key, 16 bits": FuzzProblem(HALF, rows="one key", magnitudes={"v": 1e4}, dlse=False),
    "scores of 1e4": FuzzProblem(replace(SMALL, causal="top_left"), magnitudes={"q": 100.0, "k": 100.0}),
    "denormals": FuzzProblem(replace(SMALL, padding="left"), magnitudes={"k": 1e-40, "v": 1e-40, "dout": 1e-30}),
    "denormals in 16 bits": FuzzProblem(
        replace(HALF, nheads_q=1, seqlen_q=1, seqlen_k=1, head_dim=1, seed=0),
        magnitudes={"q": 100.0, "k": 1e-40, "v": 1e-40},
        dlse=False,
    ),
    "gradients that overflow before a scale of 0": FuzzProblem(
        replace(SMALL, nheads_q=1, seqlen_q=1, seqlen_k=1, head_dim=1, scale=0.0),
        magnitudes={"q": 1e-40, "k": 1e30, "dlse": 1e30},
    ),
    "weights below the normal numbers": FuzzProblem(
        replace(
            SMALL,
            nheads_q=1,
            seqlen_q=97,
            seqlen_k=38,
            head_dim=24,
            causal="bottom_right",
            boolean="broadcast",
            rope="half",
            rotary_dim=10,
            scale=1.0,
            seed=2063,
        ),
        magnitudes={"q": 100.0},
        dlse=False,
    ),
    "values of 1e-36 in bfloat16": FuzzProblem(
        replace(HALF, seqlen_k=2, seed=0), magnitudes={"v": 1e-36, "dout": 1e4}, dlse=False
    ),
    "scores of 100,000, of which the rounding of a rotation chooses the largest": FuzzProblem(
        Case(
            batch=1,
            nheads_q=1,
            nheads_kv=1,
            seqlen_q=64,
            seqlen_k=33,
            head_dim=40,
            dtype=torch.bfloat16,
            boolean="full",
            rope="half",
            rotary_dim=24,
            rope_tables="per_batch",
            scale=-0.3,
            seed=4022,
        ),
        magnitudes={"q": 100.0, "k": 100.0},
        dlse=False,
    ),
    "nothing visible": FuzzProblem(HALF, rows="all empty", poison=(("v", "inf", "hidden"), ("q", "nan", "hidden"))),
    "no queries": FuzzProblem(replace(SMALL, seqlen_q=0)),
    "everything overlaps": FuzzProblem(
        replace(SMALL, seqlen_k=19),
        layouts={"q": "windows", "k": "over_seqlen", "v": "windows", "dout": "over_everything"},
        storage_offset=1,
    ),
    "every tensor laid out in its own way": FuzzProblem(
        replace(HALF, batch=2, nheads_q=4, nheads_kv=2),
        layouts={"q": "transposed", "k": "seqlen_first", "v": "packed", "dout": "every_other"},
        strided_constants=True,
    ),
    "a block of which one pair is hidden": FuzzProblem(
        replace(SMALL, nheads_q=1, seqlen_q=46, seqlen_k=46, head_dim=3, causal="bottom_right"), dlse=False
    ),
    "weights that underflow, in rows that a NaN reaches": FuzzProblem(
        Case(
            batch=1, nheads_q=2, seqlen_q=20, seqlen_k=31, head_dim=1, padding="uneven", boolean="broadcast", seed=4259
        ),
        magnitudes={"q": 100.0, "v": 1e30},
        poison=(("v", "nan", "some rows"),),
        dlse=False,
    ),
    "scores of -inf, and a value of NaN": FuzzProblem(
        replace(SMALL, seqlen_k=2, head_dim=1, padding="right"),
        magnitudes={"q": 1e30, "k": 1e30},
        poison=(("v", "nan", "some rows"), ("v", "nan", "one element")),
        rows="one key",
    ),
    "a scale of 0, where the gradient of the scores is large": FuzzProblem(
        replace(SMALL, nheads_q=1, seqlen_q=1, seqlen_k=16, head_dim=2, dtype=torch.float16, scale=0.0),
        magnitudes={"k": 1000.0, "dlse": 1000.0},
    ),
    "negated views": FuzzProblem(HALF, layouts=dict.fromkeys(("q", "k", "v", "dout"), "negated"), storage_offset=3),
    "overflow": FuzzProblem(
        replace(SMALL, dtype=torch.float16), magnitudes={"q": 1e3, "k": 1e3, "v": 1e3, "dout": 1e3}
    ),
    "a bias of -inf in whole rows, and a NaN behind it": FuzzProblem(
        replace(SMALL, bias="per_query", bias_inf=True, sinks=True, seed=2),
        poison=(("bias", "-inf", "some rows"), ("v", "nan", "hidden")),
        strided_constants=True,
    ),
    "sinks of NaN where nothing is visible": FuzzProblem(
        replace(SMALL, sinks=True), rows="all empty", poison=(("sinks", "nan", "all"),), dlse=False
    ),
    "a sink of NaN beside hidden keys": FuzzProblem(
        replace(SMALL, sinks=True, padding="uneven", boolean="full"), poison=(("sinks", "nan", "one element"),)
    ),
    "an infinite sink beside hidden keys": FuzzProblem(
        replace(SMALL, sinks=True, padding="uneven", boolean="full"), poison=(("sinks", "inf", "one element"),)
    ),
    "a NaN in a bias where nothing is visible": FuzzProblem(
        replace(HALF, bias="full", relative="per_query", causal="bottom_right", bias_dtype=torch.float32),
        layouts={"bias": "transposed"},
        poison=(("bias", "nan", "hidden"), ("relative", "inf", "hidden")),
        needed="br",
    ),
    "rows of the lowest bias, 16 bits": FuzzProblem(
        replace(HALF, bias="per_query"), poison=(("bias", "lowest", "some rows"),)
    ),
    "rows of the lowest bias, which gets no gradient": FuzzProblem(
        replace(HALF, bias="per_query", causal="bottom_right"), poison=(("bias", "lowest", "some rows"),), needed="qkv"
    ),
    "the lowest bias everywhere, float16": FuzzProblem(
        replace(HALF, dtype=torch.float16, bias="full", padding="left"), poison=(("bias", "lowest", "all"),)
    ),
    "the lowest bias of float32 everywhere, 16 bits": FuzzProblem(
        replace(HALF, bias="per_head", bias_dtype=torch.float32, causal="bottom_right"),
        poison=(("bias", "lowest", "all"),),
    ),
    "the highest bias here and there, 16 bits": FuzzProblem(
        replace(HALF, bias="full", bias_dtype=torch.float32), poison=(("bias", "highest", "some elements"),)
    ),
    "the lowest bias here and there": FuzzProblem(
        replace(SMALL, bias="full", bias_inf=True), poison=(("bias", "lowest", "some elements"),)
    ),
    "the highest bias of few queries, 16 bits": FuzzProblem(
        replace(HALF, seqlen_q=1, seqlen_k=97, bias="full"), poison=(("bias", "highest", "some elements"),)
    ),
    "the lowest relative bias everywhere, 16 bits": FuzzProblem(
        replace(HALF, relative="per_head"), poison=(("relative", "lowest", "all"),)
    ),
    "the highest sink, 16 bits": FuzzProblem(replace(HALF, sinks=True), poison=(("sinks", "highest", "one element"),)),
    "the lowest sinks, 16 bits": FuzzProblem(
        replace(HALF, sinks=True, causal="top_left", window=(3, 0)), poison=(("sinks", "lowest", "all"),)
    ),
    "a bias that is expanded": FuzzProblem(
        replace(SMALL, batch=2, bias="full", padding="left"), layouts={"bias": "over_batch", "q": "transposed"}
    ),
    "a NaN in one sink": FuzzProblem(
        replace(SMALL, sinks=True, window=(5, 2)), poison=(("sinks", "nan", "one element"),), rows="some empty"
    ),
    "sinks far above and far below the scores": FuzzProblem(
        replace(SMALL, sinks=True, padding="right", empty_batch=True, batch=2, seed=6), magnitudes={"sinks": 100.0}
    ),
    "a soft-cap of large scores": FuzzProblem(
        replace(SMALL, softcap=5.0, score_mod=True), magnitudes={"q": 1e2, "k": 1e2}, needed="qk"
    ),
    "dropped, poisoned and documents": FuzzProblem(
        replace(SMALL, dropout_p=0.5, documents="shuffled", mask_function=True),
        poison=(("v", "nan", "one element"), ("k", "nan", "hidden")),
    ),
    "values of other features, nothing visible in a block": FuzzProblem(
        replace(HALF, head_dim_v=24, layout=16, prefix=True, alibi="per_batch", seed=4),
        layouts={"v": "seqlen_first", "dout": "packed"},
        strided_constants=True,
    ),
}
