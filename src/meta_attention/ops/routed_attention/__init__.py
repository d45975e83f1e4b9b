"""Softmax attention for the tokens that are routed to it.

    out[t] = sum_s softmax_s(query[t] . key[s] / sqrt(P)) value[s]      for t in a list

Each list has a window: None for all positions a token may see, or the number of them on each
allowed side. So full and local attention are one function, and run together. Lists with a window
may see the first tokens of a row beside it (attention sinks). Queries outside the lists cost
nothing; keys and values are those of all tokens.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from meta_attention.config import Impl
from meta_attention.errors import ConfigError, ShapeError
from meta_attention.ops.backend import choose_impl
from meta_attention.ops.heads import check_heads, check_scores
from meta_attention.ops.route_plan import RoutePlan, plan_routes
from meta_attention.ops.routed_attention.reference import routed_attention_reference

__all__ = ["attend_all", "routed_attention"]


def routed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: RoutePlan,
    windows: Mapping[int, int | None],
    *,
    causal: bool,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    num_sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Softmax attention over query lists.

    Args:
        query: ``[B, T, H, P]``.
        key: ``[B, S, K, P]``; each of the K key-value heads serves H / K query heads. The queries
            are those of the last T positions.
        value: ``[B, S, K, P]``.
        plan: The query lists.
        windows: Which lists to work on, by their expert's index in ``plan``, and the window of
            each; None: no window.
        causal: Token t sees positions up to t only.
        mask: ``[B, S]``, 0 for padding. Boolean, or whole numbers: the documents packed into a
            row, in rising order, which do not see each other.
        rows: Buffer to write into and return, for experts that share one; only under an exclusive
            plan. Its gradient is passed on as it is. Default: zeros.
        num_sinks: How many first tokens of its row, or of its document, a token of a list with a
            window sees beside those in it; padding before them does not count.
        scale: Factor of the scores; default 1 / sqrt(P).
        softcap: Scores become ``softcap * tanh(score / softcap)``; default: as they are.
        impl: ``"auto"``, ``"reference"`` or ``"triton"``.

    Returns:
        Rows ``[B, T, H, P]`` under an exclusive plan, otherwise ``[N, B, T, H, P]``, one for each
        of ``windows``. Rows of tokens that are not listed are those of ``rows``.
    """
    check_heads(query, key, value, mask)
    check_plan(plan, query, key)
    check_scores(scale, softcap, num_sinks)
    num_lists = plan.counts.shape[2]
    for index, window in windows.items():
        if not 0 <= index < num_lists:
            raise ConfigError(
                f"windows must name lists of the plan, 0 to {num_lists - 1}, got {index}"
            )
        if window is not None and window < 1:
            raise ConfigError(f"window must be >= 1, got {window}")
    if not windows:
        raise ConfigError("windows must name at least one list")
    if rows is not None and (
        not plan.is_exclusive or rows.shape != query.shape or rows.stride(-1) != 1
    ):
        raise ShapeError(
            f"rows must be like query {list(query.shape)}, contiguous along the last axis and "
            f"under an exclusive plan, got {list(rows.shape)} of strides {list(rows.stride())}"
        )
    if all(window is None for window in windows.values()):
        num_sinks = 0  # among all that these see
    arguments = (query, key, value, plan, windows, causal, mask, rows, num_sinks, scale, softcap)
    if choose_impl("routed_attention", impl, query) == "triton":
        from meta_attention.ops.routed_attention.kernel import routed_attention_triton

        return routed_attention_triton(*arguments)
    return routed_attention_reference(*arguments)


def attend_all(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    *,
    causal: bool,
    mask: Tensor | None = None,
    num_sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Softmax attention of every token; padding gets zero rows."""
    B, T = query.shape[:2]
    new_mask = None if mask is None else mask[:, mask.shape[1] - T :]
    everyone = torch.ones(B, T, 1, device=query.device)
    plan = plan_routes(everyone, mask=new_mask, is_exclusive=True, impl=impl)
    return routed_attention(
        query,
        key,
        value,
        plan,
        {0: window},
        causal=causal,
        mask=mask,
        num_sinks=num_sinks,
        scale=scale,
        softcap=softcap,
        impl=impl,
    )


def check_plan(plan: RoutePlan, query: Tensor, key: Tensor) -> None:
    """Raise unless the plan is of these queries."""
    B, T, K, shape = query.shape[0], query.shape[1], key.shape[2], plan.positions.shape
    if shape[0] != B or shape[1] not in (1, K) or shape[3] != T:
        raise ShapeError(
            f"the plan must be of B = {B} rows, T = {T} tokens and 1 or {K} groups, "
            f"got positions [B, G, E, T] = {list(shape)}"
        )
    if plan.positions.device != query.device:
        raise ShapeError(
            f"the plan must be on the device of query, {query.device}, got {plan.positions.device}"
        )
