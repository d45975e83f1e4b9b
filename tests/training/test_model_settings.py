"""Settings: refused where they cannot work, and those of the model reach it."""

import json
from typing import get_args

import pytest

from meta_attention import config as options
from meta_attention.cli import train as cli
from meta_attention.errors import ConfigError
from meta_attention.training.model_settings import (
    Settings,
    parse_costs,
    parse_layer_experts,
    parse_names,
)
from meta_attention.training.overrides import build_settings
from meta_attention.training.schedule import Schedule


@pytest.mark.parametrize(
    ("flag", "values", "after_training"),
    [
        # what experts are worth is learnt by 'meta-attention route'
        (cli.Controller, options.ControllerName, {"value"}),
        (cli.Weights, options.TrainingWeights, {"explore"}),
        (cli.RouteGradient, options.RouteGradient, set()),
        (cli.RouteGranularity, options.RouteGranularity, set()),
        (cli.Routing, options.RoutingName, set()),
        (cli.Signal, options.Signal, set()),
    ],
)
def test_a_flag_takes_the_values_of_its_setting(flag, values, after_training):
    assert {choice.value for choice in flag} == set(get_args(values)) - after_training


def test_settings_of_routes_reach_the_model_and_survive_json():
    settings = build_settings(
        "demo", {"routing": "hard", "training_weights": "one_hot", "route_gradient": "chosen"}
    )
    config = settings.model_config(vocab_size=10)
    assert (config.training_weights, config.route_gradient) == ("one_hot", "chosen")
    saved = json.loads(json.dumps(settings.to_dict()))
    assert Settings.from_dict(saved) == settings
    # a run of before there was a choice
    del saved["route_gradient"]
    assert Settings.from_dict(saved).route_gradient == "all"


def test_settings_of_economy_reach_the_model_and_survive_json():
    given = {
        "start_expert": "full",
        "target_cost": 0.4,
        "kl_weight": Schedule.parse("0->0.1@settled+50s"),
        "cost_weight": Schedule.parse("0->0.3@100s:200s"),
        "settle_drop": 0.05,
        "settle_steps": 40,
    }
    settings = build_settings("demo", given)
    config = settings.model_config(vocab_size=10)
    assert (config.start_expert, config.cost_weight) == ("full", 0.3)
    saved = json.loads(json.dumps(settings.to_dict()))
    assert saved["kl_weight"] == "0->0.1@settled+50s"
    assert Settings.from_dict(saved) == settings
    # a run of before there was any of it
    later = ("settle", "target", "start_", "hold", "argmax_from")
    old = {k: v for k, v in saved.items() if not k.startswith(later)}
    old["cost_weight"] = 0.25
    assert Settings.from_dict(old).cost_weight == Schedule.constant(0.25)
    assert Settings.from_dict(old).target_cost is None


def test_a_saved_model_has_the_last_kl_weight():
    settings = build_settings("demo", {"kl_weight": Schedule(0.0, 0.3)})
    assert settings.model_config(vocab_size=10).kl_weight == 0.3


def test_a_pattern_of_layer_experts_repeats():
    settings = build_settings("demo", {"layers": 6, "layer_experts": (("local",), ("full",))})
    config = settings.model_config(vocab_size=10)
    assert config.layer_experts == (("local",), ("full",)) * 3
    with pytest.raises(ConfigError, match="must name 5 layers or a pattern"):
        build_settings(
            "demo", {"layers": 5, "layer_experts": (("local",), ("full",))}
        ).model_config(vocab_size=10)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"steps": 0}, "steps must be >= 1, got 0"),
        ({"eval_every": -1}, "eval_every must be >= 0"),
        ({"batch_size": 10, "grad_accum": 3}, "multiple of grad_accum, got 10 and 3"),
        ({"lr": 0.0}, "lr must be > 0"),
        ({"lr": float("nan")}, "lr must be > 0"),
        ({"warmup": 301}, "between 0 and all 300 steps, got 301"),
        ({"kl_weight": Schedule(0.0, -1.0)}, "kl_weight must be >= 0, got 0->-1"),
        ({"kl_weight": Schedule.parse("0->1@100s:301s")}, "within the 300 steps .* got 0->1@100s"),
        ({"cost_weight": Schedule.constant(-0.5)}, "cost_weight must be >= 0, got -0.5"),
        ({"target_cost": 20.0}, "target_cost must be a share between 0 and 1, got 20"),
        ({"settle_drop": 2.0}, "settle_drop must be a share between 0 and 1, got 2"),
        ({"settle_steps": 3}, "settle_steps must be >= 10, got 3"),
        ({"precision": "int8"}, "precision must be fp32, bf16 or fp16"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        build_settings("demo", overrides)


def test_text_forms_of_experts_and_costs():
    assert parse_names("full, local") == ("full", "local")
    assert parse_layer_experts("local,full+local") == (("local",), ("full", "local"))
    assert parse_layer_experts("local*2, full+local * 1") == (("local",),) * 2 + (
        ("full", "local"),
    )
    for text in ("local*", "local*0", "local*-1", "local*x", "local*2*2"):
        with pytest.raises(ConfigError, match="a whole number of times, such as 'local"):
            parse_layer_experts(text)
    assert parse_costs("flops") == "flops"
    assert parse_costs("1,0.15") == (1.0, 0.15)
    with pytest.raises(ConfigError, match="single commas"):
        parse_names("full,,local")
    with pytest.raises(ConfigError, match="paper, flops or numbers"):
        parse_costs("cheap")
