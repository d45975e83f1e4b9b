"""Routed attention in Triton: tiles of listed queries against the keys they may see.

    list      2 3 7 8 | 9 14 15 20 | ...          a tile of queries, all of one list
    keys      [lowest bound ........ highest]     masked at both ends, plain in the middle

Forward and the query gradient run over tiles of queries, the longest first; the gradients of keys
and values over tiles of keys, which find the queries that see them through the plan's ranks. So no
program waits for another, nothing is added atomically, and the host knows no count.

Exponentials are powers of two: scores are scaled by log2(e), and the saved log-sum-exp is a base-2
logarithm.

Shapes: B batch, T queries, S keys, H heads, K key-value heads, G groups of lists, E lists of the
plan, of which N run here.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from meta_attention.ops.route_plan import RANK_BLOCK, RoutePlan
from meta_attention.ops.routed_attention import hopper, hopper_backward

LOG2_E = tl.constexpr(1.4426950408889634)


# tiles of the longest list that are worked on in turn, three for each multiprocessor of a large GPU
SPREAD = 396


class Tiles(NamedTuple):
    """How a kernel is cut for a head width."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def forward_tiles(width: int, itemsize: int) -> Tiles:
    if itemsize > 2:
        return Tiles(64, 32, 4, 2)
    if width <= 64:
        return Tiles(128, 128, 4, 3)
    return Tiles(128, 128, 8, 3) if width <= 128 else Tiles(128, 64, 8, 2)


def query_gradient_tiles(width: int, itemsize: int) -> Tiles:
    if itemsize > 2:
        return Tiles(32, 32, 4, 1)
    if width <= 64:
        return Tiles(128, 64, 4, 3)
    return Tiles(128, 64, 8, 3) if width <= 128 else Tiles(64, 32, 8, 2)


def key_gradient_tiles(width: int, itemsize: int) -> Tiles:
    if itemsize > 2:
        return Tiles(32, 64, 4, 1)
    if width <= 64:
        return Tiles(64, 128, 4, 3)
    return Tiles(64, 128, 8, 3) if width <= 128 else Tiles(32, 64, 8, 2)


@triton.jit
def find_head(num_tiles, num_heads, counts_ptr, lists_ptr, SPREAD, QUERIES: tl.constexpr):
    """Head, counted over the batch, and tile of this program.

    Tiles of several heads take turns, from the longest: enough heads that a long tile is not
    what everything waits for in the end, few enough that their keys stay in the cache. The first
    list of the first row stands for all.
    """
    longest = tl.maximum(tl.cdiv(tl.load(counts_ptr + tl.load(lists_ptr)), QUERIES), 1)
    heads = tl.minimum(tl.cdiv(SPREAD, longest), num_heads)
    program = tl.program_id(0)
    part = program // (heads * num_tiles)
    within = program - part * heads * num_tiles
    # the last part may have fewer heads
    heads_here = tl.minimum(heads, num_heads - part * heads)
    return part * heads + within % heads_here, within // heads_here


@triton.jit
def find_tile(
    tile, lists_ptr, counts_ptr, unbounded, NUM_LISTS: tl.constexpr, QUERIES: tl.constexpr
):
    """List, its slot, count and window, the tile in it, and the tiles before it; list -1: none.

    The tiles of a list run from its end, where queries see most.
    """
    first = 0
    before = 0
    expert = -1
    slot = 0
    count = 0
    window = 0
    number = 0
    for i in tl.static_range(NUM_LISTS):
        e = tl.load(lists_ptr + 2 * i)
        n = tl.load(counts_ptr + e)
        tiles = tl.cdiv(n, QUERIES)
        here = (tile >= first) & (tile < first + tiles)
        w = tl.load(lists_ptr + 2 * i + 1)
        expert = tl.where(here, e, expert)
        slot = tl.where(here, i, slot)
        count = tl.where(here, n, count)
        window = tl.where(here, tl.where(w < 0, unbounded, w), window)
        number = tl.where(here, first + tiles - 1 - tile, number)
        before = tl.where(here, first, before)
        first += tiles
    return expert, slot, count, window, number, before


@triton.jit
def load_tile(
    desc,
    ptr,
    row,
    column,
    stride,
    first,
    S,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TMA: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys or values [TILE, BLOCK_P] from position ``first``; zeros beyond S, where masked."""
    if TMA:
        return desc.load([row + first, column])
    else:
        s = first + tl.arange(0, TILE)[:, None]
        p = tl.arange(0, BLOCK_P)[None, :]
        pointers = ptr + s.to(tl.int64) * stride + p
        if MASKED:
            return tl.load(pointers, mask=(s < S) & (p < WIDTH), other=0.0)
        elif WIDTH < BLOCK_P:
            return tl.load(pointers, mask=p < WIDTH, other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def is_visible(s, low, high, query_marks, marks_ptr, S, HAS_MARKS: tl.constexpr):
    """Which keys [1, n] rows of bounds [m, 1] see."""
    visible = (s >= low) & (s <= high)
    if HAS_MARKS:
        visible = visible & (tl.load(marks_ptr + s, mask=s < S, other=0) == query_marks)
    return visible


@triton.jit
def attend(
    q,
    acc,
    top,
    total,
    k_desc,
    v_desc,
    k_ptr,
    v_ptr,
    k_row,
    v_row,
    k_column,
    v_column,
    stride_ks,
    stride_vs,
    marks_ptr,
    low,
    high,
    query_marks,
    begin,
    end,
    S,
    scale,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_MARKS: tl.constexpr,
):
    """Go on with a softmax over the keys from ``begin`` to ``end``, tile by tile."""
    for first in range(begin, end, KEYS):
        k = load_tile(
            k_desc, k_ptr, k_row, k_column, stride_ks, first, S, KEYS, WIDTH, BLOCK_P, TMA, MASKED
        )
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if MASKED:
            s = first + tl.arange(0, KEYS)[None, :]
            visible = is_visible(s, low, high, query_marks, marks_ptr, S, HAS_MARKS)
            scores = tl.where(visible, scores, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            # a row that has seen no key yet
            shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        else:
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            shift = new_top
        weights = tl.exp2(scores * scale - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        v = load_tile(
            v_desc, v_ptr, v_row, v_column, stride_vs, first, S, KEYS, WIDTH, BLOCK_P, TMA, MASKED
        )
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit
def bounds_of(position, window, starts_ptr, S, CAUSAL: tl.constexpr, HAS_MARKS: tl.constexpr):
    """First and last key [m] that queries at these positions among the keys see."""
    low = tl.maximum(position - window, 0)
    if HAS_MARKS:
        low = tl.maximum(low, tl.load(starts_ptr + position))
    high = position if CAUSAL else tl.minimum(position + window, S - 1)
    return low, high


@triton.jit
def middle_of(low, high, begin, is_row, S, KEYS: tl.constexpr, HAS_MARKS: tl.constexpr):
    """Where the keys that all rows of a tile see begin and end, in whole tiles from ``begin``."""
    if HAS_MARKS:
        return begin, begin
    else:
        inner = tl.max(tl.where(is_row, low, 0))
        outer = tl.min(tl.where(is_row, high, S - 1)) + 1
        inner = begin + tl.cdiv(inner - begin, KEYS) * KEYS
        outer = begin + tl.maximum(outer - begin, 0) // KEYS * KEYS
        # a tile wider than its window has no such keys
        inner = tl.minimum(inner, tl.maximum(outer, begin))
        return inner, tl.maximum(outer, inner)


@triton.jit
def routed_attention_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    rows_ptr,
    lse_ptr,
    lists_ptr,
    positions_ptr,
    counts_ptr,
    marks_ptr,
    starts_ptr,
    num_tiles,
    num_heads,
    T,
    S,
    H,
    K,
    G,
    E,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_rn,
    stride_rb,
    stride_rt,
    stride_rh,
    stride_ln,
    desc_rows_b,
    desc_rows_h,
    desc_columns_h,
    scale,
    NUM_LISTS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
    TMA: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    SPREAD: tl.constexpr,
):
    any_head, program = find_head(num_tiles, num_heads, counts_ptr, lists_ptr, SPREAD, QUERIES)
    h = any_head % H
    b = any_head // H
    kv = h // (H // K)
    group = b * G + tl.where(G == 1, 0, kv)
    expert, slot, count, window, tile, _before = find_tile(
        program, lists_ptr, counts_ptr + group * E, S, NUM_LISTS, QUERIES
    )
    if expert < 0:
        return
    entry = tile * QUERIES + tl.arange(0, QUERIES)
    is_row = entry < count
    order = positions_ptr + (group * E + expert).to(tl.int64) * T
    # rows beyond the end of the list repeat its last: their bounds widen nothing
    t = tl.load(order + tl.minimum(entry, count - 1))
    p = tl.arange(0, BLOCK_P)
    batch = b.to(tl.int64)
    q_rows = q_ptr + batch * stride_qb + h.to(tl.int64) * stride_qh
    q = tl.load(
        q_rows + t[:, None].to(tl.int64) * stride_qt + p[None, :],
        mask=p[None, :] < WIDTH,
        other=0.0,
    )

    marks_ptr += batch * S
    starts_ptr += batch * S
    at = t + (S - T)
    low, high = bounds_of(at, window, starts_ptr, S, CAUSAL, HAS_MARKS)
    marks = at
    if HAS_MARKS:
        marks = tl.load(marks_ptr + at)
    begin = tl.min(low)
    end = tl.max(high) + 1
    inner, outer = middle_of(low, high, begin, is_row, S, KEYS, HAS_MARKS)
    low, high, marks = low[:, None], high[:, None], marks[:, None]

    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, BLOCK_P], tl.float32)
    k_ptr += batch * stride_kb + kv.to(tl.int64) * stride_kh
    v_ptr += batch * stride_vb + kv.to(tl.int64) * stride_vh
    row = b * desc_rows_b + kv * desc_rows_h
    column = kv * desc_columns_h
    factor = scale * LOG2_E
    acc, top, total = attend(
        q, acc, top, total, k_desc, v_desc, k_ptr, v_ptr, row, row, column, column, stride_ks,
        stride_vs, marks_ptr, low, high, marks, begin, inner, S, factor,
        KEYS, WIDTH, BLOCK_P, PRECISION, TMA, True, HAS_MARKS,
    )  # fmt: skip
    acc, top, total = attend(
        q, acc, top, total, k_desc, v_desc, k_ptr, v_ptr, row, row, column, column, stride_ks,
        stride_vs, marks_ptr, low, high, marks, inner, outer, S, factor,
        KEYS, WIDTH, BLOCK_P, PRECISION, TMA, False, HAS_MARKS,
    )  # fmt: skip
    acc, top, total = attend(
        q, acc, top, total, k_desc, v_desc, k_ptr, v_ptr, row, row, column, column, stride_ks,
        stride_vs, marks_ptr, low, high, marks, outer, end, S, factor,
        KEYS, WIDTH, BLOCK_P, PRECISION, TMA, True, HAS_MARKS,
    )  # fmt: skip

    rows = rows_ptr + slot.to(tl.int64) * stride_rn + batch * stride_rb + h * stride_rh
    tl.store(
        rows + t[:, None].to(tl.int64) * stride_rt + p[None, :],
        (acc / total[:, None]).to(rows_ptr.dtype.element_ty),
        mask=is_row[:, None] & (p[None, :] < WIDTH),
    )
    lse = lse_ptr + slot.to(tl.int64) * stride_ln + (batch * H + h) * T + t
    tl.store(lse, top + tl.log2(total), mask=is_row)


@triton.jit
def attend_backwards(
    q,
    d_out,
    acc,
    lse,
    delta,
    k_desc,
    v_desc,
    k_ptr,
    v_ptr,
    row,
    column,
    stride_ks,
    stride_vs,
    marks_ptr,
    low,
    high,
    query_marks,
    begin,
    end,
    S,
    scale,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_MARKS: tl.constexpr,
):
    """Add what the keys from ``begin`` to ``end`` give to the gradient of a tile of queries."""
    for first in range(begin, end, KEYS):
        k = load_tile(
            k_desc, k_ptr, row, column, stride_ks, first, S, KEYS, WIDTH, BLOCK_P, TMA, MASKED
        )
        v = load_tile(
            v_desc, v_ptr, row, column, stride_vs, first, S, KEYS, WIDTH, BLOCK_P, TMA, MASKED
        )
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        weights = tl.exp2(scores * scale - lse[:, None])
        if MASKED:
            s = first + tl.arange(0, KEYS)[None, :]
            visible = is_visible(s, low, high, query_marks, marks_ptr, S, HAS_MARKS)
            weights = tl.where(visible, weights, 0.0)
        d_weights = tl.dot(d_out, v.T, input_precision=PRECISION)
        d_scores = weights * (d_weights - delta[:, None])
        acc = tl.dot(d_scores.to(k.dtype), k, acc, input_precision=PRECISION)
    return acc


@triton.jit
def routed_attention_bwd_query_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    rows_ptr,
    d_rows_ptr,
    lse_ptr,
    dq_ptr,
    packed_q_ptr,
    packed_d_ptr,
    packed_lse_ptr,
    packed_delta_ptr,
    lists_ptr,
    positions_ptr,
    counts_ptr,
    marks_ptr,
    starts_ptr,
    num_tiles,
    num_heads,
    T,
    S,
    H,
    K,
    G,
    E,
    packed_rows,
    packed_base,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_rn,
    stride_rb,
    stride_rt,
    stride_rh,
    stride_dn,
    stride_db,
    stride_dt,
    stride_dh,
    stride_ln,
    desc_rows_b,
    desc_rows_h,
    desc_columns_h,
    scale,
    NUM_LISTS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
    TMA: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    SPREAD: tl.constexpr,
    ADD: tl.constexpr,
):
    """Query gradient [B, T, H, P], contiguous.

    Packs what the key gradients read of the lists: tile after tile, the last of each list filled
    up with rows that weigh nothing. delta is each row's sum of out * d_out.
    """
    any_head, program = find_head(num_tiles, num_heads, counts_ptr, lists_ptr, SPREAD, QUERIES)
    h = any_head % H
    b = any_head // H
    kv = h // (H // K)
    group = b * G + tl.where(G == 1, 0, kv)
    expert, slot, count, window, tile, before = find_tile(
        program, lists_ptr, counts_ptr + group * E, S, NUM_LISTS, QUERIES
    )
    if expert < 0:
        return
    entry = tile * QUERIES + tl.arange(0, QUERIES)
    is_row = entry < count
    order = positions_ptr + (group * E + expert).to(tl.int64) * T
    t = tl.load(order + tl.minimum(entry, count - 1))
    t64 = t[:, None].to(tl.int64)
    p = tl.arange(0, BLOCK_P)[None, :]
    in_width = p < WIDTH
    batch = b.to(tl.int64)
    head = h.to(tl.int64)
    n = slot.to(tl.int64)
    q = tl.load(
        q_ptr + batch * stride_qb + head * stride_qh + t64 * stride_qt + p, mask=in_width, other=0.0
    )
    d_out = tl.load(
        d_rows_ptr + n * stride_dn + batch * stride_db + head * stride_dh + t64 * stride_dt + p,
        mask=in_width,
        other=0.0,
    )
    out = tl.load(
        rows_ptr + n * stride_rn + batch * stride_rb + head * stride_rh + t64 * stride_rt + p,
        mask=in_width,
        other=0.0,
    )
    saved = n * stride_ln + (batch * H + head) * T + t
    lse = tl.load(lse_ptr + saved)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    packed = (batch * H + head) * packed_rows + packed_base + (before + tile) * QUERIES
    packed += tl.arange(0, QUERIES)
    tl.store(packed_lse_ptr + packed, tl.where(is_row, lse, float("inf")))
    tl.store(packed_delta_ptr + packed, tl.where(is_row, delta, 0.0))
    packed = packed[:, None] * WIDTH + p
    tl.store(packed_q_ptr + packed, tl.where(is_row[:, None], q, 0.0), mask=in_width)
    tl.store(packed_d_ptr + packed, tl.where(is_row[:, None], d_out, 0.0), mask=in_width)

    marks_ptr += batch * S
    starts_ptr += batch * S
    at = t + (S - T)
    low, high = bounds_of(at, window, starts_ptr, S, CAUSAL, HAS_MARKS)
    marks = at
    if HAS_MARKS:
        marks = tl.load(marks_ptr + at)
    begin = tl.min(low)
    end = tl.max(high) + 1
    inner, outer = middle_of(low, high, begin, is_row, S, KEYS, HAS_MARKS)
    low, high, marks = low[:, None], high[:, None], marks[:, None]

    acc = tl.zeros([QUERIES, BLOCK_P], tl.float32)
    k_ptr += batch * stride_kb + kv.to(tl.int64) * stride_kh
    v_ptr += batch * stride_vb + kv.to(tl.int64) * stride_vh
    row = b * desc_rows_b + kv * desc_rows_h
    column = kv * desc_columns_h
    factor = scale * LOG2_E
    acc = attend_backwards(
        q, d_out, acc, lse, delta, k_desc, v_desc, k_ptr, v_ptr, row, column, stride_ks,
        stride_vs, marks_ptr, low, high, marks, begin, inner, S, factor,
        KEYS, WIDTH, BLOCK_P, PRECISION, TMA, True, HAS_MARKS,
    )  # fmt: skip
    acc = attend_backwards(
        q, d_out, acc, lse, delta, k_desc, v_desc, k_ptr, v_ptr, row, column, stride_ks,
        stride_vs, marks_ptr, low, high, marks, inner, outer, S, factor,
        KEYS, WIDTH, BLOCK_P, PRECISION, TMA, False, HAS_MARKS,
    )  # fmt: skip
    acc = attend_backwards(
        q, d_out, acc, lse, delta, k_desc, v_desc, k_ptr, v_ptr, row, column, stride_ks,
        stride_vs, marks_ptr, low, high, marks, outer, end, S, factor,
        KEYS, WIDTH, BLOCK_P, PRECISION, TMA, True, HAS_MARKS,
    )  # fmt: skip

    acc *= scale
    dq = dq_ptr + ((batch * T + t64) * H + head) * WIDTH + p
    is_written = is_row[:, None] & in_width
    if ADD:
        # a soft token is in several lists, which run one after the other
        acc += tl.load(dq, mask=is_written, other=0.0).to(tl.float32)
    tl.store(dq, acc.to(dq_ptr.dtype.element_ty), mask=is_written)


@triton.jit
def attend_from_keys(
    dk,
    dv,
    k,
    v,
    q_desc,
    d_desc,
    q_ptr,
    d_ptr,
    lse_ptr,
    delta_ptr,
    packed,
    order,
    marks_ptr,
    starts_ptr,
    key_marks,
    s,
    first,
    last,
    count,
    window,
    past,
    S,
    scale,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_MARKS: tl.constexpr,
):
    """Add what the entries ``first`` to ``last`` of a list give to a tile of keys and values.

    ``first`` is a multiple of QUERIES; ``packed`` is the row of entry 0 among the packed rows.
    """
    for start in range(first, last, QUERIES):
        row = packed + start
        q = load_tile(q_desc, q_ptr, 0, 0, WIDTH, row, 0, QUERIES, WIDTH, BLOCK_P, TMA, False)
        d_out = load_tile(d_desc, d_ptr, 0, 0, WIDTH, row, 0, QUERIES, WIDTH, BLOCK_P, TMA, False)
        rows = row + tl.arange(0, QUERIES)
        lse = tl.load(lse_ptr + rows)
        delta = tl.load(delta_ptr + rows)
        scores = tl.dot(k, q.T, input_precision=PRECISION)  # [keys, queries]
        weights = tl.exp2(scores * scale - lse[None, :])
        if MASKED:
            entry = start + tl.arange(0, QUERIES)
            at = tl.load(order + tl.minimum(entry, count - 1)) + past
            low, high = bounds_of(at, window, starts_ptr, S, CAUSAL, HAS_MARKS)
            visible = (s >= low[None, :]) & (s <= high[None, :])
            if HAS_MARKS:
                visible = visible & (key_marks == tl.load(marks_ptr + at)[None, :])
            weights = tl.where(visible, weights, 0.0)
        dv = tl.dot(weights.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
        d_weights = tl.dot(v, d_out.T, input_precision=PRECISION)
        d_scores = weights * (d_weights - delta[None, :])
        dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def routed_attention_bwd_key_kernel(
    k_ptr,
    v_ptr,
    q_desc,
    d_desc,
    packed_q_ptr,
    packed_d_ptr,
    packed_lse_ptr,
    packed_delta_ptr,
    dk_ptr,
    dv_ptr,
    lists_ptr,
    positions_ptr,
    counts_ptr,
    ranks_ptr,
    marks_ptr,
    starts_ptr,
    ends_ptr,
    T,
    S,
    H,
    K,
    G,
    E,
    packed_rows,
    packed_tile,
    num_ranks,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    scale,
    NUM_LISTS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    """Gradients [B, S, K, P], contiguous, of a tile of keys and values, of all heads they serve."""
    kv = tl.program_id(0) % K
    b = tl.program_id(0) // K
    batch = b.to(tl.int64)
    start = tl.program_id(1) * KEYS
    s = start + tl.arange(0, KEYS)[:, None]
    p = tl.arange(0, BLOCK_P)[None, :]
    is_read = (s < S) & (p < WIDTH)
    s64 = s.to(tl.int64)
    head = kv.to(tl.int64)
    k = tl.load(
        k_ptr + batch * stride_kb + head * stride_kh + s64 * stride_ks + p, mask=is_read, other=0.0
    )
    v = tl.load(
        v_ptr + batch * stride_vb + head * stride_vh + s64 * stride_vs + p, mask=is_read, other=0.0
    )
    marks_ptr += batch * S
    starts_ptr += batch * S
    key_marks = s
    # queries that may see any of these keys, by position among the keys
    stop = tl.minimum(start + KEYS, S)
    last_seen = S
    if HAS_MARKS:
        key_marks = tl.load(marks_ptr + s, mask=s < S, other=0)
        last_seen = tl.load(ends_ptr + batch * S + stop - 1)
    past = S - T
    factor = scale * LOG2_E

    dk = tl.zeros([KEYS, BLOCK_P], tl.float32)
    dv = tl.zeros([KEYS, BLOCK_P], tl.float32)
    group = b * G + tl.where(G == 1, 0, kv)
    per_group = H // K
    base = 0
    for i in tl.static_range(NUM_LISTS):
        e = tl.load(lists_ptr + 2 * i)
        w = tl.load(lists_ptr + 2 * i + 1)
        window = tl.where(w < 0, S, w)
        count = tl.load(counts_ptr + group * E + e)
        order = positions_ptr + (group * E + e).to(tl.int64) * T
        ranks = ranks_ptr + (group * E + e).to(tl.int64) * num_ranks
        earliest = start if CAUSAL else tl.maximum(start - window, 0)
        latest = tl.minimum(stop + window, last_seen)
        first = tl.load(ranks + tl.maximum(earliest - past, 0) // RANK_BLOCK)
        last = tl.load(ranks + tl.cdiv(tl.maximum(latest - past, 0), RANK_BLOCK))
        first = first // QUERIES * QUERIES
        # entries after these see all of the keys, where a list has no window
        inner = last
        if CAUSAL and not HAS_MARKS:
            clear = tl.load(ranks + tl.cdiv(tl.maximum(stop - past, 0), RANK_BLOCK))
            clear = tl.cdiv(clear, QUERIES) * QUERIES
            inner = tl.where(w < 0, tl.minimum(clear, last), last)
        for j in range(per_group):
            packed = (batch * H + kv * per_group + j) * packed_rows + base
            if TMA:
                # the copy engine counts rows in 32 bits
                packed = packed.to(tl.int32)
            dk, dv = attend_from_keys(
                dk, dv, k, v, q_desc, d_desc, packed_q_ptr, packed_d_ptr, packed_lse_ptr,
                packed_delta_ptr, packed, order, marks_ptr, starts_ptr, key_marks, s, first, inner,
                count, window, past, S, factor,
                QUERIES, WIDTH, BLOCK_P, PRECISION, TMA, CAUSAL, True, HAS_MARKS,
            )  # fmt: skip
            dk, dv = attend_from_keys(
                dk, dv, k, v, q_desc, d_desc, packed_q_ptr, packed_d_ptr, packed_lse_ptr,
                packed_delta_ptr, packed, order, marks_ptr, starts_ptr, key_marks, s, inner, last,
                count, window, past, S, factor,
                QUERIES, WIDTH, BLOCK_P, PRECISION, TMA, CAUSAL, False, HAS_MARKS,
            )  # fmt: skip
        if EXCLUSIVE:
            base += tl.cdiv(count, packed_tile) * packed_tile
        else:
            base += tl.cdiv(T, packed_tile) * packed_tile

    written = ((batch * S + s64) * K + head) * WIDTH + p
    tl.store(dk_ptr + written, (dk * scale).to(dk_ptr.dtype.element_ty), mask=is_read)
    tl.store(dv_ptr + written, dv.to(dv_ptr.dtype.element_ty), mask=is_read)


class RoutedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, query, key, value, plan, windows, causal, marks):
        # rows [N, B, T, H, P], or [1, ...] under an exclusive plan
        B, T, H = query.shape[:3]
        lse = torch.empty(rows.shape[0], B, H, T, dtype=torch.float32, device=query.device)
        launch = _Launch(query, key, value, plan, windows, causal, marks)
        launch.forward(rows, lse)
        ctx.save_for_backward(query, key, value, rows, lse)
        ctx.plan, ctx.windows, ctx.causal, ctx.marks = plan, windows, causal, marks
        # returned as it is, and not marked as changed: rows of other lists, which an expert before
        # this one has saved, are left alone
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx, d_rows):
        query, key, value, rows, lse = ctx.saved_tensors
        launch = _Launch(query, key, value, ctx.plan, ctx.windows, ctx.causal, ctx.marks)
        upstream = d_rows.to(query.dtype)
        if upstream.stride(-1) != 1:
            upstream = upstream.contiguous()
        gradients = launch.backward(rows, upstream, lse)
        return d_rows, *gradients, None, None, None, None


class _Marks(NamedTuple):
    """What padding and documents make of the keys, [B, S] int32 each."""

    marks: Tensor  # 0 for padding, or the document
    starts: Tensor  # first position a token's document has
    ends: Tensor  # position after its last


def _marks_of(mask: Tensor) -> _Marks:
    marks = mask.int().contiguous()
    # padding counts to the document before it
    documents = marks.cummax(dim=1).values
    position = torch.arange(marks.shape[1], device=marks.device, dtype=torch.int32).expand_as(marks)
    changes = documents[:, 1:] != documents[:, :-1]
    first = torch.cat([torch.ones_like(changes[:, :1]), changes], dim=1)[:, : marks.shape[1]]
    last = torch.cat([changes, torch.ones_like(changes[:, :1])], dim=1)[:, : marks.shape[1]]
    starts = torch.where(first, position, 0).cummax(dim=1).values
    ends = torch.where(last, position + 1, marks.shape[1])
    ends = ends.flip(1).cummin(dim=1).values.flip(1)
    return _Marks(marks, starts.int().contiguous(), ends.int().contiguous())


@lru_cache(maxsize=256)
def _lists_on(device: torch.device, lists: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.tensor(lists, dtype=torch.int32, device=device)


class _Launch:
    """Arguments the three kernels share."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: RoutePlan,
        windows: tuple[tuple[int, int], ...],
        causal: bool,
        marks: _Marks | None,
    ) -> None:
        self.query, self.key, self.value, self.plan = query, key, value, plan
        self.windows, self.marks = windows, marks
        self.B, self.T, self.H, self.P = query.shape
        self.S, self.K = key.shape[1:3]
        self.G, self.E = plan.counts.shape[1:]
        # stands in for pointers that are not read
        nothing = plan.counts
        self.marks_args = (marks.marks, marks.starts) if marks else (nothing, nothing)
        self.ends = marks.ends if marks else nothing
        self.is_plain = causal and marks is None
        self.lists = _lists_on(query.device, windows)
        self.sizes = (self.T, self.S, self.H, self.K, self.G, self.E)
        self.key_strides = (*key.stride()[:3], *value.stride()[:3])
        self.scale = self.P**-0.5
        self.constants = {
            "WIDTH": self.P,
            "BLOCK_P": max(triton.next_power_of_2(self.P), 16),
            # tensor cores round float32 to ten bits otherwise
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
            "CAUSAL": causal,
            "HAS_MARKS": marks is not None,
        }

    def _num_tiles(self, queries: int, num_lists: int) -> int:
        """Tiles of queries there may be, whatever the routes."""
        if self.plan.is_exclusive:
            return triton.cdiv(self.T, queries) + num_lists - 1
        return triton.cdiv(self.T, queries) * num_lists

    def _descriptors(self, tiles: Tiles) -> tuple[object, object, tuple[int, int, int], bool]:
        """Keys and values for the copy engine, where their layout allows it."""
        layout = self._layout()
        if layout is None or self.constants["BLOCK_P"] != self.P or not self._has_copy_engine():
            return self.key, self.value, (0, 0, 0), False
        shape, offsets = layout
        block = [tiles.keys, self.P]
        described = (
            TensorDescriptor(x, list(shape), [shape[1], 1], block) for x in (self.key, self.value)
        )
        return *described, offsets, True

    def _layout(self) -> tuple[tuple[int, int], tuple[int, int, int]] | None:
        """Keys and values as matrices, where both are the same kind of one."""
        layouts = [_layout_of(x) for x in (self.key, self.value)]
        return layouts[0] if layouts[0] == layouts[1] else None

    def _has_copy_engine(self) -> bool:
        if not self.query.is_cuda:
            return True  # the interpreter's
        return torch.cuda.get_device_capability(self.query.device)[0] >= 9

    def forward(self, rows: Tensor, lse: Tensor) -> None:
        layout = self._layout()
        if hopper.can_run(self.query, self.is_plain, layout):
            assert layout is not None
            with _on(self.query):
                hopper.launch_forward(
                    self.query,
                    self.key,
                    self.value,
                    rows,
                    lse,
                    self.lists,
                    self.plan.positions,
                    self.plan.counts,
                    *layout,
                    self._num_tiles(hopper.QUERIES, len(self.windows)),
                    self.sizes,
                    (*_row_strides(rows), _slot_stride(lse)),
                    SPREAD,
                )
            return
        tiles = forward_tiles(self.P, self.query.element_size())
        k_desc, v_desc, offsets, tma = self._descriptors(tiles)
        num_lists = len(self.windows)
        num_tiles = self._num_tiles(tiles.queries, num_lists)
        with _on(self.query):
            routed_attention_fwd_kernel[(num_tiles * self.B * self.H,)](
                self.query,
                self.key,
                self.value,
                k_desc,
                v_desc,
                rows,
                lse,
                self.lists,
                self.plan.positions,
                self.plan.counts,
                *self.marks_args,
                num_tiles,
                self.B * self.H,
                *self.sizes,
                *self.query.stride()[:3],
                *self.key_strides,
                *_row_strides(rows),
                _slot_stride(lse),
                *offsets,
                self.scale,
                NUM_LISTS=num_lists,
                QUERIES=tiles.queries,
                KEYS=tiles.keys,
                TMA=tma,
                SPREAD=SPREAD,
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
                **self.constants,
            )

    def backward(self, rows: Tensor, d_rows: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq = torch.zeros(self.query.shape, dtype=self.query.dtype, device=self.query.device)
        tiles = query_gradient_tiles(self.P, self.query.element_size())
        packed_rows = self._num_tiles(tiles.queries, len(self.windows)) * tiles.queries
        packed_heads = [
            self.query.new_empty(self.B * self.H * packed_rows, self.P) for _ in ("query", "d_out")
        ]
        packed_sums = [lse.new_empty(self.B * self.H * packed_rows) for _ in ("lse", "delta")]
        # lists that share tokens run one after the other: each adds to the same rows of dq
        together = len(self.windows) if self.plan.is_exclusive else 1
        num_tiles = self._num_tiles(tiles.queries, together)
        k_desc, v_desc, offsets, tma = self._descriptors(tiles)
        with _on(self.query):
            for slot in range(len(self.windows) // together):
                routed_attention_bwd_query_kernel[(num_tiles * self.B * self.H,)](
                    self.query,
                    self.key,
                    self.value,
                    k_desc,
                    v_desc,
                    rows[slot],
                    d_rows[slot],
                    lse[slot],
                    dq,
                    *packed_heads,
                    *packed_sums,
                    self.lists[slot:],
                    self.plan.positions,
                    self.plan.counts,
                    *self.marks_args,
                    num_tiles,
                    self.B * self.H,
                    *self.sizes,
                    packed_rows,
                    slot * num_tiles * tiles.queries,
                    *self.query.stride()[:3],
                    *self.key_strides,
                    *_row_strides(rows),
                    *_row_strides(d_rows),
                    _slot_stride(lse),
                    *offsets,
                    self.scale,
                    NUM_LISTS=together,
                    QUERIES=tiles.queries,
                    KEYS=tiles.keys,
                    TMA=tma,
                    SPREAD=SPREAD,
                    ADD=slot > 0,
                    num_warps=tiles.num_warps,
                    num_stages=tiles.num_stages,
                    **self.constants,
                )
        return dq, *self._key_gradients(packed_heads, packed_sums, packed_rows, tiles.queries)

    def _key_gradients(
        self,
        packed_heads: list[Tensor],
        packed_sums: list[Tensor],
        packed_rows: int,
        packed_tile: int,
    ) -> tuple[Tensor, Tensor]:
        dk = torch.empty(self.key.shape, dtype=self.key.dtype, device=self.key.device)
        dv = torch.empty(self.value.shape, dtype=self.value.dtype, device=self.value.device)
        layout = self._layout()
        if hopper.can_run(self.query, self.is_plain, layout):
            assert layout is not None
            with _on(self.query):
                hopper_backward.launch_key_gradients(
                    self.key,
                    self.value,
                    packed_heads,
                    packed_sums,
                    dk,
                    dv,
                    self.lists,
                    self.plan.positions,
                    self.plan.counts,
                    self.plan.ranks,
                    *layout,
                    self.sizes,
                    packed_rows,
                    packed_tile,
                    self.plan.is_exclusive,
                )
            return dk, dv
        tiles = key_gradient_tiles(self.P, self.query.element_size())
        tma = self._has_copy_engine() and self.constants["BLOCK_P"] == self.P
        described = packed_heads
        if tma:
            block = [tiles.queries, self.P]
            described = [TensorDescriptor.from_tensor(x, block) for x in packed_heads]
        grid = (self.B * self.K, triton.cdiv(self.S, tiles.keys))
        with _on(self.query):
            routed_attention_bwd_key_kernel[grid](
                self.key,
                self.value,
                *described,
                *packed_heads,
                *packed_sums,
                dk,
                dv,
                self.lists,
                self.plan.positions,
                self.plan.counts,
                self.plan.ranks,
                *self.marks_args,
                self.ends,
                *self.sizes,
                packed_rows,
                packed_tile,
                self.plan.ranks.shape[-1],
                *self.key_strides,
                self.scale,
                NUM_LISTS=len(self.windows),
                QUERIES=tiles.queries,
                KEYS=tiles.keys,
                TMA=tma,
                EXCLUSIVE=self.plan.is_exclusive,
                RANK_BLOCK=RANK_BLOCK,
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
                **self.constants,
            )
        return dk, dv


def _slot_stride(x: Tensor) -> int:
    """From one list's buffer to the next; lists share one under an exclusive plan."""
    return 0 if x.shape[0] == 1 else x.stride(0)


def _row_strides(x: Tensor) -> tuple[int, ...]:
    return (_slot_stride(x), *x.stride()[1:4])


def _on(x: Tensor) -> torch.cuda.device_of:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device_of(x)


def _layout_of(x: Tensor) -> tuple[tuple[int, int], tuple[int, int, int]] | None:
    """[B, S, K, P] as a matrix: its shape, and rows per batch and head, columns per head.

    Either heads side by side, as projections leave them, or head after head, as caches do.
    """
    B, S, K, P = x.shape
    if x.stride(3) != 1 or x.data_ptr() % 16 or (P * x.element_size()) % 16:
        return None
    if x.stride()[:3] == (S * K * P, K * P, P):
        return (B * S, K * P), (S, 0, P)
    if x.stride()[:3] == (K * S * P, P, S * P):
        return (B * K * S, P), (K * S, S, 0)
    return None


def routed_attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: RoutePlan,
    windows: Mapping[int, int | None],
    causal: bool,
    mask: Tensor | None,
    rows: Tensor | None,
) -> Tensor:
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    # the longest lists first; -1: no window
    pairs = tuple((index, -1 if window is None else window) for index, window in windows.items())
    if plan.is_exclusive:
        pairs = tuple(sorted(pairs, key=lambda pair: -pair[1] if pair[1] >= 0 else -(2**31)))
    if rows is None:
        num_buffers = 1 if plan.is_exclusive else len(pairs)
        buffer = torch.zeros(num_buffers, *query.shape, dtype=query.dtype, device=query.device)
    else:
        buffer = rows.unsqueeze(0)
    marks = None if mask is None else _marks_of(mask)
    out = RoutedAttention.apply(buffer, query, key, value, plan, pairs, causal, marks)
    return out.squeeze(0) if plan.is_exclusive else out
