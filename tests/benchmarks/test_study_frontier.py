"""The figure of the study: which rows it has, and that it can be read."""

import itertools
import json

import pytest
import study_frontier
import study_report
import study_text
from matplotlib import pyplot as plt
from matplotlib.text import Annotation, Text

from meta_attention.errors import DataError


@pytest.fixture(autouse=True)
def no_figures_left():
    yield
    plt.close("all")


def test_reports_that_were_kept_make_one_frontier_of_their_best_rows(rounds, tmp_path):
    """Rows of most seeds, and times as shares of the hybrid's of the same table."""
    first, second = (study_report.report([runs]) for runs in rounds)
    few = [{"variant": "hybrid-1-5-x32-late", "beyond_hybrid": {"mean": 9.0, "n": 1}}]
    few.append({"variant": "hybrid-1-5", "beyond_hybrid": None, "loss": {"n": 1}})
    for row, step, prefill in zip(few, (6.0, 4.0), (1.0, 2.0), strict=True):
        row |= {"is_routed": False, "attention_flops": {"mean": 0.1}}
        row |= {"step_ms": {"mean": step}, "prefill_ms": {"64": {"mean": prefill}}}
    other = {"note": "a sentence", "times": few, "small": [few[0] | {"variant": "full"}]}
    paths = []
    for name, tables in (("first", first), ("other", other), ("second", second)):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(tables))
    out = tmp_path / "frontier.svg"
    files = ["--rows", *map(str, paths), "--scale", "tiny"]
    assert study_text.main(["frontier", *files, "--out", str(out)]) == 0
    assert "share of hybrid-1-5's" in out.read_text()
    rows = {row["variant"]: row for row in study_frontier.published_rows(paths, "tiny")}
    names = ["hybrid-1-5", "hybrid-1-5-x32-late", "prior-free-wide-kv_head-0.45"]
    assert sorted(rows) == names
    narrowed = rows["hybrid-1-5-x32-late"]
    assert narrowed["beyond_hybrid"]["mean"] == pytest.approx(0.1)
    assert narrowed["step_ms"]["mean"] == pytest.approx(1.5)
    assert narrowed["prefill_ms"]["64"]["mean"] == pytest.approx(0.5)
    assert rows["prior-free-wide-kv_head-0.45"]["step_ms"] is None


def test_a_frontier_needs_reports_that_exist_and_have_rows(tmp_path):
    with pytest.raises(DataError, match="a report must be a file that exists"):
        study_frontier.published_rows([tmp_path / "no.json"], "tiny")
    path = tmp_path / "empty.json"
    path.write_text("{}")
    with pytest.raises(DataError, match="no table of tiny models"):
        study_frontier.published_rows([path], "tiny")


def row(variant, flops, distance, seeds=5):
    loss = {"mean": 3.0 + distance, "interval": 0.1, "n": seeds}
    beyond = {"mean": distance, "interval": 0.001, "n": seeds}
    return {
        "variant": variant,
        "is_routed": not variant.startswith(("full", "local", "hybrid")),
        "loss": loss,
        "beyond_hybrid": None if variant == "hybrid-1-5" else beyond,
        "attention_flops": {"mean": flops},
        "step_ms": None,
        "prefill_ms": {},
    }


@pytest.fixture
def crowd():
    """Variants of nearly the same loss and cost, and some that are far."""
    far = [row("full", 1.0, 0.04), row("local", 0.02, 0.25, seeds=1), row("hybrid-1-5", 0.18, 0.0)]
    names = [
        f"bayes-wide-kv_head-0.{target}{ending}"
        for target in ("3", "45", "6")
        for ending in ("", "-tilted", "-fading", "-flat", "-blind", "-recurrence")
    ]
    return far + [row(name, 0.09 + i * 1e-4, 0.002 + i * 1e-5) for i, name in enumerate(names)]


def numbers(axis):
    return [child for child in axis.get_children() if isinstance(child, Annotation)]


def test_every_variant_has_a_number_and_a_name_in_the_key(crowd):
    figure = study_frontier.frontier_figure(crowd)
    everything, near = figure.axes
    assert sorted(int(n.get_text()) for n in numbers(everything)) == list(range(1, 22))
    # full and local are far from the hybrid
    assert len(numbers(near)) == 19
    key = [text.get_text() for text in figure.texts]
    labels = dict(line.split(maxsplit=1) for line in key if line.strip()[:1].isdigit())
    places = {n.get_text(): n.xy for n in numbers(everything)}
    for drawn in crowd:
        name = drawn["variant"].removeprefix("bayes-")
        label = f"{name} ({drawn['loss']['n']})"
        [number] = [number for number, found in labels.items() if found == label]
        height = 0.0 if drawn["beyond_hybrid"] is None else drawn["beyond_hybrid"]["mean"]
        assert places[number] == (drawn["attention_flops"]["mean"], height)


def test_numbers_of_a_crowd_do_not_hide_each_other(crowd):
    figure = study_frontier.frontier_figure(crowd)
    figure.canvas.draw()
    for axis in figure.axes:
        boxes = [n.get_tightbbox() for n in numbers(axis)]
        frame = axis.get_window_extent()
        assert all(frame.contains(box.x0, box.y0) for box in boxes)
        # without the line that leads to a marker
        texts = [Text.get_window_extent(n) for n in numbers(axis)]
        assert not [1 for a, b in itertools.combinations(texts, 2) if a.overlaps(b)]


def test_a_variant_of_few_seeds_is_hollow_and_no_part_of_the_static_line():
    rows = [
        row("hybrid-1-5", 0.18, 0.0),
        row("local", 0.02, 0.25),
        row("hybrid-1-1", 0.5, -0.1, seeds=2),
    ]
    [axis] = study_frontier.frontier_figure(rows).axes
    [line] = [line for line in axis.lines if len(line.get_xdata()) > 1]
    assert list(line.get_xdata()) == [0.02, 0.18]
    markers = {line.get_xdata()[0]: line.get_markerfacecolor() for line in axis.lines[:-1]}
    assert markers[0.5] == "white"
    assert markers[0.02] != "white"
