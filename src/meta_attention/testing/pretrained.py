"""Small random models of every family that can be adapted, and what tests feed them.

They have whatever of their family changes attention: grouped heads, norms of heads, windows,
scales, soft-caps, rotation of some channels only.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from meta_attention.controller.controllers import MLPController

VOCABULARY = 61

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED: dict[str, Any] = COMMON | {"num_key_value_heads": 2}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LAYER_TYPES = ["sliding_attention", "full_attention"]

# name: model, config
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**GROUPED)),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=5, layer_types=LAYER_TYPES),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**GROUPED, head_dim=12)),
    "mistral": (MistralForCausalLM, MistralConfig(**GROUPED, sliding_window=None)),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config(
            **GROUPED,
            head_dim=8,
            sliding_window=5,
            layer_types=LAYER_TYPES,
            query_pre_attn_scalar=11,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=5.0,
        ),
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **GROUPED,
            head_dim=8,
            sliding_window=5,
            layer_types=LAYER_TYPES,
            query_pre_attn_scalar=11,
        ),
    ),
    "phi3": (
        Phi3ForCausalLM,
        Phi3Config(**GROUPED, rope_parameters=PARTIAL_ROPE, sliding_window=None),
    ),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            initializer_range=0.2,
            scale_attn_by_inverse_layer_idx=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
        ),
    ),
    "bert": (BertModel, BertConfig(**COMMON)),
}
DECODERS = [name for name in FAMILIES if name != "bert"]


def build_base(name: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A random model of a family, the same for the same seed."""
    cls, config = FAMILIES[name]
    config = type(config)(**(config.to_dict() | options))
    if name == "gemma2":
        # sdpa has no soft-cap
        config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = cls(config)
        for norm in model.modules():
            if "norm" in type(norm).__name__.lower():
                for parameter in norm.parameters():
                    # as trained ones are: not the same for every channel
                    nn.init.uniform_(parameter, 0.5, 1.5)
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and not parameter.any():
                # likewise: a bias of 0 could be left out unnoticed
                nn.init.normal_(parameter, std=0.3)
    return model.eval()


def randomise_controllers(model: nn.Module, seed: int = 1, scale: float = 4.0) -> None:
    """Give all controllers weights under which tokens differ in their routes."""
    generator = torch.Generator().manual_seed(seed)
    for controller in model.modules():
        if not isinstance(controller, MLPController):
            continue
        for parameter in controller.parameters():
            drawn = torch.zeros(parameter.shape)
            if parameter.dim() == 2:
                drawn = torch.randn(parameter.shape, generator=generator)
                drawn *= scale / parameter.shape[1] ** 0.5
            parameter.data.copy_(drawn)


def draw_tokens(B: int, T: int, seed: int = 0) -> Tensor:
    """Random tokens [B, T], none of them padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (B, T), generator=generator)


def pad_rows(ids: Tensor, lengths: list[int], side: str) -> tuple[Tensor, Tensor]:
    """The first tokens of each row, as many as ``lengths`` says, padded to one length."""
    B, T = len(lengths), max(lengths)
    padded, mask = torch.zeros(B, T, dtype=torch.long), torch.zeros(B, T, dtype=torch.long)
    for row, length in enumerate(lengths):
        at = slice(T - length, T) if side == "left" else slice(0, length)
        padded[row, at] = ids[row, :length]
        mask[row, at] = 1
    return padded, mask


def predict(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> Tensor:
    """Logits, or the hidden states of an encoder."""
    out = model(ids, **kwargs)
    found: Tensor = out.last_hidden_state if "last_hidden_state" in out else out.logits
    return found
