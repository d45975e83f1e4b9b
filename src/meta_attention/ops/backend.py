"""Which implementation of a tensor function runs. Never changed silently."""

import importlib.util
import os
from typing import Literal, get_args

import torch
from torch import Tensor

from meta_attention.config import Impl
from meta_attention.errors import BackendUnavailableError, ConfigError

# what the kernels compute in; anything else, such as a float64 oracle, is for the reference
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

IMPLS = get_args(Impl)

HAS_TRITON = importlib.util.find_spec("triton") is not None


def choose_impl(
    op: str, impl: Impl, x: Tensor, *, compiles: bool = False
) -> Literal["reference", "triton"]:
    """The implementation that runs on data like ``x``, for a function that has both.

    ``"auto"`` is Triton for CUDA tensors of a precision the kernels have, PyTorch for the rest.

    Args:
        op: Name of the function, for errors.
        impl: What was asked for.
        x: The data.
        compiles: The reference can be traced, so ``torch.compile`` gets it under ``"auto"``: it
            fuses as much by itself, and its graph stays whole. Kernels run outside of graphs.
    """
    _check_name(impl)
    if impl == "reference":
        return "reference"
    if impl == "auto" and compiles and torch.compiler.is_compiling():
        return "reference"
    if impl == "auto":
        # float64 is only ever an oracle
        return "triton" if x.is_cuda and has_triton() and x.dtype in KERNEL_DTYPES else "reference"
    if not has_triton():
        raise BackendUnavailableError(
            f"{op} with impl='triton' needs the package triton; install it or pass impl='auto'"
        )
    if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise BackendUnavailableError(
            f"{op} with impl='triton' needs CUDA tensors, got {x.device.type}; pass impl='auto', "
            "or set TRITON_INTERPRET=1 to run kernels in Triton's interpreter"
        )
    if x.dtype not in KERNEL_DTYPES:
        raise BackendUnavailableError(
            f"{op} with impl='triton' computes in float32, bfloat16 or float16, got {x.dtype}; "
            "pass impl='auto'"
        )
    return "triton"


def has_triton() -> bool:
    return HAS_TRITON


def _check_name(impl: Impl) -> None:
    if impl not in IMPLS:
        raise ConfigError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}")
