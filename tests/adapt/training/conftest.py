"""A small base with a tokenizer, and text to train its router on."""

import pytest

from meta_attention.adapt.training import RouterSettings
from meta_attention.testing.pretrained import build_base
from meta_attention.training.corpus import Corpus
from meta_attention.training.tokenizer import build_tokenizer

LENGTH = 48


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer("bytes", Corpus("none", [""]))


@pytest.fixture
def base(tokenizer):
    """A new one each time, of the same weights."""

    def build(family="llama", **options):
        return build_base(family, vocab_size=len(tokenizer), **options)

    return build


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    lines = (f"line {n}: {n * n} is the square of {n}.\n" for n in range(400))
    path.write_text("".join(lines))
    return path


@pytest.fixture
def settings(text):
    """Of a short run; anything may be given otherwise."""

    def choose(**given):
        short = {
            "model": "tiny",
            "data": (str(text),),
            "length": LENGTH,
            "window_size": 6,
            "num_sinks": 2,
            "target_cost": 0.6,
            "route_granularity": "token",
            # what must be found again takes longer blocks
            "recall_share": 0.0,
            "steps": 4,
            "batch_size": 2,
            "log_every": 1,
            "max_bytes": 8000,
        }
        return RouterSettings.of(short | given)

    return choose
