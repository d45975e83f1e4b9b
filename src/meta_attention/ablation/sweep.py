"""Many runs: which there are, what is missing of them, and processes that make it.

A folder of an ablation holds ``ablation.json`` (what all its runs have in common, and which
experiments they belong to) and ``runs/VARIANT/seed-N``, a folder per run. More seeds, variants and
experiments may be added to it; other sizes or another text may not.
"""

import json
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for_process
from pathlib import Path
from typing import Any

from meta_attention.ablation.run import Job, execute
from meta_attention.ablation.variants import (
    VARIANTS,
    Experiment,
    Layout,
    Variant,
    find_experiment,
    find_variants,
)
from meta_attention.errors import ConfigError, MetaAttentionError
from meta_attention.training.corpus import read_corpus
from meta_attention.training.data import HOLDOUT
from meta_attention.training.logs import METRICS_FILE
from meta_attention.training.model_settings import Settings

PLAN_FILE, RUNS_FOLDER, LOG_FILE = "ablation.json", "runs", "log.txt"
# bytes at the end of a log that hold its last row
_TAIL = 8192


@dataclass(frozen=True, slots=True)
class Plan:
    """All that an ablation runs.

    Args:
        out: Its folder.
        base: What all runs have in common.
        experiments: Which variants belong together.
        seeds: Of every variant, from 0 on.
        is_short: Whether this is the short version.
        notes: What was left out, and why.
    """

    out: Path
    base: Settings
    experiments: tuple[Experiment, ...]
    seeds: int
    is_short: bool = False
    notes: tuple[str, ...] = ()

    @property
    def variants(self) -> list[Variant]:
        """All variants once, in order."""
        by_name = {v.name: v for experiment in self.experiments for v in experiment.variants}
        return list(by_name.values())

    @property
    def jobs(self) -> list[Job]:
        """All variants of a seed before the next seed, the long ones first."""
        found = [
            Job(
                variant,
                seed,
                variant.settings(self.base, seed),
                self.out / RUNS_FOLDER / variant.name / f"seed-{seed}",
            )
            for seed in range(self.seeds)
            for variant in self.variants
        ]
        return sorted(found, key=lambda job: (job.seed, -job.work))

    def to_dict(self) -> dict[str, Any]:
        return {
            "is_short": self.is_short,
            "seeds": self.seeds,
            "settings": _in_common(self.base),
            "experiments": {
                experiment.name: {
                    "question": experiment.question,
                    "axis": experiment.axis,
                    "variants": {v.name: v.value for v in experiment.variants},
                }
                for experiment in self.experiments
            },
            "notes": list(self.notes),
        }

    def save(self) -> None:
        """Write ``ablation.json``, with what the folder held before.

        Raises:
            ConfigError: It holds something else, or runs of other settings. Nothing is written.
        """
        path = self.out / PLAN_FILE
        record = self.to_dict()
        if path.exists():
            before = read_plan(self.out)
            # settings that there were none of yet were at their default
            before["settings"] = _in_common(Settings.from_dict(before["settings"]))
            for name in ("settings", "is_short"):
                _check_equal(self.out, before[name], record[name], name)
            experiments = dict(before["experiments"])
            for name, experiment in record["experiments"].items():
                known = experiments.get(name, {"variants": {}})["variants"]
                merged = known | experiment["variants"]
                experiments[name] = experiment | {"variants": merged}
            record["experiments"] = experiments
            record["seeds"] = max(record["seeds"], before["seeds"])
            record["notes"] = list(dict.fromkeys([*before["notes"], *record["notes"]]))
        elif self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise ConfigError(
                f"{self.out} must be a new or empty folder, or one of an earlier 'meta-attention "
                "ablate', but it holds something else; choose another with --out"
            )
        for job in self.jobs:
            job.check_same()
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(".new")
            draft.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
            draft.replace(path)
        except OSError as error:
            raise ConfigError(
                f"{self.out} must be a folder that can be written, got: {error.strerror}"
            ) from error


def make_plan(
    out: Path,
    base: Settings,
    *,
    experiments: Sequence[str] = ("ablation",),
    variants: Sequence[str] = (),
    layouts: Sequence[Layout] = ("own",),
    seeds: int = 1,
    is_short: bool = False,
) -> Plan:
    """What to run, checked: names are known, and the text can be read.

    Args:
        out: Folder of the ablation.
        base: What all runs have in common.
        experiments: Names of experiments.
        variants: Of the experiment ``ablation``, if not all of them.
        layouts: Projections of each expert's own, as the paper has it, shared ones, or both.
        seeds: Of every variant.
        is_short: Whether this is the short version.
    """
    if seeds < 1:
        raise ConfigError(f"seeds must be >= 1, got {seeds}")
    chosen = find_variants(variants or list(VARIANTS))
    if variants and "ablation" not in experiments:
        raise ConfigError(
            "variants must not be named without the experiment ablation: the others have their own"
        )
    asked = [find_experiment(name) for name in dict.fromkeys(experiments)]
    needed = [v.settings(base, 0).max_bytes for e in asked for v in e.variants]
    # an unreadable text shall be known before the first run, and how much of it there is
    known = [num for num in needed if num is not None]
    most = max(known) if len(known) == len(needed) else None
    num_bytes = read_corpus(base.data, max_bytes=most).num_bytes
    found, notes = [], []
    for experiment in asked:
        name = experiment.name
        kept = list(chosen if name == "ablation" else experiment.variants)
        left_out = [v for v in kept if not _can_repeat(v, base, num_bytes)]
        if left_out:
            notes.append(
                f"{name}: left out are {', '.join(v.name for v in left_out)}; {base.steps} steps "
                f"on a text of {num_bytes:,} bytes cannot see it that often"
            )
        kept = [v.in_layout(layout) for layout in layouts for v in kept if v not in left_out]
        kept = list({variant.name: variant for variant in kept}.values())
        if kept:
            found.append(
                Experiment(experiment.name, experiment.question, tuple(kept), experiment.axis)
            )
    if not found:
        raise ConfigError(f"there must be something to run, but {'; '.join(notes)}")
    return Plan(out, base, tuple(found), seeds, is_short, tuple(notes))


def _can_repeat(variant: Variant, base: Settings, num_bytes: int) -> bool:
    """Whether text can be seen as often as a variant asks for: neither too short nor too long."""
    if variant.repeats is None:
        return True
    settings = variant.settings(base, 0)
    assert settings.train_bytes is not None
    available = (1.0 - HOLDOUT) * min(num_bytes, settings.max_bytes or num_bytes)
    # a batch at least, of which no block is cut off; and what is held out is a twentieth or so
    least = settings.batch_size * settings.length
    return least < settings.train_bytes <= 1.02 * available


def read_plan(out: Path) -> dict[str, Any]:
    """What ``ablation.json`` of a folder holds."""
    path = out / PLAN_FILE
    try:
        record = json.loads(path.read_text("utf-8"))
        if not isinstance(record, dict) or "experiments" not in record:
            raise ValueError("it is not a plan")
        return record
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} must be readable, as 'meta-attention ablate' wrote it, got: {error}"
        ) from error


def _in_common(settings: Settings) -> dict[str, Any]:
    """What all runs have in common."""
    return {name: value for name, value in settings.to_dict().items() if name != "seed"}


def _check_equal(out: Path, before: Any, now: Any, name: str) -> None:
    if before == now:
        return
    if isinstance(before, Mapping):
        name = next(key for key in now if before[key] != now[key])
        before, now = before[name], now[name]
    raise ConfigError(
        f"{out} holds runs whose {name} is {before!r}, not {now!r}; choose another folder with "
        "--out, or leave that out"
    )


def run_jobs(
    jobs: Sequence[Job], num_processes: int
) -> Generator[tuple[Job, str | None], None, None]:
    """Run what is missing; each run as it ends, with the reason if it failed.

    Closing the iterator ends the processes; what runs had saved stays.

    Args:
        jobs: What there is to run.
        num_processes: How many at a time. On a CPU each has one thread, so that its figures do not
            depend on this number.
    """
    missing = [job for job in jobs if not job.is_done]
    if not missing:
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        min(num_processes, len(missing)), context, initializer=_start_process
    )
    futures: dict[Future[None], Job] = {}
    try:
        futures |= {pool.submit(_execute, job): job for job in missing}
        left = set(futures)
        while left:
            # with a limit, so that an interrupt is seen on every platform
            ended, left = wait(left, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in ended:
                error = future.exception()
                yield futures[future], None if error is None else _first_line(error)
    finally:
        for process in list((pool._processes or {}).values()):
            # those that wait for work end by themselves; the others would go on for minutes
            if any(not future.done() for future in futures):
                process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


def steps_done(job: Job) -> tuple[int, dict[str, Any]]:
    """How many steps of a run are done, and the newest row of its log."""
    if job.is_done:
        return job.settings.steps, {}
    try:
        with (job.folder / METRICS_FILE).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL))
            lines = file.read().splitlines()
    except OSError:
        return 0, {}
    # the first may be cut off at its beginning, the last at its end
    for line in reversed(lines):
        try:
            row = json.loads(line)
            return row["step"], row
        except (ValueError, KeyError, TypeError):
            continue
    return 0, {}


def _execute(job: Job) -> None:
    """In a process of the pool: what a run says goes to its log."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with (job.folder / LOG_FILE).open("a", encoding="utf-8") as log:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        execute(job)


def _start_process() -> None:
    """Make a process of the pool repeatable, and end it with the one that started it."""
    # read by cuBLAS when it starts
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # it would only cost time: nothing here reads memory that was not written
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    warnings.simplefilter("ignore")
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    """Without this, the runs of a killed sweep would go on, beside those of the next."""
    wait_for_process([sentinel])
    os._exit(1)


def _first_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return text if isinstance(error, MetaAttentionError) else f"{type(error).__name__}: {text}"
