"""All figures of a model over a text."""

import json

import pytest
import torch

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM
from meta_attention.evaluation.calibration import expected_calibration_error
from meta_attention.evaluation.evaluate import evaluate_text
from meta_attention.evaluation.forcing import force_expert
from meta_attention.evaluation.perplexity import measure_perplexity

TEXT = "The keeper counted the ships twice: once for luck."  # 50 bytes, one window


def output(model, tokenizer, text=TEXT):
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        return ids, model(ids, labels=ids, output_routing=True)


def test_one_window_gives_the_figures_of_one_pass(model, tokenizer):
    ids, out = output(model, tokenizer)
    result = evaluate_text(model, tokenizer, TEXT)
    assert result.text.loss == pytest.approx(out.task_loss.item(), rel=1e-5)
    assert result.routing.kl == pytest.approx(out.kl.item(), rel=1e-5)
    assert result.routing.projected_cost == pytest.approx(out.projected_cost.item(), rel=1e-5)
    assert result.routing.num_tokens == 50
    probabilities = out.logits[0, :-1].softmax(-1)
    confidence, best = probabilities.max(-1)
    assert result.ece == pytest.approx(
        expected_calibration_error(confidence, best == ids[0, 1:]), abs=1e-6
    )


def test_windows_and_batches_count_every_token_once(model, tokenizer):
    text = TEXT * 5
    result = evaluate_text(model, tokenizer, text, length=16, stride=5, batch_size=7)
    plain = measure_perplexity(model, tokenizer, text, length=16, stride=5)
    assert result.text.num_tokens == 249
    assert result.routing.num_tokens == 250
    assert sum(one.count for one in result.calibration) == 249
    assert result.text.nats == pytest.approx(plain.nats, rel=1e-6)
    other = evaluate_text(model, tokenizer, text, length=16, stride=5, batch_size=1)
    assert other.routing.kl == pytest.approx(result.routing.kl, rel=1e-5)
    assert other.routing.adaptivity == pytest.approx(result.routing.adaptivity, rel=1e-3)


@pytest.mark.parametrize("depth", [{}, {"depth_capacity": 0.5, "depth_layers": (2,)}])
def test_forcing_judges_the_prediction_each_token_makes(config, tokenizer, depth):
    """Regret of the last layer, over the tokens that enter it."""
    torch.manual_seed(0)
    config = MetaAttentionConfig(**config.to_diff_dict() | depth)
    model = MetaAttentionForCausalLM(config).eval()
    ids, free = output(model, tokenizer)
    has_entered = free.routing_weights[2][0, :-1].sum(-1) > 0.0
    assert (0 < has_entered.sum() < 49) if depth else has_entered.all()

    def losses(logits):
        return -logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)

    forced = []
    for expert in range(2):
        with force_expert(model, [2], expert):
            forced.append(losses(output(model, tokenizer)[1].logits))
    forced = torch.stack(forced, -1)
    lowest = forced.min(-1).values
    confidence, top = free.routing_weights[2][0, :-1].max(-1)
    # where a token sees no further than the window, both are the best
    is_right = forced.gather(-1, top.unsqueeze(-1)).squeeze(-1) == lowest

    result = evaluate_text(model, tokenizer, TEXT, forced=True)
    last = result.forced.layers[-1]
    regret = (losses(free.logits) - lowest)[has_entered].mean().item()
    assert last.regret == pytest.approx(regret, abs=1e-5)
    ece = expected_calibration_error(confidence[has_entered], is_right[has_entered])
    assert last.routing_ece == pytest.approx(ece, abs=1e-5)


def test_the_dictionary_is_json_and_says_what_was_run(model, tokenizer):
    seen = []
    result = evaluate_text(
        model, tokenizer, [TEXT, TEXT], forced=True, advance=lambda *now: seen.append(now)
    )
    figures = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert figures["num_tokens"] == 98
    assert figures["num_documents"] == 2
    assert figures["device"] == "cpu"
    assert figures["dtype"] == "float32"
    assert (figures["length"], figures["stride"]) == (64, 32)
    for name in ("loss", "perplexity", "bits_per_byte", "kl", "projected_cost", "ece", "regret"):
        assert figures[name] is not None
    assert figures["layers"][0]["routing_ece"] is not None
    assert "regret" not in figures["layers"][1]
    assert "hard_cost" not in figures
    # one pass as routed, three and two with experts forced
    assert seen[-1] == (98 * 6, 98 * 6)


def test_without_forcing_nothing_is_said_about_it(model, tokenizer):
    assert "regret" not in evaluate_text(model, tokenizer, TEXT).to_dict()


def test_a_controller_without_a_prior_has_no_kl(config, tokenizer):
    config.controller = "prior_free"
    result = evaluate_text(MetaAttentionForCausalLM(config), tokenizer, TEXT, forced=True)
    assert result.routing.kl is None
    assert result.routing.layers[0].adaptivity > 0.0


def test_bfloat16_is_named_and_close(model, tokenizer):
    exact = evaluate_text(model, tokenizer, TEXT)
    rounded = evaluate_text(model.bfloat16(), tokenizer, TEXT)
    assert rounded.dtype == "bfloat16"
    assert rounded.text.loss == pytest.approx(exact.text.loss, rel=0.02)
    assert rounded.routing.projected_cost == pytest.approx(exact.routing.projected_cost, rel=0.05)


@pytest.mark.gpu
def test_a_gpu_gives_the_figures_of_the_cpu(model, tokenizer):
    exact = evaluate_text(model, tokenizer, TEXT, length=16, forced=True)
    other = evaluate_text(model.cuda(), tokenizer, TEXT, length=16, forced=True)
    assert other.device.startswith("cuda")
    assert other.text.loss == pytest.approx(exact.text.loss, rel=1e-3)
    assert other.forced.regret == pytest.approx(exact.forced.regret, abs=1e-2)
