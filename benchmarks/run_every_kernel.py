"""One small run of every kernel, to be watched by NVIDIA's memory checker.

    compute-sanitizer --tool memcheck python benchmarks/run_every_kernel.py

Exits with an error where a result is not finite; what is out of bounds the checker reports.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from meta_attention.ops.controller_logits import Network, controller_logits
from meta_attention.ops.depth_attention import open_sources
from meta_attention.ops.linear_attention import linear_attention
from meta_attention.ops.route_merge import route_merge
from meta_attention.ops.route_plan import plan_routes
from meta_attention.ops.route_tokens import route_tokens
from meta_attention.ops.routed_attention import routed_attention
from meta_attention.ops.routed_decode import LinearStep, routed_decode

B, T, H, K, WINDOW = 2, 333, 4, 2, 50


def run_lists(
    P: int,
    dtype: torch.dtype,
    *,
    is_exclusive: bool,
    masked: bool,
    num_sinks: int = 0,
    softcap: float | None = None,
    forgets: bool = False,
) -> None:
    """Plan, softmax and linear experts, merge, forward and backward."""
    query, key, value = heads = [
        torch.randn(B, T, n, P, device="cuda", dtype=dtype, requires_grad=True) for n in (H, K, K)
    ]
    mask = torch.ones(B, T, dtype=torch.bool, device="cuda")
    mask[0, :9] = False
    if is_exclusive:
        weights = F.one_hot(torch.randint(3, (B, T), device="cuda"), 3).float()
    else:
        weights = torch.rand(B, T, 3, device="cuda").softmax(dim=-1)
    plan = plan_routes(weights, mask=mask if masked else None, is_exclusive=is_exclusive)
    seen = mask if masked else None
    rows = routed_attention(
        query,
        key,
        value,
        plan,
        {0: None, 1: WINDOW},
        causal=True,
        mask=seen,
        num_sinks=num_sinks,
        softcap=softcap,
    )
    softmax = [rows] if is_exclusive else list(rows)
    space: dict[str, Any] = {}
    if forgets:
        space = {"decay": -torch.rand(B, T, K, device="cuda"), "skip": torch.rand(H, device="cuda")}
        space = {name: x.requires_grad_() for name, x in space.items()} | {"normalise": False}
    linear, _ = linear_attention(
        query, key, value, causal=True, mask=seen, queries=plan.list_of(2), **space
    )
    if is_exclusive:
        merged = rows + linear
    else:
        merged = route_merge(weights, [x.flatten(2) for x in (*softmax, linear)], only_listed=True)
    used = [*heads, *(x for x in space.values() if isinstance(x, torch.Tensor))]
    gradients = torch.autograd.grad(merged.float().square().sum(), used)
    for tensor in (merged, *gradients):
        assert tensor.isfinite().all(), (P, dtype, is_exclusive, masked)


def run_decode(
    P: int,
    dtype: torch.dtype,
    *,
    num_sinks: int = 0,
    softcap: float | None = None,
    forgets: bool = False,
) -> None:
    query = torch.randn(B, H, P, device="cuda", dtype=dtype)
    new_key, new_value = torch.randn(2, B, K, P, device="cuda", dtype=dtype)
    key, value = torch.randn(2, B, K, T, P, device="cuda", dtype=dtype)
    state = torch.rand(B, K, P, P + 1, device="cuda")
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.3, 0.5]], device="cuda")
    linear = LinearStep(2, query, new_key, new_value, state)
    if forgets:
        decay, skip = -torch.rand(B, K, device="cuda"), torch.rand(H, device="cuda")
        linear = replace(linear, decay=decay, skip=skip, normalise=False)
    rows = routed_decode(
        query,
        key,
        value,
        weights,
        {0: None, 1: WINDOW},
        length=torch.tensor(T - 5, device="cuda", dtype=torch.int32),
        linear=linear,
        num_sinks=num_sinks,
        softcap=softcap,
    )
    assert rows.isfinite().all(), (P, dtype)


def run_controller(D: int, W: int, dtype: torch.dtype, *, G: int = 1) -> None:
    """The controller's network, and routes by it with a prior and without."""
    x = torch.randn(B, T, D, device="cuda", dtype=dtype)
    position_ids = torch.arange(T, device="cuda").expand(B, -1)
    shapes = ((W, D + 2), (W,), (3 * G, W), (3 * G,))
    network = Network(*(torch.randn(shape, device="cuda") for shape in shapes))
    with torch.no_grad():
        logits = controller_logits(x, position_ids, network, max_positions=T, impl="triton")
    assert logits.isfinite().all(), (D, W, dtype)
    for prior in (None, torch.ones(3, device="cuda")):
        weights = route_tokens(
            x,
            position_ids,
            network,
            prior_concentration=prior,
            groups=(G,) if G > 1 else (),
            max_positions=T,
            impl="triton",
        )
        assert (weights.sum(dim=-1) == 1).all(), (D, W, dtype)


def run_depth(D: int, dtype: torch.dtype) -> None:
    """Two sublayers over a growing number of sources, forward and backward."""
    data = torch.randn(4, B, T, D, device="cuda", dtype=dtype, requires_grad=True)
    queries = torch.randn(4, D, device="cuda", requires_grad=True)
    sources = open_sources(data[0], 3, eps=1e-6)
    sources.add(data[1])
    first, second = sources.attend(queries[:2])
    row, _ = sources.join(first)
    joined, partial = sources.join(second, row, data[2])
    assert partial is not None
    sources.add(partial, data[3])
    (last,) = sources.attend(queries[2:3])
    mixed, _ = sources.join(last)
    gradients = torch.autograd.grad((mixed + joined).float().square().sum(), [data, queries])
    for tensor in (mixed, joined, *gradients):
        assert tensor.isfinite().all(), (D, dtype)


def main() -> None:
    torch.manual_seed(0)
    for is_exclusive in (True, False):
        run_lists(128, torch.bfloat16, is_exclusive=is_exclusive, masked=False)
    run_lists(64, torch.float16, is_exclusive=True, masked=True)
    run_lists(64, torch.bfloat16, is_exclusive=True, masked=False, num_sinks=4)
    run_lists(64, torch.bfloat16, is_exclusive=False, masked=True, num_sinks=4, softcap=50.0)
    run_lists(64, torch.bfloat16, is_exclusive=True, masked=True, forgets=True)
    run_decode(128, torch.bfloat16)
    run_decode(128, torch.bfloat16, forgets=True)
    run_decode(64, torch.bfloat16, num_sinks=4, softcap=50.0)
    run_controller(576, 64, torch.bfloat16)
    run_controller(100, 128, torch.bfloat16, G=2)
    run_controller(77, 256, torch.bfloat16)
    run_controller(77, 50, torch.float32, G=2)
    run_depth(1024, torch.bfloat16)
    run_depth(96, torch.float32)
    torch.cuda.synchronize()
    print("every kernel ran, and every result is finite")


if __name__ == "__main__":
    main()
