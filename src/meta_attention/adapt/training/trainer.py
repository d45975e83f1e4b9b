"""Our Trainer for the routers of an adapted model, its base frozen beside them.

A step runs the model twice on one batch: as the base has it, without a gradient, and routed. What
is learnt is how to route so that the predictions stay those of the base. Evaluation does the same
with the routes of use, so that every held-out figure stands next to the base's.

Shapes: B batch, T sequence, F figures of a row.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import SAFE_WEIGHTS_NAME

from meta_attention.adapt.adaptation import Record, Routing
from meta_attention.adapt.lora import lora_parameters, without_lora
from meta_attention.adapt.router import check_routing, collect_routing, routed_as, routers_of
from meta_attention.adapt.training.divergence import Predictor, compare_predictions
from meta_attention.adapt.training.recall import RecallBlocks
from meta_attention.adapt.training.settings import RouterSettings
from meta_attention.controller import RoutingPosterior
from meta_attention.evaluation.adapted_flops import count_adapted, executed_routes
from meta_attention.evaluation.routing import RoutingSummary
from meta_attention.training.economy import PATH
from meta_attention.training.logs import flatten_routing
from meta_attention.training.packing import IGNORED, PackedDataset
from meta_attention.training.trainer import Batch, MetaAttentionTrainer

# of these an evaluation reports the divergence as well
RECALL_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class RouterOutput:
    """What a step has computed; see :class:`MetaAttentionTrainer`."""

    task_loss: Tensor
    kl: Tensor
    projected_cost: Tensor
    routed_cost: Tensor
    routed_projected_cost: Tensor
    routing_weights: list[Tensor] | None
    concentrations: list[Tensor | None] | None
    figures: dict[str, Tensor]


class EvaluateLast(TrainerCallback):
    """The last step is evaluated, too: it is the first that was trained to the end."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        control.should_evaluate |= state.global_step >= state.max_steps


class RouterTrainer(MetaAttentionTrainer):
    """Trains the routers of an adapted model, and its LoRA where it has one.

    Args:
        model: An adapted model, whose parameters that learn are marked.
        args: Trainer's own arguments.
        settings: Of the run.
        routes: Routes of all tokens by layer, in place of the routers': what learns is LoRA.
        recall: Held-out blocks of which evaluation also reports the divergence, where something far
            back must be found again.
        kwargs: As for Trainer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        settings: RouterSettings,
        *,
        routes: Routing | None = None,
        recall: RecallBlocks | None = None,
        **kwargs: Any,
    ) -> None:
        self.settings, self.recall = settings, recall
        self.routers = routers_of(model)
        self.adaptation = self.routers[0].adaptation
        if routes is not None:
            # for good: what is computed again in a backward pass must be routed the same
            self.adaptation.routing = check_routing(model, routes)
        is_pressed = routes is None and settings.controller != "value"
        model.to(args.device)  # type: ignore[arg-type]
        # Trainer refuses models that were quantised, as GGUF is; what learns here never was
        marked: Any = model
        is_quantized = getattr(model, "is_quantized", False)
        marked.is_quantized = False
        super().__init__(
            model,
            args,
            kl_weight=settings.kl_weight,
            cost_weight=settings.cost_weight,
            target_cost=settings.target_cost if is_pressed else None,
            cost_path=PATH,
            hold=settings.hold,
            argmax_from=settings.argmax_from,
            optimizers=(_optimizer(model, settings), None),
            **kwargs,
        )
        marked.is_quantized = is_quantized
        self.add_callback(EvaluateLast())
        self.predictor = Predictor(model)
        self._checkpointed = [
            m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)
        ]

    @property
    def target_cost(self) -> float | None:
        """What routes shall cost."""
        return self.economy.target

    # --- the model ---

    def config_of(self, model: nn.Module) -> Any:
        return self.adaptation.config

    def flatten(self, routing: RoutingSummary) -> dict[str, float]:
        """Layers by their index in the base."""
        return flatten_routing(routing, self.adaptation.layers)

    def run_model(
        self, model: Any, inputs: Batch, *, output_routing: bool, output_routed_cost: bool
    ) -> RouterOutput:
        self._set_modes(model)
        record, compared = self._compare(model, inputs)
        divergence, loss, base_loss = _means(compared, inputs["labels"])
        by_name = {"distill": divergence, "lm": loss, "both": (divergence + loss) / 2}
        cost = record.projected_cost
        weights, concentrations = self._routing_of(record) if output_routing else (None, None)
        return RouterOutput(
            by_name[self.settings.loss],
            record.kl,
            cost,
            record.routed_cost if output_routed_cost else cost.detach(),
            # what is recorded is routed
            cost,
            weights,
            concentrations,
            {"divergence": divergence, "lm_loss": loss, "base_loss": base_loss},
        )

    def _set_modes(self, model: nn.Module) -> None:
        """What training must not change."""
        # the base is not trained, so nothing of it is dropped; layers that are computed again in
        # the backward pass go by their own mode
        model.eval()
        for router in self.routers:
            router.train()
        for layer in self._checkpointed:
            layer.training = True

    def _compare(self, model: Any, inputs: Batch) -> tuple[Record, Tensor]:
        """Routing of a batch, and its three figures of every token ``[B, T, 3]``."""
        ids, labels = inputs["input_ids"], inputs["labels"]
        with self.accelerator.autocast():
            with torch.no_grad(), routed_as(model, "full"), without_lora(model):
                base = self.predictor.run(model, ids)
            with collect_routing(model) as record:
                routed = self.predictor.run(model, ids)
            return record, compare_predictions(self.predictor, routed, base, labels)

    def _routing_of(self, record: Record) -> tuple[list[Tensor], list[Tensor | None]]:
        """Weights and concentrations by adapted layer, without gradients."""
        weights: list[Tensor] = []
        concentrations: list[Tensor | None] = []
        for router in self.routers:
            out = record.layers.get(router.layer_idx)
            if out is None:
                # by given routes on full attention, which the base ran itself
                some = next(iter(record.layers.values())).routes.weights
                on_full = torch.zeros_like(some)
                on_full[..., router.expert_names.index("full")] = 1.0
                weights.append(on_full)
                concentrations.append(None)
                continue
            posterior = out.posterior
            weights.append(out.routes.weights.detach())
            concentrations.append(
                posterior.concentration.detach()
                if isinstance(posterior, RoutingPosterior)
                else None
            )
        return weights, concentrations

    # --- evaluation ---

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Batch,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, Tensor, Tensor]:
        """Sums of every row ``[B, F]``, which Trainer gathers."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            record, compared = self._compare(model, inputs)
        weights, concentrations = self._routing_of(record)
        routing = self._tally.count(weights, None, concentrations)
        B, T = inputs["input_ids"].shape
        counted = count_adapted(model, executed_routes(record), batch=B, length=T)
        num_predicted = (inputs["labels"][:, 1:] != IGNORED).sum(dim=1)
        columns = [
            *compared.sum(dim=1, dtype=routing.dtype).unbind(dim=1),
            num_predicted.to(routing),
            torch.full_like(num_predicted, T).to(routing),
            # counted over the batch; in units that float32 can add up, where there is no float64
            *(
                torch.full_like(num_predicted, flops.attention / 1e9 / B, dtype=routing.dtype)
                for flops in (counted.routed, counted.base)
            ),
        ]
        rows = torch.cat([torch.stack(columns, dim=1), routing], dim=1)
        return None, rows, num_predicted.unsqueeze(1)

    def _reduce_rows(self, prediction: EvalPrediction) -> dict[str, float]:
        """Figures of an evaluation, from the sums of its rows."""
        total = torch.as_tensor(prediction.predictions).double().sum(dim=0)
        diverged, nats, base_nats, num_predicted, num_tokens, executed, of_base = total[:7].tolist()
        routing = self._tally.summary_of(total[7:])
        divergence, loss = diverged / num_tokens, nats / num_predicted
        by_name = {"distill": divergence, "lm": loss, "both": (divergence + loss) / 2}
        metrics = {
            "loss": by_name[self.settings.loss],
            "task_loss": by_name[self.settings.loss],
            "divergence": divergence,
            "lm_loss": loss,
            "base_loss": base_nats / num_predicted,
            "perplexity": math.exp(min(loss, 700.0)),
            "kl": routing.kl or 0.0,
            "projected_cost": routing.projected_cost,
            "routed_cost": routing.projected_cost,
            "attention_share": executed / of_base,
        }
        if isinstance(self.eval_dataset, PackedDataset):
            metrics["bits_per_byte"] = self.eval_dataset.bits_per_byte(loss)
        if self.recall is not None:
            metrics["recall_divergence"] = self._recall_divergence(self.recall)
        return metrics | self.flatten(routing)

    @torch.no_grad()
    def _recall_divergence(self, recall: RecallBlocks) -> float:
        """Mean over the tokens of the first blocks."""
        total, chosen = 0.0, range(min(len(recall), RECALL_BLOCKS))
        for index in chosen:
            ids = recall[index]["input_ids"].unsqueeze(0).to(self.args.device)
            _, compared = self._compare(self.model, {"input_ids": ids, "labels": ids})
            total += compared[..., 0].mean().item()
        return total / len(chosen)

    # --- checkpoints ---

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """What learns, and routers whole: the base is where it was."""
        folder = Path(str(output_dir or self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.learnt(), folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})

    def learnt(self) -> dict[str, Tensor]:
        """Routers and LoRA by their names in the model."""
        model: Any = self.model
        return {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in model.state_dict().items()
            if ".router." in name or ".lora_" in name
        }

    def restore_model(self) -> None:
        """Leave the model as one that is used: routes are not drawn any more."""
        self.adaptation.config.training_weights = self._draws
        assert isinstance(self.model, nn.Module)
        self.model.eval()


def _optimizer(model: nn.Module, settings: RouterSettings) -> torch.optim.Optimizer:
    assert settings.lr is not None
    lora = {id(p) for p in lora_parameters(model)}
    learning = [p for p in model.parameters() if p.requires_grad]
    routers = [p for p in learning if id(p) not in lora]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in routers if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in routers if p.dim() <= 1]},
        {"params": [p for p in learning if id(p) in lora], "lr": settings.lora_lr},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0)


def _means(compared: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the divergence over tokens, of the losses over predicted ones."""
    num_predicted = (labels[:, 1:] != IGNORED).sum().clamp(min=1)
    divergence, loss, base_loss = compared.unbind(dim=-1)
    return divergence.mean(), loss.sum() / num_predicted, base_loss.sum() / num_predicted
