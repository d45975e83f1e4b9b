"""Figures of the further experiments as numbers: what is committed, and what is drawn."""

from typing import Any

from meta_attention.evaluation.statistics import Figure
from meta_attention.report.ablation.read import Ablation
from meta_attention.report.ablation.summary import largest_drop

# what the gradient of a controller differs by
NOISE = {"data": "other batches", "sample": "Dirichlet samples", "one_hot": "drawn hard routes"}
REPEATED = ("bayesian", "prior-free")


def gate_points(ablation: Ablation, variant: str) -> dict[str, list[dict[str, float]]]:
    """Cost and loss at rising thresholds, by signal; means over seeds."""
    runs = ablation.by_variant[variant]
    of_runs = [run.result["gates"] for run in runs if run.result.get("gates")]
    found: dict[str, list[dict[str, float]]] = {}
    for signal in of_runs[0] if of_runs else ():
        at_thresholds = zip(*(gates[signal] for gates in of_runs), strict=True)
        found[signal] = [
            {
                name: sum(point[name] for point in points) / len(points)
                for name in ("hard_share", "attention_flops", "loss")
            }
            for points in at_thresholds
        ]
    return found


def gradient_noise(ablation: Ablation, variant: str) -> dict[str, list[dict[int, float]]]:
    """Noise over the norm of the mean gradient, by kind, layer and step; means over seeds."""
    runs = [run for run in ablation.by_variant[variant] if run.gradients]
    found: dict[str, list[dict[int, float]]] = {}
    for kind in NOISE if runs else ():
        layers = []
        for layer in range(len(runs[0].gradients[0]["layers"])):
            ratios: dict[int, list[float]] = {}
            for run in runs:
                for row in run.gradients:
                    figures = row["layers"][layer]
                    ratio = figures[f"{kind}_noise"] / max(figures["norm"], 1e-12)
                    ratios.setdefault(row["step"], []).append(ratio)
            layers.append({step: sum(r) / len(r) for step, r in sorted(ratios.items())})
        found[kind] = layers
    return found


def entropy_drops(ablation: Ablation, kind: str) -> dict[float, tuple[Figure, Figure]]:
    """When routing entropy falls most and how much of the fall that is, by times text is seen."""
    values = ablation.plan["experiments"]["repetition"]["variants"]
    found = {}
    for name in ablation.variants_of("repetition"):
        if not name.startswith(f"repetition-{kind}-"):
            continue
        drops = [largest_drop(run.curve) for run in ablation.by_variant[name]]
        step = Figure.of([None if drop is None else drop.step for drop in drops])
        share = Figure.of([None if drop is None else drop.share for drop in drops])
        if step is not None and share is not None:
            found[values[name]] = (step, share)
    return found


def further_record(ablation: Ablation) -> dict[str, Any]:
    """All of them, where they were run."""
    record: dict[str, Any] = {}
    if "threshold" in ablation.experiments:
        names = ablation.variants_of("threshold")
        record["gates"] = {name: gate_points(ablation, name) for name in names}
    if "gradient-variance" in ablation.experiments:
        names = ablation.variants_of("gradient-variance")
        record["gradient_noise"] = {name: gradient_noise(ablation, name) for name in names}
    if "repetition" in ablation.experiments:
        record["entropy_drops"] = {
            kind: [
                {"times": times, "step": step.to_dict(), "share_of_fall": share.to_dict()}
                for times, (step, share) in entropy_drops(ablation, kind).items()
            ]
            for kind in REPEATED
        }
    return record
