"""Gradients of keys and values for Hopper GPUs: a walk from the end of a segment to its start.

A few segments of the sequence take the place of the chunks of ``kernel.py``: their sums are scanned
in reverse, and from the gradient of the state after a segment a program works back through its
chunks, the gradient of the state in registers. With f the features of keys, and u, g and pull as in
``backward.py``:

    d_value[s] = f[s] state + sum_t (f[s] . u[t]) g[t]                      state += u[t]^T g[t]
    d_f[s] = v[s] state + norm + sum_t (v[s] . g[t] + pull[t]) u[t]         state += g[t]^T u[t]
                                                                           norm += pull[t] u[t]

for t from s to the end of its chunk; the state is that of the chunks after. Both are one walk: of
rows, f or v, with all columns of one packed tensor, here called wide, and those 64 columns of the
other that a program works out, called narrow.

It covers what ``hopper.py`` does. ``backward.py`` covers everything and is the definition.
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
from meta_attention.ops.heads import as_matrix
from meta_attention.ops.launch import launch
from meta_attention.ops.linear_attention.hopper import Lists
from meta_attention.ops.route_plan import RANK_BLOCK

# tokens of a chunk: the rank table says which entries of a list are in it
CHUNK = RANK_BLOCK

# of the head width, in one program
COLUMNS = 64

# a segment is at least so long, and a power of two so that few lengths of it are compiled
MIN_SEGMENT = 256

# two programs have room on a multiprocessor; twice as many as the largest GPU runs at a time
PROGRAMS = 512

# renamed between the versions of Triton we run on
wait_for_warps = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def first_slot(ranks_ptr, chunk, T, CHUNK: gl.constexpr, HAS_LIST: gl.constexpr):
    """How many entries of a list come before a chunk."""
    if HAS_LIST:
        slot = gl.load(ranks_ptr + chunk)
    else:
        slot = gl.minimum(chunk * CHUNK, T)
    return slot


@gluon.jit
def load_positions(positions_ptr, first, stop, CHUNK: gl.constexpr, HAS_LIST: gl.constexpr):
    """Of the entries of a chunk; -1, before all keys, where there is none."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = first + gl.arange(0, CHUNK, layout=LINE)
    if HAS_LIST:
        at = gl.load(positions_ptr + slot, mask=slot < stop, other=-1)
    else:
        at = gl.where(slot < stop, slot, -1)
    return at


@gluon.jit
def fetch_packed(
    wide_desc,
    narrow_desc,
    pull_ptr,
    wide_tiles,
    narrow_tiles,
    ready,
    n,
    head,
    first,
    stop,
    column,
    CHUNK: gl.constexpr,
    HAS_PULL: gl.constexpr,
):
    """Start to copy the entries of a chunk, if any, and load their pulls."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = head + first
    if first < stop:
        barrier = ready.index(n % 2)
        mbarrier.expect(barrier, wide_desc.block_type.nbytes + narrow_desc.block_type.nbytes)
        copy_tile(wide_desc, [row, 0], barrier, wide_tiles.index(n % 2))
        copy_tile(narrow_desc, [row, column], barrier, narrow_tiles.index(n % 2))
    i = gl.arange(0, CHUNK, layout=LINE)
    if HAS_PULL:
        pull = gl.load(pull_ptr + row + i, mask=i < stop - first, other=0.0)
    else:
        pull = gl.zeros([CHUNK], gl.float32, LINE)
    return pull


@gluon.jit
def fetch_rows(
    rows_desc,
    slope_desc,
    rows_tile,
    slope_tile,
    ready,
    rows_at,
    rows_column,
    slope_at,
    slope_column,
    HAS_SLOPE: gl.constexpr,
):
    if HAS_SLOPE:
        mbarrier.expect(ready, rows_desc.block_type.nbytes + slope_desc.block_type.nbytes)
        copy_tile(slope_desc, [slope_at, slope_column], ready, slope_tile)
    else:
        mbarrier.expect(ready, rows_desc.block_type.nbytes)
    copy_tile(rows_desc, [rows_at, rows_column], ready, rows_tile)


@gluon.jit
def wipe(tile, count):
    """Zero the rows of a tile from ``count`` on."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x = tile.load(LAYOUT)
    row = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    tile.store(gl.where(gl.expand_dims(row < count, 1), x, gl.zeros_like(x)))


@gluon.jit
def add_entries(
    acc,
    state,
    norm,
    x,
    state_tile,
    at,
    pull,
    wide_desc,
    narrow_desc,
    pull_ptr,
    wide_tiles,
    narrow_tiles,
    ready,
    n,
    member,
    first_head,
    before,
    first,
    stop,
    column,
    count,
    start,
    T,
    GROUP: gl.constexpr,
    WIDTH: gl.constexpr,
    COLUMNS: gl.constexpr,
    CHUNK: gl.constexpr,
    OUT: gl.constexpr,
    STATE: gl.constexpr,
    HAS_PULL: gl.constexpr,
    ADD_LATER: gl.constexpr,
):
    """What the entries of a chunk give its keys, for one query head, and give to the state."""
    OUT_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    STATE_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=STATE, k_width=2)
    ACROSS: gl.constexpr = gl.SliceLayout(0, OUT)
    dtype: gl.constexpr = wide_tiles.dtype

    # those of the next head, or of the chunk before
    n += member
    next_head = first_head + (member + 1) * T
    next_first = first
    next_stop = stop
    if member == GROUP - 1:
        next_head = first_head
        next_first = before
        next_stop = first
    next_pull = fetch_packed(
        wide_desc, narrow_desc, pull_ptr, wide_tiles, narrow_tiles, ready, n + 1, next_head,
        next_first, next_stop, column, CHUNK, HAS_PULL,
    )  # fmt: skip

    mbarrier.wait(ready.index(n % 2), (n // 2) & 1)
    wide = wide_tiles.index(n % 2)
    narrow = narrow_tiles.index(n % 2)
    if first + CHUNK > count:
        # beyond the list lies what was never written, and 0 times that may be NaN
        wipe(wide, stop - first)
        wipe(narrow, stop - first)
        fence_async_shared()
        wait_for_warps()
    if ADD_LATER:
        acc = warpgroup_mma(x, state_tile.permute((1, 0)), acc, is_async=True)
    empty = gl.zeros([CHUNK, CHUNK], gl.float32, OUT)
    scores = warpgroup_mma(
        x, wide.permute((1, 0)), empty, use_acc=False, is_async=True
    )  # [keys, entries]
    added = narrow.permute((1, 0)).load(OUT)  # [columns, entries]
    # what follows are entries of the next chunk, which the state holds already
    entry = gl.expand_dims(gl.arange(0, CHUNK, layout=ACROSS), 0)
    added = gl.where(entry < stop - first, added, gl.zeros_like(added))
    operand = gl.convert_layout(added, STATE_OPERAND)
    state = warpgroup_mma(operand, wide, state, is_async=True)
    if HAS_PULL:
        pulls = gl.expand_dims(gl.convert_layout(pull, ACROSS), 0)
        norm += gl.sum(added.to(gl.float32) * pulls, axis=1)
    acc, scores = warpgroup_mma_wait(1, deps=(acc, scores))
    if HAS_PULL:
        scores += pulls
    s = gl.expand_dims(start + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, OUT)), 1)
    sees = s <= gl.expand_dims(gl.convert_layout(at, ACROSS), 0)
    weights = gl.convert_layout(gl.where(sees, scores, 0.0).to(dtype), OUT_OPERAND)
    acc = warpgroup_mma(weights, narrow, acc, is_async=True)
    acc, state, weights, operand = warpgroup_mma_wait(0, deps=(acc, state, weights, operand))
    return acc, state, norm, next_pull


@gluon.jit
def walk_back(
    rows_desc,
    wide_desc,
    narrow_desc,
    slope_desc,
    pull_ptr,
    positions_ptr,
    ranks_ptr,
    state_ptr,
    norm_ptr,
    out_ptr,
    rows_tiles,
    wide_tiles,
    narrow_tiles,
    slope_tiles,
    state_tile,
    rows_ready,
    ready,
    rows_at,
    rows_column,
    slope_at,
    slope_column,
    first_head,
    column,
    count,
    begin,
    end,
    T,
    stride,
    GROUP: gl.constexpr,
    WIDTH: gl.constexpr,
    COLUMNS: gl.constexpr,
    CHUNK: gl.constexpr,
    HAS_LIST: gl.constexpr,
    NORMALISE: gl.constexpr,
    OF_KEYS: gl.constexpr,
):
    """Gradients of some columns of the keys or values in the chunks ``begin`` to ``end``."""
    dtype: gl.constexpr = wide_tiles.dtype
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, CHUNK, 16]
    )  # of scores [keys, entries] as well: chunks are as long as columns are wide
    STATE: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16]
    )
    OUT_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    ACROSS: gl.constexpr = gl.SliceLayout(0, OUT)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HAS_PULL: gl.constexpr = OF_KEYS and NORMALISE

    # the state lies transposed, [columns, width]
    c = gl.expand_dims(column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, STATE)), 1)
    p = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, STATE)), 0)
    if OF_KEYS:
        state = gl.load(state_ptr + c * WIDTH + p)
    else:
        state = gl.load(state_ptr + p * WIDTH + c)
    state_tile.store(state.to(dtype))
    fence_async_shared()
    norm = gl.load(norm_ptr + column + gl.arange(0, COLUMNS, layout=ROW))
    empty = gl.zeros([CHUNK, COLUMNS], gl.float32, OUT)

    stop = first_slot(ranks_ptr, end, T, CHUNK, HAS_LIST)
    first = first_slot(ranks_ptr, end - 1, T, CHUNK, HAS_LIST)
    # of the chunk before; none before the first, which shows as a chunk without entries
    before = first_slot(ranks_ptr, gl.maximum(end - 2, begin), T, CHUNK, HAS_LIST)
    at = load_positions(positions_ptr, first, stop, CHUNK, HAS_LIST)
    n = 0
    pull = fetch_packed(
        wide_desc, narrow_desc, pull_ptr, wide_tiles, narrow_tiles, ready, n, first_head, first,
        stop, column, CHUNK, HAS_PULL,
    )  # fmt: skip
    start = (end - 1) * CHUNK
    fetch_rows(
        rows_desc, slope_desc, rows_tiles.index(0), slope_tiles.index(0),
        rows_ready.index(0), rows_at + start, rows_column, slope_at + start, slope_column, HAS_PULL,
    )  # fmt: skip

    for i in range(end - begin):
        chunk = end - 1 - i
        start = chunk * CHUNK
        slope_tile = slope_tiles.index(i % 2)
        next_before = first_slot(ranks_ptr, gl.maximum(chunk - 2, begin), T, CHUNK, HAS_LIST)
        next_at = load_positions(positions_ptr, before, first, CHUNK, HAS_LIST)

        mbarrier.wait(rows_ready.index(i % 2), (i // 2) & 1)
        # all have read what the copies from here on replace
        wait_for_warps()
        if chunk > begin:
            fetch_rows(
                rows_desc, slope_desc, rows_tiles.index((i + 1) % 2),
                slope_tiles.index((i + 1) % 2), rows_ready.index((i + 1) % 2),
                rows_at + start - CHUNK, rows_column, slope_at + start - CHUNK, slope_column,
                HAS_PULL,
            )  # fmt: skip
        x = rows_tiles.index(i % 2)
        if NORMALISE and not OF_KEYS:
            k = x.load(OUT_OPERAND).to(gl.float32)
            x = gl.where(k > 0, k + 1.0, gl.exp(gl.minimum(k, 0.0))).to(dtype)

        # through the state after the chunk, and through its own entries, which then join the state
        later = empty
        if OF_KEYS:
            later += gl.expand_dims(gl.convert_layout(norm, ACROSS), 0)
        if first < stop:
            acc, state, norm, pull = add_entries(
                later, state, norm, x, state_tile, at, pull, wide_desc, narrow_desc, pull_ptr,
                wide_tiles, narrow_tiles, ready, n, 0, first_head, before, first, stop, column,
                count, start, T, GROUP, WIDTH, COLUMNS, CHUNK, OUT, STATE, HAS_PULL, True,
            )  # fmt: skip
            for member in range(1, GROUP):
                wait_for_warps()
                acc, state, norm, pull = add_entries(
                    acc, state, norm, x, state_tile, at, pull, wide_desc, narrow_desc, pull_ptr,
                    wide_tiles, narrow_tiles, ready, n, member, first_head, before, first, stop,
                    column, count, start, T, GROUP, WIDTH, COLUMNS, CHUNK, OUT, STATE, HAS_PULL,
                    False,
                )  # fmt: skip
            n += GROUP
        else:
            pull = fetch_packed(
                wide_desc, narrow_desc, pull_ptr, wide_tiles, narrow_tiles, ready, n, first_head,
                before, first, column, CHUNK, HAS_PULL,
            )  # fmt: skip
            acc = warpgroup_mma(x, state_tile.permute((1, 0)), later)

        # all have read the state
        wait_for_warps()
        if HAS_PULL:
            k = slope_tile.load(OUT).to(gl.float32)
            acc = gl.where(k > 0, acc, acc * gl.exp(gl.minimum(k, 0.0)))
        slope_tile.store(acc.to(dtype))
        state_tile.store(state.to(dtype))
        fence_async_shared()
        wait_for_warps()
        row = gl.expand_dims(gl.arange(0, CHUNK, layout=gl.SliceLayout(1, STORE)), 1)
        across = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, STORE)), 0)
        out = out_ptr + start.to(gl.int64) * stride + row * stride + across
        gl.store(out, slope_tile.load(STORE), mask=row < T - start)
        at = next_at
        stop = first
        first = before
        before = next_before


@gluon.jit
def linear_attention_hopper_key_kernel(
    key_desc,
    value_desc,
    slope_desc,
    wide_u_desc,
    wide_g_desc,
    narrow_u_desc,
    narrow_g_desc,
    pull_ptr,  # [B, H, T] float32
    states_ptr,  # [B, K, N, P, P] float32: gradients of the states after every segment
    norms_ptr,  # [B, K, N, P] float32
    d_key_ptr,  # [B, T, K, P]
    d_value_ptr,
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
    chunks,  # of a segment
    key_rows_b,
    key_rows_h,
    key_columns_h,
    value_rows_b,
    value_rows_h,
    value_columns_h,
    GROUP: gl.constexpr,
    WIDTH: gl.constexpr,
    COLUMNS: gl.constexpr,
    CHUNK: gl.constexpr,
    HAS_LIST: gl.constexpr,
    NORMALISE: gl.constexpr,
):
    """Gradients of one segment: of some columns of its keys, or of its values."""
    PARTS: gl.constexpr = WIDTH // COLUMNS
    # programs that read the same tiles are next to each other
    part = gl.program_id(0) % (2 * PARTS)
    bk = gl.program_id(0) // (2 * PARTS)
    segment = gl.program_id(1)
    b = bk // K
    kv = bk % K
    begin = segment * chunks
    end = gl.minimum(begin + chunks, gl.cdiv(T, CHUNK))
    column = part % PARTS * COLUMNS
    first_head = bk * GROUP * T
    key_at = b * key_rows_b + kv * key_rows_h
    key_column = kv * key_columns_h
    value_at = b * value_rows_b + kv * value_rows_h
    value_column = kv * value_columns_h
    count = T
    if HAS_LIST:
        positions_ptr += b.to(gl.int64) * stride_pb + kv * stride_pg
        ranks_ptr += b.to(gl.int64) * stride_rb + kv * stride_rg
        count = gl.load(ranks_ptr + num_ranks - 1)
    state = bk.to(gl.int64) * N + segment
    state_ptr = states_ptr + state * WIDTH * WIDTH
    norm_ptr = norms_ptr + state * WIDTH
    offset = (b.to(gl.int64) * T * K + kv) * WIDTH + column
    stride = K * WIDTH

    dtype: gl.constexpr = key_desc.dtype
    rows_tiles = gl.allocate_shared_memory(dtype, [2, CHUNK, WIDTH], key_desc.layout)
    wide_tiles = gl.allocate_shared_memory(dtype, [2, CHUNK, WIDTH], wide_u_desc.layout)
    narrow_tiles = gl.allocate_shared_memory(dtype, [2, CHUNK, COLUMNS], narrow_u_desc.layout)
    # what comes out leaves through the same place
    slope_tiles = gl.allocate_shared_memory(dtype, [2, CHUNK, COLUMNS], slope_desc.layout)
    state_tile = gl.allocate_shared_memory(dtype, [COLUMNS, WIDTH], key_desc.layout)
    rows_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(rows_ready.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    wait_for_warps()

    if part < PARTS:
        walk_back(
            key_desc, wide_u_desc, narrow_g_desc, slope_desc, pull_ptr, positions_ptr, ranks_ptr,
            state_ptr, norm_ptr, d_value_ptr + offset, rows_tiles, wide_tiles, narrow_tiles,
            slope_tiles, state_tile, rows_ready, ready, key_at, key_column, key_at, key_column,
            first_head, column, count, begin, end, T, stride,
            GROUP, WIDTH, COLUMNS, CHUNK, HAS_LIST, NORMALISE, False,
        )  # fmt: skip
    else:
        walk_back(
            value_desc, wide_g_desc, narrow_u_desc, slope_desc, pull_ptr, positions_ptr, ranks_ptr,
            state_ptr, norm_ptr, d_key_ptr + offset, rows_tiles, wide_tiles, narrow_tiles,
            slope_tiles, state_tile, rows_ready, ready, value_at, value_column, key_at,
            key_column + column, first_head, column, count, begin, end, T, stride,
            GROUP, WIDTH, COLUMNS, CHUNK, HAS_LIST, NORMALISE, True,
        )  # fmt: skip


def segment_length(key: Tensor) -> int:
    """Tokens between two states: few states, and work for every multiprocessor."""
    B, T, K, P = key.shape
    programs = B * K * 2 * (P // COLUMNS)
    length = MIN_SEGMENT
    while length < T and programs * -(-T // (2 * length)) >= PROGRAMS:
        length *= 2
    return length


def launch_key_gradients(
    key: Tensor,
    value: Tensor,
    packed_u: Tensor,
    packed_g: Tensor,
    packed_pull: Tensor,
    d_states: Tensor,
    d_norms: Tensor,
    segment: int,
    lists: Lists,
    normalise: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values, from those of the states after every segment."""
    B, T, K, P = key.shape
    d_key, d_value = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (key, value))
    key_layout, value_layout = as_matrix(key), as_matrix(value)
    assert key_layout is not None
    assert value_layout is not None
    (key_shape, key_offsets), (value_shape, value_offsets) = key_layout, value_layout
    packed = (packed_u.numel() // P, P)
    N = d_states.shape[2]
    wide, narrow = (CHUNK, P), (CHUNK, COLUMNS)
    described = (
        describe(key, key_shape, wide),
        describe(value, value_shape, wide),
        describe(key, key_shape, narrow),
        *(describe(x, packed, tile) for tile in (wide, narrow) for x in (packed_u, packed_g)),
    )
    launch(
        linear_attention_hopper_key_kernel,
        (B * K * 2 * (P // COLUMNS), N, 1),
        (*described, packed_pull, d_states, d_norms, d_key, d_value, *lists.tensors),
        (
            *(*lists.strides, lists.num_ranks),
            *(T, K, N, segment // CHUNK, *key_offsets, *value_offsets),
        ),
        {
            "GROUP": packed_u.shape[1] // K,
            "WIDTH": P,
            "COLUMNS": COLUMNS,
            "CHUNK": CHUNK,
            "HAS_LIST": lists.is_given,
            "NORMALISE": normalise,
        },
        num_warps=4,
    )
    return d_key, d_value
