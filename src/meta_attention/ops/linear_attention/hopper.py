"""Linear attention, forward, for Hopper GPUs: programs that walk along the tokens.

    sums    what every segment of the tokens adds to the state      parallel over segments
    scan    the state before every segment, and the last            kernel.py's
    rows    from the state before the segment on                    hopper_rows.py

A program takes 64 tokens at a time and divides the work among groups of warps: one copies keys and
values, one turns keys into features, and one or two each hold 64 columns of the state in registers.
So nothing is written for every chunk, neither states nor features. It is written in Gluon, Triton's
lower-level dialect: the state stays where the tensor cores sum it.

It covers bfloat16 without padding, documents or decay, for head widths of 64 and 128: see
``can_run``. ``kernel.py`` covers everything and is the definition of what this does.

In here, a tile of rows is laid out in one of three ways: LOAD for whole rows as memory has them,
TILE for 64 columns of the same rows in the same threads, and MMA for the tensor cores.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from meta_attention.ops.copy_engine import copy_tile, describe
from meta_attention.ops.heads import as_matrix, last_contiguous
from meta_attention.ops.launch import ceil_div, compute_capability, launch
from meta_attention.ops.route_plan import RANK_BLOCK, QueryList
from meta_attention.ops.routed_attention.forward import LOG2_E

# tokens at a time: the rank table says which entries of a list are among them
CHUNK = gl.constexpr(RANK_BLOCK)

# rows of a tile that a thread works on at once, so that registers suffice
PART = gl.constexpr(32)

# of the state, in a group of warps
COLUMNS = gl.constexpr(64)

SUM_STAGES = 6

# what the groups of warps share, on average, and then divide among them: for one program on a
# multiprocessor, or two if heads are narrow
MAX_REGISTERS = {64: 80, 128: 128}

# two groups of 64 columns for each multiprocessor of a large GPU, in one program or in two
PROGRAMS = 264

# what it costs to start on a segment, in chunks, and the segments there may be
START_COST, MAX_PROGRAMS = 4, 4 * PROGRAMS

# renamed between the versions of Triton we run on
all_warps = getattr(gl, "barrier", None) or gl.thread_barrier
gather = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def load_layout(width):
    """Rows of ``width``, 16 bytes to a thread."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def tile_layout(width):
    """64 columns of such rows, each row in the threads that ``load_layout`` has it in."""
    return gl.BlockedLayout([1, 512 // width], [256 // width, width // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def mma_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])


@gluon.jit
def features(x, NORMALISE: gl.constexpr):
    if NORMALISE:
        # by itself, the compiler takes care of results below 1e-38 in three more instructions
        below = gl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [gl.minimum(x, 0.0) * LOG2_E],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
        x = gl.maximum(x, 0.0) + below
    return x


@gluon.jit
def widen(x):
    """bfloat16 in float32, with one instruction for each and not two for every other."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
        "=r,=r,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def round_pairs(x):
    """``x`` in bfloat16, and that in float32.

    By itself, the compiler rounds one by one what it needs as both: eight times as slow.
    """
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $4, $3; shl.b32 $1, $0, 16; and.b32 $2, $0, 0xffff0000;",
        "=r,=r,=r,r,r",
        [x],
        dtype=(gl.bfloat16, gl.float32),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def put_features(
    f_tile, k_tile, start, T, WIDTH: gl.constexpr, LAYOUT: gl.constexpr, NORMALISE: gl.constexpr
):
    """Features of a tile of keys into another, and their sums as far as each thread has them.

    They are zero beyond the last token: other rows of the matrix follow there.
    """
    ROWS: gl.constexpr = 1024 // WIDTH
    for i in gl.static_range(CHUNK // PART):
        s = start + i * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, LAYOUT))
        k = k_tile.slice(i * PART, PART).load(LAYOUT)
        f = gl.where(gl.expand_dims(s < T, 1), features(k.to(gl.float32), NORMALISE), 0.0)
        f = f.to(k_tile.dtype)
        f_tile.slice(i * PART, PART).store(f)
        part = gl.sum(f.to(gl.float32).reshape([PART // ROWS, ROWS, f.shape[1]]), axis=0)
        if i == 0:
            total = part
        else:
            total = total + part
    return gl.convert_layout(total, LAYOUT, assert_trivial=True)


@gluon.jit
def drop_beyond(tile, start, T, LAYOUT: gl.constexpr, FILL: gl.constexpr = 0.0):
    """Fill a tile beyond the last token, where even 0 times what is there may be NaN."""
    if start + CHUNK > T:
        s = start + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
        v = tile.load(LAYOUT).to(gl.float32)
        tile.store(gl.where(gl.expand_dims(s < T, 1), v, FILL).to(tile.dtype))


@gluon.jit
def sum_in_warp(total, WIDTH: gl.constexpr):
    """[4, columns], a row for each warp, of the sums of ``put_features``."""
    return gl.sum(total.reshape([4, 256 // WIDTH, total.shape[1]]), axis=1)


@gluon.jit
def rank_at(ranks_ptr, n, T, HAS_LIST: gl.constexpr):
    """How many rows come before chunk ``n``."""
    if HAS_LIST:
        rank = gl.load(ranks_ptr + n)
    else:
        rank = gl.minimum(n * CHUNK, T)
    return rank


@gluon.jit
def load_positions(positions_ptr, slot, stop, HAS_LIST: gl.constexpr):
    if HAS_LIST:
        t = gl.load(positions_ptr + slot, mask=slot < stop, other=0)
    else:
        t = slot
    return t


@gluon.jit
def copy_rows(tile, ptr, t, stride, is_row, c):
    """Have [t, c] copied, of what is listed only."""
    at = gl.expand_dims(t.to(gl.int64) * stride, 1) + gl.expand_dims(c, 0)
    gather(tile, ptr + at, mask=gl.expand_dims(is_row, 1))
    async_copy.commit_group()


@gluon.jit
def put_keys(tile, P: gl.constexpr, LAYOUT: gl.constexpr, NORMALISE: gl.constexpr):
    """Features in place of keys, and their sums as far as each thread has them."""
    f = widen(tile.load(LAYOUT))
    if NORMALISE:
        rounded, f = round_pairs(features(f, NORMALISE))
        tile.store(rounded)
    total = gl.sum(f.reshape([CHUNK * P // 1024, 1024 // P, P]), axis=0)
    return gl.convert_layout(total, LAYOUT, assert_trivial=True)


@gluon.jit
def afresh(x):
    """``x``, as the compiler cannot know: what follows from it is not worked out ahead and kept."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def copy_chunks(
    descs, tiles, barriers, places, begin, end, HALVES: gl.constexpr, STAGES: gl.constexpr
):
    """Have chunk after chunk of keys and values copied, each as soon as its place is free."""
    k_desc, v_desc = descs
    k_tiles, v_tiles = tiles
    ready, free = barriers
    k_row, k_column, v_row, v_column = places
    for n in range(begin, end):
        stage = (n - begin) % STAGES
        # of a fresh barrier, the phase before the first counts as over
        mbarrier.wait(free.index(stage), (((n - begin) // STAGES) & 1) ^ 1)
        barrier = ready.index(stage)
        size: gl.constexpr = k_desc.block_type.nbytes + HALVES * v_desc.block_type.nbytes
        mbarrier.expect(barrier, size)
        copy_tile(k_desc, [k_row + n * CHUNK, k_column], barrier, k_tiles.index(stage))
        for i in gl.static_range(HALVES):
            copy_tile(
                v_desc,
                [v_row + n * CHUNK, v_column + i * COLUMNS],
                barrier,
                v_tiles.index(stage * HALVES + i),
            )


@gluon.jit
def hand_over(barrier):
    """Let others multiply what all warps of this group have written."""
    fence_async_shared()
    all_warps()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def sum_keys(
    norm_ptr,
    tiles,
    barriers,
    begin,
    end,
    T,
    P: gl.constexpr,
    NORMALISE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Turn keys into features, tile after tile, in place, and sum them."""
    k_tiles, v_tiles = tiles
    ready, f_ready, _free = barriers
    LOAD: gl.constexpr = load_layout(P)
    TILE: gl.constexpr = tile_layout(P)
    HALVES: gl.constexpr = P // COLUMNS
    norm = gl.zeros([1024 // P, P], gl.float32, LOAD)
    for n in range(begin, end):
        stage = (n - begin) % STAGES
        mbarrier.wait(ready.index(stage), ((n - begin) // STAGES) & 1)
        # keys whose features are zero: other rows of the matrix follow the last token
        FILL: gl.constexpr = -float("inf") if NORMALISE else 0.0
        drop_beyond(k_tiles.index(stage), n * CHUNK, T, LOAD, FILL)
        for i in gl.static_range(HALVES):
            drop_beyond(v_tiles.index(stage * HALVES + i), n * CHUNK, T, TILE)
        norm += put_keys(k_tiles.index(stage), P, LOAD, NORMALISE)
        hand_over(f_ready.index(stage))
    p = gl.arange(0, P, layout=gl.SliceLayout(0, LOAD))
    gl.store(norm_ptr + p, gl.sum(norm, axis=0))


@gluon.jit
def sum_columns(
    sums_ptr,
    tiles,
    barriers,
    begin,
    end,
    P: gl.constexpr,
    STAGES: gl.constexpr,
    HALF: gl.constexpr,
):
    """64 columns of what a segment adds to the state, by one group of four warps."""
    k_tiles, v_tiles = tiles
    ready, f_ready, free = barriers
    MMA: gl.constexpr = mma_layout()
    HALVES: gl.constexpr = P // COLUMNS
    state = gl.zeros([P, COLUMNS], gl.float32, MMA)
    for n in range(begin, end):
        stage = (n - begin) % STAGES
        lap = ((n - begin) // STAGES) & 1
        mbarrier.wait(ready.index(stage), lap)
        mbarrier.wait(f_ready.index(stage), lap)
        v_tile = v_tiles.index(stage * HALVES + HALF)
        state = warpgroup_mma(k_tiles.index(stage).permute((1, 0)), v_tile, state, is_async=True)
        state = warpgroup_mma_wait(0, deps=(state,))
        mbarrier.arrive(free.index(stage), count=1)
    row = gl.arange(0, P, layout=gl.SliceLayout(1, MMA))
    c = HALF * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA))
    gl.store(sums_ptr + gl.expand_dims(row * P, 1) + gl.expand_dims(c, 0), state)


@gluon.jit
def linear_attention_hopper_sum_kernel(
    k_desc,
    v_desc,
    sums_ptr,  # [B, K, G, P * P + P] float32
    T,
    K,
    chunks,  # of a segment
    k_rows_b,
    k_rows_h,
    k_columns_h,
    v_rows_b,
    v_rows_h,
    v_columns_h,
    P: gl.constexpr,
    NORMALISE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """What one segment adds to the state."""
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
    sums_ptr += (bk.to(gl.int64) * gl.num_programs(0) + segment) * (P * P + P)

    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, P], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES * HALVES, CHUNK, COLUMNS], v_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    f_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(f_ready.index(i), count=1)
        mbarrier.init(free.index(i), count=HALVES)
    fence_async_shared()

    descs = (k_desc, v_desc)
    tiles = (k_tiles, v_tiles)
    places = (k_row, k_column, v_row, v_column)
    barriers = (ready, f_ready, free)
    norm_ptr = sums_ptr + P * P
    if HALVES == 1:
        gl.warp_specialize(
            [
                (sum_columns, (sums_ptr, tiles, barriers, begin, end, P, STAGES, 0)),
                (sum_keys, (norm_ptr, tiles, barriers, begin, end, T, P, NORMALISE, STAGES)),
                (copy_chunks, (descs, tiles, (ready, free), places, begin, end, HALVES, STAGES)),
            ],
            [4, 1],
            [104, 24],
        )
    else:
        gl.warp_specialize(
            [
                (sum_columns, (sums_ptr, tiles, barriers, begin, end, P, STAGES, 0)),
                (sum_columns, (sums_ptr, tiles, barriers, begin, end, P, STAGES, 1)),
                (sum_keys, (norm_ptr, tiles, barriers, begin, end, T, P, NORMALISE, STAGES)),
                (copy_chunks, (descs, tiles, (ready, free), places, begin, end, HALVES, STAGES)),
            ],
            [4, 4, 1],
            [168, 152, 24],
        )


def can_run(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, decay: Tensor | None
) -> bool:
    """Whether these kernels cover the case: nothing masked or shrunk, in a layout they can copy."""
    return (
        mask is None
        and decay is None
        and query.is_cuda
        and query.dtype == torch.bfloat16
        and query.shape[-1] in (64, 128)
        and as_matrix(key) is not None
        and as_matrix(value) is not None
        and compute_capability(query.device) == 9
    )


@lru_cache(maxsize=1024)
def cut_segments(T: int, heads: int, P: int) -> tuple[int, int]:
    """How many segments there are, and of how many chunks, for ``heads`` states.

    So that the programs, each of which walks along one segment, end at about the same time.
    """
    chunks = ceil_div(T, CHUNK.value)
    programs = heads * (P // COLUMNS.value)
    most = max(1, min(ceil_div(chunks, 4), MAX_PROGRAMS // programs))

    def cost(segments: int) -> int:
        rounds = ceil_div(segments * programs, PROGRAMS)
        return rounds * (ceil_div(chunks, segments) + START_COST)

    length = ceil_div(chunks, min(range(1, most + 1), key=cost))
    return ceil_div(chunks, length), length


class Lists(NamedTuple):
    """A query list as kernels read it, or that there is none."""

    tensors: tuple[Tensor | None, Tensor | None] = (None, None)  # positions and ranks
    strides: tuple[int, int, int, int] = (0, 0, 0, 0)  # of their batch and group
    num_ranks: int = 0

    @property
    def is_given(self) -> bool:
        return self.num_ranks > 0


def lists_of(queries: QueryList | None) -> Lists:
    if queries is None:
        return Lists()
    positions, ranks = last_contiguous(queries.positions), last_contiguous(queries.ranks)
    of_batch, of_group, _ = positions.stride()
    ranks_of_batch, ranks_of_group, _ = ranks.stride()
    if positions.shape[1] == 1:
        of_group = ranks_of_group = 0
    strides = (of_batch, of_group, ranks_of_batch, ranks_of_group)
    return Lists((positions, ranks), strides, ranks.shape[-1])


class Copied(NamedTuple):
    """Keys and values for the copy engine."""

    descriptors: tuple[TensorDescriptor, TensorDescriptor]
    offsets: tuple[int, ...]  # where in their matrices the heads are


def describe_chunks(key: Tensor, value: Tensor, key_width: int, value_width: int) -> Copied:
    """Keys and values, of which so many columns of a chunk are copied at a time."""
    key_layout, value_layout = as_matrix(key), as_matrix(value)
    assert key_layout is not None
    assert value_layout is not None
    descriptors = (
        describe(key, key_layout[0], (CHUNK.value, key_width)),
        describe(value, value_layout[0], (CHUNK.value, value_width)),
    )
    return Copied(descriptors, (*key_layout[1], *value_layout[1]))


def aligned(x: Tensor) -> Tensor:
    """``x`` [B, T, H, P], or a copy whose rows can be copied 16 bytes at a time."""
    of_batch, of_token, of_head = strides_of(x)
    is_aligned = (x.data_ptr() | of_batch | of_token | of_head) % 16 == 0
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def strides_of(x: Tensor) -> tuple[int, int, int]:
    """Strides of [B, T, H]; those of axes with one entry may be anything otherwise."""
    (B, T, H, _), (of_batch, of_token, of_head, _) = x.shape, x.stride()
    return 0 if B == 1 else of_batch, 0 if T == 1 else of_token, 0 if H == 1 else of_head


def sum_segments(key: Tensor, copied: Copied, normalise: bool) -> Tensor:
    """What every segment adds to the state, [B, K, G, P * P + P]."""
    B, T, K, P = key.shape
    segments, chunks = cut_segments(T, B * K, P)
    sums = torch.empty(B, K, segments, P * P + P, dtype=torch.float32, device=key.device)
    launch(
        linear_attention_hopper_sum_kernel,
        (segments, B * K, 1),
        (*copied.descriptors, sums),
        (T, K, chunks, *copied.offsets),
        {"P": P, "NORMALISE": normalise, "STAGES": SUM_STAGES},
        num_warps=4,
        maxnreg=MAX_REGISTERS[P],
    )
    return sums
