"""Results of the recall study: who solves it, and who gets full attention."""

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown

from meta_attention.errors import DataError

RESULT = "result.json"
Row = dict[str, Any]

# what a run is held to
LEAST_ACCURACY, LEAST_PRECISION, MOST_SPENT = 0.99, 0.95, 1.5

# the order of tables
ORDER = (
    "full",
    "local",
    "linear",
    "hybrid",
    "hybrid-full-first",
    "one-hot",
    "thompson",
    "argmax",
    "no-start",
    "empirical",
    "settled",
    "steered",
    "prior-free",
    "prior-free-steered",
    "paper",
)


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def report(runs: Path) -> dict[str, Any]:
    """Print a table; write ``recall.json``, ``recall.md`` and ``recall.png``."""
    rows = [figures_of(result) for result in read_results(runs)]
    summary: dict[str, Any] = {
        "targets": {
            "far_accuracy": LEAST_ACCURACY,
            "precision": LEAST_PRECISION,
            "full_share": f"at most {MOST_SPENT} x need_share",
        },
        "variants": summarise(rows),
        "runs": rows,
    }
    (runs / "recall.json").write_text(json.dumps(summary, indent=1) + "\n")
    table = to_markdown(summary["variants"])
    (runs / "recall.md").write_text(table)
    Console(width=180).print(Markdown(table))
    draw(rows, runs / "recall.png")
    print(f"written: {runs / 'recall.json'}, {runs / 'recall.md'}")
    return summary


def read_results(runs: Path) -> list[Row]:
    """Of all finished runs."""
    results = [json.loads(path.read_text()) for path in sorted(runs.glob(f"*/{RESULT}"))]
    if not results:
        raise DataError(f"a folder of runs must have a finished one, but {runs} has none")
    scales = {result["scale"] for result in results}
    if len(scales) > 1:
        raise DataError(
            f"runs of one report must be of one scale, but {runs} has {', '.join(sorted(scales))}; "
            "give each a folder of its own"
        )
    return results


def figures_of(result: Row) -> Row:
    """One level of figures of a run, with routes as executed: one expert per token."""
    hard, as_trained = result["hard"], result["as_trained"]
    on_full = hard["any_layer"]
    is_static = all(layer["is_static"] for layer in hard["layers"])
    spent = on_full["full_share"] / hard["need_share"]
    is_solved = hard["far_accuracy"] >= LEAST_ACCURACY
    is_precise = (on_full["precision"] or 0.0) >= LEAST_PRECISION and spent <= MOST_SPENT
    return {
        "variant": result["variant"],
        "seed": result["seed"],
        "scale": result["scale"],
        "steps": result["steps"],
        "seconds": result["seconds"],
        "device": result["device"],
        "accuracy": hard["accuracy"],
        "far_accuracy": hard["far_accuracy"],
        "near_accuracy": hard["near_accuracy"],
        "soft_far_accuracy": None if as_trained is None else as_trained["far_accuracy"],
        "need_share": hard["need_share"],
        "full_share_any": on_full["full_share"],
        "full_share": hard["full_share"],
        "spent": spent,
        "precision": on_full["precision"],
        "recall": on_full["recall"],
        "cost": hard["projected_cost"],
        "adaptivity": hard["adaptivity"],
        "kl": hard["kl"],
        "regret": result["regret"],
        "is_static": is_static,
        "is_solved": is_solved,
        "meets_targets": is_solved and is_precise,
        "layers": [
            {
                name: layer[name]
                for name in ("experts", "top_share", "full_share", "precision", "recall")
            }
            for layer in hard["layers"]
        ],
    }


def summarise(rows: Sequence[Row]) -> list[Row]:
    """A row per variant: figures by seed, and means over all seeds."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["variant"]].append(row)
    names = ("near_accuracy", "full_share_any", "spent", "precision", "recall", "cost")
    return [
        {
            "variant": name,
            "seeds": [row["seed"] for row in groups[name]],
            "far_accuracy": [row["far_accuracy"] for row in groups[name]],
            "solved": sum(row["is_solved"] for row in groups[name]),
            "meets_targets": sum(row["meets_targets"] for row in groups[name]),
            **{key: _mean([row[key] for row in groups[name]]) for key in (*names, "adaptivity")},
        }
        for name in sorted(groups, key=ORDER.index)
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def to_markdown(variants: Sequence[Row]) -> str:
    columns = ["variant", "recall by seed", "solved", "copies", "on full", "of need", "precision"]
    columns += ["recall of need", "cost", "adaptivity", "all targets"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in variants:
        count = len(row["seeds"])
        cells = [
            row["variant"],
            " ".join(f"{value:.2f}" for value in row["far_accuracy"]),
            f"{row['solved']}/{count}",
            _cell(row["near_accuracy"], ".3f"),
            _cell(row["full_share_any"], ".1%"),
            _cell(row["spent"], ".2f"),
            _cell(row["precision"], ".3f"),
            _cell(row["recall"], ".3f"),
            _cell(row["cost"], ".3f"),
            _cell(row["adaptivity"], ".3f"),
            f"{row['meets_targets']}/{count}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"One expert per token is executed. Solved: at least {LEAST_ACCURACY:.0%} of the far "
        "recalls are right. On full: tokens on full attention in any layer; of need: as a multiple "
        "of the tokens that need it. Precision: share of these that do; recall of need: share of "
        "those in need that are on it. Cost: of all layers, as the paper counts it. Means over "
        f"seeds. All targets: solved, precision at least {LEAST_PRECISION}, at most {MOST_SPENT} "
        "times the need.",
        "",
    ]
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Recall against the share of tokens on full attention, a point per run."""
    try:
        import matplotlib
    except ImportError:
        print("no figure: matplotlib is not installed; run report where it is")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    need = rows[0]["need_share"]
    axis.axvspan(need, MOST_SPENT * need, color="tab:green", alpha=0.15, lw=0)
    axis.axvline(need, color="tab:green", lw=0.8, label="tokens in need, to 1.5 times these")
    names = [name for name in ORDER if any(row["variant"] == name for row in rows)]
    for index, name in enumerate(names):
        own = [row for row in rows if row["variant"] == name]
        axis.plot(
            [max(row["full_share_any"], 1e-3) for row in own],
            [row["far_accuracy"] for row in own],
            "s" if own[0]["is_static"] else "o",
            color=f"C{index}",
            alpha=0.7,
            label=name,
        )
    axis.set_xscale("log")
    axis.set_xlabel("share of tokens on full attention in any layer (0.001: fewer)")
    axis.set_ylabel("accuracy of far recalls")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"written: {path}")
