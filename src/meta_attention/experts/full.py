"""Full softmax attention."""

from torch import Tensor

from meta_attention.experts.base import Heads, SoftmaxExpert, register_expert
from meta_attention.ops.full_attention import full_attention


@register_expert("full")
class FullAttention(SoftmaxExpert):
    """Every token sees all tokens (causal: all before it). The paper's E1."""

    paper_cost = 1.0
    keeps_documents_apart = True

    def forward(self, heads: Heads, x: Tensor, mask: Tensor | None) -> Tensor:
        return full_attention(
            heads.query,
            heads.key,
            heads.value,
            causal=self.causal,
            mask=mask,
            scale=self.scale,
            softcap=self.softcap,
            impl=self.impl,
        )
