"""What the cache of a block holds that tokens may pass by: those that entered it, and no others.

Rows differ in how many these are. A row keeps its own from the first column on, one after another,
so that a window counts tokens that entered, and a decoding step needs to know of a row no more
than its count. A call with many tokens looks at rows that end together, new tokens and padding
after them: these are made for it.

Shapes: B batch, N new tokens of a row at most, K heads kept, P head width, S columns.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from meta_attention.layers.decode_step import DecodeStep


class EnteredRows:
    """Mixin for the cache of a layer: rows that differ in length."""

    keys: Tensor | None
    values: Tensor | None
    states: dict[str, Tensor]
    counts: Tensor | None = None  # [B] tokens kept of each row
    waits_for_host = True  # whether a step may ask the host if any row enters

    @property
    def width(self) -> int:
        """Columns that may hold tokens."""
        raise NotImplementedError

    def make_room(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Buffers with at least N columns after ``width``; keys and values [B, K, N, P] as new."""
        raise NotImplementedError

    def check_host_may_read(self, step: "DecodeStep") -> None:
        """Raise where the host must not read, as while a step is captured."""

    def count(self, num_entered: Tensor | None, num_tokens: int) -> None:
        """Count tokens of a call: those of each row that entered [B], None: nowhere, and all."""
        raise NotImplementedError

    def keep_state(self, name: str, state: Tensor) -> None:
        """Remember the state of a recurrent expert."""
        raise NotImplementedError

    def open_state(self, name: str, zeros: Callable[[], Tensor]) -> Tensor:
        """The state of a linear expert, to be written in place."""
        raise NotImplementedError

    def counts_of(self, rows: int, device: torch.device) -> Tensor:
        """Tokens kept of each row [B]."""
        if self.counts is None:
            self.counts = torch.zeros(rows, dtype=torch.long, device=device)
        return self.counts

    def write(self, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        """Put N tokens [B, K, N, P] after those of each row; returns the buffers.

        Whoever knows how many of them are tokens counts them afterwards.
        """
        keys, values = self.make_room(new_keys, new_values)
        counts = self.counts_of(new_keys.shape[0], new_keys.device)
        if keys is not new_keys:
            at = counts.unsqueeze(1) + torch.arange(new_keys.shape[2], device=counts.device)
            index = at[:, None, :, None].expand_as(new_keys)
            keys.scatter_(2, index, new_keys.to(keys.dtype))
            values.scatter_(2, index, new_values.to(values.dtype))
        return keys, values


class EnteredMemory:
    """The cache of a layer, as experts see it in a call where some tokens entered.

    Args:
        layer: What is kept between calls.
        is_entered: ``[B, N]``, of each row its tokens first, then padding.
    """

    def __init__(self, layer: EnteredRows, is_entered: Tensor) -> None:
        self.layer = layer
        self.is_entered = is_entered
        self.past = layer.width
        self.counts = layer.counts_of(is_entered.shape[0], is_entered.device)

    @property
    def keys(self) -> Tensor | None:
        return self.layer.keys

    @property
    def values(self) -> Tensor | None:
        return self.layer.values

    @property
    def states(self) -> dict[str, Tensor]:
        return self.layer.states

    def keep_state(self, name: str, state: Tensor) -> None:
        self.layer.keep_state(name, state)

    def open_state(self, name: str, zeros: Callable[[], Tensor]) -> Tensor:
        return self.layer.open_state(name, zeros)

    @property
    def mask(self) -> Tensor:
        """Of the tokens kept and the new ones [B, past + N], as ``update`` returns them."""
        is_kept = torch.arange(self.past, device=self.counts.device) >= (
            self.past - self.counts.unsqueeze(1)
        )
        return torch.cat([is_kept, self.is_entered], dim=1)

    def mask_of(self, step: "DecodeStep") -> Tensor | None:
        self.layer.check_host_may_read(step)
        return self.mask

    def update(self, key_states: Tensor, value_states: Tensor, /) -> tuple[Tensor, Tensor]:
        """Add keys and values; returns all [B, K, past + N, P], kept rows ending together."""
        seen = [
            x if self.past == 0 or old is None else torch.cat([self._aligned(old), x], dim=2)
            for old, x in ((self.keys, key_states), (self.values, value_states))
        ]
        self.layer.write(key_states, value_states)
        return seen[0], seen[1]

    def _aligned(self, x: Tensor) -> Tensor:
        """The kept columns [B, K, past, P], moved so that all rows end at the last."""
        at = torch.arange(self.past, device=x.device) - (self.past - self.counts.unsqueeze(1))
        index = at.clamp(min=0)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        return x.gather(2, index)

    def update_newest(
        self, key_states: Tensor, value_states: Tensor, step: "DecodeStep"
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Add one token of each row; a row that passes by has a column that counts for nothing."""
        keys, values = self.layer.write(key_states, value_states)
        return keys, values, self.counts + self.is_entered.sum(dim=1), None

    def get_seq_length(self) -> int:
        return self.past

    def advance(self, num_tokens: int) -> None:
        """Nothing: tokens are counted by the block, those included that pass it by."""
