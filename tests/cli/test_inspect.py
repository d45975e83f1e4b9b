"""``meta-attention inspect``."""

import json
import subprocess
import sys

import pytest

from meta_attention.errors import ConfigError, DataError

TEXT = "The keeper <b>counted</b>."


def test_terminal_shows_text_legend_and_layers(run, checkpoint):
    result = run("inspect", checkpoint, "--text", TEXT)
    assert result.exit_code == 0, result.exception
    for name in ("layer 0:", "full", "linear", "local", "adaptivity", "The"):
        assert name in result.stdout


def test_a_layer_and_a_signal_can_be_chosen(run, checkpoint):
    result = run(
        "inspect", checkpoint, "--text", TEXT, "--layer", 1, "--signal", "mutual-information"
    )
    assert "mutual_information in layer 1" in result.stdout
    assert TEXT in result.stdout


def test_a_page_is_written_and_named(run, checkpoint, tmp_path):
    page = tmp_path / "routes.html"
    result = run("inspect", checkpoint, "--text", TEXT, "--html", page)
    assert f"wrote {page}" in result.stdout
    source = page.read_text("utf-8")
    assert "Where the tokens go: tiny" in source
    assert "<b>" not in source


def test_json_is_one_document(run, checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    result = run(
        "inspect", checkpoint, "--text-file", tmp_path / "text.txt", "--json", "--html",
        tmp_path / "page.html",
    )  # fmt: skip
    inspection = json.loads(result.stdout)
    assert "".join(inspection["tokens"]) == TEXT
    assert len(inspection["layers"]) == 2
    assert len(inspection["layers"][0]["weights"]) == len(TEXT)
    assert (tmp_path / "page.html").is_file()


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        ([], DataError, "exactly one of --text"),
        (["--text", "a" * 65], DataError, "max_position_embeddings = 64 tokens, got 65"),
        (["--text", "a", "--layer", "2"], ConfigError, "between 0 and 1, got 2"),
        (["--text", "a", "--signal", "mood"], ConfigError, "expert, loss, mean_entropy"),
        (["--text", "a", "--html", "no/such/folder/a.html"], DataError, "can be written"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(flags, error, message, run, checkpoint):
    result = run("inspect", checkpoint, *flags)
    assert isinstance(result.exception, error)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_no_command_on_a_checkpoint_loads_torch_for_its_help():
    code = (
        "import sys\n"
        "sys.argv = ['meta-attention']\n"
        "import meta_attention.cli.evaluate, meta_attention.cli.generate\n"
        "import meta_attention.cli.inspect\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
        "assert 'rich' not in sys.modules, 'rich was loaded'\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
