"""Overrides: what is given stays, and what it leaves without a meaning goes."""

from dataclasses import replace

import pytest

from meta_attention import MetaAttentionForCausalLM
from meta_attention.errors import ConfigError
from meta_attention.evaluation.routing import RoutingTally
from meta_attention.training.economy import Economy
from meta_attention.training.overrides import build_settings
from meta_attention.training.recipes import RECIPES, bytes_small
from meta_attention.training.schedule import Schedule
from meta_attention.training.settings import NO_WEIGHT

ADAPTIVE = {
    "routing": "hard",
    "training_weights": "one_hot",
    "start_expert": "full",
    "target_cost": 0.4,
    "kl_weight": Schedule(0.0, 0.1, 0.5, 0.75),
}


def test_an_unknown_recipe_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="one of demo, tiny, bytes-small, recall, needle, got"):
        build_settings("huge", {})


def test_a_shorter_run_has_a_shorter_warmup():
    assert build_settings("demo", {"steps": 50}).warmup == 5
    assert build_settings("demo", {"steps": 50, "warmup": 9}).warmup == 9


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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"depth_routing": "threshold"}, "depth_routing is of Mixture of Depths and needs a"),
        ({"depth_weight": 0.5}, "depth_weight is of Mixture of Depths and needs a depth_capacity"),
        ({"residual_blocks": 2}, "those of residual='block_attention', got residual='sum'; set"),
        ({"residual": "attention", "residual_blocks": 2}, "got residual='attention'; set that"),
    ],
)
def test_what_would_do_nothing_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        build_settings("demo", overrides)


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
