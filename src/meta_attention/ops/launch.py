"""The host's side of a launch, kept short: on short sequences a GPU waits for it."""

from functools import lru_cache
from typing import Any

import torch


def ceil_div(a: int, b: int) -> int:
    # Triton's own is made for its compiler, and takes a third of a launch when called from Python
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``, for n above 0."""
    return 1 << (n - 1).bit_length()


@lru_cache(maxsize=64)
def compute_capability(device: torch.device) -> int:
    """Generation of an NVIDIA GPU, 9 for Hopper; 0 for other makes."""
    return 0 if torch.version.hip else torch.cuda.get_device_capability(device)[0]


class _NoGraph:
    """Stands in for the context of a function whose backward will not be called."""

    def save_for_backward(self, *tensors: object) -> None:
        pass


def apply(function: type[torch.autograd.Function], *args: object) -> Any:
    """``function.apply``, or without gradients its forward alone, which saves half a launch."""
    if torch.is_grad_enabled():
        return function.apply(*args)
    return function.forward(_NoGraph(), *args)
