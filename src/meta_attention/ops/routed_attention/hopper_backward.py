"""Gradients of keys and values for Hopper GPUs, in the manner of ``hopper.py``.

One warp copies the packed queries and output gradients of a list into shared memory, tile by tile;
two groups of four warps each hold the gradients of 64 of the tile's 128 keys in registers.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from meta_attention.ops.copy_engine import copy_tile, describe
from meta_attention.ops.launch import ceil_div, launch
from meta_attention.ops.route_plan.reference import RANK_BLOCK
from meta_attention.ops.routed_attention.forward import LOG2_E

QUERIES = 64
KEYS = 128


@gluon.jit
def bounds_of_list(
    i: gl.constexpr,
    lists_ptr,
    counts_ptr,
    ranks_ptr,
    group,
    E,
    S,
    past,
    num_ranks,
    start,
    stop,
    QUERIES: gl.constexpr,
    RANK_BLOCK: gl.constexpr,
):
    """Entries of list ``i`` that see keys from ``start`` to ``stop``: as in ``backward.py``.

    From ``first`` to ``inner`` some may see only a part of the keys, from there on to ``last`` all
    see all.
    """
    e = gl.load(lists_ptr + 2 * i)
    w = gl.load(lists_ptr + 2 * i + 1)
    count = gl.load(counts_ptr + group * E + e)
    window = w
    if w < 0:
        window = S
    ranks = ranks_ptr + (group * E + e).to(gl.int64) * num_ranks
    latest = gl.minimum(stop + window, S)
    first = gl.load(ranks + gl.maximum(start - past, 0) // RANK_BLOCK)
    last = gl.load(ranks + gl.cdiv(gl.maximum(latest - past, 0), RANK_BLOCK))
    clear = gl.load(ranks + gl.cdiv(gl.maximum(stop - past, 0), RANK_BLOCK))
    first = first // QUERIES
    last = gl.cdiv(last, QUERIES)
    inner = last
    if w < 0:
        inner = gl.minimum(gl.cdiv(clear, QUERIES), last)
    return e, count, window, gl.minimum(first, last), inner, last


@gluon.jit
def load_queries(
    q_desc,
    d_desc,
    lse_desc,
    delta_desc,
    q_tiles,
    d_tiles,
    lse_tiles,
    delta_tiles,
    ready,
    d_ready,
    free,
    k_desc,
    v_desc,
    k_tile,
    v_tile,
    keys_ready,
    key_row,
    key_column,
    lists_ptr,
    counts_ptr,
    ranks_ptr,
    group,
    E,
    S,
    past,
    num_ranks,
    start,
    stop,
    first_head,
    per_group,
    packed_rows,
    packed_tile,
    NUM_LISTS: gl.constexpr,
    QUERIES: gl.constexpr,
    STAGES: gl.constexpr,
    RANK_BLOCK: gl.constexpr,
    EXCLUSIVE: gl.constexpr,
):
    """Copy the keys and values, then the queries that see them, as soon as there is room."""
    for half in gl.static_range(2):
        barrier = keys_ready.index(half)
        row = key_row + 64 * half
        mbarrier.expect(barrier, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        copy_tile(k_desc, [row, key_column], barrier, k_tile.index(half))
        copy_tile(v_desc, [row, key_column], barrier, v_tile.index(half))
    n = 0
    base = 0
    for i in gl.static_range(NUM_LISTS):
        _e, count, _window, first, _inner, last = bounds_of_list(
            i, lists_ptr, counts_ptr, ranks_ptr, group, E, S, past, num_ranks, start, stop,
            QUERIES, RANK_BLOCK,
        )  # fmt: skip
        for j in range(per_group):
            packed = (first_head + j) * packed_rows + base
            for tile in range(first, last):
                stage = n % STAGES
                lap = ((n // STAGES) & 1) ^ 1
                row = packed + tile * QUERIES
                mbarrier.wait(free.index(stage), lap)
                mbarrier.expect(
                    ready.index(stage), q_desc.block_type.nbytes + lse_desc.block_type.nbytes
                )
                copy_tile(q_desc, [row, 0], ready.index(stage), q_tiles.index(stage))
                copy_tile(lse_desc, [row // QUERIES, 0], ready.index(stage), lse_tiles.index(stage))
                mbarrier.expect(
                    d_ready.index(stage), d_desc.block_type.nbytes + delta_desc.block_type.nbytes
                )
                copy_tile(d_desc, [row, 0], d_ready.index(stage), d_tiles.index(stage))
                copy_tile(
                    delta_desc, [row // QUERIES, 0], d_ready.index(stage), delta_tiles.index(stage)
                )
                n += 1
        if EXCLUSIVE:
            base += gl.cdiv(count, packed_tile) * packed_tile
        else:
            base += gl.cdiv(S - past, packed_tile) * packed_tile


@gluon.jit
def attend_from_tiles(
    dk,
    dv,
    n,
    first,
    last,
    order,
    count,
    window,
    past,
    s,
    k_tile,
    v_tile,
    q_tiles,
    d_tiles,
    lse_tiles,
    delta_tiles,
    ready,
    d_ready,
    free,
    empty,
    scale,
    MASKED: gl.constexpr,
    QUERIES: gl.constexpr,
    STAGES: gl.constexpr,
    SCORES: gl.constexpr,
    WEIGHTS: gl.constexpr,
):
    dtype: gl.constexpr = q_tiles.dtype
    for tile in range(first, last):
        stage = n % STAGES
        lap = (n // STAGES) & 1
        mbarrier.wait(ready.index(stage), lap)
        q_tile = q_tiles.index(stage)
        d_tile = d_tiles.index(stage)
        scores = warpgroup_mma(
            k_tile, q_tile.permute((1, 0)), empty, use_acc=False, is_async=True
        )  # [keys, queries]
        mbarrier.wait(d_ready.index(stage), lap)
        d_weights = warpgroup_mma(
            v_tile, d_tile.permute((1, 0)), empty, use_acc=False, is_async=True
        )
        lse = lse_tiles.index(stage).load(SCORES)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        weights = gl.exp2(scores * scale - lse)
        if MASKED:
            entry = tile * QUERIES + gl.arange(0, QUERIES, layout=gl.SliceLayout(0, SCORES))
            at = gl.expand_dims(gl.load(order + gl.minimum(entry, count - 1)) + past, 0)
            weights = gl.where((s <= at) & (s >= at - window), weights, 0.0)
        operand = gl.convert_layout(weights.to(dtype), WEIGHTS)
        dv = warpgroup_mma(operand, d_tile, dv, is_async=True)
        delta = delta_tiles.index(stage).load(SCORES)
        d_weights = warpgroup_mma_wait(1, deps=(d_weights,))
        d_scores = weights * (d_weights - delta)
        d_operand = gl.convert_layout(d_scores.to(dtype), WEIGHTS)
        dk = warpgroup_mma(d_operand, q_tile, dk, is_async=True)
        dk, dv, operand, d_operand = warpgroup_mma_wait(0, deps=(dk, dv, operand, d_operand))
        mbarrier.arrive(free.index(stage), count=1)
        n += 1
    return dk, dv, n


@gluon.jit
def attend_from_rows(
    dk_ptr,
    dv_ptr,
    k_tile,
    v_tile,
    q_tiles,
    d_tiles,
    lse_tiles,
    delta_tiles,
    ready,
    d_ready,
    free,
    keys_ready,
    positions_ptr,
    lists_ptr,
    counts_ptr,
    ranks_ptr,
    group,
    T,
    E,
    S,
    past,
    num_ranks,
    start,
    stop,
    half: gl.constexpr,
    per_group,
    stride,
    scale,
    NUM_LISTS: gl.constexpr,
    QUERIES: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    RANK_BLOCK: gl.constexpr,
):
    """Gradients of 64 keys and values, by one group of four warps."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, QUERIES, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16]
    )
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    dk = gl.zeros([64, WIDTH], gl.float32, OUT)
    dv = gl.zeros([64, WIDTH], gl.float32, OUT)
    empty = gl.zeros([64, QUERIES], gl.float32, SCORES)
    factor = scale * LOG2_E
    mine = start + 64 * half
    s = gl.expand_dims(mine + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES)), 1)
    mbarrier.wait(keys_ready, 0)
    n = 0
    for i in gl.static_range(NUM_LISTS):
        e, count, window, first, inner, last = bounds_of_list(
            i, lists_ptr, counts_ptr, ranks_ptr, group, E, S, past, num_ranks, start, stop,
            QUERIES, RANK_BLOCK,
        )  # fmt: skip
        order = positions_ptr + (group * E + e).to(gl.int64) * T
        for _j in range(per_group):
            dk, dv, n = attend_from_tiles(
                dk, dv, n, first, inner, order, count, window, past, s, k_tile, v_tile, q_tiles,
                d_tiles, lse_tiles, delta_tiles, ready, d_ready, free, empty, factor,
                True, QUERIES, STAGES, SCORES, WEIGHTS,
            )  # fmt: skip
            dk, dv, n = attend_from_tiles(
                dk, dv, n, inner, last, order, count, window, past, s, k_tile, v_tile, q_tiles,
                d_tiles, lse_tiles, delta_tiles, ready, d_ready, free, empty, factor,
                False, QUERIES, STAGES, SCORES, WEIGHTS,
            )  # fmt: skip

    row = mine + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    p = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, OUT))
    at = gl.expand_dims(row.to(gl.int64) * stride, 1) + gl.expand_dims(p, 0)
    is_key = gl.expand_dims(row < S, 1)
    gl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=is_key)
    gl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=is_key)


@gluon.jit
def routed_attention_hopper_key_kernel(
    k_desc,
    v_desc,
    q_desc,
    d_desc,
    lse_desc,
    delta_desc,
    dk_ptr,
    dv_ptr,
    lists_ptr,
    positions_ptr,
    counts_ptr,
    ranks_ptr,
    T,
    S,
    H,
    K,
    G,
    E,
    packed_rows,
    packed_tile,
    num_ranks,
    desc_rows_b,
    desc_rows_h,
    desc_columns_h,
    scale,
    NUM_LISTS: gl.constexpr,
    QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    RANK_BLOCK: gl.constexpr,
    EXCLUSIVE: gl.constexpr,
):
    kv = gl.program_id(0) % K
    b = gl.program_id(0) // K
    group = b * G
    if G > 1:
        group += kv
    start = gl.program_id(1) * KEYS
    stop = gl.minimum(start + KEYS, S)
    past = S - T
    per_group = H // K
    first_head = b * H + kv * per_group
    key_row = b * desc_rows_b + kv * desc_rows_h + start
    key_column = kv * desc_columns_h
    # gradients [B, S, K, P]
    offset = (b.to(gl.int64) * S * K + kv) * WIDTH
    stride = K * WIDTH

    dtype: gl.constexpr = k_desc.dtype
    k_tile = gl.allocate_shared_memory(dtype, [2, 64, WIDTH], k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, [2, 64, WIDTH], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, QUERIES, WIDTH], q_desc.layout)
    d_tiles = gl.allocate_shared_memory(dtype, [STAGES, QUERIES, WIDTH], d_desc.layout)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], lse_desc.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], lse_desc.layout)
    keys_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    d_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(keys_ready.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(d_ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)

    gl.warp_specialize(
        [
            (
                attend_from_rows,
                (
                    dk_ptr + offset, dv_ptr + offset, k_tile.index(0), v_tile.index(0), q_tiles,
                    d_tiles, lse_tiles, delta_tiles, ready, d_ready, free, keys_ready.index(0),
                    positions_ptr, lists_ptr, counts_ptr, ranks_ptr, group, T, E, S, past,
                    num_ranks, start, stop, 0, per_group, stride, scale,
                    NUM_LISTS, QUERIES, WIDTH, STAGES, RANK_BLOCK,
                ),
            ),
            (
                attend_from_rows,
                (
                    dk_ptr + offset, dv_ptr + offset, k_tile.index(1), v_tile.index(1), q_tiles,
                    d_tiles, lse_tiles, delta_tiles, ready, d_ready, free, keys_ready.index(1),
                    positions_ptr, lists_ptr, counts_ptr, ranks_ptr, group, T, E, S, past,
                    num_ranks, start, stop, 1, per_group, stride, scale,
                    NUM_LISTS, QUERIES, WIDTH, STAGES, RANK_BLOCK,
                ),
            ),
            (
                load_queries,
                (
                    q_desc, d_desc, lse_desc, delta_desc, q_tiles, d_tiles, lse_tiles, delta_tiles,
                    ready, d_ready, free, k_desc, v_desc, k_tile, v_tile, keys_ready, key_row,
                    key_column, lists_ptr, counts_ptr, ranks_ptr, group, E, S, past, num_ranks,
                    start, stop, first_head, per_group, packed_rows, packed_tile,
                    NUM_LISTS, QUERIES, STAGES, RANK_BLOCK, EXCLUSIVE,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def launch_key_gradients(
    key: Tensor,
    value: Tensor,
    packed_heads: list[Tensor],
    packed_sums: list[Tensor],
    dk: Tensor,
    dv: Tensor,
    lists: Tensor,
    positions: Tensor,
    counts: Tensor,
    ranks: Tensor,
    shape: tuple[int, int],
    offsets: tuple[int, int, int],
    sizes: tuple[int, ...],
    packed_rows: int,
    packed_tile: int,
    scale: float,
    is_exclusive: bool,
) -> None:
    B, S, K, P = key.shape
    packed = packed_heads[0].shape[0]
    described = (
        *(describe(x, shape, (64, P)) for x in (key, value)),
        *(describe(x, (packed, P), (QUERIES, P)) for x in packed_heads),
        *(describe(x, (packed // QUERIES, QUERIES), (1, QUERIES)) for x in packed_sums),
    )
    launch(
        routed_attention_hopper_key_kernel,
        (B * K, ceil_div(S, KEYS), 1),
        (*described, dk, dv, lists, positions, counts, ranks),
        (*sizes, packed_rows, packed_tile, ranks.shape[-1], *offsets, scale),
        {
            "NUM_LISTS": lists.shape[0],
            "QUERIES": QUERIES,
            "KEYS": KEYS,
            "WIDTH": P,
            "STAGES": 256 // P,
            "RANK_BLOCK": RANK_BLOCK,
            "EXCLUSIVE": is_exclusive,
        },
        num_warps=4,
        maxnreg=168,
    )
