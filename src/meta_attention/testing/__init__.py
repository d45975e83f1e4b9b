"""What tests and benchmarks share: slow exact definitions, and how much error is allowed."""

import torch
from torch import Tensor

from meta_attention.testing.definitions import (
    naive_attention_residuals,
    naive_full_attention,
    naive_linear_attention,
    naive_local_attention,
    naive_state_space,
)

__all__ = [
    "assert_within_error_budget",
    "naive_attention_residuals",
    "naive_full_attention",
    "naive_linear_attention",
    "naive_local_attention",
    "naive_state_space",
]


def assert_within_error_budget(
    name: str, actual: Tensor, oracle: Tensor, plain: Tensor, *, roundings: float = 1.0
) -> None:
    """Allow an implementation at most twice the rounding error of plain PyTorch.

    The budget follows the data, so no test carries a hand-tuned tolerance.

    Args:
        name: Named in the failure message.
        actual: What is judged.
        oracle: The definition, in float64.
        plain: The definition, in the dtype of ``actual``.
        roundings: How often the largest value may be rounded beyond that: of n terms added one by
            one to a sum as large, about the root of n show.
    """
    rounding = torch.finfo(actual.dtype).eps * oracle.abs().max().item()
    budget = 2.0 * (plain.double() - oracle).abs().max().item() + roundings * rounding
    error = (actual.double() - oracle).abs().max().item()
    assert error <= budget, f"{name}: error {error:.3e} exceeds budget {budget:.3e}"
