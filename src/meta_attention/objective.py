"""The training objective, its parts kept apart."""

import torch
from torch import Tensor

from meta_attention.errors import ShapeError


def routing_loss(
    task_loss: Tensor,
    kl: Tensor,
    *,
    kl_weight: float | Tensor,
    cost: Tensor | float = 0.0,
    cost_weight: float | Tensor = 0.0,
) -> Tensor:
    """Negative ELBO to minimise: task loss plus weighted KL, plus an optional cost penalty.

    The paper prints a minus sign before the KL; minimised as printed it would reward leaving
    the prior. Its listing returns the term with a plus sign, as here.

    Args:
        task_loss: Task loss ``[]`` in nats.
        kl: Mean KL ``[]`` in nats; see :func:`mean_over_tokens`.
        kl_weight: The paper's beta_elbo; 0 removes the prior from training.
        cost: Mean projected cost ``[]``.
        cost_weight: Weight of ``cost``; how a prior-free controller is told to be cheap.
    """
    return task_loss + kl_weight * kl + cost_weight * cost


def mean_over_tokens(values: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Mean of ``values`` ``[B, T]`` over the tokens that are not padding; 0 if all are."""
    if attention_mask is None:
        return values.mean()
    if attention_mask.shape != values.shape:
        raise ShapeError(
            f"attention_mask must be [B, T] = {list(values.shape)} to match values, "
            f"got {list(attention_mask.shape)}"
        )
    is_token = attention_mask.bool()
    return torch.where(is_token, values, 0.0).sum() / is_token.sum().clamp(min=1)
