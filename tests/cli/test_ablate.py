"""``meta-attention ablate`` and ``meta-attention report``."""

import io
import json

import pytest

from meta_attention.ablation import sweep
from meta_attention.ablation.run import Job
from meta_attention.cli.ablate import RunsView, default_jobs
from meta_attention.errors import ConfigError, DataError

VERY_SHORT = ("--short", "--steps", "4", "--max-bytes", "12000", "--jobs", "1")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The keeper counted the ships twice: once for luck. " * 400)
    return path


def error_of(run, *arguments):
    result = run(*arguments)
    assert isinstance(result.exception, ConfigError | DataError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_runs_end_in_a_table_a_page_and_json(run, text, tmp_path):
    out = tmp_path / "out"
    arguments = ("--variants", "bayesian,prior-free", "--data", text, "--out", out, *VERY_SHORT)
    result = run("ablate", *arguments, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert [row["variant"] for row in record["experiments"]["ablation"]] == [
        "bayesian",
        "prior-free",
    ]
    assert record["failed"] == {}
    assert record["is_short"]
    assert record["text"]["name"] == str(text)
    assert (out / "report" / "index.html").is_file()
    saved = json.loads((out / "report" / "results.json").read_text())
    assert saved == {name: value for name, value in record.items() if name != "failed"}

    # again: nothing to do, the same table
    again = run("ablate", *arguments)
    assert again.exit_code == 0
    assert "all 2 runs are done" in again.output
    assert "prior-free" in again.stdout

    # the report alone, elsewhere
    result = run("report", out, "--out", tmp_path / "page", "--json")
    assert json.loads(result.stdout) == saved
    assert (tmp_path / "page" / "frontier.png").is_file()


def test_bad_input_is_one_sentence_and_nothing_is_written(run, text, tmp_path):
    out = tmp_path / "out"
    to = ("--out", out, "--data", text)
    assert "one of bayesian," in error_of(run, "ablate", "--variants", "bayes", *to)
    assert "one of ablation, kl-weight," in error_of(run, "ablate", "--sweep", "kl", *to)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "binary.txt" in error_of(run, "ablate", "--out", out, "--data", binary)
    assert not out.exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("dear")
    assert "something else" in error_of(run, "ablate", "--out", mine, "--data", text)
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
    assert "has no ablation.json" in error_of(run, "report", mine)


def test_a_run_that_fails_is_named_and_the_command_fails(run, text, tmp_path, monkeypatch):
    def fail(jobs, num_processes):
        for job in jobs:
            if job.variant.name == "full":
                yield job, "out of luck"
            else:
                sweep.execute(job)
                yield job, None

    monkeypatch.setattr(sweep, "run_jobs", fail)
    out = tmp_path / "out"
    result = run("ablate", "--variants", "local,full", "--data", text, "--out", out, *VERY_SHORT)
    assert result.exit_code == 1
    assert "failed: full seed 0: out of luck" in result.output
    assert "not done: full seed 0" in result.output


def test_where_every_run_fails_the_reasons_are_all_there_is(run, text, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "run_jobs", lambda jobs, n: ((job, "out of luck") for job in jobs))
    arguments = ("--variants", "full", "--data", text, "--out", tmp_path / "out", *VERY_SHORT)
    result = run("ablate", *arguments)
    assert result.exit_code == 1
    assert "failed: full seed 0: out of luck" in result.output
    result = run("ablate", *arguments, "--json")
    assert json.loads(result.stdout) == {"failed": {"full seed 0": "out of luck"}}


def test_the_list_names_variants_and_experiments(run):
    result = run("ablate", "--list")
    assert result.exit_code == 0
    for name in ("recommended", "hybrid", "kl-weight", "repetition", "gradient-variance"):
        assert f"\n  {name} " in result.stdout
    record = json.loads(run("ablate", "--list", "--json").stdout)
    assert "kl-weight-0.1" in record["experiments"]["kl-weight"]["variants"]


def test_the_view_shows_variants_steps_and_what_is_left(tmp_path):
    from rich.console import Console

    from meta_attention.ablation.variants import VARIANTS, short_base

    jobs = [
        Job(VARIANTS[name], seed, short_base(), tmp_path / name / str(seed))
        for name in ("full", "bayesian")
        for seed in range(2)
    ]
    for job in jobs[:3]:
        job.folder.mkdir(parents=True)
    view = RunsView(jobs)
    (jobs[0].folder / "result.json").write_text("{}")
    row = {"step": 120, "kind": "train", "task_loss": 2.5, "projected_cost": 0.25}
    (jobs[2].folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(view.render())
    shown = console.export_text()
    assert "full" in shown
    assert "1/2" in shown
    assert "120/300" in shown
    assert "2.500" in shown
    done = 300 * 0.45 + 0.95 * 120
    assert f"{100 * done / (2 * 300 * 1.45):.0f}%" in shown


def test_processes_follow_the_cores_and_a_gpu_takes_a_dozen_at_most():
    assert default_jobs(has_gpu=False) >= 1
    assert 1 <= default_jobs(has_gpu=True) <= 12
