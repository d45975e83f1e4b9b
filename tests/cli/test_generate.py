"""``meta-attention generate``."""

import json

import pytest

from meta_attention.errors import ConfigError, DataError

PROMPT = "The keeper"


def written(run, checkpoint, *flags):
    result = run("generate", checkpoint, "--max-new-tokens", 6, "--json", *flags)
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def test_greedy_text_is_repeatable_and_follows_the_prompt(run, checkpoint):
    once = written(run, checkpoint, "--prompt", PROMPT, "--greedy")
    assert once == written(run, checkpoint, "--prompt", PROMPT, "--greedy")
    assert once["prompt"] == PROMPT
    assert 1 <= len(once["tokens"]) <= 6
    plain = run("generate", checkpoint, "--prompt", PROMPT, "--greedy", "--max-new-tokens", 6)
    assert plain.stdout == PROMPT + once["text"] + "\n"


def test_a_seed_makes_sampling_repeatable(run, checkpoint):
    flags = ("--prompt", PROMPT, "--temperature", 1.5, "--top-p", 0.9, "--top-k", 40, "--seed")
    assert written(run, checkpoint, *flags, 1) == written(run, checkpoint, *flags, 1)
    assert written(run, checkpoint, *flags, 1) != written(run, checkpoint, *flags, 2)


def test_only_the_likeliest_is_greedy(run, checkpoint):
    greedy = written(run, checkpoint, "--prompt", PROMPT, "--greedy")
    assert written(run, checkpoint, "--prompt", PROMPT, "--top-k", 1) == greedy


def test_beams_search(run, checkpoint):
    beams = written(run, checkpoint, "--prompt", PROMPT, "--num-beams", 3)
    assert beams == written(run, checkpoint, "--prompt", PROMPT, "--num-beams", 3)


def test_without_a_prompt_a_document_begins(run, checkpoint):
    assert written(run, checkpoint, "--seed", 1)["prompt"] == ""


def test_streaming_prints_what_is_written(run, checkpoint, tmp_path):
    (tmp_path / "start.txt").write_text(PROMPT)
    whole = written(run, checkpoint, "--prompt", PROMPT, "--greedy")
    result = run(
        "generate", checkpoint, "--prompt-file", tmp_path / "start.txt", "--greedy", "--stream",
        "--max-new-tokens", 6,
    )  # fmt: skip
    assert result.stdout.rstrip("\n") == (PROMPT + whole["text"]).rstrip("\n")


def test_by_default_it_writes_as_far_as_there_is_room(run, checkpoint):
    result = run("generate", checkpoint, "--prompt", "a" * 60, "--seed", 1, "--json")
    assert len(json.loads(result.stdout)["tokens"]) <= 4


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        (["--prompt", "a" * 64], DataError, "max_position_embeddings = 64, got 64 tokens"),
        (["--prompt", "a" * 60, "--max-new-tokens", "5"], ConfigError, "must be at most 4"),
        (["--prompt", ""], DataError, "must not be empty"),
        (["--prompt", "a", "--prompt-file", "b"], DataError, "exactly one of --prompt"),
        (["--prompt", "a", "--greedy", "--top-k", "3"], ConfigError, "leave out --top-k"),
        (["--prompt", "a", "--num-beams", "2", "--top-p", "0.5"], ConfigError, "leave out --top-p"),
        (["--prompt", "a", "--temperature", "0"], ConfigError, "use --greedy"),
        (["--prompt", "a", "--stream", "--json"], ConfigError, "leave out --stream"),
        (["--prompt", "a", "--stream", "--num-beams", "2"], ConfigError, "leave out --stream"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(flags, error, message, run, checkpoint):
    result = run("generate", checkpoint, *flags)
    assert isinstance(result.exception, error)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_help_has_examples(run):
    assert "meta-attention generate runs/tiny --prompt" in run("generate", "--help").output
