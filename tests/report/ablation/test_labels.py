"""Names of points do not cover one another."""

import random
from itertools import combinations

import pytest

from meta_attention.report.ablation.drawing import make_axes
from meta_attention.report.ablation.labels import DISTANCES, place_labels

pytest.importorskip("matplotlib")

NAMES = ["bayesian", "bayesian-sampled", "prior-free", "prior-free-cost", "recommended", "full"]


def place(points, names=NAMES, lines=()):
    _, axes = make_axes("x", "y")
    axes.plot([x for x, _ in points], [y for _, y in points], "o")
    axes.margins(0.12)
    boxes = place_labels(axes, points, names, lines)
    return axes, boxes


@pytest.mark.parametrize("seed", range(4))
def test_names_of_close_points_are_apart_and_in_the_frame(seed):
    draw = random.Random(seed)
    # most of them close together, one far away
    points = [(60 + draw.uniform(-3, 3), 2 + draw.uniform(-0.1, 0.1)) for _ in NAMES]
    points[-1] = (100, 4)
    axes, boxes = place(points)
    for one, other in combinations(boxes, 2):
        assert not one.overlaps(other)
    frame = axes.get_window_extent()
    for box in boxes:
        assert frame.x0 - 1 <= box.x0
        assert box.x1 <= frame.x1 + 1
        assert frame.y0 - 1 <= box.y0
        assert box.y1 <= frame.y1 + 1


def test_no_name_covers_a_point():
    points = [(float(x), 0.02 * x) for x in range(6)]
    axes, boxes = place(points)
    for point in points:
        at = axes.transData.transform(point)
        assert not any(box.contains(*at) for box in boxes)


def test_a_name_keeps_off_a_line():
    points = [(0.0, 0.0), (10.0, 0.0)]
    axes, (box, _) = place(points, ["local", "hybrid"], [(points[0], points[1])])
    _, y = axes.transData.transform(points[0])
    assert box.y1 <= y or box.y0 >= y or box.x1 < axes.transData.transform(points[0])[0]
    # without the line it stands on it
    _, (free, _) = place(points, ["local", "hybrid"])
    assert free.y0 < y < free.y1


def test_a_name_stays_near_its_point():
    points = [(0.0, 0.0), (10.0, 5.0)]
    axes, boxes = place(points, ["one", "two"])
    for point, box in zip(points, boxes, strict=True):
        x, y = axes.transData.transform(point)
        gap = max(box.x0 - x, x - box.x1, box.y0 - y, y - box.y1)
        assert gap <= DISTANCES[0] * axes.figure.dpi / 72 + 1
