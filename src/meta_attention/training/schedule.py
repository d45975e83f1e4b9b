"""A number that changes in the course of training, its direction written out."""

import math
import re
from dataclasses import dataclass
from typing import Self

from meta_attention.errors import ConfigError

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_FORM = re.compile(
    rf"\s*({_NUMBER})\s*(?:->\s*({_NUMBER})\s*(?:@\s*({_NUMBER})\s*:\s*({_NUMBER})\s*)?)?"
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """From ``start`` to ``end``, in a straight line between two moments of training.

    Nothing is implied by the name of what it drives: a value rises when ``end`` is above
    ``start`` and falls when it is below. Before ``begin`` it is ``start``, from ``finish`` on it
    is ``end``; where the two moments are one, it jumps there.

    Args:
        start: Value at the first step.
        end: Value at the last step.
        begin: When it starts to change, as a fraction of training: 0 is the first step.
        finish: When it has reached ``end``: 1 is the last step.
    """

    start: float
    end: float
    begin: float = 0.0
    finish: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and math.isfinite(self.end)):
            raise ConfigError(f"a schedule must have finite values, got {self.start}, {self.end}")
        if not 0.0 <= self.begin <= self.finish <= 1.0:
            raise ConfigError(
                "a schedule must change between two fractions of training, 0 <= begin <= finish "
                f"<= 1, got {self.begin} and {self.finish}"
            )

    @classmethod
    def constant(cls, value: float) -> Self:
        """The same value throughout."""
        return cls(value, value)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``"0.1"``, ``"0->0.1"`` or ``"0->0.1@0.5:0.75"``.

        The last goes from 0 up to 0.1 between half and three quarters of training.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise ConfigError(
                "a schedule must be a number, 'START->END' or 'START->END@BEGIN:FINISH' with "
                f"fractions of training, such as '0->0.1@0.5:0.75', got {text!r}"
            )
        start, end, begin, finish = match.groups()
        if end is None:
            return cls.constant(float(start))
        return cls(float(start), float(end), float(begin or 0.0), float(finish or 1.0))

    def __call__(self, progress: float) -> float:
        """Value at ``progress``, 0 at the first step of training and 1 at the last."""
        if progress >= self.finish:
            return self.end
        if progress <= self.begin:
            return self.start
        done = (progress - self.begin) / (self.finish - self.begin)
        return self.start + done * (self.end - self.start)

    @property
    def is_constant(self) -> bool:
        return self.start == self.end

    def __str__(self) -> str:
        """The form that :meth:`parse` reads."""
        if self.is_constant:
            return f"{self.start:g}"
        span = "" if (self.begin, self.finish) == (0.0, 1.0) else f"@{self.begin:g}:{self.finish:g}"
        return f"{self.start:g}->{self.end:g}{span}"
