"""Tokens to routes at once: what the posterior would say, and every token for itself."""

import pytest
import torch

from meta_attention.errors import BackendUnavailableError, ShapeError
from meta_attention.ops.controller_logits import Network, controller_logits
from meta_attention.ops.route_tokens import can_run_kernel, route_tokens

# beliefs closer than this may turn over by rounding
MARGIN = 1e-4

# products of these are wrong in Triton's interpreter
BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)

PRIOR = [0.01, 0.86, 0.71, 0.5, 0.3]


def make_inputs(B=2, T=70, D=20, W=8, E=3, G=0, dtype=torch.float32):
    x, positions = torch.randn(B, T, D).to(dtype), torch.randint(0, 90, (B, T))
    outputs = max(G, 1) * E
    # as wide as logits are in a trained controller
    shapes = {(W, D + 2): 2 / D**0.5, (W,): 0.3, (outputs, W): 6 / W**0.5, (outputs,): 0.3}
    network = Network(*(torch.randn(shape) * size for shape, size in shapes.items()))
    return x, positions, network, (G,) if G else ()


def run(x, positions, network, groups, has_prior, impl="reference", device="cpu"):
    num_experts = network.weight2.shape[0] // max(1, *groups, 1)
    prior = torch.tensor(PRIOR[:num_experts]) if has_prior else None
    weights = route_tokens(
        x.to(device),
        positions.to(device),
        Network(*(p.to(device) for p in network)),
        prior_concentration=None if prior is None else prior.to(device, network.weight1.dtype),
        groups=groups,
        max_positions=100,
        impl=impl,
    )
    return weights.cpu()


def belief_of(x, positions, network, groups, has_prior):
    """In float64, by the definition."""
    exact = Network(*(p.double() for p in network))
    logits = controller_logits(x.double(), positions, exact, max_positions=100)
    logits = logits.unflatten(-1, (*groups, -1))
    if not has_prior:
        return logits.softmax(dim=-1)
    prior = torch.tensor(PRIOR[: logits.shape[-1]]).double()
    return torch.distributions.Dirichlet(prior + logits.exp().log1p()).mean


def check(weights, belief):
    """One-hot, and the largest belief wherever one is larger than the others."""
    assert weights.shape == belief.shape
    assert ((weights == 0) | (weights == 1)).all()
    assert (weights.sum(dim=-1) == 1).all()
    top = belief.topk(2, dim=-1).values
    is_clear = top[..., 0] - top[..., 1] > MARGIN
    assert is_clear.float().mean() > 0.98
    expert = belief.argmax(dim=-1)
    assert torch.equal(weights.argmax(dim=-1)[is_clear], expert[is_clear])
    assert expert.unique().numel() > 1, "a test of routes that all tokens share"


SHAPES = [
    {},
    {"T": 1, "B": 150},
    {"T": 131, "D": 130, "W": 64},
    {"D": 33, "W": 100, "E": 5},
    {"G": 2},
    {"T": 37, "D": 77, "W": 17, "E": 2, "G": 3},
]


@pytest.mark.parametrize("has_prior", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_takes_what_is_most_believed_in(shape, has_prior):
    inputs = make_inputs(**shape)
    weights = run(*inputs, has_prior)
    assert weights.dtype == torch.float32
    check(weights, belief_of(*inputs, has_prior))


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16, torch.float16])
@pytest.mark.parametrize("has_prior", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_takes_the_same(shape, has_prior, dtype, kernel_device):
    inputs = make_inputs(**shape, dtype=dtype)
    weights = run(*inputs, has_prior, "triton", kernel_device)
    assert weights.dtype == torch.float32
    check(weights, belief_of(*inputs, has_prior))


@pytest.mark.gpu
@pytest.mark.parametrize("has_prior", [True, False])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_kernel_takes_the_same_at_full_size(width, has_prior):
    inputs = make_inputs(T=3000, D=2048, W=width, dtype=torch.bfloat16)
    check(run(*inputs, has_prior, "triton", "cuda"), belief_of(*inputs, has_prior))


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("shape", [{}, {"T": 300, "D": 200, "W": 64}], ids=str)
def test_routes_are_by_the_logits_of_the_other_kernel(shape, dtype, kernel_device):
    """Also where beliefs are all but equal: to look at the logits does not change a route."""
    x, positions, network, groups = make_inputs(**shape, dtype=dtype)
    # logits next to each other: a difference of rounding would turn routes over
    network = network._replace(weight2=network.weight2[:1] + 1e-6 * network.weight2)
    network = network._replace(bias2=torch.zeros(3))
    weights = run(x, positions, network, groups, False, "triton", kernel_device)
    on_device = Network(*(p.to(kernel_device) for p in network))
    logits = controller_logits(
        x.to(kernel_device),
        positions.to(kernel_device),
        on_device,
        max_positions=100,
        impl="triton",
    ).cpu()
    # a softmax may round two of them to one
    chosen = logits.gather(-1, weights.argmax(dim=-1, keepdim=True)).squeeze(-1)
    assert (logits.amax(dim=-1) - chosen).max() <= 2 * torch.finfo(torch.float32).eps
    assert weights.sum(dim=(0, 1)).min() > 0


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("has_prior", [True, False])
def test_a_route_does_not_depend_on_other_tokens(has_prior, dtype, kernel_device):
    """Bit by bit, all but ties included: a decoding step decides as the prefill does."""
    x, positions, network, groups = make_inputs(B=2, T=150, D=100, W=16, dtype=dtype)
    network = network._replace(weight2=network.weight2[:1] + 1e-6 * network.weight2)

    def route(x, positions):
        return run(x, positions, network, groups, has_prior, "triton", kernel_device)

    whole = route(x, positions)
    steps = [route(x[:, t : t + 1], positions[:, t : t + 1]) for t in range(0, 150, 7)]
    assert torch.equal(torch.cat(steps, dim=1), whole[:, ::7])
    one_row = route(x.flatten(0, 1)[None], positions.flatten()[None])
    assert torch.equal(one_row[0], whole.flatten(0, 1))
    # rows that lie apart
    assert torch.equal(route(x.transpose(0, 1), positions.T), whole.transpose(0, 1))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_of_equals_the_first_is_taken(impl, kernel_device):
    x, positions, network, _ = make_inputs(E=6)
    device = kernel_device if impl == "triton" else "cpu"
    network = network._replace(weight2=torch.zeros(6, 8), bias2=torch.tensor([0, 1, 1, 2, 0, 2.0]))
    weights = run(x, positions, network, (2,), False, impl, device)
    assert (weights.argmax(dim=-1) == torch.tensor([1, 0])).all()
    # evidence that makes up for what the prior lacks is no tie that rounding may decide
    network = network._replace(bias2=torch.full((6,), -100.0))
    weights = run(x, positions, network, (2,), True, impl, device)
    assert (weights.argmax(dim=-1) == 1).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("has_prior", [True, False])
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_token_of_nan_takes_one_expert_too(impl, has_prior, kernel_device):
    """Lists have room for a token once: a route of none or of two would break them."""
    x, positions, network, groups = make_inputs()
    x[0, 3] = float("nan")
    x[1, 5, 2] = float("inf")
    device = kernel_device if impl == "triton" else "cpu"
    weights = run(x, positions, network, groups, has_prior, impl, device)
    assert (weights.sum(dim=-1) == 1).all()
    assert weights[0, 3].tolist() == [1.0, 0.0, 0.0]


def test_what_the_kernel_cannot_hold_is_for_the_reference(kernel_device):
    x, positions, network, groups = make_inputs()
    x = x.to(kernel_device)
    assert can_run_kernel(x, network, impl="triton")
    assert can_run_kernel(x, network) == (kernel_device == "cuda")
    assert not can_run_kernel(x, network, impl="reference")
    double = Network(*(p.double() for p in network))
    wide = make_inputs(W=257)[2]
    many = make_inputs(E=17)[2]
    for refused in (double, wide, many):
        assert not can_run_kernel(x, refused, impl="triton")
    # as many in groups of fewer
    assert can_run_kernel(x, make_inputs(E=5, G=16)[2], groups=(16,), impl="triton")
    for refused in (wide, many):
        with pytest.raises(BackendUnavailableError, match="at most 256 hidden columns and 16"):
            run(x, positions, refused, groups, False, "triton", kernel_device)
        weights = run(x, positions, refused, groups, False, "auto", kernel_device)
        assert (weights.sum(dim=-1) == 1).all()


def test_wrong_shapes_are_named():
    x, positions, network, _ = make_inputs()
    with pytest.raises(ShapeError, match=r"\[W, D \+ 2\] = \[8, 22\]"):
        run(x[..., :9], positions, network, (), False)
    with pytest.raises(ShapeError, match=r"positions \[B, T\], got \[2, 69\]"):
        run(x, positions[:, 1:], network, (), False)
    with pytest.raises(ShapeError, match="a divisor of the network's 3 outputs"):
        run(x, positions, network, (2,), False)
    with pytest.raises(ShapeError, match=r"prior_concentration must be \[E\] = \[3\]"):
        route_tokens(x, positions, network, prior_concentration=torch.ones(2), max_positions=100)
