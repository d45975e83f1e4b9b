"""What a controller thinks of every token: a small network on its hidden state, norm and position.

    logits[t] = W2 gelu(W1 [x[t], |x[t]| / sqrt(D), position[t] / max_positions] + b1) + b2

All in float32 at least, whatever the precision of x. A row depends on its own token only.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from meta_attention.config import Impl
from meta_attention.errors import ShapeError
from meta_attention.ops.backend import choose_impl
from meta_attention.ops.controller_logits.reference import (
    NUM_EXTRA_FEATURES,
    controller_logits_reference,
    token_features,
)

__all__ = ["NUM_EXTRA_FEATURES", "Network", "controller_logits", "token_features"]

# columns of the hidden layer that a program of the kernel can hold
MAX_KERNEL_WIDTH = 256


class Network(NamedTuple):
    """The parameters: of the hidden layer, W wide, and of the output."""

    weight1: Tensor  # [W, D + 2]
    bias1: Tensor  # [W]
    weight2: Tensor  # [E, W]
    bias2: Tensor  # [E]


def controller_logits(
    x: Tensor, position_ids: Tensor, network: Network, *, max_positions: int, impl: Impl = "auto"
) -> Tensor:
    """Logits of a controller.

    Args:
        x: Hidden states ``[B, T, D]``.
        position_ids: Absolute positions ``[B, T]``.
        network: The parameters.
        max_positions: By which positions are divided: the longest length the model is made for.
        impl: ``"auto"``, ``"reference"`` or ``"triton"``.

    Returns:
        ``[B, T, E]`` in float32, or float64 where x is.
    """
    check_shapes(x, position_ids, network)
    chosen = choose_impl("controller_logits", impl, x, compiles=True)
    if chosen == "triton" and (fits_kernel(network) or impl == "triton"):
        from meta_attention.ops.controller_logits.kernel import controller_logits_triton

        return controller_logits_triton(x, position_ids, network, max_positions)
    return controller_logits_reference(x, position_ids, *network, max_positions=max_positions)


def check_shapes(x: Tensor, position_ids: Tensor, network: Network) -> None:
    """Raise unless a network reads such tokens."""
    B, T, D = x.shape
    if network.weight1.shape[1] != D + NUM_EXTRA_FEATURES or position_ids.shape != (B, T):
        raise ShapeError(
            f"x {list(x.shape)} must be [B, T, D] for weights [W, D + {NUM_EXTRA_FEATURES}] = "
            f"{list(network.weight1.shape)} and positions [B, T], got {list(position_ids.shape)}"
        )


def fits_kernel(network: Network) -> bool:
    """Whether a program of the kernel can hold the hidden layer, in the precision it has."""
    width, dtype = network.weight1.shape[0], network.weight1.dtype
    return width <= MAX_KERNEL_WIDTH and dtype == torch.float32
