"""Forcing experts, and the figures judged by it."""

import re

import pytest
import torch
import torch.nn.functional as F

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM
from meta_attention.errors import ConfigError, ShapeError
from meta_attention.evaluation.calibration import expected_calibration_error
from meta_attention.evaluation.forcing import (
    RouteJudge,
    attention_layers,
    force_expert,
    force_routes,
)

IDS = torch.arange(24).reshape(2, 12) * 7 % 256


def run(model):
    with torch.no_grad():
        return model(IDS, output_routing=True)


@pytest.mark.parametrize("expert", [0, 1, 2])
def test_a_forced_expert_takes_every_token_of_its_layer_only(expert, model):
    free = run(model)
    with force_expert(model, [0], expert):
        forced = run(model)
    wanted = F.one_hot(torch.full((2, 12), expert), 3).float()
    torch.testing.assert_close(forced.routing_weights[0], wanted, rtol=0, atol=0)
    assert forced.routing_weights[2].unique().numel() > 2
    costs = attention_layers(model)[0].controller.costs
    change = (costs[expert] - (free.routing_weights[0] * costs).sum(-1).mean()) / 3
    others = (forced.routing_weights[2] - free.routing_weights[2]) * torch.tensor([1.0, 0.3])
    change = change + others.sum(-1).mean() / 3
    torch.testing.assert_close(forced.projected_cost, free.projected_cost + change)


@pytest.mark.parametrize("signal", ["mutual_information", "vacuity", "entropy", "margin"])
def test_a_gate_does_not_doubt_a_forced_expert(signal, config):
    changes = {
        "routing": "gated",
        "uncertainty_signal": signal,
        "uncertainty_threshold": 1e-6 if signal != "entropy" else -1e6,
    }
    model = MetaAttentionForCausalLM(MetaAttentionConfig(**config.to_diff_dict() | changes)).eval()
    with force_expert(model, [0], 1):
        weights = run(model).routing_weights[0]
    torch.testing.assert_close(weights, F.one_hot(torch.ones(2, 12).long(), 3).float())


def test_a_forced_layer_computes_what_a_static_one_does(model, config):
    static = MetaAttentionConfig(
        **config.to_diff_dict() | {"layer_experts": [["local"], ["local"], ["full"]]}
    )
    other = MetaAttentionForCausalLM(static).eval()
    other.load_state_dict(model.state_dict(), strict=False)
    with force_expert(model, [0], 2), force_expert(model, [2], 0):
        torch.testing.assert_close(run(model).logits, run(other).logits)


def test_afterwards_the_model_is_as_before(model):
    before, names = run(model), list(model.state_dict())
    with force_expert(model, [0, 2, 0], 1):
        assert not torch.equal(run(model).logits, before.logits)
    torch.testing.assert_close(run(model).logits, before.logits, rtol=0, atol=0)
    assert list(model.state_dict()) == names


def test_an_error_inside_restores_the_model(model):
    controllers = [layer.controller for layer in attention_layers(model)]
    with pytest.raises(RuntimeError, match="inside"), force_expert(model, [0, 2], 0):
        raise RuntimeError("inside")
    assert [layer.controller for layer in attention_layers(model)] == controllers


@pytest.mark.parametrize(("layers", "expert"), [([3], 0), ([-1], 0), ([0, 2], 2), ([0], -1)])
def test_a_layer_or_expert_that_is_not_there_is_refused(layers, expert, model):
    controllers = [layer.controller for layer in attention_layers(model)]
    with pytest.raises(ConfigError, match="must be below"), force_expert(model, layers, expert):
        pass
    assert [layer.controller for layer in attention_layers(model)] == controllers


def test_regret_and_calibration_are_their_definitions(model):
    """Losses that are known for each forced expert of layer 0; layer 2 changes nothing."""
    torch.manual_seed(1)
    chosen = torch.rand(50, dtype=torch.float64)
    table = torch.rand(50, 3, dtype=torch.float64)
    weights = [torch.rand(50, 3).softmax(-1), torch.ones(50, 1), torch.rand(50, 2).softmax(-1)]

    def rescore():
        layer = attention_layers(model)[0].controller
        return table[:, layer.expert_index] if hasattr(layer, "expert_index") else chosen

    judge = RouteJudge(model)
    assert judge.num_passes == 5
    judge.add(chosen, weights, rescore)
    judge.add(chosen, weights, rescore)
    verdict = judge.verdict()
    first, last = verdict.layers
    assert (first.layer, last.layer) == (0, 2)
    assert first.regret == pytest.approx((chosen - table.min(-1).values).mean().item())
    assert first.static_regret == pytest.approx((chosen.mean() - table.mean(0).min()).item())
    assert list(first.forced_loss.values()) == pytest.approx(table.mean(0).tolist())
    assert sum(first.best_share.values()) == pytest.approx(1.0)
    top = weights[0].max(-1)
    assert first.routing_ece == pytest.approx(
        expected_calibration_error(top.values, top.indices == table.argmin(-1))
    )
    assert last.regret == pytest.approx(0.0, abs=1e-9)
    assert verdict.regret == pytest.approx((first.regret + last.regret) / 2)


def test_a_model_without_choices_cannot_be_judged(config):
    config.layer_experts = [["full"], ["local"], ["full"]]
    with pytest.raises(ConfigError, match="more than one"):
        RouteJudge(MetaAttentionForCausalLM(config))


def test_forced_routes_are_taken_token_by_token(model):
    wanted = {0: torch.randint(3, IDS.shape), 2: torch.randint(2, IDS.shape)}
    with force_routes(model, wanted):
        weights = run(model).routing_weights
    for layer, expert in wanted.items():
        assert torch.equal(weights[layer], F.one_hot(expert, weights[layer].shape[-1]).float())


def test_forcing_the_routes_a_model_takes_changes_nothing(config):
    config.routing = "hard"
    model = MetaAttentionForCausalLM(config).eval()
    free = run(model)
    taken = {layer: free.routing_weights[layer].argmax(-1) for layer in (0, 2)}
    assert taken[0].unique().numel() > 1
    with force_routes(model, taken):
        torch.testing.assert_close(run(model).logits, free.logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("routes", "error", "message"),
    [
        ({0: torch.full((2, 12), 3)}, ConfigError, "below the 3 of layer 0"),
        ({2: torch.full((2, 12), -1)}, ConfigError, "got -1"),
        ({0: torch.zeros(2, 11)}, ShapeError, re.escape("must be [2, 12]")),
    ],
)
def test_routes_that_do_not_fit_are_refused(routes, error, message, model):
    controllers = [layer.controller for layer in attention_layers(model)]
    with pytest.raises(error, match=message), force_routes(model, routes):
        run(model)
    assert [layer.controller for layer in attention_layers(model)] == controllers


def test_tokens_that_may_pass_a_block_by_are_forced_all_alike_or_not_at_all(config):
    changes = {"depth_capacity": 0.5, "depth_layers": (0,)}
    torch.manual_seed(0)
    model = MetaAttentionForCausalLM(MetaAttentionConfig(**config.to_diff_dict() | changes)).eval()
    routes = {0: torch.zeros(2, 12)}
    with pytest.raises(ConfigError, match="every token enters, got 0"), force_routes(model, routes):
        run(model)
    with force_expert(model, [0], 1), force_routes(model, {2: torch.zeros(2, 12)}):
        weights = run(model).routing_weights
    share = weights[0].flatten(0, 1).mean(dim=0)
    assert 0.0 < share[1] < 1.0
    assert share[0] == share[2] == 0.0
    assert (weights[2][..., 0] == 1.0).all()


@pytest.mark.parametrize("shape", [(4, 3), (4, 2, 3)])
def test_tokens_that_pass_a_block_by_are_not_judged_there(shape, model):
    table = torch.tensor([[1.0, 2.0, 3.0], [9.0, 1.0, 1.0], [2.0, 1.0, 3.0], [0.0, 5.0, 0.0]])
    weights = torch.rand(shape).softmax(-1)
    weights[[1, 3]] = 0.0
    assert judged(model, table, weights) == judged(model, table[[0, 2]], weights[[0, 2]])


def test_a_layer_that_nobody_enters_has_no_verdict(model):
    table = torch.rand(4, 3)
    judge = RouteJudge(model)
    judge.add(
        table[:, 0], [torch.zeros(4, 3), torch.ones(4, 1), torch.zeros(4, 2)], lambda: table[:, 0]
    )
    assert judge.verdict().layers == []
    assert judge.verdict().regret is None
    judge.add(
        table[:, 0], [torch.zeros(4, 3), torch.ones(4, 1), torch.ones(4, 2)], lambda: table[:, 0]
    )
    assert [layer.layer for layer in judge.verdict().layers] == [2]


def judged(model, table, weights, **options):
    """Verdict on layer 0, where experts have the losses of a table."""

    def rescore():
        layer = attention_layers(model)[0].controller
        return table[:, getattr(layer, "expert_index", 0)]

    judge = RouteJudge(model, **options)
    judge.add(table[:, 0], [weights, torch.ones(2, 1), weights[..., :2]], rescore)
    return judge.verdict().layers[0]


def test_of_equal_experts_none_is_wrong(model):
    table = torch.tensor([[1.0, 2.0, 1.0], [1.0, 2.0, 1.0]])
    # certain of one of the two best, and of the other
    verdict = judged(model, table, torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))
    assert verdict.routing_ece == 0.0
    assert list(verdict.best_share.values()) == [0.5, 0.0, 0.5]
    # each key-value head by itself: one of two is wrong
    verdict = judged(model, table, torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]] * 2))
    assert verdict.routing_ece == 0.5


def test_what_is_equal_may_be_given(model):
    table = torch.tensor([[1.0, 1.001, 1.1], [1.0, 1.001, 1.1]])
    weights = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    assert judged(model, table, weights).routing_ece == 1.0
    assert judged(model, table, weights, tie=0.01).routing_ece == 0.0
