"""``meta-attention check``."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from meta_attention import cli
from meta_attention.errors import ConfigError
from meta_attention.evaluation import check as evaluation
from meta_attention.evaluation.check import CheckReport, StructuralRow

run = CliRunner().invoke


def test_table_shows_the_papers_values_and_ours():
    result = run(cli.app, ["check", "--seeds", "3"])
    assert result.exit_code == 0
    for text in ("output shape", "0.209", "0.406", "0.385", "1.060", "3.420", "holds"):
        assert text in result.output


def test_json_is_one_document():
    result = run(cli.app, ["check", "--seeds", "2", "--json"])
    report = json.loads(result.output)
    assert report["passed"] is True
    assert report["seeds"] == 2
    assert len(report["values"]) == 5


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_failed_structure_is_exit_status_one(flags, monkeypatch):
    failed = CheckReport(1, [StructuralRow("NaN / Inf", "none", False, "3 values")], [])
    monkeypatch.setattr(evaluation, "run_check", lambda *a, **k: failed)
    result = run(cli.app, ["check", *flags])
    assert result.exit_code == 1
    assert "3 values" in result.output


def test_no_seeds_is_refused():
    result = run(cli.app, ["check", "--seeds", "0"])
    assert result.exit_code == 2
    assert "--seeds" in result.output


@pytest.mark.parametrize(
    "command", ["ablate", "check", "train", "evaluate", "generate", "inspect", "report"]
)
def test_help_has_examples_and_does_not_load_torch(command):
    code = (
        "import sys\n"
        "sys.argv = ['meta-attention', sys.argv[1], '--help']\n"
        "from meta_attention.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    assert stop.code == 0\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    result = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert f"meta-attention {command} " in result.stdout.partition("examples:")[2]


def test_an_error_raised_on_purpose_is_one_line(monkeypatch, capsys):
    def fail() -> None:
        raise ConfigError("window_size must be >= 1, got 0")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: window_size must be >= 1, got 0\n"
