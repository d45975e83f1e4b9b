"""The host's side of a launch."""

import torch

from meta_attention.ops.launch import apply, ceil_div, launch, next_power_of_2


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.factor = 2
        return x * 2

    @staticmethod
    def backward(ctx, d_out):
        return d_out * ctx.factor


class CountingKernel:
    """As one of Triton's: a launch returns the machine code, which can be launched as well."""

    def __init__(self):
        self.fn = object()
        self.compiled = []
        self.seen = []

    def __getitem__(self, grid):
        def run(*args, **options):
            self.compiled.append(args)
            return {grid: lambda *args: self.seen.append(args)}

        return run


def test_only_launches_that_are_alike_share_machine_code():
    kernel, x = CountingKernel(), torch.zeros(9)

    def run(x, number=3, constant=4, **options):
        launch(kernel, (1, 1, 1), (x, None), (number,), {"C": constant}, **options)

    run(x)
    run(torch.ones(9))
    assert len(kernel.compiled) == 1
    [(first, *rest)] = kernel.seen
    assert first[0] == 1.0
    assert rest == [None, 3, 4]
    for others in ((x, 1), (x, 3, 5), (x[1:],), (x.int(),)):
        run(*others)
        run(*others)
    run(x, num_warps=8)
    assert len(kernel.compiled) == 6
    assert len(kernel.seen) == 5


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
