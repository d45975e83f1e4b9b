"""Expected calibration error: does a thing said with 80% confidence hold 8 times in 10?"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meta_attention.errors import ShapeError

NUM_BINS = 15


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Predictions of like confidence."""

    count: int
    confidence: float  # mean; 0 in an empty bin
    accuracy: float  # share that held


class CalibrationTally:
    """Sums per bin, so that batches add up. Bins are equally wide and hold their upper edge.

    Args:
        num_bins: Number of bins.
    """

    def __init__(self, num_bins: int = NUM_BINS) -> None:
        self.num_bins = num_bins
        self.sums = torch.zeros(3, num_bins, dtype=torch.float64)
        """Per bin: predictions, their confidence, how many held."""

    def add(self, confidence: Tensor, is_correct: Tensor) -> None:
        """Count predictions: confidence in [0, 1] and whether each held, of one shape."""
        if confidence.shape != is_correct.shape:
            raise ShapeError(
                f"is_correct must have the shape of confidence, {list(confidence.shape)}, got "
                f"{list(is_correct.shape)}"
            )
        # on the CPU: some devices have no float64
        values = confidence.detach().flatten().cpu().double()
        held = is_correct.detach().flatten().cpu().double()
        index = (values * self.num_bins).ceil().long().sub(1).clamp(0, self.num_bins - 1)
        for row, weights in enumerate((torch.ones_like(values), values, held)):
            self.sums[row] += torch.bincount(index, weights, minlength=self.num_bins)

    @property
    def error(self) -> float:
        """Mean over predictions of the bins' |accuracy - mean confidence|; 0 for none."""
        count, confidence, held = self.sums
        return ((held - confidence).abs().sum() / count.sum().clamp(min=1.0)).item()

    @property
    def bins(self) -> list[CalibrationBin]:
        """What a reliability diagram shows."""
        return [
            CalibrationBin(int(count), confidence / max(count, 1.0), held / max(count, 1.0))
            for count, confidence, held in self.sums.T.tolist()
        ]


def expected_calibration_error(
    confidence: Tensor, is_correct: Tensor, num_bins: int = NUM_BINS
) -> float:
    """Calibration error of predictions that are all at hand; see :class:`CalibrationTally`."""
    tally = CalibrationTally(num_bins)
    tally.add(confidence, is_correct)
    return tally.error
