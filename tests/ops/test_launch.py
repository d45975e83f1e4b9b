"""The host's side of a launch."""

import torch

from meta_attention.ops.launch import apply, ceil_div, next_power_of_2


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.factor = 2
        return x * 2

    @staticmethod
    def backward(ctx, d_out):
        return d_out * ctx.factor


def test_sizes_round_up():
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [next_power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


def test_a_graph_is_recorded_where_gradients_are_wanted():
    x = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(apply(Double, x).sum(), x)
    assert gradient.tolist() == [2.0] * 3
    with torch.no_grad():
        out = apply(Double, x)
    assert out.tolist() == [2.0] * 3
    assert not out.requires_grad
