"""Softmax attention over a window of neighbours.

    out[t] = sum_s softmax_s(query[t] . key[s] / sqrt(P)) value[s]

s runs over [t - window, t] when causal, over [t - window, t + window] otherwise; never over
padding. Time and memory grow linearly with T.
"""

from torch import Tensor

from meta_attention.config import Impl
from meta_attention.errors import ConfigError
from meta_attention.ops.backend import choose_impl
from meta_attention.ops.heads import check_heads
from meta_attention.ops.local_attention.reference import local_attention_reference
from meta_attention.ops.routed_attention import attend_all

__all__ = ["local_attention"]


def local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int,
    causal: bool,
    mask: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Sliding-window attention.

    Args:
        query: ``[B, T, H, P]``.
        key: ``[B, S, K, P]``; each of the K key-value heads serves H / K query heads. The queries
            are those of the last T positions.
        value: ``[B, S, K, P]``.
        window: Positions seen on each allowed side of a token, beside itself.
        causal: Token t sees positions up to t only.
        mask: ``[B, S]``, 0 for padding. Boolean, or whole numbers: the documents packed into a
            row, in rising order, which do not see each other.
        impl: ``"auto"``, ``"reference"`` or ``"triton"``.

    Returns:
        ``[B, T, H, P]``; rows of padding are zero.
    """
    check_heads(query, key, value, mask)
    if window < 1:
        raise ConfigError(f"window must be >= 1, got {window}")
    if choose_impl("local_attention", impl, query, compiles=True) == "triton":
        return attend_all(query, key, value, window, causal=causal, mask=mask, impl="triton")
    return local_attention_reference(query, key, value, window, causal, mask)
