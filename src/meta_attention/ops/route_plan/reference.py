"""The plan as a stable sort. No shape depends on the routes here either."""

import torch
import torch.nn.functional as F
from torch import Tensor

# positions between two entries of the rank table: key tiles start at multiples of it
RANK_BLOCK = 64


def plan_routes_reference(weights: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    listed = (weights > 0).permute(0, 2, 3, 1)  # [B, G, E, T]
    if mask is not None:
        listed = listed & (mask != 0)[:, None, None, :]
    positions = listed.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    T = listed.shape[-1]
    per_block = F.pad(listed, (0, -T % RANK_BLOCK)).unflatten(-1, (-1, RANK_BLOCK)).sum(dim=-1)
    ranks = F.pad(per_block.cumsum(dim=-1), (1, 0))
    return positions.int(), ranks[..., -1].int(), ranks.int()
