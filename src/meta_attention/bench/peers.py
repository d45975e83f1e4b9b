"""What routed attention is measured against: PyTorch's attention, FlexAttention, fla."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from meta_attention.bench.data import FULL, LOCAL
from meta_attention.bench.rows import CUDNN, DEFAULT_SDPA, FLASH

BACKENDS = {
    FLASH: [SDPBackend.FLASH_ATTENTION],
    CUDNN: [SDPBackend.CUDNN_ATTENTION],
    # whatever PyTorch would take by itself
    DEFAULT_SDPA: None,
}

# queries and keys of a FlexAttention block
BLOCK = 128


def sdpa(backend: str, query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True) -> Tensor:
    """PyTorch's attention of heads ``[B, T, H, P]``, by one of ``BACKENDS``."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    is_grouped = q.shape[1] != k.shape[1]
    chosen = BACKENDS[backend]
    if chosen is None:
        rows = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=is_grouped)
    else:
        with sdpa_kernel(chosen):
            rows = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=is_grouped)
    return rows.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class FlexRows:
    """Softmax rows of given routes for FlexAttention: full ones first, then local ones.

    Lists fill up to whole blocks, so that no block mixes experts.
    """

    order: Tensor  # [B, N] position of each row; beyond a list's end its last one again
    is_row: Tensor  # [B, N]
    mask: BlockMask

    def gather(self, query: Tensor) -> Tensor:
        """Queries [B, H, N, P] of heads [B, T, H, P], in order."""
        batch = torch.arange(len(query), device=query.device).unsqueeze(-1)
        return query[batch, self.order].transpose(1, 2).contiguous()

    def scatter(self, rows: Tensor, like: Tensor) -> Tensor:
        """Rows [B, H, N, P] back to [B, T, H, P]; zero where there is none."""
        out = torch.zeros_like(like)
        batch = torch.arange(len(like), device=like.device).unsqueeze(-1).expand_as(self.order)
        out[batch[self.is_row], self.order[self.is_row]] = rows.transpose(1, 2)[self.is_row]
        return out


def plan_flex(routes: Tensor, window: int) -> FlexRows:
    """Rows and block mask of routes ``[B, T]``: blocks from the rows' first and last keys."""
    B, T = routes.shape
    orders, kept = [], []
    for expert in (FULL, LOCAL):
        is_listed = routes == expert
        count = is_listed.sum(dim=1)  # [B]
        length = -(-int(count.max()) // BLOCK) * BLOCK
        if not length:
            continue
        # listed positions first, in rising order
        order = (~is_listed).to(torch.int8).argsort(dim=1, stable=True)
        entry = torch.arange(length, device=routes.device).expand(B, -1)
        last = (count - 1).clamp(min=0).unsqueeze(-1)
        orders.append(order.gather(1, entry.minimum(last)))
        kept.append(entry < count.unsqueeze(-1))
    order, is_row = torch.cat(orders, dim=1), torch.cat(kept, dim=1)
    is_local = routes.gather(1, order) == LOCAL
    last = order
    first = torch.where(is_local, (order - window).clamp(min=0), 0)
    return FlexRows(order, is_row, _block_mask(first, last, is_row, T))


def _block_mask(first: Tensor, last: Tensor, is_row: Tensor, T: int) -> BlockMask:
    """Mask of rows [B, N] that see the keys from ``first`` to ``last``."""
    B, N = first.shape
    blocks = (B, 1, N // BLOCK, 1, BLOCK)
    low, high, has_rows = (x.view(blocks) for x in (first, last, is_row))
    start = torch.arange(0, T, BLOCK, device=first.device)  # of a block of keys
    end = (start + BLOCK).clamp(max=T) - 1
    seen_by_some = (end >= low.amin(dim=-1)) & (start <= high.amax(dim=-1)) & has_rows.any(dim=-1)
    seen_by_all = (start >= low.amax(dim=-1)) & (end <= high.amin(dim=-1)) & has_rows.any(dim=-1)
    # a block cut off by the end of the keys has to be masked
    seen_by_all = seen_by_all & (end - start == BLOCK - 1)

    def is_visible(b: Tensor, h: Tensor, q: Tensor, s: Tensor) -> Tensor:
        return (s >= first[b, q]) & (s <= last[b, q])

    return BlockMask.from_kv_blocks(
        *_numbered(seen_by_some & ~seen_by_all),
        *_numbered(seen_by_all),
        BLOCK_SIZE=BLOCK,
        mask_mod=is_visible,
        seq_lengths=(N, T),
    )


def _numbered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys are chosen [B, 1, N], and which [B, 1, N, M], those first."""
    order = (~chosen).to(torch.int8).argsort(dim=-1, stable=True)
    return chosen.sum(dim=-1).to(torch.int32), order.to(torch.int32)


FlexCall = Callable[[Tensor, Tensor, Tensor, BlockMask], Tensor]


def build_flex(device: torch.device) -> FlexCall:
    """FlexAttention for one shape, compiled anew: past its limit the compiler would give up."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        rows = flex_attention(q, k, v, block_mask=mask)
        assert isinstance(rows, Tensor)
        return rows

    if device.type != "cuda":
        return attend
    torch._dynamo.reset()
    # a backward that is timed alone runs again and again on what its forward has left
    torch._functorch.config.donated_buffer = False
    compiled: FlexCall = torch.compile(attend, dynamic=False)
    return compiled


def has_fla() -> bool:
    return find_spec("fla") is not None


def fla_linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal linear attention of flash-linear-attention, with our features."""
    # untyped, and seldom there
    fla = import_module("fla.ops.linear_attn")
    rows, _ = fla.chunk_linear_attn(
        F.elu(query) + 1.0, F.elu(key) + 1.0, value, scale=1.0, normalize=True
    )
    assert isinstance(rows, Tensor)
    return rows
