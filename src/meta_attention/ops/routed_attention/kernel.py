"""Routed attention in Triton: tiles of listed queries against the keys they may see.

    list      2 3 7 8 | 9 14 15 20 | ...          a tile of queries, all of one list
    keys      [lowest bound ........ highest]     masked at both ends, plain in the middle
    sinks     [first ones]                        before them, where a window leaves them out

Forward and the query gradient run over tiles of queries, the longest first; the gradients of keys
and values over tiles of keys, which find the queries that see them through the plan's ranks. So no
program waits for another, nothing is added atomically, and the host knows no count.

Shapes: B batch, T queries, S keys, H heads, K key-value heads, G groups of lists, E lists of the
plan, of which N run here.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from meta_attention.errors import ShapeError
from meta_attention.ops.heads import as_matrix, find_sinks, last_contiguous
from meta_attention.ops.launch import apply, ceil_div, compute_capability, launch, next_power_of_2
from meta_attention.ops.route_plan import RANK_BLOCK, RoutePlan
from meta_attention.ops.routed_attention import (
    hopper,
    hopper_backward,
    hopper_query_gradient,
)
from meta_attention.ops.routed_attention.backward import (
    routed_attention_bwd_key_kernel,
    routed_attention_bwd_query_kernel,
)
from meta_attention.ops.routed_attention.forward import routed_attention_fwd_kernel

# longer windows than any sequence: positions are added to them in 32 bits
MAX_WINDOW = 2**30

# tiles of the longest list that are worked on in turn, three for each multiprocessor of a large GPU
SPREAD = 396


class Tiles(NamedTuple):
    """How a kernel is cut for a head width."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# by the pass: for float32, and for half precision by head width. The tiles of queries of the key
# gradient divide those of the query gradient, which packs them
FLOAT32_TILES = {
    "forward": Tiles(64, 32, 4, 2),
    "query gradient": Tiles(32, 32, 4, 1),
    "key gradient": Tiles(32, 64, 4, 1),
}
HALF_TILES = {
    "forward": {
        64: Tiles(128, 64, 4, 3), 128: Tiles(128, 128, 8, 3), 256: Tiles(128, 64, 8, 2)
    },
    "query gradient": {
        64: Tiles(128, 64, 4, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(64, 32, 8, 2)
    },
    "key gradient": {
        64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 2), 256: Tiles(32, 64, 8, 2)
    },
}  # fmt: skip

# where that does not fit: many GPUs have 99 KiB of shared memory
LARGE_TILES = 164 * 1024
SMALL_TILES = {
    "forward": {128: Tiles(128, 64, 8, 2), 256: Tiles(64, 32, 4, 2)},
    "query gradient": {128: Tiles(64, 64, 4, 2), 256: Tiles(32, 32, 4, 2)},
    "key gradient": {128: Tiles(64, 64, 4, 2), 256: Tiles(32, 32, 4, 2)},
}


def choose_tiles(kernel: str, width: int, itemsize: int, shared_memory: int) -> Tiles:
    if itemsize > 2:
        return FLOAT32_TILES[kernel]
    table = HALF_TILES[kernel]
    if shared_memory < LARGE_TILES:
        table = table | SMALL_TILES[kernel]
    # wider heads are cut as those of 256
    return next((tiles for most, tiles in table.items() if width <= most), table[256])


class RoutedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, query, key, value, plan, windows, causal, marks, scores):
        # rows [N, B, T, H, P], or [B, T, H, P] under an exclusive plan
        B, T, H = query.shape[:3]
        lse = torch.empty(*rows.shape[:-4], B, H, T, dtype=torch.float32, device=query.device)
        _Launch(query, key, value, plan, windows, causal, marks, scores).forward(rows, lse)
        ctx.save_for_backward(query, key, value, rows, lse)
        ctx.arguments = (plan, windows, causal, marks, scores)
        # returned as it is, and not marked as changed: rows of other lists, which an expert before
        # this one has saved, are left alone
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx, d_rows):
        query, key, value, rows, lse = ctx.saved_tensors
        work = _Launch(query, key, value, *ctx.arguments)
        gradients = work.backward(rows, last_contiguous(d_rows.to(query.dtype)), lse)
        return d_rows, *gradients, None, None, None, None, None


class _Scores(NamedTuple):
    """What becomes of products of queries and keys, and which are also looked at."""

    num_sinks: int
    scale: float
    softcap: float  # 0: none


class _Marks(NamedTuple):
    """What padding and documents make of the keys, [B, S] int32 each."""

    marks: Tensor  # 0 for padding, or the document
    starts: Tensor  # first position a token's document has; [B, 2, S]: and that after its sinks
    ends: Tensor  # position after its last


def _marks_of(mask: Tensor, num_sinks: int) -> _Marks:
    marks = mask.int().contiguous()
    # padding counts to the document before it
    documents = marks.cummax(dim=1).values
    position = torch.arange(marks.shape[1], device=marks.device, dtype=torch.int32).expand_as(marks)
    changes = documents[:, 1:] != documents[:, :-1]
    # of the marks: a single key has no change
    edge = torch.ones_like(marks[:, :1], dtype=torch.bool)
    first, last = torch.cat([edge, changes], dim=1), torch.cat([changes, edge], dim=1)
    starts = torch.where(first, position, 0).cummax(dim=1).values
    ends = torch.where(last, position + 1, marks.shape[1])
    ends = ends.flip(1).cummin(dim=1).values.flip(1)
    if num_sinks > 0:
        sink_stops = torch.where(find_sinks(mask, num_sinks), position + 1, 0).cummax(dim=1).values
        starts = torch.stack([starts, sink_stops.gather(1, ends.long() - 1)], dim=1)
    return _Marks(marks, starts.int().contiguous(), ends.int().contiguous())


@lru_cache(maxsize=256)
def _order(
    windows: tuple[tuple[int, int | None], ...], is_exclusive: bool
) -> tuple[tuple[int, int], ...]:
    """Lists and their windows, -1 for none; the longest first where their order is free."""
    pairs = ((index, -1 if w is None else min(w, MAX_WINDOW)) for index, w in windows)
    if not is_exclusive:
        return tuple(pairs)
    return tuple(sorted(pairs, key=lambda pair: -pair[1] if pair[1] >= 0 else -(2**31)))


@lru_cache(maxsize=256)
def _lists_on(device: torch.device, lists: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.tensor(lists, dtype=torch.int32, device=device)


class _Launch:
    """Arguments the three kernels share."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: RoutePlan,
        windows: tuple[tuple[int, int], ...],
        causal: bool,
        marks: _Marks | None,
        scores: _Scores,
    ) -> None:
        self.query, self.key, self.value, self.plan = query, key, value, plan
        self.windows, self.causal, self.marks = windows, causal, marks
        self.num_sinks, self.scale, self.softcap = scores
        self.B, self.T, self.H, self.P = query.shape
        self.S, self.K = key.shape[1:3]
        self.lists = _lists_on(query.device, windows)
        self.sizes = (self.T, self.S, self.H, self.K, *plan.counts.shape[1:])
        # of keys and values as matrices, where both are the same kind of one
        self.layout = as_matrix(key)
        if key.stride() != value.stride() or value.data_ptr() % 16:
            self.layout = None
        is_plain = causal and marks is None and not self.softcap
        self.is_hopper = hopper.can_run(query, is_plain, self.num_sinks, self.layout)
        # its gradients know no sinks
        self.is_hopper_backward = self.is_hopper and not self.num_sinks

    def _mark_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        # the counts stand in for pointers that are not read
        return self.marks or (self.plan.counts,) * 3

    def _key_strides(self) -> tuple[int, ...]:
        return (*self.key.stride()[:3], *self.value.stride()[:3])

    def _tiles(self, kernel: str) -> Tiles:
        itemsize = self.query.element_size()
        return choose_tiles(kernel, self.P, itemsize, _shared_memory(self.query))

    def _slot_stride(self, x: Tensor) -> int:
        """From one list's buffer to the next; lists share one under an exclusive plan."""
        return 0 if self.plan.is_exclusive else x.stride(0)

    def _row_strides(self, x: Tensor) -> tuple[int, ...]:
        return (self._slot_stride(x), *x.stride()[-4:-1])

    def _num_tiles(self, queries: int, num_lists: int) -> int:
        """Tiles of queries there may be, whatever the routes."""
        if self.plan.is_exclusive:
            return ceil_div(self.T, queries) + num_lists - 1
        return ceil_div(self.T, queries) * num_lists

    def _descriptors(self, tiles: Tiles) -> tuple[object, object, tuple[int, int, int], bool]:
        """Keys and values for the copy engine, where their layout allows it."""
        if self.layout is None or not self._can_copy_tiles():
            return self.key, self.value, (0, 0, 0), False
        shape, offsets = self.layout
        block = [tiles.keys, self.P]
        described = (
            TensorDescriptor(x, list(shape), [shape[1], 1], block) for x in (self.key, self.value)
        )
        return *described, offsets, True

    def _can_copy_tiles(self) -> bool:
        """Whether there is a copy engine, and tiles are of a width that it knows."""
        if _padded(self.P) != self.P:
            return False
        # the interpreter has one
        return not self.query.is_cuda or compute_capability(self.query.device) >= 9

    def forward(self, rows: Tensor, lse: Tensor) -> None:
        num_lists = len(self.windows)
        strides = (*self._row_strides(rows), self._slot_stride(lse))
        if self.is_hopper:
            assert self.layout is not None
            hopper.launch_forward(
                self.query,
                self.key,
                self.value,
                rows,
                lse,
                self.lists,
                self.plan.positions,
                self.plan.counts,
                *self.layout,
                self._num_tiles(hopper.QUERIES, num_lists),
                self.sizes,
                strides,
                self.scale,
                SPREAD,
                self.num_sinks,
            )
            return
        tiles = self._tiles("forward")
        k_desc, v_desc, offsets, tma = self._descriptors(tiles)
        num_tiles = self._num_tiles(tiles.queries, num_lists)
        launch(
            routed_attention_fwd_kernel,
            (num_tiles * self.B * self.H, 1, 1),
            (
                *(self.query, self.key, self.value, k_desc, v_desc, rows, lse),
                *(self.lists, self.plan.positions, self.plan.counts, *self._mark_tensors()[:2]),
            ),
            (
                *(num_tiles, self.B * self.H, *self.sizes),
                *(*self.query.stride()[:3], *self._key_strides(), *strides, *offsets),
                self.scale,
            ),
            {
                "NUM_LISTS": num_lists,
                "QUERIES": tiles.queries,
                "KEYS": tiles.keys,
                "WIDTH": self.P,
                "BLOCK_P": _padded(self.P),
                "PRECISION": _precision(self.query),
                "CAUSAL": self.causal,
                "TMA": tma,
                "HAS_MARKS": self.marks is not None,
                "SPREAD": SPREAD,
                "NUM_SINKS": self.num_sinks,
                "SOFTCAP": self.softcap,
            },
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )

    def backward(self, rows: Tensor, d_rows: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq = torch.zeros(self.query.shape, dtype=self.query.dtype, device=self.query.device)
        tiles = self._tiles("query gradient")
        queries = hopper_query_gradient.QUERIES if self.is_hopper_backward else tiles.queries
        packed_rows = self._num_tiles(queries, len(self.windows)) * queries
        packed_heads = [
            self.query.new_empty(self.B * self.H * packed_rows, self.P) for _ in ("query", "d_out")
        ]
        packed_sums = [lse.new_empty(self.B * self.H * packed_rows) for _ in ("lse", "delta")]
        # lists that share tokens run one after the other: each adds to the same rows of dq
        together = len(self.windows) if self.plan.is_exclusive else 1
        num_tiles = self._num_tiles(queries, together)
        for slot in range(len(self.windows) // together):
            of_slot = (rows, d_rows, lse)
            if not self.plan.is_exclusive:
                of_slot = (rows[slot], d_rows[slot], lse[slot])
            lists = self.lists[slot:] if slot else self.lists
            if self.is_hopper_backward:
                assert self.layout is not None
                hopper_query_gradient.launch_query_gradient(
                    self.query,
                    self.key,
                    self.value,
                    *of_slot,
                    dq,
                    [*packed_heads, *packed_sums],
                    lists,
                    self.plan.positions,
                    self.plan.counts,
                    *self.layout,
                    num_tiles,
                    together,
                    self.sizes,
                    packed_rows,
                    slot * num_tiles * queries,
                    self.scale,
                    SPREAD,
                    slot > 0,
                )
                continue
            k_desc, v_desc, offsets, tma = self._descriptors(tiles)
            launch(
                routed_attention_bwd_query_kernel,
                (num_tiles * self.B * self.H, 1, 1),
                (
                    *(self.query, self.key, self.value, k_desc, v_desc),
                    *(*of_slot, dq, *packed_heads, *packed_sums),
                    *(lists, self.plan.positions, self.plan.counts),
                    *self._mark_tensors()[:2],
                ),
                (
                    *(num_tiles, self.B * self.H, *self.sizes),
                    *(packed_rows, slot * num_tiles * queries),
                    *(*self.query.stride()[:3], *self._key_strides()),
                    *(*self._row_strides(rows), *self._row_strides(d_rows)),
                    *(self._slot_stride(lse), *offsets, self.scale),
                ),
                {
                    "NUM_LISTS": together,
                    "QUERIES": queries,
                    "KEYS": tiles.keys,
                    "WIDTH": self.P,
                    "BLOCK_P": _padded(self.P),
                    "PRECISION": _precision(self.query),
                    "CAUSAL": self.causal,
                    "TMA": tma,
                    "HAS_MARKS": self.marks is not None,
                    "SPREAD": SPREAD,
                    "ADD": slot > 0,
                    "NUM_SINKS": self.num_sinks,
                    "SOFTCAP": self.softcap,
                },
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
            )
        return dq, *self._key_gradients(packed_heads, packed_sums, packed_rows, queries)

    def _key_gradients(
        self,
        packed_heads: list[Tensor],
        packed_sums: list[Tensor],
        packed_rows: int,
        packed_tile: int,
    ) -> tuple[Tensor, Tensor]:
        dk = torch.empty(self.key.shape, dtype=self.key.dtype, device=self.key.device)
        dv = torch.empty(self.value.shape, dtype=self.value.dtype, device=self.value.device)
        if self.is_hopper_backward:
            assert self.layout is not None
            hopper_backward.launch_key_gradients(
                self.key,
                self.value,
                packed_heads,
                packed_sums,
                dk,
                dv,
                self.lists,
                self.plan.positions,
                self.plan.counts,
                self.plan.ranks,
                *self.layout,
                self.sizes,
                packed_rows,
                packed_tile,
                self.scale,
                self.plan.is_exclusive,
            )
            return dk, dv
        tiles = self._tiles("key gradient")
        tma = self._can_copy_tiles()
        described = packed_heads
        if tma:
            block = [tiles.queries, self.P]
            described = [TensorDescriptor.from_tensor(x, block) for x in packed_heads]
        launch(
            routed_attention_bwd_key_kernel,
            (self.B * self.K, ceil_div(self.S, tiles.keys), 1),
            (
                *(self.key, self.value, *described, *packed_heads, *packed_sums, dk, dv),
                *(self.lists, self.plan.positions, self.plan.counts, self.plan.ranks),
                *self._mark_tensors(),
            ),
            (
                *(*self.sizes, packed_rows, packed_tile, self.plan.ranks.shape[-1]),
                *(*self._key_strides(), self.scale),
            ),
            {
                "NUM_LISTS": len(self.windows),
                "QUERIES": tiles.queries,
                "KEYS": tiles.keys,
                "WIDTH": self.P,
                "BLOCK_P": _padded(self.P),
                "PRECISION": _precision(self.query),
                "TMA": tma,
                "CAUSAL": self.causal,
                "HAS_MARKS": self.marks is not None,
                "EXCLUSIVE": self.plan.is_exclusive,
                "RANK_BLOCK": RANK_BLOCK,
                "NUM_SINKS": self.num_sinks,
                "SOFTCAP": self.softcap,
            },
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
        return dk, dv


def _padded(width: int) -> int:
    """The width of a tile: a power of two, and what tensor cores take at least."""
    return max(next_power_of_2(width), 16)


def _precision(x: Tensor) -> str:
    # tensor cores round float32 to ten bits otherwise
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _shared_memory(x: Tensor) -> int:
    """Bytes that a program may have."""
    if not x.is_cuda:
        return LARGE_TILES  # the interpreter's has no end
    return _shared_memory_of(x.device.index)


@lru_cache(maxsize=64)
def _shared_memory_of(device: int) -> int:
    properties = triton.runtime.driver.active.utils.get_device_properties(device)
    return int(properties["max_shared_mem"])


@torch.compiler.disable
def routed_attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: RoutePlan,
    windows: Mapping[int, int | None],
    causal: bool,
    mask: Tensor | None,
    rows: Tensor | None,
    num_sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    if key.dtype != query.dtype or value.dtype != query.dtype:
        # a copy engine's tiles are read as the query's kind, whatever they are
        raise ShapeError(
            f"key and value must be {query.dtype} like query, got {key.dtype} and {value.dtype}"
        )
    query, key, value = (last_contiguous(x) for x in (query, key, value))
    if num_sinks and _is_split(query, key, windows, causal, mask, num_sinks, softcap):
        return _split(query, key, value, plan, windows, rows, num_sinks, scale)
    pairs = _order(tuple(windows.items()), plan.is_exclusive)
    if rows is None:
        buffers = () if plan.is_exclusive else (len(pairs),)
        rows = torch.zeros(*buffers, *query.shape, dtype=query.dtype, device=query.device)
    marks = None if mask is None else _marks_of(mask, num_sinks)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = _Scores(min(num_sinks, MAX_WINDOW), scale, softcap or 0.0)
    return apply(RoutedAttention, rows, query, key, value, plan, pairs, causal, marks, scores)


def _is_split(
    query: Tensor,
    key: Tensor,
    windows: Mapping[int, int | None],
    causal: bool,
    mask: Tensor | None,
    num_sinks: int,
    softcap: float | None,
) -> bool:
    """Whether lists without a window, which have no sinks of their own, have a faster kernel."""
    is_mixed = len({window is None for window in windows.values()}) == 2
    is_plain = causal and mask is None and not softcap
    layout = as_matrix(key)
    if not is_mixed or not hopper.can_run(query, is_plain, 0, layout):
        return False
    return torch.is_grad_enabled() or not hopper.can_run(query, is_plain, num_sinks, layout)


def _split(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: RoutePlan,
    windows: Mapping[int, int | None],
    rows: Tensor | None,
    num_sinks: int,
    scale: float | None,
) -> Tensor:
    """Causal attention, lists without a window apart from the others."""
    found: dict[int, Tensor] = {}
    for is_full in (True, False):
        own = {i: window for i, window in windows.items() if (window is None) == is_full}
        sinks = 0 if is_full else num_sinks
        out = routed_attention_triton(
            query, key, value, plan, own, True, None, rows, sinks, scale, None
        )
        if plan.is_exclusive:
            rows = out
        else:
            found |= zip(own, out, strict=True)
    return torch.stack([found[i] for i in windows]) if rows is None else rows
