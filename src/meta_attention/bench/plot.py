"""Time against length, from saved results."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meta_attention.bench.op_bench import ALL_LINEAR, ALL_LOCAL
from meta_attention.bench.op_peers import FLEX
from meta_attention.bench.rows import BOTH, FORWARD, ROUTED, Results, Row
from meta_attention.errors import ConfigError, DataError

FORMATS = (".png", ".svg")

_STYLES = {ROUTED: "-o", FLEX: "--s"}

# told apart also by people who see fewer colours
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")


@dataclass(frozen=True, slots=True)
class Line:
    """One implementation on one mix."""

    name: str
    mix: str | None
    points: dict[int, float] = field(default_factory=dict)  # microseconds per token by length

    @property
    def colour(self) -> str:
        return self.name if self.mix is None else self.mix

    @property
    def label(self) -> str:
        return self.name if self.mix is None else f"{self.name} {self.mix}"


def plot_results(results: Results, path: Path) -> None:
    """Draw the attention op: microseconds per token against length, per mix and peer.

    Args:
        results: With rows of the suite ``op``, measured on a GPU.
        path: Where to; its ending, ``.png`` or ``.svg``, is the format.
    """
    check_format(path)
    panels = {work: _lines(results.rows, work) for work in (FORWARD, BOTH)}
    panels = {work: lines for work, lines in panels.items() if lines}
    if not panels:
        raise DataError("a plot needs times of the suite 'op', measured on a GPU; there are none")
    # drawing needs a package that a benchmark does not
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * len(panels), 5.0), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    # a mix has one colour, whoever computes it
    kinds = list(dict.fromkeys(line.colour for lines in panels.values() for line in lines))
    for axis, (work, lines) in zip(axes, panels.items(), strict=True):
        for line in lines:
            lengths, times = zip(*sorted(line.points.items()), strict=True)
            colour = _COLOURS[kinds.index(line.colour) % len(_COLOURS)]
            style = _STYLES.get(line.name, ":^")
            axis.plot(lengths, times, style, color=colour, label=line.label, markersize=4)
        ticks = sorted({length for line in lines for length in line.points})
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ticks, [f"{t // 1024}k" if t >= 1024 else str(t) for t in ticks])
        axis.set_xlabel("tokens of a sequence")
        axis.set_ylabel("microseconds per token")
        axis.set_title(work)
        axis.grid(True, which="both", alpha=0.25)
        axis.legend(fontsize="small")
    known = [results.machine.get("device"), results.machine.get("commit")]
    figure.suptitle(", ".join(str(part) for part in known if part), fontsize="medium")
    figure.savefig(path, dpi=150)


def check_format(path: Path) -> None:
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"an image must end in {' or '.join(FORMATS)}, got {path}")


def _lines(rows: Sequence[Row], work: str) -> list[Line]:
    """Of every mix and peer, at the usual head width; parts of a hybrid are left out."""
    timed = [
        row
        for row in rows
        if row.suite == "op" and row.work == work and row.timing and row.is_comparable
    ]
    timed = [row for row in timed if row.mix not in (str(ALL_LOCAL), str(ALL_LINEAR))]
    widths = [row.shape["P"] for row in timed]
    lines: dict[tuple[str, str | None], Line] = {}
    for row in timed:
        # one width in a picture: that of most rows
        if row.timing is None or row.shape["P"] != max(set(widths), key=widths.count):
            continue
        line = lines.setdefault((row.name, row.mix), Line(row.name, row.mix))
        tokens = row.shape["B"] * row.shape["T"]
        line.points[row.shape["T"]] = row.timing.median_ms * 1e3 / tokens
    return list(lines.values())
