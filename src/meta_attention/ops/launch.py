"""The host's side of a launch, kept short: on short sequences a GPU waits for it."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

# launches that are remembered, of all shapes together
MAX_KNOWN = 4096

_compiled: dict[tuple[object, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Any, ...],
    numbers: tuple[int | float, ...],
    constants: Mapping[str, Any],
    alike: tuple[object, ...] | None = None,
    /,
    **options: int,
) -> None:
    """``kernel[grid](*tensors, *numbers, **constants, **options)``, quicker the second time.

    To find the machine code, Triton looks at every argument of every launch, which takes longer
    than the launch. A launch like an earlier one takes the code of that.

    Args:
        kernel: With its parameters in the order of these arguments.
        grid: How many programs along each axis.
        tensors: Tensors, at least one; None; and descriptors whose tiles and precision follow from
            the rest. The launch is on their device, which need not be the current one.
        numbers: Sizes and strides.
        constants: What the code is compiled for, in the order of the kernel's parameters.
        alike: What the code depends on of the numbers, where they differ from launch to launch:
            see :func:`kind_of`. Default: all of them.
        options: ``num_warps`` and the like.
    """
    # addresses in place of tensors: the driver is asked about every tensor, and takes its time
    addresses: list[Any] = []
    like: list[object] = []
    for x in tensors:
        # first, as a look at its type takes longer
        if x is None:
            addresses.append(x)
            like.append(x)
        elif isinstance(x, Tensor):
            address = x.data_ptr()
            addresses.append(address)
            like += (x.dtype, address % 16)
            one = x
        else:
            addresses.append(x)
            like.append(False)
    device = one.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, tensors, numbers, constants, alike, **options)
        return
    constant = tuple(constants.values())
    known = numbers if alike is None else alike
    key = (kernel.fn, device, *like, *known, *constant, *options.values())
    compiled = _compiled.get(key)
    if compiled is not None and not _is_watched():
        stream = driver.active.get_current_stream(device)
        code = (stream, compiled.function, compiled.packed_metadata)
        # without what only hooks read
        compiled.run(*grid, *code, None, None, None, *addresses, *numbers, *constant)
        return
    # the code gets its arguments in this order, whatever their names
    assert not constants or tuple(constants) == tuple(kernel.arg_names[-len(constants) :])
    compiled = kernel[grid](*tensors, *numbers, **constants, **options)
    # on AMD's GPUs the code also depends on how large the memory behind a tensor is
    if compiled is not None and not torch.version.hip:
        if len(_compiled) >= MAX_KNOWN:
            _compiled.clear()
        _compiled[key] = compiled


def _is_watched() -> bool:
    """Whether a profiler wants to hear of every launch."""
    runtime = knobs.runtime
    return _has_calls(runtime.launch_enter_hook) or _has_calls(runtime.launch_exit_hook)


def _has_calls(hook: Any) -> bool:
    # a chain of hooks, or what somebody has put in its place
    return hook is not None and bool(getattr(hook, "calls", True))


def kind_of(number: int) -> int:
    """What Triton compiles for: one, a multiple of 16, and whether it takes 64 bits."""
    is_long = not -(2**31) <= number < 2**31
    return 1 if number == 1 else 2 * (number % 16 == 0) + 4 * is_long


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
