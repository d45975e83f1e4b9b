"""``meta-attention evaluate``."""

import json

import pytest

from meta_attention.errors import ConfigError, DataError
from meta_attention.training.overrides import build_settings
from meta_attention.training.run import train_model

TEXT = "The keeper counted the ships twice: once for the ledger and once for luck."


def test_table_shows_every_figure(run, checkpoint):
    result = run("evaluate", checkpoint, "--text", TEXT, "--forced", "--device", "cpu")
    assert result.exit_code == 0, result.output
    for name in ("loss", "perplexity", "bits per byte", "calibration error", "projected cost"):
        assert name in result.output
    for name in ("adaptivity", "regret", "static regret", "full", "linear", "local", "float32"):
        assert name in result.output


def test_json_is_one_document(run, checkpoint, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT)
    result = run(
        "evaluate", checkpoint, "--data", tmp_path / "a.txt", "--data", tmp_path / "b.txt",
        "--length", 32, "--stride", 8, "--batch-size", 2, "--json",
    )  # fmt: skip
    figures = json.loads(result.stdout)
    assert figures["num_documents"] == 2
    assert figures["num_tokens"] == 2 * (len(TEXT) - 1)
    assert (figures["length"], figures["stride"]) == (32, 8)
    assert figures["bits_per_byte"] > 0.0


def test_max_tokens_bounds_the_work(run, checkpoint):
    result = run("evaluate", checkpoint, "--text", TEXT, "--max-tokens", 10, "--json")
    assert json.loads(result.stdout)["num_tokens"] == 9


def test_text_may_come_from_stdin(run, checkpoint):
    result = run("evaluate", checkpoint, "--text-file", "-", "--json", input=TEXT)
    assert json.loads(result.stdout)["num_tokens"] == len(TEXT) - 1


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        ([], DataError, "one of --text, --text-file, --data and --task"),
        (["--task", "needle", "--text", TEXT], ConfigError, "--text must not be given with --task"),
        (["--task", "needle", "--max-tokens", "9"], ConfigError, "--max-tokens must not be given"),
        (["--text", TEXT, "--sequences", "9"], ConfigError, "--sequences must not be given"),
        (["--task", "recall", "--data", "x"], ConfigError, "data must not be given"),
        (["--task", "needle"], ConfigError, "a sequence must have >= "),
        (["--text", "a", "--data", "b"], DataError, "must not be given together"),
        (["--text", ""], DataError, "must not be empty"),
        (["--text", "a"], DataError, "at least two tokens"),
        (["--text", TEXT, "--length", "65"], ConfigError, "max_position_embeddings = 64"),
        (["--text", TEXT, "--stride", "64"], ConfigError, "stride must be between"),
        (["--data", "no/such/file.txt"], DataError, "no file, folder or glob"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(flags, error, message, run, checkpoint):
    result = run("evaluate", checkpoint, *flags)
    assert isinstance(result.exception, error)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_a_folder_that_is_not_a_checkpoint_is_one_sentence(run, tmp_path):
    result = run("evaluate", tmp_path, "--text", TEXT)
    assert isinstance(result.exception, ConfigError)
    assert "no config.json" in str(result.exception)


def test_help_has_examples(run):
    assert "meta-attention evaluate runs/tiny --text-file" in run("evaluate", "--help").output


@pytest.fixture(scope="module")
def recall_checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("recall") / "run"
    sizes = "pairs=4,fewest_pairs=2,recalls=3,copies=3,copy_distance=3,keys=6,values=6,noise=3"
    changes = {"task": f"recall:{sizes}", "length": 32, "hidden_size": 32, "window_size": 4}
    train_model(build_settings("recall", changes | {"steps": 1, "eval_every": 0}), out)
    return out


def test_a_task_is_measured_with_the_sizes_it_was_trained_with(run, recall_checkpoint):
    flags = ("--task", "recall", "--sequences", 5)
    result = run("evaluate", recall_checkpoint, *flags, "--forced")
    assert result.exit_code == 0, result.output
    for name in ("of 30 answers right", "precision", "recall", "adaptivity", "static regret"):
        assert name in result.output
    figures = json.loads(run("evaluate", recall_checkpoint, *flags, "--json").stdout)
    assert figures["task"].startswith("recall:pairs=4,")
    assert (figures["num_sequences"], figures["length"]) == (5, 32)
    assert figures["num_asked"] == 30
    assert len(figures["layers"]) == 2
    fewer = run("evaluate", recall_checkpoint, "--task", "recall:pairs=3", "--json")
    assert json.loads(fewer.stdout)["num_asked"] == 6 * 128
