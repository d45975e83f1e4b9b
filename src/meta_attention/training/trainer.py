"""Transformers' Trainer with the routing objective: schedules, parts logged apart, safe saves.

The loss of a batch does not depend on how it is computed: on one process or several, at once or
in accumulated parts. The task loss is a mean over all predicted tokens of the batch, the KL and
the cost are means over all its tokens, each counted once. Only what holds a cost up to its target
is of each part by itself, and then the mean of these: a square does not add up.

Shapes: B batch, T sequence, F figures of a row.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
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
from meta_attention.objective import routing_loss
from meta_attention.training.capture import CapturedSteps, StepResult, check_capture
from meta_attention.training.checkpoints import TrainingError
from meta_attention.training.economy import TOLERANCE, WINDOW, Economy, check_holding
from meta_attention.training.lasting import LastingTrainer
from meta_attention.training.logs import Flow, flatten_routing
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
        self.kl_weight = kl_weight or Schedule.constant(config.kl_weight)
        self.uncertainty_threshold = uncertainty_threshold
        if not isinstance(cost_weight, Schedule):
            value = config.cost_weight if cost_weight is None else cost_weight
            cost_weight = Schedule.constant(value)
        self.cost_weight = cost_weight
        # a KL beside a cost keeps its weight: it says how certain routes may be, not how cheap
        self._steers_cost_weight = (
            max(cost_weight.values) > 0.0 or config.controller == "prior_free"
        )
        self._is_hard = config.routing == "hard"
        self._depth_weight = config.depth_weight
        self._hold, self._argmax_from = hold, argmax_from
        self._draws = config.training_weights
        schedules = (self.kl_weight, self.cost_weight, self.uncertainty_threshold)
        self.economy = Economy(
            num_steps=max(1, args.max_steps),
            pressure=self.cost_weight if self._steers_cost_weight else self.kl_weight,
            target=target_cost,
            waiting=tuple(s for s in schedules if s is not None and s.when_settled),
            path=cost_path,
            pressed_by="cost_weight" if self._steers_cost_weight else "kl_weight",
            settle_drop=settle_drop,
            settle_steps=settle_steps,
        )
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
        self._need = TaskTally.of(model) if isinstance(eval_dataset, TaskDataset) else None
        if target_cost is not None:
            self._check_target(target_cost, config)
        # sums of figures since the log was last written, and their names
        self._parts: Tensor | None = None
        self._names: tuple[str, ...] = ()
        self.captured: CapturedSteps | None = None
        if capture:
            check_capture(args, config, getattr(train_dataset, "isolate_documents", False))
            self.captured = CapturedSteps(model.parameters())
        # task loss, routed and projected cost since the economy last looked
        self._watched = torch.zeros(3)
        self._weights = self._weights_after(0)
        self._num_tokens = 0
        self.logged_step = 0
        self._clock: float | None = None

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

    def _weights_after(self, steps: int) -> dict[str, float]:
        """Of what is added to the loss, during the step that follows ``steps`` others."""
        economy = self.economy
        is_held = economy.target is not None and economy.has_begun(steps)
        kl_factor, cost_factor = economy.multiplier, 1.0
        if self._steers_cost_weight:
            kl_factor, cost_factor = cost_factor, kl_factor
        return {
            "kl_weight": kl_factor * economy.value(self.kl_weight, steps),
            "cost_weight": cost_factor * economy.value(self.cost_weight, steps),
            "hold_weight": self._hold if is_held else 0.0,
            "multiplier": economy.multiplier,
        }

    @property
    def _step_weights(self) -> list[float]:
        return [self._weights[name] for name in ("kl_weight", "cost_weight", "hold_weight")]

    def _check_target(self, target: float, config: Any) -> None:
        if not self._is_hard:
            raise ConfigError(
                "target_cost must have routing='hard': other routes execute more than one expert, "
                "so there is nothing to save"
            )
        # who passes a block by costs nothing there
        capacity = 1.0 if config.depth_capacity is None else config.depth_capacity
        costs = [
            [capacity * cost if config.may_skip(index) else cost for cost in layer]
            for index, layer in enumerate(self._tally.costs)
            if len(layer) > 1
        ]
        if not costs:
            raise ConfigError("target_cost must have a layer to route in, but all are static")
        if self.economy.path is not None and len(costs) < len(self._tally.costs):
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

    def observe_step(self) -> None:
        """At the end of every window of steps, let the economy look at it."""
        step = self.state.global_step
        if self.economy.is_watched and step % WINDOW == 0:
            reduce: Any = self.accelerator.reduce
            loss, cost, believed = (reduce(self._watched, "mean") / WINDOW).tolist()
            self.economy.observe(step, loss, cost, believed)
            self._watched = torch.zeros(3)

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
        if self._clock is None:
            self._clock = time.perf_counter()
        if self.uncertainty_threshold is not None:
            inner: Any = self.accelerator.unwrap_model(model)
            threshold = self.economy.value(self.uncertainty_threshold, self.state.global_step)
            inner.set_uncertainty_threshold(threshold)
        if self._argmax_from < 1.0:
            config = self.config_of(self.accelerator.unwrap_model(model))
            config.training_weights = self._draws if self._is_drawn else "mean"
        self._weights = self._weights_after(self.state.global_step)
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
        kl_weight, cost_weight, hold_weight = added
        # known of a task, but nothing to learn from
        inputs = {name: value for name, value in inputs.items() if name != "needs_full"}
        is_steered = self.economy.target is not None
        out = self.run_model(model, inputs, output_routing=is_logged, output_routed_cost=is_steered)
        task, kl, cost = out.task_loss, out.kl, out.projected_cost
        routed_cost = out.routed_cost if is_steered else cost.detach()
        held = torch.zeros_like(cost)
        if self._hold and is_steered:
            held = hold_weight * self.economy.below_target(out.routed_projected_cost)
        parts = 1
        if num_items is not None:
            # Trainer takes a loss that knows this count as it is; gradients of processes are
            # averaged, so each counts as all of them
            num_predicted = (inputs["labels"][:, 1:] != IGNORED).sum()
            task = task * (num_predicted * self.args.world_size / num_items)
            # blocks have one length, so their parts weigh the same
            parts = self.current_gradient_accumulation_steps
            kl, cost, routed_cost, held = (x / parts for x in (kl, cost, routed_cost, held))
        loss = routing_loss(task, kl, kl_weight=kl_weight, cost=cost, cost_weight=cost_weight)
        if self._hold:
            loss = loss + held
        depth = getattr(out, "depth_loss", None)
        if depth is not None:
            depth = depth / parts
            loss = loss + self._depth_weight * depth
        figures = {
            "task_loss": task,
            "kl": kl,
            "kl_loss": kl_weight * kl,
            "projected_cost": cost,
            "cost_loss": cost_weight * cost,
            "routed_cost": routed_cost,
        }
        if self._hold:
            figures["hold_loss"] = held
        if depth is not None:
            figures["depth_loss"] = depth
        others = {name: value / parts for name, value in getattr(out, "figures", {}).items()}
        figures |= others
        values = torch.stack([value.detach() for value in figures.values()])
        weights = concentrations = None
        if is_logged:
            weights = [weights.detach() for weights in self._believed_weights(out)]
            concentrations = [c if c is None else c.detach() for c in out.concentrations]
        return StepResult(loss, tuple(figures), values, weights, concentrations, out)

    def _end_step(self, step: StepResult, inputs: Mapping[str, Tensor]) -> None:
        """Take note of a step."""
        self._names = step.names
        self._parts = step.figures + (0.0 if self._parts is None else self._parts)
        if self.economy.is_watched:
            figures = dict(zip(step.names, step.figures, strict=True))
            names = ("task_loss", "routed_cost", "projected_cost")
            watched = torch.stack([figures[name] for name in names])
            self._watched = self._watched.to(watched) + watched
        self._num_tokens += inputs["input_ids"].numel()
        if step.weights is not None:
            self._tally.add(step.weights, None, step.concentrations)

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
        """Means over the steps since the last log, over all processes."""
        reduce: Any = self.accelerator.reduce
        num_steps = max(1, self.state.global_step - self.logged_step)
        assert self._parts is not None  # a window has a step
        sums = self._parts
        means = dict(zip(self._names, (reduce(sums, "mean") / num_steps).tolist(), strict=True))
        self._tally.sums = reduce(self._tally.sums.to(sums.device), "sum")
        routing = self._tally.summary()
        seconds = time.perf_counter() - (self._clock or 0.0)
        routed_cost = means.pop("routed_cost")
        figures = {
            **means,
            "kl_weight": self._weights["kl_weight"],
            "cost_weight": self._weights["cost_weight"],
            "tokens_per_s": self._num_tokens * self.args.world_size / seconds,
        } | self.flatten(routing)
        if self.economy.target is not None:
            figures["routed_cost"] = routed_cost
            figures["target_cost"] = self.economy.target
            figures["multiplier"] = self._weights["multiplier"]
        if self.economy.settled is not None:
            figures["settled_step"] = self.economy.settled
        self._parts, self._num_tokens, self._clock = None, 0, None
        self.logged_step = self.state.global_step
        self._tally.sums = torch.zeros_like(self._tally.sums)
        return figures

    # --- evaluation ---

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As Trainer's; its time does not count as training."""
        begin = time.perf_counter()
        if self.uncertainty_threshold is not None:
            # models are compared, and one is kept, as they will be used: at the last threshold
            inner: Any = self.accelerator.unwrap_model(self.model)
            inner.set_uncertainty_threshold(self.uncertainty_threshold.end)
        metrics = super().evaluate(*args, **kwargs)
        if self._clock is not None:
            self._clock += time.perf_counter() - begin
        return metrics

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Batch,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, Tensor, Tensor]:
        """Sums of every row ``[B, F]``, which Trainer gathers without counting a row twice."""
        inputs = self._prepare_inputs(inputs)
        all_labels, needs_full = inputs.pop("labels"), inputs.pop("needs_full", None)
        labels = all_labels[:, 1:]  # [B, T - 1]
        with torch.no_grad(), self.compute_loss_context_manager():
            out = model(**inputs, use_cache=False, output_routing=True)
        losses = F.cross_entropy(  # [B, T - 1]
            out.logits[:, :-1].transpose(1, 2).float(),
            labels,
            ignore_index=IGNORED,
            reduction="none",
        )
        routing = self._tally.count(out.routing_weights, None, out.concentrations)
        nats = losses.sum(dim=1, dtype=routing.dtype)
        num_predicted = (labels != IGNORED).sum(dim=1)
        rows = torch.cat([torch.stack([nats, num_predicted.to(nats)], dim=1), routing], dim=1)
        if self._need is not None:
            assert needs_full is not None
            predicted = out.logits.argmax(dim=-1)
            need = self._need.count(predicted, all_labels, needs_full, out.routing_weights)
            rows = torch.cat([rows, need.to(rows)], dim=1)
        # Trainer reduces nothing without labels
        return None, rows, num_predicted.unsqueeze(1)

    def _reduce_rows(self, prediction: EvalPrediction) -> dict[str, float]:
        """Figures of an evaluation, from the sums of its rows."""
        total = torch.as_tensor(prediction.predictions).double().sum(dim=0)
        nats, num_predicted = total[:2].tolist()
        sizes = [len(self._tally.sums), len(total) - 2 - len(self._tally.sums)]
        routing_sums, need_sums = total[2:].split(sizes)
        routing = self._tally.summary_of(routing_sums)
        task_loss = nats / num_predicted
        weights = self._weights_after(self.state.global_step)
        kl_loss = weights["kl_weight"] * (routing.kl or 0.0)
        metrics = {
            "loss": task_loss + kl_loss + weights["cost_weight"] * routing.projected_cost,
            "task_loss": task_loss,
            # a loss this high is no language model, and JSON has no infinity
            "perplexity": math.exp(min(task_loss, 700.0)),
            "kl": routing.kl or 0.0,
            "projected_cost": routing.projected_cost,
        }
        if self._is_hard and routing.routed_cost is not None:
            metrics["routed_cost"] = routing.routed_cost
        if isinstance(self.eval_dataset, PackedDataset):
            metrics["bits_per_byte"] = self.eval_dataset.bits_per_byte(task_loss)
        if self._need is not None:
            metrics |= self._need.result_of(need_sums).flatten()
        return metrics | self.flatten(routing)

    # --- checkpoints ---

    def may_be_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluated model competes for the best.

        The loss is lowest before a model is pressed to save: only one that was pressed as hard as
        it was asked to be, and that costs what it may, is what the run is for.
        """
        economy, step = self.economy, self.state.global_step
        if not all(economy.is_over(s, step) for s in (self.kl_weight, self.cost_weight)):
            return False
        target = economy.target
        return target is None or metrics["eval_routed_cost"] <= TOLERANCE * target

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        return self.may_be_best(metrics) and super()._determine_best_metric(metrics, trial)

    def restore(self) -> None:
        """Go on with the economy of a checkpoint, where there is one."""
        self.economy.num_steps = max(1, self.state.max_steps)
        saved = dict(self.state.stateful_callbacks.get(ECONOMY_STATE, {}))  # type: ignore[union-attr]
        if saved:
            watched = torch.tensor(saved.pop("watched"))
            # projected cost was not watched in older ones
            self._watched = F.pad(watched, (0, 3 - len(watched)))
            self.economy.load(saved)

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
            reduce: Any = self.accelerator.reduce
            self._watched = reduce(self._watched, "mean")
            state = self.economy.state() | {"watched": self._watched.tolist()}
            self.state.stateful_callbacks[ECONOMY_STATE] = state  # type: ignore[index,call-overload]
        super()._save_checkpoint(model, trial)


def _wants_fsdp(args: TrainingArguments) -> bool:
    return bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
