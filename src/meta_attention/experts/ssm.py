"""A selective state-space model on the shared projections.

Shapes: B batch, T sequence, D width, H heads, K key-value heads, P head width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from meta_attention.config import MetaAttentionConfig
from meta_attention.errors import ConfigError
from meta_attention.experts.base import Heads, register_expert
from meta_attention.experts.linear import LinearStateExpert, StateInputs
from meta_attention.precision import KeepFloat32

# of Mamba-2: where decay rates and step sizes begin, the latter evenly in their logarithm
FIRST_RATES = (1.0, 16.0)
FIRST_STEPS = (0.001, 0.1)

# log of what a token leaves, at least: 1e-13 is no more than 0 to a float32 sum, and sums of larger
# numbers over a chunk would round what differs between its tokens
MIN_DECAY = -30.0


class StateSpaceRates(KeepFloat32):
    """What of a state-space model does not depend on the token.

    In Mamba-2's names ``log_rate`` is A_log, ``step_bias`` dt_bias and ``skip`` D.

    Args:
        num_heads: Query heads, H.
        num_key_value_heads: Key-value heads, K.
    """

    def __init__(self, num_heads: int, num_key_value_heads: int) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.empty(num_key_value_heads))
        self.step_bias = nn.Parameter(torch.empty(num_key_value_heads))
        self.skip = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        rate = torch.empty_like(self.log_rate).uniform_(*FIRST_RATES)
        low, high = (math.log(step) for step in FIRST_STEPS)
        step = torch.empty_like(self.step_bias).uniform_(low, high).exp()
        # of Transformers: leaves alone what was loaded
        init.copy_(self.log_rate, rate.log())
        # softplus of it is the step
        init.copy_(self.step_bias, step + torch.log(-torch.expm1(-step)))
        init.ones_(self.skip)


@register_expert("ssm")
class SelectiveStateSpace(LinearStateExpert):
    """Every token reads a state that forgets, at a pace that each token sets.

    The state-space duality form of Mamba-2 (Dao and Gu, 2024), the query as its C, the key as its
    B and the value as its x:

        step[t] = softplus(W x[t] + step_bias),    rate = exp(log_rate)
        state[t] = exp(-step[t] rate) state[t - 1] + step[t] key[t]^T value[t]
        row[t] = query[t] state[t] + skip value[t]

    Steps and rates are of key-value heads, as states are: with one for each query head there would
    be as many states. The skip is of query heads, which read.
    """

    # decay tells near from far
    uses_rope = False

    def __init__(self, config: MetaAttentionConfig) -> None:
        super().__init__(config)
        if not config.causal:
            raise ConfigError("expert 'ssm' needs causal=True, got False: its state runs forward")
        self.step_proj = nn.Linear(config.hidden_size, self.num_key_value_heads, bias=False)
        self.rates = StateSpaceRates(self.num_heads, self.num_key_value_heads)

    def inputs(self, heads: Heads, x: Tensor) -> StateInputs:
        precise = torch.promote_types(heads.key.dtype, torch.float32)
        rates = self.rates
        step = F.softplus(self.step_proj(x).to(precise) + rates.step_bias)  # [B, T, K]
        decay = (-step * rates.log_rate.exp()).clamp(min=MIN_DECAY)
        key = (heads.key * step.unsqueeze(-1)).to(heads.key.dtype)
        return StateInputs(heads.query, key, heads.value, decay, rates.skip, normalise=False)

    @property
    def update_flops(self) -> float:
        # a key-value head has a step size, and adds to P x P numbers of state
        return 2.0 * self.step_proj.weight.numel() + (
            2.0 * self.head_dim * self.head_dim * self.num_key_value_heads
        )

    def flops(self, length: int) -> float:
        # each query head reads them; decay and skip are no matrix products
        return self.update_flops + 2.0 * self.head_dim * self.head_dim * self.num_heads
