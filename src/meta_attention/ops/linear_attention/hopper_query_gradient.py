"""Gradient of the queries for Hopper GPUs, in the manner of ``hopper.py``.

Keys and values change their roles: the gradient g of a row meets the state from its other side,

    du[t] = g[t] state^T + pull[t] norm + sum_s (g[t] . value[s] + pull[t]) f(key[s]),    s <= t

A program walks along one segment in four groups of warps, each some chunks ahead of the next:

    load_chunks      1 warp     has keys and values copied
    prepare_chunks   4 warps    turns keys into features where they are, sums them up, fetches the
                                listed rows, works out their pulls, and packs u, g and pull for the
                                kernels after this one
    multiply_chunks  4 warps    the products, with one half of the features' columns; twice

See ``backward.py``, which is the definition of what this does.
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

from meta_attention.ops.copy_engine import copy_tile
from meta_attention.ops.launch import launch
from meta_attention.ops.linear_attention.hopper import (
    CHUNK,
    Lists,
    afresh,
    aligned,
    all_warps,
    copy_rows,
    cut_segments,
    describe_chunks,
    drop_beyond,
    features,
    load_layout,
    load_positions,
    rank_at,
    strides_of,
)
from meta_attention.ops.linear_attention.reference import MIN_NORMALISER
from meta_attention.ops.routed_attention.forward import LOG2_E

# chunks of keys and values, and tiles of rows, that are in shared memory at a time
STAGES, PLACES = 3, gl.constexpr(2)

# of each thread of a group; with those of the second half, 4 times what threads start with
START_REGISTERS = 128
HALF_REGISTERS = gl.constexpr(184)
PREPARE_REGISTERS = gl.constexpr(120)
LOAD_REGISTERS = gl.constexpr(24)


@gluon.constexpr_function
def mma_layout(width):
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 16]
    )


@gluon.constexpr_function
def store_layout(width):
    """Each row in the warp that has it in ``mma_layout``, 16 bytes to a thread."""
    return gl.BlockedLayout([width // 16, 8], [256 // width, width // 8], [4, 1], [1, 0])


@gluon.jit
def load_chunks(
    k_desc,
    v_desc,
    k_tiles,
    v_tiles,
    loaded,
    chunk_free,
    k_row,
    k_column,
    v_row,
    v_column,
    begin,
    end,
    HALF: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copy chunk after chunk of keys, in halves, and values, each as soon as its place is free."""
    for n in range(begin, end):
        stage = (n - begin) % STAGES
        barrier = loaded.index(stage)
        # of a fresh barrier, the phase before the first counts as over
        mbarrier.wait(chunk_free.index(stage), (((n - begin) // STAGES) & 1) ^ 1)
        mbarrier.expect(barrier, 2 * k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        for half in gl.static_range(2):
            copy_tile(
                k_desc,
                [k_row + n * CHUNK, k_column + half * HALF],
                barrier,
                k_tiles.index(2 * stage + half),
            )
        copy_tile(v_desc, [v_row + n * CHUNK, v_column], barrier, v_tiles.index(stage))


@gluon.jit
def fetch_rows(
    tile,
    t,
    slot,
    stop,
    head,
    q_tiles,
    g_tiles,
    out_tile,
    row_free,
    query_ptr,
    grad_ptr,
    rows_ptr,
    normaliser_ptr,
    T,
    stride_qt,
    stride_qh,
    stride_gt,
    stride_gh,
    stride_ot,
    stride_oh,
    HALF: gl.constexpr,
    LOAD: gl.constexpr,
    NORMALISE: gl.constexpr,
):
    """Have the rows of a tile copied when their place is free, and load their normalisers."""
    place = tile % PLACES
    is_row = slot < stop
    c = gl.arange(0, HALF, layout=gl.SliceLayout(0, LOAD))
    p = gl.arange(0, 2 * HALF, layout=gl.SliceLayout(0, LOAD))
    # of a fresh barrier, the phase before the first counts as over
    mbarrier.wait(row_free.index(place), ((tile // PLACES) & 1) ^ 1)
    copy_rows(g_tiles.index(place), grad_ptr + head * stride_gh, t, stride_gt, is_row, p)
    den = gl.zeros([CHUNK], gl.float32, gl.SliceLayout(1, LOAD))
    if NORMALISE:
        copy_rows(out_tile, rows_ptr + head * stride_oh, t, stride_ot, is_row, p)
        den = gl.load(normaliser_ptr + head * T + t, mask=is_row, other=1.0)
    for half in gl.static_range(2):
        q_ptr = query_ptr + head * stride_qh + half * HALF
        copy_rows(q_tiles.index(2 * place + half), q_ptr, t, stride_qt, is_row, c)
    return den


@gluon.jit
def prepare_rows(
    tile,
    t,
    slot,
    stop,
    den,
    q_tiles,
    g_tiles,
    out_tile,
    at_tiles,
    shift_tiles,
    pull_tiles,
    scale_tiles,
    row_ready,
    packed_u_ptr,
    packed_g_ptr,
    packed_pull_ptr,
    HALF: gl.constexpr,
    LOAD: gl.constexpr,
    MIN_NORMALISER: gl.constexpr,
    NORMALISE: gl.constexpr,
):
    """Hand a tile of rows over to the products, and pack it."""
    dtype: gl.constexpr = g_tiles.dtype
    place = tile % PLACES
    is_row = slot < stop
    is_listed = gl.expand_dims(is_row, 1)
    c = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, LOAD)), 0)
    p = gl.expand_dims(gl.arange(0, 2 * HALF, layout=gl.SliceLayout(0, LOAD)), 0)
    at = gl.expand_dims(slot.to(gl.int64) * (2 * HALF), 1)
    async_copy.wait_group(0)
    # what is not listed lies before all keys
    at_tiles.index(place).store(gl.where(is_row, t, -1))
    pull = gl.zeros([CHUNK], gl.float32, gl.SliceLayout(1, LOAD))
    if NORMALISE:
        g = g_tiles.index(place).load(LOAD).to(gl.float32)
        # a normaliser at its floor does not depend on anything
        pull = -gl.sum(g * out_tile.load(LOAD).to(gl.float32), axis=1)
        pull = gl.where(den > MIN_NORMALISER, pull, 0.0)
        pull_tiles.index(place).store(pull)
        scale = 1.0 / den
        scale_tiles.index(place).store(scale)
        pull = pull * scale
        top = gl.max(q_tiles.index(2 * place).load(LOAD).to(gl.float32), axis=1)
        q = q_tiles.index(2 * place + 1).load(LOAD).to(gl.float32)
        shift = gl.minimum(gl.maximum(top, gl.max(q, axis=1)), 0.0)
        shift_tiles.index(place).store(shift)
    for half in gl.static_range(2):
        u = q_tiles.index(2 * place + half).load(LOAD)
        if NORMALISE:
            u = features(u.to(gl.float32) - gl.expand_dims(shift, 1), True).to(dtype)
        gl.store(packed_u_ptr + half * HALF + at + c, u, mask=is_listed)
    fence_async_shared()
    all_warps()
    # the queries are not read after this: what comes out takes their place
    mbarrier.arrive(row_ready.index(place), count=1)
    g = g_tiles.index(place).load(LOAD)
    if NORMALISE:
        g = (g.to(gl.float32) * gl.expand_dims(scale, 1)).to(dtype)
    gl.store(packed_g_ptr + at + p, g, mask=is_listed)
    gl.store(packed_pull_ptr + slot, pull, mask=is_row)


@gluon.jit
def turn_keys(tile, HALF: gl.constexpr, LOAD: gl.constexpr):
    """Features in place of keys, and their sums as far as each thread has them."""
    ROWS: gl.constexpr = 1024 // HALF
    tile.store(features(tile.load(LOAD).to(gl.float32), True).to(tile.dtype))
    # rounded in pairs if not used before they are there
    f = tile.load(LOAD).to(gl.float32)
    total = gl.sum(f.reshape([CHUNK // ROWS, ROWS, HALF]), axis=0)
    return gl.convert_layout(total, LOAD, assert_trivial=True)


@gluon.jit
def prepare_chunks(
    k_tiles,
    v_tiles,
    q_tiles,
    g_tiles,
    out_tile,
    norm_tiles,
    at_tiles,
    shift_tiles,
    pull_tiles,
    scale_tiles,
    loaded,
    chunk_ready,
    row_ready,
    row_free,
    query_ptr,
    grad_ptr,
    rows_ptr,
    normaliser_ptr,
    norm_ptr,
    packed_u_ptr,
    packed_g_ptr,
    packed_pull_ptr,
    positions_ptr,
    ranks_ptr,
    T,
    begin,
    end,
    stride_qt,
    stride_qh,
    stride_gt,
    stride_gh,
    stride_ot,
    stride_oh,
    GROUP: gl.constexpr,
    HALF: gl.constexpr,
    MIN_NORMALISER: gl.constexpr,
    HAS_LIST: gl.constexpr,
    NORMALISE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Features of every chunk and the norm before it, and the rows of every query head."""
    LOAD: gl.constexpr = load_layout(HALF)
    # a thread sums up its own rows
    c = gl.arange(0, HALF, layout=gl.SliceLayout(0, LOAD))
    is_first = gl.arange(0, 1024 // HALF, layout=gl.SliceLayout(1, LOAD)) == 0
    is_first = gl.expand_dims(is_first, 1)
    norm_0 = gl.where(is_first, gl.expand_dims(gl.load(norm_ptr + c), 0), 0.0)
    norm_1 = gl.where(is_first, gl.expand_dims(gl.load(norm_ptr + HALF + c), 0), 0.0)

    first = rank_at(ranks_ptr, begin, T, HAS_LIST)
    stop = rank_at(ranks_ptr, begin + 1, T, HAS_LIST)
    following = rank_at(ranks_ptr, gl.minimum(begin + 2, end), T, HAS_LIST)
    tile = 0
    line = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LOAD))
    # offsets of query heads in 64 bits
    zero = gl.to_tensor(0).to(gl.int64)
    t = load_positions(positions_ptr, first + line, stop, HAS_LIST)
    den = gl.zeros([CHUNK], gl.float32, gl.SliceLayout(1, LOAD))
    if first < stop:
        den = fetch_rows(
            tile, t, first + line, stop, zero, q_tiles, g_tiles, out_tile, row_free, query_ptr,
            grad_ptr, rows_ptr, normaliser_ptr, T, stride_qt, stride_qh, stride_gt, stride_gh,
            stride_ot, stride_oh, HALF, LOAD, NORMALISE,
        )  # fmt: skip
    for n in range(begin, end):
        later = rank_at(ranks_ptr, gl.minimum(n + 3, end), T, HAS_LIST)
        next_t = load_positions(positions_ptr, stop + line, following, HAS_LIST)
        stage = (n - begin) % STAGES
        mbarrier.wait(loaded.index(stage), ((n - begin) // STAGES) & 1)
        if NORMALISE:
            norm_tiles.index(2 * stage).store(gl.sum(norm_0, axis=0))
            norm_tiles.index(2 * stage + 1).store(gl.sum(norm_1, axis=0))
            norm_0 += turn_keys(k_tiles.index(2 * stage), HALF, LOAD)
            norm_1 += turn_keys(k_tiles.index(2 * stage + 1), HALF, LOAD)
        # other rows of the matrix follow there; no chunk follows that would need their sums
        drop_beyond(k_tiles.index(2 * stage), n * CHUNK, T, LOAD)
        drop_beyond(k_tiles.index(2 * stage + 1), n * CHUNK, T, LOAD)
        drop_beyond(v_tiles.index(stage), n * CHUNK, T, LOAD)
        fence_async_shared()
        all_warps()
        mbarrier.arrive(chunk_ready.index(stage), count=1)

        for member in range(GROUP):
            if first < stop:
                here = (zero + member) * T
                prepare_rows(
                    tile, t, first + line, stop, den, q_tiles, g_tiles, out_tile, at_tiles,
                    shift_tiles, pull_tiles, scale_tiles, row_ready,
                    packed_u_ptr + here * (2 * HALF), packed_g_ptr + here * (2 * HALF),
                    packed_pull_ptr + here, HALF, LOAD, MIN_NORMALISER, NORMALISE,
                )  # fmt: skip
                tile += 1
            head = zero + member + 1
            if member + 1 == GROUP:
                head = zero
                first = stop
                stop = following
                following = later
                t = next_t
            if first < stop:
                den = fetch_rows(
                    tile, t, first + line, stop, head, q_tiles, g_tiles, out_tile, row_free,
                    query_ptr, grad_ptr, rows_ptr, normaliser_ptr, T, stride_qt, stride_qh,
                    stride_gt, stride_gh, stride_ot, stride_oh, HALF, LOAD, NORMALISE,
                )  # fmt: skip


@gluon.jit
def multiply_chunks(
    half,
    f_tiles,
    v_tiles,
    s_tile,
    q_tiles,
    g_tiles,
    norm_tiles,
    at_tiles,
    shift_tiles,
    pull_tiles,
    scale_tiles,
    loaded,
    chunk_ready,
    chunk_free,
    row_ready,
    row_free,
    state_ptr,
    d_query_ptr,
    ranks_ptr,
    T,
    begin,
    end,
    stride,
    GROUP: gl.constexpr,
    HALF: gl.constexpr,
    HAS_LIST: gl.constexpr,
    NORMALISE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Gradients of half the columns of the segment's queries."""
    P: gl.constexpr = 2 * HALF
    SCORES: gl.constexpr = mma_layout(CHUNK)
    MMA: gl.constexpr = mma_layout(HALF)
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    COLUMN: gl.constexpr = gl.SliceLayout(0, MMA)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    STORE: gl.constexpr = store_layout(HALF)
    dtype: gl.constexpr = f_tiles.dtype
    d_query_ptr += half * HALF
    c = half * HALF + gl.arange(0, HALF, layout=COLUMN)
    v = gl.arange(0, P, layout=ROW)
    state = gl.load(state_ptr + gl.expand_dims(v, 1) + gl.expand_dims(c * P, 0))
    s_tile.store(state.to(dtype))
    fence_async_shared()
    all_warps()

    tile = 0
    zero = gl.to_tensor(0).to(gl.int64)
    first = rank_at(ranks_ptr, begin, T, HAS_LIST)
    stop = rank_at(ranks_ptr, begin + 1, T, HAS_LIST)
    s = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, SCORES))
    out_c = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, STORE)), 0)
    for n in range(begin, end):
        following = rank_at(ranks_ptr, gl.minimum(n + 2, end), T, HAS_LIST)
        stage = (n - begin) % STAGES
        lap = ((n - begin) // STAGES) & 1
        f_tile = f_tiles.index(2 * stage + half)
        v_tile = v_tiles.index(stage)
        mbarrier.wait(loaded.index(stage), lap)
        mbarrier.wait(chunk_ready.index(stage), lap)
        # ahead of the rows, which read the copy in shared memory: after a branch, the assembler
        # takes addresses from where there are rows even if there are none
        state = warpgroup_mma(v_tile.permute((1, 0)), f_tile, state, is_async=True)
        state = warpgroup_mma_wait(0, deps=(state,))
        if first < stop:
            for member in range(GROUP):
                place = tile % PLACES
                g_tile = g_tiles.index(place)
                mbarrier.wait(row_ready.index(place), (tile // PLACES) & 1)
                d_scores = warpgroup_mma(
                    g_tile,
                    v_tile.permute((1, 0)),
                    gl.zeros([CHUNK, CHUNK], gl.float32, SCORES),
                    use_acc=False,
                    is_async=True,
                )
                du = warpgroup_mma(
                    g_tile,
                    s_tile,
                    gl.zeros([CHUNK, HALF], gl.float32, MMA),
                    use_acc=False,
                    is_async=True,
                )
                at = at_tiles.index(place).load(gl.SliceLayout(1, SCORES))
                d_scores = warpgroup_mma_wait(1, deps=(d_scores,))
                if NORMALISE:
                    pull = pull_tiles.index(place).load(gl.SliceLayout(1, SCORES))
                    d_scores += gl.expand_dims(pull, 1)
                sees = gl.expand_dims(afresh(n) * CHUNK + s, 0) <= gl.expand_dims(at, 1)
                operand = gl.convert_layout(gl.where(sees, d_scores, 0.0).to(dtype), OPERAND)
                du = warpgroup_mma(operand, f_tile, du, is_async=True)
                du, operand = warpgroup_mma_wait(0, deps=(du, operand))
                q_tile = q_tiles.index(2 * place + half)
                if NORMALISE:
                    pull = gl.expand_dims(pull_tiles.index(place).load(ROW), 1)
                    scale = gl.expand_dims(scale_tiles.index(place).load(ROW), 1)
                    shift = gl.expand_dims(shift_tiles.index(place).load(ROW), 1)
                    norm = gl.expand_dims(norm_tiles.index(2 * stage + half).load(COLUMN), 0)
                    q = q_tile.load(MMA).to(gl.float32)
                    du = (du + pull * norm) * scale * slope(q - shift)
                q_tile.store(du.to(dtype))
                all_warps()
                out = q_tile.load(STORE)
                t = at_tiles.index(place).load(gl.SliceLayout(1, STORE))
                all_warps()
                mbarrier.arrive(row_free.index(place), count=1)
                out_at = (zero + member) * P + gl.expand_dims(t.to(gl.int64) * stride, 1) + out_c
                gl.store(d_query_ptr + out_at, out, mask=gl.expand_dims(t >= 0, 1))
                tile += 1
        # before anything writes where others may still read
        all_warps()
        mbarrier.arrive(chunk_free.index(stage), count=1)
        s_tile.store(state.to(dtype))
        fence_async_shared()
        all_warps()
        first = stop
        stop = following


@gluon.jit
def slope(x):
    """Of the features: 1 above 0, and the features themselves below."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;",
        "=f,f",
        [gl.minimum(x, 0.0) * LOG2_E],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


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
    """Gradients of one segment's queries, for all query heads of a key-value head."""
    HALF: gl.constexpr = P // 2
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = k_desc.dtype
    bk = gl.program_id(0)
    segment = gl.program_id(1)
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
    query_ptr += b * stride_qb + kv * GROUP * stride_qh
    rows_ptr += b * stride_ob + kv * GROUP * stride_oh
    grad_ptr += b * stride_gb + kv * GROUP * stride_gh
    d_query_ptr += (b * T * K + kv) * GROUP * P
    packed = bk.to(gl.int64) * GROUP * T
    normaliser_ptr += packed
    packed_pull_ptr += packed
    packed_u_ptr += packed * P
    packed_g_ptr += packed * P
    at = bk.to(gl.int64) * gl.num_programs(1) + segment
    if HAS_LIST:
        positions_ptr += b * stride_pb + kv * stride_pg
        ranks_ptr += b * stride_rb + kv * stride_rg

    k_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, CHUNK, HALF], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, P], v_desc.layout)
    s_tiles = gl.allocate_shared_memory(dtype, [2, P, HALF], k_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [2 * PLACES, CHUNK, HALF], k_desc.layout)
    g_tiles = gl.allocate_shared_memory(dtype, [PLACES, CHUNK, P], v_desc.layout)
    out_tile = gl.allocate_shared_memory(dtype, [CHUNK, P], v_desc.layout)
    norm_tiles = gl.allocate_shared_memory(gl.float32, [2 * STAGES, HALF], LINE)
    at_tiles = gl.allocate_shared_memory(gl.int32, [PLACES, CHUNK], LINE)
    shift_tiles = gl.allocate_shared_memory(gl.float32, [PLACES, CHUNK], LINE)
    pull_tiles = gl.allocate_shared_memory(gl.float32, [PLACES, CHUNK], LINE)
    scale_tiles = gl.allocate_shared_memory(gl.float32, [PLACES, CHUNK], LINE)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    chunk_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    chunk_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    row_ready = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    row_free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    # both groups that multiply give a place back
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(chunk_ready.index(i), count=1)
        mbarrier.init(chunk_free.index(i), count=2)
    for i in gl.static_range(PLACES):
        mbarrier.init(row_ready.index(i), count=1)
        mbarrier.init(row_free.index(i), count=2)
    fence_async_shared()

    gl.warp_specialize(
        [
            (
                multiply_chunks,
                (
                    0, k_tiles, v_tiles, s_tiles.index(0), q_tiles, g_tiles, norm_tiles, at_tiles,
                    shift_tiles, pull_tiles, scale_tiles, loaded, chunk_ready, chunk_free,
                    row_ready, row_free, states_ptr + at * P * P, d_query_ptr, ranks_ptr, T, begin,
                    end, K * GROUP * P, GROUP, HALF, HAS_LIST, NORMALISE, STAGES,
                ),
            ),
            (
                multiply_chunks,
                (
                    1, k_tiles, v_tiles, s_tiles.index(1), q_tiles, g_tiles, norm_tiles, at_tiles,
                    shift_tiles, pull_tiles, scale_tiles, loaded, chunk_ready, chunk_free,
                    row_ready, row_free, states_ptr + at * P * P, d_query_ptr, ranks_ptr, T, begin,
                    end, K * GROUP * P, GROUP, HALF, HAS_LIST, NORMALISE, STAGES,
                ),
            ),
            (
                prepare_chunks,
                (
                    k_tiles, v_tiles, q_tiles, g_tiles, out_tile, norm_tiles, at_tiles,
                    shift_tiles, pull_tiles, scale_tiles, loaded, chunk_ready, row_ready, row_free,
                    query_ptr, grad_ptr, rows_ptr, normaliser_ptr, norms_ptr + at * P,
                    packed_u_ptr, packed_g_ptr, packed_pull_ptr, positions_ptr, ranks_ptr, T,
                    begin, end, stride_qt, stride_qh, stride_gt, stride_gh, stride_ot, stride_oh,
                    GROUP, HALF, MIN_NORMALISER, HAS_LIST, NORMALISE, STAGES,
                ),
            ),
            (
                load_chunks,
                (
                    k_desc, v_desc, k_tiles, v_tiles, loaded, chunk_free, k_row, k_column, v_row,
                    v_column, begin, end, HALF, STAGES,
                ),
            ),
        ],
        [4, 4, 1],
        [HALF_REGISTERS, PREPARE_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


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
    lists: Lists,
) -> None:
    """Gradients of the listed queries, and what the kernels after this read of them."""
    B, T, K, P = key.shape
    segments, chunks = cut_segments(T, B * K, P)
    query, rows, grad = aligned(query), aligned(rows), aligned(grad.to(query.dtype))
    copied = describe_chunks(key, value, P // 2, P)
    launch(
        linear_attention_hopper_bwd_query_kernel,
        (B * K, segments, 1),
        (
            *(query, *copied.descriptors, states, norms, rows, normaliser, grad, d_query),
            *(*packed, *lists.tensors),
        ),
        (
            *(T, K, chunks, *copied.offsets),
            *(*strides_of(query), *strides_of(rows), *strides_of(grad)),
            *lists.strides,
        ),
        {
            "GROUP": query.shape[2] // K,
            "P": P,
            "MIN_NORMALISER": MIN_NORMALISER,
            "HAS_LIST": lists.is_given,
            "NORMALISE": normalise,
            "STAGES": STAGES,
        },
        num_warps=4,
        # four groups of warps share the registers, which they then divide among them
        maxnreg=START_REGISTERS,
    )
