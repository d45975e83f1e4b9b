"""Tasks by name."""

import pytest

from meta_attention.errors import ConfigError
from meta_attention.evaluation.tasks import TASK_SIZES, RecallTask, TaskSpec


@pytest.mark.parametrize(
    "text", ["recall", "recall:pairs=16,recalls=8", "needle", "multi_key:facts=3"]
)
def test_a_spec_survives_being_written(text):
    assert str(TaskSpec.parse(text)) == text


def test_sizes_reach_the_task_and_defaults_are_its_own():
    task = TaskSpec.parse("recall:pairs=64,copies=8").build(length=512, window=16, layers=2)
    assert task == RecallTask(window=16, reach=32, pairs=64, copies=8)
    assert TaskSpec.parse("recall").build(length=512, window=16, layers=2) == RecallTask(
        window=16, reach=32
    )
    assert set(TASK_SIZES) == {"recall", "needle", "multi_key"}


def test_sizes_not_given_come_from_another_spec():
    given, trained = TaskSpec.parse("recall:pairs=8"), TaskSpec.parse("recall:pairs=16,keys=20")
    assert str(given.or_sizes_of(trained)) == "recall:pairs=8,keys=20"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recal", "must be one of recall, needle, multi_key, got 'recal'"),
        ("recall:pair=3", "sizes of task recall must be of pairs"),
        ("needle:facts=3", "sizes of task needle must be of digits"),
        ("recall:pairs", "must be NAME=NUMBER, got 'pairs'"),
        ("recall:pairs=-1", "must be NAME=NUMBER"),
        ("recall:pairs=2,", "sizes of task recall"),
    ],
)
def test_what_is_no_task_is_one_sentence(text, message):
    with pytest.raises(ConfigError, match=message):
        TaskSpec.parse(text)
