"""Associative recall: its labels are right, by brute force."""

import numpy as np
import pytest
import torch

from meta_attention.errors import ConfigError
from meta_attention.evaluation.tasks import NOT_ASKED, RecallTask, TaskDataset

SMALL = {
    "length": 64,
    "window": 5,
    "reach": 10,
    "pairs": 8,
    "recalls": 6,
    "copies": 6,
    "keys": 12,
    "values": 10,
    "noise": 4,
    "copy_distance": 3,
}
TASKS = {
    "small": RecallTask(**SMALL),
    "notes": RecallTask(window=16, reach=32),
    "tight": RecallTask(**SMALL | {"length": 39}),
}


def sequences(task, held_out=True, count=20):
    dataset = TaskDataset(task, count, seed=3, held_out=held_out)
    for index in range(count):
        yield {name: values.tolist() for name, values in dataset[index].items()}


def asked(row):
    """Positions that are asked something, and what."""
    return [(t - 1, label) for t, label in enumerate(row["labels"]) if label != NOT_ASKED]


@pytest.mark.parametrize("held_out", [True, False])
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_the_answer_to_a_recall_is_out_of_reach_and_that_to_a_copy_within_the_window(
    task, held_out
):
    for row in sequences(task, held_out):
        ids = row["input_ids"]
        pairs = dict(zip(ids[: 2 * task.pairs : 2], ids[1 : 2 * task.pairs : 2], strict=True))
        for position, answer in asked(row):
            near = ids[max(0, position - task.reach) : position + 1]
            if row["needs_full"][position]:
                assert pairs[ids[position]] == answer
                assert answer not in near
                # nor does anything else near it depend on the value: the key is there once
                assert near.count(ids[position]) == 1 or not held_out
            else:
                assert task.words[ids[position]] == "copy"
                assert ids[position - task.copy_distance] == answer
                assert task.copy_distance <= task.window


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_half_of_what_is_asked_needs_full_attention(task):
    for row in sequences(task):
        questions = asked(row)
        assert len(questions) == task.recalls + task.copies
        assert sum(row["needs_full"]) == task.recalls
        asked_keys = [row["input_ids"][t] for t, _ in questions if row["needs_full"][t]]
        assert len(set(asked_keys)) == task.recalls


def test_defaults_are_those_of_the_notes():
    task = TASKS["notes"]
    assert (task.length, task.pairs, task.recalls, task.copies) == (512, 128, 32, 32)
    assert task.copy_distance == 7


def test_a_key_alone_says_nothing_of_its_value():
    task = TASKS["small"]
    rows = list(sequences(task, count=2000))
    guesses = [
        (row["input_ids"][t], label)
        for row in rows
        for t, label in asked(row)
        if row["needs_full"][t]
    ]
    counts = np.zeros((len(task.words), len(task.words)))
    for key, value in guesses:
        counts[key, value] += 1
    # the best guess of a value by its key alone is hardly better than one in ten
    assert counts.max(axis=1).sum() / counts.sum() < 0.15


def test_training_sequences_have_fewer_pairs_and_held_out_ones_all():
    task = RecallTask(**SMALL, fewest_pairs=2)

    def num_pairs(row):
        return sum(task.words[i].startswith("v") for i in row["input_ids"])

    assert {num_pairs(row) for row in sequences(task)} == {8}
    assert {num_pairs(row) for row in sequences(task, held_out=False, count=100)} == set(
        range(2, 9)
    )


def test_sequences_are_a_function_of_seed_and_index():
    task = TASKS["small"]
    one, again = (TaskDataset(task, 10, seed=1) for _ in range(2))
    assert torch.equal(one[7]["input_ids"], again[7]["input_ids"])
    assert torch.equal(one.batch(5, 10)["labels"][2], one[7]["labels"])
    assert one.batch(5, 10)["needs_full"].shape == (5, 64)
    assert one.fingerprint == again.fingerprint
    others = [TaskDataset(task, 10, seed=2), TaskDataset(task, 10, seed=1, held_out=True)]
    for other in others:
        assert not torch.equal(one[7]["input_ids"], other[7]["input_ids"])
        assert one.fingerprint != other.fingerprint
    with pytest.raises(IndexError):
        one[10]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 38}, "must have >= 39 tokens"),
        ({"pairs": 11}, "at most keys and values"),
        ({"recalls": 9}, "at most pairs = 8"),
        ({"fewest_pairs": 9}, "at most pairs = 8"),
        ({"copy_distance": 6}, "within the window"),
        ({"reach": 4}, "at least its window"),
        ({"noise": 0}, "noise of task recall must be >= 1"),
        ({"copies": -1}, "copies of task recall must be >= 0"),
    ],
)
def test_sizes_that_do_not_fit_are_one_sentence(changes, message):
    with pytest.raises(ConfigError, match=message):
        RecallTask(**SMALL | changes)
