"""Rows of an evaluation: sums over the tokens of one sequence, from which all figures follow.

Trainer gathers rows from all processes and counts none twice, which means of batches would.

Shapes: B batch, T sequence, F figures of a row.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meta_attention.evaluation.routing import RoutingSummary, RoutingTally
from meta_attention.evaluation.tasks import TaskResult, TaskTally
from meta_attention.training.packing import IGNORED


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What the rows of an evaluation add up to."""

    task_loss: float
    """Mean over predicted tokens, in nats."""
    routing: RoutingSummary
    task: TaskResult | None
    """Answers and routes in need, of a task that knows them."""

    def figures(self, kl_weight: float, cost_weight: float) -> dict[str, float]:
        """By name: the loss at these weights, and its parts."""
        routing, kl = self.routing, self.routing.kl or 0.0
        return {
            "loss": self.task_loss + kl_weight * kl + cost_weight * routing.projected_cost,
            "task_loss": self.task_loss,
            # a loss this high is no language model, and JSON has no infinity
            "perplexity": math.exp(min(self.task_loss, 700.0)),
            "kl": kl,
            "projected_cost": routing.projected_cost,
        }


class EvaluationRows:
    """Counts rows and adds them up.

    Args:
        routing: Counts routes.
        need: Counts what is known of a task.
    """

    def __init__(self, routing: RoutingTally, need: TaskTally | None = None) -> None:
        self.routing, self.need = routing, need

    def count(self, out: Any, labels: Tensor, needs_full: Tensor | None = None) -> Tensor:
        """Nats, predicted tokens, and sums of the tallies ``[B, F]``, from what a model returned.

        Args:
            out: With logits and routing.
            labels: Not shifted ``[B, T]``.
            needs_full: Which tokens of a task need full attention ``[B, T]``.
        """
        following = labels[:, 1:]  # [B, T - 1]
        losses = F.cross_entropy(  # [B, T - 1]
            out.logits[:, :-1].transpose(1, 2).float(),
            following,
            ignore_index=IGNORED,
            reduction="none",
        )
        routing = self.routing.count(out.routing_weights, None, out.concentrations)
        nats = losses.sum(dim=1, dtype=routing.dtype)
        num_predicted = (following != IGNORED).sum(dim=1)
        rows = torch.cat([torch.stack([nats, num_predicted.to(nats)], dim=1), routing], dim=1)
        if self.need is not None:
            assert needs_full is not None
            predicted = out.logits.argmax(dim=-1)
            need = self.need.count(predicted, labels, needs_full, out.routing_weights)
            rows = torch.cat([rows, need.to(rows)], dim=1)
        return rows

    def add_up(self, rows: Any) -> EvaluationResult:
        """The result of rows as :meth:`count` gives them."""
        total = torch.as_tensor(rows).double().sum(dim=0)
        nats, num_predicted = total[:2].tolist()
        num_routing = len(self.routing.sums)
        routing, need = total[2 : 2 + num_routing], total[2 + num_routing :]
        return EvaluationResult(
            nats / num_predicted,
            self.routing.summary_of(routing),
            None if self.need is None else self.need.result_of(need),
        )
