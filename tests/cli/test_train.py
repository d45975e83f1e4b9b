"""``meta-attention train``."""

import json
import math
import subprocess
import sys

import pytest
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from meta_attention.cli.train import EXAMPLES, train
from meta_attention.errors import ConfigError, DataError, MetaAttentionError
from meta_attention.training import run as run_module
from meta_attention.training.checkpoints import TrainingError
from meta_attention.training.logs import describe, read_metrics

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
app.callback()(lambda: None)
app.command("train", epilog=EXAMPLES)(train)

SMALL = [
    *("--tokenizer", "bytes", "--max-bytes", "20000", "--length", "32", "--batch-size", "8"),
    *("--hidden-size", "32", "--heads", "2", "--window-size", "4"),
    *("--steps", "4", "--eval-every", "2", "--save-every", "2", "--log-every", "2"),
]


def run(*flags):
    return CliRunner().invoke(app, ["train", *map(str, flags)])


def error_of(*flags):
    """The error a command ends with; its message is one line."""
    result = run(*flags)
    assert isinstance(result.exception, MetaAttentionError), result.output
    assert "\n" not in str(result.exception)
    return result.exception


def test_a_run_leaves_a_model_its_tokenizer_its_log_and_its_record(tmp_path):
    out = tmp_path / "run"
    result = run("--out", out, *SMALL, "--kl-weight", "0->0.1@0.5:0.75", "--seed", 7)
    assert result.exit_code == 0, result.output
    assert "held out:" in result.output
    assert "projected cost" in result.output
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.config.use_cache
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.kl_weight == 0.1
    assert [row["step"] for row in read_metrics(out)] == [1, 2, 2, 4, 4]
    assert not list(out.glob("*.bin"))

    record = json.loads((out / "run.json").read_text())
    assert record["recipe"] == "demo"
    assert record["seed"] == 7
    assert record["parameters"] == model.num_parameters()
    assert record["settings"]["kl_weight"] == "0->0.1@0.5:0.75"
    assert len(record["data"]["fingerprint"]) == 64
    assert record["data"]["name"].startswith("Python 3.")
    assert {"meta_attention", "torch", "transformers", "accelerate"} <= set(record["versions"])
    assert record["finished"] is True
    assert record["metrics"]["perplexity"] > 1

    assert "already holds a run" in str(error_of("--out", out, *SMALL))


def test_json_is_one_document(tmp_path):
    result = run("--out", tmp_path / "run", *SMALL, "--json")
    report = json.loads(result.stdout)
    assert report["out"] == str(tmp_path / "run")
    assert report["metrics"]["bits_per_byte"] > 0
    again = run("--out", tmp_path / "run", "--resume", "--json")
    assert json.loads(again.stdout)["metrics"] == report["metrics"]


def test_static_baselines_and_other_flags_reach_the_model(tmp_path):
    result = run(
        *("--out", tmp_path / "run", *SMALL, "--layers", 3, "--layer-experts", "local,local,full"),
        *("--expert-costs", "paper", "--kv-heads", 1, "--grad-accum", 2, "--isolate-documents"),
        *("--gradient-checkpointing", "--precision", "bf16", "--own-projections"),
        *("--residual", "block_attention", "--residual-blocks", 2),
    )
    assert result.exit_code == 0, result.output
    assert "every layer is static" in result.output
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "run").config
    assert config.layer_experts == (("local",), ("local",), ("full",))
    assert config.num_key_value_heads == 1
    assert not config.shared_projections
    assert (config.residual, config.residual_blocks) == ("block_attention", 2)


def test_hard_routes_that_run_only_the_chosen_expert_learn(tmp_path):
    out = tmp_path / "run"
    hard = ("--routing", "hard", "--training-weights", "one_hot", "--route-gradient", "chosen")
    result = run("--out", out, *SMALL, *hard, "--steps", 30, "--eval-every", 15)
    assert result.exit_code == 0, result.output
    losses = [row["task_loss"] for row in read_metrics(out) if "task_loss" in row]
    assert losses[-1] < 0.9 * losses[0]
    settings = json.loads((out / "run.json").read_text())["settings"]
    assert settings["training_weights"] == "one_hot"
    assert settings["route_gradient"] == "chosen"
    config = AutoModelForCausalLM.from_pretrained(out).config
    assert config.routing == "hard"
    assert config.training_weights == "one_hot"
    assert config.route_gradient == "chosen"
    error = error_of("--out", out, "--resume", "--route-gradient", "all")
    assert "whose route_gradient is 'chosen', got 'all'" in str(error)


def test_controllers_that_know_what_was_seen_before_are_asked_for_by_a_flag(tmp_path):
    result = run("--out", tmp_path / "run", *SMALL, "--recurrence", 2)
    assert result.exit_code == 0, result.output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert model.config.recurrence == 2
    weight = model.model.layers[0].attention.recurrence.weight
    assert weight.shape[0] == 2
    assert weight.abs().sum() > 0  # it starts as nothing


def test_depth_is_asked_for_by_flags(tmp_path):
    out = tmp_path / "depth"
    flags = ("--layers", 3, "--depth-capacity", 0.5, "--depth-layers", "0,2")
    result = run("--out", out, *SMALL, *flags, "--depth-routing", "threshold")
    assert result.exit_code == 0, result.output
    assert "depth: tokens that enter, held out: layer 0 " in result.output
    model = AutoModelForCausalLM.from_pretrained(out)
    assert [model.config.may_skip(layer) for layer in range(3)] == [True, False, True]
    assert model.config.depth_routing == "threshold"
    rows = read_metrics(out)
    assert all("depth_loss" in row for row in rows if row["kind"] == "train")
    wrong = error_of("--out", tmp_path / "wrong", *SMALL, "--depth-capacity", 2)
    assert "depth_capacity must be in (0, 1], got 2.0" in str(wrong)
    for indices in ("a", "-1", "0,,2"):
        wrong = error_of("--out", tmp_path / "wrong", *SMALL, f"--depth-layers={indices}")
        wanted = "depth_layers must be indices of blocks, 0 or more, parted by commas"
        assert f"{wanted}, got {indices!r}" in str(wrong)


def test_experts_depth_and_residuals_are_asked_for_together(tmp_path):
    out = tmp_path / "all"
    flags = ("--layers", 4, "--experts", "full,ssm,local", "--expert-costs", "flops")
    depth = ("--depth-capacity", 0.5, "--gradient-checkpointing", "--precision", "bf16")
    residual = ("--residual", "block_attention", "--residual-blocks", 4)
    result = run("--out", out, *SMALL, *flags, *depth, *residual)
    assert result.exit_code == 0, result.output
    assert "depth: tokens that enter, held out: layer 1 " in result.output
    rows = [row for row in read_metrics(out) if row["kind"] == "train"]
    assert all(math.isfinite(row["task_loss"]) and row["depth_loss"] > 0 for row in rows)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    kinds = [type(block).__name__ for block in model.model.layers]
    assert kinds == ["HalvedBlock", "HalvedMixtureOfDepthsBlock"] * 2
    assert model.config.experts == ("full", "ssm", "local")
    # trained: all of them started at zero
    assert (model.model.residuals.queries[1:].abs().amax(dim=1) > 0).all()
    prompt = tokenizer("The keeper", return_tensors="pt")
    options = {"max_new_tokens": 6, "do_sample": False}
    text = model.generate(**prompt, **options)
    assert text.tolist() == model.generate(**prompt, **options, use_cache=False).tolist()


def test_a_cost_above_its_target_is_said_of_what_no_kl_presses(tmp_path):
    result = run("--out", tmp_path / "run", *SMALL, "--controller", "prior_free")
    assert result.exit_code == 0, result.output
    assert "note: that is above the target; more steps bring it nearer" in result.output


def test_a_target_cost_is_asked_for_by_a_flag(tmp_path):
    out = tmp_path / "run"
    hard = ("--routing", "hard", "--training-weights", "one_hot", "--start-expert", "full")
    result = run(
        *("--out", out, *SMALL, *hard, "--steps", 40, "--target-cost", 0.5, "--log-every", 10),
        *("--kl-weight", "0->0.1@settled+10s", "--settle-steps", 10, "--settle-drop", 0.5),
        *("--layers", 3, "--layer-experts", "local*2,full+local"),
    )
    assert result.exit_code == 0, result.output
    assert "of full attention, target 0.5" in result.output
    last = [row for row in read_metrics(out) if row["kind"] == "train"][-1]
    assert {"routed_cost", "target_cost", "multiplier", "settled_step"} <= set(last)
    config = AutoModelForCausalLM.from_pretrained(out).config
    assert config.start_expert == "full"
    assert config.layer_experts == (("local",), ("local",), ("full", "local"))
    error = error_of("--out", out, "--resume", "--target-cost", 0.6)
    assert "whose target_cost is 0.5, got 0.6" in str(error)


def test_without_evaluation_the_last_model_is_saved(tmp_path):
    result = run("--out", tmp_path / "run", *SMALL, "--eval-every", 0, "--experts", "full,local")
    assert result.exit_code == 0, result.output
    assert "held out" not in result.output
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["eval_data"] is None
    assert record["metrics"] == {}


def test_text_to_evaluate_on_can_be_given(tmp_path):
    for name in ("train", "valid"):
        (tmp_path / f"{name}.txt").write_text(f"the {name} text, over and over; " * 100)
    result = run(
        *("--out", tmp_path / "run", *SMALL, "--data", tmp_path / "train.txt"),
        *("--eval-data", tmp_path / "valid.txt", "--tokenizer", "characters"),
    )
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["eval_data"]["name"] == str(tmp_path / "valid.txt")


def test_a_task_is_trained_on_and_its_figures_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr("meta_attention.training.tasks.NUM_HELD_OUT", 4)
    sizes = "pairs=4,fewest_pairs=2,recalls=3,copies=3,copy_distance=3,keys=6,values=6,noise=3"
    small = [flag for flag in SMALL if flag not in ("--tokenizer", "bytes", "--max-bytes", "20000")]
    out = tmp_path / "run"
    result = run("--task", f"recall:{sizes}", "--out", out, *small)
    assert result.exit_code == 0, result.output
    assert "of 24 answers right (far" in result.output
    assert "9.4% of tokens need it" in result.output
    assert "projected cost" in result.output
    record = json.loads((out / "run.json").read_text())
    assert record["recipe"] == "recall"
    assert record["task"]["any_layer"].keys() == {"full_share", "precision", "recall"}
    assert "accuracy 0." in describe(read_metrics(out)[-1])
    again = run("--out", out, "--resume", "--json")
    assert json.loads(again.stdout)["task"] == record["task"]


def test_a_task_that_makes_no_sense_is_one_clear_sentence(tmp_path):
    out = ("--out", tmp_path / "run")
    for flags, message in (
        (["--task", "recal"], "task must be one of recall, needle, multi_key, got 'recal'"),
        (["--task", "recall", "--data", "x.txt"], "data must not be given with task recall"),
        (["--task", "recall", "--tokenizer", "bytes"], "tokenizer must not be given"),
        (["--task", "recall", "--length", 128], "must have >= 353 tokens for 128 pairs"),
        (["--task", "needle", "--length", 64], "a sequence must have >= "),
        (["--task", "needle", "--isolate-documents"], "isolate_documents must not be given"),
    ):
        assert message in str(error_of(*out, *flags))
    assert not (tmp_path / "run").exists()


def test_bad_text_is_one_clear_sentence(tmp_path):
    out = ("--out", tmp_path / "run")
    assert "no file, folder or glob" in str(error_of(*out, *SMALL, "--data", tmp_path / "none.txt"))
    (tmp_path / "empty.txt").touch()
    empty = error_of(*out, *SMALL, "--data", tmp_path / "empty.txt")
    assert isinstance(empty, DataError)
    assert "must contain text" in str(empty)
    (tmp_path / "short.txt").write_text("too short")
    assert "must fill a block of 32 tokens" in str(
        error_of(*out, *SMALL, "--data", tmp_path / "short.txt", "--eval-every", 0)
    )
    (tmp_path / "few.txt").write_text("not enough for a batch, " * 10)
    assert "must fill a batch of 8 blocks" in str(
        error_of(*out, *SMALL, "--data", tmp_path / "few.txt", "--eval-every", 0)
    )
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 1000)
    assert "must be UTF-8 text, got byte 0xe9 at offset 3" in str(
        error_of(*out, *SMALL, "--data", tmp_path / "latin.txt")
    )


def test_bad_settings_are_one_clear_sentence(tmp_path):
    out = ("--out", tmp_path / "run")
    assert "START->END" in str(error_of(*out, *SMALL, "--kl-weight", "up"))
    assert "unknown expert 'fulll'" in str(error_of(*out, *SMALL, "--experts", "fulll"))
    assert "multiple of num_attention_heads" in str(error_of(*out, *SMALL, "--heads", 5))
    soft = ("--routing", "soft")
    soft_draw = error_of(*out, *SMALL, *soft, "--training-weights", "one_hot")
    assert "draws a single expert, but routing='soft' mixes them" in str(soft_draw)
    hard = ("--routing", "hard", "--target-cost", "0.01")
    assert "target_cost must be between" in str(error_of(*out, *SMALL, *hard))
    soft_target = error_of(*out, *SMALL, *soft, "--target-cost", "0.5")
    assert "target_cost must have routing='hard'" in str(soft_target)
    assert "all its moments at steps" in str(error_of(*out, *SMALL, "--kl-weight", "0->1@0.1:4s"))
    assert "must reach its end" in str(error_of(*out, *SMALL, "--kl-weight", "0->1@0s:9s"))
    assert "such as 'local*5'" in str(error_of(*out, *SMALL, "--layer-experts", "local*x"))
    assert "an expert of a layer" in str(error_of(*out, *SMALL, "--start-expert", "fulll"))
    blocks = ("--residual", "block_attention", "--residual-blocks", 9)
    assert "residual_blocks must be at most" in str(error_of(*out, *SMALL, *blocks))
    assert "no run.json" in str(error_of(*out, "--resume"))
    assert "must have a GPU" in str(error_of(*out, *SMALL, "--precision", "fp16"))
    # nothing was left behind
    assert not (tmp_path / "run").exists()


def test_a_refused_run_takes_away_only_what_it_made(tmp_path):
    flags = (*SMALL, "--routing", "hard", "--target-cost", "0.01")
    (tmp_path / "empty").mkdir()
    error_of("--out", tmp_path / "runs" / "new", *flags)
    error_of("--out", tmp_path / "empty", *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_tensorboard_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    error = error_of("--out", tmp_path / "run", *SMALL, "--tensorboard")
    assert isinstance(error, ConfigError)
    assert "pip install 'meta-attention[tensorboard]'" in str(error)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_before_training_is_one_clear_sentence(tmp_path, monkeypatch):
    def fill_disk(out, record):
        raise OSError(28, "No space left on device")

    (tmp_path / "run").mkdir()
    monkeypatch.setattr(run_module, "write_run", fill_disk)
    error = error_of("--out", tmp_path / "run", *SMALL)
    assert isinstance(error, TrainingError)
    assert "run.json could not be written: no space left" in str(error)


def test_help_has_examples_and_does_not_load_torch():
    code = (
        "import sys\n"
        "sys.argv = ['meta-attention']\n"
        "import typer\n"
        "from meta_attention.cli.train import EXAMPLES, train\n"
        "app = typer.Typer(rich_markup_mode=None)\n"
        "app.command(epilog=EXAMPLES)(train)\n"
        "try:\n    app(['--help'])\n"
        "except SystemExit as stop:\n    assert stop.code == 0\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "meta-attention train --out runs/demo --resume" in result.stdout
    assert "--isolate-documents" in result.stdout


@pytest.mark.parametrize(
    "flags",
    [["--steps", "0"], ["--recipe", "huge"], ["--length", "1"], ["--route-gradient", "some"]],
)
def test_flags_out_of_range_are_refused(flags):
    result = run(*flags)
    assert result.exit_code == 2
    assert flags[0] in result.output
