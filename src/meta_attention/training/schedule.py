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
_PEAKED = re.compile(
    rf"\s*({_NUMBER})\s*->\s*({_NUMBER})\s*->\s*({_NUMBER})\s*"
    rf"@\s*({_MOMENT})\s*:\s*({_MOMENT})\s*:\s*({_MOMENT})\s*"
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """From ``start`` to ``end``, in a straight line between two moments of training.

    Nothing is implied by the name of what it drives: a value rises when ``end`` is above
    ``start`` and falls when it is below. Before ``begin`` it is ``start``, from ``finish`` on it
    is ``end``; where the two moments are one, it jumps there. With a peak it is two lines: to
    ``peak`` at the moment ``turn``, and on to ``end``.

    Args:
        start: Value at the first step.
        end: Value at the last step.
        begin: When it starts to change, as a fraction of training: 0 is the first step.
        finish: When it has reached ``end``: 1 is the last step.
        in_steps: ``begin``, ``finish`` and ``turn`` are numbers of steps, not fractions.
        when_settled: They count from the moment when the task loss has settled, not from the
            first step. Who asks for a value says when that was.
        peak: Value between the two lines; None: there is one line.
        turn: When the peak is reached, between ``begin`` and ``finish``.
    """

    start: float
    end: float
    begin: float = 0.0
    finish: float = 1.0
    in_steps: bool = False
    when_settled: bool = False
    peak: float | None = None
    turn: float | None = None

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, self.values)):
            shown = ", ".join(map(str, self.values))
            raise ConfigError(f"a schedule must have finite values, got {shown}")
        if (self.peak is None) != (self.turn is None):
            raise ConfigError("a schedule must have a peak and its moment, or neither")
        if self.turn is not None and not self.begin <= self.turn <= self.finish:
            raise ConfigError(
                "a schedule must reach its peak between the moments at which it begins and "
                f"finishes, got {self.begin:g}, {self.turn:g} and {self.finish:g}"
            )
        if self.turn is not None and self.begin == self.finish:
            raise ConfigError(
                f"a schedule must have time for its peak, but begins and finishes at {self.begin:g}"
            )
        if self.peak is not None and self.when_settled:
            raise ConfigError("a schedule that waits for a settled loss must have no peak")
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
        - ``"0->0.1->0@0.5:0.75:0.9"``: up to 0.1 at three quarters, and down again.
        """
        if (peaked := _PEAKED.fullmatch(text)) is not None:
            start, peak, end, begin, turn, finish = peaked.groups()
            in_steps = _are_steps(text, begin, turn, finish)
            begin, turn, finish = (moment.removesuffix("s") for moment in (begin, turn, finish))
            return cls(
                float(start),
                float(end),
                float(begin),
                float(finish),
                in_steps=in_steps,
                peak=float(peak),
                turn=float(turn),
            )
        match = _FORM.fullmatch(text)
        if match is None:
            raise ConfigError(
                "a schedule must be a number, 'START->END' or 'START->END@BEGIN:FINISH' with "
                "fractions of training, such as '0->0.1@0.5:0.75', with steps, such as "
                "'0->0.1@2000s:3000s', '0->0.1@settled+500s', or with a peak, such as "
                f"'0->0.1->0@0.5:0.75:0.9', got {text!r}"
            )
        start, end, begin, finish, length = match.groups()
        if end is None:
            return cls.constant(float(start))
        if length is not None:
            begin, finish = "0s" if length.endswith("s") else "0", length
        begin, finish = begin or "0", finish or "1"
        in_steps = _are_steps(text, begin, finish)
        return cls(
            float(start),
            float(end),
            float(begin.removesuffix("s")),
            float(finish.removesuffix("s")),
            in_steps=in_steps,
            when_settled=length is not None,
        )

    @property
    def values(self) -> tuple[float, ...]:
        """Values it goes through; all others lie between them."""
        return (self.start, self.end) if self.peak is None else (self.start, self.peak, self.end)

    def __call__(self, progress: float) -> float:
        """Value at ``progress``, 0 at the first step of training and 1 at the last.

        For schedules by fractions; :meth:`at` is for all.
        """
        return self._when(progress)

    def at(self, step: int, num_steps: int, settled: int | None = None) -> float:
        """Value during a step.

        Args:
            step: How many steps were done before it.
            num_steps: How many there are.
            settled: How many had been done when the task loss settled; None: it has not.
        """
        now = self._moment(step, num_steps, settled)
        return self.start if now is None else self._when(now)

    def is_over(self, step: int, num_steps: int, settled: int | None = None) -> bool:
        """Whether it does not change any more; arguments as of :meth:`at`."""
        now = self._moment(step, num_steps, settled)
        return self.is_constant or (now is not None and now >= self.finish)

    def _moment(self, step: int, num_steps: int, settled: int | None) -> float | None:
        """A step in the unit of the schedule; None: before the loss has settled."""
        if self.when_settled:
            if settled is None:
                return None
            step = step - settled
        return step if self.in_steps else min(1.0, step / max(1, num_steps - 1))

    def last_moment_to_settle(self, num_steps: int) -> float:
        """Steps after which it must begin to have reached its end with the last one."""
        length = self.finish if self.in_steps else self.finish * (num_steps - 1)
        return max(0.0, num_steps - 1 - length)

    def _when(self, now: float) -> float:
        if self.peak is None or self.turn is None:
            return _line(now, self.begin, self.finish, self.start, self.end)
        if now < self.turn:
            return _line(now, self.begin, self.turn, self.start, self.peak)
        return _line(now, self.turn, self.finish, self.peak, self.end)

    @property
    def is_constant(self) -> bool:
        return len(set(self.values)) == 1

    def __str__(self) -> str:
        """The form that :meth:`parse` reads."""
        if self.is_constant:
            return f"{self.start:.12g}"
        unit = "s" if self.in_steps else ""
        finish = f"{self.finish:.12g}{unit}"
        if self.when_settled:
            span = f"@settled+{finish}"
        elif self.turn is not None:
            span = f"@{self.begin:.12g}{unit}:{self.turn:.12g}{unit}:{finish}"
        elif (self.begin, self.finish, unit) == (0.0, 1.0, ""):
            span = ""
        else:
            span = f"@{self.begin:.12g}{unit}:{finish}"
        return "->".join(f"{value:.12g}" for value in self.values) + span


def _line(now: float, begin: float, finish: float, start: float, end: float) -> float:
    if now >= finish:
        return end
    if now <= begin:
        return start
    return start + (now - begin) / (finish - begin) * (end - start)


def _are_steps(text: str, *moments: str) -> bool:
    are_steps = {moment.endswith("s") for moment in moments}
    if len(are_steps) > 1:
        raise ConfigError(
            f"a schedule must have all its moments at steps, or all at fractions, got {text!r}"
        )
    return are_steps.pop()
