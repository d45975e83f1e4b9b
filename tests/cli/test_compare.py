"""``meta-attention evaluate --adapter``."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from meta_attention import adapt
from meta_attention.adapt import load_tokenizer, save_adapter
from meta_attention.errors import (
    BackendUnavailableError,
    ConfigError,
    DataError,
    MetaAttentionError,
)
from meta_attention.testing.pretrained import build_base, randomise_controllers
from meta_attention.training.corpus import Corpus
from meta_attention.training.tokenizer import build_tokenizer

TEXT = "The keeper counted the ships twice, once for the ledger and once for luck. " * 24


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "small-llama"
    tokenizer = build_tokenizer("bytes", Corpus("none", [""]))
    model = build_base("llama", vocab_size=len(tokenizer), max_position_embeddings=1024)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter") / "mine"
    vocab_size = len(load_tokenizer(str(base)))
    model = build_base("llama", vocab_size=vocab_size, max_position_embeddings=1024)
    randomise_controllers(adapt(model, window_size=8))
    return save_adapter(model, folder, base=str(base))


def test_an_adapter_is_measured_as_a_checkpoint_is(run, adapter):
    result = run("evaluate", "--adapter", adapter, "--text", TEXT[:200], "--length", 64, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["num_tokens"] == 199
    assert len(figures["layers"]) == 2
    assert 0.0 < figures["projected_cost"] < 1.0


def test_base_and_adapter_stand_side_by_side(run, adapter, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    flags = ["--adapter", adapter, "--compare-base", "--data", tmp_path / "text.txt"]
    flags += ["--lengths", "700,600", "--sequences", 2, "--questions", 1, "--device", "cpu"]
    result = run("evaluate", *flags, "--decode-batch", 2)
    assert result.exit_code == 0, result.output
    for name in ("base", "adapted", "attention FLOPs", "512 to 699", "one of 6", "prefill"):
        assert name in result.output
    # times of a CPU are not shown
    assert "no result" in result.output
    assert "base ms" not in result.output

    result = run("evaluate", *flags, "--no-time", "--distractors", 1, "--json")
    figures = json.loads(result.stdout)
    assert [row["length"] for row in figures["lengths"]] == [600, 700]
    for row in figures["lengths"]:
        assert 0.0 < row["attention_share"] < 1.0
        assert row["loss_increase"] == pytest.approx(row["adapted_loss"] - row["base_loss"])
    assert set(figures["facts"]) == {"one fact", "one of 6"}
    assert figures["facts"]["one fact"][0]["base"]["num_sequences"] == 5
    assert figures["times"] == []
    assert figures["num_sequences"] == 2


def test_without_a_text_it_is_pythons_manual(run, adapter):
    flags = ["--lengths", "64", "--sequences", 1, "--questions", 0, "--no-time", "--json"]
    result = run("evaluate", "--adapter", adapter, "--compare-base", *flags)
    assert json.loads(result.stdout)["facts"] == {}


def test_the_base_may_be_somewhere_else(run, adapter, base, tmp_path):
    moved = shutil.copytree(base, tmp_path / "elsewhere")
    flags = ["--text", TEXT[:100], "--json"]
    result = run("evaluate", "--adapter", adapter, "--base", moved, *flags)
    assert result.exit_code == 0, result.output
    build_base("llama", seed=5, vocab_size=258, max_position_embeddings=1024).save_pretrained(moved)
    result = run("evaluate", "--adapter", adapter, "--base", moved, *flags)
    assert isinstance(result.exception, ConfigError)
    message = str(result.exception)
    assert "of other weights than this model (they differ in " in message
    # the flag, not the argument that Python has
    assert message.endswith("; load the base it was trained for, or add --allow-other-base")


def test_an_adapter_is_taken_to_another_base_when_told(run, adapter, base, tmp_path):
    other = shutil.copytree(base, tmp_path / "trained-on")
    build_base("llama", seed=5, vocab_size=258, max_position_embeddings=1024).save_pretrained(other)
    flags = ["--adapter", adapter, "--base", other, "--device", "cpu"]
    losses = []
    for name, extra in (
        ("evaluate", ["--text", TEXT[:100], "--json"]),
        ("evaluate", ["--compare-base", "--text", TEXT[:100], "--lengths", "64", "--json"]),
        ("inspect", ["--text", TEXT[:20], "--json"]),
        ("generate", ["--prompt", "The", "--max-new-tokens", 2, "--json"]),
    ):
        extra += ["--questions", 0, "--no-time", "--sequences", 1] * ("--compare-base" in extra)
        result = run(name, *flags, *extra)
        assert "add --allow-other-base" in str(result.exception)
        result = run(name, *flags, *extra, "--allow-other-base")
        assert result.exit_code == 0, result.exception
        losses.append(json.loads(result.stdout).get("loss"))
    own = run("evaluate", "--adapter", adapter, "--text", TEXT[:100], "--json", "--device", "cpu")
    # it is the other one that was run
    assert losses[0] != pytest.approx(json.loads(own.stdout)["loss"], rel=1e-3)


def test_another_shape_is_refused_also_when_told(run, adapter, base, tmp_path):
    other = shutil.copytree(base, tmp_path / "wider")
    wider = build_base("llama", vocab_size=258, hidden_size=64, max_position_embeddings=1024)
    wider.save_pretrained(other)
    flags = ["--adapter", adapter, "--base", other, "--allow-other-base", "--text", "ab"]
    result = run("evaluate", *flags)
    assert isinstance(result.exception, ConfigError)
    assert "its shape is" in str(result.exception)
    assert "allow" not in str(result.exception)


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        ([], ConfigError, "either a checkpoint or --adapter"),
        (["ADAPTER", "--adapter", "ADAPTER"], ConfigError, "either a checkpoint or --adapter"),
        (["ADAPTER", "--base", "x"], ConfigError, "--base must be given with --adapter"),
        (["ADAPTER", "--allow-other-base"], ConfigError, "--allow-other-base must be given with"),
        (["ADAPTER", "--compare-base"], ConfigError, "--compare-base must be given with"),
        (["--adapter", "ADAPTER", "--chat"], ConfigError, "--chat must be given with --compare"),
        (["--adapter", "ADAPTER", "--lengths", "9"], ConfigError, "--lengths must be given with"),
        (["ADAPTER", "--distractors", "1"], ConfigError, "--distractors must be given with"),
        (
            ["--adapter", "ADAPTER", "--compare-base", "--distractors", "90"],
            ConfigError,
            "with distractors at most 90",
        ),
        (["--adapter", "ADAPTER", "--task", "recall"], ConfigError, "--task must not be given"),
        (["--adapter", "no-such", "--compare-base"], DataError, "no adapter.json"),
        (
            ["--adapter", "ADAPTER", "--compare-base", "--stride", "9"],
            ConfigError,
            "--stride must not be given with --compare-base",
        ),
        (
            ["--adapter", "ADAPTER", "--compare-base", "--lengths", "a,9"],
            ConfigError,
            "--lengths must be numbers",
        ),
        (
            ["--adapter", "ADAPTER", "--compare-base", "--lengths", "2048"],
            ConfigError,
            "lengths must be between 2 and 1024",
        ),
        (
            ["--adapter", "ADAPTER", "--compare-base", "--lengths", "99", "--questions", "1"],
            ConfigError,
            "raise the length (--lengths), have fewer of them, or ask for no facts (--questions 0)",
        ),
        (
            ["--adapter", "ADAPTER", "--compare-base", "--text", "short"],
            DataError,
            "the text must have >= 1024 tokens, got 5",
        ),
        (
            ["--adapter", "ADAPTER", "--base", "no/such/base", "--text", "ab"],
            ConfigError,
            "the base no/such/base cannot be loaded",
        ),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(flags, error, message, run, adapter):
    result = run("evaluate", *[adapter if flag == "ADAPTER" else flag for flag in flags])
    assert isinstance(result.exception, error), result.exception
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:20000])


def narrow(path):
    file = path.parent / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 40}))


def drop_a_weight(path):
    weights = load_file(path)
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("command", ["evaluate", "generate"])
@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (cut_short, "cannot be loaded; add --base with a folder that holds it whole"),
        (narrow, "but 6 are missing or of another shape, such as model.layers.0.mlp.down_proj"),
        (drop_a_weight, "such as model.layers.0.self_attn.q_proj.weight; save or download"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_base_is_one_sentence(command, breaks, message, run, adapter, base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "broken")
    breaks(folder / "model.safetensors")
    flag = "--text" if command == "evaluate" else "--prompt"
    result = run(command, "--adapter", adapter, "--base", folder, flag, "ab")
    assert isinstance(result.exception, MetaAttentionError), result.exception
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    # Transformers has its own to say, in tables
    assert not result.stderr


def test_an_encoder_is_refused_in_one_sentence(run, base, tmp_path, monkeypatch):
    folder = save_adapter(adapt(build_base("bert"), window_size=8), tmp_path, base=str(base))
    # as packaged encoders are loaded
    monkeypatch.setattr("meta_attention.adapt.load_base", lambda name, **_: build_base("bert"))
    result = run("evaluate", "--adapter", folder, "--text", "ab")
    assert isinstance(result.exception, ConfigError)
    assert "bidirectional" in str(result.exception)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_sentence(run, adapter):
    result = run("evaluate", "--adapter", adapter, "--text", "ab", "--device", "cuda")
    assert isinstance(result.exception, BackendUnavailableError)
