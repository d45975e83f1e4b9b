"""Routing figures: one meaning each, and batches add up."""

import math

import pytest
import torch

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM
from meta_attention.errors import ShapeError
from meta_attention.evaluation.routing import RoutingTally, summarise_routing

NAMES = ("full", "linear", "local")
COSTS = torch.tensor([1.0, 0.15, 0.30])


def summarise(weights, kl=None, mask=None, names=NAMES, costs=COSTS):
    return summarise_routing([weights], kl, [names], [costs], mask)


def random_weights(*shape):
    return torch.randn(*shape, 3).softmax(dim=-1)


def one_hot(*experts):
    return torch.eye(3)[list(experts)].unsqueeze(0)


def test_shares_are_mean_weights_and_sum_to_one():
    weights = random_weights(4, 16)
    layer = summarise(weights).layers[0]
    assert list(layer.share.values()) == pytest.approx(weights.mean(dim=(0, 1)).tolist())
    assert sum(layer.share.values()) == pytest.approx(1.0)
    assert sum(layer.top_share.values()) == pytest.approx(1.0)


def test_projected_cost_is_the_papers_arithmetic():
    weights = torch.tensor([0.25, 0.5, 0.25]).expand(2, 8, 3)
    assert summarise(weights).projected_cost == pytest.approx(0.40)


def test_constant_routing_has_no_adaptivity():
    weights = torch.tensor([0.2, 0.5, 0.3]).expand(2, 8, 3)
    layer = summarise(weights, kl=1.0).layers[0]
    assert layer.adaptivity == pytest.approx(0.0, abs=1e-6)
    assert layer.has_prior_collapse
    # every token has its largest weight on the same expert
    assert layer.has_expert_collapse


def test_adaptivity_is_the_mutual_information_of_token_and_route():
    # each expert has a third of the tokens, for certain
    layer = summarise(one_hot(0, 1, 2), kl=1.0).layers[0]
    assert layer.adaptivity == pytest.approx(math.log(3), rel=1e-6)
    assert layer.routing_entropy == pytest.approx(0.0, abs=1e-6)
    assert not layer.has_prior_collapse
    assert not layer.has_expert_collapse


def test_parts_by_expert_sum_to_the_adaptivity():
    layer = summarise(random_weights(4, 32)).layers[0]
    assert min(layer.adaptivity_by_expert.values()) >= 0.0
    assert sum(layer.adaptivity_by_expert.values()) == pytest.approx(layer.adaptivity)


def test_routing_entropy_is_in_percent_of_the_largest():
    even = torch.full((1, 4, 3), 1 / 3)
    assert summarise(even).routing_entropy == pytest.approx(100.0, rel=1e-5)


def test_expert_collapse_starts_above_95_percent():
    experts = [1] * 95 + [0] * 5
    assert not summarise(one_hot(*experts)).layers[0].has_expert_collapse
    assert summarise(one_hot(*experts, *[1] * 20)).layers[0].has_expert_collapse


@pytest.mark.parametrize(("kl", "collapsed"), [(0.009, True), (0.02, False), (None, False)])
def test_a_small_kl_is_a_prior_collapse(kl, collapsed):
    assert summarise(one_hot(0, 1, 2), kl=kl).layers[0].has_prior_collapse is collapsed


def test_tokens_that_pass_a_block_by_have_no_expert():
    weights = one_hot(0, 0, 2, 2) * torch.tensor([0.0, 1.0, 0.0, 1.0]).unsqueeze(-1)
    layer = summarise(weights).layers[0]
    assert layer.share == layer.top_share == {"full": 0.25, "linear": 0.0, "local": 0.25}
    assert layer.projected_cost == pytest.approx(0.25 * 1.3)
    assert layer.entered == 0.5
    # and those that enter are told apart as if alone
    alone = summarise(one_hot(0, 2)).layers[0]
    assert layer.adaptivity == pytest.approx(alone.adaptivity)
    assert (alone.entered, layer.routing_entropy) == (1.0, 0.0)
    assert not layer.has_expert_collapse

    same = summarise(weights * torch.tensor([1.0, 0.0, 0.0])).layers[0]
    assert same.entered == 0.25
    assert same.adaptivity == 0.0
    assert same.has_expert_collapse


@pytest.mark.parametrize(("kl", "collapsed"), [(0.004, False), (0.002, True)])
def test_a_prior_collapse_is_of_the_tokens_that_enter(kl, collapsed):
    # a quarter of them, so their own mean KL is four times that of all
    weights = torch.cat([one_hot(0, 1), torch.zeros(1, 6, 3)], dim=1)
    layer = summarise(weights, kl=kl).layers[0]
    assert (layer.entered, layer.kl) == (0.25, kl)
    assert layer.has_prior_collapse is collapsed


def test_a_layer_that_nobody_enters_has_not_collapsed():
    layer = summarise(torch.zeros(1, 4, 3), kl=0.0).layers[0]
    assert layer.entered == 0.0
    assert not layer.has_prior_collapse
    assert not layer.has_expert_collapse


def test_padding_does_not_count():
    weights = random_weights(2, 8)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, 5:] = 0
    padded = weights.clone()
    padded[0, 5:] = float("nan")
    # documents are numbered, which makes no difference
    counted = summarise(padded, mask=mask * torch.tensor([[1], [3]]))
    kept = torch.cat([weights[0, :5], weights[1]]).unsqueeze(0)
    assert counted.num_tokens == 13
    assert counted.projected_cost == pytest.approx(summarise(kept).projected_cost)
    assert counted.adaptivity == pytest.approx(summarise(kept).adaptivity)


def test_batches_add_up_to_one_batch():
    weights = random_weights(6, 8)
    tally = RoutingTally([NAMES], [COSTS])
    tally.add([weights[:2]])
    tally.add([weights[2:]])
    whole = RoutingTally([NAMES], [COSTS])
    whole.add([weights])
    torch.testing.assert_close(tally.sums, whole.sums)
    assert tally.summary(0.5).num_tokens == 48
    rows = RoutingTally([NAMES], [COSTS]).count([weights])  # [B, columns]
    torch.testing.assert_close(rows.sum(dim=0), tally.sums)


def test_a_static_layer_is_reported_as_static():
    weights = [torch.ones(2, 4, 1), random_weights(2, 4)]
    summary = summarise_routing(
        weights, 0.7, [("local",), NAMES], [torch.tensor([0.3]), COSTS], None
    )
    static, routed = summary.layers
    assert static.is_static
    assert not routed.is_static
    assert static.adaptivity is static.routing_entropy is static.kl is None
    assert not static.has_expert_collapse
    assert not static.has_prior_collapse
    # means are over routed layers, the cost over all
    assert summary.adaptivity == routed.adaptivity
    assert summary.kl == 0.7
    assert summary.projected_cost == pytest.approx((0.3 + routed.projected_cost) / 2)
    assert summary.to_dict()["layers"][0]["is_static"] is True


@pytest.mark.parametrize("depth_capacity", [None, 0.5])
@pytest.mark.parametrize("controller", ["bayesian", "prior_free"])
def test_a_tally_of_a_model_agrees_with_the_models_own_figures(controller, depth_capacity):
    config = MetaAttentionConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        layer_experts=[NAMES, ["full"], ["full", "local"]],
        controller=controller,
        depth_capacity=depth_capacity,
        depth_layers=None if depth_capacity is None else (0,),
        depth_routing="threshold",
    )
    torch.manual_seed(0)
    model = MetaAttentionForCausalLM(config).eval()
    out = model(torch.randint(32, (2, 16)), output_routing=True)
    tally = RoutingTally.of(model)
    tally.add(out.routing_weights, None, out.concentrations)
    summary = tally.summary()
    assert (0.0 < summary.layers[0].entered < 1.0) is (depth_capacity is not None)
    assert summary.projected_cost == pytest.approx(out.projected_cost.item(), rel=1e-5)
    if controller == "bayesian":
        assert summary.kl == pytest.approx(out.kl.item(), rel=1e-5)
    else:
        assert summary.kl is None


def test_a_wrong_number_of_layers_or_experts_is_refused():
    with pytest.raises(ShapeError, match="each of 1 layers, got 2"):
        summarise_routing([random_weights(1, 2)] * 2, None, [NAMES], [COSTS], None)
    with pytest.raises(ShapeError, match="one number for each of"):
        summarise(torch.ones(1, 2, 2))
    with pytest.raises(ShapeError, match="one entry per layer"):
        RoutingTally([NAMES], [])
