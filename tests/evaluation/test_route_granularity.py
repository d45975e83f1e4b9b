"""Figures of a model whose key-value heads have routes of their own.

Shapes: B batch, T sequence, N tokens of a text, G key-value heads, E experts.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM, RoutingPosterior
from meta_attention.errors import ShapeError
from meta_attention.evaluation.calibration import expected_calibration_error
from meta_attention.evaluation.evaluate import evaluate_text
from meta_attention.evaluation.forcing import force_expert
from meta_attention.evaluation.inspect import DIRICHLET_SIGNALS, inspect_text
from meta_attention.evaluation.routing import RoutingTally, summarise_routing
from meta_attention.report.html import render_inspection
from meta_attention.report.terminal import print_text

NAMES = ("full", "linear", "local")
COSTS = torch.tensor([1.0, 0.15, 0.30])
TEXT = "The keeper counted the ships twice: once for luck."
G = 2


@pytest.fixture(params=[{}, {"routing": "hard"}, {"controller": "prior_free"}], ids=str)
def model(config, request) -> MetaAttentionForCausalLM:
    """Layers of three experts, of one and of two, with two key-value heads."""
    changes = {"route_granularity": "kv_head", "num_key_value_heads": G} | request.param
    torch.manual_seed(0)
    return MetaAttentionForCausalLM(MetaAttentionConfig(**config.to_diff_dict() | changes)).eval()


def run(model, tokenizer, text=TEXT):
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        return ids, model(ids, labels=ids, output_routing=True)


def test_a_mean_over_tokens_is_one_over_their_heads():
    """Each head is as a layer of its own, and the layer the mean of these; padding has none."""
    weights = torch.randn(3, 8, 4, 3).softmax(dim=-1)
    mask = torch.ones(3, 8)
    mask[0, 3:], mask[1, :2] = 0, 0
    ours = summarise_routing(
        [weights, torch.ones(3, 8, 1)], [0.5, None], [NAMES, ("local",)], [COSTS, COSTS[2:]], mask
    )
    assert ours.num_tokens == mask.sum()
    assert ours.layers[1].projected_cost == pytest.approx(0.3)
    heads = [
        summarise_routing([weights[:, :, head]], 0.5, [NAMES], [COSTS], mask).layers[0]
        for head in range(4)
    ]
    layer = ours.layers[0]
    for name in ("adaptivity", "routing_entropy", "projected_cost"):
        expected = sum(getattr(head, name) for head in heads) / 4
        assert getattr(layer, name) == pytest.approx(expected, rel=1e-6), name
    for name in ("share", "top_share", "adaptivity_by_expert"):
        expected = {n: sum(getattr(head, name)[n] for head in heads) / 4 for n in NAMES}
        assert getattr(layer, name) == pytest.approx(expected, rel=1e-6), name


def test_heads_that_treat_every_token_alike_do_not_adapt():
    """However much they differ from each other."""
    weights = torch.eye(3)[[0, 1]].expand(2, 8, G, 3)
    layer = summarise_routing([weights], 1.0, [NAMES], [COSTS]).layers[0]
    assert layer.adaptivity == pytest.approx(0.0, abs=1e-6)
    assert layer.has_prior_collapse
    assert not layer.has_expert_collapse
    assert layer.share == {"full": 0.5, "linear": 0.5, "local": 0.0}


def test_routes_of_another_number_of_heads_are_refused():
    tally = RoutingTally([NAMES], [COSTS], groups=[G])
    with pytest.raises(ShapeError, match="routes for 2 key-value heads of a token, got 1"):
        tally.add([torch.ones(1, 4, 3) / 3])


def test_batches_of_heads_add_up():
    weights = torch.randn(4, 8, G, 3).softmax(dim=-1)
    concentration = torch.rand(4, 8, G, 3) + 0.1
    prior = torch.tensor([0.01, 0.86, 0.71])
    whole, parts = (RoutingTally([NAMES], [COSTS], [prior], groups=[G]) for _ in range(2))
    whole.add([weights], None, [concentration])
    for rows in (slice(0, 1), slice(1, 4)):
        parts.add([weights[rows]], None, [concentration[rows]])
    torch.testing.assert_close(parts.sums, whole.sums)
    expected = RoutingPosterior(concentration).kl_to(prior).mean().item()
    assert whole.summary().kl == pytest.approx(expected, rel=1e-5)


def test_a_tally_of_a_model_agrees_with_the_models_own_figures(model, tokenizer):
    _, out = run(model, tokenizer)
    tally = RoutingTally.of(model)
    tally.add(out.routing_weights, None, out.concentrations)
    summary = tally.summary()
    assert summary.projected_cost == pytest.approx(out.projected_cost.item(), rel=1e-5)
    if model.config.controller == "bayesian":
        assert summary.kl == pytest.approx(out.kl.item(), rel=1e-5)
    else:
        assert summary.kl is None


def test_an_inspected_token_has_the_mean_of_its_heads_and_says_so(model, tokenizer):
    _, out = run(model, tokenizer)
    inspection = inspect_text(model, tokenizer, TEXT)
    assert [layer.num_groups for layer in inspection.layers] == [G, 1, G]
    for index in (0, 2):
        layer, mean = inspection.layers[index], out.routing_weights[index][0].mean(dim=1)
        torch.testing.assert_close(torch.tensor(layer.weights), mean)
        assert layer.expert == torch.tensor(layer.weights).argmax(dim=-1).tolist()
        if out.concentrations[index] is not None:
            posterior = RoutingPosterior(out.concentrations[index][0])  # [N, G, E]
            for name in DIRICHLET_SIGNALS:
                expected = getattr(posterior, name).mean(dim=1)
                torch.testing.assert_close(torch.tensor(layer.signals[name]), expected)
    assert inspection.routing.projected_cost == pytest.approx(out.projected_cost.item(), rel=1e-5)
    figures = json.loads(json.dumps(inspection.to_dict(), allow_nan=False))
    assert figures["layers"][0]["num_groups"] == G
    if out.concentrations[0] is not None:
        kls = [sum(layer.signals["kl"]) for layer in inspection.layers if layer.signals]
        assert sum(kls) / 2 / len(inspection.ids) == pytest.approx(out.kl.item(), rel=1e-5)

    assert f"means over {G} key-value heads" in render_inspection(inspection, "by head")
    for layer_idx, quantity in ((0, "expert"), (0, "margin"), (1, "expert"), (0, "loss")):
        console = Console(width=300)
        with console.capture() as shown:
            print_text(console, inspection, layer_idx, quantity)
        is_said = f"mean over {G} key-value heads" in shown.get()
        assert is_said == (layer_idx == 0 and quantity != "loss")


def test_a_forced_expert_takes_all_heads_of_every_token(model, tokenizer):
    with force_expert(model, [0], 1):
        ids, out = run(model, tokenizer)
    wanted = F.one_hot(torch.ones(1, ids.shape[1], G).long(), 3).float()
    torch.testing.assert_close(out.routing_weights[0], wanted, rtol=0, atol=0)
    static = MetaAttentionForCausalLM(
        MetaAttentionConfig(
            **model.config.to_diff_dict() | {"layer_experts": [["local"], ["local"], ["full"]]}
        )
    ).eval()
    static.load_state_dict(model.state_dict(), strict=False)
    with force_expert(model, [0], 2), force_expert(model, [2], 0):
        torch.testing.assert_close(
            run(model, tokenizer)[1].logits, run(static, tokenizer)[1].logits
        )


def test_every_head_is_judged_by_the_best_expert_of_its_token(model, tokenizer):
    ids, free = run(model, tokenizer)

    def losses(logits):
        return -logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)

    forced = []
    for expert in range(2):
        with force_expert(model, [2], expert):
            forced.append(losses(run(model, tokenizer)[1].logits))
    losses_by_expert = torch.stack(forced, -1)
    lowest = losses_by_expert.min(-1).values
    concentration = free.concentrations[2]
    belief = free.routing_weights[2] if concentration is None else concentration
    belief = belief / belief.sum(dim=-1, keepdim=True)
    confidence, top = belief[0, :-1].max(-1)  # [N - 1, G]
    # near the start experts are equal, and none is wrong
    is_right = losses_by_expert.gather(-1, top) == lowest[:, None]

    result = evaluate_text(model, tokenizer, TEXT, forced=True)
    last = result.forced.layers[-1]
    assert last.regret == pytest.approx((losses(free.logits) - lowest).mean().item(), abs=1e-5)
    assert last.routing_ece == pytest.approx(
        expected_calibration_error(confidence, is_right), abs=1e-5
    )
    assert result.routing.projected_cost == pytest.approx(free.projected_cost.item(), rel=1e-5)
    json.dumps(result.to_dict(), allow_nan=False)
