"""Which parameters stay in float32 in a model of another precision."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class KeepFloat32(nn.Module):
    """A module that ``model.bfloat16()`` and ``model.half()`` move but do not round.

    In bfloat16 0.86 + 0.0015 is 0.86: small evidence would vanish.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def move(t: Tensor) -> Tensor:
            moved = fn(t)
            is_half = moved.dtype in (torch.bfloat16, torch.float16)
            return t.to(moved.device) if is_half else moved

        return super()._apply(move, recurse)
