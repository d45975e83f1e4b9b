"""Sliding-window perplexity against single-token conditionals."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from meta_attention.evaluation.perplexity import Perplexity, measure_perplexity

TEXT = "The keeper counted the ships twice, na\u00efve as he was: 20\u20ac a night."


def loop_over_tokens(model, ids, length, stride):
    """Nats of each token but the first, one call of the model per token."""
    nats = []
    for t in range(1, len(ids)):
        # how many strides beyond the first window this token lies
        steps = max(0, math.ceil((t + 1 - length) / stride))
        end = min(length + steps * stride, len(ids))
        begin = max(0, end - length)
        with torch.no_grad():
            logits = model(input_ids=ids[None, begin:t]).logits[0, -1]
        nats.append(-logits.double().log_softmax(dim=-1)[ids[t]].item())
    return nats


@pytest.mark.parametrize(
    ("length", "stride", "batch_size"), [(16, 8, 1), (16, 15, 3), (9, 2, 4), (64, 32, 2)]
)
def test_it_is_the_product_of_single_conditionals(length, stride, batch_size, model, tokenizer):
    ids = torch.tensor(tokenizer(TEXT)["input_ids"])
    nats = loop_over_tokens(model, ids, length, stride)
    result = measure_perplexity(
        model, tokenizer, TEXT, length=length, stride=stride, batch_size=batch_size
    )
    assert result.num_tokens == len(nats) == len(TEXT.encode()) - 1
    assert result.num_bytes == result.num_tokens
    assert result.nats == pytest.approx(sum(nats), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-5)
    assert result.bits_per_byte == pytest.approx(sum(nats) / len(nats) / math.log(2.0), rel=1e-5)


def test_documents_do_not_see_each_other(model, tokenizer):
    texts = [TEXT, "short", TEXT[:20], "ab"]
    apart = sum((measure_perplexity(model, tokenizer, text) for text in texts), Perplexity())
    together = measure_perplexity(model, tokenizer, texts, batch_size=3)
    assert together.num_tokens == apart.num_tokens
    assert together.nats == pytest.approx(apart.nats, rel=1e-5)


def test_a_uniform_model_needs_the_logarithm_of_its_vocabulary(model, tokenizer):
    torch.nn.init.zeros_(model.lm_head.weight)
    result = measure_perplexity(model, tokenizer, TEXT)
    assert result.perplexity == pytest.approx(len(tokenizer), rel=1e-5)


def test_any_causal_model_can_be_measured(tokenizer):
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.tensor(tokenizer(TEXT)["input_ids"])
    result = measure_perplexity(model, tokenizer, TEXT, length=16, stride=4)
    assert result.nats == pytest.approx(sum(loop_over_tokens(model, ids, 16, 4)), rel=1e-5)


def test_bfloat16_is_close_to_float32(model, tokenizer):
    exact = measure_perplexity(model, tokenizer, TEXT)
    rounded = measure_perplexity(model.bfloat16(), tokenizer, TEXT)
    assert rounded.loss == pytest.approx(exact.loss, rel=0.02)


def test_progress_ends_at_the_total_and_the_mode_is_kept(model, tokenizer):
    seen = []
    model.train()
    measure_perplexity(
        model, tokenizer, TEXT, length=8, advance=lambda done, total: seen.append((done, total))
    )
    assert model.training
    assert seen[-1] == (len(TEXT.encode()) - 1,) * 2
    assert seen == sorted(seen)
    assert len(seen) > 1
