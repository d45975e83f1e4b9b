"""Attention with a kernel in place of the softmax, so that keys and values sum into one state.

    out[t] = sum_s (f(query[t]) . f(key[s])) value[s] / sum_s f(query[t]) . f(key[s])

with f(x) = ELU(x) + 1. s runs over the tokens up to t when causal, over all tokens otherwise;
never over padding. Time and memory grow linearly with T.

Three options make it the recurrence of a state-space model: a decay, by which every token shrinks
what came before it; ``normalise=False``, which takes queries and keys as they are and does not
divide; and a skip, by which a row sees its own value as it is:

    state[t] = exp(decay[t]) state[t - 1] + key[t]^T value[t]
    out[t] = query[t] state[t] + skip value[t]
"""

import torch
from torch import Tensor

from meta_attention.config import Impl
from meta_attention.errors import BackendUnavailableError, ConfigError, ShapeError
from meta_attention.ops.backend import choose_impl
from meta_attention.ops.heads import check_heads
from meta_attention.ops.linear_attention.reference import linear_attention_reference
from meta_attention.ops.route_plan import QueryList

__all__ = ["linear_attention"]

# what a tile of the kernel has room for
MAX_KERNEL_HEAD_DIM = 256


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    initial_state: Tensor | None = None,
    decay: Tensor | None = None,
    normalise: bool = True,
    skip: Tensor | None = None,
    queries: QueryList | None = None,
    rows: Tensor | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """Linear attention, of all tokens or of those in a query list.

    Args:
        query: ``[B, T, H, P]``.
        key: ``[B, T, K, P]``; each of the K key-value heads serves H / K query heads.
        value: ``[B, T, K, P]``.
        causal: Token t sees positions up to t only.
        mask: ``[B, T]``, 0 for padding. Boolean, or whole numbers: the documents packed into a
            row, in rising order, which do not see each other.
        initial_state: State ``[B, K, P, P + 1]`` left by the tokens before these.
        decay: ``[B, T, K]``, finite and at most 0: log of what each token leaves of the state
            before it. Padding leaves all. Only with ``causal``.
        normalise: Use features and divide by their sum; False for neither. The last column of the
            state sums the keys either way.
        skip: ``[H]``, what each query head adds of a row's own value. Only causal, and where
            nothing is normalised.
        queries: Tokens whose rows are worked out, None for all. The state is of all tokens.
        rows: Buffer ``[B, T, H, P]`` to write into and return, for experts that share one: rows
            that are not listed stay as they are. Its gradient passes unchanged, so who wrote it
            must use that of their own rows only. Default: zeros.
        impl: ``"auto"``, ``"reference"`` or ``"triton"``.

    Returns:
        Rows ``[B, T, H, P]``, zero for padding where all tokens are rows, and the state after the
        last token, in float32 at least.
    """
    check_heads(query, key, value, mask)
    B, T, _, P = query.shape
    K = key.shape[2]
    if key.shape[1] != T:
        raise ShapeError(
            f"linear attention takes the keys of its queries only, got query {list(query.shape)} "
            f"and key {list(key.shape)}; the tokens before them are in initial_state"
        )
    if mask is not None and mask.dtype != torch.bool and not causal:
        raise ConfigError(
            "linear attention keeps packed documents apart only when causal; pass a boolean mask"
        )
    if decay is not None and not causal:
        raise ConfigError("linear attention has a decay only when causal")
    if skip is not None and (normalise or not causal):
        raise ConfigError("linear attention has a skip only when causal, with normalise=False")
    for name, tensor, shape in (
        ("initial_state", initial_state, (B, K, P, P + 1)),
        ("decay", decay, (B, T, K)),
        ("skip", skip, query.shape[2:3]),
        ("rows", rows, query.shape),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ShapeError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
    if rows is not None and (rows.dtype, rows.stride(-1)) != (query.dtype, 1):
        raise ShapeError(
            f"rows must be {query.dtype} like query, its last axis contiguous, "
            f"got {rows.dtype} of strides {list(rows.stride())}"
        )
    if queries is not None:
        _check_list(queries, query, K)
    # without a list, that is: with one, the reference reads its count
    chosen = choose_impl("linear_attention", impl, query, compiles=queries is None)
    if chosen == "triton" and _has_kernel(impl, causal, P):
        from meta_attention.ops.linear_attention.kernel import linear_attention_triton

        return linear_attention_triton(
            query, key, value, mask, initial_state, decay, normalise, queries, rows, skip
        )
    return linear_attention_reference(
        query, key, value, causal, mask, initial_state, decay, normalise, queries, rows, skip
    )


def _check_list(queries: QueryList, query: Tensor, K: int) -> None:
    """Raise unless the list is of these queries."""
    B, T = query.shape[:2]
    shape = queries.positions.shape
    if shape not in ((B, 1, T), (B, K, T)):
        raise ShapeError(
            f"queries must be a list of B = {B} rows, 1 or {K} groups and T = {T} tokens, "
            f"got positions [B, G, T] = {list(shape)}"
        )
    if queries.positions.device != query.device:
        raise ShapeError(
            f"queries must be on the device of query, {query.device}, "
            f"got {queries.positions.device}"
        )


def _has_kernel(impl: Impl, causal: bool, P: int) -> bool:
    """Whether the kernel does this; raise where it does not and was asked for by name."""
    if causal and P <= MAX_KERNEL_HEAD_DIM:
        return True
    if impl == "triton":
        raise BackendUnavailableError(
            f"linear_attention with impl='triton' is causal and of head widths up to "
            f"{MAX_KERNEL_HEAD_DIM}, got causal={causal} and width {P}; pass impl='auto'"
        )
    return False
