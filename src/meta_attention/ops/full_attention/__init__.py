"""Softmax attention over every position a token may see.

    out[t] = sum_s softmax_s(query[t] . key[s] / sqrt(P)) value[s]

s runs over the tokens up to t when causal, over all tokens otherwise; never over padding. Another
``scale`` may stand in place of 1 / sqrt(P), and a soft-cap bounds the scores.
"""

from torch import Tensor

from meta_attention.config import Impl
from meta_attention.ops.backend import choose_impl
from meta_attention.ops.full_attention.reference import full_attention_reference
from meta_attention.ops.heads import check_heads, check_scores
from meta_attention.ops.routed_attention import attend_all

__all__ = ["full_attention"]


def full_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Softmax attention.

    Args:
        query: ``[B, T, H, P]``.
        key: ``[B, S, K, P]``; each of the K key-value heads serves H / K query heads. The queries
            are those of the last T positions.
        value: ``[B, S, K, P]``.
        causal: Token t sees positions up to t only.
        mask: ``[B, S]``, 0 for padding. Boolean, or whole numbers: the documents packed into a
            row, in rising order, which do not see each other.
        scale: Factor of the scores; default 1 / sqrt(P).
        softcap: Scores become ``softcap * tanh(score / softcap)``; default: as they are.
        impl: ``"auto"``, ``"reference"`` or ``"triton"``.

    Returns:
        ``[B, T, H, P]``; rows of padding are zero.
    """
    check_heads(query, key, value, mask)
    check_scores(scale, softcap)
    # "auto" is PyTorch's: its own kernels are the fastest for a list of all tokens. They have no
    # soft-cap
    is_theirs = impl == "auto" and softcap is None
    if not is_theirs and choose_impl("full_attention", impl, query) == "triton":
        return attend_all(
            query,
            key,
            value,
            None,
            causal=causal,
            mask=mask,
            scale=scale,
            softcap=softcap,
            impl="triton",
        )
    return full_attention_reference(query, key, value, causal, mask, scale, softcap)
