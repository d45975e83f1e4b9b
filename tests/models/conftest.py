"""A small language model with whatever a test changes of it."""

import pytest
import torch

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM

VOCABULARY = 61


@pytest.fixture
def make_model():
    def make(seed: int = 0, **kwargs) -> MetaAttentionForCausalLM:
        defaults = {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "window_size": 5,
            "max_position_embeddings": 128,
            "controller_hidden_size": 8,
            "pad_token_id": 0,
            "eos_token_id": 1,
            # large enough that tokens differ in their routes
            "initializer_range": 0.3,
        }
        torch.manual_seed(seed)
        model = MetaAttentionForCausalLM(MetaAttentionConfig(**(defaults | kwargs))).eval()
        for name, weight in model.named_parameters():
            # new, these are the same in all channels, or nothing, or forget next to nothing
            parts = ("short_conv", "k_proj.bias", "rates", "residuals", "recurrence")
            if any(part in name for part in parts):
                torch.nn.init.normal_(weight, mean=-2.0 if name.endswith("step_bias") else 0.0)
        return model

    return make


@pytest.fixture
def tokens():
    def draw(B: int = 2, T: int = 24, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(2, VOCABULARY, (B, T), generator=generator)

    return draw
