"""Windows over a text: every token scored once, every byte counted once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meta_attention.errors import ConfigError, DataError
from meta_attention.evaluation.windows import (
    choose_windows,
    num_targets,
    plan_windows,
    tokenize,
    tokenize_documents,
    window_batches,
)
from meta_attention.training.corpus import Corpus
from meta_attention.training.tokenizer import build_tokenizer

TEXT = "na\u00efve: 20\u20ac \U0001f680 and on"


@given(st.integers(0, 200), st.integers(2, 40), st.data())
def test_every_token_but_the_first_is_scored_once(num_tokens, length, data):
    stride = data.draw(st.integers(1, length - 1))
    windows = list(plan_windows(num_tokens, length, stride))
    assert [t for w in windows for t in range(w.first, w.end)] == list(range(1, num_tokens))
    for window in windows:
        # all of one length, so that nothing needs padding, and none without context
        assert len(window) == min(length, num_tokens)
        assert window.begin < window.first
        assert window.first == 1 or window.first - window.begin >= length - stride


@pytest.mark.parametrize("spec", ["bytes", "bpe:300", "characters"])
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(spec, model):
    tokenizer = build_tokenizer(spec, Corpus("text", [TEXT, "a" * 300]))
    model.config.vocab_size = len(tokenizer)
    document = tokenize(model, tokenizer, TEXT)
    assert int(document.num_bytes.sum()) == len(TEXT.encode())
    assert document.ends[-1] == len(TEXT)
    assert int(document.num_bytes.min()) > 0


def test_a_token_that_is_one_byte_counts_as_one_byte(model, tokenizer):
    document = tokenize(model, tokenizer, "\u00e9a")
    assert document.num_bytes.tolist() == [1, 1, 1]
    assert document.ends == [0, 1, 2]


def test_text_that_spells_a_special_token_is_text(model, tokenizer):
    assert len(tokenize(model, tokenizer, "<|endoftext|>").ids) == 13


def test_each_target_and_byte_is_in_one_batch(model, tokenizer):
    texts = ["first document, a longer one", "x", "", "second", TEXT]
    documents = tokenize_documents(model, tokenizer, texts)
    assert len(documents) == 3
    targets, new, num_bytes = 0, 0, 0
    for batch in window_batches(documents, 8, 3, 4, "cpu"):
        targets += int(batch.is_target.sum())
        new += int(batch.is_new.sum())
        num_bytes += batch.num_bytes
        if batch.attention_mask is not None:
            assert not batch.is_new[batch.attention_mask == 0].any()
        predicted = batch.input_ids.roll(-1, dims=1)[batch.is_predictor]
        torch.testing.assert_close(predicted, batch.input_ids[batch.is_target])
    assert targets == num_targets(documents) == sum(len(d.ids) - 1 for d in documents)
    assert new == sum(len(d.ids) for d in documents)
    # with a tokenizer of bytes, all but the first byte of a document
    assert num_bytes == targets


def test_max_tokens_is_the_number_of_tokens_read(model, tokenizer):
    documents = tokenize_documents(model, tokenizer, ["abcdef", "ghijkl"], max_tokens=9)
    assert [len(document.ids) for document in documents] == [6, 3]


@pytest.mark.parametrize("text", ["", "a", ["", "a"]])
def test_a_text_without_a_second_token_is_refused(text, model, tokenizer):
    with pytest.raises(DataError, match="at least two tokens"):
        tokenize_documents(model, tokenizer, text)


def test_a_foreign_tokenizer_is_refused(model, tokenizer):
    model.config.vocab_size = 50
    with pytest.raises(DataError, match="the model's own"):
        tokenize(model, tokenizer, "abc")


def test_windows_must_fit_the_model(model):
    assert choose_windows(model) == (64, 32)
    for length, stride in ((65, None), (1, None), (8, 8), (8, 0)):
        with pytest.raises(ConfigError):
            choose_windows(model, length, stride)
    model.config.causal = False
    with pytest.raises(ConfigError, match="causal=True"):
        choose_windows(model)
