"""The steps of docs/learn run alone, are correct and short; their page shows their output, and its references exist."""

from __future__ import annotations

import ast
import functools
import re
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bench.work.visited import visited
from fusedattn import masks, testing
from fusedattn.testing import Case
from tests.conftest import INTERPRETING, TERMS_LIMIT, inputs_of, sum_of_terms
from tests.helpers.compiling import ROOT, output

FOLDER = ROOT / "docs/learn"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
KERNELS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "kernels").glob("*.py")}
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")}  # of the steps

STEPS = ("softmax", "online_softmax", "tiles", "causal", "rope", "backward_dkdv", "backward_dq")
MOST_LINES = 80

# Lengths that no tile divides; one query; one block of keys; queries that see nothing under a causal mask. With 50,
# 51 and 53 keys a single pair decides whether a causal block is full, or visited.
LENGTHS = ((37, 37), (1, 45), (36, 50), (32, 16), (50, 21))

# In float32 rounding units of the sum of the absolute terms of an element. Scores, weights and sums are rounded at
# the size of these terms. Measured in the interpreter, with 5 seeds for each of LENGTHS: at most 0.84. A GPU rounds
# more often, and its exp2 errs by up to two units.
LIMIT = 1.0 if INTERPRETING else TERMS_LIMIT[torch.float32]

# Names that the steps and the kernels of the package share.
SHARED_NAMES = {
    *("BLOCK_M", "BLOCK_N", "HEAD_DIM", "start_m", "start_n", "offs_m", "offs_n", "offs_d", "rows", "keys", "tile"),
    *(
        "head",
        "q_tile",
        "k_tile",
        "v_tile",
        "dout_tile",
        "seqlen_q",
        "seqlen_k",
        "scale",
        "qk_scale",
        "upper",
        "n_full",
    ),
    *("n_boundary", "scores", "m_i", "l_i", "acc", "m_new", "p", "alpha", "lse", "shift", "seen", "products", "delta"),
    *("dp", "ds", "dq", "dk", "dv"),
}


@functools.cache
def module_of(step: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(FOLDER / f"{step}.py")))


def problem(step: str, seqlen_q: int, seqlen_k: int) -> testing.Inputs:
    """Inputs for a step: two heads, and no gradient of lse. Large keys make a few weights dominate."""
    options = {"causal": {"causal": "bottom_right"}, "rope": {"rope": "half"}}.get(step, {})
    inputs = inputs_of(Case(batch=1, nheads_q=2, nheads_kv=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **options))
    return replace(inputs, k=2.0 * inputs.k, dlse=torch.zeros_like(inputs.dlse))


def results_of(step: str, inputs: testing.Inputs) -> dict[str, Tensor]:
    """The results of a step for every batch and head, by the names of the error budget."""
    module = module_of(step)
    q, k, v = heads = [x.flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v)]
    if step in ("softmax", "online_softmax"):
        found = {"out": torch.stack([module.attention(*x) for x in zip(q, k, v, strict=True)])}
    elif step == "tiles":
        out, lse = module.attention(inputs.q, inputs.k, inputs.v)
        return {"out": out, "lse": lse}
    elif step == "causal":
        found = {"out": module.attention(*heads)[0]}
    elif step == "rope":
        found = {"out": module.attention(*heads, inputs.rope.cos, inputs.rope.sin)}
    else:
        exact = testing.golden(inputs)
        kept = (exact[name].flatten(0, 1).float() for name in ("out", "lse"))
        gradients = module.attention_bwd(*heads, *kept, inputs.dout.flatten(0, 1))
        found = {"dq": gradients} if step == "backward_dq" else dict(zip(("dk", "dv"), gradients, strict=True))
    return {name: x.unflatten(0, inputs.q.shape[:2]) for name, x in found.items()}


# Step 5 requires seqlen_q <= seqlen_k: otherwise the first queries have positions before 0.
PROBLEMS = [(step, n, m) for step in STEPS for n, m in LENGTHS if step != "rope" or n <= m]


@pytest.mark.parametrize(("step", "seqlen_q", "seqlen_k"), PROBLEMS)
def test_step_is_as_close_to_float64_as_float32_permits(step: str, seqlen_q: int, seqlen_k: int) -> None:
    inputs = problem(step, seqlen_q, seqlen_k)
    truth, terms = testing.golden(inputs), sum_of_terms(inputs)
    for name, x in results_of(step, inputs).items():
        assert x.shape == truth[name].shape
        unit = torch.finfo(torch.float32).eps * terms[name] + torch.finfo(torch.float32).tiny
        error = ((x.double() - truth[name]).abs() / unit).max().item()
        assert error <= LIMIT, f"{name}: {error:.2f} units"


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [*LENGTHS, (36, 51), (36, 53), (100, 100)])
def test_causal_step_visits_the_blocks_of_the_package(seqlen_q: int, seqlen_k: int) -> None:
    module = module_of("causal")
    inputs = problem("causal", seqlen_q, seqlen_k)
    _, counts = module.attention(*(x.flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v)))
    blocks = visited(masks.causal(), seqlen_q, seqlen_k, module.BLOCK_M, module.BLOCK_N)
    for tile, found in enumerate(counts.tolist()):
        of_tile = [block.is_full for block in blocks if block.start_m == tile * module.BLOCK_M]
        assert found == [of_tile.count(True), of_tile.count(False)]


# Errors depend on the order of sums in NumPy and torch.
ERROR = re.compile(r"\d\.\de-\d\d")


@pytest.mark.parametrize("step", STEPS)
def test_the_page_shows_the_output_of_the_step(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(FOLDER / f"{step}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    errors = [float(x) for x in ERROR.findall(printed)]
    assert len(errors) >= 1
    assert max(errors) < 1e-2
    assert f"```text\n{ERROR.sub('#', printed)}```\n" in ERROR.sub("#", PAGE)


def test_step_runs_as_a_script_away_from_the_checkout(tmp_path: Path) -> None:
    variables = {"PYTHONPATH": "", **({"TRITON_INTERPRET": "1"} if INTERPRETING else {})}
    assert ERROR.sub("#", output(FOLDER / "causal.py", cwd=tmp_path, **variables)) in ERROR.sub("#", PAGE)


# Compile the kernels of the given steps for sm_90. Parameter names determine parameter types.
COMPILE = """
import runpy, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FLOAT32 = {"lse_ptr", "cos_ptr", "sin_ptr", "shift_ptr", "delta_ptr"}

def type_of(name, inputs):
    if name.isupper():
        return "constexpr"
    if name.endswith("_ptr"):
        return "*i32" if name == "counts_ptr" else "*fp32" if name in FLOAT32 else f"*{inputs}"
    return "fp32" if name.endswith("scale") else "i32"

for path in sys.argv[1:]:
    step = runpy.run_path(path)
    (kernel,) = (x for name, x in step.items() if name.startswith("attention_") and hasattr(x, "arg_names"))
    sizes = {"HEAD_DIM": 32, "BLOCK_M": step["BLOCK_M"], "BLOCK_N": step.get("BLOCK_N", 16)}
    signature = {name: type_of(name, "fp16" if "tl.dot" in open(path).read() else "fp32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs={(kernel.arg_names.index(name),): n for name, n in sizes.items()})
    print(kernel.__name__, "mma" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


def test_steps_compile_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter accepts more than the compiler; 16-bit products must use tensor cores."""
    shown = output("-c", COMPILE, *(FOLDER / f"{step}.py" for step in STEPS), TRITON_CACHE_DIR=str(tmp_path))
    forwards = [f"attention_fwd {step not in ('softmax', 'online_softmax')}" for step in STEPS[:5]]
    assert shown.splitlines() == [*forwards, "attention_bwd_dkdv True", "attention_bwd_dq True"]


@pytest.mark.parametrize("step", STEPS)
def test_step_is_short_and_stands_alone(step: str) -> None:
    assert SOURCES[step].count("\n") <= MOST_LINES
    imported: set[str] = set()
    for node in ast.walk(ast.parse(SOURCES[step])):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or ".").partition(".")[0])
    assert imported == {"torch", "triton"}


def test_folder_has_the_steps_alone_and_the_page_links_each() -> None:
    assert SOURCES.keys() == set(STEPS)
    for step in STEPS:
        assert f"[`{step}.py`]({step}.py)" in PAGE
    links = (ROOT / name for name in ("README.md", "CONTRIBUTING.md"))
    assert all("(docs/learn/README.md)" in path.read_text(encoding="utf-8") for path in links)


def words(*texts: str) -> set[str]:
    return set(re.findall(r"\w+", "\n".join(texts)))


def test_steps_use_the_names_of_the_kernels() -> None:
    assert SHARED_NAMES - words(*KERNELS.values()) == set(), "renamed in kernels/: rename it in docs/learn too"
    assert SHARED_NAMES - words(*SOURCES.values()) == set(), "no step uses it any more"


def broken_references(page: str) -> list[str]:
    """Links whose file is missing, or whose text is a name that the file in kernels/ does not define."""
    found = []
    for text, target in re.findall(r"\[([^\]]*)\]\(([^)#]+)(?:#[^)]*)?\)", page):
        path = (FOLDER / target).resolve()
        name = text.strip("`")
        if not path.is_file():
            found.append(target)
            continue
        is_function = path.parent == ROOT / "kernels" and text.startswith("`") and not name.endswith(".py")
        if is_function and not re.search(rf"^def {re.escape(name)}\(", KERNELS[path.name], re.MULTILINE):
            found.append(f"{name} in {path.name}")
    return found


def test_references_of_the_page_exist() -> None:
    assert broken_references(PAGE) == []
    referred = re.findall(r"\[`(\w+)`\]\(\.\./\.\./kernels/", PAGE)
    assert {"softmax_update", "key_blocks", "rotate_tile", "modified", "visible", "store_results"} <= set(referred)


def test_broken_references_are_seen() -> None:
    page = "[`softmax_update`](../../kernels/rope.py) [`a`](../../kernels/nothing.py)"
    assert broken_references(f"{page} [`rope.py`](../../kernels/rope.py)") == [
        "softmax_update in rope.py",
        "../../kernels/nothing.py",
    ]


def test_identifiers_of_the_last_section_exist() -> None:
    """The left column has identifiers of the steps, the right one identifiers of kernels/."""
    rows = re.findall(r"^\| (.+) \| (.+) \|$", PAGE.partition("## Line by line")[2], re.MULTILINE)[2:]
    assert len(rows) >= 15
    for row, defined in ((0, words(*SOURCES.values())), (1, words(*KERNELS.values()))):
        for code in (code for columns in rows for code in re.findall(r"`([^`]+)`", columns[row])):
            missing = set(re.findall(r"[A-Za-z_]\w*", code)) - defined
            assert not missing, f"{code}: {missing}"
