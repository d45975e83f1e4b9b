"""Posterior -> routes: how belief about a token becomes weights on the experts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from meta_attention.controller import Posterior


@dataclass(frozen=True, slots=True)
class Routes:
    """Where every token goes."""

    weights: Tensor  # [B, T, E], float32, rows sum to one
    hard: Tensor  # [B, T] bool: the token takes one expert only

    @property
    def expert(self) -> Tensor:
        """Index of the expert of largest weight [B, T]; for a hard token the only one."""
        return self.weights.argmax(dim=-1)


def choose_routes(posterior: Posterior, *, sample: bool) -> Routes:
    """Soft routes: every token takes every expert, weighted by belief.

    Args:
        posterior: The controller's answer.
        sample: Draw the weights from the posterior instead of taking its mean. For training: a
            sample sees how sure the posterior is, the mean does not.
    """
    weights = posterior.sample() if sample else posterior.mean
    return Routes(weights, hard=torch.zeros_like(weights[..., 0], dtype=torch.bool))
