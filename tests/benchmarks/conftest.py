"""A small text for the studies of experts of heads, rules and values."""

import pytest
from study_data import Cache, prepare

from meta_attention.training.corpus import embedded_corpus


@pytest.fixture(scope="session")
def manual(tmp_path_factory):
    """A dozen documents, prepared."""
    folder = tmp_path_factory.mktemp("manual")
    text = folder / "manual.txt"
    text.write_text("\n".join(embedded_corpus().documents[:12]))
    prepare([text], folder / "cache", vocab=300, max_tokens=8000)
    return Cache.open(folder / "cache")
