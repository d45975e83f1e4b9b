"""Kernels of the backward pass.

With u the features of a query, a row is (u . sums) / (u . norm). So from a gradient g of the row
the state gets the gradient

    u^T [g, pull] / (u . norm),    pull = -(g . row)

and where nothing is divided, it is u^T [g, 0]. The query kernel packs u, g and pull, the latter two
divided already, in the order of the list: the kernels after it read them without a detour. Shapes
and names: as in forward.py.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from meta_attention.ops.linear_attention.forward import (
    drop_padding,
    features,
    load_positions,
    load_queries,
    load_tile,
    load_transposed,
    slots_between,
)


@triton.jit
def slope(x, NORMALISE: tl.constexpr):
    """Derivative of the features."""
    if NORMALISE:
        out = tl.where(x > 0, 1.0, tl.exp(tl.minimum(x, 0.0)))
    else:
        out = tl.full(x.shape, 1.0, tl.float32)
    return out


@triton.jit
def linear_attention_bwd_query_kernel(
    query_ptr,
    features_ptr,  # of the keys [B, T, K, P]
    value_ptr,
    states_ptr,
    norms_ptr,
    rows_ptr,
    normaliser_ptr,  # [B, H, T] float32
    grad_ptr,
    d_query_ptr,
    packed_u_ptr,  # [B, H, T, P]
    packed_g_ptr,  # [B, H, T, P]
    packed_pull_ptr,  # [B, H, T] float32
    decay_terms_ptr,  # [column tiles, B, H, N * CHUNK] float32
    skip_terms_ptr,  # [B, H, T] float32
    stride_qb,
    stride_qt,
    stride_qh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_gb,
    stride_gt,
    stride_gh,
    mask_ptr,
    documents_ptr,
    past_ptr,
    positions_ptr,
    ranks_ptr,
    stride_pb,
    stride_pg,
    stride_rb,
    stride_rg,
    num_ranks,
    skip_ptr,
    T,
    K,
    N,
    GROUP: tl.constexpr,
    P: tl.constexpr,
    CHUNK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    MIN_NORMALISER: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_LIST: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    NORMALISE: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Gradient of the queries of one tile of a list; packs what the kernels after it need."""
    n = tl.program_id(0) // (CHUNK // BLOCK_M)
    bh = tl.program_id(2).to(tl.int64)
    bk = bh // GROUP
    b = bk // K
    h = bh % (K * GROUP)
    start = n * CHUNK
    if HAS_LIST:
        positions_ptr += b * stride_pb + bk % K * stride_pg
        ranks_ptr += b * stride_rb + bk % K * stride_rg
    first, stop = slots_between(ranks_ptr, start, start + CHUNK, T, num_ranks, HAS_LIST, RANK_BLOCK)
    first += tl.program_id(0) % (CHUNK // BLOCK_M) * BLOCK_M
    if first >= stop:
        return

    slot = first + tl.arange(0, BLOCK_M)
    is_row = slot < stop
    t = load_positions(positions_ptr, slot, is_row, HAS_LIST)
    is_query = drop_padding(mask_ptr, b * T + t, is_row, HAS_MASK)
    p = tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    grad_ptr += b * stride_gb + h * stride_gh
    g = load_tile(grad_ptr, t, p, stride_gt, is_query, P).to(COMPUTE)  # [M, P]
    pull = tl.zeros([BLOCK_M], tl.float32)
    scale = tl.full([BLOCK_M], 1.0, tl.float32)
    if NORMALISE:
        rows_ptr += b * stride_ob + h * stride_oh
        row = load_tile(rows_ptr, t, p, stride_ot, is_query, P).to(tl.float32)
        den = tl.load(normaliser_ptr + bh * T + t, mask=is_query, other=1.0)
        # a normaliser at its floor does not depend on anything
        pull = tl.where(den > MIN_NORMALISER, -tl.sum(g.to(tl.float32) * row, 1), 0.0)
        scale = 1.0 / den
    if tl.program_id(1) == 0:
        packed = ((bh * T + slot) * P)[:, None] + p[None, :]
        is_packed = is_row[:, None] & (p < P)[None, :]
        tl.store(packed_pull_ptr + bh * T + slot, pull * scale, mask=is_row)
        scaled = (g.to(tl.float32) * scale[:, None]).to(COMPUTE)
        tl.store(packed_g_ptr + packed, scaled, mask=is_packed)

    # through the state before the chunk
    state = load_transposed(states_ptr + (bk * N + n) * P * P, c, p, P, c < P, P)  # [P, C]
    norm = tl.load(norms_ptr + (bk * N + n) * P + c, mask=c < P, other=0.0)
    du = tl.dot(g, state, input_precision=PRECISION) + pull[:, None] * norm[None, :]  # [M, C]
    du = du * scale[:, None]
    if HAS_DECAY:
        past_ptr += bk * N * CHUNK
        past_t = tl.load(past_ptr + t, mask=is_row, other=0.0)
        du = du * tl.exp(past_t)[:, None]
    if HAS_DOCUMENTS:
        documents_ptr += b * T
        d_t = tl.load(documents_ptr + t, mask=is_row, other=-1)
        is_same = d_t == tl.load(documents_ptr + tl.maximum(start - 1, 0))
        du = tl.where(is_same[:, None], du, 0.0)

    # through the chunk up to each row
    features_ptr += (b * T * K + bk % K) * P
    value_ptr += b * stride_vb + bk % K * stride_vh
    last = tl.max(tl.where(is_row, t, 0), 0)
    for s0 in range(start, last + 1, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        is_key = drop_padding(mask_ptr, b * T + s, s <= last, HAS_MASK)
        v = load_tile(value_ptr, s, p, stride_vt, is_key, P).to(COMPUTE)  # [S, P]
        d_scores = tl.dot(g, tl.trans(v), input_precision=PRECISION) + pull[:, None]  # [M, S]
        d_scores = d_scores * scale[:, None]
        sees = s[None, :] <= t[:, None]
        if HAS_DOCUMENTS:
            d_s = tl.load(documents_ptr + s, mask=is_key, other=-2)
            sees = sees & (d_s[None, :] == d_t[:, None])
        if HAS_DECAY:
            past_s = tl.load(past_ptr + s)
            d_scores = d_scores * tl.exp(tl.minimum(past_t[:, None] - past_s[None, :], 0.0))
        d_scores = tl.where(sees, d_scores, 0.0).to(COMPUTE)
        f = load_tile(features_ptr, s, c, K * P, s <= last, P)  # [S, C]
        du = tl.dot(d_scores, f, du, input_precision=PRECISION)

    query_ptr += b * stride_qb + h * stride_qh
    q, shift = load_queries(query_ptr, t, p, stride_qt, is_query, P, NORMALISE)
    if tl.program_id(1) == 0:
        u = features(q, is_query[:, None] & (p < P)[None, :], NORMALISE).to(COMPUTE)
        packed = ((bh * T + slot) * P)[:, None] + p[None, :]
        tl.store(packed_u_ptr + packed, u, mask=is_row[:, None] & (p < P)[None, :])
        if HAS_SKIP:
            own = load_tile(value_ptr, t, p, stride_vt, is_query, P).to(tl.float32)
            tl.store(skip_terms_ptr + bh * T + t, tl.sum(g.to(tl.float32) * own, 1), mask=is_row)
    if BLOCK_C != BLOCK_P:
        q = load_tile(query_ptr, t, c, stride_qt, is_query, P).to(tl.float32) - shift[:, None]
    used = is_row[:, None] & (c < P)[None, :]
    if HAS_DECAY:
        terms = features(q, used, NORMALISE).to(COMPUTE).to(tl.float32) * du
        at = (tl.program_id(1) * tl.num_programs(2) + bh) * N * CHUNK + t
        tl.store(decay_terms_ptr + at, tl.sum(terms, 1), mask=is_row)
    out = d_query_ptr + ((b * T + t) * K * GROUP + h)[:, None] * P + c[None, :]
    dq = du * slope(q, NORMALISE)
    tl.store(out, dq.to(d_query_ptr.dtype.element_ty), mask=used)


@triton.jit
def linear_attention_bwd_sum_kernel(
    packed_u_ptr,
    packed_g_ptr,
    packed_pull_ptr,
    sums_ptr,  # [B, K, N, P * P + P] float32
    mask_ptr,
    documents_ptr,
    past_ptr,
    positions_ptr,
    ranks_ptr,
    stride_pb,
    stride_pg,
    stride_rb,
    stride_rg,
    num_ranks,
    T,
    K,
    N,
    GROUP: tl.constexpr,
    P: tl.constexpr,
    CHUNK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    MIN_NORMALISER: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_LIST: tl.constexpr,
    NORMALISE: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """What the rows of one chunk add to the gradient of the state before it."""
    n = tl.program_id(0)
    bk = tl.program_id(2).to(tl.int64)
    b = bk // K
    start = n * CHUNK
    if HAS_LIST:
        positions_ptr += b * stride_pb + bk % K * stride_pg
        ranks_ptr += b * stride_rb + bk % K * stride_rg
    if HAS_DOCUMENTS:
        documents_ptr += b * T
        carried = tl.load(documents_ptr + tl.maximum(start - 1, 0))
    if HAS_DECAY:
        past_ptr += bk * N * CHUNK
    first, stop = slots_between(ranks_ptr, start, start + CHUNK, T, num_ranks, HAS_LIST, RANK_BLOCK)

    p = tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    acc = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    norm = tl.zeros([BLOCK_P], tl.float32)
    for member in range(GROUP):
        bh = bk * GROUP + member
        for slot0 in range(first, stop, BLOCK_M):
            slot = slot0 + tl.arange(0, BLOCK_M)
            is_row = slot < stop
            packed = bh * T + slot
            u = load_tile(packed_u_ptr, packed, p, P, is_row, P)  # [M, P]
            if HAS_DECAY or HAS_DOCUMENTS:
                t = load_positions(positions_ptr, slot, is_row, HAS_LIST)
                weight = tl.full([BLOCK_M], 1.0, tl.float32)
                if HAS_DECAY:
                    weight = tl.exp(tl.load(past_ptr + t, mask=is_row, other=0.0))
                if HAS_DOCUMENTS:
                    d_t = tl.load(documents_ptr + t, mask=is_row, other=-1)
                    weight = tl.where(d_t == carried, weight, 0.0)
                u = (u.to(tl.float32) * weight[:, None]).to(COMPUTE)
            if NORMALISE:
                pull = tl.load(packed_pull_ptr + packed, mask=is_row, other=0.0)
                norm += tl.sum(u.to(tl.float32) * pull[:, None], 0)
            g = load_tile(packed_g_ptr, packed, c, P, is_row, P)
            acc = tl.dot(tl.trans(u), g, acc, input_precision=PRECISION)

    sums_ptr += (bk * N + n) * (P * P + P)
    tl.store(sums_ptr + p[:, None] * P + c[None, :], acc, mask=(p < P)[:, None] & (c < P)[None, :])
    if tl.program_id(1) == 0:
        tl.store(sums_ptr + P * P + p, norm, mask=p < P)


@triton.jit
def linear_attention_bwd_key_kernel(
    packed_u_ptr,
    packed_g_ptr,
    packed_pull_ptr,
    key_ptr,
    value_ptr,
    states_ptr,  # gradients of the states after every chunk
    norms_ptr,
    d_key_ptr,
    d_value_ptr,
    decay_terms_ptr,  # [2, column tiles, B, K, N * CHUNK] float32: of later chunks, of its own
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    mask_ptr,
    documents_ptr,
    past_ptr,
    positions_ptr,
    ranks_ptr,
    stride_pb,
    stride_pg,
    stride_rb,
    stride_rg,
    num_ranks,
    skip_ptr,
    T,
    K,
    N,
    GROUP: tl.constexpr,
    P: tl.constexpr,
    CHUNK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    MIN_NORMALISER: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_LIST: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    NORMALISE: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Gradients of one tile of keys and values, summed over the query heads they serve."""
    s0 = tl.program_id(0) * BLOCK_S
    if s0 >= T:
        return
    n = s0 // CHUNK
    bk = tl.program_id(2).to(tl.int64)
    b = bk // K
    start = n * CHUNK
    s = s0 + tl.arange(0, BLOCK_S)
    is_key = drop_padding(mask_ptr, b * T + s, s < T, HAS_MASK)
    p = tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    key_ptr += b * stride_kb + bk % K * stride_kh
    value_ptr += b * stride_vb + bk % K * stride_vh
    k = load_tile(key_ptr, s, p, stride_kt, is_key, P).to(tl.float32)
    f = features(k, is_key[:, None] & (p < P)[None, :], NORMALISE).to(COMPUTE)  # [S, P]
    v = load_tile(value_ptr, s, p, stride_vt, is_key, P).to(COMPUTE)

    # through the state after the chunk
    states_ptr += (bk * N + n) * P * P
    state = load_tile(states_ptr, p, c, P, p < P, P)
    dv = tl.dot(f, state, input_precision=PRECISION)  # [S, C]
    state = load_transposed(states_ptr, c, p, P, c < P, P)
    norm = tl.load(norms_ptr + (bk * N + n) * P + c, mask=c < P, other=0.0)
    df = tl.dot(v, state, input_precision=PRECISION) + norm[None, :]
    if HAS_DECAY:
        past_ptr += bk * N * CHUNK
        past_s = tl.load(past_ptr + s)
        to_end = tl.exp(tl.load(past_ptr + start + CHUNK - 1) - past_s)
        dv = dv * to_end[:, None]
        df = df * to_end[:, None]
    if HAS_DOCUMENTS:
        documents_ptr += b * T
        d_s = tl.load(documents_ptr + s, mask=is_key, other=-2)
        is_same = d_s == tl.load(documents_ptr + tl.minimum(start + CHUNK, T) - 1)
        dv = tl.where(is_same[:, None], dv, 0.0)
        df = tl.where(is_same[:, None], df, 0.0)
    used = is_key[:, None] & (c < P)[None, :]
    if HAS_DECAY:
        k = load_tile(key_ptr, s, c, stride_kt, is_key, P).to(tl.float32)
        later = tl.sum(features(k, used, NORMALISE).to(COMPUTE).to(tl.float32) * df, 1)

    # through the rows of the chunk that follow
    if HAS_LIST:
        positions_ptr += b * stride_pb + bk % K * stride_pg
        ranks_ptr += b * stride_rb + bk % K * stride_rg
    first, stop = slots_between(ranks_ptr, s0, start + CHUNK, T, num_ranks, HAS_LIST, RANK_BLOCK)
    for member in range(GROUP):
        bh = bk * GROUP + member
        for slot0 in range(first, stop, BLOCK_M):
            slot = slot0 + tl.arange(0, BLOCK_M)
            is_row = slot < stop
            t = load_positions(positions_ptr, slot, is_row, HAS_LIST)
            packed = bh * T + slot
            u = load_tile(packed_u_ptr, packed, p, P, is_row, P)  # [M, P]
            g = load_tile(packed_g_ptr, packed, p, P, is_row, P)
            sees = (s[:, None] <= t[None, :]) & is_row[None, :]
            if HAS_DOCUMENTS:
                d_t = tl.load(documents_ptr + t, mask=is_row, other=-1)
                sees = sees & (d_s[:, None] == d_t[None, :])
            scores = tl.dot(f, tl.trans(u), input_precision=PRECISION)  # [S, M]
            d_scores = tl.dot(v, tl.trans(g), input_precision=PRECISION)
            if NORMALISE:
                d_scores += tl.load(packed_pull_ptr + packed, mask=is_row, other=0.0)[None, :]
            if HAS_DECAY:
                past_t = tl.load(past_ptr + t, mask=is_row, other=0.0)
                to_row = tl.exp(tl.minimum(past_t[None, :] - past_s[:, None], 0.0))
                scores = scores * to_row
                d_scores = d_scores * to_row
            if HAS_SKIP:
                # a row sees its own value as if its score were larger by as much
                skip = tl.load(skip_ptr + bh % (K * GROUP))
                scores += tl.where(s[:, None] == t[None, :], skip, 0.0)
            scores = tl.where(sees, scores, 0.0).to(COMPUTE)
            d_scores = tl.where(sees, d_scores, 0.0).to(COMPUTE)
            if BLOCK_C != BLOCK_P:
                u = load_tile(packed_u_ptr, packed, c, P, is_row, P)
                g = load_tile(packed_g_ptr, packed, c, P, is_row, P)
            dv = tl.dot(scores, g, dv, input_precision=PRECISION)
            df = tl.dot(d_scores, u, df, input_precision=PRECISION)

    k = load_tile(key_ptr, s, c, stride_kt, is_key, P).to(tl.float32)
    if HAS_DECAY:
        terms = tl.sum(features(k, used, NORMALISE).to(COMPUTE).to(tl.float32) * df, 1)
        at = (tl.program_id(1) * tl.num_programs(2) + bk) * N * CHUNK + s
        both = tl.num_programs(1) * tl.num_programs(2).to(tl.int64) * N * CHUNK
        tl.store(decay_terms_ptr + at, later, mask=is_key)
        tl.store(decay_terms_ptr + both + at, terms - later, mask=is_key)
    dk = tl.where(used, df * slope(k, NORMALISE), 0.0)
    out = ((b * T + s) * K + bk % K)[:, None] * P + c[None, :]
    used = (s < T)[:, None] & (c < P)[None, :]
    tl.store(d_key_ptr + out, dk.to(d_key_ptr.dtype.element_ty), mask=used)
    tl.store(d_value_ptr + out, dv.to(d_value_ptr.dtype.element_ty), mask=used)


@triton.jit
def linear_attention_bwd_decay_kernel(
    row_terms_ptr,  # [B, K, N * CHUNK] float32
    later_terms_ptr,
    own_terms_ptr,
    through_ptr,  # [B, K, N] float32
    d_decay_ptr,  # [B, T, K] float32
    mask_ptr,
    documents_ptr,
    T,
    K,
    N,
    CHUNK: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of the decay: all that passes from before a token to it or beyond.

    A term is the share of one row or key in the loss. From rows at t and beyond go those parts
    that their keys at t and beyond have given; what passes the whole chunk is ``through``.
    """
    bk = tl.program_id(1).to(tl.int64)
    b = bk // K
    start = tl.program_id(0) * BLOCK
    n = start // CHUNK
    t = start + tl.arange(0, BLOCK)
    is_token = drop_padding(mask_ptr, b * T + t, t < T, HAS_MASK)
    through = tl.load(through_ptr + bk * N + n)
    out = tl.zeros([BLOCK], tl.float32) + through
    if HAS_DOCUMENTS:
        documents_ptr += b * T
        d_t = tl.load(documents_ptr + t, mask=t < T, other=-1)
        end = tl.load(documents_ptr + tl.minimum((n + 1) * CHUNK, T) - 1)
        out = tl.where(d_t == end, out, 0.0)
    for s0 in range(n * CHUNK, tl.minimum((n + 1) * CHUNK, T), BLOCK):
        s = s0 + tl.arange(0, BLOCK)
        at = bk * N * CHUNK + s
        beyond = tl.load(row_terms_ptr + at) - tl.load(own_terms_ptr + at)
        before = tl.load(later_terms_ptr + at)
        terms = tl.where(s[None, :] >= t[:, None], beyond[None, :], before[None, :])
        if HAS_DOCUMENTS:
            d_s = tl.load(documents_ptr + s, mask=s < T, other=-2)
            terms = tl.where(d_s[None, :] == d_t[:, None], terms, 0.0)
        out += tl.sum(terms, 1)
    out = tl.where(is_token, out, 0.0)
    tl.store(d_decay_ptr + (b * T + t) * K + bk % K, out, mask=t < T)
