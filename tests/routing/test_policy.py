"""Soft, hard and gated routes."""

import pytest
import torch

from meta_attention import RoutingPosterior
from meta_attention.routing import choose_routes, uncertainty_of

SIGNALS = ("entropy", "mean_entropy", "margin", "mutual_information", "vacuity")


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


@pytest.mark.parametrize("sample", [True, False])
def test_a_hard_route_takes_one_expert(sample):
    routes = choose_routes(make_posterior(), routing="hard", sample=sample)
    assert routes.hard.all()
    assert ((routes.weights == 0) | (routes.weights == 1)).all()
    assert (routes.weights.sum(dim=-1) == 1).all()


def test_hard_routes_follow_the_mean_or_by_thompson_sampling_the_belief():
    posterior = RoutingPosterior(torch.tensor([[[3.0, 1.0]]]).expand(1, 20_000, 2))
    mean = choose_routes(posterior, routing="hard")
    assert (mean.expert == 0).all()
    torch.manual_seed(0)
    thompson = choose_routes(posterior, routing="hard", sample=True)
    # P(first weight > 1/2) under Beta(3, 1) is 7/8
    assert thompson.weights[..., 0].mean().item() == pytest.approx(7 / 8, abs=0.01)


@pytest.mark.parametrize("signal", SIGNALS)
def test_gated_routes_go_from_soft_to_hard_as_the_threshold_rises(signal):
    posterior = make_posterior()
    uncertainty = uncertainty_of(posterior, signal)
    counts = []
    for threshold in (-1e9, *uncertainty.flatten().sort().values.tolist(), 1e9):
        routes = choose_routes(posterior, routing="gated", signal=signal, threshold=threshold)
        assert torch.equal(routes.hard, uncertainty < threshold)
        assert torch.equal(routes.weights[~routes.hard], posterior.mean[~routes.hard])
        assert (routes.weights[routes.hard].max(dim=-1).values == 1).all()
        counts.append(int(routes.hard.sum()))
    assert counts[0] == 0
    assert counts[-1] == 10
    assert counts == sorted(counts)


@pytest.mark.parametrize("signal", SIGNALS)
def test_a_decided_token_is_less_uncertain_than_an_even_one(signal):
    even, decided = (RoutingPosterior(torch.tensor(c)) for c in ([2.0, 2.0, 2.0], [60.0, 2.0, 2.0]))
    assert uncertainty_of(decided, signal) < uncertainty_of(even, signal)


def test_the_gradient_of_a_hard_route_reaches_every_experts_belief():
    """Straight-through: that of the soft mixture at the chosen expert's output."""
    concentration = torch.tensor([[[2.0, 1.0, 0.5]]], requires_grad=True)
    values = torch.tensor([1.0, -2.0, 5.0])
    posterior = RoutingPosterior(concentration)
    hard = choose_routes(posterior, routing="hard").weights @ values
    (gradient,) = torch.autograd.grad(hard.sum(), concentration, retain_graph=True)
    (soft,) = torch.autograd.grad((posterior.mean @ values).sum(), concentration)
    torch.testing.assert_close(gradient, soft)
    assert (gradient != 0).all()
