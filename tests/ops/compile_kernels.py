"""Compile every kernel for a Hopper GPU on a machine without one; run by test_compile.py.

The interpreter runs what the compiler refuses, and cannot run Gluon at all. Here a driver that
launches nothing answers the compiler's questions, and launches stop at the machine code.
"""

from dataclasses import replace

import torch
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class NoDriver:
    """Of a Hopper GPU that is not there."""

    class utils:
        @staticmethod
        def get_device_properties(device):
            return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind):
        return "int"


def compile_only(kernel, grid):
    def launch(*args, **kwargs):
        compiled = kernel.warmup(*args, grid=grid, **kwargs)
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= 232448, kernel.__name__
        print(kernel.__name__)

    return launch


driver.set_active(NoDriver())
JITFunction.__getitem__ = compile_only
GluonJITFunction.__getitem__ = compile_only


def main():
    from meta_attention.ops.controller_logits import MAX_KERNEL_WIDTH, Network
    from meta_attention.ops.controller_logits import kernel as controller_logits
    from meta_attention.ops.depth_attention.kernel import BankedSources
    from meta_attention.ops.linear_attention import hopper as linear_hopper
    from meta_attention.ops.linear_attention.kernel import linear_attention_triton
    from meta_attention.ops.rotary.kernel import rotate_triton
    from meta_attention.ops.route_merge.kernel import route_merge_triton
    from meta_attention.ops.route_plan import RoutePlan
    from meta_attention.ops.route_plan.kernel import plan_routes_triton
    from meta_attention.ops.route_tokens import kernel as route_tokens
    from meta_attention.ops.routed_attention import hopper, kernel
    from meta_attention.ops.routed_decode import LinearStep
    from meta_attention.ops.routed_decode.kernel import routed_decode_triton

    B, T, H, K, P = 2, 512, 8, 4, 128
    half = torch.bfloat16
    heads = [torch.zeros(B, T, n, P, dtype=half, requires_grad=True) for n in (H, K, K)]
    plan = RoutePlan(*plan_routes_triton(torch.zeros(B, T, 1, 3), None), True)
    windows = {0: None, 1: 256}
    can_run, can_run_linear = hopper.can_run, linear_hopper.can_run
    for plain in (True, False):
        # Gluon where the case is plain, Triton where it is not
        hopper.can_run = (lambda *_: True) if plain else can_run
        rows = kernel.routed_attention_triton(*heads, plan, windows, True, None, None)
        torch.autograd.grad(rows.sum(), heads)
        linear_hopper.can_run = (lambda *_: True) if plain else can_run_linear
        rows, _ = linear_attention_triton(
            *heads, None, None, None, True, plan.list_of(2), torch.zeros(B, T, H, P, dtype=half)
        )
        torch.autograd.grad(rows.sum(), heads)
    # sinks and a soft-cap, and sinks after padding
    rows = kernel.routed_attention_triton(*heads, plan, windows, True, None, None, 4, 0.1, 50.0)
    torch.autograd.grad(rows.sum(), heads)
    with torch.no_grad():
        padded = torch.ones(B, T, dtype=torch.bool)
        kernel.routed_attention_triton(*heads, plan, windows, True, padded, None, 4)
    # the other width, lists that share tokens
    hopper.can_run = lambda *_: True
    narrow = [torch.zeros(B, T, n, 64, dtype=half, requires_grad=True) for n in (H, K, K)]
    shared = replace(plan, is_exclusive=False)
    rows = kernel.routed_attention_triton(*narrow, shared, windows, True, None, None)
    torch.autograd.grad(rows.sum(), narrow)
    # with sinks and full attention in one launch
    with torch.no_grad():
        for x in (heads, narrow):
            kernel.routed_attention_triton(*x, plan, windows, True, None, None, 4)
    hopper.can_run = can_run
    linear_hopper.can_run = lambda *_: True
    linear_attention_triton(*narrow, None, None, None, True, None, None)
    linear_hopper.can_run = can_run_linear
    # of a state-space model, with documents
    decay = torch.zeros(B, T, K, requires_grad=True)
    skip = torch.zeros(H, requires_grad=True)
    documents = torch.ones(B, T, dtype=torch.long)
    rows, _ = linear_attention_triton(
        *narrow, documents, None, decay, False, plan.list_of(2), None, skip
    )
    torch.autograd.grad(rows.sum(), [*narrow, decay, skip])

    x = torch.zeros(B, T, 256, dtype=half)
    position_ids = torch.zeros(B, T, dtype=torch.long)
    large, small = controller_logits.LARGE_TILES, controller_logits.TILES
    widest_large = controller_logits.MAX_LARGE_WIDTH
    for W, states in ((64, x), (widest_large, x), (MAX_KERNEL_WIDTH, x), (64, x.float())):
        # as on the GPU
        tiles = large if states.dtype == half and widest_large >= W else small
        controller_logits.choose_tiles = route_tokens.choose_tiles = lambda *_, t=tiles: t
        shapes = ((W, 258), (W,), (6, W), (6,))
        network = Network(*(torch.zeros(shape) for shape in shapes))
        controller_logits.controller_logits_triton(states, position_ids, network, 1024)
        for prior, groups in ((torch.ones(3), (2,)), (None, ())):
            route_tokens.route_tokens_triton(states, position_ids, network, prior, groups, 1024)
    table = torch.zeros(1, T, P, dtype=half)
    rotate_triton(heads[0].detach(), table, table)
    route_merge_triton(torch.zeros(B, T, 3), [x, x, x], False)

    # the inputs of a group of six sublayers, some of which have a part or two to join, and the last
    x = torch.zeros(B, T, 1024, dtype=half, requires_grad=True)
    queries = torch.zeros(7, 1024, requires_grad=True)
    sources = BankedSources(x, 2, 1e-6)
    first, second, third, *_ = sources.attend(queries[:6])
    output, partial = sources.join(second, sources.join(first)[0])
    output, partial = sources.join(third, partial, output)
    sources.add(partial, output)
    (last,) = sources.attend(queries[6:])
    torch.autograd.grad(sources.join(last)[0].sum(), [x, queries])

    query, new = torch.zeros(B, H, P, dtype=half), torch.zeros(B, K, P, dtype=half)
    cache = torch.zeros(B, K, T, P, dtype=half)
    step = LinearStep(2, query, new, new, torch.zeros(B, K, P, P + 1))
    length = torch.zeros(1, dtype=torch.int32)
    weights = torch.zeros(B, 1, 3)
    space = replace(step, decay=torch.zeros(B, K), skip=torch.zeros(H), normalise=False)
    for linear, *scores in ((step, 0, None, None), (step, 4, 0.1, 50.0), (space,), (None,)):
        routed_decode_triton(
            query, cache, cache, weights, windows, length, None, None, linear, *scores
        )


if __name__ == "__main__":
    main()
