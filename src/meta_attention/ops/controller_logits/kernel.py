"""The network in one kernel: hidden states are read once, and only logits are written.

PyTorch would write them out in float32, with their two extra columns, and read them again. The
gradient is PyTorch's, from the reference run again: backward is never what routing waits for.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from meta_attention.ops.controller_logits.reference import controller_logits_reference
from meta_attention.ops.heads import last_contiguous
from meta_attention.ops.launch import (
    apply,
    ceil_div,
    compute_capability,
    launch,
    next_power_of_2,
)


class Tiles(NamedTuple):
    """How the work is cut."""

    tokens: int  # of a program
    channels: int  # of the hidden state at a time
    warps: int
    stages: int


# by what fits in shared memory: a Hopper GPU has room for large tiles of bfloat16
TILES = Tiles(128, 32, 4, 3)
# of 256 tokens, routes of 65,536 would take 70 us in place of 86, those of 32 tokens 33 for 22
LARGE_TILES = Tiles(128, 64, 8, 3)
# columns of the hidden layer that leave room for these
MAX_LARGE_WIDTH = 128


def choose_tiles(x: Tensor, W: int) -> Tiles:
    """For hidden states and W columns. Not by how many tokens: a route must not depend on that."""
    is_hopper = x.is_cuda and compute_capability(x.device) == 9
    is_large = x.dtype == torch.bfloat16 and is_hopper and W <= MAX_LARGE_WIDTH
    return LARGE_TILES if is_large else TILES


# a float32 as a sum of bfloat16
PARTS = 3
SPLIT_BLOCK = 1024


@triton.jit
def split_weights_kernel(weight1_ptr, parts_ptr, D, W, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Weights [W, D + 2] as a sum of bfloat16 [PARTS, W, D], the largest first."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rest = tl.load(weight1_ptr + i // D * (D + 2) + i % D, mask=i < W * D, other=0.0)
    for part in tl.static_range(PARTS):
        rounded = rest.to(tl.bfloat16)
        tl.store(parts_ptr + part * W * D + i, rounded, mask=i < W * D)
        rest -= rounded.to(tl.float32)


@triton.jit
def hidden_layer(
    x_ptr,
    positions_ptr,
    weight1_ptr,
    parts_ptr,  # of the weights, where x is bfloat16; None: they are taken apart here
    bias1_ptr,
    token,
    num_tokens,
    T,
    stride_xb,
    stride_xt,
    stride_pb,
    stride_pt,
    D,
    W,
    max_positions,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Of a block of tokens [TOKENS, BLOCK_W], after its GELU; zero beyond the last column."""
    is_token = token < num_tokens
    b = token // T
    t = token % T
    w = tl.arange(0, BLOCK_W)
    is_column = w < W
    row = x_ptr + b * stride_xb + t * stride_xt

    hidden = tl.zeros([TOKENS, BLOCK_W], tl.float32)
    squares = tl.zeros([TOKENS], tl.float32)
    for start in range(0, D, CHANNELS):
        d = start + tl.arange(0, CHANNELS)
        is_read = is_token[:, None] & (d < D)[None, :]
        is_weight = is_column[None, :] & (d < D)[:, None]
        x = tl.load(row[:, None] + d[None, :], mask=is_read, other=0.0)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        # three products: the precision of float32 on tensor cores
        if PARTS > 0:
            # only the weights have more bits than a factor may have. The least first, and each
            # block by itself: tensor cores drop what is small next to the sum so far
            block = tl.zeros([TOKENS, BLOCK_W], tl.float32)
            if parts_ptr is None:
                at = weight1_ptr + w[None, :] * (D + 2) + d[:, None]
                weight = tl.load(at, mask=is_weight, other=0.0)  # [channels, W]
                largest = weight.to(tl.bfloat16)
                rest = weight - largest.to(tl.float32)
                middle = rest.to(tl.bfloat16)
                least = (rest - middle.to(tl.float32)).to(tl.bfloat16)
                block = tl.dot(x, least, block)
                block = tl.dot(x, middle, block)
                block = tl.dot(x, largest, block)
            else:
                for i in tl.static_range(PARTS):
                    at = parts_ptr + ((PARTS - 1 - i) * W + w[None, :]) * D + d[:, None]
                    block = tl.dot(x, tl.load(at, mask=is_weight, other=0.0), block)
            hidden += block
        else:
            at = weight1_ptr + w[None, :] * (D + 2) + d[:, None]
            weight = tl.load(at, mask=is_weight, other=0.0)  # [channels, W]
            hidden = tl.dot(wide, weight, hidden, input_precision="tf32x3")

    salience = tl.sqrt(squares) / tl.sqrt(D.to(tl.float32))
    position = tl.load(positions_ptr + b * stride_pb + t * stride_pt, mask=is_token, other=0)
    position = position.to(tl.float32) / max_positions
    last = weight1_ptr + w * (D + 2) + D
    hidden += salience[:, None] * tl.load(last, mask=is_column, other=0.0)[None, :]
    hidden += position[:, None] * tl.load(last + 1, mask=is_column, other=0.0)[None, :]
    hidden += tl.load(bias1_ptr + w, mask=is_column, other=0.0)[None, :]
    return 0.5 * hidden * (1.0 + tl.erf(hidden * 0.7071067811865476))


@triton.jit
def output_logit(hidden, weight2_ptr, bias2_ptr, index, W, BLOCK_W: tl.constexpr):
    """Logits [TOKENS] of one output."""
    w = tl.arange(0, BLOCK_W)
    weight = tl.load(weight2_ptr + index * W + w, mask=w < W, other=0.0)
    return tl.sum(hidden * weight[None, :], 1) + tl.load(bias2_ptr + index)


@triton.jit
def controller_logits_kernel(
    x_ptr,
    positions_ptr,
    weight1_ptr,
    parts_ptr,  # of the weights, where x is bfloat16
    bias1_ptr,
    weight2_ptr,
    bias2_ptr,
    logits_ptr,
    num_tokens,
    T,
    stride_xb,
    stride_xt,
    stride_pb,
    stride_pt,
    D,
    W,
    max_positions,
    E,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    hidden = hidden_layer(
        x_ptr,
        positions_ptr,
        weight1_ptr,
        parts_ptr,
        bias1_ptr,
        token,
        num_tokens,
        T,
        stride_xb,
        stride_xt,
        stride_pb,
        stride_pt,
        D,
        W,
        max_positions,
        PARTS,
        TOKENS,
        CHANNELS,
        BLOCK_W,
    )
    for e in range(E):
        logit = output_logit(hidden, weight2_ptr, bias2_ptr, e, W, BLOCK_W)
        tl.store(logits_ptr + token * E + e, logit, mask=token < num_tokens)


class ControllerLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, position_ids, max_positions, *network):
        weight1, bias1, weight2, bias2 = (p.contiguous() for p in network)
        B, T, D = x.shape
        E, W = weight2.shape
        logits = torch.empty(B, T, E, dtype=torch.float32, device=x.device)
        tiles = choose_tiles(x, W)
        parts = None
        if x.dtype == torch.bfloat16:
            parts = torch.empty(PARTS, W, D, dtype=x.dtype, device=x.device)
            grid = (ceil_div(W * D, SPLIT_BLOCK), 1, 1)
            constants = {"PARTS": PARTS, "BLOCK": SPLIT_BLOCK}
            launch(split_weights_kernel, grid, (weight1, parts), (D, W), constants, num_warps=4)
        launch(
            controller_logits_kernel,
            (ceil_div(B * T, tiles.tokens), 1, 1),
            (x, position_ids, weight1, parts, bias1, weight2, bias2, logits),
            (B * T, T, *x.stride()[:2], *position_ids.stride(), D, W, max_positions, E),
            {
                "PARTS": 0 if parts is None else PARTS,
                "TOKENS": tiles.tokens,
                "CHANNELS": tiles.channels,
                "BLOCK_W": max(next_power_of_2(W), 16),
            },
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        ctx.save_for_backward(x, position_ids, *network)
        ctx.max_positions = max_positions
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logits):
        x, position_ids, *network = ctx.saved_tensors
        inputs = [tensor.detach().requires_grad_() for tensor in (x, *network)]
        with torch.enable_grad():
            logits = controller_logits_reference(
                inputs[0], position_ids, *inputs[1:], max_positions=ctx.max_positions
            )
        d_x, *d_network = torch.autograd.grad(logits, inputs, d_logits)
        return d_x, None, None, *d_network


@torch.compiler.disable
def controller_logits_triton(
    x: Tensor, position_ids: Tensor, network: tuple[Tensor, ...], max_positions: int
) -> Tensor:
    return apply(ControllerLogits, last_contiguous(x), position_ids, max_positions, *network)
