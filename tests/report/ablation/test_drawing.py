"""Figures that can be read: nothing in them covers anything else."""

import pytest

from meta_attention.report.ablation.figures import draw_sections
from meta_attention.report.ablation.read import read_ablation

pytest.importorskip("matplotlib")


def test_no_legend_covers_a_plot(ablation_folder):
    legends = 0
    for section in draw_sections(read_ablation([ablation_folder])):
        for panel in section.panels:
            panel.figure.draw_without_rendering()
            (axes,) = panel.figure.axes
            assert axes.get_legend() is None
            for legend in panel.figure.legends:
                legends += 1
                box = legend.get_window_extent()
                assert box.y0 >= axes.get_window_extent().y1 - 1.0, panel.name
                assert box.x1 <= panel.figure.bbox.x1 + 1.0, panel.name
    assert legends > 10


def test_lines_on_one_another_differ_in_their_dashes():
    from meta_attention.report.ablation.drawing import line_of

    # the paper's recipe and its variant with samples, which often agree
    assert line_of(0) != line_of(1)
