"""Which implementation of a tensor function runs. Never changed silently."""

from typing import get_args

from meta_attention.config import Impl
from meta_attention.errors import BackendUnavailableError, ConfigError


def require_reference(op: str, impl: Impl) -> None:
    """Accept ``impl`` for a function that has only its PyTorch implementation.

    ``"auto"`` takes the fastest implementation there is; one asked for by name runs or raises.
    """
    if impl not in get_args(Impl):
        raise ConfigError(f"impl must be one of {', '.join(get_args(Impl))}, got {impl!r}")
    if impl == "triton":
        raise BackendUnavailableError(
            f"{op} has no Triton kernel in this version; pass impl='auto' or impl='reference'"
        )
