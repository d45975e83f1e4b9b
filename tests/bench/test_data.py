"""Random routes, fixed routes, and how many operations they are."""

import pytest
import torch

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM
from meta_attention.bench.data import (
    EXPERTS,
    Mix,
    OpShape,
    attention_flops,
    causal_flops,
    fix_routes,
    fixed_routes,
    make_heads,
)
from meta_attention.bench.modules import draw_layers
from meta_attention.errors import ShapeError

CPU = torch.device("cpu")
MIX = Mix(25, 25, 50)


def make_model(**fields):
    config = MetaAttentionConfig(
        vocab_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, window_size=4,
        max_position_embeddings=64, experts=EXPERTS, routing="hard", **fields,
    )  # fmt: skip
    return MetaAttentionForCausalLM(config).eval()


def test_routes_follow_the_mix_and_the_seed():
    routes = MIX.draw(4, 5000, seed=0, device=CPU)
    shares = routes.flatten().bincount(minlength=3) / routes.numel()
    assert shares.tolist() == pytest.approx([0.25, 0.25, 0.5], abs=0.02)
    assert torch.equal(routes, MIX.draw(4, 5000, seed=0, device=CPU))
    assert not torch.equal(routes, MIX.draw(4, 5000, seed=1, device=CPU))


def test_rows_of_a_batch_are_shared_out_exactly():
    routes = MIX.share_out(32, seed=0, device=CPU)
    assert routes.bincount(minlength=3).tolist() == [8, 8, 16]


def test_a_mix_without_linear_tokens_has_two_experts():
    routes = Mix(20, 80, 0).draw(1, 10, seed=0, device=CPU)
    assert Mix(20, 80, 0).weights(routes).shape == (1, 10, 2)
    assert str(Mix(20, 80, 0)) == "20/80/0"


def test_data_does_not_depend_on_who_asks():
    shape = OpShape(1, 8, H=2, P=4)
    one, other = (make_heads(shape, dtype=torch.bfloat16, device=CPU, seed=3) for _ in range(2))
    assert torch.equal(one.query, other.query)
    assert one.key.requires_grad
    assert not one.upstream.requires_grad


def test_all_full_costs_the_causal_half():
    shape = OpShape(2, 300, H=2, P=16, window=32)
    full = torch.zeros(2, 300, dtype=torch.long)
    assert attention_flops(shape, full, EXPERTS[:2]) == causal_flops(shape)
    # linear rows leave softmax experts nothing to do
    assert attention_flops(shape, full + 2, EXPERTS[:2]) == 0
    assert attention_flops(shape, full + 2, EXPERTS) > 0


def test_fixed_routes_are_taken_and_controllers_still_run():
    model = make_model()
    ids = torch.randint(16, (2, 20))
    routes = draw_layers(MIX, 2, 2, 20, seed=0, device=CPU)
    calls = []
    for block in model.model.layers:
        block.attention.controller.register_forward_hook(lambda *args: calls.append(1))
    with fixed_routes(model, routes):
        out = model(ids, output_routing=True)
    assert len(calls) == 2
    for weights, route in zip(out.routing_weights, routes, strict=True):
        assert torch.equal(weights.argmax(dim=-1), route)
    after = model(ids, output_routing=True)
    assert not torch.equal(after.routing_weights[0].argmax(dim=-1), routes[0])


def test_fixed_routes_keep_the_controllers_gradient():
    model = make_model(route_gradient="chosen").train()
    ids = torch.randint(16, (1, 20))
    with fixed_routes(model, draw_layers(MIX, 2, 1, 20, seed=0, device=CPU)):
        model(ids, labels=ids).loss.backward()
    gradient = model.model.layers[0].attention.controller.mlp[0].weight.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0


def test_static_layers_need_no_routes():
    model = make_model(layer_experts=[["full"], ["full", "local"]])
    with pytest.raises(ShapeError, match="each of 1 layers, got 2"):
        fix_routes(model, draw_layers(MIX, 2, 1, 4, seed=0, device=CPU))
