"""The objective: a sum of its parts, padding left out."""

import pytest
import torch

from meta_attention import mean_over_tokens, routing_loss
from meta_attention.errors import ShapeError


def test_loss_rises_with_the_divergence():
    task, kl = torch.tensor(2.0), torch.tensor(3.0)
    assert routing_loss(task, kl, kl_weight=0.5).item() == 3.5
    assert routing_loss(task, kl, kl_weight=0.0).item() == 2.0


def test_cost_penalty_is_added():
    loss = routing_loss(
        torch.tensor(2.0), torch.tensor(0.0), kl_weight=1.0, cost=torch.tensor(0.4), cost_weight=0.5
    )
    assert loss.item() == pytest.approx(2.2)


def test_padding_does_not_count():
    values = torch.tensor([[1.0, 3.0, float("nan")]])
    assert mean_over_tokens(values, torch.tensor([[1, 1, 0]])).item() == 2.0
    assert mean_over_tokens(values[:, :2]).item() == 2.0


def test_all_padding_is_zero_not_nan():
    assert mean_over_tokens(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.long)).item() == 0.0


def test_mask_of_another_shape_is_refused():
    with pytest.raises(ShapeError, match=r"\[B, T\] = \[1, 2\] .* got \[1, 3\]"):
        mean_over_tokens(torch.ones(1, 2), torch.ones(1, 3))
