"""What the commands of all studies share: runs side by side until a moment, and how errors end."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from meta_attention.errors import ConfigError, MetaAttentionError
from meta_attention.training.schedule import Schedule
from meta_attention.training.settings import RunSettings

LOG = "log.txt"


@dataclass(slots=True)
class Job:
    """Runs of one variant that are missing, or under way: one after the other in a process."""

    variant: str
    seeds: tuple[int, ...]
    folders: tuple[Path, ...]  # of the seeds
    result: str
    """Name of the file that a finished run has."""
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0

    @property
    def is_done(self) -> bool:
        return all((folder / self.result).exists() for folder in self.folders)

    @property
    def log(self) -> Path:
        return self.folders[0] / LOG

    def __str__(self) -> str:
        return f"{self.variant} seed {', '.join(map(str, self.seeds))}"


def run_side_by_side(
    jobs: Sequence[Job],
    command_of: Callable[[Job, float], Sequence[str]],
    *,
    parallel: int,
    time_limit: float,
    patience: float = 30.0,
) -> int:
    """Run jobs, in their order; how many failed.

    Args:
        jobs: Runs that are missing.
        command_of: Arguments after ``python`` for a job that shall stop at a moment of
            ``time.time()``. A run that ends well without its result was cut off by that.
        parallel: How many at a time.
        time_limit: Seconds after which none starts.
        patience: Seconds after that for those under way to save what they have; one that is still
            there hangs, and is killed.
    """
    waiting, total, begin = list(jobs), len(jobs), time.time()
    stop_at = begin + time_limit
    running: list[Job] = []
    finished = failed = cut_off = 0
    try:
        while running or (waiting and time.time() < stop_at):
            if waiting and len(running) < parallel and time.time() < stop_at:
                job = waiting.pop(0)
                _start(job, command_of(job, stop_at), parallel)
                running.append(job)
                continue
            if time.time() > stop_at + patience:
                for job in running:
                    assert job.process is not None
                    job.process.kill()
                    job.process.wait()
            over = [job for job in running if job.process and job.process.poll() is not None]
            for job in over:
                running.remove(job)
                assert job.process is not None
                seconds = time.time() - job.started
                last = (job.log.read_text().splitlines() or ["no output"])[-1]
                if job.process.returncode:
                    failed += 1
                    say(f"{job} FAILED after {seconds:.0f} s: {last}")
                elif job.is_done:
                    finished += 1
                    say(f"{finished}/{total} {job}: {last}, {seconds:.0f} s")
                else:
                    cut_off += 1
                    say(f"{job} cut off: {last}")
            if not over:
                time.sleep(0.2)
    finally:
        for job in running:
            if job.process is not None:
                job.process.terminate()
                # it may be writing
                job.process.wait()
    left = len(waiting) + cut_off
    say(
        f"{finished} finished, {failed} failed, {left} left"
        + ("; run the same command again" if left else "")
    )
    return failed


def _start(job: Job, command: Sequence[str], parallel: int) -> None:
    threads = str(max(1, (os.cpu_count() or 1) // parallel))
    job.log.parent.mkdir(parents=True, exist_ok=True)
    job.started = time.time()
    with job.log.open("wb") as log:
        job.process = subprocess.Popen(
            [sys.executable, *command],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": threads} | os.environ,
        )


class TimeIsOver(Exception):
    """A run has saved what it has, to go on another time."""


class StopAt(TrainerCallback):
    """Saves a run and ends it at a moment of ``time.time()``."""

    def __init__(self, moment: float) -> None:
        self.moment = moment
        self.is_over = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # where a window of the log ends, so that none is cut in two
        is_window = state.global_step % state.logging_steps == 0
        if is_window and state.global_step < state.max_steps and time.time() >= self.moment:
            self.is_over = control.should_save = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.is_over:
            raise TimeIsOver(f"time is over after step {state.global_step} of {state.max_steps}")


def say(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


def parse_changes(changes: list[str], settings: type[RunSettings]) -> dict[str, Any]:
    """``NAME=VALUE`` of the settings of a run, from a command line."""
    known = [field.name for field in fields(settings)]
    values: dict[str, Any] = {}
    for change in changes:
        name, _, text = change.partition("=")
        if name not in known:
            raise ConfigError(f"a setting must be one of {', '.join(known)}, got {name!r}")
        if name in settings.SCHEDULED:
            values[name] = Schedule.parse(text)
            continue
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


def run_command(parser: argparse.ArgumentParser, arguments: list[str] | None) -> int:
    """Call what a command has set as ``call``; its status, 2 where the input was bad."""
    args = parser.parse_args(arguments)
    try:
        return int(bool(args.call(args)))
    except MetaAttentionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
