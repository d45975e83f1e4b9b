"""The table of an experiment in a terminal."""

from collections.abc import Callable, Sequence

from rich.box import SIMPLE
from rich.table import Table

from meta_attention.report.ablation.claims import paper_claims
from meta_attention.report.ablation.read import Ablation
from meta_attention.report.ablation.summary import Summary

Cell = Callable[[Summary], str]


def cell(name: str, form: str, scale: float = 1.0, sign: str = "") -> Cell:
    """A figure of a row with its interval; empty where there is none."""

    def show(row: Summary) -> str:
        figure = row[name]
        return "" if figure is None else figure.show(form, scale, sign)

    return show


# the columns that tell most, in the order they are read in
COLUMNS: dict[str, Cell] = {
    "seeds": lambda row: str(len(row.seeds)),
    "ppl": cell("perplexity", ".2f"),
    "vs prior-\nfree, %": cell("relative_perplexity", ".1f", 100.0, "+"),
    "ppl\nhard": cell("hard_perplexity", ".2f"),
    "entropy\n%": cell("routing_entropy", ".1f"),
    "projected\ncost, %": cell("projected_cost", ".1f"),
    "hard\ncost, %": cell("hard_cost", ".1f"),
    "attention\nFLOPs, %": cell("attention_flops", ".0f"),
    "adapti-\nvity": cell("adaptivity", ".3f"),
    "collapsed\nlayers": lambda row: collapses(row),
}


def collapses(row: Summary) -> str:
    """Mean number of layers with an expert collapse and with a prior collapse."""
    expert, prior = row["expert_collapses"], row["prior_collapses"]
    if expert is None or prior is None:
        return ""
    return f"{expert.mean:.1f} / {prior.mean:.1f}"


def summary_table(rows: Sequence[Summary], title: str, *, is_narrow: bool = False) -> Table:
    """One row per variant, mean over seeds and half of the 95% interval.

    Args:
        rows: What to show.
        title: Above it.
        is_narrow: Put intervals below their means.
    """
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("variant", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [show(row) for show in COLUMNS.values()]
        if is_narrow:
            cells = [cell.replace(" \u00b1", "\n\u00b1") for cell in cells]
        table.add_row(row.variant, *cells)
    return table


def claims_table(ablation: Ablation) -> Table:
    """What the paper says, next to ours."""
    table = Table(
        title="The paper's claims", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0)
    )
    table.add_column("claim", overflow="fold")
    for name in ("paper", "ours", "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    for claim in paper_claims(ablation):
        ours = "" if claim.ours is None else claim.ours.show(".2f", sign="+")
        table.add_row(claim.text, claim.printed, f"{ours} {claim.unit}", claim.verdict)
    return table
