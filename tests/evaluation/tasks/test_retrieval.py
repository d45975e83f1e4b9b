"""Needles in text: where the facts are, and what is asked."""

import re

import numpy as np
import pytest

from meta_attention.errors import ConfigError, DataError
from meta_attention.evaluation.tasks import NOT_ASKED, RetrievalTask, TaskDataset
from meta_attention.training.corpus import embedded_corpus
from meta_attention.training.tokenizer import build_tokenizer, encode_document

TEXT = embedded_corpus().documents[0][:5000]
FACT = re.compile(r' The code of (\w+) is "(\d+)"\.')


def build(tokenizer="bytes", **sizes):
    from meta_attention.training.corpus import Corpus

    built = build_tokenizer(tokenizer, Corpus("test", [TEXT]))
    sizes = {"length": 400, "reach": 24, "facts": 4, "questions": 2} | sizes
    task = RetrievalTask(
        text=encode_document(built, TEXT), encode=lambda text: encode_document(built, text), **sizes
    )
    return task, built


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:400"])
def test_every_code_asked_for_stands_once_before_and_out_of_reach(tokenizer):
    task, built = build(tokenizer)
    for row in (TaskDataset(task, 20)[index] for index in range(20)):
        ids = row["input_ids"].tolist()
        assert len(ids) == 400
        text = built.decode(ids)
        found = FACT.findall(text)
        assert len(found) == 6
        facts, questions = dict(found[:4]), found[4:]
        assert len(facts) == 4
        assert all(facts[word] == code for word, code in questions)
        labels = row["labels"].tolist()
        answers = [i for i, label in enumerate(labels) if label != NOT_ASKED]
        assert built.decode([labels[i] for i in answers]) == "".join(code for _, code in questions)
        assert [ids[i] for i in answers] == [labels[i] for i in answers]
        # every token before one asked for needs full attention, and no other
        assert np.flatnonzero(row["needs_full"]).tolist() == [i - 1 for i in answers]
        first = answers[0] - 1
        near = built.decode(ids[first - task.reach : first + 1])
        assert not FACT.search(near)
        assert all(code not in near for _, code in questions)


def test_the_rest_is_the_text():
    task, built = build()
    text = built.decode(TaskDataset(task, 1)[0]["input_ids"])
    *_, last = FACT.finditer(text)
    assert last.end() == len(text)
    assert FACT.sub("", text) in TEXT


def test_facts_are_anywhere_in_the_text():
    task, built = build(facts=1, questions=1)
    rows = [TaskDataset(task, 200)[i]["input_ids"] for i in range(200)]
    places = [FACT.search(built.decode(row)).start() for row in rows]
    assert min(places) < 30
    assert max(places) > 250


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"length": 100}, ConfigError, "a sequence must have >= "),
        ({"questions": 5}, ConfigError, "between 1 and facts"),
        ({"facts": 1000}, ConfigError, "facts at most"),
        ({"digits": 0}, ConfigError, "digits of a code"),
        ({"length": 6000}, DataError, "must have >= 6000 tokens"),
    ],
)
def test_sizes_that_do_not_fit_are_one_sentence(sizes, error, message):
    with pytest.raises(error, match=message):
        build(**sizes)
