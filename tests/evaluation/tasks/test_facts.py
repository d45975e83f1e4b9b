"""Facts in plain words: sequences as they should be, answers judged as greedy decoding would."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from meta_attention.errors import ConfigError, DataError
from meta_attention.evaluation.tasks import FactTask, measure_facts
from meta_attention.testing.pretrained import build_base

SENTENCE = "It rained all day, and nobody came. "
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} [end]{% endfor %}[assistant] "


@pytest.fixture
def text(tokenizer):
    return np.array(tokenizer(SENTENCE * 40)["input_ids"])


def make_task(tokenizer, text, **options):
    return FactTask.of(tokenizer, text, **({"length": 500} | options))


def draw(task, tokenizer, seed=0, depth=0.5):
    example = task.draw(np.random.default_rng(seed), depth)
    return example, tokenizer.decode(example.input_ids)


def test_a_sequence_hides_a_fact_and_ends_with_the_question_and_its_answer(tokenizer, text):
    example, shown = draw(make_task(tokenizer, text), tokenizer)
    assert len(example.input_ids) == 500
    (name, code), *rest = re.findall(r"The special code of the (\w+ \w+) is (\d{5})", shown)
    # once in the text, once as the answer
    assert rest == [(name, code)]
    assert f"came. The special code of the {name} is {code}. It rained" in shown
    assert shown.endswith(
        f"\n\nWhat is the special code of the {name}?\nThe special code of the {name} is {code}"
    )
    assert tokenizer.decode(example.input_ids[-example.answer_length :]) == f" {code}"


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_the_fact_asked_for_lies_at_its_depth(tokenizer, text, depth):
    task = make_task(tokenizer, text, facts=3, distractors=2)
    for seed in range(5):
        _, shown = draw(task, tokenizer, seed, depth)
        body, _, asked = shown.partition("\n\n")
        name = re.search(r"code of the (\w+ \w+)\?", asked).group(1)
        place = body.index(f"code of the {name} is")
        # other facts take room, too, and facts stand between sentences
        assert abs(place / len(body) - depth) < 0.35
    assert len(re.findall(r"special code of the \w+ \w+ is \d{5}\.", body)) == 3
    assert len(re.findall(r"In the \w+ \w+ they once counted \d{5} barrels\.", body)) == 2


def test_depths_follow_each_other(tokenizer, text):
    task = make_task(tokenizer, text)
    places = [draw(task, tokenizer, 3, depth)[1].index("special") for depth in (0.1, 0.5, 0.9)]
    assert places == sorted(places)
    assert places[2] - places[0] > 200


def test_sequences_are_the_same_for_the_same_seed(tokenizer, text):
    task = make_task(tokenizer, text, facts=3)
    a, b, c = (draw(task, tokenizer, seed)[0].input_ids for seed in (1, 1, 2))
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


def test_a_chat_template_goes_around_text_and_question(tokenizer, text, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    _, shown = draw(make_task(tokenizer, text, is_chat=True), tokenizer)
    assert shown.startswith("[user] ")
    assert re.search(r"code of the \w+ \w+\? \[end\]\[assistant\] The special code of", shown)


class Oracle(nn.Module):
    """Predicts the token that follows, but for the places from the end that it gets wrong."""

    def __init__(self, vocab_size, wrong=()):
        super().__init__()
        self.config, self.device = SimpleNamespace(vocab_size=vocab_size), torch.device("cpu")
        self.wrong = wrong

    def forward(self, input_ids, use_cache, logits_to_keep):
        following = input_ids.roll(-1, dims=1)
        for place in self.wrong:
            following[:, -1 - place] = 0
        logits = 10.0 * nn.functional.one_hot(following, self.config.vocab_size).float()
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


def test_an_answer_is_right_if_all_its_tokens_are(tokenizer, text):
    task = make_task(tokenizer, text)
    knows = measure_facts(Oracle(len(tokenizer)), task, per_depth=2, batch_size=3)
    assert (knows.accuracy, knows.token_accuracy, knows.num_sequences) == (1.0, 1.0, 10)
    assert list(knows.by_depth) == ["0.1", "0.3", "0.5", "0.7", "0.9"]
    # places count from the last digit; the answer is a space and five digits
    errs = measure_facts(Oracle(len(tokenizer), wrong=[1]), task, per_depth=1)
    assert (errs.accuracy, errs.token_accuracy) == (0.0, pytest.approx(5 / 6))
    assert errs.log_probability < knows.log_probability < 0.0
    # what comes before the answer is not judged
    before = measure_facts(Oracle(len(tokenizer), wrong=[7]), task, per_depth=1)
    assert before.accuracy == 1.0
    assert measure_facts(Oracle(len(tokenizer), wrong=[6]), task, per_depth=1).accuracy == 0.0


def test_batches_change_nothing(tokenizer, text):
    model = build_base("llama", vocab_size=len(tokenizer))
    task = make_task(tokenizer, text, length=200)
    alone, together = (
        measure_facts(model, task, per_depth=1, depths=(0.2, 0.8, 0.4), batch_size=size)
        for size in (1, 3)
    )
    assert alone.log_probability == pytest.approx(together.log_probability, abs=1e-3)
    assert alone.by_depth.keys() == together.by_depth.keys() == {"0.2", "0.8", "0.4"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"facts": 0}, ConfigError, "facts must be >= 1"),
        ({"facts": 80, "distractors": 20}, ConfigError, "at most 90"),
        ({"digits": 0}, ConfigError, "digits of a code"),
        ({"length": 100}, ConfigError, "a sequence of 1 facts"),
        ({"length": 5000}, DataError, "must have >= 5000 tokens"),
        ({"is_chat": True}, ConfigError, "no chat template"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(options, error, message, tokenizer, text):
    with pytest.raises(error, match=message) as caught:
        make_task(tokenizer, text, **options)
    assert "\n" not in str(caught.value)
