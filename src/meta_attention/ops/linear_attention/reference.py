"""Linear attention in chunks: a state carried between chunks, a small matrix inside each.

The state is float32 at least: over 64k tokens its sums pass what half precision can hold. Inside a
segment bfloat16 is multiplied as it is: it has the range, and tensor cores are made for it.

Every token is summed into the states; rows are worked out for the listed queries only, gathered
chunk by chunk. How many there are is read on the host: on a GPU this waits for the device, which
the kernel does not.

Shapes: N chunks of C tokens, M rows in each (C where all tokens are rows); K key-value heads, each
for G query heads; R = P + 1, the values and a column of ones that sums the normaliser along.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meta_attention.ops.heads import drop_padding
from meta_attention.ops.route_plan import RANK_BLOCK, QueryList

# so that the rank table says which entries of a list are in a chunk
CHUNK = RANK_BLOCK

# tokens worked on at a time, whole chunks: the states of long sequences would leave the cache
SEGMENT = 4096

# keys far below 0 have features that underflow; a row that sees only such is 0, not 0 / 0
MIN_NORMALISER = 1e-30


def linear_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    mask: Tensor | None,
    initial_state: Tensor | None,
    decay: Tensor | None,
    normalise: bool,
    queries: QueryList | None,
    rows: Tensor | None,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    B, T, _, P = query.shape
    K = key.shape[2]
    state_dtype = torch.promote_types(query.dtype, torch.float32)
    compute = query.dtype if query.dtype == torch.bfloat16 else state_dtype
    # nothing of padding may reach a sum, not even as 0 times what it holds
    key, value = drop_padding(key, mask), drop_padding(value, mask)
    if queries is None:
        query = drop_padding(query, mask)
    if decay is not None:
        decay = drop_padding(decay.to(state_dtype).unsqueeze(-1), mask).squeeze(-1)
    documents = last = None
    if mask is not None and mask.dtype != torch.bool:
        # padding belongs to the document before it, and the state to the first
        documents = mask.cummax(dim=1).values
        last = documents[:, 0]
    grouped = query.unflatten(2, (K, -1))  # [B, T, K, G, P]
    listed = None if queries is None else Listed(queries, K)
    segments = [slice(start, min(start + SEGMENT, T)) for start in range(0, T, SEGMENT)]

    found = []
    with torch.autocast(query.device.type, enabled=False):
        state = initial_state
        if state is None:
            state = torch.zeros(B, K, P, P + 1, dtype=state_dtype, device=query.device)
        if not causal:
            for segment in segments:
                k, v = _key_features(key, value, mask, segment, compute, normalise)
                state = state + torch.einsum("btkp,btkr->bkpr", k, v).to(state_dtype)
        for segment in segments:
            if listed is None:
                q = _chunks(grouped[:, segment])
                offset = torch.arange(q.shape[2], device=q.device).view(1, 1, -1, 1)
            else:
                q, offset = listed.take(grouped, segment)
            q = _query_features(q, compute, normalise)  # [B, N, M, K, G, P]
            if causal:
                k, v = _key_features(key, value, mask, segment, compute, normalise)
                factors = _factors(
                    offset,
                    min(CHUNK, k.shape[1]),
                    None if decay is None else _chunks(decay[:, segment]),
                    None if documents is None else _chunks(documents[:, segment], repeat=True),
                    last,
                )
                sums, state = _causal_sums(q, _chunks(k), _chunks(v), state, factors)
                last = None if documents is None else documents[:, segment.stop - 1]
            else:
                sums = torch.einsum("bnmkgp,bkpr->bnmkgr", q, state.to(compute))
            part = _normalise(sums) if normalise else sums[..., :-1]
            if skip is not None:
                own = torch.take_along_dim(_chunks(value[:, segment]), offset.unsqueeze(-1), dim=2)
                factor = skip.to(state_dtype).view(K, -1, 1)  # [K, G, 1]
                part = part + factor * own.unsqueeze(4)
            found.append(part.to(query.dtype))

    if listed is not None:
        out = torch.zeros_like(query) if rows is None else rows
        return listed.put(out.unflatten(2, (K, -1)), found).flatten(2, 3), state
    whole = torch.cat([x.flatten(1, 2) for x in found], dim=1)[:, :T]
    return drop_padding(whole.flatten(2, 3), mask), state


class Listed:
    """The rows of a query list, as many in every chunk of a segment as its fullest chunk has.

    The places that stay vacant read zero and are never written.
    """

    def __init__(self, queries: QueryList, K: int) -> None:
        self.queries = queries
        self.K = K
        self.counts: list[int] = queries.ranks.diff(dim=-1).amax(dim=(0, 1)).tolist()
        self.places: list[tuple[Tensor, Tensor, Tensor]] = []
        self.is_row: list[Tensor] = []

    def take(self, x: Tensor, segment: slice) -> tuple[Tensor, Tensor]:
        """Rows [B, N, M, K, ...] of ``x`` [B, T, K, ...], and their offsets [B, N, M, K]."""
        first, stop = segment.start // CHUNK, -(-segment.stop // CHUNK)
        M = max(self.counts[first:stop])
        ranks = self.queries.ranks[:, :, first : stop + 1].long().unsqueeze(-1)
        slots = ranks[:, :, :-1] + torch.arange(M, device=x.device)  # [B, G, N, M]
        is_row = slots < ranks[:, :, 1:]
        # what a list holds beyond its count is undefined
        slots = slots.masked_fill(~is_row, 0)
        at = self.queries.positions.long().gather(2, slots.flatten(2)).view_as(slots)
        at = at.masked_fill(~is_row, segment.start)
        at, is_row = (i.permute(0, 2, 3, 1).expand(-1, -1, -1, self.K) for i in (at, is_row))

        b = torch.arange(x.shape[0], device=x.device).view(-1, 1, 1, 1).expand_as(at)
        k = torch.arange(self.K, device=x.device).expand_as(at)
        self.places.append((b[is_row], at[is_row], k[is_row]))
        self.is_row.append(is_row)
        return x[b, at, k].masked_fill(~is_row[..., None, None], 0.0), at % CHUNK

    def put(self, x: Tensor, rows: list[Tensor]) -> Tensor:
        """``x`` [B, T, K, ...] with the rows of all segments in their places."""
        b, t, k = (torch.cat(indices) for indices in zip(*self.places, strict=True))
        kept = [r[is_row] for r, is_row in zip(rows, self.is_row, strict=True)]
        return x.index_put((b, t, k), torch.cat(kept))


@dataclass(frozen=True, slots=True)
class Factors:
    """What of the past is visible, and how much of it decay has left. None for ones."""

    scores: Tensor  # [B, N, K, M, C]: a token of the chunk, seen from a row; boolean or a number
    reads: Tensor | None  # [B, N, M, K]: the state before the chunk, seen from a row
    adds: Tensor | None  # [B, N, C, K]: a token of the chunk, in the state after
    keeps: Tensor | None  # [B, N, K]: the state before the chunk, in the state after


def _factors(
    offset: Tensor, C: int, decay: Tensor | None, documents: Tensor | None, last: Tensor | None
) -> Factors:
    """Factors of one segment.

    Args:
        offset: Where in their chunk the rows are, [B, N, M, K] or broadcast to it.
        C: Tokens of a chunk.
        decay: Log decay [B, N, C, K].
        documents: Document of each token [B, N, C]; a state holds the one its chunk ends in.
        last: Document [B] of the state before the segment.
    """
    visible = (offset.unsqueeze(-1) >= torch.arange(C, device=offset.device)).transpose(2, 3)
    reads = adds = keeps = None
    if documents is not None and last is not None:
        d = documents.unsqueeze(-1)  # [B, N, C, 1]
        d_row = torch.take_along_dim(d, offset, dim=2)  # [B, N, M, K]
        ends = d[:, :, -1]
        before = torch.cat([last[:, None, None], ends[:, :-1]], dim=1)  # [B, N, 1]
        visible = visible & (d_row.transpose(2, 3).unsqueeze(-1) == documents[:, :, None, None])
        reads, adds, keeps = d_row == before.unsqueeze(2), d == ends.unsqueeze(2), before == ends
    if decay is None:
        return Factors(visible, reads, adds, keeps)

    past = decay.cumsum(dim=2)  # [B, N, C, K]
    past_row = torch.take_along_dim(past, offset, dim=2)
    total = past[:, :, -1]
    spans = past_row.transpose(2, 3).unsqueeze(-1) - past.transpose(2, 3).unsqueeze(-2)
    scores = spans.masked_fill(~visible, float("-inf")).exp()
    factors = [past_row.exp(), (total.unsqueeze(2) - past).exp(), total.exp()]
    if reads is not None and adds is not None and keeps is not None:
        factors = [x * same for x, same in zip(factors, (reads, adds, keeps), strict=True)]
    return Factors(scores, *factors)


def _causal_sums(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, factors: Factors
) -> tuple[Tensor, Tensor]:
    """Sums [B, N, M, K, G, R] of a segment that follows ``state`` [B, K, P, R]; the state after.

    Every chunk reads the state before it, and its own tokens up to each row.
    """
    kept = k if factors.adds is None else k * factors.adds.unsqueeze(-1).to(k.dtype)
    added = torch.einsum("bnckp,bnckr->bnkpr", kept, v).to(state.dtype)
    if factors.keeps is None:
        after = added.cumsum(dim=1) + state.unsqueeze(1)
        before = torch.cat([state.unsqueeze(1), after[:, :-1]], dim=1)
        state = after[:, -1]
    else:
        keeps = factors.keeps.unsqueeze(-1).unsqueeze(-1).to(state.dtype)
        states = [state]
        for n in range(added.shape[1]):
            states.append(states[-1] * keeps[:, n] + added[:, n])
        before = torch.stack(states[:-1], dim=1)
        state = states[-1]
    sums = torch.einsum("bnmkgp,bnkpr->bnmkgr", q, before.to(q.dtype))
    if factors.reads is not None:
        sums = sums * factors.reads[..., None, None].to(sums.dtype)

    scores = torch.einsum("bnmkgp,bnskp->bnkgms", q, k)
    scores = scores * factors.scores.unsqueeze(3).to(scores.dtype)
    return sums + torch.einsum("bnkgms,bnskr->bnmkgr", scores, v), state


def feature_map(x: Tensor) -> Tensor:
    """ELU(x) + 1, written so that it keeps its relative precision where ELU is near -1."""
    return F.relu(x) + x.clamp(max=0.0).exp()


def _query_features(q: Tensor, compute: torch.dtype, normalise: bool) -> Tensor:
    """``feature_map`` up to a factor per row, which the normaliser cancels.

    Rows all below 0 are shifted up, so that their features do not underflow.
    """
    if not normalise:
        return q.to(compute)
    q = q.to(torch.promote_types(compute, torch.float32))
    shift = q.amax(dim=-1, keepdim=True).clamp(max=0.0).detach()
    return feature_map(q - shift).to(compute)


def _key_features(
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    segment: slice,
    compute: torch.dtype,
    normalise: bool,
) -> tuple[Tensor, Tensor]:
    """Features [B, S, K, P], zero for padding, and values with their column of ones."""
    k, v = key[:, segment], value[:, segment]
    if normalise:
        k = feature_map(k.to(torch.promote_types(compute, torch.float32)))
        k = drop_padding(k, None if mask is None else mask[:, segment])
    return k.to(compute), F.pad(v.to(compute), (0, 1), value=1.0)


def _chunks(x: Tensor, repeat: bool = False) -> Tensor:
    """Split [B, S, ...] into [B, N, C, ...], the end filled with zeros or with the last token."""
    size = min(CHUNK, x.shape[1])
    missing = -x.shape[1] % size
    if missing:
        end = x[:, -1:].expand(-1, missing, *x.shape[2:])
        x = torch.cat([x, end if repeat else torch.zeros_like(end)], dim=1)
    return x.unflatten(1, (-1, size))


def _normalise(sums: Tensor) -> Tensor:
    """Rows [..., P] of sums [..., R]."""
    sums = sums.to(torch.promote_types(sums.dtype, torch.float32))
    return sums[..., :-1] / sums[..., -1:].clamp(min=MIN_NORMALISER)
