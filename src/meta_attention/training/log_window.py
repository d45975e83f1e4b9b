"""The steps since the log was last written, of which a row of the log has means."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meta_attention.evaluation.routing import RoutingSummary, RoutingTally
from meta_attention.training.capture import StepResult


@dataclass(frozen=True, slots=True)
class WindowMeans:
    """What is known of a window when it ends, over all processes."""

    figures: dict[str, float]
    routing: RoutingSummary
    tokens_per_s: float


class LogWindow:
    """Sums over steps, on the device until the window ends: only then is it waited for.

    Args:
        tally: Counts the routes of steps that have them.
    """

    def __init__(self, tally: RoutingTally) -> None:
        self.tally = tally
        self.steps_before = 0
        """How many steps were done before the window."""
        self._names: tuple[str, ...] = ()
        self._sums: Tensor | None = None
        self._num_tokens = 0
        self._clock: float | None = None

    def start_clock(self) -> None:
        """Time counts from the first step, not from when the window before was written."""
        if self._clock is None:
            self._clock = time.perf_counter()

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """What is done meanwhile does not count as training."""
        begin = time.perf_counter()
        yield
        if self._clock is not None:
            self._clock += time.perf_counter() - begin

    def add(self, step: StepResult, num_tokens: int) -> None:
        """Take note of a step, or of a part of one."""
        self._names = step.names
        self._sums = step.figures + (0.0 if self._sums is None else self._sums)
        self._num_tokens += num_tokens
        if step.weights is not None:
            self.tally.add(step.weights, None, step.concentrations)

    def close(
        self, step: int, reduce: Callable[[Tensor, str], Any], num_processes: int
    ) -> WindowMeans:
        """Means over the steps of the window; the next one begins after ``step``."""
        assert self._sums is not None  # a window has a step
        num_steps = max(1, step - self.steps_before)
        means = (reduce(self._sums, "mean") / num_steps).tolist()
        self.tally.sums = reduce(self.tally.sums.to(self._sums.device), "sum")
        routing = self.tally.summary()
        seconds = time.perf_counter() - (self._clock or 0.0)
        speed = self._num_tokens * num_processes / seconds
        self.steps_before = step
        self._sums, self._num_tokens, self._clock = None, 0, None
        self.tally.sums = torch.zeros_like(self.tally.sums)
        return WindowMeans(dict(zip(self._names, means, strict=True)), routing, speed)
