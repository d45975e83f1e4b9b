"""Kernels of the forward pass, and what the backward shares with it.

Exponentials are powers of two: scores are scaled by log2(e), and the saved log-sum-exp is a base-2
logarithm. Shapes: as in kernel.py.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_head(num_tiles, num_heads, counts_ptr, lists_ptr, SPREAD, QUERIES: tl.constexpr):
    """Head, counted over the batch, and tile of this program.

    Tiles of several heads take turns, from the longest: enough heads that a long tile is not
    what everything waits for in the end, few enough that their keys stay in the cache. The first
    list of the first row stands for all.
    """
    longest = tl.maximum(tl.cdiv(tl.load(counts_ptr + tl.load(lists_ptr)), QUERIES), 1)
    heads = tl.minimum(tl.cdiv(SPREAD, longest), num_heads)
    # a last part of few heads would begin with a long tile when the others are done
    heads = tl.cdiv(num_heads, num_heads // heads)
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
def squash(x):
    """tanh(x), to the last bits of float32 also near zero, where a quotient loses them."""
    power = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    quotient = (1.0 - power) / (1.0 + power)
    y = x * x
    series = x * (1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return tl.where(y < 0.0625, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def factors_of(scale, SOFTCAP: tl.constexpr):
    """What products of queries and keys are multiplied with before a soft-cap, and after it."""
    if SOFTCAP > 0:
        return scale / SOFTCAP, SOFTCAP * LOG2_E
    else:
        return scale, scale * LOG2_E


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
    inside,
    scale,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Go on with a softmax over the keys from ``begin`` to ``end``, tile by tile."""
    for first in range(begin, end, KEYS):
        k = load_tile(
            k_desc, k_ptr, row, column, stride_ks, first, S, KEYS, WIDTH, BLOCK_P, TMA, MASKED
        )
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if SOFTCAP > 0:
            scores = squash(scores * inside)
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
            v_desc, v_ptr, row, column, stride_vs, first, S, KEYS, WIDTH, BLOCK_P, TMA, MASKED
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
def sinks_of(
    position,
    low,
    high,
    starts_ptr,
    S,
    NUM_SINKS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_MARKS: tl.constexpr,
):
    """Where the sinks before ``low`` begin and end [m], and the last key that queries then see.

    A query sees them and the keys from ``low`` to that one, so none of them twice. Of a list
    without a window there are none before it.
    """
    if HAS_MARKS:
        first = tl.load(starts_ptr + position)
        stop = tl.load(starts_ptr + S + position)
    else:
        first = position * 0
        stop = tl.minimum(first + NUM_SINKS, S)
    if not CAUSAL:
        # sinks after the window: all of its keys, and what lies between, are sinks too
        high = tl.maximum(high, stop - 1)
    return first, tl.minimum(stop, low), high


@triton.jit
def span_of(first, stop, S):
    """Where the sinks of a tile begin and end, by its rows that have some."""
    has_sinks = first < stop
    return tl.min(tl.where(has_sinks, first, S)), tl.max(tl.where(has_sinks, stop, 0))


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
    NUM_SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
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
    starts_ptr += batch * S * (2 if NUM_SINKS > 0 else 1)
    at = t + (S - T)
    low, high = bounds_of(at, window, starts_ptr, S, CAUSAL, HAS_MARKS)
    if NUM_SINKS > 0:
        first_sink, sink_stop, high = sinks_of(
            at, low, high, starts_ptr, S, NUM_SINKS, CAUSAL, HAS_MARKS
        )
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
    inside, factor = factors_of(scale, SOFTCAP)
    if NUM_SINKS > 0:
        sinks_begin, sinks_end = span_of(first_sink, sink_stop, S)
        acc, top, total = attend(
            q, acc, top, total, k_desc, v_desc, k_ptr, v_ptr, row, column, stride_ks,
            stride_vs, marks_ptr, first_sink[:, None], sink_stop[:, None] - 1, marks,
            sinks_begin, sinks_end, S, inside, factor,
            KEYS, WIDTH, BLOCK_P, PRECISION, TMA, True, HAS_MARKS, SOFTCAP,
        )  # fmt: skip
    acc, top, total = attend(
        q, acc, top, total, k_desc, v_desc, k_ptr, v_ptr, row, column, stride_ks,
        stride_vs, marks_ptr, low, high, marks, begin, inner, S, inside, factor,
        KEYS, WIDTH, BLOCK_P, PRECISION, TMA, True, HAS_MARKS, SOFTCAP,
    )  # fmt: skip
    acc, top, total = attend(
        q, acc, top, total, k_desc, v_desc, k_ptr, v_ptr, row, column, stride_ks,
        stride_vs, marks_ptr, low, high, marks, inner, outer, S, inside, factor,
        KEYS, WIDTH, BLOCK_P, PRECISION, TMA, False, HAS_MARKS, SOFTCAP,
    )  # fmt: skip
    acc, top, total = attend(
        q, acc, top, total, k_desc, v_desc, k_ptr, v_ptr, row, column, stride_ks,
        stride_vs, marks_ptr, low, high, marks, outer, end, S, inside, factor,
        KEYS, WIDTH, BLOCK_P, PRECISION, TMA, True, HAS_MARKS, SOFTCAP,
    )  # fmt: skip

    rows = rows_ptr + slot.to(tl.int64) * stride_rn + batch * stride_rb + h.to(tl.int64) * stride_rh
    tl.store(
        rows + t[:, None].to(tl.int64) * stride_rt + p[None, :],
        (acc / total[:, None]).to(rows_ptr.dtype.element_ty),
        mask=is_row[:, None] & (p[None, :] < WIDTH),
    )
    lse = lse_ptr + slot.to(tl.int64) * stride_ln + (batch * H + h) * T + t
    tl.store(lse, top + tl.log2(total), mask=is_row)
