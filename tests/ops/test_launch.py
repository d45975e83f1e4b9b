"""The host's side of a launch."""

import pytest
import torch
from triton import knobs
from triton.runtime import driver

from meta_attention.ops.launch import apply, ceil_div, kind_of, launch, next_power_of_2


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
    """As one of Triton's: a launch returns the machine code, which can be run as well."""

    arg_names = ("x_ptr", "nothing_ptr", "n", "C")
    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.fn = object()
        self.compiled = []
        self.seen = []

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.compiled.append(args)
            return self

        return launch

    def run(self, *args):
        self.seen.append(args)


class Driver:
    def get_current_stream(self, device):
        return "stream"


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(driver, "_active", Driver())
    return CountingKernel()


def test_only_launches_that_are_alike_share_machine_code(kernel):
    x = torch.zeros(9)

    def run(x, number=3, constant=4, **options):
        launch(kernel, (5, 6, 7), (x, None), (number,), {"C": constant}, **options)

    run(x)
    other = torch.ones(9)
    run(other)
    assert len(kernel.compiled) == 1
    code = ("stream", "function", "metadata", None, None, None)
    assert kernel.seen == [(5, 6, 7, *code, other.data_ptr(), None, 3, 4)]
    for others in ((x, 1), (x, 3, 5), (x[1:],), (x.int(),)):
        run(*others)
        run(*others)
    run(x, num_warps=8)
    assert len(kernel.compiled) == 6
    assert len(kernel.seen) == 5


def test_numbers_that_grow_bring_no_new_machine_code(kernel):
    x = torch.zeros(9)
    for number in (32, 48, 33, 34, 1, 2**31, 2**31 + 1):
        for _ in range(2):
            launch(kernel, (1, 1, 1), (x, None), (number,), {"C": 4}, (kind_of(number),))
    # of 32, 33, 1 and both long ones
    assert [args[2] for args in kernel.compiled] == [32, 33, 1, 2**31, 2**31 + 1]
    # the numbers themselves are what the code gets
    assert [args[-2] for args in kernel.seen][:4] == [32, 48, 48, 33]


def test_a_launch_somebody_watches_goes_through_triton(kernel):
    x, hook = torch.zeros(9), print
    arguments = (kernel, (1, 1, 1), (x, None), (3,), {"C": 4})
    launch(*arguments)
    for hooks in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hooks.add(hook)
        try:
            launch(*arguments)
        finally:
            hooks.remove(hook)
    assert len(kernel.compiled) == 3
    launch(*arguments)
    assert len(kernel.compiled) == 3
    assert len(kernel.seen) == 1


def test_constants_in_another_order_than_the_kernels_are_refused(kernel):
    with pytest.raises(AssertionError):
        launch(kernel, (1, 1, 1), (torch.zeros(9),), (), {"C": 4, "n": 3})


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
