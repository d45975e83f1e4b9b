"""The compute-aware prior."""

import pytest
import torch

from meta_attention import compute_aware_prior
from meta_attention.errors import ConfigError


def test_prior_at_the_papers_values():
    prior = compute_aware_prior([1.0, 0.15, 0.30], strength=1.0, floor=0.01)
    torch.testing.assert_close(prior, torch.tensor([0.01, 0.86, 0.71]))


def test_costs_may_be_a_tensor():
    costs = torch.tensor([1.0, 0.5])
    torch.testing.assert_close(compute_aware_prior(costs), compute_aware_prior([1.0, 0.5]))


def test_strength_scales_everything_above_the_floor():
    weak = compute_aware_prior([0.25, 0.5], strength=1.0, floor=0.1)
    strong = compute_aware_prior([0.25, 0.5], strength=4.0, floor=0.1)
    torch.testing.assert_close(strong - 0.1, 4.0 * (weak - 0.1))


def test_without_strength_the_prior_knows_no_costs():
    assert compute_aware_prior([1.0, 0.2], strength=0.0, floor=0.5).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"costs": []}, "one number per expert, got none"),
        ({"costs": [1.0, 0.0]}, r"expert_costs\[1\] must be in \(0, 1\], got 0.0"),
        ({"costs": [1.5]}, r"expert_costs\[0\] must be in \(0, 1\], got 1.5"),
        ({"costs": [float("nan")]}, "got nan"),
        ({"costs": [1.0], "floor": 0.0}, "prior_floor must be finite and > 0, got 0.0"),
        ({"costs": [1.0], "floor": -1.0}, "prior_floor"),
        ({"costs": [1.0], "strength": -1.0}, "prior_strength must be finite and >= 0, got -1.0"),
        ({"costs": [1.0], "strength": float("inf")}, "prior_strength"),
    ],
)
def test_an_improper_prior_is_refused(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        compute_aware_prior(**kwargs)
