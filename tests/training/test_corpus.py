"""Text is read exactly, in a fixed order, or refused with the place."""

import gzip
import json
import lzma
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meta_attention.errors import ConfigError, DataError
from meta_attention.training.corpus import (
    Corpus,
    cut_corpus,
    embedded_corpus,
    read_corpus,
    split_corpus,
    split_wikitext,
)

TEXT = "A line.\r\nAnother: \u00e9\u4e2d\U0001f600\n"
ARTICLES = [
    " \n = Robert Boulter = \n \n He is an actor . \n \n = = Career = = \n \n In 2000 ... \n",
    " \n = Constant k filter = \n \n Where \n = 1 rad / s and k = \n 1 ohm . \n",
    " \n = <unk> = \n \n The end . \n",
]
documents = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_bytes(TEXT.encode())
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "title": "x"}\n')
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.txt.gz").write_bytes(gzip.compress(b"three"))
    (tmp_path / "notes.md").write_text("not part of it")
    return tmp_path


def test_a_folder_gives_its_files_sorted_by_path(folder):
    assert read_corpus([str(folder)]).documents == ["one", "two", TEXT, "three"]


def test_a_glob_gives_the_files_it_matches(folder):
    assert read_corpus([str(folder / "**" / "*.txt*")]).documents == [TEXT, "three"]
    assert read_corpus([str(folder / "*")]).documents == ["one", "two", TEXT, "three"]


def test_sources_keep_their_order_and_a_file_named_twice_is_read_once(folder):
    corpus = read_corpus([str(folder / "b.txt"), str(folder)])
    assert corpus.documents == [TEXT, "one", "two", "three"]
    assert corpus.num_bytes == len(TEXT.encode()) + 11


def test_a_single_name_is_one_source(folder):
    assert read_corpus(str(folder / "b.txt")).documents == [TEXT]


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_compressed_files_read_like_plain_ones(tmp_path, suffix, compress):
    (tmp_path / f"a.txt{suffix}").write_bytes(compress(TEXT.encode()))
    (tmp_path / f"b.jsonl{suffix}").write_bytes(compress(json.dumps({"text": TEXT}).encode()))
    assert read_corpus([str(tmp_path)]).documents == [TEXT, TEXT]


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_compressed_file_cut_short_is_refused(tmp_path, suffix, compress):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compress(TEXT.encode() * 100)[:-12])
    with pytest.raises(DataError, match=rf"a\.txt\{suffix} must be readable to its end"):
        read_corpus([str(path)])


def test_zst_reads_whole_files_only(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.txt.zst"
    frame = zstandard.compress(TEXT.encode() * 100)
    path.write_bytes(frame + frame)
    assert read_corpus([str(path)]).documents == [TEXT * 200]
    for broken in (frame[:-12], b"no frame"):
        path.write_bytes(broken)
        with pytest.raises(DataError, match="must be readable to its end"):
            read_corpus([str(path)])


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="zst is in the standard library")
def test_zst_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.txt.zst").write_bytes(b"")
    with pytest.raises(DataError, match=r"pip install 'meta-attention\[data\]'"):
        read_corpus([str(tmp_path)])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "tw', "line 2 must be JSON"),
        ('{"body": "two"}', r"line 2 must be an object with a string \"text\", got fields \['body"),
        ('{"text": 2}', "line 2 must be an object with a string"),
        ('["two"]', 'line 2 must be an object with a string "text", got list'),
        (r'{"text": "\ud83d"}', "line 2 must be Unicode text, got half a surrogate pair"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"a\.jsonl {message}"):
        read_corpus([str(path)])


def test_undecodable_bytes_are_named_by_file_and_offset(tmp_path):
    (tmp_path / "a.txt").write_bytes("caf\u00e9 ".encode() + b"\xe9t\xe9")
    with pytest.raises(DataError, match=r"a\.txt must be UTF-8 text, got byte 0xe9 at offset 6"):
        read_corpus([str(tmp_path)])
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl must be UTF-8 text, got byte 0xff at offset 26"):
        read_corpus([str(tmp_path)])


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    assert read_corpus([str(tmp_path)]).documents == [TEXT]


def test_what_is_not_there_or_empty_is_refused(folder):
    with pytest.raises(DataError, match=r"no file, folder or glob matches '.*none\.txt'"):
        read_corpus([str(folder / "none.txt")])
    with pytest.raises(DataError, match="no file, folder or glob matches"):
        read_corpus([str(folder / "*.gz")])
    with pytest.raises(DataError, match=r"a corpus file must be \.txt, \.jsonl"):
        read_corpus([str(folder / "notes.md")])
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=r"must contain files ending in \.txt, \.jsonl"):
        read_corpus([str(folder / "empty")])
    (folder / "empty" / "a.txt").touch()
    with pytest.raises(DataError, match="a corpus must contain text, got none in"):
        read_corpus([str(folder / "empty")])


def test_a_missing_source_is_found_before_another_is_read(folder):
    (folder / "b.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="no file, folder or glob matches"):
        read_corpus([str(folder / "b.txt"), str(folder / "none.txt")])


def test_max_bytes_ends_at_a_document_or_else_at_a_character(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": c * 10}) for c in "abc"))
    assert read_corpus([str(tmp_path)], max_bytes=29).documents == ["a" * 10, "b" * 10]
    assert read_corpus([str(tmp_path)], max_bytes=30).num_bytes == 30
    assert read_corpus([str(tmp_path)], max_bytes=7).documents == ["a" * 7]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "\u00e9" * 10}))
    assert read_corpus([str(tmp_path)], max_bytes=7).documents == ["\u00e9" * 3]
    with pytest.raises(DataError, match="must contain text"):
        read_corpus([str(tmp_path)], max_bytes=1)
    with pytest.raises(ConfigError, match="max_bytes must be >= 1"):
        read_corpus(max_bytes=0)


def test_wikitext_is_split_at_its_articles(tmp_path):
    (tmp_path / "train.txt").write_text("".join(ARTICLES))
    (tmp_path / "wiki.valid.tokens").write_text("".join(ARTICLES[1:]))
    assert read_corpus([str(tmp_path)]).documents == ARTICLES + ARTICLES[1:]


@pytest.mark.parametrize("before", ["", "\n\n", " \n \n"])
def test_blank_lines_before_the_first_article_belong_to_it(before):
    text = before + "".join(ARTICLES).lstrip()
    assert split_wikitext(text) == [before + ARTICLES[0].lstrip(), *ARTICLES[1:]]


@given(st.lists(st.sampled_from([" \n", "\n", " = A = \n", " = = B = = \n", "= C =\n", "x\n"])))
def test_splitting_loses_nothing(lines):
    text = "".join(lines)
    articles = split_wikitext(text)
    assert "".join(articles) == text
    assert len(articles) == 1 or all(article.strip() for article in articles)


def test_other_text_with_headings_is_one_document():
    text = "Intro\n \n = Title = \n \n text\n"
    assert split_wikitext(text) == [text]


def test_no_source_gives_the_embedded_corpus():
    corpus = read_corpus()
    assert corpus == embedded_corpus()
    assert "pydoc_data.topics" in corpus.name
    assert corpus.num_bytes > 300_000
    assert read_corpus(max_bytes=10_000).num_bytes <= 10_000


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("owner/books", ("owner/books", "train")),
        ("owner/books:test", ("owner/books", "test")),
        ("books:train", ("books", "train")),
        ("owner/books:small:test", ("owner/books", "small", "test")),
    ],
)
def test_a_hub_dataset_is_read_by_name(monkeypatch, source, arguments):
    def load_dataset(*names, split, streaming):
        assert ((*names, split), streaming) == (arguments, True)
        return [{"text": "one"}, {"text": ""}, {"text": "two"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_corpus([source], max_bytes=100).documents == ["one", "two"]


def test_wikitext_from_the_hub_is_joined_from_its_lines(monkeypatch):
    lines = "".join(ARTICLES).splitlines(keepends=True)
    rows = [{"text": line if line.strip() else ""} for line in lines]
    fake = SimpleNamespace(load_dataset=lambda *_, **__: rows)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert read_corpus(["Salesforce/wikitext:wikitext-2-v1:train"]).documents == ARTICLES


def test_a_hub_dataset_that_cannot_be_read_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"matches 'owner/books'; .* 'meta-attention\[data\]'"):
        read_corpus(["owner/books"])

    def load_dataset(*_, **__):
        raise ConnectionError("no\nnetwork")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match=r"'owner/books', .* got ConnectionError: no network$"):
        read_corpus(["owner/books"])
    fake = SimpleNamespace(load_dataset=lambda *_, **__: [{"body": "one"}])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(DataError, match="hub dataset with a text field"):
        read_corpus(["owner/books"])


@given(documents, st.floats(0.01, 0.99))
def test_a_split_loses_nothing_and_leaves_no_side_empty(texts, holdout):
    corpus = Corpus("x", texts)
    try:
        train, valid = split_corpus(corpus, holdout=holdout)
    except DataError:
        # one character, or copies of it, cannot be on both sides
        assert {len(text) for text in texts} == {1}
        return
    assert any(train.documents)
    assert any(valid.documents)
    assert sorted("".join(train.documents + valid.documents)) == sorted("".join(texts))


def test_the_share_asked_for_is_held_out():
    corpus = embedded_corpus()
    for holdout in (0.01, 0.05, 0.3):
        train, valid = split_corpus(corpus, holdout=holdout)
        assert holdout / 2 <= valid.num_bytes / corpus.num_bytes <= holdout * 1.01
        assert train.num_bytes + valid.num_bytes == corpus.num_bytes
        assert train.documents == [text for text in corpus.documents if text in train.documents]


def test_a_text_that_occurs_twice_stays_on_one_side():
    texts = [f"document {i // 2}" for i in range(200)]
    train, valid = split_corpus(Corpus("x", texts), holdout=0.2)
    assert not set(train.documents) & set(valid.documents)


def test_of_one_document_the_tail_is_held_out():
    train, valid = split_corpus(Corpus("x", ["0123456789" * 10]), holdout=0.05)
    assert train.documents == [("0123456789" * 10)[:95]]
    assert valid.documents == ["56789"]


def test_a_split_is_the_same_on_every_machine():
    corpus = Corpus("x", [str(i) for i in range(99)])
    assert split_corpus(corpus, holdout=0.1)[1].documents == (
        ["9", "39", "46", "49", "50", "51", "53", "55", "65", "91"]
    )


@pytest.mark.parametrize("texts", [[], ["a"], ["a", "a"]])
def test_a_corpus_too_small_to_split_is_refused(texts):
    with pytest.raises(DataError, match="must have text to train on and text to hold out"):
        split_corpus(Corpus("x", texts))


@pytest.mark.parametrize("holdout", [0.0, 1.0, float("nan")])
def test_a_share_outside_zero_and_one_is_refused(holdout):
    with pytest.raises(ConfigError, match=r"holdout must be in \(0, 1\)"):
        split_corpus(embedded_corpus(), holdout=holdout)


def test_a_cut_corpus_is_the_beginning_of_it_to_the_byte():
    corpus = Corpus("text", ["abc", "d\u20ac", "ef"])
    assert cut_corpus(corpus, None) is corpus
    assert cut_corpus(corpus, 3).documents == ["abc"]
    assert cut_corpus(corpus, 4).documents == ["abc", "d"]
    # a character that does not fit is left out, and nothing comes after it
    assert cut_corpus(corpus, 6).documents == ["abc", "d"]
    assert cut_corpus(corpus, 99).documents == corpus.documents
