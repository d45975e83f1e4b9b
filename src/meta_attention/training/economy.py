"""Capability first, economy second: when a run begins to save, and how hard it is pressed.

A KL that bites before a model can use full attention removes it, and it does not come back. So
the pressure to be cheap (the weight of the KL, or of the cost where there is no prior) may wait
until the task loss has settled, and may then be steered until the routes cost what was asked for.

Both look at means over ``WINDOW`` steps, whatever is logged and how often. All that is known
between two steps is saved with a checkpoint, so that a resumed run goes on as it would have.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meta_attention.errors import ConfigError
from meta_attention.training.schedule import Schedule

# steps whose means are looked at; reading them waits for the device
WINDOW = 10
# by how much the logarithm of the pressure changes in the whole of training, where the cost is
# beyond the target by a factor of e
GAIN = 20.0
# by how much at most in one window, however short the run
MAX_MOVE = 0.5
# how much more it changes on a path, where the cost is not far from its aim
PATH_GAIN = 2.0
# share of the steps that are left when pressing begins, after which such a path is at the target
PATH = 0.6
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

    **A path** keeps a short run from overshooting. Routes cost what they did until beliefs turn,
    and then many do at once; by then the multiplier has been wound up, and a cost that has fallen
    to the floor is slow to come back. With ``path`` the aim moves: in log space straight from the
    believed cost at the beginning to the target, where it stays. What is compared with it is at
    first the cost that is believed, which moves before any route does, and by the end of the path
    that of the routes. Beliefs that are off the aim also count at once, not only in sum.

    Args:
        num_steps: Of the whole run.
        pressure: Schedule of the weight that is steered; steering begins with its change.
        pressed_by: Name of that weight, for what is said of it.
        target: Share of full attention's cost in the routed layers, or None.
        waiting: Schedules that count from when the loss has settled.
        path: See above: share of the steps left when pressing begins, after which the aim is the
            target. None: it is the target from the start.
        settle_drop: See above.
        settle_steps: Likewise; None: a tenth of the run.
    """

    num_steps: int
    pressure: Schedule
    target: float | None = None
    waiting: tuple[Schedule, ...] = ()
    path: float | None = None
    pressed_by: str = "kl_weight"
    settle_drop: float = 0.02
    settle_steps: int | None = None

    settled: int | None = field(default=None, init=False)
    """Steps done when the task loss had settled; None: not yet."""
    cost: float | None = field(default=None, init=False)
    """Of the last window, as steered."""
    log_multiplier: float = field(default=0.0, init=False)
    wound: float = field(default=0.0, init=False)
    """Of the logarithm, what has added up on a path."""
    begun: list[float] | None = field(default=None, init=False)
    """Where a path begins: a step, and a cost."""
    losses: list[float] = field(default_factory=list, init=False)
    """Task loss of the last windows."""

    def __post_init__(self) -> None:
        check_settling(self.settle_drop, self.settle_steps)
        if self.path is not None and not 0.0 < self.path <= 1.0:
            raise ConfigError(f"path must be a share of the steps left, got {self.path}")
        if self.target is not None and self.pressure.peak is not None:
            raise ConfigError(
                "target_cost must have a weight to steer that stays where it has risen to, but "
                f"{self.pressed_by} is {self.pressure}; a peak is for a kl_weight beside a "
                "cost_weight that presses"
            )
        if self.target is not None and self.pressure.end <= 0.0:
            raise ConfigError(
                f"target_cost must have a weight to steer, but {self.pressed_by} ends at 0; let it "
                "end above 0, or leave out the target"
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

    def is_over(self, schedule: Schedule, step: int) -> bool:
        """Whether a schedule has reached its end after so many steps."""
        return schedule.is_over(step, self.num_steps, self.settled)

    def has_begun(self, step: int) -> bool:
        """Whether the pressure is on, or is on throughout."""
        pressure = self.pressure
        return pressure.is_constant or self.value(pressure, step) != pressure.start

    def below_target(self, cost: Tensor) -> Tensor:
        """Square of the share by which routed layers, of this cost, are below their target, or 0.

        What makes routes cheap can only press less, never pull back: in a short run they fell far
        below every target and stayed there. Which tokens to spend the rest on is left to the task.
        """
        if self.target is None:
            return torch.zeros_like(cost)
        return (1.0 - cost / self.target).clamp(min=0.0).square()

    def observe(self, step: int, loss: float, cost: float, believed: float | None = None) -> None:
        """Take note of a window.

        Args:
            step: How many steps are done.
            loss: Mean task loss of the window.
            cost: Mean cost of its tokens in routed layers, by the routes of evaluation.
            believed: Likewise, expected under the beliefs; None: the same. Looked at on a path.
        """
        self.cost = cost
        if self.waiting and self.settled is None:
            self._look_whether_settled(step, loss)
        if self.target is not None and self.has_begun(step):
            move = min(MAX_MOVE, GAIN * WINDOW / self.num_steps)
            if self.path is None:
                moved = self.log_multiplier + move * _log_ratio(cost, self.target)
            else:
                moved = self._follow_path(step, move, cost, cost if believed is None else believed)
            self.log_multiplier = _limited(moved)

    def _follow_path(self, step: int, move: float, cost: float, believed: float) -> float:
        """The logarithm of the multiplier, from where the cost is and where it should be by now."""
        assert self.target is not None
        assert self.path is not None
        if self.begun is None:
            self.begun = [step - WINDOW, max(believed, self.target)]
        first, start = self.begun
        done = min(1.0, (step - first) / max(WINDOW, self.path * (self.num_steps - first)))
        aim = start ** (1.0 - done) * self.target**done
        seen = believed ** (1.0 - done) * cost**done
        self.wound = _limited(self.wound + PATH_GAIN * move * _log_ratio(seen, aim))
        # routes turn all at once, beliefs do not: only these can be answered at once
        return self.wound + _log_ratio(believed, aim)

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
        names = ("settled", "cost", "log_multiplier", "wound", "begun", "losses")
        return {name: getattr(self, name) for name in names}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave."""
        for name, value in state.items():
            setattr(self, name, value)


def _log_ratio(cost: float, aim: float) -> float:
    """At most 1 either way."""
    return min(1.0, max(-1.0, math.log(max(cost, 1e-9) / aim)))


def _limited(log_multiplier: float) -> float:
    limit = math.log(MAX_MULTIPLIER)
    return min(limit, max(-limit, log_multiplier))


def check_settling(drop: float, steps: int | None) -> None:
    """Raise unless these can tell whether a loss has settled."""
    if not 0.0 < drop < 1.0:
        raise ConfigError(f"settle_drop must be a share between 0 and 1, got {drop}")
    if steps is not None and steps < WINDOW:
        raise ConfigError(f"settle_steps must be >= {WINDOW}, got {steps}: losses are noisy")


def check_holding(hold: float, argmax_from: float) -> None:
    """Raise unless these are a weight and a share of training."""
    if not 0.0 <= hold < math.inf:
        raise ConfigError(f"hold must be >= 0, got {hold}")
    if not 0.0 <= argmax_from <= 1.0:
        raise ConfigError(f"argmax_from must be a share of training, got {argmax_from}")


def check_target(
    target: float, config: Any, expert_costs: Sequence[Sequence[float]], path: float | None = None
) -> None:
    """Raise unless the routes of a model can cost so much.

    Args:
        target: Share of full attention's cost in the routed layers.
        config: Says how the model is routed.
        expert_costs: Cost of each expert, by layer.
        path: As of :class:`Economy`.
    """
    if config.routing != "hard":
        raise ConfigError(
            "target_cost must have routing='hard': other routes execute more than one expert, "
            "so there is nothing to save"
        )
    if config.controller == "value":
        raise ConfigError(
            "target_cost presses a controller in training, and one of values has a price, which is "
            "found afterwards: 'meta-attention route' does that"
        )
    # who passes a block by costs nothing there
    capacity = 1.0 if config.depth_capacity is None else config.depth_capacity
    costs = [
        [capacity * cost if config.may_skip(index) else cost for cost in layer]
        for index, layer in enumerate(expert_costs)
        if len(layer) > 1
    ]
    if not costs:
        raise ConfigError("target_cost must have a layer to route in, but all are static")
    if path is not None and len(costs) < len(expert_costs):
        raise ConfigError(
            "cost_path must have no static layers: what is believed is known of all layers "
            "together, and the target is of the routed ones; leave it out"
        )
    lowest = sum(map(min, costs)) / len(costs)
    highest = sum(map(max, costs)) / len(costs)
    if not lowest < target < highest:
        entered = " for the share of tokens that enter" if capacity < 1.0 else ""
        raise ConfigError(
            f"target_cost must be between {lowest:.3f} and {highest:.3f}, the costs of the "
            f"cheapest and the dearest experts of the routed layers{entered}, got {target}; "
            "take one in between, other experts, or none (--target-cost 0)"
        )
