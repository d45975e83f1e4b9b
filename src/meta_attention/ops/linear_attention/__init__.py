"""Attention with a kernel in place of the softmax, so that keys and values sum into one state.

    out[t] = sum_s (f(query[t]) . f(key[s])) value[s] / sum_s f(query[t]) . f(key[s])

with f(x) = ELU(x) + 1. s runs over the tokens up to t when causal, over all tokens otherwise;
never over padding. Time and memory grow linearly with T.
"""

import torch
from torch import Tensor

from meta_attention.config import Impl
from meta_attention.errors import ConfigError, ShapeError
from meta_attention.ops.backend import require_reference
from meta_attention.ops.heads import check_heads
from meta_attention.ops.linear_attention.reference import linear_attention_reference

__all__ = ["linear_attention"]


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    initial_state: Tensor | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """Normalised linear attention.

    Args:
        query: ``[B, T, H, P]``.
        key: ``[B, T, K, P]``; each of the K key-value heads serves H / K query heads.
        value: ``[B, T, K, P]``.
        causal: Token t sees positions up to t only.
        mask: ``[B, T]``, 0 for padding. Boolean, or whole numbers: the documents packed into a
            row, in rising order, which do not see each other.
        initial_state: State ``[B, K, P, P + 1]`` left by the tokens before these.
        impl: ``"auto"``, ``"reference"`` or ``"triton"``.

    Returns:
        Rows ``[B, T, H, P]``, zero for padding, and the state after the last token, in float32 at
        least.
    """
    check_heads(query, key, value, mask)
    if query.shape[1] != key.shape[1]:
        raise ShapeError(
            f"linear attention takes the keys of its queries only, got query {list(query.shape)} "
            f"and key {list(key.shape)}; the tokens before them are in initial_state"
        )
    if mask is not None and mask.dtype != torch.bool and not causal:
        raise ConfigError(
            "linear attention keeps packed documents apart only when causal; pass a boolean mask"
        )
    require_reference("linear_attention", impl)
    return linear_attention_reference(query, key, value, causal, mask, initial_state)
