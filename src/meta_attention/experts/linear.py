"""Linear attention, and what it has in common with other sums over all tokens."""

from dataclasses import dataclass

from torch import Tensor

from meta_attention.experts.base import Heads, RecurrentExpert, register_expert
from meta_attention.ops.linear_attention import linear_attention
from meta_attention.ops.route_plan import QueryList


@dataclass(frozen=True, slots=True)
class StateInputs:
    """What ``linear_attention`` is given of T tokens."""

    query: Tensor  # [B, T, H, P]
    key: Tensor  # [B, T, K, P]
    value: Tensor  # [B, T, K, P]
    decay: Tensor | None = None  # [B, T, K]
    skip: Tensor | None = None  # [H]
    normalise: bool = True


class LinearStateExpert(RecurrentExpert):
    """An expert whose state is that of ``linear_attention``, zero before the first token.

    Subclasses give ``inputs``, by which prefill and decoding do the same.
    """

    keeps_documents_apart = True

    def inputs(self, heads: Heads, x: Tensor) -> StateInputs:
        """Queries, keys and values as they are summed and read; x is the layer's input."""
        raise NotImplementedError

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
        given = self.inputs(heads, x)
        return linear_attention(
            given.query,
            given.key,
            given.value,
            causal=self.causal,
            mask=mask,
            initial_state=state,
            decay=given.decay,
            normalise=given.normalise,
            skip=given.skip,
            queries=queries,
            rows=rows,
            impl=self.impl,
        )

    @property
    def update_flops(self) -> float:
        """Operations that every token costs, whatever its route."""
        raise NotImplementedError


@register_expert("linear")
class LinearAttention(LinearStateExpert):
    """Every token reads one state that sums all tokens (causal: all before it). The paper's E2."""

    # rotated features would not stay positive, and the normaliser could vanish
    uses_rope = False
    paper_cost = 0.15

    def inputs(self, heads: Heads, x: Tensor) -> StateInputs:
        return StateInputs(heads.query, heads.key, heads.value)

    @property
    def update_flops(self) -> float:
        # a key-value head adds to P x (P + 1) numbers of state
        return 2.0 * self.head_dim * (self.head_dim + 1) * self.num_key_value_heads

    def flops(self, length: int) -> float:
        # and each of its query heads reads them
        return self.update_flops + 2.0 * self.head_dim * (self.head_dim + 1) * self.num_heads
