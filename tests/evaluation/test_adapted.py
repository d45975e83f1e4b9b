"""What is measured of our own models is measured of adapted ones, too."""

import pytest
import torch

from meta_attention import adapt
from meta_attention.adapt import collect_routing, routed_as
from meta_attention.errors import ConfigError
from meta_attention.evaluation.evaluate import evaluate_text
from meta_attention.evaluation.forcing import force_routes
from meta_attention.evaluation.inspect import inspect_text
from meta_attention.evaluation.perplexity import measure_perplexity
from meta_attention.evaluation.routing import RoutingTally, reading_routing
from meta_attention.testing.pretrained import build_base, draw_tokens, randomise_controllers

TEXT = "The keeper counted the ships twice: once for the ledger, once for luck."


def make_routed(tokenizer, name="llama", **settings):
    model = adapt(build_base(name, vocab_size=len(tokenizer)), **({"window_size": 4} | settings))
    randomise_controllers(model)
    return model


@pytest.mark.parametrize("granularity", ["token", "kv_head"])
@pytest.mark.parametrize("controller", ["bayesian", "prior_free"])
def test_routing_is_summed_up_as_of_our_own_models(tokenizer, granularity, controller):
    model = make_routed(tokenizer, route_granularity=granularity, controller=controller)
    ids = draw_tokens(2, 20)
    tally = RoutingTally.of(model)
    with torch.no_grad(), reading_routing(model) as reader:
        weights, concentrations = reader.read(model(ids, **reader.options))
    tally.add(weights, None, concentrations)
    summary = tally.summary()
    with torch.no_grad(), collect_routing(model) as record:
        model(ids)
    assert summary.projected_cost == pytest.approx(record.projected_cost.item())
    assert (summary.kl is not None) == (controller == "bayesian")
    if summary.kl is not None:
        assert summary.kl == pytest.approx(record.kl.item(), rel=1e-4)
    for layer, out in zip(summary.layers, record.layers.values(), strict=True):
        assert layer.share["full"] == pytest.approx((out.routes.expert == 0).float().mean().item())


def test_a_text_is_evaluated_and_judged(tokenizer):
    model = make_routed(tokenizer)
    result = evaluate_text(model, tokenizer, TEXT, length=32, forced=True)
    assert result.text == measure_perplexity(model, tokenizer, TEXT, length=32)
    assert len(result.routing.layers) == 2
    assert result.forced is not None
    # forcing all on full in one layer, routes of the other kept
    with routed_as(model, {0: "full"}):
        kept = measure_perplexity(model, tokenizer, TEXT, length=32)
    forced = result.forced.layers[0].forced_loss["full"]
    assert forced == pytest.approx(kept.loss, rel=1e-6)
    assert forced != pytest.approx(result.forced.layers[0].forced_loss["local"], rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_text_is_inspected_in_its_adapted_layers(tokenizer, name):
    model = make_routed(tokenizer, name)
    seen = inspect_text(model, tokenizer, TEXT[:40])
    assert "".join(seen.tokens) == TEXT[:40]
    assert len(seen.layers) == (2 if name == "llama" else 1)
    assert set(seen.layers[0].expert) == {0, 1}
    assert "kl" in seen.layers[0].signals
    assert seen.loss[0] is None
    assert all(loss > 0.0 for loss in seen.loss[1:])


def test_routes_can_be_forced_token_by_token(tokenizer):
    model, ids = make_routed(tokenizer), draw_tokens(2, 20)
    routes = {i: torch.randint(2, (2, 20)) for i in range(2)}
    with torch.no_grad(), force_routes(model, routes), collect_routing(model) as record:
        model(ids)
    for index, expected in routes.items():
        assert torch.equal(record.layers[index].routes.expert, expected)


def test_a_layer_that_was_not_routed_has_nothing_to_read(tokenizer):
    model = make_routed(tokenizer)
    with torch.no_grad(), routed_as(model, {1: "full"}), reading_routing(model) as reader:
        out = model(draw_tokens(1, 8), **reader.options)
        with pytest.raises(ConfigError, match="layer 1 ran as the base"):
            reader.read(out)
