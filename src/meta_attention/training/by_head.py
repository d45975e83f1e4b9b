"""What routes by token have to beat: heads that each keep one expert, whatever the token.

Values say which: what an expert is worth to a head is the mean over its tokens, and a head takes
what is worth most at a price, as a token does. So a model that knows values has this opponent, too,
and says on its own text whether the token matters or only the head.

Shapes: G key-value heads that have routes of their own, E experts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meta_attention.controller import ValueController, ValuePosterior
from meta_attention.evaluation.perplexity import evaluating
from meta_attention.models import MetaAttentionForCausalLM
from meta_attention.routing import search_price

Choice = dict[int, Tensor]
"""The expert of every head [G], by routed layer, as ``force_routes`` takes them."""
# of the price that is just dear enough, at which one head more takes what is dear
BELOW = 0.999


@torch.no_grad()
def experts_by_head(
    model: MetaAttentionForCausalLM, texts: Sequence[Tensor], target_cost: float
) -> list[Choice]:
    """The dearest choice that costs no more than asked for, and the cheapest that costs more.

    Heads are few, so the two may be far apart; what is asked for lies between them. One alone, if
    nothing costs more.

    Args:
        model: With values that were learnt.
        texts: Token ids ``[B, T]`` over which means are taken.
        target_cost: Mean over heads and routed layers.
    """
    means = _mean_values(model, texts)

    def at(price: float) -> Choice:
        return {
            index: (value - price * costs).argmax(dim=-1) for index, (value, costs) in means.items()
        }

    def cost_at(price: float) -> float:
        taken = at(price)
        costs = [costs[taken[index]].mean() for index, (_, costs) in means.items()]
        return torch.stack(costs).mean().item()

    price = search_price(cost_at, target_cost)
    below, above = at(price), at(BELOW * price)
    return [below] if all(torch.equal(below[i], above[i]) for i in below) else [below, above]


def _mean_values(
    model: MetaAttentionForCausalLM, texts: Sequence[Tensor]
) -> dict[int, tuple[Tensor, Tensor]]:
    """By routed layer: what experts are worth to its heads [G, E] in nats, and their costs [E]."""
    controllers = {
        index: block.attention.controller
        for index, block in enumerate(model.model.layers)
        if isinstance(block.attention.controller, ValueController)
    }
    sums: dict[int, Tensor] = {}

    def keep(index: int, found: ValuePosterior) -> None:
        sums[index] = sums.get(index, 0.0) + found.value.double().sum(dim=(0, 1))

    hooks = [
        controller.register_forward_hook(lambda _, __, found, index=index: keep(index, found))
        for index, controller in controllers.items()
    ]
    try:
        with evaluating(model):
            for ids in texts:
                model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    num_tokens = sum(ids.numel() for ids in texts)
    return {
        index: (sums[index] / num_tokens, controller.costs.double())
        for index, controller in controllers.items()
    }
