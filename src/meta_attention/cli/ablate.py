"""``meta-attention ablate``: the paper's ablation, its baselines and further experiments."""

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meta_attention.cli.checkpoint import Device, DeviceOption
from meta_attention.errors import BackendUnavailableError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

    from meta_attention.ablation.run import Job
    from meta_attention.ablation.sweep import Plan
    from meta_attention.ablation.variants import Layout

EXAMPLES = """\b
examples:
  meta-attention ablate --short
  meta-attention ablate --data wikitext-2/train.txt --seeds 5 --jobs 12 --out runs/ablation
  meta-attention ablate --variants bayesian,prior-free,recommended --seeds 3
  meta-attention ablate --sweep kl-weight --sweep prior-floor --seeds 3
  meta-attention ablate --sweep gradient-variance --short --out runs/gradients
  meta-attention ablate --layout both --short --json | jq '.experiments.ablation[].perplexity'
  meta-attention ablate --list

\b
what is run:
  The paper's Tiny LM: characters, D=128, 2 layers, T=64, batch 32, 2,000 steps, 1 MB of text.
  --short is a smaller model for fewer steps: it shows how all of this works, and is no result.
  Without --data the text is Python's own manual. --list names variants and sweeps.

\b
stopped and started:
  Every run is a folder in OUT/runs with its settings and its figures. The same command again goes
  on where the last was stopped, and ends with the same table. More seeds, variants and sweeps can
  be added to a folder; other sizes or another text need a folder of their own. 'meta-attention
  report OUT' makes the report again from what is there.
"""


class LayoutChoice(StrEnum):
    """Projections of the experts."""

    own = "own"
    shared = "shared"
    both = "both"


_LAYOUTS: dict[LayoutChoice, "tuple[Layout, ...]"] = {
    LayoutChoice.own: ("own",),
    LayoutChoice.shared: ("shared",),
    LayoutChoice.both: ("own", "shared"),
}


def ablate(
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            "--experiment",
            help="an experiment by name, repeatable; --list names them  [default: ablation]",
            show_default=False,
        ),
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(help="variants of the ablation, by commas  [default: all]"),
    ] = None,
    layout: Annotated[
        LayoutChoice, typer.Option(help="projections: each expert's own (the paper's), or shared")
    ] = LayoutChoice.own,
    data: Annotated[
        list[str] | None,
        typer.Option(help="text: a file, folder, glob or hub name, repeatable"),
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(min=1, help="read this much of it  [default: 1,000,000]")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="runs of every variant  [default: 5; --short: 1]")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="of training  [default: 2000; --short: 300]")
    ] = None,
    short: Annotated[bool, typer.Option("--short", help="minutes on a CPU, and no result")] = False,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="runs at a time  [default: the CPU's cores, on a GPU at most 12]"),
    ] = None,
    device: DeviceOption = Device.auto,
    out: Annotated[Path, typer.Option(help="folder of the runs and the report")] = Path(
        "runs/ablation"
    ),
    show_list: Annotated[
        bool, typer.Option("--list", help="name variants and experiments, run nothing")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Train every variant with every seed, measure each, and write a report.

    Exits with status 1 if a run failed; the others are done and reported.
    """
    # torch and transformers load here, so that --help stays instant
    from dataclasses import replace

    from rich.console import Console

    from meta_attention.ablation.sweep import make_plan
    from meta_attention.ablation.variants import paper_base, short_base, with_steps
    from meta_attention.training.model_settings import parse_names

    if show_list:
        _print_list(as_json)
        return
    base = short_base() if short else paper_base()
    if steps is not None:
        base = with_steps(base, steps)
    base = replace(base, data=tuple(data or ()), max_bytes=max_bytes or base.max_bytes)
    plan = make_plan(
        out,
        base,
        experiments=sweep or ["ablation"],
        variants=parse_names(variants) if variants else (),
        layouts=_LAYOUTS[layout],
        seeds=seeds or (1 if short else 5),
        is_short=short,
    )
    has_gpu = _choose_device(device)
    plan.save()
    errors = Console(stderr=True)
    for note in plan.notes:
        errors.print(f"note: {note}", soft_wrap=True, highlight=False)
    failed = _run(plan, jobs or default_jobs(has_gpu), errors, quiet=as_json)
    # without a finished run there is nothing to report but why
    has_result = any(job.is_done for job in plan.jobs)
    record = _report(plan, errors, as_json) if has_result else {}
    if as_json:
        print(json.dumps(record | {"failed": failed}, indent=1))
    if failed:
        for name, reason in failed.items():
            errors.print(f"failed: {name}: {reason}", soft_wrap=True, highlight=False)
        raise typer.Exit(1)


def default_jobs(has_gpu: bool) -> int:
    """Processes at a time: a small model leaves a GPU idle, but each needs a core to drive it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(12, cores or 1) if has_gpu else cores or 1)


def _choose_device(device: Device) -> bool:
    """Whether runs use a GPU; processes that are started later see it or not."""
    import torch

    if device is Device.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return False
    has_gpu = torch.cuda.is_available()
    if device is Device.cuda and not has_gpu:
        raise BackendUnavailableError("--device cuda needs a GPU that torch can see; use cpu")
    return has_gpu


def _run(plan: "Plan", num_processes: int, console: "Console", *, quiet: bool) -> dict[str, str]:
    """Run what is missing; why each run that failed did, by its name."""
    from rich.live import Live

    from meta_attention.ablation.sweep import run_jobs

    jobs = plan.jobs
    view = RunsView(jobs)
    missing = sum(not job.is_done for job in jobs)
    if not quiet:
        told = f"{missing} of {len(jobs)} runs to do, {min(num_processes, missing)} at a time"
        console.print(f"{told}, in {plan.out}" if missing else f"all {len(jobs)} runs are done")
    failed: dict[str, str] = {}
    is_live = console.is_terminal and not quiet and missing > 0
    live = Live(get_renderable=view.render, console=console, refresh_per_second=1, transient=True)
    ended = run_jobs(jobs, num_processes)
    if is_live:
        live.start()
    try:
        for job, reason in ended:
            name = f"{job.variant.name} seed {job.seed}"
            if reason is not None:
                failed[name] = view.failed[name] = reason
            if not (quiet or is_live):
                done = sum(one.is_done for one in jobs)
                console.print(
                    f"{done}/{len(jobs)} {name}: {reason or 'done'}",
                    soft_wrap=True,
                    highlight=False,
                )
    except KeyboardInterrupt:
        raise ConfigError(
            "stopped; runs under way have saved what they had, and the same command goes on"
        ) from None
    finally:
        ended.close()
        if is_live:
            live.stop()
    return failed


class RunsView:
    """What a terminal shows meanwhile: a row per variant, and a bar with the time left.

    Args:
        jobs: All runs, done or not.
    """

    def __init__(self, jobs: "Sequence[Job]") -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        self.jobs = jobs
        self.failed: dict[str, str] = {}
        self.done = {job.folder for job in jobs if job.is_done}
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), Remaining()
        )
        self.task = self.bar.add_task(
            "runs", total=sum(job.work for job in jobs), completed=round(self._work_done({}))
        )

    def _work_done(self, steps: dict[Path, int]) -> float:
        found = 0.0
        for job in self.jobs:
            share = steps.get(job.folder, 0) / job.settings.steps
            # measuring takes a while, too
            found += job.work * (1.0 if job.folder in self.done else 0.95 * share)
        return found

    def render(self) -> "RenderableType":
        from rich.box import SIMPLE
        from rich.console import Group
        from rich.table import Table

        from meta_attention.ablation.sweep import steps_done

        table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
        table.add_column("variant", no_wrap=True)
        for column in ("done", "step", "task loss", "projected cost", "entropy %", "adaptivity"):
            table.add_column(column, justify="right", no_wrap=True)
        steps: dict[Path, int] = {}
        rows: dict[str, list[Job]] = {}
        for job in self.jobs:
            rows.setdefault(job.variant.name, []).append(job)
        for name, jobs in rows.items():
            newest: dict[str, Any] = {}
            now = ""
            for job in jobs:
                if job.folder not in self.done and job.is_done:
                    self.done.add(job.folder)
                if job.folder in self.done:
                    continue
                steps[job.folder], row = steps_done(job)
                if row:
                    newest, now = row, f"{row['step']}/{job.settings.steps}"
            done = sum(job.folder in self.done for job in jobs)
            failed = sum(f"{name} seed {job.seed}" in self.failed for job in jobs)
            prefix = "eval_" if newest.get("kind") == "eval" else ""
            table.add_row(
                name,
                f"{done}/{len(jobs)}" + (f", {failed} failed" if failed else ""),
                now or ("" if done == len(jobs) else "waiting" if not failed else ""),
                *(
                    _number(newest.get(prefix + key))
                    for key in ("task_loss", "projected_cost", "routing_entropy", "adaptivity")
                ),
            )
        self.bar.update(self.task, completed=self._work_done(steps))
        return Group(table, self.bar)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _report(plan: "Plan", console: "Console", as_json: bool) -> dict[str, Any]:
    """Tables on the terminal, and the page; what is there of it as a dictionary."""
    from meta_attention.cli.report import print_tables
    from meta_attention.report.ablation.page import write_report
    from meta_attention.report.ablation.read import read_ablation
    from meta_attention.report.ablation.results import to_record

    ablation = read_ablation([plan.out])
    if not as_json:
        print_tables(ablation)
    try:
        page = write_report(ablation, plan.out / "report")
    except BackendUnavailableError as error:
        console.print(f"note: no page: {error}", soft_wrap=True, highlight=False)
    else:
        if not as_json:
            print(f"report: {page}")
    return to_record(ablation)


def _print_list(as_json: bool) -> None:
    from meta_attention.ablation.variants import EXPERIMENTS, VARIANTS

    if as_json:
        print(
            json.dumps(
                {
                    "variants": {name: v.title for name, v in VARIANTS.items()},
                    "experiments": {
                        name: {"question": e.question, "variants": [v.name for v in e.variants]}
                        for name, e in EXPERIMENTS.items()
                    },
                },
                indent=1,
            )
        )
        return
    print("variants of the experiment ablation:")
    for name, variant in VARIANTS.items():
        print(f"  {name:<18}{variant.title}")
    print("experiments (--sweep):")
    for name, experiment in EXPERIMENTS.items():
        print(f"  {name:<18}{experiment.question}")
        if name != "ablation":
            print(f"  {'':<18}{', '.join(v.name for v in experiment.variants)}")
