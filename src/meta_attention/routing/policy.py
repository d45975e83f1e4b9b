"""Posterior -> routes: how belief about a token becomes weights on the experts.

A token is routed by its own posterior, never by its rank in the sequence: that would read the
future. Where every key-value head of a token has a posterior, what is said here of a token holds
for each of them.

Shapes: B batch, T sequence, E experts, G key-value heads that have routes of their own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meta_attention.config import RouteGradient, RoutingName, TrainingWeights
from meta_attention.controller import Posterior
from meta_attention.routing.gate import uncertainty_of

# an expert drawn at a lower probability counts as if it had this one; see choose_routes
MIN_PROBABILITY = 1e-6


@dataclass(frozen=True, slots=True)
class Routes:
    """Where every token goes, or every key-value head of it."""

    weights: Tensor  # [B, T, E] or [B, T, G, E], float32, rows sum to one
    hard: Tensor  # [B, T] or [B, T, G] bool: it takes one expert only
    explored: Tensor | None = None  # likewise: only these teach the controller; None: all do

    @property
    def expert(self) -> Tensor:
        """Index of the expert of largest weight [B, T] or [B, T, G]; the only one if hard."""
        return self.weights.argmax(dim=-1)


def choose_routes(
    posterior: Posterior,
    *,
    routing: RoutingName = "soft",
    draw: TrainingWeights = "mean",
    gradient: RouteGradient = "all",
    signal: str = "mutual_information",
    threshold: Tensor | float = 0.0,
    explored_share: float = 0.5,
) -> Routes:
    """Weights of every token on the experts.

    The weights of a hard token are exactly one and zero. With p the belief in an expert, and p'
    the same without a gradient, they are::

        gradient "all"                          chosen + (p - p')
        gradient "chosen", draw "one_hot"       chosen * (1 + (p - p') / p')
        gradient "chosen", draw anything else   chosen * (1 + (p - p'))

    The first needs the rows of all experts: its gradient is that of the soft mixture, taken at the
    chosen output (straight-through). The second needs the chosen row only and weights it by
    d log p. Averaged over drawn routes, both are the gradient of the expected loss where the loss
    is affine in each token's output, and otherwise of first order: the first in the differences
    between the rows, the second in the rows themselves. The third teaches how much to believe in
    what was chosen, and promises no more.

    In the second, p' is at least ``MIN_PROBABILITY``: an expert drawn against such odds has a
    bounded gradient in place of an unbiased one.

    Args:
        posterior: The controller's answer.
        routing: ``"soft"``: every expert, weighted by belief. ``"hard"``: only one. ``"gated"``:
            hard where the uncertainty is below the threshold, soft elsewhere.
        draw: What a route is made from. ``"mean"``: the expected weights; a hard route takes the
            largest. ``"sample"``: weights drawn from the posterior; a hard route takes the largest
            of these: Thompson sampling. ``"one_hot"``: a hard route takes one expert drawn with
            the expected weights as probabilities; soft tokens take the expected weights.
            ``"explore"``: some hard routes take any expert, the others the largest; only the
            former teach.
        gradient: How a hard route teaches the controller, as above.
        signal: Uncertainty that gates; see :func:`uncertainty_of`.
        threshold: The paper's eta. Raising it makes tokens hard, lowering it makes them soft.
        explored_share: How many routes take any expert, of those that explore.
    """
    belief = posterior.mean
    weights = posterior.sample() if draw == "sample" else belief
    if routing == "soft":
        return Routes(weights, hard=torch.zeros_like(weights[..., 0], dtype=torch.bool))

    expert = draw_expert(belief) if draw == "one_hot" else weights.argmax(dim=-1)
    explored = None
    if draw == "explore":
        explored = torch.rand(expert.shape, device=expert.device) < explored_share
        expert = torch.where(explored, torch.randint_like(expert, weights.shape[-1]), expert)
    chosen = torch.zeros_like(weights).scatter_(-1, expert.unsqueeze(-1), 1.0)
    teaches = explored is not None or not posterior.learns_by_exploring
    lesson = posterior.lesson_of(expert) if teaches else None
    if lesson is not None and lesson.requires_grad:
        # zero, with the gradient of the belief: added first, so that one and zero stay exact
        carrier = lesson - lesson.detach()
        if explored is not None:
            carrier = carrier * explored.unsqueeze(-1)
        if gradient == "all":
            chosen = chosen + carrier
        elif draw == "one_hot":
            chosen = chosen * (1.0 + carrier / belief.detach().clamp(min=MIN_PROBABILITY))
        else:
            chosen = chosen * (1.0 + carrier)
    if routing == "hard":
        return Routes(chosen, torch.ones_like(expert, dtype=torch.bool), explored)
    hard = uncertainty_of(posterior, signal) < threshold
    return Routes(torch.where(hard.unsqueeze(-1), chosen, weights), hard)


def draw_expert(probabilities: Tensor) -> Tensor:
    """One expert per token ``[...]``, drawn with ``probabilities`` ``[..., E]``.

    The winner of a race between exponential times. It does not wait for the device, as
    ``torch.multinomial`` may to check its input.
    """
    probabilities = probabilities.detach()
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)
