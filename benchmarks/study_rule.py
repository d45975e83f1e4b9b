"""Routes by a rule that nobody learns: full attention where there is something to find far back.

Where the last two tokens stood together before, and last beyond the middle window, full attention;
everywhere else that window. What a controller learns that sees the same is worth no more than what
it has over this.
"""

import torch
from torch import nn

from meta_attention.errors import ConfigError
from meta_attention.layers import BayesianMetaAttentionLayer

# to hidden states, which are normalised; large enough for none of them to matter
SIGN = 1000.0
# the last two tokens together
RUN = 1


@torch.no_grad()
def follow_rule(model: nn.Module) -> None:
    """Controllers that say nothing else, and do not learn.

    Recurrence puts a sign on the first channel of what they see; one hidden unit reads it.

    Args:
        model: Routed among full attention and two windows, the wider one first, with
            ``recurrence``.
    """
    layers = [m for m in model.modules() if isinstance(m, BayesianMetaAttentionLayer)]
    layers = [layer for layer in layers if layer.recurrence is not None]
    if not layers:
        raise ConfigError("a rule by what was seen before needs routed layers with recurrence")
    for layer in layers:
        names = layer.expert_names
        if len(names) != 3 or names[0] != "full" or not names[1].startswith("local:"):
            raise ConfigError(f"the rule is for full and two windows, got {', '.join(names)}")
        assert layer.recurrence is not None
        window = int(names[1].removeprefix("local:"))
        if window & (window - 1) or layer.controller.groups:
            raise ConfigError(
                f"the rule is for a middle window of a power of two and one route for all heads, "
                f"got {window} and {layer.config.route_granularity}"
            )
        is_far = layer.recurrence.bounds >= window  # [K - 1], of the buckets after "never"
        for module in (layer.recurrence, layer.controller):
            module.requires_grad_(False)
            for parameter in module.parameters():
                parameter.zero_()
        layer.recurrence.weight[RUN, 1:, 0] = SIGN * is_far.float()
        first, _, second = layer.controller.mlp  # type: ignore[misc]
        first.weight[0, 0], first.bias[0] = 1.0, -SIGN / 2
        # 500 for full where it is far, else 100 for the middle window
        second.weight[0, 0], second.bias[1] = 1.0, SIGN / 10
