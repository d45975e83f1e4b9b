"""Text as a run sees it."""

from dataclasses import replace

import pytest

from meta_attention.errors import ConfigError
from meta_attention.training.data import read_blocks
from meta_attention.training.recipes import tiny


def test_less_training_text_leaves_the_held_out_text_and_the_vocabulary_alone():
    whole = read_blocks(replace(tiny(), max_bytes=60_000), None)
    part = read_blocks(replace(tiny(), max_bytes=60_000, train_bytes=6400), None)
    assert part.train.num_bytes <= 6400 < whole.train.num_bytes
    assert part.train.num_bytes > 6000
    assert part.valid.fingerprint == whole.valid.fingerprint
    assert part.tokenizer.get_vocab() == whole.tokenizer.get_vocab()


def test_no_training_text_is_refused():
    with pytest.raises(ConfigError, match="train_bytes must be >= 1"):
        replace(tiny(), train_bytes=0)
