"""``python -m fusedattn``: every command end to end, in its own process, and the errors that can occur."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fusedattn import __version__, fuse, not_supported_reasons, reference, testing
from fusedattn.__main__ import main
from fusedattn.cli import progress
from fusedattn.cli.check import command as check_command
from fusedattn.cli.check import comparison, json_report
from fusedattn.cli.check.outcome import Outcome
from fusedattn.cli.demo import corpus, settings, threads, verify
from fusedattn.cli.demo.memory import peak_memory
from fusedattn.cli.errors import CommandError
from fusedattn.integrations.modules import FusedScaledDotProductAttention
from fusedattn.testing import peers

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
ESCAPE = "\x1b"


def environment(**extra: str) -> dict[str, str]:
    # A user's environment: nothing set for Triton, no terminal. One thread, because the tests share the machine.
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "COLUMNS", "FORCE_COLOR")}
    return env | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | extra


def run_python(*arguments: str, status: int = 0, cwd: Path = ROOT, **extra: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments], env=environment(**extra), cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == status, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "fusedattn", *arguments, **options)


@pytest.fixture
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the settings that a command makes for its own process."""
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))


def test_help_names_the_commands_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, fusedattn.__main__ as tool\ntry:\n    tool.main(['--help'])\n"
        "finally:\n    print(sorted({'triton', 'rich', 'matplotlib'} & sys.modules.keys()))"
    )
    out = run_python("-c", code).stdout
    assert out.endswith("\n[]\n")
    assert out.startswith("usage: python -m fusedattn")
    assert all(command in out for command in ("demo", "check", "info", "examples:", "exit status"))


@pytest.mark.parametrize("command", ["demo", "check", "info"])
def test_help_of_a_command(command: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert f"  python -m fusedattn {command}" in out
    assert max(map(len, out.splitlines())) <= 80


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"fusedattn {__version__}\n"


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "examples:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--text", "/no/such/file"], "--text: there is no file or folder '/no/such/file'"),
        (["demo", "--out", __file__], "--out: cannot make the folder"),
        (["demo", "--device", "tpu"], "--device: got 'tpu', allowed are cpu, cuda and cuda:N"),
        (["demo", "--device", "cuda:99"], "GPUs"),
        (["check", "--feature", "telepathy"], "--feature: got 'telepathy'"),
        (["check", "--feature", "causl"], "which is in none of the 97 names; near it are 'causal'"),
        (["check", "--against", "telepathy"], "--against: got 'telepathy', allowed are torch.sdpa-math, "),
        (["check", "--against", "no.such:f"], "--against: got 'no.such:f': ModuleNotFoundError: No module named 'no'"),
        (["check", "--against", "math:pi"], "--against: got 'math:pi', which is a float"),
        (["info", "--shape", "1,3,2,8,8,16"], "nheads_q divisible by nheads_kv"),
        (["info", "--softcap", "30"], "--shape"),
    ],
)
@pytest.mark.usefixtures("_own_environment")
def test_an_error_that_the_user_can_fix_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, *(() if "--device" in arguments else ("--device", "cpu"))]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith(f"python -m fusedattn {arguments[0]}: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--steps", "0"], "'0', allowed are whole numbers from 1 on"),
        (["demo", "--steps", "-3"], "'-3', allowed are whole numbers from 1 on"),
        (["demo", "--seed", "x"], "'x', allowed are whole numbers from 0"),
        (["info", "--shape", "1,2,3"], "six numbers"),
        (["info", "--shape", "1,2,2,8,8,x"], "'x', allowed are whole numbers"),
        (["info", "--dropout", "1"], "0 <= P < 1"),
        (["info", "--softcap", "nan"], "positive numbers"),
        (["check", "--dtype", "int8"], "invalid choice"),
        (["dance"], "invalid choice"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_too_little_text(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("too short")
    with pytest.raises(CommandError, match=r"got 9 bytes of text from .*short.txt, needed are \d+ and more"):
        corpus.read_corpus(str(path), seqlen=64)


@pytest.mark.usefixtures("_own_environment")
@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_demo_says_how_to_install_missing_packages(package: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err.endswith(f"{package} not installed: pip install 'fusedattn[demo]'\n")


def test_the_interpreter_needs_numpy() -> None:
    pytest.importorskip("triton")
    code = (
        "import sys\nsys.modules['numpy'] = None\nfrom fusedattn.__main__ import main\n"
        "sys.exit(main(['check', '--device', 'cpu']))"
    )
    assert "pip install numpy" in run_python("-c", code, status=2).stderr


def test_info_without_a_case() -> None:
    out = run("info", "--device", "cpu").stdout
    assert re.search(rf"^fusedattn +{re.escape(__version__)}$", out, re.MULTILINE)
    assert re.search(rf"^torch +{re.escape(torch.__version__)}$", out, re.MULTILINE)
    assert re.search(r"^CPU tensors +backend torch: ", out, re.MULTILINE)


def test_info_gives_every_reason(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    shape = "2,4,2,64,70,1000"
    arguments = ["info", "--shape", shape, "--device", "cpu", "--bias", "--softcap", "30", "--dropout", "0.1"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "q (2, 4, 64, 1000), k and v (2, 2, 70, 1000)" in out
    q, k = torch.empty(2, 4, 64, 1000), torch.empty(2, 2, 70, 1000)
    options = {"bias": torch.empty(2, 4, 64, 70), "softcap": 30.0, "dropout_p": 0.1}
    of_triton, of_torch = re.split(r"^backend torch", out, flags=re.MULTILINE)
    for section, backend in ((of_triton, "triton"), (of_torch, "torch")):
        reasons = not_supported_reasons(q, k, k, **options, backend=backend)
        assert re.findall(r"^  - (.+)$", section, re.MULTILINE) == reasons
    assert "TRITON_INTERPRET" in of_triton


def test_info_costs_no_memory(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["info", "--shape", "100000,64,8,131072,131072,128", "--device", "cpu"]) == 0
    assert "backend torch: yes, the default" in capsys.readouterr().out


def test_info_shows_the_launches() -> None:
    pytest.importorskip("triton")
    out = run("info", "--shape", "1,4,4,64,64,64", "--device", "cpu", TRITON_INTERPRET="1").stdout
    assert "backend triton: yes, the default" in out
    assert re.search(r"launches on interpreter", out)
    tile = r"\d+x\d+, \d+, \d+"
    for kernel in ("fwd", "dkdv", "dq"):
        assert re.search(rf"^  {kernel} +{tile}( +{tile}){{4}}$", out, re.MULTILINE), "one for each kind of work"
    assert max(map(len, out.splitlines())) <= 80


@pytest.fixture(scope="module")
def _triton() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("numpy")


@pytest.mark.thorough
@pytest.mark.usefixtures("_triton")
def test_check_passes() -> None:
    out = run("check", "--feature", "causal", "--dtype", "float32", "--device", "cpu").stdout
    names = [case.name for case in (*testing.CASES, *testing.FP8_CASES) if "causal" in case.name]
    assert len(re.findall(r" float32 .* ok$", out, re.MULTILINE)) == len(names)
    assert f"{len(names)} of {len(names)} within the budget" in out
    assert all(name in out for name in names)
    assert ESCAPE not in out
    assert max(map(len, out[out.index("Error against") :].splitlines())) <= 80


@pytest.mark.usefixtures("_triton")
def test_check_prints_json() -> None:
    done = run("check", "--json", "--feature", "negative", "--dtype", "float16", "--device", "cpu")
    report = json.loads(done.stdout)
    assert report.keys() == {
        "device", "backend", "how", "versions", "budget", "results", "features", "tensors", "against", "ok"
    }  # fmt: skip
    assert (report["ok"], report["against"], report["backend"]) == (True, [], "triton")
    assert report["versions"]["torch"] == torch.__version__
    assert [result["tensor"] for result in report["results"]] == list(testing.TENSORS)
    for result in report["results"]:
        assert result.keys() == {"case", "dtype", "tensor", "max", "mean", "row", "used", "ok", "lse_gradient"}
        assert (result["case"], result["dtype"]) == ("negative scale", "float16")
        assert 0.0 <= result["used"] <= 1.0
        assert result["lse_gradient"] is True
    (feature,) = report["features"]
    for number in ("max", "mean", "row", "used"):
        assert feature[number] == max(result[number] for result in report["results"])
    assert {"tensor": feature["tensor"], "used": feature["used"]}.items() <= max(
        report["results"], key=lambda result: result["used"]
    ).items()
    assert [row["tensor"] for row in report["tensors"]] == list(testing.TENSORS)


@pytest.mark.parametrize(("used", "by_chance"), [(0.9, False), (1.2, True), (1.6, False)])
def test_check_draws_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], used: float, by_chance: bool
) -> None:
    """Another seed draws other inputs; the message names it if the budget is exceeded by no more than chance allows."""
    seen: list[torch.Tensor] = []

    def measure(inputs: testing.Inputs, backend: str, compiled: str | None) -> dict[str, testing.Ratios]:
        seen.append(inputs.q)
        return {"out": testing.Ratios(1.0, 1.0, 1.0, used)}

    monkeypatch.setattr(check_command, "_measure", measure)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)  # other tests run in this process
    given = ["check", "--feature", "negative", "--dtype", "float32", "--backend", "torch", "--device", "cpu"]
    for seed in ("0", "1", "1"):
        assert main([*given, "--seed", seed]) == (used > 1.0)
        assert ("--seed 1" in capsys.readouterr().out) == by_chance
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[1], seen[2])


BROKEN = """
import sys
from fusedattn import testing
from fusedattn.kernels import attention_fwd as kernel

testing.CACHED_CASES = testing.LINEAR_CASES = testing.FP8_CASES = ()
testing.CASES = (testing.Case("tiny", batch=1, nheads_q=1, nheads_kv=1, seqlen_q=8, seqlen_k=8, head_dim=16),)
launch = kernel.launch

def broken(q, k, v, results, problem):
    launch(q, k, v, results, problem)
    out = results.out
    {fault}

kernel.launch = broken
from fusedattn.__main__ import main
sys.exit(main({arguments}))
"""


@pytest.mark.usefixtures("_triton")
def test_check_fails_where_a_kernel_is_wrong() -> None:
    code = BROKEN.format(fault="out[..., -1, :] *= 1.0001", arguments=["check", "--dtype", "float32"])
    out = run_python("-c", code, status=1, TRITON_INTERPRET="1").stdout
    assert re.search(r"^tiny +float32 +(out|d[qkv]) .* FAIL$", out, re.MULTILINE)
    assert "0 of 1 within the budget" in out


@pytest.mark.thorough
@pytest.mark.usefixtures("_triton")
def test_check_goes_on_where_a_kernel_does_not_run_or_gives_nan() -> None:
    fault = """if q.dtype.itemsize == 2:
        raise RuntimeError('out of luck')
    out.fill_(float('nan'))"""
    code = BROKEN.format(fault=fault, arguments=["check", "--dtype", "float16", "--dtype", "float32", "--json"])
    report = json.loads(run_python("-c", code, status=1, TRITON_INTERPRET="1").stdout)
    assert report["ok"] is False
    crashed, *of_nan = report["results"]
    assert crashed["error"] == "RuntimeError: out of luck"
    assert [result["tensor"] for result in of_nan] == list(testing.TENSORS)
    assert (of_nan[0]["max"], of_nan[0]["used"], of_nan[0]["ok"]) == (None, None, False)


def outcome(case: str, dtype: str, **used: float) -> Outcome:
    return Outcome(case, dtype, {tensor: testing.Ratios(x, x / 2, x / 4, x / 1.5) for tensor, x in used.items()})


def test_json_has_the_worst_of_each_feature_and_of_each_tensor() -> None:
    not_run = Outcome("b", "float32", {}, missing={"out": "no"})
    rounds = [
        {"fusedattn": outcome("a", "float32", out=0.5, dq=1.4), "f": outcome("a", "float32", out=3.0)},
        {"fusedattn": outcome("b", "float32", out=1.2, dq=0.3), "f": not_run},
    ]
    report = json_report.report(rounds, "triton", CPU)
    assert [(row["case"], row["tensor"], row["max"], row["mean"]) for row in report["features"]] == [
        ("a", "dq", 1.4, 0.7),
        ("b", "out", 1.2, 0.6),
    ]
    assert [(row["tensor"], row["case"], row["max"], row["row"]) for row in report["tensors"]] == [
        ("out", "b", 1.2, 0.3),
        ("dq", "a", 1.4, 0.35),
    ]
    other: dict = report["against"][0]
    of_features = [(row["tensor"], row["ok"], row["max"]) for row in other["features"]]
    assert of_features == [("out", False, 3.0), (None, None, None)]
    assert other["results"][-1]["missing"] == "no"
    assert report["ok"] is True, "the others do not count"
    assert json.loads(json_report.dumps(report)) == report


# With the few numbers of a tiny case, it is chance whether one of them exceeds the budget.
COMPARED = BROKEN.replace("seqlen_q=8, seqlen_k=8", "seqlen_q=48, seqlen_k=48")

MINE = """
import torch

def wrong(q, k, v, *, mask, rope, scale, return_lse):
    if return_lse:
        raise NotImplementedError("there is no lse")
    out = q @ k.mT
    return out.softmax(-1) @ v * torch.tensor([1.0] + [float("nan")] * (v.shape[-1] - 1))

def crash(*arguments, **options):
    raise RuntimeError("out of luck")
"""


@pytest.mark.thorough
@pytest.mark.usefixtures("_triton")
def test_check_against_others(tmp_path: Path) -> None:
    """Their errors and refusals are printed, and do not fail the check."""
    (tmp_path / "mine.py").write_text(MINE)
    others = [("--against", name) for name in ("sdpa-math", "sdpa-cudnn", "mine:wrong")]
    arguments = ["check", "--dtype", "float32", "--device", "cpu", *itertools.chain(*others)]
    code = COMPARED.format(fault="pass", arguments=arguments)
    out = run_python("-c", code, cwd=tmp_path, TRITON_INTERPRET="1").stdout
    table = out[out.index("Error against") :]
    assert max(map(len, table.splitlines())) <= 80
    assert re.search(r"^ +fusedattn +sdpa-math +sdpa-cudnn +mine:wrong$", table, re.MULTILINE)
    cell = r"\d\.\d\d +\d\.\d\d +\d+%!?\*?"
    assert re.search(rf"^  out +{cell} +{cell} +none \[1\] +inf +inf +>999%!$", table, re.MULTILINE)
    assert re.search(rf"^  lse +{cell} +none \[2\] +none \[1\] +none \[3\]$", table, re.MULTILINE)
    assert "[1] torch.sdpa-cudnn: device: got cpu" in table
    assert "[2] torch.sdpa-math: return_lse: " in table
    assert "[3] mine:wrong: there is no lse" in table
    assert re.search(r"mine:wrong, out: 720 of 768 elements are NaN or infinite", table)
    assert "fusedattn: 1 of 1 within the budget" in table
    assert "torch.sdpa-cudnn: 0 of 1 within the budget, 1 not run" in table
    assert "mine:wrong: 0 of 1 within the budget, 1 beyond it, 1 NaN or Inf, without lse" in table


@pytest.mark.thorough
@pytest.mark.usefixtures("_triton")
def test_check_against_a_function_fails_where_a_kernel_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    arguments = ["check", "--dtype", "float32", "--json", "--against", "sdpa-math", "--against", "mine:crash"]
    code = COMPARED.format(fault="out[..., -1, :] *= 1.0001", arguments=arguments)
    report = json.loads(run_python("-c", code, status=1, cwd=tmp_path, TRITON_INTERPRET="1").stdout)
    assert report["ok"] is False
    math, crash = report["against"]
    assert (math["name"], crash["name"]) == ("torch.sdpa-math", "mine:crash")
    assert [row["tensor"] for row in math["results"] if row["ok"] is not None] == ["out", "dq", "dk", "dv"]
    assert crash["results"][0]["error"] == "RuntimeError: out of luck"
    # All get the same problem: torch's function has no gradient through lse.
    assert not any(row["lse_gradient"] for row in report["results"])


def test_the_most_accurate_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    table = comparison.Table(["f"])
    better, worse = outcome("a", "float32", out=0.5, dq=1.00), outcome("a", "float32", out=1.8, dq=1.04)
    table.print_block({"fusedattn": better, "f": worse})
    table.print_block({"fusedattn": worse, "f": better})
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("  out", "  dq"))]
    assert lines == [
        ["out", "0.50", "0.25", "33%*", "1.80", "0.90", "120%!"],
        ["dq", "1.00", "0.50", "67%*", "1.04", "0.52", "69%*"],
        ["out", "1.80", "0.90", "120%!", "0.50", "0.25", "33%*"],
        ["dq", "1.04", "0.52", "69%*", "1.00", "0.50", "67%*"],
    ]
    table.print_summary()
    assert capsys.readouterr().out.endswith(
        "fusedattn: 1 of 2 within the budget, 1 beyond it\nf: 1 of 2 within the budget, 1 beyond it\n"
    )


def test_all_models_solve_the_task_of_the_weakest() -> None:
    """A function with a gradient through lse is measured without it beside a function that has none."""
    inputs = testing.make_inputs(testing.Case(seqlen_q=8, seqlen_k=8, head_dim=8))

    def complete(q, k, v, *, return_lse, **options):
        out, lse, _ = reference.attention(q, k, v, **options)
        return (out, lse) if return_lse else out

    outcomes, same = comparison.measure({"complete": complete}, inputs, "a", "float32")
    assert same is inputs
    assert outcomes["complete"].lse_gradient
    both = {"complete": complete, "math": peers.PEERS["torch.sdpa-math"]}
    outcomes, same = comparison.measure(both, inputs, "a", "float32")
    assert not same.dlse.any()
    assert {outcome.lse_gradient for outcome in outcomes.values()} == {False}
    assert outcomes["complete"].ratios == testing.check(complete, same)


def test_check_of_the_torch_backend_also_measures_out_without_lse() -> None:
    case = testing.Case("causal", causal="bottom_right")
    ratios = check_command.measure(case, "torch", CPU)
    assert set(ratios) == {"out", "dq", "dk", "dv"}
    assert any(r.max not in (0.0, 1.0) for r in ratios.values()), "this is the reference itself"


@pytest.mark.thorough
def test_demo(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "song.txt").write_text("".join(f"{i} bottles [/] on the wall\n" for i in range(400)))
    arguments = ("--quick", "--steps", "8", "--text", "text", "--out", "out/here", "--device", "cpu")
    out = run("demo", *arguments, cwd=tmp_path).stdout

    assert ESCAPE not in out
    assert "\r" not in out
    assert max(map(len, out.splitlines())) <= 80

    assert "backend torch, float32" in out
    assert "FAIL" not in out
    n_compared = 1 if "Triton kernels: not compared" in out else 2
    assert len(re.findall(r"parameters: within the budget\.$", out, re.MULTILINE)) == n_compared

    losses = [float(loss) for loss in re.findall(r"^step +\d+/8  loss (\S+)", out, re.MULTILINE)]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5
    before, after = map(float, re.findall(r"held-out text: (\S+) before, (\S+) after", out)[0])
    assert after < before - 0.5
    assert "The model goes on:" in out

    for seqlen in settings.CPU_QUICK.lengths:
        assert re.search(rf"^ +{seqlen} +\S+ +\S+ +[\d.]+x ", out, re.MULTILINE)
    assert (tmp_path / "out/here/fusedattn-demo.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert out.rstrip().endswith("out/here/fusedattn-demo.png")


def test_comparison_sees_a_small_fault(tmp_path: Path) -> None:
    sizes = settings.CPU_QUICK
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    (tmp_path / "text.txt").write_text("".join(f"{i} green bottles, hanging on the wall.\n" for i in range(400)))
    corpus_ = corpus.read_corpus(str(tmp_path), sizes.seqlen)
    reference = verify.build_model(sizes, 1, sizes.seqlen, CPU)
    fused = fuse(copy.deepcopy(reference), backend="torch")
    for module in fused.modules():
        if isinstance(module, FusedScaledDotProductAttention):
            module.scale = 1.001 / 32**0.5
    batches = [corpus.random_batch(corpus_.train, 4, sizes.seqlen, generator, CPU) for _ in range(2)]
    kinds = verify.compare(fused, copy.deepcopy(reference).double(), reference, batches)
    assert sum(kind.n_tensors for kind in kinds) == 2 + len(list(reference.parameters()))
    assert not any(kind.ok for kind in kinds if kind.name.startswith("grad"))


def test_a_folder_is_read_in_order_without_hidden_or_binary_files(tmp_path: Path) -> None:
    for name, content in (("b.txt", b"b" * 900), ("a/z.py", b"z" * 900), (".git/x", b"x" * 900), ("c", b"\0" * 900)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    text = corpus.read_corpus(str(tmp_path), seqlen=16)
    assert bytes(torch.cat((text.train, text.held_out)).tolist()) == b"b" * 900 + b"z" * 900
    assert text.source.endswith(", 2 files")


def test_peak_memory_of_a_block() -> None:
    with peak_memory(CPU) as peak:
        torch.ones(64 * 2**20, dtype=torch.uint8)
    if peak.bytes is None:
        pytest.skip("this system does not tell")
    assert 60 * 2**20 < peak.bytes < 100 * 2**20


def test_fastest_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        chosen = threads.choose_threads(lambda: time.sleep(0.02 * torch.get_num_threads()))
        assert chosen == torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send")
@pytest.mark.parametrize(
    ("command", "when"),
    [(("check",), b" ok\n"), (("demo", "--quick", "--out", "out"), b"Training the fused model")],
    ids=["check", "demo"],
)
def test_interruption(command: tuple[str, ...], when: bytes, tmp_path: Path) -> None:
    """During the work. While torch imports its compiler, for the first call, the signal may end Python or get lost."""
    for package in {"demo": ("rich", "matplotlib"), "check": ("triton",)}[command[0]]:
        pytest.importorskip(package)
    process = subprocess.Popen(
        [sys.executable, "-m", "fusedattn", *command, "--device", "cpu"],
        env=environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell makes background processes ignore this signal, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    try:
        while (line := process.stdout.readline()) and when not in line:
            pass
        assert line, process.communicate()[1].decode()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.decode() == "interrupted\n"


@pytest.mark.thorough
def test_a_quick_check_has_each_case_once() -> None:
    dtypes = ("--dtype", "float16", "--dtype", "bfloat16")
    report = json.loads(run("check", "--quick", "--backend", "torch", "--feature", "window", "--json", *dtypes).stdout)
    done = [(row["case"], row["dtype"]) for row in report["results"]]
    cases = list(dict.fromkeys(case for case, _ in done))
    assert len(set(done)) == len(cases) > 1
    assert len({dtype for _, dtype in done}) == 2


def test_output_that_nobody_reads_to_its_end() -> None:
    """With ``| head``, no traceback appears."""
    command = f"{shlex.quote(sys.executable)} -W ignore -m fusedattn check --backend torch --quick --feature causal"
    done = subprocess.run(f"{command} | head -n 1", shell=True, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


def test_progress_is_for_terminals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.shown("abc", 3)) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(progress.shown("abc", 3)) == ["a", "b", "c"]
    shown = capsys.readouterr().err
    assert "1 of 3, about 0 s left" in shown
    assert shown.endswith(progress.CLEARED)
