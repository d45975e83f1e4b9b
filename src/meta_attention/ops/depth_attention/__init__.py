"""Softmax attention over depth: what a sublayer reads of the outputs before it.

    logit[l, i] = query[l] . source[i] / rms(source[i])
    row[l] = count * sum_i softmax_i(logit[l]) source[i]

Queries are parameters and known in advance, so the rows of several sublayers are worked out
together, each source read once. They stop short of the division: a sum of outputs that is not
finished yet may still join the softmax as one more source. ``count`` is the number of sources.

Shapes: N tokens (any leading axes), D width, S rows at once.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from meta_attention.config import Impl
from meta_attention.errors import ShapeError
from meta_attention.ops.backend import choose_impl

__all__ = ["DepthRow", "Sources", "open_sources"]


@dataclass(frozen=True, slots=True)
class DepthRow:
    """A softmax over sources that another may join; float32 but for the numerator."""

    numerator: Tensor  # [N, D], sum of exp(logit - maximum) * source
    denominator: Tensor  # [N], sum of exp(logit - maximum)
    maximum: Tensor  # [N], of the logits; any other number would do, so it has no gradient
    query: Tensor  # [D]
    count: int


class Sources(Protocol):
    """What may be attended to. It grows, and what was added does not change."""

    max_rows: int
    """Most rows of one call of :meth:`attend`."""

    def add(self, *parts: Tensor) -> None:
        """One more source ``[N, D]``: the sum of one or two parts."""

    def attend(self, queries: Tensor) -> list[DepthRow]:
        """The softmax of each of some queries ``[S, D]`` over all sources."""

    def join(self, row: DepthRow, *parts: Tensor) -> tuple[Tensor, Tensor | None]:
        """The finished row ``[N, D]``, with the sum of up to two parts as one more source.

        To be called once for a row.

        Returns:
            The row, in the precision of the first source, and the sum of the parts. What follows
            must go on with that one: its gradient then takes no pass of its own.
        """


def open_sources(first: Tensor, num_sources: int, *, eps: float, impl: Impl = "auto") -> Sources:
    """Begin with one source.

    Args:
        first: The embedding ``[B, T, D]``.
        num_sources: How many there will be at most, this one included.
        eps: Of the RMS norm of the sources.
        impl: ``"auto"``, ``"reference"`` or ``"triton"``.
    """
    if first.dim() != 3 or num_sources < 1:
        raise ShapeError(
            f"sources must be [B, T, D] and at least one, got {list(first.shape)} and {num_sources}"
        )
    if choose_impl("depth_attention", impl, first, compiles=True) == "triton":
        from meta_attention.ops.depth_attention.kernel import BankedSources

        return BankedSources(first, num_sources, eps)
    from meta_attention.ops.depth_attention.reference import ListedSources

    return ListedSources(first, eps)


def source_dtype(first: Tensor) -> torch.dtype:
    """Precision of what sublayers put out, given that of the embedding."""
    device = first.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return first.dtype
