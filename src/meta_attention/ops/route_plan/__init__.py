"""Routes to query lists: which tokens each expert works on.

A list holds positions in rising order. A token of weight zero on an expert is not in its list, and
padding is in none. Shapes do not depend on the routes, so nothing waits for the device: a list has
room for all T tokens, and its count says how many there are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meta_attention.config import Impl
from meta_attention.errors import ShapeError
from meta_attention.ops.backend import choose_impl
from meta_attention.ops.heads import check_mask
from meta_attention.ops.route_plan.reference import RANK_BLOCK, plan_routes_reference

__all__ = ["RANK_BLOCK", "QueryList", "RoutePlan", "plan_routes"]


@dataclass(frozen=True, slots=True)
class QueryList:
    """The tokens of one expert."""

    positions: Tensor  # [B, G, T] int32, rising; undefined from count on
    count: Tensor  # [B, G] int32
    ranks: Tensor  # [B, G, N + 1] int32: how many of the list come before position n * RANK_BLOCK

    def is_listed(self, length: int) -> Tensor:
        """Which of ``length`` tokens are in the list ``[B, T, G]``."""
        entry = torch.arange(length, device=self.count.device)
        is_entry = entry < self.count.unsqueeze(-1)  # [B, G, T]
        # what lies beyond the end of a list may be no position
        position = torch.where(is_entry, self.positions, 0).long()
        times = torch.zeros_like(position).scatter_add(-1, position, is_entry.long())
        return (times > 0).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """Query lists of all experts. G is 1, or the key-value heads where each has its own routes."""

    positions: Tensor  # [B, G, E, T] int32
    counts: Tensor  # [B, G, E] int32
    ranks: Tensor  # [B, G, E, N + 1] int32
    is_exclusive: bool  # every token is in one list at most

    def list_of(self, expert: int) -> QueryList:
        return QueryList(
            self.positions.select(2, expert),
            self.counts.select(2, expert),
            self.ranks.select(2, expert),
        )


def plan_routes(
    weights: Tensor, *, mask: Tensor | None = None, is_exclusive: bool, impl: Impl = "auto"
) -> RoutePlan:
    """Query lists of routing weights.

    Args:
        weights: ``[B, T, E]``, or ``[B, T, G, E]`` where every key-value head has its own routes.
        mask: ``[B, T]``, 0 for padding.
        is_exclusive: The caller knows that no token has more than one weight above zero, as under
            hard routing; not checked, which would wait for the device, and buffers are made for
            it: where it is not so, memory is overrun.
        impl: ``"auto"``, ``"reference"`` or ``"triton"``.
    """
    if weights.dim() not in (3, 4) or 0 in weights.shape:
        raise ShapeError(
            f"weights must be [B, T, E] or [B, T, G, E] with no empty axis, "
            f"got {list(weights.shape)}"
        )
    weights = weights.detach()
    if weights.dim() == 3:
        weights = weights.unsqueeze(2)
    check_mask(mask, weights.shape[0], weights.shape[1])
    if choose_impl("plan_routes", impl, weights) == "triton":
        from meta_attention.ops.route_plan.kernel import plan_routes_triton

        positions, counts, ranks = plan_routes_triton(weights, mask)
    else:
        positions, counts, ranks = plan_routes_reference(weights, mask)
    return RoutePlan(positions, counts, ranks, is_exclusive)
