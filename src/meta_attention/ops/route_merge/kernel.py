"""The merge in Triton: one pass over the rows that have weight, and one for their gradients."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from meta_attention.ops.launch import apply, ceil_div, launch, next_power_of_2


@triton.jit
def route_merge_fwd_kernel(
    weights_ptr,
    rows_ptr,
    merged_ptr,
    num_tokens,
    D,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for e in tl.static_range(E):
        w = tl.load(weights_ptr + t * E + e)
        is_read = (d < D) & (ALL | (w > 0))
        row = tl.load(rows_ptr + (t + e * num_tokens) * D + d, mask=is_read, other=0.0)
        acc += w * row.to(tl.float32)
    tl.store(merged_ptr + t * D + d, acc.to(merged_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def route_merge_bwd_kernel(
    weights_ptr,
    rows_ptr,
    d_merged_ptr,
    d_weights_ptr,
    d_rows_ptr,
    num_tokens,
    D,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    for e in tl.static_range(E):
        w = tl.load(weights_ptr + t * E + e)
        dot = tl.zeros([BLOCK], tl.float32)
        for start in range(0, D, BLOCK):
            d = start + tl.arange(0, BLOCK)
            is_read = (d < D) & (ALL | (w > 0))
            row = tl.load(rows_ptr + (t + e * num_tokens) * D + d, mask=is_read, other=0.0)
            g = tl.load(d_merged_ptr + t * D + d, mask=d < D, other=0.0).to(tl.float32)
            dot += tl.where(is_read, g * row.to(tl.float32), 0.0)
            d_row = (w * g).to(d_rows_ptr.dtype.element_ty)
            tl.store(d_rows_ptr + (t + e * num_tokens) * D + d, d_row, mask=d < D)
        tl.store(d_weights_ptr + t * E + e, tl.sum(dot, 0))


class RouteMerge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, rows, reads_all):
        E, B, T, D = rows.shape
        merged = torch.empty_like(rows[0])
        block = min(next_power_of_2(D), 1024)
        launch(
            route_merge_fwd_kernel,
            (B * T, ceil_div(D, block), 1),
            (weights, rows, merged),
            (B * T, D),
            {"E": E, "BLOCK": block, "ALL": reads_all},
        )
        ctx.save_for_backward(weights, rows)
        ctx.reads_all = reads_all
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx, d_merged):
        weights, rows = ctx.saved_tensors
        E, B, T, D = rows.shape
        d_weights, d_rows = torch.empty_like(weights), torch.empty_like(rows)
        launch(
            route_merge_bwd_kernel,
            (B * T, 1, 1),
            (weights, rows, d_merged.contiguous(), d_weights, d_rows),
            (B * T, D),
            {"E": E, "BLOCK": min(next_power_of_2(D), 1024), "ALL": ctx.reads_all},
        )
        return d_weights, d_rows, None


@torch.compiler.disable
def route_merge_triton(weights: Tensor, rows: Sequence[Tensor], reads_all: bool) -> Tensor:
    # one buffer, so that a kernel need not know how many there are
    return apply(RouteMerge, weights.float().contiguous(), torch.stack(list(rows)), reads_all)
