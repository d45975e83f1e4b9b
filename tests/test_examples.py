"""The committed checkpoint: what its card promises."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from meta_attention import MetaAttentionForCausalLM

CHECKPOINT = Path(__file__).parents[1] / "examples" / "routed-2m"
PASSAGE = (
    "Elizabeth Bennet had been obliged, by the scarcity of gentlemen, to sit down for two dances; "
    "and during part of that time, Mr. Darcy had been standing near enough for Elizabeth Bennet to "
    "hear a conversation between him and Mr. Bingley. Mr. Darcy said nothing to Elizabeth Bennet."
)


@pytest.fixture(scope="module")
def model():
    return MetaAttentionForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def test_the_checkpoint_is_small_enough_to_be_committed():
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 5e6


@torch.no_grad()
def test_names_that_come_again_go_to_full_attention_and_most_words_do_not(model, tokenizer):
    words = tokenizer(PASSAGE, return_offsets_mapping=True, return_tensors="pt")
    out = model(words["input_ids"], output_routing=True)
    is_full = out.routing_weights[3][0, :, 0] == 1.0
    starts = words["offset_mapping"][0, :, 0].tolist()
    names = [PASSAGE.rfind(name) for name in ("Bennet", "Darcy")]
    for name in names:
        # a token may begin with the space before its word
        assert any(is_full[i] for i, start in enumerate(starts) if start in (name - 1, name))
    assert 0.2 < is_full.float().mean() < 0.6


def test_it_writes_and_stops(model, tokenizer):
    prompt = tokenizer("In the beginning of the year", return_tensors="pt")["input_ids"]
    out = model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert prompt.shape[1] < out.shape[1] <= prompt.shape[1] + 8
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
