"""Attention over depth in Triton: sources in one buffer, read once for the rows of a group.

Autograd would add up the gradients of a source from every sublayer that reads it, each time with a
pass over three tensors. Here they go along a chain: whatever reads the sources hands them on, so
that its backward gets the gradient of all later readers and adds its own while it is there.

Shapes: N tokens, D width, S rows at once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from meta_attention.ops.depth_attention import DepthRow, source_dtype
from meta_attention.ops.launch import ceil_div, launch, next_power_of_2

# rows of a program, and numbers that it keeps of them: with more, registers would not do
MAX_ROWS = 8
MAX_KEPT = 16384
# tokens of a program, for which it reads the queries once
TOKENS = 8
# tokens at once where there is one row of each
TILE = 2
# programs of a backward, whose shares of the gradient of the queries are summed at the end
MAX_PROGRAMS = 1024


@triton.jit
def sum_parts(first_ptr, second_ptr, sum_ptr, at, inside, PARTS: tl.constexpr):
    """One tensor or the sum of two, in the precision in which it is kept."""
    total = tl.load(first_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS == 2:
        total += tl.load(second_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return total.to(sum_ptr.dtype.element_ty)


@triton.jit
def depth_add_kernel(
    first_ptr,
    second_ptr,
    source_ptr,
    scales_ptr,
    num_tokens,
    D,
    eps,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    d = tl.arange(0, BLOCK)
    is_token = t < num_tokens
    inside = is_token[:, None] & (d < D)[None, :]
    at = t[:, None] * D + d[None, :]
    kept = sum_parts(first_ptr, second_ptr, source_ptr, at, inside, PARTS)
    tl.store(source_ptr + at, kept, mask=inside)
    # as it was rounded
    source = kept.to(tl.float32)
    tl.store(scales_ptr + t, 1.0 / tl.sqrt(tl.sum(source * source, 1) / D + eps), mask=is_token)


@triton.jit
def depth_attend_fwd_kernel(
    bank_ptr,
    scales_ptr,
    queries_ptr,
    numerators_ptr,
    denominators_ptr,
    maxima_ptr,
    logits_ptr,
    num_sources,
    num_tokens,
    D,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    j = tl.arange(0, ROWS).to(tl.int64)
    d = tl.arange(0, BLOCK)
    is_row = j < S
    inside = is_row[:, None] & (d < D)[None, :]
    query = tl.load(queries_ptr + j[:, None] * D + d[None, :], mask=inside, other=0.0)
    N = num_tokens
    first = tl.program_id(0).to(tl.int64) * TOKENS
    for t in range(first, tl.minimum(first + TOKENS, N)):
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        denominator = tl.zeros([ROWS], tl.float32)
        numerator = tl.zeros([ROWS, BLOCK], tl.float32)
        coming = tl.load(bank_ptr + t * D + d, mask=d < D, other=0.0)
        for i in range(num_sources):
            source = coming.to(tl.float32)
            # the next one is on its way while this one is summed up
            after = tl.minimum(i + 1, num_sources - 1)
            coming = tl.load(bank_ptr + (after * N + t) * D + d, mask=d < D, other=0.0)
            scale = tl.load(scales_ptr + i * N + t)
            logit = tl.sum(query * source[None, :], 1) * scale
            tl.store(logits_ptr + (t * num_sources + i) * S + j, logit, mask=is_row)
            new_maximum = tl.maximum(maximum, logit)
            rest = tl.exp(maximum - new_maximum)
            weight = tl.exp(logit - new_maximum)
            denominator = denominator * rest + weight
            numerator = numerator * rest[:, None] + weight[:, None] * source[None, :]
            maximum = new_maximum
        at = (j * N + t)[:, None] * D + d[None, :]
        kept = numerator.to(numerators_ptr.dtype.element_ty)
        tl.store(numerators_ptr + at, kept, mask=inside)
        tl.store(denominators_ptr + j * N + t, denominator, mask=is_row)
        tl.store(maxima_ptr + j * N + t, maximum, mask=is_row)


@triton.jit
def depth_attend_bwd_kernel(
    bank_ptr,
    scales_ptr,
    queries_ptr,
    maxima_ptr,
    logits_ptr,
    d_numerators_ptr,
    d_denominators_ptr,
    d_bank_ptr,
    d_queries_ptr,
    num_sources,
    num_tokens,
    tokens,
    D,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_LAST: tl.constexpr,
):
    j = tl.arange(0, ROWS).to(tl.int64)
    d = tl.arange(0, BLOCK)
    is_row = j < S
    inside = is_row[:, None] & (d < D)[None, :]
    query = tl.load(queries_ptr + j[:, None] * D + d[None, :], mask=inside, other=0.0)
    N = num_tokens
    program = tl.program_id(0).to(tl.int64)
    # of these tokens, beginning with what joins have found
    d_query_ptr = d_queries_ptr + (program * S + j)[:, None] * D + d[None, :]
    d_query = tl.load(d_query_ptr, mask=inside, other=0.0)
    first = program * tokens
    for t in range(first, tl.minimum(first + tokens, N)):
        at = (j * N + t)[:, None] * D + d[None, :]
        d_numerator = tl.load(d_numerators_ptr + at, mask=inside, other=0.0).to(tl.float32)
        d_denominator = tl.load(d_denominators_ptr + j * N + t, mask=is_row, other=0.0)
        maximum = tl.load(maxima_ptr + j * N + t, mask=is_row, other=0.0)
        coming = tl.load(bank_ptr + t * D + d, mask=d < D, other=0.0)
        for i in range(num_sources):
            here = (i * N + t) * D + d
            source = coming.to(tl.float32)
            after = tl.minimum(i + 1, num_sources - 1)
            coming = tl.load(bank_ptr + (after * N + t) * D + d, mask=d < D, other=0.0)
            if not IS_LAST:
                later = tl.load(d_bank_ptr + here, mask=d < D, other=0.0)
            scale = tl.load(scales_ptr + i * N + t)
            logit = tl.load(logits_ptr + (t * num_sources + i) * S + j, mask=is_row, other=0.0)
            weight = tl.where(is_row, tl.exp(logit - maximum), 0.0)
            d_weight = tl.sum(d_numerator * source[None, :], 1) + d_denominator
            d_logit = weight * d_weight
            # of query . source, before its scale
            d_product = d_logit * scale
            d_query += d_product[:, None] * source[None, :]
            # two sums: each product is then added by the instruction that makes it
            d_source = tl.sum(weight[:, None] * d_numerator, 0)
            d_source += tl.sum(d_product[:, None] * query, 0)
            through_scale = tl.sum(d_logit * logit, 0) * scale * scale / D
            d_source -= through_scale * source
            if not IS_LAST:
                d_source += later.to(tl.float32)
            tl.store(d_bank_ptr + here, d_source.to(d_bank_ptr.dtype.element_ty), mask=d < D)
    tl.store(d_query_ptr, d_query, mask=inside)


@triton.jit
def depth_join_fwd_kernel(
    numerator_ptr,
    denominator_ptr,
    maximum_ptr,
    first_ptr,
    second_ptr,
    query_ptr,
    partial_ptr,
    mixed_ptr,
    logit_ptr,
    scale_ptr,
    num_tokens,
    D,
    count,
    eps,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    d = tl.arange(0, BLOCK)
    is_token = t < num_tokens
    inside = is_token[:, None] & (d < D)[None, :]
    at = t[:, None] * D + d[None, :]
    mixed = tl.load(numerator_ptr + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(denominator_ptr + t, mask=is_token, other=1.0)
    if PARTS > 0:
        old = tl.load(maximum_ptr + t, mask=is_token, other=0.0)
        query = tl.load(query_ptr + d, mask=d < D, other=0.0)
        kept = sum_parts(first_ptr, second_ptr, partial_ptr, at, inside, PARTS)
        if PARTS == 2:
            tl.store(partial_ptr + at, kept, mask=inside)
        partial = kept.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(partial * partial, 1) / D + eps)
        logit = tl.sum(partial * query[None, :], 1) * scale
        maximum = tl.maximum(old, logit)
        rest = tl.exp(old - maximum)
        weight = tl.exp(logit - maximum)
        mixed = rest[:, None] * mixed + weight[:, None] * partial
        total = rest * total + weight
        tl.store(logit_ptr + t, logit, mask=is_token)
        tl.store(scale_ptr + t, scale, mask=is_token)
    mixed = mixed * (count / total)[:, None]
    tl.store(mixed_ptr + at, mixed.to(mixed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def depth_join_bwd_kernel(
    mixed_ptr,
    d_mixed_ptr,
    denominator_ptr,
    maximum_ptr,
    partial_ptr,
    query_ptr,
    logit_ptr,
    scale_ptr,
    d_later_ptr,
    d_numerator_ptr,
    d_denominator_ptr,
    d_partial_ptr,
    d_query_ptr,
    num_tokens,
    tokens,
    D,
    count,
    d_query_stride,
    JOINS: tl.constexpr,
    IS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    d = tl.arange(0, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    d_query = tl.zeros([BLOCK], tl.float32)
    if JOINS:
        query = tl.load(query_ptr + d, mask=d < D, other=0.0)
    begin = program * tokens
    for first in range(begin, tl.minimum(begin + tokens, num_tokens), TILE):
        t = first + tl.arange(0, TILE)
        is_token = t < num_tokens
        inside = is_token[:, None] & (d < D)[None, :]
        at = t[:, None] * D + d[None, :]
        d_mixed = tl.load(d_mixed_ptr + at, mask=inside, other=0.0).to(tl.float32)
        mixed = tl.load(mixed_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total = tl.load(denominator_ptr + t, mask=is_token, other=1.0)
        if JOINS:
            # all of it is on its way before the first sum waits for it
            partial = tl.load(partial_ptr + at, mask=inside, other=0.0).to(tl.float32)
            if not IS_LAST:
                later = tl.load(d_later_ptr + at, mask=inside, other=0.0)
            old = tl.load(maximum_ptr + t, mask=is_token, other=0.0)
            logit = tl.load(logit_ptr + t, mask=is_token, other=0.0)
            scale = tl.load(scale_ptr + t, mask=is_token, other=0.0)
        along = tl.sum(d_mixed * mixed, 1)
        # of the numerator in the row
        share = 1.0 / total
        if JOINS:
            maximum = tl.maximum(old, logit)
            rest = tl.exp(old - maximum)
            weight = tl.exp(logit - maximum)
            total = rest * total + weight
            share = rest / total
            weight = weight / total
            d_logit = weight * (count * tl.sum(d_mixed * partial, 1) - along)
            d_product = d_logit * scale
            d_query += tl.sum(d_product[:, None] * partial, 0)
            d_partial = (count * weight)[:, None] * d_mixed + d_product[:, None] * query[None, :]
            d_partial -= (d_product * logit * scale / D)[:, None] * partial
            if not IS_LAST:
                d_partial += later.to(tl.float32)
            kept = d_partial.to(d_partial_ptr.dtype.element_ty)
            tl.store(d_partial_ptr + at, kept, mask=inside)
        kept = ((count * share)[:, None] * d_mixed).to(d_numerator_ptr.dtype.element_ty)
        tl.store(d_numerator_ptr + at, kept, mask=inside)
        tl.store(d_denominator_ptr + t, -share * along, mask=is_token)
    tl.store(d_query_ptr + program * d_query_stride + d, d_query, mask=d < D)


@dataclass(frozen=True, slots=True)
class BankedRow(DepthRow):
    """A row, and where its gradients go."""

    gradients: "_RowGradients"
    index: int


class _RowGradients:
    """Where the gradients of the rows of one call meet: in one buffer, as its backward reads them.

    Allocated when the first of them is known, and let go when they are read.
    """

    def __init__(self, shape: tuple[int, int, int], like: Tensor) -> None:
        self.shape, self.dtype, self.device = shape, like.dtype, like.device
        # [S, N, D], [S, N], and of the queries [programs, S, D]
        self.buffers: tuple[Tensor, Tensor, Tensor] | None = None
        self.joined: set[int] = set()  # rows of which the last of these is known

    def of(self, j: int) -> tuple[Tensor, Tensor, Tensor]:
        if self.buffers is None:
            S, N, D = self.shape
            self.buffers = (
                torch.empty(S, N, D, dtype=self.dtype, device=self.device),
                torch.empty(S, N, dtype=torch.float32, device=self.device),
                torch.empty(_split(N)[0], S, D, dtype=torch.float32, device=self.device),
            )
        numerators, denominators, queries = self.buffers
        return numerators[j], denominators[j], queries[:, j]

    def take(self, d_numerators, d_denominators) -> tuple[Tensor, Tensor, Tensor]:
        """All of them; those that came another way, or not at all, are copied to their place."""
        for j, given in enumerate(zip(d_numerators, d_denominators, strict=True)):
            *places, d_query = self.of(j)
            for place, gradient in zip(places, given, strict=True):
                if gradient is None:
                    place.zero_()
                elif gradient.data_ptr() != place.data_ptr():
                    place.copy_(gradient)
            if given[0] is None or j not in self.joined:
                d_query.zero_()
        taken, self.buffers = self.buffers, None
        self.joined.clear()
        assert taken is not None
        return taken


class AddSource(torch.autograd.Function):
    """Write a source, or the sum of two parts of one, to its place in the bank."""

    @staticmethod
    def forward(ctx, bank, scales, slot, eps, *parts):
        _, N, D = bank.shape
        launch(
            depth_add_kernel,
            (ceil_div(N, TILE), 1, 1),
            (*_two(parts), bank[slot], scales[slot]),
            (N, D, eps),
            {"PARTS": len(parts), "BLOCK": next_power_of_2(D), "TILE": TILE},
            num_warps=_row_warps(D),
        )
        ctx.slot, ctx.dtypes = slot, [part.dtype for part in parts]
        ctx.mark_dirty(bank)
        return bank

    @staticmethod
    @once_differentiable
    def backward(ctx, d_bank):
        d_source = d_bank[ctx.slot]
        return d_bank, None, None, None, *(d_source.to(dtype) for dtype in ctx.dtypes)


class Attend(torch.autograd.Function):
    """Rows of some queries over the first sources of a bank, which it hands on."""

    @staticmethod
    def forward(ctx, bank, queries, scales, num_sources, gradients):
        _, N, D = bank.shape
        S = queries.shape[0]
        numerators = bank.new_empty(S, N, D)
        denominators, maxima = (queries.new_empty(S, N) for _ in range(2))
        logits = queries.new_empty(N, num_sources, S)
        launch(
            depth_attend_fwd_kernel,
            (ceil_div(N, TOKENS), 1, 1),
            (bank, scales, queries, numerators, denominators, maxima, logits),
            (num_sources, N, D),
            _sizes(S, D) | {"TOKENS": TOKENS},
            num_warps=_warps(S, D, 128, 1024),
        )
        ctx.gradients, ctx.num_sources = gradients, num_sources
        # sources are added to the bank later, in other places: no reason to refuse it then
        ctx.bank, ctx.scales = bank.detach(), scales
        ctx.save_for_backward(queries, maxima, logits)
        ctx.mark_dirty(bank)
        ctx.mark_non_differentiable(maxima)
        ctx.set_materialize_grads(False)
        return bank, maxima, *numerators.unbind(), *denominators.unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_bank, _, *d_rows):
        queries, maxima, logits = ctx.saved_tensors
        bank = ctx.bank
        _, N, D = bank.shape
        S = queries.shape[0]
        d_numerators, d_denominators, d_queries = ctx.gradients.take(d_rows[:S], d_rows[S:])
        is_last = d_bank is None
        if is_last:
            d_bank = torch.empty_like(bank)
        programs, tokens = _split(N)
        launch(
            depth_attend_bwd_kernel,
            (programs, 1, 1),
            (
                *(bank, ctx.scales, queries, maxima, logits),
                *(d_numerators, d_denominators, d_bank, d_queries),
            ),
            (ctx.num_sources, N, tokens, D),
            _sizes(S, D) | {"IS_LAST": is_last},
            # programs are few here
            num_warps=_warps(S, D, 64, 256),
        )
        return d_bank, d_queries.sum(dim=0), None, None, None


class Join(torch.autograd.Function):
    """The finished row, with the sum of some parts as one more source; hands that sum on.

    The gradient of the query goes with those of the row, to where its other readers are.
    """

    @staticmethod
    def forward(ctx, numerator, denominator, maximum, row, dtype, eps, *parts):
        N, D = numerator.shape
        joins = len(parts) > 0
        mixed = torch.empty_like(numerator, dtype=dtype)
        logit, scale = (torch.empty_like(denominator) if joins else None for _ in range(2))
        partial = parts[0] if joins else None
        if len(parts) == 2:
            finer = torch.promote_types(parts[0].dtype, parts[1].dtype)
            partial = torch.empty_like(partial, dtype=finer)
        count = row.count + joins
        launch(
            depth_join_fwd_kernel,
            (ceil_div(N, TILE), 1, 1),
            (
                *(numerator, denominator, maximum, *_two(parts), row.query),
                *(partial, mixed, logit, scale),
            ),
            (N, D, float(count), eps),
            {"PARTS": len(parts), "BLOCK": next_power_of_2(D), "TILE": TILE},
            num_warps=_row_warps(D),
        )
        ctx.save_for_backward(denominator, maximum, partial, row.query, mixed, logit, scale)
        # not the row: its numerator is not needed any more
        ctx.gradients, ctx.index, ctx.count = row.gradients, row.index, count
        ctx.dtypes = [part.dtype for part in parts]
        ctx.set_materialize_grads(False)
        return (mixed, partial) if joins else mixed

    @staticmethod
    @once_differentiable
    def backward(ctx, d_mixed, d_later=None):
        denominator, maximum, partial, query, mixed, logit, scale = ctx.saved_tensors
        N, D = mixed.shape
        joins = partial is not None
        d_mixed = torch.zeros_like(mixed) if d_mixed is None else d_mixed.contiguous()
        d_later = None if d_later is None else d_later.contiguous()
        d_numerator, d_denominator, d_query = ctx.gradients.of(ctx.index)
        ctx.gradients.joined.add(ctx.index)
        d_partial = torch.empty_like(partial) if joins else None
        programs, tokens = _split(N)
        launch(
            depth_join_bwd_kernel,
            (programs, 1, 1),
            (
                *(mixed, d_mixed, denominator, maximum, partial, query, logit, scale),
                *(d_later, d_numerator, d_denominator, d_partial, d_query),
            ),
            (N, tokens, D, float(ctx.count), d_query.stride(0)),
            {
                **{"JOINS": joins, "IS_LAST": d_later is None},
                **{"BLOCK": next_power_of_2(D), "TILE": TILE},
            },
            num_warps=_row_warps(D),
        )
        d_parts = (d_partial.to(dtype) for dtype in ctx.dtypes)
        return d_numerator, d_denominator, None, None, None, None, *d_parts


class BankedSources:
    """Sources in one buffer that has room for all of them."""

    def __init__(self, first: Tensor, num_sources: int, eps: float) -> None:
        self.shape, self.dtype, self.eps = first.shape, first.dtype, eps
        N, D = self.shape[:-1].numel(), self.shape[-1]
        self.max_rows = min(MAX_ROWS, max(MAX_KEPT // next_power_of_2(D), 1))
        self.bank = first.new_empty(num_sources, N, D, dtype=source_dtype(first))
        self.scales = first.new_empty(num_sources, N, dtype=torch.float32)
        self.count = 0
        self.add(first)

    @torch.compiler.disable
    def add(self, *parts: Tensor) -> None:
        self.bank = AddSource.apply(
            self.bank, self.scales, self.count, self.eps, *self._flatten(parts)
        )
        self.count += 1

    @torch.compiler.disable
    def attend(self, queries: Tensor) -> list[DepthRow]:
        _, N, D = self.bank.shape
        S = queries.shape[0]
        gradients = _RowGradients((S, N, D), self.bank)
        queries = queries.float().contiguous()
        self.bank, maxima, *rows = Attend.apply(
            self.bank, queries, self.scales, self.count, gradients
        )
        return [
            BankedRow(rows[j], rows[S + j], maxima[j], query, self.count, gradients, j)
            for j, query in enumerate(queries.detach().unbind())
        ]

    @torch.compiler.disable
    def join(self, row: DepthRow, *parts: Tensor) -> tuple[Tensor, Tensor | None]:
        given = (row.numerator, row.denominator, row.maximum, row, self.dtype, self.eps)
        if not parts:
            return Join.apply(*given).view(self.shape), None
        mixed, partial = Join.apply(*given, *self._flatten(parts))
        return mixed.view(self.shape), partial.view(self.shape)

    def _flatten(self, parts: tuple[Tensor, ...]) -> list[Tensor]:
        return [part.reshape(self.bank.shape[1:]).contiguous() for part in parts]


def _two(parts: tuple[Tensor, ...]) -> list[Tensor | None]:
    return [*parts, None, None][:2]


def _split(N: int) -> tuple[int, int]:
    """Programs of a backward, and tokens of each."""
    tokens = TILE * ceil_div(N, TILE * MAX_PROGRAMS)
    return ceil_div(N, tokens), tokens


def _sizes(S: int, D: int) -> dict[str, int]:
    return {"S": S, "ROWS": next_power_of_2(S), "BLOCK": next_power_of_2(D)}


def _warps(S: int, D: int, kept: int, channels: int) -> int:
    """So that a thread has no more numbers of the rows, and a warp no more channels.

    A thread has all rows of its channels: sums over rows stay within it.
    """
    width = next_power_of_2(D)
    by_rows = next_power_of_2(S) * width // (32 * kept)
    return min(max(by_rows, min(width // channels, 8), 1), 16)


def _row_warps(D: int) -> int:
    return min(max(next_power_of_2(D) // 256, 1), 16)
