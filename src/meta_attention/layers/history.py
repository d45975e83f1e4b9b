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

    Args:
        num_lengths: Of the runs that are looked for, N.
    """

    def __init__(self, num_lengths: int) -> None:
        self.num_lengths = num_lengths
        self.tokens: Tensor | None = None  # [B, S], -1 for padding

    def add(self, ids: Tensor, is_token: Tensor | None, step: DecodeStep | None) -> Tensor:
        """Add new tokens ``[B, T]``; returns when each was last seen, ``[B, T, N]``.

        Args:
            ids: The tokens.
            is_token: ``[B, T]``, False for padding; None: there is none.
            step: Where they stand, if it is one of each row.
        """
        new = ids if is_token is None else ids.masked_fill(~is_token, PADDING)
        if step is not None:
            tokens = self._with_newest(new, step)
            return newest_last_seen(tokens, step.position, self.num_lengths)
        tokens = self._with(new)
        return last_seen(tokens, self.num_lengths, tokens != PADDING)[:, -ids.shape[1] :]

    def _with(self, new: Tensor) -> Tensor:
        """All tokens, the new ones included."""
        self.tokens = new if self.tokens is None else torch.cat([self.tokens, new], dim=1)
        return self.tokens

    def _with_newest(self, new: Tensor, step: DecodeStep) -> Tensor:
        return self._with(new)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last; ``tokens_to_remove`` is negative, as in Transformers."""
        if self.tokens is not None:
            self.tokens = self.tokens[:, :tokens_to_remove]

    def reset(self) -> None:
        self.tokens = None

    def map_rows(self, select: Callable[[Tensor], Tensor]) -> None:
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
        self.length = 0  # as far as the host knows

    def _buffer(self, new: Tensor) -> Tensor:
        if self.tokens is None:
            self.tokens = new.new_full((new.shape[0], self.capacity), PADDING)
        return self.tokens

    def _with(self, new: Tensor) -> Tensor:
        tokens, begin = self._buffer(new), self.length
        self.length += new.shape[1]
        tokens[:, begin : self.length] = new
        return tokens[:, : self.length]

    def _with_newest(self, new: Tensor, step: DecodeStep) -> Tensor:
        tokens = self._buffer(new)
        tokens.index_copy_(1, step.position, new)
        self.length += 1
        return tokens

    def advance(self, num_tokens: int) -> None:
        """Count tokens that a captured step writes, which the host does not see."""
        self.length += num_tokens

    def crop(self, tokens_to_remove: int) -> None:
        self.length += tokens_to_remove

    def reset(self) -> None:
        # what lies past the length is not looked at
        self.length = 0

    def map_rows(self, select: Callable[[Tensor], Tensor]) -> None:
        if self.tokens is not None:
            self.tokens.copy_(select(self.tokens))
