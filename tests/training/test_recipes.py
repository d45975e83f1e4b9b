"""Recipes: complete, valid, and overridden by name."""

import json
from dataclasses import fields, replace
from typing import get_args

import pytest

from meta_attention import MetaAttentionForCausalLM
from meta_attention import config as options
from meta_attention.cli import train as cli
from meta_attention.errors import ConfigError
from meta_attention.evaluation.routing import RoutingTally
from meta_attention.training.economy import Economy
from meta_attention.training.recipes import (
    RECIPES,
    Settings,
    build_settings,
    bytes_small,
    parse_costs,
    parse_layer_experts,
    parse_names,
)
from meta_attention.training.schedule import Schedule
from meta_attention.training.settings import NO_WEIGHT


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_builds_a_model_and_survives_json(name):
    settings = build_settings(name, {})
    assert settings.recipe == name
    MetaAttentionForCausalLM(settings.model_config(vocab_size=260))
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


def test_the_command_line_knows_every_recipe_and_setting():
    assert [recipe.value for recipe in cli.Recipe] == list(RECIPES)
    flags = set(cli.train.__annotations__) | {"compile"}
    assert {field.name for field in fields(Settings)} <= flags


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        (cli.Controller, options.ControllerName),
        (cli.Weights, options.TrainingWeights),
        (cli.RouteGradient, options.RouteGradient),
        (cli.RouteGranularity, options.RouteGranularity),
        (cli.Routing, options.RoutingName),
        (cli.Signal, options.Signal),
    ],
)
def test_a_flag_takes_the_values_of_its_setting(flag, values):
    assert {choice.value for choice in flag} == set(get_args(values))


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


def test_the_tiny_recipe_is_the_papers():
    config = build_settings("tiny", {}).model_config(vocab_size=100)
    assert (config.hidden_size, config.num_hidden_layers, config.window_size) == (128, 2, 8)
    assert config.max_position_embeddings == 64
    assert config.expert_costs == "paper"
    assert not config.shared_projections
    assert config.kl_weight == 1.0


def test_bytes_small_has_about_five_million_parameters():
    config = build_settings("bytes-small", {}).model_config(vocab_size=258)
    assert 4e6 < MetaAttentionForCausalLM(config).num_parameters() < 6e6


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


def test_a_shorter_run_has_a_shorter_warmup():
    assert build_settings("demo", {"steps": 50}).warmup == 5
    assert build_settings("demo", {"steps": 50, "warmup": 9}).warmup == 9


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
        ({"depth_routing": "threshold"}, "depth_routing is of Mixture of Depths and needs a"),
        ({"depth_weight": 0.5}, "depth_weight is of Mixture of Depths and needs a depth_capacity"),
        ({"residual_blocks": 2}, "those of residual='block_attention', got residual='sum'; set"),
        ({"residual": "attention", "residual_blocks": 2}, "got residual='attention'; set that"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        build_settings("demo", overrides)


def test_an_unknown_recipe_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="one of demo, tiny, bytes-small, recall, needle, got"):
        build_settings("huge", {})


ADAPTIVE = {
    "routing": "hard",
    "training_weights": "one_hot",
    "start_expert": "full",
    "target_cost": 0.4,
    "kl_weight": Schedule(0.0, 0.1, 0.5, 0.75),
}


def test_settings_of_economy_reach_the_model_and_survive_json():
    given = ADAPTIVE | {
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


def test_what_a_flag_leaves_without_a_meaning_goes_with_it(monkeypatch):
    monkeypatch.setitem(RECIPES, "demo", lambda: replace(build_settings("tiny", {}), **ADAPTIVE))
    assert build_settings("demo", {}).target_cost == 0.4

    soft = build_settings("demo", {"routing": "soft"})
    assert (soft.training_weights, soft.target_cost) == ("mean", None)
    for static in ({"experts": ("full",)}, {"layer_experts": (("local",), ("full",))}):
        assert build_settings("demo", static).target_cost is None
    hybrid = build_settings("demo", {"layer_experts": (("local",), ("full", "local"))})
    assert (hybrid.target_cost, hybrid.start_expert) == (0.4, "full")
    assert build_settings("demo", {"experts": ("linear", "local")}).start_expert is None

    prior_free = build_settings("demo", {"controller": "prior_free"})
    assert prior_free.cost_weight == ADAPTIVE["kl_weight"]
    for settings in (soft, hybrid, prior_free):
        MetaAttentionForCausalLM(settings.model_config(vocab_size=10))
    # what was given stays, and is refused where it cannot work
    assert build_settings("demo", {"routing": "soft", "target_cost": 0.3}).target_cost == 0.3


@pytest.mark.parametrize(
    "given",
    [{"target_cost": None}, {"routing": "soft"}, {"experts": ("full",)}],
    ids=str,
)
def test_nothing_is_held_up_to_no_target(given):
    assert build_settings("bytes-small", given).hold == 0.0
    with pytest.raises(ConfigError, match=r"hold must have a target_cost .*, got 0.5 and none"):
        build_settings("bytes-small", given | {"hold": 0.5})


def test_bytes_small_routes_the_full_layer_of_a_hybrid_as_the_text_study_does():
    settings = build_settings("bytes-small", {})
    layers = settings.model_config(vocab_size=258).layer_experts
    assert [list(layer) for layer in layers] == [
        *([["local"]] * 3),
        ["full", "local:256", "local"],
        *([["local"]] * 2),
    ]
    assert settings.route_granularity == "kv_head"
    assert (settings.hold, settings.argmax_from) == (1.0, 0.8)
    # what learns from the chosen expert alone is drawn to the end
    assert build_settings("bytes-small", {"route_gradient": "chosen"}).argmax_from == 1.0
    # heads are merged before an output projection that they share
    apart = build_settings("bytes-small", {"shared_projections": False})
    assert apart.model_config(vocab_size=258).route_granularity == "token"
    with pytest.raises(ConfigError, match="or experts for all layers"):
        build_settings("bytes-small", {"layers": 4}).model_config(vocab_size=258)
    all_layers = {"layers": 4, "experts": ("full", "local")}
    assert build_settings("bytes-small", all_layers).layer_experts is None


def test_in_shorter_blocks_windows_beside_full_attention_keep_their_share():
    def windows(**given):
        settings = build_settings("bytes-small", given)
        return settings.layer_experts[3], settings.window_size

    assert windows(length=128) == (("full", "local:32", "local"), 4)
    assert windows(length=256) == (("full", "local:64", "local"), 8)
    assert windows(length=2048) == windows() == (("full", "local:256", "local"), 32)
    # one that would be no wider than the window that was given is left out
    assert windows(length=128, window_size=8) == (("full", "local:32", "local"), 8)
    assert windows(length=128, window_size=32) == (("full", "local"), 32)
    # what was given stays, and so do recipes of one window
    hybrid = (("local",), ("full", "local:100", "local"))
    assert build_settings("bytes-small", {"length": 128, "layer_experts": hybrid}).window_size == 32
    assert build_settings("demo", {"length": 64}).window_size == 16
    model = MetaAttentionForCausalLM(
        build_settings("bytes-small", {"length": 128, "hidden_size": 32}).model_config(vocab_size=9)
    )
    costs = RoutingTally.of(model).costs[3]
    assert costs[0] == 1.0
    assert 0.4 < costs[1] < 0.5
    assert costs[2] < 0.1


@pytest.mark.parametrize(
    ("recipe", "given", "got"),
    [
        ("bytes-small", {"length": 128, "layer_experts": (("full", "local:256"),)}, "local:256"),
        ("demo", {"experts": ("full", "local:127", "local")}, "local:127 of 127 tokens"),
        ("demo", {"window_size": 128}, "local of 128 tokens in blocks of 128"),
    ],
)
def test_a_window_that_hides_nothing_is_refused_where_layers_route(recipe, given, got):
    with pytest.raises(ConfigError, match=f"must be shorter than a block, got {got}"):
        build_settings(recipe, given)
    # a static layer may see all there is
    build_settings(recipe, {"length": 128, "experts": ("local",), "window_size": 128})


@pytest.mark.parametrize("name", ["demo", "bytes-small"])
def test_text_is_pressed_by_its_cost_and_the_kl_has_a_tenth_at_most(name):
    settings = build_settings(name, {})
    cost, kl = settings.cost_weight, settings.kl_weight
    assert cost.begin == kl.begin
    assert (cost.start, kl.start) == (0.0, 0.0)
    assert max(kl.values) == pytest.approx(0.1 * cost.end)
    # a prior-free controller is pressed by the same weight
    assert build_settings(name, {"controller": "prior_free"}).cost_weight == cost
    given = Schedule.parse("0->0.5@settled+0.2")
    by_cost = build_settings(name, {"cost_weight": given})
    assert (by_cost.cost_weight, by_cost.kl_weight) == (given, kl)


def test_the_kl_of_bytes_small_is_gone_when_routes_are_taken():
    settings = build_settings("bytes-small", {})
    assert settings.kl_weight == bytes_small().kl_weight
    assert (settings.kl_weight.end, settings.kl_weight.finish) == (0.0, settings.argmax_from)
    later = build_settings("bytes-small", {"argmax_from": 0.9}).kl_weight
    assert str(later) == "0->0.01->0@0.5:0.7:0.9"
    # drawn to the end, it has as long; taken before anything presses, it has no time
    assert build_settings("bytes-small", {"route_gradient": "chosen"}).kl_weight.finish == 1.0
    assert build_settings("bytes-small", {"argmax_from": 0.5}).kl_weight == NO_WEIGHT


def test_without_a_cost_the_kl_of_bytes_small_stays():
    settings = build_settings("bytes-small", {"cost_weight": NO_WEIGHT})
    assert str(settings.kl_weight) == "0->0.01@0.5:0.65"
    # so that a target has a weight to steer
    assert Economy(10, settings.kl_weight, target=settings.target_cost).target == 0.45


@pytest.mark.parametrize("name", ["demo", "bytes-small"])
def test_a_kl_weight_given_alone_presses_in_place_of_the_cost(name):
    cost = build_settings(name, {}).cost_weight
    given = Schedule.parse("0->0.5@settled+0.2")
    alone = build_settings(name, {"kl_weight": given})
    assert (alone.kl_weight, alone.cost_weight) == (given, Schedule.constant(0.0))
    both = build_settings(name, {"kl_weight": given, "cost_weight": cost})
    assert (both.kl_weight, both.cost_weight) == (given, cost)
    # a prior-free controller has no KL that could
    free = build_settings(name, {"kl_weight": given, "controller": "prior_free"})
    assert free.cost_weight == cost
    # where routes are not hard, the KL presses as it did
    for routing in ("soft", "gated"):
        settings = build_settings(name, {"routing": routing})
        assert (settings.kl_weight, settings.cost_weight) == (cost, Schedule.constant(0.0))


def test_tasks_of_known_need_are_pressed_by_the_kl():
    for name in ("recall", "needle"):
        assert build_settings(name, {}).cost_weight == Schedule.constant(0.0)
