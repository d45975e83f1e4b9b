"""Local attention in blocks: each block of queries sees one span of keys.

    queries   |........|########|........|      one block of n queries
    keys      |...=====|========|=====...|      w before it, and w after it unless causal

Blocks become the batch of PyTorch's fused attention, so no score matrix is held, and the cost is
T * (n + w) scores. Blocks shorter than the window would copy more keys than they use. Sinks stand
before the keys of every block, for the queries that do not have them in their window.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meta_attention.ops.heads import drop_padding, masked_attention, sees

MIN_BLOCK = 64

# tokens worked on at a time: spans of long sequences would leave the cache
SEGMENT = 8192


class Sinks(NamedTuple):
    """The first tokens of every row."""

    key: Tensor  # [B, n, K, P]
    value: Tensor  # [B, n, K, P]
    position: Tensor  # [B, n] among the keys
    is_token: Tensor  # [B, n], false where a row has fewer


def local_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    causal: bool,
    mask: Tensor | None,
    num_sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """``mask`` is boolean where there are sinks."""
    B, T, _, _ = query.shape
    S = key.shape[1]
    # no token is farther away than S - 1
    before = min(window, S - 1)
    after = 0 if causal else before
    block = min(max(MIN_BLOCK, before), T)
    segment = max(SEGMENT // block, 1) * block

    marks = mask
    if marks is None:
        marks = torch.ones(1, S, dtype=torch.bool, device=query.device)
    sinks = _first_tokens(key, value, mask, num_sinks) if num_sinks > 0 else None
    rows = [
        _attend(
            q, k, v, m.expand(B, -1), before, after, block, first, causal, sinks, scale, softcap
        )
        for first, q, k, v, m in zip(
            range(S - T, S, segment),
            query.split(segment, dim=1),
            _with_context(key, T, segment, before, after),
            _with_context(value, T, segment, before, after),
            _with_context(marks, T, segment, before, after),
            strict=True,
        )
    ]
    return drop_padding(torch.cat(rows, dim=1), None if mask is None else mask[:, S - T :])


def _first_tokens(key: Tensor, value: Tensor, mask: Tensor | None, num_sinks: int) -> Sinks:
    B, S, K, P = key.shape
    n = min(num_sinks, S)
    if mask is None:
        position = torch.arange(n, device=key.device).expand(B, n)
        return Sinks(
            key[:, :n], value[:, :n], position, torch.ones_like(position, dtype=torch.bool)
        )
    # tokens before padding, each in order
    position = mask.byte().argsort(dim=1, descending=True, stable=True)[:, :n]
    index = position[:, :, None, None].expand(B, n, K, P)
    return Sinks(key.gather(1, index), value.gather(1, index), position, mask.gather(1, position))


def _with_context(x: Tensor, T: int, segment: int, before: int, after: int) -> list[Tensor]:
    """Segments of the last T of [B, S, ...], with ``before`` and ``after`` neighbours of each.

    Beyond the ends there are zeros.
    """
    past = x.shape[1] - T
    # split and concatenate: slices of the whole would each have a gradient of its whole length
    parts = x[:, past:].split(segment, dim=1)
    context = x[:, max(past - before, 0) : past]
    beyond_start = x.new_zeros(x.shape[0], before - context.shape[1], *x.shape[2:])
    beyond_end = x.new_zeros(x.shape[0], after, *x.shape[2:])
    joined = []
    for index, part in enumerate(parts):
        left = [parts[index - 1][:, segment - before :]] if index else [beyond_start, context]
        # the last segment may be shorter than what is to follow
        right = [following[:, :after] for following in parts[index + 1 : index + 2]]
        right_end = beyond_end[:, sum(r.shape[1] for r in right) :]
        joined.append(torch.cat([*left, part, *right, right_end], dim=1))
    return joined


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    marks: Tensor,
    before: int,
    after: int,
    block: int,
    first: int,
    causal: bool,
    sinks: Sinks | None,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """One segment: queries [B, n, H, P]; keys, values and marks [B, before + n + after, ...].

    Its first query is at position ``first`` among the keys of the sequence.
    """
    B, n, H, P = q.shape
    tail = -n % block
    span = before + block + after

    def spans(x: Tensor) -> Tensor:  # [B, before + n + after, ...] -> [B * N, ..., span]
        x = F.pad(x, (*(0, 0) * (x.dim() - 2), 0, tail))
        return x.unfold(1, span, block).flatten(0, 1)

    i = torch.arange(block, device=q.device)[:, None]
    j = torch.arange(span, device=q.device)[None, :] - before  # relative to the block's start
    in_window = (j >= i - before) & (j <= i + after)
    key_marks = spans(marks)  # [B * N, span]
    query_marks = key_marks[:, before : before + block]
    # padding sees itself: a row with no key has no softmax
    visible = (in_window & sees(query_marks, key_marks)) | (i == j)  # [B * N, block, span]

    queries = F.pad(q, (0, 0, 0, 0, 0, tail)).view(-1, block, H, P)  # [B * N, block, H, P]
    # [B * N, K, P, span] -> [B * N, K, span, P]
    keys, values = (spans(x).transpose(2, 3) for x in (k, v))
    if sinks is not None:
        num_blocks = (n + tail) // block

        def of_blocks(x: Tensor) -> Tensor:  # [B, ...] -> [B * N, ...]
            return x.repeat_interleave(num_blocks, dim=0)

        starts = first + block * torch.arange(num_blocks, device=q.device).repeat(B)  # [B * N]
        at = starts[:, None, None] + i  # [B * N, block, 1]
        position = of_blocks(sinks.position).unsqueeze(1)
        is_outside = position < at - before
        if not causal:
            is_outside |= position > at + after
        is_seen = is_outside & of_blocks(sinks.is_token).unsqueeze(1)  # [B * N, block, sinks]
        visible = torch.cat([is_seen, visible], dim=2)
        keys, values = (
            torch.cat([of_blocks(x).transpose(1, 2), x_span], dim=2)
            for x, x_span in ((sinks.key, keys), (sinks.value, values))
        )
    rows = masked_attention(
        queries.transpose(1, 2), keys, values, visible.unsqueeze(1), scale, softcap
    )
    return rows.transpose(1, 2).reshape(B, n + tail, H, P)[:, :n]
