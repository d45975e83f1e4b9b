"""The tokens that enter a block, packed row by row.

Shapes: B batch, T sequence, N tokens of a row that enter, at most, D width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """Who enters a block."""

    enters: Tensor  # [B, T] boolean, False for padding
    gate: Tensor  # [B, T] float32, what of the block's update a token takes
    loss: Tensor | None  # []
    num_entered: int | None  # of every row, where that is known without looking; None: look


@dataclass(frozen=True, slots=True)
class Packing:
    """The tokens that enter, of each row in their order and from its first place on."""

    index: Tensor | None  # [B, N] where they stand; None: every place is its own
    is_entered: Tensor | None  # [B, N] False for places that are left over; None: none is

    @staticmethod
    def of(entry: Entry, least_places: int = 0) -> "Packing | None":
        """None if nobody enters. Waits for the device where the shapes do not say how many."""
        enters, N = entry.enters, entry.num_entered
        T = enters.shape[1]
        counts = enters.sum(dim=1)
        is_even = N is not None
        if N is None:
            least, most = torch.stack(counts.aminmax()).tolist()
            N = max(most, least_places)
            is_even = least == N
        if N == 0:
            return None
        is_entered = None
        if not is_even:
            is_entered = torch.arange(N, device=enters.device) < counts.unsqueeze(1)
        elif N == T:
            return Packing(None, None)
        # a stable order by who enters keeps that of the text; places left over get the others
        index = (~enters).to(torch.uint8).argsort(dim=1, stable=True)[:, :N]
        return Packing(index, is_entered)

    def take(self, x: Tensor) -> Tensor:
        """Of ``x`` [B, T, ...] the tokens that enter [B, N, ...]."""
        if self.index is None:
            return x
        # positions may be those of one row for all
        x = x.expand(self.index.shape[0], *x.shape[1:])
        return x.gather(1, _as_wide(self.index, x))

    def put(self, rows: Tensor, into: Tensor) -> Tensor:
        """``into`` [B, T, ...] with ``rows`` [B, N, ...] at the places of the tokens that enter."""
        if self.is_entered is not None:
            is_entered = _unsqueezed(self.is_entered, rows.dim())
            rows = torch.where(is_entered, rows, self.take(into))
        return rows if self.index is None else into.scatter(1, _as_wide(self.index, rows), rows)

    def blank(self, x: Tensor, value: float = 0.0) -> Tensor:
        """``x`` [B, N, ...] with ``value`` at places that are left over."""
        if self.is_entered is None:
            return x
        return x.masked_fill(~_unsqueezed(self.is_entered, x.dim()), value)


@dataclass(frozen=True, slots=True)
class Entered:
    """Who entered a block and where they are packed: what its halves share."""

    entry: Entry
    packing: Packing | None  # None: nobody entered

    def take(self, x: Tensor) -> Tensor | None:
        """Of ``x`` [B, T, D] the tokens that entered [B, N, D], and zeros; None: nobody did."""
        return None if self.packing is None else self.packing.blank(self.packing.take(x))

    def put(self, rows: Tensor, into: Tensor) -> Tensor:
        """``into`` [B, T, D] with ``rows`` [B, N, D] at the places of the tokens that entered."""
        assert self.packing is not None
        return self.packing.put(rows, into)

    def gated(self, update: Tensor) -> Tensor:
        """What those who entered take of an update [B, N, D], at least float32."""
        assert self.packing is not None
        return self.packing.take(self.entry.gate).unsqueeze(-1) * update

    def spread(self, update: Tensor | None, like: Tensor) -> Tensor:
        """What of an update [B, N, D] tokens take, as wide as ``like``: [B, T, D], else zero."""
        if update is None:
            return torch.zeros_like(like)
        nothing = update.new_zeros(like.shape)
        return self.put(self.gated(update).to(update.dtype), nothing)


def _unsqueezed(x: Tensor, dim: int) -> Tensor:
    return x.view(*x.shape, *[1] * (dim - x.dim()))


def _as_wide(index: Tensor, like: Tensor) -> Tensor:
    """``index`` [B, N] for whole entries of ``like`` [B, ..., ...]."""
    return _unsqueezed(index, like.dim()).expand(*index.shape, *like.shape[2:])
