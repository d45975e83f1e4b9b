"""The contract shared by the attention functions: queries, keys, values and padding."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from meta_attention.errors import ConfigError, ShapeError


def check_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Raise unless query ``[B, T, H, P]``, key and value ``[B, S, K, P]`` and mask fit together.

    The queries belong to the last T of S positions. K, the number of key-value heads, divides H.
    """
    if query.dim() != 4:
        raise ShapeError(f"query must be [B, T, H, P], got {list(query.shape)}")
    B, T, H, P = query.shape
    for name, tensor in (("key", key), ("value", value)):
        shape = tensor.shape
        if len(shape) != 4 or shape[0] != B or shape[1] < T or shape[3] != P:
            raise ShapeError(
                f"{name} must be [B, S, K, P] = [{B}, S >= {T}, K, {P}] to match query "
                f"{list(query.shape)}, got {list(shape)}"
            )
        # a kernel that has run before is given addresses, which say nothing of where they are
        if tensor.device != query.device:
            raise ShapeError(
                f"{name} must be on the device of query, {query.device}, got {tensor.device}"
            )
    if key.shape != value.shape:
        raise ShapeError(
            f"key and value must have one shape, got {list(key.shape)} and {list(value.shape)}"
        )
    if H % key.shape[2]:
        raise ShapeError(
            f"query heads must be a multiple of key-value heads, got query {list(query.shape)} "
            f"and key {list(key.shape)}"
        )
    check_mask(mask, B, key.shape[1])


def check_mask(mask: Tensor | None, batch: int, length: int) -> None:
    """Raise unless mask is None or ``[B, S]`` of whole numbers or booleans."""
    if mask is None:
        return
    if mask.shape != (batch, length):
        raise ShapeError(
            f"mask must be [B, T] = [{batch}, {length}], 1 for tokens and 0 for padding, "
            f"got {list(mask.shape)}"
        )
    if mask.is_floating_point():
        raise ShapeError(
            f"mask must be boolean or whole numbers, 1 for tokens and 0 for padding, "
            f"got {mask.dtype}"
        )


def check_scores(scale: float | None, softcap: float | None, num_sinks: int = 0) -> None:
    """Raise unless scores can be scaled and capped like this, and there can be so many sinks."""
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None and not 0.0 < number < math.inf:
            raise ConfigError(f"{name} must be finite and > 0, or None, got {number}")
    if num_sinks < 0:
        raise ConfigError(f"num_sinks must be >= 0, got {num_sinks}")


def find_sinks(mask: Tensor, num_sinks: int) -> Tensor:
    """Which tokens [B, S] are the first of their row, or of their document: attention sinks.

    Args:
        mask: ``[B, S]``, boolean or document numbers in rising order, 0 for padding.
        num_sinks: How many of each there are.
    """
    is_token = mask != 0
    rank = is_token.cumsum(dim=1)  # from 1
    if mask.dtype != torch.bool:
        # a document goes on through padding until the next one begins
        documents = mask.cummax(dim=1).values
        begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
        rank = rank - torch.where(begins, rank - 1, 0).cummax(dim=1).values
    return is_token & (rank <= num_sinks)


def sees(query_mask: Tensor, key_mask: Tensor) -> Tensor:
    """Which tokens may see which by their marks: not padding, and the same document.

    Args:
        query_mask: ``[..., T]``, boolean or document numbers.
        key_mask: ``[..., S]``, likewise.

    Returns:
        ``[..., T, S]``, or ``[..., 1, S]`` where all tokens are of one document.
    """
    is_token = (key_mask != 0).unsqueeze(-2)
    if key_mask.dtype == torch.bool:
        return is_token
    return is_token & (query_mask.unsqueeze(-1) == key_mask.unsqueeze(-2))


def drop_padding(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the rows ``[B, T, H, P]`` of padding, so that nothing of it reaches a sum."""
    return rows if mask is None else rows.masked_fill((mask == 0)[:, :, None, None], 0.0)


def last_contiguous(x: Tensor) -> Tensor:
    """``x``, or a copy whose last axis lies in one piece, as kernels read it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def as_matrix(x: Tensor) -> tuple[tuple[int, int], tuple[int, int, int]] | None:
    """[B, S, K, P] as a matrix: its shape, and rows per batch and head, columns per head.

    Either heads side by side, as projections leave them, or head after head, as caches do: there
    the rows of one head may be followed by room for more.
    """
    B, S, K, P = x.shape
    stride_b, stride_s, stride_k, stride_p = x.stride()
    if stride_p != 1 or x.data_ptr() % 16 or (P * x.element_size()) % 16:
        return None
    if (stride_b, stride_s, stride_k) == (S * K * P, K * P, P):
        return (B * S, K * P), (S, 0, P)
    if stride_s == P and stride_b % P == 0 and stride_k % P == 0:
        per_batch, per_head = stride_b // P, stride_k // P
        rows = (B - 1) * per_batch + (K - 1) * per_head + S
        return (rows, P), (per_batch, per_head, 0)
    return None


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Fused softmax attention ``[B, H, T, P]`` under an explicit mask ``[B, 1, T, S]``, or none.

    Keys and values are ``[B, K, S, P]``. PyTorch's kernels have no soft-cap: with one, the scores
    are held whole.
    """
    group = query.shape[1] // key.shape[1]
    if group > 1 and (softcap is not None or (query.is_cuda and visible is not None)):
        # CUDA's fused kernels take a mask or grouped heads, not both; scores would be held whole
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        group = 1
    if softcap is not None:
        wide = torch.promote_types(query.dtype, torch.float32)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * factor
        scores = softcap * torch.tanh(scores / softcap)
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        return (scores.softmax(dim=-1) @ value.to(wide)).to(value.dtype)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, scale=scale, enable_gqa=group > 1
    )
