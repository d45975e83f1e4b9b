"""A transformer block with routed attention."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP

from meta_attention.config import MetaAttentionConfig
from meta_attention.layers.attention import BayesianMetaAttentionLayer, LayerOutput, Rotation
from meta_attention.layers.cache import MetaAttentionCache
from meta_attention.layers.decode_step import DecodeStep


class MetaTransformerBlock(GradientCheckpointingLayer):
    """RMSNorm, routed attention, RMSNorm, SwiGLU feed-forward, each half with its residual.

    Args:
        config: Model configuration.
        layer_idx: Index of the block in its model.
    """

    def __init__(self, config: MetaAttentionConfig, layer_idx: int = 0) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = BayesianMetaAttentionLayer(config, layer_idx)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        past_key_values: MetaAttentionCache | None = None,
        rotation: Rotation | None = None,
        step: DecodeStep | None = None,
        recurrence: Tensor | None = None,
    ) -> LayerOutput:
        """As the attention layer, with the block's hidden states ``[B, T, D]`` as ``output``."""
        arguments = (attention_mask, position_ids, document_ids, past_key_values, rotation, step)
        attended = self.attend(x, *arguments, recurrence)
        x = x + attended.output
        x = x + self.feed_forward(x)
        return replace(attended, output=x)

    def attend(self, x: Tensor, *arguments: Any) -> LayerOutput:
        """The attention half, without its residual; arguments as of :meth:`forward`."""
        attended: LayerOutput = self.attention(self.attention_norm(x), *arguments)
        return attended

    def feed_forward(self, x: Tensor) -> Tensor:
        """The feed-forward half ``[B, T, D]``, without its residual."""
        out: Tensor = self.mlp(self.mlp_norm(x))
        return out
