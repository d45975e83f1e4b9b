"""Finished runs as one small file to publish: figures of each, comparisons, and where they are of.

A run's folder has its model and a figure for every step; what is kept is what pages quote.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study_report import read_results, summarise
from study_run import CONFIG, run_folder
from study_variants import SCALES, Scale

from meta_attention.errors import DataError

Row = dict[str, Any]
# of a text, in the order they are written
FIGURES = (
    "loss",
    "loss_by_corpus",
    "loss_by_position",
    "attention_flops",
    "attention_and_controller_flops",
    "model_flops",
)
ROUTING = ("adaptivity", "routed_cost", "collapsed_layers")
# of a run, where it has them
OTHERS = ("train_loss", "prices", "experts_of_heads", "word_perplexity", "timing")


def keep(folders: Sequence[Path], path: Path, *, note: str, compared: Sequence[Path]) -> Row:
    """Write what is published of runs to a file.

    Args:
        folders: Of runs; a run may be in one of them only.
        path: File to write.
        note: What the runs are, in a sentence.
        compared: Files that ``compare`` or ``study_worth.py`` wrote, kept as they are.
    """
    results = [result for folder in folders for result in read_results(folder)]
    runs: dict[str, Row] = {}
    settings: dict[str, Row] = {}
    machines: list[Row] = []
    for result in results:
        scale, variant, seed = (result[name] for name in ("scale", "variant", "seed"))
        folder = run_folder(Path(result["folder"]), scale, variant, seed)
        if folder.name in runs:
            raise DataError(f"{folder.name} must be in one folder only; keep them in two files")
        machine = _machine(result)
        if machine not in machines:
            machines.append(machine)
        # of machines, which one
        runs[folder.name] = _figures(result) | {"machine": machines.index(machine)}
        _note_settings(settings, folder, scale)
    record = {
        "note": note,
        "machines": machines,
        "settings": settings,
        # a table for each scale, as the frontier reads them
        **summarise(results),
        "compared": [_read(file) for file in compared],
        "runs": runs,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {path}, {len(runs)} runs, {path.stat().st_size / 1e3:.0f} kB")
    return record


def _figures(result: Row) -> Row:
    row = _of_text(result["hard"]) | {"soft_loss": result["soft"]["loss"]}
    for name in ("long", "with_first_values"):
        if name in result:
            row[name] = _of_text(result[name])
    words = {name: text["word_perplexity"] for name, text in result["words"].items()}
    others = result | {"word_perplexity": words}
    return row | {name: others[name] for name in OTHERS if others.get(name)}


def _of_text(scored: Row) -> Row:
    # runs of before something was counted do not have it
    figures = {name: scored[name] for name in FIGURES if name in scored}
    routing = scored["routing"]
    figures["routing"] = {name: routing[name] for name in ROUTING if name in routing}
    routed = [layer for layer in routing["layers"] if not layer["is_static"]]
    if routed:
        figures["routing"]["top_share"] = [layer["top_share"] for layer in routed]
    return figures


def _note_settings(settings: dict[str, Row], folder: Path, scale: str) -> None:
    """Those of a scale, which must be the same for all its runs: as they differ from the scale."""
    config = json.loads((folder / CONFIG).read_text())
    own, usual = Scale.of_run(config["settings"]), SCALES[scale]
    changes = {
        name: getattr(own, name)
        for name in Scale.__dataclass_fields__
        if getattr(own, name) != getattr(usual, name)
    }
    found = {"changes": changes, "text": config["text"]}
    if settings.setdefault(scale, found) != found:
        raise DataError(
            f"{folder} must be of the settings and the text of the runs before it; keep runs of "
            "other settings in a file of their own"
        )


def _read(path: Path) -> Row:
    try:
        found: Row = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} must be a file that compare or study_worth.py wrote with --json: {error}"
        ) from error
    return found


def _machine(result: Row) -> Row:
    # runs of before it was written have the device and torch alone
    found = result.get("machine") or {name: result[name] for name in ("device", "torch")}
    return {name: value for name, value in found.items() if name != "date"}
