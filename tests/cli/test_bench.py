"""``meta-attention bench``."""

import json
import subprocess
import sys

import pytest
import torch

from meta_attention.bench import cpu_suite
from meta_attention.bench import run as runs
from meta_attention.bench.data import OpShape
from meta_attention.bench.op_suite import QUARTERS, OpPlan
from meta_attention.bench.rows import Results, Row, Timing
from meta_attention.bench.timing import Clock
from meta_attention.errors import BackendUnavailableError, ConfigError, DataError

TINY = OpPlan(
    suite="cpu",
    shapes=((OpShape(1, 256, H=2, P=16, window=32), (QUARTERS,)),),
    works=("forward",),
    baselines=("SDPA default",),
    hybrid_window=None,
)


@pytest.fixture
def bench(run, monkeypatch):
    """The command with a tiny suite for the CPU."""

    def tiny(session):
        session.clock = Clock(session.device, budget_ms=0.0, min_runs=2, max_runs=2)
        return cpu_suite.run_cpu(session, TINY)

    monkeypatch.setitem(runs.SUITE_RUNS, "cpu", runs.Suite(tiny, tiny))
    return lambda *arguments: run("bench", *arguments)


def test_table_and_file(bench, tmp_path):
    path = tmp_path / "new" / "results.json"
    result = bench("--suite", "cpu", "--json", path, "--commit", "abc123")
    assert result.exit_code == 0, result.output
    assert "cpu: float32 B=1 T=256 H=2 P=16, on a CPU: ratios only" in result.stdout
    assert "25/25/50" in result.stdout
    assert " ms" not in result.output
    assert "forward routed:" in result.stderr
    document = json.loads(path.read_text())
    assert document["machine"]["commit"] == "abc123"
    assert document["is_complete"] is True
    assert [row["name"] for row in document["rows"]] == ["SDPA default", "routed"]
    assert {row["status"] for row in document["rows"]} == {"measured"}
    assert not any(row["is_comparable"] for row in document["rows"])


def test_json_to_stdout_is_one_document(bench):
    result = bench("--suite", "cpu", "--quick", "--seed", 5, "--json", "-")
    document = json.loads(result.stdout)
    assert document["schema"] == 1
    assert document["arguments"]["seed"] == 5
    assert document["arguments"]["quick"] is True
    row = document["rows"][1]
    assert row["timing"]["median_ms"] > 0
    assert row["gates"][0].keys() == {"name", "error", "budget"}


def test_an_interrupted_run_shows_what_it_has(bench, monkeypatch):
    def interrupted(session):
        cpu_suite.run_cpu(session, TINY)
        raise KeyboardInterrupt

    monkeypatch.setitem(runs.SUITE_RUNS, "cpu", runs.Suite(interrupted, interrupted))
    result = bench("--suite", "cpu")
    assert result.exit_code == 130
    assert "25/25/50" in result.stdout


def test_without_a_gpu_it_says_what_runs(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = bench()
    assert isinstance(result.exception, BackendUnavailableError)
    assert str(result.exception) == (
        "--suite op,layer,model,train,decode needs a GPU that torch can see; '--suite cpu' runs "
        "without one"
    )


@pytest.mark.parametrize("suite", ["", "cpu,ops", "cpu;op"])
def test_an_unknown_suite_is_one_sentence(bench, suite):
    result = bench("--suite", suite)
    assert isinstance(result.exception, ConfigError)
    assert "must be some of op, layer, model, train, decode, cpu" in str(result.exception)


def test_a_file_that_cannot_be_written_is_found_first(bench, tmp_path):
    result = bench("--suite", "cpu", "--json", tmp_path)
    assert isinstance(result.exception, DataError)
    assert "is a folder" in str(result.exception)


def test_saved_results_are_drawn(bench, tmp_path):
    path = tmp_path / "results.json"
    results = Results({"device": "NVIDIA H200"}, {}, path=path)
    for T in (4096, 16384):
        results.add(
            Row(
                suite="op", name="routed", work="forward", dtype="bfloat16", mix="25/25/50",
                shape={"B": 1, "T": T, "H": 8, "P": 128}, timing=Timing(1.0, 1.0, 1.0, 1.0, 10),
            )
        )  # fmt: skip
    result = bench("--plot", path)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "results.png").stat().st_size > 1000
    bench("--plot", path, "--image", tmp_path / "other.svg")
    assert (tmp_path / "other.svg").is_file()


def test_what_cannot_be_drawn_is_one_sentence(bench, tmp_path):
    for arguments, message in (
        (("--plot", tmp_path / "none.json"), "must be results written by"),
        (("--plot", tmp_path / "none.json", "--image", "x.pdf"), "must end in .png or .svg"),
        (("--image", "x.png"), "add --plot RESULTS.json"),
    ):
        result = bench(*arguments)
        assert isinstance(result.exception, ConfigError | DataError)
        assert message in str(result.exception)
        assert "\n" not in str(result.exception)


def test_help_has_examples_and_does_not_load_torch():
    code = (
        "import sys\n"
        "sys.argv = ['meta-attention', 'bench', '--help']\n"
        "from meta_attention.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    assert stop.code == 0\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "meta-attention bench --suite cpu" in result.stdout.partition("examples:")[2]


def test_the_command_runs_as_a_module():
    command = [sys.executable, "-m", "meta_attention.cli", "bench", "--suite", "nope"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error: --suite must be some of op, ")
    assert result.stderr.count("\n") == 1
