"""Full attention through PyTorch's fused kernels, which never hold the T x T scores."""

import torch
import torch.nn.functional as F
from torch import Tensor

from meta_attention.ops.heads import drop_padding

# with padding the fused kernels need an explicit mask: this many of its rows exist at a time
QUERY_BLOCK = 1024


def full_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None
) -> Tensor:
    T = query.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # [B, H, T, P]
    if mask is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2)

    mask = mask.bool()
    position = torch.arange(T, device=query.device)
    blocks = []
    for start in range(0, T, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, T)
        seen = stop if causal else T
        i, j = position[start:stop, None], position[None, :seen]
        visible = mask[:, None, :seen] & (j <= i) if causal else mask[:, None, :seen]
        # padding sees itself: a row with no key has no softmax
        visible = visible | (i == j)  # [B, block, seen]
        blocks.append(
            F.scaled_dot_product_attention(
                q[:, :, start:stop],
                k[:, :, :seen],
                v[:, :, :seen],
                attn_mask=visible.unsqueeze(1),
                enable_gqa=True,
            )
        )
    return drop_padding(torch.cat(blocks, dim=2).transpose(1, 2), mask)
