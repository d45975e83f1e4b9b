"""Local attention in blocks: each block of queries sees one span of keys.

    queries   |........|########|........|      one block of n queries
    keys      |...=====|========|=====...|      w before it, and w after it unless causal

Blocks become the batch of PyTorch's fused attention, so no score matrix is held, and the cost is
T * (n + w) scores. Blocks shorter than the window would copy more keys than they use.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from meta_attention.ops.heads import drop_padding

MIN_BLOCK = 64


def local_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, window: int, causal: bool, mask: Tensor | None
) -> Tensor:
    B, T, H, P = query.shape
    # no token is farther away than T - 1
    before = min(window, T - 1)
    after = 0 if causal else before
    block = min(max(MIN_BLOCK, before), T)
    num_blocks = -(-T // block)
    span = before + block + after
    tail = num_blocks * block - T

    def query_blocks(x: Tensor) -> Tensor:  # [B, T, H, P] -> [B * N, H, block, P]
        x = F.pad(x, (0, 0, 0, 0, 0, tail)).view(B, num_blocks, block, H, P)
        return x.flatten(0, 1).transpose(1, 2)

    def key_spans(x: Tensor) -> Tensor:  # [B, T, K, P] -> [B * N, K, span, P]
        x = F.pad(x, (0, 0, 0, 0, before, tail + after))
        return x.unfold(1, span, block).flatten(0, 1).transpose(2, 3)

    if mask is not None:
        mask = mask.bool()
    out = F.scaled_dot_product_attention(
        query_blocks(query),
        key_spans(key),
        key_spans(value),
        attn_mask=_visible(B, T, num_blocks, block, before, after, mask, query.device),
        enable_gqa=True,
    )  # [B * N, H, block, P]
    out = out.transpose(1, 2).reshape(B, num_blocks * block, H, P)[:, :T]
    return drop_padding(out, mask)


def _visible(
    B: int,
    T: int,
    num_blocks: int,
    block: int,
    before: int,
    after: int,
    mask: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Which key of its span each query sees: [B * N, 1, block, span]."""
    span = before + block + after
    i = torch.arange(block, device=device)[:, None]
    j = torch.arange(span, device=device)[None, :] - before  # relative to the block's start
    in_window = (j >= i - before) & (j <= i + after)  # [block, span]

    start = torch.arange(num_blocks, device=device)[:, None] * block
    position = start + j  # [N, span]
    is_token = ((position >= 0) & (position < T)).expand(B, -1, -1)  # [B, N, span]
    if mask is not None:
        is_token = is_token & F.pad(mask, (before, num_blocks * block - T + after)).unfold(
            1, span, block
        )
    # padding sees itself: a row with no key has no softmax
    visible = (in_window & is_token[:, :, None, :]) | (i == j)  # [B, N, block, span]
    return visible.flatten(0, 1).unsqueeze(1)
