"""Static hybrids whose heads differ: every key-value head of a layer keeps an expert of its own.

It is what routes by token have to beat: a layer in which some heads see everything and others a
window, whatever the token. Which head shall see how far is found where other variants begin to
route, in the model that all go on from: of all ways to give experts to heads that cost no more than
asked, the one with the least loss on text of the training. Where these are too many, heads are
narrowed one by one, each time where least is lost for what is saved.

Shapes: B sequences, T their length, G key-value heads, E experts.
"""

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from study_evaluation import autocast
from torch import Tensor, nn

from meta_attention import MetaAttentionForCausalLM
from meta_attention.controller.controllers import MLPController
from meta_attention.errors import ConfigError
from meta_attention.evaluation.perplexity import evaluating

Choice = tuple[int, ...]
"""Index of an expert for every head, layer after layer."""
# of a logit over the others: a softmax of it is 1 in float32
CERTAIN = 100.0
# ways that are all tried
MAX_CHOICES = 500


class FixedHeads:
    """The heads of a model's routed layers, each on an expert that holds for every token.

    Controllers stay, so that the model is saved, loaded and counted as others are, but they neither
    see a token nor learn.

    Args:
        model: With layers that are routed per key-value head.
    """

    def __init__(self, model: nn.Module) -> None:
        self.controllers = [m for m in model.modules() if isinstance(m, MLPController)]
        if not self.controllers or not all(c.groups for c in self.controllers):
            raise ConfigError("experts of heads need layers that are routed per key-value head")
        # of each head, those of its experts
        self.costs = [c.costs.tolist() for c in self.controllers for _ in range(c.groups[0])]
        for controller in self.controllers:
            controller.requires_grad_(False)
            for parameter in controller.parameters():
                parameter.zero_()

    def look_at(self, ids: Tensor) -> None:
        """A text ``[B, T]`` on which heads are to be judged: what experts cost may depend on it."""

    def set(self, choice: Choice) -> None:
        """Give every head its expert."""
        heads = iter(choice)
        for controller in self.controllers:
            experts = torch.tensor(list(itertools.islice(heads, controller.groups[0])))
            chosen = F.one_hot(experts, len(controller.costs))  # [G, E]
            last_layer(controller).bias.copy_(CERTAIN * chosen.flatten())

    def get(self) -> list[list[int]]:
        """The experts of the heads, by layer."""
        biases = (last_layer(c).bias.view(*c.groups, -1) for c in self.controllers)
        return [bias.argmax(dim=-1).tolist() for bias in biases]

    def cost(self, choice: Choice) -> float:
        """Mean over heads, as a share of full attention's."""
        return sum(self.costs[head][expert] for head, expert in enumerate(choice)) / len(choice)

    def find(self, loss: Callable[[Choice], float], *, cost: float) -> Choice:
        """The choice of least loss that costs no more than asked."""
        cheapest = sum(map(min, self.costs)) / len(self.costs)
        if cheapest > cost:
            raise ConfigError(f"a cost must be at least that of the cheapest experts, {cheapest}")
        if math.prod(map(len, self.costs)) <= MAX_CHOICES:
            every = itertools.product(*(range(len(costs)) for costs in self.costs))
            return min((c for c in every if self.cost(c) <= cost), key=loss)
        choice: Choice = tuple(costs.index(max(costs)) for costs in self.costs)
        while self.cost(choice) > cost:
            narrowed = self._narrowed(choice)
            before, losses = loss(choice), [loss(c) for c in narrowed]
            prices = [
                (after - before) / (self.cost(choice) - self.cost(c))
                for c, after in zip(narrowed, losses, strict=True)
            ]
            choice = narrowed[prices.index(min(prices))]
        return choice

    def _narrowed(self, choice: Choice) -> list[Choice]:
        """One head on a cheaper expert."""
        return [
            (*choice[:head], expert, *choice[head + 1 :])
            for head, costs in enumerate(self.costs)
            for expert, cost in enumerate(costs)
            if cost < costs[choice[head]]
        ]


def choose_heads(
    heads: FixedHeads, model: MetaAttentionForCausalLM, ids: Tensor, cost: float
) -> None:
    """Give heads the experts with which their model predicts a text ``[B, T]`` best."""

    @torch.no_grad()
    def loss(choice: Choice) -> float:
        heads.set(choice)
        with evaluating(model), autocast(str(model.device)):
            losses = [model(part, labels=part, use_cache=False).task_loss for part in ids.split(8)]
        return torch.stack(losses).mean().item()

    heads.look_at(ids)
    heads.set(heads.find(loss, cost=cost))


def last_layer(controller: MLPController) -> nn.Linear:
    """Of which the outputs are logits, those of a head together."""
    return controller.mlp[-1]  # type: ignore[return-value]
