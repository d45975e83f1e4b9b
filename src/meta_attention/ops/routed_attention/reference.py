"""Routed attention on gathered queries: the path of machines without a GPU, and a definition.

    positions of a list   2 3 | 7 8 | 9 14 | ...      blocks of n queries
    keys of block 7 8     |...======|                 from lowest to highest bound, and sinks

A block is one call of PyTorch's fused attention, so the cost follows the lists. Where no gradient
is wanted, full attention on a CPU takes a call for the keys that all queries of a large block see,
without a mask, and one for each of its parts and the keys after them. Counts are read on the host:
on a GPU this waits for the device, which the kernel does not.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from meta_attention.ops.heads import find_sinks, masked_attention, sees
from meta_attention.ops.route_plan import RoutePlan

# queries of a block: more see more keys in vain, fewer pay for more calls. PyTorch's kernel is
# faster from 768 queries on, which long lists have to spare
FULL_BLOCK, LONG_FULL_BLOCK, LOCAL_BLOCK = 256, 768, 64
LONG_LIST = 4 * LONG_FULL_BLOCK

# PyTorch's kernel for CPUs, which also returns the logarithm of each row's sum: with it, rows can
# be put together from parts of their keys. It has no public name; without it, blocks are whole
FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
COMMON_BLOCK, OWN_BLOCK = 768, 192


def routed_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: RoutePlan,
    windows: Mapping[int, int | None],
    causal: bool,
    mask: Tensor | None,
    rows: Tensor | None,
    num_sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    B, T, H, P = query.shape
    G = plan.counts.shape[1]
    # [B, T, G, heads of a group, P]: each group has its own lists
    queries, keys, values = (x.unflatten(2, (G, -1)) for x in (query, key, value))
    counts: list[list[list[int]]] = plan.counts.tolist()
    has_graph = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    in_parts = causal and mask is None and not has_graph and query.is_cpu and FLASH is not None
    in_parts = in_parts and softcap is None
    sinks = None
    if num_sinks > 0:
        tokens = torch.ones(1, key.shape[1], dtype=torch.bool, device=query.device)
        sinks = find_sinks(tokens if mask is None else mask, num_sinks).expand(B, -1)

    def rows_of(index: int, b: int, g: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of a list block by block, and where they belong among all of [B * T * G]."""
        order = plan.positions[b, g, index, : counts[b][g][index]].long()
        window = windows[index]
        marks = None if mask is None else mask[b]
        first = None if sinks is None or window is None else sinks[b]
        heads = (queries[b, :, g], keys[b, :, g], values[b, :, g])
        size = LOCAL_BLOCK
        if window is None:
            size = FULL_BLOCK if len(order) < LONG_LIST else LONG_FULL_BLOCK
        # a short list has little to gain
        splits = in_parts and window is None and len(order) >= COMMON_BLOCK
        for block in order.split(COMMON_BLOCK if splits else size):
            if len(block) and splits:
                yield (b * T + block) * G + g, _attend_in_parts(*heads, block, scale)
            elif len(block):
                own = _attend(*heads, block, window, causal, marks, first, scale, softcap)
                yield (b * T + block) * G + g, own

    buffers = []
    # one buffer for all lists, or one for each
    for lists in [list(windows)] if plan.is_exclusive else [[index] for index in windows]:
        buffer = torch.zeros_like(query) if rows is None else rows
        found = (
            entry
            for index in lists
            for b in range(B)
            for g in range(G)
            for entry in rows_of(index, b, g)
        )
        buffers.append(_put(buffer, found, (B * T * G, H // G, P), (query, key, value)))
    return buffers[0] if plan.is_exclusive else torch.stack(buffers)


def _put(
    buffer: Tensor,
    found: Iterator[tuple[Tensor, Tensor]],
    shape: tuple[int, int, int],
    inputs: tuple[Tensor, ...],
) -> Tensor:
    """``buffer`` [B, T, H, P] with rows in their places: in itself, or in a copy with a graph."""
    has_graph = torch.is_grad_enabled() and any(x.requires_grad for x in (buffer, *inputs))
    if not has_graph and buffer.is_contiguous():
        for places, rows in found:
            buffer.view(shape).index_copy_(0, places, rows)
        return buffer
    entries = list(found)
    if not entries:
        # no rows, but a graph: where nobody is listed the gradient is zero, not none
        return buffer + sum(x[:, :0].sum() for x in inputs)
    places, blocks = (torch.cat(parts) for parts in zip(*entries, strict=True))
    return buffer.reshape(shape).index_copy(0, places, blocks).view_as(buffer)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block: Tensor,
    window: int | None,
    causal: bool,
    mask: Tensor | None,
    is_sink: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """Rows [n, H, P] of the queries at ``block`` [n], of [T, H, P] and [S, K, P].

    Marks and sinks are [S].
    """
    S = key.shape[0]
    at = block + (S - query.shape[0])  # among the keys
    first, last = int(at[0]), int(at[-1])
    start = 0 if window is None else max(first - window, 0)
    stop = S if window is None else min(last + window + 1, S)
    stop = last + 1 if causal else stop

    seen: slice | Tensor = slice(start, stop)
    j = torch.arange(start, stop, device=block.device)
    if is_sink is not None:
        sinks = is_sink.nonzero().squeeze(1)
        if mask is not None:
            sinks = sinks[mask[sinks] >= mask[at[0]]]  # not of documents before these
        before, after = sinks[sinks < start], sinks[sinks >= stop]
        if len(before) or (len(after) and not causal):
            seen = j = torch.cat([before, j] if causal else [before, j, after])

    i, j = at[:, None], j[None, :]
    visible = torch.ones(len(block), j.shape[1], dtype=torch.bool, device=block.device)
    if window is not None:
        visible &= (j >= i - window) & (j <= i + window)
        if is_sink is not None:
            visible |= is_sink[j]
    if causal:
        visible &= j <= i
    if mask is not None:
        visible &= sees(mask[at], mask[seen])
    out = masked_attention(
        query[block].transpose(0, 1).unsqueeze(0),
        key[seen].transpose(0, 1).unsqueeze(0),
        value[seen].transpose(0, 1).unsqueeze(0),
        visible[None, None],
        scale,
        softcap,
    )
    return out.squeeze(0).transpose(0, 1)


def _attend_in_parts(
    query: Tensor, key: Tensor, value: Tensor, block: Tensor, scale: float | None
) -> Tensor:
    """As ``_attend`` for full causal attention: keys that all see, then those that only some do."""
    at = block + (key.shape[0] - query.shape[0])
    # [1, H, n or S, P]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query[block], key, value))
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    common = int(at[0]) + 1
    rows, total = FLASH(q, k[:, :, :common], v[:, :, :common], scale=scale)
    rows = rows.clone()
    for start in range(0, len(block), OWN_BLOCK):
        part = slice(start, start + OWN_BLOCK)
        i, stop = at[part], int(at[part][-1]) + 1
        if stop == common:
            continue
        visible = torch.arange(common, stop) <= i[:, None]
        hidden = torch.zeros(visible.shape, dtype=q.dtype).masked_fill(~visible, float("-inf"))
        own, own_total = FLASH(
            q[:, :, part],
            k[:, :, common:stop],
            v[:, :, common:stop],
            attn_mask=hidden[None, None],
            scale=scale,
        )
        # of a row that sees none of them, the kernel says neither a sum nor that there is none
        share = torch.where(i >= common, torch.sigmoid(own_total - total[:, :, part]), 0.0)
        rows[:, :, part] = torch.lerp(
            rows[:, :, part].to(share.dtype), own.to(share.dtype), share.unsqueeze(-1)
        ).to(rows.dtype)
    return rows.squeeze(0).transpose(0, 1)
