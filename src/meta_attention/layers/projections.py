"""Hidden states -> heads -> hidden states: the matrices around attention."""

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from meta_attention.config import Impl, MetaAttentionConfig
from meta_attention.controller import KeepFloat32
from meta_attention.experts import Heads
from meta_attention.ops.rotary import rotate


class Projections(nn.Module):
    """Query, key, value and output projections, for one expert or shared by all."""

    def __init__(self, config: MetaAttentionConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, bias = config.hidden_size, config.attention_bias
        query_width = config.num_attention_heads * self.head_dim
        key_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, query_width, bias=bias)
        self.k_proj = nn.Linear(width, key_width, bias=bias)
        self.v_proj = nn.Linear(width, key_width, bias=bias)
        self.o_proj = nn.Linear(query_width, width, bias=bias)

    def heads(self, x: Tensor) -> Heads:
        """Project [B, T, D] to heads."""
        return Heads(
            *(
                projection(x).unflatten(-1, (-1, self.head_dim))
                for projection in (self.q_proj, self.k_proj, self.v_proj)
            )
        )

    def output(self, rows: Tensor) -> Tensor:
        """Project rows [B, T, H * P] back to [B, T, D]."""
        return self.o_proj(rows)


class MetaAttentionRotaryEmbedding(KeepFloat32, LlamaRotaryEmbedding):
    """Rotary embedding as in Llama, with every length-independent scaling Transformers knows."""

    def __init__(self, config: MetaAttentionConfig) -> None:
        # it reads only the fields that both configs have
        super().__init__(config)  # type: ignore[arg-type]
        self.impl: Impl = config.impl

    def rotate(self, heads: Heads, cos: Tensor, sin: Tensor) -> Heads:
        query, key = (rotate(x, cos, sin, impl=self.impl) for x in (heads.query, heads.key))
        return Heads(query, key, heads.value)


def number_documents(document_ids: Tensor, mask: Tensor | None) -> Tensor:
    """Documents [B, T] numbered from 1 along each row, 0 for padding.

    Neighbours of one number are one document; a number that comes again starts another.
    """
    marks = document_ids.long()
    if mask is not None:
        marks = marks.masked_fill(~mask.bool(), 0)
    starts = torch.ones_like(marks)
    starts[:, 1:] = (marks[:, 1:] != marks[:, :-1]).long()
    return starts.cumsum(dim=1).masked_fill(marks == 0, 0)


def positions_of(mask: Tensor | None, B: int, T: int, past: int, device: torch.device) -> Tensor:
    """Absolute positions [B, T] of the last T tokens.

    They count from each row's first token, so left padding is free, and from the first token of
    each document where the mask numbers them.
    """
    if mask is None:
        return torch.arange(past, past + T, device=device).expand(B, -1)
    count = (mask != 0).long().cumsum(dim=-1)  # tokens so far, this one included
    if mask.dtype != torch.bool:
        starts = torch.ones_like(mask, dtype=torch.bool)
        starts[:, 1:] = (mask[:, 1:] != mask[:, :-1]) & (mask[:, 1:] != 0)
        # tokens before the document: the count at its start, carried along
        count = count - torch.where(starts, count - 1, 0).cummax(dim=-1).values
    return (count - 1).clamp(min=0)[:, past:]
