"""Kernels of the forward pass: sums of chunks, their scan, and rows.

Shapes: as in reference.py. The normaliser, the last column of a state, is a vector of its own here,
so that tiles are powers of two; in a flat state of P * P + P numbers it comes last.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def slots_between(
    ranks_ptr, start, end, T, num_ranks, HAS_LIST: tl.constexpr, RANK_BLOCK: tl.constexpr
):
    """First and end of the entries of a list at positions from ``start`` to ``end``."""
    if HAS_LIST:
        first = tl.load(ranks_ptr + start // RANK_BLOCK)
        stop = tl.load(ranks_ptr + tl.minimum(tl.cdiv(end, RANK_BLOCK), num_ranks - 1))
    else:
        first = start
        stop = tl.minimum(end, T)
    return first, stop


@triton.jit
def load_positions(positions_ptr, slot, is_row, HAS_LIST: tl.constexpr):
    if HAS_LIST:
        t = tl.load(positions_ptr + slot, mask=is_row, other=0)
    else:
        t = slot
    return t


@triton.jit
def drop_padding(mask_ptr, t, in_range, HAS_MASK: tl.constexpr):
    if HAS_MASK:
        in_range = in_range & (tl.load(mask_ptr + t, mask=in_range, other=0) != 0)
    return in_range


@triton.jit
def load_tile(ptr, t, c, stride_t, is_used, P: tl.constexpr):
    """[t, c], zero where not used: what padding holds is never read."""
    used = is_used[:, None] & (c < P)[None, :]
    return tl.load(ptr + t.to(tl.int64)[:, None] * stride_t + c[None, :], mask=used, other=0.0)


@triton.jit
def load_transposed(ptr, t, c, stride_t, is_used, P: tl.constexpr):
    """[c, t], zero where not used."""
    used = (c < P)[:, None] & is_used[None, :]
    return tl.load(ptr + t.to(tl.int64)[None, :] * stride_t + c[:, None], mask=used, other=0.0)


@triton.jit
def features(x, is_used, NORMALISE: tl.constexpr):
    if NORMALISE:
        x = tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
    return tl.where(is_used, x, 0.0)


@triton.jit
def load_queries(ptr, t, p, stride_t, is_query, P: tl.constexpr, NORMALISE: tl.constexpr):
    """Queries in float32 less the shift of each row, and the shift; see the reference."""
    q = load_tile(ptr, t, p, stride_t, is_query, P).to(tl.float32)
    shift = tl.zeros([q.shape[0]], tl.float32)
    if NORMALISE:
        shift = tl.minimum(tl.max(tl.where((p < P)[None, :], q, float("-inf")), 1), 0.0)
    return q - shift[:, None], shift


@triton.jit
def linear_attention_sum_kernel(
    key_ptr,
    value_ptr,
    sums_ptr,  # [B, K, N, P * P + P] float32
    features_ptr,  # [B, T, K, P]
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    mask_ptr,  # [B, T] int8
    documents_ptr,  # [B, T] int32
    past_ptr,  # [B, K, N * CHUNK] float32: decay summed since the start of the chunk
    T,
    K,
    N,
    P: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    NORMALISE: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """What one chunk adds to the state, and the features of its keys, which others need too."""
    n = tl.program_id(0)
    bk = tl.program_id(2).to(tl.int64)
    b = bk // K
    key_ptr += b * stride_kb + bk % K * stride_kh
    value_ptr += b * stride_vb + bk % K * stride_vh
    start = n * CHUNK
    stop = tl.minimum(start + CHUNK, T)
    if HAS_DOCUMENTS:
        documents_ptr += b * T
        end = tl.load(documents_ptr + stop - 1)
    if HAS_DECAY:
        past_ptr += bk * N * CHUNK
        total = tl.load(past_ptr + start + CHUNK - 1)

    p = tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    acc = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    norm = tl.zeros([BLOCK_P], tl.float32)
    for s0 in range(start, stop, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        is_key = drop_padding(mask_ptr, b * T + s, s < stop, HAS_MASK)
        k = load_tile(key_ptr, s, p, stride_kt, is_key, P).to(tl.float32)
        f = features(k, is_key[:, None] & (p < P)[None, :], NORMALISE)  # [S, P]
        if tl.program_id(1) == 0:
            at = ((b * T + s) * K + bk % K)[:, None] * P + p[None, :]
            is_written = (s < stop)[:, None] & (p < P)[None, :]
            tl.store(features_ptr + at, f.to(COMPUTE), mask=is_written)
        if HAS_DOCUMENTS:
            is_key = is_key & (tl.load(documents_ptr + s, mask=is_key, other=-1) == end)
            f = tl.where(is_key[:, None], f, 0.0)
        if HAS_DECAY:
            f = f * tl.exp(total - tl.load(past_ptr + s))[:, None]
        f = f.to(COMPUTE)
        v = load_tile(value_ptr, s, c, stride_vt, is_key, P).to(COMPUTE)
        acc = tl.dot(tl.trans(f), v, acc, input_precision=PRECISION)
        norm += tl.sum(f.to(tl.float32), 0)

    sums_ptr += (bk * N + n) * (P * P + P)
    tl.store(sums_ptr + p[:, None] * P + c[None, :], acc, mask=(p < P)[:, None] & (c < P)[None, :])
    if tl.program_id(1) == 0:
        tl.store(sums_ptr + P * P + p, norm, mask=p < P)


@triton.jit
def linear_attention_scan_kernel(
    sums_ptr,  # [B, K, N, P * P + P] float32
    first_ptr,  # [B, K, P, P + 1] float32
    keeps_ptr,  # [B, K, N] float32: what a chunk leaves of the state before it
    states_ptr,  # [B, K, N, P, P]
    norms_ptr,  # [B, K, N, P] float32
    last_ptr,  # [B, K, P, P + 1] float32
    before_ptr,  # states and norms of the forward scan, to be multiplied with those of the reverse
    before_norms_ptr,
    products_ptr,  # [B, K, N, programs] float32
    N,
    P: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_KEEPS: tl.constexpr,
    HAS_PRODUCTS: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The state before each chunk. In reverse, the gradient of the state after it."""
    bk = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_sum = i < P * P
    is_norm = (i >= P * P) & (i < P * P + P)
    at = tl.where(is_sum, (i // P) * (P + 1) + i % P, (i - P * P) * (P + 1) + P)
    at = bk * P * (P + 1) + at

    state = tl.zeros([BLOCK], tl.float32)
    if HAS_FIRST:
        state += tl.load(first_ptr + at, mask=is_sum | is_norm, other=0.0)
    for step in tl.range(0, N, num_stages=STAGES):
        if REVERSE:
            n = bk * N + (N - 1 - step)
        else:
            n = bk * N + step
        added = tl.load(sums_ptr + n * (P * P + P) + i, mask=is_sum | is_norm, other=0.0)
        if HAS_PRODUCTS:
            before = tl.load(before_ptr + n * P * P + i, mask=is_sum, other=0.0).to(tl.float32)
            before += tl.load(before_norms_ptr + n * P + (i - P * P), mask=is_norm, other=0.0)
            product = tl.sum(state * before, 0)
            tl.store(products_ptr + n * tl.num_programs(0) + tl.program_id(0), product)
        tl.store(states_ptr + n * P * P + i, state.to(states_ptr.dtype.element_ty), mask=is_sum)
        tl.store(norms_ptr + n * P + (i - P * P), state, mask=is_norm)
        if HAS_KEEPS:
            state = state * tl.load(keeps_ptr + n)
        state += added
    tl.store(last_ptr + at, state, mask=is_sum | is_norm)


@triton.jit
def linear_attention_fwd_kernel(
    query_ptr,
    features_ptr,  # of the keys [B, T, K, P]
    value_ptr,
    states_ptr,
    norms_ptr,
    rows_ptr,
    normaliser_ptr,  # [B, H, T] float32
    stride_qb,
    stride_qt,
    stride_qh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_ob,
    stride_ot,
    stride_oh,
    mask_ptr,
    documents_ptr,
    past_ptr,
    positions_ptr,  # [B, G, T] int32
    ranks_ptr,  # [B, G, num_ranks] int32
    stride_pb,
    stride_pg,
    stride_rb,
    stride_rg,
    num_ranks,
    skip_ptr,  # [H] float32
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
    """Rows of one tile of a list, all in one chunk."""
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
    query_ptr += b * stride_qb + h * stride_qh
    q, _ = load_queries(query_ptr, t, p, stride_qt, is_query, P, NORMALISE)
    u = features(q, is_query[:, None] & (p < P)[None, :], NORMALISE).to(COMPUTE)  # [M, P]

    # what the state before the chunk gives
    state = load_tile(states_ptr + (bk * N + n) * P * P, p, c, P, p < P, P)
    norm = tl.load(norms_ptr + (bk * N + n) * P + p, mask=p < P, other=0.0)
    acc = tl.dot(u, state, input_precision=PRECISION)  # [M, C]
    den = tl.sum(u.to(tl.float32) * norm[None, :], 1)
    if HAS_DECAY:
        past_ptr += bk * N * CHUNK
        past_t = tl.load(past_ptr + t, mask=is_row, other=0.0)
        acc = acc * tl.exp(past_t)[:, None]
        den = den * tl.exp(past_t)
    if HAS_DOCUMENTS:
        documents_ptr += b * T
        d_t = tl.load(documents_ptr + t, mask=is_row, other=-1)
        is_same = d_t == tl.load(documents_ptr + tl.maximum(start - 1, 0))
        acc = tl.where(is_same[:, None], acc, 0.0)
        den = tl.where(is_same, den, 0.0)

    # what the chunk gives, up to each row
    features_ptr += (b * T * K + bk % K) * P
    value_ptr += b * stride_vb + bk % K * stride_vh
    last = tl.max(tl.where(is_row, t, 0), 0)
    for s0 in range(start, last + 1, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        is_key = drop_padding(mask_ptr, b * T + s, s <= last, HAS_MASK)
        f = load_tile(features_ptr, s, p, K * P, s <= last, P)
        scores = tl.dot(u, tl.trans(f), input_precision=PRECISION)  # [M, S]
        sees = s[None, :] <= t[:, None]
        if HAS_DOCUMENTS:
            d_s = tl.load(documents_ptr + s, mask=is_key, other=-2)
            sees = sees & (d_s[None, :] == d_t[:, None])
        if HAS_DECAY:
            past_s = tl.load(past_ptr + s)
            scores = scores * tl.exp(tl.minimum(past_t[:, None] - past_s[None, :], 0.0))
        scores = tl.where(sees, scores, 0.0).to(COMPUTE)
        v = load_tile(value_ptr, s, c, stride_vt, is_key, P).to(COMPUTE)
        acc = tl.dot(scores, v, acc, input_precision=PRECISION)
        den += tl.sum(scores.to(tl.float32), 1)

    if NORMALISE:
        den = tl.maximum(den, MIN_NORMALISER)
        acc = acc / den[:, None]
        if tl.program_id(1) == 0:
            tl.store(normaliser_ptr + bh * T + t, den, mask=is_row)
    if HAS_SKIP:
        own = load_tile(value_ptr, t, c, stride_vt, is_query, P).to(tl.float32)
        acc += tl.load(skip_ptr + h) * own
    rows_ptr += b * stride_ob + h * stride_oh
    out = rows_ptr + t.to(tl.int64)[:, None] * stride_ot + c[None, :]
    tl.store(out, acc.to(rows_ptr.dtype.element_ty), mask=is_row[:, None] & (c < P)[None, :])
