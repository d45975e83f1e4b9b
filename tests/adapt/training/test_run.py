"""Routers learn and nothing else does; a run that was stopped goes on as if it had not been."""

import json
from functools import partial

import pytest
import torch

from meta_attention import adapt
from meta_attention.adapt import load_adapter, read_card, routers_of
from meta_attention.adapt.training import open_router_run, read_blocks, train_router
from meta_attention.adapt.training.trainer import RouterTrainer
from meta_attention.errors import ConfigError, DataError
from meta_attention.testing.pretrained import build_base, draw_tokens, randomise_controllers
from meta_attention.training.checkpoints import TrainingError
from meta_attention.training.logs import read_metrics
from meta_attention.training.schedule import Schedule

HEAVY = Schedule.constant(0.5)


def weights_of(model):
    return {n: p.detach().cpu().clone() for n, p in model.named_parameters() if ".router." not in n}


def curve(folder, name="loss"):
    return [row[name] for row in read_metrics(folder) if row["kind"] == "train"]


def stop_after(trainer_step, monkeypatch):
    """Make training fail at a step, as a machine does."""
    before = RouterTrainer.observe_step

    def observe(self):
        before(self)
        if self.state.global_step == trainer_step:
            raise TrainingError("the machine stopped")

    monkeypatch.setattr(RouterTrainer, "observe_step", observe)


def test_the_base_is_unchanged_bit_by_bit(base, tokenizer, settings, tmp_path):
    model = base()
    before, ids = weights_of(model), draw_tokens(2, 40)
    plain = model(ids).logits
    record = train_router(model, tokenizer, settings(lr=0.05), tmp_path / "a")
    after = weights_of(model.cpu())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    fresh = adapt(base(), settings().adapt_config(48))
    for new, trained in zip(routers_of(fresh), routers_of(model), strict=True):
        assert not torch.equal(new.controller.mlp[0].weight, trained.controller.mlp[0].weight)
    # and the folder is an adapter, for a new base
    other = load_adapter(base(), tmp_path / "a")
    assert torch.equal(other(ids).logits, model.eval()(ids).logits)
    assert record["finished"]
    assert record["base_parameters"] == sum(p.numel() for p in before.values())
    torch.testing.assert_close(base()(ids).logits, plain)


def test_what_is_measured_is_of_the_model_that_is_saved(base, tokenizer, settings, tmp_path):
    model, folder = base(), tmp_path / "a"
    record = train_router(model, tokenizer, settings(lr=0.1, steps=12, kl_weight=HEAVY), folder)
    measured = read_card(folder)["metadata"]["measured"]
    assert measured == record["metrics"]
    assert 0.0 < measured["attention_share"] < 1.0
    assert set(measured["layers"]) == {"0", "1"}
    for layer in measured["layers"].values():
        assert sum(layer["share"].values()) == pytest.approx(1.0)
    costs = routers_of(model)[0].controller.costs
    cost = sum(
        share * costs[i].item()
        for layer in measured["layers"].values()
        for i, share in enumerate(layer["share"].values())
    )
    assert measured["routed_cost"] == pytest.approx(cost / 2, rel=1e-4)
    assert measured["loss_increase"] == measured["lm_loss"] - measured["base_loss"]
    # the base's loss is the base's
    held_out = read_blocks(tokenizer, settings(), 48).valid
    ids = torch.stack([block["input_ids"] for block in held_out])
    assert measured["base_loss"] == pytest.approx(base()(ids, labels=ids).loss.item(), rel=1e-5)
    page = (folder / "README.md").read_text()
    assert f"{measured['attention_share']:.1%}" in page
    assert "Adapter for tiny" in page
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("adapter.json", "adapter.safetensors", "README.md", "run.json", "metrics.jsonl")
    }


def test_routes_are_steered_to_the_target(base, tokenizer, settings, tmp_path):
    for target in (0.5, 0.8):
        record = train_router(
            base(),
            tokenizer,
            settings(target_cost=target, steps=160, lr=0.05, log_every=10),
            tmp_path / str(target),
        )
        assert record["metrics"]["routed_cost"] == pytest.approx(target, rel=0.15)


@pytest.mark.parametrize(
    ("target", "seed", "granularity"), [(0.3, 0, "token"), (0.3, 1, "kv_head"), (0.5, 1, "token")]
)
def test_a_short_run_does_not_overshoot_its_target(
    target, seed, granularity, base, tokenizer, settings, tmp_path
):
    """Steered at once, the first of these ended at 0.72 of its target: all tokens on the window."""
    given = settings(
        target_cost=target,
        seed=seed,
        route_granularity=granularity,
        length=64,
        window_size=4,
        steps=300,
        log_every=20,
        eval_every=300,
    )
    train_router(base(seed=seed), tokenizer, given, tmp_path / "a")
    *_, last = (row for row in read_metrics(tmp_path / "a") if row["kind"] == "eval")
    assert last["eval_routed_cost"] == pytest.approx(target, rel=0.15)


@pytest.mark.parametrize("recall_share", [0.0, 0.5])
def test_a_resumed_run_is_an_unbroken_one(
    recall_share, base, tokenizer, settings, tmp_path, monkeypatch
):
    options = {"steps": 24, "save_every": 6, "eval_every": 12, "lr": 0.03, "argmax_from": 0.5}
    if recall_share:
        options |= {"recall_share": recall_share, "length": 192}
        base = partial(base, max_position_embeddings=192)
    whole = train_router(base(), tokenizer, settings(**options), tmp_path / "whole")
    with monkeypatch.context() as stopped:
        stop_after(15, stopped)
        with pytest.raises(TrainingError, match="the machine stopped"):
            train_router(base(), tokenizer, settings(**options), tmp_path / "broken")
    lines = []
    resumed = train_router(
        base(),
        tokenizer,
        open_router_run(tmp_path / "broken", {}, resume=True),
        tmp_path / "broken",
        resume=True,
        say=lines.append,
    )
    assert lines == [f"resuming {(tmp_path / 'broken').resolve()} from step 12"]
    assert curve(tmp_path / "broken") == curve(tmp_path / "whole")
    assert resumed["metrics"] == whole["metrics"]
    # and there is nothing left to do
    again = train_router(
        base(), tokenizer, settings(**options), tmp_path / "broken", resume=True, say=lines.append
    )
    assert again["metrics"] == resumed["metrics"]
    assert "nothing to do" in lines[-1]


def test_the_last_step_is_evaluated_and_kept(base, tokenizer, settings, tmp_path):
    given = settings(steps=5, eval_every=2, lr=0.03, kl_weight=HEAVY)
    record = train_router(base(), tokenizer, given, tmp_path / "a")
    rows = [row for row in read_metrics(tmp_path / "a") if row["kind"] == "eval"]
    assert [row["step"] for row in rows] == [2, 4, 5]
    # of those that cost what they may; where none does, the last
    may = [row for row in rows if row["eval_routed_cost"] <= 1.1 * 0.6]
    best = min(may, key=lambda row: row["eval_divergence"]) if may else rows[-1]
    assert record["metrics"]["step"] == best["step"]
    page = (tmp_path / "a" / "README.md").read_text()
    assert f"as they were after step {best['step']}" in page
    assert record["metrics"]["divergence"] == pytest.approx(best["eval_divergence"], rel=1e-6)


def test_an_adapter_has_a_middle_window(base, tokenizer, settings, tmp_path):
    experts = ("full", "local:16", "local")
    model = adapt(base(), settings(experts=experts).adapt_config(48))
    randomise_controllers(model)
    record = train_router(model, tokenizer, settings(experts=experts), tmp_path / "a")
    for layer in record["metrics"]["layers"].values():
        assert list(layer["share"]) == list(experts)
        assert min(layer["share"].values()) > 0.0
    ids = draw_tokens(2, 40)
    other = load_adapter(base(), tmp_path / "a")
    assert torch.equal(other(ids).logits, model(ids).logits)
    page = (tmp_path / "a" / "README.md").read_text()
    windows = (f"local (window {window}, 2 first tokens)" for window in (16, 6))
    assert f"among full and {' and '.join(windows)}, in 2" in page


def test_a_wide_base_has_a_low_learning_rate(base, tokenizer, settings, tmp_path):
    assert settings().lr_for(4096) < settings().lr_for(1024) < settings().lr_for(32)
    assert settings(lr=0.5).lr_for(4096) == 0.5
    record = train_router(base(), tokenizer, settings(steps=1), tmp_path / "a")
    assert record["settings"]["lr"] == settings().lr_for(32)


def test_a_base_of_few_positions_has_no_wide_window(base, tokenizer, settings, tmp_path):
    short = settings(length=None, window_size=10, steps=1)
    record = train_router(base(), tokenizer, short, tmp_path / "a")
    assert record["length"] == 64
    assert record["settings"]["experts"] == ("full", "local")


def test_activations_may_be_computed_again(base, tokenizer, settings, tmp_path):
    calls = {}
    for name, gradient_checkpointing in (("kept", False), ("again", True)):
        model, calls[name] = base(), 0

        def count(*_, name=name):
            calls[name] += 1

        model.model.layers[0].mlp.register_forward_pre_hook(count)
        given = settings(lr=0.03, gradient_checkpointing=gradient_checkpointing)
        train_router(model, tokenizer, given, tmp_path / name)
    assert calls["again"] == calls["kept"] + given.steps
    torch.testing.assert_close(curve(tmp_path / "again"), curve(tmp_path / "kept"))


@pytest.mark.parametrize(
    "given",
    [
        {"route_gradient": "chosen"},
        {"route_granularity": "kv_head"},
        {"route_granularity": "kv_head", "route_gradient": "chosen"},
        {"controller": "prior_free"},
        {"experts": ("full", "local", "linear")},
        {"experts": ("full", "local:16", "local"), "route_granularity": "kv_head"},
        {"layers": (1,)},
        {"precision": "bf16"},
        {"loss": "lm"},
        {"loss": "both", "grad_accum": 2},
    ],
    ids=str,
)
def test_every_kind_of_routing_learns(given, base, tokenizer, settings, tmp_path):
    model = base()
    record = train_router(model, tokenizer, settings(lr=0.03, **given), tmp_path / "a")
    rows = [row for row in read_metrics(tmp_path / "a") if row["kind"] == "train"]
    assert all(row["grad_norm"] > 0.0 for row in rows)
    task = {"lm": "lm_loss"}.get(given.get("loss"), "divergence")
    for row in rows:
        expected = row[task]
        if given.get("loss") == "both":
            expected = (row["divergence"] + row["lm_loss"]) / 2
        assert row["task_loss"] == pytest.approx(expected, rel=1e-5)
        parts = (row["task_loss"], row["kl_loss"], row["cost_loss"], row["hold_loss"])
        assert row["loss"] == pytest.approx(sum(parts), rel=1e-4)
        assert row["base_loss"] > 0.0
    assert len(record["metrics"]["layers"]) == len(routers_of(model))


def test_nothing_of_the_base_is_dropped(base, tokenizer, settings, tmp_path):
    """GPT-2 drops a tenth of everything in training, which a router could not tell from routes."""
    model = base("gpt2")
    on_full = settings(argmax_from=0.0, kl_weight=Schedule.constant(0.0), target_cost=None, lr=1e-9)
    train_router(model, tokenizer, on_full, tmp_path / "a")
    assert max(curve(tmp_path / "a", "divergence")) < 1e-6


def test_a_cost_below_its_target_is_pulled_back(base, tokenizer, settings, tmp_path):
    model = adapt(base(), settings().adapt_config(48))
    randomise_controllers(model)  # about half of the tokens are on full attention
    given = settings(
        target_cost=0.95, hold=5.0, kl_weight=Schedule.constant(1e-9), steps=30, lr=0.03
    )
    train_router(model, tokenizer, given, tmp_path / "a")
    costs = curve(tmp_path / "a", "projected_cost")
    assert costs[0] < 0.8
    assert sum(costs[-5:]) / 5 > 0.9


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"length": 65}, ConfigError, "at most the 64 positions of the base, got 65"),
        ({"target_cost": 0.1}, ConfigError, "target_cost must be between 0."),
        ({"data": ("nowhere.txt",)}, DataError, "no file, folder or glob matches 'nowhere.txt'"),
        ({"max_bytes": 300}, DataError, "must fill a block of 48 tokens"),
        ({"batch_size": 1000}, DataError, "must fill a batch of 1000 blocks"),
        ({"experts": ("full",)}, ConfigError, "at least two to choose from, got full"),
        ({"experts": ("full", "magic")}, ConfigError, "unknown expert 'magic'"),
        ({"layers": (7,)}, ConfigError, "among [0, 1], got 7"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_one_sentence(
    given, error, message, base, tokenizer, settings, tmp_path
):
    with pytest.raises(error) as caught:
        train_router(base(), tokenizer, settings(**given), tmp_path / "a")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a" / "run.json").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": "mood"}, "loss must be distill, lm or both"),
        ({"argmax_from": 1.5}, "argmax_from must be a share"),
        ({"hold": -1.0}, "hold must be >= 0"),
        ({"recall_share": 1.5}, "recall_share must be a share of the blocks, from 0 to 1, got 1.5"),
        ({"recall_share": -0.1}, "recall_share must be a share"),
        ({"lora_rank": -1}, "lora_rank must be >= 0"),
        ({"eval_every": 0}, "eval_every must be >= 1"),
        ({"target_cost": 1.5}, "target_cost must be a share between 0 and 1"),
        ({"length": 1}, "length must be >= 2"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(given, message, settings):
    with pytest.raises(ConfigError, match=message):
        settings(**given)


def test_an_encoder_is_refused(tokenizer, settings, tmp_path):
    with pytest.raises(ConfigError, match="bert models are bidirectional; give a causal language"):
        train_router(build_base("bert"), tokenizer, settings(), tmp_path / "a")


def test_a_folder_is_not_overwritten(base, tokenizer, settings, tmp_path):
    train_router(base(), tokenizer, settings(), tmp_path / "a")
    with pytest.raises(ConfigError, match="already holds a run or a model"):
        train_router(base(), tokenizer, settings(), tmp_path / "a")


def test_a_run_knows_the_window_that_it_was_not_given(base, tokenizer, settings, tmp_path):
    chosen = settings(window_size=None, num_sinks=0, experts=None)
    train_router(base(), tokenizer, chosen, tmp_path / "a")
    window = chosen.window_for(chosen.length)
    kept = open_router_run(tmp_path / "a", {"window_size": window}, resume=True)
    assert (kept.window_size, kept.experts) == (window, chosen.experts_for(chosen.length))


def test_a_resumed_run_keeps_its_base_its_text_and_its_settings(
    base, tokenizer, settings, tmp_path, monkeypatch, text
):
    folder = tmp_path / "a"
    with monkeypatch.context() as stopped:
        stop_after(3, stopped)
        with pytest.raises(TrainingError):
            train_router(base(), tokenizer, settings(save_every=2), folder)
    with pytest.raises(ConfigError, match="holds a run whose window_size is 6, got 7"):
        open_router_run(folder, {"window_size": 7}, resume=True)
    same = open_router_run(folder, {"log_every": 2}, resume=True)
    with pytest.raises(ConfigError, match="must have the base it began with"):
        train_router(base(seed=1), tokenizer, same, folder, resume=True)
    other = text.with_name("other.txt")
    other.write_text(text.read_text().replace("square", "circle"))
    moved = open_router_run(folder, {"data": (str(other),)}, resume=True)
    with pytest.raises(DataError, match="must be the text it began with"):
        train_router(base(), tokenizer, moved, folder, resume=True)
    assert not json.loads((folder / "run.json").read_text())["finished"]


@pytest.mark.gpu
@pytest.mark.parametrize("route_gradient", ["all", "chosen"])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_on_a_gpu_in_bf16_routers_learn(
    route_gradient, gradient_checkpointing, base, tokenizer, settings, tmp_path
):
    """Head widths are those that kernels know."""
    model = base(hidden_size=128, num_attention_heads=4, head_dim=32)
    before = weights_of(model)
    given = settings(
        precision="bf16",
        steps=40,
        lr=0.03,
        kl_weight=HEAVY,
        route_gradient=route_gradient,
        gradient_checkpointing=gradient_checkpointing,
    )
    record = train_router(model, tokenizer, given, tmp_path / "a")
    assert record["device"] == "cuda"
    assert record["metrics"]["routed_cost"] < 0.95
    after = weights_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
