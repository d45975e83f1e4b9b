"""Soft routes: the mean, or a sample of it."""

import torch

from meta_attention import RoutingPosterior
from meta_attention.routing import choose_routes


def make_posterior() -> RoutingPosterior:
    return RoutingPosterior(torch.rand(2, 5, 3, generator=torch.Generator().manual_seed(0)) + 0.1)


def test_the_mean_is_deterministic():
    posterior = make_posterior()
    assert torch.equal(choose_routes(posterior, sample=False).weights, posterior.mean)


def test_samples_differ_and_sum_to_one():
    posterior = make_posterior()
    first, second = (choose_routes(posterior, sample=True).weights for _ in range(2))
    assert not torch.equal(first, second)
    torch.testing.assert_close(first.sum(dim=-1), torch.ones(2, 5))


def test_expert_is_the_one_of_largest_weight():
    posterior = RoutingPosterior(torch.tensor([[[1.0, 5.0, 2.0], [9.0, 1.0, 1.0]]]))
    routes = choose_routes(posterior, sample=False)
    assert routes.expert.tolist() == [[1, 0]]
    assert routes.hard.tolist() == [[False, False]]
