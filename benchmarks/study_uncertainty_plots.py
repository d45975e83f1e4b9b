"""Figures of what uncertainty knows, as PNG and SVG."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def draw(scale: str, rows: Sequence[Row], repeated: dict[str, list[Row]], out: Path) -> None:
    """Every figure there is something to show in; none without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no figures: matplotlib is not installed; run report where it is")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    routed = [row for row in rows if row.get("hurts")]
    # the others have tokens that pass blocks by
    complete = [row for row in routed if row["adaptive"]]
    figures = {"shift": draw_shift(plt, rows)}
    if routed:
        figures |= {
            "hurts": draw_hurts(plt, routed),
            "emergence": draw_emergence(plt, routed),
        }
    if complete:
        figures |= {
            "classes": draw_classes(plt, complete),
            "adaptive": draw_adaptive(plt, complete),
        }
    if repeated:
        figures["repeat"] = draw_repeat(plt, repeated)
    for name, figure in figures.items():
        for kind in ("png", "svg"):
            figure.savefig(out / f"uncertainty-{name}-{scale}.{kind}", dpi=150)
        plt.close(figure)
    print(f"written: {out}/uncertainty-{{{','.join(figures)}}}-{scale}.png and .svg")


def draw_hurts(plt: Any, rows: Sequence[Row]) -> Any:
    """AUROC of every signal, layer by layer, where hard routing hurts."""
    definitions = list(rows[0]["hurts"]["soft"]["definitions"])
    figure, axes = plt.subplots(
        2, len(definitions), figsize=(13, 8), sharey=True, layout="constrained", squeeze=False
    )
    for line, against in enumerate(("soft", "full")):
        for column, definition in enumerate(definitions):
            known = [row for row in rows if row["hurts"][against]]
            found = [row["hurts"][against]["definitions"][definition] for row in known]
            scores = [
                {s: one["signals"][s].get("mean") for s in one["signals"]}
                | {"predictive entropy": one["baselines"]["predictive entropy"]}
                for one in found
            ]
            _dots(axes[line][column], known, scores)
            axes[line][column].set_title(f"harm against {against}: {definition}", fontsize=9)
    axes[0][0].set_ylabel("AUROC, mean over layers")
    axes[0][-1].legend(fontsize=6)
    return figure


def draw_shift(plt: Any, rows: Sequence[Row]) -> Any:
    """AUROC of every signal and of what needs no router, for each foreign text."""
    names = list(dict.fromkeys(name for row in rows for name in row["shift"]))
    figure, axes = plt.subplots(
        2,
        len(names),
        figsize=(5 * len(names), 8),
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    for line, level in enumerate(("sequence", "token")):
        for column, name in enumerate(names):
            known = [row for row in rows if name in row["shift"]]
            found = [row["shift"][name][level] for row in known]
            scores = [
                {s: one["signals"][s].get("mean") for s in one["signals"]} | one["baselines"]
                for one in found
            ]
            _dots(axes[line][column], known, scores)
            axes[line][column].set_title(f"{name}, by {level}", fontsize=9)
        axes[line][0].set_ylabel("AUROC")
    axes[0][-1].legend(fontsize=6)
    return figure


def _dots(axis: Any, rows: Sequence[Row], scores: Sequence[dict[str, Row | None]]) -> None:
    """A group of dots for each score, one for each row."""
    names = list(dict.fromkeys(chain.from_iterable(scores)))
    names.sort(key=lambda name: sum(name not in one for one in scores) > 0, reverse=True)
    for index, (row, of_row) in enumerate(zip(rows, scores, strict=True)):
        shift = 0.8 * ((index + 0.5) / len(rows) - 0.5)
        known = [(at, one) for at, name in enumerate(names) if (one := of_row.get(name))]
        axis.errorbar(
            [at + shift for at, _ in known],
            [one["mean"] for _, one in known],
            yerr=[one["interval"] or 0.0 for _, one in known],
            fmt="o",
            ms=3,
            capsize=2,
            label=row["label"],
        )
    axis.axhline(0.5, color="tab:gray", lw=0.8)
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=7)
    axis.grid(alpha=0.3, axis="y")


def draw_classes(plt: Any, rows: Sequence[Row]) -> Any:
    """Lift of every class, as colour."""
    families = [row["classes"]["families"] for row in rows]
    labels = [
        (family, label)
        for family in families[0]
        for label in dict.fromkeys(k for of_row in families for k in of_row[family]["classes"])
    ]
    lifts = [
        [
            ((of_row[family]["classes"].get(label) or {}).get("lift") or {}).get("mean")
            for of_row in families
        ]
        for family, label in labels
    ]
    figure, axis = plt.subplots(
        figsize=(4 + 0.7 * len(rows), 1.5 + 0.22 * len(labels)), layout="constrained"
    )
    values = [[float("nan") if lift is None else lift for lift in line] for line in lifts]
    image = axis.imshow(values, cmap="coolwarm", vmin=0.0, vmax=2.0, aspect="auto")
    axis.set_xticks(range(len(rows)), [row["label"] for row in rows], rotation=60, ha="right")
    axis.set_yticks(range(len(labels)), [f"{family}: {label}" for family, label in labels])
    axis.tick_params(labelsize=7)
    for y, line in enumerate(lifts):
        for x, lift in enumerate(line):
            if lift is not None:
                axis.text(x, y, f"{lift:.2f}", ha="center", va="center", fontsize=5)
    figure.colorbar(image, ax=axis, label="share of full over its mean")
    return figure


def draw_adaptive(plt: Any, rows: Sequence[Row]) -> Any:
    """Nats that the routes of others cost."""
    swaps = [swap for swap in rows[0]["adaptive"] if swap != "own"]
    figure, axis = plt.subplots(figsize=(10, 5), layout="constrained")
    for index, swap in enumerate(swaps):
        costs = [row["adaptive"][swap]["cost"] for row in rows]
        axis.bar(
            [at + 0.8 * (index / len(swaps) - 0.5) for at in range(len(rows))],
            [cost["mean"] for cost in costs],
            width=0.8 / len(swaps),
            yerr=[cost["interval"] or 0.0 for cost in costs],
            capsize=2,
            align="edge",
            label=f"routes: {swap}",
        )
    axis.axhline(0.0, color="black", lw=0.8)
    axis.set_xticks(range(len(rows)), [row["label"] for row in rows], rotation=30, ha="right")
    axis.set_ylabel("loss above that of a token's own routes, nats")
    axis.tick_params(labelsize=7)
    axis.legend(fontsize=7)
    return figure


def draw_emergence(plt: Any, rows: Sequence[Row]) -> Any:
    """Routing entropy, cost and loss over the steps."""
    kinds = {
        "routing_entropy": "routing entropy, percent",
        "believed_cost": "cost of routed layers, share of full",
        "loss": "training loss, nats per token",
    }
    figure, axes = plt.subplots(1, len(kinds), figsize=(15, 4.5), layout="constrained")
    for axis, (kind, label) in zip(axes, kinds.items(), strict=True):
        for row in rows:
            curves = row["emergence"]["curves"]
            # runs of unequal length have no common curve
            if curves["step"] and curves.get(kind):
                steps = [point["mean"] for point in curves["step"]]
                axis.plot(steps, [p["mean"] for p in curves[kind]], lw=1, label=row["label"])
        axis.set_xlabel("step")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[-1].legend(fontsize=6)
    return figure


def draw_repeat(plt: Any, groups: dict[str, list[Row]]) -> Any:
    """Validation loss and adaptivity against how often the text was repeated."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    labels = {
        "validation_loss": "validation loss, nats per token",
        "adaptivity": "adaptivity, nats",
    }
    for axis, (key, label) in zip(axes, labels.items(), strict=True):
        for name, rows in groups.items():
            known = [row for row in rows if row[key]]
            axis.errorbar(
                [row["repeat"] for row in known],
                [row[key]["mean"] for row in known],
                yerr=[row[key]["interval"] or 0.0 for row in known],
                marker="o",
                capsize=2,
                label=name,
            )
        axis.set_xscale("log", base=2)
        axis.set_xlabel("repetitions of the text, in equal steps")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    return figure
