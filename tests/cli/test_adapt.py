"""``meta-attention adapt``, and what is done with an adapter."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from meta_attention.adapt import load_adapter, routers_of
from meta_attention.adapt.adapters import WEIGHTS_FILE
from meta_attention.errors import ConfigError, DataError
from meta_attention.testing.pretrained import build_base
from meta_attention.training.corpus import Corpus
from meta_attention.training.tokenizer import build_tokenizer

SHORT = (
    *("--length", 32, "--window-size", 4, "--num-sinks", 1, "--target-cost", 0.6),
    *("--steps", 6, "--batch-size", 2, "--eval-every", 3, "--save-every", 3, "--max-bytes", 4000),
    *("--recall-share", 0),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a small model and its tokenizer, as from_pretrained takes it."""
    folder = tmp_path_factory.mktemp("base") / "tiny-llama"
    tokenizer = build_tokenizer("bytes", Corpus("none", [""]))
    build_base("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(300)))
    return path


@pytest.fixture
def adapter(run, base, text, tmp_path):
    """An adapter that the command has trained."""
    folder = tmp_path / "adapter"
    result = run("adapt", base, "--data", text, "--out", folder, *SHORT, "--json")
    assert result.exit_code == 0, result.exception
    return folder, json.loads(result.stdout)


def test_an_adapter_is_trained_measured_and_loaded(adapter, base, text):
    folder, record = adapter
    assert record["out"] == str(folder)
    assert record["finished"]
    assert record["steps"] == 6
    assert record["settings"]["model"] == str(base)
    assert record["metrics"]["base_loss"] > 0.0
    # the adapter is handed on, and says nothing of where its parts lay
    assert str(base.parent) not in (folder / "adapter.json").read_text()
    assert str(text.parent) not in (folder / "adapter.json").read_text()
    assert "of held-out text (text.txt" in (folder / "README.md").read_text()
    model = load_adapter(AutoModelForCausalLM.from_pretrained(base), folder)
    assert model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, model.config.vocab_size)


def test_the_terminal_shows_a_table(run, base, text, tmp_path):
    flags = ("--layers", "1", "--granularity", "kv_head", "--route-gradient", "chosen")
    result = run("adapt", base, "--data", text, "--out", tmp_path / "a", *SHORT, *flags)
    assert result.exit_code == 0, result.exception
    for part in ("parameters trained beside", "held out", "the base", "of the base's FLOPs at 32"):
        assert part in result.stdout
    assert "Adapted layers: share of tokens" in result.stdout
    assert "note: that is above the target 0.6" in result.stdout


def test_routes_by_value_have_a_price_list(run, base, text, tmp_path):
    flags = ("--length", 64, "--controller", "value")
    result = run("adapt", base, "--data", text, "--out", tmp_path / "a", *SHORT, *flags)
    assert result.exit_code == 0, result.exception
    assert "Prices, in nats for full attention" in result.stdout
    page = (tmp_path / "a" / "README.md").read_text()
    settings = json.loads((tmp_path / "a" / "adapter.json").read_text())["settings"]
    assert f"now {settings['price']:.3g} nats" in page
    assert "| 0.6 | " in page
    result = run(
        "adapt", base, "--data", text, "--out", tmp_path / "b", *SHORT, *flags, "--hold", 1
    )
    assert isinstance(result.exception, ConfigError)
    assert "hold must be 0.0 with controller='value'" in str(result.exception)


def test_a_middle_window_is_named_by_its_size(run, base, text, tmp_path):
    flags = ("--experts", "full,local:12,local", "--granularity", "kv_head", "--json")
    result = run("adapt", base, "--data", text, "--out", tmp_path / "a", *SHORT, *flags)
    assert result.exit_code == 0, result.exception
    shares = json.loads(result.stdout)["metrics"]["layers"]["0"]["share"]
    assert list(shares) == ["full", "local:12", "local"]
    shown = run("generate", "--adapter", tmp_path / "a", "--base", base, "--prompt", "5 squared")
    assert shown.exit_code == 0, shown.exception


def test_an_expert_that_learns_is_part_of_the_adapter(run, base, text, tmp_path):
    flags = ("--experts", "full,ssm,local", "--json")
    result = run("adapt", base, "--data", text, "--out", tmp_path / "a", *SHORT, *flags)
    assert result.exit_code == 0, result.exception
    shares = json.loads(result.stdout)["metrics"]["layers"]["0"]["share"]
    assert list(shares) == ["full", "ssm", "local"]
    saved = load_file(tmp_path / "a" / WEIGHTS_FILE)
    model = load_adapter(AutoModelForCausalLM.from_pretrained(base), tmp_path / "a")
    for layer, router in enumerate(routers_of(model)):
        own = dict(router.experts[1].named_parameters())
        assert set(own) == {"step_proj.weight", "rates.log_rate", "rates.step_bias", "rates.skip"}
        for name, weight in own.items():
            assert torch.equal(weight, saved[f"layers.{layer}.experts.1.{name}"])
        # a new one has a skip of 1
        assert (own["rates.skip"] != 1.0).all()
    model = ("--adapter", tmp_path / "a", "--base", base)
    shown = run("generate", *model, "--prompt", "5 squared", "--greedy", "--max-new-tokens", 4)
    assert shown.exit_code == 0, shown.exception
    assert shown.stdout.startswith("5 squared")


def test_a_weaker_prior_is_part_of_the_adapter(run, base, text, tmp_path):
    flags = ("--prior-strength", 0.1, "--kl-weight", "0->0.002->0@0.1:0.4:0.8")
    result = run("adapt", base, "--data", text, "--out", tmp_path / "a", *SHORT, *flags)
    assert result.exit_code == 0, result.exception
    model = load_adapter(AutoModelForCausalLM.from_pretrained(base), tmp_path / "a")
    prior = routers_of(model)[0].controller.prior_concentration
    assert 0.05 < prior.max() < 0.11
    assert (
        json.loads((tmp_path / "a" / "run.json").read_text())["settings"]["kl_weight"] == flags[3]
    )


def test_a_run_goes_on_where_it_is(run, adapter):
    folder, _ = adapter
    result = run("adapt", "--out", folder, "--resume", "--json")
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout[result.stdout.index("{") :])["finished"]


def test_a_finished_run_is_not_resumed_with_another_base(run, adapter, base, tmp_path):
    folder, _ = adapter
    moved = shutil.copytree(base, tmp_path / "moved")
    assert run("adapt", moved, "--out", folder, "--resume").exit_code == 0
    vocab_size = AutoConfig.from_pretrained(base).vocab_size
    build_base("llama", seed=5, vocab_size=vocab_size).save_pretrained(moved)
    result = run("adapt", moved, "--out", folder, "--resume")
    assert isinstance(result.exception, ConfigError)
    assert "a resumed run must have the base it began with" in str(result.exception)


def test_generate_and_inspect_take_an_adapter(run, adapter, base):
    folder, _ = adapter
    model = ("--adapter", folder, "--base", base)
    result = run("generate", *model, "--prompt", "5 squared", "--greedy", "--max-new-tokens", 4)
    assert result.exit_code == 0, result.exception
    assert result.stdout.startswith("5 squared")
    result = run("inspect", *model, "--text", "5 squared is 25.", "--json")
    assert result.exit_code == 0, result.exception
    inspection = json.loads(result.stdout)
    assert "".join(inspection["tokens"]) == "5 squared is 25."
    # the wide window of four times the window is half of a block, and not more
    experts = ["full", "local:16", "local"]
    assert [layer["experts"] for layer in inspection["layers"]] == [experts] * 2
    result = run("inspect", *model, "--text", "5 squared is 25.")
    assert "layer 0" in result.stdout


def test_the_base_may_be_what_the_card_says(run, adapter, base, monkeypatch):
    """A folder is named by its last part only, which is found where it lies."""
    folder, _ = adapter
    monkeypatch.chdir(base.parent)
    result = run("generate", "--adapter", folder, "--prompt", "5", "--max-new-tokens", 2)
    assert result.exit_code == 0, result.exception


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        ([], ConfigError, "name a model to adapt"),
        (["{base}"], ConfigError, "must have a model and text"),
        (["./nothing", "--data", "{text}"], DataError, "must be a causal language model"),
        (["all-minilm-l6-v2", "--data", "{text}"], None, ""),
        (["{base}", "--data", "no.txt"], DataError, "no file, folder or glob matches 'no.txt'"),
        (["{base}", "--data", "{text}", "--length", "65"], ConfigError, "at most the 64 positions"),
        (["{base}", "--data", "{text}", "--layers", "x"], ConfigError, "--layers must be indices"),
        (
            [
                *("{base}", "--data", "{text}", "--length", "32", "--window-size", "4"),
                *("--target-cost", "0.01", "--recall-share", "0"),
            ],
            ConfigError,
            "target_cost must be between",
        ),
        (
            ["{base}", "--data", "{text}", "--length", "32"],
            DataError,
            "raise the length, or set recall_share to 0",
        ),
        (["{base}", "--data", "{text}", "--kl-weight", "up"], ConfigError, "a schedule must be"),
        (["{base}", "--out", "{base}", "--data", "{text}"], ConfigError, "already holds a run"),
        (["--out", "nowhere", "--resume"], ConfigError, "there must be a run to resume"),
    ],
    ids=str,
)
def test_what_cannot_be_adapted_is_one_sentence(
    flags, error, message, run, base, text, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = run("adapt", *(flag.format(base=base, text=text) for flag in flags))
    if error is None:
        # an encoder where it is installed, and what to install where it is not
        error = (ConfigError, DataError)
    assert isinstance(result.exception, error)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    # nothing was left behind
    assert not list(tmp_path.iterdir())


def test_a_base_that_lacks_a_weight_is_not_adapted(run, base, text, tmp_path):
    folder = shutil.copytree(base, tmp_path / "base")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    result = run("adapt", folder, "--data", text, "--out", tmp_path / "a", *SHORT)
    assert isinstance(result.exception, DataError)
    message = str(result.exception)
    assert "such as model.layers.0.self_attn.q_proj.weight; save or download the" in message
    assert "\n" not in message
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "a"], "exactly one of a checkpoint and --adapter"),
        (["x", "--base", "y", "--prompt", "a"], "--base is the model of an --adapter"),
        (
            ["x", "--allow-other-base", "--prompt", "a"],
            "--allow-other-base is for an --adapter; leave it out",
        ),
        (["x", "--adapter", "y", "--prompt", "a"], "exactly one of a checkpoint and --adapter"),
    ],
)
def test_a_model_to_run_is_named_once(flags, message, run):
    result = run("generate", *flags)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_help_has_examples(run):
    assert "meta-attention adapt smollm2-135m-instruct --data" in run("adapt", "--help").output
