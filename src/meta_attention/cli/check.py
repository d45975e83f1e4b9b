"""``meta-attention check``: the paper's initialisation table next to ours."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meta_attention.evaluation.check import CheckReport

EXAMPLES = """\b
examples:
  meta-attention check
  meta-attention check --seeds 100
  meta-attention check --json | python -m json.tool
"""


def check(
    seeds: Annotated[int, typer.Option(min=1, help="random initialisations to run")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Run the paper's correctness table on random weights.

    Exits with status 1 when a structural row fails. A value that differs from the paper's is
    explained, not failed.
    """
    # torch and transformers load here, so that --help stays instant
    from rich.progress import Progress

    from meta_attention.evaluation.check import run_check

    with Progress(transient=True, disable=as_json) as progress:
        task = progress.add_task("seeds", total=seeds)
        report = run_check(seeds, advance=lambda: progress.advance(task))
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print_tables(report)
    if not report.passed:
        raise typer.Exit(1)


def _print_tables(report: "CheckReport") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    structure = Table(title="Structure: must hold", title_justify="left")
    for column in ("row", "expected", "seen", ""):
        structure.add_column(column, overflow="fold")
    for row in report.structure:
        verdict = "[green]holds[/]" if row.holds else "[red]FAILS[/]"
        structure.add_row(row.name, row.expected, row.seen.replace("[", r"\["), verdict)
    console.print(structure)

    values = Table(
        title=f"Values at initialisation, {report.seeds} seeds: mean +- sd (range)",
        title_justify="left",
    )
    for column in ("row", "paper", "ours", "paper's value is"):
        values.add_column(column, overflow="fold")
    for value in report.values:
        values.add_row(
            value.name,
            f"{value.paper:.3f}",
            f"{value.mean:.3f} +- {value.std:.3f} ({value.low:.3f} to {value.high:.3f})",
            "[green]in our range[/]" if value.agrees else "[yellow]outside our range[/]",
        )
    console.print(values)
    for value in report.values:
        if value.note:
            console.print(f"{value.name} differs: {value.note}.", soft_wrap=True)
