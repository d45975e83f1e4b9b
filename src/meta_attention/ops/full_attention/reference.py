"""Full attention through PyTorch's fused kernels, which never hold the T x S scores."""

import torch
import torch.nn.functional as F
from torch import Tensor

from meta_attention.ops.heads import drop_padding, masked_attention, sees

# where the fused kernels need an explicit mask, this many of its rows exist at a time
QUERY_BLOCK = 1024


def full_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    T, S = query.shape[1], key.shape[1]
    past = S - T
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # [B, H, T, P]
    # a single query is the last token: it sees everything
    if mask is None and softcap is None and (past == 0 or T == 1 or not causal):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal and T > 1, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2)

    position = torch.arange(S, device=query.device)
    blocks = []
    for start in range(past, S, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, S)
        seen = stop if causal else S
        i, j = position[start:stop, None], position[None, :seen]
        visible = torch.ones(stop - start, seen, dtype=torch.bool, device=query.device)
        if causal:
            visible = j <= i
        if mask is not None:
            visible = visible & sees(mask[:, start:stop], mask[:, :seen])
            # padding sees itself: a row with no key has no softmax
            visible = visible | (i == j)
        blocks.append(
            masked_attention(
                q[:, :, start - past : stop - past],
                k[:, :, :seen],
                v[:, :, :seen],
                visible.reshape(-1, 1, stop - start, seen),
                scale,
                softcap,
            )
        )
    rows = torch.cat(blocks, dim=2).transpose(1, 2)
    return drop_padding(rows, None if mask is None else mask[:, past:])
