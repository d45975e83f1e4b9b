"""The controller's network: one definition, one kernel, a row for each token alone."""

import pytest
import torch
from torch import nn

from meta_attention.errors import ShapeError
from meta_attention.ops.controller_logits import Network, controller_logits, token_features
from meta_attention.testing import assert_within_error_budget


def make_inputs(B=2, T=5, D=20, W=8, E=3):
    x = torch.randn(B, T, D, dtype=torch.float64)
    positions = torch.randint(0, 90, (B, T))
    shapes = ((W, D + 2), (W,), (E, W), (E,))
    return x, positions, [torch.randn(shape, dtype=torch.float64) / 3 for shape in shapes]


def run(x, positions, parameters, dtype, impl="reference", device="cpu"):
    inputs = [y.to(device, dtype).requires_grad_() for y in (x, *parameters)]
    logits = controller_logits(
        inputs[0], positions.to(device), Network(*inputs[1:]), max_positions=100, impl=impl
    )
    upstream = torch.linspace(-1, 1, logits.numel(), device=device).view_as(logits).to(dtype)
    names = ("logits", "d_x", "d_weight1", "d_bias1", "d_weight2", "d_bias2")
    gradients = torch.autograd.grad(logits, inputs, upstream)
    return {n: y.detach().cpu() for n, y in zip(names, (logits, *gradients), strict=True)}


def test_reference_is_the_network_of_torch():
    x, positions, parameters = make_inputs()
    network = nn.Sequential(nn.Linear(22, 8), nn.GELU(), nn.Linear(8, 3)).double()
    for own, given in zip(network.parameters(), parameters, strict=True):
        own.data.copy_(given)
    expected = network(token_features(x, positions, max_positions=100))
    actual = controller_logits(x, positions, Network(*parameters), max_positions=100)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "shape",
    [{}, {"T": 1, "B": 9}, {"T": 70, "D": 130, "W": 64}, {"D": 64, "W": 100, "E": 5}, {"E": 1}],
    ids=str,
)
def test_kernel_is_the_reference_gradients_included(shape, kernel_device):
    inputs = make_inputs(**shape)
    exact = run(*inputs, torch.float64)
    plain = run(*inputs, torch.float32)
    ours = run(*inputs, torch.float32, "triton", kernel_device)
    for name, actual in ours.items():
        assert_within_error_budget(name, actual, exact[name], plain[name])


@pytest.mark.gpu
def test_half_precision_states_lose_nothing_more():
    """The network itself stays in float32."""
    x, positions, parameters = make_inputs(T=500, D=1024, W=64)
    x = x.bfloat16()
    network = [p.float() for p in parameters]
    exact = controller_logits(
        x.double(), positions, Network(*(p.double() for p in network)), max_positions=100
    )
    plain = controller_logits(x, positions, Network(*network), max_positions=100)
    on_gpu = Network(*(p.cuda() for p in network))
    ours = controller_logits(x.cuda(), positions.cuda(), on_gpu, max_positions=100, impl="triton")
    assert ours.dtype == torch.float32
    assert_within_error_budget("logits", ours.cpu(), exact, plain)


def test_a_row_does_not_depend_on_the_others(kernel_device):
    """Bit by bit: a decoding step decides as the prefill does."""
    x, positions, parameters = make_inputs(B=1, T=130, D=100, W=16)
    x, positions = x.float().to(kernel_device), positions.to(kernel_device)
    network = Network(*(p.float().to(kernel_device) for p in parameters))

    def logits(rows):
        return controller_logits(
            x[:, rows], positions[:, rows], network, max_positions=100, impl="triton"
        )

    assert torch.equal(logits(slice(77, 78)), logits(slice(None))[:, 77:78])


def test_wrong_shapes_are_named():
    x, positions, parameters = make_inputs()
    with pytest.raises(ShapeError, match=r"\[W, D \+ 2\] = \[8, 22\]"):
        controller_logits(x[..., :9], positions, Network(*parameters), max_positions=100)
