"""Weighted merge of expert rows, the last step of a routed layer.

    merged[b, t] = sum_e weights[b, t, e] * rows[e][b, t]

An expert of weight zero contributes nothing, whatever its buffer holds: hard routing never writes
the rows of experts that did not run. While the weights have a gradient all rows are read, since a
weight of zero may have one too: that is how a hard route learns of the experts it did not take.
Where these did not run, ``only_listed`` leaves them out.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meta_attention.config import Impl
from meta_attention.errors import ShapeError
from meta_attention.ops.backend import choose_impl
from meta_attention.ops.route_merge.reference import route_merge_reference

__all__ = ["route_merge", "take_chosen"]


def route_merge(
    weights: Tensor, rows: Sequence[Tensor], *, only_listed: bool = False, impl: Impl = "auto"
) -> Tensor:
    """Merge expert rows by routing weight.

    Args:
        weights: Routing weights ``[B, T, E]``, float32, non-negative.
        rows: One ``[B, T, D]`` per expert.
        only_listed: Rows of weight zero were not computed: they are not read, and have no
            gradient.
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
    reads_all = weights.requires_grad and not only_listed
    if choose_impl("route_merge", impl, rows[0], compiles=True) == "triton":
        from meta_attention.ops.route_merge.kernel import route_merge_triton

        return route_merge_triton(weights, rows, reads_all)
    return route_merge_reference(weights, rows, reads_all)


def take_chosen(weights: Tensor, rows: Tensor) -> Tensor:
    """The merge of a hard route: rows ``[B, T, D]`` that every token's one expert has written.

    A weight of one changes nothing, so this only hands the weights ``[B, T, E]`` their gradient.
    """
    return ChosenRows.apply(weights, rows) if weights.requires_grad else rows


class ChosenRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, rows):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(weights, rows)
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_merged):  # type: ignore[no-untyped-def]
        weights, rows = ctx.saved_tensors
        wide = torch.promote_types(rows.dtype, torch.float32)
        d_weight = torch.linalg.vecdot(d_merged.to(wide), rows.to(wide)).to(weights.dtype)  # [B, T]
        return torch.where(weights > 0, d_weight.unsqueeze(-1), 0.0), d_merged
