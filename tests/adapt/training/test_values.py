"""Values of a base are learnt once; every evaluation is at the price of the cost asked for."""

import dataclasses
import json

import pytest
import torch

from meta_attention import adapt
from meta_attention.adapt import load_adapter, read_card, routers_of
from meta_attention.adapt.training import RouterSettings, open_router_run, train_router
from meta_attention.errors import ConfigError
from meta_attention.testing.pretrained import draw_tokens
from meta_attention.training.logs import read_metrics
from meta_attention.training.schedule import Schedule

LONG = {"length": 64, "window_size": 4, "experts": ("full", "local:16", "local")}


@pytest.fixture
def by_value(settings):
    def choose(**given):
        return settings(controller="value", **(LONG | given))

    return choose


def test_values_buy_what_matters_for_the_cost_that_is_asked_for(
    base, tokenizer, by_value, tmp_path
):
    model, folder = base(), tmp_path / "a"
    before = {n: p.clone() for n, p in model.named_parameters()}
    given = by_value(target_cost=0.5, steps=60, lr=0.02, log_every=10, eval_every=60)
    record = train_router(model, tokenizer, given, folder)
    weights = dict(model.named_parameters())
    assert all(torch.equal(weights[name].cpu(), before[name]) for name in before)
    measured = read_card(folder)["metadata"]["measured"]
    assert measured == json.loads(json.dumps(record["metrics"]))
    assert measured["routed_cost"] == pytest.approx(0.5, rel=0.1)
    assert measured["target_cost"] == 0.5
    assert measured["price"] == read_card(folder)["settings"]["price"] > 0.0
    offers = measured["offers"]
    assert [offer["target_cost"] for offer in offers] == [0.25, 0.4, 0.5, 0.6]
    prices = [offer["price"] for offer in offers]
    assert prices == sorted(prices, reverse=True)
    divergences = [offer["divergence"] for offer in offers]
    assert divergences == sorted(divergences, reverse=True)
    # the model that is left is that of the cost asked for, not of the last in the list
    assert routers_of(model)[0].adaptation.config.price == measured["price"]
    ids = draw_tokens(2, 40)
    with torch.no_grad():
        loaded = load_adapter(base(), folder).eval()
        assert torch.equal(loaded(ids).logits, model.cpu().eval()(ids).logits)


def test_a_value_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    base, tokenizer, by_value, tmp_path, monkeypatch
):
    from meta_attention.adapt.training.trainer import RouterTrainer
    from meta_attention.training.checkpoints import TrainingError

    given = {"steps": 6, "save_every": 2, "eval_every": 3, "lr": 0.02}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train_router(base(), tokenizer, by_value(**given), whole)
    observe = RouterTrainer.observe_step

    def stop(self):
        observe(self)
        if self.state.global_step == 5:
            raise TrainingError("the machine stopped")

    with monkeypatch.context() as patched:
        patched.setattr(RouterTrainer, "observe_step", stop)
        settings = by_value(**given)
        with pytest.raises(TrainingError, match="stopped"):
            train_router(base(), tokenizer, settings, cut)
    train_router(base(), tokenizer, by_value(**given), cut, resume=True)

    def rows(folder):
        return [
            {k: v for k, v in row.items() if "per_s" not in k and "runtime" not in k}
            for row in read_metrics(folder)
        ]

    assert rows(cut) == rows(whole)
    offers = [read_card(f)["metadata"]["measured"]["offers"] for f in (cut, whole)]
    assert offers[0] == offers[1]


def test_a_run_that_fails_leaves_no_price_that_buys_everything(
    base, tokenizer, by_value, tmp_path, monkeypatch
):
    from meta_attention.adapt.training.trainer import RouterTrainer

    def fail(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(RouterTrainer, "observe_step", fail)
    model = base()
    with pytest.raises(KeyboardInterrupt):
        train_router(model, tokenizer, by_value(), tmp_path / "a")
    for router in routers_of(model):
        assert router.controller.price.item() == 0.0
        assert router.adaptation.config.price == router.adaptation.settings.price == 0.0


def test_what_would_press_values_is_refused(by_value):
    assert by_value().kl_weight == Schedule.constant(1.0)
    assert by_value().lora_rank == 0
    for name, value in (
        ("cost_weight", Schedule.constant(0.1)),
        ("hold", 1.0),
        ("argmax_from", 0.5),
        ("lora_rank", 4),
        ("prior_strength", 2.0),
        ("prior_floor", 0.1),
        ("kl_weight", Schedule.constant(0.1)),
        ("target_cost", None),
    ):
        with pytest.raises(ConfigError, match=f"{name} must be .* controller='value'"):
            by_value(**{name: value})


def test_settings_and_model_agree_on_values(base, tokenizer, settings, by_value, tmp_path):
    model = adapt(base(), settings(**LONG).adapt_config(64))
    with pytest.raises(ConfigError, match="the same controller; give both, or neither"):
        train_router(model, tokenizer, by_value(), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_the_last_router_is_kept_whatever_an_evaluation_before_it_cost(
    base, tokenizer, by_value, tmp_path, monkeypatch
):
    from meta_attention.adapt.training.values import ValueTrainer

    reduce, seen = ValueTrainer._reduce_rows, []

    def cheaper_first(self, prediction):
        # as where an early price buys more of held-out text than a late one
        metrics = reduce(self, prediction)
        seen.append(metrics["price"])
        return metrics | {"loss": float(len(seen)), "task_loss": float(len(seen))}

    monkeypatch.setattr(ValueTrainer, "_reduce_rows", cheaper_first)
    folder = tmp_path / "a"
    train_router(base(), tokenizer, by_value(steps=4, eval_every=2, lr=0.02), folder)
    assert read_card(folder)["metadata"]["measured"]["step"] == 4
    rows = [row for row in read_metrics(folder) if "eval_price" in row]
    assert [row["eval_price"] for row in rows] == seen[: len(rows)]
    assert len(rows) == 2


def test_a_model_that_does_not_explore_is_refused(base, tokenizer, by_value, tmp_path):
    config = dataclasses.replace(by_value().adapt_config(64), training_weights="mean")
    with pytest.raises(ConfigError, match="training_weights='explore', got hard ones with 'mean'"):
        train_router(adapt(base(), config), tokenizer, by_value(), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_target_out_of_reach_is_refused_before_anything_is_learnt(
    base, tokenizer, by_value, tmp_path
):
    with pytest.raises(ConfigError, match=r"target_cost must be above 0\.\d+"):
        train_router(base(), tokenizer, by_value(target_cost=0.01), tmp_path / "a")
    assert not (tmp_path / "a" / "adapter.json").exists()


def test_values_go_with_settings_of_the_command(tmp_path, text):
    given = {"model": "tiny", "data": (str(text),), "controller": "value"}
    settings = open_router_run(tmp_path, given, resume=False)
    assert isinstance(settings, RouterSettings)
    assert settings.adapt_config(64).controller == "value"
