"""Settings of a router's training: defaults that fit what was given."""

import pytest

from meta_attention import adapt
from meta_attention.adapt import routers_of
from meta_attention.adapt.training import RouterSettings
from meta_attention.testing.pretrained import build_base
from meta_attention.training.settings import NO_WEIGHT


@pytest.mark.parametrize(
    ("given", "length", "experts"),
    [
        ({}, 8192, ("full", "local:1024", "local")),
        ({"window_size": 128}, 8192, ("full", "local:512", "local")),
        ({}, 1024, ("full", "local:128", "local")),
        ({"window_size": 256}, 2048, ("full", "local:1024", "local")),
        # of blocks this short the wide window would be most
        ({"window_size": 256}, 2047, ("full", "local")),
        ({"experts": ("full", "linear")}, 512, ("full", "linear")),
    ],
)
def test_the_wide_window_goes_with_the_other_one_and_with_the_length(given, length, experts):
    assert RouterSettings.of(given).experts_for(length) == experts


@pytest.mark.parametrize("length", [48, 100, 1024, 2048, 8192, 131072])
def test_the_window_leaves_the_default_target_within_reach(length):
    settings = RouterSettings.of({})
    config = settings.adapt_config(length)
    assert config.window_size == settings.window_for(length) <= 256
    (router, *_) = routers_of(adapt(build_base("llama"), config))
    assert min(router.controller.costs) < settings.target_cost
    assert RouterSettings.of({"window_size": 300}).window_for(length) == 300


def test_what_makes_routes_cheap_is_their_cost_and_without_a_prior_there_is_no_kl():
    bayesian = RouterSettings.of({})
    assert bayesian == RouterSettings()
    assert 0.0 < bayesian.kl_weight.end < bayesian.cost_weight.end
    prior_free = RouterSettings.of({"controller": "prior_free"})
    assert prior_free.kl_weight == NO_WEIGHT
    assert prior_free.cost_weight == bayesian.cost_weight
