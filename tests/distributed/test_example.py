"""``torchrun -m fusedattn.distributed.example``: it trains, compares and draws; an error ends every process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fusedattn.cli.errors import CommandError
from fusedattn.distributed.example import figure
from fusedattn.distributed.example.__main__ import main
from fusedattn.distributed.example.plan import shares_of
from fusedattn.distributed.example.shares import Shares
from fusedattn.distributed.example.sizes import CPU
from fusedattn.distributed.example.training import Losses
from tests.distributed.processes import NEEDS_PROCESSES
from tests.helpers import quick
from tests.helpers.compiling import ROOT, run

pytestmark = NEEDS_PROCESSES

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

EXAMPLE = ("-m", "fusedattn.distributed.example")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(torch.randint(97, 123, (4000,), generator=torch.Generator().manual_seed(0)).tolist()))
    return path


def launch(world: int, *command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command by torchrun."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world))
    return run(*start, *command, cwd=cwd, PYTHONPATH=str(ROOT))


RUNS = [
    (2, "ring", ()),
    (2, "ring", ("--balance", "contiguous", "--no-compare")),
    (2, "ulysses", ("--positions", "sinusoidal")),
    (3, "all_gather", ("--positions", "learned")),
    (4, "ring+ulysses", ("--seqlen", "37")),
    (2, "ring", ("--seqlen", "1")),
]


@quick.only(options=())
@pytest.mark.parametrize(("world", "mode", "options"), RUNS)
def test_processes_learn_what_one_learns(
    text: Path, tmp_path: Path, world: int, mode: str, options: tuple[str, ...]
) -> None:
    arguments = ("--steps", "3", "--seqlen", "64", "--text", text, "--out", "new/picture.png", "--mode", mode, *options)
    done = launch(world, *EXAMPLE, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("fusedattn ")] == [lines[0]], "one process prints"
    assert lines[0].endswith(f"one GPT, trained by {world} processes")
    assert sum(line.startswith(f"processes  {world}, gloo; each on CPU") for line in lines) == 1
    assert [line[:10] for line in lines if line.startswith("step ")] == ["step 1/3  ", "step 2/3  ", "step 3/3  "]
    assert lines[-1] == "new/picture.png"
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(PNG)
    losses = {name: values.split() for name, values in re.findall(r"^(first step|last step|held-out text) +(.+)$",
                                                                 done.stdout, re.MULTILINE)}  # fmt: skip
    assert losses.keys() == {"first step", "last step", "held-out text"}
    if "--no-compare" in options:
        assert "Tokens of each process: 32 of 64" in lines
        assert "ifference" not in done.stdout
        assert all(len(values) == 1 for values in losses.values())
        return
    (largest,) = re.findall(r"^Largest difference of a step: (.+)$", done.stdout, re.MULTILINE)
    assert float(largest) < 1e-5
    for of_all, of_one, difference in losses.values():
        assert float(of_all) == pytest.approx(float(of_one), abs=2e-4)
        assert float(difference) < 1e-5


@pytest.mark.thorough
def test_one_process_needs_no_launcher(text: Path, tmp_path: Path) -> None:
    done = run(*EXAMPLE, "--steps", "2", "--seqlen", "64", "--text", text, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Two share them: torchrun --nproc-per-node 2 -m fusedattn.distributed.example" in done.stdout
    assert (tmp_path / "fusedattn-demo" / "distributed.png").exists()


THREADS = """
import sys
from pathlib import Path
from fusedattn.distributed.example.__main__ import main
status = main(sys.argv[1:])
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
sys.exit(status or ", ".join(name for name in names if "gloo" in name) or None)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names of threads are read from /proc")
def test_no_thread_of_the_group_is_left(text: Path, tmp_path: Path) -> None:
    """Such a thread can abort a process that ends."""
    done = run("-c", THREADS, "--steps", "1", "--seqlen", "32", "--text", text, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
def test_an_error_of_all_is_printed_once(tmp_path: Path) -> None:
    done = launch(2, *EXAMPLE, "--text", "nowhere.txt", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("error: --text: there is no file or folder 'nowhere.txt'") == 1
    assert "exitcode  : 2" in done.stderr


# Rank 1 fails, before the training or in its second step.
FAILING = """
import os, sys
from fusedattn.distributed.example import __main__ as example, training

def fail(*arguments):
    raise OSError("out of luck")

if os.environ["RANK"] == "1":
    {fault}
sys.exit(example.main(sys.argv[1:]))
"""
FAULTS = {
    "at the start": "example.plan_of = fail",
    "in a step": """step = training.Learner.step
    steps = iter([step, fail])
    training.Learner.step = lambda self, batch: next(steps)(self, batch)""",
}


@pytest.mark.thorough
@pytest.mark.parametrize("when", FAULTS)
def test_an_error_of_one_ends_all(text: Path, tmp_path: Path, when: str) -> None:
    (tmp_path / "failing.py").write_text(FAILING.format(fault=FAULTS[when]))
    done = launch(2, "failing.py", "--seqlen", "64", "--steps", "100000", "--text", text, cwd=tmp_path)
    assert done.returncode != 0
    assert re.search(r"rank 1: (error: )?OSError: out of luck$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: got '0', allowed are whole numbers from 1 on"),
        (["--mode", "star"], "argument --mode: invalid choice: 'star'"),
        (["--out", "picture.pdf"], "--out: got 'picture.pdf', allowed are names of files that end in .png"),
        (["--out", f"{__file__}/picture.png"], "--out: cannot make the folder"),
        (["--device", "cuda"], "--device: got cuda for 1 processes"),
        (["--mode", "ulysses", "--balance", "zigzag"], "--balance: got zigzag with --mode ulysses"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], message: str, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)  # other tests run in this process
    assert main(["--text", str(text), "--seqlen", "64", *arguments]) == 2
    found = capsys.readouterr()
    assert found.err.startswith(f"python -m fusedattn.distributed.example: error: {message}")
    assert (found.err.count("\n"), found.out) == (1, "")
    assert not dist.is_initialized()


def test_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("mode", "world", "parts", "sharing"),
    [("ring", 6, 6, 1), ("ulysses", 4, 1, 4), ("ring+ulysses", 4, 2, 2), ("all_gather+ulysses", 12, 3, 4)],
)
def test_who_shares_what(mode: str, world: int, parts: int, sharing: int) -> None:
    shares = shares_of(mode, None, CPU, world)
    assert (shares.n_parts, shares.n_sharing) == (parts, sharing)
    assert len(shares.names()) == parts


@pytest.mark.parametrize(("mode", "world"), [("ulysses", 3), ("ring+ulysses", 2), ("ring+ulysses", 9)])
def test_modes_that_need_other_numbers_of_processes(mode: str, world: int) -> None:
    with pytest.raises(CommandError, match=rf"--mode: got {re.escape(mode)} for {world} processes, allowed are "):
        shares_of(mode, None, CPU, world)


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("seqlen", "parts"), [(24, 3), (23, 4), (3, 4)])
def test_shares_of_the_pairs(seqlen: int, parts: int, balance: str) -> None:
    shares = Shares(seqlen, parts, 1, balance)
    visible = torch.ones(seqlen, seqlen).tril().sum(1)
    owner = shares.part_of_query()
    expected = [(visible[owner == part].sum() / visible.sum()).item() for part in range(parts)]
    assert shares.of_pairs() == pytest.approx(expected)
    if (seqlen, balance) == (24, "zigzag"):
        assert shares.of_pairs() == pytest.approx([1 / 3] * 3)
    counts = owner.bincount(minlength=parts)
    assert shares.held() == ("8" if seqlen == 24 else f"{counts.min()} to {counts.max()}")


@pytest.mark.parametrize("shares", [Shares(1, 2, 1, "zigzag"), Shares(9000, 16, 1, "contiguous"),
                                    Shares(64, 1, 4, "contiguous"), Shares(64, 2, 2, "zigzag")])  # fmt: skip
@pytest.mark.parametrize("alone", [None, Losses([5.0, 4.0], 3.0), Losses([5.1, float("nan")], float("nan"))])
def test_pictures(shares: Shares, alone: Losses | None, tmp_path: Path) -> None:
    figure.draw(tmp_path / "a.png", "A GPT", shares, Losses([5.0, 4.0], 3.0), alone, "4 processes")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
