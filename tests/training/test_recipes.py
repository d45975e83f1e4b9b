"""Recipes: complete, and what they were measured to be."""

import json
from dataclasses import fields

import pytest

from meta_attention import MetaAttentionForCausalLM
from meta_attention.cli import train as cli
from meta_attention.errors import ConfigError
from meta_attention.training.model_settings import Settings
from meta_attention.training.overrides import build_settings
from meta_attention.training.recipes import RECIPES
from meta_attention.training.schedule import Schedule


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


def test_tasks_of_known_need_are_pressed_by_the_kl():
    for name in ("recall", "needle"):
        assert build_settings(name, {}).cost_weight == Schedule.constant(0.0)
