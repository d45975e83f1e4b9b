"""The step row by row, in PyTorch: the path of machines without a GPU, and a definition.

Routes and lengths are read on the host, so a row costs what its route needs. On a GPU this waits
for the device, which the kernel does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meta_attention.ops.heads import masked_attention
from meta_attention.ops.linear_attention import linear_attention


@dataclass(frozen=True, slots=True)
class LinearStep:
    """What the linear expert needs of the newest tokens, and what it remembers of the others.

    All of it is as in ``linear_attention``: features and normaliser, or decay and skip.
    """

    index: int  # of the expert, in the routing weights
    query: Tensor  # [B, H, P], not rotated
    key: Tensor  # [B, K, P], not rotated
    value: Tensor  # [B, K, P]
    state: Tensor  # [B, K, P, P + 1] float32, as linear_attention returns it; updated in place
    decay: Tensor | None = None  # [B, K]
    skip: Tensor | None = None  # [H]
    normalise: bool = True


@torch.no_grad()
def routed_decode_reference(
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
) -> Tensor:
    B, _, S, _ = key.shape
    G = weights.shape[1]
    lengths = length.expand(B).clamp(max=S)
    starts = torch.zeros_like(lengths) if start is None else start
    is_row = starts < lengths
    if is_token is not None:
        is_row = is_row & (is_token != 0)

    # [B, G, heads of a group, ...]: each group has its own route
    queries, keys, values = (x.unflatten(1, (G, -1)) for x in (query, key, value))
    out = torch.zeros_like(queries, dtype=torch.promote_types(query.dtype, torch.float32))
    rows = zip(is_row.tolist(), starts.tolist(), lengths.tolist(), weights.tolist(), strict=True)
    for b, (has_token, first, stop, routes) in enumerate(rows):
        if not has_token:
            continue
        for g, route in enumerate(routes):
            for index, window in windows.items():
                if route[index] > 0:
                    low = first if window is None else max(first, stop - 1 - window)
                    seen = [x[b, g, None, :, low:stop] for x in (keys, values)]
                    sinks = min(low - first, num_sinks)  # those before the window
                    if sinks > 0:
                        parts = (x[b, g, None, :, first : first + sinks] for x in (keys, values))
                        seen = [torch.cat(pair, dim=2) for pair in zip(parts, seen, strict=True)]
                    row = masked_attention(
                        queries[b, g, None, :, None],  # [1, heads, 1, P]
                        seen[0],
                        seen[1],
                        None,
                        scale,
                        softcap,
                    )
                    out[b, g] += route[index] * row[0, :, 0]

    if linear is not None:
        row, state = linear_attention(
            *(x.unsqueeze(1) for x in (linear.query, linear.key, linear.value)),
            causal=True,
            mask=is_row.unsqueeze(1),
            initial_state=linear.state,
            decay=None if linear.decay is None else linear.decay.unsqueeze(1),
            normalise=linear.normalise,
            skip=linear.skip,
            impl="reference",
        )
        linear.state.copy_(state)
        weight = weights[:, :, linear.index, None, None].to(out.dtype)  # [B, G, 1, 1]
        # a weight of zero would not remove a NaN
        out += torch.where(weight > 0, weight * row.view_as(queries), 0.0)
    return out.flatten(1, 2).to(query.dtype)
