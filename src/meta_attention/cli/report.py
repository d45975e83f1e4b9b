"""``meta-attention report``: the page of an ablation, from its runs' figures alone."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meta_attention.report.ablation.read import Ablation

EXAMPLES = """\b
examples:
  meta-attention report runs/ablation
  meta-attention report runs/ablation --out report --json > results.json
  meta-attention report runs/seeds-0-4 runs/more-experiments --out report
"""


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="folders that 'meta-attention ablate' wrote", show_default=False),
    ],
    out: Annotated[
        Path | None, typer.Option(help="where the page goes  [default: report in the first]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Make the report again: index.html, figures as PNG and SVG, and results.json.

    Nothing is trained or loaded. Runs that are not done are left out, and named.
    """
    from meta_attention.report.ablation.page import write_report
    from meta_attention.report.ablation.read import read_ablation
    from meta_attention.report.ablation.results import to_record

    ablation = read_ablation(runs)
    page = write_report(ablation, out or runs[0] / "report")
    if as_json:
        print(json.dumps(to_record(ablation), indent=1))
        return
    print_tables(ablation)
    print(f"report: {page}")


def print_tables(ablation: "Ablation") -> None:
    """A table for every experiment, and the verdict on every claim."""
    from rich.console import Console

    from meta_attention.report.ablation.claims import has_claims
    from meta_attention.report.ablation.summary import summarise
    from meta_attention.report.ablation.table import claims_table, summary_table

    console = Console()
    # lines may be long where there is no terminal, and a table that is cut helps nobody
    console = Console(width=None if console.is_terminal else 160)
    for name in ablation.experiments:
        question = ablation.plan["experiments"][name]["question"]
        rows = summarise(ablation, name)
        console.print(summary_table(rows, f"{name}: {question}", is_narrow=console.width < 140))
    if has_claims(ablation):
        console.print(claims_table(ablation))
    if ablation.missing:
        console.print(f"not done: {', '.join(ablation.missing)}", soft_wrap=True, highlight=False)
