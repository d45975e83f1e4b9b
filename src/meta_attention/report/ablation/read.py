"""Runs of an ablation as they lie in its folder; nothing is trained or loaded."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from meta_attention.errors import DataError

# as the runs write them; see meta_attention.ablation
PLAN, RESULT, CURVE, GRADIENTS = (
    "ablation.json",
    "result.json",
    "routing.jsonl",
    "gradients.jsonl",
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One finished run."""

    folder: Path
    result: Row

    @property
    def variant(self) -> str:
        return self.result["variant"]

    @property
    def seed(self) -> int:
        return self.result["seed"]

    @cached_property
    def curve(self) -> list[Row]:
        """Figures on held-out text over training."""
        return _read_rows(self.folder / CURVE)

    @cached_property
    def gradients(self) -> list[Row]:
        """Noise in the controllers' gradients over training, where it was measured."""
        return _read_rows(self.folder / GRADIENTS)


@dataclass(frozen=True)
class Ablation:
    """All finished runs, and what they were run for."""

    plan: Row
    runs: tuple[Run, ...]

    @cached_property
    def by_variant(self) -> dict[str, list[Run]]:
        """Runs of each variant by seed."""
        found: dict[str, list[Run]] = {}
        for run in sorted(self.runs, key=lambda run: run.seed):
            found.setdefault(run.variant, []).append(run)
        return found

    def variants_of(self, experiment: str) -> list[str]:
        """Names of its variants that have a finished run, in its order."""
        names = self.plan["experiments"].get(experiment, {"variants": {}})["variants"]
        return [name for name in names if name in self.by_variant]

    @property
    def experiments(self) -> list[str]:
        """Names of the experiments that have a finished run."""
        return [name for name in self.plan["experiments"] if self.variants_of(name)]

    @property
    def missing(self) -> list[str]:
        """Runs that were asked for and are not done."""
        done = {(run.variant, run.seed) for run in self.runs}
        names = {v: None for e in self.plan["experiments"].values() for v in e["variants"]}
        return [
            f"{name} seed {seed}"
            for name in names
            for seed in range(self.plan["seeds"])
            if (name, seed) not in done
        ]


def read_ablation(folders: Sequence[Path]) -> Ablation:
    """Finished runs of one or more folders of the same ablation.

    Args:
        folders: Each as ``meta-attention ablate`` left it. Of a variant and a seed that several
            hold, the first counts.
    """
    plan: Row | None = None
    runs: dict[tuple[str, int], Run] = {}
    for folder in folders:
        one = _read_json(folder / PLAN)
        if plan is None:
            plan = one
        elif plan["settings"] != one["settings"]:
            raise DataError(
                f"folders of one report must be of runs with the same settings, but those of "
                f"{folder} differ from those of {folders[0]}; make a report of each"
            )
        else:
            plan = plan | {
                "experiments": _merge(plan["experiments"], one["experiments"]),
                "seeds": max(plan["seeds"], one["seeds"]),
                "notes": list(dict.fromkeys([*plan["notes"], *one["notes"]])),
            }
        for path in sorted(folder.glob(f"runs/*/seed-*/{RESULT}")):
            run = Run(path.parent, _read_json(path))
            runs.setdefault((run.variant, run.seed), run)
    if plan is None or not runs:
        names = ", ".join(map(str, folders))
        raise DataError(
            f"a report must have a finished run, but {names} has none; run 'meta-attention "
            "ablate' first, or let it end"
        )
    return Ablation(plan, tuple(runs.values()))


def _merge(first: Row, second: Row) -> Row:
    merged = dict(first)
    for name, experiment in second.items():
        known = merged.get(name, {"variants": {}})["variants"]
        merged[name] = experiment | {"variants": known | experiment["variants"]}
    return merged


def _read_json(path: Path) -> Row:
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{path.parent} must be a folder that 'meta-attention ablate' has written, but it has "
            f"no {path.name}"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} must be readable JSON, got: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} must hold a JSON object, got a {type(found).__name__}")
    return found


def _read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
