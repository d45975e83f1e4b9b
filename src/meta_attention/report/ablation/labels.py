"""Names beside points, placed so that none covers another name, a point, a line or the frame."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meta_attention.report.ablation.drawing import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

SIZE = 8.0  # of letters, in points
# around a point: right first, where one looks for a name
ANGLES = (0, 45, -45, 180, 90, -90, 135, -135, 22, -22, 158, -158, 67, -67, 113, -113)
DISTANCES = (7, 13, 20, 28, 38, 50, 64)  # points; beyond the first a thin line leads to the name


Point = tuple[float, float]


def place_labels(
    axes: "Axes",
    points: Sequence[Point],
    labels: Sequence[str],
    lines: Sequence[tuple[Point, Point]] = (),
) -> "list[Bbox]":
    """Write a name at each point; where they came to stand, in pixels.

    Everything else must have been drawn, as the axes may not move any more.

    Args:
        axes: Where the points are drawn.
        points: In the units of the axes.
        labels: Their names.
        lines: Ends of what else should not be covered.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    figure = axes.get_figure(root=True)
    assert figure is not None
    FigureCanvasAgg(figure).draw()
    pixels = figure.dpi / 72.0
    frame = axes.get_window_extent()

    def to_pixels(point: Point) -> Point:
        x, y = axes.transData.transform(point)
        return float(x), float(y)

    at = [to_pixels(point) for point in points]
    room = 5.0 * pixels
    taken = [Bbox.from_extents(x - room, y - room, x + room, y + room) for x, y in at]
    for begin, end in lines:
        taken += _beads(to_pixels(begin), to_pixels(end))
    placed: list[Bbox] = []
    for (x, y), point, label in zip(at, points, labels, strict=True):
        text = axes.annotate(label, point, fontsize=SIZE, color=INK)
        box = text.get_window_extent()
        text.remove()
        best: tuple[float, float, float, Bbox] | None = None
        for distance in DISTANCES:
            for angle in ANGLES:
                dx, dy = (distance * f(math.radians(angle)) for f in (math.cos, math.sin))
                # the nearest edge of the name, not its middle, is at that distance
                left = x + dx * pixels - box.width * (1.0 - math.cos(math.radians(angle))) / 2.0
                low = y + dy * pixels - box.height * (1.0 - math.sin(math.radians(angle))) / 2.0
                own = Bbox.from_bounds(left, low, box.width, box.height)
                cost = sum(_shared(own, other) for other in (*taken, *placed))
                cost += own.width * own.height - _shared(own, frame)
                if best is None or cost < best[0] - 1e-6:
                    best = (cost, left, low, own)
            if best is not None and best[0] < 1e-6:
                break
        assert best is not None
        _, left, low, own = best
        placed.append(own)
        is_far = math.hypot(*_gap(own, x, y)) > 10.0 * pixels
        axes.annotate(
            label,
            point,
            xytext=((left - x) / pixels, (low - y) / pixels),
            textcoords="offset points",
            fontsize=SIZE,
            color=INK,
            arrowprops={"arrowstyle": "-", "color": "#888888", "lw": 0.6} if is_far else None,
        )
    return placed


def _beads(begin: Point, end: Point) -> "list[Bbox]":
    """A line as a row of small boxes."""
    from matplotlib.transforms import Bbox

    (x0, y0), (x1, y1) = begin, end
    count = max(1, int(math.hypot(x1 - x0, y1 - y0) / 3.0))
    middles = [(x0 + (x1 - x0) * i / count, y0 + (y1 - y0) * i / count) for i in range(count + 1)]
    return [Bbox.from_extents(x - 2, y - 2, x + 2, y + 2) for x, y in middles]


def _shared(one: "Bbox", other: "Bbox") -> float:
    """Area of what two boxes share."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return max(width, 0.0) * max(height, 0.0)


def _gap(box: "Bbox", x: float, y: float) -> tuple[float, float]:
    """From a point to the nearest of a box."""
    return max(box.x0 - x, x - box.x1, 0.0), max(box.y0 - y, y - box.y1, 0.0)
