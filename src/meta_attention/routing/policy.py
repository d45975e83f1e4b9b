"""Posterior -> routes: how belief about a token becomes weights on the experts."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meta_attention.controller import Posterior
from meta_attention.routing.gate import uncertainty_of


@dataclass(frozen=True, slots=True)
class Routes:
    """Where every token goes."""

    weights: Tensor  # [B, T, E], float32, rows sum to one
    hard: Tensor  # [B, T] bool: the token takes one expert only

    @property
    def expert(self) -> Tensor:
        """Index of the expert of largest weight [B, T]; for a hard token the only one."""
        return self.weights.argmax(dim=-1)


def choose_routes(
    posterior: Posterior,
    *,
    routing: str = "soft",
    sample: bool = False,
    signal: str = "mutual_information",
    threshold: Tensor | float = 0.0,
) -> Routes:
    """Weights of every token on the experts.

    Args:
        posterior: The controller's answer.
        routing: ``"soft"``: every expert, weighted by belief. ``"hard"``: only the one of largest
            weight. ``"gated"``: hard where the uncertainty is below the threshold, soft elsewhere.
        sample: Draw weights from the posterior in place of its mean, for training. A hard route is
            then the largest of a sample: Thompson sampling.
        signal: Uncertainty that gates; see :func:`uncertainty_of`.
        threshold: The paper's eta. Raising it makes tokens hard, lowering it makes them soft.
    """
    belief = posterior.mean
    weights = posterior.sample() if sample else belief
    if routing == "soft":
        return Routes(weights, hard=torch.zeros_like(weights[..., 0], dtype=torch.bool))

    chosen = F.one_hot(weights.argmax(dim=-1), weights.shape[-1]).to(weights.dtype)
    if belief.requires_grad:
        # straight-through: one expert forward, the gradient of the belief in all of them backward
        chosen = chosen + (belief - belief.detach())
    if routing == "hard":
        return Routes(chosen, hard=torch.ones_like(weights[..., 0], dtype=torch.bool))
    hard = uncertainty_of(posterior, signal) < threshold
    return Routes(torch.where(hard.unsqueeze(-1), chosen, weights), hard)
