"""Full softmax attention with a gate on its output."""

import torch
from torch import Tensor, nn

from meta_attention.config import MetaAttentionConfig
from meta_attention.experts.base import Heads, register_expert
from meta_attention.experts.full import FullAttention


@register_expert("gated_full")
class GatedFullAttention(FullAttention):
    """Full attention times a sigmoid gate, one value per head and channel, from the layer input.

    The gate lets a head say nothing, which plain softmax cannot (Qiu et al., 2025).
    """

    def __init__(self, config: MetaAttentionConfig) -> None:
        super().__init__(config)
        self.gate = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)

    def forward(self, heads: Heads, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.finish(super().forward(heads, x, mask), x)

    def finish(self, rows: Tensor, x: Tensor) -> Tensor:
        return rows * torch.sigmoid(self.gate(x)).view_as(rows)

    def flops(self, length: int) -> float:
        return super().flops(length) + 2.0 * self.gate.weight.numel()
