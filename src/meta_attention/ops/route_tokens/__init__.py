"""Tokens to hard routes at once: which expert a controller believes in most.

    belief[t] = softmax(logits[t]), or c / sum(c) with c = prior_concentration + softplus(logits[t])
    weights[t] = 1 for the first expert of largest belief, 0 for the others

The logits are those of ``controller_logits``. It is what hard routing makes of a controller's
posterior in evaluation, for those who do not ask for the posterior. A row depends on its own token
only, and has no gradient.
"""

import math
from typing import Any

import torch
from torch import Tensor

from meta_attention.config import Impl
from meta_attention.errors import BackendUnavailableError, ShapeError
from meta_attention.ops.backend import choose_impl
from meta_attention.ops.controller_logits import (
    MAX_KERNEL_WIDTH,
    Network,
    check_shapes,
    fits_kernel,
)
from meta_attention.ops.route_tokens.reference import route_tokens_reference

__all__ = ["can_run_kernel", "route_tokens"]

# outputs of the network that a program of the kernel can hold at a time: experts of a group
MAX_KERNEL_EXPERTS = 16


def route_tokens(
    x: Tensor,
    position_ids: Tensor,
    network: Network,
    *,
    prior_concentration: Tensor | None,
    groups: tuple[int, ...] = (),
    max_positions: int,
    impl: Impl = "auto",
) -> Tensor:
    """Hard routes by a controller's network.

    Args:
        x: Hidden states ``[B, T, D]``.
        position_ids: Absolute positions ``[B, T]``.
        network: The controller's parameters, with an output for each expert of each group.
        prior_concentration: ``[E]``; None for a controller without a prior.
        groups: ``(G,)`` where each of G key-value heads has a route of its own.
        max_positions: By which positions are divided: the longest length the model is made for.
        impl: ``"auto"``, ``"reference"`` or ``"triton"``.

    Returns:
        ``[B, T, E]`` or ``[B, T, G, E]``, one and zero, in float32, or float64 where x is.
    """
    check_shapes(x, position_ids, network)
    num_outputs, num_groups = network.weight2.shape[0], math.prod(groups)
    num_experts = num_outputs // num_groups
    if len(groups) > 1 or num_outputs % num_groups:
        raise ShapeError(
            f"groups must be () or (G,) with G a divisor of the network's {num_outputs} outputs, "
            f"got {groups}"
        )
    if prior_concentration is not None and prior_concentration.shape != (num_experts,):
        raise ShapeError(
            f"prior_concentration must be [E] = [{num_experts}] to match the network's outputs, "
            f"got {list(prior_concentration.shape)}"
        )
    chosen = choose_impl("route_tokens", impl, x)
    if chosen == "triton" and _fits(network, num_groups):
        from meta_attention.ops.route_tokens.kernel import route_tokens_triton

        if torch.compiler.is_compiling():
            # one node of the graph: a token's route is the same, compiled or not
            return _compiled(
                x, position_ids, *network, prior_concentration, list(groups), max_positions
            )
        return route_tokens_triton(
            x, position_ids, network, prior_concentration, groups, max_positions
        )
    if impl == "triton":
        raise BackendUnavailableError(
            f"route_tokens with impl='triton' needs float32 weights, at most {MAX_KERNEL_WIDTH} "
            f"hidden columns and {MAX_KERNEL_EXPERTS} experts, got {network.weight1.dtype}, "
            f"{network.weight1.shape[0]} and {num_experts}; pass impl='auto'"
        )
    return route_tokens_reference(
        x, position_ids, network, prior_concentration, groups, max_positions
    )


def can_run_kernel(
    x: Tensor, network: Network, *, groups: tuple[int, ...] = (), impl: Impl = "auto"
) -> bool:
    """Whether routes are made in one launch, and not step by step as the reference does."""
    is_triton = choose_impl("route_tokens", impl, x) == "triton"
    return is_triton and _fits(network, math.prod(groups))


def _fits(network: Network, num_groups: int) -> bool:
    return fits_kernel(network) and network.weight2.shape[0] <= MAX_KERNEL_EXPERTS * num_groups


@torch.library.custom_op("meta_attention::route_tokens", mutates_args=())
def _compiled(
    x: Tensor,
    position_ids: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    prior_concentration: Tensor | None,
    groups: list[int],
    max_positions: int,
) -> Tensor:
    """The kernel, as ``torch.compile`` sees it."""
    from meta_attention.ops.route_tokens.kernel import route_tokens_triton

    network = (weight1, bias1, weight2, bias2)
    return route_tokens_triton(
        x, position_ids, network, prior_concentration, tuple(groups), max_positions
    )


@_compiled.register_fake
def _(x: Tensor, *args: Any) -> Tensor:
    *_, weight2, _, _, groups, _ = args
    num_experts = weight2.shape[0] // math.prod(groups)
    return x.new_empty(*x.shape[:2], *groups, num_experts, dtype=torch.float32)
