"""Results of the study: means over seeds with 95% intervals, and the frontier they form."""

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from study_run import RESULT, TIMING
from study_variants import find_variant, place_of

from meta_attention.errors import DataError
from meta_attention.evaluation.statistics import Figure

Row = dict[str, Any]


def report(runs: Path) -> dict[str, list[Row]]:
    """Print a table per scale, write ``report.json`` and ``frontier-SCALE.png``."""
    rows = summarise(read_results(runs))
    for scale, of_scale in rows.items():
        print_table(scale, of_scale)
        draw_frontier(of_scale, runs / f"frontier-{scale}.png")
    (runs / "report.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"written: {runs / 'report.json'}")
    return rows


def read_results(runs: Path) -> list[Row]:
    """Of all finished runs, with the times measured alone where there are any."""
    results = []
    for path in sorted(runs.glob(f"*/{RESULT}")):
        timing = path.with_name(TIMING)
        times = json.loads(timing.read_text()) if timing.exists() else {}
        results.append(json.loads(path.read_text()) | {"timing": times})
    if not results:
        raise DataError(f"a folder of runs must have a finished one, but {runs} has none")
    return results


def summarise(results: Sequence[Row]) -> dict[str, list[Row]]:
    """A row per variant for each scale, in the order of the variants."""
    groups: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        groups[result["scale"]][result["variant"]].append(result)
    tables = {}
    for scale, variants in groups.items():
        rows = [_row(name, variants[name]) for name in sorted(variants, key=place_of)]
        _compare_with_static(rows)
        tables[scale] = rows
    return tables


def _row(name: str, runs: Sequence[Row]) -> Row:
    def figure(values: Sequence[float | None]) -> Row | None:
        found = Figure.of(values)
        return None if found is None else found.to_dict()

    texts = runs[0]["words"]
    prefills = {key for run in runs for key in run["timing"] if key.startswith("prefill")}
    return {
        "variant": name,
        "is_routed": find_variant(name).is_routed,
        "seeds": sorted(run["seed"] for run in runs),
        "parameters": runs[0]["parameters"],
        "tokens": runs[0]["tokens"],
        "loss": figure([run["hard"]["loss"] for run in runs]),
        "soft_gap": figure([run["hard"]["loss"] - run["soft"]["loss"] for run in runs]),
        "attention_flops": figure([run["hard"]["attention_flops"] for run in runs]),
        "adaptivity": figure([run["hard"]["routing"]["adaptivity"] for run in runs]),
        "collapsed_layers": figure(
            [sum(map(len, run["hard"]["routing"]["collapsed_layers"].values())) for run in runs]
        ),
        "loss_by_position": {
            bucket: figure([run["hard"]["loss_by_position"][bucket] for run in runs])
            for bucket in runs[0]["hard"]["loss_by_position"]
        },
        "long_loss_by_position": {
            bucket: figure([run["long"]["loss_by_position"][bucket] for run in runs])
            for bucket in runs[0].get("long", {}).get("loss_by_position", {})
        },
        "word_perplexity": {
            text: figure([run["words"][text]["word_perplexity"] for run in runs]) for text in texts
        },
        "step_ms": figure([run["timing"].get("step_ms") for run in runs]),
        "step_ms_side_by_side": figure([run["step_ms"] for run in runs]),
        "prefill_ms": {
            key.rpartition("_")[2]: figure([run["timing"].get(key) for run in runs])
            for key in sorted(prefills)
        },
    }


def _compare_with_static(rows: list[Row]) -> None:
    """How far each loss is from the line through the static variants at the same FLOPs."""
    static = sorted(
        (row["attention_flops"]["mean"], row["loss"]["mean"])
        for row in rows
        if not row["is_routed"]
    )
    for row in rows:
        at = row["attention_flops"]["mean"]
        expected = _interpolate(static, at) if row["is_routed"] else None
        row["beyond_static"] = None if expected is None else row["loss"]["mean"] - expected


def _interpolate(points: Sequence[tuple[float, float]], at: float) -> float | None:
    """Between the neighbours of ``at``; None outside."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= at <= x1:
            return y0 + (at - x0) / max(x1 - x0, 1e-12) * (y1 - y0)
    return None


def print_table(scale: str, rows: Sequence[Row]) -> None:
    table = Table(title=f"{scale}: mean over seeds +- half of the 95% interval")
    texts = list(rows[0]["word_perplexity"])
    columns = ["variant", "seeds", "M params", "loss", "vs static", "hard - soft", "attn FLOPs"]
    columns += ["adaptivity", "collapsed", "step ms", *(f"{text} word ppl" for text in texts)]
    for column in columns:
        table.add_column(column, justify="left" if column == "variant" else "right")
    for row in rows:
        beyond = row["beyond_static"]
        # a time that was not measured alone is no time of the variant's own
        step = _cell(row["step_ms"], 1) if row["step_ms"] else "not timed"
        table.add_row(
            row["variant"],
            str(len(row["seeds"])),
            f"{row['parameters'] / 1e6:.2f}",
            _cell(row["loss"], 4),
            "-" if beyond is None else f"{beyond:+.4f}",
            _cell(row["soft_gap"], 4),
            _cell(row["attention_flops"], 3),
            _cell(row["adaptivity"], 3),
            _cell(row["collapsed_layers"], 1),
            step,
            *(_cell(row["word_perplexity"][text], 1) for text in texts),
        )
    Console(width=200).print(table)


def _cell(figure: Row | None, digits: int) -> str:
    if figure is None:
        return "-"
    half = figure["interval"]
    return f"{figure['mean']:.{digits}f}" + ("" if half is None else f" +-{half:.{digits}f}")


def draw_frontier(rows: Sequence[Row], path: Path) -> None:
    """Loss against counted FLOPs and against the measured time of a step."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed; run report where it is")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(13, 5.5), sharey=True, layout="constrained")
    is_alone = all(row["step_ms"] for row in rows)
    time = "step_ms" if is_alone else "step_ms_side_by_side"
    labels = {
        "attention_flops": "counted attention FLOPs, share of full attention",
        time: f"training step, ms ({'alone' if is_alone else 'side by side'} on the device)",
    }
    for axis, (key, label) in zip(axes, labels.items(), strict=True):
        for row in rows:
            x, y = row[key], row["loss"]
            axis.errorbar(
                x["mean"],
                y["mean"],
                xerr=x["interval"] or 0.0,
                yerr=y["interval"] or 0.0,
                fmt="o" if row["is_routed"] else "s",
                color="tab:blue" if row["is_routed"] else "tab:gray",
                capsize=2,
            )
            at = (x["mean"], y["mean"])
            axis.annotate(row["variant"], at, xytext=(4, 4), textcoords="offset points", fontsize=6)
        static = sorted((r[key]["mean"], r["loss"]["mean"]) for r in rows if not r["is_routed"])
        axis.plot([x for x, _ in static], [y for _, y in static], color="tab:gray", lw=0.8)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("validation loss, nats per token")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"written: {path}")
