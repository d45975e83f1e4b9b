"""A Tiny LM that trains in a second: the same variants, smaller in everything."""

from dataclasses import replace

import pytest

from meta_attention.ablation import probes
from meta_attention.ablation import run as run_module
from meta_attention.ablation.variants import paper_base, with_steps
from meta_attention.training.model_settings import Settings


@pytest.fixture(scope="session")
def base() -> Settings:
    small = replace(
        paper_base(),
        max_bytes=20_000,
        tokenizer="bytes",
        length=16,
        hidden_size=16,
        heads=2,
        window_size=1,
        batch_size=4,
        lr=1e-2,
    )
    return replace(with_steps(small, 8), save_every=4)


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch) -> None:
    for module in (probes, run_module):
        monkeypatch.setattr(module, "DRAWS", 4)
