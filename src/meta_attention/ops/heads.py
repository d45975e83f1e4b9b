"""The contract shared by the attention functions: queries, keys, values and padding."""

from torch import Tensor

from meta_attention.errors import ShapeError


def check_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Raise unless query ``[B, T, H, P]``, key and value ``[B, T, K, P]`` and mask fit together.

    K, the number of key-value heads, must divide H.
    """
    if query.dim() != 4:
        raise ShapeError(f"query must be [B, T, H, P], got {list(query.shape)}")
    B, T, H, P = query.shape
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dim() != 4 or (*tensor.shape[:2], tensor.shape[3]) != (B, T, P):
            raise ShapeError(
                f"{name} must be [B, T, K, P] = [{B}, {T}, K, {P}] to match query "
                f"{list(query.shape)}, got {list(tensor.shape)}"
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
    check_mask(mask, B, T)


def check_mask(mask: Tensor | None, batch: int, length: int) -> None:
    """Raise unless mask is None or ``[B, T]`` of whole numbers or booleans."""
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


def drop_padding(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the rows ``[B, T, H, P]`` of padding, so that nothing of it reaches a sum."""
    return rows if mask is None else rows.masked_fill(~mask[:, :, None, None], 0.0)
