"""Tokens to routes in one launch: hidden states are read once, and only routes are written.

The network is that of ``controller_logits``, product by product in the same order: a token has the
same route whether somebody looks at the controller's logits or not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meta_attention.ops.controller_logits.kernel import (
    PARTS,
    choose_tiles,
    hidden_layer,
    output_logit,
)
from meta_attention.ops.heads import last_contiguous
from meta_attention.ops.launch import ceil_div, launch, next_power_of_2


@triton.jit
def softplus(x):
    """log(1 + exp(x)), precise also where that is next to nothing."""
    small = tl.exp(-tl.abs(x))
    total = 1.0 + small
    # what was lost in the sum is made up for: Triton has no log1p of its own
    is_lost = total == 1.0
    tail = tl.log(total) * (small / tl.where(is_lost, 1.0, total - 1.0))
    return tl.maximum(x, 0.0) + tl.where(is_lost, small, tail)


@triton.jit
def route_tokens_kernel(
    x_ptr,
    positions_ptr,
    weight1_ptr,
    bias1_ptr,
    weight2_ptr,
    bias2_ptr,
    prior_ptr,  # None: beliefs are a softmax
    weights_ptr,
    num_tokens,
    T,
    stride_xb,
    stride_xt,
    stride_pb,
    stride_pt,
    D,
    W,
    max_positions,
    G,
    E: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    hidden = hidden_layer(
        x_ptr,
        positions_ptr,
        weight1_ptr,
        None,
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
    e = tl.arange(0, BLOCK_E)[None, :]
    for g in range(G):
        logits = tl.full([TOKENS, BLOCK_E], float("-inf"), tl.float32)
        for i in tl.static_range(E):
            logit = output_logit(hidden, weight2_ptr, bias2_ptr, g * E + i, W, BLOCK_W)
            logits = tl.where(e == i, logit[:, None], logits)
        # divided as the definition does: what rounds to the same there is equal here
        if prior_ptr is None:
            belief = tl.exp(logits - tl.max(logits, 1)[:, None])
        else:
            belief = tl.load(prior_ptr + e, mask=e < E, other=0.0) + softplus(logits)
            belief = tl.where(e < E, belief, 0.0)
        belief = belief / tl.sum(belief, 1)[:, None]
        # a NaN is the largest, as PyTorch has it: every token takes one expert, whatever it holds
        belief = tl.where(belief != belief, float("inf"), belief)
        belief = tl.where(e < E, belief, -1.0)
        is_largest = belief == tl.max(belief, 1)[:, None]
        first = tl.min(tl.where(is_largest, e, BLOCK_E), 1)
        chosen = tl.where(e == first[:, None], 1.0, 0.0)
        at = weights_ptr + ((token * G + g) * E)[:, None] + e
        tl.store(at, chosen, mask=(token < num_tokens)[:, None] & (e < E))


@torch.compiler.disable
def route_tokens_triton(
    x: Tensor,
    position_ids: Tensor,
    network: tuple[Tensor, Tensor, Tensor, Tensor],
    prior_concentration: Tensor | None,
    groups: tuple[int, ...],
    max_positions: int,
) -> Tensor:
    x = last_contiguous(x)
    weight1, bias1, weight2, bias2 = (p.contiguous() for p in network)
    B, T, D = x.shape
    G = groups[0] if groups else 1
    W, E = weight1.shape[0], weight2.shape[0] // G
    weights = torch.empty(B, T, *groups, E, dtype=torch.float32, device=x.device)
    tiles = choose_tiles(x, W)
    launch(
        route_tokens_kernel,
        (ceil_div(B * T, tiles.tokens), 1, 1),
        (x, position_ids, weight1, bias1, weight2, bias2, prior_concentration, weights),
        (B * T, T, *x.stride()[:2], *position_ids.stride(), D, W, max_positions, G),
        {
            "E": E,
            "PARTS": PARTS if x.dtype == torch.bfloat16 else 0,
            "TOKENS": tiles.tokens,
            "CHANNELS": tiles.channels,
            "BLOCK_W": max(next_power_of_2(W), 16),
            "BLOCK_E": next_power_of_2(E),
        },
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return weights
