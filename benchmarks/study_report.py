"""Results of the study: means over seeds with 95% intervals, and the frontier they form.

Several folders of runs may be given, such as two rounds. A seed is not the same run in both, so
what is compared seed by seed is compared within a folder.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from study_frontier import draw_frontier
from study_run import CONFIG, METRICS, RESULT, TIMING
from study_variants import REFERENCE, Scale, find_variant, place_of

from meta_attention.errors import DataError
from meta_attention.evaluation.statistics import Figure
from meta_attention.report.ablation.summary import frontier, interpolate

Row = dict[str, Any]
Key = tuple[str | None, int]


def report(folders: Sequence[Path]) -> dict[str, list[Row]]:
    """Print a table per scale, write ``report.json`` and ``frontier-SCALE.svg`` to the first."""
    rows = summarise([result for runs in folders for result in read_results(runs)])
    for scale, of_scale in rows.items():
        print_table(scale, of_scale)
        draw_frontier(of_scale, folders[0] / f"frontier-{scale}.svg")
    (folders[0] / "report.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"written: {folders[0] / 'report.json'}")
    return rows


def read_results(runs: Path) -> list[Row]:
    """Of all finished runs, with the times measured alone where there are any."""
    results = []
    for path in sorted(runs.glob(f"*/{RESULT}")):
        timing = path.with_name(TIMING)
        times = json.loads(timing.read_text()) if timing.exists() else {}
        others = {"timing": times, "folder": str(runs), "drawn": _while_drawn(path.parent)}
        results.append(json.loads(path.read_text()) | others)
    if not results:
        raise DataError(f"a folder of runs must have a finished one, but {runs} has none")
    return results


def _while_drawn(folder: Path) -> Row:
    """Training loss and entropy of beliefs in the last tenth of training in which routes are drawn.

    Later the largest weight is taken, and how certain it is no longer matters to the task.
    """
    scale = Scale.of_run(json.loads((folder / CONFIG).read_text())["settings"])
    end = scale.argmax_from * scale.steps
    rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    rows = [row for row in rows if end - 0.1 * scale.steps < row["step"] <= end]

    def mean(name: str) -> float | None:
        # runs of before it was logged do not have it
        found = Figure.of([row.get(name) for row in rows])
        return None if found is None else found.mean

    return {"loss": mean("loss"), "entropy": mean("routing_entropy")}


def summarise(results: Sequence[Row]) -> dict[str, list[Row]]:
    """A row per variant for each scale, in the order of the variants."""
    groups: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        groups[result["scale"]][result["variant"]].append(result)
    tables = {}
    for scale, variants in groups.items():
        rows = [_row(name, variants[name]) for name in sorted(variants, key=place_of)]
        _compare_with_static(rows, [run for runs in variants.values() for run in runs])
        tables[scale] = rows
    return tables


def _row(name: str, runs: Sequence[Row]) -> Row:
    def figure(values: Sequence[float | None]) -> Row | None:
        found = Figure.of(values)
        return None if found is None else found.to_dict()

    texts, is_routed = runs[0]["words"], find_variant(name).is_routed
    prefills = {key for run in runs for key in run["timing"] if key.startswith("prefill")}
    return {
        "variant": name,
        "is_routed": is_routed,
        "seeds": sorted(run["seed"] for run in runs),
        "parameters": runs[0]["parameters"],
        "tokens": runs[0]["tokens"],
        "loss": figure([run["hard"]["loss"] for run in runs]),
        "soft_gap": figure([run["hard"]["loss"] - run["soft"]["loss"] for run in runs]),
        "attention_flops": figure([run["hard"]["attention_flops"] for run in runs]),
        # runs of before it was counted do not have it
        "model_flops": figure([run["hard"].get("model_flops") for run in runs]),
        "adaptivity": figure([run["hard"]["routing"]["adaptivity"] for run in runs]),
        "entropy": figure([run["soft"]["routing"].get("routing_entropy") for run in runs]),
        "drawn_entropy": figure(
            [run["drawn"]["entropy"] if is_routed and "drawn" in run else None for run in runs]
        ),
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


def _compare_with_static(rows: list[Row], runs: Sequence[Row]) -> None:
    """How far each loss is from static variants', seed by seed: seeds differ by more than variants.

    Models of one seed that are routed in the hybrid's layers, or narrowed there, have the hybrid's
    beginning. ``beyond_static`` is the distance to the line through the static models of the seed
    that no cheaper one beats, at the same FLOPs; ``beyond_static_and_controller`` the same where
    the controllers' count as well; ``beyond_hybrid`` that to the hybrid as it is.
    """
    static: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    hybrids = {key_of(run): run for run in runs if run["variant"] == REFERENCE}
    for run in runs:
        if not find_variant(run["variant"]).is_routed:
            point = (run["hard"]["attention_flops"], run["hard"]["loss"])
            static[key_of(run)].append(point)
    for row in rows:
        own = [run for run in runs if run["variant"] == row["variant"]]
        lines = {
            "beyond_static": "attention_flops",
            "beyond_static_and_controller": "attention_and_controller_flops",
        }
        beyond: dict[str, list[float | None]] = {name: [] for name in (*lines, "beyond_hybrid")}
        for run in own:
            hard, of_run = run["hard"], key_of(run)
            for name, flops in lines.items():
                # runs of before it was counted do not have it
                at = hard.get(flops) if row["is_routed"] else None
                line = None if at is None else _static_loss(static[of_run], at)
                beyond[name].append(None if line is None else hard["loss"] - line)
            hybrid = None if row["variant"] == REFERENCE else hybrids.get(of_run)
            distance = None if hybrid is None else hard["loss"] - hybrid["hard"]["loss"]
            beyond["beyond_hybrid"].append(distance)
        for key, values in beyond.items():
            found = Figure.of(values)
            row[key] = None if found is None else found.to_dict()


def key_of(run: Row) -> Key:
    """What runs have in common that go on from one beginning: their folder and their seed."""
    return run.get("folder"), run["seed"]


def _static_loss(points: Sequence[tuple[float, float]], at: float) -> float | None:
    """On the line through those that no cheaper one beats; None below the cheapest."""
    best = frontier(points)
    if best and at >= best[-1][0]:
        return best[-1][1]
    return interpolate(best, at)


def print_table(scale: str, rows: Sequence[Row]) -> None:
    table = Table(title=f"{scale}: mean over seeds +- half of the 95% interval")
    texts = list(rows[0]["word_perplexity"])
    columns = [
        "variant",
        "seeds",
        "M params",
        "loss",
        "vs static",
        "+ controller",
        "vs 1:5",
        "hard - soft",
    ]
    columns += [
        "attn FLOPs",
        "all FLOPs",
        "adaptivity",
        "collapsed",
        "step ms",
        *(f"{text} word ppl" for text in texts),
    ]
    for column in columns:
        table.add_column(column, justify="left" if column == "variant" else "right")
    for row in rows:
        # a time that was not measured alone is no time of the variant's own
        step = _cell(row["step_ms"], 1) if row["step_ms"] else "not timed"
        table.add_row(
            row["variant"],
            str(len(row["seeds"])),
            f"{row['parameters'] / 1e6:.2f}",
            _cell(row["loss"], 4),
            _cell(row["beyond_static"], 4, sign="+"),
            _cell(row["beyond_static_and_controller"], 4, sign="+"),
            _cell(row["beyond_hybrid"], 4, sign="+"),
            _cell(row["soft_gap"], 4),
            _cell(row["attention_flops"], 3),
            _cell(row["model_flops"], 3),
            _cell(row["adaptivity"], 3),
            _cell(row["collapsed_layers"], 1),
            step,
            *(_cell(row["word_perplexity"][text], 1) for text in texts),
        )
    Console(width=200).print(table)


def _cell(figure: Row | None, digits: int, sign: str = "") -> str:
    if figure is None:
        return "-"
    half = figure["interval"]
    return f"{figure['mean']:{sign}.{digits}f}" + ("" if half is None else f" +-{half:.{digits}f}")
