"""The best static choice of an expert for every head, of all choices that there are.

A small model has few heads: with three experts for eight of them there are 6,561 static models, and
each can be run. What is left of them is the frontier: the least divergence from the base that a
choice which does not see the token can have at its cost. Routes that do see it are worth something
where they are below.

Shapes: B batch, T sequence.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

from meta_attention.adapt import collect_routing, routed_as, routers_of
from meta_attention.adapt.training.divergence import Predictor, compare_predictions
from meta_attention.evaluation.adapted_flops import count_adapted, executed_routes

Choice = tuple[tuple[str, ...], ...]
"""Names of experts, by layer and key-value head."""


@dataclass(frozen=True, slots=True)
class Point:
    """What a choice costs, as a share of the base's attention FLOPs, and its divergence in nats."""

    choice: Choice
    attention_share: float
    divergence: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class ComparedModel:
    """An adapted model and text that its base has been run on once: what other routes come to.

    Args:
        model: Adapted with routes per key-value head.
        text: Tokens ``[B, T]``.
    """

    def __init__(self, model: PreTrainedModel, text: Tensor) -> None:
        self.model, self.text = model.eval(), text
        self.routers = routers_of(model)
        self.predictor = Predictor(model)
        with torch.no_grad(), routed_as(model, "full"):
            self.base = self.predictor.run(model, text)

    def choices(self) -> list[Choice]:
        """All of them."""
        config = self.routers[0].adaptation.config
        heads = config.num_key_value_heads
        by_layer = itertools.product(self.routers[0].expert_names, repeat=heads)
        return list(itertools.product(list(by_layer), repeat=len(self.routers)))

    def measure(self, choice: Choice) -> Point:
        layers = (router.layer_idx for router in self.routers)
        with routed_as(self.model, dict(zip(layers, choice, strict=True))):
            return Point(choice, *self.measure_routes())

    @torch.no_grad()
    def measure_routes(self) -> tuple[float, float]:
        """Cost and divergence of whatever routes are in force."""
        with collect_routing(self.model) as record:
            routed = self.predictor.run(self.model, self.text)
        B, T = self.text.shape
        counted = count_adapted(self.model, executed_routes(record), batch=B, length=T)
        compared = compare_predictions(self.predictor, routed, self.base, self.text)
        return counted.attention_share, compared[..., 0].double().mean().item()


def search(few: ComparedModel, many: ComparedModel, *, keep: float) -> list[Point]:
    """The frontier: every choice on a little text, the best of them on more.

    Args:
        few: On a little text.
        many: On more text, which the frontier is that of.
        keep: Share of the choices to measure on more text, those least above the first frontier.
    """
    choices = few.choices()
    points = [few.measure(c) for c in track(choices, f"{len(choices)} static choices")]
    first = frontier(points)
    above = [p.divergence - divergence_at(first, p.attention_share) for p in points]
    order = sorted(range(len(points)), key=above.__getitem__)
    kept = order[: max(1, round(keep * len(points)))]
    return frontier([many.measure(choices[i]) for i in track(kept, f"the best {len(kept)}")])


def frontier(points: Sequence[Point]) -> list[Point]:
    """The lower convex hull, the cheapest first: choices, and mixtures of two of them, at best."""
    hull: list[Point] = []
    for point in sorted(points, key=lambda p: (p.attention_share, p.divergence)):
        if hull and point.divergence >= hull[-1].divergence:
            continue
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull


def _is_above(middle: Point, left: Point, right: Point) -> bool:
    """Whether a point is no better than the line between its neighbours."""
    return middle.divergence >= _on_line(left, right, middle.attention_share)


def _on_line(left: Point, right: Point, share: float) -> float:
    part = (share - left.attention_share) / (right.attention_share - left.attention_share)
    return left.divergence + part * (right.divergence - left.divergence)


def divergence_at(points: Sequence[Point], share: float) -> float:
    """What a frontier has at a cost; beyond its ends, what it has there."""
    for left, right in itertools.pairwise(points):
        if left.attention_share <= share <= right.attention_share:
            return _on_line(left, right, share)
    return points[0 if share < points[0].attention_share else -1].divergence
