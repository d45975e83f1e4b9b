"""An adapted model beside its base: the same text, the same questions, each as it is alone."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from meta_attention import adapt
from meta_attention.adapt import collect_routing, routed_as
from meta_attention.adapt.lora import add_lora
from meta_attention.errors import ConfigError, DataError
from meta_attention.evaluation import compare
from meta_attention.evaluation.compare import (
    as_base,
    compare_facts,
    compare_text,
    cut_sequences,
    position_edges,
    token_losses,
)
from meta_attention.evaluation.tasks import FactTask
from meta_attention.testing.pretrained import build_base, draw_tokens, randomise_controllers


def make_pair(name="llama", **options):
    base = build_base(name, **options)
    routed = adapt(copy.deepcopy(base), window_size=4)
    randomise_controllers(routed)
    return base, routed


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_base_is_the_model_as_it_was_loaded(name):
    base, routed = make_pair(name)
    ids = draw_tokens(2, 30)
    before = routed(ids).logits
    with as_base(routed), routed_as(routed, "local"):
        # routing means nothing to it, and no router is asked
        with collect_routing(routed) as record:
            assert torch.equal(routed(ids).logits, base(ids).logits)
        assert not record.layers
    assert torch.equal(routed(ids).logits, before)
    assert not torch.allclose(before, base(ids).logits, atol=0.01)


@torch.no_grad()
def test_the_base_is_without_what_lora_added():
    pytest.importorskip("peft")
    base, routed = make_pair()
    add_lora(routed, 2)
    for name, parameter in routed.named_parameters():
        if ".lora_B." in name:
            parameter.fill_(0.1)
    ids = draw_tokens(2, 30)
    with routed_as(routed, "full"):
        assert not torch.allclose(routed(ids).logits, base(ids).logits, atol=0.01)
    with as_base(routed):
        torch.testing.assert_close(routed(ids).logits, base(ids).logits, rtol=0.0, atol=1e-5)


@torch.no_grad()
def test_losses_in_chunks_are_those_of_all_logits(monkeypatch):
    base, _ = make_pair()
    ids = draw_tokens(3, 23)
    expected = F.cross_entropy(
        base(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
    )
    for chunk in (1, 5, 22, 23, 1024):
        monkeypatch.setattr(compare, "CHUNK", chunk)
        torch.testing.assert_close(token_losses(base, ids), expected, rtol=0.0, atol=1e-5)


def test_every_length_is_what_it_is_alone():
    base, routed = make_pair()
    ids = draw_tokens(5, 40)
    whole = compare_text(routed, ids, [16, 40], batch_size=2)
    alone = compare_text(routed, ids[:, :16], [16], batch_size=5)
    a, b = whole.lengths[0], alone.lengths[0]
    assert a.base_loss == pytest.approx(b.base_loss, abs=1e-5)
    assert a.adapted_loss == pytest.approx(b.adapted_loss, abs=1e-5)
    assert a.flops.attention_share == pytest.approx(b.flops.attention_share)
    with torch.no_grad():
        expected = base(ids, labels=ids).loss.item()
    assert whole.lengths[1].base_loss == pytest.approx(expected, abs=1e-5)
    assert whole.lengths[1].loss_increase != pytest.approx(0.0, abs=1e-3)
    # windows pay off where texts are long
    assert whole.lengths[1].flops.attention_share < a.flops.attention_share < 1.0


def test_positions_add_up_to_the_whole(monkeypatch):
    monkeypatch.setattr(compare, "FIRST_EDGE", 8)
    _, routed = make_pair()
    result = compare_text(routed, draw_tokens(3, 40), [40])
    assert [(row.begin, row.end) for row in result.positions] == [
        (0, 8),
        (8, 16),
        (16, 32),
        (32, 40),
    ]
    # the first token is not predicted
    sizes = [row.end - max(row.begin, 1) for row in result.positions]
    for name in ("base_loss", "adapted_loss"):
        losses = [getattr(row, name) for row in result.positions]
        total = sum(loss * size for loss, size in zip(losses, sizes, strict=True))
        assert total / 39 == pytest.approx(getattr(result.lengths[0], name), abs=1e-6)
    assert position_edges(8) == [0, 8]


def test_a_model_on_full_attention_loses_and_saves_nothing():
    _, routed = make_pair()
    with routed_as(routed, "full"):
        (row,) = compare_text(routed, draw_tokens(2, 30), [30]).lengths
    assert row.loss_increase == pytest.approx(0.0, abs=1e-6)
    assert row.flops.attention_share == 1.0


def test_sequences_come_from_as_many_documents_as_there_are(tokenizer):
    model = build_base("llama", vocab_size=len(tokenizer))
    documents = ["a" * 70, "short", "b" * 25, "c" * 45]
    ids = cut_sequences(model, tokenizer, documents, length=20, count=5)
    assert [tokenizer.decode(row)[0] for row in ids] == list("abcac")
    assert ids.shape == (5, 20)
    # short ones are read as one where there is nothing else
    ids = cut_sequences(model, tokenizer, ["abc"] * 10, length=20, count=5)
    assert ids.shape == (1, 20)
    with pytest.raises(DataError, match="must have >= 20 tokens, got 15"):
        cut_sequences(model, tokenizer, ["abc"] * 5, length=20, count=5)


@pytest.mark.parametrize("lengths", [[], [1], [8, 41], [65]])
def test_lengths_beyond_the_text_or_the_model_are_refused(lengths):
    _, routed = make_pair()
    with pytest.raises(ConfigError, match="lengths must be between 2 and"):
        compare_text(routed, draw_tokens(1, 40), lengths)


def test_both_are_asked_the_same(tokenizer):
    base, routed = make_pair(vocab_size=len(tokenizer), max_position_embeddings=512)
    text = np.array(tokenizer("It rained all day. " * 40)["input_ids"])
    task = FactTask.of(tokenizer, text, length=300)
    options = {"depths": (0.2, 0.7), "per_depth": 1}
    (row,) = compare_facts(routed, [task], **options)
    alone = compare.measure_facts(base, task, **options)
    assert row["base"] == alone.to_dict()
    assert row["adapted"]["log_probability"] != pytest.approx(alone.log_probability, abs=1e-3)
    assert row["length"] == row["adapted"]["length"] == 300
