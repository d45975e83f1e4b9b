"""Routes in PyTorch: the belief of a controller, and its largest part."""

import torch
import torch.nn.functional as F
from torch import Tensor

from meta_attention.ops.controller_logits.reference import controller_logits_reference


def route_tokens_reference(
    x: Tensor,
    position_ids: Tensor,
    network: tuple[Tensor, Tensor, Tensor, Tensor],
    prior_concentration: Tensor | None,
    groups: tuple[int, ...],
    max_positions: int,
) -> Tensor:
    logits = controller_logits_reference(x, position_ids, *network, max_positions=max_positions)
    logits = logits.unflatten(-1, (*groups, -1))  # [B, T, (G,) E]
    if prior_concentration is None:
        belief = logits.softmax(dim=-1)
    else:
        concentration = prior_concentration + F.softplus(logits)
        belief = concentration / concentration.sum(dim=-1, keepdim=True)
    expert = belief.argmax(dim=-1, keepdim=True)
    return torch.zeros_like(belief).scatter_(-1, expert, 1.0)
