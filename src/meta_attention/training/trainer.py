"""Transformers' Trainer with the routing objective: schedules, parts logged apart, safe saves.

The loss of a batch does not depend on how it is computed: on one process or several, at once or
in accumulated parts. The task loss is a mean over all predicted tokens of the batch, the KL and
the cost are means over all its tokens, each counted once. Only what holds a cost up to its target
is of each part by itself, and then the mean of these: a square does not add up.

Shapes: B batch, T sequence, F figures of a row.
"""

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    TrainingArguments,
    default_data_collator,
)

from meta_attention.errors import ConfigError
from meta_attention.evaluation.routing import RoutingSummary, RoutingTally
from meta_attention.evaluation.tasks import TaskDataset, TaskTally
from meta_attention.training.capture import CapturedSteps, StepResult, check_capture
from meta_attention.training.checkpoints import TrainingError
from meta_attention.training.economy import TOLERANCE, check_holding, check_target
from meta_attention.training.evaluation_rows import EvaluationRows
from meta_attention.training.lasting import LastingTrainer
from meta_attention.training.log_window import LogWindow
from meta_attention.training.logs import Flow, flatten_routing
from meta_attention.training.objective import RoutingObjective
from meta_attention.training.packing import IGNORED, PackedDataset
from meta_attention.training.sampler import BlockSampler
from meta_attention.training.schedule import Schedule

Batch = dict[str, Tensor]

# where the trainer's state keeps what the economy knows
ECONOMY_STATE = "economy"


class MetaAttentionTrainer(LastingTrainer):
    """Trains a routed language model on blocks of one length.

    Args:
        model: A model that returns ``task_loss``, ``kl`` and ``projected_cost``.
        args: Trainer's own arguments. Batches are dropped, not shortened, at the end of an epoch.
        train_dataset: Blocks with ``input_ids`` and ``labels``, and ``document_ids`` if the
            documents of a block do not see each other.
        eval_dataset: Blocks to evaluate on; :class:`PackedDataset` gives bits per byte,
            :class:`TaskDataset` accuracy and the routes of tokens in need.
        kl_weight: Weight of the KL in the course of training; default: the config's.
        uncertainty_threshold: Threshold of gated routing, likewise; a rising one makes tokens hard.
        cost_weight: Weight of the projected cost, likewise.
        target_cost: What hard routes shall cost in evaluation, as a share of full attention's cost
            in the routed layers; steers ``cost_weight`` where it is not 0, else ``kl_weight``. See
            :class:`Economy`.
        cost_path: Lead the cost to its target along a path; likewise.
        hold: Weight of what keeps the cost from falling below its target; see ``RunSettings``.
            Without a target there is nothing to hold.
        argmax_from: Share of training after which routes are not drawn any more; 1: drawn to the
            end. When training ends, the config has its ``training_weights`` again.
        settle_drop: When the task loss counts as settled, for schedules that wait for it; see
            :class:`Economy`.
        settle_steps: Likewise.
        capture: Replay steps from CUDA graphs; see :mod:`meta_attention.training.capture`.
        kwargs: As for Trainer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        *,
        train_dataset: Dataset[Batch] | None = None,
        eval_dataset: Dataset[Batch] | None = None,
        kl_weight: Schedule | None = None,
        uncertainty_threshold: Schedule | None = None,
        cost_weight: Schedule | float | None = None,
        target_cost: float | None = None,
        cost_path: float | None = None,
        hold: float = 0.0,
        argmax_from: float = 1.0,
        settle_drop: float = 0.02,
        settle_steps: int | None = None,
        capture: bool = False,
        **kwargs: Any,
    ) -> None:
        check_holding(hold, argmax_from)
        config = self.config_of(model)
        self.routing_objective = RoutingObjective(
            config,
            max(1, args.max_steps),
            kl_weight=kl_weight,
            cost_weight=cost_weight,
            uncertainty_threshold=uncertainty_threshold,
            hold=hold,
            target_cost=target_cost,
            cost_path=cost_path,
            settle_drop=settle_drop,
            settle_steps=settle_steps,
        )
        self.economy = self.routing_objective.economy
        self.uncertainty_threshold = uncertainty_threshold
        self._argmax_from, self._draws = argmax_from, config.training_weights
        self._is_hard = config.routing == "hard"
        # a hard route is logged as it was taken, a soft one as it was believed
        self._is_sampled = config.training_weights == "sample" and config.routing == "soft"
        # several GPUs in one process would be DataParallel, which is slower and splits the loss
        args._n_gpu = min(args.n_gpu, 1)
        super().__init__(
            model,
            args,
            data_collator=default_data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=self._reduce_rows,
            **kwargs,
        )
        if _wants_fsdp(args) and not self.is_fsdp_enabled:
            raise ConfigError(
                "FSDP must have several processes with a GPU each, got "
                f"{self.args.world_size} on {self.args.device.type}; leave FSDP out"
            )
        # ours is scaled by the tokens of the whole batch; see compute_loss
        self.model_accepts_loss_kwargs = True
        for console in (PrinterCallback, ProgressCallback):
            self.remove_callback(console)
        self.add_callback(Flow(self))
        self.sampler: BlockSampler | None = None
        self._tally = RoutingTally.of(model)
        need = TaskTally.of(model) if isinstance(eval_dataset, TaskDataset) else None
        self._rows = EvaluationRows(self._tally, need)
        if target_cost is not None:
            check_target(target_cost, config, self._tally.costs, cost_path)
        self.window = LogWindow(self._tally)
        self.captured: CapturedSteps | None = None
        if capture:
            check_capture(args, config, getattr(train_dataset, "isolate_documents", False))
            self.captured = CapturedSteps(model.parameters())
        self._weights = self.routing_objective.weights_after(0)

    # --- the model ---

    def config_of(self, model: Any) -> Any:
        """The configuration that says how a model is routed."""
        return model.config

    def run_model(
        self, model: nn.Module, inputs: Batch, *, output_routing: bool, output_routed_cost: bool
    ) -> Any:
        """A call of the model: its output has the parts of the loss, and what was asked for.

        Where ``output.figures`` is there, these means over tokens are logged as well, by name.
        """
        return model(
            **inputs,
            use_cache=False,
            output_routing=output_routing,
            output_routed_cost=output_routed_cost,
        )

    # --- objective ---

    @property
    def _step_weights(self) -> list[float]:
        return [self._weights[name] for name in ("kl_weight", "cost_weight", "hold_weight")]

    def observe_step(self) -> None:
        """At the end of every window of steps, let the economy look at it."""
        self.routing_objective.observe_step(self.state.global_step, self.accelerator.reduce)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """This process's and this part's share of the batch's loss.

        Args:
            model: The model, wrapped or not.
            inputs: A batch, or a part of one.
            return_outputs: Return the model's outputs as well.
            num_items_in_batch: Tokens predicted in the whole batch, over all its parts and
                processes.
        """
        is_logged = self._begin_step(model)
        step = self._objective(
            model, inputs, num_items_in_batch, self._step_weights, is_logged=is_logged
        )
        self._end_step(step, inputs)
        return (step.loss, step.out) if return_outputs else step.loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's. The model's config is then what it was, also if routes were not drawn."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._argmax_from < 1.0:
                config = self.config_of(self.accelerator.unwrap_model(self.model))
                config.training_weights = self._draws

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """As Trainer's, or replayed from a graph."""
        if self.captured is None:
            return super().training_step(model, inputs, num_items_in_batch)
        is_logged = self.is_logged_step(self.state.global_step + 1)
        inputs = cast(Batch, self._prepare_inputs(inputs))
        inputs = {name: value for name, value in inputs.items() if name != "needs_full"}
        model.train()
        self._begin_step(model)
        objective = partial(self._objective, model, is_logged=is_logged)
        weights, kind = self._step_weights, (is_logged, self._is_drawn)
        replay = self.captured.find(kind, objective, inputs, num_items_in_batch, len(weights))
        if replay is None:
            return super().training_step(model, inputs, num_items_in_batch)
        step = replay(inputs, num_items_in_batch, weights)
        self._end_step(step, inputs)
        return step.loss

    def _begin_step(self, model: nn.Module) -> bool:
        """What the host decides before a step; whether it is logged."""
        self.window.start_clock()
        if self.uncertainty_threshold is not None:
            inner: Any = self.accelerator.unwrap_model(model)
            threshold = self.economy.value(self.uncertainty_threshold, self.state.global_step)
            inner.set_uncertainty_threshold(threshold)
        if self._argmax_from < 1.0:
            config = self.config_of(self.accelerator.unwrap_model(model))
            config.training_weights = self._draws if self._is_drawn else "mean"
        self._weights = self.routing_objective.weights_after(self.state.global_step)
        return self.is_logged_step(self.state.global_step + 1)

    @property
    def _is_drawn(self) -> bool:
        """Whether routes of the next step are still drawn, where they are at all."""
        # a loss that is asked for before or after training is of routes that are drawn
        late = self.state.global_step >= self._argmax_from * self.state.max_steps
        return self._argmax_from == 1.0 or not (late and self.is_in_train)

    def _objective(
        self,
        model: nn.Module,
        inputs: Mapping[str, Tensor],
        num_items: Tensor | int | None,
        added: Sequence[Any],
        *,
        is_logged: bool,
    ) -> StepResult:
        """A step up to its loss, without waiting for the device."""
        # known of a task, but nothing to learn from
        inputs = {name: value for name, value in inputs.items() if name != "needs_full"}
        is_steered = self.routing_objective.is_steered
        out = self.run_model(model, inputs, output_routing=is_logged, output_routed_cost=is_steered)
        task_share: Tensor | float = 1.0
        num_parts = 1
        if num_items is not None:
            # Trainer takes a loss that knows this count as it is; gradients of processes are
            # averaged, so each counts as all of them
            num_predicted = (inputs["labels"][:, 1:] != IGNORED).sum()
            task_share = num_predicted * self.args.world_size / num_items
            # blocks have one length, so their parts weigh the same
            num_parts = self.current_gradient_accumulation_steps
        loss, figures = self.routing_objective.loss_of(
            out, added, task_share=task_share, num_parts=num_parts
        )
        values = torch.stack(list(figures.values()))
        weights = concentrations = None
        if is_logged:
            weights = [weights.detach() for weights in self._believed_weights(out)]
            concentrations = [c if c is None else c.detach() for c in out.concentrations]
        return StepResult(loss, tuple(figures), values, weights, concentrations, out)

    def _end_step(self, step: StepResult, inputs: Mapping[str, Tensor]) -> None:
        """Take note of a step."""
        self.window.add(step, inputs["input_ids"].numel())
        self.routing_objective.watch(step)

    def _believed_weights(self, out: Any) -> Sequence[Tensor]:
        """Routing weights without the noise of a training sample."""
        if not self._is_sampled:
            return out.routing_weights
        return [
            weights if concentration is None else concentration / concentration.sum(-1, True)
            for weights, concentration in zip(out.routing_weights, out.concentrations, strict=True)
        ]

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """As Trainer has it, but what is no better at 0 than elsewhere.

        That is rates of state-space models, and queries of Attention Residuals: 0 is the plain sum.
        """
        names: list[str] = super().get_decay_parameter_names(model)
        return [name for name in names if ".rates." not in name and ".residuals." not in name]

    # --- data ---

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        batch_size = self.get_total_train_batch_size(self.args)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self.sampler = BlockSampler(dataset, batch_size, seed)
        return self.sampler

    # --- logs ---

    def is_logged_step(self, step: int) -> bool:
        """Whether the step ends a window of the log.

        Evaluated and saved steps do, so that a resumed run has the windows of an unbroken one.
        """
        state, args = self.state, self.args
        every = [state.logging_steps]
        if args.eval_strategy == "steps":
            every.append(state.eval_steps)
        if args.save_strategy == "steps":
            every.append(state.save_steps)
        return step in (1, state.max_steps) or any(step % n == 0 for n in every if n)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the parts of the loss and the routing to what Trainer logs of a window."""
        if "loss" in logs:
            logs.update(self._close_window())
            if not math.isfinite(logs["loss"]):
                raise TrainingError(
                    f"the loss must be finite, got {logs['loss']} at step "
                    f"{self.state.global_step}; lower the learning rate or train in fp32 or bf16"
                )
        super().log(logs, start_time)
        # metrics.jsonl keeps the layers; every checkpoint would keep all of them again
        row = self.state.log_history[-1]
        self.state.log_history[-1] = {k: v for k, v in row.items() if "layer_" not in k}

    def flatten(self, routing: RoutingSummary) -> dict[str, float]:
        """A summary as names and numbers, as logs want it."""
        figures = flatten_routing(routing)
        config = self.config_of(self.accelerator.unwrap_model(self.model))
        for index, layer in enumerate(routing.layers):
            if config.may_skip(index):
                figures[f"layer_{index}/entered"] = layer.entered
        return figures

    def _close_window(self) -> dict[str, float]:
        """What is logged of the steps since the last log."""
        step, num_processes = self.state.global_step, self.args.world_size
        means = self.window.close(step, self.accelerator.reduce, num_processes)
        routed_cost = means.figures.pop("routed_cost")
        figures = {
            **means.figures,
            "kl_weight": self._weights["kl_weight"],
            "cost_weight": self._weights["cost_weight"],
            "tokens_per_s": means.tokens_per_s,
        } | self.flatten(means.routing)
        if self.economy.target is not None:
            figures["routed_cost"] = routed_cost
            figures["target_cost"] = self.economy.target
            figures["multiplier"] = self._weights["multiplier"]
        if self.economy.settled is not None:
            figures["settled_step"] = self.economy.settled
        return figures

    # --- evaluation ---

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As Trainer's; its time does not count as training."""
        if self.uncertainty_threshold is not None:
            # models are compared, and one is kept, as they will be used: at the last threshold
            inner: Any = self.accelerator.unwrap_model(self.model)
            inner.set_uncertainty_threshold(self.uncertainty_threshold.end)
        with self.window.clock_stopped():
            return super().evaluate(*args, **kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Batch,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, Tensor, Tensor]:
        """Sums of every row ``[B, F]``, which Trainer gathers without counting a row twice."""
        inputs = self._prepare_inputs(inputs)
        labels, needs_full = inputs.pop("labels"), inputs.pop("needs_full", None)
        with torch.no_grad(), self.compute_loss_context_manager():
            out = model(**inputs, use_cache=False, output_routing=True)
        rows = self._rows.count(out, labels, needs_full)
        # Trainer reduces nothing without labels; which, does not matter
        return None, rows, rows[:, :1]

    def _reduce_rows(self, prediction: EvalPrediction) -> dict[str, float]:
        """Figures of an evaluation, from the sums of its rows."""
        result = self._rows.add_up(prediction.predictions)
        routing = result.routing
        weights = self.routing_objective.weights_after(self.state.global_step)
        metrics = result.figures(weights["kl_weight"], weights["cost_weight"])
        if self._is_hard and routing.routed_cost is not None:
            metrics["routed_cost"] = routing.routed_cost
        if isinstance(self.eval_dataset, PackedDataset):
            metrics["bits_per_byte"] = self.eval_dataset.bits_per_byte(result.task_loss)
        if result.task is not None:
            metrics |= result.task.flatten()
        return metrics | self.flatten(routing)

    # --- checkpoints ---

    def may_be_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluated model competes for the best.

        The loss is lowest before a model is pressed to save: only one that was pressed as hard as
        it was asked to be, and that costs what it may, is what the run is for.
        """
        if not self.routing_objective.is_at_full_weight(self.state.global_step):
            return False
        target = self.economy.target
        return target is None or metrics["eval_routed_cost"] <= TOLERANCE * target

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        return self.may_be_best(metrics) and super()._determine_best_metric(metrics, trial)

    def restore(self) -> None:
        """Go on with the economy of a checkpoint, where there is one."""
        self.economy.num_steps = max(1, self.state.max_steps)
        saved = self.state.stateful_callbacks.get(ECONOMY_STATE)  # type: ignore[union-attr]
        if saved:
            self.routing_objective.load(saved)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """With the setting that a run began with, also when routes are not drawn any more."""
        config = self.config_of(self.accelerator.unwrap_model(self.model))
        now = config.training_weights
        if self._argmax_from < 1.0:
            config.training_weights = self._draws
        try:
            super()._save(output_dir, state_dict)
        finally:
            config.training_weights = now

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.economy.is_watched:
            state = self.routing_objective.state(self.accelerator.reduce)
            self.state.stateful_callbacks[ECONOMY_STATE] = state  # type: ignore[index,call-overload]
        super()._save_checkpoint(model, trial)


def _wants_fsdp(args: TrainingArguments) -> bool:
    return bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
