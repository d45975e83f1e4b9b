"""Expected calibration error."""

import pytest
import torch

from meta_attention.errors import ShapeError
from meta_attention.evaluation.calibration import CalibrationTally, expected_calibration_error


def naive(confidence, is_correct, num_bins=15):
    """The definition, bin by bin."""
    error, n = 0.0, len(confidence)
    for index in range(num_bins):
        low, high = index / num_bins, (index + 1) / num_bins
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            gap = is_correct[inside].double().mean() - confidence[inside].double().mean()
            error += inside.sum().item() / n * abs(gap.item())
    return error


def test_it_is_the_definition():
    confidence, is_correct = torch.rand(1000), torch.rand(1000) < 0.4
    error = expected_calibration_error(confidence, is_correct)
    assert error == pytest.approx(naive(confidence, is_correct), abs=1e-9)


def test_batches_add_up():
    confidence, is_correct = torch.rand(4, 250), torch.rand(4, 250) < 0.4
    tally = CalibrationTally()
    for row in range(4):
        tally.add(confidence[row], is_correct[row])
    assert tally.error == pytest.approx(expected_calibration_error(confidence, is_correct))
    assert sum(one.count for one in tally.bins) == 1000
    assert len(tally.bins) == 15


def test_honest_confidence_has_no_error():
    confidence = torch.full((1000,), 0.7)
    is_correct = torch.arange(1000) < 700
    assert expected_calibration_error(confidence, is_correct) == pytest.approx(0.0, abs=1e-6)


def test_certain_and_wrong_is_the_largest_error():
    wrong = torch.zeros(10, dtype=torch.bool)
    assert expected_calibration_error(torch.ones(10), wrong) == 1.0
    assert expected_calibration_error(torch.zeros(10), ~wrong) == 1.0


def test_an_edge_belongs_to_the_bin_below_it():
    tally = CalibrationTally(num_bins=2)
    tally.add(torch.tensor([0.0, 0.5, 0.75, 1.0]), torch.ones(4, dtype=torch.bool))
    assert [one.count for one in tally.bins] == [2, 2]
    assert tally.bins[1].confidence == 0.875


def test_nothing_seen_is_no_error():
    assert CalibrationTally().error == 0.0


def test_shapes_must_agree():
    with pytest.raises(ShapeError):
        CalibrationTally().add(torch.rand(3), torch.rand(2) < 1)
