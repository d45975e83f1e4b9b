"""Text survives every tokenizer, and every tokenizer survives saving."""

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from meta_attention import MetaAttentionConfig
from meta_attention.errors import ConfigError, DataError
from meta_attention.training import tokenizer as module
from meta_attention.training.corpus import Corpus, embedded_corpus, read_corpus
from meta_attention.training.tokenizer import (
    build_tokenizer,
    encode_document,
    encode_documents,
    token_bytes,
)

CORPUS = read_corpus(max_bytes=60_000)
SPECS = ["bytes", "characters", "bpe:400"]
TOKENIZERS = {spec: build_tokenizer(spec, CORPUS) for spec in SPECS}
HARD = "caf\u00e9  \n\n\t'll <|endoftext|> <|pad|> <unk> \U0001f600\u0301 , \r\n \x00\x85 end ."
texts = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(params=SPECS)
def tokenizer(request) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]


@pytest.mark.parametrize("spec", ["bytes", "bpe:400"])
@given(text=texts)
def test_any_text_survives_bytes_and_bpe(spec, text):
    ids = encode_document(TOKENIZERS[spec], text)
    assert TOKENIZERS[spec].decode(ids.tolist()) == text


@given(text=st.text(sorted(set("".join(CORPUS.documents)))))
def test_text_of_known_characters_survives_characters(text):
    ids = encode_document(TOKENIZERS["characters"], text)
    assert len(ids) == len(text)
    assert TOKENIZERS["characters"].decode(ids.tolist()) == text


def test_an_unknown_character_becomes_unk():
    tokenizer = TOKENIZERS["characters"]
    ids = encode_document(tokenizer, "a\u4e2d\U0001f600b").tolist()
    assert ids[1] == ids[2] == tokenizer.unk_token_id
    assert tokenizer.decode(ids) == "a<unk><unk>b"


@pytest.mark.parametrize("spec", SPECS)
@given(text=texts | st.just(HARD))
def test_documents_get_the_ids_of_the_tokenizer_itself(spec, text):
    tokenizer = TOKENIZERS[spec]
    assert encode_document(tokenizer, text).tolist() == tokenizer(text)["input_ids"]


def test_text_never_becomes_a_special_token(tokenizer):
    ids = encode_document(tokenizer, HARD * 3)
    assert not {tokenizer.eos_token_id, tokenizer.pad_token_id} & set(ids.tolist())


def test_bytes_are_their_own_ids():
    tokenizer = TOKENIZERS["bytes"]
    assert encode_document(tokenizer, HARD).tolist() == list(HARD.encode())
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, 256, 257)
    assert set(module._byte_symbols()) == set(pre_tokenizers.ByteLevel.alphabet())


def test_special_tokens_and_padding_are_set(tokenizer):
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    assert tokenizer.pad_token == "<|pad|>"
    batch = tokenizer(["a", "a b"], padding=True)
    assert batch["input_ids"][0][0] == tokenizer.pad_token_id
    assert batch["attention_mask"][0][0] == 0


def test_tokenizers_survive_saving_beside_a_model_config(tokenizer, tmp_path):
    MetaAttentionConfig().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), build_tokenizer(str(tmp_path), CORPUS)):
        assert loaded.get_vocab() == tokenizer.get_vocab()
        assert loaded.eos_token_id == tokenizer.eos_token_id
        assert loaded.pad_token_id == tokenizer.pad_token_id
        assert loaded.padding_side == "left"
        ids = encode_document(tokenizer, HARD).tolist()
        assert encode_document(loaded, HARD).tolist() == loaded(HARD)["input_ids"] == ids
        assert loaded.decode(ids) == tokenizer.decode(ids)


def test_bytes_and_characters_stay_fast_after_saving(tmp_path):
    for spec in ("bytes", "characters"):
        TOKENIZERS[spec].save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        assert module._symbol_encoder(loaded, len(loaded)) is not None


def test_a_tokenizer_that_has_grown_is_encoded_anew():
    tokenizer = build_tokenizer("bytes", CORPUS)
    assert len(encode_document(tokenizer, "the")) == 3
    tokenizer.add_tokens("the")
    assert encode_document(tokenizer, "the").tolist() == tokenizer("the")["input_ids"] == [258]


def test_bpe_has_the_size_asked_for_and_is_the_same_every_time():
    again = build_tokenizer("bpe:400", CORPUS)
    assert len(again) == 400
    assert again.get_vocab() == TOKENIZERS["bpe:400"].get_vocab()
    assert len(build_tokenizer("bpe", embedded_corpus())) == 8192


def test_bpe_learns_from_pieces_spread_over_a_large_corpus(monkeypatch):
    monkeypatch.setattr(module, "_BPE_SAMPLE", 1000)
    monkeypatch.setattr(module, "_BPE_PIECE", 10)
    sample = list(module._sample(["a" * 5000, "b" * 5000, "c"]))
    assert 900 <= sum(map(len, sample)) <= 1000
    assert abs("".join(sample).count("a") - "".join(sample).count("b")) <= 10


def test_cutting_long_documents_changes_no_token(monkeypatch):
    tokenizer = TOKENIZERS["bpe:400"]
    documents = ["".join(CORPUS.documents), HARD, "", "no line end " * 50]
    whole = [tokenizer(text)["input_ids"] for text in documents]
    monkeypatch.setattr(module, "_PIECE", 50)
    monkeypatch.setattr(module, "_BATCH", 500)
    pieces = list(module._pieces(tokenizer.backend_tokenizer, documents))
    assert len(pieces) > 100
    assert [ids.tolist() for ids in encode_documents(tokenizer, documents)] == whole


def test_long_documents_are_neither_cut_nor_warned_about(tmp_path, caplog):
    tokenizer = build_tokenizer("bpe:300", CORPUS)
    tokenizer.model_max_length = 16
    tokenizer.backend_tokenizer.enable_truncation(16)
    tokenizer.save_pretrained(tmp_path)
    loaded = build_tokenizer(str(tmp_path), CORPUS)
    with caplog.at_level(logging.WARNING):
        ids = encode_document(loaded, CORPUS.documents[0])
    assert loaded.decode(ids.tolist()) == CORPUS.documents[0]
    assert not caplog.records


def test_a_pretrained_tokenizer_gets_what_packing_needs(tmp_path):
    backend = TOKENIZERS["bpe:400"].backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    loaded = build_tokenizer(str(tmp_path), CORPUS)
    assert loaded.eos_token == loaded.pad_token == "<|endoftext|>"
    assert loaded.padding_side == "left"


def test_ids_have_the_smallest_type_that_fits():
    for spec in SPECS:
        assert encode_document(TOKENIZERS[spec], "a").dtype == np.uint16
    many = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x14000)]))
    tokenizer = build_tokenizer("characters", Corpus("all of them", [many]))
    ids = encode_document(tokenizer, many)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids.tolist()) == many


def test_bytes_of_tokens_add_up_to_the_text():
    for spec, text in (("bytes", HARD), ("bpe:400", HARD * 2), ("characters", "plain text")):
        lengths = token_bytes(TOKENIZERS[spec])
        assert lengths[encode_document(TOKENIZERS[spec], text)].sum() == len(text.encode())
        assert lengths[TOKENIZERS[spec].eos_token_id] == 0


@pytest.mark.parametrize("spec", ["byte", "chars", "BPE", "bpe:8k", "bytes:256", "bpe-8192"])
def test_a_misspelt_tokenizer_is_refused_at_once(spec):
    with pytest.raises(ConfigError, match=r"must be bytes, characters, bpe, bpe:SIZE, or .* got"):
        build_tokenizer(spec, CORPUS)


def test_a_folder_without_a_tokenizer_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="cannot be loaded") as caught:
        build_tokenizer(str(tmp_path), CORPUS)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="there is no folder"):
        build_tokenizer(str(tmp_path / "none"), CORPUS)


def test_a_tokenizer_without_a_fast_form_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: object())
    with pytest.raises(DataError, match=r"must have a tokenizer\.json"):
        build_tokenizer(str(tmp_path), CORPUS)


def test_a_bpe_smaller_than_the_bytes_is_refused():
    with pytest.raises(ConfigError, match=r">= 258 tokens, .* got 100"):
        build_tokenizer("bpe:100", CORPUS)
