"""What a run measures of itself while it trains, in files of its own.

A probe draws from no generator that training draws from: a run with it has the losses of one
without.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from meta_attention.ablation.measure import measure
from meta_attention.config import MetaAttentionConfig
from meta_attention.evaluation.forcing import attention_layers
from meta_attention.models import MetaAttentionForCausalLM
from meta_attention.objective import routing_loss
from meta_attention.training.logs import RowLog

ROUTING_FILE, GRADIENTS_FILE = "routing.jsonl", "gradients.jsonl"
# how often in a run
ROUTING_POINTS, GRADIENT_POINTS = 20, 5
# how many gradients a variance is taken over
DRAWS = 16
# of a final measurement; too long for every point of a curve
_ONLY_AT_THE_END = ("calibration",)


class Probe(RowLog):
    """Measures at evenly spaced steps, the first and the last included, a row each time.

    Args:
        folder: Of the run.
        name: Of the file.
        num_points: How often.
    """

    def __init__(self, folder: Path, name: str, num_points: int) -> None:
        super().__init__(folder, name)
        self.num_points = num_points

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step, last = state.global_step, state.max_steps
        every = -(-last // self.num_points)
        if step % every == 0 or step in (1, last):
            model = kwargs["model"]
            with torch.random.fork_rng(devices=_devices(model)):
                self.write({"step": step} | self.look(model, step))

    def look(self, model: MetaAttentionForCausalLM, step: int) -> dict[str, Any]:
        """Figures of a row."""
        raise NotImplementedError


class RoutingProbe(Probe):
    """Loss, routes and uncertainty on held-out text, softly and hard, over training.

    Args:
        folder: Of the run.
        blocks: Held-out token ids ``[N, T]``.
    """

    def __init__(self, folder: Path, blocks: Tensor) -> None:
        super().__init__(folder, ROUTING_FILE, ROUTING_POINTS)
        self.blocks = blocks

    def look(self, model: MetaAttentionForCausalLM, step: int) -> dict[str, Any]:
        found = {}
        for routing in ("soft", "hard"):
            figures = measure(model, self.blocks, routing)
            found[routing] = {k: v for k, v in figures.items() if k not in _ONLY_AT_THE_END}
        return found


class GradientProbe(Probe):
    """Noise in the controllers' gradients: what drawing routes adds to what batches differ by.

    Per routed layer, of the gradient of all parameters of its controller: ``data_noise`` is the
    standard deviation between batches with routes at the posterior's mean, ``sample_noise`` and
    ``one_hot_noise`` between draws of routes on one batch (a Dirichlet sample; a hard route drawn
    by the mean), each as the square root of the summed variances. ``norm`` is that of the mean
    gradient over batches.

    Args:
        folder: Of the run.
        batches: Token ids ``[B, T]``, ``DRAWS`` of them.
        kl_weight: Of the loss whose gradient it is; 0 leaves the task alone.
    """

    def __init__(self, folder: Path, batches: Sequence[Tensor], kl_weight: float = 0.0) -> None:
        super().__init__(folder, GRADIENTS_FILE, GRADIENT_POINTS)
        self.batches = batches
        self.kl_weight = kl_weight

    def look(self, model: MetaAttentionForCausalLM, step: int) -> dict[str, Any]:
        config: MetaAttentionConfig = model.config
        before = (config.routing, config.training_weights)
        one = [self.batches[0]] * DRAWS
        try:
            found = {
                "data": self._gradients(model, self.batches, "soft", "mean"),
                "sample": self._gradients(model, one, "soft", "sample"),
                "one_hot": self._gradients(model, one, "hard", "one_hot"),
            }
        finally:
            config.routing, config.training_weights = before
        layers = []
        for index in found["data"]:
            row: dict[str, float] = {"layer": index}
            row["norm"] = found["data"][index].mean(dim=0).norm().item()
            for kind, of_layers in found.items():
                variance = of_layers[index].var(dim=0).sum()
                row[f"{kind}_noise"] = variance.sqrt().item()
            layers.append(row)
        return {"draws": DRAWS, "layers": layers}

    def _gradients(
        self, model: MetaAttentionForCausalLM, batches: Sequence[Tensor], routing: Any, draw: Any
    ) -> dict[int, Tensor]:
        """Gradients of each routed layer's controller [batches, parameters]."""
        config: MetaAttentionConfig = model.config
        config.routing, config.training_weights = routing, draw
        parameters = {
            index: list(layer.controller.parameters())
            for index, layer in enumerate(attention_layers(model))
            if len(layer.expert_names) > 1
        }
        flat = [p for of_layer in parameters.values() for p in of_layer]
        rows: dict[int, list[Tensor]] = {index: [] for index in parameters}
        for number, ids in enumerate(batches):
            # draws of a batch differ, and are those of every run and step
            torch.manual_seed(number)
            ids = ids.to(model.device)
            out = model(ids, labels=ids, use_cache=False)
            loss = routing_loss(out.task_loss, out.kl, kl_weight=self.kl_weight)
            gradients = iter(torch.autograd.grad(loss, flat))
            for index, of_layer in parameters.items():
                rows[index].append(torch.cat([next(gradients).flatten() for _ in of_layer]))
        return {index: torch.stack(found).double() for index, found in rows.items()}


def _devices(model: nn.Module) -> list[int]:
    device = next(model.parameters()).device
    return [device.index or 0] if device.type == "cuda" else []
