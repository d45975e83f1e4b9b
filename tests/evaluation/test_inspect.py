"""A text's tokens and their routes."""

import json

import pytest
import torch

from meta_attention import MetaAttentionForCausalLM, RoutingPosterior
from meta_attention.errors import DataError
from meta_attention.evaluation.inspect import DIRICHLET_SIGNALS, POINT_SIGNALS, inspect_text

TEXT = "Twice: na\u00efve,\n20\u20ac"


def test_tokens_joined_are_the_text_and_a_dot_for_each_part(model, tokenizer):
    inspection = inspect_text(model, tokenizer, TEXT)
    assert len(inspection.tokens) == len(TEXT.encode())
    assert "".join(inspection.tokens).replace("\u00b7", "") == TEXT
    assert inspection.tokens[-3:] == ["\u00b7", "\u00b7", "\u20ac"]


def test_control_characters_are_shown_as_signs(model, tokenizer):
    inspection = inspect_text(model, tokenizer, "a\x1b[2J\x00\r\x7f\t\n")
    shown = "".join(inspection.tokens)
    assert shown == "a\u241b[2J\u2400\u240d\u2421\t\n"


def test_numbers_are_those_of_the_model(model, tokenizer):
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    with torch.no_grad():
        out = model(ids, labels=ids, output_routing=True)
    inspection = inspect_text(model, tokenizer, TEXT)
    assert inspection.ids == ids[0].tolist()
    assert inspection.loss[0] is None
    known = [loss for loss in inspection.loss if loss is not None]
    assert sum(known) / len(known) == pytest.approx(out.task_loss.item(), rel=1e-5)
    for layer, weights, concentration in zip(
        inspection.layers, out.routing_weights, out.concentrations, strict=True
    ):
        torch.testing.assert_close(torch.tensor(layer.weights), weights[0])
        assert layer.expert == weights[0].argmax(-1).tolist()
        for name in layer.signals.keys() & set(DIRICHLET_SIGNALS):
            expected = getattr(RoutingPosterior(concentration), name)[0]
            torch.testing.assert_close(torch.tensor(layer.signals[name]), expected)
    kls = [sum(layer.signals["kl"]) for layer in inspection.layers if layer.signals]
    assert sum(kls) / len(kls) / len(inspection.ids) == pytest.approx(out.kl.item(), rel=1e-5)
    assert inspection.routing.kl == pytest.approx(out.kl.item(), rel=1e-5)


def test_a_static_layer_has_no_uncertainty(model, tokenizer):
    inspection = inspect_text(model, tokenizer, TEXT)
    assert inspection.layers[1].signals == {}
    assert inspection.signals == (*DIRICHLET_SIGNALS, "kl")
    assert inspection.first_routed_layer == 0


def test_without_a_prior_only_the_weights_speak(config, tokenizer):
    config.controller = "prior_free"
    inspection = inspect_text(MetaAttentionForCausalLM(config), tokenizer, TEXT)
    assert inspection.signals == POINT_SIGNALS


def test_one_token_is_enough(model, tokenizer):
    inspection = inspect_text(model, tokenizer, "a")
    assert inspection.loss == [None]
    json.dumps(inspection.to_dict(), allow_nan=False)


@pytest.mark.parametrize("text", ["", "a" * 65])
def test_a_text_of_no_or_too_many_tokens_is_refused(text, model, tokenizer):
    with pytest.raises(DataError, match=f"max_position_embeddings = 64 tokens, got {len(text)}"):
        inspect_text(model, tokenizer, text)
