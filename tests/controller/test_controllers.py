"""Controllers: one interface, a float32 posterior, nothing that depends on the length."""

import pytest
import torch

from meta_attention import BayesianMetaController, MetaAttentionConfig, PriorFreeController
from meta_attention.controller import (
    PointPosterior,
    RoutingPosterior,
    ValueController,
    ValuePosterior,
    build_controller,
)
from meta_attention.controller.features import token_features

COSTS = [1.0, 0.15, 0.30]
CONTROLLERS = (BayesianMetaController, PriorFreeController)


def make_config(**kwargs) -> MetaAttentionConfig:
    defaults = {"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64}
    return MetaAttentionConfig(**(defaults | kwargs))


def make_inputs(T: int = 5):
    return torch.randn(2, T, 16), torch.arange(T).expand(2, T)


def test_concentration_is_prior_plus_positive_evidence():
    controller = BayesianMetaController(make_config(), COSTS)
    posterior = controller(*make_inputs())
    assert posterior.concentration.shape == (2, 5, 3)
    assert (posterior.concentration > controller.prior_concentration).all()


def test_one_word_of_config_changes_the_controller():
    assert isinstance(build_controller(make_config(), COSTS), BayesianMetaController)
    prior_free = build_controller(make_config(controller="prior_free"), COSTS)
    assert isinstance(prior_free, PriorFreeController)


def test_both_controllers_learn_the_same_parameters():
    bayesian, prior_free = (cls(make_config(), COSTS) for cls in CONTROLLERS)
    shapes = {name: p.shape for name, p in bayesian.named_parameters()}
    assert shapes == {name: p.shape for name, p in prior_free.named_parameters()}
    assert len(shapes) == 4


def test_both_controllers_give_weights_that_sum_to_one():
    for cls, kind in zip(CONTROLLERS, (RoutingPosterior, PointPosterior), strict=True):
        controller = cls(make_config(), COSTS)
        posterior = controller(*make_inputs())
        assert isinstance(posterior, kind)
        torch.testing.assert_close(posterior.mean.sum(dim=-1), torch.ones(2, 5))
        assert posterior.kl_to(controller.prior_concentration).shape == (2, 5)


@pytest.mark.parametrize("granularity", ["token", "kv_head"])
@pytest.mark.parametrize("strength", [1.0, 10.0])
@pytest.mark.parametrize("cls", CONTROLLERS)
def test_a_controller_may_start_on_one_expert(cls, strength, granularity):
    config = make_config(prior_strength=strength, route_granularity=granularity)
    for start in range(3):
        posterior = cls(config, COSTS, start)(*make_inputs())
        mean = posterior.mean
        assert (mean.argmax(dim=-1) == start).all()
        assert mean[..., start].min() > 0.7


def test_the_evidence_to_start_with_is_the_one_that_was_tried():
    controller = BayesianMetaController(make_config(), COSTS, 0)
    with torch.no_grad():
        controller.mlp[-1].weight.zero_()
    evidence = controller(*make_inputs()).concentration - controller.prior_concentration
    expected = torch.tensor([6.0, 0.02, 0.02]).expand_as(evidence)
    torch.testing.assert_close(evidence, expected, rtol=1e-4, atol=1e-4)
    # a controller without a prior starts on the same weights
    other = PriorFreeController(make_config(), COSTS, 0)
    with torch.no_grad():
        other.mlp[-1].weight.zero_()
    torch.testing.assert_close(other(*make_inputs()).mean, controller(*make_inputs()).mean)


@pytest.mark.parametrize("granularity", ["token", "kv_head"])
def test_one_expert_leaves_nothing_to_learn(granularity):
    controller = build_controller(make_config(route_granularity=granularity), [0.3])
    assert list(controller.parameters()) == []
    assert controller(*make_inputs()).mean.tolist() == torch.ones(2, 5, 1).tolist()


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("cls", CONTROLLERS)
def test_every_key_value_head_has_a_posterior_of_its_own(cls, impl, kernel_device):
    """That of a controller for tokens with this head's rows of the last layer."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "impl": impl}
    by_head = cls(make_config(route_granularity="kv_head", **sizes), COSTS).to(kernel_device)
    by_token = cls(make_config(**sizes), COSTS).to(kernel_device)
    assert by_head.mlp[2].weight.shape == (4 * 3, by_head.config.controller_hidden_size)
    x, positions = (tensor.to(kernel_device) for tensor in make_inputs())
    posterior = by_head(x, positions)
    prior = by_head.prior_concentration
    assert posterior.mean.shape == (2, 5, 4, 3)
    assert posterior.kl_to(prior).shape == (2, 5, 4)
    for head in range(4):
        rows = slice(3 * head, 3 * head + 3)
        by_token.mlp[0].load_state_dict(by_head.mlp[0].state_dict())
        by_token.mlp[2].weight.data = by_head.mlp[2].weight.data[rows]
        by_token.mlp[2].bias.data = by_head.mlp[2].bias.data[rows]
        expected = by_token(x, positions)
        torch.testing.assert_close(posterior.mean[:, :, head], expected.mean)
        torch.testing.assert_close(posterior.kl_to(prior)[:, :, head], expected.kl_to(prior))


@pytest.mark.parametrize("cls", CONTROLLERS)
@pytest.mark.parametrize("cast", ["bfloat16", "half"])
def test_casting_the_model_does_not_round_the_controller(cls, cast):
    controller = cls(make_config(), COSTS)
    x, positions = make_inputs()
    before = {name: p.clone() for name, p in controller.state_dict().items()}
    expected = controller(x, positions).mean
    getattr(torch.nn.Sequential(controller), cast)()
    for name, p in controller.state_dict().items():
        torch.testing.assert_close(p, before[name], rtol=0, atol=0)
    torch.testing.assert_close(controller(x, positions).mean, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_posterior_is_float32_under_autocast_and_for_half_inputs(dtype):
    controller = BayesianMetaController(make_config(), COSTS)
    x, positions = make_inputs()
    with torch.autocast("cpu", dtype=dtype):
        autocast = controller(x, positions)
    torch.testing.assert_close(autocast.concentration, controller(x, positions).concentration)
    half = controller(x.to(dtype), positions)
    assert half.concentration.dtype == torch.float32
    assert half.sample().dtype == torch.float32
    assert half.entropy.dtype == torch.float32


def test_position_feature_does_not_depend_on_the_length():
    x, positions = make_inputs(T=20)
    long = token_features(x, positions, max_positions=64)
    short = token_features(x[:, :7], positions[:, :7], max_positions=64)
    torch.testing.assert_close(short, long[:, :7], rtol=0, atol=0)
    torch.testing.assert_close(long[0, :, -1], torch.arange(20) / 64)


def test_norm_feature_is_one_for_a_unit_variance_token():
    x = torch.ones(1, 1, 16)
    assert token_features(x, torch.zeros(1, 1), max_positions=64)[0, 0, -2].item() == 1.0


@pytest.mark.parametrize("granularity", ["token", "kv_head"])
def test_gradient_reaches_every_parameter(granularity):
    for cls in CONTROLLERS:
        controller = cls(make_config(route_granularity=granularity), COSTS)
        posterior = controller(*make_inputs())
        loss = posterior.mean[..., 0].sum() + posterior.kl_to(controller.prior_concentration).sum()
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in controller.parameters())


def make_value_controller(**kwargs) -> ValueController:
    config = make_config(controller="value", routing="hard", num_hidden_layers=2, **kwargs)
    controller = build_controller(config, COSTS)
    assert isinstance(controller, ValueController)
    return controller


def test_a_token_takes_what_is_worth_most_after_its_price():
    controller = make_value_controller(price=0.2)
    posterior = controller(*make_inputs())
    assert isinstance(posterior, ValuePosterior)
    surplus = posterior.value - 0.2 * controller.costs
    assert torch.equal(posterior.mean.argmax(dim=-1), surplus.argmax(dim=-1))
    # what others are worth is next to the dearest
    assert (posterior.value[..., 0] == 0).all()
    assert (posterior.value[..., 1:] != 0).all()


def test_the_dearest_expert_goes_first_as_the_price_rises():
    controller, inputs = make_value_controller(), make_inputs()
    shares = []
    for price in (-100.0, 0.0, 0.05, 100.0):
        controller.price.fill_(price)
        chosen = controller(*inputs).mean.argmax(dim=-1)
        shares.append((chosen == 0).float().mean().item())
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1.0
    assert shares[-1] == 0.0


def test_a_new_value_controller_starts_on_its_expert():
    config = make_config(controller="value", routing="hard")
    controller = build_controller(config, COSTS, start=2)
    controller.mlp[-1].weight.data.zero_()
    assert (controller(*make_inputs()).mean.argmax(dim=-1) == 2).all()


def test_a_value_weighs_as_much_as_its_part_of_the_mean_kl():
    by_head = make_value_controller(route_granularity="kv_head")
    assert by_head.num_shares == 2 * 2  # layers times heads
    assert make_value_controller().num_shares == 2


def test_a_scale_is_shared_by_the_routes_of_a_token():
    controller = make_value_controller(route_granularity="kv_head", value_scale=0.01)
    assert controller.scale == pytest.approx(0.01 / 4)
    posterior = controller(*make_inputs())
    torch.testing.assert_close(posterior.value, controller.scale * posterior.score.sinh())
    # a model may have more layers than have a choice
    controller.set_routed_layers(1)
    assert (controller.num_shares, controller.scale) == (2, pytest.approx(0.01 / 2))
    assert make_value_controller().scale is None


def test_a_new_value_controller_knows_of_no_token_in_particular():
    for scale in (None, 0.01):
        config = make_config(controller="value", routing="hard", value_scale=scale)
        value = build_controller(config, COSTS, start=0)(*make_inputs()).value
        assert (value[..., 1:] < 0).all()
        assert torch.equal(value, value[:1, :1].expand_as(value))


def test_a_value_controller_knows_something_once_it_tells_tokens_apart():
    controller = build_controller(make_config(controller="value", routing="hard"), COSTS, start=0)
    assert not controller.knows
    with torch.no_grad():
        controller.mlp[-1].bias.add_(1.0)
        assert not controller.knows
        controller.mlp[-1].weight[0, 0] = 0.1
    assert controller.knows
