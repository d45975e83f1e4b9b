"""``meta-attention flops``."""

import json
import subprocess
import sys

import pytest

from meta_attention.errors import ConfigError

MIX = "full=0.25,local=0.25,linear=0.5"


def test_table_has_a_row_for_every_length(run):
    result = run("flops", "--mix", MIX, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    for text in ("attention alone", "whole model", "of full", "linear 0.5", "1k", "128k"):
        assert text in result.output
    rows = [line.split() for line in result.output.splitlines() if "%" in line]
    assert [row[0] for row in rows] == ["1k", "2k", "4k", "8k", "16k", "32k", "64k", "128k"]
    assert all(len(row) == 7 for row in rows)
    # a quarter of full attention, and little else, at the end
    assert float(rows[-1][2].rstrip("%")) == pytest.approx(25.0, abs=0.5)


def test_table_fits_a_terminal(run):
    result = run("flops", "--mix", MIX, env={"COLUMNS": "80"})
    assert all(len(line) <= 80 for line in result.output.splitlines())
    assert result.output.count("%") == 3 * 8


def test_json_is_one_document(run):
    result = run(
        "flops", "--mix", MIX, "--hidden-size", 64, "--heads", 4, "--kv-heads", 2, "--layers", 3,
        "--window", 16, "--vocab-size", 100, "--own-projections", "--json",
    )  # fmt: skip
    table = json.loads(result.stdout)
    assert table["mix"] == {"full": 0.25, "local": 0.25, "linear": 0.5}
    assert (table["window_size"], table["kv_heads"], table["layers"]) == (16, 2, 3)
    assert [row["length"] for row in table["rows"]] == [1024 << n for n in range(8)]
    first = table["rows"][0]
    # a set of projections for each of three experts
    projections = 3 * 3 * 2 * 64 * (4 + 4 + 2 + 2) * 16
    controller = 3 * 2 * 64 * (64 + 2 + 3)
    difference = first["layer"]["gflop_per_token"] - first["attention"]["gflop_per_token"]
    assert difference * 1e9 == pytest.approx(projections + controller)


def test_sinks_are_counted(run):
    def attention(*options):
        rows = json.loads(run("flops", "--mix", "local=1", "--json", *options).stdout)["rows"]
        return [row["attention"]["gflop_per_token"] for row in rows]

    window, sinks, wider = (
        attention("--window", 60 + n, "--num-sinks", s) for n, s in ((0, 0), (0, 4), (4, 0))
    )
    # four keys more for all but the first tokens, be they sinks or next to the window
    for without, ours, expected in zip(window, sinks, wider, strict=True):
        assert ours - without == pytest.approx(expected - without, rel=0.05)


def test_depth_multiplies_what_is_in_blocks_and_residuals_are_of_every_token(run):
    def first(*options):
        result = run("flops", "--mix", "full=0.5,ssm=0.5", "--layers", 4, *options, "--json")
        return json.loads(result.stdout)

    depth = ("--depth-capacity", 0.5)
    plain, less, both = first(), first(*depth), first(*depth, "--residual", "attention")
    assert (both["depth_capacity"], both["residual"]) == (0.5, "attention")
    costs = [table["rows"][0] for table in (plain, less, both)]
    plain, less, both = (row["model"]["gflop_per_token"] * 1e9 for row in costs)
    assert less < plain
    # logits and sums, over 2 to 9 sources
    assert both - less == pytest.approx(4 * 1024 * sum(range(2, 10)))
    assert costs[1]["layer"] == costs[2]["layer"]


def test_full_attention_alone_costs_what_it_costs(run):
    rows = json.loads(run("flops", "--mix", "full=1", "--json").stdout)["rows"]
    assert {row[name]["relative_to_full"] for row in rows for name in ("attention", "model")} == {1}


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ("full=0.5,local=0.4", "the shares of a mix must sum to 1, got 0.9"),
        ("full=1.5,local=-0.5", "share of 'local' in a mix must be >= 0, got -0.5"),
        ("full=0.5,sparse=0.5", "unknown expert 'sparse'; known are"),
        ("full=0.5,full=0.5", "each expert once, got 'full' again"),
        ("full=0.5,local", "expert=share, parted by commas, .* got 'local'"),
        ("full=half,local=0.5", "got 'full=half'"),
        ("", "got ''"),
        ("full=nan", "must be >= 0, got nan"),
    ],
)
def test_a_bad_mix_is_one_sentence(mix, message, run):
    result = run("flops", "--mix", mix)
    assert isinstance(result.exception, ConfigError)
    assert "\n" not in str(result.exception)
    with pytest.raises(ConfigError, match=message):
        raise result.exception


def test_a_model_that_cannot_be_is_one_sentence(run):
    result = run("flops", "--hidden-size", 100, "--heads", 3)
    assert isinstance(result.exception, ConfigError)
    assert "hidden_size must be a multiple of num_attention_heads" in str(result.exception)
    result = run("flops", "--layers", 2, "--residual", "block_attention")
    assert isinstance(result.exception, ConfigError)
    assert "residual_blocks must be at most 4" in str(result.exception)


def test_help_has_examples_and_does_not_load_torch():
    code = (
        "import sys\n"
        "sys.argv = ['meta-attention', 'flops', '--help']\n"
        "from meta_attention.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    assert stop.code == 0\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "meta-attention flops --mix full=" in result.stdout.partition("examples:")[2]


def test_blocks_of_residuals_without_such_residuals_are_refused(run):
    result = run("flops", "--residual", "attention", "--residual-blocks", 4)
    assert isinstance(result.exception, ConfigError)
    assert "--residual-blocks needs --residual block_attention" in str(result.exception)
