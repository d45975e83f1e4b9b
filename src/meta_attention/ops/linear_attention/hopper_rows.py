"""Rows of linear attention for Hopper GPUs: groups of warps that each do one thing.

    copy        chunks of keys and values into shared memory            1 warp
    prepare     features in place of keys, and of gathered queries      4 warps
    multiply    64 columns of the state and of the rows                 4 warps each

A program walks along one segment from the state before it, for all query heads of a key-value head.
Each group hands its tiles on through barriers and is at most a few tiles ahead of those after it.
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

from meta_attention.ops.launch import launch
from meta_attention.ops.linear_attention.hopper import (
    CHUNK,
    COLUMNS,
    MAX_REGISTERS,
    PART,
    Copied,
    Lists,
    aligned,
    all_warps,
    copy_chunks,
    copy_rows,
    cut_segments,
    drop_beyond,
    features,
    hand_over,
    load_layout,
    mma_layout,
    put_keys,
    rank_at,
    round_pairs,
    strides_of,
    sum_in_warp,
    tile_layout,
    widen,
)
from meta_attention.ops.linear_attention.reference import MIN_NORMALISER

# tiles of keys and values, and of queries, that the copies may be ahead
STAGES = gl.constexpr(4)
ROW_STAGES = gl.constexpr(3)

FLOOR = gl.constexpr(MIN_NORMALISER)


@gluon.constexpr_function
def out_layout():
    """Rows as ``mma_layout`` has them in each warp, 16 bytes to a thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )


@gluon.jit
def put_queries(tile, sums_tile, norm, LAYOUT: gl.constexpr):
    """Features in place of queries, less the shift of each row, and their products with the norm.

    As ``load_queries`` of forward.py; rows that are not listed hold anything.
    """
    q = widen(tile.load(LAYOUT))
    q = q - gl.expand_dims(gl.minimum(gl.max(q, axis=1), 0.0), 1)
    rounded, u = round_pairs(features(q, True))
    tile.store(rounded)
    sums_tile.store(gl.sum(u * gl.expand_dims(norm, 0), axis=1))


@gluon.jit
def find_rows(positions_ptr, first, stop, line, HAS_LIST: gl.constexpr):
    """Positions of the rows from ``first`` to ``stop``, and -1 after them."""
    slot = first + line
    if HAS_LIST:
        t = gl.load(positions_ptr + slot, mask=slot < stop, other=-1)
    else:
        t = gl.where(slot < stop, slot, -1)
    return t


@gluon.jit
def prepare_operands(
    query_ptr,
    norms_ptr,
    lists,
    tiles,
    row_tiles,
    parts_tile,
    barriers,
    begin,
    end,
    T,
    stride_qt,
    stride_qh,
    GROUP: gl.constexpr,
    P: gl.constexpr,
    HAS_LIST: gl.constexpr,
    NORMALISE: gl.constexpr,
):
    """Turn keys and the listed queries into features, tile after tile, in place.

    Queries are gathered a tile ahead, and their positions found a chunk before that.
    """
    positions_ptr, ranks_ptr = lists
    k_tiles, v_tiles = tiles
    u_tiles, t_tiles, d_tiles = row_tiles
    ready, f_ready, u_ready, u_free = barriers
    LOAD: gl.constexpr = load_layout(P)
    TILE: gl.constexpr = tile_layout(P)
    PARTS: gl.constexpr = gl.BlockedLayout([4, 8], [256 // P, P // 8], [4, 1], [1, 0])
    HALVES: gl.constexpr = P // COLUMNS
    line = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LOAD))
    p = gl.arange(0, P, layout=gl.SliceLayout(0, LOAD))
    first = rank_at(ranks_ptr, begin, T, HAS_LIST)
    stop = rank_at(ranks_ptr, begin + 1, T, HAS_LIST)
    stop_1 = rank_at(ranks_ptr, gl.minimum(begin + 2, end), T, HAS_LIST)
    stop_2 = rank_at(ranks_ptr, gl.minimum(begin + 3, end), T, HAS_LIST)
    t = find_rows(positions_ptr, first, stop, line, HAS_LIST)
    t_1 = find_rows(positions_ptr, stop, stop_1, line, HAS_LIST)
    copy_rows(u_tiles.index(0), query_ptr, t, stride_qt, t >= 0, p)
    t_tiles.index(0).store(t)
    norm = gl.load(norms_ptr + p)
    tile = 0
    for n in range(begin, end):
        t_2 = find_rows(positions_ptr, stop_1, stop_2, line, HAS_LIST)
        stop_3 = rank_at(ranks_ptr, gl.minimum(n + 4, end), T, HAS_LIST)
        stage = (n - begin) % STAGES
        mbarrier.wait(ready.index(stage), ((n - begin) // STAGES) & 1)
        if NORMALISE:
            # beyond the last token, too: no row sees those, and the state after them is not used
            total = put_keys(k_tiles.index(stage), P, LOAD, NORMALISE)
            parts_tile.store(sum_in_warp(total, P))
        for i in gl.static_range(HALVES):
            drop_beyond(v_tiles.index(stage * HALVES + i), n * CHUNK, T, TILE)
        hand_over(f_ready.index(stage))

        has_rows = first < stop
        # without rows, only those of the next chunk are to be gathered
        for member in range(gl.where(has_rows, GROUP, 1)):
            next_tile = tile + has_rows.to(gl.int32)
            next_slot = next_tile % ROW_STAGES
            is_next_head = has_rows & (member + 1 < GROUP)
            next_t = gl.where(is_next_head, t, t_1)
            # offsets in 64 bits
            head = gl.where(is_next_head, member + 1, 0).to(gl.int64)
            mbarrier.wait(u_free.index(next_slot), ((next_tile // ROW_STAGES) & 1) ^ 1)
            copy_rows(
                u_tiles.index(next_slot), query_ptr + head * stride_qh, next_t, stride_qt,
                next_t >= 0, p,
            )  # fmt: skip
            t_tiles.index(next_slot).store(next_t)
            async_copy.wait_group(1)
            if has_rows:
                slot = tile % ROW_STAGES
                if NORMALISE:
                    for i in gl.static_range(CHUNK // PART):
                        if first + i * PART < stop:
                            put_queries(
                                u_tiles.index(slot).slice(i * PART, PART),
                                d_tiles.index(slot).slice(i * PART, PART),
                                norm,
                                LOAD,
                            )
                hand_over(u_ready.index(slot))
            tile = next_tile
        if NORMALISE:
            added = gl.sum(parts_tile.load(PARTS), axis=0)
            norm += gl.convert_layout(added, gl.SliceLayout(0, LOAD), assert_trivial=True)
        first = stop
        stop = stop_1
        stop_1 = stop_2
        stop_2 = stop_3
        t = t_1
        t_1 = t_2


@gluon.jit
def attend_columns(
    states_ptr,
    outputs,
    ranks_ptr,
    tiles,
    row_tiles,
    s_tiles,
    barriers,
    begin,
    end,
    T,
    stride_ot,
    stride_oh,
    GROUP: gl.constexpr,
    P: gl.constexpr,
    HAS_LIST: gl.constexpr,
    NORMALISE: gl.constexpr,
    HALF: gl.constexpr,
):
    """64 columns of the state and of the rows, by one group of four warps."""
    rows_ptr, normaliser_ptr = outputs
    k_tiles, v_tiles = tiles
    u_tiles, t_tiles, d_tiles = row_tiles
    ready, f_ready, free, u_ready, u_free = barriers
    MMA: gl.constexpr = mma_layout()
    OUT: gl.constexpr = out_layout()
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    HALVES: gl.constexpr = P // COLUMNS
    dtype: gl.constexpr = k_tiles.dtype
    s_tile = s_tiles.index(HALF)
    state_row = gl.arange(0, P, layout=ROW)
    state_column = HALF * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA))
    state = gl.load(states_ptr + gl.expand_dims(state_row * P, 1) + gl.expand_dims(state_column, 0))
    s_tile.store(state.to(dtype))
    fence_async_shared()
    all_warps()

    empty = gl.zeros([CHUNK, COLUMNS], gl.float32, MMA)
    s = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, MMA))
    c = HALF * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, OUT))
    first = rank_at(ranks_ptr, begin, T, HAS_LIST)
    stop = rank_at(ranks_ptr, begin + 1, T, HAS_LIST)
    tile = 0
    for n in range(begin, end):
        following = rank_at(ranks_ptr, gl.minimum(n + 2, end), T, HAS_LIST)
        stage = (n - begin) % STAGES
        lap = ((n - begin) // STAGES) & 1
        f_tile = k_tiles.index(stage)
        v_tile = v_tiles.index(stage * HALVES + HALF)
        mbarrier.wait(ready.index(stage), lap)
        mbarrier.wait(f_ready.index(stage), lap)
        # ahead of the rows, which read the copy in shared memory: after a branch, the assembler
        # takes addresses from where there are rows even if there are none
        state = warpgroup_mma(f_tile.permute((1, 0)), v_tile, state, is_async=True)
        state = warpgroup_mma_wait(0, deps=(state,))
        if first < stop:
            for member in range(GROUP):
                slot = tile % ROW_STAGES
                u_tile = u_tiles.index(slot)
                mbarrier.wait(u_ready.index(slot), (tile // ROW_STAGES) & 1)
                scores = warpgroup_mma(
                    u_tile, f_tile.permute((1, 0)), empty, use_acc=False, is_async=True
                )
                acc = warpgroup_mma(u_tile, s_tile, empty, use_acc=False, is_async=True)
                t = t_tiles.index(slot).load(ROW)
                out_t = t_tiles.index(slot).load(gl.SliceLayout(1, OUT))
                if NORMALISE:
                    den = d_tiles.index(slot).load(ROW)
                scores = warpgroup_mma_wait(1, deps=(scores,))
                sees = gl.expand_dims(n * CHUNK + s, 0) <= gl.expand_dims(t, 1)
                rounded, weights = round_pairs(gl.where(sees, scores, 0.0))
                operand = gl.convert_layout(rounded, OPERAND)
                acc = warpgroup_mma(operand, v_tile, acc, is_async=True)
                if NORMALISE:
                    den = gl.maximum(den + gl.sum(weights, axis=1), FLOOR)
                acc, operand = warpgroup_mma_wait(0, deps=(acc, operand))
                mbarrier.arrive(u_free.index(slot), count=1)
                # offsets in 64 bits
                head = first.to(gl.int64) * 0 + member
                if NORMALISE:
                    acc = acc * gl.expand_dims(1.0 / den, 1)
                    # once, not by every group of warps
                    if HALF == 0:
                        gl.store(normaliser_ptr + head * T + t, den, mask=t >= 0)
                out = gl.convert_layout(acc.to(rows_ptr.dtype.element_ty), OUT)
                at = gl.expand_dims(out_t.to(gl.int64) * stride_ot, 1) + gl.expand_dims(c, 0)
                mask = gl.expand_dims(out_t >= 0, 1)
                gl.store(rows_ptr + head * stride_oh + at, out, mask=mask)
                tile += 1
        mbarrier.arrive(free.index(stage), count=1)
        s_tile.store(state.to(dtype))
        fence_async_shared()
        all_warps()
        first = stop
        stop = following


@gluon.jit
def linear_attention_hopper_fwd_kernel(
    query_ptr,
    k_desc,
    v_desc,
    states_ptr,  # [B, K, G, P, P] float32, before every segment
    norms_ptr,  # [B, K, G, P] float32
    rows_ptr,
    normaliser_ptr,  # [B, H, T] float32
    positions_ptr,  # [B, 1 or K, T] int32
    ranks_ptr,  # [B, 1 or K, chunks + 1] int32
    T,
    K,
    chunks,  # of a segment
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
    stride_pb,
    stride_pg,
    stride_rb,
    stride_rg,
    GROUP: gl.constexpr,
    P: gl.constexpr,
    HAS_LIST: gl.constexpr,
    NORMALISE: gl.constexpr,
):
    """The rows of one segment, for all query heads of a key-value head."""
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    HALVES: gl.constexpr = P // COLUMNS
    dtype: gl.constexpr = k_desc.dtype
    segment = gl.program_id(0)
    bk = gl.program_id(1)
    b = bk // K
    kv = bk % K
    begin = segment * chunks
    end = gl.minimum(begin + chunks, gl.cdiv(T, CHUNK))
    k_row = b * k_rows_b + kv * k_rows_h
    k_column = kv * k_columns_h
    v_row = b * v_rows_b + kv * v_rows_h
    v_column = kv * v_columns_h
    b = b.to(gl.int64)
    kv = kv.to(gl.int64)
    at = bk.to(gl.int64) * gl.num_programs(0) + segment
    states_ptr += at * P * P
    norms_ptr += at * P
    query_ptr += b * stride_qb + kv * GROUP * stride_qh
    rows_ptr += b * stride_ob + kv * GROUP * stride_oh
    normaliser_ptr += bk.to(gl.int64) * GROUP * T
    if HAS_LIST:
        positions_ptr += b * stride_pb + kv * stride_pg
        ranks_ptr += b * stride_rb + kv * stride_rg

    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, P], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES * HALVES, CHUNK, COLUMNS], v_desc.layout)
    u_tiles = gl.allocate_shared_memory(dtype, [ROW_STAGES, CHUNK, P], k_desc.layout)
    s_tiles = gl.allocate_shared_memory(dtype, [HALVES, P, COLUMNS], v_desc.layout)
    # of every row of queries, its position and its product with the norm
    t_tiles = gl.allocate_shared_memory(gl.int32, [ROW_STAGES, CHUNK], LINE)
    d_tiles = gl.allocate_shared_memory(gl.float32, [ROW_STAGES, CHUNK], LINE)
    parts_tile = gl.allocate_shared_memory(gl.float32, [4, P], LINES)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    f_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    u_ready = gl.allocate_shared_memory(gl.int64, [ROW_STAGES, 1], mbarrier.MBarrierLayout())
    u_free = gl.allocate_shared_memory(gl.int64, [ROW_STAGES, 1], mbarrier.MBarrierLayout())
    # every group of columns gives a tile back
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(f_ready.index(i), count=1)
        mbarrier.init(free.index(i), count=HALVES)
    for i in gl.static_range(ROW_STAGES):
        mbarrier.init(u_ready.index(i), count=1)
        mbarrier.init(u_free.index(i), count=HALVES)
    fence_async_shared()

    lists = (positions_ptr, ranks_ptr)
    outputs = (rows_ptr, normaliser_ptr)
    descs = (k_desc, v_desc)
    tiles = (k_tiles, v_tiles)
    row_tiles = (u_tiles, t_tiles, d_tiles)
    copied = (ready, free)
    prepared = (ready, f_ready, u_ready, u_free)
    barriers = (ready, f_ready, free, u_ready, u_free)
    places = (k_row, k_column, v_row, v_column)
    if HALVES == 1:
        gl.warp_specialize(
            [
                (attend_columns, (
                    states_ptr, outputs, ranks_ptr, tiles, row_tiles, s_tiles, barriers, begin, end,
                    T, stride_ot, stride_oh, GROUP, P, HAS_LIST, NORMALISE, 0,
                )),
                (prepare_operands, (
                    query_ptr, norms_ptr, lists, tiles, row_tiles, parts_tile, prepared, begin, end,
                    T, stride_qt, stride_qh, GROUP, P, HAS_LIST, NORMALISE,
                )),
                (copy_chunks, (descs, tiles, copied, places, begin, end, HALVES, STAGES)),
            ],
            [4, 1],
            [80, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend_columns, (
                    states_ptr, outputs, ranks_ptr, tiles, row_tiles, s_tiles, barriers, begin, end,
                    T, stride_ot, stride_oh, GROUP, P, HAS_LIST, NORMALISE, 0,
                )),
                (attend_columns, (
                    states_ptr, outputs, ranks_ptr, tiles, row_tiles, s_tiles, barriers, begin, end,
                    T, stride_ot, stride_oh, GROUP, P, HAS_LIST, NORMALISE, 1,
                )),
                (prepare_operands, (
                    query_ptr, norms_ptr, lists, tiles, row_tiles, parts_tile, prepared, begin, end,
                    T, stride_qt, stride_qh, GROUP, P, HAS_LIST, NORMALISE,
                )),
                (copy_chunks, (descs, tiles, copied, places, begin, end, HALVES, STAGES)),
            ],
            [4, 4, 1],
            [192, 104, 24],
        )  # fmt: skip


def walk_rows(
    query: Tensor,
    copied: Copied,
    states: Tensor,
    norms: Tensor,
    rows: Tensor,
    normaliser: Tensor,
    normalise: bool,
    lists: Lists,
) -> None:
    """Rows and their normalisers, from the states before every segment."""
    B, T, H, P = query.shape
    K = states.shape[1]
    query = aligned(query)
    segments, chunks = cut_segments(T, B * K, P)
    launch(
        linear_attention_hopper_fwd_kernel,
        (segments, B * K, 1),
        (query, *copied.descriptors, states, norms, rows, normaliser, *lists.tensors),
        (
            *(T, K, chunks, *copied.offsets, *strides_of(query), *rows.stride()[:3]),
            *lists.strides,
        ),
        {"GROUP": H // K, "P": P, "HAS_LIST": lists.is_given, "NORMALISE": normalise},
        num_warps=4,
        maxnreg=MAX_REGISTERS[P],
    )
