"""A layer whose key-value heads have routes of their own.

That it is causal, prefix-stable and safe, and that it executes only what it routed, is shown with
the other layers in ``test_attention`` and ``test_execution``.

Shapes: B batch, T sequence, D width, H heads, P head width, E experts, G key-value heads.
"""

import pytest
import torch

from meta_attention import BayesianMetaAttentionLayer, MetaAttentionConfig, RoutingPosterior
from meta_attention.controller import PointPosterior

B, T, D, H, P = 2, 40, 32, 8, 4
ROUTINGS = {
    "soft": {},
    "hard": {"routing": "hard"},
    "gated": {
        "routing": "gated",
        "uncertainty_signal": "margin",
        "uncertainty_threshold": 0.4,
    },
}
HEADS = {"MHA": 8, "GQA": 2, "MQA": 1}


def make_layer(granularity="kv_head", dtype=torch.float64, **kwargs):
    defaults = {
        "hidden_size": D,
        "num_attention_heads": H,
        "num_key_value_heads": 2,
        "window_size": 5,
        "max_position_embeddings": 64,
        "controller_hidden_size": 8,
        "route_granularity": granularity,
    }
    torch.manual_seed(0)
    layer = BayesianMetaAttentionLayer(MetaAttentionConfig(**(defaults | kwargs)))
    if len(layer.experts) > 1:
        with torch.no_grad():
            # large enough that every expert has its heads
            costs = layer.controller.costs
            layer.controller.mlp[-1].weight.mul_(20)
            layer.controller.mlp[-1].bias.view(-1, len(costs)).copy_(2.0 * costs - 1.0)
    return layer.to(dtype).eval()


def make_input(dtype=torch.float64):
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1), dtype=dtype)


def padded_mask():
    mask = torch.ones(B, T, dtype=torch.long)
    mask[0, :7], mask[1, 30:] = 0, 0
    return mask


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_posterior_and_routes_have_an_axis_for_the_heads(routing, heads):
    G = HEADS[heads]
    out = make_layer(num_key_value_heads=G, **ROUTINGS[routing])(make_input())
    assert out.posterior.concentration.shape == (B, T, G, 3)
    assert out.routes.weights.shape == (B, T, G, 3)
    assert out.routes.hard.shape == out.routes.expert.shape == (B, T, G)
    assert out.kl.shape == out.projected_cost.shape == (B, T)
    if G > 1:
        expert, hard = out.routes.expert, out.routes.hard
        assert (expert != expert[..., :1]).any(), "the heads of some token go apart"
        assert (hard != hard[..., :1]).any() == (routing == "gated")


@pytest.mark.parametrize("options", ROUTINGS.values(), ids=ROUTINGS)
def test_one_route_per_token_keeps_its_shapes(options):
    out = make_layer("token", **options)(make_input())
    assert out.routes.weights.shape == out.posterior.mean.shape == (B, T, 3)
    assert out.routes.hard.shape == out.routes.expert.shape == (B, T)


def test_a_static_layer_has_one_route_per_token():
    layer = make_layer(experts=("local",))
    out = layer(make_input())
    assert out.routes.weights.shape == (B, T, 1)
    assert list(layer.controller.parameters()) == []
    assert torch.equal(out.output, make_layer("token", experts=("local",))(make_input()).output)


def make_twins(**options):
    """Layers that route tokens and heads, alike but for their controllers."""
    by_token, by_head = make_layer("token", **options), make_layer(**options)
    for name in ("projections", "experts"):
        getattr(by_head, name).load_state_dict(getattr(by_token, name).state_dict())
    return by_token, by_head


def believe(layer, posterior):
    """Make a layer believe this of its tokens, whatever its controller says."""
    layer.controller.forward = lambda x, position_ids: posterior
    return layer


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_heads_that_agree_are_as_one_route(training, routing, heads):
    """To the bit where all experts run on all tokens; lists are attended to group by group."""
    options = {
        "num_key_value_heads": HEADS[heads],
        "experts": ("full", "gated_full", "linear", "local"),
        **ROUTINGS[routing],
    }
    by_token, by_head = (layer.train(training) for layer in make_twins(**options))
    x, mask = make_input(), padded_mask()
    belief = by_token(x, mask).posterior.concentration.detach()
    found = []
    for layer, concentration in (
        (by_token, belief.clone().requires_grad_(training)),
        (by_head, belief.unsqueeze(2).repeat(1, 1, HEADS[heads], 1).requires_grad_(training)),
    ):
        out = believe(layer, RoutingPosterior(concentration))(x, mask)
        values = {"output": out.output, "kl": out.kl, "cost": out.projected_cost}
        if training:
            (out.output.square().sum() + out.kl.sum() + out.projected_cost.sum()).backward()
            gradient = concentration.grad
            gradient = gradient if layer is by_token else gradient.sum(dim=2)
            values["gradient"] = gradient
        found.append({name: value.detach() for name, value in values.items()})
    expected, ours = found
    if training or routing == "soft":
        assert torch.equal(ours["output"], expected["output"])
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", ["MHA", "GQA"])
@pytest.mark.parametrize("routing", ["hard", "soft"])
def test_a_head_has_what_its_own_route_gives(routing, heads):
    """Head by head the rows of the layer are those of a layer that routes all heads so."""
    G = HEADS[heads]
    weights = torch.rand(B, T, G, 3, generator=torch.Generator().manual_seed(2)).double()
    weights = weights / weights.sum(dim=-1, keepdim=True)
    by_token, by_head = make_twins(num_key_value_heads=G, **ROUTINGS[routing])

    def rows_of(layer, mean):
        seen = []
        layer._output = lambda index, rows: seen.append(rows) or rows
        believe(layer, PointPosterior(mean))(make_input())
        return seen[0].unflatten(-1, (G, -1))  # [B, T, G, heads of a group * P]

    with torch.no_grad():
        ours = rows_of(by_head, weights)
        for group in range(G):
            expected = rows_of(by_token, weights[:, :, group])
            torch.testing.assert_close(ours[:, :, group], expected[:, :, group])


@pytest.mark.parametrize("draw", ["mean", "sample", "one_hot"])
@pytest.mark.parametrize("routing", ["hard", "gated"])
@pytest.mark.parametrize("gradient", ["all", "chosen"])
def test_kl_and_cost_of_a_token_are_means_over_its_heads(gradient, routing, draw):
    options = ROUTINGS[routing] | {"training_weights": draw, "route_gradient": gradient}
    layer = make_layer(**options).train()
    x, mask, costs = make_input(), padded_mask(), layer.controller.costs
    out = layer(x, mask)
    kl = out.posterior.kl_to(layer.controller.prior_concentration)
    torch.testing.assert_close(out.kl, kl.mean(dim=2) * mask)
    taken = (out.routes.weights * costs).sum(dim=-1).mean(dim=2)
    torch.testing.assert_close(out.projected_cost, taken * mask)
    # a chosen route's cost teaches the whole belief
    believed = (out.posterior.mean * costs).sum(dim=-1).mean(dim=2) * mask
    teaches = believed.sum() if gradient == "chosen" else (taken * mask).sum()
    parameters = list(layer.controller.parameters())
    expected = torch.autograd.grad(teaches, parameters, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out.projected_cost.sum(), parameters), expected)


@pytest.mark.parametrize("options", ROUTINGS.values(), ids=ROUTINGS)
def test_half_precision_is_finite_and_close(options):
    layer, x = make_layer(dtype=torch.float32, **options), make_input(torch.float32)
    exact = layer(x).output
    out = layer.bfloat16()(x.bfloat16(), padded_mask())
    assert out.routes.weights.dtype == torch.float32
    assert out.output.isfinite().all()
    if "routing" not in options:
        close = layer(x.bfloat16()).output.float()
        torch.testing.assert_close(close, exact, rtol=0.05, atol=0.05)
