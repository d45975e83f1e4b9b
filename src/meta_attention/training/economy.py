"""Capability first, economy second: when a run begins to save, and how hard it is pressed.

A KL that bites before a model can use full attention removes it, and it does not come back. So
the pressure to be cheap (the weight of the KL, or of the cost where there is no prior) may wait
until the task loss has settled, and may then be steered until the routes cost what was asked for.

Both look at means over ``WINDOW`` steps, whatever is logged and how often. All that is known
between two steps is saved with a checkpoint, so that a resumed run goes on as it would have.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meta_attention.errors import ConfigError
from meta_attention.training.schedule import Schedule

# steps whose means are looked at; reading them waits for the device
WINDOW = 10
# by how much the logarithm of the pressure changes in the whole of training, where the cost is
# beyond the target by a factor of e
GAIN = 20.0
# by how much at most in one window, however short the run
MAX_MOVE = 0.5
# the pressure stays within this factor of its schedule
MAX_MULTIPLIER = 100.0
# a model whose cost is within this factor of the target is on it
TOLERANCE = 1.1


@dataclass
class Economy:
    """Follows the loss and the cost of a run, and says when and how hard to press.

    **Settled** means: the mean task loss of the last ``settle_steps`` steps is less than the share
    ``settle_drop`` below that of as many steps before. A loss that stands still before it falls,
    as that of a task that is understood all at once, looks settled too early: give such a run a
    step or a fraction.

    **Steering** is integral control in log space. Every window changes the logarithm of the
    multiplier of the pressure by ``GAIN * WINDOW / num_steps * log(cost / target)``, the last
    logarithm at most 1 either way. The multiplier moves as long as the cost is off its target, and
    by little at a time. It can only press less where a model costs less than it may: the task
    alone makes routes dearer, where that helps.

    Args:
        num_steps: Of the whole run.
        pressure: Schedule of the weight that is steered; steering begins with its change.
        target: Share of full attention's cost in the routed layers, or None.
        waiting: Schedules that count from when the loss has settled.
        settle_drop: See above.
        settle_steps: Likewise; None: a tenth of the run.
    """

    num_steps: int
    pressure: Schedule
    target: float | None = None
    waiting: tuple[Schedule, ...] = ()
    settle_drop: float = 0.02
    settle_steps: int | None = None

    settled: int | None = field(default=None, init=False)
    """Steps done when the task loss had settled; None: not yet."""
    cost: float | None = field(default=None, init=False)
    """Of the last window, as steered."""
    log_multiplier: float = field(default=0.0, init=False)
    losses: list[float] = field(default_factory=list, init=False)
    """Task loss of the last windows."""

    def __post_init__(self) -> None:
        check_settling(self.settle_drop, self.settle_steps)
        if self.target is not None and self.pressure.end <= 0.0:
            raise ConfigError(
                "target_cost must have a weight to steer, but the schedule of it ends at 0: raise "
                "kl_weight, or cost_weight for a prior_free controller"
            )

    @property
    def is_watched(self) -> bool:
        """Whether anything depends on what is observed."""
        return self.target is not None or bool(self.waiting)

    @property
    def multiplier(self) -> float:
        """Of the pressure; 1 without a target."""
        return math.exp(self.log_multiplier)

    def value(self, schedule: Schedule, step: int) -> float:
        """Of a schedule, during the step that follows ``step`` others."""
        return schedule.at(step, self.num_steps, self.settled)

    def has_begun(self, step: int) -> bool:
        """Whether the pressure is on, or is on throughout."""
        pressure = self.pressure
        return pressure.is_constant or self.value(pressure, step) != pressure.start

    def observe(self, step: int, loss: float, cost: float) -> None:
        """Take note of a window.

        Args:
            step: How many steps are done.
            loss: Mean task loss of the window.
            cost: Mean cost of its tokens in routed layers, by the routes of evaluation.
        """
        self.cost = cost
        if self.waiting and self.settled is None:
            self._look_whether_settled(step, loss)
        if self.target is not None and self.has_begun(step):
            beyond = min(1.0, max(-1.0, math.log(max(cost, 1e-9) / self.target)))
            limit = math.log(MAX_MULTIPLIER)
            moved = self.log_multiplier + min(MAX_MOVE, GAIN * WINDOW / self.num_steps) * beyond
            self.log_multiplier = min(limit, max(-limit, moved))

    def _look_whether_settled(self, step: int, loss: float) -> None:
        steps = self.num_steps // 10 if self.settle_steps is None else self.settle_steps
        span = max(1, round(steps / WINDOW))
        self.losses = [*self.losses, loss][-2 * span :]
        before, now = self.losses[:span], self.losses[span:]
        has_settled = len(now) == span and sum(now) > (1.0 - self.settle_drop) * sum(before)
        # a run that never settles is pressed at its end, as it was asked to be
        latest = min(schedule.last_moment_to_settle(self.num_steps) for schedule in self.waiting)
        if has_settled or step >= latest:
            self.settled, self.losses = step, []

    def state(self) -> dict[str, Any]:
        """Plain data, as :meth:`load` reads it."""
        names = ("settled", "cost", "log_multiplier", "losses")
        return {name: getattr(self, name) for name in names}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave."""
        for name, value in state.items():
            setattr(self, name, value)


def check_settling(drop: float, steps: int | None) -> None:
    """Raise unless these can tell whether a loss has settled."""
    if not 0.0 < drop < 1.0:
        raise ConfigError(f"settle_drop must be a share between 0 and 1, got {drop}")
    if steps is not None and steps < WINDOW:
        raise ConfigError(f"settle_steps must be >= {WINDOW}, got {steps}: losses are noisy")
