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

# tokens worked on at a time: spans of long sequences would leave the cache
SEGMENT = 8192


def local_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, window: int, causal: bool, mask: Tensor | None
) -> Tensor:
    B, T, _, _ = query.shape
    # no token is farther away than T - 1
    before = min(window, T - 1)
    after = 0 if causal else before
    block = min(max(MIN_BLOCK, before), T)
    segment = max(SEGMENT // block, 1) * block

    is_token = torch.ones(1, T, dtype=torch.bool, device=query.device)
    if mask is not None:
        is_token = mask = mask.bool()
    rows = [
        _attend(q, k, v, m.expand(B, -1), before, after, block)
        for q, k, v, m in zip(
            query.split(segment, dim=1),
            _with_context(key, segment, before, after),
            _with_context(value, segment, before, after),
            _with_context(is_token, segment, before, after),
            strict=True,
        )
    ]
    return drop_padding(torch.cat(rows, dim=1), mask)


def _with_context(x: Tensor, segment: int, before: int, after: int) -> list[Tensor]:
    """Segments of [B, T, ...] with what lies before and after each, zeros beyond the ends."""
    # split and concatenate: slices of the whole would each have a gradient of its whole length
    parts = x.split(segment, dim=1)
    beyond_start = x.new_zeros(x.shape[0], before, *x.shape[2:])
    beyond_end = x.new_zeros(x.shape[0], after, *x.shape[2:])
    joined = []
    for index, part in enumerate(parts):
        left = parts[index - 1][:, segment - before :] if index else beyond_start
        # the last segment may be shorter than what is to follow
        right = [following[:, :after] for following in parts[index + 1 : index + 2]]
        right_end = beyond_end[:, sum(r.shape[1] for r in right) :]
        joined.append(torch.cat([left, part, *right, right_end], dim=1))
    return joined


def _attend(
    q: Tensor, k: Tensor, v: Tensor, is_token: Tensor, before: int, after: int, block: int
) -> Tensor:
    """One segment: queries [B, n, H, P], keys and values [B, before + n + after, K, P]."""
    B, n, H, P = q.shape
    tail = -n % block
    span = before + block + after

    def spans(x: Tensor) -> Tensor:  # [B, before + n + after, ...] -> [B * N, ..., span]
        x = F.pad(x, (*(0, 0) * (x.dim() - 2), 0, tail))
        return x.unfold(1, span, block).flatten(0, 1)

    i = torch.arange(block, device=q.device)[:, None]
    j = torch.arange(span, device=q.device)[None, :] - before  # relative to the block's start
    in_window = (j >= i - before) & (j <= i + after)
    # padding sees itself: a row with no key has no softmax
    visible = (in_window & spans(is_token)[:, None, :]) | (i == j)  # [B * N, block, span]

    queries = F.pad(q, (0, 0, 0, 0, 0, tail)).view(-1, block, H, P)  # [B * N, block, H, P]
    rows = F.scaled_dot_product_attention(
        queries.transpose(1, 2),
        spans(k).transpose(2, 3),
        spans(v).transpose(2, 3),
        attn_mask=visible.unsqueeze(1),
        enable_gqa=True,
    )
    return rows.transpose(1, 2).reshape(B, n + tail, H, P)[:, :n]
