"""The step in one launch: keys of a row split over programs, the last of which adds the parts up.

    programs of one row and key-value head     | full: split 0, 1, ... | local: 0 | linear: 0, 1 |
    a row routed to full, of few keys          | ==== ====             |          | ++++  ++++   |
    a row routed to linear                     |                       |          | ====  ====   |
                                                 = its part of the output   + update of the state

The number of programs follows the capacity of the cache, which a captured graph fixes. How many of
them have work follows the row: as few as keep SPLIT_KEYS keys each, otherwise all, evenly. The
others read a few numbers and leave.

Sinks, the first keys of a row, are read by the first split of an expert whose window has left them
behind, before its own keys.

A program leaves its part in a workspace and counts itself in; the program that completes the count
merges the parts, weights them, writes the rows and sets the counter back to zero. Every program
works out from route and length how many will come, so those without a part touch no counter.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from meta_attention.ops.heads import last_contiguous
from meta_attention.ops.launch import ceil_div, kind_of, launch, next_power_of_2
from meta_attention.ops.linear_attention.reference import MIN_NORMALISER
from meta_attention.ops.routed_attention.forward import LOG2_E, squash
from meta_attention.ops.routed_decode.reference import LinearStep

# keys of a program, at least: below it, merging and launching outweigh the reads
SPLIT_KEYS = 512

# splits of a row, at most: one program merges them all
MAX_SPLITS = 128

# programs for full attention, about: enough to level out rows of different routes, few enough that
# a batch without full rows does not wait for programs that leave at once
PROGRAMS = 8192

# bytes of a tile of keys: two tiles, times the stages in flight, must fit several programs' shared
# memory on one processor
TILE_BYTES = 16384

# columns of the linear state for one program
STATE_COLUMNS = 32

# floats of the parts merged at a time
MERGE_SIZE = 4096

# a window that ends before any cache; in int32, with room to add to it
NO_WINDOW = 2**30


@triton.jit
def _split_keys(
    weight,
    start,
    length,
    num_splits,
    WINDOW: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """First key, keys of a split, splits that have keys, and splits there are programs for."""
    first = tl.maximum(start, length - 1 - WINDOW)
    keys = tl.where(weight > 0, tl.maximum(length - first, 0), 0)
    splits = tl.minimum(num_splits, (WINDOW + SPLIT_KEYS) // SPLIT_KEYS)
    tiles = (keys + BLOCK_N - 1) // BLOCK_N
    per_split = tl.maximum((tiles + splits - 1) // splits * BLOCK_N, SPLIT_KEYS)
    return first, per_split, (keys + per_split - 1) // per_split, splits


@triton.jit
def _add_keys(
    query,
    m,
    total,
    acc,
    key_ptr,  # [S, P]
    value_ptr,  # [S, P]
    p,
    n,
    low,
    high,
    stride_ks,
    stride_vs,
    scale,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Go on with a softmax over keys low to high."""
    keys = key_ptr + low.to(tl.int64) * stride_ks + n[None, :] * stride_ks + p[:, None]
    values = value_ptr + low.to(tl.int64) * stride_vs + n[:, None] * stride_vs + p[None, :]
    for tile in range(low, high, BLOCK_N):
        seen = n < high - tile
        k = tl.load(keys, mask=(p < P)[:, None] & seen[None, :], other=0.0)
        scores = tl.dot(query, k, input_precision="ieee") * scale  # [BLOCK_G, BLOCK_N]
        if SOFTCAP > 0:
            scores = squash(scores) * (SOFTCAP * LOG2_E)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        # finite from the first tile on: every tile has a key
        new_m = tl.maximum(m, tl.max(scores, axis=1))
        keep = tl.exp2(m - new_m)
        probs = tl.exp2(scores - new_m[:, None])
        total = total * keep + tl.sum(probs, axis=1)
        v = tl.load(values, mask=seen[:, None] & (p < P)[None, :], other=0.0)
        acc = tl.dot(probs.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        m = new_m
        keys += BLOCK_N * stride_ks
        values += BLOCK_N * stride_vs
    return m, total, acc


@triton.jit
def _attend(
    query_ptr,  # [GROUP, P]
    key_ptr,  # [S, P]
    value_ptr,  # [S, P]
    part_ptr,  # [GROUP, P]
    stats_ptr,  # [2, GROUP]
    low,
    high,
    first_sink,
    sink_stop,
    stride_qh,
    stride_ks,
    stride_vs,
    scale,
    GROUP: tl.constexpr,
    P: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Softmax attention over keys low to high, and sinks: unnormalised rows, maximum and sum."""
    g = tl.arange(0, BLOCK_G)
    p = tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    in_group = (g < GROUP)[:, None] & (p < P)[None, :]
    query = tl.load(query_ptr + g[:, None] * stride_qh + p[None, :], mask=in_group, other=0.0)
    m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_P], tl.float32)
    if NUM_SINKS > 0:
        m, total, acc = _add_keys(
            query, m, total, acc, key_ptr, value_ptr, p, n, first_sink, sink_stop,
            stride_ks, stride_vs, scale, P, BLOCK_N, SOFTCAP,
        )  # fmt: skip
    m, total, acc = _add_keys(
        query, m, total, acc, key_ptr, value_ptr, p, n, low, high,
        stride_ks, stride_vs, scale, P, BLOCK_N, SOFTCAP,
    )  # fmt: skip

    tl.store(part_ptr + g[:, None] * P + p[None, :], acc, mask=in_group)
    tl.store(stats_ptr + g, m, mask=g < GROUP)
    tl.store(stats_ptr + GROUP + g, total, mask=g < GROUP)


@triton.jit
def _feature_map(x):
    """ELU(x) + 1, as in the reference."""
    return tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))


@triton.jit
def _step_state(
    query_ptr,  # [GROUP, P]
    key_ptr,  # [P]
    value_ptr,  # [P]
    state_ptr,  # [P, P + 1]
    sums_ptr,  # [GROUP, P + 1]
    decay_ptr,  # [B, K]
    row,
    weight,
    first_column,
    stride_qh,
    stride_sp,
    GROUP: tl.constexpr,
    P: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Add the newest token to some columns of the state and, where routed, read them."""
    p = tl.arange(0, BLOCK_P)
    c = first_column + tl.arange(0, BLOCK_C)
    # the last column sums the normaliser; features of lanes that are not there are zero
    nothing = float("-inf") if NORMALISE else 0.0
    key = tl.load(key_ptr + p, mask=p < P, other=nothing).to(tl.float32)
    if NORMALISE:
        key = _feature_map(key)
    value = tl.load(value_ptr + c, mask=c < P, other=1.0).to(tl.float32)
    at = state_ptr + p[:, None] * stride_sp + c[None, :]
    in_state = (p < P)[:, None] & (c <= P)[None, :]
    state = tl.load(at, mask=in_state, other=0.0)
    if HAS_DECAY:
        state = state * tl.exp(tl.load(decay_ptr + row))
    state += key[:, None] * value[None, :]
    tl.store(at, state, mask=in_state)
    if weight > 0:
        for g in range(GROUP):
            query = tl.load(query_ptr + g * stride_qh + p, mask=p < P, other=nothing)
            query = query.to(tl.float32)
            if NORMALISE:
                query = _feature_map(query - tl.minimum(tl.max(query, axis=0), 0.0))
            sums = tl.sum(query[:, None] * state, axis=0)
            tl.store(sums_ptr + g * (P + 1) + c, sums, mask=c <= P)


@triton.jit
def _merge(
    out_ptr,  # [GROUP, P]
    weights_ptr,  # [E]
    parts_ptr,  # [slots, GROUP, P]
    stats_ptr,  # [slots, 2, GROUP]
    sums_ptr,  # [GROUP, P + 1]
    value_ptr,  # of the linear expert
    skip_ptr,  # [H]
    at_value,
    at_skip,
    start,
    length,
    num_splits,
    stride_we,
    EXPERTS: tl.constexpr,
    WINDOWS: tl.constexpr,
    LINEAR: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    NORMALISE: tl.constexpr,
    GROUP: tl.constexpr,
    P: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MIN_NORMALISER: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Weighted sum of the experts' rows, from the parts of all programs.

    Parts were written by other processors: .cg reads past the cache of this one.
    """
    s = tl.arange(0, BLOCK_S)
    g = tl.arange(0, BLOCK_G)
    p = tl.arange(0, BLOCK_P)
    in_group = (g < GROUP)[:, None] & (p < P)[None, :]
    out = tl.zeros([BLOCK_G, BLOCK_P], tl.float32)
    slot = 0
    for i in tl.static_range(len(EXPERTS)):
        weight = tl.load(weights_ptr + EXPERTS[i] * stride_we).to(tl.float32)
        _, _, active, splits = _split_keys(
            weight, start, length, num_splits, WINDOWS[i], SPLIT_KEYS, BLOCK_N
        )
        m = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_P], tl.float32)
        for split in range(0, active, BLOCK_S):
            is_part = split + s < active
            at = slot + split + s
            stats = stats_ptr + at[:, None] * (2 * GROUP) + g[None, :]
            has_stats = is_part[:, None] & (g < GROUP)[None, :]
            ms = tl.load(stats, mask=has_stats, other=float("-inf"), cache_modifier=".cg")
            # heads that are not there: any finite number
            ms = tl.where((g < GROUP)[None, :], ms, 0.0)
            sums = tl.load(stats + GROUP, mask=has_stats, other=0.0, cache_modifier=".cg")
            parts = tl.load(
                parts_ptr + (at[:, None, None] * GROUP + g[None, :, None]) * P + p[None, None, :],
                mask=is_part[:, None, None] & in_group[None, :, :],
                other=0.0,
                cache_modifier=".cg",
            )  # [BLOCK_S, BLOCK_G, BLOCK_P]
            new_m = tl.maximum(m, tl.max(ms, axis=0))
            keep = tl.exp2(m - new_m)
            scales = tl.exp2(ms - new_m[None, :])
            total = total * keep + tl.sum(sums * scales, axis=0)
            acc = acc * keep[:, None] + tl.sum(parts * scales[:, :, None], axis=0)
            m = new_m
        # no keys, no sum: such an expert adds zero
        out += weight * acc / tl.where(total > 0, total, 1.0)[:, None]
        slot += splits

    if LINEAR >= 0:
        weight = tl.load(weights_ptr + LINEAR * stride_we).to(tl.float32)
        if (weight > 0) & (length > 0):
            sums = sums_ptr + g[:, None] * (P + 1) + p[None, :]
            rows = tl.load(sums, mask=in_group, other=0.0, cache_modifier=".cg")
            if NORMALISE:
                normaliser = tl.load(
                    sums_ptr + g * (P + 1) + P, mask=g < GROUP, other=1.0, cache_modifier=".cg"
                )
                out += weight * rows / tl.maximum(normaliser, MIN_NORMALISER)[:, None]
            else:
                if HAS_SKIP:
                    own = tl.load(value_ptr + at_value + p, mask=p < P, other=0.0).to(tl.float32)
                    skip = tl.load(skip_ptr + at_skip + g, mask=g < GROUP, other=0.0)
                    rows += skip[:, None] * own[None, :]
                out += weight * rows
    tl.store(out_ptr + g[:, None] * P + p[None, :], out, mask=in_group)


# a cache that grows with every token must not bring a new kernel every sixteenth
@triton.jit(do_not_specialize=["capacity", "num_splits", "num_slots", "num_softmax_slots"])
def routed_decode_kernel(
    query_ptr,  # [B, H, P]
    key_ptr,  # [B, K, S, P]
    value_ptr,  # [B, K, S, P]
    weights_ptr,  # [B, G, E]
    length_ptr,  # [B] or []
    start_ptr,  # [B]
    is_token_ptr,  # [B]
    linear_query_ptr,  # [B, H, P]
    linear_key_ptr,  # [B, K, P]
    linear_value_ptr,  # [B, K, P]
    state_ptr,  # [B, K, P, P + 1] float32
    decay_ptr,  # [B, K] float32
    skip_ptr,  # [H] float32
    out_ptr,  # [B, H, P]
    parts_ptr,  # [B, K, softmax slots, GROUP, P] float32
    stats_ptr,  # [B, K, softmax slots, 2, GROUP] float32
    sums_ptr,  # [B, K, GROUP, P + 1] float32
    counters_ptr,  # [B, K] int32, zero before and after
    scale,
    capacity,
    num_splits,
    num_slots,
    num_softmax_slots,
    K,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kk,
    stride_ks,
    stride_vb,
    stride_vk,
    stride_vs,
    stride_wb,
    stride_wg,
    stride_we,
    stride_length,
    stride_lqb,
    stride_lqh,
    stride_lkb,
    stride_lkk,
    stride_lvb,
    stride_lvk,
    stride_sb,
    stride_sk,
    stride_sp,
    EXPERTS: tl.constexpr,
    WINDOWS: tl.constexpr,
    LINEAR: tl.constexpr,
    LINEAR_TILES: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    NORMALISE: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_MASK: tl.constexpr,
    GROUP: tl.constexpr,
    P: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MIN_NORMALISER: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    MERGE_G: tl.constexpr,
    MERGE_S: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    # programs of one row and key-value head follow each other: their parts are merged while the
    # next rows are read, not all at the end
    pid = tl.program_id(0)
    slot = pid % num_slots
    row = (pid // num_slots).to(tl.int64)  # of B * K
    b = row // K
    kv = row % K

    # a row of padding has no keys, so no expert has work
    length = tl.minimum(tl.load(length_ptr + b * stride_length).to(tl.int32), capacity)
    start = slot * 0
    if HAS_START:
        start = tl.load(start_ptr + b).to(tl.int32)
    is_row = start < length
    if HAS_MASK:
        is_row = is_row & (tl.load(is_token_ptr + b) != 0)
    length = tl.where(is_row, length, 0)

    # the keys of this program, if any, and how many programs have a part
    weights_ptr += b * stride_wb + kv * stride_wg
    low = slot * 0
    high = slot * 0
    sink_stop = slot * 0
    arrivals = slot * 0
    first_slot = slot * 0
    for i in tl.static_range(len(EXPERTS)):
        weight = tl.load(weights_ptr + EXPERTS[i] * stride_we)
        first, per_split, active, splits = _split_keys(
            weight, start, length, num_splits, WINDOWS[i], SPLIT_KEYS, BLOCK_N
        )
        split = slot - first_slot
        is_mine = (split >= 0) & (split < active)
        low = tl.where(is_mine, first + split * per_split, low)
        high = tl.where(is_mine, tl.minimum(first + (split + 1) * per_split, length), high)
        if NUM_SINKS > 0:
            # an expert without a window has none before its first key
            before = tl.minimum(start + NUM_SINKS, first)
            sink_stop = tl.where(is_mine & (split == 0), before, sink_stop)
        arrivals += active
        first_slot += splits
    has_part = low < high

    parts_ptr += row * num_softmax_slots * (GROUP * P)
    stats_ptr += row * num_softmax_slots * (2 * GROUP)
    sums_ptr += row * (GROUP * (P + 1))
    if has_part:
        _attend(
            query_ptr + b * stride_qb + kv * GROUP * stride_qh,
            key_ptr + b * stride_kb + kv * stride_kk,
            value_ptr + b * stride_vb + kv * stride_vk,
            parts_ptr + slot * (GROUP * P),
            stats_ptr + slot * (2 * GROUP),
            low,
            high,
            start,
            sink_stop,
            stride_qh,
            stride_ks,
            stride_vs,
            scale,
            GROUP,
            P,
            BLOCK_G,
            BLOCK_P,
            BLOCK_N,
            NUM_SINKS,
            SOFTCAP,
        )
    if LINEAR >= 0:
        weight = tl.load(weights_ptr + LINEAR * stride_we)
        is_linear = (slot >= num_softmax_slots) & (length > 0)
        is_read = (weight > 0) & (length > 0)
        arrivals += tl.where(is_read, LINEAR_TILES, 0)
        has_part = has_part | (is_linear & is_read)
        if is_linear:
            _step_state(
                linear_query_ptr + b * stride_lqb + kv * GROUP * stride_lqh,
                linear_key_ptr + b * stride_lkb + kv * stride_lkk,
                linear_value_ptr + b * stride_lvb + kv * stride_lvk,
                state_ptr + b * stride_sb + kv * stride_sk,
                sums_ptr,
                decay_ptr,
                row,
                weight,
                (slot - num_softmax_slots) * BLOCK_C,
                stride_lqh,
                stride_sp,
                GROUP,
                P,
                HAS_DECAY,
                NORMALISE,
                BLOCK_P,
                BLOCK_C,
            )

    # the last to arrive merges; where none has a part, the first program writes the zeros
    is_last = (arrivals == 0) & (slot == 0)
    if has_part:
        # all threads have stored their part before one counts the program in
        tl.debug_barrier()
        if arrivals > 1:
            before = tl.atomic_add(counters_ptr + row, 1, sem="acq_rel", scope="gpu")
            is_last = before == arrivals - 1
            tl.debug_barrier()
        else:
            is_last = arrivals == 1
    if is_last:
        _merge(
            out_ptr + row * (GROUP * P),
            weights_ptr,
            parts_ptr,
            stats_ptr,
            sums_ptr,
            linear_value_ptr,
            skip_ptr,
            b * stride_lvb + kv * stride_lvk,
            kv * GROUP,
            start,
            length,
            num_splits,
            stride_we,
            EXPERTS,
            WINDOWS,
            LINEAR,
            HAS_SKIP,
            NORMALISE,
            GROUP,
            P,
            SPLIT_KEYS,
            MIN_NORMALISER,
            MERGE_G,
            BLOCK_P,
            BLOCK_N,
            MERGE_S,
        )
        tl.store(counters_ptr + row, 0)


@torch.compiler.disable
def routed_decode_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor,
    windows: Mapping[int, int | None],
    length: Tensor,
    start: Tensor | None,
    is_token: Tensor | None,
    linear: LinearStep | None,
    num_sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    keep_counters: bool = True,
) -> Tensor:
    B, H, P = query.shape
    K, S = key.shape[1:3]
    group = H // K
    device = query.device
    query = last_contiguous(query)
    start = None if start is None else start.contiguous()
    if is_token is not None:
        # a boolean is no pointer type of Triton's
        is_token = is_token.view(torch.uint8) if is_token.dtype == torch.bool else is_token
        is_token = is_token.contiguous()

    block_p = max(next_power_of_2(P), 16)
    block_n = max(min(TILE_BYTES // (block_p * key.element_size()), 128), 16)
    split_keys = max(SPLIT_KEYS, block_n)
    most = max(PROGRAMS // (B * K), 1)
    num_splits = min(ceil_div(S, split_keys), most, MAX_SPLITS)
    reach = [NO_WINDOW if w is None else min(w, NO_WINDOW) for w in windows.values()]
    num_softmax_slots = sum(min(num_splits, ceil_div(w + 1, split_keys)) for w in reach)
    linear_tiles = 0 if linear is None else ceil_div(P + 1, STATE_COLUMNS)
    num_slots = num_softmax_slots + linear_tiles

    out = torch.empty(B, H, P, dtype=query.dtype, device=device)
    parts, stats = (
        torch.empty(B * K, num_softmax_slots, *shape, dtype=torch.float32, device=device)
        for shape in ((group, P), (2, group))
    )
    sums = stats  # which nobody touches
    step: list[Tensor | None] = [None] * 6
    step_strides = [0] * 9
    if linear is not None:
        sums = torch.empty(B * K, group, P + 1, dtype=torch.float32, device=device)
        new = [last_contiguous(x) for x in (linear.query, linear.key, linear.value)]
        rates = [None if x is None else x.float().contiguous() for x in (linear.decay, linear.skip)]
        step = [*new, linear.state, *rates]
        step_strides = [n for x in (*new, linear.state) for n in x.stride()[:-1]]

    if all(window is None for window in windows.values()):
        num_sinks = 0  # among all that these see
    scale = P**-0.5 if scale is None else scale
    # scores are exponents of 2; a soft-cap stands between
    scale = scale * 1.4426950408889634 if softcap is None else scale / softcap

    # those of a cache that grows with every token must not bring a new kernel with it
    growing = (*key.stride()[:-1], *value.stride()[:-1])
    steady = (
        *query.stride()[:-1],
        weights.stride(0),
        0 if weights.shape[1] == 1 else weights.stride(1),
        weights.stride(2),
        length.stride(0) if length.numel() > 1 else 0,
        *step_strides,
    )
    merge_g = next_power_of_2(group)
    launch(
        routed_decode_kernel,
        (B * K * num_slots, 1, 1),
        (
            query,
            key,
            value,
            weights,
            length,
            start,
            is_token,
            *step,
            out,
            parts,
            stats,
            sums,
            _zeroed_counters(B * K, device, keep_counters),
        ),
        (
            scale,
            S,
            num_splits,
            num_slots,
            num_softmax_slots,
            K,
            *steady[:2],
            *growing,
            *steady[2:],
        ),
        {
            "EXPERTS": tuple(windows),
            "WINDOWS": tuple(reach),
            "LINEAR": -1 if linear is None else linear.index,
            "LINEAR_TILES": linear_tiles,
            "HAS_DECAY": step[4] is not None,
            "HAS_SKIP": step[5] is not None,
            "NORMALISE": linear is None or linear.normalise,
            "HAS_START": start is not None,
            "HAS_MASK": is_token is not None,
            "GROUP": group,
            "P": P,
            "SPLIT_KEYS": split_keys,
            "MIN_NORMALISER": MIN_NORMALISER,
            "BLOCK_G": max(merge_g, 16),
            "BLOCK_P": block_p,
            "BLOCK_N": block_n,
            "BLOCK_C": STATE_COLUMNS,
            "MERGE_G": merge_g,
            "MERGE_S": max(MERGE_SIZE // (merge_g * block_p), 1),
            "NUM_SINKS": min(num_sinks, NO_WINDOW),
            "SOFTCAP": softcap or 0.0,
        },
        (K, *steady, *map(kind_of, growing)),
        num_warps=4,
        num_stages=3,
    )
    return out


_counters: dict[tuple[torch.device, int], Tensor] = {}


def _zeroed_counters(count: int, device: torch.device, may_keep: bool) -> Tensor:
    """Counters that are zero, and that the kernel leaves so.

    Kept per stream, where one launch ends before the next begins, so that a step is one launch. A
    captured graph may be replayed on any stream, beside any other work: it gets counters of its
    own, zeroed at each replay.
    """
    if not may_keep or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return torch.zeros(count, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    counters = _counters.get((device, stream))
    if counters is None or counters.numel() < count:
        counters = torch.zeros(count, dtype=torch.int32, device=device)
        _counters[device, stream] = counters
    return counters
