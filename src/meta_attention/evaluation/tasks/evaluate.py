"""Every figure of a model on a task, from one pass over its sequences.

Shapes: B batch, T sequence, M tokens asked in a batch.
"""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from meta_attention.evaluation.evaluate import expected_weights
from meta_attention.evaluation.forcing import RouteJudge, RouteVerdict
from meta_attention.evaluation.perplexity import Advance, evaluating
from meta_attention.evaluation.routing import RoutingSummary, RoutingTally
from meta_attention.evaluation.tasks.base import NOT_ASKED, TaskDataset
from meta_attention.evaluation.tasks.need import TaskResult, TaskTally


@dataclass(frozen=True, slots=True)
class TaskEvaluation:
    """What was measured, and on how much."""

    result: TaskResult
    loss: float
    """Nats per token asked."""
    routing: RoutingSummary
    forced: RouteVerdict | None
    """Regret, over the tokens asked."""
    num_sequences: int
    length: int

    def to_dict(self) -> dict[str, Any]:
        """One level of figures, and under ``layers`` those of each layer."""
        routing, result = self.routing.to_dict(), self.result.to_dict()
        del routing["num_tokens"]
        layers = [a | b for a, b in zip(routing.pop("layers"), result.pop("layers"), strict=True)]
        forced = {} if self.forced is None else self.forced.to_dict()
        for verdict in forced.pop("layers", []):
            layers[verdict.pop("layer")] |= verdict
        return {
            "num_sequences": self.num_sequences,
            "length": self.length,
            "loss": self.loss,
            **result,
            **routing,
            **forced,
            "layers": layers,
        }


def evaluate_task(
    model: PreTrainedModel,
    dataset: TaskDataset,
    *,
    batch_size: int = 8,
    forced: bool = False,
    advance: Advance = lambda done, total: None,
) -> TaskEvaluation:
    """Measure a routed model on a task.

    Args:
        model: The model, on the device and in the dtype to measure.
        dataset: Sequences it has not seen.
        batch_size: Sequences in one call of the model.
        forced: Also work out the regret by forcing each expert in turn: one more pass for each
            expert of each routed layer.
        advance: Called with the passes over a batch so far and in all.
    """
    tally, routing = TaskTally.of(model), RoutingTally.of(model)
    judge = RouteJudge(model) if forced else None
    starts = range(0, len(dataset), batch_size)
    done, total = 0, len(starts) * (1 + (judge.num_passes if judge else 0))
    nats = 0.0
    with evaluating(model):
        for start in starts:
            batch = {k: v.to(model.device) for k, v in dataset.batch(start, batch_size).items()}
            is_asking = batch["labels"].roll(-1, dims=1) != NOT_ASKED  # [B, T]

            def run(output_routing: bool = False, batch: dict[str, Tensor] = batch) -> Any:
                nonlocal done
                done += 1
                advance(done, total)
                return model(
                    input_ids=batch["input_ids"], use_cache=False, output_routing=output_routing
                )

            def loss_of(
                out: Any, batch: dict[str, Tensor] = batch, at: Tensor = is_asking
            ) -> Tensor:
                answers = batch["labels"].roll(-1, dims=1)[at]
                return F.cross_entropy(out.logits[at].float(), answers, reduction="none")  # [M]

            out = run(output_routing=True)
            loss = loss_of(out)
            nats += loss.double().sum().item()
            predicted = out.logits.argmax(dim=-1)
            tally.add(predicted, batch["labels"], batch["needs_full"], out.routing_weights)
            routing.add(out.routing_weights, None, out.concentrations)
            if judge is not None:
                beliefs = map(expected_weights, out.routing_weights, out.concentrations)
                judge.add(loss, [b[is_asking] for b in beliefs], lambda: loss_of(run()))
    result = tally.result()
    return TaskEvaluation(
        result=result,
        loss=nats / result.num_asked,
        routing=routing.summary(),
        forced=None if judge is None else judge.verdict(),
        num_sequences=len(dataset),
        length=dataset.task.length,
    )
