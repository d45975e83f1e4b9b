"""Gradient of the queries for Hopper GPUs, in the manner of ``hopper.py``.

Keys and values change their roles: the gradient g of a row meets the state from its other side,

    du[t] = g[t] state^T + pull[t] norm + sum_s (g[t] . value[s] + pull[t]) f(key[s]),    s <= t

so a program holds the states of 64 columns of the features, all values wide. It packs u, g and pull
for the kernels after it: see ``backward.py``, which is the definition of what this does.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from meta_attention.ops.linear_attention.hopper import (
    CHUNK,
    COLUMNS,
    PART,
    WALK_STAGES,
    add_chunk,
    add_warps,
    afresh,
    aligned,
    all_warps,
    copy_chunk,
    copy_rows,
    cut_segments,
    describe,
    drop_beyond,
    features,
    load_layout,
    load_positions,
    mma_layout,
    next_rows,
    put_features,
    rank_at,
    store_rows,
    strides_of,
    sum_in_warp,
    tile_layout,
)
from meta_attention.ops.linear_attention.reference import MIN_NORMALISER

# renamed between the versions of Triton we run on
_tile = gl.shared_memory_descriptor
seen_as = getattr(_tile, "reinterpret", None) or _tile._reinterpret


@gluon.jit
def load_rows(ptr, t, stride, is_row, c):
    """[t, c], zero where not listed."""
    at = gl.expand_dims(t.to(gl.int64) * stride, 1) + gl.expand_dims(c, 0)
    return gl.load(ptr + at, mask=gl.expand_dims(is_row, 1), other=0.0)


@gluon.jit
def put_shifts(
    tile,
    query_ptr,
    positions_ptr,
    first,
    stop,
    stride,
    WIDTH: gl.constexpr,
    LOAD: gl.constexpr,
    HAS_LIST: gl.constexpr,
):
    """What ``put_queries`` takes off the queries of some rows."""
    slot = first + gl.arange(0, PART, layout=gl.SliceLayout(1, LOAD))
    p = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LOAD))
    t = load_positions(positions_ptr, slot, stop, HAS_LIST)
    q = load_rows(query_ptr, t, stride, slot < stop, p).to(gl.float32)
    tile.store(gl.minimum(gl.max(q, axis=1), 0.0))


@gluon.jit
def finish_rows(
    du_tile,
    shift_tile,
    pull_tile,
    norm_tile,
    query_ptr,
    grad_ptr,
    normaliser_ptr,
    d_query_ptr,
    packed_u_ptr,
    packed_g_ptr,
    packed_pull_ptr,
    positions_ptr,
    first,
    stop,
    stride_qt,
    stride_gt,
    stride_dt,
    P: gl.constexpr,
    TILE: gl.constexpr,
    HAS_LIST: gl.constexpr,
    NORMALISE: gl.constexpr,
):
    """From gradients of features to those of queries, in the program's columns of some rows."""
    ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    dtype: gl.constexpr = packed_u_ptr.dtype.element_ty
    slot = first + gl.arange(0, PART, layout=ROW)
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, TILE))
    is_row = slot < stop
    t = load_positions(positions_ptr, slot, stop, HAS_LIST)
    u = load_rows(query_ptr, t, stride_qt, is_row, c).to(gl.float32)
    g = load_rows(grad_ptr, t, stride_gt, is_row, c).to(gl.float32)
    du = du_tile.load(TILE)
    pull = gl.zeros([PART], gl.float32, ROW)
    if NORMALISE:
        scale = 1.0 / gl.load(normaliser_ptr + t, mask=is_row, other=1.0)
        u = features(u - gl.expand_dims(shift_tile.load(ROW), 1), NORMALISE)
        pull = pull_tile.load(ROW) * scale
        norm = gl.expand_dims(norm_tile.load(gl.SliceLayout(0, TILE)), 0)
        du = du * gl.expand_dims(scale, 1) + gl.expand_dims(pull, 1) * norm
        # the slope of the features: 1 above 0, and the features themselves below
        du = du * gl.minimum(u, 1.0)
        g = g * gl.expand_dims(scale, 1)
    store_rows(d_query_ptr, du.to(dtype), t, stride_dt, is_row, c, TILE)
    store_rows(packed_u_ptr, u.to(dtype), slot, P, is_row, c, TILE)
    store_rows(packed_g_ptr, g.to(dtype), slot, P, is_row, c, TILE)
    # once, not by every program of the row
    if gl.program_id(0) == 0:
        gl.store(packed_pull_ptr + slot, pull, mask=is_row)


@gluon.jit
def linear_attention_hopper_bwd_query_kernel(
    query_ptr,
    k_desc,
    v_desc,
    states_ptr,  # [B, K, G, P, P] float32, before every segment
    norms_ptr,  # [B, K, G, P] float32
    rows_ptr,
    normaliser_ptr,  # [B, H, T] float32
    grad_ptr,
    d_query_ptr,  # [B, T, H, P]
    packed_u_ptr,  # [B, H, T, P]
    packed_g_ptr,  # [B, H, T, P]
    packed_pull_ptr,  # [B, H, T] float32
    positions_ptr,
    ranks_ptr,
    T,
    K,
    chunks,
    k_rows_b,
    k_rows_h,
    k_columns_h,
    v_rows_b,
    v_rows_h,
    v_columns_h,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_pb,
    stride_pg,
    stride_rb,
    stride_rg,
    GROUP: gl.constexpr,
    P: gl.constexpr,
    MIN_NORMALISER: gl.constexpr,
    HAS_LIST: gl.constexpr,
    NORMALISE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Some columns of the gradients of one segment's queries."""
    LOAD: gl.constexpr = load_layout(P)
    TILE: gl.constexpr = tile_layout(P)
    MMA: gl.constexpr = mma_layout()
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    DU: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, COLUMNS], gl.float32)
    dtype: gl.constexpr = k_desc.dtype
    half = gl.program_id(0)
    segment = gl.program_id(1)
    bk = gl.program_id(2)
    b = bk // K
    kv = bk % K
    begin = segment * chunks
    end = gl.minimum(begin + chunks, gl.cdiv(T, CHUNK))
    k_row = b * k_rows_b + kv * k_rows_h
    k_column = kv * k_columns_h + half * COLUMNS
    v_row = b * v_rows_b + kv * v_rows_h
    v_column = kv * v_columns_h
    b = b.to(gl.int64)
    kv = kv.to(gl.int64)
    query_ptr += b * stride_qb + kv * GROUP * stride_qh
    rows_ptr += b * stride_ob + kv * GROUP * stride_oh
    grad_ptr += b * stride_gb + kv * GROUP * stride_gh
    d_query_ptr += (b * T * K + kv) * GROUP * P + half * COLUMNS
    packed = bk.to(gl.int64) * GROUP * T
    normaliser_ptr += packed
    packed_pull_ptr += packed
    packed_u_ptr += packed * P + half * COLUMNS
    packed_g_ptr += packed * P + half * COLUMNS
    if HAS_LIST:
        positions_ptr += b * stride_pb + kv * stride_pg
        ranks_ptr += b * stride_rb + kv * stride_rg

    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, P], v_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, COLUMNS], k_desc.layout)
    f_tile = gl.allocate_shared_memory(dtype, [CHUNK, COLUMNS], k_desc.layout)
    g_tile = gl.allocate_shared_memory(dtype, [CHUNK, P], v_desc.layout)
    s_tile = gl.allocate_shared_memory(dtype, [P, COLUMNS], k_desc.layout)
    # rows are read before the gradients of their features are there
    du_tile = gl.allocate_shared_memory(gl.float32, [CHUNK, COLUMNS], DU)
    out_tile = seen_as(du_tile, dtype, [CHUNK, P], v_desc.layout)
    shift_tile = gl.allocate_shared_memory(gl.float32, [CHUNK], LINE)
    pull_tile = gl.allocate_shared_memory(gl.float32, [CHUNK], LINE)
    norm_tile = gl.allocate_shared_memory(gl.float32, [COLUMNS], LINE)
    parts_tile = gl.allocate_shared_memory(gl.float32, [4, COLUMNS], LINES)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    all_warps()
    for i in gl.static_range(STAGES - 1):
        copy_chunk(
            begin + i, begin, end, k_desc, v_desc, k_tiles, v_tiles, ready, k_row, k_column, v_row,
            v_column, STAGES,
        )  # fmt: skip

    # the first rows, then the state before the segment
    first = rank_at(ranks_ptr, begin, T, HAS_LIST)
    stop = rank_at(ranks_ptr, begin + 1, T, HAS_LIST)
    following = rank_at(ranks_ptr, gl.minimum(begin + 2, end), T, HAS_LIST)
    line = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LOAD))
    p = gl.arange(0, P, layout=gl.SliceLayout(0, LOAD))
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, TILE))
    is_row = first + line < stop
    t = load_positions(positions_ptr, first + line, stop, HAS_LIST)
    copy_rows(g_tile, grad_ptr, t, stride_gt, is_row, p)
    if NORMALISE:
        copy_rows(out_tile, rows_ptr, t, stride_ot, is_row, p)
        den = gl.load(normaliser_ptr + t, mask=is_row, other=1.0)
    at = bk.to(gl.int64) * gl.num_programs(1) + segment
    state_row = gl.arange(0, P, layout=ROW)
    state_column = half * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA))
    state_at = gl.expand_dims(state_row, 1) + gl.expand_dims(state_column * P, 0)
    state = gl.load(states_ptr + at * P * P + state_at)
    norm_tile.store(gl.load(norms_ptr + at * P + half * COLUMNS + c))
    s_tile.store(state.to(dtype))

    empty = gl.zeros([CHUNK, COLUMNS], gl.float32, MMA)
    row = gl.arange(0, CHUNK, layout=ROW)
    s = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, MMA))
    for n in range(begin, end):
        copy_chunk(
            n + STAGES - 1, begin, end, k_desc, v_desc, k_tiles, v_tiles, ready, k_row, k_column,
            v_row, v_column, STAGES,
        )  # fmt: skip
        later = rank_at(ranks_ptr, gl.minimum(n + 3, end), T, HAS_LIST)
        stage = (n - begin) % STAGES
        v_tile = v_tiles.index(stage)
        lap = ((n - begin) // STAGES) & 1
        mbarrier.wait(ready.index(stage), lap)
        total = put_features(f_tile, k_tiles.index(stage), n * CHUNK, T, P, TILE, NORMALISE)
        if NORMALISE:
            parts_tile.store(sum_in_warp(total, P))
        drop_beyond(v_tile, n * CHUNK, T, LOAD)

        if first < stop:
            for member in range(GROUP):
                first = afresh(first)
                next_first, next_stop, next_member = next_rows(
                    first, stop, following, member, GROUP
                )
                async_copy.wait_group(0)
                if NORMALISE:
                    g = g_tile.load(LOAD).to(gl.float32)
                    # a normaliser at its floor does not depend on anything
                    pull = -gl.sum(g * out_tile.load(LOAD).to(gl.float32), axis=1)
                    pull_tile.store(gl.where(den > MIN_NORMALISER, pull, 0.0))
                fence_async_shared()
                all_warps()

                d_scores = warpgroup_mma(
                    g_tile, v_tile.permute((1, 0)), empty, use_acc=False, is_async=True
                )
                if GROUP == 1:
                    state = warpgroup_mma(v_tile.permute((1, 0)), f_tile, state, is_async=True)
                at_row = load_positions(positions_ptr, first + row, stop, HAS_LIST)
                # offsets in 64 bits
                head = kv * 0 + member
                q_ptr = query_ptr + head * stride_qh
                if NORMALISE:
                    for i in gl.static_range(CHUNK // PART):
                        if first + i * PART < stop:
                            put_shifts(
                                shift_tile.slice(i * PART, PART), q_ptr, positions_ptr,
                                first + i * PART, stop, stride_qt, P, LOAD, HAS_LIST,
                            )  # fmt: skip
                d_scores = warpgroup_mma_wait(1 if GROUP == 1 else 0, deps=(d_scores,))
                if NORMALISE:
                    d_scores += gl.expand_dims(pull_tile.load(ROW), 1)
                sees = gl.expand_dims(n * CHUNK + s, 0) <= gl.expand_dims(at_row, 1)
                operand = gl.where(sees, d_scores, 0.0).to(dtype)
                operand = gl.convert_layout(operand, OPERAND)
                # not before: there are no registers for the scores and this
                du = warpgroup_mma(g_tile, s_tile, empty, use_acc=False, is_async=True)
                du = warpgroup_mma(operand, f_tile, du, is_async=True)
                if GROUP == 1:
                    du, operand, state = warpgroup_mma_wait(0, deps=(du, operand, state))
                else:
                    du, operand = warpgroup_mma_wait(0, deps=(du, operand))

                du_tile.store(du)
                here = head * T
                # long over: keeps the assembler from working out addresses before the products
                mbarrier.wait(ready.index(stage), lap)
                first = afresh(first)
                for i in gl.static_range(CHUNK // PART):
                    if first + i * PART < stop:
                        finish_rows(
                            du_tile.slice(i * PART, PART), shift_tile.slice(i * PART, PART),
                            pull_tile.slice(i * PART, PART), norm_tile, q_ptr + half * COLUMNS,
                            grad_ptr + head * stride_gh + half * COLUMNS, normaliser_ptr + here,
                            d_query_ptr + head * P, packed_u_ptr + here * P,
                            packed_g_ptr + here * P, packed_pull_ptr + here, positions_ptr,
                            first + i * PART, stop, stride_qt, stride_gt, K * GROUP * P, P, TILE,
                            HAS_LIST, NORMALISE,
                        )  # fmt: skip

                # before anything writes where others may still read
                all_warps()
                next_t = load_positions(positions_ptr, next_first + line, next_stop, HAS_LIST)
                is_next = next_first + line < next_stop
                next_head = kv * 0 + next_member
                copy_rows(g_tile, grad_ptr + next_head * stride_gh, next_t, stride_gt, is_next, p)
                if NORMALISE:
                    copy_rows(
                        out_tile, rows_ptr + next_head * stride_oh, next_t, stride_ot, is_next, p
                    )
                    den = gl.load(normaliser_ptr + next_head * T + next_t, is_next, other=1.0)
        else:
            next_t = load_positions(positions_ptr, stop + line, following, HAS_LIST)
            is_next = stop + line < following
            copy_rows(g_tile, grad_ptr, next_t, stride_gt, is_next, p)
            if NORMALISE:
                copy_rows(out_tile, rows_ptr, next_t, stride_ot, is_next, p)
                den = gl.load(normaliser_ptr + next_t, is_next, other=1.0)
            if GROUP == 1:
                state = add_chunk(state, v_tile, f_tile)
                all_warps()
        # in one place: from two, the compiler makes one that reads beside the tiles
        if GROUP > 1:
            state = add_chunk(state, v_tile, f_tile)
            all_warps()
        if NORMALISE:
            add_warps(norm_tile, parts_tile)
        s_tile.store(state.to(dtype))
        first = stop
        stop = following
        following = later


def walk_query_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    states: Tensor,
    norms: Tensor,
    rows: Tensor,
    normaliser: Tensor,
    grad: Tensor,
    d_query: Tensor,
    packed: tuple[Tensor, Tensor, Tensor],
    normalise: bool,
    lists: dict[str, object],
) -> None:
    """Gradients of the listed queries, and what the kernels after this read of them."""
    B, T, K, P = key.shape
    segments, chunks = cut_segments(T, B * K, P)
    rows, grad = aligned(rows), aligned(grad.to(query.dtype))
    k_desc, k_offsets = describe(key, COLUMNS.value)
    v_desc, v_offsets = describe(value, P)
    linear_attention_hopper_bwd_query_kernel[(P // COLUMNS.value, segments, B * K)](
        query,
        k_desc,
        v_desc,
        states,
        norms,
        rows,
        normaliser,
        grad,
        d_query,
        *packed,
        lists["positions_ptr"],
        lists["ranks_ptr"],
        T,
        K,
        chunks,
        *k_offsets,
        *v_offsets,
        *query.stride()[:3],
        *strides_of(rows),
        *strides_of(grad),
        *(lists[name] for name in ("stride_pb", "stride_pg", "stride_rb", "stride_rg")),
        GROUP=lists["GROUP"],
        P=P,
        MIN_NORMALISER=MIN_NORMALISER,
        HAS_LIST=lists["HAS_LIST"],
        NORMALISE=normalise,
        STAGES=WALK_STAGES,
        num_warps=4,
    )
