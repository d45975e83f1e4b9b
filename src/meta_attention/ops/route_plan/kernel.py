"""The plan in one kernel: a counting sort, each program placing one block of positions.

A program counts the listed tokens before its block itself. That re-reads weights, at most 16 bytes
a token, from the cache; it saves a second launch and any order among the programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meta_attention.ops.launch import ceil_div, launch
from meta_attention.ops.route_plan.reference import RANK_BLOCK

BLOCK = 1024
# tokens read at a time where they are only counted: each turn waits for memory once
COUNTED = 4096


@triton.jit
def route_plan_kernel(
    weights_ptr,
    mask_ptr,
    positions_ptr,
    counts_ptr,
    ranks_ptr,
    T,
    G,
    num_ranks,
    stride_wb,
    stride_wt,
    stride_wg,
    stride_we,
    E: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTED: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    e = tl.program_id(1) % E
    g = tl.program_id(1) // E
    b = tl.program_id(2).to(tl.int64)
    offset = tl.arange(0, BLOCK)
    weights_ptr += b * stride_wb + g * stride_wg + e * stride_we
    list_index = (b * G + g) * E + e

    before = tl.zeros([COUNTED], tl.int32)
    for start in range(0, block * BLOCK, COUNTED):
        t = (start + tl.arange(0, COUNTED)).to(tl.int64)
        is_before = t < block * BLOCK
        listed = tl.load(weights_ptr + t * stride_wt, mask=is_before, other=0.0) > 0
        if HAS_MASK:
            listed = listed & (tl.load(mask_ptr + b * T + t, mask=is_before, other=0) != 0)
        before += listed.to(tl.int32)
    rank = tl.sum(before)

    t = (block * BLOCK + offset).to(tl.int64)
    listed = tl.load(weights_ptr + t * stride_wt, mask=t < T, other=0.0) > 0
    if HAS_MASK:
        listed = listed & (tl.load(mask_ptr + b * T + t, mask=t < T, other=0) != 0)
    number = listed.to(tl.int32)
    slot = rank + tl.cumsum(number, 0) - number  # how many of the list come before each position
    tl.store(positions_ptr + list_index * T + slot, t.to(tl.int32), mask=listed)
    starts_rank = (t % RANK_BLOCK == 0) & (t // RANK_BLOCK < num_ranks - 1)
    tl.store(ranks_ptr + list_index * num_ranks + t // RANK_BLOCK, slot, mask=starts_rank)
    if (block + 1) * BLOCK >= T:
        count = rank + tl.sum(number)
        tl.store(counts_ptr + list_index, count)
        tl.store(ranks_ptr + list_index * num_ranks + num_ranks - 1, count)


@torch.compiler.disable
def plan_routes_triton(weights: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    B, T, G, E = weights.shape
    num_ranks = ceil_div(T, RANK_BLOCK) + 1
    positions = torch.empty(B, G, E, T, dtype=torch.int32, device=weights.device)
    counts = torch.empty(B, G, E, dtype=torch.int32, device=weights.device)
    ranks = torch.empty(B, G, E, num_ranks, dtype=torch.int32, device=weights.device)
    if mask is not None:
        # a boolean is no pointer type of Triton's
        mask = mask.to(torch.int8 if mask.dtype == torch.bool else mask.dtype).contiguous()
    launch(
        route_plan_kernel,
        (ceil_div(T, BLOCK), G * E, B),
        (weights, mask, positions, counts, ranks),
        (T, G, num_ranks, *weights.stride()),
        {
            "E": E,
            "HAS_MASK": mask is not None,
            "BLOCK": BLOCK,
            "COUNTED": COUNTED,
            "RANK_BLOCK": RANK_BLOCK,
        },
        num_warps=4,
    )
    return positions, counts, ranks
