"""The compute-aware prior: cheap experts are believed in before any token is read."""

from collections.abc import Sequence

import torch
from torch import Tensor

from meta_attention.config import check_costs, check_prior
from meta_attention.errors import ConfigError


def compute_aware_prior(
    costs: Sequence[float] | Tensor, *, strength: float = 1.0, floor: float = 0.01
) -> Tensor:
    """Prior concentration ``[E]`` that favours cheap experts: floor + strength * (1 - cost).

    Args:
        costs: Cost of each expert relative to full attention, in (0, 1].
        strength: The paper's beta_0. Larger values take more evidence to overcome.
        floor: The paper's epsilon. Keeps the concentration of an expert of cost 1 above zero.

    Returns:
        Float32 on the CPU; ``[0.01, 0.86, 0.71]`` for the paper's costs 1, 0.15 and 0.30.
    """
    values = [float(cost) for cost in costs]
    if not values:
        raise ConfigError("costs must have one number per expert, got none")
    check_costs(values)
    check_prior(strength, floor)
    return torch.tensor([floor + strength * (1.0 - cost) for cost in values], dtype=torch.float32)
