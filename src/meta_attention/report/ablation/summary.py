"""Runs reduced over seeds: one row per variant, every figure with its interval."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from meta_attention.evaluation.statistics import Figure
from meta_attention.report.ablation.read import Ablation, Row, Run

# perplexities are given relative to this one's, seed by seed
REFERENCE = "prior-free"
# and hard losses as a distance to this one's, likewise
RECIPE = "recommended"

Read = Callable[[Row], float | None]


def _forced(mode: str, name: str) -> Read:
    return lambda result: result[mode].get("forced", {}).get(name)


def _collapses(kind: str) -> Read:
    return lambda result: float(len(result["soft"]["collapsed_layers"][kind]))


def _uncertainty(signal: str) -> Read:
    def read(result: Row) -> float | None:
        layers = result["soft"]["uncertainty"].get(signal, {})
        return sum(layers.values()) / len(layers) if layers else None

    return read


FIGURES: dict[str, Read] = {
    "loss": lambda r: r["soft"]["loss"],
    "perplexity": lambda r: r["soft"]["perplexity"],
    "hard_loss": lambda r: r["hard"]["loss"],
    "hard_perplexity": lambda r: r["hard"]["perplexity"],
    "routing_entropy": lambda r: r["soft"]["routing_entropy"],
    "projected_cost": lambda r: 100.0 * r["soft"]["projected_cost"],
    "hard_cost": lambda r: 100.0 * r["hard"]["projected_cost"],
    "attention_flops": lambda r: 100.0 * r["hard"]["flops"]["attention"],
    "layer_flops": lambda r: 100.0 * r["hard"]["flops"]["layer"],
    "model_flops": lambda r: 100.0 * r["hard"]["flops"]["model"],
    "soft_attention_flops": lambda r: 100.0 * r["soft"]["flops"]["attention"],
    "adaptivity": lambda r: r["soft"]["adaptivity"],
    "hard_adaptivity": lambda r: r["hard"]["adaptivity"],
    "expert_collapses": _collapses("expert"),
    "prior_collapses": _collapses("prior"),
    "kl": lambda r: r["soft"]["kl"],
    "uncertainty": _uncertainty("entropy"),
    "mutual_information": _uncertainty("mutual_information"),
    "mean_entropy": _uncertainty("mean_entropy"),
    "ece": lambda r: r["soft"]["ece"],
    "hard_ece": lambda r: r["hard"]["ece"],
    "routing_ece": _forced("soft", "routing_ece"),
    "regret": _forced("soft", "regret"),
    "hard_regret": _forced("hard", "regret"),
    "static_regret": _forced("hard", "static_regret"),
}


@dataclass(frozen=True)
class Summary:
    """A variant over its seeds."""

    variant: str
    title: str
    value: float | str | None
    is_static: bool
    seeds: tuple[int, ...]
    parameters: int
    figures: Mapping[str, Figure | None]

    def __getitem__(self, name: str) -> Figure | None:
        return self.figures[name]

    def to_dict(self) -> dict[str, Any]:
        return {
            "variant": self.variant,
            "title": self.title,
            "value": self.value,
            "is_static": self.is_static,
            "seeds": list(self.seeds),
            "parameters": self.parameters,
            **{k: None if f is None else f.to_dict() for k, f in self.figures.items()},
        }


def summarise(ablation: Ablation, experiment: str) -> list[Summary]:
    """A row per variant of an experiment, in its order."""
    values = ablation.plan["experiments"].get(experiment, {"variants": {}})["variants"]
    return [_summary(ablation, name, values[name]) for name in ablation.variants_of(experiment)]


def _summary(ablation: Ablation, name: str, value: float | str | None) -> Summary:
    runs = ablation.by_variant[name]
    first = runs[0].result
    figures = {key: Figure.of([read(run.result) for run in runs]) for key, read in FIGURES.items()}
    is_static = first["is_static"]
    for mode in ("soft", "hard"):
        key = "relative_perplexity" if mode == "soft" else "hard_relative_perplexity"
        both = paired(ablation, name, REFERENCE)
        figures[key] = Figure.of(
            [a[mode]["perplexity"] / b[mode]["perplexity"] - 1.0 for a, b in both]
        )
    figures["beyond_recommended"] = Figure.of(
        [a["hard"]["loss"] - b["hard"]["loss"] for a, b in paired(ablation, name, RECIPE)]
    )
    if is_static:
        # nothing is routed, so nothing can collapse
        figures |= {"expert_collapses": None, "prior_collapses": None}
    return Summary(
        name,
        first["title"],
        value,
        is_static,
        tuple(run.seed for run in runs),
        first["parameters"],
        figures,
    )


def paired(ablation: Ablation, name: str, other: str) -> list[tuple[Row, Row]]:
    """Results of two variants, seed by seed, where both have one."""
    others = {run.seed: run.result for run in ablation.by_variant.get(other, [])}
    return [
        (run.result, others[run.seed])
        for run in ablation.by_variant.get(name, [])
        if run.seed in others
    ]


def beyond_static(rows: Sequence[Summary]) -> dict[str, float]:
    """How far the hard loss of each routed variant is from the line of the static ones.

    The line goes through the static variants that no other static one beats, at their counted
    attention operations; below 0 is better than any static mixture at the same cost. Variants
    beyond its ends are left out.
    """
    static = frontier(
        [
            (row["attention_flops"].mean, row["hard_loss"].mean)  # type: ignore[union-attr]
            for row in rows
            if row.is_static
        ]
    )
    found = {}
    for row in rows:
        cost, loss = row["attention_flops"], row["hard_loss"]
        assert cost is not None
        assert loss is not None
        expected = interpolate(static, cost.mean)
        if not row.is_static and expected is not None:
            found[row.variant] = loss.mean - expected
    return found


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both coordinates, from cheap to dear."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not kept or y < kept[-1][1]:
            kept.append((x, y))
    return kept


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float | None:
    """Between the neighbours of ``at``; None outside."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= at <= x1:
            return y0 + (at - x0) / max(x1 - x0, 1e-12) * (y1 - y0)
    return None


def mean_curve(
    runs: Sequence[Run], read: Callable[[Row], float | None]
) -> list[tuple[int, Figure]]:
    """A figure over training: steps and means over seeds, where it is known."""
    by_step: dict[int, list[float | None]] = {}
    for run in runs:
        for row in run.curve:
            by_step.setdefault(row["step"], []).append(read(row))
    found = []
    for step, values in sorted(by_step.items()):
        figure = Figure.of(values)
        if figure is not None:
            found.append((step, figure))
    return found


@dataclass(frozen=True, slots=True)
class Drop:
    """The largest fall of the routing entropy between two moments of training."""

    step: int
    """When it was over."""
    share: float
    """Percent of the whole fall, from the highest value to the last; 0 if there is none."""


def largest_drop(curve: Sequence[Row]) -> Drop | None:
    """Of a run's routing entropy on held-out text; None where it is not known."""
    entropies = [row["soft"]["routing_entropy"] for row in curve]
    if len(entropies) < 2 or None in entropies:
        return None
    begin = entropies.index(max(entropies))
    fall = entropies[begin] - entropies[-1]
    drops = [a - b for a, b in pairwise(entropies)]
    largest = max(range(len(drops)), key=drops.__getitem__)
    # less than a point is no transition
    share = 100.0 * max(drops[begin:]) / fall if fall > 1.0 else 0.0
    return Drop(curve[largest + 1]["step"], share)
