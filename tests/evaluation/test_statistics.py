"""Means over seeds and their intervals."""

import math

import pytest
import torch
from torch.distributions import StudentT

from meta_attention.evaluation.statistics import Figure, difference, half_interval


def test_an_interval_is_student_t():
    assert half_interval([1.0]) is None
    assert half_interval([1.0, 2.0, 3.0]) == pytest.approx(4.30 / math.sqrt(3.0))


@pytest.mark.parametrize("n", [3, 5])
def test_an_interval_holds_the_true_mean_19_times_in_20(n):
    draws = torch.randn(4000, n).tolist()
    held = sum(abs(sum(row) / n) <= half_interval(row) for row in draws) / len(draws)
    assert held == pytest.approx(0.95, abs=0.012)


def test_quantiles_are_those_of_the_distribution():
    """Monte Carlo, as torch has no inverse of Student's t."""
    for n in (2, 6, 11, 12, 30):
        draws = StudentT(n - 1.0).sample((400_000,)).abs()
        width = half_interval([float(i) for i in range(n)])
        spread = torch.arange(float(n)).std().item() / math.sqrt(n)
        assert (draws <= width / spread).float().mean().item() == pytest.approx(0.95, abs=0.002)


def test_groups_of_equal_means_differ_by_their_interval_once_in_20():
    torch.manual_seed(0)
    # neither spread is the other's
    pairs = zip(torch.randn(4000, 5).tolist(), (3.0 * torch.randn(4000, 4)).tolist(), strict=True)
    found = [difference(values, others) for values, others in pairs]
    held = sum(figure.low <= 0.0 <= figure.high for figure in found) / len(found)
    assert held == pytest.approx(0.955, abs=0.015)


def test_a_difference_is_of_means_and_needs_two_values_for_an_interval():
    figure = difference([1.0, 2.0], [4.0, 8.0, 6.0])
    assert (figure.mean, figure.n) == (-4.5, 2)
    assert difference([1.0], [4.0, 8.0]) == Figure(-5.0, None, 1)
    assert difference([1.0, 1.0], [2.0, 2.0]) == Figure(-1.0, 0.0, 2)


def test_a_figure_leaves_out_what_is_not_known():
    assert Figure.of([None, None]) is None
    figure = Figure.of([1.0, None, 3.0])
    assert (figure.mean, figure.n) == (2.0, 2)
    assert figure.low < 2.0 < figure.high


def test_a_figure_shows_its_interval_in_the_same_unit():
    assert Figure(0.25, 0.011, 5).show(".1f", scale=100.0) == "25.0 \u00b11.1"
    assert Figure(0.25, None, 1).show(".2f", sign="+") == "+0.25"
