"""Gradient of queries for Hopper GPUs, in the manner of ``hopper.py``.

One warp copies tiles of keys and values into shared memory; two groups of four warps each hold the
gradients of 64 of the tile's 128 queries in registers. While a group takes the exponentials of one
tile of scores, its tensor cores multiply the gradients of the scores before with their keys and
find those of the weights.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from meta_attention.ops.copy_engine import describe
from meta_attention.ops.launch import launch
from meta_attention.ops.routed_attention.forward import LOG2_E
from meta_attention.ops.routed_attention.hopper import find_queries, load_keys, skip_tiles

QUERIES = 128
KEYS = 64


@gluon.jit
def weigh_again(scores, lse, first, at, window, s, scale, MASKED: gl.constexpr):
    """Weights as the forward had them; none for the keys that a row does not see."""
    weights = gl.exp2(scores * scale - gl.expand_dims(lse, 1))
    if MASKED:
        key = gl.expand_dims(first + s, 0)
        row = gl.expand_dims(at, 1)
        weights = gl.where((key <= row) & (key >= row - window), weights, 0.0)
    return weights


@gluon.jit
def attend_backwards(
    acc,
    d_scores,
    q,
    d_out,
    lse,
    delta,
    empty,
    k_tiles,
    v_tiles,
    k_ready,
    v_ready,
    k_free,
    v_free,
    first,
    last,
    num_tiles,
    begin,
    at,
    window,
    s,
    scale,
    MASKED: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    OPERAND: gl.constexpr,
):
    """Gradients of the scores ``first`` to ``last``, each while those before meet their keys.

    The wait for the next keys is where it is for the reason ``attend_tiles`` gives.
    """
    for i in range(first, last):
        stage = i % STAGES
        before = (i - 1) % STAGES
        following = i + 1
        scores = warpgroup_mma(
            q, k_tiles.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True
        )
        acc = warpgroup_mma(d_scores, k_tiles.index(before), acc, is_async=True)
        mbarrier.wait(v_ready.index(stage), (i // STAGES) & 1)
        d_weights = warpgroup_mma(
            d_out, v_tiles.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True
        )
        scores = warpgroup_mma_wait(2, deps=(scores,))
        weights = weigh_again(scores, lse, begin + i * KEYS, at, window, s, scale, MASKED)
        mbarrier.wait(
            k_ready.index(following % STAGES),
            (following // STAGES) & 1,
            pred=following < num_tiles,
        )
        acc, d_scores, d_weights, weights = warpgroup_mma_wait(
            0, deps=(acc, d_scores, d_weights, weights)
        )
        mbarrier.arrive(k_free.index(before), count=1)
        mbarrier.arrive(v_free.index(stage), count=1)
        d_scores = weights * (d_weights - gl.expand_dims(delta, 1))
        d_scores = gl.convert_layout(d_scores.to(k_tiles.dtype), OPERAND)
    return acc, d_scores


@gluon.jit
def differentiate_rows(
    q_ptr,
    rows_ptr,
    d_rows_ptr,
    lse_ptr,
    dq_ptr,
    packed_q_ptr,
    packed_d_ptr,
    packed_lse_ptr,
    packed_delta_ptr,
    order,
    q_tile,
    d_tile,
    k_tiles,
    v_tiles,
    k_ready,
    v_ready,
    k_free,
    v_free,
    entry,
    packed,
    count,
    window,
    past,
    begin,
    num_tiles,
    stride_qt,
    stride_rt,
    stride_dt,
    stride_dqt,
    scale,
    KEYS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    ADD: gl.constexpr,
):
    """Gradient of 64 listed queries, by one group of four warps."""
    ROWS: gl.constexpr = 64
    dtype: gl.constexpr = k_tiles.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16]
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    LOAD_ROW: gl.constexpr = gl.SliceLayout(1, LOAD)

    # queries and gradients into shared memory, and packed: rows beyond the list weigh nothing
    row = gl.arange(0, ROWS, layout=LOAD_ROW)
    is_row = gl.expand_dims(entry + row < count, 1)
    t = gl.load(order + gl.minimum(entry + row, count - 1)).to(gl.int64)
    p = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LOAD)), 0)
    packed_at = gl.expand_dims((packed + row) * WIDTH, 1) + p
    q = gl.load(q_ptr + gl.expand_dims(t * stride_qt, 1) + p)
    q_tile.store(q)
    gl.store(packed_q_ptr + packed_at, gl.where(is_row, q, gl.zeros_like(q)))
    d_out = gl.load(d_rows_ptr + gl.expand_dims(t * stride_dt, 1) + p)
    d_tile.store(d_out)
    gl.store(packed_d_ptr + packed_at, gl.where(is_row, d_out, gl.zeros_like(d_out)))
    fence_async_shared()
    out = gl.load(rows_ptr + gl.expand_dims(t * stride_rt, 1) + p)
    delta = gl.sum(out.to(gl.float32) * d_out.to(gl.float32), axis=1)
    delta = gl.convert_layout(delta, ROW)

    row = gl.arange(0, ROWS, layout=ROW)
    is_row = entry + row < count
    t = gl.load(order + gl.minimum(entry + row, count - 1))
    lse = gl.load(lse_ptr + t)
    gl.store(packed_lse_ptr + packed + row, gl.where(is_row, lse, float("inf")))
    gl.store(packed_delta_ptr + packed + row, gl.where(is_row, delta, 0.0))

    at = t + past
    s = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
    acc = gl.zeros([ROWS, WIDTH], gl.float32, OUT)
    empty = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    factor = scale * LOG2_E

    # as in attend_rows
    lowest = gl.load(order + gl.minimum(entry, count - 1)) + past
    highest = gl.load(order + gl.minimum(entry + ROWS, count) - 1) + past
    first = (gl.maximum(lowest - window, 0) - begin) // KEYS
    last = gl.cdiv(highest + 1 - begin, KEYS)
    inner = gl.cdiv(gl.maximum(highest - window, 0) - begin, KEYS)
    inner = gl.minimum(gl.maximum(inner, first + 1), last)
    outer = gl.maximum((lowest + 1 - begin) // KEYS, inner)

    skip_tiles(k_ready, v_ready, k_free, v_free, 0, first, STAGES)
    stage = first % STAGES
    lap = (first // STAGES) & 1
    mbarrier.wait(k_ready.index(stage), lap)
    scores = warpgroup_mma(
        q_tile, k_tiles.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True
    )
    mbarrier.wait(v_ready.index(stage), lap)
    d_weights = warpgroup_mma(
        d_tile, v_tiles.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True
    )
    scores, d_weights = warpgroup_mma_wait(0, deps=(scores, d_weights))
    mbarrier.arrive(v_free.index(stage), count=1)
    weights = weigh_again(scores, lse, begin + first * KEYS, at, window, s, factor, True)
    d_scores = weights * (d_weights - gl.expand_dims(delta, 1))
    d_scores = gl.convert_layout(d_scores.to(dtype), OPERAND)
    following = first + 1
    mbarrier.wait(
        k_ready.index(following % STAGES), (following // STAGES) & 1, pred=following < last
    )

    # masked at both ends, plain in the middle
    acc, d_scores = attend_backwards(
        acc, d_scores, q_tile, d_tile, lse, delta, empty, k_tiles, v_tiles, k_ready, v_ready,
        k_free, v_free, first + 1, inner, last, begin, at, window, s, factor,
        True, KEYS, STAGES, OPERAND,
    )  # fmt: skip
    acc, d_scores = attend_backwards(
        acc, d_scores, q_tile, d_tile, lse, delta, empty, k_tiles, v_tiles, k_ready, v_ready,
        k_free, v_free, inner, outer, last, begin, at, window, s, factor,
        False, KEYS, STAGES, OPERAND,
    )  # fmt: skip
    acc, d_scores = attend_backwards(
        acc, d_scores, q_tile, d_tile, lse, delta, empty, k_tiles, v_tiles, k_ready, v_ready,
        k_free, v_free, outer, last, last, begin, at, window, s, factor,
        True, KEYS, STAGES, OPERAND,
    )  # fmt: skip

    stage = (last - 1) % STAGES
    acc = warpgroup_mma(d_scores, k_tiles.index(stage), acc, is_async=True)
    acc, d_scores = warpgroup_mma_wait(0, deps=(acc, d_scores))
    mbarrier.arrive(k_free.index(stage), count=1)
    skip_tiles(k_ready, v_ready, k_free, v_free, last, num_tiles, STAGES)

    row = entry + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    t = gl.load(order + gl.minimum(row, count - 1)).to(gl.int64)
    p = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, OUT)), 0)
    written = dq_ptr + gl.expand_dims(t * stride_dqt, 1) + p
    is_row = gl.expand_dims(row < count, 1)
    acc *= scale
    if ADD:
        # a soft token is in several lists, which run one after the other
        acc += gl.load(written, mask=is_row, other=0.0).to(gl.float32)
    gl.store(written, acc.to(dq_ptr.dtype.element_ty), mask=is_row)


@gluon.jit
def routed_attention_hopper_query_kernel(
    q_ptr,
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
    stride_rb,
    stride_rt,
    stride_rh,
    stride_db,
    stride_dt,
    stride_dh,
    desc_rows_b,
    desc_rows_h,
    desc_columns_h,
    scale,
    NUM_LISTS: gl.constexpr,
    SPREAD: gl.constexpr,
    QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    ADD: gl.constexpr,
):
    """What ``routed_attention_bwd_query_kernel`` does, whose lists share one buffer of rows."""
    b, h, kv, group, expert, _slot, count, window, tile, before = find_queries(
        gl.program_id(0), lists_ptr, counts_ptr, num_tiles, num_heads, S, H, K, G, E, NUM_LISTS,
        SPREAD, QUERIES,
    )  # fmt: skip
    if expert >= 0:
        batch = b.to(gl.int64)
        head = h.to(gl.int64)
        order = positions_ptr + (group * E + expert).to(gl.int64) * T
        entry = tile * QUERIES
        past = S - T
        lowest = gl.load(order + entry) + past
        highest = gl.load(order + gl.minimum(entry + QUERIES, count) - 1) + past
        begin = gl.maximum(lowest - window, 0)
        num_key_tiles = gl.cdiv(highest + 1 - begin, KEYS)

        q_ptr += batch * stride_qb + head * stride_qh
        rows_ptr += batch * stride_rb + head * stride_rh
        d_rows_ptr += batch * stride_db + head * stride_dh
        lse_ptr += (batch * H + head) * T
        dq_ptr += (batch * T * H + head) * WIDTH
        packed = (batch * H + head) * packed_rows + packed_base + (before + tile) * QUERIES
        row = b * desc_rows_b + kv * desc_rows_h + begin
        column = kv * desc_columns_h

        dtype: gl.constexpr = k_desc.dtype
        ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH], dtype)
        q_tiles = gl.allocate_shared_memory(dtype, [2, 64, WIDTH], ROWS)
        d_tiles = gl.allocate_shared_memory(dtype, [2, 64, WIDTH], ROWS)
        k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, WIDTH], k_desc.layout)
        v_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, WIDTH], v_desc.layout)
        k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(k_ready.index(i), count=1)
            mbarrier.init(v_ready.index(i), count=1)
            # both groups of warps give a tile back
            mbarrier.init(k_free.index(i), count=2)
            mbarrier.init(v_free.index(i), count=2)

        gl.warp_specialize(
            [
                (
                    differentiate_rows,
                    (
                        q_ptr, rows_ptr, d_rows_ptr, lse_ptr, dq_ptr, packed_q_ptr, packed_d_ptr,
                        packed_lse_ptr, packed_delta_ptr, order, q_tiles.index(0),
                        d_tiles.index(0), k_tiles, v_tiles, k_ready, v_ready, k_free, v_free,
                        entry, packed, count, window, past, begin, num_key_tiles, stride_qt,
                        stride_rt, stride_dt, H * WIDTH, scale, KEYS, WIDTH, STAGES, ADD,
                    ),
                ),
                (
                    differentiate_rows,
                    (
                        q_ptr, rows_ptr, d_rows_ptr, lse_ptr, dq_ptr, packed_q_ptr, packed_d_ptr,
                        packed_lse_ptr, packed_delta_ptr, order, q_tiles.index(1),
                        d_tiles.index(1), k_tiles, v_tiles, k_ready, v_ready, k_free, v_free,
                        entry + 64, packed + 64, count, window, past, begin, num_key_tiles,
                        stride_qt, stride_rt, stride_dt, H * WIDTH, scale, KEYS, WIDTH, STAGES,
                        ADD,
                    ),
                ),
                (
                    load_keys,
                    (
                        k_desc, v_desc, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, row,
                        column, num_key_tiles, KEYS, STAGES,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def launch_query_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    d_rows: Tensor,
    lse: Tensor,
    dq: Tensor,
    packed: list[Tensor],
    lists: Tensor,
    positions: Tensor,
    counts: Tensor,
    shape: tuple[int, int],
    offsets: tuple[int, int, int],
    num_tiles: int,
    num_lists: int,
    sizes: tuple[int, ...],
    packed_rows: int,
    packed_base: int,
    scale: float,
    spread: int,
    is_added: bool,
) -> None:
    """Of the first ``num_lists`` lists, which share rows, their gradients [B, T, H, P] and lse."""
    B, _, H, P = query.shape
    described = (describe(key, shape, (KEYS, P)), describe(value, shape, (KEYS, P)))
    launch(
        routed_attention_hopper_query_kernel,
        (num_tiles * B * H, 1, 1),
        (query, *described, rows, d_rows, lse, dq, *packed, lists, positions, counts),
        (
            *(num_tiles, B * H, *sizes, packed_rows, packed_base),
            *(*query.stride()[:3], *rows.stride()[:3], *d_rows.stride()[:3]),
            *(*offsets, scale),
        ),
        {
            "NUM_LISTS": num_lists,
            "SPREAD": spread,
            "QUERIES": QUERIES,
            "KEYS": KEYS,
            "WIDTH": P,
            # a group holds two tiles of keys and waits for a third
            "STAGES": 512 // P,
            "ADD": is_added,
        },
        num_warps=4,
        maxnreg=168,
    )
