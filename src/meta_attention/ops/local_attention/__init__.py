"""Softmax attention over a window of neighbours.

    out[t] = sum_s softmax_s(query[t] . key[s] / sqrt(P)) value[s]

s runs over [t - window, t] when causal, over [t - window, t + window] otherwise; never over
padding. Time and memory grow linearly with T. With sinks, s also runs over the first tokens of the
row (causal: up to t). Another ``scale`` may stand in place of 1 / sqrt(P), and a soft-cap bounds
the scores.
"""

import torch
from torch import Tensor

from meta_attention.config import Impl
from meta_attention.errors import ConfigError
from meta_attention.ops.backend import choose_impl
from meta_attention.ops.heads import check_heads, check_scores
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
    num_sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
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
        num_sinks: How many first tokens of its row, or of its document, a token sees beside those
            in the window; padding before them does not count.
        scale: Factor of the scores; default 1 / sqrt(P).
        softcap: Scores become ``softcap * tanh(score / softcap)``; default: as they are.
        impl: ``"auto"``, ``"reference"`` or ``"triton"``.

    Returns:
        ``[B, T, H, P]``; rows of padding are zero.
    """
    check_heads(query, key, value, mask)
    if window < 1:
        raise ConfigError(f"window must be >= 1, got {window}")
    check_scores(scale, softcap, num_sinks)
    # blocks of the reference share their sinks, which documents do not: these go list by list, and
    # that cannot be traced
    has_lists = num_sinks > 0 and mask is not None and mask.dtype != torch.bool
    chosen = choose_impl("local_attention", impl, query, compiles=not has_lists)
    if chosen == "triton" or has_lists:
        return attend_all(
            query,
            key,
            value,
            window,
            causal=causal,
            mask=mask,
            num_sinks=num_sinks,
            scale=scale,
            softcap=softcap,
            impl=chosen,
        )
    return local_attention_reference(
        query, key, value, window, causal, mask, num_sinks, scale, softcap
    )
