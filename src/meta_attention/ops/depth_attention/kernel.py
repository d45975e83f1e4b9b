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
            tl.store(logits_ptr + (i * S + j) * N + t, logit, mask=is_row)
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
    d_products_ptr,
    num_sources,
    num_tokens,
    D,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_LAST: tl.constexpr,
):
    j = tl.arange(0, ROWS).to(tl.int64)
    d = tl.arange(0, BLOCK)
    is_row = j < S
    inside = is_row[:, None] & (d < D)[None, :]
    query = tl.load(queries_ptr + j[:, None] * D + d[None, :], mask=inside, other=0.0)
    N = num_tokens
    first = tl.program_id(0).to(tl.int64) * TOKENS
    for t in range(first, tl.minimum(first + TOKENS, N)):
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
            logit = tl.load(logits_ptr + (i * S + j) * N + t, mask=is_row, other=0.0)
            weight = tl.where(is_row, tl.exp(logit - maximum), 0.0)
            d_weight = tl.sum(d_numerator * source[None, :], 1) + d_denominator
            d_logit = weight * d_weight
            # of query . source, before its scale
            d_product = d_logit * scale
            tl.store(d_products_ptr + (j * num_sources + i) * N + t, d_product, mask=is_row)
            d_source = tl.sum(weight[:, None] * d_numerator + d_product[:, None] * query, 0)
            through_scale = tl.sum(d_logit * logit, 0) * scale * scale / D
            d_source -= through_scale * source
            if not IS_LAST:
                d_source += later.to(tl.float32)
            tl.store(d_bank_ptr + here, d_source.to(d_bank_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def depth_join_fwd_kernel(
    numerator_ptr,
    denominator_ptr,
    maximum_ptr,
    partial_ptr,
    query_ptr,
    mixed_ptr,
    logit_ptr,
    scale_ptr,
    D,
    count,
    eps,
    JOINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    mixed = tl.load(numerator_ptr + t * D + d, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(denominator_ptr + t)
    if JOINS:
        partial = tl.load(partial_ptr + t * D + d, mask=inside, other=0.0).to(tl.float32)
        query = tl.load(query_ptr + d, mask=inside, other=0.0)
        scale = 1.0 / tl.sqrt(tl.sum(partial * partial, 0) / D + eps)
        logit = tl.sum(partial * query, 0) * scale
        old = tl.load(maximum_ptr + t)
        maximum = tl.maximum(old, logit)
        rest = tl.exp(old - maximum)
        weight = tl.exp(logit - maximum)
        mixed = rest * mixed + weight * partial
        total = rest * total + weight
        tl.store(logit_ptr + t, logit)
        tl.store(scale_ptr + t, scale)
    mixed = mixed * (count / total)
    tl.store(mixed_ptr + t * D + d, mixed.to(mixed_ptr.dtype.element_ty), mask=inside)


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
    d_product_ptr,
    D,
    count,
    JOINS: tl.constexpr,
    IS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    d_mixed = tl.load(d_mixed_ptr + t * D + d, mask=inside, other=0.0).to(tl.float32)
    mixed = tl.load(mixed_ptr + t * D + d, mask=inside, other=0.0).to(tl.float32)
    along = tl.sum(d_mixed * mixed, 0)
    total = tl.load(denominator_ptr + t)
    rest = 1.0
    if JOINS:
        old = tl.load(maximum_ptr + t)
        logit = tl.load(logit_ptr + t)
        scale = tl.load(scale_ptr + t)
        maximum = tl.maximum(old, logit)
        rest = tl.exp(old - maximum)
        weight = tl.exp(logit - maximum)
        total = rest * total + weight
        share = weight / total
        partial = tl.load(partial_ptr + t * D + d, mask=inside, other=0.0).to(tl.float32)
        query = tl.load(query_ptr + d, mask=inside, other=0.0)
        d_logit = share * (count * tl.sum(d_mixed * partial, 0) - along)
        d_product = d_logit * scale
        d_partial = count * share * d_mixed + d_product * query
        d_partial -= d_logit * logit * scale * scale / D * partial
        if not IS_LAST:
            later = tl.load(d_later_ptr + t * D + d, mask=inside, other=0.0)
            d_partial += later.to(tl.float32)
        kept = d_partial.to(d_partial_ptr.dtype.element_ty)
        tl.store(d_partial_ptr + t * D + d, kept, mask=inside)
        tl.store(d_product_ptr + t, d_product)
    d_numerator = (count * rest / total * d_mixed).to(d_numerator_ptr.dtype.element_ty)
    tl.store(d_numerator_ptr + t * D + d, d_numerator, mask=inside)
    tl.store(d_denominator_ptr + t, -rest / total * along)


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
        self.buffers: tuple[Tensor, Tensor] | None = None  # [S, N, D] and [S, N]

    def of(self, j: int) -> tuple[Tensor, Tensor]:
        if self.buffers is None:
            self.buffers = (
                torch.empty(self.shape, dtype=self.dtype, device=self.device),
                torch.empty(self.shape[:2], dtype=torch.float32, device=self.device),
            )
        numerators, denominators = self.buffers
        return numerators[j], denominators[j]

    def take(self, d_numerators, d_denominators) -> tuple[Tensor, Tensor]:
        """All of them; those that came another way, or not at all, are copied to their place."""
        for j, given in enumerate(zip(d_numerators, d_denominators, strict=True)):
            for place, gradient in zip(self.of(j), given, strict=True):
                if gradient is None:
                    place.zero_()
                elif gradient.data_ptr() != place.data_ptr():
                    place.copy_(gradient)
        taken, self.buffers = self.buffers, None
        assert taken is not None
        return taken


class AddSource(torch.autograd.Function):
    """Write a source to its place in the bank."""

    @staticmethod
    def forward(ctx, bank, source, slot):
        bank[slot].copy_(source)
        ctx.slot, ctx.dtype = slot, source.dtype
        ctx.mark_dirty(bank)
        return bank

    @staticmethod
    @once_differentiable
    def backward(ctx, d_bank):
        return d_bank, d_bank[ctx.slot].to(ctx.dtype), None


class Attend(torch.autograd.Function):
    """Rows of some queries over the first sources of a bank, which it hands on."""

    @staticmethod
    def forward(ctx, bank, queries, scales, num_sources, gradients):
        _, N, D = bank.shape
        S = queries.shape[0]
        numerators = bank.new_empty(S, N, D)
        denominators, maxima = (queries.new_empty(S, N) for _ in range(2))
        logits = queries.new_empty(num_sources, S, N)
        launch(
            depth_attend_fwd_kernel,
            (ceil_div(N, TOKENS), 1, 1),
            (bank, scales, queries, numerators, denominators, maxima, logits),
            (num_sources, N, D),
            _sizes(S, D),
            num_warps=_warps(S, D),
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
        bank, count = ctx.bank, ctx.num_sources
        _, N, D = bank.shape
        S = queries.shape[0]
        d_numerators, d_denominators = ctx.gradients.take(d_rows[:S], d_rows[S:])
        is_last = d_bank is None
        if is_last:
            d_bank = torch.empty_like(bank)
        d_products = queries.new_empty(S, count, N)
        launch(
            depth_attend_bwd_kernel,
            (ceil_div(N, TOKENS), 1, 1),
            (
                *(bank, ctx.scales, queries, maxima, logits),
                *(d_numerators, d_denominators, d_bank, d_products),
            ),
            (count, N, D),
            _sizes(S, D) | {"IS_LAST": is_last},
            num_warps=_warps(S, D),
        )
        d_queries = None
        if ctx.needs_input_grad[1]:
            d_queries = _product(d_products.view(S, count * N), bank[:count].view(count * N, D))
        return d_bank, d_queries, None, None, None


class Join(torch.autograd.Function):
    """The finished row, with one more source or without; hands that source on."""

    @staticmethod
    def forward(ctx, numerator, denominator, maximum, partial, query, row, dtype, eps):
        N, D = numerator.shape
        joins = partial is not None
        mixed = torch.empty_like(numerator, dtype=dtype)
        logit, scale = (torch.empty_like(denominator) if joins else None for _ in range(2))
        count = row.count + joins
        launch(
            depth_join_fwd_kernel,
            (N, 1, 1),
            (numerator, denominator, maximum, partial, query, mixed, logit, scale),
            (D, float(count), eps),
            {"JOINS": joins, "BLOCK": next_power_of_2(D)},
            num_warps=_row_warps(D),
        )
        ctx.save_for_backward(denominator, maximum, partial, query, mixed, logit, scale)
        # not the row: its numerator is not needed any more
        ctx.gradients, ctx.index, ctx.count = row.gradients, row.index, count
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
        d_numerator, d_denominator = ctx.gradients.of(ctx.index)
        d_partial = torch.empty_like(partial) if joins else None
        d_product = torch.empty_like(denominator) if joins else None
        launch(
            depth_join_bwd_kernel,
            (N, 1, 1),
            (
                *(mixed, d_mixed, denominator, maximum, partial, query, logit, scale),
                *(d_later, d_numerator, d_denominator, d_partial, d_product),
            ),
            (D, float(ctx.count)),
            {"JOINS": joins, "IS_LAST": d_later is None, "BLOCK": next_power_of_2(D)},
            num_warps=_row_warps(D),
        )
        d_query = None
        if joins and ctx.needs_input_grad[4]:
            d_query = _product(d_product.unsqueeze(0), partial).squeeze(0)
        return d_numerator, d_denominator, None, d_partial, d_query, None, None, None


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
    def add(self, source: Tensor) -> None:
        source = source.reshape(self.bank.shape[1:])
        self.bank = AddSource.apply(self.bank, source, self.count)
        with torch.no_grad():
            # as it was rounded
            kept = self.bank[self.count]
            norm = torch.linalg.vector_norm(kept, dim=-1, dtype=torch.float32)
            torch.rsqrt(norm.square() / kept.shape[-1] + self.eps, out=self.scales[self.count])
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
            BankedRow(rows[j], rows[S + j], maxima[j], self.count, gradients, j) for j in range(S)
        ]

    @torch.compiler.disable
    def join(
        self, row: DepthRow, partial: Tensor | None, query: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        parts = (row.numerator, row.denominator, row.maximum)
        if partial is None:
            mixed = Join.apply(*parts, None, None, row, self.dtype, self.eps)
            return mixed.view(self.shape), None
        flat = partial.reshape(row.numerator.shape).contiguous()
        mixed, flat = Join.apply(
            *parts, flat, query.float().contiguous(), row, self.dtype, self.eps
        )
        return mixed.view(self.shape), flat.view(self.shape)


def _sizes(S: int, D: int) -> dict[str, int]:
    return {"S": S, "ROWS": next_power_of_2(S), "BLOCK": next_power_of_2(D), "TOKENS": TOKENS}


def _warps(S: int, D: int) -> int:
    # a thread has all rows of its channels: sums over rows stay within it
    kept, width = next_power_of_2(S) * next_power_of_2(D), next_power_of_2(D)
    return min(max(kept // 2048, width // 1024, 1), 16)


def _row_warps(D: int) -> int:
    return min(max(next_power_of_2(D) // 256, 1), 16)


def _product(weights: Tensor, rows: Tensor) -> Tensor:
    """Weights [S, N] times rows [N, D], float32."""
    return (weights.to(rows.dtype) @ rows).float()
