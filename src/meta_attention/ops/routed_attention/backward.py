"""Kernels of the backward pass: query gradients by tiles of queries, the rest by tiles of keys."""

import triton
import triton.language as tl

from meta_attention.ops.routed_attention.forward import (
    bounds_of,
    factors_of,
    find_head,
    find_tile,
    is_visible,
    load_tile,
    middle_of,
    sinks_of,
    span_of,
    squash,
)


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
    """Add what the keys from ``begin`` to ``end`` give to the gradient of a tile of queries."""
    for first in range(begin, end, KEYS):
        k = load_tile(
            k_desc, k_ptr, row, column, stride_ks, first, S, KEYS, WIDTH, BLOCK_P, TMA, MASKED
        )
        v = load_tile(
            v_desc, v_ptr, row, column, stride_vs, first, S, KEYS, WIDTH, BLOCK_P, TMA, MASKED
        )
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if SOFTCAP > 0:
            scores = squash(scores * inside)
        weights = tl.exp2(scores * scale - lse[:, None])
        if MASKED:
            s = first + tl.arange(0, KEYS)[None, :]
            visible = is_visible(s, low, high, query_marks, marks_ptr, S, HAS_MARKS)
            weights = tl.where(visible, weights, 0.0)
        d_weights = tl.dot(d_out, v.T, input_precision=PRECISION)
        d_scores = weights * (d_weights - delta[:, None])
        if SOFTCAP > 0:
            d_scores *= 1.0 - scores * scores
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
    NUM_SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
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

    acc = tl.zeros([QUERIES, BLOCK_P], tl.float32)
    k_ptr += batch * stride_kb + kv.to(tl.int64) * stride_kh
    v_ptr += batch * stride_vb + kv.to(tl.int64) * stride_vh
    row = b * desc_rows_b + kv * desc_rows_h
    column = kv * desc_columns_h
    inside, factor = factors_of(scale, SOFTCAP)
    if NUM_SINKS > 0:
        sinks_begin, sinks_end = span_of(first_sink, sink_stop, S)
        acc = attend_backwards(
            q, d_out, acc, lse, delta, k_desc, v_desc, k_ptr, v_ptr, row, column, stride_ks,
            stride_vs, marks_ptr, first_sink[:, None], sink_stop[:, None] - 1, marks,
            sinks_begin, sinks_end, S, inside, factor,
            KEYS, WIDTH, BLOCK_P, PRECISION, TMA, True, HAS_MARKS, SOFTCAP,
        )  # fmt: skip
    acc = attend_backwards(
        q, d_out, acc, lse, delta, k_desc, v_desc, k_ptr, v_ptr, row, column, stride_ks,
        stride_vs, marks_ptr, low, high, marks, begin, inner, S, inside, factor,
        KEYS, WIDTH, BLOCK_P, PRECISION, TMA, True, HAS_MARKS, SOFTCAP,
    )  # fmt: skip
    acc = attend_backwards(
        q, d_out, acc, lse, delta, k_desc, v_desc, k_ptr, v_ptr, row, column, stride_ks,
        stride_vs, marks_ptr, low, high, marks, inner, outer, S, inside, factor,
        KEYS, WIDTH, BLOCK_P, PRECISION, TMA, False, HAS_MARKS, SOFTCAP,
    )  # fmt: skip
    acc = attend_backwards(
        q, d_out, acc, lse, delta, k_desc, v_desc, k_ptr, v_ptr, row, column, stride_ks,
        stride_vs, marks_ptr, low, high, marks, outer, end, S, inside, factor,
        KEYS, WIDTH, BLOCK_P, PRECISION, TMA, True, HAS_MARKS, SOFTCAP,
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
    inside,
    scale,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
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
        if SOFTCAP > 0:
            scores = squash(scores * inside)
        weights = tl.exp2(scores * scale - lse[None, :])
        if MASKED:
            entry = start + tl.arange(0, QUERIES)
            at = tl.load(order + tl.minimum(entry, count - 1)) + past
            low, high = bounds_of(at, window, starts_ptr, S, CAUSAL, HAS_MARKS)
            if NUM_SINKS > 0:
                first_sink, sink_stop, high = sinks_of(
                    at, low, high, starts_ptr, S, NUM_SINKS, CAUSAL, HAS_MARKS
                )
            visible = (s >= low[None, :]) & (s <= high[None, :])
            if NUM_SINKS > 0:
                visible = visible | ((s >= first_sink[None, :]) & (s < sink_stop[None, :]))
            if HAS_MARKS:
                visible = visible & (key_marks == tl.load(marks_ptr + at)[None, :])
            weights = tl.where(visible, weights, 0.0)
        dv = tl.dot(weights.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
        d_weights = tl.dot(v, d_out.T, input_precision=PRECISION)
        d_scores = weights * (d_weights - delta[None, :])
        if SOFTCAP > 0:
            d_scores *= 1.0 - scores * scores
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
    NUM_SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
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
    starts_ptr += batch * S * (2 if NUM_SINKS > 0 else 1)
    key_marks = s
    # queries that may see any of these keys, by position among the keys
    stop = tl.minimum(start + KEYS, S)
    last_seen = S
    if HAS_MARKS:
        key_marks = tl.load(marks_ptr + s, mask=s < S, other=0)
        last_seen = tl.load(ends_ptr + batch * S + stop - 1)
    # sinks are seen from afar
    has_sinks = start < NUM_SINKS
    if HAS_MARKS and NUM_SINKS > 0:
        sink_stops = tl.load(starts_ptr + S + s, mask=s < S, other=0)
        has_sinks = tl.max(sink_stops - s) > 0
    past = S - T
    inside, factor = factors_of(scale, SOFTCAP)

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
        if NUM_SINKS > 0:
            if not CAUSAL:
                earliest = tl.where(has_sinks, 0, earliest)
            latest = tl.where(has_sinks, last_seen, latest)
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
                count, window, past, S, inside, factor, QUERIES, WIDTH, BLOCK_P, PRECISION, TMA,
                CAUSAL, True, HAS_MARKS, NUM_SINKS, SOFTCAP,
            )  # fmt: skip
            dk, dv = attend_from_keys(
                dk, dv, k, v, q_desc, d_desc, packed_q_ptr, packed_d_ptr, packed_lse_ptr,
                packed_delta_ptr, packed, order, marks_ptr, starts_ptr, key_marks, s, inner, last,
                count, window, past, S, inside, factor, QUERIES, WIDTH, BLOCK_P, PRECISION, TMA,
                CAUSAL, False, HAS_MARKS, NUM_SINKS, SOFTCAP,
            )  # fmt: skip
        if EXCLUSIVE:
            base += tl.cdiv(count, packed_tile) * packed_tile
        else:
            base += tl.cdiv(T, packed_tile) * packed_tile

    written = ((batch * S + s64) * K + head) * WIDTH + p
    tl.store(dk_ptr + written, (dk * scale).to(dk_ptr.dtype.element_ty), mask=is_read)
    tl.store(dv_ptr + written, dv.to(dv_ptr.dtype.element_ty), mask=is_read)
