"""Cost against quality: every variant a point with its name."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from meta_attention.report.ablation.drawing import (
    Panel,
    add_legend,
    colour_of,
    make_axes,
    sample_of,
)
from meta_attention.report.ablation.labels import place_labels
from meta_attention.report.ablation.summary import Summary, frontier


def draw_frontiers(rows: Sequence[Summary]) -> Iterator[Panel]:
    for name, x, y, x_label, title, caption in (
        (
            "frontier",
            "attention_flops",
            "hard_loss",
            "counted attention FLOPs, % of full attention",
            "Routed hard: loss against counted FLOPs",
            "Every variant with one expert per token, as it would run cheaply. Static variants use "
            "the same expert for every token of a layer. The grey line joins those of them that no "
            "other static one beats in both cost and loss: a routed variant is worth having where "
            "it is below that line.",
        ),
        (
            "projected",
            "projected_cost",
            "loss",
            "projected cost, % of full attention (paper's costs)",
            "Routed softly: loss against projected cost",
            "The paper's view: every token runs all experts and mixes them by weight. The cost is "
            "not measured; it is what the weights would imply with the paper's fixed costs of 1 "
            "for full, 0.15 for linear and 0.30 for local attention.",
        ),
    ):
        both = [(row, row[x], row[y]) for row in rows]
        drawn = [(row, cost, loss) for row, cost, loss in both if cost and loss]
        figure, axes = make_axes(x_label, "held-out loss, nats per character", height=3.2)
        for row, cost, loss in drawn:
            axes.errorbar(
                cost.mean,
                loss.mean,
                xerr=cost.interval or 0.0,
                yerr=loss.interval or 0.0,
                fmt=_marker(row.is_static),
                color=colour_of(rows.index(row)),
                ms=6,
                capsize=2,
                lw=1,
            )
        best = frontier([(cost.mean, loss.mean) for row, cost, loss in drawn if row.is_static])
        axes.plot([a for a, _ in best], [b for _, b in best], color="#888888", lw=1, zorder=0)
        axes.margins(x=0.12, y=0.12)
        add_legend(
            axes,
            [
                sample_of("routed", marker=_marker(is_static=False)),
                sample_of("static", marker=_marker(is_static=True)),
                sample_of("best static ones", line="-"),
            ],
            columns=3,
        )
        points = [(cost.mean, loss.mean) for _, cost, loss in drawn]
        lines = list(pairwise(best))
        for _, cost, loss in drawn:
            lines.append(((cost.low, loss.mean), (cost.high, loss.mean)))
            lines.append(((cost.mean, loss.low), (cost.mean, loss.high)))
        place_labels(axes, points, [row.variant for row, _, _ in drawn], lines)
        yield Panel(name, title, caption, figure)


def _marker(is_static: bool) -> str:
    return "s" if is_static else "o"
