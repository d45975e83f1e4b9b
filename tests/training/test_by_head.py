"""What heads do that each keep one expert, chosen by values."""

import pytest
import torch
from torch import nn

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM
from meta_attention.evaluation.forcing import force_routes
from meta_attention.training.by_head import experts_by_head
from meta_attention.training.values import value_controllers, with_values

T, WINDOW = 32, 4
TEXTS = [torch.arange(2 * T).view(2, T) * 7 % 40, torch.arange(3 * T).view(3, T) * 11 % 40]


@pytest.fixture
def model() -> MetaAttentionForCausalLM:
    torch.manual_seed(0)
    config = MetaAttentionConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=64,
        layer_experts=[["full"], ["local"], ["full"]],
        window_size=2,
    )
    static = MetaAttentionForCausalLM(config).eval()
    return with_values(static, window_size=WINDOW, length=T, recurrence=None)


def set_values(model, *worths):
    """Full attention is worth so much more than the window to each head, whatever the token."""
    heads = iter(worths)
    for controller in value_controllers(model):
        last = controller.mlp[-1]
        nn.init.zeros_(last.weight)
        scores = [[0.0, -torch.tensor(next(heads) / controller.scale).asinh()] for _ in range(2)]
        with torch.no_grad():
            last.bias.copy_(torch.tensor(scores).flatten())


def cost_of(choice, model):
    costs = value_controllers(model)[0].costs
    return torch.stack([costs[experts] for experts in choice.values()]).mean().item()


def test_heads_to_which_full_attention_is_worth_most_have_it(model):
    set_values(model, 0.01, 0.4, 0.3, -0.1)
    window = value_controllers(model)[0].costs[1].item()
    [below, above] = experts_by_head(model, TEXTS, 0.25 + 0.75 * window + 1e-6)
    assert {index: experts.tolist() for index, experts in below.items()} == {0: [1, 0], 2: [1, 1]}
    assert {index: experts.tolist() for index, experts in above.items()} == {0: [1, 0], 2: [0, 1]}
    assert cost_of(below, model) < 0.25 + 0.75 * window + 1e-6 < cost_of(above, model)


def test_nothing_is_dearer_than_full_attention_where_it_is_worth_something(model):
    set_values(model, 0.1, 0.4, 0.3, 0.2)
    [choice] = experts_by_head(model, TEXTS, 1.0)
    assert cost_of(choice, model) == 1.0


def test_a_choice_is_what_its_heads_do_for_every_token(model):
    set_values(model, 0.01, 0.4, 0.3, -0.1)
    for choice in experts_by_head(model, TEXTS, 0.6):
        for ids in TEXTS:
            with force_routes(model, choice), torch.no_grad():
                weights = model(ids, output_routing=True, use_cache=False).routing_weights
            for index, experts in choice.items():
                assert torch.equal(weights[index].argmax(-1), experts.expand(*ids.shape, 2))


def test_the_model_is_as_it_was(model):
    price = model.config.price
    ids = TEXTS[0]
    before = model(ids).logits
    experts_by_head(model, TEXTS, 0.6)
    assert model.config.price == price
    assert all(not c._forward_hooks for c in value_controllers(model))
    assert torch.equal(model(ids).logits, before)
