"""Predictions of a routed model and of its base, compared a few tokens at a time."""

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, LlamaModel

from meta_attention import adapt
from meta_attention.adapt import routed_as
from meta_attention.adapt.training.divergence import Predictor, compare_predictions
from meta_attention.errors import ConfigError
from meta_attention.testing.pretrained import (
    DECODERS,
    FAMILIES,
    build_base,
    draw_tokens,
    randomise_controllers,
)
from meta_attention.training.packing import IGNORED


class Scaled(LlamaForCausalLM):
    """A head that does more than its matrix says."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = 0.5 * out.logits
        return out


def compare(model, ids, labels=None, **options):
    predictor = Predictor(model)
    with torch.no_grad(), routed_as(model, "full"):
        base = predictor.run(model, ids)
    routed = predictor.run(model, ids)
    return compare_predictions(
        predictor, routed, base, ids if labels is None else labels, **options
    )


def by_definition(model, ids):
    """The three figures of every token from the logits of all."""
    with routed_as(model, "full"):
        expected = model(ids).logits.float().log_softmax(-1)
    found = model(ids).logits.float().log_softmax(-1)
    divergence = F.kl_div(found, expected, log_target=True, reduction="none").sum(-1)
    losses = [
        F.pad(F.nll_loss(x[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"), (0, 1))
        for x in (found, expected)
    ]
    return torch.stack([divergence, *losses], dim=-1)


@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_on_full_attention_nothing_diverges(family):
    model = adapt(build_base(family), window_size=3)
    divergence, loss, base_loss = compare(model, draw_tokens(2, 20)).unbind(-1)
    assert divergence.abs().max() < 1e-6
    torch.testing.assert_close(loss, base_loss, rtol=0.0, atol=1e-5)
    assert base_loss[:, :-1].min() > 0.0


@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_figures_are_those_of_the_models_own_logits(family):
    model = adapt(build_base(family), window_size=3)
    randomise_controllers(model)
    ids = draw_tokens(2, 20)
    assert not Predictor(model).is_whole
    found = compare(model, ids, tokens_at_once=7)
    assert found[..., 0].max() > 1e-3
    torch.testing.assert_close(found, by_definition(model, ids), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_head_that_does_more_is_run_whole():
    torch.manual_seed(0)
    model = adapt(Scaled(FAMILIES["llama"][1]).eval(), window_size=3)
    randomise_controllers(model)
    assert Predictor(model).is_whole
    ids = draw_tokens(2, 20)
    torch.testing.assert_close(compare(model, ids), by_definition(model, ids), rtol=1e-4, atol=1e-6)


def test_parts_are_the_whole_gradients_included():
    gradients, values = [], []
    for tokens_at_once in (1000, 7):
        model = adapt(build_base("llama"), window_size=3, training_weights="mean")
        randomise_controllers(model)
        found = compare(model.train(), draw_tokens(2, 20), tokens_at_once=tokens_at_once)
        found.sum(dim=(0, 1))[:2].sum().backward()
        parameters = [p for n, p in model.named_parameters() if "router" in n]
        gradients.append([p.grad for p in parameters if p.grad is not None])
        values.append(found.detach())
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-6)
    assert len(gradients[0]) >= 8
    for whole, part in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, part, rtol=1e-4, atol=1e-5)


def test_tokens_that_are_not_asked_for_have_no_loss():
    model = adapt(build_base("llama"), window_size=3)
    ids = draw_tokens(1, 10)
    labels = ids.clone()
    labels[:, 4] = IGNORED
    losses = compare(model, ids, labels)[0, :, 1:]
    assert (losses == 0).all(dim=-1).nonzero().flatten().tolist() == [3, 9]


def test_a_model_that_predicts_nothing_is_refused():
    model = adapt(LlamaModel(FAMILIES["llama"][1]))
    with pytest.raises(ConfigError, match="LlamaModel makes none; load a causal language model"):
        Predictor(model)
