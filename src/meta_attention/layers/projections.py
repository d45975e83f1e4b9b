"""Hidden states -> heads -> hidden states: the matrices around attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from meta_attention.config import Impl, MetaAttentionConfig
from meta_attention.experts import Heads
from meta_attention.ops.rotary import rotate
from meta_attention.precision import KeepFloat32

# of a new convolution: the token itself, and the one before
START_TAPS = (0.6, 0.4)


class ShortConvolution(nn.Module):
    """A causal convolution of each channel over the last tokens.

    A new one has 0.6 of a token and 0.4 of the one before it: a value is stored under its key from
    the first step, in part. As the identity, it was of no more use than none (see
    ``docs/architecture.md``).

    Args:
        channels: Channels, C.
        width: Taps: how many tokens it sees, the newest included.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        start = torch.zeros_like(self.weight)
        first = torch.tensor(START_TAPS if self.weight.shape[1] > 1 else (1.0,))
        start[:, : len(first)] = first
        # of Transformers: leaves alone what was loaded
        init.copy_(self.weight, start)

    def forward(
        self,
        x: Tensor,
        past: Tensor | None = None,
        documents: Tensor | None = None,
        is_padding: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Convolve.

        Args:
            x: ``[B, T, C]``, zeros where there is padding.
            past: What the last call returned; None: nothing came before.
            documents: Numbers ``[B, T]``; tokens of one see none of another.
            is_padding: ``[B, T]``; the next tokens will not see what follows a row's last token.

        Returns:
            ``[B, T, C]``, and the inputs that the next tokens will see ``[B, width - 1, C]``.
        """
        T, reach = x.shape[1], self.weight.shape[1] - 1
        if past is None:
            seen = F.pad(x, (0, 0, reach, 0))
        else:
            seen = torch.cat([past.to(x.dtype), x], dim=1)  # [B, reach + T, C]
        taps = self.weight.to(x.dtype).unbind(dim=1)
        out = x * taps[0]
        for back, tap in enumerate(taps[1:], start=1):
            earlier = seen[:, reach - back : reach - back + T]
            if documents is not None:
                same = F.pad(documents, (back, 0))[:, :T] == documents
                earlier = earlier * same.unsqueeze(-1)
            out = out + earlier * tap
        if is_padding is None:
            return out, seen[:, T:]
        at = torch.arange(1, T + 1, device=x.device)
        ends = torch.where(is_padding, 0, at).amax(dim=1)  # [B]
        kept = ends.unsqueeze(1) + torch.arange(reach, device=x.device)  # [B, reach]
        return out, seen.gather(1, kept.unsqueeze(-1).expand(-1, -1, seen.shape[-1]))

    def extra_repr(self) -> str:
        channels, width = self.weight.shape
        return f"{channels}, width={width}"


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
        self.short_conv = None
        if config.short_conv is not None:
            self.short_conv = ShortConvolution(query_width + 2 * key_width, config.short_conv)

    def heads(
        self,
        x: Tensor,
        is_padding: Tensor | None = None,
        documents: Tensor | None = None,
        past: Tensor | None = None,
    ) -> tuple[Heads, Tensor | None]:
        """Project [B, T, D] to heads, and convolve them where there is a convolution.

        Also returns what it will see of these tokens from the next ones, to be given as ``past``.
        """
        parts = [projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj)]
        if self.short_conv is not None:
            joined = torch.cat(parts, dim=-1)
            if is_padding is not None:
                # a projection with a bias makes something of it
                joined = joined.masked_fill(is_padding.unsqueeze(-1), 0.0)
            joined, past = self.short_conv(joined, past, documents, is_padding)
            parts = list(joined.split([part.shape[-1] for part in parts], dim=-1))
        return Heads(*(part.unflatten(-1, (-1, self.head_dim)) for part in parts)), past

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
