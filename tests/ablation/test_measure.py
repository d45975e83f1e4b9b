"""Figures of a model over blocks of a text."""

import json

import pytest
import torch

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM
from meta_attention.ablation.measure import (
    GATE_SHARES,
    gated_by,
    measure,
    measure_gates,
    measure_uncertainty,
    read_passage,
)
from meta_attention.controller import RoutingPosterior
from meta_attention.evaluation.forcing import attention_layers
from meta_attention.evaluation.routing import routed_as
from meta_attention.training.corpus import Corpus
from meta_attention.training.tokenizer import build_tokenizer


def make_model(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "window_size": 4}
    sizes |= {"num_hidden_layers": 2, "max_position_embeddings": 16, "initializer_range": 0.5}
    return MetaAttentionForCausalLM(MetaAttentionConfig(**sizes | changes)).eval()


@pytest.fixture
def blocks():
    return torch.randint(0, 40, (10, 16))


def test_softly_the_figures_are_those_of_one_pass(blocks):
    model = make_model(expert_costs="paper")
    with torch.no_grad():
        out = model(blocks, labels=blocks, output_routing=True)
    figures = measure(model, blocks, "soft", batch_size=4)
    assert figures["loss"] == pytest.approx(out.task_loss.item(), rel=1e-5)
    assert figures["projected_cost"] == pytest.approx(out.projected_cost.item(), rel=1e-5)
    assert figures["kl"] == pytest.approx(out.kl.item(), rel=1e-5)
    assert figures["num_tokens"] == 150
    # all three experts run on all tokens
    assert figures["flops"]["attention"] > 1.0


def test_hard_every_token_takes_its_top_expert_and_nothing_else_is_counted(blocks):
    model = make_model()
    soft, hard = measure(model, blocks, "soft"), measure(model, blocks, "hard")
    # of the first layer: the second sees what the first made of its tokens
    assert hard["layers"][0]["share"] == pytest.approx(soft["layers"][0]["top_share"])
    assert hard["flops"]["attention"] < soft["flops"]["attention"]
    assert hard["loss"] != soft["loss"]
    assert model.config.routing == "soft"


def test_a_projected_cost_is_the_papers_whatever_costs_a_model_has(blocks):
    names = ["full", "local"]
    figures = measure(make_model(expert_costs="flops", experts=names), blocks, "soft")
    shares = [layer["share"] for layer in figures["layers"]]
    expected = sum(share["full"] + 0.3 * share["local"] for share in shares) / 2
    assert figures["projected_cost"] == pytest.approx(expected)


def test_full_attention_costs_all_of_itself(blocks):
    flops = measure(make_model(experts=["full"]), blocks, "hard")["flops"]
    assert [flops[part] for part in ("attention", "layer", "model")] == pytest.approx([1, 1, 1])


def test_attention_residuals_cost_more_than_all_of_full_attention(blocks):
    plain, more = (
        measure(make_model(experts=["full"], residual=residual), blocks, "hard")["flops"]
        for residual in ("sum", "attention")
    )
    assert (more["attention"], more["layer"]) == pytest.approx((1, 1))
    # the measure is the plain model, so the share grows as the operations do
    assert more["model"] == pytest.approx(more["model_per_token"] / plain["model_per_token"])
    assert more["model"] > 1.0


def test_forcing_needs_a_choice_and_gives_a_regret(blocks):
    figures = measure(make_model(), blocks, "hard", forced=True)["forced"]
    assert figures["regret"] >= figures["static_regret"]
    assert sum(one["count"] for one in figures["layers"][0]["calibration"]) == 150
    assert "forced" not in measure(make_model(experts=["local"]), blocks, "hard", forced=True)


def test_a_hard_route_without_a_posterior_says_nothing_of_confidence(blocks):
    model = make_model(controller="prior_free")
    assert measure(model, blocks, "hard", forced=True)["forced"]["routing_ece"] is None
    assert measure(model, blocks, "soft", forced=True)["forced"]["routing_ece"] > 0.0


def test_histograms_hold_every_token(blocks):
    tally = measure_uncertainty(make_model(), blocks, batch_size=3)
    found = tally.histograms()
    assert list(found) == ["mean_entropy", "margin", "mutual_information", "vacuity", "entropy"]
    for histogram in found.values():
        assert histogram["low"] < histogram["high"]
        for shares in histogram["shares"].values():
            assert sum(shares) == pytest.approx(1.0)


def test_a_gate_goes_from_soft_to_hard(blocks):
    model = make_model()
    tally = measure_uncertainty(model, blocks)
    found = measure_gates(model, blocks, tally, batch_size=4)
    soft, hard = (measure(model, blocks, routing) for routing in ("soft", "hard"))
    for points in found.values():
        assert [p["share_asked"] for p in points] == list(GATE_SHARES)
        assert points[0]["hard_share"] == 0.0
        assert points[-1]["hard_share"] == 1.0
        assert points[0]["loss"] == pytest.approx(soft["loss"], rel=1e-5)
        assert points[-1]["loss"] == pytest.approx(hard["loss"], rel=1e-5)
        assert points[-1]["attention_flops"] == pytest.approx(hard["flops"]["attention"])
        shares = [p["hard_share"] for p in points]
        assert shares == sorted(shares)


def test_a_token_is_hard_by_its_gate_not_by_a_weight_that_rounds_to_one(blocks):
    model = make_model(controller="prior_free")
    for layer in attention_layers(model):
        # softmax: one, and little more than nothing
        torch.nn.init.zeros_(layer.controller.mlp[-1].weight)
        layer.controller.mlp[-1].bias.data.copy_(torch.tensor([20.0, 0.0, 0.0]))
    with torch.no_grad():
        weights = model(blocks, output_routing=True).routing_weights[0]
    assert (weights[..., 0] == 1.0).all()
    assert (weights > 0.0).all()
    found = measure_gates(model, blocks, measure_uncertainty(model, blocks))
    assert [point["hard_share"] for point in found["margin"]] == [0.0] * 5 + [1.0]
    # soft tokens run all experts
    soft = measure(model, blocks, "soft")["flops"]["attention"]
    assert found["margin"][0]["attention_flops"] == pytest.approx(soft)


def test_a_model_is_as_before(blocks):
    model = make_model()
    before = measure(model, blocks, "soft")
    with gated_by(model, "margin", 0.3):
        assert model.config.routing == "gated"
    with routed_as(model, "hard"), pytest.raises(RuntimeError), routed_as(model, "soft"):
        raise RuntimeError
    assert model.config.routing == "soft"
    assert model.config.uncertainty_threshold is None
    # what layers gate by is a copy of their own
    assert all(layer.controller.uncertainty_threshold == 0.0 for layer in attention_layers(model))
    assert measure(model, blocks, "soft") == before


def test_a_passage_is_the_text_and_one_expert_for_each_of_its_characters():
    tokenizer = build_tokenizer("characters", Corpus("text", ["a b\nc" * 20]))
    model = make_model(vocab_size=len(tokenizer))
    ids = torch.tensor(tokenizer("a b\nca b\n")["input_ids"]).view(1, -1)
    passage = read_passage(model, tokenizer, ids)
    assert "".join(passage["tokens"]) == "a b\nca b\n"
    assert all(len(layer["expert"]) == 9 for layer in passage["layers"])
    assert passage["layers"][0]["experts"] == ["full", "linear", "local"]


def test_everything_is_json(blocks):
    for model in (make_model(), make_model(experts=["full"]), make_model(controller="prior_free")):
        json.dumps(measure(model, blocks, "hard", forced=True), allow_nan=False)
        json.dumps(measure_uncertainty(model, blocks).histograms(), allow_nan=False)


@pytest.mark.parametrize("granularity", ["token", "kv_head"])
def test_tokens_that_pass_a_block_by_have_no_uncertainty_there(granularity, blocks):
    model = make_model(depth_capacity=0.5, route_granularity=granularity)
    with torch.no_grad():
        out = model(blocks, output_routing=True)
    has_entered = out.routing_weights[1].sum(dim=-1) > 0.0
    assert 0 < has_entered.sum() < has_entered.numel()
    uncertainty = measure_uncertainty(model, blocks, batch_size=4)
    expected = RoutingPosterior(out.concentrations[1]).vacuity[has_entered]
    torch.testing.assert_close(uncertainty.of(1, "vacuity"), expected)
    assert len(uncertainty.of(0, "vacuity")) == has_entered.numel()
    # so all that there are can be made hard
    gates = measure_gates(model, blocks, uncertainty)
    assert gates["vacuity"][-1]["hard_share"] == 1.0
