"""The routing posterior: closed forms against torch.distributions and Monte Carlo."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Dirichlet, kl_divergence

from meta_attention import RoutingPosterior
from meta_attention.controller import PointPosterior
from meta_attention.errors import ShapeError

PRIOR = torch.tensor([0.01, 0.86, 0.71])
SIGNALS = ("entropy", "mean_entropy", "margin", "mutual_information", "vacuity")

# the whole range a controller may reach, evenly in the exponent
concentrations = st.lists(
    st.floats(-3.0, 6.0).map(lambda exponent: 10.0**exponent), min_size=1, max_size=5
)


def posterior_of(values) -> RoutingPosterior:
    return RoutingPosterior(torch.tensor(values, dtype=torch.float32))


@given(concentrations)
def test_closed_forms_agree_with_torch_distributions(values):
    posterior = posterior_of(values)
    exact = Dirichlet(posterior.concentration.double())
    prior = torch.linspace(0.01, 2.0, len(values))
    kl = kl_divergence(exact, Dirichlet(prior.double()))
    torch.testing.assert_close(posterior.mean, exact.mean.float())
    torch.testing.assert_close(posterior.entropy, exact.entropy().float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(posterior.kl_to(prior), kl.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("values", [[2.0, 3.0, 4.0], [0.3, 0.9, 0.7], [40.0, 1.0, 1.0]])
def test_closed_forms_agree_with_monte_carlo(values):
    posterior = posterior_of(values)
    q = Dirichlet(posterior.concentration.double())
    draws = q.sample((200_000,))
    log_q = q.log_prob(draws)
    kl = (log_q - Dirichlet(PRIOR.double()).log_prob(draws)).mean()
    conditional = torch.special.entr(draws).sum(dim=-1).mean()
    information = posterior.mean_entropy - conditional
    for closed, estimate in (
        (posterior.entropy, -log_q.mean()),
        (posterior.kl_to(PRIOR), kl),
        (posterior.mutual_information, information),
    ):
        torch.testing.assert_close(closed.double(), estimate.double(), rtol=1e-2, atol=1e-2)


def test_no_evidence_means_no_divergence():
    posterior = RoutingPosterior(PRIOR.expand(2, 5, 3))
    torch.testing.assert_close(posterior.kl_to(PRIOR), torch.zeros(2, 5))


@given(concentrations)
def test_values_and_gradients_are_finite(values):
    concentration = torch.tensor(values, dtype=torch.float32, requires_grad=True)
    posterior = RoutingPosterior(concentration)
    prior = torch.full((len(values),), 0.5)
    torch.manual_seed(0)
    results = [getattr(posterior, signal) for signal in SIGNALS]
    results += [posterior.mean, posterior.sample(), posterior.kl_to(prior)]
    for result in results:
        assert result.dtype == torch.float32
        assert result.isfinite().all()
        (gradient,) = torch.autograd.grad(result.sum(), concentration)
        assert gradient.isfinite().all()


@given(concentrations)
def test_signals_stay_within_their_ranges(values):
    posterior = posterior_of(values)
    limit = math.log(len(values)) + 1e-6
    assert 0.0 <= posterior.mean_entropy <= limit
    assert 0.0 <= posterior.mutual_information <= posterior.mean_entropy + 1e-6
    assert 0.0 <= posterior.margin <= 1.0 + 1e-6
    assert posterior.vacuity > 0.0
    assert posterior.kl_to(torch.full((len(values),), 0.5)) >= -1e-6


def test_more_evidence_for_the_same_weights_is_less_uncertain():
    little, much = posterior_of([2.0, 1.0, 1.0]), posterior_of([200.0, 100.0, 100.0])
    for signal in ("entropy", "mutual_information", "vacuity"):
        assert getattr(much, signal) < getattr(little, signal)
    torch.testing.assert_close(much.mean_entropy, little.mean_entropy)


def test_the_papers_uncertainty_is_lowest_where_nothing_is_known():
    # why the other signals exist: the prior itself looks more certain than a decided token
    unread, decided = posterior_of(PRIOR.tolist()), posterior_of([5.01, 50.86, 5.71])
    assert unread.entropy.item() == pytest.approx(-95.11, abs=0.01)
    assert unread.entropy < decided.entropy
    assert unread.mutual_information > decided.mutual_information
    assert unread.mean_entropy > decided.mean_entropy
    assert unread.vacuity > decided.vacuity
    assert unread.margin < decided.margin


def test_sample_has_the_posteriors_mean_and_its_gradient():
    concentration = torch.tensor([1.5, 0.8, 3.0])
    target = torch.tensor([1.0, -2.0, 0.5])

    # d E[(target . weights)^2] / d concentration, from the Dirichlet's moments
    a = concentration.clone().requires_grad_()
    mean = a / a.sum()
    covariance = (torch.diag(mean) - torch.outer(mean, mean)) / (a.sum() + 1.0)
    (exact,) = torch.autograd.grad(target @ covariance @ target + (target @ mean) ** 2, a)

    many = concentration.expand(400_000, 3).clone().requires_grad_()
    draws = RoutingPosterior(many).sample()
    torch.testing.assert_close(draws.sum(dim=-1), torch.ones(400_000))
    torch.testing.assert_close(draws.mean(dim=0), mean.detach(), rtol=0, atol=5e-3)
    (gradient,) = torch.autograd.grad(((draws @ target) ** 2).mean(), many)
    torch.testing.assert_close(gradient.sum(dim=0), exact, rtol=0.05, atol=5e-3)


def test_prior_of_another_size_is_refused():
    with pytest.raises(ShapeError, match=r"\[E\] = \[3\] .* got \[2\]"):
        posterior_of([1.0, 1.0, 1.0]).kl_to(torch.ones(2))


def test_one_expert_is_certain():
    posterior = posterior_of([[3.0]])
    assert posterior.mean.item() == 1.0
    assert posterior.margin.item() == 1.0
    assert posterior.mean_entropy.item() == pytest.approx(0.0, abs=1e-6)
    assert posterior.kl_to(torch.tensor([0.01])).item() == pytest.approx(0.0, abs=1e-6)


def test_a_point_has_no_divergence_and_samples_itself():
    point = PointPosterior(torch.tensor([[[0.5, 0.25, 0.25]]]))
    assert point.kl_to(PRIOR).tolist() == [[0.0]]
    assert point.sample() is point.mean
    assert point.margin.item() == 0.25
    assert point.mean_entropy.item() == pytest.approx(1.5 * math.log(2))


def test_entropy_of_a_weight_that_underflowed_has_a_finite_gradient():
    logits = torch.tensor([0.0, -200.0], requires_grad=True)
    entropy = PointPosterior(logits.softmax(dim=-1)).mean_entropy
    (gradient,) = torch.autograd.grad(entropy, logits)
    assert entropy.item() == pytest.approx(0.0, abs=1e-30)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", [RoutingPosterior, PointPosterior])
def test_heads_of_a_token_are_believed_in_as_tokens_are(kind):
    """[B, T, G, E] is as [B, T * G, E] in every closed form."""
    values = torch.rand(2, 5, 4, 3, generator=torch.Generator().manual_seed(0)) + 0.1
    if kind is PointPosterior:
        values = values / values.sum(dim=-1, keepdim=True)
    heads, tokens = kind(values), kind(values.flatten(1, 2))
    for name in SIGNALS if kind is RoutingPosterior else ("mean_entropy", "margin"):
        assert torch.equal(getattr(heads, name).flatten(1, 2), getattr(tokens, name)), name
    assert torch.equal(heads.mean.flatten(1, 2), tokens.mean)
    assert torch.equal(heads.kl_to(PRIOR).flatten(1, 2), tokens.kl_to(PRIOR))
    draws = []
    for posterior in (heads, tokens):
        torch.manual_seed(0)
        draws.append(posterior.sample().view(2, 20, 3))
    assert torch.equal(*draws)
