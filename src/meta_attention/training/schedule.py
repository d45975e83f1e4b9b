"""A number that changes in the course of training, its direction written out."""

import math
import re
from dataclasses import dataclass
from typing import Self

from meta_attention.errors import ConfigError

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_MOMENT = rf"{_NUMBER}s?"
_FORM = re.compile(
    rf"\s*({_NUMBER})\s*"
    rf"(?:->\s*({_NUMBER})\s*"
    rf"(?:@\s*(?:({_MOMENT})\s*:\s*({_MOMENT})|settled\s*\+\s*({_MOMENT}))\s*)?)?"
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
        in_steps: ``begin`` and ``finish`` are numbers of steps, not fractions.
        when_settled: They count from the moment when the task loss has settled, not from the
            first step. Who asks for a value says when that was.
    """

    start: float
    end: float
    begin: float = 0.0
    finish: float = 1.0
    in_steps: bool = False
    when_settled: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and math.isfinite(self.end)):
            raise ConfigError(f"a schedule must have finite values, got {self.start}, {self.end}")
        if self.in_steps and not 0.0 <= self.begin <= self.finish < math.inf:
            raise ConfigError(
                "a schedule must change between two steps, 0 <= begin <= finish, got "
                f"{self.begin:g} and {self.finish:g}"
            )
        if not self.in_steps and not 0.0 <= self.begin <= self.finish <= 1.0:
            raise ConfigError(
                "a schedule must change between two fractions of training, 0 <= begin <= finish "
                f"<= 1, got {self.begin} and {self.finish}; steps are written with an s, as 500s"
            )

    @classmethod
    def constant(cls, value: float) -> Self:
        """The same value throughout."""
        return cls(value, value)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a schedule as it is written on the command line.

        - ``"0.1"``: throughout.
        - ``"0->0.1"``: from the first step to the last.
        - ``"0->0.1@0.5:0.75"``: up to 0.1 between half and three quarters of training.
        - ``"0->0.1@2000s:3000s"``: between these steps.
        - ``"0->0.1@settled+500s"``, ``"0->0.1@settled+0.2"``: from when the task loss has settled,
          over 500 steps or a fifth of training.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise ConfigError(
                "a schedule must be a number, 'START->END' or 'START->END@BEGIN:FINISH' with "
                "fractions of training, such as '0->0.1@0.5:0.75', with steps, such as "
                "'0->0.1@2000s:3000s', or '0->0.1@settled+500s', got "
                f"{text!r}"
            )
        start, end, begin, finish, length = match.groups()
        if end is None:
            return cls.constant(float(start))
        if length is not None:
            begin, finish = "0s" if length.endswith("s") else "0", length
        begin, finish = begin or "0", finish or "1"
        if begin.endswith("s") != finish.endswith("s"):
            raise ConfigError(
                f"a schedule must begin and finish both at steps or both at fractions, got {text!r}"
            )
        return cls(
            float(start),
            float(end),
            float(begin.removesuffix("s")),
            float(finish.removesuffix("s")),
            in_steps=finish.endswith("s"),
            when_settled=length is not None,
        )

    def __call__(self, progress: float) -> float:
        """Value at ``progress``, 0 at the first step of training and 1 at the last.

        For schedules by fractions; :meth:`at` is for all.
        """
        return self._between(progress, self.begin, self.finish)

    def at(self, step: int, num_steps: int, settled: int | None = None) -> float:
        """Value during a step.

        Args:
            step: How many steps were done before it.
            num_steps: How many there are.
            settled: How many had been done when the task loss settled; None: it has not.
        """
        if self.when_settled:
            if settled is None:
                return self.start
            step = step - settled
        if self.in_steps:
            return self._between(step, self.begin, self.finish)
        return self(min(1.0, step / max(1, num_steps - 1)))

    def last_moment_to_settle(self, num_steps: int) -> float:
        """Steps after which it must begin to have reached its end with the last one."""
        length = self.finish if self.in_steps else self.finish * (num_steps - 1)
        return max(0.0, num_steps - 1 - length)

    def _between(self, now: float, begin: float, finish: float) -> float:
        if now >= finish:
            return self.end
        if now <= begin:
            return self.start
        return self.start + (now - begin) / (finish - begin) * (self.end - self.start)

    @property
    def is_constant(self) -> bool:
        return self.start == self.end

    def __str__(self) -> str:
        """The form that :meth:`parse` reads."""
        if self.is_constant:
            return f"{self.start:g}"
        unit = "s" if self.in_steps else ""
        finish = f"{self.finish:.12g}{unit}"
        if self.when_settled:
            span = f"@settled+{finish}"
        elif (self.begin, self.finish, unit) == (0.0, 1.0, ""):
            span = ""
        else:
            span = f"@{self.begin:.12g}{unit}:{finish}"
        return f"{self.start:g}->{self.end:g}{span}"
