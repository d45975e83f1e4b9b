"""A model small enough to run many times, with routes that differ from token to token."""

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM
from meta_attention.training.corpus import Corpus
from meta_attention.training.tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer("bytes", Corpus("none", [""]))


@pytest.fixture
def config(tokenizer) -> MetaAttentionConfig:
    return MetaAttentionConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=64,
        window_size=4,
        initializer_range=0.2,
        layer_experts=[["full", "linear", "local"], ["local"], ["full", "local"]],
    )


@pytest.fixture
def model(config) -> MetaAttentionForCausalLM:
    torch.manual_seed(0)
    return MetaAttentionForCausalLM(config).eval()
