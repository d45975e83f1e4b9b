"""Linear attention."""

from torch import Tensor

from meta_attention.experts.base import Heads, RecurrentExpert, register_expert
from meta_attention.ops.linear_attention import linear_attention
from meta_attention.ops.route_plan import QueryList


@register_expert("linear")
class LinearAttention(RecurrentExpert):
    """Every token reads one state that sums all tokens (causal: all before it). The paper's E2."""

    # rotated features would not stay positive, and the normaliser could vanish
    uses_rope = False
    paper_cost = 0.15
    keeps_documents_apart = True

    def forward(  # type: ignore[override]  # as RecurrentExpert
        self, heads: Heads, x: Tensor, mask: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return self.attend(heads, x, mask, state)

    def attend(  # type: ignore[override]  # as RecurrentExpert; without a list, all rows
        self,
        heads: Heads,
        x: Tensor,
        mask: Tensor | None,
        state: Tensor | None,
        queries: QueryList | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return linear_attention(
            heads.query,
            heads.key,
            heads.value,
            causal=self.causal,
            mask=mask,
            initial_state=state,
            queries=queries,
            rows=rows,
            impl=self.impl,
        )

    def flops(self, length: int) -> float:
        # a key-value head adds to P x (P + 1) numbers of state, each of its query heads reads them
        state = self.head_dim * (self.head_dim + 1)
        return 2.0 * state * (self.num_key_value_heads + self.num_heads)
