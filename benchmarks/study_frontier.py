"""The figure of the study: what every variant loses, against what it costs.

Losses are distances to the hybrid of the same seed, as seeds differ by more than variants do. Every
variant has a number, and the key beside the figure says which it is; where most of them stand, a
panel shows them once more and larger.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study_variants import REFERENCE, SCALES, find_variant, place_of

from meta_attention.errors import DataError
from meta_attention.report.ablation.summary import frontier

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]
FAMILIES = {
    "static": ("tab:gray", "s"),
    "rule": ("tab:green", "D"),
    "prior-free": ("tab:orange", "^"),
    "bayes": ("tab:blue", "o"),
    "value": ("tab:red", "*"),
}
# seeds below which a variant is drawn hollow and without its interval, which would hide the rest
ENOUGH = 3
# nats around the hybrid that have a panel of their own, if so many variants are there; and up to
# which the other panels are linear
NEAR, CROWD, LINEAR = 0.02, 8, 0.01
# labels: points from their marker, nearest first, and directions
DISTANCES = (5, 9, 14, 20, 27, 35, 44)
DIRECTIONS = ((0.7, 0.7), (0.7, -0.7), (-0.7, 0.7), (-0.7, -0.7), (1, 0), (-1, 0), (0, 1), (0, -1))
FONT = 7
# inches: a panel, and the width of the key
PANEL, KEY = (4.8, 4.5), 2.7


@dataclass(frozen=True, slots=True)
class Point:
    """A variant in a panel."""

    number: int
    family: str
    x: float
    y: float
    interval: float
    is_hollow: bool


def draw_published(paths: Sequence[Path], scale: str, out: Path) -> list[Row]:
    """The frontier of reports that were kept, such as those in ``benchmarks/results``."""
    rows = published_rows(paths, scale)
    draw_frontier(rows, out, are_times_shares=True)
    return rows


def numbered(rows: Sequence[Row]) -> list[tuple[int, Row]]:
    """Variants that are drawn, with the numbers by which figure and table name them."""
    is_paired = any(row["variant"] == REFERENCE for row in rows)
    drawn = [row for row in rows if _height(row, is_paired) is not None]
    drawn.sort(key=lambda row: list(FAMILIES).index(family_of(row)))  # as the key has them
    return list(enumerate(drawn, 1))


def published_rows(paths: Sequence[Path], scale: str) -> list[Row]:
    """A row per variant: of the table that has most of its seeds, timed as in any of them.

    Files hold tables by name. One that is named as another scale is left out.
    """
    found: dict[str, Row] = {}
    for path in paths:
        if not path.is_file():
            raise DataError(f"a report must be a file that exists, got {str(path)!r}")
        tables: dict[str, Any] = json.loads(path.read_text())
        for name, table in tables.items():
            is_table = isinstance(table, list) and all("beyond_hybrid" in row for row in table)
            if not is_table or (name in SCALES and name != scale):
                continue
            for row in _with_times_as_shares(table):
                other = found.get(row["variant"], row)
                best = max(other, row, key=_num_compared)
                timed = other if other["step_ms"] else row
                times = {key: timed[key] for key in ("step_ms", "prefill_ms")}
                found[row["variant"]] = best | times
    if not found:
        raise DataError(f"no table of {scale} models in {', '.join(map(str, paths))}")
    return [found[name] for name in sorted(found, key=place_of)]


def _num_compared(row: Row) -> int:
    height = _height(row, True)
    return 0 if height is None else height["n"]


def _with_times_as_shares(table: Sequence[Row]) -> list[Row]:
    """Rows whose times are shares of the hybrid's: those of one table are of one machine."""
    hybrid = next((row for row in table if row["variant"] == REFERENCE), None)

    def share(figure: Row | None, of: Row | None) -> Row | None:
        return {"mean": figure["mean"] / of["mean"]} if figure and of else None

    rows = []
    for row in table:
        step_ms = share(row["step_ms"], hybrid and hybrid["step_ms"])
        prefill_ms = {
            length: share(figure, hybrid and hybrid["prefill_ms"].get(length))
            for length, figure in row["prefill_ms"].items()
        }
        rows.append(row | {"step_ms": step_ms, "prefill_ms": prefill_ms})
    return rows


def _height(row: Row, is_paired: bool) -> Row | None:
    """Where a variant is drawn."""
    if not is_paired:
        return row["loss"]
    if row["variant"] == REFERENCE:
        return {"mean": 0.0, "interval": 0.0, "n": row["loss"]["n"]}
    return row["beyond_hybrid"]


def family_of(row: Row) -> str:
    """What routes a variant, if anything."""
    if not row["is_routed"]:
        return "static"
    variant = find_variant(row["variant"])
    names = {"prior_free": "prior-free", "bayesian": "bayes", "value": "value"}
    return "rule" if variant.is_rule else names[variant.controller]


def draw_frontier(rows: Sequence[Row], path: Path, *, are_times_shares: bool = False) -> None:
    """Write the figure, where matplotlib is installed.

    Args:
        rows: As :func:`study_report.summarise` gives them.
        path: Where the figure goes.
        are_times_shares: Times are shares of the hybrid's, not milliseconds.
    """
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed; run report where it is")
        return
    figure = frontier_figure(rows, are_times_shares=are_times_shares)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})
    matplotlib.pyplot.close(figure)
    print(f"written: {path}")


def frontier_figure(rows: Sequence[Row], *, are_times_shares: bool = False) -> "Figure":
    """Loss against counted FLOPs, and against times that were measured alone.

    Variants that have no seed in common with the hybrid are left out, where that is there.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    is_paired = any(row["variant"] == REFERENCE for row in rows)
    drawn = [row for _, row in numbered(rows)]
    panels = _panels(drawn, is_paired, are_times_shares)
    columns = len(panels) if len(panels) < 4 else 2
    lines = -(-len(panels) // columns)
    # inches
    width, height = PANEL[0] * columns + KEY, PANEL[1] * lines
    figure, axes = plt.subplots(lines, columns, figsize=(width, height), squeeze=False)
    top, keys_at = 1.0 - 0.25 / height, 1.0 - KEY / width
    figure.subplots_adjust(
        left=0.8 / width, right=keys_at - 0.1 / width, bottom=0.5 / height, top=top, wspace=0.22
    )
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw(axis, panel.points)
        panel.scale(axis)
        axis.set_xlabel(panel.label)
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(panels) :]:
        axis.remove()
    name = f"loss minus that of {REFERENCE}, same seed" if is_paired else "validation loss"
    for axis in axes[:, 0]:
        axis.set_ylabel(f"{name}, nats per token", fontsize=9)
    _draw_key(figure, drawn, is_paired, keys_at, top)
    # where labels have room is known once everything else has its place
    figure.canvas.draw()
    for axis, panel in zip(axes.flat, panels, strict=False):
        _number(axis, panel.points)
    return figure


@dataclass(frozen=True, slots=True)
class Panel:
    """Variants against one measure of what they cost."""

    label: str
    points: list[Point]
    scale: Callable[["Axes"], object]


def _panels(rows: Sequence[Row], is_paired: bool, are_times_shares: bool) -> list[Panel]:
    """Of the measures that any variant has."""
    lengths = [length for row in rows for length in row["prefill_ms"]]
    longest = max(lengths, key=int, default=None)
    unit = f"share of {REFERENCE}'s" if are_times_shares else "ms"
    flops = "counted attention FLOPs, share of full attention"

    def points(read: Callable[[Row], Row | None]) -> list[Point]:
        return list(_points(rows, read, is_paired))

    def far(axis: "Axes") -> None:
        if is_paired:
            axis.set_yscale("symlog", linthresh=LINEAR)
            axis.yaxis.set_major_formatter("{x:g}")

    def logarithmic(axis: "Axes") -> None:
        axis.set_xscale("log")
        # a power of ten alone says little
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        far(axis)

    every = points(lambda row: row["attention_flops"])
    panels = [Panel(flops, every, logarithmic)]
    near = _near_reference(rows, every) if is_paired else []
    if len(near) >= CROWD:

        def around(axis: "Axes") -> None:
            xs, ys = [p.x for p in near], [p.y for p in near]
            for limit, values in ((axis.set_xlim, xs), (axis.set_ylim, ys)):
                margin = 0.1 * (max(values) - min(values)) or LINEAR
                limit(min(values) - margin, max(values) + margin)

        panels.append(Panel("the same, near the hybrid", near, around))
    for label, read in (
        (f"training step alone on the device, {unit}", lambda row: row["step_ms"]),
        (f"prefill of {longest} tokens, {unit}", lambda row: row["prefill_ms"].get(longest)),
    ):
        if found := points(read):
            panels.append(Panel(label, found, far))
    return panels


def _near_reference(rows: Sequence[Row], points: Sequence[Point]) -> list[Point]:
    """Of about its loss and no dearer: where variants are closest to each other."""
    number = next(i for i, row in enumerate(rows, 1) if row["variant"] == REFERENCE)
    dearest = next(p.x for p in points if p.number == number)
    return [p for p in points if abs(p.y) <= NEAR and p.x <= dearest]


def _points(
    rows: Sequence[Row], read: Callable[[Row], Row | None], is_paired: bool
) -> Iterator[Point]:
    for number, row in enumerate(rows, 1):
        x, y = read(row), _height(row, is_paired)
        if x is not None and y is not None:
            is_hollow = y["n"] < ENOUGH
            interval = 0.0 if is_hollow or y["interval"] is None else y["interval"]
            yield Point(number, family_of(row), x["mean"], y["mean"], interval, is_hollow)


def _draw(axis: "Axes", points: Sequence[Point]) -> None:
    for p in points:
        colour, marker = FAMILIES[p.family]
        axis.errorbar(
            [p.x],
            [p.y],
            yerr=[p.interval],
            fmt=marker,
            color=colour,
            markerfacecolor="white" if p.is_hollow else colour,
            markersize=8 if marker == "*" else 5,
            elinewidth=0.6,
        )
    static = frontier([(p.x, p.y) for p in points if p.family == "static" and not p.is_hollow])
    xs, ys = [x for x, _ in static], [y for _, y in static]
    axis.plot(xs, ys, color=FAMILIES["static"][0], linewidth=0.8, zorder=0)


def _draw_key(
    figure: "Figure", rows: Sequence[Row], is_paired: bool, left: float, top: float
) -> None:
    """Numbers and names, a family after the other."""
    from matplotlib.lines import Line2D

    height = figure.get_figheight()
    line = min(0.155, (height - 0.4) / (len(rows) + 2 * len(FAMILIES))) / height
    at = top
    for family, (colour, marker) in FAMILIES.items():
        named = [(i, row) for i, row in enumerate(rows, 1) if family_of(row) == family]
        if not named:
            continue
        figure.text(left + 0.012, at, family, color=colour, weight="bold", fontsize=FONT, va="top")
        figure.add_artist(
            Line2D([left + 0.005], [at - 0.4 * line], marker=marker, color=colour, markersize=5)
        )
        at -= line
        for number, row in named:
            height_of = _height(row, is_paired)
            assert height_of is not None
            name = row["variant"].removeprefix(f"{family}-")
            figure.text(
                left, at, f"{number:>2}  {name} ({height_of['n']})", fontsize=FONT - 0.5, va="top"
            )
            at -= line
        at -= 0.5 * line
    figure.text(
        left,
        at,
        "in brackets: seeds; hollow: fewer than three,\nso no interval. Grey line: static models\n"
        "that no cheaper one beats",
        fontsize=FONT - 0.5,
        va="top",
        style="italic",
    )


def _number(axis: "Axes", points: Sequence[Point]) -> None:
    """Beside every marker its number, where neither markers nor other numbers are."""
    from matplotlib.transforms import Bbox

    def sign(value: float) -> int:
        return (value > 0) - (value < 0)

    def box(x: float, y: float, width: float, height: float) -> Bbox:
        return Bbox.from_bounds(x - width / 2, y - height / 2, width, height)

    pixels = axis.figure.dpi / 72
    places = [axis.transData.transform((p.x, p.y)) for p in points]
    taken: list[Bbox] = [box(x, y, 7 * pixels, 7 * pixels) for x, y in places]
    frame = axis.get_window_extent()

    def is_free(room: Bbox) -> bool:
        is_inside = frame.contains(room.x0, room.y0) and frame.contains(room.x1, room.y1)
        return is_inside and not any(room.overlaps(other) for other in taken)

    for p, (x, y) in zip(points, places, strict=True):
        width, height = (4.4 * len(str(p.number)) + 1) * pixels, FONT * pixels
        # from the marker to the number's nearer end
        shifts = [
            (d * pixels * dx + width * sign(dx) / 2, d * pixels * dy)
            for d, (dx, dy) in product(DISTANCES, DIRECTIONS)
        ]
        rooms = [box(x + dx, y + dy, width, height) for dx, dy in shifts]
        # without any room, over something else rather than not at all
        best = next((i for i, room in enumerate(rooms) if is_free(room)), 0)
        (dx, dy), room = shifts[best], rooms[best]
        taken.append(room)
        is_far = math.hypot(dx, dy) > 12 * pixels
        axis.annotate(
            str(p.number),
            (p.x, p.y),
            xytext=(dx / pixels, dy / pixels),
            textcoords="offset points",
            fontsize=FONT,
            color=FAMILIES[p.family][0],
            ha="center",
            va="center",
            arrowprops={"arrowstyle": "-", "linewidth": 0.3, "color": "0.6"} if is_far else None,
        )
