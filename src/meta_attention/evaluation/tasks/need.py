"""Did the answers come out right, and was full attention where it was needed?

A token is on full attention in a layer if its expert of largest weight there is one that sees all
tokens by softmax; where key-value heads have routes of their own, if any of them is. Of such
tokens, *precision* is the share that needs it, and *recall* is the share of tokens in need that
are on it: layer by layer, and in any layer, since one look is enough.

Shapes: B batch, T sequence, E experts, G key-value heads that have routes of their own.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from meta_attention.evaluation.forcing import attention_layers
from meta_attention.evaluation.tasks.base import NOT_ASKED
from meta_attention.experts.base import SoftmaxExpert


@dataclass(frozen=True, slots=True)
class NeedOfLayer:
    """Where full attention was, against where it was needed."""

    full_share: float
    """Share of all tokens that are on full attention."""
    precision: float | None
    """Share of these that need it; None if there are none."""
    recall: float | None
    """Share of the tokens in need that are on it; None if there are none."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What a model made of a task."""

    num_tokens: int
    num_asked: int
    accuracy: float
    """Share of the answers that are right, over all tokens asked."""
    far_accuracy: float | None
    """Over those that need full attention."""
    near_accuracy: float | None
    """Over the others; None where all need it."""
    need_share: float
    """Share of all tokens that need full attention."""
    any_layer: NeedOfLayer
    layers: list[NeedOfLayer]

    @property
    def full_share(self) -> float:
        """Share of tokens on full attention, mean over layers."""
        return sum(layer.full_share for layer in self.layers) / len(self.layers)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"full_share": self.full_share}

    def flatten(self) -> dict[str, float]:
        """Names and numbers, as logs want them; what is not defined is left out."""
        figures = {
            "accuracy": self.accuracy,
            "far_accuracy": self.far_accuracy,
            "near_accuracy": self.near_accuracy,
            "need_share": self.need_share,
            "full_share": self.full_share,
            "full_share_any": self.any_layer.full_share,
            "full_precision": self.any_layer.precision,
            "full_recall": self.any_layer.recall,
        }
        for index, layer in enumerate(self.layers):
            figures[f"layer_{index}/full_share"] = layer.full_share
            figures[f"layer_{index}/full_precision"] = layer.precision
            figures[f"layer_{index}/full_recall"] = layer.recall
        return {name: value for name, value in figures.items() if value is not None}


class TaskTally:
    """Adds up batches, or counts them row by row for someone else to add up.

    Args:
        is_full: For each layer, which of its experts are full attention ``[E]``.
    """

    def __init__(self, is_full: Sequence[Tensor]) -> None:
        self.is_full = list(is_full)
        self.sums = torch.zeros(6 + 2 * (1 + len(self.is_full)), dtype=torch.float64)
        """Tokens and those in need; asked and right, far and near; then on full attention, and of
        these in need: in any layer, and layer by layer."""

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """A tally for every routed attention layer of a model, static ones included, in order."""
        return cls(
            [
                torch.tensor(
                    [isinstance(e, SoftmaxExpert) and e.window is None for e in layer.experts]
                )
                for layer in attention_layers(model)
            ]
        )

    def count(
        self,
        predicted: Tensor,
        labels: Tensor,
        needs_full: Tensor,
        weights: Sequence[Tensor],
    ) -> Tensor:
        """What each row of a batch adds to ``sums``, ``[B, len(sums)]``.

        Args:
            predicted: The most probable next token ``[B, T]``; the last of a row counts for
                nothing.
            labels: ``[B, T]``, as the dataset gives them: not shifted.
            needs_full: ``[B, T]``.
            weights: Routing weights ``[B, T, E]`` or ``[B, T, G, E]`` per layer.
        """
        labels = labels.roll(-1, dims=1)
        labels[:, -1] = NOT_ASKED
        is_asked = labels != NOT_ASKED
        is_right = is_asked & (predicted == labels)
        columns = [torch.ones_like(is_asked), needs_full]
        columns += [is_asked & needs_full, is_right & needs_full]
        columns += [is_asked & ~needs_full, is_right & ~needs_full]
        layers = [self._is_on_full(*layer) for layer in zip(weights, self.is_full, strict=True)]
        for is_on_full in (torch.stack(layers).any(dim=0), *layers):
            columns += [is_on_full, is_on_full & needs_full]
        # counts of one row are exact in float32, which all devices have
        return torch.stack([column.sum(dim=1) for column in columns], dim=1).float()

    def add(self, *batch: Any) -> None:
        """Count one batch; arguments as :meth:`count`."""
        self.sums += self.count(*batch).sum(dim=0).cpu()

    def result(self) -> TaskResult:
        """Figures over every token counted so far."""
        return self.result_of(self.sums)

    def result_of(self, sums: Tensor) -> TaskResult:
        """Figures from sums as :meth:`count` gives them, added up elsewhere."""
        tokens, need, far, far_right, near, near_right, *on_full = sums.tolist()
        anywhere, *layers = (
            NeedOfLayer(full / tokens, _ratio(hits, full), _ratio(hits, need))
            for full, hits in zip(on_full[::2], on_full[1::2], strict=True)
        )
        return TaskResult(
            num_tokens=int(tokens),
            num_asked=int(far + near),
            accuracy=(far_right + near_right) / (far + near),
            far_accuracy=_ratio(far_right, far),
            near_accuracy=_ratio(near_right, near),
            need_share=need / tokens,
            any_layer=anywhere,
            layers=layers,
        )

    def _is_on_full(self, weights: Tensor, is_full: Tensor) -> Tensor:
        """[B, T] bool."""
        top, expert = weights.max(dim=-1)
        # without any weight a token passed the block by
        is_on_full = is_full.to(weights.device)[expert] & (top > 0.0)
        return is_on_full.any(dim=2) if is_on_full.dim() == 3 else is_on_full


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
