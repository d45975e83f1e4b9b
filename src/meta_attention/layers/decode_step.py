"""Where the new tokens of a call stand, and which positions are padding.

Shapes: B batch, S positions so far.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One new token for every row, where none goes on after padding.

    All of it lies on the device: a captured step reads it anew at every replay.
    """

    position: Tensor  # [1] where the new keys go
    length: Tensor  # [1] positions filled, the newest included
    start: Tensor | None  # [B] first position that is not padding; None: 0
    is_token: Tensor | None  # [B] false where the newest is padding; None: nowhere

    @property
    def position_ids(self) -> Tensor:
        """Positions [B, 1], or [1, 1] for all rows, counted from each row's first token."""
        if self.start is None:
            return self.position.unsqueeze(0)
        return (self.position - self.start).clamp(min=0).unsqueeze(1)

    @property
    def is_padding(self) -> Tensor | None:
        """[B, 1], or None if all rows have a token."""
        return None if self.is_token is None else ~self.is_token.unsqueeze(1)

    def mask(self, length: int) -> Tensor | None:
        """Mask [B, S] of ``length`` positions, the newest the last; None without padding."""
        if self.start is None:
            return None
        mask = torch.arange(length, device=self.start.device) >= self.start.unsqueeze(1)
        if self.is_token is not None:
            mask[:, -1] &= self.is_token
        return mask

    def to(self, device: torch.device, non_blocking: bool = False) -> "DecodeStep":
        """The same on another device, where Accelerate has put a layer there."""
        position, length = (
            x.to(device, non_blocking=non_blocking) for x in (self.position, self.length)
        )
        start, is_token = (
            None if x is None else x.to(device, non_blocking=non_blocking)
            for x in (self.start, self.is_token)
        )
        return DecodeStep(position, length, start, is_token)


@dataclass(frozen=True, slots=True)
class Padding:
    """Which of the positions so far are padding, and what the host knows of it."""

    is_token: Tensor  # [B, S] boolean; positions after S hold tokens
    start: Tensor  # [B] first token, S where there is none
    has_gaps: bool  # some row goes on after padding
    ends: bool  # some row ends in padding, after tokens

    @staticmethod
    def of(is_token: Tensor) -> "Padding | None":
        """Read a mask; None if it has no padding. Waits for the device."""
        S = is_token.shape[1]
        start = torch.where(is_token.any(dim=1), is_token.long().argmax(dim=1), S)
        inside = torch.arange(S, device=is_token.device) >= start.unsqueeze(1)
        hole = inside & ~is_token
        gap = hole[:, :-1] & is_token[:, 1:]
        any_padding, has_gaps, ends = torch.stack(
            [~is_token.all(), gap.any(), hole[:, -1:].any()]
        ).tolist()
        return Padding(is_token, start, has_gaps, ends) if any_padding else None

    def extend_to(self, length: int) -> "Padding":
        """With tokens in all rows up to ``length`` positions."""
        B, S = self.is_token.shape
        if length == S:
            return self
        is_token = torch.cat([self.is_token, self.is_token.new_ones(B, length - S)], dim=1)
        return Padding(is_token, self.start, self.has_gaps or self.ends, ends=False)
