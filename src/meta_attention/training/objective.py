"""The objective in the course of training: what is added to the task loss, and how much of it.

The KL, the cost and what holds a cost up have weights that follow schedules. One of them is the
pressure to be cheap, which the economy steers by what it has watched.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meta_attention.objective import routing_loss
from meta_attention.training.capture import StepResult
from meta_attention.training.economy import WINDOW, Economy
from meta_attention.training.schedule import Schedule

# what the economy looks at
WATCHED = ("task_loss", "routed_cost", "projected_cost")

# of a tensor over all processes: "mean" or "sum"
Reduce = Callable[[Tensor, str], Any]


class RoutingObjective:
    """The loss of a run at each of its steps. Arguments as of ``MetaAttentionTrainer``.

    Args:
        config: Says how the model is routed; its weights are those of schedules left out.
        num_steps: Of the whole run.
        kl_weight: Weight of the KL.
        cost_weight: Weight of the projected cost.
        uncertainty_threshold: No part of the loss, but it may wait for the same moment.
        hold: Weight of what keeps the cost from falling below its target.
        target_cost: What the economy steers to.
        cost_path: Likewise, along a path.
        settle_drop: When the task loss counts as settled.
        settle_steps: Likewise.
    """

    def __init__(
        self,
        config: Any,
        num_steps: int,
        *,
        kl_weight: Schedule | None = None,
        cost_weight: Schedule | float | None = None,
        uncertainty_threshold: Schedule | None = None,
        hold: float = 0.0,
        target_cost: float | None = None,
        cost_path: float | None = None,
        settle_drop: float = 0.02,
        settle_steps: int | None = None,
    ) -> None:
        self.kl_weight = kl_weight or Schedule.constant(config.kl_weight)
        if not isinstance(cost_weight, Schedule):
            value = config.cost_weight if cost_weight is None else cost_weight
            cost_weight = Schedule.constant(value)
        self.cost_weight = cost_weight
        self.hold, self._depth_weight = hold, config.depth_weight
        # a KL beside a cost keeps its weight: it says how certain routes may be, not how cheap
        self._steers_cost_weight = (
            max(cost_weight.values) > 0.0 or config.controller == "prior_free"
        )
        schedules = (self.kl_weight, self.cost_weight, uncertainty_threshold)
        self.economy = Economy(
            num_steps=num_steps,
            pressure=self.cost_weight if self._steers_cost_weight else self.kl_weight,
            target=target_cost,
            waiting=tuple(s for s in schedules if s is not None and s.when_settled),
            path=cost_path,
            pressed_by="cost_weight" if self._steers_cost_weight else "kl_weight",
            settle_drop=settle_drop,
            settle_steps=settle_steps,
        )
        # sums since the economy last looked
        self._watched = torch.zeros(len(WATCHED))

    @property
    def is_steered(self) -> bool:
        """Whether the cost has a target."""
        return self.economy.target is not None

    def weights_after(self, steps: int) -> dict[str, float]:
        """Of what is added to the loss, during the step that follows ``steps`` others."""
        economy = self.economy
        is_held = self.is_steered and economy.has_begun(steps)
        kl_factor, cost_factor = economy.multiplier, 1.0
        if self._steers_cost_weight:
            kl_factor, cost_factor = cost_factor, kl_factor
        return {
            "kl_weight": kl_factor * economy.value(self.kl_weight, steps),
            "cost_weight": cost_factor * economy.value(self.cost_weight, steps),
            "hold_weight": self.hold if is_held else 0.0,
            "multiplier": economy.multiplier,
        }

    def is_at_full_weight(self, steps: int) -> bool:
        """Whether KL and cost have reached the end of their schedules."""
        return all(self.economy.is_over(s, steps) for s in (self.kl_weight, self.cost_weight))

    def loss_of(
        self,
        out: Any,
        weights: Sequence[Any],
        *,
        task_share: Tensor | float = 1.0,
        num_parts: int = 1,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, or a part's share of it, and the figures to log by name.

        Args:
            out: What the model returned for the part.
            weights: Of KL, cost and hold; numbers, or tensors where a step is captured.
            task_share: Share of the batch's predicted tokens that are the part's.
            num_parts: Of the batch, alike in tokens.
        """
        kl_weight, cost_weight, hold_weight = weights
        task = out.task_loss * task_share
        kl, cost = out.kl / num_parts, out.projected_cost / num_parts
        loss = routing_loss(task, kl, kl_weight=kl_weight, cost=cost, cost_weight=cost_weight)
        figures = {
            "task_loss": task,
            "kl": kl,
            "kl_loss": kl_weight * kl,
            "projected_cost": cost,
            "cost_loss": cost_weight * cost,
            "routed_cost": out.routed_cost / num_parts if self.is_steered else cost,
        }
        if self.hold:
            held = torch.zeros_like(cost)
            if self.is_steered:
                below = self.economy.below_target(out.routed_projected_cost)
                held = hold_weight * below / num_parts
            loss = loss + held
            figures["hold_loss"] = held
        depth = getattr(out, "depth_loss", None)
        if depth is not None:
            depth = depth / num_parts
            loss = loss + self._depth_weight * depth
            figures["depth_loss"] = depth
        others = getattr(out, "figures", {})
        figures |= {name: value / num_parts for name, value in others.items()}
        return loss, {name: value.detach() for name, value in figures.items()}

    # --- what the economy watches ---

    def watch(self, step: StepResult) -> None:
        """Take note of a step, or of a part of one, without waiting for the device."""
        if self.economy.is_watched:
            figures = dict(zip(step.names, step.figures, strict=True))
            watched = torch.stack([figures[name] for name in WATCHED])
            self._watched = self._watched.to(watched) + watched

    def observe_step(self, step: int, reduce: Reduce) -> None:
        """At the end of every window of steps, let the economy look at it."""
        if self.economy.is_watched and step % WINDOW == 0:
            loss, cost, believed = (reduce(self._watched, "mean") / WINDOW).tolist()
            self.economy.observe(step, loss, cost, believed)
            self._watched = torch.zeros(len(WATCHED))

    def state(self, reduce: Reduce) -> dict[str, Any]:
        """Plain data of all processes, as :meth:`load` reads it."""
        self._watched = reduce(self._watched, "mean")
        return self.economy.state() | {"watched": self._watched.tolist()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave."""
        saved = dict(state)
        watched = torch.tensor(saved.pop("watched"))
        # projected cost was not watched in older ones
        self._watched = F.pad(watched, (0, len(WATCHED) - len(watched)))
        self.economy.load(saved)
