"""Weighted merge of expert rows, the last step of a routed layer.

    merged[b, t] = sum_e weights[b, t, e] * rows[e][b, t]

An expert of weight zero contributes nothing, whatever its buffer holds: hard routing never writes
the rows of experts that did not run. While the weights have a gradient all rows are read, since a
weight of zero may have one too: that is how a hard route learns of the experts it did not take.
"""

from collections.abc import Sequence

from torch import Tensor

from meta_attention.config import Impl
from meta_attention.errors import ShapeError
from meta_attention.ops.backend import require_reference
from meta_attention.ops.route_merge.reference import route_merge_reference

__all__ = ["route_merge"]


def route_merge(weights: Tensor, rows: Sequence[Tensor], *, impl: Impl = "auto") -> Tensor:
    """Merge expert rows by routing weight.

    Args:
        weights: Routing weights ``[B, T, E]``, float32, non-negative.
        rows: One ``[B, T, D]`` per expert.
        impl: ``"auto"``, ``"reference"`` or ``"triton"``.

    Returns:
        Merged rows ``[B, T, D]`` in the dtype of ``rows``.
    """
    for index, row in enumerate(rows):
        if weights.shape != (*row.shape[:2], len(rows)) or row.shape != rows[0].shape:
            raise ShapeError(
                f"weights {list(weights.shape)} must be [B, T, E] for {len(rows)} expert rows "
                f"[B, T, D], got rows[{index}] {list(row.shape)}"
            )
    require_reference("route_merge", impl)
    return route_merge_reference(weights, rows)
