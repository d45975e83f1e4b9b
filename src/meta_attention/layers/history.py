"""The tokens that a cache has seen, where controllers ask when one was seen last.

Shapes: B batch, T new tokens, S tokens so far, N lengths of runs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from meta_attention.controller.recurrence import last_seen, newest_last_seen
from meta_attention.layers.decode_step import DecodeStep

PADDING = -1


class TokenHistory:
    """Ids of all tokens so far, which grow with the text.

    How many there are is told by those who count them: tokens of a call that was refused are not.

    Args:
        num_lengths: Of the runs that are looked for, N.
    """

    def __init__(self, num_lengths: int) -> None:
        self.num_lengths = num_lengths
        self.tokens: Tensor | None = None  # [B, S], -1 for padding

    def add(
        self, ids: Tensor, is_token: Tensor | None, step: DecodeStep | None, past: int
    ) -> Tensor:
        """Add new tokens ``[B, T]``; returns when each was last seen, ``[B, T, N]``.

        Args:
            ids: The tokens.
            is_token: ``[B, T]``, False for padding; None: there is none.
            step: Where they stand, if it is one of each row.
            past: How many came before; what was added beyond them is forgotten.
        """
        new = ids.long()
        if is_token is not None:
            new = new.masked_fill(~is_token, PADDING)
        if step is not None:
            tokens = self._with_newest(new, past, step)
            return newest_last_seen(tokens, step.position, self.num_lengths)
        tokens = self._with(new, past)
        return last_seen(tokens, self.num_lengths, tokens != PADDING)[:, past:]

    def _with(self, new: Tensor, past: int) -> Tensor:
        """All tokens, the new ones included."""
        if self.tokens is None or past == 0:
            self.tokens = new
        else:
            self.tokens = torch.cat([self.tokens[:, :past], new], dim=1)
        return self.tokens

    def _with_newest(self, new: Tensor, past: int, step: DecodeStep) -> Tensor:
        return self._with(new, past)

    def map_rows(self, select: Callable[[Tensor], Tensor]) -> None:
        """Keep other rows, or the same in another order."""
        if self.tokens is not None:
            self.tokens = select(self.tokens)


class StaticTokenHistory(TokenHistory):
    """Of fixed size, written in place: a captured step goes on with it.

    Args:
        num_lengths: Of the runs that are looked for, N.
        capacity: Tokens of a row that there is room for.
    """

    def __init__(self, num_lengths: int, capacity: int) -> None:
        super().__init__(num_lengths)
        self.capacity = capacity

    def _buffer(self, new: Tensor) -> Tensor:
        if self.tokens is None:
            self.tokens = new.new_full((new.shape[0], self.capacity), PADDING)
        return self.tokens

    def _with(self, new: Tensor, past: int) -> Tensor:
        tokens, stop = self._buffer(new), past + new.shape[1]
        tokens[:, past:stop] = new
        return tokens[:, :stop]

    def _with_newest(self, new: Tensor, past: int, step: DecodeStep) -> Tensor:
        # where that is, the device knows: a captured step is replayed at other places
        return self._buffer(new).index_copy_(1, step.position, new)

    def map_rows(self, select: Callable[[Tensor], Tensor]) -> None:
        if self.tokens is not None:
            self.tokens.copy_(select(self.tokens))
