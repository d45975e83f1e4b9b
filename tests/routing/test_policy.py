"""Soft, hard and gated routes, and the gradients by which hard ones teach.

Shapes: T tokens, E experts, D width. Assignments are one expert for each token.
"""

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meta_attention import BayesianMetaAttentionLayer, MetaAttentionConfig, RoutingPosterior
from meta_attention.controller import (
    PointPosterior,
    Posterior,
    ValuePosterior,
    build_controller,
)
from meta_attention.routing import choose_routes, policy, uncertainty_of

SIGNALS = ("entropy", "mean_entropy", "margin", "mutual_information", "vacuity")
DRAWS = ("mean", "sample", "one_hot")
GRADIENTS = ("all", "chosen")

Loss = Callable[[Tensor], Tensor]


def make_posterior(requires_grad: bool = False) -> RoutingPosterior:
    concentration = torch.rand(2, 5, 3, generator=torch.Generator().manual_seed(0)) + 0.1
    return RoutingPosterior(concentration.requires_grad_(requires_grad))


def test_the_mean_is_deterministic():
    posterior = make_posterior()
    assert torch.equal(choose_routes(posterior, draw="mean").weights, posterior.mean)


def test_samples_differ_and_sum_to_one():
    posterior = make_posterior()
    first, second = (choose_routes(posterior, draw="sample").weights for _ in range(2))
    assert not torch.equal(first, second)
    torch.testing.assert_close(first.sum(dim=-1), torch.ones(2, 5))


def test_expert_is_the_one_of_largest_weight():
    posterior = RoutingPosterior(torch.tensor([[[1.0, 5.0, 2.0], [9.0, 1.0, 1.0]]]))
    routes = choose_routes(posterior)
    assert routes.expert.tolist() == [[1, 0]]
    assert routes.hard.tolist() == [[False, False]]


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("draw", DRAWS)
def test_a_hard_route_takes_one_expert(draw, gradient, requires_grad):
    # beliefs that no float holds exactly, down to 1e-30
    concentration = torch.rand(4, 500, 3, generator=torch.Generator().manual_seed(0))
    concentration[0] = torch.tensor([1e-30, 1.0, 3.0])
    posterior = RoutingPosterior(concentration.requires_grad_(requires_grad))
    routes = choose_routes(posterior, routing="hard", draw=draw, gradient=gradient)
    assert routes.hard.all()
    assert routes.weights.requires_grad == requires_grad
    assert ((routes.weights == 0.0) | (routes.weights == 1.0)).all()
    assert (routes.weights.sum(dim=-1) == 1.0).all()


def test_each_draw_takes_experts_as_often_as_it_says():
    posterior = RoutingPosterior(torch.tensor([[[3.0, 1.0]]]).expand(1, 20_000, 2))
    shares = {
        draw: choose_routes(posterior, routing="hard", draw=draw).weights[..., 0].mean().item()
        for draw in DRAWS
    }
    assert shares["mean"] == 1.0
    # P(first weight > 1/2) under Beta(3, 1) is 7/8
    assert shares["sample"] == pytest.approx(7 / 8, abs=0.01)
    assert shares["one_hot"] == pytest.approx(3 / 4, abs=0.01)


def test_an_expert_without_probability_is_never_drawn():
    probabilities = torch.tensor([0.0, 0.3, 0.7]).expand(20_000, 3)
    assert set(policy.draw_expert(probabilities).tolist()) == {1, 2}


def test_drawn_routes_of_a_prior_free_belief_differ():
    belief = PointPosterior(torch.tensor([[[0.6, 0.4]]]).expand(1, 200, 2))
    assert (choose_routes(belief, routing="hard", draw="sample").expert == 0).all()
    assert choose_routes(belief, routing="hard", draw="one_hot").expert.unique().tolist() == [0, 1]


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("routing", ["soft", "hard", "gated"])
def test_heads_of_a_token_are_routed_as_tokens_are(routing, draw, gradient):
    """Routes of [B, T, G, E] are those of [B, T * G, E], and so is what they teach."""
    values = torch.rand(2, 5, 4, 3, generator=torch.Generator().manual_seed(0)) + 0.1
    threshold = RoutingPosterior(values).mutual_information.median()
    found = []
    for shape in ((2, 5, 4, 3), (2, 20, 3)):
        concentration = values.view(shape).clone().requires_grad_()
        torch.manual_seed(0)
        routes = choose_routes(
            RoutingPosterior(concentration),
            routing=routing,
            draw=draw,
            gradient=gradient,
            threshold=threshold,
        )
        assert routes.weights.shape == shape
        assert routes.hard.shape == routes.expert.shape == shape[:-1]
        (routes.weights * values.view(shape)).sum().backward()
        found.append([routes.weights, routes.hard, routes.expert, concentration.grad])
    if routing == "gated":
        # the heads of one token differ
        assert (found[0][1].any(dim=-1) & ~found[0][1].all(dim=-1)).any()
    for heads, tokens in zip(*found, strict=True):
        assert torch.equal(heads.view_as(tokens), tokens)


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


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_drawn_gated_routes_are_one_hot_where_hard_and_the_mean_elsewhere(gradient):
    posterior = make_posterior(requires_grad=True)
    threshold = posterior.mutual_information.median()
    routes = choose_routes(
        posterior, routing="gated", draw="one_hot", gradient=gradient, threshold=threshold
    )
    assert 0 < routes.hard.sum() < routes.hard.numel()
    hard = routes.weights[routes.hard]
    assert ((hard == 0.0) | (hard == 1.0)).all()
    assert (hard.sum(dim=-1) == 1.0).all()
    assert torch.equal(routes.weights[~routes.hard], posterior.mean[~routes.hard])

    upstream = torch.randn(2, 5, 3)
    (ours,) = torch.autograd.grad(
        (routes.weights * upstream).sum(), posterior.concentration, retain_graph=True
    )
    (soft,) = torch.autograd.grad((posterior.mean * upstream).sum(), posterior.concentration)
    torch.testing.assert_close(ours[~routes.hard], soft[~routes.hard])
    assert (ours[routes.hard] != 0).all()


@pytest.mark.parametrize("signal", SIGNALS)
def test_a_decided_token_is_less_uncertain_than_an_even_one(signal):
    even, decided = (RoutingPosterior(torch.tensor(c)) for c in ([2.0, 2.0, 2.0], [60.0, 2.0, 2.0]))
    assert uncertainty_of(decided, signal) < uncertainty_of(even, signal)


# two tokens of three experts: concentration [1, T, E], rows [T, E, D], in float64
CONCENTRATION = torch.tensor([[[2.0, 1.0, 0.5], [0.3, 0.9, 4.0]]], dtype=torch.float64)
ROWS = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
READ = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
JOIN = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def linear_loss(output: Tensor) -> Tensor:
    """Of outputs [T, D]."""
    return (READ * output).sum()


def affine_loss(output: Tensor) -> Tensor:
    """Affine in the output of each token, but not in both: what one token adds depends on the
    other's route."""
    return 3.0 + linear_loss(output) + output[0] @ JOIN @ output[1]


def quadratic_loss(output: Tensor) -> Tensor:
    return linear_loss(output) + output.square().sum()


def cross_entropy(output: Tensor) -> Tensor:
    return F.cross_entropy(output, torch.tensor([1, 3]))


def output_of(weights: Tensor, rows: Tensor) -> Tensor:
    """[1, T, E], [T, E, D] -> [T, D]."""
    return torch.einsum("te,ted->td", weights[0], rows)


def expected_loss(concentration: Tensor, rows: Tensor, loss: Loss) -> Tensor:
    """Over the routes drawn from the mean, token by token: every assignment, by probability."""
    mean = RoutingPosterior(concentration).mean[0]
    total = torch.zeros((), dtype=torch.float64)
    for assignment in product(range(3), repeat=2):
        probability = mean[0, assignment[0]] * mean[1, assignment[1]]
        total = total + probability * loss(rows[[0, 1], list(assignment)])
    return total


def difference_quotient(rows: Tensor, loss: Loss, step: float = 1e-5) -> Tensor:
    """Gradient of the expected loss in the concentration, without any autograd."""
    gradient = torch.zeros_like(CONCENTRATION)
    for index in product(*map(range, CONCENTRATION.shape)):
        above, below = CONCENTRATION.clone(), CONCENTRATION.clone()
        above[index] += step
        below[index] -= step
        rise = expected_loss(above, rows, loss) - expected_loss(below, rows, loss)
        gradient[index] = rise / (2 * step)
    return gradient


def route_gradient(rows: Tensor, loss: Loss, **kwargs) -> Tensor:
    concentration = CONCENTRATION.clone().requires_grad_()
    routes = choose_routes(RoutingPosterior(concentration), routing="hard", **kwargs)
    (gradient,) = torch.autograd.grad(loss(output_of(routes.weights, rows)), concentration)
    return gradient


def mean_gradient(monkeypatch, rows: Tensor, loss: Loss, gradient: str) -> Tensor:
    """Exact mean of the gradient over drawn routes: each assignment forced, by probability."""
    mean = RoutingPosterior(CONCENTRATION).mean[0]
    total = torch.zeros_like(CONCENTRATION)
    for assignment in product(range(3), repeat=2):
        monkeypatch.setattr(policy, "draw_expert", lambda p, a=assignment: torch.tensor([a]))
        probability = mean[0, assignment[0]] * mean[1, assignment[1]]
        total += probability * route_gradient(rows, loss, draw="one_hot", gradient=gradient)
    return total


@pytest.mark.parametrize("draw", DRAWS)
def test_straight_through_is_the_gradient_of_the_expected_linear_loss_at_every_draw(draw):
    """Of one draw alone: a linear loss has the same slope at every output."""
    ours = route_gradient(ROWS, linear_loss, draw=draw, gradient="all")
    torch.testing.assert_close(ours, difference_quotient(ROWS, linear_loss), rtol=1e-8, atol=1e-9)
    assert (ours != 0).all()


@pytest.mark.parametrize("loss", [linear_loss, affine_loss])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_drawn_routes_teach_the_gradient_of_the_expected_loss(gradient, loss, monkeypatch):
    """Unbiased for a loss affine in each token's output, also where the tokens depend on another.

    The mean runs over all nine assignments of two tokens, so nothing is left to chance.
    """
    ours = mean_gradient(monkeypatch, ROWS, loss, gradient)
    torch.testing.assert_close(ours, difference_quotient(ROWS, loss), rtol=1e-8, atol=1e-9)


def test_a_single_drawn_route_weighs_its_row_by_the_slope_of_its_log_probability(monkeypatch):
    monkeypatch.setattr(policy, "draw_expert", lambda p: torch.tensor([[1, 0]]))
    ours = route_gradient(ROWS, linear_loss, draw="one_hot", gradient="chosen")
    concentration = CONCENTRATION.clone().requires_grad_()
    log_mean = RoutingPosterior(concentration).mean[0].log()
    score = log_mean[0, 1] * (READ[0] @ ROWS[0, 1]) + log_mean[1, 0] * (READ[1] @ ROWS[1, 0])
    torch.testing.assert_close(ours, torch.autograd.grad(score, concentration)[0])


@pytest.mark.parametrize("draw", ["mean", "sample"])
def test_otherwise_a_chosen_route_teaches_the_belief_in_its_expert(draw):
    taken = set()
    for seed in range(5):
        torch.manual_seed(seed)
        ours = route_gradient(ROWS, linear_loss, draw=draw, gradient="chosen")
        torch.manual_seed(seed)
        routes = choose_routes(RoutingPosterior(CONCENTRATION), routing="hard", draw=draw)
        first, second = routes.expert[0].tolist()
        taken.add((first, second))
        concentration = CONCENTRATION.clone().requires_grad_()
        mean = RoutingPosterior(concentration).mean[0]
        value = mean[0, first] * (READ[0] @ ROWS[0, first])
        value = value + mean[1, second] * (READ[1] @ ROWS[1, second])
        torch.testing.assert_close(ours, torch.autograd.grad(value, concentration)[0])
    assert (len(taken) > 1) == (draw == "sample")


@pytest.mark.parametrize("loss", [quadratic_loss, cross_entropy])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_curved_loss_is_taught_to_first_order_in_the_rows(gradient, loss, monkeypatch):
    """As the rows shrink by 10, the gradient does too, and its error by 100."""
    errors, sizes = [], []
    for scale in (1e-3, 1e-4):
        exact = difference_quotient(scale * ROWS, loss, step=1e-3)
        ours = mean_gradient(monkeypatch, scale * ROWS, loss, gradient)
        errors.append((ours - exact).norm().item())
        sizes.append(exact.norm().item())
    assert sizes[0] / sizes[1] == pytest.approx(10.0, rel=0.02)
    assert errors[0] / errors[1] == pytest.approx(100.0, rel=0.02)


@pytest.mark.parametrize(("gradient", "is_exact"), [("all", True), ("chosen", False)])
def test_what_all_experts_agree_on_costs_only_chosen_gradients_their_accuracy(
    gradient, is_exact, monkeypatch
):
    """The error of ``"all"`` is of second order in the differences between rows, not in the rows.

    Rows that differ by 1e-4 of their size leave next to no error in ``"all"``.
    """
    rows = ROWS[:, :1] + 1e-4 * ROWS
    exact = difference_quotient(rows, quadratic_loss, step=1e-3)
    ours = mean_gradient(monkeypatch, rows, quadratic_loss, gradient)
    error = ((ours - exact).norm() / exact.norm()).item()
    assert (error < 1e-3) == is_exact, error


@pytest.mark.parametrize("probability", [1e-3, 1e-6, 1e-30, 0.0])
def test_a_belief_near_zero_has_a_finite_gradient(probability, monkeypatch):
    """Unbiased down to 1e-6 (1 / p of what p itself would get), bounded by 1e6 below."""
    monkeypatch.setattr(policy, "draw_expert", lambda p: torch.zeros(1, 1, dtype=torch.long))
    belief = torch.tensor([[[probability, 1.0 - probability]]], requires_grad=True)
    routes = choose_routes(
        PointPosterior(belief), routing="hard", draw="one_hot", gradient="chosen"
    )
    assert routes.weights.tolist() == [[[1.0, 0.0]]]
    (slope,) = torch.autograd.grad(routes.weights[0, 0, 0], belief)
    assert slope[0, 0, 0].item() == pytest.approx(min(1.0 / max(probability, 1e-30), 1e6))
    assert slope[0, 0, 1] == 0.0


CONTROLLERS = {
    "bayesian": {"uncertainty_signal": "mutual_information"},
    "prior_free": {"uncertainty_signal": "mean_entropy"},
}


@pytest.mark.parametrize("routing", ["hard", "gated"])
@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("granularity", ["token", "kv_head"])
def test_no_part_of_the_controller_is_dead(granularity, draw, gradient, controller, routing):
    """By the output alone, without the KL: every weight matrix and bias, and of the last layer
    every expert's row, of every head that has one."""
    gate = {"uncertainty_threshold": 1e9} if routing == "gated" else {}
    config = MetaAttentionConfig(
        hidden_size=32,
        num_attention_heads=4,
        window_size=5,
        controller_hidden_size=8,
        max_position_embeddings=64,
        routing=routing,
        training_weights=draw,
        route_gradient=gradient,
        route_granularity=granularity,
        controller=controller,
        **CONTROLLERS[controller],
        **gate,
    )
    layer = BayesianMetaAttentionLayer(config).train()
    out = layer(torch.randn(2, 40, 32))
    assert out.routes.hard.all()
    assert ((out.routes.weights == 0.0) | (out.routes.weights == 1.0)).all()
    out.output.square().sum().backward()
    first, last = layer.controller.mlp[0], layer.controller.mlp[2]
    assert (first.weight.grad.abs().sum(dim=1) > 0).all()
    assert (first.weight.grad.abs().sum(dim=0) > 0).all(), "a feature has no gradient"
    assert (first.bias.grad != 0).all()
    assert (last.weight.grad.abs().sum(dim=1) > 0).all(), "an expert's logit has no gradient"
    assert (last.bias.grad != 0).all()
    assert all(p.grad.isfinite().all() for p in layer.controller.parameters())


@pytest.mark.parametrize("routing", ["hard", "gated"])
def test_routes_of_a_prefix_do_not_depend_on_what_follows(routing):
    """No expert has a quota to fill: later tokens that want one take it from nobody."""
    config = MetaAttentionConfig(hidden_size=32, num_attention_heads=4, initializer_range=1.0)
    controller = build_controller(config, (1.0, 0.15, 0.3))
    torch.nn.init.normal_(controller.mlp[2].weight, std=3.0)

    def posterior_of(x: Tensor) -> Posterior:
        return controller(x, torch.arange(x.shape[1]).expand(x.shape[:2]))

    x = torch.randn(2, 60, 32)
    threshold = posterior_of(x).mutual_information.median()
    whole = choose_routes(posterior_of(x), routing=routing, threshold=threshold)
    assert whole.expert[:, :40].unique().numel() > 1
    for later in (100.0 * torch.randn(2, 20, 32), x[:, :1].expand(-1, 20, -1)):
        changed = torch.cat([x[:, :40], later], dim=1)
        routes = choose_routes(posterior_of(changed), routing=routing, threshold=threshold)
        assert not torch.equal(routes.weights[:, 40:], whole.weights[:, 40:])
        assert torch.equal(routes.weights[:, :40], whole.weights[:, :40])
        assert torch.equal(routes.hard[:, :40], whole.hard[:, :40])
    alone = choose_routes(posterior_of(x[:, :40]), routing=routing, threshold=threshold)
    assert torch.equal(alone.expert, whole.expert[:, :40])


def values_of(score: Tensor, scale: float | None = None) -> ValuePosterior:
    """Of experts next to the first of them, which is the dearest."""
    value = ValuePosterior(score, score, scale=scale).value.detach()
    return ValuePosterior((value / 0.02).softmax(dim=-1), score, scale=scale)


@pytest.mark.parametrize("explored", [0.5, 0.125])
def test_a_share_of_the_routes_explores_and_any_expert_is_tried(explored):
    posterior = values_of(torch.tensor([0.0, -0.3, -0.6]).repeat(40, 500, 1))
    routes = choose_routes(posterior, routing="hard", draw="explore", explored_share=explored)
    assert routes.explored is not None
    share = routes.explored.float().mean().item()
    assert share == pytest.approx(explored, abs=0.02)
    tried = F.one_hot(routes.expert[routes.explored], 3).float().mean(dim=0)
    torch.testing.assert_close(tried, torch.full((3,), 1 / 3), atol=0.03, rtol=0)
    assert (routes.expert[~routes.explored] == 0).all()


def test_values_learn_from_routes_that_explore_and_from_no_others():
    value = torch.zeros(2, 50, 3, requires_grad=True)
    routes = choose_routes(values_of(value), routing="hard", draw="explore")
    (routes.weights * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert torch.equal(value.grad.abs().sum(dim=-1) > 0, routes.explored)
    evaluated = choose_routes(values_of(value), routing="hard", draw="mean")
    assert not evaluated.weights.requires_grad


def learn_values_of(adds: Tensor, noise: float, scale: float | None) -> Tensor:
    """Values learnt from what each expert adds to the loss of a token, with noise."""
    torch.manual_seed(0)
    score = torch.zeros(3, requires_grad=True)
    optimiser = torch.optim.Adam([score])
    for step in range(600):
        optimiser.param_groups[0]["lr"] = 0.1 / (1 + step / 30)
        posterior = values_of((score - score[0]).expand(8, 256, 3), scale)
        routes = choose_routes(posterior, routing="hard", draw="explore")
        added = adds + noise * adds.abs() * torch.randn(8, 256, 3)
        assert routes.explored is not None
        task = (routes.weights * added).sum(dim=-1).mean()
        kl = (posterior.kl_to(adds, routes.expert) * routes.explored).mean()
        optimiser.zero_grad()
        (task + kl).backward()
        optimiser.step()
    return values_of((score - score[0]).detach(), scale).value


@pytest.mark.parametrize("scale", [None, 0.1, 0.001])
def test_a_value_becomes_the_expected_gain_of_its_expert(scale):
    adds = torch.tensor([0.0, -0.3, 0.5])
    learnt = learn_values_of(adds, 1.0, scale)
    torch.testing.assert_close(learnt, -adds, atol=0.03, rtol=0)


def test_with_a_scale_a_small_value_is_learnt_as_well_as_a_large_one():
    adds = torch.tensor([0.0, 0.001, 0.5])
    learnt = learn_values_of(adds, 1.0, 1e-4)
    torch.testing.assert_close(learnt, -adds, atol=0, rtol=0.1)


def test_a_route_teaches_of_its_own_expert_and_the_dearest_alone():
    score = torch.tensor([0.0, -0.2, -0.4]).repeat(1, 3, 1).requires_grad_()
    taken = torch.tensor([[0, 1, 2]])
    of_both = torch.tensor([[[0.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
    posterior = values_of(score)
    weighed = torch.tensor([3.0, 1.0, 2.0])  # of an expert more than the dearest: -2 and -1
    gains = torch.tensor([0.0, 2.0, 1.0])
    (found,) = torch.autograd.grad((posterior.lesson_of(taken) * weighed).sum(), score)
    torch.testing.assert_close(found, -gains * of_both)
    (found,) = torch.autograd.grad(posterior.kl_to(weighed, taken).sum(), score)
    torch.testing.assert_close(found, score.detach() * of_both)


def test_a_middle_expert_is_not_judged_by_routes_on_the_last():
    # curved: with x the distance from full attention, the loss is x^2. First-order gains are right
    # in the mean of both ends; at the far end, the middle would seem to be worse than it is
    at = torch.tensor([0.0, 0.5, 1.0])
    torch.manual_seed(0)
    score = torch.zeros(3, requires_grad=True)
    optimiser = torch.optim.Adam([score])
    for step in range(400):
        optimiser.param_groups[0]["lr"] = 0.1 / (1 + step / 20)
        posterior = values_of((score - score[0]).expand(8, 256, 3))
        routes = choose_routes(posterior, routing="hard", draw="explore")
        task = (routes.weights * at).sum(dim=-1).square().mean()
        kl = (posterior.kl_to(at, routes.expert) * routes.explored).mean()
        optimiser.zero_grad()
        (task + kl).backward()
        optimiser.step()
    torch.testing.assert_close((score - score[0]).detach(), -at.square(), atol=0.03, rtol=0)


def test_the_scale_of_values_is_a_limit_of_the_normal_case():
    # large next to all values, it makes their differences count, as without
    score = torch.linspace(-2.0, 2.0, 9).repeat(1, 1, 1)
    scale, prior = 1e4, torch.ones(9)
    scaled, normal = values_of(score / scale, scale), values_of(score)
    torch.testing.assert_close(scaled.value, normal.value)
    torch.testing.assert_close(scale * scaled.kl_to(prior), normal.kl_to(prior))
