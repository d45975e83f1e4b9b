"""Routes without a posterior: the same routes, and only where nobody asks for more."""

import pytest
import torch

from meta_attention import MetaAttentionConfig
from meta_attention.controller import BayesianMetaController, build_controller
from meta_attention.routing import can_route_directly, choose_routes, route_directly
from meta_attention.testing.pretrained import randomise_controllers

COSTS = (1.0, 0.15, 0.3)


def make_controller(impl="triton", costs=COSTS, **options):
    options = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2} | options
    controller = build_controller(MetaAttentionConfig(impl=impl, **options), costs).eval()
    randomise_controllers(controller)
    return controller


def make_inputs(device, T=40):
    return torch.randn(2, T, 32).to(device), torch.arange(T, device=device).expand(2, -1)


@pytest.mark.parametrize("granularity", ["token", "kv_head"])
@pytest.mark.parametrize("kind", ["bayesian", "prior_free"])
@torch.no_grad()
def test_routes_are_those_of_the_posterior(kind, granularity, kernel_device):
    controller = make_controller(controller=kind, route_granularity=granularity).to(kernel_device)
    x, position_ids = make_inputs(kernel_device)
    assert can_route_directly(controller, x)
    posterior = controller(x, position_ids)
    assert posterior.margin.min() > 1e-5
    weights = route_directly(controller, x, position_ids)
    expected = choose_routes(posterior, routing="hard").weights
    assert torch.equal(weights, expected)
    assert weights.dtype == expected.dtype
    assert weights.flatten(0, -2).sum(dim=0).min() > 0


@torch.no_grad()
def test_whoever_asks_for_a_posterior_gets_it(kernel_device):
    class Another(BayesianMetaController):
        """Believes something else, or may."""

    controller, (x, _) = make_controller().to(kernel_device), make_inputs(kernel_device)
    assert can_route_directly(controller, x)
    for register in (controller.register_forward_hook, controller.register_forward_pre_hook):
        handle = register(lambda *_: None)
        assert not can_route_directly(controller, x)
        handle.remove()
    controller.train()
    assert not can_route_directly(controller, x)
    controller.eval()
    with torch.enable_grad():
        assert not can_route_directly(controller, x)
    controller.forward = lambda *_: None
    assert not can_route_directly(controller, x)
    del controller.forward
    assert can_route_directly(controller, x)
    assert not can_route_directly(Another(controller.config, COSTS).eval(), x)
    assert not can_route_directly(make_controller(costs=(1.0,)), x)
    # what stands in for a controller need not be one of ours
    assert not can_route_directly(torch.nn.Identity().eval(), x)


@torch.no_grad()
def test_it_takes_a_kernel_that_knows_the_case(kernel_device):
    x, _ = make_inputs(kernel_device)
    is_gpu = kernel_device == "cuda"
    assert can_route_directly(make_controller(impl="auto").to(kernel_device), x) == is_gpu
    assert not can_route_directly(make_controller(impl="reference").to(kernel_device), x)
    wide = make_controller(controller_hidden_size=300).to(kernel_device)
    assert not can_route_directly(wide, x)
    assert not can_route_directly(make_controller().double().to(kernel_device), x)


@torch.no_grad()
def test_a_compiler_sees_one_operation(kernel_device):
    """Of the same routes: a kernel that it cannot look into must not break its graph."""
    controller, (x, position_ids) = make_controller().to(kernel_device), make_inputs(kernel_device)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def call(x):
        assert can_route_directly(controller, x)
        return route_directly(controller, x, position_ids)

    weights = torch.compile(call, backend=keep, fullgraph=True)(x)
    assert torch.equal(weights, call(x))
    (graph,) = graphs
    assert "meta_attention.route_tokens" in graph.code
    torch.library.opcheck(
        torch.ops.meta_attention.route_tokens,
        (x, position_ids, *controller.network, controller.prior_concentration, [], 64),
        test_utils=("test_schema", "test_faketensor"),
    )
