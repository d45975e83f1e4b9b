"""A variant against others at their FLOPs, also where these were run in another round.

Within a folder of runs, variants of a seed have a beginning in common and are compared seed by
seed. Two folders have beginnings of their own, and the same seed is another run in each: there,
distances to the hybrid are taken seed by seed, and then compared as two groups (Welch's interval).
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from study_report import Row, read_results
from study_variants import REFERENCE, find_variant

from meta_attention.errors import DataError
from meta_attention.evaluation.statistics import Figure, difference


def compare(
    runs: Path,
    variant: str,
    others: Sequence[str],
    other_runs: Path | None = None,
    *,
    seeds: Sequence[int] | None = None,
    reference: str = REFERENCE,
    path: Path | None = None,
) -> Row:
    """Print how a variant stands to each of the others, and its own runs; write them to a file.

    Args:
        runs: Folder with the variant and its hybrid.
        variant: What is compared.
        others: Variants it is compared with.
        other_runs: Folder of these and of their hybrid; None: the same.
        seeds: Of the variant, only these.
        reference: The static variant that distances are taken to, in place of the hybrid.
        path: File to write; None: none.
    """
    own = read_group(runs, variant, seeds, reference)
    is_paired = other_runs is None or other_runs.resolve() == runs.resolve()
    # seed by seed, what the others have besides is left out
    theirs = [run["seed"] for run in own] if is_paired else None
    found = [
        _stand(own, read_group(other_runs or runs, other, theirs, reference), other, is_paired)
        for other in others
    ]
    record = {
        "variant": variant,
        "reference": reference,
        "runs": own,
        "attention_flops": _mean(own, "attention_flops"),
        "against": found,
    }
    _print(record)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"written: {path}")
    return record


def read_group(
    runs: Path, variant: str, seeds: Sequence[int] | None, reference: str = REFERENCE
) -> list[Row]:
    """What is compared of a variant's runs, those of a seed beside the hybrid of that seed."""
    for name in (variant, reference):
        find_variant(name)  # raises where there is none of this name
    results = read_results(runs)
    hybrids = {result["seed"]: result for result in results if result["variant"] == reference}
    group = [
        _figures(result, hybrids[result["seed"]])
        for result in results
        if result["variant"] == variant
        and result["seed"] in hybrids
        and (seeds is None or result["seed"] in seeds)
    ]
    if not group:
        asked = "the same seed" if seeds is None else f"a seed of {', '.join(map(str, seeds))}"
        raise DataError(
            f"{runs} must have a finished run of {variant} and of {reference} with {asked}"
        )
    return group


def _figures(result: Row, hybrid: Row) -> Row:
    hard, soft, drawn = result["hard"], result["soft"], result["drawn"]
    routed = [layer for layer in hard["routing"]["layers"] if not layer["is_static"]]
    # of models that learn on with values, where it was measured
    first = result.get("with_first_values")
    return {
        "seed": result["seed"],
        "loss": hard["loss"],
        "hybrid_loss": hybrid["hard"]["loss"],
        "beyond_hybrid": hard["loss"] - hybrid["hard"]["loss"],
        "attention_flops": hard["attention_flops"],
        "attention_and_controller_flops": hard["attention_and_controller_flops"],
        "hybrid_flops": hybrid["hard"]["attention_flops"],
        "soft_gap": hard["loss"] - soft["loss"],
        "adaptivity": hard["routing"]["adaptivity"],
        "top_share": [layer["top_share"] for layer in routed],
        "adaptivity_by_expert": [layer["adaptivity_by_expert"] for layer in routed],
        "entropy": soft["routing"]["routing_entropy"],
        "drawn_entropy": drawn["entropy"],
        "drawn_beyond_hybrid": drawn["loss"] - hybrid["drawn"]["loss"],
        "first_values_beyond_hybrid": first and first["loss"] - hybrid["hard"]["loss"],
        "first_values_flops": first and first["attention_flops"],
    }


def _stand(own: list[Row], others: list[Row], name: str, is_paired: bool) -> Row:
    """How the variant's loss stands to another's, and to the line from that to the hybrid."""
    flops = "attention_flops"
    row: Row = {
        "other": name,
        "is_paired": is_paired,
        "seeds": [run["seed"] for run in others],
        "loss": _distance(own, others, 1.0, is_paired),
        "flops_ratio": _mean(own, flops) / _mean(others, flops),
        "line": None,
        "line_with_controller": None,
    }
    if not find_variant(name).is_routed:
        low, high = _mean(others, flops), _mean(others, "hybrid_flops")
        for key, at in (
            ("line", _mean(own, flops)),
            ("line_with_controller", _mean(own, "attention_and_controller_flops")),
        ):
            if low < high and low <= at <= high:
                row[key] = _distance(own, others, (high - at) / (high - low), is_paired)
    return row


def _distance(own: list[Row], others: list[Row], weight: float, is_paired: bool) -> Row:
    """Of distances to the hybrid, those of the others times a weight."""
    if is_paired:
        theirs = {run["seed"]: weight * run["beyond_hybrid"] for run in others}
        known = [run for run in own if run["seed"] in theirs]
        found = Figure.of([run["beyond_hybrid"] - theirs[run["seed"]] for run in known])
        assert found is not None  # a group without a seed of the variant's was refused
        return found.to_dict()
    lists = [[run["beyond_hybrid"] for run in own], [weight * r["beyond_hybrid"] for r in others]]
    return difference(*lists).to_dict()


def _mean(runs: Sequence[Row], name: str) -> float:
    return statistics.mean(run[name] for run in runs)


def _print(record: Row) -> None:
    console = Console(width=160)
    names = {
        "seed": "d",
        "loss": ".4f",
        "beyond_hybrid": "+.4f",
        "attention_flops": ".4f",
        "attention_and_controller_flops": ".4f",
        "soft_gap": "+.4f",
        "adaptivity": ".3f",
        "entropy": ".0f",
        "drawn_entropy": ".0f",
        "drawn_beyond_hybrid": "+.4f",
        "first_values_beyond_hybrid": "+.4f",
    }
    table = Table(title=record["variant"])
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for run in record["runs"]:
        table.add_row(*(_cell(run[name], form) for name, form in names.items()))
    console.print(table)
    table = Table(title="loss against, mean +- half of the 95% interval")
    for name in ("other", "compared", "its FLOPs times", "loss", "line", "line, with controller"):
        table.add_column(name, justify="left" if name == "other" else "right")
    for row in record["against"]:
        figures = [row[name] for name in ("loss", "line", "line_with_controller")]
        how = "seed by seed" if row["is_paired"] else "as groups"
        cells = ["-" if f is None else Figure(**f).show(".4f", sign="+") for f in figures]
        table.add_row(row["other"], how, f"{row['flops_ratio']:.2f}", *cells)
    console.print(table)


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
