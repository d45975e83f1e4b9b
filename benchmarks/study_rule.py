"""Routes by a rule that nobody learns: full attention where there is something to find far back.

Where the last two tokens stood together before, and last beyond the middle window, full attention;
everywhere else that window. What a controller learns that sees the same is worth no more than what
it has over this. All heads may follow the rule, or those for which that is best.

Shapes: B sequences, T their length, G key-value heads, E experts.
"""

import itertools

import torch
from study_fixed_heads import Choice, FixedHeads, last_layer
from torch import Tensor, nn

from meta_attention.controller import last_seen
from meta_attention.controller.controllers import MLPController
from meta_attention.errors import ConfigError
from meta_attention.layers import BayesianMetaAttentionLayer

# to hidden states, which are normalised; large enough for none of them to matter
SIGN = 1000.0
# the last two tokens together
RUN = 1
FULL, MIDDLE = 0, 1
# as an expert of a head: full attention or the middle window, by the rule
BY_RULE = 3


@torch.no_grad()
def follow_rule(model: nn.Module) -> None:
    """Controllers that say nothing else, and do not learn.

    Args:
        model: Routed among full attention and two windows, the wider one first, with
            ``recurrence``, and one route for all heads.
    """
    for layer in _layers(model):
        controller = layer.controller
        assert isinstance(controller, MLPController)
        if controller.groups:
            raise ConfigError(
                "the rule for all heads needs one route for all heads, got route_granularity "
                f"{layer.config.route_granularity!r}"
            )
        controller.requires_grad_(False)
        for parameter in controller.parameters():
            parameter.zero_()
        _see_what_is_far(layer)
        _follow(controller, head=0)


class RuledHeads(FixedHeads):
    """The heads of a model's routed layers, each on an expert, or on two by the rule.

    Args:
        model: As of :func:`follow_rule`, but routed per key-value head.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.windows: list[int] = []
        with torch.no_grad():
            for layer in _layers(model):
                _see_what_is_far(layer)
                self.windows.append(_middle_window(layer))

    def look_at(self, ids: Tensor) -> None:
        """What following the rule costs, by how often it speaks in a text ``[B, T]``."""
        distance = last_seen(ids, RUN + 1)[..., RUN]
        heads = iter(self.costs)
        for controller, window in zip(self.controllers, self.windows, strict=True):
            share = (distance >= window).float().mean().item()
            for costs in itertools.islice(heads, controller.groups[0]):
                costs[BY_RULE:] = [share * costs[FULL] + (1.0 - share) * costs[MIDDLE]]

    def set(self, choice: Choice) -> None:
        super().set(tuple(MIDDLE if expert == BY_RULE else expert for expert in choice))
        experts = iter(choice)
        for controller in self.controllers:
            last_layer(controller).weight.zero_()
            for head, expert in enumerate(itertools.islice(experts, controller.groups[0])):
                if expert == BY_RULE:
                    _follow(controller, head)

    def get(self) -> list[list[int]]:
        found = super().get()
        for controller, experts in zip(self.controllers, found, strict=True):
            reads = last_layer(controller).weight.view(*controller.groups, -1).any(dim=-1)  # [G]
            for head in reads.nonzero().flatten().tolist():
                experts[head] = BY_RULE
        return found


def _layers(model: nn.Module) -> list[BayesianMetaAttentionLayer]:
    """Those that can follow the rule, at least one."""
    layers = [m for m in model.modules() if isinstance(m, BayesianMetaAttentionLayer)]
    layers = [layer for layer in layers if layer.recurrence is not None]
    if not layers:
        raise ConfigError("a rule by what was seen before needs routed layers with recurrence")
    for layer in layers:
        names = layer.expert_names
        if len(names) != BY_RULE or names[FULL] != "full" or not names[MIDDLE].startswith("local:"):
            raise ConfigError(f"the rule is for full and two windows, got {', '.join(names)}")
        window = _middle_window(layer)
        if window & (window - 1):
            raise ConfigError(f"the middle window must be a power of two, got {window}")
    return layers


def _middle_window(layer: BayesianMetaAttentionLayer) -> int:
    return int(layer.expert_names[MIDDLE].removeprefix("local:"))


def _see_what_is_far(layer: BayesianMetaAttentionLayer) -> None:
    """Recurrence puts a sign on the first channel of what is seen; one hidden unit reads it."""
    recurrence, controller = layer.recurrence, layer.controller
    assert recurrence is not None
    assert isinstance(controller, MLPController)
    recurrence.requires_grad_(False)
    recurrence.weight.zero_()
    is_far = recurrence.bounds >= _middle_window(layer)  # [K - 1], of the buckets after "never"
    recurrence.weight[RUN, 1:, 0] = SIGN * is_far.float()
    first: nn.Linear = controller.mlp[0]  # type: ignore[assignment]
    first.weight[0, 0], first.bias[0] = 1.0, -SIGN / 2


def _follow(controller: MLPController, head: int) -> None:
    """Of a head: 500 for full attention where it is far, else 100 for the middle window."""
    second = last_layer(controller)
    first = head * len(controller.costs)
    second.weight[first + FULL, 0], second.bias[first + MIDDLE] = 1.0, SIGN / 10
