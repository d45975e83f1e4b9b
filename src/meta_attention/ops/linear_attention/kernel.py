"""Linear attention over query lists in three passes, and their mirror image for the gradients.

    chunk sums    keys and values of every chunk                  parallel over chunks
    scan          the state before every chunk, and the last      parallel over the state
    rows          state before, and the chunk up to the row       parallel over tiles of rows

Backward works out the states again, which costs less than to keep them. Then queries take the
place of keys: their sums, scanned from the end, are the gradients of the states.

Decay enters as its sum since the start of the chunk, so that no exponent is above 0. Nothing waits
for the device: tiles of a list that have no rows return at once.

Hopper GPUs have kernels of their own for the plain case. They cut the tokens into few segments in
place of many chunks, and walk along each: see ``hopper.py``.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from meta_attention.ops.heads import last_contiguous
from meta_attention.ops.launch import apply, ceil_div, launch, next_power_of_2
from meta_attention.ops.linear_attention import (
    hopper,
    hopper_backward,
    hopper_query_gradient,
    hopper_rows,
)
from meta_attention.ops.linear_attention.backward import (
    linear_attention_bwd_decay_kernel,
    linear_attention_bwd_key_kernel,
    linear_attention_bwd_query_kernel,
    linear_attention_bwd_sum_kernel,
)
from meta_attention.ops.linear_attention.forward import (
    linear_attention_fwd_kernel,
    linear_attention_scan_kernel,
    linear_attention_sum_kernel,
)
from meta_attention.ops.linear_attention.reference import MIN_NORMALISER
from meta_attention.ops.route_plan import RANK_BLOCK, QueryList


class Tiles(NamedTuple):
    """How the kernels divide their work."""

    chunk: int  # tokens between two states, a multiple of RANK_BLOCK
    rows: int
    keys: int
    key_rows: int  # rows at a time where a program holds a tile of keys
    columns: int  # of the head width, at most
    warps: int
    stages: int


# by head width, the next that has room
TILES = {
    torch.bfloat16: {
        64: Tiles(chunk=128, rows=64, keys=64, key_rows=64, columns=64, warps=4, stages=2),
        128: Tiles(chunk=256, rows=64, keys=64, key_rows=64, columns=128, warps=8, stages=2),
        256: Tiles(chunk=256, rows=64, keys=64, key_rows=32, columns=64, warps=8, stages=1),
    },
    torch.float16: {
        64: Tiles(chunk=128, rows=64, keys=64, key_rows=32, columns=64, warps=4, stages=1),
        128: Tiles(chunk=256, rows=64, keys=64, key_rows=32, columns=64, warps=8, stages=1),
        256: Tiles(chunk=256, rows=64, keys=32, key_rows=32, columns=32, warps=8, stages=1),
    },
    torch.float32: {
        64: Tiles(chunk=128, rows=32, keys=32, key_rows=32, columns=64, warps=4, stages=1),
        128: Tiles(chunk=256, rows=32, keys=32, key_rows=32, columns=64, warps=8, stages=1),
        256: Tiles(chunk=256, rows=16, keys=32, key_rows=16, columns=32, warps=8, stages=1),
    },
}

# what single kernels do otherwise in bfloat16 at widths of 65 to 128, as measured on an H200. They
# wait for memory more than they compute: with fewer registers, programs take turns on a
# multiprocessor
OPTIONS: dict[str, dict[str, int]] = {
    "sum": {"num_warps": 4, "num_stages": 2, "BLOCK_S": 32},
    "rows": {"num_warps": 4, "num_stages": 1, "maxnreg": 168},
    "bwd_query": {"num_warps": 8, "num_stages": 2, "maxnreg": 128},
    "bwd_sum": {"num_warps": 8, "num_stages": 1, "maxnreg": 128},
    "bwd_key": {"num_warps": 4, "num_stages": 1, "maxnreg": 168},
}

# numbers of the state in a program of the scan
SCAN_BLOCK, SCAN_WARPS, SCAN_STAGES = 512, 2, 4

DECAY_BLOCK, DECAY_WARPS = 64, 4

# where in its tensors a list lies
LIST_STRIDES = ("stride_pb", "stride_pg", "stride_rb", "stride_rg")

TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class Work:
    """What the kernels have in common."""

    tiles: Tiles
    compute: torch.dtype
    B: int
    K: int
    N: int
    P: int
    keeps: Tensor | None  # [B, K, N]: what a chunk leaves of the state before it
    tokens: dict[str, Any]
    lists: dict[str, Any]
    skip: Tensor | None  # [H]

    @property
    def columns(self) -> int:
        return ceil_div(self.P, self.tokens["BLOCK_C"])

    def options(self, kernel: str) -> dict[str, Any]:
        """Arguments of one kernel beside its tensors."""
        arguments = self.tokens | {
            "num_warps": self.tiles.warps,
            "num_stages": self.tiles.stages,
        }
        if kernel != "sum":
            arguments |= self.lists
        if kernel in ("rows", "bwd_query", "bwd_key"):
            arguments |= {"skip_ptr": self.skip, "HAS_SKIP": self.skip is not None}
        if kernel == "bwd_key":
            arguments["BLOCK_M"] = self.tiles.key_rows
        if self.compute == torch.bfloat16 and 64 < self.P <= 128:
            arguments |= OPTIONS[kernel]
        return arguments


def _plan_work(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    decay: Tensor | None,
    normalise: bool,
    queries: QueryList | None,
    skip: Tensor | None,
) -> Work:
    B, T, H, P = query.shape
    K = key.shape[2]
    # float16 has not the range for states and normalisers
    compute = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32
    tiles = next(tiles for width, tiles in TILES[query.dtype].items() if width >= P)
    block_p = max(next_power_of_2(P), 16)
    N = ceil_div(T, tiles.chunk)

    documents = past = keeps = None
    if mask is not None:
        if mask.dtype != torch.bool:
            # padding belongs to the document before it, and the state to the first
            documents = mask.cummax(dim=1).values.int()
            at = torch.arange(1, N + 1, device=mask.device) * tiles.chunk - 1
            ends = documents[:, at.clamp(max=T - 1)]  # [B, N]
            before = torch.cat([documents[:, :1], ends[:, :-1]], dim=1)
            keeps = (ends == before).float().unsqueeze(1).expand(B, K, N).contiguous()
        mask = (mask != 0).to(torch.int8).contiguous()
    if decay is not None:
        if mask is not None:
            decay = decay.masked_fill((mask == 0).unsqueeze(-1), 0.0)
        decay = F.pad(decay.transpose(1, 2), (0, N * tiles.chunk - T))
        # in float64, as exponents are differences of these sums
        past = decay.unflatten(2, (N, tiles.chunk)).cumsum(dim=-1, dtype=torch.float64)
        past = past.float().contiguous()  # [B, K, N, C]
        total = past[..., -1].exp()
        keeps = total if keeps is None else total * keeps

    tokens = {
        "mask_ptr": mask,
        "documents_ptr": documents,
        "past_ptr": past,
        "T": T,
        "K": K,
        "N": N,
        "P": P,
        "CHUNK": tiles.chunk,
        "HAS_MASK": mask is not None,
        "HAS_DOCUMENTS": documents is not None,
        "HAS_DECAY": past is not None,
        "NORMALISE": normalise,
        "COMPUTE": TRITON_DTYPES[compute],
        # tf32 is as precise as float16
        "PRECISION": "tf32" if query.dtype == torch.float16 else "ieee",
        "BLOCK_P": block_p,
        "BLOCK_C": min(tiles.columns, block_p),
        "BLOCK_M": tiles.rows,
        "BLOCK_S": tiles.keys,
    }
    of_list = hopper.lists_of(queries)
    lists = {
        **dict(zip(("positions_ptr", "ranks_ptr"), of_list.tensors, strict=True)),
        **dict(zip(LIST_STRIDES, of_list.strides, strict=True)),
        "num_ranks": of_list.num_ranks,
        "GROUP": H // K,
        "RANK_BLOCK": RANK_BLOCK,
        "MIN_NORMALISER": MIN_NORMALISER,
        "HAS_LIST": of_list.is_given,
    }
    return Work(tiles, compute, B, K, N, P, keeps, tokens, lists, skip)


def _scan(
    sums: Tensor,
    P: int,
    first: Tensor | None,
    dtype: torch.dtype,
    keeps: Tensor | None = None,
    before: tuple[Tensor, Tensor] | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """States and norms of every chunk, the last state, and products with those of ``before``."""
    B, K, N, _ = sums.shape
    states = torch.empty(B, K, N, P, P, dtype=dtype, device=sums.device)
    norms = torch.empty(B, K, N, P, dtype=torch.float32, device=sums.device)
    last = torch.empty(B, K, P, P + 1, dtype=torch.float32, device=sums.device)
    programs = ceil_div(P * P + P, SCAN_BLOCK)
    products = None
    if before is not None:
        products = torch.empty(B, K, N, programs, dtype=torch.float32, device=sums.device)
    launch(
        linear_attention_scan_kernel,
        (programs, B * K, 1),
        (sums, first, keeps, states, norms, last, *(before or (None, None)), products),
        (N,),
        {
            "P": P,
            "HAS_FIRST": first is not None,
            "HAS_KEEPS": keeps is not None,
            "HAS_PRODUCTS": before is not None,
            "REVERSE": reverse,
            "BLOCK": SCAN_BLOCK,
            "STAGES": SCAN_STAGES,
        },
        num_warps=SCAN_WARPS,
    )
    return states, norms, last, products


def _states(
    work: Work, key: Tensor, value: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The states and norms before every chunk, the last state, and the features of the keys."""
    B, K, N, P = work.B, work.K, work.N, work.P
    sums = torch.empty(B, K, N, P * P + P, dtype=torch.float32, device=key.device)
    features = torch.empty(key.shape, dtype=work.compute, device=key.device)
    linear_attention_sum_kernel[(N, work.columns, B * K)](
        key,
        value,
        sums,
        features,
        *key.stride()[:3],
        *value.stride()[:3],
        **work.options("sum"),
    )
    states, norms, last, _ = _scan(sums, P, first, work.compute, work.keeps)
    return states, norms, last, features


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor | None,
        initial_state: Tensor | None,
        rows: Tensor,
        skip: Tensor | None,
        mask: Tensor | None,
        normalise: bool,
        queries: QueryList | None,
    ) -> tuple[Tensor, Tensor]:
        B, T, H, _ = query.shape
        work = _plan_work(query, key, mask, decay, normalise, queries, skip)
        states, norms, last, features = _states(work, key, value, initial_state)
        normaliser = torch.empty(B, H, T, dtype=torch.float32, device=query.device)
        grid = (work.N * work.tiles.chunk // work.tiles.rows, work.columns, B * H)
        linear_attention_fwd_kernel[grid](
            query,
            features,
            value,
            states,
            norms,
            rows,
            normaliser,
            *query.stride()[:3],
            *value.stride()[:3],
            *rows.stride()[:3],
            **work.options("rows"),
        )
        # rows is returned as it is, not marked as changed: experts before this one have saved the
        # same buffer, and theirs are other rows
        ctx.save_for_backward(query, key, value, initial_state, rows.detach(), normaliser)
        ctx.work = work
        return rows, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, initial_state, rows, normaliser = ctx.saved_tensors
        work: Work = ctx.work
        B, T, H, P = query.shape
        K, N, chunk = work.K, work.N, work.tiles.chunk
        has_decay = work.tokens["HAS_DECAY"]
        passed, grad = grad, last_contiguous(grad)
        states, norms, _, features = _states(work, key, value, initial_state)

        new = torch.zeros if work.lists["HAS_LIST"] else torch.empty
        d_query = new(B, T, H, P, dtype=query.dtype, device=query.device)
        packed = (
            torch.empty(B, H, T, P, dtype=work.compute, device=query.device),
            torch.empty(B, H, T, P, dtype=work.compute, device=query.device),
            torch.empty_like(normaliser),
        )
        row_terms = key_terms = skip_terms = None
        if work.skip is not None:
            skip_terms = grad.new_zeros(B, H, T, dtype=torch.float32)
        if has_decay:
            row_terms = grad.new_zeros(work.columns, B, H, N * chunk, dtype=torch.float32)
            key_terms = grad.new_zeros(2, work.columns, B, K, N * chunk, dtype=torch.float32)
        linear_attention_bwd_query_kernel[(N * chunk // work.tiles.rows, work.columns, B * H)](
            query,
            features,
            value,
            states,
            norms,
            rows,
            normaliser,
            grad,
            d_query,
            *packed,
            row_terms,
            skip_terms,
            *query.stride()[:3],
            *value.stride()[:3],
            *rows.stride()[:3],
            *grad.stride()[:3],
            **work.options("bwd_query"),
        )

        sums = torch.empty(B, K, N, P * P + P, dtype=torch.float32, device=query.device)
        linear_attention_bwd_sum_kernel[(N, work.columns, B * K)](
            *packed,
            sums,
            **work.options("bwd_sum"),
        )
        before = (states, norms) if has_decay else None
        d_states, d_norms, d_first, products = _scan(
            sums, P, d_last.contiguous(), work.compute, work.keeps, before, reverse=True
        )

        d_key, d_value = (
            torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (key, value)
        )
        options = work.options("bwd_key")
        linear_attention_bwd_key_kernel[(N * chunk // options["BLOCK_S"], work.columns, B * K)](
            *packed,
            key,
            value,
            d_states,
            d_norms,
            d_key,
            d_value,
            key_terms,
            *key.stride()[:3],
            *value.stride()[:3],
            **options,
        )
        d_decay = None
        if row_terms is not None and key_terms is not None and products is not None:
            d_decay = _d_decay(work, row_terms, key_terms, products)
        d_initial = None if initial_state is None else d_first
        d_skip = None if skip_terms is None else skip_terms.sum(dim=(0, 2))
        return d_query, d_key, d_value, d_decay, d_initial, passed, d_skip, None, None, None


class _WalkedLinearAttention(torch.autograd.Function):
    """The same by the kernels for Hopper GPUs."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        initial_state: Tensor | None,
        rows: Tensor,
        normalise: bool,
        queries: QueryList | None,
    ) -> tuple[Tensor, Tensor]:
        B, T, H, P = query.shape
        lists = hopper.lists_of(queries)
        copied = hopper.describe_chunks(key, value, P, hopper.COLUMNS.value)
        sums = hopper.sum_segments(key, copied, normalise)
        states, norms, last, _ = _scan(sums, P, initial_state, torch.float32)
        normaliser = torch.empty(B, H, T, dtype=torch.float32, device=query.device)
        hopper_rows.walk_rows(query, copied, states, norms, rows, normaliser, normalise, lists)
        ctx.save_for_backward(query, key, value, rows.detach(), normaliser, states, norms)
        ctx.lists, ctx.normalise, ctx.has_initial = lists, normalise, initial_state is not None
        return rows, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, rows, normaliser, states, norms = ctx.saved_tensors
        lists, normalise = ctx.lists, ctx.normalise
        B, T, H, P = query.shape
        K = key.shape[2]
        new = torch.zeros if lists.is_given else torch.empty
        d_query = new(B, T, H, P, dtype=query.dtype, device=query.device)
        packed = (
            torch.empty(B, H, T, P, dtype=query.dtype, device=query.device),
            torch.empty(B, H, T, P, dtype=query.dtype, device=query.device),
            torch.empty_like(normaliser),
        )
        hopper_query_gradient.walk_query_gradients(
            query,
            key,
            value,
            states,
            norms,
            rows,
            normaliser,
            last_contiguous(grad),
            d_query,
            packed,
            normalise,
            lists,
        )

        segment = hopper_backward.segment_length(key)
        N = ceil_div(T, segment)
        sums = torch.empty(B, K, N, P * P + P, dtype=torch.float32, device=key.device)
        constants, options = _segment_sum(P, segment, H // K, lists.is_given, normalise)
        launch(
            linear_attention_bwd_sum_kernel,
            (N, ceil_div(P, constants["BLOCK_C"]), B * K),
            (*packed, sums, None, None, None, *lists.tensors),
            (*lists.strides, lists.num_ranks, T, K, N),
            constants,
            **options,
        )
        d_states, d_norms, d_first, _ = _scan(
            sums, P, d_last.contiguous(), torch.float32, reverse=True
        )
        d_key, d_value = hopper_backward.launch_key_gradients(
            key, value, *packed, d_states, d_norms, segment, lists, normalise
        )
        d_initial = d_first if ctx.has_initial else None
        return d_query, d_key, d_value, d_initial, grad, None, None


@lru_cache(maxsize=256)
def _segment_sum(
    P: int, segment: int, group: int, has_list: bool, normalise: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """Constants, in the kernel's order, and options for the sums of segments in bfloat16."""
    tiles = TILES[torch.bfloat16][P]
    own = OPTIONS["bwd_sum"] if P > 64 else {"num_warps": tiles.warps}
    constants = {
        "GROUP": group,
        "P": P,
        "CHUNK": segment,
        "RANK_BLOCK": RANK_BLOCK,
        "MIN_NORMALISER": MIN_NORMALISER,
        "HAS_MASK": False,
        "HAS_DOCUMENTS": False,
        "HAS_DECAY": False,
        "HAS_LIST": has_list,
        "NORMALISE": normalise,
        "COMPUTE": tl.bfloat16,
        "PRECISION": "ieee",
        "BLOCK_P": P,
        # programs are few and their loops long
        "BLOCK_C": 64,
        "BLOCK_M": tiles.rows,
        "BLOCK_S": tiles.keys,
    }
    return constants, own | {"num_stages": 3}


def _d_decay(work: Work, row_terms: Tensor, key_terms: Tensor, products: Tensor) -> Tensor:
    B, K, N, tokens = work.B, work.K, work.N, work.tokens
    through = products.sum(dim=-1)
    if work.keeps is not None:
        through = through * work.keeps
    later, own = key_terms.sum(dim=1)
    d_decay = torch.empty(B, tokens["T"], K, dtype=torch.float32, device=own.device)
    linear_attention_bwd_decay_kernel[(N * work.tiles.chunk // DECAY_BLOCK, B * K)](
        row_terms.sum(dim=0).unflatten(1, (K, -1)).sum(dim=2),
        later,
        own,
        through,
        d_decay,
        tokens["mask_ptr"],
        tokens["documents_ptr"],
        tokens["T"],
        K,
        N,
        CHUNK=work.tiles.chunk,
        HAS_MASK=tokens["HAS_MASK"],
        HAS_DOCUMENTS=tokens["HAS_DOCUMENTS"],
        BLOCK=DECAY_BLOCK,
        num_warps=DECAY_WARPS,
    )
    return d_decay


@torch.compiler.disable
def linear_attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    initial_state: Tensor | None,
    decay: Tensor | None,
    normalise: bool,
    queries: QueryList | None,
    rows: Tensor | None,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if rows is None:
        new = torch.empty if queries is None else torch.zeros
        rows = new(query.shape, dtype=query.dtype, device=query.device)
    query, key, value = (last_contiguous(x.to(query.dtype)) for x in (query, key, value))
    initial_state = None if initial_state is None else initial_state.float().contiguous()
    if skip is None and hopper.can_run(query, key, value, mask, decay):
        return apply(
            _WalkedLinearAttention, query, key, value, initial_state, rows, normalise, queries
        )
    # Triton launches on the current device; backward runs on that of its forward anyway
    with torch.cuda.device_of(query):
        return apply(
            _LinearAttention,
            query,
            key,
            value,
            None if decay is None else decay.float(),
            initial_state,
            rows,
            None if skip is None else skip.float().contiguous(),
            mask,
            normalise,
            queries,
        )
