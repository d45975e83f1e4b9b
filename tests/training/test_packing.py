"""Packing loses nothing but the tail, and keeps every boundary."""

import io
import pickle
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from meta_attention.errors import ConfigError, DataError
from meta_attention.training import packing as module
from meta_attention.training.corpus import Corpus, read_corpus
from meta_attention.training.packing import PackedDataset, pack
from meta_attention.training.tokenizer import build_tokenizer, encode_document

CORPUS = read_corpus(max_bytes=60_000)
TOKENIZERS = {spec: build_tokenizer(spec, CORPUS) for spec in ("bytes", "characters", "bpe:400")}
BYTES = TOKENIZERS["bytes"]
EOS = BYTES.eos_token_id
ABC = Corpus("abc", ["aaa", "bb", "cccc"])
corpora = st.builds(
    Corpus,
    st.just("random"),
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1),
)


def by_definition(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Each document's tokens and a boundary, one after the other."""
    ids = []
    for text in corpus.documents:
        ids += [*encode_document(tokenizer, text).tolist(), tokenizer.eos_token_id]
    return ids


@pytest.mark.parametrize("spec", TOKENIZERS)
@given(corpus=corpora, length=st.integers(2, 9))
def test_blocks_are_the_documents_and_their_boundaries_in_order(spec, corpus, length):
    ids = by_definition(corpus, TOKENIZERS[spec])
    if len(ids) < length:
        return
    packed = pack(corpus, TOKENIZERS[spec], length)
    seen = torch.cat([packed[i]["input_ids"] for i in range(len(packed))]).tolist()
    assert seen == ids[: len(seen)]
    assert packed.num_tokens == len(seen) == len(packed) * length
    assert packed.dropped_tokens == len(ids) - len(seen) < length
    for start in packed.document_starts:
        assert start == 0 or seen[start - 1] == TOKENIZERS[spec].eos_token_id


def test_a_block_is_input_and_label():
    packed = pack(ABC, BYTES, 4)
    block = packed[1]
    assert block["input_ids"].tolist() == [*b"bb", EOS, *b"c"]
    assert block["labels"].tolist() == block["input_ids"].tolist()
    assert block["input_ids"].dtype == torch.long
    assert set(block) == {"input_ids", "labels"}
    assert packed.document_starts.tolist() == [0, 4, 7]
    assert len(list(packed)) == len(packed) == 3
    with pytest.raises(IndexError):
        packed[-1]


def test_isolated_documents_are_numbered_and_do_not_predict_each_other():
    packed = pack(ABC, BYTES, 6, isolate_documents=True)
    first, second = packed[0], packed[1]
    assert first["input_ids"].tolist() == [*b"aaa", EOS, *b"bb"]
    assert first["document_ids"].tolist() == [1, 1, 1, 1, 2, 2]
    assert first["labels"].tolist() == [-100, *b"aa", EOS, -100, *b"b"]
    assert second["input_ids"].tolist() == [EOS, *b"cccc", EOS]
    assert second["document_ids"].tolist() == [1, 2, 2, 2, 2, 2]
    assert second["labels"].tolist() == [EOS, -100, *b"ccc", EOS]


@given(corpus=corpora, length=st.integers(2, 9))
def test_masks_count_boundaries(corpus, length):
    if corpus.num_bytes < length:
        return
    packed = pack(corpus, BYTES, length, isolate_documents=True)
    for block in packed:
        before = torch.cat([torch.tensor([0]), (block["input_ids"] == EOS).long()[:-1]])
        assert torch.equal(block["document_ids"], 1 + before.cumsum(0))


@pytest.mark.parametrize("isolate", [False, True])
@given(corpus=corpora, length=st.integers(2, 9))
def test_bytes_are_counted_exactly(isolate, corpus, length):
    if corpus.num_bytes < length:
        return
    packed = pack(corpus, BYTES, length, isolate_documents=isolate)
    blocks = list(packed)
    assert packed.block_bytes.tolist() == [int((b["input_ids"] != EOS).sum()) for b in blocks]
    assert packed.num_bytes == sum(packed.block_bytes)
    # what a causal model is asked for: every label but the first, and none that is ignored
    targets = torch.cat([block["labels"][1:] for block in blocks])
    targets = targets[targets >= 0]
    assert packed.num_target_tokens == len(targets)
    assert packed.num_target_bytes == int((targets != EOS).sum())


@pytest.mark.parametrize("spec", TOKENIZERS)
def test_all_bytes_of_the_text_are_covered(spec):
    for length in (4, 64, 7000):
        packed = pack(CORPUS, TOKENIZERS[spec], length)
        decoded = TOKENIZERS[spec].decode(packed.tokens.tolist(), skip_special_tokens=True)
        assert packed.num_bytes == len(decoded.encode())


def test_bytes_of_a_text_with_unknown_characters_still_add_up():
    corpus = Corpus("new", ["a\u4e2d\u4e2d", "b\U0001f600c"])
    packed = pack(corpus, TOKENIZERS["characters"], 8)
    assert packed.dropped_tokens == 0
    assert packed.num_bytes == corpus.num_bytes


def test_bytes_of_a_tokenizer_that_rewrites_text_add_up_by_document():
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "[SEP]": 1, "hello": 2}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", eos_token="[SEP]"
    )
    corpus = Corpus("words", ["hello   hello", "some other  words", "   "])
    packed = pack(corpus, tokenizer, 8)
    assert packed.dropped_tokens == 0
    assert packed.num_bytes == corpus.num_bytes - 3


def test_a_uniform_guess_costs_eight_bits_per_byte():
    packed = pack(Corpus("long", ["x" * 4096]), BYTES, 64)
    assert packed.bits_per_byte(float(np.log(256))) == pytest.approx(8.0)


def test_a_text_shorter_than_a_block_is_refused():
    with pytest.raises(DataError, match=r"abc must fill a block of 13 tokens, got 12;"):
        pack(ABC, BYTES, 13)
    assert len(pack(ABC, BYTES, 12)) == 1
    with pytest.raises(ConfigError, match="length must be >= 2"):
        pack(ABC, BYTES, 1)


def test_a_tokenizer_without_a_boundary_is_refused():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=BYTES.backend_tokenizer)
    with pytest.raises(ConfigError, match="tokenizer must have an eos_token"):
        pack(ABC, tokenizer, 4)


def test_a_fingerprint_tells_other_data_apart():
    prints = {
        pack(ABC, BYTES, 4).fingerprint,
        pack(ABC, BYTES, 3).fingerprint,
        pack(ABC, BYTES, 4, isolate_documents=True).fingerprint,
        pack(Corpus("abc", ["aaa", "bb", "cccd"]), BYTES, 4).fingerprint,
    }
    assert len(prints) == 4
    assert pack(ABC, BYTES, 4).fingerprint == pack(Corpus("z", ABC.documents), BYTES, 4).fingerprint


def test_a_dataset_travels_to_worker_processes():
    packed = pack(ABC, BYTES, 4)
    copy = pickle.loads(pickle.dumps(packed))
    assert isinstance(copy, PackedDataset)
    assert copy.fingerprint == packed.fingerprint


def test_a_loader_shuffles_by_seed_and_visits_every_block_once():
    packed = pack(CORPUS, BYTES, 64)

    def epoch(seed):
        generator = torch.Generator().manual_seed(seed)
        batches = DataLoader(packed, batch_size=8, shuffle=True, generator=generator)
        return torch.cat([batch["input_ids"] for batch in batches])

    assert torch.equal(epoch(0), epoch(0))
    assert not torch.equal(epoch(0), epoch(1))
    blocks = packed.tokens.reshape(-1, 64).tolist()
    assert sorted(epoch(0).tolist()) == sorted(blocks)


def test_only_slow_work_shows_a_bar_and_only_on_stderr(monkeypatch, capsys):
    pack(ABC, BYTES, 4)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setattr(sys, "stderr", terminal := io.StringIO())
    clock = iter(range(100))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    with module._progress(10) as advance:
        for _ in range(5):
            advance(2)
    assert "tokenising" in terminal.getvalue()
    assert capsys.readouterr().out == ""
