"""What the routes of an adapted model cost, next to what its base does.

Shapes: B batch, T sequence, G key-value heads with routes of their own, E experts.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from meta_attention.adapt.router import routers_of
from meta_attention.evaluation.flops import count_layer
from meta_attention.evaluation.routing import RoutingTally
from meta_attention.experts.base import visible_keys


def tally_of(model: nn.Module) -> RoutingTally:
    """A tally for the adapted layers of a model, in order."""
    routers = routers_of(model)
    return RoutingTally(
        [router.expert_names for router in routers],
        [router.controller.costs for router in routers],
        [router.controller.prior_concentration for router in routers],
        groups=[math.prod(router.controller.groups) for router in routers],
    )


def attention_flops(model: Any, weights: Sequence[Tensor]) -> tuple[float, float]:
    """Operations of attention in all layers of a model, and in all layers of its base.

    Scores and values, counted to the key, for whole rows of text; see :mod:`..evaluation.flops`.

    Args:
        model: An adapted model.
        weights: Routes that were executed, by adapted layer: ``[B, T, E]`` or ``[B, T, G, E]``.
    """
    adaptation = routers_of(model)[0].adaptation
    config, family = adaptation.config, adaptation.family
    B, T = weights[0].shape[:2]
    per_key = 4.0 * config.num_attention_heads * config.head_dim
    of_base = 0.0
    unchanged = 0.0
    for index in range(config.num_hidden_layers):
        # a window of Transformers counts the token itself
        window = model.config.sliding_window - 1 if family.has_window(model.config, index) else T
        own = B * T * per_key * visible_keys(T, window, causal=True)
        of_base += own
        unchanged += 0.0 if index in adaptation.layers else own
    routed = sum(
        count_layer(config, routes, layer_idx=index).attention
        for index, routes in zip(adaptation.layers, weights, strict=True)
    )
    return unchanged + routed, of_base
