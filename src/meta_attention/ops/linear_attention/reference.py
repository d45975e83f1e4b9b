"""Linear attention in chunks: a state carried between chunks, a small matrix inside each.

The state is float32 at least: over 64k tokens its sums pass what half precision can hold. Inside a
segment bfloat16 is multiplied as it is: it has the range, and tensor cores are made for it.

Shapes: N chunks of C tokens; K key-value heads, each for G query heads; R = P + 1, the values and
a column of ones that sums the normaliser along with them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from meta_attention.ops.heads import drop_padding

CHUNK = 64

# tokens worked on at a time: the chunk states of long sequences would leave the cache
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
) -> tuple[Tensor, Tensor]:
    B, T, _, P = query.shape
    K = key.shape[2]
    state_dtype = torch.promote_types(query.dtype, torch.float32)
    compute = query.dtype if query.dtype == torch.bfloat16 else state_dtype
    marks = mask
    if marks is None:
        marks = torch.ones(B, T, dtype=torch.bool, device=query.device)
    queries, keys, values, tokens = (x.split(SEGMENT, dim=1) for x in (query, key, value, marks))

    rows = []
    with torch.autocast(query.device.type, enabled=False):
        state = initial_state
        if state is None:
            state = torch.zeros(B, K, P, P + 1, dtype=state_dtype, device=query.device)
        if causal:
            last = marks[:, 0]
            for q, k, v, m in zip(queries, keys, values, tokens, strict=True):
                q, (k, v) = _query_features(q, K, compute), _key_features(k, v, m, compute)
                if m.dtype == torch.bool:
                    sums, state = _causal_sums(q, k, v, state)
                else:
                    sums, state, last = _causal_sums_apart(q, k, v, state, m, last)
                rows.append(_normalise(sums).to(query.dtype))
        else:
            for k, v, m in zip(keys, values, tokens, strict=True):
                k, v = _key_features(k, v, m, compute)
                state = state + torch.einsum("btkp,btkr->bkpr", k, v).to(state_dtype)
            for q in queries:
                features = _query_features(q, K, compute)
                sums = torch.einsum("btkgp,bkpr->btkgr", features, state.to(compute))
                rows.append(_normalise(sums).to(query.dtype))
    return drop_padding(torch.cat(rows, dim=1), mask), state


def feature_map(x: Tensor) -> Tensor:
    """ELU(x) + 1, written so that it keeps its relative precision where ELU is near -1."""
    return torch.where(x > 0, x + 1.0, x.clamp(max=0.0).exp())


def _query_features(q: Tensor, K: int, compute: torch.dtype) -> Tensor:
    """``feature_map`` [B, S, K, G, P] up to a factor per row, which the normaliser cancels.

    Rows all below 0 are shifted up, so that their features do not underflow.
    """
    q = q.to(torch.promote_types(compute, torch.float32))
    shift = q.amax(dim=-1, keepdim=True).clamp(max=0.0).detach()
    return feature_map(q - shift).to(compute).unflatten(2, (K, -1))


def _key_features(
    k: Tensor, v: Tensor, is_token: Tensor, compute: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Features [B, S, K, P], zero for padding, and values with their column of ones."""
    return (
        drop_padding(feature_map(k.to(torch.promote_types(compute, torch.float32))), is_token).to(
            compute
        ),
        F.pad(v.to(compute), (0, 1), value=1.0),
    )


def _causal_sums(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Sums [B, S, K, G, R] of a segment that follows ``state`` [B, K, P, R], and the state after.

    Every chunk reads the state before it, and its own tokens up to each row.
    """
    S = q.shape[1]
    q, k, v = (_chunks(x) for x in (q, k, v))  # [B, N, C, ...]
    added = torch.einsum("bnckp,bnckr->bnkpr", k, v).to(state.dtype)
    after = added.cumsum(dim=1) + state.unsqueeze(1)
    before = torch.cat([state.unsqueeze(1), after[:, :-1]], dim=1)
    sums = torch.einsum("bnckgp,bnkpr->bnckgr", q, before.to(q.dtype))

    scores = torch.einsum("bnckgp,bnskp->bnkgcs", q, k).tril()
    sums = sums + torch.einsum("bnkgcs,bnskr->bnckgr", scores, v)
    return sums.flatten(1, 2)[:, :S], after[:, -1]


def _causal_sums_apart(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, documents: Tensor, last: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``_causal_sums`` where rows see their own document only.

    Args:
        q, k, v, state: As there.
        documents: Document of each token [B, S], numbers that rise along a row; 0 for padding.
        last: Document [B] whose sums ``state`` holds.
    """
    S = q.shape[1]
    # padding belongs to the document before it
    documents = torch.maximum(documents, last.unsqueeze(1)).cummax(dim=1).values
    filled = F.pad(documents.unsqueeze(1).float(), (0, -S % min(CHUNK, S)), mode="replicate")
    d = _chunks(filled.squeeze(1).to(documents.dtype))  # [B, N, C]
    q, k, v = (_chunks(x) for x in (q, k, v))

    # a state holds the document its chunk ends in, summed over the chunks that end in it too
    ends = d[:, :, -1]  # [B, N]
    carried = torch.cat([last.unsqueeze(1), ends[:, :-1]], dim=1)
    is_kept = (d == ends.unsqueeze(-1))[..., None, None]
    added = torch.einsum("bnckp,bnckr->bnkpr", k * is_kept, v).to(state.dtype)
    same = (ends.unsqueeze(2) == ends.unsqueeze(1)).to(state.dtype).tril()  # [B, N, N]
    goes_on = (ends == last.unsqueeze(1))[..., None, None, None]
    after = torch.einsum("bnm,bmkpr->bnkpr", same, added) + state.unsqueeze(1) * goes_on
    before = torch.cat([state.unsqueeze(1), after[:, :-1]], dim=1)
    reads = (d == carried.unsqueeze(-1))[..., None, None, None]
    sums = torch.einsum("bnckgp,bnkpr->bnckgr", q * reads, before.to(q.dtype))

    together = (d.unsqueeze(3) == d.unsqueeze(2))[:, :, None, None]  # [B, N, 1, 1, C, C]
    scores = torch.einsum("bnckgp,bnskp->bnkgcs", q, k).tril() * together
    sums = sums + torch.einsum("bnkgcs,bnskr->bnckgr", scores, v)
    return sums.flatten(1, 2)[:, :S], after[:, -1], ends[:, -1]


def _chunks(x: Tensor) -> Tensor:
    """Split [B, S, ...] into [B, N, C, ...], the end filled with zeros."""
    size = min(CHUNK, x.shape[1])
    x = F.pad(x, (*(0, 0) * (x.dim() - 2), 0, -x.shape[1] % size))
    return x.unflatten(1, (-1, size))


def _normalise(sums: Tensor) -> Tensor:
    """[B, S, K, G, R] -> rows [B, S, H, P]."""
    sums = sums.to(torch.promote_types(sums.dtype, torch.float32))
    rows = sums[..., :-1] / sums[..., -1:].clamp(min=MIN_NORMALISER)
    return rows.flatten(2, 3)
