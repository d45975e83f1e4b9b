"""Attention with a kernel in place of the softmax, so that keys and values sum into one state.

    out[t] = sum_s (f(query[t]) . f(key[s])) value[s] / sum_s f(query[t]) . f(key[s])

with f(x) = ELU(x) + 1. s runs over the tokens up to t when causal, over all tokens otherwise;
never over padding. Time and memory grow linearly with T.
"""

from torch import Tensor

from meta_attention.config import Impl
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
    impl: Impl = "auto",
) -> Tensor:
    """Normalised linear attention.

    Args:
        query: ``[B, T, H, P]``.
        key: ``[B, T, K, P]``; each of the K key-value heads serves H / K query heads.
        value: ``[B, T, K, P]``.
        causal: Token t sees positions up to t only.
        mask: ``[B, T]``, 1 for tokens and 0 for padding.
        impl: ``"auto"``, ``"reference"`` or ``"triton"``.

    Returns:
        ``[B, T, H, P]``; rows of padding are zero.
    """
    check_heads(query, key, value, mask)
    require_reference("linear_attention", impl)
    return linear_attention_reference(query, key, value, causal, mask)
