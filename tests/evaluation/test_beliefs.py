"""Posteriors of a running model."""

import pytest
import torch

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM
from meta_attention.evaluation.beliefs import SIGNALS, signals_of, watch_beliefs

IDS = torch.arange(24).reshape(2, 12) * 7 % 256


@pytest.mark.parametrize("controller", ["bayesian", "prior_free"])
def test_hard_routes_hide_a_belief_that_is_watched(config, controller):
    changes = {"routing": "hard", "controller": controller, "uncertainty_signal": "margin"}
    model = MetaAttentionForCausalLM(MetaAttentionConfig(**config.to_diff_dict() | changes)).eval()
    with torch.no_grad(), watch_beliefs(model) as beliefs:
        weights = model(IDS, output_routing=True).routing_weights
    # the static layer has none
    assert list(beliefs) == [0, 2]
    for index, posterior in beliefs.items():
        assert torch.equal(posterior.mean.argmax(-1), weights[index].argmax(-1))
        assert posterior.mean.max() < 1.0
    has_prior = controller == "bayesian"
    signals = signals_of(beliefs[0])
    assert list(signals) == (list(SIGNALS) if has_prior else ["mean_entropy", "margin"])
    assert torch.equal(signals["margin"], 1.0 - beliefs[0].margin)
    before = dict(beliefs)
    with torch.no_grad():
        model(IDS)
    assert beliefs == before


def test_signals_of_heads_are_their_mean(config):
    config.route_granularity = "kv_head"
    model = MetaAttentionForCausalLM(config).eval()
    with torch.no_grad(), watch_beliefs(model) as beliefs:
        model(IDS)
    posterior = beliefs[0]
    assert posterior.vacuity.shape == (2, 12, 2)
    assert torch.equal(signals_of(posterior)["vacuity"], posterior.vacuity.mean(-1))


@pytest.mark.parametrize("residual", ["sum", "attention"])
def test_beliefs_stand_where_their_tokens_do_also_if_some_pass_by(config, residual):
    changes = {"depth_capacity": 0.5, "depth_layers": (0,), "residual": residual}
    torch.manual_seed(0)
    model = MetaAttentionForCausalLM(MetaAttentionConfig(**config.to_diff_dict() | changes)).eval()
    with torch.no_grad(), watch_beliefs(model) as beliefs:
        out = model(IDS, output_routing=True)
    has_entered = out.routing_weights[0].sum(dim=-1) > 0.0
    assert 0 < has_entered.sum() < IDS.numel()
    assert list(beliefs) == [0, 2]
    for index, posterior in beliefs.items():
        assert torch.equal(posterior.concentration, out.concentrations[index])
    prior = model.model.layers[0].attention.controller.prior_concentration
    assert (beliefs[0].concentration[~has_entered] == prior).all()
