"""What an adapted model of values spends is a price, which is found for a cost and saved."""

import pytest
import torch

from meta_attention import adapt
from meta_attention.adapt import (
    collect_routing,
    find_price,
    load_adapter,
    routers_of,
    save_adapter,
    set_price,
)
from meta_attention.adapt.prices import cost_range
from meta_attention.errors import ConfigError
from meta_attention.testing.pretrained import build_base, draw_tokens, randomise_controllers

EXPERTS = ("full", "local:8", "local")


def make_priced(**settings):
    given = {"experts": EXPERTS, "window_size": 4, "num_sinks": 2, "cost_length": 40}
    model = adapt(build_base("llama"), **(given | {"controller": "value"} | settings))
    # scores of some units: values are exponential in them
    randomise_controllers(model, scale=1.5)
    return model


def cost_of(model, ids):
    with torch.no_grad(), collect_routing(model) as record:
        model(ids)
    return record.routed_cost.item()


@pytest.mark.parametrize("granularity", ["token", "kv_head"])
def test_a_price_is_found_for_any_cost_and_a_lower_one_buys_more(granularity):
    model, batches = make_priced(route_granularity=granularity), list(draw_tokens(8, 40).split(4))
    prices = []
    for target in (0.45, 0.55, 0.65):
        prices.append(find_price(model, batches, target))
        assert cost_of(model, torch.cat(batches)) <= target
        assert cost_of(model, torch.cat(batches)) > 0.9 * target
    assert prices == sorted(prices, reverse=True)
    assert prices[0] > prices[-1] >= 0.0


def test_a_price_is_found_where_experts_cost_nearly_the_same():
    # what a price takes from full attention is its share of little
    model = make_priced(expert_costs=(1.0, 0.99, 0.98))
    with torch.no_grad():
        for router in routers_of(model):
            router.controller.mlp[-1].weight.zero_()
            router.controller.mlp[-1].bias.copy_(torch.tensor([0.0, -6.0, -6.0]))
    price, ids = find_price(model, [draw_tokens(2, 40)], 0.985), draw_tokens(2, 40)
    assert price > 10.0
    assert cost_of(model, ids) <= 0.985


def test_a_price_is_part_of_an_adapter(tmp_path):
    model, ids = make_priced(), draw_tokens(2, 40)
    set_price(model, 0.003)
    save_adapter(model, tmp_path, base="tiny")
    loaded = load_adapter(build_base("llama"), tmp_path)
    assert all(
        router.controller.price.item() == pytest.approx(0.003) for router in routers_of(loaded)
    )
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)
    before = cost_of(loaded, ids)
    set_price(loaded, 1e6)
    cheapest, _ = cost_range(loaded)
    assert cost_of(loaded, ids) == pytest.approx(cheapest)
    assert before > cheapest


def test_modes_and_prices_are_as_before_a_search_that_failed():
    model = make_priced()
    set_price(model, 0.01)
    model.train()
    model.model.layers[0].eval()
    find_price(model, [draw_tokens(2, 40)], 0.6)
    assert model.training
    assert not model.model.layers[0].training
    set_price(model, 0.01)
    with torch.no_grad():
        for router in routers_of(model):
            router.controller.mlp[-1].bias.fill_(float("nan"))
    with pytest.raises(ConfigError, match="are all values finite"):
        find_price(model, [draw_tokens(2, 40)], 0.6)
    assert routers_of(model)[0].adaptation.config.price == 0.01
    assert routers_of(model)[0].controller.price.item() == pytest.approx(0.01)


def test_a_price_is_for_models_of_values():
    model = adapt(build_base("llama"), experts=EXPERTS, window_size=4)
    with pytest.raises(ConfigError, match="adapted with controller='value', got 'bayesian'"):
        set_price(model, 0.1)
    for price in (float("inf"), True, "0.1", torch.tensor(0.1)):
        with pytest.raises(ConfigError, match="price must be a finite number"):
            set_price(make_priced(), price)
    with pytest.raises(ConfigError, match=r"target_cost must be above 0\.\d+"):
        find_price(make_priced(), [draw_tokens(2, 40)], 0.01)
    with pytest.raises(ConfigError, match="batches must have tokens"):
        find_price(make_priced(), [], 0.6)


def test_a_new_router_of_values_says_what_the_base_says():
    given = {"experts": EXPERTS, "window_size": 4, "controller": "value"}
    model, ids = adapt(build_base("llama"), **given), draw_tokens(2, 40)
    with torch.no_grad():
        expected = build_base("llama")(ids).logits
        torch.testing.assert_close(model.eval()(ids).logits, expected, rtol=0.0, atol=1e-5)
    config = routers_of(model)[0].adaptation.config
    assert config.training_weights == "explore"
    assert config.value_scale == 0.01
    # as many as layers of the base are routed
    assert routers_of(model)[0].controller.num_shares == len(routers_of(model))
