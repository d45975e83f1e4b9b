"""Blocks in which something far back must be found again: really there, and not the test itself."""

import re

import numpy as np
import pytest
import torch

from meta_attention import adapt
from meta_attention.adapt.training import recall, train_router
from meta_attention.adapt.training.recall import RecallBlocks, narrowest_window
from meta_attention.errors import DataError
from meta_attention.evaluation.tasks import facts
from meta_attention.testing.pretrained import build_base, randomise_controllers
from meta_attention.training.corpus import Corpus
from meta_attention.training.logs import read_metrics
from meta_attention.training.tokenizer import build_tokenizer

WINDOW, LENGTH = 40, 1024


class Counting:
    """Blocks whose tokens are all different, so that a copy is known by its source."""

    def __init__(self, num_blocks=12, length=LENGTH):
        self.num_blocks, self.length = num_blocks, length

    def __len__(self):
        return self.num_blocks

    def __getitem__(self, index):
        ids = torch.arange(self.length) + 1000
        return {"input_ids": ids, "labels": ids.clone()}


@pytest.fixture
def make(tokenizer):
    def build(blocks=None, **options):
        given = {"share": 1.0, "window": WINDOW} | options
        return RecallBlocks(blocks or Counting(), tokenizer, **given)

    return build


def of_kind(blocks, kind):
    return [blocks[i]["input_ids"] for i in range(len(blocks)) if blocks.kind_of(i) == kind]


def test_a_share_of_the_blocks_is_changed_by_turns(make):
    blocks = make(Counting(40), share=0.25, seed=3)
    kinds = [blocks.kind_of(index) for index in range(40)]
    assert [kinds.count(kind) for kind in ("text", "copies", "facts")] == [30, 5, 5]
    for index, kind in enumerate(kinds):
        block = blocks[index]
        assert block["input_ids"].shape == (LENGTH,)
        assert torch.equal(block["input_ids"], block["labels"])
        is_text = torch.equal(block["input_ids"], Counting()[0]["input_ids"])
        assert is_text == (kind == "text")
    assert {blocks.kind_of(0) for blocks in [make(share=0.0)]} == {"text"}


def test_a_block_depends_on_seed_and_index_alone(make):
    first, again, other = make(seed=1), make(seed=1), make(seed=2)
    order = [5, 0, 5, 3]
    for index in order:
        assert torch.equal(first[index]["input_ids"], again[index]["input_ids"])
    same = [torch.equal(first[i]["input_ids"], other[i]["input_ids"]) for i in range(12)]
    assert not any(same)
    assert not torch.equal(of_kind(first, "copies")[0], of_kind(first, "copies")[1])


@pytest.mark.parametrize("length", [300, 1024, 8192])
def test_copies_are_of_passages_beyond_the_window(length, make):
    shares, distances = [], []
    for ids in of_kind(make(Counting(24, length)), "copies"):
        distance = torch.arange(length) + 1000 - ids  # 0 where nothing was changed
        assert (distance >= 0).all()
        is_copy = distance > 0
        # a copy of a copy is that of its source: still further back
        assert (distance[is_copy] > WINDOW).all()
        shares.append(is_copy.float().mean().item())
        distances += distance[is_copy].tolist()
        # whole passages
        edges = torch.diff(distance.ne(0).int(), prepend=torch.tensor([0])).eq(1).sum()
        assert is_copy.sum() >= recall.PASSAGE[0] * edges
    few, many = recall.COPIES
    assert min(shares) > few - recall.PASSAGE[0] / length
    assert max(shares) <= many
    assert max(distances) > 0.7 * length


def is_told_and_asked(text, name, told, asked):
    """Whether both lines are there, in this order and with the same value."""
    told, asked = (re.escape(line.replace("{name}", name)) for line in (told, asked))
    told = told.replace(r"\{value\}", r"(?P<value>\w+)")
    asked = asked.replace(r"\{value\}", "(?P=value)")
    return re.search(f"\n{told}\n.*\n{asked}\n", text, re.DOTALL) is not None


def test_facts_are_told_before_they_are_asked_for_beyond_the_window(make, tokenizer):
    # bytes, so that a text is as long as its tokens
    blocks = make(Counting(8, 2048))
    num_facts = 0
    for ids in of_kind(blocks, "facts"):
        is_text = ids >= 1000
        # the text goes on where a line has interrupted it
        assert torch.equal(ids[is_text], torch.arange(int(is_text.sum())) + 1000)
        assert 0.05 < (~is_text).float().mean() <= recall.FACTS
        text = "".join(tokenizer.decode([i]) if i < 1000 else "~" for i in ids.tolist())
        for name in recall.NAMES:
            places = [match.start() for match in re.finditer(name, text)]
            if places:
                num_facts += 1
                assert sum(is_told_and_asked(text, name, *pair) for pair in recall.SENTENCES) == 1
                assert places[1] - places[0] > WINDOW
    assert num_facts >= 8


def test_the_test_of_retrieval_stays_a_test():
    """Nothing that ``evaluation/tasks/facts.py`` asks with or for is trained on."""

    def words(*texts):
        return set(re.findall(r"[a-z]+", " ".join(texts).lower()))

    asked = words(*facts.NAMES, "barrels code special")
    trained = words(*recall.NAMES, *recall.WORDS, *(x for pair in recall.SENTENCES for x in pair))
    assert not asked & trained
    assert not any("is {value}" in line for pair in recall.SENTENCES for line in pair)
    assert facts.FactTask.__dataclass_fields__["digits"].default not in recall.DIGITS


def test_values_are_words_and_numbers(make, tokenizer):
    pairs = make().lines.draw(np.random.default_rng(0), 10_000)
    told = [tokenizer.decode(line) for line, _ in pairs]
    numbers = [re.search(r"\d+", text) for text in told]
    share = np.mean([match is not None for match in numbers])
    assert 0.3 < share < 0.7
    assert {len(match[0]) for match in numbers if match} == set(recall.DIGITS)


def test_parts_are_tokenised_as_the_whole_would_be():
    text = " ".join([*recall.NAMES, *recall.WORDS]) * 3
    tokenizer = build_tokenizer("bpe:400", Corpus("words", [text]))
    blocks = RecallBlocks(Counting(4), tokenizer, share=1.0, window=WINDOW)
    for line in (x for pair in blocks.lines.draw(np.random.default_rng(0), 2000) for x in pair):
        assert tokenizer(tokenizer.decode(line))["input_ids"] == line.tolist()


def test_blocks_that_are_too_short_are_refused_in_one_sentence(make):
    needed = WINDOW + 2 + make().lines.longest
    make(Counting(4, needed))[0]
    with pytest.raises(DataError, match=f"blocks of >= {needed} tokens.*got {needed - 1}; raise"):
        make(Counting(4, needed - 1))
    # nothing is asked of text that stays as it is
    assert len(make(Counting(4, 8), share=0.0)[0]["input_ids"]) == 8


@pytest.mark.parametrize("seed", range(3))
def test_the_shortest_blocks_can_be_changed(seed, make):
    length = WINDOW + 2 + make().lines.longest
    for block in make(Counting(12, length), seed=seed):
        assert block["input_ids"].shape == (length,)


@pytest.mark.parametrize("seed", range(3))
def test_a_window_of_nearly_the_whole_block_leaves_room_for_facts(seed, make):
    """Less than the share that facts may take lies beyond it."""
    window = 1150
    for ids in of_kind(make(Counting(12, 1300), window=window, seed=seed), "facts"):
        assert ids.shape == (1300,)
        assert 0 < (ids < 1000).sum() < 1300 - window


def test_the_window_is_the_narrowest():
    model = adapt(build_base("llama"), experts=("full", "local:12", "local"), window_size=4)
    assert narrowest_window(model) == 4
    assert narrowest_window(adapt(build_base("llama"), experts=("full", "linear"))) == 0


def test_training_sees_changed_blocks_and_reports_them_apart(base, tokenizer, settings, tmp_path):
    given = settings(length=256, recall_share=0.5, steps=2)
    model = adapt(base(max_position_embeddings=256), given.adapt_config(256))
    randomise_controllers(model)
    record = train_router(model, tokenizer, given, tmp_path / "a")
    rows = [row for row in read_metrics(tmp_path / "a") if row["kind"] == "eval"]
    assert rows[-1]["eval_recall_divergence"] > 0.0
    assert record["metrics"]["recall_divergence"] == pytest.approx(
        rows[-1]["eval_recall_divergence"], rel=1e-5
    )
    assert record["settings"]["recall_share"] == 0.5
    plain = train_router(
        base(max_position_embeddings=256),
        tokenizer,
        settings(length=256, steps=2),
        tmp_path / "plain",
    )
    assert "recall_divergence" not in plain["metrics"]
    # the text of a run is what it was read from, however it is changed
    assert record["data"]["fingerprint"] == plain["data"]["fingerprint"]
