"""A language model whose key-value heads have routes of their own.

That decoding equals one pass is shown with the other models in ``test_cache`` and
``test_static_cache``.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from meta_attention import RoutingPosterior

BY_HEAD = {"route_granularity": "kv_head", "expert_costs": (0.5, 0.5, 0.5)}
ROUTINGS = {
    "soft": {},
    "hard": {"routing": "hard"},
    "gated": {"routing": "gated", "uncertainty_signal": "margin", "uncertainty_threshold": 0.5},
}


def padded(ids, side):
    mask = torch.ones_like(ids)
    mask[0, slice(9) if side == "left" else slice(15, None)] = 0
    return mask


def test_routing_on_request_has_an_axis_for_the_heads_where_there_is_a_choice(make_model, tokens):
    experts = [["full", "local"], ["local"], ["linear", "local"]]
    out = make_model(**BY_HEAD, layer_experts=experts)(tokens(), output_routing=True)
    shapes = [(2, 24, 2, 2), (2, 24, 1), (2, 24, 2, 2)]
    assert [w.shape for w in out.routing_weights] == shapes
    assert [c.shape for c in out.concentrations] == shapes


def test_kl_is_the_mean_over_routed_layers_real_tokens_and_heads(make_model, tokens):
    model, ids = make_model(route_granularity="kv_head"), tokens()
    mask = padded(ids, "left")
    out = model(ids, attention_mask=mask, labels=ids, output_routing=True)
    prior = torch.tensor([0.01, 0.86, 0.71])
    kls = [RoutingPosterior(c).kl_to(prior)[mask.bool()] for c in out.concentrations]
    torch.testing.assert_close(out.kl, torch.stack(kls).mean())
    torch.testing.assert_close(out.loss, out.task_loss + out.kl)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_padding_changes_nothing(make_model, tokens, routing, side):
    model, ids = make_model(**BY_HEAD, **ROUTINGS[routing]), tokens()
    mask = padded(ids, side)
    out = model(ids, attention_mask=mask)
    alone = model(ids[:1, mask[0].bool()])
    torch.testing.assert_close(out.logits[:1, mask[0].bool()], alone.logits, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_model_survives_saving_and_generates_with_a_cache_as_without(
    make_model, tokens, routing, tmp_path
):
    model, ids = make_model(**BY_HEAD, **ROUTINGS[routing]), tokens()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.route_granularity == "kv_head"
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    mask = padded(ids, "left")
    arguments = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    plain = loaded.generate(ids * mask, use_cache=False, **arguments)
    for cache in (None, "static"):
        cached = loaded.generate(ids * mask, cache_implementation=cache, **arguments)
        assert torch.equal(cached, plain)


@pytest.mark.parametrize("draw", ["mean", "sample", "one_hot"])
@pytest.mark.parametrize("gradient", ["all", "chosen"])
@pytest.mark.parametrize("routing", ["hard", "gated"])
def test_a_routed_model_trains_all_of_its_controllers(make_model, tokens, routing, gradient, draw):
    """By the task alone, and the same with checkpoints: routes that were drawn are drawn again."""
    model = make_model(
        **BY_HEAD,
        **ROUTINGS[routing],
        route_gradient=gradient,
        training_weights=draw,
        kl_weight=0.0,
    ).train()
    ids = tokens()

    def gradients():
        model.zero_grad()
        torch.manual_seed(1)
        model(ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    plain = gradients()
    for name, grad in plain.items():
        assert grad.isfinite().all(), name
        if "controller.mlp.2" in name:
            assert (grad.flatten(1).abs().sum(dim=1) if grad.dim() > 1 else grad.abs()).min() > 0
        assert grad.abs().sum() > 0, name
    model.gradient_checkpointing_enable()
    for name, grad in gradients().items():
        torch.testing.assert_close(grad, plain[name])


def test_compiles_without_graph_breaks(make_model, tokens):
    model, ids = make_model(**BY_HEAD, num_hidden_layers=1).train(), tokens()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ours = compiled(ids, labels=ids, use_cache=False).loss
    torch.testing.assert_close(ours, model(ids, labels=ids, use_cache=False).loss)
    ours.backward()
    torch._dynamo.reset()
