"""Training that runs only the chosen experts, next to training that runs them all.

Every assignment of a few tokens is forced in turn and weighted by its probability: means over drawn
routes are exact, and nothing is left to chance.

Shapes: B batch, T sequence, E experts, G key-value heads where each has a route of its own.
"""

from itertools import product

import pytest
import torch

from meta_attention import BayesianMetaAttentionLayer, MetaAttentionConfig, MetaAttentionForCausalLM
from meta_attention.routing import policy

SIZES = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "window_size": 1,
    "max_position_embeddings": 8,
    "controller_hidden_size": 8,
    "experts": ("full", "local"),
    "expert_costs": (1.0, 0.5),
    "routing": "hard",
    "training_weights": "one_hot",
}
LAYOUTS = {
    "token": {},
    "own": {"shared_projections": False},
    "kv_head": {"route_granularity": "kv_head"},
    "prior_free": {"controller": "prior_free"},
}
T = 3


def force(monkeypatch, expert):
    """Make the routes [1, T] or [1, T, G] of every layer these."""
    monkeypatch.setattr(policy, "draw_expert", lambda probabilities: expert)


def assignments(shape):
    for experts in product(range(2), repeat=shape.numel()):
        yield torch.tensor(experts).view(shape)


def spread_beliefs(controller):
    """Probabilities that differ from token to token, none near 0 or 1."""
    with torch.no_grad():
        controller.mlp[-1].weight.mul_(3)
        controller.mlp[-1].bias.view(-1, 2).copy_(torch.tensor([1.0, -0.5]))


def make_layer(gradient, **layout):
    torch.manual_seed(0)
    config = MetaAttentionConfig(**SIZES, **layout, route_gradient=gradient)
    layer = BayesianMetaAttentionLayer(config)
    spread_beliefs(layer.controller)
    return layer.double().train()


def gradients_of(module, loss):
    module.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def is_of_controller(name):
    return ".controller." in f".{name}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_training_has_the_gradient_of_the_dense_form_on_average(layout, monkeypatch):
    """For a loss linear in the output. All but the controller agree draw by draw.

    The dense form is the same whatever is drawn, the sparse one is so only on average: it sees the
    row of one expert, and weighs it by the slope of its log probability.
    """
    x = torch.randn(1, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    read = torch.randn(1, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    layers = {gradient: make_layer(gradient, **LAYOUTS[layout]) for gradient in ("all", "chosen")}
    belief = layers["all"].controller(x, torch.arange(T)[None]).mean.detach()
    mean = {gradient: {} for gradient in layers}
    spread = 0.0
    for expert in assignments(belief.shape[:-1]):
        force(monkeypatch, expert)
        probability = belief.gather(-1, expert.unsqueeze(-1)).prod().item()
        found = {g: gradients_of(net, (net(x).output * read).sum()) for g, net in layers.items()}
        for gradient, values in found.items():
            for name, value in values.items():
                total = mean[gradient].get(name, torch.zeros_like(value))
                mean[gradient][name] = total + probability * value
        for name, sparse in found["chosen"].items():
            if not is_of_controller(name):
                torch.testing.assert_close(sparse, found["all"][name], msg=name)
        last = "controller.mlp.2.bias"
        spread = max(spread, (found["chosen"][last] - found["all"][last]).norm().item())
    assert mean["all"].keys() == mean["chosen"].keys()
    for name, dense in mean["all"].items():
        torch.testing.assert_close(mean["chosen"][name], dense, rtol=1e-9, atol=1e-10)
    # a single draw may be far off
    assert spread > mean["all"][last].norm().item()


def test_a_curved_loss_parts_sparse_from_dense_training_in_the_controller_alone(monkeypatch):
    """Cross-entropy behind a whole block: what is not a controller still agrees at every draw.

    The mean gradients of the controller differ, since each linearises the loss about the drawn
    output in its own way, the dense one about differences between rows and the sparse one about
    whole rows. Their biases are of second order in these (see ``choose_routes``): with rows a tenth
    as large, the difference is a tenth of what it was, next to the gradient.
    """
    differences = []
    for scale in (1.0, 0.1):
        models = {}
        for gradient in ("all", "chosen"):
            torch.manual_seed(0)
            config = MetaAttentionConfig(
                **SIZES, vocab_size=11, num_hidden_layers=1, route_gradient=gradient, kl_weight=0.0
            )
            model = MetaAttentionForCausalLM(config).double().train()
            attention = model.model.layers[0].attention
            spread_beliefs(attention.controller)
            with torch.no_grad():
                attention.projections[0].o_proj.weight.mul_(10 * scale)
                model.lm_head.weight.mul_(20)
            models[gradient] = model
        ids = torch.tensor([[3, 7, 5, 2, 9]])
        concentrations = models["all"](ids, output_routing=True).concentrations[0]
        belief = (concentrations / concentrations.sum(-1, keepdim=True)).detach()
        mean = dict.fromkeys(models, torch.zeros(()))
        for expert in assignments(belief.shape[:-1]):
            force(monkeypatch, expert)
            probability = belief.gather(-1, expert.unsqueeze(-1)).prod().item()
            found = {g: gradients_of(m, m(ids, labels=ids).task_loss) for g, m in models.items()}
            for name, sparse in found["chosen"].items():
                # the controller's input carries its gradient further down
                is_below = "embed_tokens" in name or "norm" in name
                if not is_of_controller(name) and not is_below:
                    torch.testing.assert_close(sparse, found["all"][name], msg=name)
            for gradient, values in found.items():
                parts = [v.flatten() for n, v in values.items() if is_of_controller(n)]
                mean[gradient] = mean[gradient] + probability * torch.cat(parts)
        gap = (mean["chosen"] - mean["all"]).norm() / mean["all"].norm()
        differences.append(gap.item())
    assert 1e-3 < differences[1] < differences[0]
    assert differences[1] / differences[0] == pytest.approx(0.1, rel=0.5)
