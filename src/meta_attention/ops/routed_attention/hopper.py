"""Routed attention, forward, for Hopper GPUs: warps that load, and warps that compute.

One warp copies tiles of keys and values into shared memory; two groups of four warps each hold 64
of the tile's 128 queries. While a group takes the exponentials of one tile of scores, its tensor
cores multiply the weights of the tile before with their values. Triton's own compiler does not
overlap these, so this kernel is written in Gluon, its lower-level dialect.

It covers causal attention in half precision without padding or documents, for head widths of 64
and 128, with at most 16 sinks: see ``can_run``. ``kernel.py`` covers everything and is the
definition of what this does.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from meta_attention.ops.copy_engine import copy_tile, describe
from meta_attention.ops.launch import compute_capability, launch
from meta_attention.ops.routed_attention.forward import LOG2_E

QUERIES = 128
KEYS = 128
# keys of a tile of sinks, the fewest that a product of weights and values takes
SINKS = 16


@gluon.jit
def find_queries(
    program,
    lists_ptr,
    counts_ptr,
    num_tiles,
    num_heads,
    S,
    H,
    K,
    G,
    E,
    NUM_LISTS: gl.constexpr,
    SPREAD: gl.constexpr,
    QUERIES: gl.constexpr,
):
    """Head and tile of queries of a program: find_head and find_tile of ``forward.py``."""
    longest = gl.maximum(gl.cdiv(gl.load(counts_ptr + gl.load(lists_ptr)), QUERIES), 1)
    heads = gl.minimum(gl.cdiv(SPREAD, longest), num_heads)
    heads = gl.cdiv(num_heads, num_heads // heads)
    part = program // (heads * num_tiles)
    within = program - part * heads * num_tiles
    heads_here = gl.minimum(heads, num_heads - part * heads)
    any_head = part * heads + within % heads_here
    program = within // heads_here
    h = any_head % H
    b = any_head // H
    kv = h // (H // K)
    group = b * G
    if G > 1:
        group += kv
    first = 0
    before = 0
    expert = -1
    slot = 0
    count = 0
    window = 0
    tile = 0
    for i in gl.static_range(NUM_LISTS):
        e = gl.load(lists_ptr + 2 * i)
        w = gl.load(lists_ptr + 2 * i + 1)
        n = gl.load(counts_ptr + group * E + e)
        tiles = gl.cdiv(n, QUERIES)
        if (program >= first) & (program < first + tiles):
            expert = e
            slot = i
            count = n
            window = w
            tile = first + tiles - 1 - program
            before = first
        first += tiles
    if window < 0:
        window = S
    return b, h, kv, group, expert, slot, count, window, tile, before


@gluon.jit
def load_keys(
    k_desc,
    v_desc,
    k_tiles,
    v_tiles,
    k_ready,
    v_ready,
    k_free,
    v_free,
    row,
    column,
    num_tiles,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copy tile after tile of keys and values, each as soon as its place is free."""
    for i in range(num_tiles):
        stage = i % STAGES
        # of a fresh barrier, the phase before the first counts as over
        lap = ((i // STAGES) & 1) ^ 1
        mbarrier.wait(k_free.index(stage), lap)
        mbarrier.expect(k_ready.index(stage), k_desc.block_type.nbytes)
        copy_tile(k_desc, [row + i * KEYS, column], k_ready.index(stage), k_tiles.index(stage))
        mbarrier.wait(v_free.index(stage), lap)
        mbarrier.expect(v_ready.index(stage), v_desc.block_type.nbytes)
        copy_tile(v_desc, [row + i * KEYS, column], v_ready.index(stage), v_tiles.index(stage))


@gluon.jit
def load_sinks_and_keys(
    k_desc,
    v_desc,
    k_sinks_desc,
    v_sinks_desc,
    k_tiles,
    v_tiles,
    k_ready,
    v_ready,
    k_free,
    v_free,
    k_sinks,
    v_sinks,
    sinks_ready,
    first_row,
    begin,
    column,
    num_tiles,
    NUM_SINKS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    if NUM_SINKS > 0:
        mbarrier.expect(sinks_ready, 2 * k_sinks_desc.block_type.nbytes)
        copy_tile(k_sinks_desc, [first_row, column], sinks_ready, k_sinks)
        copy_tile(v_sinks_desc, [first_row, column], sinks_ready, v_sinks)
    load_keys(
        k_desc, v_desc, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, first_row + begin,
        column, num_tiles, KEYS, STAGES,
    )  # fmt: skip


@gluon.jit
def hide(scores, first, at, window, s):
    """Scores with the keys that a row does not see at minus infinity."""
    key = gl.expand_dims(first + s, 0)
    row = gl.expand_dims(at, 1)
    return gl.where((key <= row) & (key >= row - window), scores, -float("inf"))


@gluon.jit
def weigh(scores, top, total, scale, MASKED: gl.constexpr):
    """Weights of one tile of scores under the new maximum, and by what to shrink the rest."""
    new_top = gl.maximum(top, gl.max(scores, axis=1) * scale)
    shift = new_top
    if MASKED:
        # a row that has seen no key yet
        shift = gl.where(new_top == -float("inf"), 0.0, new_top)
    weights = gl.exp2(scores * scale - gl.expand_dims(shift, 1))
    shrink = gl.exp2(top - shift)
    return weights, new_top, total * shrink + gl.sum(weights, axis=1), shrink


@gluon.jit
def attend_tiles(
    acc,
    weights,
    top,
    total,
    empty,
    q_tile,
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
    OUT_ROW: gl.constexpr,
    WEIGHTS: gl.constexpr,
):
    """Scores of the tiles ``first`` to ``last``, each while the weights before meet their values.

    The wait for the next keys comes between the exponentials and the wait for that product: the
    assembler moves a wait for a product up past all arithmetic, but not out of its basic block.
    """
    for i in range(first, last):
        stage = i % STAGES
        before = (i - 1) % STAGES
        following = i + 1
        scores = warpgroup_mma(
            q_tile, k_tiles.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True
        )
        mbarrier.wait(v_ready.index(before), ((i - 1) // STAGES) & 1)
        acc = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(k_free.index(stage), count=1)
        if MASKED:
            scores = hide(scores, begin + i * KEYS, at, window, s)
        new_weights, top, total, shrink = weigh(scores, top, total, scale, MASKED)
        new_weights = gl.convert_layout(new_weights.to(weights.dtype), WEIGHTS)
        mbarrier.wait(
            k_ready.index(following % STAGES),
            (following // STAGES) & 1,
            pred=following < num_tiles,
        )
        acc, weights, new_weights = warpgroup_mma_wait(0, deps=(acc, weights, new_weights))
        mbarrier.arrive(v_free.index(before), count=1)
        acc = acc * gl.expand_dims(gl.convert_layout(shrink, OUT_ROW), 1)
        weights = new_weights
    return acc, weights, top, total


@gluon.jit
def skip_tiles(k_ready, v_ready, k_free, v_free, first, last, STAGES: gl.constexpr):
    """Give back tiles that only the other group of warps needs."""
    for i in range(first, last):
        stage = i % STAGES
        lap = (i // STAGES) & 1
        # not before they have arrived: a place is filled once for each time it is given back
        mbarrier.wait(k_ready.index(stage), lap)
        mbarrier.arrive(k_free.index(stage), count=1)
        mbarrier.wait(v_ready.index(stage), lap)
        mbarrier.arrive(v_free.index(stage), count=1)


@gluon.jit
def attend_sinks(
    acc,
    q_tile,
    k_sinks,
    v_sinks,
    at,
    window,
    scale,
    ROWS: gl.constexpr,
    NUM_SINKS: gl.constexpr,
    SINKS: gl.constexpr,
    WEIGHTS: gl.constexpr,
):
    """Begin a softmax with the sinks that lie before the windows of its rows."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SINKS, 16]
    )
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    scores = warpgroup_mma(
        q_tile,
        k_sinks.permute((1, 0)),
        gl.zeros([ROWS, SINKS], gl.float32, SCORES),
        use_acc=False,
        is_async=True,
    )
    scores = warpgroup_mma_wait(0, deps=(scores,))
    stop = gl.minimum(gl.convert_layout(at, ROW) - window, NUM_SINKS)
    s = gl.arange(0, SINKS, layout=gl.SliceLayout(0, SCORES))
    scores = gl.where(gl.expand_dims(s, 0) < gl.expand_dims(stop, 1), scores, -float("inf"))
    top = gl.full([ROWS], -float("inf"), gl.float32, ROW)
    total = gl.zeros([ROWS], gl.float32, ROW)
    weights, top, total, _shrink = weigh(scores, top, total, scale, True)
    weights = gl.convert_layout(weights.to(v_sinks.dtype), WEIGHTS)
    acc = warpgroup_mma(weights, v_sinks, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc, top, total


@gluon.jit
def attend_rows(
    q_ptr,
    rows_ptr,
    lse_ptr,
    order,
    q_tile,
    k_tiles,
    v_tiles,
    k_ready,
    v_ready,
    k_free,
    v_free,
    k_sinks,
    v_sinks,
    sinks_ready,
    entry,
    count,
    window,
    past,
    begin,
    num_tiles,
    stride_qt,
    stride_rt,
    scale,
    NUM_SINKS: gl.constexpr,
    SINKS: gl.constexpr,
    KEYS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Attention of 64 listed queries, by one group of four warps."""
    ROWS: gl.constexpr = 64
    dtype: gl.constexpr = k_tiles.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16]
    )
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])

    # queries into shared memory
    load_row = entry + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOAD))
    t = gl.load(order + gl.minimum(load_row, count - 1)).to(gl.int64)
    p = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LOAD))
    q_tile.store(gl.load(q_ptr + gl.expand_dims(t * stride_qt, 1) + gl.expand_dims(p, 0)))
    fence_async_shared()

    list_row = entry + gl.arange(0, ROWS, layout=ROW)
    at = gl.load(order + gl.minimum(list_row, count - 1)) + past
    s = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
    top = gl.full([ROWS], -float("inf"), gl.float32, ROW)
    total = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, WIDTH], gl.float32, OUT)
    empty = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    if NUM_SINKS > 0:
        mbarrier.wait(sinks_ready, 0)
        acc, top, total = attend_sinks(
            acc, q_tile, k_sinks, v_sinks, at, window, scale, ROWS, NUM_SINKS, SINKS, WEIGHTS
        )
        top = gl.convert_layout(top, ROW)
        total = gl.convert_layout(total, ROW)

    # tiles of keys that some of these rows see, and within them those that all see whole
    lowest = gl.load(order + gl.minimum(entry, count - 1)) + past
    highest = gl.load(order + gl.minimum(entry + ROWS, count) - 1) + past
    first = (gl.maximum(lowest - window, 0) - begin) // KEYS
    last = gl.cdiv(highest + 1 - begin, KEYS)
    inner = gl.cdiv(gl.maximum(highest - window, 0) - begin, KEYS)
    inner = gl.minimum(gl.maximum(inner, first + 1), last)
    outer = gl.maximum((lowest + 1 - begin) // KEYS, inner)

    skip_tiles(k_ready, v_ready, k_free, v_free, 0, first, STAGES)
    stage = first % STAGES
    mbarrier.wait(k_ready.index(stage), (first // STAGES) & 1)
    scores = warpgroup_mma(
        q_tile, k_tiles.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True
    )
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_free.index(stage), count=1)
    scores = hide(scores, begin + first * KEYS, at, window, s)
    weights, top, total, shrink = weigh(scores, top, total, scale, True)
    weights = gl.convert_layout(weights.to(dtype), WEIGHTS)
    if NUM_SINKS > 0:
        acc = acc * gl.expand_dims(gl.convert_layout(shrink, OUT_ROW), 1)
    following = first + 1
    mbarrier.wait(
        k_ready.index(following % STAGES), (following // STAGES) & 1, pred=following < last
    )

    # masked at both ends, plain in the middle
    acc, weights, top, total = attend_tiles(
        acc, weights, top, total, empty, q_tile, k_tiles, v_tiles, k_ready, v_ready, k_free,
        v_free, first + 1, inner, last, begin, at, window, s, scale, True, KEYS,
        STAGES, OUT_ROW, WEIGHTS,
    )  # fmt: skip
    acc, weights, top, total = attend_tiles(
        acc, weights, top, total, empty, q_tile, k_tiles, v_tiles, k_ready, v_ready, k_free,
        v_free, inner, outer, last, begin, at, window, s, scale, False, KEYS,
        STAGES, OUT_ROW, WEIGHTS,
    )  # fmt: skip
    acc, weights, top, total = attend_tiles(
        acc, weights, top, total, empty, q_tile, k_tiles, v_tiles, k_ready, v_ready, k_free,
        v_free, outer, last, last, begin, at, window, s, scale, True, KEYS,
        STAGES, OUT_ROW, WEIGHTS,
    )  # fmt: skip

    stage = (last - 1) % STAGES
    mbarrier.wait(v_ready.index(stage), ((last - 1) // STAGES) & 1)
    acc = warpgroup_mma(weights, v_tiles.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_free.index(stage), count=1)
    skip_tiles(k_ready, v_ready, k_free, v_free, last, num_tiles, STAGES)

    acc = acc / gl.expand_dims(gl.convert_layout(total, OUT_ROW), 1)
    out_row = entry + gl.arange(0, ROWS, layout=OUT_ROW)
    t = gl.load(order + gl.minimum(out_row, count - 1)).to(gl.int64)
    p = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, OUT))
    gl.store(
        rows_ptr + gl.expand_dims(t * stride_rt, 1) + gl.expand_dims(p, 0),
        acc.to(rows_ptr.dtype.element_ty),
        mask=gl.expand_dims(out_row < count, 1),
    )
    gl.store(lse_ptr + (at - past), top + gl.log2(total), mask=list_row < count)


@gluon.jit
def routed_attention_hopper_kernel(
    q_ptr,
    k_desc,
    v_desc,
    k_sinks_desc,
    v_sinks_desc,
    rows_ptr,
    lse_ptr,
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
    stride_qb,
    stride_qt,
    stride_qh,
    stride_rn,
    stride_rb,
    stride_rt,
    stride_rh,
    stride_ln,
    desc_rows_b,
    desc_rows_h,
    desc_columns_h,
    scale,
    NUM_LISTS: gl.constexpr,
    SPREAD: gl.constexpr,
    QUERIES: gl.constexpr,
    NUM_SINKS: gl.constexpr,
    SINKS: gl.constexpr,
    KEYS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    b, h, kv, group, expert, slot, count, window, tile, _before = find_queries(
        gl.program_id(0), lists_ptr, counts_ptr, num_tiles, num_heads, S, H, K, G, E, NUM_LISTS,
        SPREAD, QUERIES,
    )  # fmt: skip
    if expert >= 0:
        batch = b.to(gl.int64)
        order = positions_ptr + (group * E + expert).to(gl.int64) * T
        entry = tile * QUERIES
        past = S - T
        lowest = gl.load(order + entry) + past
        highest = gl.load(order + gl.minimum(entry + QUERIES, count) - 1) + past
        begin = gl.maximum(lowest - window, 0)
        num_key_tiles = gl.cdiv(highest + 1 - begin, KEYS)

        head = h.to(gl.int64)
        q_ptr += batch * stride_qb + head * stride_qh
        buffer = batch * 0 + slot
        rows_ptr += buffer * stride_rn + batch * stride_rb + head * stride_rh
        lse_ptr += buffer * stride_ln + (batch * H + head) * T
        first_row = b * desc_rows_b + kv * desc_rows_h
        column = kv * desc_columns_h

        dtype: gl.constexpr = k_desc.dtype
        Q_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH], dtype)
        q_tiles = gl.allocate_shared_memory(dtype, [2, 64, WIDTH], Q_TILE)
        k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, WIDTH], k_desc.layout)
        v_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, WIDTH], v_desc.layout)
        k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        # without sinks these stand in for what is not read
        k_sinks = k_tiles.index(0)
        v_sinks = v_tiles.index(0)
        sinks_ready = k_ready.index(0)
        if NUM_SINKS > 0:
            k_sinks = gl.allocate_shared_memory(dtype, [SINKS, WIDTH], k_sinks_desc.layout)
            v_sinks = gl.allocate_shared_memory(dtype, [SINKS, WIDTH], v_sinks_desc.layout)
            sinks_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
            mbarrier.init(sinks_ready, count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_ready.index(i), count=1)
            mbarrier.init(v_ready.index(i), count=1)
            # both groups of warps give a tile back
            mbarrier.init(k_free.index(i), count=2)
            mbarrier.init(v_free.index(i), count=2)

        factor = scale * LOG2_E
        gl.warp_specialize(
            [
                (
                    attend_rows,
                    (
                        q_ptr, rows_ptr, lse_ptr, order, q_tiles.index(0), k_tiles, v_tiles,
                        k_ready, v_ready, k_free, v_free, k_sinks, v_sinks, sinks_ready, entry,
                        count, window, past, begin, num_key_tiles, stride_qt, stride_rt, factor,
                        NUM_SINKS, SINKS, KEYS, WIDTH, STAGES,
                    ),
                ),
                (
                    attend_rows,
                    (
                        q_ptr, rows_ptr, lse_ptr, order, q_tiles.index(1), k_tiles, v_tiles,
                        k_ready, v_ready, k_free, v_free, k_sinks, v_sinks, sinks_ready, entry + 64,
                        count, window, past, begin, num_key_tiles, stride_qt, stride_rt, factor,
                        NUM_SINKS, SINKS, KEYS, WIDTH, STAGES,
                    ),
                ),
                (
                    load_sinks_and_keys,
                    (
                        k_desc, v_desc, k_sinks_desc, v_sinks_desc, k_tiles, v_tiles, k_ready,
                        v_ready, k_free, v_free, k_sinks, v_sinks, sinks_ready, first_row, begin,
                        column, num_key_tiles, NUM_SINKS, KEYS, STAGES,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def can_run(query: Tensor, is_plain: bool, num_sinks: int, layout: object) -> bool:
    """Whether this kernel covers the case: causal, nothing masked, keys in a layout it can copy.

    Plain is a case without padding, documents or a soft-cap.
    """
    return (
        is_plain
        and num_sinks <= SINKS
        and layout is not None
        and query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] in (64, 128)
        and compute_capability(query.device) == 9
    )


def launch_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    lse: Tensor,
    lists: Tensor,
    positions: Tensor,
    counts: Tensor,
    shape: tuple[int, int],
    offsets: tuple[int, int, int],
    num_tiles: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    scale: float,
    spread: int,
    num_sinks: int,
) -> None:
    B, _, H, P = query.shape
    described = [describe(x, shape, (KEYS, P)) for x in (key, value)]
    if num_sinks:
        described += (describe(x, shape, (SINKS, P)) for x in (key, value))
    else:
        described += described  # not read
    launch(
        routed_attention_hopper_kernel,
        (num_tiles * B * H, 1, 1),
        (query, *described, rows, lse, lists, positions, counts),
        (num_tiles, B * H, *sizes, *query.stride()[:3], *strides, *offsets, scale),
        {
            "NUM_LISTS": lists.shape[0],
            "SPREAD": spread,
            "QUERIES": QUERIES,
            "NUM_SINKS": num_sinks,
            "SINKS": SINKS,
            "KEYS": KEYS,
            "WIDTH": P,
            "STAGES": 256 // P,
        },
        num_warps=4,
        # three groups of warps share the registers, which they then divide among them
        maxnreg=168,
    )
