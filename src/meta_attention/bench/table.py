"""Results for people: one table per suite and shape."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from meta_attention.bench.rows import Results, Row, Verdict

# of a log, which has no width of its own
LOG_WIDTH = 150
# a narrower terminal is shown less
FULL_WIDTH = 140

_COLUMNS = (
    "work",
    "mix",
    "who",
    "median ms",
    "20-80%",
    "again",
    "graph ms",
    "TFLOP/s",
    "GB/s",
    "peak MiB",
    "error",
    "speedup",
)
_NARROW_COLUMNS = ("work", "mix", "who", "median ms", "peak MiB", "error", "speedup")
# of a shared CPU only ratios mean anything
_RATIO_COLUMNS = ("work", "mix", "who", "error", "speedup")


def print_results(console: Console, results: Results) -> None:
    """Print the machine, a table for every suite and shape, what needs words, and the targets."""
    console.print(_header(results), soft_wrap=True, highlight=False)
    groups: dict[str, list[Row]] = {}
    for row in results.rows:
        groups.setdefault(f"{row.suite}: {row.dtype} {_sizes(row)}", []).append(row)
    for title, rows in groups.items():
        if not all(row.is_comparable for row in rows):
            title += ", on a CPU: ratios only"
        console.print(title, soft_wrap=True, highlight=False, markup=False)
        console.print(_row_table(rows, console.width))
        for line in _words(rows):
            console.print(f"  {line}", soft_wrap=True, highlight=False, markup=False)
        console.print()
    verdicts = [(row, verdict) for row in results.rows for verdict in row.verdicts]
    if verdicts:
        console.print(_target_table(verdicts))


def build_console() -> Console:
    """For standard output: as wide as the terminal, or wide enough where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, LOG_WIDTH))


def _header(results: Results) -> str:
    machine = results.machine
    parts = [str(machine["device"])]
    for name in ("driver", "cuda", "cudnn", "torch", "triton", "python", "commit"):
        if machine.get(name):
            parts.append(f"{name} {machine[name]}")
    if "matmul_tflops_per_s" in results.ceilings:
        parts.append(f"matmul {results.ceilings['matmul_tflops_per_s']:.0f} TFLOP/s")
        parts.append(f"copy {results.ceilings['copy_gbytes_per_s']:.0f} GB/s")
    return " | ".join([*parts, str(machine["date"])])


def _row_table(rows: Sequence[Row], width: int) -> Table:
    known: tuple[str, ...] = _COLUMNS if width >= FULL_WIDTH else _NARROW_COLUMNS
    if not all(row.is_comparable for row in rows):
        known = _RATIO_COLUMNS
    cells = [_cells(row) for row in rows]
    # what no row has is not shown
    columns = [column for column in known if any(cell[column] for cell in cells)]
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for column in columns:
        is_text = column in ("work", "mix", "who")
        table.add_column(
            column,
            justify="left" if is_text else "right",
            no_wrap=column != "work",
            overflow="fold",
        )
    for cell in cells:
        table.add_row(*(cell[column] for column in columns))
    return table


def _sizes(row: Row) -> str:
    """A row's shape; windows differ between the rows of one table."""
    return " ".join(f"{axis}={size}" for axis, size in row.shape.items() if axis != "window")


def _cells(row: Row) -> dict[str, str]:
    cells = dict.fromkeys(_COLUMNS, "")
    cells |= {"work": row.work, "mix": row.mix or "", "who": row.name}
    if row.gates:
        cells["error"] = f"{max(gate.error for gate in row.gates):.1e}"
    if row.timing is None:
        cells["speedup"] = row.status
        return cells
    timing = row.timing
    cells |= {
        "median ms": f"{timing.median_ms:.3f}",
        "20-80%": f"{timing.low_ms:.3f}-{timing.high_ms:.3f}",
        "again": f"{timing.repeat_ms:.3f}",
        "graph ms": _show(row.graph_ms, ".3f"),
        "TFLOP/s": _show(row.tflops_per_s, ".0f") + _show(row.ceiling_share, " (.0%)"),
        "GB/s": _show(row.gbytes_per_s, ".0f") + _show(row.bandwidth_share, " (.0%)"),
        "peak MiB": _show(row.peak_mib, ".0f") + _show(row.memory_ratio, " (.2fx)"),
        "speedup": _show(row.speedup, ".2fx"),
    }
    return cells


def _show(value: float | None, form: str) -> str:
    """``.2fx`` is a number and an x; what is in brackets has a space before it."""
    if value is None:
        return ""
    if form.startswith(" ("):
        return f" ({_show(value, form[2:-1])})"
    return f"{value:{form[:-1]}}x" if form.endswith("x") else f"{value:{form}}"


def _words(rows: Sequence[Row]) -> list[str]:
    """Why rows have no time, and what to know about them; once where it is the same for several."""
    about: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        text = row.note if row.reason is None else f"{row.status}, {row.reason}"
        if text:
            who = f"{row.name} {row.mix}" if row.mix else row.name
            about.setdefault((who, text), []).append(row.work)
    return [f"{who} ({', '.join(works)}): {text}" for (who, text), works in about.items()]


def _target_table(verdicts: Sequence[tuple[Row, Verdict]]) -> Table:
    table = Table(title="Targets", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for column in ("suite", "shape", "work", "mix", "figure", "target", "measured", ""):
        table.add_column(column, overflow="fold")
    for row, verdict in verdicts:
        table.add_row(
            row.suite,
            _sizes(row),
            row.work,
            row.mix or "",
            verdict.quantity.replace("_", " "),
            verdict.target,
            _measured(verdict),
            _VERDICTS[verdict.is_met],
        )
    return table


_VERDICTS: dict[Any, str] = {True: "[green]met[/]", False: "[red]missed[/]", None: "not measured"}


def _measured(verdict: Verdict) -> str:
    if verdict.value is None:
        return ""
    is_share = verdict.quantity.endswith("share")
    return f"{verdict.value:.1%}" if is_share else f"{verdict.value:.2f}x"
