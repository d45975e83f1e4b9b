"""Means over seeds, and how far to trust them."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

# 97.5% quantile of the normal distribution, and of Student's t for 1, 2, ... degrees of freedom
_NORMAL = 1.96
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean over seeds."""

    mean: float
    interval: float | None
    """Half the width of the 95% interval of the mean; None for a single value."""
    n: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "Figure | None":
        """The mean of what is known of ``values``; None if nothing is."""
        known = [float(value) for value in values if value is not None]
        if not known:
            return None
        return cls(statistics.mean(known), half_interval(known), len(known))

    @property
    def low(self) -> float:
        return self.mean - (self.interval or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.interval or 0.0)

    def show(self, form: str, scale: float = 1.0, sign: str = "") -> str:
        """``1.23 +-0.04``, or the mean alone where there is no interval.

        Args:
            form: As for ``format``, without a sign.
            scale: What both numbers are multiplied with, such as 100 for percent.
            sign: ``"+"`` to show that of the mean always.
        """
        text = format(self.mean * scale, sign + form)
        return text if self.interval is None else f"{text} \u00b1{self.interval * scale:{form}}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def half_interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95% interval of the mean (Student's t); None for a single value."""
    degrees = len(values) - 1
    if degrees < 1:
        return None
    return _quantile(degrees) * statistics.stdev(values) / math.sqrt(len(values))


def difference(values: Sequence[float], others: Sequence[float]) -> Figure:
    """How far apart the means of two groups are that have nothing in common but their kind.

    The interval is Welch's, which takes neither spread for the other's, its degrees of freedom
    rounded down; None where a group is a single value. ``n`` is of the smaller group.
    """
    mean, n = statistics.mean(values) - statistics.mean(others), min(len(values), len(others))
    if n < 2:
        return Figure(mean, None, n)
    variances = [statistics.variance(group) / len(group) for group in (values, others)]
    if not any(variances):
        return Figure(mean, 0.0, n)
    parts = [v**2 / (len(g) - 1) for v, g in zip(variances, (values, others), strict=True)]
    degrees = math.floor(sum(variances) ** 2 / sum(parts))
    return Figure(mean, _quantile(degrees) * math.sqrt(sum(variances)), n)


def _quantile(degrees: int) -> float:
    """97.5% of Student's t."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    # the first two terms of its expansion around the normal's: right to two digits
    return _NORMAL + 2.372 / degrees + 2.82 / degrees**2
