"""Figures of the further experiments."""

from collections.abc import Iterator, Sequence

from meta_attention.report.ablation.drawing import (
    COLOURS,
    SIGNALS,
    Panel,
    add_legend,
    colour_of,
    draw_curve,
    make_axes,
    marker_of,
)
from meta_attention.report.ablation.further import (
    NOISE,
    REPEATED,
    entropy_drops,
    gate_points,
    gradient_noise,
)
from meta_attention.report.ablation.read import Ablation
from meta_attention.report.ablation.summary import mean_curve, summarise


def draw_gates(ablation: Ablation, names: Sequence[str]) -> Iterator[Panel]:
    for variant in names:
        gates = gate_points(ablation, variant)
        if not gates:
            continue
        figure, axes = make_axes("counted attention FLOPs, % of full", "held-out loss, nats")
        for index, (signal, points) in enumerate(gates.items()):
            xs = [100.0 * point["attention_flops"] for point in points]
            ys = [point["loss"] for point in points]
            axes.plot(
                xs,
                ys,
                color=colour_of(index),
                marker=marker_of(index),
                ms=3.5,
                lw=1,
                label=SIGNALS[signal].split(",")[0],
            )
        add_legend(axes)
        yield Panel(
            f"threshold-{variant}",
            f"{variant}: gated by each uncertainty",
            "One line per signal that can decide. Left end: every token takes one expert; right "
            "end: every token mixes all of them, which costs more than full attention alone. A "
            "signal is of use where its line is low on the left.",
            figure,
        )


def draw_sweep(ablation: Ablation, experiment: str) -> Iterator[Panel]:
    rows = summarise(ablation, experiment)
    axis = ablation.plan["experiments"][experiment]["axis"]
    labels = [str(row.variant if row.value is None else row.value) for row in rows]
    for key, label in (
        ("perplexity", "perplexity, routed softly"),
        ("projected_cost", "projected cost, %"),
        ("adaptivity", "adaptivity, nats"),
    ):
        figure, axes = make_axes(axis or "", label)
        known = [(i, row[key]) for i, row in enumerate(rows) if row[key] is not None]
        axes.errorbar(
            [i for i, _ in known],
            [f.mean for _, f in known if f],
            yerr=[f.interval or 0.0 for _, f in known if f],
            # without an axis there is nothing between two variants
            fmt="o-" if axis else "o",
            color=COLOURS[0],
            capsize=2,
            lw=1,
        )
        rotation = 45 if max(map(len, labels)) > 6 else 0
        axes.set_xticks(
            range(len(labels)), labels, rotation=rotation, ha="right" if rotation else "center"
        )
        yield Panel(
            f"{experiment}-{key.replace('_', '-')}",
            label.split(",")[0].capitalize(),
            "Mean over seeds with the 95% interval; everything else as in the paper.",
            figure,
        )


def draw_gradients(ablation: Ablation) -> Iterator[Panel]:
    for variant in ablation.variants_of("gradient-variance"):
        noise = gradient_noise(ablation, variant)
        if not noise:
            continue
        figure, axes = make_axes("step", "noise / norm of the mean gradient")
        for index, (kind, layers) in enumerate(noise.items()):
            for layer, ratios in enumerate(layers):
                axes.plot(
                    list(ratios),
                    list(ratios.values()),
                    color=colour_of(index),
                    ls="-" if layer == 0 else "--",
                    marker="o",
                    ms=3,
                    lw=1,
                    label=NOISE[kind] if layer == 0 else None,
                )
        axes.set_yscale("log")
        add_legend(axes)
        yield Panel(
            f"gradients-{variant}",
            variant.removesuffix("-gradients"),
            "Standard deviation of the controller's gradient between batches, and between draws of "
            "routes on one batch, over the norm of the mean gradient. Dashed: the second layer.",
            figure,
        )


def draw_repetition(ablation: Ablation) -> Iterator[Panel]:
    names = ablation.variants_of("repetition")
    yield from _draw_drops(ablation, names)
    for kind in REPEATED:
        own = [name for name in names if name.startswith(f"repetition-{kind}-")]
        if not own:
            continue
        figure, axes = make_axes("step", "routing entropy, %")
        for index, name in enumerate(own):
            curve = mean_curve(
                ablation.by_variant[name], lambda row: row["soft"]["routing_entropy"]
            )
            draw_curve(axes, curve, f"{name.rpartition('-')[2]} times", index)
        add_legend(axes)
        yield Panel(
            f"repetition-{kind}",
            f"{kind}: entropy by how often the text is seen",
            "Equal steps; the less text, the more often it is seen. If repetition brought the "
            "transition forward, lines of more repeats would fall earlier.",
            figure,
        )


def _draw_drops(ablation: Ablation, names: Sequence[str]) -> Iterator[Panel]:
    """When the routing entropy falls most, by how often the text is seen."""
    values = ablation.plan["experiments"]["repetition"]["variants"]
    figure, axes = make_axes("times the text is seen", "step")
    for index, kind in enumerate(REPEATED):
        drops = entropy_drops(ablation, kind)
        if drops:
            axes.errorbar(
                list(drops),
                [step.mean for step, _ in drops.values()],
                yerr=[step.interval or 0.0 for step, _ in drops.values()],
                fmt="o-",
                color=colour_of(index),
                capsize=2,
                lw=1,
                label=kind,
            )
    axes.set_xscale("log", base=2)
    seen = sorted({values[name] for name in names})
    axes.set_xticks(seen, [f"{value:g}" for value in seen])
    add_legend(axes)
    yield Panel(
        "repetition-drop",
        "When routing entropy falls most",
        "The end of the interval, of twenty, in which it falls most. If repetition brought "
        "routing forward, lines would go down to the right.",
        figure,
    )
