"""Linear attention in chunks: a state carried between chunks, a small matrix inside each.

The sums run in float32 at least: over 64k tokens they pass what half precision can hold.

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
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None
) -> Tensor:
    B, _, H, P = query.shape
    K = key.shape[2]
    compute = torch.promote_types(query.dtype, torch.float32)
    if mask is not None:
        mask = mask.bool()

    with torch.autocast(query.device.type, enabled=False):
        queries = [
            query_features(q.to(compute)).unflatten(2, (K, H // K))  # [B, S, K, G, P]
            for q in query.split(SEGMENT, dim=1)
        ]
        key = drop_padding(feature_map(key.to(compute)), mask)
        keys = key.split(SEGMENT, dim=1)  # [B, S, K, P] each
        value = F.pad(value.to(compute), (0, 1), value=1.0)
        values = value.split(SEGMENT, dim=1)  # [B, S, K, R] each

        rows = []
        if causal:
            state = value.new_zeros(B, K, P, P + 1)
            for q, k, v in zip(queries, keys, values, strict=True):
                sums, state = _causal_sums(q, k, v, state)
                rows.append(_normalise(sums))
        else:
            state = torch.einsum("btkp,btkr->bkpr", key, value)
            for q in queries:
                rows.append(_normalise(torch.einsum("btkgp,bkpr->btkgr", q, state)))
    return drop_padding(torch.cat(rows, dim=1).to(query.dtype), mask)


def feature_map(x: Tensor) -> Tensor:
    """ELU(x) + 1, written so that it keeps its relative precision where ELU is near -1."""
    return torch.where(x > 0, x + 1.0, x.clamp(max=0.0).exp())


def query_features(x: Tensor) -> Tensor:
    """``feature_map`` up to a factor per row, which the normaliser cancels.

    Rows all below 0 are shifted up, so that their features do not underflow.
    """
    shift = x.amax(dim=-1, keepdim=True).clamp(max=0.0).detach()
    return feature_map(x - shift)


def _causal_sums(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Sums [B, S, K, G, R] of a segment that follows ``state`` [B, K, P, R], and the state after.

    Every chunk reads the state before it, and its own tokens up to each row.
    """
    S = q.shape[1]
    q, k, v = (_chunks(x) for x in (q, k, v))  # [B, N, C, ...]
    added = torch.einsum("bnckp,bnckr->bnkpr", k, v)
    after = added.cumsum(dim=1) + state.unsqueeze(1)
    before = torch.cat([state.unsqueeze(1), after[:, :-1]], dim=1)
    sums = torch.einsum("bnckgp,bnkpr->bnckgr", q, before)

    scores = torch.einsum("bnckgp,bnskp->bnkgcs", q, k).tril()
    sums = sums + torch.einsum("bnkgcs,bnskr->bnckgr", scores, v)
    return sums.flatten(1, 2)[:, :S], after[:, -1]


def _chunks(x: Tensor) -> Tensor:
    """Split [B, S, ...] into [B, N, C, ...], the end filled with zeros."""
    size = min(CHUNK, x.shape[1])
    x = F.pad(x, (*(0, 0) * (x.dim() - 2), 0, -x.shape[1] % size))
    return x.unflatten(1, (-1, size))


def _normalise(sums: Tensor) -> Tensor:
    """[B, S, K, G, R] -> rows [B, S, H, P]."""
    rows = sums[..., :-1] / sums[..., -1:].clamp(min=MIN_NORMALISER)
    return rows.flatten(2, 3)
