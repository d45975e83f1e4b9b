"""Attention as it is written on paper: T x T matrices, one line per formula.

Query [B, T, H, P], key and value [B, T, K, P], mask [B, T] boolean or document numbers. Rows of
padding are zero.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def naive_full_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Softmax over every visible token."""
    T = query.shape[1]
    visible = _visible(_band(T, T, causal), mask)
    return _softmax_attention(query, key, value, visible, mask, scale, softcap)


def naive_local_attention(
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
) -> Tensor:
    """Softmax over the visible tokens at most ``window`` away, and over the first ``num_sinks``."""
    T = query.shape[1]
    visible = _visible(_band(T, window, causal), mask)
    if num_sinks > 0:
        # of the tokens that full attention sees, those before which there are few
        everything = _visible(_band(T, T, causal), mask)
        tokens = _visible(_band(T, T, causal=False), mask)
        visible = visible | (everything & (tokens.cumsum(dim=-1) <= num_sinks))
    return _softmax_attention(query, key, value, visible, mask, scale, softcap)


def naive_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, mask: Tensor | None = None
) -> Tensor:
    """Products of ELU + 1 features in place of the softmax, normalised to sum to one."""
    T = query.shape[1]
    key, value = _one_per_query_head(query, key, value)
    scores = torch.einsum("bthp,bshp->bhts", F.elu(query) + 1.0, F.elu(key) + 1.0)
    scores = scores * _visible(_band(T, T, causal), mask)
    weights = scores / scores.sum(dim=-1, keepdim=True).clamp(min=1e-30)
    return _drop_padding(torch.einsum("bhts,bshp->bthp", weights, value), mask)


def naive_state_space(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    step: Tensor,
    rate: Tensor,
    skip: Tensor,
    mask: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A selective state-space model, token by token; its rows and the state after the last.

    Step sizes [B, T, K], decay rates [K] above 0, skip [H], state [B, K, P, P]. A document starts
    from nothing, padding leaves the state as it is.
    """
    B, T, _, P = query.shape
    K = key.shape[2]
    marks = torch.ones(B, T, dtype=torch.bool) if mask is None else mask
    is_token, before = (marks != 0)[:, :, None, None], marks[:, 0]
    state = value.new_zeros(B, K, P, P) if state is None else state
    key, value = (torch.where(is_token, x, 0.0) for x in (key, value))
    rows = []
    for t in range(T):
        k, v, now = key[:, t, :, :, None], value[:, t, :, None], marks[:, t]
        if marks.dtype != torch.bool:
            goes_on = (now == before) | (now == 0)
            state = torch.where(goes_on[:, None, None, None], state, 0.0)
            before = torch.where(now == 0, before, now)
        left = torch.exp(-step[:, t] * rate)[:, :, None, None]
        updated = left * state + step[:, t, :, None, None] * (k @ v)
        state = torch.where(is_token[:, t, None], updated, state)
        q = query[:, t].unflatten(1, (K, -1))  # [B, K, heads of a group, P]
        rows.append((q @ state + skip.view(K, -1, 1) * v).flatten(1, 2))
    return _drop_padding(torch.stack(rows, dim=1), mask), state


def naive_attention_residuals(
    embedding: Tensor, outputs: list[Tensor], queries: Tensor, *, groups: list[int], eps: float
) -> list[Tensor]:
    """What each sublayer and the final norm read, by the formula of the paper: weights sum to 1.

    Embedding and outputs [B, T, D], queries [L + 1, D]; ``groups`` has the sizes of the groups
    whose outputs are summed, all 1 in the full variant.
    """
    inputs = []
    for at in range(len(outputs) + 1):
        sources, start = [embedding], 0
        for size in groups:
            summed = outputs[start : min(start + size, at)]
            if summed:
                sources.append(torch.stack(summed).sum(dim=0))
            start += size
        values = torch.stack(sources)  # [I, B, T, D]
        keys = values / (values.square().mean(dim=-1, keepdim=True) + eps).sqrt()
        weights = torch.einsum("d,ibtd->ibt", queries[at], keys).softmax(dim=0)
        inputs.append(torch.einsum("ibt,ibtd->btd", weights, values))
    return inputs


def _softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    key, value = _one_per_query_head(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bthp,bshp->bhts", query, key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    # a row with nothing to see is all -inf, and its softmax NaN; such rows are padding
    weights = scores.softmax(dim=-1).nan_to_num(0.0)
    return _drop_padding(torch.einsum("bhts,bshp->bthp", weights, value), mask)


def _band(T: int, window: int, causal: bool) -> Tensor:
    """Which positions each position sees, [T, T]."""
    distance = torch.arange(T)[:, None] - torch.arange(T)[None, :]
    return (distance <= window) & ((distance >= 0) if causal else (distance >= -window))


def _visible(band: Tensor, mask: Tensor | None) -> Tensor:
    """The band without padding, and within each document where the mask numbers them."""
    if mask is None:
        return band
    same = mask[:, None, :, None] == mask[:, None, None, :]
    return band & same & (mask != 0)[:, None, None, :]


def _one_per_query_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    group = query.shape[2] // key.shape[2]
    return key.repeat_interleave(group, dim=2), value.repeat_interleave(group, dim=2)


def _drop_padding(rows: Tensor, mask: Tensor | None) -> Tensor:
    return rows if mask is None else torch.where((mask != 0)[:, :, None, None], rows, 0.0)
