"""Linear attention in chunks: a state carried between chunks, a small matrix inside each.

The sums run in float32 at least: over 64k tokens they pass what half precision can hold.

Shapes: N chunks of C tokens; K key-value heads, each for G query heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from meta_attention.ops.heads import drop_padding

CHUNK = 64

# keys far below 0 have features that underflow; a row that sees only such is 0, not 0 / 0
MIN_NORMALISER = 1e-30


def feature_map(x: Tensor, shift: Tensor | float = 0.0) -> Tensor:
    """ELU(x) + 1, written so that it keeps its relative precision where ELU is near -1.

    A ``shift`` below 0, for rows with nothing above it, divides the row by exp(shift).
    """
    return torch.where(x > 0, x + 1.0, (x - shift).clamp(max=0.0).exp())


def linear_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None
) -> Tensor:
    B, T, H, P = query.shape
    K = key.shape[2]
    compute = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        q = query.to(compute)
        # a factor of all features of a query cancels: none of them has to underflow
        q = feature_map(q, shift=q.amax(dim=-1, keepdim=True).clamp(max=0.0).detach())
        q = q.view(B, T, K, H // K, P)
        k = feature_map(key.to(compute))
        # the column of ones sums the normaliser along with the values
        v = F.pad(value.to(compute), (0, 1), value=1.0)  # [B, T, K, P + 1]
        if mask is not None:
            mask = mask.bool()
            k = drop_padding(k, mask)
        sums = _causal_sums(q, k, v) if causal else _full_sums(q, k, v)  # [B, T, K, G, P + 1]
        out = sums[..., :-1] / sums[..., -1:].clamp(min=MIN_NORMALISER)
        out = out.reshape(B, T, H, P)
    return drop_padding(out.to(query.dtype), mask)


def _full_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state = torch.einsum("btkp,btkr->bkpr", k, v)
    return torch.einsum("btkgp,bkpr->btkgr", q, state)


def _causal_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    T = q.shape[1]
    C = min(CHUNK, T)
    q, k, v = (_chunks(x, C) for x in (q, k, v))  # [B, N, C, ...]

    # every chunk reads the state of those before it
    states = torch.einsum("bnckp,bnckr->bnkpr", k, v)
    before = F.pad(states, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1].cumsum(dim=1)
    sums = torch.einsum("bnckgp,bnkpr->bnckgr", q, before)

    # and its own tokens up to each row
    scores = torch.einsum("bnckgp,bnskp->bnkgcs", q, k).tril()
    sums = sums + torch.einsum("bnkgcs,bnskr->bnckgr", scores, v)
    return sums.flatten(1, 2)[:, :T]


def _chunks(x: Tensor, size: int) -> Tensor:
    """Split [B, T, ...] into [B, N, size, ...], the end filled with zeros."""
    tail = -x.shape[1] % size
    x = F.pad(x, (*(0, 0) * (x.dim() - 2), 0, tail))
    return x.unflatten(1, (-1, size))
